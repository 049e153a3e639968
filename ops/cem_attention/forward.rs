//! The forward pass: one task per batch entry and tile of queries. A single query, as in decoding, has no lanes to share
//! and goes key by key, reading keys and history in place.

use kumiki_tensor::{Tensor, threads};

use super::Problem;
use super::kernels::{Shape, Weigh};
use super::products::{Factor, Layout, Met, Products};
use crate::attention_tiles::{Number, Scratch, SharedRows, Tile};
use crate::simd::{self, add_weighted_rows, row_dots};

/// What the forward pass gives.
pub(super) struct Attended {
    /// `Σ_j p_ij k_j`, in the frame of position 0: `[B, T_q, H, K]`.
    pub context: Tensor,
    /// `Σ_j (Σ_h p_ij) ĥ_j` of every group, `[B, T_q, G, D]`.
    pub mix: Option<Tensor>,
    /// `[B, T_q, H]`.
    pub lse: Tensor,
}

pub(super) fn forward<E: Number>(p: &Problem<E>) -> Attended {
    let tensor = |shape: &[usize]| Tensor::empty(E::DTYPE, shape);
    let mut context = tensor(&[p.batch, p.queries, p.heads, p.k.width]);
    let mut mix = p.diagonal.as_ref().map(|g| tensor(&[p.batch, p.queries, g.groups, g.x.width]));
    let mut lse = tensor(&[p.batch, p.queries, p.heads]);
    // With one key the backward must find a weight of exactly 1, from a score that is rounded alike.
    if p.queries == 1 && p.keys > 1 {
        single(p, [context.as_mut_slice::<E>(), lse.as_mut_slice::<E>()], mix.as_mut().map(|m| m.as_mut_slice::<E>()));
        return Attended { context, mix, lse };
    }
    let layout = Layout::of(p);
    let met = Operands::new(p, layout);
    let outputs = Outputs {
        context: SharedRows::new(context.as_mut_slice::<E>()),
        mix: mix.as_mut().map(|m| SharedRows::new(m.as_mut_slice::<E>())),
        lse: SharedRows::new(lse.as_mut_slice::<E>()),
    };
    let tiles = p.queries.div_ceil(layout.tile);
    let widths = p.heads * p.k.width + p.diagonal.as_ref().map_or(0, |g| g.groups * g.x.width);
    threads::parallel_for(p.batch * tiles, layout.tile * p.keys * widths, |task| {
        query_tile((p, layout), &met, task / tiles, task % tiles * layout.tile, &outputs);
    });
    Attended { context, mix, lse }
}

/// What all tiles meet, in both passes.
pub(super) struct Operands {
    /// Of every batch entry and head.
    pub keys: Met,
    /// Of every batch entry.
    pub history: Option<Met>,
}

impl Operands {
    pub fn new<E: Number>(p: &Problem<E>, layout: Layout) -> Operands {
        Operands {
            keys: Met::new(&p.k, [p.batch, p.keys, p.heads], layout),
            history: p.diagonal.as_ref().map(|g| Met::new(&g.history, [p.batch, p.keys, 1], layout)),
        }
    }
}

struct Outputs<'a, E> {
    context: SharedRows<'a, E>,
    mix: Option<SharedRows<'a, E>>,
    lse: SharedRows<'a, E>,
}

fn query_tile<E: Number>(
    (p, layout): (&Problem<E>, Layout),
    met: &Operands,
    batch: usize,
    i: usize,
    outputs: &Outputs<E>,
) {
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
        x_rows,
        x_columns,
        tile_size,
        rows * k_stride,
        rows * d_stride,
        stride,
        group_size,
        group_size,
    ];
    let mut scratch = Scratch::new::<E>(sizes.iter().sum());
    let [q, q_t, x, x_t, scores, context, mixed, lse, base, total] = scratch.parts::<E, 10>(sizes);
    let diagonal = (i + p.keys - p.queries) as isize;
    let tile = Tile { batch, head: 0, i, queries, j: 0, keys, diagonal, stride, narrow: p.narrow };
    let (products, shape) = (Products { tile, layout }, Shape { stride, keys, queries, diagonal });
    let mut q = Factor::new(layout, queries, width, [q, q_t]);
    let mut x = Factor::new(layout, queries, d_model, [x, x_t]);
    let (groups, heads) = p.groups();
    for group in 0..groups {
        if let (Some(g), Some(history)) = (&p.diagonal, &met.history) {
            let d = &g.d[group * d_model..][..d_model];
            x.fill(&products, false, |c, out| {
                let x = g.x.row(batch, i + c, 0).iter().zip(d);
                out.iter_mut().zip(x).for_each(|(y, (&x, &d))| *y = p.beta * d * x);
            });
            products.scores(history, batch, &x, base);
            total[..keys * stride].fill(E::ZERO);
        }
        for head in group * heads..(group + 1) * heads {
            q.fill(&products, false, |c, out| {
                let q = p.q.row(batch, i + c, head);
                out.iter_mut().zip(q).for_each(|(y, &q)| *y = p.beta * q);
            });
            let of_head = batch * p.heads + head;
            products.scores(&met.keys, of_head, &q, scores);
            let of_group = (d_model > 0).then_some((&*base, &mut *total));
            Weigh { shape, scores, group: of_group, lse }.run();
            products.over_keys(scores, &met.keys, of_head, context);
            for (c, row) in context.chunks_exact(k_stride).take(queries).enumerate() {
                let at = (batch * p.queries + i + c) * p.heads + head;
                // SAFETY: this task alone has these queries.
                let (out, lse_out) = unsafe { (outputs.context.row_mut(at, width), outputs.lse.row_mut(at, 1)) };
                out.copy_from_slice(&row[..width]);
                lse_out[0] = lse[c];
            }
        }
        if let (Some(history), Some(mix)) = (&met.history, &outputs.mix) {
            products.over_keys(total, history, batch, mixed);
            for (c, row) in mixed.chunks_exact(d_stride).take(queries).enumerate() {
                // SAFETY: as above.
                let out = unsafe { mix.row_mut((batch * p.queries + i + c) * groups + group, d_model) };
                out.copy_from_slice(&row[..d_model]);
            }
        }
    }
}

/// One query a batch entry, which sees all keys.
fn single<E: Number>(p: &Problem<E>, [context, lse]: [&mut [E]; 2], mix: Option<&mut [E]>) {
    let (groups, heads) = p.groups();
    let cost = p.keys * p.k.width;
    // Scores of every group's diagonal, then weights of every head.
    let mut base = vec![E::ZERO; if p.diagonal.is_some() { p.batch * groups * p.keys } else { 0 }];
    if let Some(g) = &p.diagonal {
        threads::parallel_chunks_mut(&mut base, p.keys, p.keys * g.x.width, |task, base| {
            let (batch, d) = (task / groups, &g.d[task % groups * g.x.width..]);
            let x: Vec<E> = g.x.row(batch, 0, 0).iter().zip(d).map(|(&x, &d)| p.beta * d * x).collect();
            row_dots(base, &x, g.history.from(batch, 0, 0), g.history.time_stride());
        });
    }
    let mut weights = vec![E::ZERO; p.batch * p.heads * p.keys];
    let lse = SharedRows::new(lse);
    threads::parallel_chunks2_mut((&mut weights, p.keys), (context, p.k.width), cost, |task, weights, context| {
        let (batch, head) = (task / p.heads, task % p.heads);
        let q: Vec<E> = p.q.row(batch, 0, head).iter().map(|&q| p.beta * q).collect();
        row_dots(weights, &q, p.k.from(batch, 0, head), p.k.time_stride());
        if !base.is_empty() {
            let base = &base[(batch * groups + head / heads) * p.keys..];
            weights.iter_mut().zip(base).for_each(|(s, &base)| *s += base);
        }
        let shift = simd::max(weights);
        let sum = simd::exp_shift_inplace(weights, shift);
        let inverse = E::ONE / sum;
        weights.iter_mut().for_each(|w| *w *= inverse);
        context.fill(E::ZERO);
        add_weighted_rows(context, weights, p.k.from(batch, 0, head), p.k.time_stride());
        // SAFETY: this task alone has this head.
        let lse = unsafe { lse.row_mut(task, 1) };
        lse[0] = shift + sum.ln();
    });
    if let (Some(g), Some(mix)) = (&p.diagonal, mix) {
        threads::parallel_chunks_mut(mix, g.x.width, p.keys * g.x.width, |task, mix| {
            let mut total = vec![E::ZERO; p.keys];
            for weights in weights[task * heads * p.keys..].chunks_exact(p.keys).take(heads) {
                total.iter_mut().zip(weights).for_each(|(t, &w)| *t += w);
            }
            mix.fill(E::ZERO);
            add_weighted_rows(mix, &total, g.history.from(task / groups, 0, 0), g.history.time_stride());
        });
    }
}
