//! Transformer++: pre-RMSNorm, rotary causal attention, SwiGLU. Tied over its applications it is the Recurrent
//! Transformer++ that TANGO is compared with; untied it is also the Llama baseline.
//!
//! ```text
//! h ← h + attention(n1(h));   h ← h + w_down( SiLU(w_gate n2(h)) ⊙ w_up n2(h) )
//! ```
//!
//! Saved per application and token, in numbers: both inputs and their norms `4D + 2`, rotated q and k, v and the attended
//! values `4D`, a log-sum-exp per head `H`, both halves of SwiGLU and their product `3F`.
//! Source: Vaswani et al., Attention Is All You Need, arXiv 1706.03762; norm, rotation and gate as their operators say.

use kumiki_autograd::{Tape, Var};
use kumiki_nn::{Attention, Init, RmsNorm, SwiGlu, module};
use kumiki_ops as ops;
use serde::{Deserialize, Serialize};

use crate::block_cache::BlockCache;

/// The sizes of a Transformer++ stack.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransformerConfig {
    /// Model width D.
    pub d_model: usize,
    /// Heads H, each of width D/H.
    pub heads: usize,
    /// Feed-forward width F.
    pub d_ff: usize,
    /// Block applications L.
    pub applications: usize,
    /// Whether all applications share one set of parameters.
    pub tied: bool,
    /// Base of the rotary angles.
    pub rope_base: f64,
}

impl TransformerConfig {
    /// What is wrong with the sizes, if anything.
    ///
    /// # Errors
    /// A sentence naming the field, what was expected and what was found.
    pub fn check(&self) -> Result<(), String> {
        let sizes = [
            ("d_model", self.d_model),
            ("heads", self.heads),
            ("d_ff", self.d_ff),
            ("applications", self.applications),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, v)| *v == 0) {
            return Err(format!("transformer: {name} must be positive, found 0"));
        }
        if !self.d_model.is_multiple_of(self.heads.saturating_mul(2)) {
            return Err(format!(
                "transformer: heads must divide d_model={} into even widths, found {} heads",
                self.d_model, self.heads
            ));
        }
        if !(self.rope_base.is_finite() && self.rope_base > 0.0) {
            return Err(format!("transformer: rope_base must be a positive number, found {}", self.rope_base));
        }
        Ok(())
    }
}

/// One set of a block's parameters.
#[derive(Clone, Debug)]
pub struct TransformerBlock {
    /// Before attention, `[D]`.
    pub norm1: RmsNorm,
    /// `wq, wk, wv, wo`, each `[D, D]`.
    pub attention: Attention,
    /// Before the feed-forward layer, `[D]`.
    pub norm2: RmsNorm,
    /// `w_gate, w_up [F, D]`, `w_down [D, F]`.
    pub mlp: SwiGlu,
}
module!(TransformerBlock { norm1, ..attention, norm2, ..mlp });

impl TransformerBlock {
    /// Fresh parameters: `1/sqrt(fan_in)`, those of `wo` and `w_down` over `sqrt(2L)`.
    pub fn new(config: &TransformerConfig, init: &Init) -> TransformerBlock {
        let out_gain = 1.0 / (2.0 * config.applications as f64).sqrt();
        TransformerBlock {
            norm1: RmsNorm::new(config.d_model, &init.of("norm1")),
            attention: Attention::new(config.d_model, config.heads, out_gain, config.rope_base, init),
            norm2: RmsNorm::new(config.d_model, &init.of("norm2")),
            mlp: SwiGlu::new(config.d_model, config.d_ff, out_gain, init),
        }
    }

    /// `h [B, T, D]` to the same. With a cache the tokens continue those in it.
    #[track_caller]
    pub fn forward(&self, tape: &Tape, h: &Var, cache: Option<&mut BlockCache>) -> Var {
        let h = ops::add(h, &self.attention.forward(tape, &self.norm1.forward(tape, h), cache.map(BlockCache::kv)));
        ops::add(&h, &self.mlp.forward(tape, &self.norm2.forward(tape, &h)))
    }
}
