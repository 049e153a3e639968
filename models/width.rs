//! μP: which learning rates and outputs are scaled with the width D, so that what suits a narrow model suits a wide one.
//!
//! With `m = D / D₀` of a base width `D₀`, for AdamW; no starting value differs from those without μP:
//!
//! ```text
//!                                        starting values   rate      output
//! token table (and head, which is tied)  unchanged         · 1       logits · 1/m
//! matrices that sum over a width         1/sqrt(fan_in)    · 1/m
//! norms, biases, scales, step sizes      unchanged         · 1
//! ```
//!
//! Adam moves every element by about the rate, whatever the gradient. Such changes of a row agree with its inputs, so that a sum
//! over D of them grows as D: hence `1/m`. A table is only looked up, its change does not grow; as the head it does, and there
//! the logits are divided. Widths that grow with D, as F and E do when they are solved for a size, count as D. Softmax keeps its
//! `1/sqrt(K)`: heads become more with D, not wider; where K grows, scores would need `1/K`.
//! Source: Yang et al., Tensor Programs V, arXiv 2203.03466, table 8.

use kumiki_autograd::{Param, Var};
use kumiki_ops as ops;

/// Parameters of two axes that are no matrices over a width: the table, scales of every element, and CEM's `u`, which reads
/// from r numbers.
const OTHERS: [&str; 5] = ["embedding", "gamma", "beta", "diag", "pre_u"];

/// Whether the parameter is a matrix whose rate falls with the width; `name` is its path.
pub fn is_hidden_matrix(name: &str, param: &Param) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    param.value().rank() >= 2 && !OTHERS.contains(&last)
}

/// What a norm gives, times a scale; of 1 nothing is done.
pub(crate) fn scaled(x: Var, scale: f64) -> Var {
    if scale == 1.0 { x } else { ops::mul_scalar(&x, scale) }
}
