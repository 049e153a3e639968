//! Files of byte-level tokenizers: Hugging Face's `tokenizer.json`, as far as it is of GPT-2's kind, and GPT-2's own pair of
//! `vocab.bpe` and `encoder.json`; and GPT-2 itself, from the crate that ships its vocabulary.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use serde_json::{Map, Value, json};

use super::bpe::{Bpe, Special};
use super::letters;
use crate::{Error, Result};

/// GPT-2's only special token.
pub(crate) const END_OF_TEXT: &str = "<|endoftext|>";

/// Tokens of GPT-2 that are made from text.
const GPT2_TOKENS: u32 = 50_256;

/// GPT-2, without a file.
///
/// # Errors
/// When the crate's vocabulary is not what it was.
pub(crate) fn gpt2() -> Result<Arc<Bpe>> {
    static GPT2: OnceLock<std::result::Result<Arc<Bpe>, String>> = OnceLock::new();
    let load = || -> Result<Arc<Bpe>> {
        let shipped = tiktoken_rs::r50k_base().map_err(|e| Error::new(e.to_string()))?;
        let token = |id| shipped.decode_bytes(&[id]).map(Vec::into_boxed_slice).map_err(|e| Error::new(e.to_string()));
        let tokens = (0..GPT2_TOKENS).map(token).collect::<Result<Vec<_>>>()?;
        Bpe::of_ranked(tokens, vec![Special { id: GPT2_TOKENS, text: END_OF_TEXT.into() }]).map(Arc::new)
    };
    let loaded = GPT2.get_or_init(|| load().map_err(|e| e.to_string()));
    loaded.clone().map_err(|e| Error::new(format!("GPT-2's vocabulary cannot be used: {e}")))
}

/// A tokenizer of `vocab.bpe` and the `encoder.json` beside it.
///
/// # Errors
/// When one cannot be read, or they do not belong together.
pub(crate) fn of_pair(merges: &Path, encoder: &Path) -> Result<Bpe> {
    let read = |path: &Path| std::fs::read_to_string(path).map_err(|e| Error::io("read the tokenizer", path, e));
    let wrong = |path: &Path, what: &str| Error::new(format!("`{}`: {what}", path.display()));
    let vocab: Map<String, Value> = serde_json::from_str(&read(encoder)?)
        .map_err(|e| wrong(encoder, &format!("expected an object of tokens and their ids: {e}")))?;
    let text = read(merges)?;
    let lines = text.lines().filter(|line| !line.starts_with("#version") && !line.is_empty());
    let learned = lines.map(|line| line.split_once(' ')).collect::<Option<Vec<_>>>();
    let learned = learned.ok_or_else(|| wrong(merges, "expected two tokens on every line, separated by a blank"))?;
    let specials: Vec<(String, u64)> =
        vocab.get(END_OF_TEXT).and_then(Value::as_u64).map(|id| (END_OF_TEXT.to_owned(), id)).into_iter().collect();
    build(&vocab, &learned, specials).map_err(|e| wrong(merges, &format!("with `{}`: {e}", encoder.display())))
}

fn build(vocab: &Map<String, Value>, learned: &[(&str, &str)], specials: Vec<(String, u64)>) -> Result<Bpe> {
    // Beyond this an id is a mistake, and the list by id would be of its size.
    const MOST: u64 = 1 << 24;
    let id_of = |token: &str| -> Result<u32> {
        let id = vocab.get(token).and_then(Value::as_u64).filter(|&id| id < MOST);
        id.map(|id| id as u32).ok_or_else(|| Error::new(format!("`{token}` has no id below {MOST}")))
    };
    let mut tokens: Vec<Option<Box<[u8]>>> = Vec::new();
    for token in vocab.keys().filter(|token| specials.iter().all(|(name, _)| *name != **token)) {
        let id = id_of(token)? as usize;
        let bytes = letters::to_bytes(token).filter(|bytes| !bytes.is_empty());
        let bytes = bytes.ok_or_else(|| Error::new(format!("token `{token}` is not in the letters of bytes")))?;
        tokens.resize(tokens.len().max(id + 1), None);
        if tokens[id].replace(bytes).is_some() {
            return Err(Error::new(format!("two tokens have the id {id}")));
        }
    }
    let mut named = Vec::new();
    for (text, id) in specials {
        let free = id < MOST && tokens.get(id as usize).is_none_or(Option::is_none);
        if !free {
            return Err(Error::new(format!("the id {id} of `{text}` is in use or beyond {MOST}")));
        }
        named.push(Special { id: id as u32, text });
    }
    let pairs = learned.iter().map(|(l, r)| Ok((id_of(l)?, id_of(r)?))).collect::<Result<Vec<_>>>()?;
    Bpe::new(tokens, pairs, named)
}

/// The byte-level tokenizer that a `tokenizer.json` describes; `None` if it is of another kind, or has an option that changes
/// what is done.
pub(crate) fn of_json(file: &Value) -> Option<Result<Bpe>> {
    let model = &file["model"];
    let unset = |value: &Value| value.is_null() || *value == json!(false) || *value == json!("");
    let splitter = &file["pre_tokenizer"];
    let words = splitter["type"] == "ByteLevel"
        && splitter["add_prefix_space"] == json!(false)
        && splitter["use_regex"] != json!(false);
    let plain = ["dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"];
    let same = words
        && (model["type"] == "BPE" || model["type"].is_null())
        && plain.iter().all(|key| unset(&model[key]))
        && unset(&file["normalizer"])
        && (file["decoder"]["type"] == "ByteLevel");
    let vocab = model["vocab"].as_object().filter(|_| same)?;
    let learned = model["merges"].as_array()?;
    let two = |merge: &'_ Value| -> Option<(String, String)> {
        match merge {
            Value::String(text) => text.split_once(' ').map(|(l, r)| (l.to_owned(), r.to_owned())),
            _ => Some((merge[0].as_str()?.to_owned(), merge[1].as_str()?.to_owned())),
        }
    };
    let learned = learned.iter().map(two).collect::<Option<Vec<_>>>()?;
    let mut specials = Vec::new();
    for token in file["added_tokens"].as_array().into_iter().flatten() {
        // Other added tokens are found in texts.
        if token["special"] != json!(true) {
            return None;
        }
        specials.push((token["content"].as_str()?.to_owned(), token["id"].as_u64()?));
    }
    let learned: Vec<(&str, &str)> = learned.iter().map(|(l, r)| (l.as_str(), r.as_str())).collect();
    Some(build(vocab, &learned, specials))
}

/// `bpe` as a `tokenizer.json` that [`of_json`] and Hugging Face's library read.
pub(crate) fn to_json(bpe: &Bpe) -> Value {
    let is_special = |id: u32| bpe.specials().iter().any(|special| special.id == id);
    let mut vocab = Map::new();
    for id in 0..bpe.vocab() as u32 {
        if let Some(token) = bpe.token(id).filter(|_| !is_special(id)) {
            vocab.insert(letters::from_bytes(token), id.into());
        }
    }
    let word = |id: u32| letters::from_bytes(bpe.token(id).unwrap_or_default());
    let merges: Vec<Value> = bpe.learned().into_iter().map(|(l, r)| json!([word(l), word(r)])).collect();
    let added: Vec<Value> = bpe.specials().iter().map(added_token).collect();
    // Their names are in the vocabulary, too, where libraries look for them.
    for special in bpe.specials() {
        vocab.insert(special.text.clone(), special.id.into());
    }
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        },
    })
}

fn added_token(special: &Special) -> Value {
    json!({
        "id": special.id, "content": special.text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::bpe::Cache;

    fn encode(bpe: &Bpe, text: &str) -> Vec<u32> {
        let mut out = Vec::new();
        bpe.encode(text.as_bytes(), &mut Cache::default(), &mut out);
        out
    }

    #[test]
    fn gpt2_as_published() {
        let gpt2 = gpt2().unwrap();
        assert_eq!(gpt2.vocab(), 50_257);
        // The examples of OpenAI's and others' documentation.
        assert_eq!(encode(&gpt2, "Hello world"), [15496, 995]);
        assert_eq!(
            encode(&gpt2, "Hello, world! This isn't   all.\n\n"),
            [15496, 11, 995, 0, 770, 2125, 470, 220, 220, 477, 13, 628]
        );
        assert!(!encode(&gpt2, END_OF_TEXT).contains(&GPT2_TOKENS), "in a text it is text");
        assert_eq!(gpt2.token(GPT2_TOKENS).unwrap(), END_OF_TEXT.as_bytes());
    }

    #[test]
    fn json_there_and_back() {
        let gpt2 = gpt2().unwrap();
        let file = to_json(&gpt2);
        let back = of_json(&file).unwrap().unwrap();
        let text = "It's 1,234 crêpes 🥞, aren't they?\r\n\tYes… <|endoftext|>";
        assert_eq!(encode(&back, text), encode(&gpt2, text));
        assert_eq!((back.vocab(), back.specials(), back.learned()), (50_257, gpt2.specials(), gpt2.learned()));
        // What changes the tokens is not taken for this kind.
        for (pointer, value) in [
            ("/pre_tokenizer/add_prefix_space", json!(true)),
            ("/pre_tokenizer/use_regex", json!(false)),
            ("/normalizer", json!({"type": "NFC"})),
            ("/model/dropout", json!(0.1)),
            ("/model/ignore_merges", json!(true)),
            ("/added_tokens/0/special", json!(false)),
        ] {
            let mut other = file.clone();
            *other.pointer_mut(pointer).unwrap() = value;
            assert!(of_json(&other).is_none(), "{pointer}");
        }
        let mut broken = file.clone();
        broken["model"]["vocab"]["!"] = json!(5);
        assert!(of_json(&broken).unwrap().err().unwrap().to_string().contains("id 5"));
    }

    #[test]
    fn the_pair_of_files_of_gpt2() {
        let dir = crate::scratch::Scratch::new();
        let vocab: Map<String, Value> = (0..256u32)
            .map(|b| (letters::from_bytes(&[b as u8]), b.into()))
            .chain([("ab".into(), 256.into()), ("Ġab".into(), 257.into()), (END_OF_TEXT.into(), 258.into())])
            .collect();
        let encoder = dir.file("encoder.json", serde_json::to_vec(&vocab).unwrap());
        let merges = dir.file("vocab.bpe", "#version: 0.2\na b\nĠ ab\n");
        let bpe = of_pair(&merges, &encoder).unwrap();
        assert_eq!((encode(&bpe, "ab abc"), bpe.vocab()), (vec![256, 257, 99], 259));
        for (lines, what) in [("a b\nx\n", "two tokens on every line"), ("a c\n", "merge 0 gives"), ("a zz\n", "`zz`")]
        {
            let e = of_pair(&dir.file("bad.bpe", lines), &encoder).err().unwrap().to_string();
            assert!(e.contains("bad.bpe") && e.contains(what), "{e}");
        }
        assert!(of_pair(&merges, &dir.path().join("gone")).err().unwrap().to_string().contains("gone"));
    }
}
