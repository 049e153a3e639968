//! The standard encoder-decoder: a bidirectional encoder, a decoder with attention to itself, then across to the encoder.
//!
//! ```text
//! e = n_encoder( encoder layers (embed(source)) )                      every token sees all
//! h ← h + attention(n1(h));   h ← h + co attention(cq n_cross(h), ck e, cv e);   h ← h + mlp(n2(h))
//! ```
//!
//! One table for both sides and the head; the positions of either side count from 0. It is trained to fill gaps: in the source
//! spans of text are replaced by *sentinels*, ids of their own behind those of texts, and the target is, for every span, its
//! sentinel and its text, with one more sentinel at the end. How many spans, of what length together, [`SpanCounts`] says; a
//! text is gone on with as if it ended in a span.
//! Source: the baseline of Block-Based Double Decoders, arXiv 2605.18807; span corruption as in T5, arXiv 1910.10683.

mod decode;

use kumiki_autograd::{Tape, Var, checkpoint};
use kumiki_nn::{Dropout, Embedding, Init, KvCache, Linear, Module, RmsNorm, module};
use kumiki_ops::{self as ops, AttentionOptions};
use kumiki_tensor::{DType, Error, Result, Tensor};
use serde::{Deserialize, Serialize};

use crate::gelu::{GeluConfig, GeluLayer, check_sizes};
use crate::language_model::IGNORE;
use crate::width::scaled;

pub use decode::EncoderDecoderCache;

/// The sizes of an encoder-decoder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EncoderDecoderConfig {
    /// Number of token ids, sentinels included.
    pub n_vocab: usize,
    /// How many of them, the last ones, are sentinels.
    pub sentinels: usize,
    /// Model width D.
    pub d_model: usize,
    /// Heads H, each of width D/H.
    pub heads: usize,
    /// Feed-forward width F; 4D in the paper.
    pub d_ff: usize,
    /// Layers of the encoder.
    pub encoder_layers: usize,
    /// Layers of the decoder.
    pub decoder_layers: usize,
    /// Base of the rotary angles.
    pub rope_base: f64,
}

impl EncoderDecoderConfig {
    fn layer(&self) -> GeluConfig {
        let &EncoderDecoderConfig { d_model, heads, d_ff, rope_base, .. } = self;
        let applications = self.encoder_layers.saturating_add(self.decoder_layers);
        GeluConfig { d_model, heads, d_ff, applications, rope_base }
    }

    /// What is wrong with the sizes, if anything.
    ///
    /// # Errors
    /// A sentence naming the field, what was expected and what was found.
    pub fn check(&self) -> Result<()> {
        let sizes = [
            ("n_vocab", self.n_vocab),
            ("d_ff", self.d_ff),
            ("encoder_layers", self.encoder_layers),
            ("decoder_layers", self.decoder_layers),
        ];
        if self.sentinels >= self.n_vocab.max(1) {
            let Self { n_vocab, sentinels, .. } = self;
            return Err(Error::new(format!(
                "encoder-decoder: sentinels must be fewer than n_vocab={n_vocab}, found {sentinels}"
            )));
        }
        check_sizes("encoder-decoder", &sizes, &self.layer()).map_err(Error::new)
    }

    /// Token ids that texts have: all but the sentinels.
    pub fn text_ids(&self) -> usize {
        self.n_vocab.saturating_sub(self.sentinels)
    }

    /// The id of the sentinel of span `n`.
    pub fn sentinel(&self, n: usize) -> i64 {
        (self.text_ids() + n) as i64
    }
}

/// How many tokens of a text span corruption hides, and in how many spans: 15 %, in spans of four tokens on average. They
/// follow from the length, so that all sequences of one length become sources and targets of one length.
/// Source: Raffel et al., *Exploring the Limits of Transfer Learning*, arXiv 1910.10683 (with spans of three).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanCounts {
    /// Tokens in the text.
    pub text: usize,
    /// Tokens that are hidden, at least one.
    pub hidden: usize,
    /// Spans that they lie in, at least one.
    pub spans: usize,
}

impl SpanCounts {
    /// Of a text of `text` tokens, at least 2.
    pub fn of(text: usize) -> SpanCounts {
        let hidden = ((text * 15 + 50) / 100).clamp(1, text.saturating_sub(1).max(1));
        // Every span needs a token, and one before it that is not hidden.
        let spans = ((hidden + 2) / 4).clamp(1, hidden.min((text - hidden).max(1)));
        SpanCounts { text, hidden, spans }
    }

    /// Tokens of the source: what is not hidden, and a sentinel for every span.
    pub fn source(&self) -> usize {
        self.text - self.hidden + self.spans
    }

    /// Tokens of the target: every span with its sentinel, and the one that ends it. Decoder tokens are all but the last,
    /// what they are to predict all but the first.
    pub fn target(&self) -> usize {
        self.hidden + self.spans + 1
    }

    /// Sentinels: one for every span, and one at the end.
    pub fn sentinels(&self) -> usize {
        self.spans + 1
    }
}

/// One decoder layer's parameters.
#[derive(Clone, Debug)]
pub struct CrossLayer {
    /// Attention of the decoder to itself, and the MLP.
    pub layer: GeluLayer,
    /// Before the attention across, `[D]`.
    pub norm_cross: RmsNorm,
    /// Queries, of the decoder, `[D, D]`.
    pub cq: Linear,
    /// Keys, of the encoder, `[D, D]`.
    pub ck: Linear,
    /// Values, of the encoder, `[D, D]`.
    pub cv: Linear,
    /// Output, `[D, D]`.
    pub co: Linear,
}
module!(CrossLayer { ..layer, norm_cross, cq, ck, cv, co });

impl CrossLayer {
    fn new(config: &EncoderDecoderConfig, out_gain: f64, init: &Init) -> CrossLayer {
        let d = config.d_model;
        let square = |name: &str, gain| Linear::new(d, d, gain, &init.of(name));
        CrossLayer {
            layer: GeluLayer::new(&config.layer(), out_gain, init),
            norm_cross: RmsNorm::new(d, &init.of("norm_cross")),
            cq: square("cq", 1.0),
            ck: square("ck", 1.0),
            cv: square("cv", 1.0),
            co: square("co", out_gain),
        }
    }

    fn split(&self, x: &Var) -> Var {
        let heads = self.layer.attention.heads;
        ops::reshape(x, &[x.dim(0), x.dim(1), heads, x.dim(2) / heads])
    }

    /// Rotated keys of encoder latents `[B, T, D]`, and their values, `[B, T, H, K]`.
    #[track_caller]
    pub fn keys_and_values(&self, tape: &Tape, encoded: &Var) -> (Var, Var) {
        let k = ops::rope(&self.split(&self.ck.forward(tape, encoded)), self.layer.attention.rope_base, 0);
        (k, self.split(&self.cv.forward(tape, encoded)))
    }

    /// `h [B, S, D]` with keys and values of the encoder's latents `[B, T, H, K]`, of which those whose `mask` `[B, T]` is 1
    /// are seen. With a cache the tokens continue those in it.
    #[track_caller]
    pub fn forward(
        &self,
        tape: &Tape,
        h: &Var,
        (k, v): (&Var, &Var),
        mask: Option<&Tensor>,
        cache: Option<&mut KvCache>,
    ) -> Var {
        let (own, start) = (&self.layer, cache.as_ref().map_or(0, |cache| cache.len()));
        let h = ops::add(h, &own.attention.forward(tape, &own.norm1.forward(tape, h), cache));
        let q = self.split(&self.cq.forward(tape, &self.norm_cross.forward(tape, &h)));
        let q = ops::rope(&q, own.attention.rope_base, start);
        let options = AttentionOptions { key_mask: mask.cloned(), ..AttentionOptions::default() };
        let attended = ops::attention(&q, k, v, &options);
        let joined = ops::reshape(&attended, &[h.dim(0), h.dim(1), h.dim(2)]);
        own.feed_forward(tape, &ops::add(&h, &self.co.forward(tape, &joined)))
    }
}

/// A standard encoder-decoder.
#[derive(Clone, Debug)]
pub struct EncoderDecoder {
    /// What it was made from.
    pub config: EncoderDecoderConfig,
    /// Token table of both sides and head, `[n_vocab, D]`.
    pub embedding: Embedding,
    /// The encoder.
    pub encoder: Vec<GeluLayer>,
    /// Of the encoder's latents, `[D]`.
    pub norm_encoder: RmsNorm,
    /// The decoder.
    pub decoder: Vec<CrossLayer>,
    /// Before the head, `[D]`.
    pub norm_out: RmsNorm,
    /// Whether every layer is recomputed in the backward instead of saved: less memory, more time.
    pub checkpoint_activations: bool,
    /// Of the embedded tokens and of what every layer adds, in training.
    pub dropout: Dropout,
    /// What logits are multiplied by; 1 but in models whose width is scaled, see [`crate::width`].
    pub logit_scale: f64,
}
module!(EncoderDecoder { embedding, encoder, norm_encoder, decoder, norm_out });

impl EncoderDecoder {
    /// A model with fresh parameters of `dtype`, drawn from `seed`, as [`crate::DoubleDecoder::new`].
    ///
    /// # Errors
    /// When the sizes do not fit together.
    pub fn new(config: &EncoderDecoderConfig, seed: u64, dtype: DType) -> Result<EncoderDecoder> {
        config.check()?;
        let (init, layer, d_model) = (Init::new(seed, dtype), config.layer(), config.d_model);
        let out_gain = 1.0 / (2.0 * layer.applications as f64).sqrt();
        Ok(EncoderDecoder {
            embedding: Embedding::new(config.n_vocab, d_model, 0.02, &init.of("embedding")),
            encoder: (0..config.encoder_layers)
                .map(|i| GeluLayer::new(&layer, out_gain, &init.of(format!("encoder.{i}"))))
                .collect(),
            norm_encoder: RmsNorm::new(d_model, &init.of("norm_encoder")),
            decoder: (0..config.decoder_layers)
                .map(|i| CrossLayer::new(config, out_gain, &init.of(format!("decoder.{i}"))))
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
        self.encoder.param_count() + self.decoder.param_count()
    }

    /// Tokens `[B, T]` to latents `[B, T, D]`; those whose `mask` `[B, T]` is 0 are seen by nobody.
    ///
    /// # Panics
    /// When the tokens are not `[B, T]`, a token is out of range, or the mask has another shape.
    #[track_caller]
    pub fn encode(&self, tape: &Tape, tokens: &Tensor, mask: Option<&Tensor>) -> Var {
        assert!(tokens.rank() == 2, "encoder-decoder: tokens must be [B, T], got {:?}", tokens.shape());
        let mut e = self.dropout.forward(tape, &self.embedding.forward(tape, tokens));
        for layer in &self.encoder {
            let after = if self.checkpoint_activations && tape.is_recording() {
                let (layer, mask) = (layer.clone(), mask.cloned());
                checkpoint(tape, &[&e], move |tape, e| layer.forward_full(tape, &e[0], mask.as_ref()))
            } else {
                layer.forward_full(tape, &e, mask)
            };
            e = self.dropout.residual(tape, &e, after);
        }
        self.norm_encoder.forward(tape, &e)
    }

    /// Source `[B, T]` and decoder tokens `[B, S]` to what the head reads, the normed last hidden state `[B, S, D]`.
    #[track_caller]
    pub fn hidden(&self, tape: &Tape, source: &Tensor, mask: Option<&Tensor>, tokens: &Tensor) -> Var {
        let encoded = self.encode(tape, source, mask);
        let mut h = self.dropout.forward(tape, &self.embedding.forward(tape, tokens));
        for layer in &self.decoder {
            let after = if self.checkpoint_activations && tape.is_recording() {
                let (layer, mask) = (layer.clone(), mask.cloned());
                checkpoint(tape, &[&h, &encoded], move |tape, x| {
                    let (k, v) = layer.keys_and_values(tape, &x[1]);
                    layer.forward(tape, &x[0], (&k, &v), mask.as_ref(), None)
                })
            } else {
                let (k, v) = layer.keys_and_values(tape, &encoded);
                layer.forward(tape, &h, (&k, &v), mask, None)
            };
            h = self.dropout.residual(tape, &h, after);
        }
        self.read_out(tape, &h)
    }

    /// The last hidden state, normed, and scaled as the logits are to be.
    pub(crate) fn read_out(&self, tape: &Tape, h: &Var) -> Var {
        scaled(self.norm_out.forward(tape, h), self.logit_scale)
    }

    /// Source `[B, T]` and decoder tokens `[B, S]` to logits `[B, S, n_vocab]`.
    #[track_caller]
    pub fn logits(&self, tape: &Tape, source: &Tensor, mask: Option<&Tensor>, tokens: &Tensor) -> Var {
        ops::linear(&self.hidden(tape, source, mask, tokens), &tape.param(&self.embedding.weight))
    }

    /// Cross-entropy of `targets [B, S]`, summed over those that are not [`IGNORE`].
    #[track_caller]
    pub fn loss_sum(
        &self,
        tape: &Tape,
        source: &Tensor,
        mask: Option<&Tensor>,
        tokens: &Tensor,
        targets: &Tensor,
    ) -> Var {
        let hidden = self.hidden(tape, source, mask, tokens);
        ops::cross_entropy_from_hidden_sum(&hidden, &tape.param(&self.embedding.weight), targets, IGNORE)
    }

    /// As [`EncoderDecoder::loss_sum`], the mean.
    #[track_caller]
    pub fn loss(&self, tape: &Tape, source: &Tensor, mask: Option<&Tensor>, tokens: &Tensor, targets: &Tensor) -> Var {
        let hidden = self.hidden(tape, source, mask, tokens);
        ops::cross_entropy_from_hidden(&hidden, &tape.param(&self.embedding.weight), targets, IGNORE)
    }

    /// The cross-entropy of every target, `[B, S]`; 0 where a target does not count. For evaluation: no gradient.
    #[track_caller]
    pub fn loss_rows(&self, source: &Tensor, tokens: &Tensor, targets: &Tensor) -> Tensor {
        ops::cross_entropy_rows(&self.logits(&Tape::inference(), source, None, tokens), targets, IGNORE).into_value()
    }

    /// As [`EncoderDecoder::loss_rows`] among the token ids of texts: sentinels are taken for impossible.
    #[track_caller]
    pub fn text_loss_rows(&self, source: &Tensor, tokens: &Tensor, targets: &Tensor) -> Tensor {
        let logits = self.logits(&Tape::inference(), source, None, tokens);
        let text = Var::constant(logits.value().narrow(2, 0, self.config.text_ids()));
        ops::cross_entropy_rows(&text, targets, IGNORE).into_value()
    }
}
