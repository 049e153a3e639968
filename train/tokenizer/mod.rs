//! Tokenizers: bytes, byte-level byte-pair encoding (GPT-2's, or learned by `kumiki data train-tokenizer`), and whatever else
//! a Hugging Face `tokenizer.json` describes.
//!
//! | name | vocabulary | end of text | any bytes come back exactly |
//! |---|---|---|---|
//! | `byte` | the 256 bytes | none | yes |
//! | `byte-eot` | the 256 bytes, and | 256 | yes |
//! | `gpt2` | 50,257 | 50,256 `<\|endoftext\|>` | yes |
//! | a file | as it says | a special token of it | if it is byte-level |
//!
//! A text is never searched for special tokens: `<|endoftext|>` in it is ordinary text.

#[cfg(feature = "bpe")]
mod bpe;
mod byte;
#[cfg(feature = "bpe")]
mod files;
#[cfg(feature = "hugging-face")]
mod hugging_face;
mod kept;
#[cfg(feature = "bpe")]
mod letters;
#[cfg(feature = "bpe")]
mod pretokenize;
mod stream;

use std::fmt;
use std::fs;
use std::path::Path;
use std::sync::Arc;

#[cfg(feature = "bpe")]
use crate::mix::{hash, mix};
use crate::{Error, Result};

pub use byte::ByteTokenizer;
pub use stream::{StreamDecoder, TokenDecoder};

/// The file that a folder keeps a tokenizer in, unless its name says all.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// The names that are no paths.
pub const NAMES: [&str; 2] = ["byte", "gpt2"];

/// Names of tokens that end a text, in the order in which they are looked for.
#[cfg(feature = "bpe")]
const ENDS: [&str; 7] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>"];

/// One of the tokenizers; clones share it.
#[derive(Clone)]
pub struct Tokenizer {
    name: Arc<str>,
    engine: Engine,
    end: Option<u32>,
}

#[derive(Clone)]
enum Engine {
    Bytes,
    #[cfg(feature = "bpe")]
    Bpe(Arc<bpe::Bpe>),
    #[cfg(feature = "hugging-face")]
    HuggingFace(Arc<hugging_face::HuggingFace>, Arc<[u8]>),
}

impl Tokenizer {
    /// Bytes and nothing else: what texts are trained on without preparation.
    pub fn bytes() -> Tokenizer {
        Tokenizer { name: "byte".into(), engine: Engine::Bytes, end: None }
    }

    /// Bytes, and a token 256 that ends a text.
    pub fn bytes_with_end() -> Tokenizer {
        Tokenizer { name: "byte-eot".into(), engine: Engine::Bytes, end: Some(ByteTokenizer::VOCAB as u32) }
    }

    /// What `--tokenizer` names, for texts with ends: `byte`, `gpt2`, or a path: of a `tokenizer.json`, of a `vocab.bpe` with
    /// `encoder.json` beside it, or of a folder with either. `end` names the token that ends a text, where it is not one of the
    /// usual.
    ///
    /// # Errors
    /// When a file cannot be read or used, has no token that ends a text, or this program was built without what it needs.
    pub fn open(name: &str, end: Option<&str>) -> Result<Tokenizer> {
        let plain = |tokenizer| match end {
            None => Ok(tokenizer),
            Some(end) => Err(Error::new(format!("`{name}` has its own end of a text; `{end}` cannot be it"))),
        };
        match name {
            "byte" | "byte-eot" => plain(Tokenizer::bytes_with_end()),
            "gpt2" => plain(Tokenizer::gpt2()?),
            path => of_path(Path::new(path), end),
        }
    }

    /// GPT-2's, with the vocabulary that this program has.
    ///
    /// # Errors
    /// When it was built without.
    #[cfg(feature = "bpe")]
    pub fn gpt2() -> Result<Tokenizer> {
        let bpe = files::gpt2()?;
        let end = bpe.specials().first().map(|special| special.id);
        Ok(Tokenizer { name: "gpt2".into(), engine: Engine::Bpe(bpe), end })
    }

    /// GPT-2's, with the vocabulary that this program has.
    ///
    /// # Errors
    /// When it was built without.
    #[cfg(not(feature = "bpe"))]
    pub fn gpt2() -> Result<Tokenizer> {
        Err(without("the tokenizer `gpt2`", "bpe"))
    }

    /// Learns a byte-level vocabulary of `vocab` tokens from texts.
    ///
    /// # Errors
    /// When `vocab` is too small, or too large for the texts.
    #[cfg(feature = "hugging-face")]
    pub fn train(vocab: usize, texts: impl Iterator<Item = String> + Send) -> Result<Tokenizer> {
        Ok(of_bpe("trained", hugging_face::train(vocab, texts)?))
    }

    /// Learns a byte-level vocabulary of `vocab` tokens from texts.
    ///
    /// # Errors
    /// When `vocab` is too small, or too large for the texts.
    #[cfg(not(feature = "hugging-face"))]
    pub fn train(_vocab: usize, _texts: impl Iterator<Item = String> + Send) -> Result<Tokenizer> {
        Err(without("learning a vocabulary", "hugging-face"))
    }

    /// What it is called: `byte`, `byte-eot`, `gpt2`, or the name of its file and a number that changes with its contents.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Ids lie below this.
    pub fn vocab(&self) -> usize {
        let tokens = match &self.engine {
            Engine::Bytes => ByteTokenizer::VOCAB,
            #[cfg(feature = "bpe")]
            Engine::Bpe(bpe) => bpe.vocab(),
            #[cfg(feature = "hugging-face")]
            Engine::HuggingFace(inner, _) => inner.vocab(),
        };
        tokens.max(self.end.map_or(0, |end| end as usize + 1))
    }

    /// The token that ends a text.
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    /// Whether a token is one byte.
    pub fn is_bytes(&self) -> bool {
        matches!(self.engine, Engine::Bytes)
    }

    /// Whether a token is some bytes, the same wherever it stands; so that any bytes come back exactly.
    pub fn is_byte_level(&self) -> bool {
        match &self.engine {
            Engine::Bytes => true,
            #[cfg(feature = "bpe")]
            Engine::Bpe(_) => true,
            #[cfg(feature = "hugging-face")]
            Engine::HuggingFace(inner, _) => inner.is_byte_level(),
        }
    }

    /// Whether its tokens stand for the bytes of a text and no others: it changes nothing, and adds and leaves out nothing.
    pub(crate) fn is_exact(&self) -> bool {
        match &self.engine {
            // What its normalizers and added tokens do is the file's business.
            #[cfg(feature = "hugging-face")]
            Engine::HuggingFace(..) => false,
            _ => true,
        }
    }

    /// Whether a text may be cut between a letter and a blank without a change of its tokens.
    pub(crate) fn cuts_cleanly(&self) -> bool {
        match &self.engine {
            #[cfg(feature = "hugging-face")]
            Engine::HuggingFace(inner, _) => inner.cuts_cleanly(),
            _ => true,
        }
    }

    /// The tokens of `bytes`. For more than one text, [`Tokenizer::encoder`] is quicker.
    ///
    /// # Errors
    /// When `bytes` are no UTF-8 and the tokenizer needs that.
    pub fn encode(&self, bytes: &[u8]) -> Result<Vec<u32>> {
        let mut out = Vec::new();
        self.encoder().encode(bytes, &mut out)?;
        Ok(out)
    }

    /// Encodes one text after the other, and remembers words.
    pub fn encoder(&self) -> Encoder<'_> {
        Encoder {
            tokenizer: self,
            #[cfg(feature = "bpe")]
            cache: matches!(self.engine, Engine::Bpe(_)).then(Default::default),
        }
    }

    /// The bytes of one token of a byte-level tokenizer; the one that ends a text has none. `None` for an id that it does not
    /// have, or if it is of another kind.
    pub fn token(&self, id: u32) -> Option<Box<[u8]>> {
        if self.end == Some(id) {
            return Some([].into());
        }
        match &self.engine {
            Engine::Bytes => u8::try_from(id).ok().map(|byte| [byte].into()),
            #[cfg(feature = "bpe")]
            Engine::Bpe(bpe) => bpe.token(id).map(Into::into),
            #[cfg(feature = "hugging-face")]
            Engine::HuggingFace(inner, _) => inner.is_byte_level().then(|| inner.token(id)).flatten(),
        }
    }

    /// The bytes that `ids` stand for; ends of texts add nothing.
    ///
    /// # Errors
    /// When an id is none of the vocabulary: it and its place are named.
    pub fn decode(&self, ids: &[u32]) -> Result<Vec<u8>> {
        #[cfg(feature = "hugging-face")]
        if let Engine::HuggingFace(inner, _) = &self.engine
            && !inner.is_byte_level()
        {
            let vocab = self.vocab();
            if let Some(at) = ids.iter().position(|&id| id as usize >= vocab) {
                return Err(self.unknown(ids[at], at));
            }
            let text: Vec<u32> = ids.iter().copied().filter(|&id| Some(id) != self.end).collect();
            return inner.decode(&text).map(String::into_bytes);
        }
        let mut out = Vec::new();
        for (at, &id) in ids.iter().enumerate() {
            out.extend_from_slice(&self.token(id).ok_or_else(|| self.unknown(id, at))?);
        }
        Ok(out)
    }

    fn unknown(&self, id: u32, at: usize) -> Error {
        let (name, vocab) = (self.name(), self.vocab());
        Error::new(format!("token {at} is {id}: the tokenizer `{name}` has no such token among its {vocab}"))
    }

    /// Turns tokens that arrive one by one into text.
    pub fn decoder(&self) -> TokenDecoder {
        TokenDecoder::new(self.clone())
    }

    /// What a folder must keep of it in [`TOKENIZER_FILE`]; `None` when the name says all.
    pub fn file(&self) -> Option<Vec<u8>> {
        match &self.engine {
            Engine::Bytes => None,
            #[cfg(feature = "bpe")]
            Engine::Bpe(_) if &*self.name == "gpt2" => None,
            #[cfg(feature = "bpe")]
            Engine::Bpe(bpe) => Some(files::to_json(bpe).to_string().into_bytes()),
            #[cfg(feature = "hugging-face")]
            Engine::HuggingFace(_, bytes) => Some(bytes.to_vec()),
        }
    }

    /// A tokenizer of this [`Tokenizer::name`], whose file, if it has one, is in `folder`; `end` is its token that ends a text.
    ///
    /// # Errors
    /// When the file is not there, cannot be used, or is another than the name says.
    pub fn load(name: &str, end: Option<u32>, folder: &Path) -> Result<Tokenizer> {
        match name {
            "byte" => return Ok(Tokenizer::bytes()),
            "byte-eot" => return Ok(Tokenizer::bytes_with_end()),
            "gpt2" => return Tokenizer::gpt2(),
            _ => {}
        }
        let path = folder.join(TOKENIZER_FILE);
        let mut found = read(&path)?;
        let number = |name: &str| name.rsplit_once('@').map(|(_, number)| number.to_owned());
        if number(name).is_none() || number(name) != number(&found.name) {
            return Err(Error::new(format!(
                "`{}` is not the tokenizer `{name}`: its contents give `{}`",
                path.display(),
                found.name
            )));
        }
        found.end = end;
        found.name = name.into();
        Ok(found)
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer(`{}`, {} tokens)", self.name, self.vocab())
    }
}

/// The same name: the same tokens.
impl PartialEq for Tokenizer {
    fn eq(&self, other: &Tokenizer) -> bool {
        self.name == other.name && self.end == other.end
    }
}

/// Encodes texts one after the other.
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    #[cfg(feature = "bpe")]
    cache: Option<bpe::Cache>,
}

impl Encoder<'_> {
    /// Appends the tokens of `bytes` to `out`.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode(&mut self, bytes: &[u8], out: &mut Vec<u32>) -> Result<()> {
        match &self.tokenizer.engine {
            Engine::Bytes => out.extend(bytes.iter().map(|&byte| u32::from(byte))),
            #[cfg(feature = "bpe")]
            Engine::Bpe(bpe) => bpe.encode(bytes, self.cache.get_or_insert_default(), out),
            #[cfg(feature = "hugging-face")]
            Engine::HuggingFace(inner, _) => inner.encode(bytes, |(id, _)| out.push(id))?,
        }
        Ok(())
    }

    /// As [`Encoder::encode`]; `starts` gets where in `bytes` each token begins.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub(crate) fn encode_placed(&mut self, bytes: &[u8], out: &mut Vec<u32>, starts: &mut Vec<usize>) -> Result<()> {
        let first = out.len();
        #[cfg(feature = "hugging-face")]
        if let Engine::HuggingFace(inner, _) = &self.tokenizer.engine
            && !inner.cuts_cleanly()
        {
            return inner.encode(bytes, |(id, start)| {
                out.push(id);
                starts.push(start);
            });
        }
        self.encode(bytes, out)?;
        let mut at = 0;
        for id in &out[first..] {
            starts.push(at);
            at += match &self.tokenizer.engine {
                #[cfg(feature = "bpe")]
                Engine::Bpe(bpe) => bpe.token(*id).map_or(0, <[u8]>::len),
                #[cfg(feature = "hugging-face")]
                Engine::HuggingFace(inner, _) => inner.token(*id).map_or(0, |token| token.len()),
                Engine::Bytes => usize::from(*id < ByteTokenizer::VOCAB as u32),
            };
        }
        Ok(())
    }
}

#[cfg(not(all(feature = "bpe", feature = "hugging-face")))]
fn without(what: &str, feature: &str) -> Error {
    Error::new(format!("{what} needs the feature `{feature}`, and this program was built without it"))
}

fn of_path(path: &Path, end: Option<&str>) -> Result<Tokenizer> {
    let meta = fs::metadata(path).map_err(|e| Error::io("open the tokenizer", path, e))?;
    let inside = |name: &str| Some(path.join(name)).filter(|file| file.is_file());
    let found =
        if !meta.is_dir() { Some(path.to_owned()) } else { inside(TOKENIZER_FILE).or_else(|| inside("vocab.bpe")) };
    let found = found.ok_or_else(|| {
        Error::new(format!("the folder `{}` has neither `{TOKENIZER_FILE}` nor `vocab.bpe`", path.display()))
    })?;
    let mut tokenizer = read(&found)?;
    if let Some(end) = end {
        tokenizer.end = tokenizer.id_of(end);
        if tokenizer.end.is_none() {
            return Err(Error::new(format!("`{}` has no token `{end}` to end a text with", found.display())));
        }
    }
    if tokenizer.end.is_none() {
        return Err(Error::new(format!(
            "`{}` has none of the usual tokens that end a text; name one with --end-token",
            found.display()
        )));
    }
    Ok(tokenizer)
}

#[cfg(not(feature = "bpe"))]
fn read(path: &Path) -> Result<Tokenizer> {
    Err(without(&format!("the tokenizer `{}`", path.display()), "bpe"))
}

#[cfg(not(feature = "bpe"))]
impl Tokenizer {
    fn id_of(&self, _token: &str) -> Option<u32> {
        None
    }
}

#[cfg(feature = "bpe")]
impl Tokenizer {
    fn id_of(&self, token: &str) -> Option<u32> {
        match &self.engine {
            Engine::Bytes => None,
            Engine::Bpe(bpe) => bpe.specials().iter().find(|special| special.text == token).map(|special| special.id),
            #[cfg(feature = "hugging-face")]
            Engine::HuggingFace(inner, _) => inner.id(token),
        }
    }
}

#[cfg(feature = "bpe")]
fn of_bpe(stem: &str, bpe: bpe::Bpe) -> Tokenizer {
    let number = files::to_json(&bpe).to_string().into_bytes();
    let engine = Engine::Bpe(Arc::new(bpe));
    named(stem, &number, engine)
}

/// With the number that its contents give, and the usual end of a text.
#[cfg(feature = "bpe")]
fn named(stem: &str, contents: &[u8], engine: Engine) -> Tokenizer {
    let number = mix(hash(contents) ^ contents.len() as u64) as u32;
    let mut tokenizer = Tokenizer { name: format!("{stem}@{number:08x}").into(), engine, end: None };
    tokenizer.end = ENDS.iter().find_map(|end| tokenizer.id_of(end));
    tokenizer
}

/// The tokenizer in a file, with the usual token that ends a text, if it has one.
#[cfg(feature = "bpe")]
fn read(path: &Path) -> Result<Tokenizer> {
    let wrong = |e: &dyn fmt::Display| Error::new(format!("`{}` cannot be used as a tokenizer: {e}", path.display()));
    let stem = path.file_stem().map_or_else(|| "file".into(), |stem| stem.to_string_lossy().replace('@', "-"));
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("bpe")) {
        let bpe = files::of_pair(path, &path.with_file_name("encoder.json"))?;
        return Ok(if is_gpt2(&bpe) { Tokenizer::gpt2()? } else { of_bpe(&stem, bpe) });
    }
    // A pipe would be waited for, for ever.
    if kumiki_tensor::files::is_special(path) {
        return Err(wrong(&"it is no regular file"));
    }
    let bytes = fs::read(path).map_err(|e| Error::io("read the tokenizer", path, e))?;
    let file: serde_json::Value =
        serde_json::from_slice(&bytes).map_err(|e| wrong(&format!("expected a tokenizer.json: {e}")))?;
    if !file["model"].is_object() {
        return Err(wrong(&"it has no `model`; expected Hugging Face's tokenizer.json, or a vocab.bpe"));
    }
    match files::of_json(&file) {
        Some(bpe) => {
            let bpe = bpe.map_err(|e| wrong(&e))?;
            Ok(if is_gpt2(&bpe) { Tokenizer::gpt2()? } else { of_bpe(&stem, bpe) })
        }
        None => by_library(&stem, bytes, &file).map_err(|e| wrong(&e)),
    }
}

#[cfg(feature = "bpe")]
fn is_gpt2(bpe: &bpe::Bpe) -> bool {
    files::gpt2().is_ok_and(|gpt2| {
        let same = |id| bpe.token(id) == gpt2.token(id);
        bpe.vocab() == gpt2.vocab() && (0..bpe.vocab() as u32).all(same) && bpe.learned() == gpt2.learned()
    })
}

#[cfg(feature = "hugging-face")]
fn by_library(stem: &str, bytes: Vec<u8>, file: &serde_json::Value) -> Result<Tokenizer> {
    let inner = hugging_face::HuggingFace::new(&bytes, file)?;
    let contents = bytes.clone();
    Ok(named(stem, &contents, Engine::HuggingFace(Arc::new(inner), bytes.into())))
}

#[cfg(all(feature = "bpe", not(feature = "hugging-face")))]
fn by_library(_stem: &str, _bytes: Vec<u8>, _file: &serde_json::Value) -> Result<Tokenizer> {
    Err(without("a tokenizer of this kind", "hugging-face"))
}

#[cfg(test)]
mod tests;
