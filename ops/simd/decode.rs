//! Matrix by vector, for operators that take one token at a time: what is summed stays in registers.

use super::lanes::{Kernel, Lanes};
use super::real::Real;

/// `out += Σ_r weights[r] · rows[r * stride ..]`.
///
/// # Panics
/// When a row does not lie within `rows`.
pub fn add_weighted_rows<E: Real>(out: &mut [E], weights: &[E], rows: &[E], stride: usize) {
    if out.is_empty() {
        return;
    }
    assert!(weights.is_empty() || (weights.len() - 1) * stride + out.len() <= rows.len());
    E::dispatch(WeightedRows { out, weights, rows, stride });
}

struct WeightedRows<'a, E> {
    out: &'a mut [E],
    weights: &'a [E],
    rows: &'a [E],
    stride: usize,
}

/// Vectors summed side by side: as many as hide the latency of an addition.
const SIDE: usize = 8;

impl<E: Real> Kernel<E> for WeightedRows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let WeightedRows { out, weights, rows, stride } = self;
        let mut c = 0;
        while c + SIDE * L::N <= out.len() {
            let mut sums = [L::splat(E::ZERO); SIDE];
            for (v, sum) in sums.iter_mut().enumerate() {
                *sum = L::load(&out[c + v * L::N..]);
            }
            for (r, &weight) in weights.iter().enumerate() {
                let (weight, row) = (L::splat(weight), &rows[r * stride + c..][..SIDE * L::N]);
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = L::load(&row[v * L::N..]).mul_add(weight, *sum);
                }
            }
            for (v, sum) in sums.iter().enumerate() {
                sum.store(&mut out[c + v * L::N..]);
            }
            c += SIDE * L::N;
        }
        while c < out.len() {
            let count = L::N.min(out.len() - c);
            let mut sum = L::load_partial(&out[c..][..count], E::ZERO);
            for (r, &weight) in weights.iter().enumerate() {
                let x = L::load_partial(&rows[r * stride + c..][..count], E::ZERO);
                sum = x.mul_add(L::splat(weight), sum);
            }
            sum.store_partial(&mut out[c..][..count]);
            c += count;
        }
    }
}

/// `out[r] = x · rows[r * stride ..]`.
///
/// # Panics
/// When a row does not lie within `rows`.
pub fn row_dots<E: Real>(out: &mut [E], x: &[E], rows: &[E], stride: usize) {
    if x.is_empty() {
        return out.fill(E::ZERO);
    }
    assert!(out.is_empty() || (out.len() - 1) * stride + x.len() <= rows.len());
    E::dispatch(RowDots { out, x, rows, stride });
}

struct RowDots<'a, E> {
    out: &'a mut [E],
    x: &'a [E],
    rows: &'a [E],
    stride: usize,
}

impl<E: Real> Kernel<E> for RowDots<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let whole = self.x.len() / L::N * L::N;
        for (r, out) in self.out.iter_mut().enumerate() {
            let row = &self.rows[r * self.stride..][..self.x.len()];
            let mut sum = [L::splat(E::ZERO); 2];
            for c in (0..whole).step_by(L::N) {
                let at = c / L::N % 2;
                sum[at] = L::load(&self.x[c..]).mul_add(L::load(&row[c..]), sum[at]);
            }
            if whole < row.len() {
                let (x, y) = (L::load_partial(&self.x[whole..], E::ZERO), L::load_partial(&row[whole..], E::ZERO));
                sum[1] = x.mul_add(y, sum[1]);
            }
            *out = (sum[0] + sum[1]).reduce_sum();
        }
    }
}

/// `sums[r, ..] += factors[r] · x` for row-major `sums` of as many rows as there are factors.
///
/// # Panics
/// When the sizes do not fit.
pub fn add_outer<E: Real>(sums: &mut [E], factors: &[E], x: &[E]) {
    assert!(sums.len() == factors.len() * x.len());
    E::dispatch(Outer { sums, factors, x });
}

struct Outer<'a, E> {
    sums: &'a mut [E],
    factors: &'a [E],
    x: &'a [E],
}

impl<E: Real> Kernel<E> for Outer<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        for (sums, &factor) in self.sums.chunks_exact_mut(self.x.len().max(1)).zip(self.factors) {
            let factor = L::splat(factor);
            for (sums, x) in sums.chunks_mut(L::N).zip(self.x.chunks(L::N)) {
                L::load_partial(x, E::ZERO).mul_add(factor, L::load_partial(sums, E::ZERO)).store_partial(sums);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Level, with_level};

    fn numbers(n: usize, seed: f64) -> Vec<f64> {
        (0..n).map(|i| (i as f64 * 0.37 + seed).sin()).collect()
    }

    #[test]
    fn all_equal_plain_loops() {
        for (rows, width) in [(0, 5), (1, 1), (3, 0), (7, 33), (5, 64), (4, 150)] {
            let (weights, matrix, x) = (numbers(rows, 1.0), numbers(rows * (width + 3), 2.0), numbers(width, 3.0));
            let mut expected = x.clone();
            for (r, w) in weights.iter().enumerate() {
                expected.iter_mut().zip(&matrix[r * (width + 3)..]).for_each(|(y, m)| *y += w * m);
            }
            let sums = numbers(rows * width, 4.0);
            for level in Level::available() {
                with_level(level, || {
                    let mut y = x.clone();
                    add_weighted_rows(&mut y, &weights, &matrix, width + 3);
                    assert!(y.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-13), "{level}");
                    let mut dots = weights.clone();
                    row_dots(&mut dots, &x, &matrix, width + 3);
                    for (r, dot) in dots.iter().enumerate() {
                        let terms = x.iter().zip(&matrix[r * (width + 3)..]).map(|(x, m)| x * m);
                        assert!((dot - terms.sum::<f64>()).abs() < 1e-12, "{level}");
                    }
                    let mut z = sums.clone();
                    add_outer(&mut z, &weights, &x);
                    for (i, (z, old)) in z.iter().zip(&sums).enumerate() {
                        assert!((z - old - weights[i / width] * x[i % width]).abs() < 1e-15, "{level}");
                    }
                });
            }
        }
    }
}
