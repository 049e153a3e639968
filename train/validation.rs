//! What models are measured on: windows of the held-out part, the same for every model, seed and run.

use std::sync::{Arc, OnceLock};

use crate::batches::{Batch, Gather, Source, check_shape};
use crate::marks::{Cursor, Marking};
use crate::{Error, Result};

/// Bytes of text that tokens stand for.
#[derive(Clone, Debug)]
pub(crate) enum TokenBytes {
    /// Of every token.
    Each(Arc<[u32]>),
    /// On average, where it depends on a token's neighbours.
    Mean(f64),
}

/// Fixed windows for validation, the same for every model, seed and run.
#[derive(Clone, Debug)]
pub struct Validation {
    source: Source,
    rows: usize,
    seq: usize,
    windows: u64,
    marking: Option<Marking>,
    /// What tokens stand for; `None` for bytes.
    bytes: Option<TokenBytes>,
    // Where the first window begins, when it has been looked for: it may be far from its file's start.
    first: Arc<OnceLock<Cursor>>,
}

impl Validation {
    /// Non-overlapping windows from the start of `source`: the whole of a text or at most `max_tokens` target tokens
    /// (at least one window). What remains after the last whole window is left out, except that a text shorter than
    /// one window gives one shorter window. For `math`, which is endless, `max_tokens` is needed.
    ///
    /// # Errors
    /// When `rows` or `seq` is 0, the text has fewer than 2 tokens, or `math` comes without `max_tokens`.
    pub fn new(source: Source, rows: usize, seq: usize, max_tokens: Option<u64>) -> Result<Validation> {
        check_shape(rows, seq)?;
        let limit = max_tokens.map(|n| (n / seq as u64).max(1));
        let (windows, seq) = match source.len() {
            Some(len) if len < 2 => {
                let name = source.name();
                return Err(Error::new(format!("`{name}` is too short to validate on: {len} tokens, 2 needed")));
            }
            Some(len) => {
                let seq = seq.min((len - 1) as usize);
                let all = (len - 1) / seq as u64;
                (limit.unwrap_or(all).min(all), seq)
            }
            None => {
                let needed = || Error::new("validation on `math`, which is endless, needs a number of tokens");
                (limit.ok_or_else(needed)?, seq)
            }
        };
        Ok(Validation { source, rows, seq, windows, marking: None, bytes: None, first: Arc::default() })
    }

    /// The same windows with the classes of their tokens, when `source` is a text; prepared tokens have theirs with them.
    /// Texts of questions lie one kind after another: of those the windows are spread evenly over the whole instead of
    /// taken from the start.
    pub fn marked(self, marking: Marking) -> Validation {
        Validation { marking: Some(marking), first: Arc::default(), ..self }
    }

    /// The same windows of tokens that stand for so many bytes.
    pub(crate) fn standing_for(self, bytes: TokenBytes) -> Validation {
        Validation { bytes: Some(bytes), ..self }
    }

    /// Bytes of text that target tokens stand for.
    pub fn bytes_of(&self, targets: &[i64]) -> f64 {
        match &self.bytes {
            None => targets.len() as f64,
            Some(TokenBytes::Each(bytes)) => {
                targets.iter().map(|&id| bytes.get(id as usize).copied().map_or(0.0, f64::from)).sum()
            }
            Some(TokenBytes::Mean(mean)) => targets.len() as f64 * mean,
        }
    }

    /// The first token of window `row` of a text of `len` tokens.
    fn start(&self, len: u64, row: u64) -> u64 {
        let all = (len - 1) / self.seq as u64;
        let questions = match &self.source {
            Source::Tokens(tokens) => tokens.questions,
            _ => self.marking == Some(Marking::Lines),
        };
        let at = match questions {
            true => (u128::from(row) * u128::from(all) / u128::from(self.windows)) as u64,
            false => row,
        };
        at * self.seq as u64
    }

    /// A cursor at the first window; for texts that are marked.
    fn cursor(&self) -> Option<Cursor> {
        let (Source::Text(text), Some(marking)) = (&self.source, self.marking) else { return None };
        let first = self.first.get_or_init(|| {
            let mut cursor = Cursor::new(marking);
            cursor.mark(text, self.start(text.len(), 0), 1, &mut Vec::new());
            cursor
        });
        Some(first.clone())
    }

    /// Tokens of a window, T.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// Target tokens in all batches together.
    pub fn tokens(&self) -> u64 {
        self.windows * self.seq as u64
    }

    /// The batches, in order; the last may have fewer rows.
    pub fn batches(&self) -> impl Iterator<Item = Batch> + '_ {
        let mut cursor = self.cursor();
        (0..self.windows).step_by(self.rows).map(move |first| {
            let rows = (self.rows as u64).min(self.windows - first);
            let mut batch = Gather::new(&self.source, rows as usize, self.seq);
            for row in first..first + rows {
                match &self.source {
                    Source::Text(text) => batch.text(text, self.start(text.len(), row), cursor.as_mut()),
                    Source::Tokens(tokens) => batch.tokens(tokens, self.start(tokens.len(), row), true),
                    // Seed 0 whatever the run's seed: losses of different seeds stay comparable.
                    Source::Math(text) => batch.math(text, 0, row),
                }
            }
            batch.finish()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::Corpus;
    use crate::marks::Class;

    /// A text of `n` distinguishable positions.
    fn text(n: usize) -> Corpus {
        Corpus::from_bytes("text", (0..n).map(|i| (i % 251) as u8).collect::<Vec<_>>())
    }

    #[test]
    fn validation_is_fixed_windows_in_order() {
        let val = Validation::new(Source::Text(text(100)), 4, 8, None).unwrap();
        assert_eq!(val.tokens(), 96);
        let seen: Vec<i64> = val.batches().flat_map(|b| b.targets()).collect();
        assert_eq!(seen, (1..97).collect::<Vec<i64>>());
        assert_eq!(val.batches().map(|b| b.rows).collect::<Vec<_>>(), [4, 4, 4]);
        let some = Validation::new(Source::Text(text(100)), 4, 8, Some(47)).unwrap();
        assert_eq!(some.batches().map(|b| b.rows).collect::<Vec<_>>(), [4, 1]);
        let short = Validation::new(Source::Text(text(5)), 4, 8, None).unwrap();
        let only: Vec<Batch> = short.batches().collect();
        assert_eq!((only.len(), only[0].rows, only[0].seq, only[0].inputs()), (1, 1, 4, vec![0, 1, 2, 3]));
        assert!(Validation::new(Source::Text(text(1)), 4, 8, None).is_err());
    }

    #[test]
    fn windows_of_questions_are_spread_over_the_whole_and_marked() {
        // 100 questions of one kind, then 100 of another.
        let lines = [b"a?\n1\n".repeat(100), b"b?\n2\n".repeat(100)].concat();
        let source = || Source::Text(Corpus::from_bytes("text", lines.clone()));
        let all = Validation::new(source(), 4, 10, None).unwrap();
        let marked = all.clone().marked(Marking::Lines);
        let tokens = |v: &Validation| v.batches().flat_map(|b| b.targets()).collect::<Vec<_>>();
        assert_eq!(tokens(&all), tokens(&marked), "all windows are all windows");
        let few = Validation::new(source(), 4, 10, Some(60)).unwrap().marked(Marking::Lines);
        let starts: Vec<u64> = (0..6).map(|row| few.start(lines.len() as u64, row)).collect();
        assert_eq!(starts, [0, 160, 330, 490, 660, 820]);
        for _ in 0..2 {
            for batch in few.batches() {
                let classes = batch.target_classes().unwrap();
                for (token, class) in batch.targets().into_iter().zip(classes) {
                    let byte = token as u8;
                    if byte != b'\n' {
                        assert_eq!(class, byte.is_ascii_digit().then_some(Class::Answer));
                    }
                }
            }
        }
        let seen = tokens(&few);
        assert!(seen.contains(&i64::from(b'a')) && seen.contains(&i64::from(b'b')));
    }
}
