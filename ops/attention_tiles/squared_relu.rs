//! Squared ReLU on a tile of transposed scores, `scores[key * stride + query]`: `p = relu(s)²`, `dp/ds = 2 relu(s)`.
//!
//! Key `r` of the tile is visible to query `c` when `r <= c + diagonal`; hidden entries become exactly 0.

use super::softmax::{hidden, visible};
use crate::simd::{Kernel, Lanes, Real};

/// Scores become weights.
pub(crate) struct SquaredRelu<'a, E> {
    pub scores: &'a mut [E],
    pub stride: usize,
    pub keys: usize,
    pub queries: usize,
    pub diagonal: isize,
}

impl<E: Real> SquaredRelu<'_, E> {
    pub fn run(self) {
        let SquaredRelu { scores, stride, keys, queries, diagonal } = self;
        SquaredReluGradient { scores, slopes: None, stride, keys, queries, diagonal }.run();
    }
}

/// Scores become weights; where `slopes` holds those of weights, it becomes those of scores.
pub(crate) struct SquaredReluGradient<'a, E> {
    pub scores: &'a mut [E],
    pub slopes: Option<&'a mut [E]>,
    pub stride: usize,
    pub keys: usize,
    pub queries: usize,
    pub diagonal: isize,
}

impl<E: Real> SquaredReluGradient<'_, E> {
    pub fn run(self) {
        let padded = self.queries.next_multiple_of(64 / size_of::<E>());
        assert!(padded <= self.stride && self.keys * self.stride <= self.scores.len());
        assert!(self.slopes.as_ref().is_none_or(|slopes| slopes.len() >= self.keys * self.stride));
        E::dispatch(self);
    }
}

impl<E: Real> Kernel<E> for SquaredReluGradient<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(mut self) {
        let (zero, two) = (L::splat(E::ZERO), L::splat(E::from_f64(2.0)));
        let scores = self.scores.as_mut_ptr();
        let slopes = self.slopes.as_mut().map(|slopes| slopes.as_mut_ptr());
        for c in (0..self.queries).step_by(L::N) {
            let (full, partial) = visible(c, L::N, self.diagonal, self.keys);
            for r in 0..partial {
                let i = r * self.stride + c;
                let show = |x: L| if r < full { x } else { L::select(hidden::<L>(c, self.diagonal, r), zero, x) };
                // SAFETY: asserted before the dispatch: every row of both tiles holds whole vectors up to the last query.
                unsafe {
                    // In this order a NaN stays one.
                    let s = show(zero.max(L::load_ptr(scores.add(i))));
                    (s * s).store_ptr(scores.add(i));
                    if let Some(slopes) = slopes {
                        // Hidden slopes may be anything, and 0 times NaN is NaN.
                        (two * s * show(L::load_ptr(slopes.add(i)))).store_ptr(slopes.add(i));
                    }
                }
            }
            for r in partial..self.keys {
                let i = r * self.stride + c;
                // SAFETY: as above.
                unsafe {
                    zero.store_ptr(scores.add(i));
                    if let Some(slopes) = slopes {
                        zero.store_ptr(slopes.add(i));
                    }
                }
            }
        }
    }
}
