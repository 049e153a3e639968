//! `linear`: a matrix applied to the last axis.
//!
//! Forward `y = x·Wᵀ`, the leading axes of `x` taken together as rows: one product. Backward `dx = dout·W` and
//! `dweight = doutᵀ·x`, one product each. Saves `x` for the weight's gradient and the weight for that of `x`, each only
//! where it is needed. An `x` that can be computed again from what another operator keeps, such as a gated average from its
//! factors, [is](kumiki_autograd::Recipe), and itself freed. Where an operand [is narrow](Var::is_narrow) the factors of all
//! three products are rounded to BF16. Operands that are BF16 are saved as such and, unless products are narrow, computed
//! with in F32. Cost: 2·N·D_in·D_out flops, twice in the backward.

use kumiki_autograd::{Backward, Kept, Var};
use kumiki_tensor::shape::Dims;
use kumiki_tensor::{DType, Tensor};

use crate::cast::is_stored_for;
use crate::count::count;
use crate::matmul::stored_matrices;
use crate::registry::{BenchCase, OpCase};

/// `x` `[.., D_in]` times the transposed `weight` `[D_out, D_in]`: `[.., D_out]`, in the weight's dtype.
///
/// # Panics
/// When the D_in differ, `x` has no axis, `weight` has not two, or dtypes are not floats or differ; but an `x` of BF16
/// goes with a weight of F32, too.
#[track_caller]
pub fn linear(x: &Var, weight: &Var) -> Var {
    project(x, weight, weight.dtype())
}

/// As [`linear`], to the inside of a layer that is wider than the model: where an operand is [narrow](Var::is_narrow)
/// the result is stored in BF16, for memory is what such layers wait for.
///
/// # Panics
/// As [`linear`].
#[track_caller]
pub fn linear_to_hidden(x: &Var, weight: &Var) -> Var {
    let halved = (x.is_narrow() || weight.is_narrow()) && weight.dtype() == DType::F32;
    project(x, weight, if halved { DType::BF16 } else { weight.dtype() })
}

#[track_caller]
fn project(x: &Var, weight: &Var, dtype: DType) -> Var {
    assert!(
        is_stored_for(x.dtype(), weight.dtype()),
        "linear: x is {}, weight is {}; both must be of one float dtype",
        x.dtype(),
        weight.dtype()
    );
    let d_in = x.shape().last().copied();
    assert!(
        weight.rank() == 2 && d_in == Some(weight.dim(1)),
        "linear: weight must be [D_out, D_in={}], got {:?} (x: {:?})",
        d_in.map_or("?".into(), |d| d.to_string()),
        weight.shape(),
        x.shape()
    );
    let rows = by_rows(x.value());
    count(|c| c.projection += (rows.dim(0) * weight.dim(0) * weight.dim(1)) as u64);
    let shape = [&x.shape()[..x.rank() - 1], &[weight.dim(0)]].concat();
    let narrow = x.is_narrow() || weight.is_narrow();
    let y = stored_matrices(&rows, &weight.value().transpose(0, 1), narrow, dtype).reshape(&shape);
    Var::from_op(y, &[x, weight], || LinearBackward {
        x: weight.requires_grad().then(|| Kept::of(x)),
        weight: x.requires_grad().then(|| weight.value().clone()),
        x_shape: Dims::new(x.shape()),
        dtypes: [x.dtype(), weight.dtype()],
        narrow,
    })
}

/// `[.., D]` as `[N, D]`: a view where strides allow it.
fn by_rows(x: &Tensor) -> Tensor {
    let (&d, leading) = x.shape().split_last().expect("a last axis");
    x.reshape(&[leading.iter().product(), d])
}

struct LinearBackward {
    x: Option<Kept>,
    weight: Option<Tensor>,
    x_shape: Dims,
    /// Of x and of the weight.
    dtypes: [DType; 2],
    narrow: bool,
}

impl Backward for LinearBackward {
    fn name(&self) -> &'static str {
        "linear"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        let x = self.x.iter().flat_map(|x| x.tensors("x"));
        x.chain(self.weight.iter().map(|w| ("weight", w))).collect()
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        let (dout, narrow, [x_dtype, weight_dtype]) = (by_rows(&dout), self.narrow, self.dtypes);
        // The other operand was saved where this one's gradient is needed.
        let dx = self.weight.map(|weight| stored_matrices(&dout, &weight, narrow, x_dtype).reshape(&self.x_shape));
        let dweight =
            self.x.map(|x| stored_matrices(&dout.transpose(0, 1), &by_rows(&x.into_value()), narrow, weight_dtype));
        vec![dx, dweight]
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let weight: (&str, &[usize]) = ("weight", &[5, 4]);
    vec![
        OpCase::new("linear", "", &[("x", &[2, 3, 4]), weight], |_, v| linear(&v[0], &v[1])),
        OpCase::new("linear", "of one vector", &[("x", &[4]), weight], |_, v| linear(&v[0], &v[1])),
        OpCase::new("linear", "of a transposed view", &[("x", &[3, 2, 4]), weight], |_, v| {
            linear(&crate::transpose(&v[0], 0, 1), &v[1])
        }),
    ]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let (n, d_in, d_out) = (2048, 512, 1536);
    vec![BenchCase {
        name: "linear",
        inputs: vec![("x", vec![4, n / 4, d_in]), ("weight", vec![d_out, d_in])],
        forward: Box::new(|_, v| linear(&v[0], &v[1])),
        bytes: 4 * (n * d_in + d_in * d_out + n * d_out),
        flops: 2 * n * d_in * d_out,
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arithmetic::Mul;
    use crate::elementwise::zip;
    use crate::testing::{Chain, difference};
    use crate::{matmul, transpose};
    use kumiki_autograd::{Param, Recipe, Tape};
    use kumiki_tensor::{DType, Rng, threads};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn passes_the_chain(
            seed in any::<u64>(), leading in proptest::collection::vec(0usize..5, 0..3),
            d_in in 0usize..20, d_out in 0usize..20,
        ) {
            let shape: Vec<usize> = leading.iter().copied().chain([d_in]).collect();
            let rows: usize = leading.iter().product();
            Chain::new("linear", seed, &[("x", &shape), ("weight", &[d_out, d_in])]).run(
                |_, v| linear(&v[0], &v[1]),
                |x| (0..rows * d_out).map(|at| {
                    let (i, o) = (at / d_out, at % d_out);
                    (0..d_in).map(|k| x[0][i * d_in + k] * x[1][o * d_in + k]).sum()
                }).collect(),
            );
        }
    }

    #[test]
    fn equals_matmul_and_saves_only_what_gradients_need() {
        let mut rng = Rng::new(7);
        let (x, w) = (rng.normal(DType::F32, &[3, 50, 70], 0.0, 1.0), rng.normal(DType::F32, &[90, 70], 0.0, 1.0));
        let dout = rng.normal(DType::F32, &[3, 50, 90], 0.0, 1.0);
        let run = |op: &dyn Fn(&Var, &Var) -> Var| {
            let tape = Tape::new();
            let (x, w) = (tape.leaf(x.clone()), tape.leaf(w.clone()));
            let y = op(&x, &w);
            let grads = tape.backward_from(&[(&y, dout.clone())]);
            [y.value(), grads.get(&x).unwrap(), grads.get(&w).unwrap()].map(Tensor::to_f64_vec)
        };
        let (fused, composed) = (run(&linear), run(&|x, w| matmul(x, &transpose(w, 0, 1))));
        for (a, b) in fused.iter().zip(&composed) {
            assert_eq!(difference(a, b, 1e-5), None);
        }
        let tape = Tape::new();
        linear(&Var::constant(x.clone()), &tape.leaf(w.clone()));
        assert_eq!(tape.summary().0.last().unwrap().saved, [("x", 4 * 3 * 50 * 70)]);
        linear(&tape.leaf(x), &Var::constant(w));
        assert_eq!(tape.summary().0.last().unwrap().saved, [("weight", 4 * 90 * 70)]);
    }

    #[test]
    fn a_recipe_is_as_good_as_the_value() {
        let mut rng = Rng::new(9);
        let mut normal = |shape: &[usize]| rng.normal(DType::F64, shape, 0.0, 1.0);
        let (a, b, w, dout) = (normal(&[2, 5, 7]), normal(&[2, 5, 7]), normal(&[3, 7]), normal(&[2, 5, 3]));
        let run = |noted: bool| {
            let tape = Tape::new();
            let (left, w) = (tape.leaf(a.clone()), tape.leaf(w.clone()));
            let mut x = crate::mul(&left, &Var::constant(b.clone()));
            if noted {
                let product = |x: &[Tensor]| zip(&Mul, x[0].clone(), &x[1]);
                x = x.with_recipe(|| Recipe::new([a.clone(), b.clone()], &[2, 5, 7], product));
            }
            let y = linear(&x, &w);
            let saved = tape.summary().0.pop().unwrap().saved.len();
            let grads = tape.backward_from(&[(&y, dout.clone())]);
            (saved, [grads.get(&left), grads.get(&w)].map(|grad| grad.unwrap().to_f64_vec()))
        };
        let ((two, plain), (three, factored)) = (run(false), run(true));
        assert_eq!((two, three), (2, 3));
        assert_eq!(plain, factored);
    }

    #[test]
    fn a_narrow_weight_rounds_factors_and_nothing_else() {
        let mut rng = Rng::new(11);
        // Numbers that BF16 holds: with them the products are those of F32.
        let mut rounded = |shape: &[usize]| rng.normal(DType::BF16, shape, 0.0, 1.0).cast(DType::F32);
        let (x, w, dout) = (rounded(&[3, 20, 70]), Param::new(rounded(&[90, 70])), rounded(&[3, 20, 90]));
        let run = |tape: Tape, x: &Tensor| {
            let x = tape.leaf(x.clone());
            let y = linear(&x, &tape.param(&w));
            let grads = tape.backward_from(&[(&y, dout.clone())]);
            [y.value(), grads.get(&x).unwrap(), grads.of(&w).unwrap()].map(Tensor::to_f64_vec)
        };
        let narrow = || Tape::new().with_narrow_products(true);
        for (a, b) in run(Tape::new(), &x).iter().zip(&run(narrow(), &x)) {
            assert_eq!(difference(a, b, 1e-5), None);
        }
        // A quarter of a unit of BF16 beside them is lost where x is a factor.
        let beside: Vec<f32> = x.to_vec::<f32>().iter().map(|x| x * (1.0 + 1.0 / 1024.0)).collect();
        let beside = Tensor::from_slice(&beside, x.shape());
        let ([y, dx, dw], [near_y, near_dx, near_dw]) = (run(narrow(), &x), run(narrow(), &beside));
        assert!(y == near_y && dx == near_dx && dw == near_dw);
        assert!(run(Tape::new(), &x)[0] != run(Tape::new(), &beside)[0]);
    }

    #[test]
    fn threads_do_not_change_the_result() {
        let run = |n| {
            threads::with_threads(n, || {
                let mut rng = Rng::new(8);
                let w = Param::new(rng.normal(DType::F32, &[190, 270], 0.0, 1.0));
                let tape = Tape::new();
                let x = tape.leaf(rng.normal(DType::F32, &[2, 333, 270], 0.0, 1.0));
                let y = linear(&x, &tape.param(&w));
                let grads = tape.backward_from(&[(&y, rng.normal(DType::F32, y.shape(), 0.0, 1.0))]);
                [y.value(), grads.get(&x).unwrap(), grads.of(&w).unwrap()].map(Tensor::to_vec::<f32>)
            })
        };
        let one = run(1);
        assert!(run(2) == one && run(8) == one);
    }

    #[test]
    #[should_panic(expected = "linear: weight must be [D_out, D_in=4], got [5, 3] (x: [2, 4])")]
    fn misfits_are_named() {
        let x = |shape: &[usize]| Var::constant(Tensor::zeros(DType::F32, shape));
        linear(&x(&[2, 4]), &x(&[5, 3]));
    }
}
