//! What a user names as data, made ready: `math`, a path to text with its held-out part, or a folder of prepared tokens.

use std::path::Path;

use crate::batches::{Batches, Source};
use crate::corpus::{self, Corpus, Split};
use crate::kinds::{Kind, Unpacked};
use crate::marks::Marking;
use crate::math::{MathText, SplitName};
use crate::prepare::{Meta, PartMeta, Prepared};
use crate::tokenizer::{ByteTokenizer, Tokenizer};
use crate::validation::{TokenBytes, Validation};
use crate::{Error, Result};

/// Target tokens of a validation on `math` when no number is asked for: about 1,000 questions.
pub const MATH_VAL_TOKENS: u64 = 65_536;

/// Where training and validation get their tokens.
#[derive(Clone, Debug)]
pub struct Data {
    /// `math`, or the path.
    pub name: String,
    /// What kind of text it is.
    pub kind: Kind,
    /// For training.
    pub train: Source,
    /// For validation; `None` if the text is too short to hold anything out.
    pub val: Option<Source>,
    /// How evaluations tell the classes of tokens in a text.
    pub marking: Option<Marking>,
    /// A sentence that the user should see: how the text was taken, or that validation is missing or short.
    pub note: Option<String>,
    /// What its tokens are: bytes, unless it was prepared with another tokenizer.
    pub tokenizer: Tokenizer,
    /// What a prepared folder says of its two parts.
    prepared: Option<[PartMeta; 2]>,
}

/// The last part of a corpus' name, which names its folders: `book.txt` for `texts/book.txt`.
///
/// # Errors
/// When the name is a path that has no last part, and is not there.
pub fn short_name(name: &str) -> Result<String> {
    let path = Path::new(name);
    let last = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    if let Some(last) = last(path) {
        return Ok(last);
    }
    // `.` and `..` have their name elsewhere, `/` has none.
    let whole = path.canonicalize().map_err(|e| Error::io("open the text", path, e))?;
    Ok(last(&whole).unwrap_or_else(|| "root".to_owned()))
}

/// The size of the vocabulary of the data of this name, without opening them: what models of them must have. That of bytes,
/// unless it is a folder of prepared tokens.
///
/// # Errors
/// When such a folder says nothing that can be understood.
pub fn vocab_of(name: &str) -> Result<usize> {
    let path = Path::new(name);
    if name != "math" && Meta::is_in(path) { Ok(Meta::read(path)?.vocab) } else { Ok(ByteTokenizer::VOCAB) }
}

impl Data {
    /// `math` is the built-in corpus (a file of that name is `./math`); a folder with a `meta.json` has prepared tokens in two
    /// parts, whatever `val_fraction` says ([`Prepared::open`]); anything else is a path for [`Corpus::open`], split by
    /// [`Corpus::split`] for windows of `seq + 1` tokens. A folder of DeepMind Mathematics is split as its folders say.
    ///
    /// # Errors
    /// Those of [`Prepared::open`], [`Corpus::open`] and [`Corpus::split`]; prepared tokens that are too few for a window.
    pub fn open(name: &str, val_fraction: f64, seq: usize) -> Result<Data> {
        if name == "math" {
            let text = |split| Source::Math(MathText::new(split));
            let (train, val) = (text(SplitName::Train), Some(text(SplitName::Interpolate)));
            let (kind, tokenizer) = (Kind::Mathematics, Tokenizer::bytes());
            return Ok(Data {
                name: name.into(),
                kind,
                train,
                val,
                marking: None,
                note: None,
                tokenizer,
                prepared: None,
            });
        }
        let path = Path::new(name);
        if Meta::is_in(path) {
            return Data::of_prepared(name, Prepared::open(path)?, seq);
        }
        let files = corpus::files(path)?;
        let kind = Kind::of(&files);
        let (split, taken) = match Unpacked::find(path, &files) {
            Some(unpacked) => {
                let [train, val] = [&unpacked.train, &unpacked.val].map(|files| Corpus::of_files(path, files));
                let folders = unpacked.folders.join(", ");
                let how = format!("training on {folders}; validation on interpolate; every second line is an answer");
                (Split { train: train?, val: val? }, Some(how))
            }
            None => {
                let lines = "taken as lines of questions and answers, for its files are named AREA__MODULE.txt";
                let split = Corpus::of_files(path, &files)?.split(val_fraction, seq)?;
                (split, (kind == Kind::Mathematics).then(|| lines.to_owned()))
            }
        };
        let taken = taken.map(|how| format!("`{name}`: {how}"));
        // Nothing was to be held out: then nothing is missing.
        let short = if val_fraction > 0.0 { split.note(seq) } else { None };
        let notes: Vec<String> = taken.into_iter().chain(short).collect();
        let note = (!notes.is_empty()).then(|| notes.join("; "));
        let val = (split.val.len() >= 2).then_some(Source::Text(split.val));
        let (train, marking) = (Source::Text(split.train), kind.marking());
        let tokenizer = Tokenizer::bytes();
        Ok(Data { name: name.into(), kind, train, val, marking, note, tokenizer, prepared: None })
    }

    fn of_prepared(name: &str, prepared: Prepared, seq: usize) -> Result<Data> {
        let Prepared { meta, tokenizer, train, val } = prepared;
        let (found, need) = (train.len(), seq as u64 + 1);
        if found < need {
            return Err(Error::new(format!(
                "`{name}` is too short: {found} tokens to train on found, {need} needed at sequence length {seq} (T + 1)"
            )));
        }
        let held = val.len();
        let note = match held {
            // Nothing was to be held out: then nothing is missing.
            0 if meta.val_fraction == 0.0 => None,
            0 | 1 => Some(format!("`{name}`: nothing is held out: no validation loss will be reported")),
            _ if held < need => Some(format!(
                "`{name}`: {held} tokens held out, fewer than a window of {need}: validation uses one shorter window"
            )),
            _ => None,
        };
        let val = (held >= 2).then_some(Source::Tokens(val));
        let (train, kind) = (Source::Tokens(train), meta.kind);
        let prepared = Some([meta.train, meta.val]);
        Ok(Data { name: name.into(), kind, train, val, marking: None, note, tokenizer, prepared })
    }

    /// Whether a model has these data's tokenizer: `whose` is the model, `name` and `vocab` are its tokenizer's.
    ///
    /// # Errors
    /// When the tokenizer or the size of the vocabulary is another one; the sentence names both.
    pub fn check_tokenizer(&self, whose: &str, name: &str, vocab: usize) -> Result<()> {
        let ours = &self.tokenizer;
        // Bytes with and without an end are told apart by their vocabularies alone.
        if (name, vocab) == (ours.name(), ours.vocab()) {
            return Ok(());
        }
        Err(Error::new(format!(
            "{whose} is of the tokenizer `{name}` ({vocab} tokens), `{}` of `{}` ({} tokens); expected the same: `kumiki data prepare` makes tokens of texts",
            self.name,
            ours.name(),
            ours.vocab()
        )))
    }

    /// Training batches; see [`Batches::new`].
    ///
    /// # Errors
    /// As [`Batches::new`].
    pub fn batches(&self, rows: usize, seq: usize, seed: u64) -> Result<Batches> {
        Batches::new(self.train.clone(), rows, seq, seed)
    }

    /// Validation windows, at most `max_tokens` target tokens ([`MATH_VAL_TOKENS`] on `math` if `None`); `None` if
    /// there is nothing to validate on. See [`Validation::new`].
    ///
    /// # Errors
    /// As [`Validation::new`].
    pub fn validation(&self, rows: usize, seq: usize, max_tokens: Option<u64>) -> Result<Option<Validation>> {
        self.val.as_ref().map(|val| self.windows(val, rows, seq, max_tokens)).transpose()
    }

    /// As [`Data::validation`], on what is trained on.
    ///
    /// # Errors
    /// As [`Validation::new`].
    pub fn training_windows(&self, rows: usize, seq: usize, max_tokens: Option<u64>) -> Result<Validation> {
        self.windows(&self.train, rows, seq, max_tokens)
    }

    fn windows(&self, source: &Source, rows: usize, seq: usize, max_tokens: Option<u64>) -> Result<Validation> {
        let max_tokens = match source {
            Source::Math(_) => max_tokens.or(Some(MATH_VAL_TOKENS)),
            Source::Text(_) | Source::Tokens(_) => max_tokens,
        };
        let windows = Validation::new(source.clone(), rows, seq, max_tokens)?;
        let windows = match &self.prepared {
            Some([train, val]) => {
                let part = if matches!(&self.val, Some(val) if std::ptr::eq(val, source)) { val } else { train };
                windows.standing_for(self.token_bytes(part))
            }
            None => windows,
        };
        Ok(match self.marking {
            Some(marking) => windows.marked(marking),
            None => windows,
        })
    }

    fn token_bytes(&self, part: &PartMeta) -> TokenBytes {
        if !self.tokenizer.is_byte_level() {
            return TokenBytes::Mean(part.bytes_per_token());
        }
        // An id without a token is in no text.
        let bytes = |id| self.tokenizer.token(id).map_or(0, |token| token.len() as u32);
        TokenBytes::Each((0..self.tokenizer.vocab() as u32).map(bytes).collect())
    }

    /// What a change of the text changes: fingerprints of both parts in hexadecimal; empty for `math`, which cannot change.
    pub fn fingerprint(&self) -> String {
        let of = |source: &Source| match source {
            Source::Text(text) => format!("{:016x}", text.fingerprint()),
            Source::Tokens(tokens) => format!("{:016x}", tokens.fingerprint()),
            Source::Math(_) => String::new(),
        };
        of(&self.train) + &self.val.as_ref().map_or(String::new(), of)
    }

    /// Tokens to train on; `None` for the endless `math`.
    pub fn train_tokens(&self) -> Option<u64> {
        self.train.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prepare;
    use crate::scratch::Scratch;

    #[test]
    fn math_and_paths() {
        let math = Data::open("math", 0.02, 32).unwrap();
        assert_eq!(math.validation(4, 32, None).unwrap().unwrap().tokens(), MATH_VAL_TOKENS);
        assert!(math.batches(2, 32, 0).unwrap().get(0).classes.is_some());
        let dir = Scratch::new();
        let path = dir.file("a.txt", vec![b'x'; 10_000]);
        let text = Data::open(path.to_str().unwrap(), 0.02, 32).unwrap();
        assert_eq!(text.batches(2, 32, 0).unwrap().steps_per_epoch(), Some(9799 / 64));
        assert_eq!(text.validation(4, 32, None).unwrap().unwrap().tokens(), 6 * 32);
        assert!(text.note.is_none());
    }

    #[test]
    fn case_36_from_the_file_on() {
        let dir = Scratch::new();
        let open = |n: usize, fraction| {
            let path = dir.file(&format!("{n}.txt"), vec![b'x'; n]);
            Data::open(path.to_str().unwrap(), fraction, 32)
        };
        assert!(open(0, 0.02).unwrap_err().to_string().contains("0 bytes"));
        assert!(open(32, 0.02).unwrap_err().to_string().contains("32 tokens found, 33 needed"));
        let one = open(33, 0.02).unwrap();
        assert_eq!(one.batches(2, 32, 0).unwrap().get(0).tokens.len(), 66);
        assert!(one.validation(2, 32, None).unwrap().is_none() && one.note.is_some());
        assert!(open(33, 0.0).unwrap().note.is_none());
    }
    #[test]
    fn deep_mind_mathematics_is_split_by_its_folders() {
        let dir = Scratch::new();
        for (folder, line) in [("train-easy", "1\n2\n"), ("train-hard", "3\n4\n"), ("interpolate", "5\n6\n")] {
            dir.file(&format!("dm/{folder}/a__b.txt"), line.repeat(50));
        }
        dir.file("dm/extrapolate/a__b.txt", "7\n8\n");
        let data = Data::open(dir.path().join("dm").to_str().unwrap(), 0.02, 32).unwrap();
        assert_eq!((data.kind, data.train_tokens()), (Kind::Mathematics, Some(400)));
        let note = data.note.as_ref().unwrap();
        assert!(note.contains("training on train-easy, train-hard; validation on interpolate"), "{note}");
        let train: Vec<i64> = data.batches(2, 32, 0).unwrap().get(0).tokens;
        assert!(train.iter().all(|token| b"1234\n".contains(&(*token as u8))));
        let val = data.validation(2, 32, None).unwrap().unwrap();
        let batch = val.batches().next().unwrap();
        let answers = batch.target_classes().unwrap().iter().filter(|class| class.is_some()).count();
        assert_eq!((answers, batch.targets().iter().filter(|&&t| t == i64::from(b'6')).count()), (32, 16));

        let one = Data::open(dir.path().join("dm/train-easy").to_str().unwrap(), 0.2, 32).unwrap();
        assert_eq!((one.kind, one.train_tokens(), one.marking), (Kind::Mathematics, Some(160), Some(Marking::Lines)));
        assert!(one.note.unwrap().contains("lines of questions and answers"));
    }

    #[test]
    fn a_prepared_folder_is_data_like_its_texts() {
        let dir = Scratch::new();
        for n in 0..4 {
            dir.file(&format!("dm/train-easy/a__{n}.txt"), format!("What is {n} + {n}?\n{}\n", 2 * n).repeat(50));
        }
        dir.file("dm/interpolate/a__0.txt", "What is 7 + 7?\n14\n".repeat(50));
        let prepare = |name: &str, val_fraction| {
            let out = dir.path().join("out");
            let options = prepare::Options {
                inputs: vec![dir.path().join(name).to_str().unwrap().to_owned()],
                out: out.clone(),
                existing: prepare::Existing::Replace,
                tokenizer: Tokenizer::bytes_with_end(),
                val_fraction,
                seed: 0,
                skip_bad: 0,
                replace_invalid: false,
                shard_tokens: 100,
                stop: crate::stop::Stop::default(),
                threads: Some(2),
            };
            prepare::prepare(&options, |_| {}).unwrap();
            Data::open(out.to_str().unwrap(), 0.5, 32).unwrap()
        };
        let data = prepare("dm", 0.1);
        assert_eq!(
            (data.kind, data.train_tokens(), data.tokenizer.vocab()),
            (Kind::Mathematics, Some(4 * 50 * 18), 257)
        );
        let batches = data.batches(4, 32, 0).unwrap();
        let batch = batches.get(7);
        assert_eq!((batch.tokens.len(), batch.classes.is_none(), batch == batches.get(7)), (4 * 33, true, true));
        assert!(batch.tokens.contains(&256) && batches.steps_per_epoch() == Some(3599 / 128));
        let val = data.validation(4, 32, None).unwrap().unwrap();
        let (mut answers, mut bytes) = (String::new(), Vec::new());
        for batch in val.batches() {
            for (token, class) in batch.targets().into_iter().zip(batch.target_classes().unwrap()) {
                bytes.extend(u8::try_from(token).ok());
                if class.is_some() {
                    answers.push(char::from(token as u8));
                }
            }
        }
        assert!(answers.starts_with("14\n14\n") && bytes.starts_with(b"hat is 7 + 7?\n14\nWhat"));
        assert_eq!(val.bytes_of(&[65, 66, 256, 10]), 3.0);
        assert_eq!(data.fingerprint().len(), 32);
        assert_eq!((vocab_of(&data.name).unwrap(), vocab_of("math").unwrap()), (257, 256));
        assert!(data.check_tokenizer("the model", "byte-eot", 257).is_ok());
        let e = data.check_tokenizer("the model", "byte", 256).unwrap_err().to_string();
        assert!(e.contains("`byte` (256 tokens)") && e.contains("`byte-eot` (257 tokens)"), "{e}");

        dir.file("short.txt", "x".repeat(32));
        assert!(prepare("short.txt", 0.0).validation(1, 32, None).unwrap().is_none(), "33 tokens with the end");
        let e = Data::open(dir.path().join("out").to_str().unwrap(), 0.0, 33).unwrap_err().to_string();
        assert!(e.contains("33 tokens to train on found, 34 needed"), "{e}");
    }

    #[test]
    fn names_of_corpora() {
        assert_eq!(short_name("math").unwrap(), "math");
        assert_eq!(short_name("texts/book.txt").unwrap(), "book.txt");
        assert_eq!(short_name("texts/").unwrap(), "texts");
        assert!(!short_name(".").unwrap().contains('.'));
        assert!(short_name("nowhere/..").unwrap_err().to_string().contains("nowhere"));
    }
}
