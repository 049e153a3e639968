//! Reductions over slices.
//!
//! Sums run over blocks of 1024 elements with four vector accumulators; block sums are combined like the carries of a
//! binary counter, which is a pairwise tree. So an f32 sum of n terms loses about `log2(n / 1024) + 32 / N` roundings
//! instead of n, and 20 million ones give exactly 20 million. The order depends on length and level only.

use super::lanes::{Kernel, Lanes};
use super::real::Real;

const BLOCK: usize = 1024;

/// What is summed: terms `0..len`.
trait Terms<E: Real> {
    fn len(&self) -> usize;
    /// `acc` plus the terms from `i` on, one per lane.
    ///
    /// # Safety
    /// `i + N <= len`.
    unsafe fn add<L: Lanes<Elem = E>>(&self, i: usize, acc: L) -> L;
    /// As `add` for the first `rest` lanes.
    ///
    /// # Safety
    /// `i + rest <= len` and `rest <= N`.
    unsafe fn add_partial<L: Lanes<Elem = E>>(&self, i: usize, rest: usize, acc: L) -> L;
}

struct Summed<T>(T);

impl<E: Real, T: Terms<E>> Kernel<E> for Summed<T> {
    type Output = E;

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) -> E {
        let terms = self.0;
        let len = terms.len();
        // Sums of 2^j blocks, at most one per j.
        let mut pending = [E::ZERO; usize::BITS as usize];
        let mut depth = 0;
        let mut blocks = 0usize;
        let mut start = 0;
        while start < len {
            let end = len.min(start + BLOCK);
            let mut sum = block_sum::<E, L, T>(&terms, start, end);
            start = end;
            blocks += 1;
            for _ in 0..blocks.trailing_zeros() {
                depth -= 1;
                sum = pending[depth] + sum;
            }
            pending[depth] = sum;
            depth += 1;
        }
        let mut total = E::ZERO;
        while depth > 0 {
            depth -= 1;
            total = pending[depth] + total;
        }
        total
    }
}

#[inline(always)]
fn block_sum<E: Real, L: Lanes<Elem = E>, T: Terms<E>>(terms: &T, start: usize, end: usize) -> E {
    let mut acc = [L::splat(E::ZERO); 4];
    let mut i = start;
    while i + 4 * L::N <= end {
        // SAFETY: i + 4 N <= end <= len.
        unsafe {
            acc[0] = terms.add(i, acc[0]);
            acc[1] = terms.add(i + L::N, acc[1]);
            acc[2] = terms.add(i + 2 * L::N, acc[2]);
            acc[3] = terms.add(i + 3 * L::N, acc[3]);
        }
        i += 4 * L::N;
    }
    while i + L::N <= end {
        // SAFETY: i + N <= end <= len.
        acc[0] = unsafe { terms.add(i, acc[0]) };
        i += L::N;
    }
    if i < end {
        // SAFETY: i + (end - i) <= len, and fewer than N are left.
        acc[1] = unsafe { terms.add_partial(i, end - i, acc[1]) };
    }
    ((acc[0] + acc[1]) + (acc[2] + acc[3])).reduce_sum()
}

struct Plain<'a, E>(&'a [E]);

impl<E: Real> Terms<E> for Plain<'_, E> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.0.len()
    }
    #[inline(always)]
    unsafe fn add<L: Lanes<Elem = E>>(&self, i: usize, acc: L) -> L {
        // SAFETY: as the caller warrants.
        acc + unsafe { L::load_ptr(self.0.as_ptr().add(i)) }
    }
    #[inline(always)]
    unsafe fn add_partial<L: Lanes<Elem = E>>(&self, i: usize, rest: usize, acc: L) -> L {
        // SAFETY: as the caller warrants.
        acc + unsafe { L::load_partial_ptr(self.0.as_ptr().add(i), rest, E::ZERO) }
    }
}

/// `x[i] * y[i]`; both slices have the same length.
struct Products<'a, E>(&'a [E], &'a [E]);

impl<E: Real> Terms<E> for Products<'_, E> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.0.len()
    }
    #[inline(always)]
    unsafe fn add<L: Lanes<Elem = E>>(&self, i: usize, acc: L) -> L {
        // SAFETY: as the caller warrants, for both slices.
        let (x, y) = unsafe { (L::load_ptr(self.0.as_ptr().add(i)), L::load_ptr(self.1.as_ptr().add(i))) };
        x.mul_add(y, acc)
    }
    #[inline(always)]
    unsafe fn add_partial<L: Lanes<Elem = E>>(&self, i: usize, rest: usize, acc: L) -> L {
        // SAFETY: as the caller warrants, for both slices.
        let (x, y) = unsafe {
            (
                L::load_partial_ptr(self.0.as_ptr().add(i), rest, E::ZERO),
                L::load_partial_ptr(self.1.as_ptr().add(i), rest, E::ZERO),
            )
        };
        x.mul_add(y, acc)
    }
}

/// `exp(x[i] - shift)`, also written to `out` where there is one.
struct Exponentials<E> {
    x: *const E,
    len: usize,
    shift: E,
    out: Option<*mut E>,
}

impl<E: Real> Terms<E> for Exponentials<E> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.len
    }
    #[inline(always)]
    unsafe fn add<L: Lanes<Elem = E>>(&self, i: usize, acc: L) -> L {
        // SAFETY: x is valid for len elements, and the caller warrants i + N <= len.
        let e = (unsafe { L::load_ptr(self.x.add(i)) } - L::splat(self.shift)).exp();
        if let Some(out) = self.out {
            // SAFETY: so is out.
            unsafe { e.store_ptr(out.add(i)) };
        }
        acc + e
    }
    #[inline(always)]
    unsafe fn add_partial<L: Lanes<Elem = E>>(&self, i: usize, rest: usize, acc: L) -> L {
        // SAFETY: x is valid for len elements, and the caller warrants i + rest <= len.
        let e = (unsafe { L::load_partial_ptr(self.x.add(i), rest, self.shift) } - L::splat(self.shift)).exp();
        if let Some(out) = self.out {
            // SAFETY: so is out.
            unsafe { e.store_partial_ptr(out.add(i), rest) };
        }
        acc + L::select(L::first_lanes(rest), e, L::splat(E::ZERO))
    }
}

/// The sum; 0 of nothing.
#[must_use]
pub fn sum<E: Real>(x: &[E]) -> E {
    E::dispatch(Summed(Plain(x)))
}

/// The sum of products.
///
/// # Panics
/// When the lengths differ.
#[must_use]
#[track_caller]
pub fn dot<E: Real>(x: &[E], y: &[E]) -> E {
    assert_eq!(x.len(), y.len(), "dot: slices differ in length");
    E::dispatch(Summed(Products(x, y)))
}

/// The sum of squares.
#[must_use]
pub fn sum_sq<E: Real>(x: &[E]) -> E {
    E::dispatch(Summed(Products(x, x)))
}

/// The sum of `exp(x[i] - shift)`.
#[must_use]
pub fn sum_exp_shifted<E: Real>(x: &[E], shift: E) -> E {
    E::dispatch(Summed(Exponentials { x: x.as_ptr(), len: x.len(), shift, out: None }))
}

/// `row[i] = exp(row[i] - shift)`; returns their sum, bitwise the same as [`sum_exp_shifted`] gives.
pub fn exp_shift_inplace<E: Real>(row: &mut [E], shift: E) -> E {
    let out = row.as_mut_ptr();
    E::dispatch(Summed(Exponentials { x: out, len: row.len(), shift, out: Some(out) }))
}

struct Greatest<'a, E>(&'a [E]);

impl<E: Real> Kernel<E> for Greatest<'_, E> {
    type Output = E;

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) -> E {
        let lowest = L::splat(E::NEG_INFINITY);
        let mut greatest = [lowest; 4];
        // The vector maximum drops NaN; this remembers whether there was one.
        let mut ordered = L::first_lanes(L::N);
        let mut chunks = self.0.chunks_exact(4 * L::N);
        for chunk in &mut chunks {
            for (k, greatest) in greatest.iter_mut().enumerate() {
                let x = L::load(&chunk[k * L::N..]);
                *greatest = x.max(*greatest);
                ordered = L::mask_and(ordered, x.eq(x));
            }
        }
        for rest in chunks.remainder().chunks(L::N) {
            let x = L::load_partial(rest, E::NEG_INFINITY);
            greatest[0] = x.max(greatest[0]);
            ordered = L::mask_and(ordered, x.eq(x));
        }
        if !L::all(ordered) {
            return E::NAN;
        }
        greatest[0].max(greatest[1]).max(greatest[2].max(greatest[3])).reduce_max()
    }
}

/// The greatest element; NaN when one is NaN, minus infinity of nothing.
#[must_use]
pub fn max<E: Real>(x: &[E]) -> E {
    E::dispatch(Greatest(x))
}
