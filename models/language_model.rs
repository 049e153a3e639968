//! [`LanguageModel`]: a token table, blocks of one architecture, a norm, and the head tied to the table.

use kumiki_autograd::{Tape, Var, checkpoint};
use kumiki_nn::{Descent, Dropout, Embedding, Init, Module, RmsNorm};
use kumiki_ops as ops;
use kumiki_tensor::{DType, Error, Result, Tensor};
use serde::{Deserialize, Serialize};

use crate::block_cache::BlockCache;
use crate::cem::{CemBlock, CemConfig};
use crate::gau::{GauBlock, GauConfig};
use crate::gelu::{GeluConfig, GeluLayer};
use crate::tango::{TangoBlock, TangoConfig};
use crate::transformer::{TransformerBlock, TransformerConfig};
use crate::width::scaled;

/// Targets with this id do not count in the loss.
pub const IGNORE: i64 = -1;

/// An architecture with its sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum Architecture {
    /// Cross-token gated residual.
    Tango(TangoConfig),
    /// Attention and SwiGLU.
    Transformer(TransformerConfig),
    /// Gated attention unit, and FLASH.
    Gau(GauConfig),
    /// Causal Energy Minimization, and Llama.
    Cem(CemConfig),
    /// Attention and a GELU MLP: the decoder-only baseline of double decoders.
    Decoder(GeluConfig),
}

/// Everything that determines a model but its parameters' values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LanguageModelConfig {
    /// Number of token ids.
    pub n_vocab: usize,
    /// The blocks.
    pub architecture: Architecture,
}

impl Architecture {
    /// What is wrong with the sizes, if anything.
    ///
    /// # Errors
    /// A sentence naming the field, what was expected and what was found.
    pub fn check(&self) -> Result<()> {
        match self {
            Architecture::Tango(c) => c.check(),
            Architecture::Transformer(c) => c.check(),
            Architecture::Gau(c) => c.check(),
            Architecture::Cem(c) => c.check(),
            Architecture::Decoder(c) => c.check(),
        }
        .map_err(Error::new)
    }

    /// Model width D.
    pub fn d_model(&self) -> usize {
        match self {
            Architecture::Tango(c) => c.d_model,
            Architecture::Transformer(c) => c.d_model,
            Architecture::Gau(c) => c.d_model,
            Architecture::Cem(c) => c.d_model,
            Architecture::Decoder(c) => c.d_model,
        }
    }

    /// Block applications L.
    pub fn applications(&self) -> usize {
        match self {
            Architecture::Tango(c) => c.applications,
            Architecture::Transformer(c) => c.applications,
            Architecture::Gau(c) => c.applications,
            Architecture::Cem(c) => c.applications,
            Architecture::Decoder(c) => c.applications,
        }
    }

    /// Whether all applications share one set of parameters.
    pub fn tied(&self) -> bool {
        match self {
            Architecture::Tango(c) => c.tied,
            Architecture::Transformer(c) => c.tied,
            Architecture::Gau(c) => c.tied,
            Architecture::Cem(c) => c.tied,
            Architecture::Decoder(_) => false,
        }
    }

    /// Fresh parameters of layer `layer`.
    pub(crate) fn block(&self, layer: usize, init: &Init) -> Block {
        match self {
            Architecture::Tango(c) => Block::Tango(TangoBlock::new(c, init)),
            Architecture::Transformer(c) => Block::Transformer(TransformerBlock::new(c, init)),
            Architecture::Gau(c) => Block::Gau(GauBlock::new(c, init)),
            Architecture::Cem(c) => Block::Cem(CemBlock::new(c, layer, init)),
            Architecture::Decoder(c) => {
                let out_gain = 1.0 / (2.0 * c.applications as f64).sqrt();
                Block::Decoder(GeluLayer::new(c, out_gain, init))
            }
        }
    }
}

/// One set of a block's parameters, of some architecture.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // a handful per model; boxing would only make them harder to read
pub enum Block {
    /// See [`TangoBlock`].
    Tango(TangoBlock),
    /// See [`TransformerBlock`].
    Transformer(TransformerBlock),
    /// See [`GauBlock`].
    Gau(GauBlock),
    /// See [`CemBlock`].
    Cem(CemBlock),
    /// See [`GeluLayer`].
    Decoder(GeluLayer),
}
kumiki_nn::module!(
    enum Block {
        Tango,
        Transformer,
        Gau,
        Cem,
        Decoder,
    }
);

impl Block {
    /// `h [B, T, D]` to the same. With a cache the tokens continue those in it.
    #[track_caller]
    pub fn forward(&self, tape: &Tape, h: &Var, cache: Option<&mut BlockCache>) -> Var {
        match self {
            Block::Tango(b) => b.forward(tape, h, cache),
            Block::Transformer(b) => b.forward(tape, h, cache),
            Block::Gau(b) => b.forward(tape, h, cache),
            Block::Cem(b) => b.forward(tape, h, cache),
            Block::Decoder(b) => b.forward(tape, h, cache),
        }
    }
}

/// What decoding keeps of the tokens so far: one cache per block application.
#[derive(Clone, Debug)]
pub struct DecodeCache {
    applications: Vec<BlockCache>,
}

impl DecodeCache {
    /// The number of tokens held.
    pub fn len(&self) -> usize {
        self.applications.first().map_or(0, BlockCache::len)
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes held: those of keys and values grow with every token, those of running sums do not.
    pub fn byte_len(&self) -> usize {
        self.applications.iter().map(BlockCache::byte_len).sum()
    }
}

/// A decoder-only language model.
#[derive(Clone, Debug)]
pub struct LanguageModel {
    /// What it was made from.
    pub config: LanguageModelConfig,
    /// Token table and head, `[n_vocab, D]`.
    pub embedding: Embedding,
    /// One block when tied, else one per application.
    pub blocks: Vec<Block>,
    /// Before the head, `[D]`.
    pub norm_out: RmsNorm,
    /// Whether every block application is recomputed in the backward instead of saved: less memory, more time.
    pub checkpoint_activations: bool,
    /// Of the embedded tokens and of what every block adds, in training.
    pub dropout: Dropout,
    /// What logits are multiplied by; 1 but in models whose width is scaled, see [`crate::width`].
    pub logit_scale: f64,
}
kumiki_nn::module!(LanguageModel { embedding, blocks, norm_out });

impl LanguageModel {
    /// A model with fresh parameters of `dtype`, drawn from `seed`; the table has standard deviation 0.02.
    ///
    /// # Errors
    /// When the sizes do not fit together.
    pub fn new(config: &LanguageModelConfig, seed: u64, dtype: DType) -> Result<LanguageModel> {
        config.architecture.check()?;
        if config.n_vocab == 0 {
            return Err(Error::new("n_vocab must be positive, found 0"));
        }
        let init = Init::new(seed, dtype);
        let sets = if config.architecture.tied() { 1 } else { config.architecture.applications() };
        let d_model = config.architecture.d_model();
        Ok(LanguageModel {
            embedding: Embedding::new(config.n_vocab, d_model, 0.02, &init.of("embedding")),
            blocks: (0..sets).map(|i| config.architecture.block(i, &init.of(format!("blocks.{i}")))).collect(),
            norm_out: RmsNorm::new(d_model, &init.of("norm_out")),
            config: config.clone(),
            checkpoint_activations: false,
            dropout: Dropout::default(),
            logit_scale: 1.0,
        })
    }

    /// The descents of layers that minimise an energy, by the names of their halves, `blocks.0.attention`: to be read, or
    /// changed. Empty for architectures that have none.
    pub fn descents_mut(&mut self) -> Vec<(String, &mut Descent)> {
        let mut found = Vec::new();
        for (i, block) in self.blocks.iter_mut().enumerate() {
            if let Block::Cem(block) = block {
                found.extend(block.descents_mut().into_iter().map(|(half, d)| (format!("blocks.{i}.{half}"), d)));
            }
        }
        found
    }

    /// The distinct trainable values without the token table.
    pub fn block_param_count(&self) -> usize {
        self.blocks.param_count()
    }

    /// Tokens `[B, T]` to what the head reads, the normed last hidden state `[B, T, D]`.
    ///
    /// # Panics
    /// When the tokens are not `[B, T]`, a token is out of range, or the cache is of a model with other blocks.
    #[track_caller]
    pub fn hidden(&self, tape: &Tape, tokens: &Tensor, mut cache: Option<&mut DecodeCache>) -> Var {
        assert!(tokens.rank() == 2, "language model: tokens must be [B, T], got {:?}", tokens.shape());
        let applications = self.config.architecture.applications();
        if let Some(cache) = &cache {
            let held = cache.applications.len();
            assert!(
                held == applications,
                "language model: the cache is of a model with {held} block applications, this one has {applications}"
            );
        }
        let mut h = self.dropout.forward(tape, &self.embedding.forward(tape, tokens));
        for i in 0..applications {
            let block = &self.blocks[i % self.blocks.len()];
            let after = match cache.as_deref_mut() {
                Some(cache) => block.forward(tape, &h, Some(&mut cache.applications[i])),
                None if self.checkpoint_activations && tape.is_recording() => {
                    let block = block.clone();
                    checkpoint(tape, &[&h], move |tape, h| block.forward(tape, &h[0], None))
                }
                None => block.forward(tape, &h, None),
            };
            h = self.dropout.residual(tape, &h, after);
        }
        self.read_out(tape, &h)
    }

    /// The last hidden state, normed, and scaled as the logits are to be.
    #[track_caller]
    pub fn read_out(&self, tape: &Tape, h: &Var) -> Var {
        scaled(self.norm_out.forward(tape, h), self.logit_scale)
    }

    /// Tokens `[B, T]` to logits `[B, T, n_vocab]`.
    #[track_caller]
    pub fn logits(&self, tape: &Tape, tokens: &Tensor) -> Var {
        let hidden = self.hidden(tape, tokens, None);
        ops::linear(&hidden, &tape.param(&self.embedding.weight))
    }

    /// Mean cross-entropy, in nats per token, of `targets [B, T]` given `tokens [B, T]`; targets of [`IGNORE`] do not
    /// count. The logits are never held all at once.
    #[track_caller]
    pub fn loss(&self, tape: &Tape, tokens: &Tensor, targets: &Tensor) -> Var {
        let hidden = self.hidden(tape, tokens, None);
        ops::cross_entropy_from_hidden(&hidden, &tape.param(&self.embedding.weight), targets, IGNORE)
    }

    /// As [`LanguageModel::loss`], summed over the targets that count: for token-weighted means over several batches.
    #[track_caller]
    pub fn loss_sum(&self, tape: &Tape, tokens: &Tensor, targets: &Tensor) -> Var {
        let hidden = self.hidden(tape, tokens, None);
        ops::cross_entropy_from_hidden_sum(&hidden, &tape.param(&self.embedding.weight), targets, IGNORE)
    }

    /// The cross-entropy of every target, `[B, T]`; 0 where a target does not count. For evaluation: no gradient.
    #[track_caller]
    pub fn loss_rows(&self, tape: &Tape, tokens: &Tensor, targets: &Tensor) -> Tensor {
        let hidden = self.hidden(tape, tokens, None).detach();
        let head = Var::constant(tape.param(&self.embedding.weight).into_value());
        ops::cross_entropy_rows(&ops::linear(&hidden, &head), targets, IGNORE).into_value()
    }

    /// An empty cache for [`LanguageModel::next_logits`].
    pub fn new_cache(&self) -> DecodeCache {
        DecodeCache { applications: vec![BlockCache::Empty; self.config.architecture.applications()] }
    }

    /// Feeds the tokens `[B, T]` that follow those in the cache, and gives the logits `[B, n_vocab]` after the last.
    ///
    /// # Panics
    /// Without tokens.
    #[track_caller]
    pub fn next_logits(&self, tokens: &Tensor, cache: &mut DecodeCache) -> Tensor {
        assert!(
            tokens.rank() == 2 && tokens.dim(1) > 0,
            "next_logits: tokens must be [B, T > 0], got {:?}",
            tokens.shape()
        );
        let tape = Tape::inference();
        let hidden = self.hidden(&tape, tokens, Some(cache));
        let last = Var::constant(hidden.value().select(1, tokens.dim(1) - 1));
        ops::linear(&last, &tape.param(&self.embedding.weight)).into_value()
    }
}
