//! `meta.json`: what a folder of prepared data says about itself.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::kinds::Kind;
use crate::marks::Class;
use crate::shards::{Files, Tokens};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// The file that makes a folder one of prepared data.
pub const META: &str = "meta.json";

/// What [`Meta::format`] says.
const FORMAT: &str = "kumiki tokens 1";

/// What a folder of prepared data has, and how it came to be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meta {
    /// `kumiki tokens 1`.
    pub format: String,
    /// Name of the tokenizer; see [`Tokenizer::name`].
    pub tokenizer: String,
    /// Ids lie below this.
    pub vocab: usize,
    /// The token after every document.
    pub end: u32,
    /// What kind of texts they are.
    pub kind: Kind,
    /// What was given, as it was given.
    pub inputs: Vec<String>,
    /// Files that were read.
    pub files: u64,
    /// Their bytes on the disk.
    pub file_bytes: u64,
    /// Part of the documents that was to be held out.
    pub val_fraction: f64,
    /// Which ones follows from this.
    pub seed: u64,
    /// Records that were passed over because they could not be used.
    pub skipped: u64,
    /// Documents without text, which were passed over, too.
    pub empty: u64,
    /// Stretches of bytes that were no UTF-8, and became U+FFFD.
    pub replaced: u64,
    /// Places where a long document had to be cut so that its tokens there may be others than those of the whole.
    pub torn: u64,
    /// To train on.
    pub train: PartMeta,
    /// Held out.
    pub val: PartMeta,
}

/// One of the two parts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartMeta {
    /// Documents, each of which ends in the end token.
    pub documents: u64,
    /// Tokens, ends included.
    pub tokens: u64,
    /// Bytes of text that they stand for; ends have none.
    pub bytes: u64,
    /// Tokens of answers; where classes are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_tokens: Option<u64>,
    /// Tokens of proofs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof_tokens: Option<u64>,
    /// Tokens of other source of files with proofs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_tokens: Option<u64>,
    /// Its files, in order.
    pub shards: Vec<ShardMeta>,
}

/// One file of tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardMeta {
    /// Its name in the folder.
    pub file: String,
    /// Its tokens.
    pub tokens: u64,
    /// XXH64 of its ids, in hexadecimal.
    pub checksum: String,
    /// The file of their classes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classes: Option<String>,
}

/// Prepared data, opened and checked.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// What the folder says.
    pub meta: Meta,
    /// What made the tokens.
    pub tokenizer: Tokenizer,
    /// To train on.
    pub train: Tokens,
    /// Held out; may be empty.
    pub val: Tokens,
}

impl PartMeta {
    /// Bytes of text that a token stands for, on average.
    pub fn bytes_per_token(&self) -> f64 {
        self.bytes as f64 / self.tokens.max(1) as f64
    }

    /// Whether these are the tokens that it speaks of, as far as they tell: a document ends in its end; where a tokenizer is
    /// exact every token has its bytes.
    fn check(&self, tokens: &Tokens, tokenizer: &Tokenizer) -> std::result::Result<(), String> {
        let (ids, classes) = tokens.census();
        let ends = tokenizer.end().and_then(|end| ids.get(end as usize)).copied().unwrap_or(0);
        // An end that is an ordinary token may be within a text, too; no byte is one.
        if ends < self.documents || (ends > self.documents && tokenizer.is_bytes()) {
            return Err(format!("says {} documents; its shards have {ends} that end", self.documents));
        }
        if !tokens.is_empty()
            && tokens.ids(tokens.len() - 1..tokens.len()).first().copied() != tokenizer.end().map(i64::from)
        {
            return Err("describes shards whose last document does not end".into());
        }
        if tokenizer.is_exact() && ends == self.documents {
            let length = |id: usize| tokenizer.token(id as u32).map_or(0, |token| token.len() as u64);
            let bytes: u64 = ids.iter().enumerate().filter(|(_, n)| **n > 0).map(|(id, n)| n * length(id)).sum();
            if bytes != self.bytes {
                return Err(format!("says {} bytes of text; its tokens stand for {bytes}", self.bytes));
            }
        }
        let said = [self.answer_tokens, self.proof_tokens, self.source_tokens];
        for ((class, said), found) in Class::ALL.iter().zip(said).zip(classes) {
            if said.unwrap_or(0) != found {
                let (name, said) = (class.name(), said.unwrap_or(0));
                return Err(format!("says {said} tokens of the class {name}; its shards have {found}"));
            }
        }
        Ok(())
    }
}

impl Meta {
    /// Of the parts and what made them; the caller fills in the rest.
    pub(super) fn new(tokenizer: &Tokenizer, kind: Kind) -> Meta {
        Meta {
            format: FORMAT.into(),
            tokenizer: tokenizer.name().into(),
            vocab: tokenizer.vocab(),
            end: tokenizer.end().unwrap_or_default(),
            kind,
            inputs: Vec::new(),
            files: 0,
            file_bytes: 0,
            val_fraction: 0.0,
            seed: 0,
            skipped: 0,
            empty: 0,
            replaced: 0,
            torn: 0,
            train: PartMeta::default(),
            val: PartMeta::default(),
        }
    }

    /// Whether `folder` says that it has prepared data.
    pub fn is_in(folder: &Path) -> bool {
        folder.join(META).is_file()
    }

    /// # Errors
    /// When there is no `meta.json`, or it says something else.
    pub fn read(folder: &Path) -> Result<Meta> {
        let path = folder.join(META);
        // A pipe would be waited for, for ever.
        if kumiki_tensor::files::is_special(&path) {
            return Err(Error::new(format!("`{}` is no regular file; expected a description of data", path.display())));
        }
        let text = fs::read_to_string(&path).map_err(|e| Error::io("read the description of the data", &path, e))?;
        let wrong = |what: String| Error::new(format!("`{}` {what}", path.display()));
        let value: serde_json::Value = serde_json::from_str(&text).map_err(|e| wrong(format!("is no JSON: {e}")))?;
        match value["format"].as_str() {
            Some(FORMAT) => {}
            Some(other) => return Err(wrong(format!("is of the format `{other}`; this program reads `{FORMAT}`"))),
            None => return Err(wrong(format!("does not describe prepared data; expected the format `{FORMAT}`"))),
        }
        // From the text again, not from the value: its errors say in which line.
        serde_json::from_str(&text).map_err(|e| wrong(format!("does not describe prepared data: {e}")))
    }
}

impl Prepared {
    /// Opens a folder, and checks all that is in it.
    ///
    /// # Errors
    /// When a file is missing, damaged or another than the description says, or the tokenizer cannot be used.
    pub fn open(folder: &Path) -> Result<Prepared> {
        let meta = Meta::read(folder)?;
        let tokenizer = Tokenizer::load(&meta.tokenizer, Some(meta.end), folder)?;
        let path = folder.join(META);
        if (tokenizer.vocab(), tokenizer.end()) != (meta.vocab, Some(meta.end)) {
            let (name, vocab) = (tokenizer.name(), tokenizer.vocab());
            return Err(Error::new(format!(
                "`{}` speaks of {} tokens of which {} ends a text; the tokenizer `{name}` has {vocab}{}",
                path.display(),
                meta.vocab,
                meta.end,
                tokenizer.end().map_or(String::new(), |end| format!(" and ends with {end}"))
            )));
        }
        let questions = meta.kind == Kind::Mathematics;
        let part = |part: &PartMeta| -> Result<Tokens> {
            let inside = |name: &str| -> Result<PathBuf> {
                let plain = Path::new(name).file_name().is_some_and(|last| last == name);
                let outside = || Error::new(format!("`{}`: the file `{name}` is not in the folder", path.display()));
                plain.then(|| folder.join(name)).ok_or_else(outside)
            };
            let of = |shard: &ShardMeta| -> Result<(PathBuf, Option<PathBuf>, u64)> {
                let sum = u64::from_str_radix(&shard.checksum, 16).map_err(|_| {
                    let (path, sum) = (path.display(), &shard.checksum);
                    Error::new(format!("`{path}`: `{sum}` is no checksum in hexadecimal"))
                })?;
                Ok((inside(&shard.file)?, shard.classes.as_deref().map(inside).transpose()?, sum))
            };
            let paths = part.shards.iter().map(of).collect::<Result<Vec<_>>>()?;
            let files = part.shards.iter().zip(&paths).map(|(shard, (ids, classes, sum))| Files {
                ids,
                classes: classes.as_deref(),
                tokens: shard.tokens,
                sum: *sum,
            });
            let tokens =
                Tokens::open(&folder.display().to_string(), meta.vocab, questions, &files.collect::<Vec<_>>())?;
            if tokens.len() != part.tokens {
                let (path, found) = (path.display(), tokens.len());
                return Err(Error::new(format!("`{path}` says {} tokens; its shards have {found}", part.tokens)));
            }
            part.check(&tokens, &tokenizer).map_err(|what| Error::new(format!("`{}` {what}", path.display())))?;
            Ok(tokens)
        };
        Ok(Prepared { train: part(&meta.train)?, val: part(&meta.val)?, tokenizer, meta })
    }
}
