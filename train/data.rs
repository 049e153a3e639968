//! What a user names as data, made ready: `math`, or a path to text with its held-out part.

use crate::Result;
use crate::batches::{Batches, Source, Validation};
use crate::corpus::Corpus;
use crate::math::{MathText, SplitName};

/// Target tokens of a validation on `math` when no number is asked for: about 1,000 questions.
pub const MATH_VAL_TOKENS: u64 = 65_536;

/// Where training and validation get their tokens.
#[derive(Clone, Debug)]
pub struct Data {
    /// `math`, or the path.
    pub name: String,
    /// For training.
    pub train: Source,
    /// For validation; `None` if the text is too short to hold anything out.
    pub val: Option<Source>,
    /// A sentence that the user should see: validation is missing or short.
    pub note: Option<String>,
}

impl Data {
    /// `math` is the built-in corpus (a file of that name is `./math`); anything else is a path for [`Corpus::open`],
    /// split by [`Corpus::split`] for windows of `seq + 1` tokens. Errors are those of these two.
    pub fn open(name: &str, val_fraction: f64, seq: usize) -> Result<Data> {
        if name == "math" {
            let text = |split| Source::Math(MathText::new(split));
            let (train, val) = (text(SplitName::Train), Some(text(SplitName::Interpolate)));
            return Ok(Data { name: name.into(), train, val, note: None });
        }
        let split = Corpus::open(name)?.split(val_fraction, seq)?;
        // Nothing was to be held out: then nothing is missing.
        let note = if val_fraction > 0.0 { split.note(seq) } else { None };
        let val = (split.val.len() >= 2).then_some(Source::Text(split.val));
        Ok(Data { name: name.into(), train: Source::Text(split.train), val, note })
    }

    /// Training batches; see [`Batches::new`].
    pub fn batches(&self, rows: usize, seq: usize, seed: u64) -> Result<Batches> {
        Batches::new(self.train.clone(), rows, seq, seed)
    }

    /// Validation windows, at most `max_tokens` target tokens ([`MATH_VAL_TOKENS`] on `math` if `None`); `None` if
    /// there is nothing to validate on. See [`Validation::new`].
    pub fn validation(&self, rows: usize, seq: usize, max_tokens: Option<u64>) -> Result<Option<Validation>> {
        let Some(val) = &self.val else { return Ok(None) };
        let max_tokens = match val {
            Source::Math(_) => max_tokens.or(Some(MATH_VAL_TOKENS)),
            Source::Text(_) => max_tokens,
        };
        Validation::new(val.clone(), rows, seq, max_tokens).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn math_and_paths() {
        let math = Data::open("math", 0.02, 32).unwrap();
        assert_eq!(math.validation(4, 32, None).unwrap().unwrap().tokens(), MATH_VAL_TOKENS);
        assert!(math.batches(2, 32, 0).unwrap().get(0).answers.is_some());
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
}
