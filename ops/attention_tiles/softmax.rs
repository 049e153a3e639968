//! The elementwise halves of attention on a tile of transposed scores, `scores[key * stride + query]`: queries lie in
//! the lanes, so that maxima and sums over keys need no step across lanes.
//!
//! Key `r` of the tile is visible to query `c` when `r <= c + diagonal`; hidden entries become exactly 0.

use crate::simd::{Kernel, Lanes, Real};

/// The part of the tile that lanes `column..column + lanes` see: keys before the first number are visible to all of
/// them, those before the second one to some.
#[inline(always)]
pub(crate) fn visible(column: usize, lanes: usize, diagonal: isize, keys: usize) -> (usize, usize) {
    let until =
        |query: usize| (query as isize).saturating_add(diagonal).saturating_add(1).clamp(0, keys as isize) as usize;
    (until(column), until(column + lanes - 1))
}

/// The lanes from `column` on that do not see key `row`, which some of them see.
#[inline(always)]
pub(crate) fn hidden<L: Lanes>(column: usize, diagonal: isize, row: usize) -> L::Mask {
    L::first_lanes((row as isize - diagonal - column as isize) as usize)
}

/// Scores become weights `exp(s - shift)`, and the statistics of every query move on by the tile.
///
/// The shift is the running maximum, or stays what it is. A query that has seen no key has shift -inf and sum 0.
pub(super) struct SoftmaxStep<'a, E> {
    pub scores: &'a mut [E],
    pub stride: usize,
    pub keys: usize,
    pub queries: usize,
    pub diagonal: isize,
    /// Whether `shift` is known to bound the scores and is left alone; then so is `factor`.
    pub fixed: bool,
    pub shift: &'a mut [E],
    pub sum: &'a mut [E],
    /// What sums under the old shift have to be multiplied with.
    pub factor: &'a mut [E],
}

impl<E: Real> SoftmaxStep<'_, E> {
    pub fn run(self) {
        let padded = self.queries.next_multiple_of(64 / size_of::<E>());
        assert!(padded <= self.stride && self.keys * self.stride <= self.scores.len());
        assert!(padded <= self.shift.len().min(self.sum.len()).min(self.factor.len()));
        E::dispatch(self);
    }
}

impl<E: Real> Kernel<E> for SoftmaxStep<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let (zero, lowest) = (L::splat(E::ZERO), L::splat(E::NEG_INFINITY));
        let (keys, stride) = (self.keys, self.stride);
        for c in (0..self.queries).step_by(L::N) {
            let (full, partial) = visible(c, L::N, self.diagonal, keys);
            // SAFETY: asserted before the dispatch: every row holds whole vectors up to the last query, as do the
            // statistics, and `r` stays below the number of keys.
            let at = |r: usize| unsafe { self.scores.as_ptr().add(r * stride + c).cast_mut() };
            for r in full..partial {
                let s = at(r);
                // SAFETY: as above.
                unsafe { L::select(hidden::<L>(c, self.diagonal, r), lowest, L::load_ptr(s)).store_ptr(s) };
            }
            let old = L::load(&self.shift[c..]);
            let mut shift = old;
            if !self.fixed {
                let mut greatest = [old, lowest, lowest, lowest];
                let mut r = 0;
                while r + 4 <= partial {
                    for (k, greatest) in greatest.iter_mut().enumerate() {
                        // SAFETY: as above.
                        *greatest = unsafe { L::load_ptr(at(r + k)) }.max(*greatest);
                    }
                    r += 4;
                }
                while r < partial {
                    // SAFETY: as above.
                    greatest[0] = unsafe { L::load_ptr(at(r)) }.max(greatest[0]);
                    r += 1;
                }
                let greatest = greatest[0].max(greatest[1]).max(greatest[2].max(greatest[3]));
                greatest.store(&mut self.shift[c..]);
                // -inf minus -inf would be NaN: queries without keys so far are shifted by 0 instead.
                shift = L::select(greatest.eq(lowest), zero, greatest);
            }
            let mut sum = zero;
            for r in 0..partial {
                let s = at(r);
                // SAFETY: as above.
                unsafe {
                    let weight = (L::load_ptr(s) - shift).exp();
                    weight.store_ptr(s);
                    sum = sum + weight;
                }
            }
            for r in partial..keys {
                // SAFETY: as above.
                unsafe { zero.store_ptr(at(r)) };
            }
            if !self.fixed {
                let factor = (old - shift).exp();
                factor.store(&mut self.factor[c..]);
                sum = L::load(&self.sum[c..]).mul_add(factor, sum);
            } else {
                sum = L::load(&self.sum[c..]) + sum;
            }
            sum.store(&mut self.sum[c..]);
        }
    }
}

/// Scores become weights `p = exp(s - lse)`; where `slopes` holds `dp = dout · v`, it becomes `ds = p (dp - delta)`.
pub(super) struct SoftmaxGradient<'a, E> {
    pub scores: &'a mut [E],
    pub slopes: Option<&'a mut [E]>,
    pub stride: usize,
    pub keys: usize,
    pub queries: usize,
    pub diagonal: isize,
    pub lse: &'a [E],
    pub delta: &'a [E],
}

impl<E: Real> SoftmaxGradient<'_, E> {
    pub fn run(self) {
        let padded = self.queries.next_multiple_of(64 / size_of::<E>());
        assert!(padded <= self.stride && self.keys * self.stride <= self.scores.len());
        assert!(self.slopes.as_ref().is_none_or(|slopes| slopes.len() >= self.keys * self.stride));
        assert!(padded <= self.lse.len().min(self.delta.len()));
        E::dispatch(self);
    }
}

impl<E: Real> Kernel<E> for SoftmaxGradient<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(mut self) {
        let zero = L::splat(E::ZERO);
        let lowest = L::splat(E::NEG_INFINITY);
        let scores = self.scores.as_mut_ptr();
        let slopes = self.slopes.as_mut().map(|slopes| slopes.as_mut_ptr());
        for c in (0..self.queries).step_by(L::N) {
            let (full, partial) = visible(c, L::N, self.diagonal, self.keys);
            let (lse, delta) = (L::load(&self.lse[c..]), L::load(&self.delta[c..]));
            for r in 0..self.keys {
                let i = r * self.stride + c;
                let (mut p, mut ds) = (zero, zero);
                if r < partial {
                    // SAFETY: asserted before the dispatch: every row of both tiles holds whole vectors up to the
                    // last query.
                    let mut s = unsafe { L::load_ptr(scores.add(i)) };
                    if r >= full {
                        s = L::select(hidden::<L>(c, self.diagonal, r), lowest, s);
                    }
                    p = (s - lse).exp();
                    if let Some(slopes) = slopes {
                        // SAFETY: as above.
                        ds = p * (unsafe { L::load_ptr(slopes.add(i)) } - delta);
                    }
                }
                // SAFETY: as above.
                unsafe { p.store_ptr(scores.add(i)) };
                if let Some(slopes) = slopes {
                    // SAFETY: as above.
                    unsafe { ds.store_ptr(slopes.add(i)) };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_diagonal_cuts_where_it_should() {
        assert_eq!(visible(0, 8, 0, 96), (1, 8));
        assert_eq!(visible(8, 8, -3, 96), (6, 13));
        assert_eq!(visible(8, 8, -20, 96), (0, 0));
        assert_eq!(visible(88, 8, 0, 90), (89, 90));
        assert_eq!(visible(0, 8, isize::MAX, 96), (96, 96));
    }

    /// Two tiles in a row, with a diagonal, against sums of exponentials; the second one raises the maximum.
    #[test]
    fn streaming_equals_one_pass() {
        const NAN: f64 = f64::NAN;
        let (mut shift, mut sum, mut factor) = ([f64::NEG_INFINITY; 8], [0.0; 8], [NAN; 8]);
        let mut first: Vec<f64> = (0..16).map(|i| (i as f64 * 0.7).sin() * 3.0).collect();
        let mut second: Vec<f64> = (0..24).map(|i| 2.0 + (i as f64 * 0.9).cos() * 3.0).collect();
        let (s1, s2) = (first.clone(), second.clone());
        let mut step = |scores: &mut [f64], keys, diagonal| {
            SoftmaxStep {
                scores,
                stride: 8,
                keys,
                queries: 3,
                diagonal,
                fixed: false,
                shift: &mut shift,
                sum: &mut sum,
                factor: &mut factor,
            }
            .run();
        };
        step(&mut first, 2, 0);
        step(&mut second, 3, -2);
        // Query 2 sees both keys of the first tile and key 0 of the second one; queries 0 and 1 see none there.
        let expected = [s1[0].exp(), s1[1].exp() + s1[9].exp(), s1[2].exp() + s1[10].exp() + s2[2].exp()];
        for c in 0..3 {
            assert!((sum[c] * shift[c].exp() / expected[c] - 1.0).abs() < 1e-14, "query {c}");
        }
        assert_eq!((second[0], second[1], second[8 + 2]), (0.0, 0.0, 0.0));
        assert!((second[2] - (s2[2] - shift[2]).exp()).abs() < 1e-15);
    }
}
