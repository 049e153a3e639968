//! `add sub mul div`: the four operations, elementwise, with broadcasting aligned at the last axis.
//!
//! | y | da | db | saved |
//! |---|---|---|---|
//! | `a + b` | `dout` | `dout` | nothing |
//! | `a - b` | `dout` | `-dout` | nothing |
//! | `a · b` | `dout · b` | `dout · a` | each operand, if the other needs a gradient |
//! | `a / b` | `dout / b` | `-(dout / b · a) / b` | b; and a, if b needs a gradient |
//!
//! Gradients of a broadcast operand are summed over the axes along which it was repeated. The sum of products (`dout · a`)
//! over one run of neighbouring axes is formed in one pass without the products in memory; so the gradient of a `[D]`
//! against `[N, D]` reads both once and writes D numbers. In `db` of a division b is constant along the axes that are
//! summed, and divides once more after the sum; `dout · a` or `b²` alone could overflow.
//! BF16 gradients are computed in F32 and rounded once, after the sums.
//! Cost: one pass over memory forward.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::{DType, Tensor};

use crate::broadcast::{checked_shape, zip_broadcast};
use crate::cuda::formulas;
use crate::elementwise::{Formula2, map_over, zip};
use crate::registry::{BenchCase, OpCase};
use crate::simd::{Binary, Lanes, Real};
use crate::sums::{product_sum_to, sum_to};
use crate::unary::Scale;

/// `a + b`; shapes broadcast.
///
/// # Panics
/// When shapes do not broadcast, or dtypes differ or are not floats.
#[track_caller]
pub fn add(a: &Var, b: &Var) -> Var {
    binary("add", a, b, &Add, || SumBackward { name: "add", a: a.shape().into(), b: b.shape().into() })
}

/// `a - b`; shapes broadcast.
///
/// # Panics
/// As [`add`].
#[track_caller]
pub fn sub(a: &Var, b: &Var) -> Var {
    binary("sub", a, b, &Sub, || SumBackward { name: "sub", a: a.shape().into(), b: b.shape().into() })
}

/// `a · b`, element by element; shapes broadcast.
///
/// # Panics
/// As [`add`].
#[track_caller]
pub fn mul(a: &Var, b: &Var) -> Var {
    binary("mul", a, b, &Mul, || MulBackward {
        a: b.requires_grad().then(|| a.value().clone()),
        b: a.requires_grad().then(|| b.value().clone()),
        shapes: [a.shape().into(), b.shape().into()],
    })
}

/// `a / b`, element by element; shapes broadcast.
///
/// # Panics
/// As [`add`].
#[track_caller]
pub fn div(a: &Var, b: &Var) -> Var {
    binary("div", a, b, &Div, || DivBackward {
        a: b.requires_grad().then(|| a.value().clone()),
        b: b.value().clone(),
        shape: a.shape().into(),
    })
}

#[track_caller]
fn binary<F, B>(name: &str, a: &Var, b: &Var, f: &F, backward: impl FnOnce() -> B) -> Var
where
    F: Formula2,
    B: Backward,
{
    checked_shape(name, a.value(), b.value());
    Var::from_op(zip_broadcast(f, a.value(), b.value()), &[a, b], backward)
}

/// Of `add` and `sub`, which differ in the sign of `db`.
struct SumBackward {
    name: &'static str,
    a: Box<[usize]>,
    b: Box<[usize]>,
}

impl Backward for SumBackward {
    fn name(&self) -> &'static str {
        self.name
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![]
    }
    fn backward(self: Box<Self>, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        let da = needs[0].then(|| sum_to(&dout, &self.a));
        let db = needs[1].then(|| sum_to(&dout, &self.b));
        drop(dout);
        vec![da, if self.name == "sub" { db.map(|db| map_over(&Scale(-1.0), db)) } else { db }]
    }
}

struct MulBackward {
    a: Option<Tensor>,
    b: Option<Tensor>,
    shapes: [Box<[usize]>; 2],
}

impl Backward for MulBackward {
    fn name(&self) -> &'static str {
        "mul"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        self.a.iter().map(|a| ("a", a)).chain(self.b.iter().map(|b| ("b", b))).collect()
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        let MulBackward { a, b, shapes } = *self;
        let (dtype, wide) = (dout.dtype(), dout.dtype().compute());
        let dout = own_cast(dout, wide);
        let da = b.map(|b| product_sum_to(dout.clone(), &b.cast(wide), &shapes[0]).cast(dtype));
        let db = a.map(|a| product_sum_to(dout, &a.cast(wide), &shapes[1]).cast(dtype));
        vec![da, db]
    }
}

struct DivBackward {
    a: Option<Tensor>,
    b: Tensor,
    shape: Box<[usize]>,
}

impl Backward for DivBackward {
    fn name(&self) -> &'static str {
        "div"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        self.a.iter().map(|a| ("a", a)).chain([("b", &self.b)]).collect()
    }
    fn backward(self: Box<Self>, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        let DivBackward { a, b, shape } = *self;
        let (dtype, wide) = (dout.dtype(), dout.dtype().compute());
        let (dout, b) = (own_cast(dout, wide), b.cast(wide));
        // Over `dout` where b was not broadcast.
        let ratio = if dout.shape() == b.shape() { zip(&Div, dout, &b) } else { zip_broadcast(&Div, &dout, &b) };
        let da = needs[0].then(|| sum_to(&ratio, &shape).cast(dtype));
        let db = a.map(|a| zip(&NegDiv, product_sum_to(ratio, &a.cast(wide), b.shape()), &b).cast(dtype));
        vec![da, db]
    }
}

/// By value, so that `dout` has no second owner afterwards and can be written over.
fn own_cast(x: Tensor, dtype: DType) -> Tensor {
    x.cast(dtype)
}

formulas!(
    "arithmetic.cu",
    [
        "zip" of "Add" "Sub" "Mul" "Div" "NegDiv",
        "zip_views" of "Add" "Sub" "Mul" "Div" "NegDiv",
    ],
    [Add, Sub, Mul, Div, NegDiv]
);

macro_rules! formula {
    ($name:ident, $x:ident, $y:ident => $value:expr) => {
        pub(crate) struct $name;

        impl<E: Real> Binary<E> for $name {
            #[inline(always)]
            fn apply<L: Lanes<Elem = E>>(&self, $x: L, $y: L) -> L {
                $value
            }
        }
    };
}
formula!(Add, x, y => x + y);
formula!(Sub, x, y => x - y);
formula!(Mul, x, y => x * y);
formula!(Div, x, y => x / y);
formula!(NegDiv, x, y => -(x / y));

pub(crate) fn cases() -> Vec<OpCase> {
    let case = |name, variant, a: &[usize], b: &[usize], f: fn(&Var, &Var) -> Var| {
        OpCase::new(name, variant, &[("a", a), ("b", b)], move |_, v| f(&v[0], &v[1]))
    };
    let away_from_zero = |x: f64| x + 0.5 * x.signum();
    vec![
        case("add", "row", &[3, 4], &[4], add),
        case("sub", "column", &[3, 1], &[3, 4], sub),
        case("mul", "same", &[3, 4], &[3, 4], mul),
        case("mul", "row", &[2, 3, 4], &[4], mul),
        case("mul", "middle", &[2, 3, 4], &[2, 1, 4], mul),
        case("mul", "outer", &[4, 1], &[1, 3], mul),
        case("div", "same", &[3, 4], &[3, 4], div).map_input(1, away_from_zero),
        case("div", "column", &[3, 4], &[3, 1], div).map_input(1, away_from_zero),
    ]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let (rows, columns) = (4096, 1024);
    let n = rows * columns;
    let case = |name, b: &[usize], f: fn(&Var, &Var) -> Var| BenchCase {
        name,
        inputs: vec![("a", vec![rows, columns]), ("b", b.to_vec())],
        forward: Box::new(move |_, v| f(&v[0], &v[1])),
        bytes: 4 * (2 * n + b.iter().product::<usize>()),
        flops: n,
    };
    vec![case("add", &[rows, columns], add), case("mul", &[columns], mul), case("div", &[rows, 1], div)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proptest_shapes::shape;
    use crate::simd::{Level, with_level};
    use crate::testing::{Chain, difference};
    use kumiki_autograd::Tape;
    use kumiki_tensor::Rng;
    use kumiki_tensor::shape::broadcast;
    use proptest::prelude::*;

    type Op = fn(&Var, &Var) -> Var;
    type Case = (&'static str, Op, fn(f64, f64) -> f64);
    const ALL: &[Case] = &[
        ("add", add, |x, y| x + y),
        ("sub", sub, |x, y| x - y),
        ("mul", mul, |x, y| x * y),
        ("div", div, |x, y| x / y),
    ];

    fn repeated(values: &[f64], shape: &[usize], to: &[usize]) -> Vec<f64> {
        Tensor::from_slice(values, shape).expand(to).to_f64_vec()
    }

    /// A shape and two that broadcast to it: some axes of size 1, some leading ones missing.
    fn pair() -> impl Strategy<Value = [Vec<usize>; 2]> {
        (shape(4), any::<[u8; 2]>(), any::<[prop::sample::Index; 2]>()).prop_map(|(shape, ones, cuts)| {
            let part = |k: usize| {
                let mut part = shape.clone();
                part.iter_mut().enumerate().filter(|(i, _)| ones[k] >> i & 1 == 1).for_each(|(_, d)| *d = 1);
                // Only one of the two loses axes.
                if k == 0 { part } else { part.split_off(cuts[k].index(shape.len() + 1)) }
            };
            [part(0), part(1)]
        })
    }

    fn check(a: &[usize], b: &[usize], seed: u64) {
        let to = broadcast(a, b).unwrap();
        for &(name, op, naive) in ALL {
            Chain::new(name, seed, &[("a", a), ("b", b)]).map_input(1, |x| x + 0.5 * x.signum()).run(
                |_, v| op(&v[0], &v[1]),
                |v| {
                    let (x, y) = (repeated(&v[0], a, &to), repeated(&v[1], b, &to));
                    x.iter().zip(&y).map(|(&x, &y)| naive(x, y)).collect()
                },
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn operations_pass_the_chain([a, b] in pair(), swap in any::<bool>(), seed in any::<u64>()) {
            if swap { check(&b, &a, seed) } else { check(&a, &b, seed) }
        }
    }

    /// Values and gradients for an upstream gradient of 1.
    fn with_ones(op: Op, a: &Tensor, b: &Tensor) -> [Vec<f64>; 3] {
        let tape = Tape::new();
        let (x, y) = (tape.leaf(a.clone()), tape.leaf(b.clone()));
        let out = op(&x, &y);
        let grads = tape.backward_from(&[(&out, Tensor::ones(out.dtype(), out.shape()))]);
        let (dx, dy) = (grads.get(&x).unwrap(), grads.get(&y).unwrap());
        assert_eq!((dx.shape(), dy.shape()), (a.shape(), b.shape()));
        [out.value().to_f64_vec(), dx.to_f64_vec(), dy.to_f64_vec()]
    }

    #[test]
    fn case_03_gradients_are_summed_to_the_shape_of_their_input() {
        let twos = |shape: &[usize]| Tensor::full(DType::F32, shape, 2.0);
        let threes = |shape: &[usize]| Tensor::full(DType::F32, shape, 3.0);
        let of = |op: Op, a: &[usize], b: &[usize]| {
            let [_, da, db] = with_ones(op, &twos(a), &threes(b));
            (da, db)
        };
        assert_eq!(of(mul, &[1], &[5, 4]), (vec![60.0], vec![2.0; 20]));
        assert_eq!(of(mul, &[4, 1], &[1, 4]), (vec![12.0; 4], vec![8.0; 4]));
        assert_eq!(of(add, &[2, 1], &[1, 3]), (vec![3.0; 2], vec![2.0; 3]));
        assert_eq!(of(sub, &[2, 1], &[1, 3]), (vec![3.0; 2], vec![-2.0; 3]));
        assert_eq!(of(mul, &[], &[2, 3]), (vec![18.0], vec![2.0; 6]));
        assert_eq!(of(mul, &[2, 3, 4], &[3, 1]), (vec![3.0; 24], vec![16.0; 3]));
        let [_, da, db] = with_ones(div, &twos(&[6, 2]), &twos(&[2]));
        assert_eq!((da, db), (vec![0.5; 12], vec![-3.0; 2]));
        assert_eq!(of(add, &[0, 3], &[3]), (vec![], vec![0.0; 3]));
    }

    #[test]
    fn case_02_operands_that_repeat_elements_at_every_level_of_lanes() {
        let mut rng = Rng::new(2);
        let bases = [&[1, 5, 1][..], &[4, 1, 17], &[1, 1, 1], &[4, 5, 1]];
        for (i, a) in bases.iter().enumerate() {
            for b in &bases[i..] {
                let [a, b] = [a, b].map(|s| rng.uniform(DType::F64, s, 1.0, 2.0).expand(&[4, 5, 17]));
                for (&(name, op, _), level) in
                    ALL.iter().flat_map(|op| Level::available().into_iter().map(move |l| (op, l)))
                {
                    let views = with_level(level, || with_ones(op, &a, &b));
                    let copies = with_ones(op, &a.copy(), &b.copy());
                    for (got, expected) in views.iter().zip(&copies) {
                        assert_eq!(
                            difference(got, expected, 1e-14),
                            None,
                            "{name} {:?} {:?}",
                            a.strides(),
                            b.strides()
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn long_rows_are_cut_anywhere() {
        // Longer than a task: pieces begin and end inside rows.
        let n = 40_001;
        let a = Tensor::from_fn::<f32>(&[3, n], |i| (i % 1000) as f32);
        let b = Tensor::from_fn::<f32>(&[3, 1], |i| i as f32 + 1.0);
        let [y, da, db] = with_ones(mul, &a, &b);
        assert!(y.iter().enumerate().all(|(i, &y)| y == (i % 1000 * (i / n + 1)) as f64));
        assert!(da.iter().enumerate().all(|(i, &d)| d == (i / n + 1) as f64));
        for (r, d) in db.iter().enumerate() {
            let sum: usize = (r * n..(r + 1) * n).map(|i| i % 1000).sum();
            assert!((d - sum as f64).abs() <= 2.0, "{d} {sum}");
        }
    }

    #[test]
    fn thread_counts_do_not_change_a_bit() {
        let (a, b) =
            (Rng::new(1).normal(DType::F32, &[1000, 130], 0.0, 1.0), Rng::new(2).normal(DType::F32, &[130], 0.0, 1.0));
        let run = |threads| kumiki_tensor::threads::with_threads(threads, || with_ones(mul, &a, &b));
        assert_eq!(run(1), run(2));
        assert_eq!(run(1), run(8));
    }

    #[test]
    fn division_does_not_overflow_on_the_way() {
        let large = Tensor::full(DType::F32, &[2], 1e30);
        let [y, da, db] = with_ones(div, &large, &large);
        assert_eq!(y, [1.0; 2]);
        assert!(da.iter().chain(&db).all(|d| (d.abs() * 1e30 - 1.0).abs() < 1e-6));
    }

    #[test]
    fn only_what_the_backward_needs_is_saved() {
        let tape = Tape::new();
        let x = tape.leaf(Tensor::ones(DType::F32, &[2, 3]));
        mul(&x, &Var::constant(Tensor::ones(DType::F32, &[3])));
        add(&x, &x);
        let saved: Vec<_> = tape.summary().0.into_iter().map(|node| node.saved).collect();
        assert_eq!(saved[1..], [vec![("b", 12)], vec![]]);
    }

    #[test]
    #[should_panic(expected = "add: a and b do not broadcast (a: [2, 3] f32, b: [2] f32)")]
    fn shapes_that_do_not_fit_are_named() {
        add(&Var::constant(Tensor::ones(DType::F32, &[2, 3])), &Var::constant(Tensor::ones(DType::F32, &[2])));
    }

    #[test]
    #[should_panic(expected = "mul: a and b must be floats of one dtype (a: [2] f32, b: [2] bf16)")]
    fn dtypes_that_differ_are_named() {
        mul(&Var::constant(Tensor::ones(DType::F32, &[2])), &Var::constant(Tensor::ones(DType::BF16, &[2])));
    }
}
