//! The block-based double decoder: a causal context stack reads blocks that are complete, a generation stack writes the
//! one that is open, attending to it and to the context in one softmax.
//!
//! ```text
//! c = n_context( context layers (embed(tokens)) )                 causal over the whole sequence
//! h = embed(tokens);  h ← h + dual_attention(n1(h), c);  h ← h + mlp(n2(h))     own block, and c of earlier blocks
//! logits = n_out(h) · embeddingᵀ
//! ```
//!
//! Tokens are embedded once, with one table for both stacks and the head; positions are absolute in both. The keys and
//! values of context and of own block come from the same `wk`, `wv` (or, `separate_kv`, from two pairs). With
//! `context_loops` the context layers are applied so many times over.
//!
//! Writing keeps keys and values of the generation layers only: the context stack runs over what is complete, its last
//! state is projected once for every generation layer, and forgotten.
//! Source: Block-Based Double Decoders, arXiv 2605.18807.

mod decode;

use kumiki_autograd::{Tape, Var, checkpoint};
use kumiki_nn::{Dropout, Embedding, Init, Linear, Module, RmsNorm, module};
use kumiki_ops::{self as ops, BlockStarts, DualAttention, DualSees};
use kumiki_tensor::{DType, Error, Result, Tensor};
use serde::{Deserialize, Serialize};

use crate::gelu::{GeluConfig, GeluLayer, check_sizes};
use crate::language_model::IGNORE;
use crate::width::scaled;

pub use decode::DoubleCache;

/// The sizes of a double decoder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DoubleDecoderConfig {
    /// Number of token ids.
    pub n_vocab: usize,
    /// Model width D.
    pub d_model: usize,
    /// Heads H, each of width D/H.
    pub heads: usize,
    /// Feed-forward width F; 4D in the paper.
    pub d_ff: usize,
    /// Layers of the context stack.
    pub context_layers: usize,
    /// Layers of the generation stack.
    pub generation_layers: usize,
    /// How often the context layers are applied, one after the other: 1 but for a looped stack.
    pub context_loops: usize,
    /// Whether generation layers project the context with keys and values of their own.
    pub separate_kv: bool,
    /// Base of the rotary angles.
    pub rope_base: f64,
}

impl DoubleDecoderConfig {
    fn layer(&self) -> GeluConfig {
        let &DoubleDecoderConfig { d_model, heads, d_ff, rope_base, .. } = self;
        GeluConfig { d_model, heads, d_ff, applications: self.layers(), rope_base }
    }

    /// Layers with parameters of their own.
    pub fn layers(&self) -> usize {
        self.context_layers.saturating_add(self.generation_layers)
    }

    /// What is wrong with the sizes, if anything.
    ///
    /// # Errors
    /// A sentence naming the field, what was expected and what was found.
    pub fn check(&self) -> Result<()> {
        let sizes = [
            ("n_vocab", self.n_vocab),
            ("d_ff", self.d_ff),
            ("context_layers", self.context_layers),
            ("generation_layers", self.generation_layers),
            ("context_loops", self.context_loops),
        ];
        check_sizes("double decoder", &sizes, &self.layer()).map_err(Error::new)
    }
}

/// One generation layer's parameters.
#[derive(Clone, Debug)]
pub struct DualLayer {
    /// All but what follows.
    pub layer: GeluLayer,
    /// Keys and values of the context, each `[D, D]`, where they are not those of the own block.
    pub context: Option<ContextProjections>,
}
module!(DualLayer { ..layer, ..context });

/// Projections of the context alone.
#[derive(Clone, Debug)]
pub struct ContextProjections {
    /// Keys, `[D, D]`.
    pub wk_context: Linear,
    /// Values, `[D, D]`.
    pub wv_context: Linear,
}
module!(ContextProjections { wk_context, wv_context });

impl DualLayer {
    fn new(config: &DoubleDecoderConfig, out_gain: f64, init: &Init) -> DualLayer {
        let square = |name: &str| Linear::new(config.d_model, config.d_model, 1.0, &init.of(name));
        DualLayer {
            layer: GeluLayer::new(&config.layer(), out_gain, init),
            context: config
                .separate_kv
                .then(|| ContextProjections { wk_context: square("wk_context"), wv_context: square("wv_context") }),
        }
    }

    /// Rotated keys of context latents `[B, T, D]` from position `start` on, and their values, `[B, T, H, K]`.
    #[track_caller]
    pub fn context_keys_and_values(&self, tape: &Tape, context: &Var, start: usize) -> (Var, Var) {
        let attention = &self.layer.attention;
        match &self.context {
            None => attention.keys_and_values(tape, context, start),
            Some(own) => {
                let heads =
                    |x: Var| ops::reshape(&x, &[x.dim(0), x.dim(1), attention.heads, x.dim(2) / attention.heads]);
                let k = ops::rope(&heads(own.wk_context.forward(tape, context)), attention.rope_base, start);
                (k, heads(own.wv_context.forward(tape, context)))
            }
        }
    }

    /// `h [B, T, D]` with the context latents `[B, T, D]` of the same tokens, to the same.
    #[track_caller]
    pub fn forward(&self, tape: &Tape, h: &Var, context: &Var, blocks: &BlockStarts) -> Var {
        let (layer, x) = (&self.layer, self.layer.norm1.forward(tape, h));
        let q = layer.attention.queries(tape, &x, 0);
        let (k_self, v_self) = layer.attention.keys_and_values(tape, &x, 0);
        let (k_context, v_context) = self.context_keys_and_values(tape, context, 0);
        let (k_self, v_self, k_context, v_context) = (&k_self, &v_self, &k_context, &v_context);
        let operands = DualAttention { q: &q, k_self, v_self, k_context, v_context };
        let attended = ops::dual_attention(operands, DualSees::Blocks(blocks));
        layer.feed_forward(tape, &ops::add(h, &layer.attention.output(tape, &attended)))
    }
}

/// A double decoder.
#[derive(Clone, Debug)]
pub struct DoubleDecoder {
    /// What it was made from.
    pub config: DoubleDecoderConfig,
    /// Token table of both stacks and head, `[n_vocab, D]`.
    pub embedding: Embedding,
    /// The context stack.
    pub context: Vec<GeluLayer>,
    /// Of the context latents, `[D]`.
    pub norm_context: RmsNorm,
    /// The generation stack.
    pub generation: Vec<DualLayer>,
    /// Before the head, `[D]`.
    pub norm_out: RmsNorm,
    /// Whether every layer is recomputed in the backward instead of saved: less memory, more time.
    pub checkpoint_activations: bool,
    /// Of the embedded tokens and of what every layer adds, in training.
    pub dropout: Dropout,
    /// What logits are multiplied by; 1 but in models whose width is scaled, see [`crate::width`].
    pub logit_scale: f64,
}
module!(DoubleDecoder { embedding, context, norm_context, generation, norm_out });

impl DoubleDecoder {
    /// A model with fresh parameters of `dtype`, drawn from `seed`; the table has standard deviation 0.02, output projections
    /// `1/sqrt(fan_in)` over `sqrt(2L)` for all L layers together.
    ///
    /// # Errors
    /// When the sizes do not fit together.
    pub fn new(config: &DoubleDecoderConfig, seed: u64, dtype: DType) -> Result<DoubleDecoder> {
        config.check()?;
        let init = Init::new(seed, dtype);
        let out_gain = 1.0 / (2.0 * config.layers() as f64).sqrt();
        let (layer, d_model) = (config.layer(), config.d_model);
        Ok(DoubleDecoder {
            embedding: Embedding::new(config.n_vocab, d_model, 0.02, &init.of("embedding")),
            context: (0..config.context_layers)
                .map(|i| GeluLayer::new(&layer, out_gain, &init.of(format!("context.{i}"))))
                .collect(),
            norm_context: RmsNorm::new(d_model, &init.of("norm_context")),
            generation: (0..config.generation_layers)
                .map(|i| DualLayer::new(config, out_gain, &init.of(format!("generation.{i}"))))
                .collect(),
            norm_out: RmsNorm::new(d_model, &init.of("norm_out")),
            config: config.clone(),
            checkpoint_activations: false,
            dropout: Dropout::default(),
            logit_scale: 1.0,
        })
    }

    /// The distinct trainable values of the layers, without token table and last norms.
    pub fn block_param_count(&self) -> usize {
        self.context.param_count() + self.generation.param_count()
    }

    /// Tokens `[B, T]` to context latents `[B, T, D]`: those of a token depend on it and on what is before it.
    #[track_caller]
    pub fn context_latents(&self, tape: &Tape, tokens: &Tensor) -> Var {
        let mut c = self.dropout.forward(tape, &self.embedding.forward(tape, tokens));
        for layer in (0..self.config.context_loops).flat_map(|_| &self.context) {
            let after = if self.checkpoint_activations && tape.is_recording() {
                let layer = layer.clone();
                checkpoint(tape, &[&c], move |tape, c| layer.forward(tape, &c[0], None))
            } else {
                layer.forward(tape, &c, None)
            };
            c = self.dropout.residual(tape, &c, after);
        }
        self.norm_context.forward(tape, &c)
    }

    /// Tokens `[B, T]` in blocks to what the head reads, the normed last hidden state `[B, T, D]`.
    ///
    /// # Panics
    /// When the tokens are not `[B, T]`, a token is out of range, or the blocks are of another number of rows or of tokens.
    #[track_caller]
    pub fn hidden(&self, tape: &Tape, tokens: &Tensor, blocks: &BlockStarts) -> Var {
        assert!(tokens.rank() == 2, "double decoder: tokens must be [B, T], got {:?}", tokens.shape());
        let context = self.context_latents(tape, tokens);
        let mut h = self.dropout.forward(tape, &self.embedding.forward(tape, tokens));
        for layer in &self.generation {
            let after = if self.checkpoint_activations && tape.is_recording() {
                let (layer, blocks) = (layer.clone(), blocks.clone());
                checkpoint(tape, &[&h, &context], move |tape, x| layer.forward(tape, &x[0], &x[1], &blocks))
            } else {
                layer.forward(tape, &h, &context, blocks)
            };
            h = self.dropout.residual(tape, &h, after);
        }
        self.read_out(tape, &h)
    }

    /// The last hidden state, normed, and scaled as the logits are to be.
    pub(crate) fn read_out(&self, tape: &Tape, h: &Var) -> Var {
        scaled(self.norm_out.forward(tape, h), self.logit_scale)
    }

    /// Tokens `[B, T]` in blocks to logits `[B, T, n_vocab]`.
    #[track_caller]
    pub fn logits(&self, tape: &Tape, tokens: &Tensor, blocks: &BlockStarts) -> Var {
        ops::linear(&self.hidden(tape, tokens, blocks), &tape.param(&self.embedding.weight))
    }

    /// Mean cross-entropy, in nats per token, of `targets [B, T]` given `tokens [B, T]`; targets of [`IGNORE`] do not
    /// count. The logits are never held all at once.
    #[track_caller]
    pub fn loss(&self, tape: &Tape, tokens: &Tensor, targets: &Tensor, blocks: &BlockStarts) -> Var {
        let hidden = self.hidden(tape, tokens, blocks);
        ops::cross_entropy_from_hidden(&hidden, &tape.param(&self.embedding.weight), targets, IGNORE)
    }

    /// As [`DoubleDecoder::loss`], summed over the targets that count.
    #[track_caller]
    pub fn loss_sum(&self, tape: &Tape, tokens: &Tensor, targets: &Tensor, blocks: &BlockStarts) -> Var {
        let hidden = self.hidden(tape, tokens, blocks);
        ops::cross_entropy_from_hidden_sum(&hidden, &tape.param(&self.embedding.weight), targets, IGNORE)
    }

    /// The cross-entropy of every target, `[B, T]`; 0 where a target does not count. For evaluation: no gradient.
    #[track_caller]
    pub fn loss_rows(&self, tape: &Tape, tokens: &Tensor, targets: &Tensor, blocks: &BlockStarts) -> Tensor {
        let hidden = self.hidden(tape, tokens, blocks).detach();
        let head = Var::constant(tape.param(&self.embedding.weight).into_value());
        ops::cross_entropy_rows(&ops::linear(&hidden, &head), targets, IGNORE).into_value()
    }
}
