//! `logsumexp`: `ln Σ e^x` along an axis, without overflow.
//!
//! Forward `y = m + ln s`, `s = Σ e^(x - m)`, m the greatest element of the row; backward `dx = dout · e^(x - m) / s`.
//! A row of -inf only, or without elements, has y = -inf and gradient 0; with elements +inf y is +inf and these share
//! the gradient. Saves x, and m and s of each row: a large y would round away digits that `e^(x - y)` needs.
//! Cost: one read of memory each way; along another axis than the last one copy first.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::cuda::Source;
use kumiki_tensor::threads::parallel_chunks2_mut;
use kumiki_tensor::{DType, Element, Tensor, kernels};

use crate::cast::widened;
use crate::elementwise::{CHUNK, in_chunks};
use crate::reduce::{checked_axes, reduced_shape};
use crate::registry::{BenchCase, OpCase};
use crate::simd::{Kernel, Lanes, Real};
use crate::softmax::{axis_last, exp_sum, load, row_max, store};

/// `ln Σ e^x` along `axis`, which disappears or stays with size 1.
///
/// # Panics
/// When the axis does not exist, or `x` is not of a float dtype.
#[track_caller]
pub fn logsumexp(x: &Var, axis: usize, keep_dim: bool) -> Var {
    checked_axes("logsumexp", x, &[axis]);
    widened(&[x], |v| {
        let x = &v[0];
        let rows = axis_last(x.value(), axis);
        let (log, stats) = match x.dtype() {
            _ if rows.cuda().is_some() => cuda::forward(&rows),
            DType::F32 => forward::<f32>(&rows),
            _ => forward::<f64>(&rows),
        };
        let y = log.transpose(axis, x.rank() - 1).cast(x.dtype());
        let y = y.reshape(&reduced_shape(x.shape(), &[axis], keep_dim));
        Var::from_op(y, &[x], || LogsumexpBackward { x: x.value().clone(), stats, axis })
    })
}

/// F64, one per row of `axis_last(x)`, with the last axis of size 1: `y = shift + ln sum`.
struct Stats {
    shift: Tensor,
    sum: Tensor,
}

impl Stats {
    fn with_log(self) -> (Tensor, Stats) {
        let (shift, sum) = (self.shift.as_slice::<f64>(), self.sum.as_slice::<f64>());
        (Tensor::from_fn(self.sum.shape(), |i| shift[i] + sum[i].ln()), self)
    }
}

struct LogsumexpBackward {
    x: Tensor,
    stats: Stats,
    axis: usize,
}

impl Backward for LogsumexpBackward {
    fn name(&self) -> &'static str {
        "logsumexp"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("x", &self.x), ("shift", &self.stats.shift), ("sum", &self.stats.sum)]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        let (axis, last) = (self.axis, self.x.rank() - 1);
        let dout = axis_last(&dout.reshape(&reduced_shape(self.x.shape(), &[axis], true)), axis);
        let x = axis_last(&self.x, axis);
        let dx = match x.dtype() {
            _ if x.cuda().is_some() => cuda::gradient(&x, &self.stats, &dout),
            DType::F32 => gradient::<f32>(&x, &self.stats, &dout),
            _ => gradient::<f64>(&x, &self.stats, &dout),
        };
        vec![Some(dx.transpose(axis, last))]
    }
}

pub(crate) static KERNELS: Source = Source {
    file: "logsumexp.cu",
    text: include_str!("logsumexp.cu"),
    headers: &[],
    kernels: kernels!["logsumexp_forward" of "float" "double", "logsumexp_backward" of "float" "double"],
};

mod cuda {
    use super::{KERNELS, Stats};
    use crate::cuda::{by_rows, kernel_of};
    use crate::reduce::reduced_shape;
    use kumiki_tensor::cuda::{Arg, launch};
    use kumiki_tensor::{DType, Tensor};

    pub fn forward(x: &Tensor) -> (Tensor, Stats) {
        let axis = x.rank() - 1;
        let (device, n, shape) =
            (x.cuda().expect("on a CUDA device"), x.dim(axis), reduced_shape(x.shape(), &[axis], true));
        let mut y = x.new_empty(x.dtype(), &shape);
        let (mut shift, mut sum) = (x.new_empty(DType::F64, &shape), x.new_empty(DType::F64, &shape));
        let blocks = by_rows(y.len(), n);
        let args = [x.cuda_in(), y.cuda_out(), shift.cuda_out(), sum.cuda_out(), Arg::I64(n as i64)];
        // SAFETY: the kernel's arguments; a block for each row, of which the results have one number each.
        unsafe { launch(device, &KERNELS, &kernel_of("logsumexp_forward", x.dtype()), blocks, &args) };
        (y, Stats { shift, sum })
    }

    pub fn gradient(x: &Tensor, Stats { shift, sum }: &Stats, dout: &Tensor) -> Tensor {
        let (device, n) = (x.cuda().expect("on a CUDA device"), x.dim(x.rank() - 1));
        let mut dx = x.new_empty(x.dtype(), x.shape());
        let of_rows = [x.cuda_in(), shift.cuda_in(), sum.cuda_in(), dout.cuda_in()];
        let args = [&of_rows[..], &[dx.cuda_out(), Arg::I64(n as i64)]].concat();
        // SAFETY: as above; dx is of x's shape.
        unsafe { launch(device, &KERNELS, &kernel_of("logsumexp_backward", x.dtype()), by_rows(sum.len(), n), &args) };
        dx
    }
}

fn forward<E: Real + Element>(x: &Tensor) -> (Tensor, Stats) {
    let axis = x.rank() - 1;
    let (n, shape) = (x.shape()[axis], reduced_shape(x.shape(), &[axis], true));
    if n == 0 {
        let nothing = Tensor::zeros(DType::F64, &shape);
        return Stats { shift: nothing.clone(), sum: nothing }.with_log();
    }
    let (mut shift, mut sum) = (Tensor::empty(DType::F64, &shape), Tensor::empty(DType::F64, &shape));
    let x = x.as_slice::<E>();
    let rows = (CHUNK / n).max(1);
    let (shift_out, sum_out) = (shift.as_mut_slice::<f64>(), sum.as_mut_slice::<f64>());
    parallel_chunks2_mut((shift_out, rows), (sum_out, rows), 4 * rows * n, |i, shift, sum| {
        E::dispatch(Forward { x: &x[i * rows * n..], n, shift, sum });
    });
    Stats { shift, sum }.with_log()
}

fn gradient<E: Real + Element>(x: &Tensor, stats: &Stats, dout: &Tensor) -> Tensor {
    let n = x.shape()[x.rank() - 1];
    let mut dx = Tensor::empty(E::DTYPE, x.shape());
    if dx.is_empty() {
        return dx;
    }
    let (x, dout) = (x.as_slice::<E>(), dout.as_slice::<E>());
    let (shift, sum) = (stats.shift.as_slice::<f64>(), stats.sum.as_slice::<f64>());
    let rows = (CHUNK / n).max(1);
    in_chunks(dx.as_mut_slice::<E>(), rows * n, 4 * rows * n, &|i, dx| {
        let first = i * rows;
        let (x, shift, sum, dout) = (&x[first * n..], &shift[first..], &sum[first..], &dout[first..]);
        E::dispatch(Gradient { x, shift, sum, dout, n, dx });
    });
    dx
}

struct Forward<'a, E> {
    x: &'a [E],
    n: usize,
    shift: &'a mut [f64],
    sum: &'a mut [f64],
}

impl<E: Real> Kernel<E> for Forward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        for ((x, shift), sum) in self.x.chunks_exact(self.n).zip(self.shift).zip(self.sum) {
            let max = row_max::<E, L>(x);
            // Of a row without a finite maximum the plain sum is 0, infinite or NaN, as it should be.
            let centre = if max.is_finite() { max } else { E::ZERO };
            *shift = centre.to_f64();
            *sum = exp_sum::<E, L, false>(x, centre, &mut []);
        }
    }
}

struct Gradient<'a, E> {
    x: &'a [E],
    shift: &'a [f64],
    sum: &'a [f64],
    dout: &'a [E],
    n: usize,
    dx: &'a mut [E],
}

impl<E: Real> Kernel<E> for Gradient<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let rows = self.x.chunks_exact(self.n).zip(self.dx.chunks_exact_mut(self.n));
        for (r, (x, dx)) in rows.enumerate() {
            let (sum, dout) = (self.sum[r], self.dout[r].to_f64());
            if sum == 0.0 {
                dx.fill(E::ZERO);
            } else if sum == f64::INFINITY {
                let infinite = |x: &E| *x == E::INFINITY;
                let share = E::from_f64(dout / x.iter().filter(|x| infinite(x)).count() as f64);
                x.iter().zip(dx).for_each(|(x, dx)| *dx = if infinite(x) { share } else { E::ZERO });
            } else {
                let (shift, scale) = (L::splat(E::from_f64(self.shift[r])), L::splat(E::from_f64(dout / sum)));
                for (x, dx) in x.chunks(L::N).zip(dx.chunks_mut(L::N)) {
                    store((load::<E, L>(x, E::ZERO) - shift).exp() * scale, dx);
                }
            }
        }
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let case = |variant, axis| {
        OpCase::new("logsumexp", variant, &[("x", &[3, 4, 5])], move |_, v| logsumexp(&v[0], axis, false))
    };
    vec![case("last axis", 2), case("first axis", 0)]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let (rows, n) = (2048, 2048);
    vec![BenchCase {
        name: "logsumexp",
        inputs: vec![("x", vec![rows, n])],
        forward: Box::new(|_, v| logsumexp(&v[0], 1, false)),
        bytes: 4 * rows * n,
        flops: 20 * rows * n,
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proptest_shapes::{check_expanded, rows, shape_and_axis, value_and_gradient};
    use crate::testing::{Chain, difference};
    use kumiki_autograd::Tape;
    use proptest::prelude::*;

    const INF: f64 = f64::INFINITY;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn sums_of_exponentials_pass_the_chain((shape, axis) in shape_and_axis(3), keep in any::<bool>(), seed in any::<u64>()) {
            let chain = Chain::new("logsumexp", seed, &[("x", &shape)]).map_input(0, |x| 3.0 * x);
            chain.run(
                |_, v| logsumexp(&v[0], axis, keep),
                |v| rows(&v[0], &shape, &[axis]).iter().map(|r| r.iter().map(|x| x.exp()).sum::<f64>().ln()).collect(),
            );
            check_expanded("logsumexp", seed, &shape, |x| logsumexp(x, axis, keep));
        }
    }

    /// Values and gradients of the rows, for an upstream gradient of 1.
    fn of(x: &[f64], shape: &[usize], axis: usize, dtype: DType) -> (Vec<f64>, Vec<f64>) {
        let tape = Tape::new();
        let leaf = tape.leaf(Tensor::from_slice(x, shape).cast(dtype));
        let y = logsumexp(&leaf, axis, false);
        let grads = tape.backward_from(&[(&y, Tensor::ones(dtype, y.shape()))]);
        (y.value().to_f64_vec(), grads.get(&leaf).unwrap().to_f64_vec())
    }

    #[test]
    fn case_16_infinities() {
        for dtype in [DType::F32, DType::F64] {
            assert_eq!(of(&[-INF, -INF], &[2], 0, dtype), (vec![-INF], vec![0.0, 0.0]));
            assert_eq!(of(&[INF, 0.0], &[2], 0, dtype), (vec![INF], vec![1.0, 0.0]));
            assert_eq!(of(&[INF, INF, -INF], &[3], 0, dtype), (vec![INF], vec![0.5, 0.5, 0.0]));
            assert_eq!(of(&[-INF, 2.0], &[2], 0, dtype), (vec![2.0], vec![0.0, 1.0]));
            assert!(of(&[-INF, f64::NAN], &[2], 0, dtype).0[0].is_nan());
            assert!(of(&[INF, f64::NAN, 0.0], &[3], 0, dtype).0[0].is_nan());
        }
    }

    #[test]
    fn case_16_each_row_has_its_own_maximum() {
        for dtype in [DType::F32, DType::F64] {
            let ulp = if dtype == DType::F32 { f32::EPSILON.into() } else { f64::EPSILON };
            for (x, axis) in [([0.0, 0.0, 1000.0, 1000.0], 1), ([0.0, 1000.0, 0.0, 1000.0], 0)] {
                let (y, dx) = of(&x, &[2, 2], axis, dtype);
                assert_eq!(difference(&y, &[2f64.ln(), 1000.0 + 2f64.ln()], ulp), None);
                assert_eq!(dx, [0.5; 4]);
            }
        }
    }

    #[test]
    fn case_06_the_sum_of_nothing_is_0() {
        let op = |x: &Var| logsumexp(x, 1, false);
        assert_eq!(value_and_gradient(&op, Tensor::ones(DType::F32, &[2, 0])), (vec![-INF; 2], vec![]));
        assert_eq!(value_and_gradient(&op, Tensor::ones(DType::F32, &[0, 2])), (vec![], vec![]));
    }

    #[test]
    fn case_05_long_rows_do_not_saturate() {
        let n = 20_000_000;
        let x = Var::constant(Tensor::zeros(DType::F32, &[1]).expand(&[n]));
        assert_eq!(logsumexp(&x, 0, false).item(), f64::from((n as f64).ln() as f32));
    }
}
