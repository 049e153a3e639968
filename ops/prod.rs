//! `prod`: the product along an axis.
//!
//! Forward `y = Π_r x_r`; backward `dx_r = dout · Π_{s≠r} x_s`, formed as product of all before and all after r: no
//! division, so zeros in the row are no exception. Saves x. Products run in f64. Over an empty axis the product is 1.
//! Cost: one read of memory forward, two in the backward.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::cuda::Source;
use kumiki_tensor::{DType, Element, Tensor, kernels};

use crate::cast::widened;
use crate::elementwise::{CHUNK, in_chunks};
use crate::max::split_at_axis;
use crate::reduce::{checked_axes, reduced_shape};
use crate::registry::OpCase;

/// The product along `axis`, which disappears or stays with size 1.
///
/// # Panics
/// When the axis does not exist, or `x` is not of a float dtype.
#[track_caller]
pub fn prod(x: &Var, axis: usize, keep_dim: bool) -> Var {
    checked_axes("prod", x, &[axis]);
    widened(&[x], |v| {
        let x = &v[0];
        let y = match x.dtype() {
            _ if x.value().cuda().is_some() => cuda::product(x.value(), axis),
            DType::F32 => product::<f32>(x.value(), axis),
            _ => product::<f64>(x.value(), axis),
        };
        let y = y.reshape(&reduced_shape(x.shape(), &[axis], keep_dim));
        Var::from_op(y, &[x], || ProdBackward { x: x.value().clone(), axis })
    })
}

struct ProdBackward {
    x: Tensor,
    axis: usize,
}

impl Backward for ProdBackward {
    fn name(&self) -> &'static str {
        "prod"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("x", &self.x)]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        vec![Some(match dout.dtype() {
            _ if dout.cuda().is_some() => cuda::product_of_others(&self.x, &dout.contiguous(), self.axis),
            DType::F32 => product_of_others::<f32>(&self.x, &dout.contiguous(), self.axis),
            _ => product_of_others::<f64>(&self.x, &dout.contiguous(), self.axis),
        })]
    }
}

pub(crate) static KERNELS: Source = Source {
    file: "prod.cu",
    text: include_str!("prod.cu"),
    headers: &[],
    kernels: kernels!["prod_forward" of "float" "double", "prod_backward" of "float" "double"],
};

mod cuda {
    use super::KERNELS;
    use crate::cuda::kernel_of;
    use crate::max::split_at_axis;
    use kumiki_tensor::cuda::{Arg, launch, over};
    use kumiki_tensor::{DType, Tensor};

    pub fn product(x: &Tensor, axis: usize) -> Tensor {
        let [outer, n, inner] = split_at_axis(x.shape(), axis);
        let (device, lines, x) = (x.cuda().expect("on a CUDA device"), outer * inner, x.contiguous());
        let mut y = x.new_empty(x.dtype(), &[outer, inner]);
        let sizes = [n, inner, lines].map(|n| Arg::I64(n as i64));
        let args = [&[x.cuda_in(), y.cuda_out()], &sizes[..]].concat();
        // SAFETY: the kernel's arguments; y has an element for each line of x.
        unsafe { launch(device, &KERNELS, &kernel_of("prod_forward", x.dtype()), over(lines), &args) };
        y
    }

    pub fn product_of_others(x: &Tensor, dout: &Tensor, axis: usize) -> Tensor {
        let [outer, n, inner] = split_at_axis(x.shape(), axis);
        let (device, lines, x) = (x.cuda().expect("on a CUDA device"), outer * inner, x.contiguous());
        let (mut before, mut dx) = (x.new_empty(DType::F64, x.shape()), x.new_empty(x.dtype(), x.shape()));
        let sizes = [n, inner, lines].map(|n| Arg::I64(n as i64));
        let args = [&[x.cuda_in(), dout.cuda_in(), before.cuda_out(), dx.cuda_out()], &sizes[..]].concat();
        // SAFETY: as above; `before` and `dx` are of x's shape.
        unsafe { launch(device, &KERNELS, &kernel_of("prod_backward", x.dtype()), over(lines), &args) };
        dx
    }
}

/// Shape `[outer, inner]`.
fn product<E: Element>(x: &Tensor, axis: usize) -> Tensor {
    let [outer, n, inner] = split_at_axis(x.shape(), axis);
    if n == 0 {
        return Tensor::ones(E::DTYPE, &[outer, inner]);
    }
    let mut y = Tensor::empty(E::DTYPE, &[outer, inner]);
    if y.is_empty() {
        return y;
    }
    let x = x.contiguous();
    let x = x.as_slice::<E>();
    let chunk = (CHUNK / n / inner).max(1) * inner;
    in_chunks(y.as_mut_slice::<E>(), chunk, chunk * n, &|i, y| {
        let mut products = vec![0f64; inner];
        for (x, y) in x[i * chunk * n..].chunks(n * inner).zip(y.chunks_mut(inner)) {
            products.fill(1.0);
            for row in x.chunks(inner) {
                products.iter_mut().zip(row).for_each(|(p, x)| *p *= x.to_f64());
            }
            y.iter_mut().zip(&products).for_each(|(y, &p)| *y = E::from_f64(p));
        }
    });
    y
}

fn product_of_others<E: Element>(x: &Tensor, dout: &Tensor, axis: usize) -> Tensor {
    let [_, n, inner] = split_at_axis(x.shape(), axis);
    let mut dx = Tensor::empty(E::DTYPE, x.shape());
    if dx.is_empty() {
        return dx;
    }
    let x = x.contiguous();
    let (x, dout) = (x.as_slice::<E>(), dout.as_slice::<E>());
    let slice = n * inner;
    let outers = (CHUNK / slice).max(1);
    in_chunks(dx.as_mut_slice::<E>(), outers * slice, 4 * outers * slice, &|i, dx| {
        // `dout` times the products of all rows before each, then times those of all rows behind it.
        let mut before = vec![0f64; slice];
        let mut running = vec![0f64; inner];
        let dout = dout[i * outers * inner..].chunks(inner);
        for ((dx, x), dout) in dx.chunks_mut(slice).zip(x[i * outers * slice..].chunks(slice)).zip(dout) {
            running.iter_mut().zip(dout).for_each(|(p, g)| *p = g.to_f64());
            for (x, before) in x.chunks(inner).zip(before.chunks_mut(inner)) {
                before.copy_from_slice(&running);
                running.iter_mut().zip(x).for_each(|(p, x)| *p *= x.to_f64());
            }
            running.fill(1.0);
            for ((dx, x), before) in dx.chunks_mut(inner).zip(x.chunks(inner)).zip(before.chunks(inner)).rev() {
                for (((dx, x), before), p) in dx.iter_mut().zip(x).zip(before).zip(&mut running) {
                    *dx = E::from_f64(before * *p);
                    *p *= x.to_f64();
                }
            }
        }
    });
    dx
}

pub(crate) fn cases() -> Vec<OpCase> {
    let with_zeros = |x: f64| if x > 0.8 { 0.0 } else { x };
    let case = |variant, axis| OpCase::new("prod", variant, &[("x", &[3, 4, 5])], move |_, v| prod(&v[0], axis, false));
    vec![case("last axis", 2), case("first axis, with zeros", 0).map_input(0, with_zeros)]
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
        fn products_pass_the_chain((shape, axis) in shape_and_axis(3), keep in any::<bool>(), seed in any::<u64>()) {
            let chain = Chain::new("prod", seed, &[("x", &shape)]);
            let chain = chain.map_input(0, |x| if x.abs() > 2.2 { 0.0 } else { x.signum() + 0.1 * x });
            chain.run(
                |_, v| prod(&v[0], axis, keep),
                |v| rows(&v[0], &shape, &[axis]).iter().map(|row| row.iter().product()).collect(),
            );
            check_expanded("prod", seed, &shape, |x| prod(x, axis, keep));
        }
    }

    #[test]
    fn zeros_in_a_row_do_not_spoil_its_gradient() {
        let of = |x: &[f64]| {
            let tape = kumiki_autograd::Tape::new();
            let leaf = tape.leaf(Tensor::from_slice(x, &[x.len()]));
            tape.backward(&prod(&leaf, 0, false)).get(&leaf).unwrap().to_f64_vec()
        };
        assert_eq!(of(&[2., 0., 3.]), [0., 6., 0.]);
        assert_eq!(of(&[0., 0., 3.]), [0., 0., 0.]);
        assert_eq!(of(&[2., 5., 3.]), [15., 6., 10.]);
    }

    #[test]
    fn f32_products_may_overflow_on_the_way() {
        let x = Var::constant(Tensor::from_slice(&[1e30f32, 1e30, 1e-30, 1e-30], &[4]));
        assert!((prod(&x, 0, false).item() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn case_06_the_product_of_nothing_is_1() {
        let op = |x: &Var| prod(x, 1, false);
        assert_eq!(value_and_gradient(&op, Tensor::ones(DType::F32, &[2, 0])), (vec![1.0; 2], vec![]));
        assert_eq!(prod(&Var::constant(Tensor::ones(DType::F64, &[0])), 0, true).value().to_f64_vec(), [1.0]);
    }
}
