//! `gate_aggregate`, `gate_aggregate_mul`: TANGO's cross-token gate, a causal softmax average of gates.
//!
//! Per batch entry and head, with `x̂ = x / sqrt(Σ x² + 1e-12)`, over the keys `j` that query `i` may see:
//!
//!     s_ij = tau q̂_i·k̂_j     ḡ_i = Σ_j exp(s_ij - tau) g_j / Σ_j exp(s_ij - tau)     y_i = ḡ_i ⊙ v_i
//!
//! `s_ij <= tau`, so the shift is known beforehand: one pass, and no maximum is searched. As `s` may be `-tau`, the
//! weights can underflow together once `exp(-2 tau)` does; heads beyond [`Width::FIXED_SHIFT`] search the maximum.
//!
//! Backward, with `q̃ = tau q̂` and the row sums kept as `lse_i = log Σ_j exp(s_ij)`: that of attention from `q̃` to `k̂`,
//! for `dḡ = dout ⊙ v`, and `dv = dout ⊙ ḡ`. Then `dtau = Σ_i dq̃_i·q̂_i` and, with `r = 1 / sqrt(Σ x² + 1e-12)` and
//! `dx̂` = `tau dq̃` or `dk̂`: `dx = r (dx̂ - x̂ (x̂·dx̂))`.
//!
//! Saved: `q`, `k`, `g`, `tau`, the output `gate` ḡ (for `dv` and for `delta = dḡ·ḡ`) and `lse` `[B, H, T_q]`; in
//! `gate_aggregate_mul` also `v`, but not the product. Normalised `q`, `k` are computed again. No `T×T` array exists.
//! Cost: `2 (K+G)` operations per visible pair forward, `6K + 4G` backward. A rotation of `q` and `k` keeps their
//! norms, so RoPE may as well be applied before.
//! Source: TANGO, "cross-token gated residual" (2026).

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::{DType, Tensor, threads};

use crate::attention_tiles::{self, Attended, Number, Problem, Rows, Upstream};
use crate::cast::widened;
use crate::causal_attention::check_shapes;
use crate::registry::{BenchCase, OpCase};
use crate::simd::{Binary, Kernel, Lanes, Real, map_binary};

/// Added to the sum of squares under the root.
const EPS: f64 = 1e-12;

/// `q` `[B, T_q, H, K]`, `k` `[B, T_k, H, K]`, `g` `[B, T_k, H, G]`, `tau` `[H]` above 0, to `[B, T_q, H, G]`. With
/// `T_q < T_k` queries are the last ones: query `i` sees keys up to `i + T_k - T_q`, as when decoding with a cache.
///
/// # Panics
/// When shapes or dtypes do not fit, or `T_q > T_k`.
#[track_caller]
pub fn gate_aggregate(q: &Var, k: &Var, g: &Var, tau: &Var) -> Var {
    check("gate_aggregate", q, k, g, tau);
    widened(&[q, k, g, tau], |x| run("gate_aggregate", &x[0], &x[1], &x[2], &x[3], None))
}

/// [`gate_aggregate`] times `v`, elementwise, in the same pass. `v` is `[B, T_q, H, G]` or `[B, T_q, H·G]`, and the
/// result has its shape.
///
/// # Panics
/// When shapes or dtypes do not fit, or `T_q > T_k`.
#[track_caller]
pub fn gate_aggregate_mul(q: &Var, k: &Var, g: &Var, tau: &Var, v: &Var) -> Var {
    let [batch, queries, _, heads, _, values] = check("gate_aggregate_mul", q, k, g, tau);
    assert!(
        (v.shape() == [batch, queries, heads, values] || v.shape() == [batch, queries, heads * values])
            && v.dtype() == q.dtype(),
        "gate_aggregate_mul: v must be [B={batch}, T_q={queries}, H={heads}, G={values}] or with both in one axis, of {}, \
         got {:?} of {}",
        q.dtype(),
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
    let Attended { out, gated, lse } = match q.dtype() {
        DType::F64 => forward::<f64>(&operands, tau.value(), factor.as_ref(), keep),
        _ => forward::<f32>(&operands, tau.value(), factor.as_ref(), keep),
    };
    let y = match v {
        Some(v) => gated.expect("asked for").reshape(v.shape()),
        None => out.clone().expect("asked for"),
    };
    Var::from_op(y, &inputs, || {
        let [q, k, g] = operands;
        let out = out.expect("kept when gradients are required");
        GateAggregateBackward { name, q, k, g, tau: tau.value().contiguous(), v: factor, gate: out, lse }
    })
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
fn with_problem<E: Width, R>([q, k, g]: &[Tensor; 3], tau: &[E], f: impl FnOnce(&Problem<E>) -> R) -> R {
    let (scaled_q, unit_k) = (unit_rows(q, Some(tau)), unit_rows::<E>(k, None));
    let bound = |&tau: &E| (0.0..=E::FIXED_SHIFT).contains(&Real::to_f64(tau)).then_some(tau);
    f(&Problem {
        batch: q.dim(0),
        heads: q.dim(2),
        queries: q.dim(1),
        keys: k.dim(1),
        q: Rows::new(&scaled_q),
        k: Rows::new(&unit_k),
        v: Rows::new(g),
        scale: E::ONE,
        causal: true,
        key_mask: None,
        bounds: &tau.iter().map(bound).collect::<Vec<_>>(),
    })
}

fn forward<E: Width>(operands: &[Tensor; 3], tau: &Tensor, factor: Option<&Tensor>, keep: bool) -> Attended {
    let factor = factor.map(Rows::new);
    with_problem(operands, &tau.to_vec::<E>(), |p| attention_tiles::forward(p, factor.as_ref(), keep))
}

struct GateAggregateBackward {
    name: &'static str,
    q: Tensor,
    k: Tensor,
    g: Tensor,
    tau: Tensor,
    v: Option<Tensor>,
    gate: Tensor,
    lse: Tensor,
}

impl Backward for GateAggregateBackward {
    fn name(&self) -> &'static str {
        self.name
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        let mut saved = vec![("q", &self.q), ("k", &self.k), ("g", &self.g), ("tau", &self.tau)];
        saved.extend(self.v.as_ref().map(|v| ("v", v)));
        saved.extend([("gate", &self.gate), ("lse", &self.lse)]);
        saved
    }
    fn backward(self: Box<Self>, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        match dout.dtype() {
            DType::F64 => gradients::<f64>(*self, &dout, needs),
            _ => gradients::<f32>(*self, &dout, needs),
        }
    }
}

fn gradients<E: Width>(saved: GateAggregateBackward, dout: &Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
    let GateAggregateBackward { q, k, g, tau, v, gate, lse, .. } = saved;
    let flat = dout.shape();
    let dout_heads = Rows::<E>::prepare(&dout.reshape(gate.shape()));
    let dv = (v.is_some() && needs[4]).then(|| product::<E>(&dout_heads, &gate).reshape(flat));
    let operands = [q, k, g];
    let tau = tau.to_vec::<E>();
    let up = Upstream {
        dout: Rows::new(&dout_heads),
        gate: v.as_ref().map(Rows::new),
        out: Rows::new(&gate),
        lse: lse.as_slice::<E>(),
    };
    let wanted = [needs[0] || needs[3], needs[1], needs[2]];
    let [dq, dk, dg] = if wanted.contains(&true) {
        with_problem(&operands, &tau, |p| attention_tiles::backward(p, &up, wanted))
    } else {
        [None, None, None]
    };
    let (dq, dtau) = dq.map(|dq| unit_rows_backward(&operands[0], dq, Some(&tau))).unzip();
    let dk = dk.map(|dk| unit_rows_backward::<E>(&operands[1], dk, None).0);
    let mut grads = vec![dq, dk, dg, dtau];
    grads.extend(v.is_some().then_some(dv));
    grads
}

/// `a ⊙ b`, contiguous.
fn product<E: Number>(a: &Tensor, b: &Tensor) -> Tensor {
    struct Product;
    impl<E: Real> Binary<E> for Product {
        #[inline(always)]
        fn apply<L: Lanes<Elem = E>>(&self, x: L, y: L) -> L {
            x * y
        }
    }
    const CHUNK: usize = 16 * 1024;
    let (a, b) = (a.contiguous(), b.contiguous());
    let (x, y) = (a.as_slice::<E>(), b.as_slice::<E>());
    let mut out = Tensor::empty(E::DTYPE, a.shape());
    threads::parallel_chunks_mut(out.as_mut_slice::<E>(), CHUNK, CHUNK, |i, piece| {
        let range = i * CHUNK..i * CHUNK + piece.len();
        map_binary(&Product, &x[range.clone()], &y[range], piece);
    });
    out
}

/// Positions (of all heads) that one task normalises.
const POSITIONS: usize = 64;

/// `factor_h x̂` for every row of `x` `[B, T, H, K]`, contiguous; without factors `x̂`.
fn unit_rows<E: Number>(x: &Tensor, factors: Option<&[E]>) -> Tensor {
    let mut out = Tensor::empty(E::DTYPE, x.shape());
    if !x.is_empty() {
        let (rows, piece) = (Rows::new(x), POSITIONS * x.dim(2) * x.dim(3));
        let shape = [x.dim(1), x.dim(2), x.dim(3)];
        threads::parallel_chunks_mut(out.as_mut_slice::<E>(), piece, 4 * piece, |i, out| {
            E::dispatch(UnitRows { first: i * POSITIONS, shape, x: rows, factors, out });
        });
    }
    out
}

/// The gradient of `x` from that of [`unit_rows`], in whose place it is written, and that of the factors `[H]`.
fn unit_rows_backward<E: Number>(x: &Tensor, mut grad: Tensor, factors: Option<&[E]>) -> (Tensor, Tensor) {
    let heads = x.dim(2);
    let mut total = vec![0f64; heads];
    if !x.is_empty() {
        let (rows, piece) = (Rows::new(x), POSITIONS * heads * x.dim(3));
        let shape = [x.dim(1), heads, x.dim(3)];
        let mut sums = vec![0f64; heads * (x.dim(0) * x.dim(1)).div_ceil(POSITIONS)];
        let grads = (grad.make_mut::<E>(), piece);
        threads::parallel_chunks2_mut(grads, (&mut sums, heads), 8 * piece, |i, grad, sums| {
            E::dispatch(UnitRowsBackward { first: i * POSITIONS, shape, x: rows, factors, grad, sums });
        });
        for part in sums.chunks_exact(heads) {
            total.iter_mut().zip(part).for_each(|(t, &x)| *t += x);
        }
    }
    (grad, Tensor::from_slice(&total, &[heads]).cast(E::DTYPE))
}

/// Positions from `first` on, counted through the batch; `shape` is T, H, K.
struct UnitRows<'a, E> {
    first: usize,
    shape: [usize; 3],
    x: Rows<'a, E>,
    factors: Option<&'a [E]>,
    out: &'a mut [E],
}

impl<E: Number> Kernel<E> for UnitRows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let [time, heads, width] = self.shape;
        for (i, out) in self.out.chunks_exact_mut(width).enumerate() {
            let (position, head) = (self.first + i / heads, i % heads);
            let x = self.x.row(position / time, position % time, head);
            let factor = self.factors.map_or(E::ONE, |f| f[head]) * inverse_norm::<E, L>(x);
            for (x, out) in x.chunks(L::N).zip(out.chunks_mut(L::N)) {
                (L::load_partial(x, E::ZERO) * L::splat(factor)).store_partial(out);
            }
        }
    }
}

struct UnitRowsBackward<'a, E> {
    first: usize,
    shape: [usize; 3],
    x: Rows<'a, E>,
    factors: Option<&'a [E]>,
    grad: &'a mut [E],
    /// Per head, the sum of `x̂ · grad`.
    sums: &'a mut [f64],
}

impl<E: Number> Kernel<E> for UnitRowsBackward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let [time, heads, width] = self.shape;
        self.sums.fill(0.0);
        for (i, grad) in self.grad.chunks_exact_mut(width).enumerate() {
            let (position, head) = (self.first + i / heads, i % heads);
            let x = self.x.row(position / time, position % time, head);
            let r = inverse_norm::<E, L>(x);
            let along = r * row_dot::<E, L>(x, grad);
            self.sums[head] += Real::to_f64(along);
            let factor = L::splat(self.factors.map_or(E::ONE, |f| f[head]) * r);
            let back = L::splat(-(along * r));
            for (x, grad) in x.chunks(L::N).zip(grad.chunks_mut(L::N)) {
                let x = L::load_partial(x, E::ZERO);
                (factor * x.mul_add(back, L::load_partial(grad, E::ZERO))).store_partial(grad);
            }
        }
    }
}

#[inline(always)]
fn inverse_norm<E: Number, L: Lanes<Elem = E>>(x: &[E]) -> E {
    E::ONE / (row_dot::<E, L>(x, x) + <E as Real>::from_f64(EPS)).sqrt()
}

#[inline(always)]
fn row_dot<E: Number, L: Lanes<Elem = E>>(x: &[E], y: &[E]) -> E {
    let mut sum = L::splat(E::ZERO);
    for (x, y) in x.chunks(L::N).zip(y.chunks(L::N)) {
        sum = L::load_partial(x, E::ZERO).mul_add(L::load_partial(y, E::ZERO), sum);
    }
    sum.reduce_sum()
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
        .map_input(3, f64::exp)
    };
    vec![
        case("gate_aggregate", "T=5", [2, 5, 5, 2, 3, 4], false),
        case("gate_aggregate", "one more than a tile", [1, 97, 97, 1, 2, 1], false),
        case("gate_aggregate", "last 2 of 5", [1, 2, 5, 2, 4, 3], false),
        case("gate_aggregate", "tau 400 times as large", [1, 4, 4, 2, 3, 2], false).map_input(3, |tau| 400.0 * tau),
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
mod tests;
