//! [`Attention`]: causal multi-head softmax attention with rotary positions.

use kumiki_autograd::{Tape, Var};
use kumiki_ops::{self as ops, AttentionOptions};
use kumiki_tensor::Tensor;

use crate::init::Init;
use crate::kv_cache::KvCache;
use crate::layers::Linear;
use crate::module;

/// `wo(attention(rope(wq x), rope(wk x), wv x))`, with `heads` heads of `d_model / heads`.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Queries, `[D, D]`.
    pub wq: Linear,
    /// Keys, `[D, D]`.
    pub wk: Linear,
    /// Values, `[D, D]`.
    pub wv: Linear,
    /// Output, `[D, D]`.
    pub wo: Linear,
    /// The number of heads.
    pub heads: usize,
    /// Base of the rotary angles.
    pub rope_base: f64,
}
module!(Attention { wq, wk, wv, wo });

/// `[B, T, H·K]` as `[B, T, H, K]`.
#[track_caller]
pub(crate) fn split_heads(x: &Var, heads: usize) -> Var {
    ops::reshape(x, &[x.dim(0), x.dim(1), heads, x.dim(2) / heads])
}

/// `[B, T, H, K]` as `[B, T, H·K]`.
#[track_caller]
pub(crate) fn join_heads(x: &Var) -> Var {
    ops::reshape(x, &[x.dim(0), x.dim(1), x.dim(2) * x.dim(3)])
}

impl Attention {
    /// Weights of standard deviation `1/sqrt(D)`, the output's times `out_gain`.
    ///
    /// # Panics
    /// When `heads` does not divide `d_model` into even widths (rotary positions turn pairs).
    #[track_caller]
    pub fn new(d_model: usize, heads: usize, out_gain: f64, rope_base: f64, init: &Init) -> Attention {
        assert!(
            heads > 0 && d_model.is_multiple_of(2 * heads),
            "attention: {heads} heads do not divide d_model={d_model} into even widths"
        );
        let square = |name: &str, gain| Linear::new(d_model, d_model, gain, &init.of(name));
        Attention {
            wq: square("wq", 1.0),
            wk: square("wk", 1.0),
            wv: square("wv", 1.0),
            wo: square("wo", out_gain),
            heads,
            rope_base,
        }
    }

    /// `[B, T, D]` to `[B, T, D]`. With a cache (decoding) the tokens continue those in it, and no gradient is recorded
    /// for the cached ones.
    #[track_caller]
    pub fn forward(&self, tape: &Tape, x: &Var, cache: Option<&mut KvCache>) -> Var {
        let start = cache.as_ref().map_or(0, |c| c.len());
        let q = self.queries(tape, x, start);
        let (mut k, mut v) = self.keys_and_values(tape, x, start);
        if let Some(cache) = cache {
            let (keys, values) = cache.append(k.value(), v.value());
            (k, v) = (Var::constant(keys), Var::constant(values));
        }
        self.output(tape, &ops::causal_attention(&q, &k, &v))
    }

    /// `[B, T, D]` to `[B, T, D]`, every token seeing all others whose `key_mask` `[B, T]` is 1 (all, without one).
    #[track_caller]
    pub fn forward_full(&self, tape: &Tape, x: &Var, key_mask: Option<&Tensor>) -> Var {
        let q = self.queries(tape, x, 0);
        let (k, v) = self.keys_and_values(tape, x, 0);
        let options = AttentionOptions { key_mask: key_mask.cloned(), ..AttentionOptions::default() };
        self.output(tape, &ops::attention(&q, &k, &v, &options))
    }

    /// Rotated queries of tokens from position `start` on, `[B, T, H, K]`.
    #[track_caller]
    pub fn queries(&self, tape: &Tape, x: &Var, start: usize) -> Var {
        ops::rope(&split_heads(&self.wq.forward(tape, x), self.heads), self.rope_base, start)
    }

    /// Rotated keys of tokens from position `start` on, and their values, `[B, T, H, K]`.
    #[track_caller]
    pub fn keys_and_values(&self, tape: &Tape, x: &Var, start: usize) -> (Var, Var) {
        let k = ops::rope(&split_heads(&self.wk.forward(tape, x), self.heads), self.rope_base, start);
        (k, split_heads(&self.wv.forward(tape, x), self.heads))
    }

    /// What attended values `[B, T, H, K]` become, `[B, T, D]`.
    #[track_caller]
    pub fn output(&self, tape: &Tape, attended: &Var) -> Var {
        self.wo.forward(tape, &join_heads(attended))
    }
}
