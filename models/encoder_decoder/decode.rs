//! Writing with an encoder-decoder: the text so far is the source, closed by a sentinel, and the decoder fills that span.

use kumiki_autograd::{Tape, Var};
use kumiki_nn::KvCache;
use kumiki_ops as ops;
use kumiki_tensor::Tensor;

use super::EncoderDecoder;

/// What writing keeps of one sequence: of every decoder layer keys and values of the source, and of what is written.
#[derive(Clone, Debug)]
pub struct EncoderDecoderCache {
    layers: Vec<LayerCache>,
}

#[derive(Clone, Debug)]
struct LayerCache {
    source: (Var, Var),
    own: KvCache,
}

impl EncoderDecoderCache {
    /// Bytes of keys and values held.
    pub fn byte_len(&self) -> usize {
        let of = |layer: &LayerCache| {
            layer.source.0.value().byte_len() + layer.source.1.value().byte_len() + layer.own.byte_len()
        };
        self.layers.iter().map(of).sum()
    }
}

impl EncoderDecoder {
    /// Reads a source: its latents are projected once for every decoder layer, and forgotten.
    #[track_caller]
    pub fn read(&self, source: &[i64]) -> EncoderDecoderCache {
        let tape = Tape::inference();
        let encoded = self.encode(&tape, &Tensor::from_slice(source, &[1, source.len()]), None);
        let layer = |layer: &super::CrossLayer| LayerCache {
            source: layer.keys_and_values(&tape, &encoded),
            own: KvCache::new(),
        };
        EncoderDecoderCache { layers: self.decoder.iter().map(layer).collect() }
    }

    /// Feeds the decoder tokens that follow those in the cache; the logits after the last, `[1, n_vocab]`.
    ///
    /// # Panics
    /// Without tokens.
    #[track_caller]
    pub fn next_logits(&self, tokens: &[i64], cache: &mut EncoderDecoderCache) -> Tensor {
        assert!(!tokens.is_empty(), "encoder-decoder: at least one token is needed to go on from");
        let tape = Tape::inference();
        let mut h = self.embedding.forward(&tape, &Tensor::from_slice(tokens, &[1, tokens.len()]));
        for (layer, kept) in self.decoder.iter().zip(&mut cache.layers) {
            let (k, v) = &kept.source;
            h = layer.forward(&tape, &h, (k, v), None, Some(&mut kept.own));
        }
        let last = Var::constant(h.value().select(1, tokens.len() - 1));
        ops::linear(&self.read_out(&tape, &last), &tape.param(&self.embedding.weight)).into_value()
    }

    /// Begins to go on with a text: reads it, closed by the first sentinel, and gives the logits of what comes next,
    /// `[1, n_vocab]`.
    ///
    /// # Panics
    /// When the model has no sentinel.
    #[track_caller]
    pub fn start(&self, text: &[i64]) -> (EncoderDecoderCache, Tensor) {
        assert!(self.config.sentinels > 0, "encoder-decoder: without sentinels no text can be gone on with");
        let sentinel = self.config.sentinel(0);
        let source: Vec<i64> = text.iter().copied().chain([sentinel]).collect();
        let mut cache = self.read(&source);
        let logits = self.next_logits(&[sentinel], &mut cache);
        (cache, logits)
    }
}
