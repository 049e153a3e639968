//! The covariance of function values, and where functions come from.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The covariance of `f(a)` and `f(b)`, `exp(-(a-b)² / (2·length²))`: a radial basis function of variance 1.
pub fn rbf(a: f64, b: f64, length: f64) -> f64 {
    // The quotient first: the square of a small length alone could vanish.
    (-0.5 * ((a - b) / length).powi(2)).exp()
}

/// A distribution of functions with noisy observations: `x` uniform in `[-x_range, x_range)`, the kernel's length
/// log-uniform between its bounds, `f` a Gaussian process of variance 1 under [`rbf`], `y = f(x) + noise·N(0, 1)`. That 0.1
/// is the *standard deviation* of the noise is our reading.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prior {
    /// Observations of every function.
    pub points: usize,
    /// Half the width of the interval around 0 that `x` is in.
    pub x_range: f64,
    /// The kernel's shortest length scale.
    pub length_scale_min: f64,
    /// The kernel's longest length scale.
    pub length_scale_max: f64,
    /// Standard deviation of the noise; 0 for none.
    pub noise: f64,
}

/// The most observations of a function: its kernel matrix has as many rows.
pub const MOST_POINTS: usize = 4096;

/// Sizes of numbers that models in F32 can work with.
const RANGE: (f64, f64) = (1e-6, 1e6);

impl Default for Prior {
    fn default() -> Prior {
        Prior { points: 64, x_range: 2.0, length_scale_min: 0.2, length_scale_max: 1.0, noise: 0.1 }
    }
}

impl Prior {
    /// What is wrong with the numbers, if anything.
    ///
    /// # Errors
    /// A sentence naming the setting, its range and what was found.
    pub fn check(&self) -> Result<()> {
        let Prior { points, x_range, length_scale_min: min, length_scale_max: max, noise } = *self;
        if !(1..=MOST_POINTS).contains(&points) {
            return Err(Error::new(format!("points must be from 1 to {MOST_POINTS}, found {points}")));
        }
        let (low, high) = RANGE;
        for (name, value) in [("x_range", x_range), ("length_scale_min", min), ("length_scale_max", max)] {
            if !(low..=high).contains(&value) {
                return Err(Error::new(format!("{name} must be a number from {low} to {high}, found {value}")));
            }
        }
        if min > max {
            return Err(Error::new(format!(
                "length_scale_min must be at most length_scale_max, found {min} and {max}"
            )));
        }
        if !(0.0..=high).contains(&noise) {
            return Err(Error::new(format!("noise must be a number from 0 to {high}, found {noise}")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn covariances() {
        assert_eq!(rbf(0.3, 0.3, 0.2), 1.0);
        assert!((rbf(0.0, 1.0, 1.0) - (-0.5f64).exp()).abs() < 1e-15);
        assert_eq!(rbf(-1.0, 3.0, 0.7), rbf(3.0, -1.0, 0.7));
        assert_eq!((rbf(1.0, 1.0, 1e-300), rbf(1.0, 2.0, 1e-300)), (1.0, 0.0));
    }

    #[test]
    fn ranges_are_sentences() {
        let good = Prior::default();
        good.check().unwrap();
        Prior { noise: 0.0, points: 1, length_scale_max: 0.2, ..good.clone() }.check().unwrap();
        for (prior, phrase) in [
            (Prior { points: 0, ..good.clone() }, "points must be from 1 to 4096, found 0"),
            (Prior { points: 4097, ..good.clone() }, "found 4097"),
            (Prior { x_range: 0.0, ..good.clone() }, "x_range must be a number from 0.000001 to 1000000, found 0"),
            (Prior { x_range: f64::NAN, ..good.clone() }, "x_range must be a number from"),
            (Prior { length_scale_min: -1.0, ..good.clone() }, "length_scale_min must be a number from"),
            (Prior { length_scale_max: f64::INFINITY, ..good.clone() }, "length_scale_max must be a number from"),
            (Prior { length_scale_min: 2.0, ..good.clone() }, "at most length_scale_max, found 2 and 1"),
            (Prior { noise: -0.1, ..good.clone() }, "noise must be a number from 0 to 1000000, found -0.1"),
            (Prior { noise: f64::NAN, ..good }, "noise must be a number from 0"),
        ] {
            let error = prior.check().unwrap_err().to_string();
            assert!(error.contains(phrase), "{error}");
        }
    }
}
