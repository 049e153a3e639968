//! `cumsum`: running sums along an axis.
//!
//! Forward `y_r = Σ_{s<=r} x_s`; backward `dx_r = Σ_{s>=r} dout_s`, summed from the end. (Total minus prefix would cancel:
//! behind large numbers nothing would be left of small ones.) Saves nothing. Sums run in f64.
//! Cost: one pass over memory each way, one after another along the axis.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::cuda::{Arg, Source, launch, over};
use kumiki_tensor::{DType, Element, Tensor, kernels};

use crate::cast::widened;
use crate::cuda::kernel_of;
use crate::elementwise::{CHUNK, in_chunks};
use crate::max::split_at_axis;
use crate::reduce::checked_axes;
use crate::registry::OpCase;

/// The sum of all elements up to and with each one along `axis`; the shape of `x`.
///
/// # Panics
/// When the axis does not exist, or `x` is not of a float dtype.
#[track_caller]
pub fn cumsum(x: &Var, axis: usize) -> Var {
    checked_axes("cumsum", x, &[axis]);
    widened(&[x], |v| {
        let x = &v[0];
        Var::from_op(running_sums(x.value(), axis, false), &[x], || CumsumBackward { axis })
    })
}

struct CumsumBackward {
    axis: usize,
}

impl Backward for CumsumBackward {
    fn name(&self) -> &'static str {
        "cumsum"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        vec![Some(running_sums(&dout, self.axis, true))]
    }
}

fn running_sums(x: &Tensor, axis: usize, from_end: bool) -> Tensor {
    match x.dtype() {
        _ if x.cuda().is_some() => running_sums_on_cuda(x, axis, from_end),
        DType::F32 => running_sums_of::<f32>(x, axis, from_end),
        _ => running_sums_of::<f64>(x, axis, from_end),
    }
}

pub(crate) static KERNELS: Source = Source {
    file: "cumsum.cu",
    text: include_str!("cumsum.cu"),
    headers: &[],
    kernels: kernels!["running_sums" of "float" "double"],
};

fn running_sums_on_cuda(x: &Tensor, axis: usize, from_end: bool) -> Tensor {
    let [outer, n, inner] = split_at_axis(x.shape(), axis);
    let (device, lines, x) = (x.cuda().expect("on a CUDA device"), outer * inner, x.contiguous());
    let mut y = x.new_empty(x.dtype(), x.shape());
    let [n, inner, of_lines] = [n, inner, lines].map(|n| Arg::I64(n as i64));
    let args = [x.cuda_in(), y.cuda_out(), n, inner, Arg::I32(i32::from(from_end)), of_lines];
    // SAFETY: the kernel's arguments; y is of x's shape.
    unsafe { launch(device, &KERNELS, &kernel_of("running_sums", x.dtype()), over(lines), &args) };
    y
}

fn running_sums_of<E: Element>(x: &Tensor, axis: usize, from_end: bool) -> Tensor {
    let [_, n, inner] = split_at_axis(x.shape(), axis);
    let mut out = Tensor::empty(E::DTYPE, x.shape());
    if out.is_empty() {
        return out;
    }
    let x = x.contiguous();
    let x = x.as_slice::<E>();
    let slice = n * inner;
    let chunk = (CHUNK / slice).max(1) * slice;
    in_chunks(out.as_mut_slice::<E>(), chunk, chunk, &|i, out| {
        let mut sums = vec![0f64; inner];
        for (y, x) in out.chunks_mut(slice).zip(x[i * chunk..].chunks(slice)) {
            if inner == 1 {
                let pairs = x.iter().zip(y);
                if from_end {
                    add_up(pairs.rev())
                } else {
                    add_up(pairs)
                }
                continue;
            }
            sums.fill(0.0);
            let rows = y.chunks_mut(inner).zip(x.chunks(inner));
            let step = |(y, x)| add_row(&mut sums, x, y);
            if from_end { rows.rev().for_each(step) } else { rows.for_each(step) }
        }
    });
    out
}

/// Writes the running sum of neighbouring elements.
fn add_up<'a, E: Element>(pairs: impl Iterator<Item = (&'a E, &'a mut E)>) {
    let mut sum = 0f64;
    for (x, y) in pairs {
        sum += x.to_f64();
        *y = E::from_f64(sum);
    }
}

/// Adds a row to the sums and writes them.
fn add_row<E: Element>(sums: &mut [f64], x: &[E], y: &mut [E]) {
    for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
        *sum += x.to_f64();
        *y = E::from_f64(*sum);
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let case = |variant, axis| OpCase::new("cumsum", variant, &[("x", &[3, 4, 5])], move |_, v| cumsum(&v[0], axis));
    vec![case("last axis", 2), case("first axis", 0)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proptest_shapes::{check_expanded, shape_and_axis, value_and_gradient};
    use crate::testing::Chain;
    use proptest::prelude::*;

    fn naive(x: &[f64], shape: &[usize], axis: usize) -> Vec<f64> {
        let inner: usize = shape[axis + 1..].iter().product();
        let sum_up_to = |i: usize| (0..=i / inner % shape[axis]).map(|s| x[i - s * inner]).sum();
        (0..x.len()).map(sum_up_to).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn running_sums_pass_the_chain((shape, axis) in shape_and_axis(3), seed in any::<u64>()) {
            let chain = Chain::new("cumsum", seed, &[("x", &shape)]);
            chain.run(|_, v| cumsum(&v[0], axis), |v| naive(&v[0], &shape, axis));
            check_expanded("cumsum", seed, &shape, |x| cumsum(x, axis));
        }
    }

    #[test]
    fn case_08_suffix_sums_are_summed_from_the_end() {
        let dout: Vec<f32> = (0..64).map(|i| if i < 32 { 1e8 } else { 1.0 }).collect();
        for shape in [&[64][..], &[64, 1], &[1, 64]] {
            let axis = shape.iter().position(|&n| n == 64).unwrap();
            let tape = kumiki_autograd::Tape::new();
            let x = tape.leaf(Tensor::zeros(DType::F32, shape));
            let grads = tape.backward_from(&[(&cumsum(&x, axis), Tensor::from_slice(&dout, shape))]);
            let dx = grads.get(&x).unwrap().to_f64_vec();
            assert_eq!((dx[32], dx[63], dx[31]), (32.0, 1.0, f64::from(1e8f32 + 32.0)));
        }
    }

    #[test]
    fn case_05_f32_running_sums_do_not_saturate() {
        let n = (1 << 24) + 100;
        let y = cumsum(&Var::constant(Tensor::ones(DType::F32, &[1]).expand(&[n])), 0);
        assert_eq!(y.value().select(0, n - 1).item(), n as f64);
    }

    #[test]
    fn case_06_empty_axes_have_empty_gradients() {
        for axis in 0..2 {
            let op = |x: &Var| cumsum(x, axis);
            assert_eq!(value_and_gradient(&op, Tensor::ones(DType::F32, &[2, 0])), (vec![], vec![]));
        }
    }
}
