//! The forward pass of a single query, as in decoding: keys and values are read once, in place.
//!
//! Tasks are parts of [`PART`] keys of a head, each with sums under its own shift, which are put together in order.

use kumiki_tensor::threads;

use super::{Number, Problem, Values, Weighting};
use crate::simd::{self, add_weighted_rows, row_dots};

/// Keys of a task.
const PART: usize = 1024;

/// Fills `out`, `gated` and `lse` as far as they are asked for. Values and gates are stored as they are computed with. The query sees all keys of all sets that are not masked.
pub(super) fn forward<E: Number>(
    sets: &[Problem<E>],
    gate: Option<&Values<E>>,
    [mut out, mut gated, mut lse]: [Option<&mut [E]>; 3],
) {
    let p = &sets[0];
    let of_head: Vec<(&Problem<E>, usize)> =
        sets.iter().flat_map(|p| (0..p.keys).step_by(PART).map(move |j| (p, j))).collect();
    let (values, parts) = (p.v.width(), of_head.len());
    // Of each part: the sums of weighted values, of weights, and the shift under which they are.
    let width = values + 2;
    let mut sums = vec![E::ZERO; p.batch * p.heads * parts * width];
    let cost = p.keys.clamp(1, PART) * (p.k.width + values);
    threads::parallel_chunks_mut(&mut sums, width, cost, |task, sums| {
        let (head, part) = (task / parts, task % parts);
        let (p, j) = of_head[part];
        key_part(p, (head / p.heads, head % p.heads), j, sums);
    });
    for head in 0..p.batch * p.heads {
        let parts = || sums[head * parts * width..][..parts * width].chunks_exact(width);
        let shift = parts().map(|part| part[values + 1]).fold(E::NEG_INFINITY, |a, b| if b > a { b } else { a });
        let factor = |part: &[E]| match p.weighting {
            Weighting::Softmax => (part[values + 1] - shift).exp(),
            Weighting::SquaredRelu => E::ONE,
        };
        let total = parts().fold(E::ZERO, |sum, part| sum + factor(part) * part[values]);
        let seen = total != E::ZERO;
        let inverse = match p.weighting {
            Weighting::Softmax if seen => E::ONE / total,
            Weighting::Softmax => E::ZERO,
            Weighting::SquaredRelu => E::ONE,
        };
        let mut row = vec![E::ZERO; values];
        for part in parts() {
            let factor = factor(part) * inverse;
            row.iter_mut().zip(part).for_each(|(y, &x)| *y += factor * x);
        }
        if let Some(out) = &mut out {
            out[head * values..][..values].copy_from_slice(&row);
        }
        if let (Some(gated), Some(gate)) = (&mut gated, gate) {
            gate.multiply((head / p.heads, 0, head % p.heads), &mut row);
            gated[head * values..][..values].copy_from_slice(&row);
        }
        if let Some(lse) = &mut lse {
            lse[head] = if seen { shift + total.ln() } else { E::INFINITY };
        }
    }
}

/// The sums over the keys from `j` on.
fn key_part<E: Number>(p: &Problem<E>, (batch, head): (usize, usize), j: usize, sums: &mut [E]) {
    let keys = PART.min(p.keys - j);
    let mut weights = [E::ZERO; PART];
    let weights = &mut weights[..keys];
    row_dots(weights, p.q.row(batch, 0, head), p.k.from(batch, j, head), p.k.time_stride());
    weights.iter_mut().for_each(|s| *s *= p.scale);
    let mask = p.mask(batch, j..j + keys);
    if let Some(mask) = mask {
        weights.iter_mut().zip(mask).filter(|(_, seen)| !**seen).for_each(|(s, _)| *s = E::NEG_INFINITY);
    }
    let Values::Same(values) = &p.v else { unreachable!("asked for values as computed with") };
    let (acc, rest) = sums.split_at_mut(p.v.width());
    match p.weighting {
        Weighting::Softmax => {
            let shift = p.bounds[head].unwrap_or_else(|| simd::max(weights));
            // -inf minus -inf would be NaN.
            let shift = if shift == E::NEG_INFINITY { E::ZERO } else { shift };
            rest[0] = simd::exp_shift_inplace(weights, shift);
            rest[1] = shift;
        }
        // In this order a NaN stays one.
        Weighting::SquaredRelu => weights.iter_mut().for_each(|s| *s = if *s < E::ZERO { E::ZERO } else { *s * *s }),
    }
    // Values of masked keys must not even be multiplied with 0, for they may be NaN: runs of the others, one by one.
    let mut r = 0;
    while r < keys {
        let seen = |r: usize| mask.is_none_or(|mask| mask[r]);
        let run = (r..keys).take_while(|&r| seen(r)).count();
        add_weighted_rows(acc, &weights[r..r + run], values.from(batch, j + r, head), values.time_stride());
        r += run + 1;
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::difference;
    use crate::{causal_attention, gate_aggregate_mul, gau_attention_mul};
    use kumiki_autograd::Var;
    use kumiki_tensor::{DType, Rng, Tensor, threads::with_threads};

    /// The last query alone against all of them at once, over several parts of keys.
    #[test]
    fn the_last_query_alone_equals_the_whole() {
        let time = 2 * super::PART + 5;
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 2e-5)] {
            let mut rng = Rng::new(3);
            let mut normal = |shape: &[usize]| rng.normal(dtype, shape, 0.0, 1.0);
            let heads = |x: &mut dyn FnMut(&[usize]) -> Tensor, width| x(&[2, time, 2, width]);
            let (q, k, g, v) =
                (heads(&mut normal, 9), heads(&mut normal, 9), heads(&mut normal, 21), heads(&mut normal, 21));
            let tau = Tensor::full(dtype, &[2], 7.0);
            let last = |x: &Tensor| Var::constant(x.narrow(1, time - 1, 1));
            let all = |x: &Tensor| Var::constant(x.clone());
            let flat = |x: &Tensor| x.reshape(&[2, time, x.dim(2) * x.dim(3)]);
            type Run<'a> = &'a (dyn Fn(&dyn Fn(&Tensor) -> Var) -> Var + Sync);
            let runs: [(&str, Run); 3] = [
                ("causal_attention", &|of| causal_attention(&of(&q), &all(&k), &all(&g))),
                ("gate_aggregate_mul", &|of| gate_aggregate_mul(&of(&q), &all(&k), &all(&g), &all(&tau), &of(&v))),
                ("gau_attention_mul", &|of| {
                    gau_attention_mul(&of(&flat(&q)), &all(&flat(&k)), &all(&flat(&g)), &of(&flat(&v)))
                }),
            ];
            for (name, run) in runs {
                let whole = run(&all).into_value();
                let one = with_threads(1, || run(&last).into_value().to_f64_vec());
                let expected = whole.narrow(1, time - 1, 1).to_f64_vec();
                assert_eq!(difference(&one, &expected, tolerance), None, "{name} {dtype}");
                assert_eq!(with_threads(3, || run(&last).into_value().to_f64_vec()), one, "{name}: any threads");
            }
        }
    }
}
