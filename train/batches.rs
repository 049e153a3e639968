//! Which tokens a step sees: a pure function of (corpus, seed, step), so that every compared model sees the same
//! batches and a resumed run goes on exactly where it stopped.
//!
//! **Order on a text of N tokens.** An epoch is a random order of the ⌊(N−1)/T⌋ windows of T+1 tokens that overlap by
//! the one token that is first a target, then an input; each epoch starts at another random phase, so windows are not cut
//! at the same places again. With R ranks of B rows an epoch has S = ⌊(N−1)/(B·T·R)⌋ steps on every rank
//! ([`steps_per_epoch`]); windows left over by that sit out this epoch, others in the next. A text too short for one
//! such step (S = 0) still trains: its windows are dealt out epoch after epoch, several times in one batch if need be.
//! The order is computed, not stored: no memory grows with N.
//!
//! **Order on `math`.** Row g of the run is its own contiguous stretch of the endless text, starting with a question.

use crate::corpus::Corpus;
use crate::marks::{Class, Cursor};
use crate::math::{self, MathText};
use crate::mix::mix;
use crate::shards::Tokens;
use crate::{Error, Result};
use std::ops::Range;

/// A batch of rows of `T+1` tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Number of rows B.
    pub rows: usize,
    /// Sequence length T.
    pub seq: usize,
    /// Token ids, row-major `[B, T+1]`.
    pub tokens: Vec<i64>,
    /// What a token belongs to, `[B, T+1]`; for `math`, and for the validation of marked texts.
    pub classes: Option<Vec<Option<Class>>>,
}

impl Batch {
    /// The first T tokens of each row, `[B, T]`.
    pub fn inputs(&self) -> Vec<i64> {
        self.columns(&self.tokens, 0..self.seq)
    }

    /// The last T tokens of each row, `[B, T]`: what is to be predicted.
    pub fn targets(&self) -> Vec<i64> {
        self.columns(&self.tokens, 1..self.seq + 1)
    }

    /// What the targets belong to, `[B, T]`; `None` when the source does not tell.
    pub fn target_classes(&self) -> Option<Vec<Option<Class>>> {
        self.classes.as_ref().map(|classes| self.columns(classes, 1..self.seq + 1))
    }

    fn columns<T: Copy>(&self, all: &[T], take: Range<usize>) -> Vec<T> {
        all.chunks_exact(self.seq + 1).flat_map(|row| row[take.clone()].iter().copied()).collect()
    }
}

/// Where rows come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A text, or one part of a split one.
    Text(Corpus),
    /// Prepared tokens, or one part of them.
    Tokens(Tokens),
    /// The built-in endless corpus.
    Math(MathText),
}

impl Source {
    /// Number of tokens; `None` for the endless `math`.
    pub fn len(&self) -> Option<u64> {
        match self {
            Source::Text(text) => Some(text.len()),
            Source::Tokens(tokens) => Some(tokens.len()),
            Source::Math(_) => None,
        }
    }

    /// Whether there is nothing to read.
    pub fn is_empty(&self) -> bool {
        self.len() == Some(0)
    }

    /// What messages call it.
    pub fn name(&self) -> &str {
        match self {
            Source::Text(text) => text.name(),
            Source::Tokens(tokens) => tokens.name(),
            Source::Math(_) => "math",
        }
    }
}

/// Steps that every rank runs in one epoch: ⌊(N−1)/(B·T·R)⌋ for N tokens, B rows a rank, sequence T, R ranks.
pub fn steps_per_epoch(tokens: u64, rows: usize, seq: usize, ranks: usize) -> u64 {
    tokens.saturating_sub(1) / (rows as u64 * seq as u64 * ranks as u64).max(1)
}

/// The endless training batches of one rank.
#[derive(Clone, Debug)]
pub struct Batches {
    source: Source,
    rows: usize,
    seq: usize,
    seed: u64,
    rank: usize,
    ranks: usize,
}

impl Batches {
    /// Batches `[rows, seq + 1]` of `source` in the order of `seed`.
    ///
    /// # Errors
    /// When `rows` or `seq` is 0, or the text has fewer than `seq + 1` tokens.
    pub fn new(source: Source, rows: usize, seq: usize, seed: u64) -> Result<Batches> {
        Batches::for_rank(source, rows, seq, seed, 0, 1)
    }

    /// The share of `rank` out of `ranks`, each with `rows` rows a step: together they see what one rank with
    /// `rows · ranks` rows sees.
    ///
    /// # Errors
    /// As [`Batches::new`], and when `rank >= ranks`.
    pub fn for_rank(source: Source, rows: usize, seq: usize, seed: u64, rank: usize, ranks: usize) -> Result<Batches> {
        check_shape(rows, seq)?;
        if rank >= ranks {
            return Err(Error::new(format!("rank {rank} of {ranks} ranks; expected 0 <= rank < ranks")));
        }
        if let Some(len) = source.len()
            && len < seq as u64 + 1
        {
            let (name, need) = (source.name(), seq + 1);
            return Err(Error::new(format!(
                "`{name}` is too short to train on: {len} tokens found, {need} needed at sequence length {seq} (T + 1)"
            )));
        }
        Ok(Batches { source, rows, seq, seed, rank, ranks })
    }

    /// Tokens of a row, T.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// The batch of `step` (from 0).
    pub fn get(&self, step: u64) -> Batch {
        let first = (step * self.ranks as u64 + self.rank as u64) * self.rows as u64;
        let mut batch = Gather::new(&self.source, self.rows, self.seq);
        for row in first..first + self.rows as u64 {
            match &self.source {
                Source::Text(text) => batch.text(text, self.start(text.len(), row), None),
                Source::Tokens(tokens) => batch.tokens(tokens, self.start(tokens.len(), row), false),
                Source::Math(text) => batch.math(text, self.seed, row),
            }
        }
        batch.finish()
    }

    /// Steps of one epoch over a text; `None` for the endless `math`. 0 if a batch holds more than the text.
    pub fn steps_per_epoch(&self) -> Option<u64> {
        self.source.len().map(|len| steps_per_epoch(len, self.rows, self.seq, self.ranks))
    }

    /// First token of the run's row `row`, counted over all ranks and steps.
    fn start(&self, len: u64, row: u64) -> u64 {
        let seq = self.seq as u64;
        let steps = steps_per_epoch(len, self.rows, self.seq, self.ranks);
        let per_epoch = match steps {
            0 => (len - 1) / seq,
            _ => steps * (self.rows * self.ranks) as u64,
        };
        let (epoch, at) = (row / per_epoch, row % per_epoch);
        // The largest phase that leaves as many windows as the epoch deals out.
        let slack = (len - 1 - per_epoch * seq).min(seq - 1);
        let key = mix(mix(self.seed) ^ epoch);
        let phase = mix(key ^ PHASE) % (slack + 1);
        let windows = (len - 1 - phase) / seq;
        phase + permute(at, windows, key) * seq
    }
}

/// A batch in the making.
pub(crate) struct Gather {
    batch: Batch,
}

impl Gather {
    pub(crate) fn new(source: &Source, rows: usize, seq: usize) -> Gather {
        let size = rows * (seq + 1);
        let classes = matches!(source, Source::Math(_)).then(|| Vec::with_capacity(size));
        Gather { batch: Batch { rows, seq, tokens: Vec::with_capacity(size), classes } }
    }

    pub(crate) fn text(&mut self, text: &Corpus, start: u64, cursor: Option<&mut Cursor>) {
        let count = self.batch.seq + 1;
        self.batch.tokens.extend(text.ids(start..start + count as u64));
        if let Some(cursor) = cursor {
            cursor.mark(text, start, count, self.batch.classes.get_or_insert_default());
        }
    }

    pub(crate) fn tokens(&mut self, tokens: &Tokens, start: u64, classes: bool) {
        let range = start..start + self.batch.seq as u64 + 1;
        self.batch.tokens.extend(tokens.ids(range.clone()));
        if classes && tokens.has_classes() {
            tokens.classes(range, self.batch.classes.get_or_insert_default());
        }
    }

    pub(crate) fn math(&mut self, text: &MathText, seed: u64, row: u64) {
        let math::Row { bytes, answers } = text.row(seed, row, self.batch.seq + 1);
        self.batch.tokens.extend(bytes.into_iter().map(i64::from));
        let classes = answers.into_iter().map(|answer| answer.then_some(Class::Answer));
        self.batch.classes.get_or_insert_default().extend(classes);
    }

    pub(crate) fn finish(self) -> Batch {
        self.batch
    }
}

pub(crate) fn check_shape(rows: usize, seq: usize) -> Result<()> {
    if rows == 0 || seq == 0 {
        return Err(Error::new(format!("a batch of {rows} rows of {seq} tokens; expected at least 1 row of 1 token")));
    }
    Ok(())
}

const PHASE: u64 = 0x9d8f_3c15_a7b2_64e1;

/// Where `index` of `0..n` stands in the order of `key`: a Feistel network on the next even number of bits, walked until
/// it falls inside `0..n` again (at most a factor 4 of steps on average). A bijection by construction.
fn permute(index: u64, n: u64, key: u64) -> u64 {
    let half = (64 - (n - 1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << half) - 1;
    let mut x = index;
    loop {
        let (mut left, mut right) = (x >> half, x & mask);
        for round in 0..6 {
            (left, right) = (right, left ^ (mix(key ^ mix(right ^ (round << 40))) & mask));
        }
        x = left << half | right;
        if x < n {
            return x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::validation::Validation;
    use std::collections::HashSet;

    /// A text of `n` distinguishable positions: two bytes each would be needed past 256, so compare by value mod 251.
    fn text(n: usize) -> Corpus {
        Corpus::from_bytes("text", (0..n).map(|i| (i % 251) as u8).collect::<Vec<_>>())
    }

    fn batches(n: usize, rows: usize, seq: usize, seed: u64) -> Batches {
        Batches::new(Source::Text(text(n)), rows, seq, seed).unwrap()
    }

    fn starts(b: &Batches, len: u64, rows: Range<u64>) -> Vec<u64> {
        rows.map(|row| b.start(len, row)).collect()
    }

    #[test]
    fn permutation_is_a_bijection_and_mixes() {
        for n in 1..300 {
            let seen: HashSet<u64> = (0..n).map(|i| permute(i, n, 7)).collect();
            assert_eq!(seen.len() as u64, n);
            assert!(seen.iter().all(|&x| x < n));
        }
        // Each of the 24 orders of 4 about equally often (expected 1000, σ ≈ 31).
        let mut counts = std::collections::HashMap::new();
        for key in 0..24_000 {
            *counts.entry([0, 1, 2, 3].map(|i| permute(i, 4, mix(key)))).or_insert(0u32) += 1;
        }
        assert_eq!(counts.len(), 24);
        assert!(counts.values().all(|&c| (850..1150).contains(&c)), "{counts:?}");
        let n = 1 << 33;
        assert!(permute(5, n, 1) < n && permute(5, n, 1) != permute(6, n, 1));
    }

    #[test]
    fn an_epoch_covers_every_window_once_and_the_next_is_another_order() {
        // 803 tokens, T = 8: 100 windows, 2 tokens of slack; 4 rows: 25 steps.
        let b = batches(803, 4, 8, 3);
        assert_eq!(b.steps_per_epoch(), Some(25));
        let mut orders = Vec::new();
        for epoch in 0..8 {
            let order = starts(&b, 803, epoch * 100..(epoch + 1) * 100);
            let phase = order.iter().min().unwrap();
            assert!(*phase <= 2);
            let seen: HashSet<u64> = order.iter().map(|s| (s - phase) / 8).collect();
            assert_eq!(seen.len(), 100);
            assert!(order.iter().all(|s| (s - phase).is_multiple_of(8) && s + 8 < 803));
            orders.push(order);
        }
        assert!(orders.iter().map(|o| o.iter().min().unwrap()).collect::<HashSet<_>>().len() > 1, "one phase only");
        assert_ne!(orders[0], orders[1]);
        assert_ne!(orders[0], starts(&batches(803, 4, 8, 4), 803, 0..100));
    }

    #[test]
    fn targets_follow_inputs_and_a_step_is_pure() {
        let b = batches(5000, 3, 16, 1);
        for step in [0, 1, 99, 12345] {
            let batch = b.get(step);
            assert_eq!(batch, b.clone().get(step));
            assert_eq!((batch.tokens.len(), batch.classes.as_ref()), (3 * 17, None));
            for (i, t) in batch.inputs().iter().zip(batch.targets()) {
                assert_eq!((i + 1) % 251, t);
            }
        }
        assert_ne!(b.get(0), b.get(1));
    }

    #[test]
    fn case_36_t_plus_1_tokens_train_and_fewer_are_an_error() {
        for n in [0, 8] {
            let e = Batches::new(Source::Text(text(n)), 4, 8, 0).unwrap_err().to_string();
            assert!(e.contains(&format!("{n} tokens found, 9 needed")), "{e}");
        }
        let batch = batches(9, 4, 8, 0).get(77);
        assert_eq!(batch.inputs(), [0, 1, 2, 3, 4, 5, 6, 7].repeat(4));
        assert!(Batches::new(Source::Text(text(9)), 0, 8, 0).is_err());
        assert!(Batches::new(Source::Text(text(9)), 1, 0, 0).is_err());
    }

    #[test]
    fn case_19_ranks_share_one_order_and_run_equally_many_steps() {
        // floor((N - 1) / (B T R))
        assert_eq!(steps_per_epoch(0, 2, 8, 3), 0);
        assert_eq!(steps_per_epoch(48, 2, 8, 3), 0);
        assert_eq!(steps_per_epoch(49, 2, 8, 3), 1);
        assert_eq!(steps_per_epoch(1 << 40, 16, 1024, 8), ((1 << 40) - 1) / (1 << 17));
        let one = batches(1000, 6, 8, 5);
        for step in 0..60 {
            let together: Vec<i64> = (0..3)
                .flat_map(|rank| {
                    let b = Batches::for_rank(Source::Text(text(1000)), 2, 8, 5, rank, 3).unwrap();
                    assert_eq!(b.steps_per_epoch(), Some(20));
                    b.get(step).tokens
                })
                .collect();
            assert_eq!(together, one.get(step).tokens, "step {step}");
        }
        assert!(Batches::for_rank(Source::Text(text(99)), 1, 8, 0, 3, 3).is_err());
    }

    #[test]
    fn math_rows_are_pure_disjoint_and_carry_answers() {
        let train = Source::Math(MathText::default());
        let b = Batches::new(train.clone(), 2, 200, 9).unwrap();
        let batch = b.get(3);
        assert_eq!(batch, b.get(3));
        assert_ne!(batch.tokens[..201], batch.tokens[201..]);
        let answers = batch.target_classes().unwrap().iter().filter(|class| **class == Some(Class::Answer)).count();
        assert!(answers > 4 && answers < 300, "{answers}");
        assert!(Validation::new(train.clone(), 2, 200, None).is_err());
        let val = Validation::new(train, 2, 200, Some(1000)).unwrap();
        assert_eq!(val.batches().map(|b| b.rows).collect::<Vec<_>>(), [2, 2, 1]);
        assert_eq!(val.batches().next(), val.batches().next());
    }
}
