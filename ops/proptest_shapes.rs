//! Shapes, views and checks that the tests of elementwise operators and reductions share.

use kumiki_autograd::{Tape, Var};
use kumiki_tensor::{DType, Rng, Tensor, poison_fresh_buffers};
use proptest::prelude::*;

use crate::simd::{Level, with_level};
use crate::testing::{Chain, difference};

/// Sizes about the numbers of lanes (4, 8, 16), and 0 and 1.
fn size() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0), Just(1), 2usize..6, Just(7), Just(8), Just(9), 15usize..19, Just(33)]
}

/// Shapes of at most `rank` axes and a thousand elements.
pub fn shape(rank: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(size(), 0..=rank).prop_filter("too large", |s| s.iter().product::<usize>() <= 1000)
}

/// As [`shape`] with at least one axis, and the number of one of them.
pub fn shape_and_axis(rank: usize) -> impl Strategy<Value = (Vec<usize>, usize)> {
    (prop::collection::vec(size(), 1..=rank), any::<prop::sample::Index>())
        .prop_filter("too large", |(s, _)| s.iter().product::<usize>() <= 1000)
        .prop_map(|(s, axis)| {
            let axis = axis.index(s.len());
            (s, axis)
        })
}

/// For every element of a reduction's result, the elements that it is made of, in order.
pub fn rows(values: &[f64], shape: &[usize], axes: &[usize]) -> Vec<Vec<f64>> {
    let kept: Vec<usize> = (0..shape.len()).filter(|axis| !axes.contains(axis)).collect();
    let order: Vec<usize> = kept.iter().chain(axes).copied().collect();
    let count = kept.iter().map(|&axis| shape[axis]).product();
    let n: usize = axes.iter().map(|&axis| shape[axis]).product();
    let moved = Tensor::from_slice(values, shape).permute(&order).to_f64_vec();
    (0..count).map(|i| moved[i * n..(i + 1) * n].to_vec()).collect()
}

/// As [`shape`] with a set of its axes.
pub fn shape_and_axes(rank: usize) -> impl Strategy<Value = (Vec<usize>, Vec<usize>)> {
    (shape(rank), any::<u8>()).prop_map(|(s, set)| {
        let axes = (0..s.len()).filter(|axis| set >> axis & 1 == 1).collect();
        (s, axes)
    })
}

/// The chain for a formula, on inputs moved into its domain and off its kinks by `domain`; and stride-0 views.
pub fn check_unary(
    name: &str,
    seed: u64,
    shape: &[usize],
    op: impl Fn(&Var) -> Var,
    naive: impl Fn(f64) -> f64,
    domain: impl Fn(f64) -> f64,
) {
    Chain::new(name, seed, &[("x", shape)])
        .map_input(0, domain)
        .run(|_, v| op(&v[0]), |x| x[0].iter().map(|&x| naive(x)).collect());
    check_expanded(name, seed, shape, op);
}

/// An operator on a view that repeats elements (stride 0) equals the operator on a copy, gradient included.
pub fn check_expanded(name: &str, seed: u64, shape: &[usize], op: impl Fn(&Var) -> Var) {
    for axis in 0..shape.len() {
        let mut small = shape.to_vec();
        small[axis] = small[axis].min(1);
        let base = Rng::new(seed).uniform(DType::F64, &small, 0.5, 1.5);
        let view = if shape[axis] == 0 { base } else { base.expand(shape) };
        let [on_view, on_copy] = [view.clone(), view.copy()].map(|x| value_and_gradient(&op, x));
        for (what, got, expected) in [("value", &on_view.0, &on_copy.0), ("gradient", &on_view.1, &on_copy.1)] {
            if let Some(problem) = difference(got, expected, 1e-13) {
                panic!("{name}: {what} on a view that repeats axis {axis} of {shape:?}: {problem}");
            }
        }
    }
}

/// The value, and the gradient for an upstream gradient that varies.
pub fn value_and_gradient(op: &impl Fn(&Var) -> Var, x: Tensor) -> (Vec<f64>, Vec<f64>) {
    let tape = Tape::new();
    let leaf = tape.leaf(x);
    let y = op(&leaf);
    let dout = Rng::new(7).normal(DType::F64, y.shape(), 0.0, 1.0).cast(y.dtype());
    let grads = tape.backward_from(&[(&y, dout)]);
    (y.value().to_f64_vec(), grads.get(&leaf).unwrap().to_f64_vec())
}

/// Value and slope of a formula at each x, in f32 and f64, at every level of lanes. NaN stands for NaN; a slope of NaN
/// is not looked at. Finite numbers within four units of the last place, zeros and infinities exactly.
pub fn slopes(name: &str, op: impl Fn(&Var) -> Var + Sync, edges: &[(f64, f64, f64)]) {
    poison_fresh_buffers(true);
    for level in Level::available() {
        with_level(level, || {
            for (dtype, ulp) in [(DType::F32, f64::from(f32::EPSILON)), (DType::F64, f64::EPSILON)] {
                let x: Vec<f64> = edges.iter().map(|e| e.0).collect();
                let x = Tensor::from_slice(&x, &[x.len()]).cast(dtype);
                let tape = Tape::new();
                let leaf = tape.leaf(x.clone());
                let y = op(&leaf);
                let grads = tape.backward_from(&[(&y, Tensor::ones(dtype, x.shape()))]);
                let (y, dx) = (y.value().to_f64_vec(), grads.get(&leaf).unwrap().to_f64_vec());
                for (i, &(x, value, slope)) in edges.iter().enumerate() {
                    let near = |got: f64, right: f64| {
                        got == right
                            || (got.is_nan() && right.is_nan())
                            || (got - right).abs() <= 4.0 * ulp * right.abs()
                    };
                    let context = || format!("{name}({x}) in {dtype} at {level:?}");
                    assert!(near(y[i], value), "{}: {}, expected {value}", context(), y[i]);
                    assert!(slope.is_nan() || near(dx[i], slope), "{}: slope {}, expected {slope}", context(), dx[i]);
                }
            }
        });
    }
}
