//! `windowed_prefix`, `windowed_prefix_mul`: WANGO's cross-token gate, exact near by and a linear kernel far away.
//!
//! Per batch entry and head, with `x̂ = x / sqrt(Σ x² + 1e-12)` and features `φ` that the caller gives (`feature_map`):
//!
//! ```text
//! w_ij = exp(tau (q̂_i·k̂_j - 1))    near: i-W < j <= i          ḡ_i = Σ_j w_ij g_j / den_i,   den_i = Σ_j w_ij
//! w_ij = φ(q)_i · φ(k)_j            far:  j <= i-W              y_i = ḡ_i ⊙ v_i
//! ```
//!
//! **One pass from the left.** Queries go by in tiles of [`CHUNK`]. Keys that are far for all of a tile are not visited:
//! they are in the running sums `S = Σ_j φ(k)_j ⊗ g_j`, `[M, G]`, and `Σ_j φ(k)_j`, for the denominator. The other keys, fewer than `W + 2 CHUNK`, meet the tile pair by pair, and each pair takes the near or the far
//! weight by its distance. Cost: `O(T (W + CHUNK + M) (K + M + G))`; memory beside operands and result: tiles and `S`.
//!
//! **Backward.** With `d_i = dḡ_i / den_i`, `dḡ = dout ⊙ v`, the slope of a weight is `dw_ij = d_i·(g_j - ḡ_i)`:
//!
//! ```text
//! near: ds_ij = w_ij dw_ij;  dq̂_i = tau Σ_j ds_ij k̂_j,  dk̂_j = tau Σ_i ds_ij q̂_i,  dtau = Σ_ij ds_ij (q̂_i·k̂_j - 1)
//! far:  dφ(q)_i = Σ_j dw_ij φ(k)_j = S d_i - d_i·ḡ_i Σ_j φ(k)_j
//!       dφ(k)_j = Σ_i dw_ij φ(q)_i = R g_j - Σ_i d_i·ḡ_i φ(q)_i
//! both: dg_j = Σ_i w_ij d_i (far: Rᵀ φ(k)_j),           dv = dout ⊙ ḡ
//! ```
//!
//! `S` is summed again from the left, `R = Σ_i φ(q)_i ⊗ d_i` from the right; neither is stored per token or per chunk.
//!
//! Saved: the operands (whose products come again), the output `gate` ḡ (for `dv` and `dḡ·ḡ`) and `den` `[B, H, T]`; in
//! `windowed_prefix_mul` also `v`, but not the product, nor need a `linear` after it ([`Recipe`](kumiki_autograd::Recipe)).
//! Normalised `q`, `k` are computed again. In f32 heads with `tau` above 30 would lose small weights: such calls are
//! computed in f64. A query all of whose weights underflow gives 0.
//! Source: WANGO, "cross-token gated residual" (2026).

mod backward;
mod cuda;
mod forward;
mod packed;
mod stream;
mod weights;

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::{DType, Tensor};

use crate::attention_tiles::{Arrived, Number, Rows, Values, arrive, with_kept_factors};
use crate::cast::{cast, is_stored_for, widened};
use crate::registry::{BenchCase, OpCase};
use crate::simd::Real;
use crate::unit_rows::{unit_rows, unit_rows_backward};

pub use stream::WindowedPrefixState;

/// Queries of a tile, and keys between two states of the running sums.
const CHUNK: usize = 64;
/// The largest `tau` that f32 serves: `exp(-2 tau)` times a small gate is a normal number.
const F32_TAU: f64 = 30.0;

pub(crate) use cuda::KERNELS as CUDA_KERNELS;

/// What [`windowed_prefix`] works on.
#[derive(Clone, Copy)]
pub struct WindowedPrefix<'a> {
    /// Queries `[B, T, H, K]`, normalised inside; rotated beforehand if near scores shall see positions.
    pub q: &'a Var,
    /// Keys `[B, T, H, K]`, likewise.
    pub k: &'a Var,
    /// Features of queries `[B, T, H, M]`.
    pub phi_q: &'a Var,
    /// Features of keys `[B, T, H, M]`. Weights should not be negative: their sum divides.
    pub phi_k: &'a Var,
    /// Gates `[B, T, H, G]`; they may be BF16 where the others are F32.
    pub g: &'a Var,
    /// Inverse temperatures `[H]`, above 0.
    pub tau: &'a Var,
    /// Keys that a query sees exactly, itself included; at least 1.
    pub window: usize,
}

/// The gate `ḡ` `[B, T, H, G]`, in the dtype of `g`.
///
/// # Panics
/// When shapes or dtypes do not fit, or the window is 0.
#[track_caller]
pub fn windowed_prefix(x: WindowedPrefix) -> Var {
    x.check("windowed_prefix");
    let inputs = [x.q, x.k, x.phi_q, x.phi_k, x.g, x.tau];
    widened(&inputs, |inputs| run("windowed_prefix", inputs, x.window))
}

/// [`windowed_prefix`] times `v`, elementwise, in the same pass. `v` is `[B, T, H, G]` or `[B, T, H·G]` in the dtype of
/// `g`, and the result has its shape.
///
/// # Panics
/// When shapes or dtypes do not fit, or the window is 0.
#[track_caller]
pub fn windowed_prefix_mul(x: WindowedPrefix, v: &Var) -> Var {
    x.check("windowed_prefix_mul");
    let [batch, time, heads, values] = [x.g.dim(0), x.g.dim(1), x.g.dim(2), x.g.dim(3)];
    assert!(
        (v.shape() == x.g.shape() || v.shape() == [batch, time, heads * values]) && v.dtype() == x.g.dtype(),
        "windowed_prefix_mul: v must be [B={batch}, T={time}, H={heads}, G={values}] or with both in one axis, of {}, \
         got {:?} of {}",
        x.g.dtype(),
        v.shape(),
        v.dtype()
    );
    let inputs = [x.q, x.k, x.phi_q, x.phi_k, x.g, x.tau, v];
    widened(&inputs, |inputs| run("windowed_prefix_mul", inputs, x.window))
}

impl WindowedPrefix<'_> {
    #[track_caller]
    fn check(&self, name: &str) {
        let shape = self.q.shape();
        assert!(shape.len() == 4, "{name}: q must be [B, T, H, K], got {shape:?}");
        let [batch, time, heads, width] = [shape[0], shape[1], shape[2], shape[3]];
        let features = self.phi_q.shape().last().copied().unwrap_or(0);
        let halved = is_stored_for(self.g.dtype(), self.q.dtype());
        let operands: [(&str, &Var, &[usize]); 4] = [
            ("k", self.k, &[batch, time, heads, width]),
            ("phi_q", self.phi_q, &[batch, time, heads, features]),
            ("phi_k", self.phi_k, &[batch, time, heads, features]),
            ("g", self.g, &[batch, time, heads, self.g.shape().last().copied().unwrap_or(0)]),
        ];
        for (operand, x, expected) in operands {
            assert!(
                x.shape() == expected && (x.dtype() == self.q.dtype() || operand == "g" && halved),
                "{name}: {operand} must be {expected:?} of {}, got {:?} of {} (q: {shape:?})",
                self.q.dtype(),
                x.shape(),
                x.dtype()
            );
        }
        assert!(
            self.tau.shape() == [heads] && self.tau.dtype().compute() == self.q.dtype().compute(),
            "{name}: tau must be [H={heads}] of {}, got {:?} of {} (q: {shape:?})",
            self.q.dtype().compute(),
            self.tau.shape(),
            self.tau.dtype()
        );
        assert!(self.window > 0, "{name}: the window must be at least 1 (a query sees itself), got 0");
    }
}

/// `inputs` are q, k, phi_q, phi_k, g, tau and perhaps v.
fn run(name: &'static str, inputs: &[Var], window: usize) -> Var {
    let steep = inputs[5].value().to_f64_vec().iter().any(|&tau| tau > F32_TAU);
    if steep && inputs[0].dtype() == DType::F32 {
        let wide: Vec<Var> = inputs.iter().map(|x| cast(x, DType::F64)).collect();
        return cast(&run(name, &wide, window), inputs[4].dtype());
    }
    let operands: [Tensor; 5] = std::array::from_fn(|i| Rows::<f32>::prepare(inputs[i].value()));
    let v = inputs.get(6).map(|v| Rows::<f32>::prepare(&v.value().reshape(inputs[4].shape())));
    let tau = inputs[5].value().contiguous();
    let keep = inputs.iter().any(Var::requires_grad);
    let narrow = inputs.iter().any(Var::is_narrow);
    let mut saved = WindowedPrefixBackward { name, operands, tau, v, window, gate: None, den: None, narrow };
    let gated = match saved.tau.dtype() {
        DType::F64 => saved.forward::<f64>(keep),
        _ => saved.forward::<f32>(keep),
    };
    let y = match inputs.get(6) {
        Some(v) => gated.expect("asked for").reshape(v.shape()),
        None => saved.gate.clone().expect("asked for"),
    };
    let factors = saved.gate.clone().filter(|_| keep).zip(saved.v.clone());
    with_kept_factors(Var::from_op(y, &inputs.iter().collect::<Vec<_>>(), || saved), factors)
}

struct WindowedPrefixBackward {
    name: &'static str,
    /// q, k, phi_q, phi_k, g.
    operands: [Tensor; 5],
    tau: Tensor,
    v: Option<Tensor>,
    window: usize,
    /// ḡ `[B, T, H, G]`, and the sums of weights `[B, H, T]`.
    gate: Option<Tensor>,
    den: Option<Tensor>,
    narrow: bool,
}

/// The operands of all heads, with `tau q̂` and `k̂`.
struct Problem<'a, E> {
    batch: usize,
    heads: usize,
    time: usize,
    window: usize,
    q: Rows<'a, E>,
    k: Rows<'a, E>,
    phi_q: Rows<'a, E>,
    phi_k: Rows<'a, E>,
    g: Values<'a, E>,
    tau: &'a [E],
    narrow: bool,
}

impl<E: Number> Problem<'_, E> {
    /// The first key that the tile of queries from `i` on meets one by one; all before it are far, and whole chunks.
    fn first_key(&self, i: usize) -> usize {
        (i + 1).saturating_sub(self.window) / CHUNK * CHUNK
    }

    /// Queries of a tile at most.
    fn tile(&self) -> usize {
        CHUNK.min(self.time)
    }
}

impl WindowedPrefixBackward {
    fn with_problem<E: Number, R>(&self, f: impl FnOnce(&Problem<E>) -> R) -> R {
        let [q, k, phi_q, phi_k, g] = &self.operands;
        let tau = self.tau.as_slice::<E>();
        let (scaled_q, unit_k) = (unit_rows::<E>(q, Some(&self.tau)), unit_rows::<E>(k, None));
        f(&Problem {
            batch: q.dim(0),
            heads: q.dim(2),
            time: q.dim(1),
            // Beyond T nothing is far; no sum below overflows, whatever a file says.
            window: self.window.min(q.dim(1).max(1)),
            q: Rows::new(&scaled_q),
            k: Rows::new(&unit_k),
            phi_q: Rows::new(phi_q),
            phi_k: Rows::new(phi_k),
            g: Values::new(g),
            tau,
            narrow: self.narrow,
        })
    }

    /// Fills in `gate` and `den` as far as they are wanted, and gives the product with `v`.
    fn forward<E: Number>(&mut self, keep: bool) -> Option<Tensor> {
        if self.tau.cuda().is_some() {
            let (gate, gated, den) = self.pairs::<E>().forward(keep);
            (self.gate, self.den) = (gate, Some(den));
            return gated;
        }
        let v = self.v.as_ref().map(Values::new);
        let (gate, gated, den) = self.with_problem::<E, _>(|p| forward::forward(p, v.as_ref(), keep));
        (self.gate, self.den) = (gate, Some(den));
        gated
    }

    fn gradients<E: Number>(mut self, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        let (gate, den) = (self.gate.take().expect("kept"), self.den.as_ref().expect("kept"));
        let (shape, by_heads) = (dout.shape().to_vec(), dout.reshape(gate.shape()));
        drop(dout); // so that it is written over
        let need_v = self.v.is_some() && needs[6];
        let Arrived { dout, dgate: dv, delta } = arrive::<E>(by_heads, self.v.as_ref(), gate, need_v);
        if self.tau.cuda().is_some() {
            let out = self.pairs::<E>().backward(dout, delta, den);
            let dq = unit_rows_backward::<E>(&self.operands[0], out.dq, Some(&self.tau)).0;
            let dk = unit_rows_backward::<E>(&self.operands[1], out.dk, None).0;
            return self.needed([dq, dk, out.dphi_q, out.dphi_k, out.dg, out.dtau], dv, &shape, needs);
        }
        let up =
            backward::Upstream { dout: Values::new(&dout), delta: delta.as_slice::<E>(), den: den.as_slice::<E>() };
        let out = self.with_problem::<E, _>(|p| backward::backward(p, &up));
        let tau = self.tau.as_slice::<E>();
        let dq = unit_rows_backward::<E>(&self.operands[0], out.dq, Some(&self.tau)).0;
        let dtau: Vec<f64> = out.near.iter().zip(tau).map(|(near, &tau)| near / Real::to_f64(tau)).collect();
        let dtau = Tensor::from_slice(&dtau, &[dtau.len()]).cast(E::DTYPE);
        let dk = unit_rows_backward::<E>(&self.operands[1], out.dk, None).0;
        self.needed([dq, dk, out.dphi_q, out.dphi_k, out.dg, dtau], dv, &shape, needs)
    }

    /// On a CUDA device.
    fn pairs<E: Number>(&self) -> cuda::Pairs<'_> {
        let [q, k, ..] = &self.operands;
        cuda::Pairs::new(self, unit_rows::<E>(q, Some(&self.tau)), unit_rows::<E>(k, None))
    }

    /// Of the inputs, in their order; that of `v` in its shape.
    fn needed(&self, grads: [Tensor; 6], dv: Option<Tensor>, shape: &[usize], needs: &[bool]) -> Vec<Option<Tensor>> {
        let dv = self.v.as_ref().map(|_| dv.map(|dv| dv.reshape(shape)));
        let grads = grads.map(Some).into_iter().chain(dv);
        grads.zip(needs).map(|(grad, &needed)| grad.filter(|_| needed)).collect()
    }
}

impl Backward for WindowedPrefixBackward {
    fn name(&self) -> &'static str {
        self.name
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        let names = ["q", "k", "phi_q", "phi_k", "g"];
        let mut saved: Vec<(&'static str, &Tensor)> = names.into_iter().zip(&self.operands).collect();
        saved.push(("tau", &self.tau));
        saved.extend(self.v.as_ref().map(|v| ("v", v)));
        saved.extend(self.gate.as_ref().map(|gate| ("gate", gate)));
        saved.extend(self.den.as_ref().map(|den| ("den", den)));
        saved
    }
    fn backward(self: Box<Self>, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        match dout.dtype() {
            DType::F64 => self.gradients::<f64>(dout, needs),
            _ => self.gradients::<f32>(dout, needs),
        }
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let case = |name: &'static str, variant, [b, t, h, k, m, g]: [usize; 6], window| {
        let shapes = shapes([b, t, h, k, m, g]);
        let used = if name == "windowed_prefix_mul" { 7 } else { 6 };
        let inputs: Vec<(&'static str, &[usize])> = shapes[..used].iter().map(|(n, s)| (*n, &s[..])).collect();
        OpCase::new(name, variant, &inputs, move |_, x| {
            let all = operands(x, window);
            x.get(6).map_or_else(|| windowed_prefix(all), |v| windowed_prefix_mul(all, v))
        })
        .map_input(0, |x| x + 0.5_f64.copysign(x)) // normalising is singular at 0
        .map_input(1, |x| x + 0.5_f64.copysign(x))
        .map_input(2, f64::exp)
        .map_input(3, f64::exp)
        .map_input(5, f64::exp)
    };
    vec![
        case("windowed_prefix", "T=7, W=3", [2, 7, 2, 3, 4, 2], 3),
        case("windowed_prefix", "three chunks, W=1", [1, 2 * CHUNK + 1, 1, 2, 2, 1], 1),
        case("windowed_prefix", "W above T", [1, 5, 2, 3, 2, 3], 9),
        case("windowed_prefix_mul", "three chunks, W=70", [1, 3 * CHUNK - 5, 1, 2, 3, 2], 70),
    ]
}

/// Names and shapes of all operands for B, T, H, K, M, G.
fn shapes([b, t, h, k, m, g]: [usize; 6]) -> Vec<(&'static str, Vec<usize>)> {
    let head = |name, width| (name, vec![b, t, h, width]);
    let tau = ("tau", vec![h]);
    vec![head("q", k), head("k", k), head("phi_q", m), head("phi_k", m), head("g", g), tau, head("v", g)]
}

fn operands(x: &[Var], window: usize) -> WindowedPrefix<'_> {
    WindowedPrefix { q: &x[0], k: &x[1], phi_q: &x[2], phi_k: &x[3], g: &x[4], tau: &x[5], window }
}

pub(crate) fn bench() -> Vec<BenchCase> {
    [(16, 256, 4, 32, 64, 239, 32), (1, 4096, 4, 32, 64, 239, 128)]
        .map(|(b, t, h, k, m, g, window)| BenchCase {
            name: "windowed_prefix_mul",
            inputs: shapes([b, t, h, k, m, g]),
            forward: Box::new(move |_, x| windowed_prefix_mul(operands(x, window), &x[6])),
            bytes: 4 * b * t * h * (2 * k + 2 * m + 3 * g),
            flops: 2 * b * h * t * (window * (k + g) + 2 * m * g),
        })
        .into()
}

#[cfg(test)]
mod tests;
