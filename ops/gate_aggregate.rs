//! `gate_aggregate`, `gate_aggregate_mul`: TANGO's cross-token gate, a causal softmax average of gates.
//!
//! Per batch entry and head, with `x̂ = x / sqrt(Σ x² + 1e-12)`, over the keys `j` that query `i` may see:
//!
//! ```text
//! s_ij = tau q̂_i·k̂_j     ḡ_i = Σ_j exp(s_ij - tau) g_j / Σ_j exp(s_ij - tau)     y_i = ḡ_i ⊙ v_i
//! ```
//!
//! `s_ij <= tau`, so the shift is known beforehand: one pass, and no maximum is searched. As `s` may be `-tau`, the
//! weights can underflow together once `exp(-2 tau)` does; heads beyond [`Width::FIXED_SHIFT`] search the maximum.
//!
//! Backward, with `q̃ = tau q̂` and the row sums kept as `lse_i = log Σ_j exp(s_ij)`: that of attention from `q̃` to `k̂`,
//! for `dḡ = dout ⊙ v`, and `dv = dout ⊙ ḡ`. Then `dtau = Σ_i dq̃_i·q̂_i` and, with `r = 1 / sqrt(Σ x² + 1e-12)` and
//! `dx̂` = `tau dq̃` or `dk̂`: `dx = r (dx̂ - x̂ (x̂·dx̂))`.
//!
//! Saved: `q`, `k`, `g` (or what it [can be computed from again](kumiki_autograd::Recipe)), `tau`, the output `gate` ḡ (for `dv` and for `delta = dḡ·ḡ`) and `lse` `[B, H, T_q]`; in
//! `gate_aggregate_mul` also `v`, but not the product, nor need a `linear` after it. Normalised `q`, `k` are computed again. No `T×T` array exists.
//! Cost: `2 (K+G)` operations per visible pair forward, `6K + 4G` backward. A rotation of `q` and `k` keeps their
//! norms, so RoPE may as well be applied before.
//! Source: TANGO, "cross-token gated residual" (2026).

use kumiki_autograd::{Backward, Kept, Var};
use kumiki_tensor::{DType, Tensor};

use crate::attention_tiles::{
    self, Arrived, Attended, Number, Problem, Rows, Sees, Upstream, Values, Weighting, arrive, with_kept_factors,
};
use crate::cast::widened;
use crate::causal_attention::check_shapes;
use crate::registry::{BenchCase, OpCase};
use crate::simd::Real;
use crate::unit_rows::{unit_rows, unit_rows_backward};

/// `q` `[B, T_q, H, K]`, `k` `[B, T_k, H, K]`, `g` `[B, T_k, H, G]`, `tau` `[H]` above 0, to `[B, T_q, H, G]` in the dtype of
/// `g`, which may be BF16 where the others are F32. With `T_q < T_k` queries are the last ones: query `i` sees keys up to
/// `i + T_k - T_q`, as when decoding with a cache.
///
/// # Panics
/// When shapes or dtypes do not fit, or `T_q > T_k`.
#[track_caller]
pub fn gate_aggregate(q: &Var, k: &Var, g: &Var, tau: &Var) -> Var {
    check("gate_aggregate", q, k, g, tau);
    widened(&[q, k, g, tau], |x| run("gate_aggregate", &x[0], &x[1], &x[2], &x[3], None))
}

/// [`gate_aggregate`] times `v`, elementwise, in the same pass. `v` is `[B, T_q, H, G]` or `[B, T_q, H·G]` in the dtype of
/// `g`, and the result has its shape.
///
/// # Panics
/// When shapes or dtypes do not fit, or `T_q > T_k`.
#[track_caller]
pub fn gate_aggregate_mul(q: &Var, k: &Var, g: &Var, tau: &Var, v: &Var) -> Var {
    let [batch, queries, _, heads, _, values] = check("gate_aggregate_mul", q, k, g, tau);
    assert!(
        (v.shape() == [batch, queries, heads, values] || v.shape() == [batch, queries, heads * values])
            && v.dtype() == g.dtype(),
        "gate_aggregate_mul: v must be [B={batch}, T_q={queries}, H={heads}, G={values}] or with both in one axis, of {}, \
         got {:?} of {}",
        g.dtype(),
        v.shape(),
        v.dtype()
    );
    widened(&[q, k, g, tau, v], |x| run("gate_aggregate_mul", &x[0], &x[1], &x[2], &x[3], Some(&x[4])))
}

#[track_caller]
fn check(name: &str, q: &Var, k: &Var, g: &Var, tau: &Var) -> [usize; 6] {
    let dims = check_shapes(name, q, k, ("g", g), true);
    assert!(
        tau.shape() == [dims[3]] && tau.dtype().is_float() && tau.dtype().compute() == q.dtype().compute(),
        "{name}: tau must be [H={}] of {}, got {:?} of {} (q: {:?})",
        dims[3],
        q.dtype().compute(),
        tau.shape(),
        tau.dtype(),
        q.shape()
    );
    dims
}

fn run(name: &'static str, q: &Var, k: &Var, g: &Var, tau: &Var, v: Option<&Var>) -> Var {
    let operands = [q, k, g].map(|x| Rows::<f32>::prepare(x.value()));
    let gated_shape = [q.dim(0), q.dim(1), q.dim(2), g.dim(3)];
    let factor = v.map(|v| Rows::<f32>::prepare(&v.value().reshape(&gated_shape)));
    let inputs: Vec<&Var> = [q, k, g, tau].into_iter().chain(v).collect();
    let keep = inputs.iter().any(|x| x.requires_grad());
    let narrow = inputs.iter().any(|x| x.is_narrow());
    let tau = tau.value().contiguous();
    let Attended { out, gated, lse } = match q.dtype() {
        DType::F64 => forward::<f64>(&operands, (&tau, narrow), factor.as_ref(), keep),
        _ => forward::<f32>(&operands, (&tau, narrow), factor.as_ref(), keep),
    };
    let y = match v {
        Some(v) => gated.expect("asked for").reshape(v.shape()),
        None => out.clone().expect("asked for"),
    };
    let factors = out.clone().filter(|_| keep).zip(factor.clone());
    let y = Var::from_op(y, &inputs, || {
        let ([q, k, _], g) = (operands, Kept::of(g));
        let out = out.expect("kept when gradients are required");
        let lse = lse.expect("of a softmax");
        GateAggregateBackward { name, q, k, g, tau, v: factor, gate: out, lse, narrow }
    });
    with_kept_factors(y, factors)
}

/// What depends on the precision.
trait Width: Number {
    /// The largest `tau` for which the fixed shift is used: `exp(-2 tau)` times a small gate is a normal number.
    const FIXED_SHIFT: f64;
}
impl Width for f32 {
    const FIXED_SHIFT: f64 = 30.0;
}
impl Width for f64 {
    const FIXED_SHIFT: f64 = 300.0;
}

/// Calls `f` with the attention problem from `tau q̂` to `k̂`.
fn with_problem<E: Width, R>(
    [q, k, g]: &[Tensor; 3],
    tau: &Tensor,
    narrow: bool,
    f: impl FnOnce(&Problem<E>) -> R,
) -> R {
    let (scaled_q, unit_k) = (unit_rows::<E>(q, Some(tau)), unit_rows::<E>(k, None));
    let bound = |&tau: &E| (0.0..=E::FIXED_SHIFT).contains(&Real::to_f64(tau)).then_some(tau);
    // A device searches for the maximum rather than wait for these.
    let bounds = if tau.cuda().is_some() { vec![None; q.dim(2)] } else { tau.as_slice().iter().map(bound).collect() };
    f(&Problem {
        batch: q.dim(0),
        heads: q.dim(2),
        queries: q.dim(1),
        keys: k.dim(1),
        q: Rows::new(&scaled_q),
        k: Rows::new(&unit_k),
        v: Values::new(g),
        scale: E::ONE,
        weighting: Weighting::Softmax,
        sees: Sees::Causal,
        key_mask: None,
        pair_mask: None,
        bounds: &bounds,
        narrow,
    })
}

fn forward<E: Width>(
    operands: &[Tensor; 3],
    (tau, narrow): (&Tensor, bool),
    factor: Option<&Tensor>,
    keep: bool,
) -> Attended {
    let factor = factor.map(Values::new);
    with_problem::<E, _>(operands, tau, narrow, |p| attention_tiles::forward(p, factor.as_ref(), keep))
}

struct GateAggregateBackward {
    name: &'static str,
    q: Tensor,
    k: Tensor,
    g: Kept,
    tau: Tensor,
    v: Option<Tensor>,
    gate: Tensor,
    lse: Tensor,
    narrow: bool,
}

impl Backward for GateAggregateBackward {
    fn name(&self) -> &'static str {
        self.name
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        let mut saved = vec![("q", &self.q), ("k", &self.k)];
        saved.extend(self.g.tensors("g"));
        saved.push(("tau", &self.tau));
        saved.extend(self.v.as_ref().map(|v| ("v", v)));
        saved.extend([("gate", &self.gate), ("lse", &self.lse)]);
        saved
    }
    fn backward(self: Box<Self>, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        match dout.dtype() {
            DType::F64 => gradients::<f64>(*self, dout, needs),
            _ => gradients::<f32>(*self, dout, needs),
        }
    }
}

fn gradients<E: Width>(saved: GateAggregateBackward, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
    let GateAggregateBackward { q, k, g, tau, v, gate, lse, narrow, .. } = saved;
    let (shape, by_heads) = (dout.shape().to_vec(), dout.reshape(gate.shape()));
    drop(dout); // so that it is written over
    let Arrived { dout, dgate, delta } = arrive::<E>(by_heads, v.as_ref(), gate, v.is_some() && needs[4]);
    let operands = [q, k, Rows::<E>::prepare(&g.into_value())];
    let up = Upstream { dout: Values::<E>::new(&dout), lse: Some(&lse), delta: Some(&delta) };
    let wanted = [needs[0] || needs[3], needs[1], needs[2]];
    let [dq, dk, dg] = with_problem(&operands, &tau, narrow, |p| attention_tiles::backward(p, &up, wanted));
    let (dq, dtau) = dq.map(|dq| unit_rows_backward::<E>(&operands[0], dq, Some(&tau))).unzip();
    let dk = dk.map(|dk| unit_rows_backward::<E>(&operands[1], dk, None).0);
    let mut grads = vec![dq, dk, dg, dtau];
    grads.extend(v.map(|_| dgate.map(|dv| dv.reshape(&shape))));
    grads
}

/// Normalising is singular at 0: differences see it from too near.
fn away_from_zero(x: f64) -> f64 {
    x + 0.5_f64.copysign(x)
}

pub(crate) fn cases() -> Vec<OpCase> {
    let case = |name, variant, [b, tq, tk, h, k, g]: [usize; 6], flat: bool| {
        let v: &[usize] = if flat { &[b, tq, h * g] } else { &[b, tq, h, g] };
        let shapes: [(&'static str, &[usize]); 5] =
            [("q", &[b, tq, h, k]), ("k", &[b, tk, h, k]), ("g", &[b, tk, h, g]), ("tau", &[h]), ("v", v)];
        let multiply = name == "gate_aggregate_mul";
        let inputs = if multiply { &shapes[..] } else { &shapes[..4] };
        OpCase::new(name, variant, inputs, move |_, x| match x.get(4) {
            Some(v) => gate_aggregate_mul(&x[0], &x[1], &x[2], &x[3], v),
            None => gate_aggregate(&x[0], &x[1], &x[2], &x[3]),
        })
        .map_input(0, away_from_zero)
        .map_input(1, away_from_zero)
        .map_input(3, f64::exp)
    };
    vec![
        case("gate_aggregate", "T=5", [2, 5, 5, 2, 3, 4], false),
        case("gate_aggregate", "one more than a tile", [1, 97, 97, 1, 2, 1], false),
        case("gate_aggregate", "last 2 of 5", [1, 2, 5, 2, 4, 3], false),
        // Beyond the fixed shift; the vectors lie close together, so that the softmax is not saturated.
        case("gate_aggregate", "tau above 400", [1, 4, 4, 2, 3, 2], false)
            .map_input(0, |x| 1.0 + 0.03 * x)
            .map_input(1, |x| 1.0 + 0.03 * x)
            .map_input(3, |tau| 400.0 + tau),
        case("gate_aggregate_mul", "v by heads", [2, 4, 4, 2, 3, 3], false),
        case("gate_aggregate_mul", "v flat, last 3 of 4", [1, 3, 4, 2, 5, 2], true),
    ]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    [(16, 256, 4, 32, 239), (1, 4096, 4, 32, 239)]
        .map(|(b, t, h, k, g)| {
            let inputs = vec![
                ("q", vec![b, t, h, k]),
                ("k", vec![b, t, h, k]),
                ("g", vec![b, t, h, g]),
                ("tau", vec![h]),
                ("v", vec![b, t, h * g]),
            ];
            BenchCase {
                name: "gate_aggregate_mul",
                inputs,
                forward: Box::new(|_, x| gate_aggregate_mul(&x[0], &x[1], &x[2], &x[3], &x[4])),
                bytes: 4 * b * t * h * (2 * k + 3 * g),
                flops: b * h * t * (t + 1) / 2 * 2 * (k + g),
            }
        })
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::causal_attention::naive;
    use crate::testing::{Chain, difference};
    use kumiki_autograd::{GradCheck, Tape};
    use kumiki_tensor::{Rng, concat, threads::with_threads};
    use proptest::prelude::*;

    fn naive_gate([b, tq, tk, h, k, g]: [usize; 6], x: &[Vec<f64>]) -> Vec<f64> {
        let unit = |x: &[f64]| -> Vec<f64> {
            let row = |row: &[f64]| {
                let norm = (row.iter().map(|x| x * x).sum::<f64>() + 1e-12).sqrt();
                row.iter().map(|x| x / norm).collect::<Vec<_>>()
            };
            x.chunks(k).flat_map(row).collect()
        };
        let (q, keys, tau) = (unit(&x[0]), unit(&x[1]), &x[3]);
        let mut y = naive([b, tq, tk, h, k, g], (&q, &keys, &x[2]), |h, dot| tau[h] * dot, |_, i, j| j <= i + tk - tq);
        if let Some(v) = x.get(4) {
            y.iter_mut().zip(v).for_each(|(y, v)| *y *= v);
        }
        y
    }

    fn chain(dims: [usize; 6], gated: Option<bool>, seed: u64, differences: bool, f32_tolerance: f64) {
        let [b, tq, tk, h, k, g] = dims;
        let v: &[usize] = if gated == Some(true) { &[b, tq, h * g] } else { &[b, tq, h, g] };
        let shapes: [(&str, &[usize]); 5] =
            [("q", &[b, tq, h, k]), ("k", &[b, tk, h, k]), ("g", &[b, tk, h, g]), ("tau", &[h]), ("v", v)];
        let shapes = if gated.is_some() { &shapes[..] } else { &shapes[..4] };
        let mut chain = Chain::new("gate_aggregate", seed, shapes)
            .map_input(0, away_from_zero)
            .map_input(1, away_from_zero)
            .map_input(3, |x| (0.3 * x + 1.0).exp());
        chain.differences = differences;
        chain.f32_tolerance = f32_tolerance;
        chain.run(
            |_, x| match x.get(4) {
                Some(v) => gate_aggregate_mul(&x[0], &x[1], &x[2], &x[3], v),
                None => gate_aggregate(&x[0], &x[1], &x[2], &x[3]),
            },
            |x| naive_gate(dims, x),
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn small_shapes_pass_the_chain(
            (b, tq, more, h) in (1usize..3, 1usize..12, 0usize..6, 1usize..3), (k, g) in (2usize..10, 1usize..10),
            gated in any::<Option<bool>>(), seed in any::<u64>(),
        ) {
            // With one key the gradients of q and k are 0. In random tiny shapes they are at times small differences of
            // large terms, hence the tolerance of the golden files for f32.
            prop_assume!(tq + more > 1);
            chain([b, tq, tq + more, h, k, g], gated, seed, true, 2e-4);
        }
    }

    #[test]
    fn shapes_around_the_tile_pass_the_chain() {
        for (seed, dims) in
            [[1, 95, 97, 1, 17, 33], [1, 193, 193, 1, 8, 1], [2, 1, 200, 2, 4, 48], [1, 96, 96, 2, 32, 239]]
                .into_iter()
                .enumerate()
        {
            chain(dims, Some(true), seed as u64, false, 2e-5);
        }
    }

    #[test]
    fn a_single_key_gives_its_gate_and_no_gradient_to_scores() {
        let x = inputs(DType::F32, [2, 1, 2, 3, 5]);
        let all = evaluate(&x, None);
        assert!(difference(&all[0].to_f64_vec(), &x[2].to_f64_vec(), 1e-6).is_none());
        assert!([1, 2, 4].iter().flat_map(|&i| all[i].to_f64_vec()).all(|dx| dx.abs() < 1e-5));
    }

    /// On both sides of the switch from the fixed shift, and where `exp(s - tau)` underflows to 0 for every key.
    #[test]
    fn every_tau_gives_the_softmax() {
        for tau in [1e-3, 29.0, 31.0, 299.0, 301.0] {
            let [b, t, h, k, g] = [1, 9, 2, 3, 4];
            let mut x = inputs(DType::F64, [b, t, h, k, g]);
            x[3] = Tensor::full(DType::F64, &[h], tau);
            let values = |x: &[Tensor; 4]| {
                gate_aggregate(&x[0].clone().into(), &x[1].clone().into(), &x[2].clone().into(), &x[3].clone().into())
                    .value()
                    .to_f64_vec()
            };
            let expected = naive_gate([b, t, t, h, k, g], &x.clone().map(|x| x.to_f64_vec()));
            assert_eq!(difference(&values(&x), &expected, 1e-10), None, "tau {tau}");
            // A rounding of `q̂·k̂` moves a score by `tau` roundings.
            let single = x.clone().map(|x| x.cast(DType::F32));
            assert_eq!(difference(&values(&single), &expected, 2e-5_f64.max(tau * 2e-6)), None, "tau {tau}");
            let named = [("q", x[0].clone()), ("k", x[1].clone()), ("g", x[2].clone()), ("tau", x[3].clone())];
            let check = GradCheck { step: 1e-3 / tau.max(1.0), ..GradCheck::default() };
            check.run(&named, &[], |_, x| gate_aggregate(&x[0], &x[1], &x[2], &x[3])).assert_below(1e-6);
        }
        let opposite = |sign: f32| Tensor::from_fn::<f32>(&[1, 3, 1, 2], |_| sign);
        for tau in [20.0f32, 1e3] {
            let inputs = [
                opposite(1.0),
                opposite(-1.0),
                Tensor::from_slice(&[1.0f32, 3.0, 8.0], &[1, 3, 1, 1]),
                Tensor::from_slice(&[tau], &[1]),
            ];
            let all = evaluate(&inputs, None);
            assert!(difference(&all[0].to_f64_vec(), &[1.0, 2.0, 4.0], 1e-6).is_none(), "{:?}", all[0].to_f64_vec());
            assert!(all.iter().all(Tensor::all_finite));
        }
    }

    fn normal(dtype: DType, seed: u64, shape: &[usize]) -> Tensor {
        Rng::new(seed).normal(dtype, shape, 0.0, 1.0)
    }

    fn inputs(dtype: DType, [b, t, h, k, g]: [usize; 5]) -> [Tensor; 4] {
        let tau = Tensor::full(dtype, &[h], 3.0);
        [normal(dtype, 1, &[b, t, h, k]), normal(dtype, 2, &[b, t, h, k]), normal(dtype, 3, &[b, t, h, g]), tau]
    }

    fn evaluate(inputs: &[Tensor; 4], v: Option<&Tensor>) -> Vec<Tensor> {
        let tape = Tape::new();
        let x: Vec<Var> = inputs.iter().chain(v).map(|t| tape.leaf(t.clone())).collect();
        let y = match x.get(4) {
            Some(v) => gate_aggregate_mul(&x[0], &x[1], &x[2], &x[3], v),
            None => gate_aggregate(&x[0], &x[1], &x[2], &x[3]),
        };
        let dout = normal(y.dtype(), 5, y.shape());
        let grads = tape.backward_from(&[(&y, dout)]);
        std::iter::once(y.value().clone()).chain(x.iter().map(|x| grads.get(x).unwrap().clone())).collect()
    }

    /// What one application in a block keeps, and that the product is not among it.
    #[test]
    fn saved_tensors_are_those_stated() {
        let [b, t, h, k, g] = [2, 6, 2, 3, 5];
        let tape = Tape::new();
        let x = inputs(DType::F32, [b, t, h, k, g]).map(|t| tape.leaf(t));
        let v = tape.leaf(normal(DType::F32, 4, &[b, t, h * g]));
        gate_aggregate(&x[0], &x[1], &x[2], &x[3]);
        gate_aggregate_mul(&x[0], &x[1], &x[2], &x[3], &v);
        let (qk, gate, rows) = (4 * b * t * h * k, 4 * b * t * h * g, 4 * b * h * t);
        let plain = vec![("q", qk), ("k", qk), ("g", gate), ("tau", 4 * h), ("gate", gate), ("lse", rows)];
        let mut multiplied = plain.clone();
        multiplied.insert(4, ("v", gate));
        let summary = tape.summary().0;
        assert_eq!((&summary[5].saved, &summary[6].saved), (&plain, &multiplied));
    }

    #[test]
    fn the_epilogue_equals_the_product_afterwards() {
        let (x, v) = (inputs(DType::F64, [2, 30, 2, 4, 7]), normal(DType::F64, 4, &[2, 30, 2, 7]));
        let fused = evaluate(&x, Some(&v));
        let plain = evaluate(&x, None);
        let times = |a: &Tensor, b: &Tensor| -> Vec<f64> {
            a.to_f64_vec().iter().zip(b.to_f64_vec()).map(|(a, b)| a * b).collect()
        };
        assert_eq!(fused[0].to_f64_vec(), times(&plain[0], &v));
        assert_eq!(fused[5].to_f64_vec(), times(&plain[0], &normal(DType::F64, 5, v.shape())));
        let inference = gate_aggregate_mul(
            &x[0].clone().into(),
            &x[1].clone().into(),
            &x[2].clone().into(),
            &x[3].clone().into(),
            &v.into(),
        );
        assert_eq!(inference.value().to_f64_vec(), fused[0].to_f64_vec());
    }

    #[test]
    fn case_26_a_cache_split_anywhere_equals_the_whole() {
        let x = inputs(DType::F64, [2, 9, 2, 3, 4]);
        let whole = evaluate(&x, None);
        let dout = normal(DType::F64, 5, &[2, 9, 2, 4]);
        for s in 0..=9 {
            let tape = Tape::new();
            let all: Vec<Var> = x.iter().map(|t| tape.leaf(t.clone())).collect();
            let [q1, k1, g1] = [0, 1, 2].map(|i| tape.leaf(x[i].narrow(1, 0, s)));
            let q2 = tape.leaf(x[0].narrow(1, s, 9 - s));
            let (y1, y2) = (gate_aggregate(&q1, &k1, &g1, &all[3]), gate_aggregate(&q2, &all[1], &all[2], &all[3]));
            let y = concat(&[y1.value(), y2.value()], 1);
            assert!(difference(&y.to_f64_vec(), &whole[0].to_f64_vec(), 1e-13).is_none(), "s={s}");
            let grads = tape.backward_from(&[(&y1, dout.narrow(1, 0, s)), (&y2, dout.narrow(1, s, 9 - s))]);
            let of = |v: &Var| grads.get(v).unwrap().clone();
            let plus = |i: usize, part: &Var| {
                let mut sum = of(&all[i]);
                sum.add_assign(&concat(&[&of(part), &Tensor::zeros(DType::F64, x[i].narrow(1, s, 9 - s).shape())], 1));
                sum
            };
            let got = [concat(&[&of(&q1), &of(&q2)], 1), plus(1, &k1), plus(2, &g1), of(&all[3])];
            for (got, expected) in got.iter().zip(&whole[1..]) {
                let problem = difference(&got.to_f64_vec(), &expected.to_f64_vec(), 1e-12);
                assert!(problem.is_none(), "s={s}: {problem:?}");
            }
        }
    }

    #[test]
    fn later_tokens_change_nothing_before_them() {
        let x = inputs(DType::F32, [1, 200, 2, 4, 5]);
        let y = evaluate(&x, None);
        for t in [1, 95, 96, 97, 199] {
            let mut moved = x.clone();
            for x in &mut moved[..3] {
                let noise = normal(DType::F32, 77, &[1, 1, 2, x.dim(3)]);
                *x = concat(&[&x.narrow(1, 0, t), &noise, &x.narrow(1, t + 1, 199 - t)], 1);
            }
            let z = evaluate(&moved, None);
            assert_eq!(y[0].narrow(1, 0, t).to_f64_vec(), z[0].narrow(1, 0, t).to_f64_vec(), "token {t}");
            assert_ne!(y[0].select(1, t).to_f64_vec(), z[0].select(1, t).to_f64_vec());
        }
    }

    #[test]
    fn threads_change_no_bit() {
        for [b, t, h] in [[2, 150, 3], [1, 900, 1]] {
            let (x, v) = (inputs(DType::F32, [b, t, h, 8, 12]), normal(DType::F32, 4, &[b, t, h * 12]));
            let run = |threads| {
                with_threads(threads, || evaluate(&x, Some(&v)).iter().map(Tensor::to_f64_vec).collect::<Vec<_>>())
            };
            let one = run(1);
            assert!(one == run(2) && one == run(8));
        }
    }

    #[test]
    fn extreme_inputs_stay_finite() {
        let mut x = inputs(DType::F32, [1, 110, 1, 4, 3]);
        x[0].scale(1e4);
        x[1].scale(1e-9); // below the root of eps
        x[3] = Tensor::full(DType::F32, &[1], 1e3);
        assert!(evaluate(&x, None).iter().all(Tensor::all_finite));
        x[0] = Tensor::zeros(DType::F32, &[1, 110, 1, 4]);
        assert!(evaluate(&x, None).iter().all(Tensor::all_finite));
    }

    #[test]
    fn empty_axes_give_empty_results_and_zero_gradients() {
        for dims in [[0, 2, 1, 2, 2], [2, 0, 1, 2, 2], [1, 2, 1, 2, 0], [1, 2, 0, 2, 2]] {
            let x = inputs(DType::F64, dims);
            let v = normal(DType::F64, 4, &[dims[0], dims[1], dims[2] * dims[4]]);
            let all = evaluate(&x, Some(&v));
            assert_eq!(all[0].shape(), v.shape());
            assert!(all.iter().all(|x| x.to_f64_vec().iter().all(|&x| x == 0.0)));
        }
    }

    #[test]
    fn only_wanted_gradients_are_given() {
        let (x, v) = (inputs(DType::F64, [1, 5, 2, 3, 4]), normal(DType::F64, 4, &[1, 5, 8]));
        let all = evaluate(&x, Some(&v));
        let values: Vec<Tensor> = x.into_iter().chain([v]).collect();
        for wanted in 0..5 {
            let tape = Tape::new();
            let x: Vec<Var> = (0..5)
                .map(|i| if i == wanted { tape.leaf(values[i].clone()) } else { values[i].clone().into() })
                .collect();
            let y = gate_aggregate_mul(&x[0], &x[1], &x[2], &x[3], &x[4]);
            let grads = tape.backward_from(&[(&y, normal(DType::F64, 5, y.shape()))]);
            assert_eq!(grads.get(&x[wanted]).unwrap().to_f64_vec(), all[1 + wanted].to_f64_vec());
        }
    }

    #[test]
    #[should_panic(expected = "gate_aggregate: tau must be [H=2] of f32, got [3] of f32 (q: [1, 2, 2, 3])")]
    fn shapes_are_named() {
        let x = || Var::constant(Tensor::zeros(DType::F32, &[1, 2, 2, 3]));
        gate_aggregate(&x(), &x(), &x(), &Var::constant(Tensor::ones(DType::F32, &[3])));
    }
}
