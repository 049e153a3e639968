//! `var`: the variance over any set of axes.
//!
//! Forward `y = Σ (x - m)² / (n - correction)`, m the mean; backward `dx = dout · 2 (x - m) / (n - correction)` (the
//! gradient through m is 0, as deviations sum to 0). Saves x and m, one number per row.
//! Two passes over each row, which lies in cache: the one-pass form `Σ x² - n m²` cancels where the mean is large. The
//! rounding of m is taken out: `Σ d² - (Σ d)² / n`, d the deviations. Long rows are added up in f64.
//! Cost: one read of memory; one copy first when the axes are not the last ones.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::cuda::{Arg, Source, launch};
use kumiki_tensor::threads::parallel_chunks2_mut;
use kumiki_tensor::{DType, Element, Tensor, kernels};

use crate::arithmetic::{Mul, Sub};
use crate::broadcast::zip_broadcast;
use crate::cast::widened;
use crate::cuda::{by_rows, kernel_of};
use crate::elementwise::{CHUNK, map_over};
use crate::reduce::{checked_axes, reduced_shape};
use crate::registry::OpCase;
use crate::simd::{Kernel, Lanes, Real};
use crate::unary::Scale;

/// The variance over `axes`, which disappear or stay with size 1; `correction` 1 for the unbiased estimate, 0 for the
/// mean square deviation. NaN or infinite over no more than `correction` elements.
///
/// # Panics
/// When an axis does not exist or is named twice, or `x` is not of a float dtype.
#[track_caller]
pub fn var(x: &Var, axes: &[usize], keep_dims: bool, correction: usize) -> Var {
    let axes = checked_axes("var", x, axes);
    widened(&[x], |v| {
        let x = &v[0];
        let kept: Vec<usize> = (0..x.rank()).filter(|axis| !axes.contains(axis)).collect();
        let order: Vec<usize> = kept.iter().chain(&axes).copied().collect();
        let n: usize = axes.iter().map(|&axis| x.dim(axis)).product();
        let scale = 1.0 / n.saturating_sub(correction) as f64;
        let rows = x.value().permute(&order).contiguous();
        let (y, mean) = match x.dtype() {
            DType::F32 => moments::<f32>(&rows, n, scale, &reduced_shape(x.shape(), &axes, true)),
            _ => moments::<f64>(&rows, n, scale, &reduced_shape(x.shape(), &axes, true)),
        };
        let y = y.reshape(&reduced_shape(x.shape(), &axes, keep_dims));
        Var::from_op(y, &[x], || VarBackward { x: x.value().clone(), mean, scale })
    })
}

struct VarBackward {
    x: Tensor,
    mean: Tensor,
    scale: f64,
}

impl Backward for VarBackward {
    fn name(&self) -> &'static str {
        "var"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("x", &self.x), ("mean", &self.mean)]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        let dout = map_over(&Scale(2.0 * self.scale), dout).reshape(self.mean.shape());
        let deviations = zip_broadcast(&Sub, &self.x, &self.mean);
        vec![Some(zip_broadcast(&Mul, &deviations, &dout))]
    }
}

pub(crate) static KERNELS: Source = Source {
    file: "variance.cu",
    text: include_str!("variance.cu"),
    headers: &[],
    kernels: kernels!["moments" of "float" "double"],
};

/// Variance and mean of contiguous rows of n, both in `shape`.
fn moments<E: Real + Element>(x: &Tensor, n: usize, scale: f64, shape: &[usize]) -> (Tensor, Tensor) {
    let (mut y, mut mean) = (x.new_empty(E::DTYPE, shape), x.new_empty(E::DTYPE, shape));
    if n == 0 {
        return (x.new_full(E::DTYPE, shape, 0.0 * scale), x.new_full(E::DTYPE, shape, f64::NAN));
    }
    if let Some(device) = x.cuda() {
        let shape = by_rows(y.len(), n);
        let args = [x.cuda_in(), y.cuda_out(), mean.cuda_out(), Arg::I64(n as i64), Arg::F64(scale)];
        // SAFETY: the kernel's arguments; a block for each row of n, of which y and mean have one number each.
        unsafe { launch(device, &KERNELS, &kernel_of("moments", E::DTYPE), shape, &args) };
        return (y, mean);
    }
    let x = x.as_slice::<E>();
    let rows = (CHUNK / n).max(1);
    parallel_chunks2_mut((y.as_mut_slice::<E>(), rows), (mean.as_mut_slice::<E>(), rows), rows * n, |i, y, mean| {
        E::dispatch(Moments { x: &x[i * rows * n..], n, scale, y, mean });
    });
    (y, mean)
}

struct Moments<'a, E> {
    x: &'a [E],
    n: usize,
    scale: f64,
    y: &'a mut [E],
    mean: &'a mut [E],
}

impl<E: Real> Kernel<E> for Moments<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let n = self.n as f64;
        for ((x, y), mean) in self.x.chunks(self.n).zip(self.y).zip(self.mean) {
            let m = E::from_f64(sums_about::<E, L>(x, E::ZERO).0 / n);
            let (sum, squares) = sums_about::<E, L>(x, m);
            let squares = squares - sum * sum / n;
            // Not `max`, which would drop NaN.
            let squares = if squares < 0.0 { 0.0 } else { squares };
            *y = E::from_f64(squares * self.scale);
            *mean = m;
        }
    }
}

/// Sum and sum of squares of `x - m`.
#[inline(always)]
fn sums_about<E: Real, L: Lanes<Elem = E>>(x: &[E], m: E) -> (f64, f64) {
    let centre = L::splat(m);
    let (mut sum, mut squares) = (0f64, 0f64);
    for part in x.chunks(128 * L::N) {
        let (mut s, mut q) = (L::splat(E::ZERO), L::splat(E::ZERO));
        let mut chunks = part.chunks_exact(L::N);
        for x in &mut chunks {
            let d = L::load(x) - centre;
            (s, q) = (s + d, d.mul_add(d, q));
        }
        let d = L::load_partial(chunks.remainder(), m) - centre;
        (s, q) = (s + d, d.mul_add(d, q));
        sum += s.reduce_sum().to_f64();
        squares += q.reduce_sum().to_f64();
    }
    (sum, squares)
}

pub(crate) fn cases() -> Vec<OpCase> {
    let case = |variant, axes: &'static [usize], correction| {
        OpCase::new("var", variant, &[("x", &[2, 3, 4])], move |_, v| var(&v[0], axes, false, correction))
    };
    vec![case("last axis", &[2], 0), case("outer axes", &[0, 2], 1)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proptest_shapes::{check_expanded, rows, shape_and_axes, value_and_gradient};
    use crate::testing::{Chain, difference};
    use kumiki_tensor::Rng;
    use proptest::prelude::*;

    fn naive(row: &[f64], correction: usize) -> f64 {
        let mean = row.iter().sum::<f64>() / row.len() as f64;
        row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (row.len() - correction) as f64
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn variances_pass_the_chain((shape, axes) in shape_and_axes(4), keep in any::<bool>(), seed in any::<u64>()) {
            let n: usize = axes.iter().map(|&axis| shape[axis]).product();
            for correction in (0..2).filter(|&c| c < n) {
                Chain::new("var", seed, &[("x", &shape)]).run(
                    |_, v| var(&v[0], &axes, keep, correction),
                    |v| rows(&v[0], &shape, &axes).iter().map(|row| naive(row, correction)).collect(),
                );
            }
            check_expanded("var", seed, &shape, |x| var(x, &axes, keep, 0));
        }
    }

    #[test]
    fn a_large_mean_does_not_cancel() {
        let x = Rng::new(1).normal(DType::F32, &[3, 1000], 1e4, 1.0);
        let exact: Vec<f64> = x.to_f64_vec().chunks(1000).map(|row| naive(row, 1)).collect();
        let y = var(&Var::constant(x), &[1], false, 1).value().to_f64_vec();
        assert_eq!(difference(&y, &exact, 1e-6), None);
    }

    #[test]
    fn case_05_a_long_row_does_not_saturate() {
        let n = 20_000_000;
        let x = Tensor::from_slice(&[-1f32, 1.0], &[1, 2]).expand(&[n / 2, 2]);
        assert_eq!(var(&Var::constant(x), &[0, 1], false, 0).item(), 1.0);
    }

    #[test]
    fn case_06_too_few_elements_give_nan_and_an_empty_gradient() {
        let of = |shape: &[usize], correction| {
            value_and_gradient(&|x: &Var| var(x, &[1], false, correction), Tensor::ones(DType::F32, shape))
        };
        let (y, dx) = of(&[2, 0], 1);
        assert!(y.len() == 2 && y.iter().all(|y| y.is_nan()) && dx.is_empty());
        assert!(of(&[1, 1], 1).0[0].is_nan());
        assert_eq!(of(&[1, 1], 0).0, [0.0]);
        let nan = Var::constant(Tensor::from_slice(&[1.0, f64::NAN], &[2]));
        assert!(var(&nan, &[0], false, 0).item().is_nan());
    }
}
