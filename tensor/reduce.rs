//! What accumulation of gradients needs: adding in place, scaling, and summing broadcast axes away.

use crate::cuda;
use crate::dtype::{DType, Element, bf16, round_to_bf16, widen_bf16};
use crate::tensor::Tensor;
use crate::threads;

/// Rows that one task of a column sum adds up; fixed, so that the order of sums never depends on threads.
const ROWS: usize = 128;

/// Elements that one task scales.
const SCALED: usize = 1 << 15;

/// Elements whose squares one task sums; fixed, so that sums do not depend on the number of threads.
const SQUARED: usize = 1 << 15;

/// `Σ x²` of each tensor, in f64 and in a fixed order; they lie on one device, from which all sums come in one copy.
pub fn sums_of_squares(tensors: &[&Tensor]) -> Vec<f64> {
    let on_device = |x: &&Tensor| x.cuda().map(|device| cuda::sum_of_squares(device, &x.contiguous()));
    let there: Vec<Tensor> = tensors.iter().filter_map(on_device).collect();
    if there.is_empty() {
        return tensors.iter().map(|x| sum_of_squares(&x.contiguous())).collect();
    }
    crate::concat(&there.iter().collect::<Vec<_>>(), 0).to_f64_vec()
}

fn sum_of_squares(x: &Tensor) -> f64 {
    // Sums that do not wait for one another.
    const LANES: usize = 16;
    dispatch!(x.dtype(), E => {
        let x = x.as_slice::<E>();
        let square = |x: &E| x.to_f64().powi(2);
        let part = |i: usize| -> f64 {
            let (lines, rest) = x[i * SQUARED..((i + 1) * SQUARED).min(x.len())].as_chunks::<LANES>();
            let mut sums = [0.0; LANES];
            for line in lines {
                sums.iter_mut().zip(line).for_each(|(sum, x)| *sum += square(x));
            }
            sums.iter().sum::<f64>() + rest.iter().map(square).sum::<f64>()
        };
        threads::parallel_map(x.len().div_ceil(SQUARED), SQUARED, part).iter().sum()
    })
}

impl Tensor {
    /// `self += other`, elementwise, in place when nobody else holds the storage.
    ///
    /// # Panics
    /// When shapes or dtypes differ.
    #[track_caller]
    pub fn add_assign(&mut self, other: &Tensor) {
        assert!(
            self.shape() == other.shape() && self.dtype() == other.dtype(),
            "add_assign: {:?} {} and {:?} {} differ",
            self.shape(),
            self.dtype(),
            other.shape(),
            other.dtype()
        );
        const CHUNK: usize = 16 * 1024;
        let other = other.contiguous();
        if let Some(device) = other.cuda() {
            self.own();
            return cuda::add_assign(device, self, &other);
        }
        if self.dtype() == DType::BF16 {
            let x = other.as_slice::<bf16>();
            return threads::parallel_chunks_mut(self.make_mut::<bf16>(), CHUNK, CHUNK, |i, piece| {
                piece
                    .iter_mut()
                    .zip(&x[i * CHUNK..])
                    .for_each(|(y, &x)| *y = round_to_bf16(widen_bf16(*y) + widen_bf16(x)));
            });
        }
        dispatch!(self.dtype(), E => {
            let x = other.as_slice::<E>();
            threads::parallel_chunks_mut(self.make_mut::<E>(), CHUNK, CHUNK, |i, piece| {
                piece.iter_mut().zip(&x[i * CHUNK..]).for_each(|(y, &x)| *y = sum2(*y, x));
            });
        });
    }

    /// `self *= factor`, elementwise.
    pub fn scale(&mut self, factor: f64) {
        if let Some(device) = self.cuda().cloned() {
            self.own();
            return cuda::scale(&device, self, factor);
        }
        dispatch!(self.dtype(), E => {
            threads::parallel_chunks_mut(self.make_mut::<E>(), SCALED, SCALED, |_, part| {
                part.iter_mut().for_each(|x| *x = E::from_f64(x.to_f64() * factor));
            });
        });
    }

    /// Sums the axes along which `shape` broadcasts to this tensor's shape: the adjoint of [`Tensor::expand`].
    /// Sums are taken in f64, in a fixed order.
    ///
    /// # Panics
    /// When `shape` does not broadcast to this tensor's shape.
    #[track_caller]
    pub fn sum_to(&self, shape: &[usize]) -> Tensor {
        if shape == self.shape() {
            return self.clone();
        }
        let extra = self.rank().checked_sub(shape.len());
        let fits =
            extra.is_some_and(|n| shape.iter().zip(&self.shape()[n..]).all(|(&to, &from)| to == from || to == 1));
        assert!(fits, "sum_to: {shape:?} does not broadcast to {:?}", self.shape());
        let extra = extra.unwrap_or(0);
        let (summed, kept): (Vec<usize>, Vec<usize>) =
            (0..self.rank()).partition(|&axis| axis < extra || shape[axis - extra] != self.shape()[axis]);
        let order: Vec<usize> = summed.iter().chain(&kept).copied().collect();
        let rows: usize = summed.iter().map(|&axis| self.shape()[axis]).product();
        let columns: usize = kept.iter().map(|&axis| self.shape()[axis]).product();
        let source = self.permute(&order).contiguous(); // [rows, columns]
        if let Some(device) = self.cuda() {
            let mut out = self.new_empty(self.dtype(), shape);
            cuda::sum_rows(device, &source, [rows, columns], &mut out);
            return out;
        }
        let mut out = Tensor::empty(self.dtype(), shape);
        dispatch!(self.dtype(), E => {
            let x = source.as_slice::<E>();
            let partial = threads::parallel_map(rows.div_ceil(ROWS), ROWS.min(rows) * columns, |i| {
                let block = &x[i * ROWS * columns..((i + 1) * ROWS).min(rows) * columns];
                column_sums(block, columns)
            });
            let mut total = vec![0f64; columns];
            for part in &partial {
                total.iter_mut().zip(part).for_each(|(t, p)| *t += p);
            }
            out.as_mut_slice::<E>().iter_mut().zip(&total).for_each(|(y, &t)| *y = E::from_f64(t));
        });
        out
    }
}

/// The sum of two elements in their own arithmetic: exact for integers, f32 for f32, through f32 for bf16.
#[inline(always)]
fn sum2<E: Element>(a: E, b: E) -> E {
    E::from_f64(a.to_f64() + b.to_f64())
}

fn column_sums<E: Element>(rows: &[E], columns: usize) -> Vec<f64> {
    let mut sums = vec![0f64; columns];
    if columns == 1 {
        sums[0] = rows.iter().map(|x| x.to_f64()).sum();
    } else {
        for row in rows.chunks_exact(columns.max(1)) {
            sums.iter_mut().zip(row).for_each(|(s, x)| *s += x.to_f64());
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sum_to_is_the_adjoint_of_expand() {
        let x = Tensor::from_fn::<f64>(&[2, 3, 4], |i| i as f64);
        assert_eq!(x.sum_to(&[4]).to_f64_vec(), [60., 66., 72., 78.]);
        assert_eq!(x.sum_to(&[3, 1]).to_f64_vec(), [6. + 54., 22. + 70., 38. + 86.]);
        assert_eq!(x.sum_to(&[2, 1, 4]).shape(), [2, 1, 4]);
        assert_eq!(x.sum_to(&[]).item(), 276.0);
        assert_eq!(x.sum_to(&[1]).shape(), [1]);
        assert_eq!(Tensor::zeros(DType::F32, &[0, 3]).sum_to(&[3]).to_f64_vec(), [0.; 3]);
    }

    #[test]
    fn sums_of_bf16_are_rounded_to_the_nearest() {
        let special = [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 3e38, -3e38, 1e-40, 1.0, 1.0039];
        let random = crate::Rng::new(3).normal(DType::F64, &[4000], 0.0, 2.0).to_f64_vec();
        let all: Vec<f64> = special.into_iter().chain(random).collect();
        let (a, b): (Vec<f64>, Vec<f64>) = special.iter().flat_map(|&a| all.iter().map(move |&b| (a, b))).unzip();
        let of = |x: &[f64]| Tensor::from_slice(x, &[x.len()]).cast(DType::BF16);
        let (mut sum, a, b) = (of(&a), of(&a), of(&b));
        sum.add_assign(&b);
        for ((sum, &a), &b) in sum.as_slice::<bf16>().iter().zip(a.as_slice::<bf16>()).zip(b.as_slice::<bf16>()) {
            let expected = bf16::from_f32(a.to_f32() + b.to_f32());
            assert!(sum.to_bits() == expected.to_bits() || sum.is_nan() && expected.is_nan(), "{a} + {b}: {sum}");
        }
    }

    #[test]
    fn add_assign_leaves_sharers_alone() {
        let mut x = Tensor::ones(DType::F32, &[3]);
        let y = x.clone();
        x.add_assign(&Tensor::ones(DType::F32, &[1]).expand(&[3]));
        assert_eq!((x.to_f64_vec(), y.to_f64_vec()), (vec![2.0; 3], vec![1.0; 3]));
    }
}
