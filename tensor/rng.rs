//! Random numbers from a counter (ChaCha8): element `i` of a fill depends on seed, stream and position only, so that
//! values are the same for any number of threads and can be drawn again from a saved position.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng};

use crate::dtype::{DType, Element};
use crate::tensor::Tensor;
use crate::threads;

/// Elements filled from one run of the generator.
const CHUNK: usize = 1024;
/// 32-bit words that every element uses, whatever the distribution.
const WORDS: u128 = 2;

/// Everything needed to continue a generator where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RngState {
    /// The seed.
    pub seed: u64,
    /// The stream within the seed.
    pub stream: u64,
    /// Values drawn so far.
    pub position: u64,
}

/// A seeded generator with a position that can be read, saved and set.
///
/// A clone draws the same values again; [`Rng::fork`] gives an independent generator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rng(RngState);

/// The finaliser of SplitMix64: spreads every bit of `x` over the result.
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Rng {
    /// The generator of a seed, at its start.
    pub fn new(seed: u64) -> Rng {
        Rng(RngState { seed, stream: 0, position: 0 })
    }

    /// The generator that stands at `state`.
    pub fn from_state(state: RngState) -> Rng {
        Rng(state)
    }

    /// Where the generator stands.
    pub fn state(&self) -> RngState {
        self.0
    }

    /// An independent generator named by `label`; does not depend on, nor change, the position of this one.
    pub fn fork(&self, label: &str) -> Rng {
        let hash = label
            .bytes()
            .fold(mix(self.0.stream ^ 0x9e37_79b9_7f4a_7c15), |h, b| mix(h ^ u64::from(b)).wrapping_add(h));
        Rng(RngState { stream: hash, position: 0, ..self.0 })
    }

    fn core(&self, skip: usize) -> ChaCha8Rng {
        let mut core = ChaCha8Rng::seed_from_u64(self.0.seed);
        core.set_stream(self.0.stream);
        core.set_word_pos((u128::from(self.0.position) + skip as u128) * WORDS);
        core
    }

    /// Fills `out` with random 32-bit words: those from word `start` on, counted from where the generator stands, which it
    /// stays at. For masks that are drawn again instead of kept.
    pub fn words(&self, start: u64, out: &mut [u32]) {
        let mut core = self.core(0);
        core.set_word_pos(u128::from(self.0.position) * WORDS + u128::from(start));
        out.iter_mut().for_each(|word| *word = core.next_u32());
    }

    /// What makes [`Rng::words`], for whoever draws them elsewhere: ChaCha8's key, its stream, and the number of the first word.
    pub fn chacha8(&self) -> ([u8; 32], u64, u128) {
        let core = self.core(0);
        (core.get_seed(), core.get_stream(), core.get_word_pos())
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        let bits = self.core(0).next_u64();
        self.0.position += 1;
        bits
    }

    /// A number in `[0, 1)`.
    pub fn next_f64(&mut self) -> f64 {
        unit(self.next_u64())
    }

    /// A number in `0..n`, each equally likely.
    ///
    /// # Panics
    /// When `n` is 0.
    #[track_caller]
    pub fn below(&mut self, n: u64) -> u64 {
        assert!(n > 0, "below: there is no number below 0");
        loop {
            // Multiply-shift; the few low products that would favour some results are drawn again.
            let product = u128::from(self.next_u64()) * u128::from(n);
            if product as u64 >= n.wrapping_neg() % n {
                return (product >> 64) as u64;
            }
        }
    }

    /// The numbers `0..n` in random order.
    pub fn permutation(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i, self.below(i as u64 + 1) as usize);
        }
        order
    }

    fn fill(&mut self, dtype: DType, shape: &[usize], f: impl Fn(&mut ChaCha8Rng, &mut [f64]) + Sync + Send) -> Tensor {
        let mut out = Tensor::empty(dtype, shape);
        let len = out.len();
        dispatch!(dtype, E => {
            threads::parallel_chunks_mut(out.as_mut_slice::<E>(), CHUNK, 16 * CHUNK, |i, piece| {
                let mut values = [0f64; CHUNK];
                f(&mut self.core(i * CHUNK), &mut values[..piece.len().next_multiple_of(2)]);
                piece.iter_mut().zip(values).for_each(|(y, x)| *y = E::from_f64(x));
            });
        });
        self.0.position += len.next_multiple_of(2) as u64;
        out
    }

    /// A tensor of independent numbers, uniform in `[low, high)` before rounding to `dtype`.
    pub fn uniform(&mut self, dtype: DType, shape: &[usize], low: f64, high: f64) -> Tensor {
        self.fill(dtype, shape, |core, values| {
            values.iter_mut().for_each(|x| *x = low + (high - low) * unit(core.next_u64()))
        })
    }

    /// A tensor of independent normal numbers (Box–Muller in f64, then rounded to `dtype`).
    pub fn normal(&mut self, dtype: DType, shape: &[usize], mean: f64, std: f64) -> Tensor {
        self.fill(dtype, shape, |core, values| {
            for pair in values.chunks_exact_mut(2) {
                let radius = (-2.0 * (1.0 - unit(core.next_u64())).ln()).sqrt();
                let angle = std::f64::consts::TAU * unit(core.next_u64());
                pair[0] = mean + std * radius * angle.cos();
                pair[1] = mean + std * radius * angle.sin();
            }
        })
    }

    /// A tensor of independent ids in `0..n` (I64 or U32).
    ///
    /// # Panics
    /// When `n` is 0 or above 2^52.
    #[track_caller]
    pub fn ids(&mut self, dtype: DType, shape: &[usize], n: u64) -> Tensor {
        assert!(n > 0 && n <= 1 << 52, "ids: the number of ids must be between 1 and 2^52, got {n}");
        self.fill(dtype, shape, |core, values| {
            values.iter_mut().for_each(|x| *x = ((u128::from(core.next_u64()) * u128::from(n)) >> 64) as f64);
        })
    }
}

/// The top 53 bits as a number in `[0, 1)`.
fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_do_not_depend_on_threads_or_on_the_cut_into_calls() {
        let draw =
            |threads| threads::with_threads(threads, || Rng::new(7).normal(DType::F64, &[5001], 0.0, 1.0).to_f64_vec());
        let whole = draw(1);
        assert_eq!(whole, draw(2));
        assert_eq!(whole, draw(8));
        let mut rng = Rng::new(7);
        let mut parts = rng.normal(DType::F64, &[1000], 0.0, 1.0).to_f64_vec();
        parts.extend(Rng::from_state(rng.state()).normal(DType::F64, &[4001], 0.0, 1.0).to_f64_vec());
        assert_eq!(whole, parts);
    }

    #[test]
    fn distributions_have_their_moments() {
        let mut rng = Rng::new(1);
        let x = rng.normal(DType::F32, &[100_000], 2.0, 3.0).to_f64_vec();
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let var = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
        assert!((mean - 2.0).abs() < 0.05 && (var - 9.0).abs() < 0.2, "{mean} {var}");
        let u = rng.uniform(DType::F64, &[100_000], -1.0, 3.0).to_f64_vec();
        assert!(u.iter().all(|x| (-1.0..3.0).contains(x)) && (u.iter().sum::<f64>() / 1e5 - 1.0).abs() < 0.02);
        let ids = rng.ids(DType::I64, &[10_000], 7).to_vec::<i64>();
        assert!((0..7).all(|id| (ids.iter().filter(|&&x| x == id).count() as f64 - 10_000.0 / 7.0).abs() < 200.0));
    }

    #[test]
    fn words_are_read_from_any_place_without_moving() {
        let mut rng = Rng::new(3);
        rng.next_u64();
        let (mut all, mut tail) = ([0; 300], [0; 100]);
        rng.words(0, &mut all);
        rng.words(200, &mut tail);
        assert_eq!(all[200..], tail);
        assert_eq!(rng.next_u64(), u64::from(all[0]) | u64::from(all[1]) << 32);
    }

    #[test]
    fn streams_seeds_and_positions_differ() {
        let base = Rng::new(3);
        let (mut a, mut b, mut c) = (base.fork("a"), base.fork("b"), Rng::new(4).fork("a"));
        let (x, y, z) = (a.next_u64(), b.next_u64(), c.next_u64());
        assert!(x != y && x != z && x != a.next_u64());
        assert_eq!(base.fork("a").next_u64(), x);
        let mut order = base.fork("order").permutation(100);
        assert_ne!(order, (0..100).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
    }
}
