//! Tokenizers of every other kind that a `tokenizer.json` can describe, by Hugging Face's own library.
//!
//! Special tokens are not found in texts, other added tokens are, as the file says. A byte-level one (its decoder is
//! `ByteLevel` alone) encodes any bytes: those that are no UTF-8 as single tokens.

use kumiki_tensor::threads;
use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::tokenizer::{AddedToken, Tokenizer, Trainer as _};

use super::bpe::Bpe;
use super::files::{END_OF_TEXT, of_json};
use super::letters;
use super::pretokenize::words;
use crate::{Error, Result};

/// A tokenizer of the library.
pub(crate) struct HuggingFace {
    inner: Tokenizer,
    vocab: usize,
    byte_level: bool,
    /// Whether a word's tokens are the same wherever the text before it begins.
    cuts_cleanly: bool,
    /// Added tokens stand for their names, also in byte-level vocabularies.
    added: Vec<u32>,
}

/// A token and where its text begins.
pub(crate) type Placed = (u32, usize);

impl HuggingFace {
    /// # Errors
    /// When the library cannot use the file.
    pub(crate) fn new(bytes: &[u8], file: &Value) -> Result<HuggingFace> {
        let mut inner = Tokenizer::from_bytes(bytes).map_err(|e| Error::new(e.to_string()))?;
        inner.set_encode_special_tokens(true);
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| Error::new(e.to_string()))?;
        let mut added: Vec<u32> = inner.get_added_tokens_decoder().into_keys().collect();
        added.sort_unstable();
        // An id may lie beyond the number of tokens when others are missing.
        let highest = inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        let byte_level = file["decoder"]["type"] == "ByteLevel";
        let plain = file["normalizer"].is_null() && file["pre_tokenizer"]["add_prefix_space"] != json!(true);
        Ok(HuggingFace { inner, vocab: highest, byte_level, cuts_cleanly: byte_level && plain, added })
    }

    pub(crate) fn vocab(&self) -> usize {
        self.vocab
    }

    pub(crate) fn is_byte_level(&self) -> bool {
        self.byte_level
    }

    pub(crate) fn cuts_cleanly(&self) -> bool {
        self.cuts_cleanly
    }

    pub(crate) fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The bytes of a token of a byte-level vocabulary.
    pub(crate) fn token(&self, id: u32) -> Option<Box<[u8]>> {
        let text = self.inner.id_to_token(id)?;
        let named = self.added.binary_search(&id).is_ok();
        if named { Some(text.into_bytes().into()) } else { letters::to_bytes(&text) }
    }

    /// Hands the tokens of `bytes` to `out`.
    ///
    /// # Errors
    /// When `bytes` are no UTF-8 and the vocabulary is not of bytes; where, counted from their start.
    pub(crate) fn encode(&self, bytes: &[u8], mut out: impl FnMut(Placed)) -> Result<()> {
        let mut at = 0;
        for chunk in bytes.utf8_chunks() {
            if !chunk.valid().is_empty() {
                let found = self.inner.encode(chunk.valid(), false).map_err(|e| Error::new(e.to_string()))?;
                for (&id, &(start, _)) in found.get_ids().iter().zip(found.get_offsets()) {
                    out((id, at + start));
                }
            }
            at += chunk.valid().len();
            for &byte in chunk.invalid() {
                let id = self.byte_level.then(|| self.id(&letters::from_bytes(&[byte]))).flatten();
                let id = id.ok_or_else(|| {
                    Error::new(format!(
                        "the byte {byte:#04x} at {at} is no UTF-8, and this tokenizer has no token for it"
                    ))
                })?;
                out((id, at));
                at += 1;
            }
        }
        Ok(())
    }

    /// The text of tokens of a vocabulary that is not of bytes.
    pub(crate) fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, true).map_err(|e| Error::new(e.to_string()))
    }
}

/// Learns a byte-level vocabulary of `vocab` tokens from `texts`, GPT-2's way; the first is the end of a text.
///
/// # Errors
/// When `vocab` cannot hold the bytes and the end, or the texts have too few different pairs for it.
pub(crate) fn train(vocab: usize, texts: impl Iterator<Item = String> + Send) -> Result<Bpe> {
    let least = 257;
    if vocab < least {
        return Err(Error::new(format!(
            "a vocabulary of {vocab} tokens; expected at least {least}: all bytes and an end of text"
        )));
    }
    let error = |e: Box<dyn std::error::Error + Send + Sync>| Error::new(e.to_string());
    let alphabet = (0..=255u8).flat_map(|byte| letters::from_bytes(&[byte]).chars().collect::<Vec<_>>()).collect();
    let mut trainer = BpeTrainer::builder()
        .vocab_size(vocab)
        .min_frequency(2)
        .show_progress(false)
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        .initial_alphabet(alphabet)
        .build();
    let mut model = BPE::default();
    // The library spreads its work over the pool that it is called in.
    threads::in_pool(|| {
        let split = |text: &str| Ok(words(text).map(|word| letters::from_bytes(word.as_bytes())).collect());
        trainer.feed(texts, split).map_err(error)?;
        trainer.train(&mut model).map_err(error)
    })?;
    let mut model = serde_json::to_value(&model).map_err(|e| Error::new(e.to_string()))?;
    model["type"] = "BPE".into();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true});
    let end = json!([{"id": 0, "content": END_OF_TEXT, "special": true}]);
    let file = json!({"added_tokens": end, "pre_tokenizer": byte_level, "decoder": byte_level, "model": model});
    let bpe = of_json(&file).unwrap_or_else(|| Err(Error::new("it is of another kind than asked for")));
    let bpe = bpe.map_err(|e| Error::new(format!("the vocabulary that was learned cannot be used: {e}")))?;
    if bpe.vocab() < vocab {
        return Err(Error::new(format!(
            "the texts give a vocabulary of {} tokens, and {vocab} were asked for: no other pair of tokens comes twice",
            bpe.vocab()
        )));
    }
    Ok(bpe)
}
