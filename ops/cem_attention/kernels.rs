//! The elementwise halves, on transposed tiles `scores[key * stride + query]` of all keys that a tile's queries see:
//! queries lie in the lanes. Key `r` is visible to query `c` when `r <= c + diagonal`; hidden entries become exactly 0.
//!
//! The products before have left entries of hidden pairs as they were: nothing may be computed with those.

use crate::attention_tiles::{hidden, visible};
use crate::simd::{Kernel, Lanes, Real};

/// Where the tile lies.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub stride: usize,
    pub keys: usize,
    pub queries: usize,
    pub diagonal: isize,
}

impl Shape {
    #[track_caller]
    fn check<E>(&self, tiles: &[usize], rows: &[usize]) {
        let padded = self.queries.next_multiple_of(64 / size_of::<E>());
        assert!(padded <= self.stride && tiles.iter().all(|&len| self.keys * self.stride <= len));
        assert!(rows.iter().all(|&len| padded <= len));
    }
}

/// Scores become weights `p`; `lse` is written. With a diagonal its scores are `base`, and `total` grows by `p`.
pub(super) struct Weigh<'a, E> {
    pub shape: Shape,
    pub scores: &'a mut [E],
    pub group: Option<(&'a [E], &'a mut [E])>,
    pub lse: &'a mut [E],
}

impl<E: Real> Weigh<'_, E> {
    pub fn run(self) {
        self.shape.check::<E>(&[self.scores.len()], &[self.lse.len()]);
        if let Some((base, total)) = &self.group {
            self.shape.check::<E>(&[base.len(), total.len()], &[]);
        }
        E::dispatch(self);
    }
}

impl<E: Real> Kernel<E> for Weigh<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(mut self) {
        let Shape { stride, keys, queries, diagonal } = self.shape;
        let (zero, lowest) = (L::splat(E::ZERO), L::splat(E::NEG_INFINITY));
        let scores = self.scores.as_mut_ptr();
        let group = self.group.as_mut().map(|(base, total)| (base.as_ptr(), total.as_mut_ptr()));
        for c in (0..queries).step_by(L::N) {
            let (full, partial) = visible(c, L::N, diagonal, keys);
            let mut greatest = lowest;
            for r in 0..partial {
                let i = r * stride + c;
                // SAFETY: checked before the dispatch: rows up to `keys` hold whole vectors up to the last query in
                // every tile, and lanes write only where this column of lanes reads.
                unsafe {
                    let mut s = L::load_ptr(scores.add(i));
                    if let Some((base, _)) = group {
                        s = s + L::load_ptr(base.add(i));
                    }
                    if r >= full {
                        s = L::select(hidden::<L>(c, diagonal, r), lowest, s);
                    }
                    s.store_ptr(scores.add(i));
                    greatest = greatest.max(s);
                }
            }
            let mut sum = zero;
            for r in 0..partial {
                let s = r * stride + c;
                // SAFETY: as above.
                unsafe {
                    let weight = (L::load_ptr(scores.add(s)) - greatest).exp();
                    weight.store_ptr(scores.add(s));
                    sum = sum + weight;
                }
            }
            (greatest + sum.ln()).store(&mut self.lse[c..]);
            let inverse = L::splat(E::ONE) / sum;
            for r in 0..partial {
                let i = r * stride + c;
                // SAFETY: as above.
                unsafe {
                    let p = L::load_ptr(scores.add(i)) * inverse;
                    p.store_ptr(scores.add(i));
                    if let Some((_, total)) = group {
                        (L::load_ptr(total.add(i)) + p).store_ptr(total.add(i));
                    }
                }
            }
            for r in partial..keys {
                // SAFETY: as above.
                unsafe { zero.store_ptr(scores.add(r * stride + c)) };
            }
        }
    }
}

/// Of a diagonal's heads together: their scores `base` and slopes `dbase` in the diagonal's products, and the sums of
/// weights and of slopes.
pub(super) struct GroupTiles<'a, E> {
    pub base: &'a [E],
    pub dbase: &'a [E],
    pub total: &'a mut [E],
    pub slopes: &'a mut [E],
}

/// Scores become weights `p`, and `dp` becomes `ds = p (dp - Σ p dp)`; the group's sums grow by both.
pub(super) struct WeighGradient<'a, E> {
    pub shape: Shape,
    pub scores: &'a mut [E],
    pub dp: &'a mut [E],
    pub group: Option<GroupTiles<'a, E>>,
    pub lse: &'a [E],
}

impl<E: Real> WeighGradient<'_, E> {
    pub fn run(self) {
        self.shape.check::<E>(&[self.scores.len(), self.dp.len()], &[self.lse.len()]);
        if let Some(g) = &self.group {
            self.shape.check::<E>(&[g.base.len(), g.dbase.len(), g.total.len(), g.slopes.len()], &[]);
        }
        E::dispatch(self);
    }
}

impl<E: Real> Kernel<E> for WeighGradient<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(mut self) {
        let Shape { stride, keys, queries, diagonal } = self.shape;
        let (zero, lowest) = (L::splat(E::ZERO), L::splat(E::NEG_INFINITY));
        let (scores, dp) = (self.scores.as_mut_ptr(), self.dp.as_mut_ptr());
        let group = (self.group.as_mut())
            .map(|g| (g.base.as_ptr(), g.dbase.as_ptr(), g.total.as_mut_ptr(), g.slopes.as_mut_ptr()));
        for c in (0..queries).step_by(L::N) {
            let (full, partial) = visible(c, L::N, diagonal, keys);
            let lse = L::load(&self.lse[c..]);
            let mut delta = zero;
            for r in 0..partial {
                let i = r * stride + c;
                // SAFETY: checked before the dispatch: rows up to `keys` hold whole vectors up to the last query in
                // every tile, and lanes write only where this column of lanes reads.
                unsafe {
                    let (mut s, mut d) = (L::load_ptr(scores.add(i)), L::load_ptr(dp.add(i)));
                    if let Some((base, dbase, ..)) = group {
                        s = s + L::load_ptr(base.add(i));
                        d = d + L::load_ptr(dbase.add(i));
                    }
                    if r >= full {
                        let mask = hidden::<L>(c, diagonal, r);
                        (s, d) = (L::select(mask, lowest, s), L::select(mask, zero, d));
                    }
                    let p = (s - lse).exp();
                    p.store_ptr(scores.add(i));
                    d.store_ptr(dp.add(i));
                    delta = p.mul_add(d, delta);
                }
            }
            for r in 0..partial {
                let i = r * stride + c;
                // SAFETY: as above.
                unsafe {
                    let p = L::load_ptr(scores.add(i));
                    let ds = p * (L::load_ptr(dp.add(i)) - delta);
                    ds.store_ptr(dp.add(i));
                    if let Some((_, _, total, slopes)) = group {
                        (L::load_ptr(total.add(i)) + p).store_ptr(total.add(i));
                        (L::load_ptr(slopes.add(i)) + ds).store_ptr(slopes.add(i));
                    }
                }
            }
            for r in partial..keys {
                // SAFETY: as above.
                unsafe {
                    zero.store_ptr(scores.add(r * stride + c));
                    zero.store_ptr(dp.add(r * stride + c));
                }
            }
        }
    }
}
