//! The products of a tile: of rows, by vectors, or where that is sooner of factors that are packed once for many tiles.

use kumiki_tensor::{Tensor, threads};

use super::Problem;
use crate::attention_tiles::factors::{matrix, part, product, stride};
use crate::attention_tiles::{Number, Rows, Tile, TransposeRows, Values, leading};
use crate::gemm::Side;
use crate::gemm::packed::{Digits, Prepacked, UNIT};

/// Queries of a task: a multiple of the heights and widths of the product's blocks; of packed ones a multiple of [`UNIT`].
pub(super) const TILE: usize = 48;
const PACKED_TILE: usize = 64;

/// How the tiles of a problem lie in memory.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// Whether any factor is packed.
    packed: bool,
    narrow: bool,
    /// Queries of a tile at most.
    pub tile: usize,
}

impl Layout {
    pub fn of<E: Number>(p: &Problem<E>) -> Layout {
        let width = p.diagonal.as_ref().map_or(p.k.width, |g| g.x.width.max(p.k.width));
        let large = p.queries >= UNIT && width >= UNIT && size_of::<E>() == 4;
        let packed = large && Digits::of(p.narrow, width).is_some();
        Layout { packed, narrow: p.narrow, tile: if packed { PACKED_TILE } else { TILE } }
    }

    /// How factors of so many numbers a row are packed, if they are.
    fn digits(self, width: usize) -> Option<Digits> {
        Digits::of(self.narrow, width).filter(|_| self.packed)
    }

    /// From row to row of so many numbers.
    pub fn stride<E>(self, columns: usize) -> usize {
        if self.packed { stride(columns) } else { leading::<E>(columns) }
    }

    /// Rows of which so many are used: packed products write whole units.
    pub fn rows(self, rows: usize) -> usize {
        if self.packed { rows.next_multiple_of(UNIT) } else { rows }
    }
}

/// What every tile of queries meets, of every head of every batch entry: keys, or the history.
pub(super) struct Met {
    width: usize,
    time: usize,
    /// From row to row, where they are not packed.
    stride: usize,
    held: Held,
}

enum Held {
    /// `[B, H, T, stride(W)]`: rows of whole vectors that do not crowd the same cache sets.
    Rows(Tensor),
    /// Of every head, as the left factor of scores and as the right factor of sums over keys.
    Packed(Vec<[Prepacked; 2]>),
}

impl Met {
    pub fn new<E: Number>(rows: &Rows<E>, [batch, time, heads]: [usize; 3], layout: Layout) -> Met {
        let (width, stride) = (rows.width, layout.stride::<E>(rows.width));
        let held = match layout.digits(width) {
            Some(digits) => Held::Packed(threads::parallel_map(batch * heads, 4 * time * width, |head| {
                let all = Values::Same(*rows);
                let all = all.matrix((head / heads, 0, head % heads), time);
                [Prepacked::of(digits, Side::A, all), Prepacked::of(digits, Side::B, all.t())]
            })),
            None => {
                let mut out = Tensor::empty(E::DTYPE, &[batch, heads, time, stride]);
                threads::parallel_chunks_mut(
                    out.as_mut_slice::<E>(),
                    (time * stride).max(1),
                    time * stride,
                    |head, out| {
                        rows.copy(head / heads, 0, head % heads, time, out, stride);
                    },
                );
                Held::Rows(out)
            }
        };
        Met { width, time, stride, held }
    }

    /// Rows of a head, and from row to row.
    fn rows<'a, E: Number>(&self, held: &'a Tensor, head: usize) -> (&'a [E], usize) {
        (&held.as_slice::<E>()[head * self.time * self.stride..], self.stride)
    }
}

/// Rows of a tile's queries, `[queries, width]`, in the forms that products need.
pub(super) struct Factor<'a, E> {
    width: usize,
    /// `layout.stride(width)` apart.
    rows: &'a mut [E],
    /// `[width, queries]`; of no length where they are packed.
    columns: &'a mut [E],
    /// For scores, and for sums over queries.
    packed: Option<[Prepacked; 2]>,
}

impl<'a, E: Number> Factor<'a, E> {
    /// Room in `[rows, columns]`, of so many numbers each.
    pub fn sizes(layout: Layout, queries: usize, width: usize) -> [usize; 2] {
        let columns = if layout.digits(width).is_some() { 0 } else { width * layout.stride::<E>(queries) };
        [queries * layout.stride::<E>(width), columns]
    }

    pub fn new(layout: Layout, queries: usize, width: usize, [rows, columns]: [&'a mut [E]; 2]) -> Self {
        let packed = layout.digits(width).map(|digits| {
            [(queries, width), (width, queries)].map(|(rows, terms)| Prepacked::new(digits, Side::B, rows, terms))
        });
        Factor { width, rows, columns, packed }
    }

    /// Takes the tile's rows from `row`; for sums over queries only if asked.
    pub fn fill(&mut self, products: &Products, sums: bool, row: impl Fn(usize, &mut [E])) {
        let Tile { queries, stride, .. } = products.tile;
        let (width, step) = (self.width, products.layout.stride::<E>(self.width));
        for (c, out) in self.rows.chunks_exact_mut(step).take(queries).enumerate() {
            row(c, &mut out[..width]);
        }
        if let Some([for_scores, for_sums]) = &mut self.packed {
            let rows = matrix(self.rows, queries, width, (step, 1));
            for_scores.pack((0, 0), rows);
            if sums {
                for_sums.pack((0, 0), rows.t());
            }
            return;
        }
        let (from, count, factor, out) = (&*self.rows, queries, E::ONE, &mut *self.columns);
        TransposeRows { from, step, width, count, factor, out, stride }.run();
    }
}

/// A tile of queries with all keys that they see.
pub(super) struct Products {
    pub tile: Tile,
    pub layout: Layout,
}

impl Products {
    /// `out[key, query]`, at least where the query sees the key.
    pub fn scores<E: Number>(&self, met: &Met, head: usize, factor: &Factor<E>, out: &mut [E]) {
        let Tile { keys, queries, stride, .. } = self.tile;
        match (&met.held, &factor.packed) {
            (Held::Packed(met_packed), Some([columns, _])) => {
                let factors = [part(&met_packed[head][0], 0, 0), part(columns, 0, 0)];
                product(factors, [keys, queries, met.width], (out, stride), false);
            }
            (Held::Rows(rows), _) => self.tile.transposed_product(met.rows(rows, head), met.width, factor.columns, out),
            _ => unreachable!("both are packed, or none"),
        }
    }

    /// `out[key] += Σ_query weights[key, query] · factor[query]`.
    pub fn over_queries<E: Number>(&self, weights: &[E], factor: &Factor<E>, out: &mut [E]) {
        let Tile { keys, queries, stride, .. } = self.tile;
        let (width, step) = (factor.width, self.layout.stride::<E>(factor.width));
        let Some(([_, columns], digits)) = factor.packed.as_ref().zip(self.layout.digits(width)) else {
            return self.tile.over_queries(weights, (factor.rows, step), width, out);
        };
        let packed = Prepacked::of(digits, Side::A, matrix(weights, keys, queries, (stride, 1)));
        product([part(&packed, 0, 0), part(columns, 0, 0)], [keys, width, queries], (out, step), true);
    }

    /// `out[query] = Σ_key weights[key, query] · met[key]`; the weights of hidden pairs are 0.
    pub fn over_keys<E: Number>(&self, weights: &[E], met: &Met, head: usize, out: &mut [E]) {
        let Tile { keys, queries, stride, .. } = self.tile;
        match (&met.held, self.layout.digits(met.width)) {
            (Held::Packed(met_packed), Some(digits)) => {
                let packed = Prepacked::of(digits, Side::A, matrix(weights, queries, keys, (1, stride)));
                let step = self.layout.stride::<E>(met.width);
                let factors = [part(&packed, 0, 0), part(&met_packed[head][1], 0, 0)];
                product(factors, [queries, met.width, keys], (out, step), false);
            }
            (Held::Rows(rows), _) => self.tile.over_keys(weights, met.rows(rows, head), met.width, out, false),
            _ => unreachable!("packed where the layout says so"),
        }
    }
}
