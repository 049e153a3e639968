//! Attention in tiles, forward and backward: what `causal_attention`, `attention`, `attention_with_lse`, `dual_attention`,
//! `gate_aggregate` and `gau_attention` share.
//!
//! For every batch entry and head, `s_ij = scale · q_i·k_j` over the visible keys and `out_i = Σ_j p_ij v_j`, with weights
//! `p_ij = softmax_j(s_ij)` or `relu(s_ij)²`, see [`Weighting`]. A query that sees no key gets 0. Scores exist only as tiles of [`KEYS`] × [`tile_queries`], keys in rows:
//! - `Sᵀ = K·Qᵀ` needs one transposed copy per query tile, and reads keys in place;
//! - a query is a lane, so that softmax needs no step across lanes;
//! - `out += (Sᵀ)ᵀ·V` and all products of the backward read the tile as their broadcast operand, in either direction,
//!   for free.
//!
//! In BF16 training, and in F32 on CPUs with AMX where values are wide, `packed` does the same with larger tiles, of factors
//! that are packed once for a whole head. `arrived` prepares what both backward passes begin with.
//!
//! Products along the diagonal skip what the mask hides, block by block of the register kernel ([`Band`]). A single query,
//! as in decoding, has no lanes to share: `single` goes key by key.
//! Operands on a CUDA device take `cuda` instead of all this.
//! Tasks are cut by shape, and no sum depends on which task ran first.
//! Source: Dao et al., FlashAttention, arXiv 2205.14135, for tiles with running maxima and sums.

mod arrived;
mod backward;
mod cuda;
pub(crate) mod factors;
mod forward;
mod packed;
mod product;
mod single;
mod softmax;
mod squared_relu;
mod turns;
mod values;

use std::marker::PhantomData;
use std::ops::Range;

use kumiki_autograd::{Recipe, Var};
use kumiki_tensor::shape::Dims;
use kumiki_tensor::{Element, Tensor};

use crate::arithmetic::Mul;
use crate::dual_attention::BlockStarts;
use crate::elementwise::zip;
use crate::simd::{Kernel, Lanes, Real};

pub(crate) use arrived::{Arrived, arrive};
pub(crate) use backward::{Upstream, backward, backward_over};
pub(crate) use cuda::{KERNELS as CUDA_KERNELS, shown_lse};
pub(crate) use forward::{Attended, forward, forward_over};
pub(crate) use product::{Band, TileProduct, leading};
pub(crate) use softmax::{hidden, visible};
pub(crate) use squared_relu::{SquaredRelu, SquaredReluGradient};
pub(crate) use turns::Turns;
pub(crate) use values::{SharedValues, Values, scale, write_gated};

/// Keys of a tile: like the queries of one, a multiple of the block heights and widths of the product kernel.
pub(crate) const KEYS: usize = 96;
/// What the tiles of a task may take of the second-level cache.
const TILE_BYTES: usize = 256 * 1024;

/// Queries of a tile, when each needs `elements` in a task's tiles: many, because keys and values are read once per
/// tile, and from pages all over the place.
fn tile_queries<E>(queries: usize, elements: usize) -> usize {
    let most = (TILE_BYTES / (elements * size_of::<E>())).clamp(96, 384);
    let tiles = queries.div_ceil(most).max(1);
    queries.div_ceil(tiles).next_multiple_of(48).min(queries).max(1)
}

/// f32 or f64, as an element and as lanes.
pub(crate) trait Number: Real + Element {}
impl<E: Real + Element> Number for E {}

/// The rows of a `[B, T, H, width]` tensor, whose last axis lies without gaps.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a, E> {
    pub tensor: &'a Tensor,
    /// Empty where the tensor is not on the CPU.
    data: &'a [E],
    offset: usize,
    strides: [usize; 3],
    pub width: usize,
}

impl<'a, E: Element> Rows<'a, E> {
    /// The rows of `x`, which must have passed through [`Rows::prepare`].
    pub fn new(x: &'a Tensor) -> Rows<'a, E> {
        let s = x.strides();
        let data = if x.is_empty() || x.cuda().is_some() { &[] } else { x.storage_slice::<E>() };
        Rows { tensor: x, data, offset: x.offset(), strides: [s[0], s[1], s[2]], width: x.dim(3) }
    }

    /// `x` itself when its last axis lies without gaps, else a copy of which it does.
    pub fn prepare(x: &Tensor) -> Tensor {
        if x.dim(3) <= 1 || x.strides()[3] == 1 { x.clone() } else { x.contiguous() }
    }

    pub fn row(&self, batch: usize, time: usize, head: usize) -> &'a [E] {
        if self.width == 0 { &[] } else { &self.from(batch, time, head)[..self.width] }
    }

    /// The storage from the start of a row on, to be walked with [`Rows::time_stride`].
    pub fn from(&self, batch: usize, time: usize, head: usize) -> &'a [E] {
        let start = self.offset + batch * self.strides[0] + time * self.strides[1] + head * self.strides[2];
        if self.width == 0 { &[] } else { &self.data[start..] }
    }

    pub fn time_stride(&self) -> usize {
        self.strides[1]
    }
}

impl<E: Number> Rows<'_, E> {
    /// Copies `count` rows of a head to rows of `stride` elements.
    pub fn copy(&self, batch: usize, time: usize, head: usize, count: usize, out: &mut [E], stride: usize) {
        if self.width > 0 && count > 0 {
            let (from, step) = (self.from(batch, time, head), self.time_stride());
            CopyRows { from, step, width: self.width, count, out, stride }.run();
        }
    }
}

/// How scores become weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weighting {
    /// `exp(s_ij) / Σ_j exp(s_ij)`.
    Softmax,
    /// `relu(s_ij)²`. A divisor that depends on the query goes into the queries, as its root.
    SquaredRelu,
}

/// Which keys a query sees, masked ones aside.
#[derive(Clone, Copy)]
pub(crate) enum Sees<'a> {
    /// All.
    All,
    /// Query `i` those up to `i + T_k - T_q`.
    Causal,
    /// Query `i` those of its block up to itself; there are as many keys as queries.
    OwnBlock(&'a BlockStarts),
    /// Query `i` those of the blocks before its own; likewise.
    EarlierBlocks(&'a BlockStarts),
}

/// What to attend to and how.
pub(crate) struct Problem<'a, E> {
    pub batch: usize,
    pub heads: usize,
    pub queries: usize,
    pub keys: usize,
    /// `[B, T_q, H, K]`.
    pub q: Rows<'a, E>,
    /// `[B, T_k, H, K]`.
    pub k: Rows<'a, E>,
    /// `[B, T_k, H, G]`.
    pub v: Values<'a, E>,
    pub scale: E,
    pub weighting: Weighting,
    pub sees: Sees<'a>,
    /// `[B, T_k]`: the keys that may be seen; all when absent.
    pub key_mask: Option<&'a [bool]>,
    /// `[B, T_k, T_q]`: the pairs that may be seen, where that is no matter of the key alone; then every query sees all others.
    /// Hidden pairs are computed like any.
    pub pair_mask: Option<&'a [bool]>,
    /// A bound of all scores of a head, where one is known that no score lies far below.
    pub bounds: &'a [Option<E>],
    /// Whether products may round their factors to BF16: [`Var::is_narrow`](kumiki_autograd::Var::is_narrow).
    pub narrow: bool,
}

impl<E: Number> Problem<'_, E> {
    /// For the tile of queries from `i` and keys from `j`: key `r` of the tile is visible to query `c` of the tile when
    /// `r <= c + diagonal`.
    fn diagonal(&self, i: usize, j: usize) -> isize {
        match self.sees {
            Sees::Causal | Sees::OwnBlock(_) => (i + self.keys - self.queries) as isize - j as isize,
            Sees::All | Sees::EarlierBlocks(_) => isize::MAX / 2,
        }
    }

    /// The keys that some of `queries` sees, which are queries of one block. Within them only the diagonal hides any.
    fn seen(&self, batch: usize, queries: &Range<usize>) -> Range<usize> {
        match self.sees {
            Sees::All => 0..self.keys,
            Sees::Causal => 0..self.keys - self.queries + queries.end,
            Sees::OwnBlock(blocks) => blocks.start_of(batch, queries.start)..queries.end,
            Sees::EarlierBlocks(blocks) => 0..blocks.start_of(batch, queries.start),
        }
    }

    /// The queries of a batch entry in tiles of at most `size`, each within one block.
    fn tiles(&self, batch: usize, size: usize) -> Vec<Range<usize>> {
        let starts = match self.sees {
            Sees::All | Sees::Causal => &[][..],
            Sees::OwnBlock(blocks) | Sees::EarlierBlocks(blocks) => blocks.of(batch),
        };
        let ends = starts.iter().copied().chain([self.queries]);
        let begins = [0].into_iter().chain(starts.iter().copied());
        let tiles = |(begin, end): (usize, usize)| {
            (begin..end).step_by(size).map(move |i| i..end.min(i + size)).collect::<Vec<_>>()
        };
        begins.zip(ends).flat_map(tiles).collect()
    }

    /// Pairs of a query and a key that it sees, over batch entries and heads.
    fn pairs(&self) -> usize {
        if let Some(mask) = self.pair_mask {
            return mask.iter().filter(|&&seen| seen).count() * self.heads;
        }
        let count = |batch: usize, keys: Range<usize>| match self.key_mask {
            None => keys.len(),
            Some(mask) => mask[batch * self.keys..][keys].iter().filter(|&&seen| seen).count(),
        };
        let of = |batch| (0..self.queries).map(|i| count(batch, self.seen(batch, &(i..i + 1)))).sum::<usize>();
        (0..self.batch).map(of).sum::<usize>() * self.heads
    }

    /// The mask of a range of keys of a batch entry; `None` when all may be seen.
    fn mask(&self, batch: usize, keys: Range<usize>) -> Option<&[bool]> {
        let mask = &self.key_mask?[batch * self.keys..][keys];
        mask.contains(&false).then_some(mask)
    }

    /// `Sᵀ` of the tile's keys (in rows so far apart) and its packed queries; scores of masked keys and pairs are -inf.
    fn scores(&self, keys: (&[E], usize), tile: Tile, packed: &[E], scores: &mut [E]) {
        tile.transposed_product(keys, self.k.width, packed, scores);
        if let Some(mask) = self.mask(tile.batch, tile.j..tile.j + tile.keys) {
            fill_masked(mask, scores, tile.stride, E::NEG_INFINITY);
        }
        let Some(mask) = self.pair_mask else { return };
        for (r, row) in scores.chunks_exact_mut(tile.stride).take(tile.keys).enumerate() {
            let seen = &mask[(tile.batch * self.keys + tile.j + r) * self.queries + tile.i..][..tile.queries];
            row.iter_mut().zip(seen).for_each(|(s, &seen)| *s = if seen { *s } else { E::NEG_INFINITY });
        }
    }

    /// Copies keys or values to rows of `stride` elements. Masked rows become 0: what lies there must not even be
    /// multiplied with 0, for it may be NaN.
    fn copy_keys(
        &self,
        rows: &Values<E>,
        (batch, head): (usize, usize),
        keys: Range<usize>,
        out: &mut [E],
        stride: usize,
    ) {
        rows.copy(batch, keys.start, head, keys.len(), out, stride);
        if let Some(mask) = self.mask(batch, keys) {
            fill_masked(mask, out, stride, E::ZERO);
        }
    }
}

/// Queries `i..i + queries` and keys `j..j + keys` of a head.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub batch: usize,
    pub head: usize,
    pub i: usize,
    pub queries: usize,
    pub j: usize,
    pub keys: usize,
    /// Key `r` of the tile is visible to query `c` of the tile when `r <= c + diagonal`.
    pub diagonal: isize,
    /// Distance between rows of the transposed tile.
    pub stride: usize,
    /// As of its [`Problem`].
    pub narrow: bool,
}

impl Tile {
    /// `rows · packed` for the tile's keys, given in rows so far apart, where the tile's queries see them.
    pub fn transposed_product<E: Number>(self, rows: (&[E], usize), width: usize, packed: &[E], out: &mut [E]) {
        TileProduct {
            rows: self.keys,
            depth: width,
            columns: self.queries,
            a: rows.0,
            a_strides: (rows.1, 1),
            b: packed,
            b_stride: self.stride,
            c: out,
            c_stride: self.stride,
            accumulate: false,
            band: self.band(Band::Columns),
            narrow: self.narrow,
        }
        .run();
    }

    /// `out[query] (+)= Σ_key weights[key, query] · rows[key]`, both in rows so far apart.
    pub fn over_keys<E: Number>(
        self,
        weights: &[E],
        (rows, row_stride): (&[E], usize),
        columns: usize,
        out: &mut [E],
        accumulate: bool,
    ) {
        TileProduct {
            rows: self.queries,
            depth: self.keys,
            columns,
            a: weights,
            a_strides: (1, self.stride),
            b: rows,
            b_stride: row_stride,
            c: out,
            c_stride: row_stride,
            accumulate,
            band: self.band(Band::DepthTo),
            narrow: self.narrow,
        }
        .run();
    }

    /// `out[key] += Σ_query weights[key, query] · rows[query]`, both in rows so far apart.
    pub fn over_queries<E: Number>(
        self,
        weights: &[E],
        (rows, row_stride): (&[E], usize),
        columns: usize,
        out: &mut [E],
    ) {
        TileProduct {
            rows: self.keys,
            depth: self.queries,
            columns,
            a: weights,
            a_strides: (self.stride, 1),
            b: rows,
            b_stride: row_stride,
            c: out,
            c_stride: row_stride,
            accumulate: true,
            band: self.band(Band::DepthFrom),
            narrow: self.narrow,
        }
        .run();
    }

    fn band(&self, band: impl Fn(isize) -> Band) -> Band {
        if self.keys as isize - 1 <= self.diagonal { Band::Full } else { band(self.diagonal) }
    }
}

fn fill_masked<E: Number>(mask: &[bool], tile: &mut [E], stride: usize, value: E) {
    for (row, _) in mask.iter().enumerate().filter(|(_, seen)| !**seen) {
        tile[row * stride..][..stride].fill(value);
    }
}

/// Copies `count` rows that lie `step` apart to rows that lie `stride` apart, padded with zeros to whole cache lines.
struct CopyRows<'a, E> {
    from: &'a [E],
    step: usize,
    width: usize,
    count: usize,
    out: &'a mut [E],
    stride: usize,
}

impl<E: Number> CopyRows<'_, E> {
    fn run(self) {
        E::dispatch(self);
    }
}

impl<E: Number> Kernel<E> for CopyRows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let whole = self.width / L::N * L::N;
        for (i, out) in self.out.chunks_exact_mut(self.stride).take(self.count).enumerate() {
            let row = &self.from[i * self.step..][..self.width];
            for c in (0..whole).step_by(L::N) {
                L::load(&row[c..]).store(&mut out[c..]);
            }
            if whole < self.width {
                L::load_partial(&row[whole..], E::ZERO).store(&mut out[whole..]);
            }
        }
    }
}

/// `out[p * stride + i] = factor · from[i * step + p]` for `count` rows of `width` elements; whole vectors are written.
pub(crate) struct TransposeRows<'a, E> {
    pub from: &'a [E],
    pub step: usize,
    pub width: usize,
    pub count: usize,
    pub factor: E,
    pub out: &'a mut [E],
    pub stride: usize,
}

impl<E: Number> TransposeRows<'_, E> {
    pub fn run(self) {
        E::dispatch(self);
    }
}

impl<E: Number> Kernel<E> for TransposeRows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let (zero, factor) = (L::splat(E::ZERO), L::splat(self.factor));
        for i in (0..self.count).step_by(L::N) {
            let live = L::N.min(self.count - i);
            for p in (0..self.width).step_by(L::N) {
                let columns = L::N.min(self.width - p);
                let mut square = [zero; 16];
                for (r, line) in square.iter_mut().enumerate().take(live) {
                    let row = &self.from[(i + r) * self.step + p..][..columns];
                    *line = factor * if columns == L::N { L::load(row) } else { L::load_partial(row, E::ZERO) };
                }
                L::transpose(&mut square);
                for (c, line) in square.iter().enumerate().take(columns) {
                    line.store(&mut self.out[(p + c) * self.stride + i..]);
                }
            }
        }
    }
}

/// The product `y` with its factors, which are saved; as it is when nothing is saved or there is one only.
pub(crate) fn with_kept_factors(y: Var, factors: Option<(Tensor, Tensor)>) -> Var {
    let Some((a, b)) = factors else { return y };
    let shape = Dims::new(y.shape());
    y.with_recipe(|| Recipe::new([a, b], &shape, |x| zip(&Mul, x[0].clone(), &x[1])))
}

/// The working memory of a task: one recycled buffer, cut into parts that begin on a cache line.
pub(crate) struct Scratch(Tensor);

impl Scratch {
    pub fn new<E: Number>(elements: usize) -> Scratch {
        Scratch(Tensor::empty(E::DTYPE, &[elements]))
    }

    pub fn parts<E: Number, const N: usize>(&mut self, lengths: [usize; N]) -> [&mut [E]; N] {
        let mut rest = self.0.as_mut_slice::<E>();
        lengths.map(|length| {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(length);
            rest = after;
            part
        })
    }
}

/// An output of which every task writes rows of its own.
pub(crate) struct SharedRows<'a, E> {
    start: *mut E,
    len: usize,
    owner: PhantomData<&'a mut [E]>,
}

// SAFETY: tasks on several threads get slices only through `row_mut`, whose callers warrant that they do not overlap.
unsafe impl<E: Send> Sync for SharedRows<'_, E> {}

impl<'a, E> SharedRows<'a, E> {
    pub fn new(out: &'a mut [E]) -> SharedRows<'a, E> {
        SharedRows { start: out.as_mut_ptr(), len: out.len(), owner: PhantomData }
    }

    /// Row `row` of `width` elements.
    ///
    /// # Safety
    /// While the slice lives, no other call asks for the same row, and all calls have the same width.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn row_mut(&self, row: usize, width: usize) -> &mut [E] {
        assert!((row + 1) * width <= self.len);
        // SAFETY: in bounds; exclusive, as the caller warrants.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * width), width) }
    }
}
