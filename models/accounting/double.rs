//! What double decoders and encoder-decoders cost, as [`super`] says it of language models.

use kumiki_ops::MacCount;

use super::{MAX_APPLICATIONS, Pairs, near_pairs};
use crate::{DoubleDecoderConfig, EncoderDecoderConfig, SpanCounts};

/// Products with weights for a token in one layer of attention and GELU MLP.
fn layer_matrices(d: usize, f: usize) -> u64 {
    let (d, f) = (d as u64, f as u64);
    4 * d * d + 2 * f * d
}

fn layer_params(d: usize, f: usize) -> u128 {
    2 * d as u128 + u128::from(layer_matrices(d, f))
}

impl DoubleDecoderConfig {
    /// Distinct parameters of both stacks.
    pub fn block_params(&self) -> u128 {
        let separate = if self.separate_kv { self.generation_layers as u128 } else { 0 };
        self.layers() as u128 * layer_params(self.d_model, self.d_ff) + separate * 2 * (self.d_model as u128).pow(2)
    }

    /// Distinct parameters: both stacks, token table, two last norms.
    pub fn total_params(&self) -> u128 {
        self.block_params() + (self.n_vocab as u128 + 2) * self.d_model as u128
    }

    /// Applications of context layers, loops counted.
    fn readings(&self) -> u64 {
        (self.context_layers * self.context_loops) as u64
    }

    /// Multiply-accumulates of a forward pass over one sequence of `seq` tokens in blocks, head included. A decoder-only
    /// model of as many layers does the same but for the keys and values of the context, `2D²` for a token and generation
    /// layer.
    pub fn macs(&self, seq: usize, pairs: Pairs) -> MacCount {
        let (t, d, generation) = (seq as u64, self.d_model as u64, self.generation_layers as u64);
        let applications = self.readings() + generation;
        MacCount {
            projection: t * (applications * layer_matrices(self.d_model, self.d_ff) + generation * 2 * d * d),
            pair: applications * near_pairs(t, t, pairs) * 2 * d,
            prefix: 0,
            head: t * d * self.n_vocab as u64,
        }
    }

    /// Multiply-accumulates to write one token after `seq` others: the generation stack's alone. What a rollover costs, the
    /// context stack's over the whole text once for every block, comes on top.
    pub fn token_macs(&self, seq: usize) -> u64 {
        let (d, generation) = (self.d_model as u64, self.generation_layers as u64);
        generation * (layer_matrices(self.d_model, self.d_ff) + (seq as u64 + 1) * 2 * d) + d * self.n_vocab as u64
    }

    /// Numbers that writing keeps after a prompt of `seq` tokens: keys and values of the generation layers.
    pub fn state_numbers(&self, seq: usize) -> u64 {
        (self.generation_layers * 2 * self.d_model * seq) as u64
    }

    /// Numbers that every layer application keeps of a token for the backward, when it is not recomputed: those of a GELU
    /// layer, in the generation stack also keys and values of the context.
    pub fn saved_numbers(&self) -> Vec<u64> {
        let layer = gelu_saved(self.d_model, self.heads, self.d_ff);
        let context = std::iter::repeat_n(layer, self.context_layers * self.context_loops);
        context.chain(std::iter::repeat_n(layer + 2 * self.d_model as u64, self.generation_layers)).collect()
    }

    /// Whether the sizes are so small that none of these counts overflows: for sizes from a file.
    pub fn countable(&self) -> bool {
        countable(&[self.n_vocab, self.d_model, self.heads, self.d_ff])
            && self.context_layers.saturating_mul(self.context_loops) <= MAX_APPLICATIONS
            && self.generation_layers <= MAX_APPLICATIONS
    }
}

impl EncoderDecoderConfig {
    /// Distinct parameters of encoder and decoder.
    pub fn block_params(&self) -> u128 {
        let d = self.d_model as u128;
        let layers = (self.encoder_layers + self.decoder_layers) as u128 * layer_params(self.d_model, self.d_ff);
        layers + self.decoder_layers as u128 * (d + 4 * d * d)
    }

    /// Distinct parameters: encoder and decoder, token table, two last norms.
    pub fn total_params(&self) -> u128 {
        self.block_params() + (self.n_vocab as u128 + 2) * self.d_model as u128
    }

    /// Multiply-accumulates of a training step's forward pass over a text of `seq` tokens with hidden spans, head included.
    /// The encoder sees all pairs, whatever `pairs` says.
    pub fn macs(&self, seq: usize, pairs: Pairs) -> MacCount {
        let counts = SpanCounts::of(seq);
        self.macs_of(counts.source(), counts.target() - 1, pairs)
    }

    /// As [`EncoderDecoderConfig::macs`] with sources of `source` and targets of `target` tokens.
    pub fn macs_of(&self, source: usize, target: usize, pairs: Pairs) -> MacCount {
        let [s, t, d, encoder, decoder] =
            [source, target, self.d_model, self.encoder_layers, self.decoder_layers].map(|n| n as u64);
        let layer = layer_matrices(self.d_model, self.d_ff);
        MacCount {
            projection: s * encoder * layer + decoder * (t * (layer + 2 * d * d) + s * 2 * d * d),
            pair: (encoder * s * s + decoder * (near_pairs(t, t, pairs) + t * s)) * 2 * d,
            prefix: 0,
            head: t * d * self.n_vocab as u64,
        }
    }

    /// Multiply-accumulates to write one token after a prompt of `seq`, which with its sentinel is the source; the target has
    /// its own sentinel before that token.
    pub fn token_macs(&self, seq: usize) -> u64 {
        let (d, decoder) = (self.d_model as u64, self.decoder_layers as u64);
        let matrices = layer_matrices(self.d_model, self.d_ff) + 2 * d * d;
        decoder * (matrices + (seq as u64 + 3) * 2 * d) + d * self.n_vocab as u64
    }

    /// Numbers that writing keeps after a prompt of `seq` tokens: in every decoder layer keys and values of the source, which
    /// is the prompt and a sentinel, and of the sentinel that opens the target.
    pub fn state_numbers(&self, seq: usize) -> u64 {
        (self.decoder_layers * 2 * self.d_model * (seq + 2)) as u64
    }

    /// Numbers that every encoder layer keeps of a token of the source for the backward: what the decoder keeps comes on top.
    pub fn saved_numbers(&self) -> Vec<u64> {
        vec![gelu_saved(self.d_model, self.heads, self.d_ff); self.encoder_layers]
    }

    /// As [`DoubleDecoderConfig::countable`].
    pub fn countable(&self) -> bool {
        countable(&[self.n_vocab, self.d_model, self.heads, self.d_ff])
            && self.encoder_layers <= MAX_APPLICATIONS
            && self.decoder_layers <= MAX_APPLICATIONS
    }
}

fn gelu_saved(d_model: usize, heads: usize, d_ff: usize) -> u64 {
    (8 * d_model + 2 + heads + 2 * d_ff) as u64
}

/// At most three sizes and small numbers are multiplied.
fn countable(sizes: &[usize]) -> bool {
    sizes.iter().all(|&size| (size as u64) < 1 << 24)
}
