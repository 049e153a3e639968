//! The elementwise halves of `windowed_prefix` on a transposed tile, `[key * stride + query]`: queries lie in the lanes.
//!
//! The distance from key `r` to query `c` of a tile is `c - r + ahead`. Below 0 the pair is hidden, below the window
//! near, else far.

use std::ops::Range;

use crate::simd::{Kernel, Lanes, Real};

/// Which pairs a tile has.
#[derive(Clone, Copy)]
pub(super) struct Pairs {
    pub keys: usize,
    pub queries: usize,
    /// Distance from the tile's first key to its first query.
    pub ahead: isize,
    pub window: isize,
    /// Elements from one key's row to the next.
    pub stride: usize,
}

impl Pairs {
    /// Whether any pair is near.
    pub fn has_near(&self) -> bool {
        self.ahead - (self.keys as isize - 1) < self.window
    }

    /// Whether any pair is far.
    pub fn has_far(&self) -> bool {
        self.ahead + self.queries as isize > self.window
    }

    /// Keys before the first number are at least `distance` away from all lanes from `column` on, those before the
    /// second number from some.
    #[inline(always)]
    fn apart<L: Lanes>(&self, column: usize, distance: isize) -> (usize, usize) {
        let until = |column: usize| {
            (column as isize + self.ahead).saturating_sub(distance).saturating_add(1).clamp(0, self.keys as isize)
        };
        (until(column) as usize, until(column + L::N - 1) as usize)
    }

    /// The lanes from `column` on that are nearer to key `row` than `distance`.
    #[inline(always)]
    fn nearer<L: Lanes>(&self, column: usize, row: usize, distance: isize) -> L::Mask {
        let lanes = (row as isize - column as isize - self.ahead).saturating_add(distance);
        L::first_lanes(lanes.clamp(0, L::N as isize) as usize)
    }

    /// All keys in runs of one kind of pairs with the lanes from `column` on. (Loops, not a closure that is called for each:
    /// one that is too large to be inlined would be compiled without the level's instructions.)
    #[inline(always)]
    fn runs<L: Lanes>(&self, column: usize) -> [(Range<usize>, Kind); 5] {
        let (all_far, some_far) = self.apart::<L>(column, self.window);
        let (all_visible, some_visible) = self.apart::<L>(column, 0);
        [
            (0..all_far, Kind::Far),
            (all_far..some_far, Kind::Mixed),
            (some_far..all_visible, Kind::Near),
            (some_far.max(all_visible)..some_visible, Kind::Mixed),
            (some_visible..self.keys, Kind::Hidden),
        ]
    }

    fn assert_fits<E>(&self, tiles: &[&[E]], of_queries: &[&[E]]) {
        let padded = self.queries.next_multiple_of(64 / size_of::<E>());
        assert!(padded <= self.stride && tiles.iter().all(|tile| self.keys * self.stride <= tile.len()));
        assert!(of_queries.iter().all(|x| padded <= x.len()));
    }
}

/// `scores` (near) and `kernel` (far) become weights, in `scores`. What is not used of either may hold anything.
pub(super) struct Weights<'a, E> {
    pub pairs: Pairs,
    pub scores: &'a mut [E],
    pub kernel: &'a [E],
    /// Of every query: its weights are added.
    pub sums: &'a mut [E],
    /// Whether weights are rounded to BF16 first, as the product will: else gates were averaged with weights that do not sum
    /// to one.
    pub rounded: bool,
    /// Subtracted from scores.
    pub shift: E,
}

impl<E: Real> Weights<'_, E> {
    pub fn run(self) {
        self.pairs.assert_fits(&[self.scores, self.kernel], &[self.sums]);
        E::dispatch(self);
    }
}

impl<E: Real> Kernel<E> for Weights<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let Weights { pairs, scores, kernel, sums, rounded, shift } = self;
        let (scores, kernel, shift) = (scores.as_mut_ptr(), kernel.as_ptr(), L::splat(shift));
        // `t - (t - w)` with `t = (2^16 + 1) w` has the first 8 of the 24 bits of w.
        let sixteen_bits = L::splat(E::from_f64(65537.0));
        for c in (0..pairs.queries).step_by(L::N) {
            let mut sum = L::load(&sums[c..]);
            for (rows, kind) in pairs.runs::<L>(c) {
                for r in rows {
                    let at = r * pairs.stride + c;
                    // SAFETY: asserted before the dispatch: every row of both tiles holds whole vectors up to the last
                    // query.
                    unsafe {
                        let mut weight = weight::<L>(&pairs, (c, r), kind, scores.add(at), kernel.add(at), shift);
                        if rounded {
                            let t = weight * sixteen_bits;
                            weight = t - (t - weight);
                        }
                        weight.store_ptr(scores.add(at));
                        sum = sum + weight;
                    }
                }
            }
            sum.store(&mut sums[c..]);
        }
    }
}

/// For the backward: `scores` become slopes of scores, `kernel` weights over their sum, `slopes` (`dḡ_i·g_j`) slopes of the far
/// weights. Gives the sum of slopes times `score - shift` over the near pairs, `tau` times what they add to the gradient of
/// `tau`.
pub(super) struct Slopes<'a, E> {
    pub pairs: Pairs,
    /// The tile's first query.
    pub query: usize,
    pub scores: &'a mut [E],
    pub kernel: &'a mut [E],
    pub slopes: &'a mut [E],
    /// Of every query: `dḡ_i·ḡ_i`, and one over the sum of its weights.
    pub delta: &'a [E],
    pub inverse: &'a [E],
    pub shift: E,
}

impl<E: Real> Slopes<'_, E> {
    pub fn run(self) -> f64 {
        self.pairs.assert_fits(&[self.scores, self.kernel, self.slopes], &[self.delta, self.inverse]);
        if self.query == 0 {
            // The first token's only weight is divided by itself: its slope is exactly 0.
            self.slopes[0] = self.delta[0];
        }
        E::dispatch(self)
    }
}

impl<E: Real> Kernel<E> for Slopes<'_, E> {
    type Output = f64;

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) -> f64 {
        let Slopes { pairs, scores, kernel, slopes, delta, inverse, shift, .. } = self;
        let (scores, kernel, slopes) = (scores.as_mut_ptr(), kernel.as_mut_ptr(), slopes.as_mut_ptr());
        let (shift, zero) = (L::splat(shift), L::splat(E::ZERO));
        let mut total = 0f64;
        for c in (0..pairs.queries).step_by(L::N) {
            let (delta, inverse) = (L::load(&delta[c..]), L::load(&inverse[c..]));
            let mut sum = zero;
            for (rows, kind) in pairs.runs::<L>(c) {
                for r in rows {
                    let at = r * pairs.stride + c;
                    // SAFETY: asserted before the dispatch: every row of the tiles holds whole vectors up to the last query.
                    unsafe {
                        let w = weight::<L>(&pairs, (c, r), kind, scores.add(at), kernel.add(at), shift);
                        let dw = (L::load_ptr(slopes.add(at)) - delta) * inverse;
                        let (near, far) = match kind {
                            Kind::Far => (zero, dw),
                            Kind::Near => (w * dw, zero),
                            Kind::Hidden => (zero, zero),
                            Kind::Mixed => {
                                let hidden = pairs.nearer::<L>(c, r, 0);
                                let near = pairs.nearer::<L>(c, r, pairs.window);
                                // w is 0 where hidden, but w·dw would be NaN for an infinite dw.
                                let ds = L::select(hidden, zero, L::select(near, w * dw, zero));
                                (ds, L::select(near, zero, dw))
                            }
                        };
                        if matches!(kind, Kind::Near | Kind::Mixed) {
                            let lower = L::load_ptr(scores.add(at)) - shift;
                            // Where nothing is near, the score may be anything.
                            sum = sum + L::select(near.eq(zero), zero, near * lower);
                        }
                        near.store_ptr(scores.add(at));
                        (w * inverse).store_ptr(kernel.add(at));
                        far.store_ptr(slopes.add(at));
                    }
                }
            }
            // Lanes past the last query hold anything.
            total += Real::to_f64(L::select(L::first_lanes((pairs.queries - c).min(L::N)), sum, zero).reduce_sum());
        }
        total
    }
}

/// What a row's pairs with the lanes of a vector are.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Far,
    Near,
    Hidden,
    Mixed,
}

/// # Safety
/// Both pointers must be readable for a vector.
#[inline(always)]
unsafe fn weight<L: Lanes>(
    pairs: &Pairs,
    (column, row): (usize, usize),
    kind: Kind,
    scores: *const L::Elem,
    kernel: *const L::Elem,
    shift: L,
) -> L {
    let zero = L::splat(L::Elem::ZERO);
    // SAFETY: warranted by the caller.
    let near = || unsafe { (L::load_ptr(scores) - shift).exp() };
    // SAFETY: as above.
    let far = || unsafe { L::load_ptr(kernel) };
    match kind {
        Kind::Far => far(),
        Kind::Near => near(),
        Kind::Hidden => zero,
        Kind::Mixed => {
            let visible = L::select(pairs.nearer::<L>(column, row, pairs.window), near(), far());
            L::select(pairs.nearer::<L>(column, row, 0), zero, visible)
        }
    }
}
