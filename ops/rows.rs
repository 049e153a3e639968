//! Passes over one contiguous row: formulas over lanes with sums on the way, the building block of norms, losses and
//! rotations.
//!
//! A row is walked in blocks of [`BLOCK`] elements with four vector accumulators a sum; block sums are added in f64. So
//! an f32 sum over a row of any length keeps f32's accuracy, and its order depends on the length and level only.

use kumiki_tensor::Tensor;

use crate::simd::{Lanes, Real};

/// Elements that are summed in their own arithmetic before f64 takes over; a multiple of every lane count.
pub(crate) const BLOCK: usize = 4096;
const UNROLL: usize = 4;

/// A formula of `I` inputs at one position, which rewrites `O` outputs (it is given their old values, so that an
/// output can be an input too) and adds to `S` sums. `step` must be `#[inline(always)]`.
pub(crate) trait Formula<E: Real, const I: usize, const O: usize, const S: usize> {
    /// The new outputs, lane by lane.
    fn step<L: Lanes<Elem = E>>(&self, x: [L; I], old: [L; O], sums: &mut [L; S]) -> [L; O];
}

/// Applies the formula along a row and gives its sums.
#[inline(always)]
pub(crate) fn pass<L: Lanes, F, const I: usize, const O: usize, const S: usize>(
    formula: &F,
    inputs: [&[L::Elem]; I],
    outputs: [&mut [L::Elem]; O],
) -> [f64; S]
where
    F: Formula<L::Elem, I, O, S>,
{
    let len = if I > 0 { inputs[0].len() } else { outputs[0].len() };
    let (mut x, mut y) = ([std::ptr::null(); I], [std::ptr::null_mut(); O]);
    for k in 0..I {
        assert!(inputs[k].len() == len);
        x[k] = inputs[k].as_ptr();
    }
    for (k, output) in outputs.into_iter().enumerate() {
        assert!(output.len() == len);
        y[k] = output.as_mut_ptr();
    }
    let mut totals = [0f64; S];
    let mut i = 0;
    while i < len {
        let end = len.min(i + BLOCK);
        let mut sums = [[L::splat(L::Elem::ZERO); S]; UNROLL];
        while i + UNROLL * L::N <= end {
            for (u, sums) in sums.iter_mut().enumerate() {
                // SAFETY: every slice has `len` elements, and i + UNROLL · N <= end <= len.
                unsafe { whole(formula, x, y, i + u * L::N, sums) };
            }
            i += UNROLL * L::N;
        }
        while i + L::N <= end {
            // SAFETY: as above, for one vector.
            unsafe { whole(formula, x, y, i, &mut sums[0]) };
            i += L::N;
        }
        if i < end {
            // SAFETY: every slice has `len` elements; fewer than N are left of this block, the row's last.
            unsafe { partial(formula, x, y, i, end - i, &mut sums[1]) };
            i = end;
        }
        for s in 0..S {
            totals[s] += ((sums[0][s] + sums[1][s]) + (sums[2][s] + sums[3][s])).reduce_sum().to_f64();
        }
    }
    totals
}

/// # Safety
/// All pointers are valid for `N` elements from `i` on, those of `y` for writes by nobody else.
#[inline(always)]
unsafe fn whole<L: Lanes, F, const I: usize, const O: usize, const S: usize>(
    formula: &F,
    x: [*const L::Elem; I],
    y: [*mut L::Elem; O],
    i: usize,
    sums: &mut [L; S],
) where
    F: Formula<L::Elem, I, O, S>,
{
    let (mut inputs, mut old) = ([L::splat(L::Elem::ZERO); I], [L::splat(L::Elem::ZERO); O]);
    for k in 0..I {
        // SAFETY: as the caller warrants.
        inputs[k] = unsafe { L::load_ptr(x[k].add(i)) };
    }
    for k in 0..O {
        // SAFETY: as the caller warrants.
        old[k] = unsafe { L::load_ptr(y[k].add(i)) };
    }
    let new = formula.step(inputs, old, sums);
    for k in 0..O {
        // SAFETY: as the caller warrants.
        unsafe { new[k].store_ptr(y[k].add(i)) };
    }
}

/// # Safety
/// All pointers are valid for `rest < N` elements from `i` on, those of `y` for writes by nobody else.
#[inline(always)]
unsafe fn partial<L: Lanes, F, const I: usize, const O: usize, const S: usize>(
    formula: &F,
    x: [*const L::Elem; I],
    y: [*mut L::Elem; O],
    i: usize,
    rest: usize,
    sums: &mut [L; S],
) where
    F: Formula<L::Elem, I, O, S>,
{
    let (mut inputs, mut old) = ([L::splat(L::Elem::ZERO); I], [L::splat(L::Elem::ZERO); O]);
    for k in 0..I {
        // SAFETY: as the caller warrants.
        inputs[k] = unsafe { L::load_partial_ptr(x[k].add(i), rest, L::Elem::ZERO) };
    }
    for k in 0..O {
        // SAFETY: as the caller warrants.
        old[k] = unsafe { L::load_partial_ptr(y[k].add(i), rest, L::Elem::ZERO) };
    }
    let before = *sums;
    let new = formula.step(inputs, old, sums);
    for s in 0..S {
        // What the filled lanes added is taken back.
        sums[s] = L::select(L::first_lanes(rest), sums[s], before[s]);
    }
    for k in 0..O {
        // SAFETY: as the caller warrants.
        unsafe { new[k].store_partial_ptr(y[k].add(i), rest) };
    }
}

/// The greatest element of a row; NaN loses, and of nothing it is minus infinity.
#[inline(always)]
pub(crate) fn row_max<L: Lanes>(row: &[L::Elem]) -> L::Elem {
    let lowest = L::splat(L::Elem::NEG_INFINITY);
    let mut top = [lowest; UNROLL];
    let mut chunks = row.chunks_exact(UNROLL * L::N);
    for chunk in &mut chunks {
        for (u, top) in top.iter_mut().enumerate() {
            *top = L::load(&chunk[u * L::N..]).max(*top);
        }
    }
    for rest in chunks.remainder().chunks(L::N) {
        top[0] = L::load_partial(rest, L::Elem::NEG_INFINITY).max(top[0]);
    }
    top[0].max(top[1]).max(top[2].max(top[3])).reduce_max()
}

/// A number as a sum of two of the element type, so that an f64 statistic can be subtracted from f32 elements without
/// its rounding; an infinity has no second part.
#[inline(always)]
pub(crate) fn split<E: Real>(x: f64) -> (E, E) {
    let high = E::from_f64(x);
    let low = x - high.to_f64();
    (high, if low.is_finite() { E::from_f64(low) } else { E::ZERO })
}

/// A tensor `[.., D]` as contiguous rows: the number of rows and D.
pub(crate) fn rows_of(x: &Tensor) -> (usize, usize) {
    let d = x.shape().last().copied().unwrap_or(1);
    (x.shape()[..x.rank().saturating_sub(1)].iter().product(), d)
}

/// Rows of `d` elements that one task takes: a matter of the shape only. At least 16, so that the partial sums of a
/// weight's gradient stay small beside the rows; at most 256, so that these sums may be f32.
pub(crate) fn rows_per_task(d: usize) -> usize {
    (16 * 1024 / d.max(1)).clamp(16, 256)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Kernel;

    struct Sums;
    impl<E: Real> Formula<E, 1, 1, 2> for Sums {
        #[inline(always)]
        fn step<L: Lanes<Elem = E>>(&self, [x]: [L; 1], [y]: [L; 1], sums: &mut [L; 2]) -> [L; 1] {
            sums[0] = sums[0] + x;
            sums[1] = sums[1] + L::splat(E::ONE);
            [x + y]
        }
    }

    struct Run<'a, E>(&'a [E], &'a mut [E]);
    impl<E: Real> Kernel<E> for Run<'_, E> {
        type Output = ([f64; 2], E);
        #[inline(always)]
        fn run<L: Lanes<Elem = E>>(self) -> Self::Output {
            (pass::<L, _, 1, 1, 2>(&Sums, [self.0], [self.1]), row_max::<L>(self.0))
        }
    }

    #[test]
    fn passes_visit_each_element_once() {
        for len in [0, 1, 3, 4, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097, 8200] {
            let x: Vec<f32> = (0..len).map(|i| (i % 97) as f32 - 120.0).collect();
            let mut y = vec![1.0f32; len];
            let ([total, count], max) = f32::dispatch(Run(&x, &mut y));
            assert_eq!((total, count), (x.iter().map(|&x| f64::from(x)).sum(), len as f64), "{len}");
            assert!(y.iter().zip(&x).all(|(y, x)| *y == x + 1.0), "{len}");
            assert_eq!(max, x.iter().copied().fold(f32::NEG_INFINITY, f32::max), "{len}");
        }
    }

    #[test]
    fn case_05_a_long_row_of_ones_is_counted() {
        let ones = vec![1.0f32; 20_000_000];
        assert_eq!(f32::dispatch(Run(&ones, &mut ones.clone())).0, [2e7, 2e7]);
    }

    #[test]
    fn a_split_number_keeps_its_low_part() {
        let (high, low) = split::<f32>(10_000.000_123);
        assert!((f64::from(high) + f64::from(low) - 10_000.000_123).abs() < 1e-10);
        assert_eq!(split::<f32>(f64::NEG_INFINITY), (f32::NEG_INFINITY, 0.0));
    }
}
