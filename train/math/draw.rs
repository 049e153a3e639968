//! Random choices for the generators: ChaCha8 keyed by what is to be made, so nothing depends on what was made before.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// How large the numbers and how long the expressions are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    Easy,
    Medium,
    Hard,
}

impl Level {
    /// One of three values.
    pub(super) fn of<T>(self, easy: T, medium: T, hard: T) -> T {
        match self {
            Level::Easy => easy,
            Level::Medium => medium,
            Level::Hard => hard,
        }
    }
}

pub(super) struct Draw(ChaCha8Rng);

impl Draw {
    pub(super) fn new(key: [u64; 4]) -> Draw {
        let mut seed = [0; 32];
        for (bytes, word) in seed.chunks_exact_mut(8).zip(key) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Draw(ChaCha8Rng::from_seed(seed))
    }

    /// Evenly from `0..n` (the bias of the multiplication is below n / 2^64).
    pub(super) fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.0.next_u64()) * n as u128) >> 64) as usize
    }

    /// Evenly from `low..=high`.
    pub(super) fn int(&mut self, low: i128, high: i128) -> i128 {
        low + self.below((high - low + 1) as usize) as i128
    }

    /// Evenly from `-max..=max` without 0.
    pub(super) fn nonzero(&mut self, max: i128) -> i128 {
        let n = self.int(1, max);
        if self.coin() { n } else { -n }
    }

    /// At least 1, with a number of decimal digits drawn evenly from `low..=high`: small numbers stay common.
    pub(super) fn digits(&mut self, low: u32, high: u32) -> i128 {
        let n = self.int(low.into(), high.into()) as u32;
        self.int(10i128.pow(n - 1), 10i128.pow(n) - 1)
    }

    /// As [`Draw::digits`], of either sign.
    pub(super) fn signed(&mut self, low: u32, high: u32) -> i128 {
        let n = self.digits(low, high);
        if self.coin() { n } else { -n }
    }

    pub(super) fn coin(&mut self) -> bool {
        self.below(2) == 0
    }

    pub(super) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }

    /// `N` different lower-case letters for variables and functions; not `e` or `i` (constants), `l` or `o` (digits).
    pub(super) fn letters<const N: usize>(&mut self) -> [char; N] {
        let mut all: Vec<char> = ('a'..='z').filter(|c| !"eilo".contains(*c)).collect();
        self.shuffle(&mut all);
        std::array::from_fn(|n| all[n])
    }

    pub(super) fn letter(&mut self) -> char {
        self.letters::<1>()[0]
    }

    /// One of the phrasings with `{}` replaced.
    pub(super) fn phrase(&mut self, of: &[&str], what: impl std::fmt::Display) -> String {
        self.pick(of).replace("{}", &what.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_stay_in_range_and_reach_both_ends() {
        let mut draw = Draw::new([1, 2, 3, 4]);
        let seen: Vec<i128> = (0..500).map(|_| draw.int(-2, 2)).collect();
        assert_eq!((seen.iter().min(), seen.iter().max()), (Some(&-2), Some(&2)));
        for _ in 0..500 {
            let n = draw.digits(2, 4);
            assert!((10..10_000).contains(&n), "{n}");
            assert_ne!(draw.nonzero(3), 0);
            let [a, b, c] = draw.letters();
            assert!(a != b && b != c && a != c);
        }
        let first = |key| Draw::new(key).below(1 << 40);
        assert_eq!(first([1, 2, 3, 4]), first([1, 2, 3, 4]));
        assert_ne!(first([1, 2, 3, 4]), first([1, 2, 4, 3]));
    }
}
