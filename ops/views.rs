//! Views: `reshape`, `transpose`, `permute`, `narrow`, `expand`, `squeeze`, `unsqueeze`, `contiguous`.
//!
//! Forward: the same elements under another shape, order or selection, `y[i] = x[f(i)]`. Nothing moves, but for one
//! copy in `reshape` where strides forbid a view, and in `contiguous` where there is something to do.
//! Backward: the adjoint, `dx[j] = Σ dout[i] over f(i) = j`: the view back for those that only rename or reorder; zeros
//! around it for `narrow`; the sum over repeats for `expand`, which the tape takes. Saves sizes, no tensor.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::cuda::{Arg, Source, launch, over};
use kumiki_tensor::shape::Dims;
use kumiki_tensor::{Tensor, dispatch, kernels, threads};

use crate::cuda::kernel_of;
use crate::registry::OpCase;

/// `x` under another shape, in row-major order; a view where the strides of `x` allow it, else one copy.
///
/// # Panics
/// When the numbers of elements differ.
#[track_caller]
pub fn reshape(x: &Var, shape: &[usize]) -> Var {
    let y = view("reshape", x, x.value().reshape(shape), Adjoint::Reshape(Dims::new(x.shape())));
    match x.recipe() {
        Some(recipe) => y.with_recipe(|| recipe.reshape(shape)),
        None => y,
    }
}

/// `x` with axes `a` and `b` swapped; a view.
///
/// # Panics
/// When there is no such axis.
#[track_caller]
pub fn transpose(x: &Var, a: usize, b: usize) -> Var {
    let value = x.value().transpose(a, b);
    let mut order: Vec<usize> = (0..x.rank()).collect();
    order.swap(a, b);
    view("transpose", x, value, Adjoint::Permute(Dims::new(&order)))
}

/// `x` with its axes in another order, axis `i` of the result being axis `order[i]` of `x`; a view.
///
/// # Panics
/// When `order` does not name every axis once.
#[track_caller]
pub fn permute(x: &Var, order: &[usize]) -> Var {
    let value = x.value().permute(order);
    let mut inverse = Dims::new(order);
    order.iter().enumerate().for_each(|(i, &axis)| inverse.values_mut()[axis] = i);
    view("permute", x, value, Adjoint::Permute(inverse))
}

/// Entries `start .. start + len` of one axis; a view.
///
/// # Panics
/// When the axis does not exist or has fewer entries.
#[track_caller]
pub fn narrow(x: &Var, axis: usize, start: usize, len: usize) -> Var {
    assert!(
        axis < x.rank() && start.checked_add(len).is_some_and(|end| end <= x.dim(axis)),
        "narrow: {len} entries from {start} on axis {axis} do not lie in {:?}",
        x.shape()
    );
    let size = x.dim(axis);
    view("narrow", x, x.value().narrow(axis, start, len), Adjoint::Narrow { axis, start, size })
}

/// `x` with axes of size 1, and new leading axes, repeated to reach `shape`; a view in which they have stride 0.
///
/// # Panics
/// When the shape of `x` does not broadcast to `shape`.
#[track_caller]
pub fn expand(x: &Var, shape: &[usize]) -> Var {
    view("expand", x, x.value().expand(shape), Adjoint::Same)
}

/// `x` without `axis`, which has size 1; a view.
///
/// # Panics
/// When the axis does not exist or has another size.
#[track_caller]
pub fn squeeze(x: &Var, axis: usize) -> Var {
    view("squeeze", x, x.value().squeeze(axis), Adjoint::Reshape(Dims::new(x.shape())))
}

/// `x` with a new axis of size 1 before axis `axis`; a view.
///
/// # Panics
/// When `axis` is above the number of axes.
#[track_caller]
pub fn unsqueeze(x: &Var, axis: usize) -> Var {
    view("unsqueeze", x, x.value().unsqueeze(axis), Adjoint::Reshape(Dims::new(x.shape())))
}

/// `x` with its elements in row-major order in memory: itself when they are so already, else a copy.
pub fn contiguous(x: &Var) -> Var {
    if x.value().is_contiguous() { x.clone() } else { view("contiguous", x, x.value().copy(), Adjoint::Same) }
}

#[track_caller]
fn view(name: &'static str, x: &Var, value: Tensor, adjoint: Adjoint) -> Var {
    Var::from_op(value, &[x], || ViewBackward { name, adjoint })
}

struct ViewBackward {
    name: &'static str,
    adjoint: Adjoint,
}

enum Adjoint {
    /// Back to this shape.
    Reshape(Dims),
    /// The axes in this order.
    Permute(Dims),
    /// Zeros before `start` and after, up to `size` entries.
    Narrow { axis: usize, start: usize, size: usize },
    /// The gradient as it comes; where it is larger than the input, the tape sums it.
    Same,
}

impl Backward for ViewBackward {
    fn name(&self) -> &'static str {
        self.name
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        vec![Some(match &self.adjoint {
            Adjoint::Reshape(shape) => dout.reshape(shape),
            Adjoint::Permute(order) => dout.permute(order),
            Adjoint::Narrow { axis, start, size } => between_zeros(&dout, *axis, *start, *size),
            Adjoint::Same => dout,
        })]
    }
}

pub(crate) static KERNELS: Source = Source {
    file: "views.cu",
    text: include_str!("views.cu"),
    headers: &[],
    kernels: kernels!["between_zeros" of "float" "double" "bf16"],
};

/// `size` entries along `axis`, of which those from `start` on are `part` and the others 0: written in one pass.
fn between_zeros(part: &Tensor, axis: usize, start: usize, size: usize) -> Tensor {
    let mut shape = part.shape().to_vec();
    shape[axis] = size;
    let inner: usize = shape[axis + 1..].iter().product();
    let (row, before, len) = (size * inner, start * inner, part.dim(axis) * inner);
    let mut out = part.new_empty(part.dtype(), &shape);
    if out.is_empty() {
        return out;
    }
    let part = part.contiguous();
    if let Some(device) = part.cuda() {
        let count = out.len();
        let sizes = [start, part.dim(axis), size, inner, count].map(|n| Arg::I64(n as i64));
        let args = [&[part.cuda_in(), out.cuda_out()][..], &sizes].concat();
        // SAFETY: the kernel's arguments, of contiguous tensors of these sizes.
        unsafe { launch(device, &KERNELS, &kernel_of("between_zeros", part.dtype()), over(count), &args) };
        return out;
    }
    let rows = (16 * 1024 / row).max(1);
    dispatch!(part.dtype(), E => {
        let x = part.as_slice::<E>();
        threads::parallel_chunks_mut(out.as_mut_slice::<E>(), rows * row, rows * row, |i, piece| {
            for (j, y) in piece.chunks_mut(row).enumerate() {
                y[..before].fill(E::default());
                y[before..before + len].copy_from_slice(&x[(i * rows + j) * len..][..len]);
                y[before + len..].fill(E::default());
            }
        });
    });
    out
}

pub(crate) fn cases() -> Vec<OpCase> {
    let x: [(&str, &[usize]); 1] = [("x", &[2, 3, 4])];
    vec![
        OpCase::new("reshape", "", &x, |_, v| reshape(&v[0], &[4, 6])),
        OpCase::new("reshape", "of a transposed view", &x, |_, v| reshape(&transpose(&v[0], 0, 2), &[6, 4])),
        OpCase::new("transpose", "", &x, |_, v| transpose(&v[0], 0, 2)),
        OpCase::new("permute", "", &x, |_, v| permute(&v[0], &[1, 2, 0])),
        OpCase::new("narrow", "", &x, |_, v| narrow(&v[0], 1, 1, 2)),
        OpCase::new("expand", "", &[("x", &[3, 1])], |_, v| expand(&v[0], &[2, 3, 4])),
        OpCase::new("squeeze", "", &[("x", &[2, 1, 3])], |_, v| squeeze(&v[0], 1)),
        OpCase::new("unsqueeze", "", &x, |_, v| unsqueeze(&v[0], 3)),
        OpCase::new("contiguous", "", &x, |_, v| contiguous(&transpose(&v[0], 0, 1))),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Chain;
    use kumiki_autograd::Tape;
    use kumiki_tensor::{DType, Rng};
    use proptest::prelude::*;

    /// Plain loops: for every index of `shape` in row-major order, the element of `x` (of `from`) that `source` names.
    fn picked(x: &[f64], from: &[usize], shape: &[usize], source: impl Fn(&[usize]) -> Vec<usize>) -> Vec<f64> {
        (0..shape.iter().product())
            .map(|position: usize| {
                let (mut index, mut rest) = (vec![0; shape.len()], position);
                for axis in (0..shape.len()).rev() {
                    index[axis] = rest % shape[axis];
                    rest /= shape[axis];
                }
                x[source(&index).iter().zip(from).fold(0, |at, (&i, &dim)| at * dim + i)]
            })
            .collect()
    }

    fn chain<'a>(name: &'a str, seed: u64, shape: &'a [usize]) -> Chain<'a> {
        // Elements only move: no more than one rounding is allowed for.
        Chain { f32_tolerance: 1e-6, bf16_tolerance: Some(4e-3), ..Chain::new(name, seed, &[("x", shape)]) }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn every_view_passes_the_chain(
            seed in any::<u64>(), shape in proptest::collection::vec(0usize..5, 1..5),
            (a, b, start, extra) in any::<(usize, usize, usize, usize)>(),
        ) {
            let rank = shape.len();
            let (a, b) = (a % rank, b % rank);
            let flat = [shape.iter().product::<usize>()];
            chain("reshape", seed, &shape).run(|_, v| reshape(&v[0], &flat), |x| x[0].clone());

            let mut swapped = shape.clone();
            swapped.swap(a, b);
            chain("transpose", seed, &shape).run(|_, v| transpose(&v[0], a, b), |x| {
                picked(&x[0], &shape, &swapped, |i| { let mut i = i.to_vec(); i.swap(a, b); i })
            });
            chain("contiguous", seed, &shape).run(|_, v| contiguous(&transpose(&v[0], a, b)), |x| {
                picked(&x[0], &shape, &swapped, |i| { let mut i = i.to_vec(); i.swap(a, b); i })
            });

            let order = Rng::new(seed).permutation(rank);
            let turned: Vec<usize> = order.iter().map(|&axis| shape[axis]).collect();
            chain("permute", seed, &shape).run(|_, v| permute(&v[0], &order), |x| {
                picked(&x[0], &shape, &turned, |i| {
                    let mut at = vec![0; rank];
                    order.iter().zip(i).for_each(|(&axis, &i)| at[axis] = i);
                    at
                })
            });

            let start = start % (shape[a] + 1);
            let mut part = shape.clone();
            part[a] = extra % (shape[a] - start + 1);
            chain("narrow", seed, &shape).run(|_, v| narrow(&v[0], a, start, part[a]), |x| {
                picked(&x[0], &shape, &part, |i| { let mut i = i.to_vec(); i[a] += start; i })
            });

            let mut single = shape.clone();
            single[a] = 1;
            let mut larger = shape.clone();
            larger.insert(0, extra % 3);
            chain("expand", seed, &single).run(|_, v| expand(&v[0], &larger), |x| {
                picked(&x[0], &single, &larger, |i| { let mut i = i[1..].to_vec(); i[a] = 0; i })
            });
            chain("squeeze", seed, &single).run(|_, v| squeeze(&v[0], a), |x| x[0].clone());
            chain("unsqueeze", seed, &shape).run(|_, v| unsqueeze(&v[0], b + 1), |x| x[0].clone());
        }
    }

    #[test]
    fn views_share_storage_and_save_nothing() {
        let tape = Tape::new();
        let x = tape.leaf(Tensor::ones(DType::F32, &[4, 6]));
        let views = [
            reshape(&x, &[2, 2, 6]),
            transpose(&x, 0, 1),
            permute(&x, &[1, 0]),
            narrow(&x, 1, 2, 3),
            expand(&x, &[5, 4, 6]),
            squeeze(&unsqueeze(&x, 0), 0),
            contiguous(&x),
        ];
        assert!(views.iter().all(|v| v.value().shares_storage_with(x.value())));
        assert!(!contiguous(&views[1]).value().shares_storage_with(x.value()));
        assert_eq!(tape.summary().saved_bytes(), 0);
    }

    #[test]
    fn a_large_gradient_is_padded_with_zeros_in_the_right_places() {
        let tape = Tape::new();
        let x = tape.leaf(Tensor::ones(DType::F32, &[700, 90]));
        let y = narrow(&x, 1, 31, 13);
        let dout = Tensor::from_fn::<f32>(&[13, 700], |i| i as f32 + 1.0).transpose(0, 1);
        let dx = tape.backward_from(&[(&y, dout)]).get(&x).unwrap().to_f64_vec();
        for (i, dx) in dx.iter().enumerate() {
            let (row, column) = (i / 90, i % 90);
            let inside = (31..44).contains(&column);
            assert_eq!(*dx, if inside { ((column - 31) * 700 + row) as f64 + 1.0 } else { 0.0 });
        }
    }

    #[test]
    #[should_panic(expected = "narrow: 3 entries from 2 on axis 1 do not lie in [2, 4]")]
    fn narrow_names_what_was_asked() {
        narrow(&Var::constant(Tensor::zeros(DType::F32, &[2, 4])), 1, 2, 3);
    }
}
