//! [`Model`]: a text model of any kind, for what handles them alike: training, files, writing, accounting.

use kumiki_nn::{Descent, Dropout, module};
use kumiki_ops::MacCount;
use kumiki_tensor::{DType, Error, Result, Tensor, concat};

use crate::accounting::{self, Pairs};
use crate::double_decoder::{DoubleCache, DoubleDecoder, DoubleDecoderConfig};
use crate::encoder_decoder::{EncoderDecoder, EncoderDecoderCache, EncoderDecoderConfig};
use crate::language_model::{Architecture, DecodeCache, LanguageModel, LanguageModelConfig};

/// Everything that determines a model but its parameters' values.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelConfig {
    /// Decoder-only: one stack of blocks.
    Language(LanguageModelConfig),
    /// A context and a generation stack.
    Double(DoubleDecoderConfig),
    /// Encoder and decoder.
    EncoderDecoder(EncoderDecoderConfig),
}

/// Calls the same on whatever there is.
macro_rules! each {
    ($of:expr, $kind:ident, $c:ident => $do:expr) => {
        match $of {
            $kind::Language($c) => $do,
            $kind::Double($c) => $do,
            $kind::EncoderDecoder($c) => $do,
        }
    };
}

impl ModelConfig {
    /// What is wrong with the sizes, if anything.
    ///
    /// # Errors
    /// A sentence naming the field, what was expected and what was found.
    pub fn check(&self) -> Result<()> {
        match self {
            ModelConfig::Language(c) => c.architecture.check(),
            ModelConfig::Double(c) => c.check(),
            ModelConfig::EncoderDecoder(c) => c.check(),
        }
    }

    /// What it is, for sentences.
    pub fn kind(&self) -> &'static str {
        match self {
            ModelConfig::Language(_) => "language model",
            ModelConfig::Double(_) => "double decoder",
            ModelConfig::EncoderDecoder(_) => "encoder-decoder",
        }
    }

    /// Token ids that texts have.
    pub fn text_ids(&self) -> usize {
        match self {
            ModelConfig::Language(c) => c.n_vocab,
            ModelConfig::Double(c) => c.n_vocab,
            ModelConfig::EncoderDecoder(c) => c.text_ids(),
        }
    }

    /// Rows of the token table.
    pub fn n_vocab(&self) -> usize {
        each!(self, ModelConfig, c => c.n_vocab)
    }

    /// Model width D.
    pub fn d_model(&self) -> usize {
        match self {
            ModelConfig::Language(c) => c.architecture.d_model(),
            ModelConfig::Double(c) => c.d_model,
            ModelConfig::EncoderDecoder(c) => c.d_model,
        }
    }

    /// Layers, or block applications.
    pub fn layers(&self) -> usize {
        match self {
            ModelConfig::Language(c) => c.architecture.applications(),
            ModelConfig::Double(c) => c.layers(),
            ModelConfig::EncoderDecoder(c) => c.encoder_layers + c.decoder_layers,
        }
    }

    /// Whether all applications share one set of parameters.
    pub fn tied(&self) -> bool {
        matches!(self, ModelConfig::Language(c) if c.architecture.tied())
    }

    /// The free width, that a size is solved with: E of gated units, F of feed-forward layers.
    pub fn width(&self) -> usize {
        match self {
            ModelConfig::Language(c) => match &c.architecture {
                Architecture::Tango(c) => c.gate_width,
                Architecture::Transformer(c) => c.d_ff,
                Architecture::Gau(c) => c.gate_width,
                Architecture::Cem(c) => c.d_ff,
                Architecture::Decoder(c) => c.d_ff,
            },
            ModelConfig::Double(c) => c.d_ff,
            ModelConfig::EncoderDecoder(c) => c.d_ff,
        }
    }

    /// Distinct parameters of blocks or layers, without token table and last norms.
    pub fn block_params(&self) -> usize {
        match self {
            ModelConfig::Language(c) => accounting::block_params(&c.architecture),
            ModelConfig::Double(c) => c.block_params() as usize,
            ModelConfig::EncoderDecoder(c) => c.block_params() as usize,
        }
    }

    /// Distinct parameters.
    pub fn total_params(&self) -> usize {
        match self {
            ModelConfig::Language(c) => accounting::total_params(c),
            ModelConfig::Double(c) => c.total_params() as usize,
            ModelConfig::EncoderDecoder(c) => c.total_params() as usize,
        }
    }

    /// As [`ModelConfig::total_params`], or `None` when the sizes are so large that counts overflow: for sizes from a file.
    pub fn checked_total_params(&self) -> Option<usize> {
        let count = match self {
            ModelConfig::Language(c) => return accounting::checked_total_params(c),
            ModelConfig::Double(c) => c.countable().then(|| c.total_params()),
            ModelConfig::EncoderDecoder(c) => c.countable().then(|| c.total_params()),
        };
        usize::try_from(count?).ok()
    }

    /// Multiply-accumulates of a training step's forward pass over one text of `seq` tokens, head included.
    pub fn macs(&self, seq: usize, pairs: Pairs) -> MacCount {
        match self {
            ModelConfig::Language(c) => accounting::macs(c, seq, pairs),
            ModelConfig::Double(c) => c.macs(seq, pairs),
            ModelConfig::EncoderDecoder(c) => c.macs(seq, pairs),
        }
    }

    /// Floating-point operations to train on a token, in sequences of `seq`: two for a multiply-accumulate, three times over
    /// for the forward and the two products of the backward.
    pub fn training_flops(&self, seq: usize) -> f64 {
        6.0 * accounting::total(&self.macs(seq, Pairs::Full)) as f64 / seq as f64
    }

    /// Multiply-accumulates to write one token after `seq` others.
    pub fn token_macs(&self, seq: usize) -> u64 {
        match self {
            ModelConfig::Language(c) => {
                let until = |seq| accounting::total(&accounting::macs(c, seq, Pairs::Causal));
                until(seq + 1) - until(seq)
            }
            ModelConfig::Double(c) => c.token_macs(seq),
            ModelConfig::EncoderDecoder(c) => c.token_macs(seq),
        }
    }

    /// Bytes that writing keeps after a prompt of `seq` tokens, for numbers of `float` bytes.
    pub fn state_bytes(&self, seq: usize, float: usize) -> u64 {
        match self {
            ModelConfig::Language(c) => accounting::state_bytes(c, seq, float),
            ModelConfig::Double(c) => c.state_numbers(seq) * float as u64,
            ModelConfig::EncoderDecoder(c) => c.state_numbers(seq) * float as u64,
        }
    }

    /// Numbers that every layer application keeps of a token for the backward; of an encoder-decoder, those of the encoder
    /// for a token of the source.
    pub fn saved_numbers(&self) -> Vec<u64> {
        match self {
            ModelConfig::Language(c) => {
                (0..c.architecture.applications()).map(|i| accounting::saved_numbers(&c.architecture, i)).collect()
            }
            ModelConfig::Double(c) => c.saved_numbers(),
            ModelConfig::EncoderDecoder(c) => c.saved_numbers(),
        }
    }
}

/// A text model.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // one per program; boxing would only make it harder to read
pub enum Model {
    /// Decoder-only.
    Language(LanguageModel),
    /// Context and generation stacks.
    Double(DoubleDecoder),
    /// Encoder and decoder.
    EncoderDecoder(EncoderDecoder),
}
module!(
    enum Model {
        Language,
        Double,
        EncoderDecoder,
    }
);

impl From<LanguageModel> for Model {
    fn from(model: LanguageModel) -> Model {
        Model::Language(model)
    }
}

/// What writing keeps of a batch of sequences.
#[derive(Clone, Debug)]
pub enum Writing {
    /// One cache for every sequence.
    Language(Vec<DecodeCache>),
    /// All sequences together.
    Double(DoubleCache),
    /// One cache for every sequence.
    EncoderDecoder(Vec<EncoderDecoderCache>),
}

impl Writing {
    /// Bytes held.
    pub fn byte_len(&self) -> usize {
        match self {
            Writing::Language(caches) => caches.iter().map(DecodeCache::byte_len).sum(),
            Writing::Double(cache) => cache.byte_len(),
            Writing::EncoderDecoder(caches) => caches.iter().map(EncoderDecoderCache::byte_len).sum(),
        }
    }
}

impl Model {
    /// A model with fresh parameters of `dtype`, drawn from `seed`.
    ///
    /// # Errors
    /// When the sizes do not fit together.
    pub fn new(config: &ModelConfig, seed: u64, dtype: DType) -> Result<Model> {
        Ok(match config {
            ModelConfig::Language(c) => Model::Language(LanguageModel::new(c, seed, dtype)?),
            ModelConfig::Double(c) => Model::Double(DoubleDecoder::new(c, seed, dtype)?),
            ModelConfig::EncoderDecoder(c) => Model::EncoderDecoder(EncoderDecoder::new(c, seed, dtype)?),
        })
    }

    /// What it was made from.
    pub fn config(&self) -> ModelConfig {
        match self {
            Model::Language(m) => ModelConfig::Language(m.config.clone()),
            Model::Double(m) => ModelConfig::Double(m.config.clone()),
            Model::EncoderDecoder(m) => ModelConfig::EncoderDecoder(m.config.clone()),
        }
    }

    /// Whether every block or layer is recomputed in the backward instead of saved: less memory, more time.
    pub fn recompute(&mut self, recompute: bool) {
        each!(self, Model, m => m.checkpoint_activations = recompute);
    }

    /// The probability with which training leaves out elements of the embedded tokens and of what blocks or layers add.
    pub fn set_dropout(&mut self, p: f64) {
        each!(self, Model, m => m.dropout = Dropout(p));
    }

    /// What logits are multiplied by.
    pub fn logit_scale(&self) -> f64 {
        each!(self, Model, m => m.logit_scale)
    }

    /// Multiplies logits by this from now on.
    pub fn set_logit_scale(&mut self, scale: f64) {
        each!(self, Model, m => m.logit_scale = scale);
    }

    /// As [`LanguageModel::descents_mut`]; other kinds of models have none.
    pub fn descents_mut(&mut self) -> Vec<(String, &mut Descent)> {
        match self {
            Model::Language(m) => m.descents_mut(),
            _ => vec![],
        }
    }

    /// Begins to write after prompts, one for every sequence: what is kept, and the logits of what comes next over the ids
    /// that texts have, `[B, text_ids]`. `block_len` is the length of a double decoder's blocks; other models have none.
    ///
    /// # Errors
    /// When there is no prompt, one is empty, a token is out of range, `block_len` is 0, or an encoder-decoder has no
    /// sentinel.
    pub fn start(&self, prompts: &[Vec<i64>], block_len: usize) -> Result<(Writing, Tensor)> {
        check_prompts(prompts, self.config().text_ids())?;
        let (writing, logits) = match self {
            Model::Double(m) => {
                let (cache, logits) = m.start(prompts, block_len)?;
                (Writing::Double(cache), logits)
            }
            Model::Language(m) => {
                let start = |prompt: &Vec<i64>| {
                    let mut cache = m.new_cache();
                    let logits = m.next_logits(&Tensor::from_slice(prompt, &[1, prompt.len()]), &mut cache);
                    (cache, logits)
                };
                let (caches, logits): (Vec<_>, Vec<_>) = prompts.iter().map(start).unzip();
                (Writing::Language(caches), join(&logits))
            }
            Model::EncoderDecoder(m) => {
                if m.config.sentinels == 0 {
                    return Err(Error::new(
                        "the encoder-decoder has no sentinels, so that it cannot go on with a text",
                    ));
                }
                let (caches, logits): (Vec<_>, Vec<_>) = prompts.iter().map(|prompt| m.start(prompt)).unzip();
                (Writing::EncoderDecoder(caches), join(&logits))
            }
        };
        Ok((writing, self.of_text(&logits)))
    }

    /// One more token for every sequence; the logits of what comes next, `[B, text_ids]`.
    ///
    /// # Panics
    /// When there is not one token for every sequence, or another kind of model began to write.
    #[track_caller]
    pub fn step(&self, tokens: &[i64], writing: &mut Writing) -> Tensor {
        let one_each = |rows: usize| assert!(tokens.len() == rows, "{} tokens for {rows} sequences", tokens.len());
        let logits = match (self, writing) {
            (Model::Double(m), Writing::Double(cache)) => m.step(tokens, cache),
            (Model::Language(m), Writing::Language(caches)) => {
                one_each(caches.len());
                let next =
                    |(cache, &id): (&mut DecodeCache, &i64)| m.next_logits(&Tensor::from_slice(&[id], &[1, 1]), cache);
                join(&caches.iter_mut().zip(tokens).map(next).collect::<Vec<_>>())
            }
            (Model::EncoderDecoder(m), Writing::EncoderDecoder(caches)) => {
                one_each(caches.len());
                join(&caches.iter_mut().zip(tokens).map(|(cache, &id)| m.next_logits(&[id], cache)).collect::<Vec<_>>())
            }
            (model, _) => panic!("another kind of model than this {} began to write", model.config().kind()),
        };
        self.of_text(&logits)
    }

    /// Without the columns of sentinels.
    fn of_text(&self, logits: &Tensor) -> Tensor {
        logits.narrow(1, 0, self.config().text_ids())
    }
}

fn join(rows: &[Tensor]) -> Tensor {
    concat(&rows.iter().collect::<Vec<_>>(), 0)
}

/// # Errors
/// When there is no prompt, one is empty, or it has a token that is not below `ids`.
pub(crate) fn check_prompts(prompts: &[Vec<i64>], ids: usize) -> Result<()> {
    if prompts.is_empty() {
        return Err(Error::new("expected a prompt for every sequence, found none"));
    }
    for (i, prompt) in prompts.iter().enumerate() {
        let which = if prompts.len() == 1 { "the prompt".to_owned() } else { format!("prompt {}", i + 1) };
        if prompt.is_empty() {
            return Err(Error::new(format!("{which} is empty; at least one token is needed to continue from")));
        }
        if let Some(wrong) = prompt.iter().find(|id| !(0..ids as i64).contains(id)) {
            return Err(Error::new(format!("{which} holds token {wrong}; the model knows 0 to {}", ids - 1)));
        }
    }
    Ok(())
}
