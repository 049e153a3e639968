//! The forward pass: one task per batch entry, head and tile of queries; keys stream past it.

use std::ops::Range;

use kumiki_tensor::{Tensor, threads};

use super::softmax::SoftmaxStep;
use super::values::write_gated;
use super::{
    KEYS, Number, Problem, Scratch, Sees, SharedRows, SharedValues, SquaredRelu, Tile, TransposeRows, Values,
    Weighting, cuda, leading, packed, single, tile_queries,
};
use crate::count::count;

/// What the forward pass gives.
pub(crate) struct Attended {
    /// `[B, T_q, H, G]`; `None` when it was not to be kept beside its product with the gate.
    pub out: Option<Tensor>,
    /// `out ⊙ gate`, where there is a gate.
    pub gated: Option<Tensor>,
    /// `[B, H, T_q]`: log-sum-exp of the scores of every query, +inf for a query that sees no key, so that
    /// `exp(s - lse)` is its weight in any case. Only softmax has it.
    pub lse: Option<Tensor>,
}

/// Attention, and its product with `gate` `[B, T_q, H, G]` if there is one; `keep` says whether `out` is wanted then.
pub(crate) fn forward<E: Number>(p: &Problem<E>, gate: Option<&Values<E>>, keep: bool) -> Attended {
    forward_over(std::slice::from_ref(p), gate, keep)
}

/// As [`forward`] with one softmax over several sets of keys: problems of the same queries, weighting, and blocks if there
/// are any.
pub(crate) fn forward_over<E: Number>(sets: &[Problem<E>], gate: Option<&Values<E>>, keep: bool) -> Attended {
    let p = &sets[0];
    count(|c| c.pair += sets.iter().map(|p| (p.pairs() * (p.k.width + p.v.width())) as u64).sum::<u64>());
    if cuda::device(p).is_some() {
        return cuda::forward(sets, gate, keep);
    }
    let shape = [p.batch, p.queries, p.heads, p.v.width()];
    let mut out = (keep || gate.is_none()).then(|| Tensor::empty(p.v.dtype(), &shape));
    let mut gated = gate.map(|gate| Tensor::empty(gate.dtype(), &shape));
    let mut lse = (p.weighting == Weighting::Softmax).then(|| Tensor::empty(E::DTYPE, &[p.batch, p.heads, p.queries]));
    // With one key the backward must find a weight of exactly 1, from a score that is rounded alike.
    let sees_all = sets.iter().all(|p| matches!(p.sees, Sees::All | Sees::Causal) && p.pair_mask.is_none());
    let as_computed = sets.iter().map(|p| &p.v).chain(gate).all(|values| values.dtype() == E::DTYPE);
    if p.queries == 1 && sees_all && as_computed && sets.iter().map(|p| p.keys).sum::<usize>() > 1 {
        let outputs = [&mut out, &mut gated, &mut lse].map(|t| t.as_mut().map(|t| t.as_mut_slice::<E>()));
        single::forward(sets, gate, outputs);
        return Attended { out, gated, lse };
    }
    let size = tile_queries::<E>(p.queries, KEYS + leading::<E>(p.v.width()));
    let of_batch: Vec<_> = (0..p.batch).map(|batch| p.tiles(batch, size)).collect();
    let tasks: Vec<_> = (0..p.batch * p.heads)
        .flat_map(|head| of_batch[head / p.heads].iter().map(move |tile| (head, tile.clone())))
        .collect();
    let outputs = Outputs {
        out: out.as_mut().map(SharedValues::new),
        gated: gated.as_mut().map(SharedValues::new),
        lse: lse.as_mut().map(|t| SharedRows::new(t.as_mut_slice::<E>())),
    };
    if let Some(digits) = packed::digits(sets) {
        packed::forward(p, digits, gate, &outputs);
        return Attended { out, gated, lse };
    }
    let cost = size * sets.iter().map(|p| p.keys).sum::<usize>() * (p.k.width + p.v.width());
    threads::parallel_for(tasks.len(), cost, |task| {
        let (head, tile) = &tasks[task];
        query_tile(sets, gate, (head / p.heads, head % p.heads), tile.clone(), &outputs);
    });
    Attended { out, gated, lse }
}

pub(super) struct Outputs<'a, E> {
    out: Option<SharedValues<'a, E>>,
    gated: Option<SharedValues<'a, E>>,
    lse: Option<SharedRows<'a, E>>,
}

fn query_tile<E: Number>(
    sets: &[Problem<E>],
    gate: Option<&Values<E>>,
    (batch, head): (usize, usize),
    range: Range<usize>,
    outputs: &Outputs<E>,
) {
    let (p, i, queries) = (&sets[0], range.start, range.len());
    let (stride, v_stride) = (leading::<E>(queries), leading::<E>(p.v.width()));
    let key_rows = KEYS.min(sets.iter().map(|p| p.keys).max().unwrap_or(0));
    let sizes =
        [p.k.width * stride, key_rows * stride, key_rows * v_stride, queries * v_stride, stride, stride, stride];
    let mut scratch = Scratch::new::<E>(sizes.iter().sum());
    let [q, scores, v, acc, shift, sum, factor] = scratch.parts::<E, 7>(sizes);
    let (from, step, width) = (p.q.from(batch, i, head), p.q.time_stride(), p.q.width);
    TransposeRows { from, step, width, count: queries, factor: p.scale, out: q, stride }.run();
    shift.fill(p.bounds[head].unwrap_or(E::NEG_INFINITY));
    sum.fill(E::ZERO);

    // Weights that nothing divides need no shift.
    let fixed = p.bounds[head].is_some() || p.weighting == Weighting::SquaredRelu;
    let mut started = false;
    let tiles = sets.iter().flat_map(|p| {
        let seen = p.seen(batch, &range);
        (seen.start..seen.end).step_by(KEYS).map(move |j| (p, j, KEYS.min(seen.end - j)))
    });
    for (p, j, keys) in tiles {
        let tile = Tile { batch, head, i, queries, j, keys, diagonal: p.diagonal(i, j), stride, narrow: p.narrow };
        if p.mask(batch, j..j + keys).is_some_and(|mask| !mask.contains(&true)) {
            continue;
        }
        p.scores((p.k.from(batch, j, head), p.k.time_stride()), tile, q, scores);
        let diagonal = tile.diagonal;
        match p.weighting {
            Weighting::Softmax => {
                SoftmaxStep { scores, stride, keys, queries, diagonal, fixed, shift, sum, factor }.run();
            }
            Weighting::SquaredRelu => SquaredRelu { scores, stride, keys, queries, diagonal }.run(),
        }
        if started && !fixed {
            for (row, &factor) in acc.chunks_exact_mut(v_stride).zip(&*factor) {
                if factor != E::ONE {
                    row.iter_mut().for_each(|x| *x *= factor);
                }
            }
        }
        p.copy_keys(&p.v, (batch, head), j..j + keys, v, v_stride);
        tile.over_keys(scores, (v, v_stride), p.v.width(), acc, started);
        started = true;
    }
    if !started {
        acc.fill(E::ZERO);
    }

    finish(p, gate, (batch, head, i), Sums { acc, stride: v_stride, sum, shift }, queries, outputs);
}

/// What a tile of queries has summed up.
pub(super) struct Sums<'a, E> {
    /// Of weighted values, in rows so far apart.
    pub acc: &'a mut [E],
    pub stride: usize,
    /// Of weights, and the shift under which they are.
    pub sum: &'a [E],
    pub shift: &'a [E],
}

/// Writes the outputs of `queries` queries from `i` on.
pub(super) fn finish<E: Number>(
    p: &Problem<E>,
    gate: Option<&Values<E>>,
    (batch, head, i): (usize, usize, usize),
    Sums { acc, stride: v_stride, sum, shift }: Sums<E>,
    queries: usize,
    outputs: &Outputs<E>,
) {
    for c in 0..queries {
        let seen = sum[c] != E::ZERO;
        let inverse = match p.weighting {
            Weighting::Softmax if seen => E::ONE / sum[c],
            Weighting::Softmax => E::ZERO,
            Weighting::SquaredRelu => E::ONE,
        };
        let row = &mut acc[c * v_stride..][..p.v.width()];
        let at = (batch * p.queries + i + c) * p.heads + head;
        // SAFETY: this task alone has this head and these queries.
        unsafe {
            let gated = outputs.gated.as_ref().zip(gate);
            write_gated(row, inverse, (batch, i + c, head), at, outputs.out.as_ref(), gated);
        }
        if let Some(lse) = &outputs.lse {
            // SAFETY: as above.
            let lse = unsafe { lse.row_mut((batch * p.heads + head) * p.queries + i + c, 1) };
            lse[0] = if seen { shift[c] + sum[c].ln() } else { E::INFINITY };
        }
    }
}
