//! Cholesky's factorisation `A = L·Lᵀ` in f64, row by row: `O(n³/6)` multiplications, and of a matrix that is extended by
//! rows only the new rows of `L` change.

use crate::{Error, Result};

/// What is added to the diagonal of a matrix that is not positive definite, as a part of the diagonal's mean.
pub const JITTER: f64 = 1e-8;

/// The lower factor of a symmetric positive definite matrix.
#[derive(Clone, Debug)]
pub struct Cholesky {
    n: usize,
    // Row i starts at i(i+1)/2 and has i+1 elements.
    lower: Vec<f64>,
    jitter: f64,
}

impl Cholesky {
    /// Factors the symmetric `matrix [n, n]`, given by its elements at `row >= column`. Kernel matrices of near points are
    /// singular within rounding: a matrix with a pivot that is not positive is tried once more with [`JITTER`] times its
    /// mean diagonal added to the diagonal; [`Cholesky::jitter`] says whether it was.
    ///
    /// # Errors
    /// When it is not positive definite even so: the pivot and its row are named.
    pub fn of(n: usize, matrix: impl Fn(usize, usize) -> f64) -> Result<Cholesky> {
        let mut entries = Vec::with_capacity(n * (n + 1) / 2);
        (0..n).for_each(|i| entries.extend((0..=i).map(|j| matrix(i, j))));
        if let Ok(lower) = factor(n, entries.clone()) {
            return Ok(Cholesky { n, lower, jitter: 0.0 });
        }
        let diagonal = |i: usize| i * (i + 1) / 2 + i;
        let jitter = JITTER * ((0..n).map(|i| entries[diagonal(i)]).sum::<f64>() / n as f64);
        (0..n).for_each(|i| entries[diagonal(i)] += jitter);
        match factor(n, entries) {
            Ok(lower) => Ok(Cholesky { n, lower, jitter }),
            Err((row, pivot)) => Err(Error::new(format!(
                "the matrix [{n}, {n}] is not positive definite, even with {jitter:e} added to its diagonal: the pivot of \
                 row {row} (from 0) must be positive, found {pivot:.2e}"
            ))),
        }
    }

    /// Row `i` of `L`, its `i + 1` elements up to the diagonal.
    pub fn row(&self, i: usize) -> &[f64] {
        row(&self.lower, i)
    }

    /// What was added to the diagonal; 0 when nothing was.
    pub fn jitter(&self) -> f64 {
        self.jitter
    }

    /// `L·z`.
    pub fn times(&self, z: &[f64]) -> Vec<f64> {
        (0..self.n).map(|i| dot(self.row(i), &z[..=i])).collect()
    }

    /// `L⁻¹·y`.
    pub fn solve(&self, y: &[f64]) -> Vec<f64> {
        let mut z: Vec<f64> = Vec::with_capacity(self.n);
        for (i, y) in y.iter().enumerate().take(self.n) {
            let row = self.row(i);
            z.push((y - dot(&row[..i], &z)) / row[i]);
        }
        z
    }
}

fn row(lower: &[f64], i: usize) -> &[f64] {
    &lower[i * (i + 1) / 2..(i + 1) * (i + 2) / 2]
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Turns the lower half of a matrix into its factor, or gives the first row whose pivot is not positive, and the pivot.
fn factor(n: usize, mut lower: Vec<f64>) -> std::result::Result<Vec<f64>, (usize, f64)> {
    for i in 0..n {
        let (above, rest) = lower.split_at_mut(i * (i + 1) / 2);
        let current = &mut rest[..=i];
        for j in 0..i {
            let other = row(above, j);
            current[j] = (current[j] - dot(&current[..j], &other[..j])) / other[j];
        }
        let pivot = current[i] - dot(&current[..i], &current[..i]);
        // NaN is not above 0 either.
        if pivot.partial_cmp(&0.0) != Some(std::cmp::Ordering::Greater) || !pivot.is_finite() {
            return Err((i, pivot));
        }
        current[i] = pivot.sqrt();
    }
    Ok(lower)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_factor_gives_the_matrix_back(n in 0usize..14, entries in prop::collection::vec(-2.0f64..2.0, 14 * 14)) {
            // B·Bᵀ + I is positive definite whatever B is.
            let b = |i: usize| &entries[14 * i..14 * i + n];
            let matrix = |i: usize, j: usize| dot(b(i), b(j)) + f64::from(u8::from(i == j));
            let found = Cholesky::of(n, matrix).unwrap();
            prop_assert_eq!(found.jitter(), 0.0);
            for i in 0..n {
                for j in 0..=i {
                    let product = dot(found.row(i), found.row(j));
                    prop_assert!((product - matrix(i, j)).abs() < 1e-12 * matrix(i, i).max(matrix(j, j)));
                }
            }
            let z = &entries[..n];
            let back = found.solve(&found.times(z));
            prop_assert!(back.iter().zip(z).all(|(a, b)| (a - b).abs() < 1e-9), "{:?} {:?}", back, z);
        }
    }

    #[test]
    fn a_singular_matrix_gets_its_jitter_and_says_so() {
        let found = Cholesky::of(3, |_, _| 2.0).unwrap();
        assert_eq!(found.jitter(), 2e-8);
        assert_eq!(found.row(0), [(2.0f64 + 2e-8).sqrt()]);
    }

    #[test]
    fn what_jitter_cannot_help_is_named() {
        let matrix = [[1.0, 0.0, 0.0], [0.0, 1.0, 2.0], [0.0, 2.0, 1.0]];
        let error = Cholesky::of(3, |i, j| matrix[i][j]).unwrap_err().to_string();
        assert!(error.contains("[3, 3] is not positive definite, even with 1e-8 added"), "{error}");
        assert!(error.contains("the pivot of row 2 (from 0) must be positive, found -3.00e0"), "{error}");
        for bad in [f64::NAN, f64::INFINITY, 0.0] {
            assert!(Cholesky::of(1, |_, _| bad).unwrap_err().to_string().contains("row 0"), "{bad}");
        }
    }
}
