//! The layers of the double-decoder paper, and its decoder-only baseline: pre-RMSNorm, rotary attention, a GELU MLP.
//!
//! ```text
//! h ← h + attention(n1(h));   h ← h + w_out gelu(w_in n2(h))
//! ```
//!
//! Saved per application and token, in numbers: both inputs and their norms `4D + 2`, rotated q and k, v and the attended
//! values `4D`, a log-sum-exp per head `H`, the hidden layer before and after GELU `2F`.
//! Source: Block-Based Double Decoders, arXiv 2605.18807.

use kumiki_autograd::{Tape, Var};
use kumiki_nn::{Attention, GeluMlp, Init, RmsNorm, module};
use kumiki_ops as ops;
use kumiki_tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::block_cache::BlockCache;

/// The sizes of a stack of these layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GeluConfig {
    /// Model width D.
    pub d_model: usize,
    /// Heads H, each of width D/H.
    pub heads: usize,
    /// Feed-forward width F; 4D in the paper.
    pub d_ff: usize,
    /// Layers L, each with its own parameters.
    pub applications: usize,
    /// Base of the rotary angles.
    pub rope_base: f64,
}

impl GeluConfig {
    /// What is wrong with the sizes, if anything.
    ///
    /// # Errors
    /// A sentence naming the field, what was expected and what was found.
    pub fn check(&self) -> Result<(), String> {
        check_sizes("decoder", &[("d_ff", self.d_ff), ("applications", self.applications)], self)
    }
}

/// What all models of these layers need of their sizes; `more` are those that must be positive beside D and H.
pub(crate) fn check_sizes(name: &str, more: &[(&str, usize)], config: &GeluConfig) -> Result<(), String> {
    let &GeluConfig { d_model, heads, rope_base, .. } = config;
    let sizes = [("d_model", d_model), ("heads", heads)];
    if let Some((field, _)) = sizes.iter().chain(more).find(|(_, v)| *v == 0) {
        return Err(format!("{name}: {field} must be positive, found 0"));
    }
    if !d_model.is_multiple_of(heads.saturating_mul(2)) {
        return Err(format!("{name}: heads must divide d_model={d_model} into even widths, found {heads} heads"));
    }
    if !(rope_base.is_finite() && rope_base > 0.0) {
        return Err(format!("{name}: rope_base must be a positive number, found {rope_base}"));
    }
    Ok(())
}

/// One layer's parameters.
#[derive(Clone, Debug)]
pub struct GeluLayer {
    /// Before attention, `[D]`.
    pub norm1: RmsNorm,
    /// `wq, wk, wv, wo`, each `[D, D]`.
    pub attention: Attention,
    /// Before the feed-forward layer, `[D]`.
    pub norm2: RmsNorm,
    /// `w_in [F, D]`, `w_out [D, F]`.
    pub mlp: GeluMlp,
}
module!(GeluLayer { norm1, ..attention, norm2, ..mlp });

impl GeluLayer {
    /// Fresh parameters: `1/sqrt(fan_in)`, those of `wo` and `w_out` times `out_gain`.
    pub fn new(config: &GeluConfig, out_gain: f64, init: &Init) -> GeluLayer {
        let &GeluConfig { d_model, heads, d_ff, rope_base, .. } = config;
        GeluLayer {
            norm1: RmsNorm::new(d_model, &init.of("norm1")),
            attention: Attention::new(d_model, heads, out_gain, rope_base, init),
            norm2: RmsNorm::new(d_model, &init.of("norm2")),
            mlp: GeluMlp::new(d_model, d_ff, out_gain, init),
        }
    }

    /// Causal: `h [B, T, D]` to the same. With a cache the tokens continue those in it.
    #[track_caller]
    pub fn forward(&self, tape: &Tape, h: &Var, cache: Option<&mut BlockCache>) -> Var {
        let x = self.norm1.forward(tape, h);
        self.feed_forward(tape, &ops::add(h, &self.attention.forward(tape, &x, cache.map(BlockCache::kv))))
    }

    /// As [`GeluLayer::forward`] with every token seeing all whose `key_mask` `[B, T]` is 1.
    #[track_caller]
    pub fn forward_full(&self, tape: &Tape, h: &Var, key_mask: Option<&Tensor>) -> Var {
        let x = self.norm1.forward(tape, h);
        self.feed_forward(tape, &ops::add(h, &self.attention.forward_full(tape, &x, key_mask)))
    }

    /// The second half.
    #[track_caller]
    pub fn feed_forward(&self, tape: &Tape, h: &Var) -> Var {
        ops::add(h, &self.mlp.forward(tape, &self.norm2.forward(tape, h)))
    }
}
