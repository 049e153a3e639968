//! `sum mean sum_all mean_all`: over any set of axes.
//!
//! Forward `y = c Σ x`, c = 1 or 1/n; backward `dx = c · dout`, repeated along the summed axes: a view that takes no
//! memory. Saves nothing. Over no elements the sum is 0 and the mean NaN.
//! Cost: one read of memory; one copy first when the summed axes are not neighbours, or for a stepped view.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::Tensor;

use crate::cast::widened;
use crate::elementwise::{assert_float, map_over};
use crate::registry::{BenchCase, OpCase};
use crate::sums::sum_axes;
use crate::unary::Scale;

/// The sum over `axes`, which disappear or stay with size 1.
///
/// # Panics
/// When an axis does not exist or is named twice, or `x` is not of a float dtype.
#[track_caller]
pub fn sum(x: &Var, axes: &[usize], keep_dims: bool) -> Var {
    reduce("sum", x, axes, keep_dims)
}

/// The mean over `axes`, which disappear or stay with size 1. NaN over an empty axis.
///
/// # Panics
/// As [`sum`].
#[track_caller]
pub fn mean(x: &Var, axes: &[usize], keep_dims: bool) -> Var {
    reduce("mean", x, axes, keep_dims)
}

/// The sum of all elements, shape `[]`.
///
/// # Panics
/// When `x` is not of a float dtype.
#[track_caller]
pub fn sum_all(x: &Var) -> Var {
    reduce("sum", x, &(0..x.rank()).collect::<Vec<_>>(), false)
}

/// The mean of all elements, shape `[]`; NaN of no elements.
///
/// # Panics
/// When `x` is not of a float dtype.
#[track_caller]
pub fn mean_all(x: &Var) -> Var {
    reduce("mean", x, &(0..x.rank()).collect::<Vec<_>>(), false)
}

#[track_caller]
fn reduce(name: &'static str, x: &Var, axes: &[usize], keep_dims: bool) -> Var {
    let axes = checked_axes(name, x, axes);
    widened(&[x], |v| {
        let x = &v[0];
        let n: usize = axes.iter().map(|&axis| x.dim(axis)).product();
        let scale = if name == "mean" { 1.0 / n as f64 } else { 1.0 };
        let y = sum_axes(x.value(), &axes, scale).reshape(&reduced_shape(x.shape(), &axes, keep_dims));
        Var::from_op(y, &[x], || ReduceBackward { name, scale, shape: x.shape().into(), axes })
    })
}

/// The axes in order, each checked.
#[track_caller]
pub(crate) fn checked_axes(op: &str, x: &Var, axes: &[usize]) -> Vec<usize> {
    assert_float(op, x.value());
    let mut sorted = axes.to_vec();
    sorted.sort_unstable();
    let valid = sorted.windows(2).all(|pair| pair[0] < pair[1]) && sorted.last().is_none_or(|&last| last < x.rank());
    assert!(valid, "{op}: axes {axes:?} must be different axes of x, shape {:?}", x.shape());
    sorted
}

/// The shape with the given axes removed, or of size 1.
pub(crate) fn reduced_shape(shape: &[usize], axes: &[usize], keep_dims: bool) -> Vec<usize> {
    let size = |(axis, &size): (usize, &usize)| match (axes.contains(&axis), keep_dims) {
        (false, _) => Some(size),
        (true, true) => Some(1),
        (true, false) => None,
    };
    shape.iter().enumerate().filter_map(size).collect()
}

struct ReduceBackward {
    name: &'static str,
    scale: f64,
    shape: Box<[usize]>,
    axes: Vec<usize>,
}

impl Backward for ReduceBackward {
    fn name(&self) -> &'static str {
        self.name
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        let dout = if self.name == "mean" { map_over(&Scale(self.scale), dout) } else { dout };
        vec![Some(dout.reshape(&reduced_shape(&self.shape, &self.axes, true)).expand(&self.shape))]
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let case = |name, variant, axes: &'static [usize], f: fn(&Var, &[usize], bool) -> Var| {
        OpCase::new(name, variant, &[("x", &[2, 3, 4])], move |_, v| f(&v[0], axes, false))
    };
    vec![
        case("sum", "last axis", &[2], sum),
        case("sum", "all", &[0, 1, 2], sum),
        case("mean", "middle axis", &[1], mean),
        case("mean", "outer axes", &[0, 2], mean),
    ]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let (rows, columns) = (4096, 1024);
    let case = |name, axis| BenchCase {
        name,
        inputs: vec![("x", vec![rows, columns])],
        forward: Box::new(move |_, v| sum(&v[0], &[axis], false)),
        bytes: 4 * rows * columns,
        flops: rows * columns,
    };
    vec![case("sum (rows)", 1), case("sum (columns)", 0)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proptest_shapes::{check_expanded, rows, shape_and_axes, value_and_gradient};
    use crate::testing::Chain;
    use kumiki_tensor::{DType, Rng, threads::with_threads};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn sums_and_means_pass_the_chain((shape, axes) in shape_and_axes(4), keep in any::<bool>(), seed in any::<u64>()) {
            let total = |row: Vec<f64>| row.iter().sum::<f64>();
            let average = |row: Vec<f64>| row.iter().sum::<f64>() / row.len() as f64;
            let chain = Chain::new("sum", seed, &[("x", &shape)]);
            chain.run(|_, v| sum(&v[0], &axes, keep), |v| rows(&v[0], &shape, &axes).into_iter().map(total).collect());
            let chain = Chain { name: "mean", ..chain };
            chain.run(|_, v| mean(&v[0], &axes, keep), |v| rows(&v[0], &shape, &axes).into_iter().map(average).collect());
            check_expanded("sum", seed, &shape, |x| sum(x, &axes, keep));
        }
    }

    fn constant(shape: &[usize]) -> Var {
        Var::constant(Tensor::ones(DType::F32, shape))
    }

    #[test]
    fn case_05_f32_accumulators_do_not_saturate() {
        let n = 20_000_000;
        // [n, 2] without 160 MB: a row that repeats.
        let view = Var::constant(Tensor::ones(DType::F32, &[2]).expand(&[n, 2]));
        assert_eq!(mean(&view, &[0], false).value().to_f64_vec(), [1.0, 1.0]);
        // The same in memory, through the kernel for narrow rows, along rows and over everything.
        let x = Tensor::ones(DType::F32, &[n, 2]);
        assert_eq!(mean(&Var::constant(x.clone()), &[0], true).value().to_f64_vec(), [1.0, 1.0]);
        assert_eq!(mean(&Var::constant(x.reshape(&[2, n])), &[1], false).value().to_f64_vec(), [1.0, 1.0]);
        assert_eq!(sum_all(&Var::constant(x)).item(), 4e7);
    }

    #[test]
    fn case_06_over_no_elements_the_sum_is_0_and_the_mean_nan() {
        assert_eq!(sum_all(&constant(&[0])).item(), 0.0);
        assert!(mean_all(&constant(&[0])).item().is_nan());
        assert_eq!(sum(&constant(&[2, 0]), &[1], true).value().to_f64_vec(), [0.0; 2]);
        assert!(mean(&constant(&[2, 0, 3]), &[1], false).value().to_f64_vec().iter().all(|x| x.is_nan()));
        assert_eq!(mean(&constant(&[2, 0]), &[0], false).shape(), [0]);
        for op in [|x: &Var| sum(x, &[1], false), |x: &Var| mean(x, &[1], false), sum_all, mean_all] {
            assert!(value_and_gradient(&op, Tensor::ones(DType::F64, &[2, 0])).1.is_empty());
        }
    }

    #[test]
    fn results_have_the_right_shapes() {
        let x = constant(&[2, 3, 4]);
        assert_eq!(sum(&x, &[2, 0], true).shape(), [1, 3, 1]);
        assert_eq!(sum(&x, &[2, 0], false).shape(), [3]);
        assert_eq!(sum(&x, &[], false).value().to_f64_vec(), [1.0; 24]);
        assert_eq!((sum_all(&x).shape(), sum_all(&x).item()), (&[][..], 24.0));
        assert_eq!(mean_all(&constant(&[])).item(), 1.0);
    }

    #[test]
    fn the_gradient_takes_no_memory() {
        let tape = kumiki_autograd::Tape::new();
        let x = tape.leaf(Tensor::ones(DType::F32, &[100, 7]));
        let grads = tape.backward(&mean_all(&x));
        let dx = grads.get(&x).unwrap();
        assert_eq!((dx.strides(), dx.select(0, 99).select(0, 6).item()), (&[0, 0][..], f64::from(1f32 / 700.0)));
    }

    #[test]
    fn thread_counts_do_not_change_a_bit_and_large_sums_are_right() {
        for shape in [[1, 100_003, 1], [7, 20_011, 1], [1, 3001, 130], [3, 50, 20_000], [400, 7, 90]] {
            let x = Rng::new(3).normal(DType::F32, &shape, 0.5, 1.0);
            let run =
                |threads| with_threads(threads, || value_and_gradient(&|x: &Var| sum(x, &[1], false), x.clone()).0);
            let y = run(1);
            assert!(y == run(2) && y == run(8));
            let exact = x.cast(DType::F64).sum_to(&[shape[0], 1, shape[2]]).to_f64_vec();
            assert_eq!(crate::testing::difference(&y, &exact, 1e-6), None, "{shape:?}");
        }
    }

    #[test]
    #[should_panic(expected = "sum: axes [1, 1] must be different axes of x, shape [2, 3]")]
    fn an_axis_named_twice_is_refused() {
        sum(&constant(&[2, 3]), &[1, 1], false);
    }

    #[test]
    #[should_panic(expected = "mean: axes [2] must be different axes of x, shape [2, 3]")]
    fn an_axis_that_does_not_exist_is_refused() {
        mean(&constant(&[2, 3]), &[2], false);
    }
}
