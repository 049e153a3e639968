//! `cem_attention_energy`, `cem_mlp_energy`: the energies that `cem_attention` and `cem_mlp` descend on, as differentiable
//! values composed from other operators.
//!
//! For reading, and to prove directions by: a direction is minus the gradient of its energy in `x`. The attention's holds
//! all scores `[B, H, T_q, T_k]`; whoever only wants the numbers gets them from a step for nothing ([`CemStep::energy`]).
//! Source: Causal Energy Minimization, arXiv 2605.07588.
//!
//! [`CemStep::energy`]: crate::CemStep::energy

use kumiki_autograd::Var;
use kumiki_tensor::Tensor;

use crate::cem_attention::CemDiagonal;
use crate::registry::OpCase;
use crate::{
    add, linear, logsumexp, matmul, mul, mul_scalar, neg, permute, reshape, rope, silu_integral, sum, transpose,
};

/// `-(1/β) Σ_h log Σ_j exp(s_ij)` of every token, `[B, T_q]`; operands as those of [`crate::cem_attention`].
///
/// # Panics
/// When shapes or dtypes do not fit.
#[track_caller]
pub fn cem_attention_energy(x: &Var, wq: &Var, k: &Var, diagonal: Option<CemDiagonal>, rope_base: f64) -> Var {
    let [batch, queries, d_model] = [x.dim(0), x.dim(1), x.dim(2)];
    let (heads, width, keys) = (wq.dim(0), wq.dim(1), k.dim(1));
    let q = linear(x, &reshape(wq, &[heads * width, d_model]));
    let q = rope(&reshape(&q, &[batch, queries, heads, width]), rope_base, keys - queries);
    let mut scores = matmul(&transpose(&q, 1, 2), &permute(k, &[0, 2, 3, 1])); // [B, H, T_q, T_k]
    if let Some(CemDiagonal { d, history }) = diagonal {
        let groups = d.value().len() / d_model;
        let scaled = mul(&reshape(x, &[batch, 1, queries, d_model]), &reshape(d, &[1, groups, 1, d_model]));
        let direct = matmul(&scaled, &reshape(&transpose(history, 1, 2), &[batch, 1, d_model, keys]));
        scores = add(&scores, &direct);
    }
    let beta = (width as f64).powf(-0.5);
    let hidden = |i: usize| if i % keys > i / keys + keys - queries { f64::NEG_INFINITY } else { 0.0 };
    let mask = Tensor::from_fn::<f64>(&[queries, keys], hidden).cast(x.dtype());
    let mask = mask.to(&x.value().device()).unwrap_or_else(|error| panic!("{error}"));
    let lse = logsumexp(&add(&mul_scalar(&scores, beta), &Var::constant(mask)), 3, false); // [B, H, T_q]
    mul_scalar(&sum(&lse, &[1], false), -1.0 / beta)
}

/// `-Σ_f gate_f Φ((W x)_f)` of every row of `x`, `[..]`, with Φ the integral of SiLU; operands as those of
/// [`crate::cem_mlp`].
///
/// # Panics
/// When shapes or dtypes do not fit.
#[track_caller]
pub fn cem_mlp_energy(x: &Var, gate: &Var, w_up: &Var) -> Var {
    neg(&sum(&mul(gate, &silu_integral(&linear(x, w_up))), &[gate.rank() - 1], false))
}

pub(crate) fn cases() -> Vec<OpCase> {
    let shapes: [(&str, &[usize]); 5] =
        [("x", &[2, 3, 6]), ("wq", &[2, 4, 6]), ("k", &[2, 3, 2, 4]), ("history", &[2, 3, 6]), ("d", &[6])];
    vec![
        OpCase::new("cem_attention_energy", "shared diagonal", &shapes, |_, v| {
            cem_attention_energy(&v[0], &v[1], &v[2], Some(CemDiagonal { d: &v[4], history: &v[3] }), 1e4)
        }),
        OpCase::new("cem_mlp_energy", "", &[("x", &[2, 3, 4]), ("gate", &[2, 3, 7]), ("w_up", &[7, 4])], |_, v| {
            cem_mlp_energy(&v[0], &v[1], &v[2])
        }),
    ]
}
