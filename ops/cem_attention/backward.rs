//! The backward pass: one task per batch entry and block of query tiles. A task adds to gradients of keys and history of
//! its own, which are summed over blocks in order.

use kumiki_tensor::{Tensor, threads};

use super::kernels::{GroupTiles, Shape, WeighGradient};
use super::{Problem, TILE, packed};
use crate::attention_tiles::{Number, Rows, Scratch, SharedRows, Tile, TransposeRows, balanced, leading};
use crate::simd::Real;

/// Tasks that keep the threads of a large machine busy.
const ENOUGH_TASKS: usize = 32;
/// Blocks of a batch entry's queries, at most.
const MOST_BLOCKS: usize = 8;

/// The gradient that arrives, and what the forward pass has left.
pub(super) struct Upstream<'a, E> {
    /// `[B, T_q, H, K]`, in the frame of position 0.
    pub dcontext: Rows<'a, E>,
    /// `[B, T_q, 1, D]`.
    pub dm: Rows<'a, E>,
    /// `[B, T_q, H]`.
    pub lse: &'a [E],
    /// `[B, T_q, G, D]`.
    pub mix: Option<&'a [E]>,
}

pub(super) struct Gradients {
    /// Rotated, `[B, T_q, H, K]`.
    pub dq: Tensor,
    /// `[B, T_k, H, K]`.
    pub dk: Tensor,
    pub diagonal: Option<DiagonalGradients>,
}

pub(super) struct DiagonalGradients {
    /// `[B, T_q, D]`, of what passes by the projection.
    pub dx: Tensor,
    /// `[G, D]`.
    pub dd: Tensor,
    /// `[B, T_k, D]`.
    pub dhistory: Tensor,
}

pub(super) fn backward<E: Number>(p: &Problem<E>, up: &Upstream<E>) -> Gradients {
    let tiles = p.queries.div_ceil(TILE);
    let wanted = ENOUGH_TASKS.div_ceil(p.batch.max(1)).min(MOST_BLOCKS);
    let blocks = balanced(tiles, wanted, |tile| p.visible((tile + 1) * TILE).min(p.keys));
    let keys = packed(&p.k, [p.batch, p.keys, p.heads]);
    let history = p.diagonal.as_ref().map(|g| packed(&g.history, [p.batch, p.keys, 1]));
    let (groups, _) = p.groups();
    let d_model = p.diagonal.as_ref().map_or(0, |g| g.x.width);
    let (k_stride, d_stride) = (leading::<E>(p.k.width), leading::<E>(d_model));

    let mut dq = Tensor::empty(E::DTYPE, &[p.batch, p.queries, p.heads, p.k.width]);
    let mut dx = p.diagonal.as_ref().map(|_| Tensor::empty(E::DTYPE, &[p.batch, p.queries, d_model]));
    let shared =
        (SharedRows::new(dq.as_mut_slice::<E>()), dx.as_mut().map(|dx| SharedRows::new(dx.as_mut_slice::<E>())));
    let cost = p.queries * p.keys * (p.heads * p.k.width + groups * d_model) / blocks.len().max(1);
    let parts = threads::parallel_map(p.batch * blocks.len(), cost, |task| {
        let batch = task / blocks.len();
        let block = &blocks[task % blocks.len()];
        let mut part = Part {
            dk: Tensor::zeros(E::DTYPE, &[p.heads, p.keys, k_stride]),
            dhistory: p.diagonal.as_ref().map(|_| Tensor::zeros(E::DTYPE, &[p.keys, d_stride])),
            dd: vec![0.0; groups * d_model],
        };
        let operands = Operands {
            keys: &keys.as_slice::<E>()[batch * p.heads * p.keys * k_stride..],
            history: history.as_ref().map(|h| &h.as_slice::<E>()[batch * p.keys * d_stride..]),
        };
        for tile in block.clone() {
            query_tile(p, up, &operands, (batch, tile * TILE), &shared, &mut part);
        }
        part
    });

    let rows_of = |rows: fn(&Part) -> Option<&Tensor>| parts.iter().filter_map(rows).collect::<Vec<_>>();
    let dk = summed::<E>([p.batch, p.keys, p.heads, p.k.width], &rows_of(|part| Some(&part.dk)));
    let diagonal = dx.map(|dx| DiagonalGradients {
        dx,
        dd: {
            let sum = |i: usize| parts.iter().map(|part| part.dd[i]).sum::<f64>();
            Tensor::from_fn::<E>(&[groups, d_model], |i| Real::from_f64(sum(i)))
        },
        dhistory: summed::<E>([p.batch, p.keys, 1, d_model], &rows_of(|part| part.dhistory.as_ref()))
            .reshape(&[p.batch, p.keys, d_model]),
    });
    Gradients { dq, dk, diagonal }
}

/// What a task adds up, in rows of whole vectors.
struct Part {
    /// `[H, T_k, leading(K)]`.
    dk: Tensor,
    /// `[T_k, leading(D)]`.
    dhistory: Option<Tensor>,
    /// `[G, D]`.
    dd: Vec<f64>,
}

/// Sums the parts `[H, T, leading(W)]` of every batch entry, as many of each, into `[B, T, H, W]`.
fn summed<E: Number>(shape: [usize; 4], parts: &[&Tensor]) -> Tensor {
    let [batch, time, heads, width] = shape;
    let (blocks, stride) = (parts.len() / batch.max(1), leading::<E>(width));
    let mut out = Tensor::zeros(E::DTYPE, &shape);
    let row = heads * width;
    const TOKENS: usize = 64;
    threads::parallel_chunks_mut(out.as_mut_slice::<E>(), row, TOKENS * row * blocks, |token, out| {
        let (batch, t) = (token / time, token % time);
        for part in &parts[batch * blocks..(batch + 1) * blocks] {
            let part = part.as_slice::<E>();
            for (head, out) in out.chunks_exact_mut(width).enumerate() {
                let part = &part[(head * time + t) * stride..][..width];
                out.iter_mut().zip(part).for_each(|(y, &x)| *y += x);
            }
        }
    });
    out
}

/// Packed rows of one batch entry.
struct Operands<'a, E> {
    /// `[H, T_k, leading(K)]`.
    keys: &'a [E],
    /// `[T_k, leading(D)]`.
    history: Option<&'a [E]>,
}

/// A factor of products with queries: as rows, and transposed.
struct Factor<'a, E> {
    rows: &'a mut [E],
    columns: &'a mut [E],
}

impl<E: Number> Factor<'_, E> {
    fn fill(&mut self, queries: usize, (width, step): (usize, usize), stride: usize, row: impl Fn(usize, &mut [E])) {
        for (c, out) in self.rows.chunks_exact_mut(step).take(queries).enumerate() {
            row(c, &mut out[..width]);
        }
        let (from, count, factor, out) = (&*self.rows, queries, E::ONE, &mut *self.columns);
        TransposeRows { from, step, width, count, factor, out, stride }.run();
    }
}

fn query_tile<E: Number>(
    p: &Problem<E>,
    up: &Upstream<E>,
    operands: &Operands<E>,
    (batch, i): (usize, usize),
    (dq_out, dx_out): &(SharedRows<E>, Option<SharedRows<E>>),
    part: &mut Part,
) {
    let queries = TILE.min(p.queries - i);
    let keys = p.visible(i + queries);
    let (stride, width, k_stride) = (leading::<E>(queries), p.k.width, leading::<E>(p.k.width));
    let d_model = p.diagonal.as_ref().map_or(0, |g| g.x.width);
    let d_stride = if d_model > 0 { leading::<E>(d_model) } else { 0 };
    // Of one size for all tiles, however many keys they see: the pool then has one kind of buffer.
    let (tile_size, group_size) = (p.keys * stride, if d_model > 0 { p.keys * stride } else { 0 });
    let sizes = [
        queries * k_stride,
        width * stride,
        queries * k_stride,
        width * stride,
        queries * d_stride,
        d_model * stride,
        queries * d_stride,
        d_model * stride,
        stride,
        tile_size,
        tile_size,
        group_size,
        group_size,
        group_size,
        group_size,
        queries * k_stride,
        queries * d_stride,
    ];
    let mut scratch = Scratch::new::<E>(sizes.iter().sum());
    let parts = scratch.parts::<E, 17>(sizes);
    let [q, q_t, dc, dc_t, x, x_t, dm, dm_t, lse, scores, dp, base, dbase, total, slopes, dq, dx] = parts;
    let factor = |rows, columns| Factor { rows, columns };
    let (mut q, mut dc, mut x, mut dm) = (factor(q, q_t), factor(dc, dc_t), factor(x, x_t), factor(dm, dm_t));
    let diagonal = (i + p.keys - p.queries) as isize;
    let tile = Tile { batch, head: 0, i, queries, j: 0, keys, diagonal, stride, narrow: p.narrow };
    let shape = Shape { stride, keys, queries, diagonal };
    let token = |c: usize| batch * p.queries + i + c;
    let (groups, heads) = p.groups();
    for group in 0..groups {
        if let (Some(g), Some(history)) = (&p.diagonal, operands.history) {
            let d = &g.d[group * d_model..][..d_model];
            let times_d = |row: &[E], factor: E, out: &mut [E]| {
                out.iter_mut().zip(row.iter().zip(d)).for_each(|(y, (&x, &d))| *y = factor * d * x);
            };
            let widths = (d_model, d_stride);
            x.fill(queries, widths, stride, |c, out| times_d(g.x.row(batch, i + c, 0), p.beta, out));
            dm.fill(queries, widths, stride, |c, out| times_d(up.dm.row(batch, i + c, 0), E::ONE, out));
            tile.transposed_product((history, d_stride), d_model, x.columns, base);
            tile.transposed_product((history, d_stride), d_model, dm.columns, dbase);
            total[..keys * stride].fill(E::ZERO);
            slopes[..keys * stride].fill(E::ZERO);
        }
        for head in group * heads..(group + 1) * heads {
            let scaled = |c: usize, out: &mut [E]| {
                out.iter_mut().zip(p.q.row(batch, i + c, head)).for_each(|(y, &q)| *y = p.beta * q);
            };
            q.fill(queries, (width, k_stride), stride, scaled);
            dc.fill(queries, (width, k_stride), stride, |c, out| {
                out.copy_from_slice(up.dcontext.row(batch, i + c, head));
            });
            lse.fill(E::ZERO);
            lse.iter_mut().take(queries).enumerate().for_each(|(c, x)| *x = up.lse[token(c) * p.heads + head]);
            let key_rows = &operands.keys[head * p.keys * k_stride..];
            tile.transposed_product((key_rows, k_stride), width, q.columns, scores);
            tile.transposed_product((key_rows, k_stride), width, dc.columns, dp);
            let group = (d_model > 0).then_some(GroupTiles { base, dbase, total, slopes });
            WeighGradient { shape, scores, dp, group, lse }.run();
            let dk = &mut part.dk.as_mut_slice::<E>()[head * p.keys * k_stride..];
            tile.over_queries(scores, (dc.rows, k_stride), width, dk);
            tile.over_queries(dp, (q.rows, k_stride), width, dk);
            tile.over_keys(dp, (key_rows, k_stride), width, dq, false);
            for (c, row) in dq.chunks_exact(k_stride).take(queries).enumerate() {
                // SAFETY: this task alone has these queries.
                let out = unsafe { dq_out.row_mut(token(c) * p.heads + head, width) };
                out.iter_mut().zip(row).for_each(|(y, &x)| *y = p.beta * x);
            }
        }
        let (Some(g), Some(history), Some(dx_out)) = (&p.diagonal, operands.history, dx_out) else { continue };
        let dhistory = part.dhistory.as_mut().expect("beside a diagonal").as_mut_slice::<E>();
        tile.over_queries(total, (dm.rows, d_stride), d_model, dhistory);
        tile.over_queries(slopes, (x.rows, d_stride), d_model, dhistory);
        tile.over_keys(slopes, (history, d_stride), d_model, dx, false);
        let (d, dd) = (&g.d[group * d_model..][..d_model], &mut part.dd[group * d_model..][..d_model]);
        let mix = up.mix.expect("beside a diagonal");
        let mut sums = vec![E::ZERO; d_model];
        for (c, row) in dx.chunks_exact(d_stride).take(queries).enumerate() {
            // SAFETY: as above.
            let out = unsafe { dx_out.row_mut(token(c), d_model) };
            if group == 0 {
                out.fill(E::ZERO);
            }
            let (x, dm) = (g.x.row(batch, i + c, 0), up.dm.row(batch, i + c, 0));
            let mix = &mix[(token(c) * groups + group) * d_model..][..d_model];
            for n in 0..d_model {
                let slope = p.beta * row[n];
                out[n] += d[n] * slope;
                sums[n] += x[n] * slope + dm[n] * mix[n];
            }
        }
        dd.iter_mut().zip(&sums).for_each(|(dd, &sum)| *dd += Real::to_f64(sum));
    }
}
