//! `max`: the greatest element along an axis.
//!
//! Forward `y = max_r x_r`; backward `dx_r = dout` for the first r with `x_r = y`, 0 elsewhere. Saves the index, one i64
//! per row of x, instead of x. A NaN is the greatest. Cost: one read of memory; the backward writes x's size once.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::cuda::Source;
use kumiki_tensor::threads::parallel_chunks2_mut;
use kumiki_tensor::{DType, Element, Tensor, kernels};

use crate::cast::widened;
use crate::elementwise::{CHUNK, in_chunks};
use crate::reduce::{checked_axes, reduced_shape};
use crate::registry::OpCase;
use crate::simd::{self, Real};

/// The greatest element along `axis`, which disappears or stays with size 1. Among equals the first gets the gradient.
///
/// # Panics
/// When the axis does not exist or is empty, or `x` is not of a float dtype.
#[track_caller]
pub fn max(x: &Var, axis: usize, keep_dim: bool) -> Var {
    checked_axes("max", x, &[axis]);
    assert!(x.dim(axis) > 0, "max: axis {axis} of x is empty, shape {:?}", x.shape());
    widened(&[x], |v| {
        let x = &v[0];
        let (y, index) = match x.dtype() {
            _ if x.value().cuda().is_some() => cuda::maximum(x.value(), axis),
            DType::F32 => maximum::<f32>(x.value(), axis),
            _ => maximum::<f64>(x.value(), axis),
        };
        let y = y.reshape(&reduced_shape(x.shape(), &[axis], keep_dim));
        Var::from_op(y, &[x], || MaxBackward { index, shape: x.shape().into(), axis })
    })
}

struct MaxBackward {
    index: Tensor,
    shape: Box<[usize]>,
    axis: usize,
}

impl Backward for MaxBackward {
    fn name(&self) -> &'static str {
        "max"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("index", &self.index)]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        vec![Some(match dout.dtype() {
            _ if dout.cuda().is_some() => cuda::scatter(&dout.contiguous(), &self.index, &self.shape, self.axis),
            DType::F32 => scatter::<f32>(&dout.contiguous(), &self.index, &self.shape, self.axis),
            _ => scatter::<f64>(&dout.contiguous(), &self.index, &self.shape, self.axis),
        })]
    }
}

/// Sizes before, of and after an axis.
pub(crate) fn split_at_axis(shape: &[usize], axis: usize) -> [usize; 3] {
    [shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product()]
}

pub(crate) static KERNELS: Source = Source {
    file: "max.cu",
    text: include_str!("max.cu"),
    headers: &[],
    kernels: kernels!["max_forward" of "float" "double", "max_backward" of "float" "double"],
};

mod cuda {
    use super::{KERNELS, split_at_axis};
    use crate::cuda::kernel_of;
    use kumiki_tensor::cuda::{Arg, launch, over};
    use kumiki_tensor::{DType, Tensor};

    pub fn maximum(x: &Tensor, axis: usize) -> (Tensor, Tensor) {
        let [outer, n, inner] = split_at_axis(x.shape(), axis);
        let (device, lines, x) = (x.cuda().expect("on a CUDA device"), outer * inner, x.contiguous());
        let (mut y, mut index) = (x.new_empty(x.dtype(), &[outer, inner]), x.new_empty(DType::I64, &[outer, inner]));
        let sizes = [n, inner, lines].map(|n| Arg::I64(n as i64));
        let args = [&[x.cuda_in(), y.cuda_out(), index.cuda_out()], &sizes[..]].concat();
        // SAFETY: the kernel's arguments; y and index have an element for each line of x.
        unsafe { launch(device, &KERNELS, &kernel_of("max_forward", x.dtype()), over(lines), &args) };
        (y, index)
    }

    pub fn scatter(dout: &Tensor, index: &Tensor, shape: &[usize], axis: usize) -> Tensor {
        let [_, n, inner] = split_at_axis(shape, axis);
        let device = dout.cuda().expect("on a CUDA device");
        let mut dx = dout.new_empty(dout.dtype(), shape);
        let count = dx.len();
        let sizes = [n, inner, count].map(|n| Arg::I64(n as i64));
        let args = [&[dout.cuda_in(), index.cuda_in(), dx.cuda_out()], &sizes[..]].concat();
        // SAFETY: as above, the other way round.
        unsafe { launch(device, &KERNELS, &kernel_of("max_backward", dout.dtype()), over(count), &args) };
        dx
    }
}

/// Maximum and its index, both `[outer, inner]`.
fn maximum<E: Real + Element>(x: &Tensor, axis: usize) -> (Tensor, Tensor) {
    let [outer, n, inner] = split_at_axis(x.shape(), axis);
    let (mut y, mut index) = (Tensor::empty(E::DTYPE, &[outer, inner]), Tensor::empty(DType::I64, &[outer, inner]));
    if y.is_empty() {
        return (y, index);
    }
    let x = x.contiguous();
    let x = x.as_slice::<E>();
    let outers = (CHUNK / n / inner).max(1);
    let (y_out, index_out) = (y.as_mut_slice::<E>(), index.as_mut_slice::<i64>());
    let chunk = outers * inner;
    parallel_chunks2_mut((y_out, chunk), (index_out, chunk), chunk * n, |i, y, index| {
        let slices = x[i * chunk * n..].chunks(n * inner);
        for ((x, y), index) in slices.zip(y.chunks_mut(inner)).zip(index.chunks_mut(inner)) {
            if inner == 1 {
                let greatest = simd::max(x);
                let found = x.iter().position(|&x| x == greatest || x.is_nan());
                (y[0], index[0]) = (greatest, found.expect("a row holds its maximum") as i64);
                continue;
            }
            y.copy_from_slice(&x[..inner]);
            index.fill(0);
            for (r, row) in x.chunks(inner).enumerate().skip(1) {
                for ((&x, y), index) in row.iter().zip(&mut *y).zip(&mut *index) {
                    // Without branches, which random data would mispredict.
                    let greater = (x > *y) | (Real::is_nan(x) & !Real::is_nan(*y));
                    *y = if greater { x } else { *y };
                    *index = if greater { r as i64 } else { *index };
                }
            }
        }
    });
    (y, index)
}

fn scatter<E: Real + Element>(dout: &Tensor, index: &Tensor, shape: &[usize], axis: usize) -> Tensor {
    let [_, n, inner] = split_at_axis(shape, axis);
    let mut dx = Tensor::empty(E::DTYPE, shape);
    if dx.is_empty() {
        return dx;
    }
    let (dout, index) = (dout.as_slice::<E>(), index.as_slice::<i64>());
    let outers = (CHUNK / n / inner).max(1);
    in_chunks(dx.as_mut_slice::<E>(), outers * n * inner, outers * n * inner, &|i, dx| {
        dx.fill(E::ZERO);
        let first = i * outers * inner;
        for (o, dx) in dx.chunks_mut(n * inner).enumerate() {
            let at = first + o * inner;
            for (c, (&g, &r)) in dout[at..at + inner].iter().zip(&index[at..at + inner]).enumerate() {
                dx[r as usize * inner + c] = g;
            }
        }
    });
    dx
}

pub(crate) fn cases() -> Vec<OpCase> {
    let case = |variant, axis| OpCase::new("max", variant, &[("x", &[3, 4, 5])], move |_, v| max(&v[0], axis, false));
    vec![case("last axis", 2), case("first axis", 0)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proptest_shapes::{check_expanded, rows, shape_and_axis, value_and_gradient};
    use crate::testing::Chain;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn maxima_pass_the_chain((shape, axis) in shape_and_axis(3), keep in any::<bool>(), seed in any::<u64>()) {
            prop_assume!(shape[axis] > 0);
            let mut chain = Chain::new("max", seed, &[("x", &shape)]);
            // Within each row distinct multiples of 1/8, in a shuffled order: differences see no ties.
            let x = chain.inputs[0].1.to_f64_vec();
            let [_, n, inner] = split_at_axis(&shape, axis);
            let rank = |i: usize| (0..n).filter(|s| x[i - i / inner % n * inner + s * inner] < x[i]).count();
            let values = chain.inputs[0].1.make_mut::<f64>();
            values.iter_mut().enumerate().for_each(|(i, v)| *v = rank(i) as f64 / 8.0 - 2.0);
            chain.run(
                |_, v| max(&v[0], axis, keep),
                |v| rows(&v[0], &shape, &[axis]).iter().map(|r| r.iter().copied().fold(f64::MIN, f64::max)).collect(),
            );
            check_expanded("max", seed, &shape, |x| max(x, axis, keep));
        }
    }

    fn gradient(x: &[f64], shape: &[usize], axis: usize) -> (Vec<f64>, Vec<f64>) {
        let tape = kumiki_autograd::Tape::new();
        let leaf = tape.leaf(Tensor::from_slice(x, shape));
        let y = max(&leaf, axis, false);
        let grads = tape.backward_from(&[(&y, Tensor::ones(DType::F64, y.shape()))]);
        (y.value().to_f64_vec(), grads.get(&leaf).unwrap().to_f64_vec())
    }

    #[test]
    fn among_equals_the_first_gets_the_gradient() {
        assert_eq!(gradient(&[1., 3., 3., 3.], &[4], 0), (vec![3.], vec![0., 1., 0., 0.]));
        assert_eq!(gradient(&[1., 3., 1., 3.], &[2, 2], 0), (vec![1., 3.], vec![1., 1., 0., 0.]));
        assert_eq!(gradient(&[f64::NEG_INFINITY; 2], &[2], 0), (vec![f64::NEG_INFINITY], vec![1., 0.]));
    }

    #[test]
    fn a_nan_is_the_greatest() {
        for (shape, axis) in [(&[3][..], 0), (&[3, 2], 0)] {
            let values = [1.0, f64::NAN, 9.0, 4.0, f64::NAN, 5.0];
            let (y, dx) = gradient(&values[..shape.iter().product()], shape, axis);
            assert!(y[0].is_nan() && dx.iter().sum::<f64>() == y.len() as f64);
        }
    }

    #[test]
    fn case_16_each_row_has_its_own_maximum() {
        let x = Tensor::from_slice(&[0.0, 0.0, 1000.0, 1000.0], &[2, 2]);
        assert_eq!(max(&Var::constant(x), 1, true).value().to_f64_vec(), [0.0, 1000.0]);
    }

    #[test]
    fn case_06_no_rows_have_no_maxima() {
        let op = |x: &Var| max(x, 1, false);
        assert_eq!(value_and_gradient(&op, Tensor::ones(DType::F32, &[0, 3])), (vec![], vec![]));
    }

    #[test]
    #[should_panic(expected = "max: axis 1 of x is empty, shape [2, 0]")]
    fn case_06_an_empty_axis_has_no_maximum() {
        max(&Var::constant(Tensor::ones(DType::F32, &[2, 0])), 1, false);
    }
}
