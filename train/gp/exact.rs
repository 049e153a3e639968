//! The exact posterior of a Gaussian process whose kernel, length scale and noise are known: what no model can beat on
//! average.
//!
//! One factorisation gives every prediction of a sequence. With `L·Lᵀ = K + σ²I` and `z = L⁻¹·y`, row `t` of `L·z = y` reads
//! `y_t = Σ_{s<t} L_ts·z_s + L_tt·z_t`. `z_0 … z_{t-1}` depend on the observations before `t` only, and `z_t` is standard
//! normal and independent of them; so given these `y_t` is normal with
//!
//! ```text
//! mean_t = Σ_{s<t} L_ts·z_s,   sd_t = L_tt
//! ```
//!
//! `O(n³/6)` for all `n` predictions, instead of a system of its own for each.
//! Source: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, chapter 2.

use super::cholesky::Cholesky;
use super::functions::Function;
use super::kernel::rbf;
use crate::Result;

/// A normal distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Its mean.
    pub mean: f64,
    /// Its standard deviation.
    pub sd: f64,
}

/// The posterior given a sequence of observations.
#[derive(Clone, Debug)]
pub struct Exact<'a> {
    x: &'a [f64],
    length: f64,
    factor: Cholesky,
    z: Vec<f64>,
}

impl<'a> Exact<'a> {
    /// The posterior given `y` at `x`, under the kernel of length scale `length` and noise of standard deviation `noise`.
    ///
    /// # Errors
    /// When the covariance of the observations cannot be factored.
    pub fn of(x: &'a [f64], y: &[f64], length: f64, noise: f64) -> Result<Exact<'a>> {
        let on_diagonal = |i, j| if i == j { noise * noise } else { 0.0 };
        let factor = Cholesky::of(x.len(), |i, j| rbf(x[i], x[j], length) + on_diagonal(i, j))?;
        let z = factor.solve(y);
        Ok(Exact { x, length, factor, z })
    }

    /// The distribution of every *observation* given those before it: noise is in its deviation.
    #[expect(clippy::missing_panics_doc, reason = "a row of the factor ends with its diagonal")]
    pub fn one_step(&self) -> Vec<Prediction> {
        let of = |t: usize| {
            let (sd, before) = self.factor.row(t).split_last().expect("a row ends with its diagonal");
            Prediction { mean: before.iter().zip(&self.z).map(|(l, z)| l * z).sum(), sd: *sd }
        };
        (0..self.x.len()).map(of).collect()
    }

    /// The distribution of the *function's value* at `x` given all observations: without noise.
    pub fn at(&self, x: f64) -> Prediction {
        let covariance: Vec<f64> = self.x.iter().map(|&other| rbf(x, other, self.length)).collect();
        let weights = self.factor.solve(&covariance);
        let mean = weights.iter().zip(&self.z).map(|(w, z)| w * z).sum();
        let explained: f64 = weights.iter().map(|w| w * w).sum();
        // Where everything is explained, rounding may explain more.
        Prediction { mean, sd: (1.0 - explained).max(0.0).sqrt() }
    }
}

/// The squared errors of the exact posterior's means against every observation of a function, given those before it.
///
/// # Errors
/// As [`Exact::of`].
pub fn squared_errors(function: &Function, noise: f64) -> Result<Vec<f64>> {
    let predictions = Exact::of(&function.x, &function.y, function.length, noise)?.one_step();
    Ok(predictions.iter().zip(&function.y).map(|(p, y)| (y - p.mean).powi(2)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gp::functions::Stream;
    use crate::gp::kernel::Prior;
    use proptest::prelude::*;

    /// Solves `a·x = b` by elimination with pivots.
    fn solve(mut a: Vec<Vec<f64>>, mut b: Vec<f64>) -> Vec<f64> {
        let n = b.len();
        for i in 0..n {
            let best = (i..n).max_by(|&p, &q| a[p][i].abs().total_cmp(&a[q][i].abs())).unwrap();
            a.swap(i, best);
            b.swap(i, best);
            for r in i + 1..n {
                let factor = a[r][i] / a[i][i];
                let pivot = a[i].clone();
                a[r].iter_mut().zip(&pivot).skip(i).for_each(|(x, p)| *x -= factor * p);
                b[r] -= factor * b[i];
            }
        }
        for i in (0..n).rev() {
            let known: f64 = (i + 1..n).map(|j| a[i][j] * b[j]).sum();
            b[i] = (b[i] - known) / a[i][i];
        }
        b
    }

    /// Mean and variance of `f(at)` given `y` at `x`, from the textbook: `kᵀC⁻¹y` and `1 - kᵀC⁻¹k`, `C = K + σ²I`.
    fn naive(x: &[f64], y: &[f64], at: f64, length: f64, noise: f64) -> (f64, f64) {
        let c = |i: usize, j: usize| rbf(x[i], x[j], length) + if i == j { noise * noise } else { 0.0 };
        let matrix: Vec<Vec<f64>> = (0..x.len()).map(|i| (0..x.len()).map(|j| c(i, j)).collect()).collect();
        let k: Vec<f64> = x.iter().map(|&other| rbf(at, other, length)).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        (dot(&k, &solve(matrix.clone(), y.into())), 1.0 - dot(&k, &solve(matrix, k.clone())))
    }

    proptest! {
        #[test]
        fn one_pass_equals_a_system_for_each_prediction(
            points in prop::collection::vec((-2.0f64..2.0, -3.0f64..3.0), 1..24),
            length in 0.1f64..2.0,
            noise in 0.05f64..1.0,
            at in -3.0f64..3.0,
        ) {
            let (x, y): (Vec<f64>, Vec<f64>) = points.into_iter().unzip();
            let exact = Exact::of(&x, &y, length, noise).unwrap();
            // The condition number of C is at most 24/noise² < 1e4.
            for (t, found) in exact.one_step().iter().enumerate() {
                let (mean, var) = naive(&x[..t], &y[..t], x[t], length, noise);
                prop_assert!((found.mean - mean).abs() < 1e-9, "t {}: {} {}", t, found.mean, mean);
                prop_assert!((found.sd.powi(2) - var - noise * noise).abs() < 1e-9, "t {}: {} {}", t, found.sd, var);
            }
            let (mean, var) = naive(&x, &y, at, length, noise);
            let found = exact.at(at);
            prop_assert!((found.mean - mean).abs() < 1e-9 && (found.sd.powi(2) - var).abs() < 1e-9);
        }
    }

    #[test]
    fn one_and_two_points_have_closed_forms() {
        let (x, y, length, noise) = ([0.3, -0.4], [1.5, -0.2], 0.7, 0.1);
        let all = Exact::of(&x, &y, length, noise).unwrap();
        let [first, second] = all.one_step()[..] else { panic!("two predictions") };
        let (k, c) = ((-0.5f64).exp(), 1.0 + noise * noise);
        assert_eq!(first.mean, 0.0);
        assert!((first.sd - c.sqrt()).abs() < 1e-15);
        assert!((second.mean - k * 1.5 / c).abs() < 1e-14);
        assert!((second.sd - (c - k * k / c).sqrt()).abs() < 1e-14);
        let nothing = Exact::of(&[], &[], length, noise).unwrap();
        assert_eq!(nothing.at(0.5), Prediction { mean: 0.0, sd: 1.0 });
        let one = Exact::of(&x[..1], &y[..1], length, 0.0).unwrap();
        let there = one.at(x[0]);
        assert!((there.mean - 1.5).abs() < 1e-14 && there.sd < 1e-7, "without noise a point is known: {there:?}");
    }

    #[test]
    fn standardised_residuals_are_standard_normal() {
        let prior = Prior::default();
        let (mut sum, mut squares, mut n) = (0.0, 0.0, 0.0);
        for function in Stream::held_out(&prior).get(0, 400).unwrap() {
            let exact = Exact::of(&function.x, &function.y, function.length, prior.noise).unwrap();
            for (prediction, y) in exact.one_step().iter().zip(&function.y) {
                let residual = (y - prediction.mean) / prediction.sd;
                (sum, squares, n) = (sum + residual, squares + residual * residual, n + 1.0);
            }
        }
        // 25,600 independent residuals: standard errors 0.006 and 0.009.
        assert!((sum / n).abs() < 0.02 && (squares / n - 1.0).abs() < 0.03, "{} {}", sum / n, squares / n);
    }

    #[test]
    fn observations_without_noise_need_jitter_and_still_work() {
        let prior = Prior { noise: 0.0, length_scale_min: 1.0, ..Prior::default() };
        let function = &Stream::held_out(&prior).get(0, 1).unwrap()[0];
        assert!(function.jitter > 0.0);
        let errors = squared_errors(function, 0.0).unwrap();
        assert!(errors[0] > 1e-6 && errors[40..].iter().all(|e| *e < 1e-5), "{errors:?}");
    }
}
