//! The backward pass: one task per batch entry and tile of queries. All tiles of an entry add to the same gradients of keys,
//! head after head, and of history; in order, so that sums do not depend on threads: a task waits before it adds until the tile
//! before it has added to this head.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use kumiki_tensor::{Tensor, threads};

use super::Problem;
use super::forward::Operands;
use super::kernels::{GroupTiles, Shape, WeighGradient};
use super::products::{Factor, Layout, Products};
use crate::attention_tiles::{Number, Rows, Scratch, SharedRows, Tile, Turns};
use crate::simd::Real;

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
    let layout = Layout::of(p);
    let tiles = p.queries.div_ceil(layout.tile);
    let met = Operands::new(p, layout);
    let (groups, _) = p.groups();
    let d_model = p.diagonal.as_ref().map_or(0, |g| g.x.width);
    let (k_stride, d_stride) = (layout.stride::<E>(p.k.width), layout.stride::<E>(d_model));
    let rows = layout.rows(p.keys);

    let tensor = |shape: &[usize]| Tensor::empty(E::DTYPE, shape);
    let of_diagonal = |tensor: Tensor| p.diagonal.as_ref().map(|_| tensor);
    let mut dq = tensor(&[p.batch, p.queries, p.heads, p.k.width]);
    let mut dx = of_diagonal(tensor(&[p.batch, p.queries, d_model]));
    let mut dk = Tensor::zeros(E::DTYPE, &[p.batch, p.heads, rows, k_stride]);
    let mut dhistory = of_diagonal(Tensor::zeros(E::DTYPE, &[p.batch, rows, d_stride]));
    let mut dd = vec![0f64; p.batch * tiles * groups * d_model];
    let shared = Shared {
        dq: SharedRows::new(dq.as_mut_slice::<E>()),
        dx: dx.as_mut().map(|dx| SharedRows::new(dx.as_mut_slice::<E>())),
        dk: SharedRows::new(dk.as_mut_slice::<E>()),
        dhistory: dhistory.as_mut().map(|t| SharedRows::new(t.as_mut_slice::<E>())),
        dd: SharedRows::new(&mut dd),
        turns: Turns::new(p.batch, p.heads + 1),
    };
    let cost = layout.tile * p.keys * (p.heads * p.k.width + groups * d_model);
    let next = AtomicUsize::new(0);
    threads::parallel_for(p.batch * tiles, cost, |_| {
        // In this order whatever thread comes first: a tile waits for earlier ones only, which have begun then.
        let task = next.fetch_add(1, Relaxed);
        let (tile, batch) = (task / p.batch, task % p.batch);
        shared.turns.or_tell_others(|| query_tile((p, layout), up, &met, (batch, tile), &shared));
    });
    drop(shared);

    let dk = compact::<E>(&dk, [p.batch, p.keys, p.heads, p.k.width]);
    let diagonal = dx.zip(dhistory).map(|(dx, dhistory)| DiagonalGradients {
        dx,
        dd: Tensor::from_fn::<E>(&[groups, d_model], |i| {
            Real::from_f64(dd.iter().skip(i).step_by(groups * d_model).sum::<f64>())
        }),
        dhistory: compact::<E>(&dhistory, [p.batch, p.keys, 1, d_model]).reshape(&[p.batch, p.keys, d_model]),
    });
    Gradients { dq, dk, diagonal }
}

/// What tasks write.
struct Shared<'a, E> {
    dq: SharedRows<'a, E>,
    dx: Option<SharedRows<'a, E>>,
    /// `[B, H, rows(T_k), stride(K)]`.
    dk: SharedRows<'a, E>,
    /// `[B, rows(T_k), stride(D)]`.
    dhistory: Option<SharedRows<'a, E>>,
    /// Of every tile, `[B, tiles, G, D]`.
    dd: SharedRows<'a, f64>,
    /// In a batch entry: of tiles at the keys of each head; and, last, of their groups at the history.
    turns: Turns,
}

/// `[B, H, rows(T), stride(W)]` as `[B, T, H, W]`.
fn compact<E: Number>(wide: &Tensor, shape: [usize; 4]) -> Tensor {
    let [_, time, heads, width] = shape;
    let [.., rows, stride] = *wide.shape() else { unreachable!("it has rows") };
    let (mut out, wide) = (Tensor::empty(E::DTYPE, &shape), wide.as_slice::<E>());
    threads::parallel_chunks_mut(out.as_mut_slice::<E>(), heads * width, heads * width, |token, out| {
        let (batch, t) = (token / time, token % time);
        for (head, out) in out.chunks_exact_mut(width).enumerate() {
            let head = batch * heads + head;
            out.copy_from_slice(&wide[(head * rows + t) * stride..][..width]);
        }
    });
    out
}

fn query_tile<E: Number>(
    (p, layout): (&Problem<E>, Layout),
    up: &Upstream<E>,
    met: &Operands,
    (batch, tile_index): (usize, usize),
    shared: &Shared<E>,
) {
    let i = tile_index * layout.tile;
    let queries = layout.tile.min(p.queries - i);
    let keys = p.visible(i + queries);
    let (stride, width) = (layout.stride::<E>(queries), p.k.width);
    let d_model = p.diagonal.as_ref().map_or(0, |g| g.x.width);
    let (k_stride, d_stride) = (layout.stride::<E>(width), layout.stride::<E>(d_model));
    // Of one size for all tiles, however many keys they see: the pool then has one kind of buffer.
    let tile_size = layout.rows(p.keys) * stride;
    let (group_size, rows) = (if d_model > 0 { tile_size } else { 0 }, layout.rows(queries));
    let [q_rows, q_columns] = Factor::<E>::sizes(layout, queries, width);
    let [x_rows, x_columns] = Factor::<E>::sizes(layout, queries, d_model);
    let sizes = [
        q_rows,
        q_columns,
        q_rows,
        q_columns,
        x_rows,
        x_columns,
        x_rows,
        x_columns,
        stride,
        tile_size,
        tile_size,
        group_size,
        group_size,
        group_size,
        group_size,
        rows * k_stride,
        rows * d_stride,
    ];
    let mut scratch = Scratch::new::<E>(sizes.iter().sum());
    let parts = scratch.parts::<E, 17>(sizes);
    let [q, q_t, dc, dc_t, x, x_t, dm, dm_t, lse, scores, dp, base, dbase, total, slopes, dq, dx] = parts;
    let (mut q, mut dc) =
        (Factor::new(layout, queries, width, [q, q_t]), Factor::new(layout, queries, width, [dc, dc_t]));
    let (mut x, mut dm) =
        (Factor::new(layout, queries, d_model, [x, x_t]), Factor::new(layout, queries, d_model, [dm, dm_t]));
    let diagonal = (i + p.keys - p.queries) as isize;
    let tile = Tile { batch, head: 0, i, queries, j: 0, keys, diagonal, stride, narrow: p.narrow };
    let (products, shape) = (Products { tile, layout }, Shape { stride, keys, queries, diagonal });
    let token = |c: usize| batch * p.queries + i + c;
    let (groups, heads) = p.groups();
    for group in 0..groups {
        if let (Some(g), Some(history)) = (&p.diagonal, &met.history) {
            let d = &g.d[group * d_model..][..d_model];
            let times_d = |row: &[E], factor: E, out: &mut [E]| {
                out.iter_mut().zip(row.iter().zip(d)).for_each(|(y, (&x, &d))| *y = factor * d * x);
            };
            x.fill(&products, true, |c, out| times_d(g.x.row(batch, i + c, 0), p.beta, out));
            dm.fill(&products, true, |c, out| times_d(up.dm.row(batch, i + c, 0), E::ONE, out));
            products.scores(history, batch, &x, base);
            products.scores(history, batch, &dm, dbase);
            total[..keys * stride].fill(E::ZERO);
            slopes[..keys * stride].fill(E::ZERO);
        }
        for head in group * heads..(group + 1) * heads {
            let scaled = |c: usize, out: &mut [E]| {
                out.iter_mut().zip(p.q.row(batch, i + c, head)).for_each(|(y, &q)| *y = p.beta * q);
            };
            q.fill(&products, true, scaled);
            dc.fill(&products, true, |c, out| {
                out.copy_from_slice(up.dcontext.row(batch, i + c, head));
            });
            lse.fill(E::ZERO);
            lse.iter_mut().take(queries).enumerate().for_each(|(c, x)| *x = up.lse[token(c) * p.heads + head]);
            let of_head = batch * p.heads + head;
            products.scores(&met.keys, of_head, &q, scores);
            products.scores(&met.keys, of_head, &dc, dp);
            let group = (d_model > 0).then_some(GroupTiles { base, dbase, total, slopes });
            WeighGradient { shape, scores, dp, group, lse }.run();
            products.over_keys(dp, &met.keys, of_head, dq);
            let turn = shared.turns.wait(batch, head, tile_index);
            // SAFETY: it is this task's turn with this head.
            let dk = unsafe { shared.dk.row_mut(of_head, layout.rows(p.keys) * k_stride) };
            products.over_queries(scores, &dc, dk);
            products.over_queries(dp, &q, dk);
            turn.pass();
            for (c, row) in dq.chunks_exact(k_stride).take(queries).enumerate() {
                // SAFETY: this task alone has these queries.
                let out = unsafe { shared.dq.row_mut(token(c) * p.heads + head, width) };
                out.iter_mut().zip(row).for_each(|(y, &x)| *y = p.beta * x);
            }
        }
        let (Some(g), Some(history)) = (&p.diagonal, &met.history) else { continue };
        let (Some(dx_out), Some(dhistory)) = (&shared.dx, &shared.dhistory) else { continue };
        products.over_keys(slopes, history, batch, dx);
        let turn = shared.turns.wait(batch, p.heads, tile_index * groups + group);
        // SAFETY: it is this group's turn with the history.
        let dhistory = unsafe { dhistory.row_mut(batch, layout.rows(p.keys) * d_stride) };
        products.over_queries(total, &dm, dhistory);
        products.over_queries(slopes, &x, dhistory);
        turn.pass();
        let d = &g.d[group * d_model..][..d_model];
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
        let tiles = p.queries.div_ceil(layout.tile);
        // SAFETY: this task alone has this tile.
        let dd = unsafe { shared.dd.row_mut((batch * tiles + tile_index) * groups + group, d_model) };
        dd.iter_mut().zip(&sums).for_each(|(dd, &sum)| *dd = Real::to_f64(sum));
    }
}
