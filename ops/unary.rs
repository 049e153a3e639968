//! Elementary functions of one number: `exp log sqrt abs clamp tanh neg add_scalar mul_scalar`.
//!
//! | y | dx | saved |
//! |---|---|---|
//! | `e^x` | `dout · y` | y |
//! | `ln x` | `dout / x` | x |
//! | `√x` | `dout / 2y` | y |
//! | `\|x\|` | `dout · sign x`, 0 at 0 | x |
//! | `min(max(x, lo), hi)` | `dout` where `lo <= x <= hi`, else 0 | x |
//! | `tanh x` | `dout · 4e / (1 + e)²`, `e = e^(-2\|x\|)` | x |
//! | `-x`, `x + c`, `c x` | `-dout`, `dout`, `c dout` | nothing |
//!
//! The output is saved where that spares a transcendental. Not of tanh: `1 - y²` cancels, and all the more for a y
//! rounded to BF16. Where a slope can be infinite (`exp`, `log`, `sqrt`) an upstream gradient of 0 gives 0, not
//! `0 · ∞ = NaN`: nothing flows into what does not count.
//! Cost: one pass over memory each way; one read more in the backward for what is saved.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::Tensor;

use crate::cuda::formulas;
use crate::elementwise::{Formula1, Save, assert_float, map, map_over, unary};
use crate::registry::OpCase;
use crate::simd::{Binary, Lanes, Real, Unary};

/// `e^x`, any shape.
///
/// # Panics
/// When `x` is not of a float dtype.
#[track_caller]
pub fn exp(x: &Var) -> Var {
    unary("exp", x, Exp, Save::Output)
}

/// The natural logarithm, any shape: `-inf` at 0, NaN below.
///
/// # Panics
/// When `x` is not of a float dtype.
#[track_caller]
pub fn log(x: &Var) -> Var {
    unary("log", x, Log, Save::Input)
}

/// The square root, any shape: NaN below 0; its slope at 0 is infinite.
///
/// # Panics
/// When `x` is not of a float dtype.
#[track_caller]
pub fn sqrt(x: &Var) -> Var {
    unary("sqrt", x, Sqrt, Save::Output)
}

/// The absolute value, any shape; its slope at 0 is 0.
///
/// # Panics
/// When `x` is not of a float dtype.
#[track_caller]
pub fn abs(x: &Var) -> Var {
    unary("abs", x, Abs, Save::Input)
}

/// The nearest number in `lo ..= hi`, any shape; NaN stays NaN. The slope is 1 inside and on the bounds, 0 outside.
///
/// # Panics
/// When `lo > hi` or a bound is NaN.
#[track_caller]
pub fn clamp(x: &Var, lo: f64, hi: f64) -> Var {
    assert!(lo <= hi, "clamp: the lower bound {lo} must not be above the upper bound {hi}");
    unary("clamp", x, Clamp { lo, hi }, Save::Input)
}

/// The hyperbolic tangent, any shape.
///
/// # Panics
/// When `x` is not of a float dtype.
#[track_caller]
pub fn tanh(x: &Var) -> Var {
    unary("tanh", x, Tanh, Save::Input)
}

/// `-x`, any shape.
///
/// # Panics
/// When `x` is not of a float dtype.
#[track_caller]
pub fn neg(x: &Var) -> Var {
    affine("neg", x, Scale(-1.0), Some(-1.0))
}

/// `x + c`, any shape.
///
/// # Panics
/// When `x` is not of a float dtype.
#[track_caller]
pub fn add_scalar(x: &Var, c: f64) -> Var {
    affine("add_scalar", x, Shift(c), None)
}

/// `x · c`, any shape.
///
/// # Panics
/// When `x` is not of a float dtype.
#[track_caller]
pub fn mul_scalar(x: &Var, c: f64) -> Var {
    affine("mul_scalar", x, Scale(c), Some(c))
}

#[track_caller]
fn affine(name: &'static str, x: &Var, f: impl Formula1, slope: Option<f64>) -> Var {
    assert_float(name, x.value());
    Var::from_op(map(&f, x.value()), &[x], || AffineBackward { name, slope })
}

struct AffineBackward {
    name: &'static str,
    /// `None` for 1: the gradient passes without a copy.
    slope: Option<f64>,
}

impl Backward for AffineBackward {
    fn name(&self) -> &'static str {
        self.name
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        vec![Some(match self.slope {
            Some(slope) => map_over(&Scale(slope), dout),
            None => dout,
        })]
    }
}

formulas!(
    "unary.cu",
    [
        "map" of "Exp" "Log" "Sqrt" "Abs" "Clamp" "Tanh" "Scale" "Shift",
        "zip" of "Exp" "Log" "Sqrt" "Abs" "Clamp" "Tanh",
    ],
    [
        Exp,
        Log,
        Sqrt,
        Abs,
        Clamp(|f| [f.lo, f.hi]),
        Tanh,
        Scale(|f| [f.0, 0.0]),
        Shift(|f| [f.0, 0.0]),
    ]
);

/// `x · c`.
pub(crate) struct Scale(pub(crate) f64);

impl<E: Real> Unary<E> for Scale {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        x * constant(self.0)
    }
}

struct Shift(f64);

impl<E: Real> Unary<E> for Shift {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        x + constant(self.0)
    }
}

#[inline(always)]
pub(crate) fn constant<L: Lanes>(x: f64) -> L {
    L::splat(L::Elem::from_f64(x))
}

/// `dx` where `dout` is not 0.
#[inline(always)]
pub(crate) fn where_it_counts<L: Lanes>(dout: L, dx: L) -> L {
    let zero = L::splat(L::Elem::ZERO);
    L::select(dout.eq(zero), zero, dx)
}

/// `σ(x) (1 - σ(x)) = e / (1 + e)²` with `e = e^-|x|`: relatively exact however saturated σ is.
#[inline(always)]
pub(crate) fn sigmoid_slope<L: Lanes>(x: L) -> L {
    let e = (-x.abs()).exp();
    let sum = L::splat(L::Elem::ONE) + e;
    e / (sum * sum)
}

struct Exp;

impl<E: Real> Unary<E> for Exp {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        x.exp()
    }
}

impl<E: Real> Binary<E> for Exp {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, dout: L, y: L) -> L {
        where_it_counts(dout, dout * y)
    }
}

struct Log;

impl<E: Real> Unary<E> for Log {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        x.ln()
    }
}

impl<E: Real> Binary<E> for Log {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, dout: L, x: L) -> L {
        where_it_counts(dout, dout / x)
    }
}

struct Sqrt;

impl<E: Real> Unary<E> for Sqrt {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        x.sqrt()
    }
}

impl<E: Real> Binary<E> for Sqrt {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, dout: L, y: L) -> L {
        where_it_counts(dout, dout / (y + y))
    }
}

struct Abs;

impl<E: Real> Unary<E> for Abs {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        x.abs()
    }
}

impl<E: Real> Binary<E> for Abs {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, dout: L, x: L) -> L {
        let zero = L::splat(E::ZERO);
        L::select(x.gt(zero), dout, L::select(x.lt(zero), -dout, zero))
    }
}

struct Clamp {
    lo: f64,
    hi: f64,
}

impl<E: Real> Unary<E> for Clamp {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        let (lo, hi) = (constant::<L>(self.lo), constant::<L>(self.hi));
        L::select(x.lt(lo), lo, L::select(x.gt(hi), hi, x))
    }
}

impl<E: Real> Binary<E> for Clamp {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, dout: L, x: L) -> L {
        let inside = L::mask_and(x.ge(constant(self.lo)), x.le(constant(self.hi)));
        L::select(inside, dout, L::splat(E::ZERO))
    }
}

struct Tanh;

impl<E: Real> Unary<E> for Tanh {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        x.tanh()
    }
}

impl<E: Real> Binary<E> for Tanh {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, dout: L, x: L) -> L {
        dout * constant(4.0) * sigmoid_slope(x + x)
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let case = |name, f: fn(&Var) -> Var| OpCase::new(name, "", &[("x", &[3, 5])], move |_, v| f(&v[0]));
    let positive = |case: OpCase| case.map_input(0, |x| 0.2 + x.abs());
    let off_kinks = |case: OpCase| case.map_input(0, |x| x + 0.1 * x.signum());
    vec![
        case("exp", exp),
        positive(case("log", log)),
        positive(case("sqrt", sqrt)),
        off_kinks(case("abs", abs)),
        off_kinks(case("clamp", |x| clamp(x, -0.05, 0.05))),
        case("tanh", tanh),
        case("neg", neg),
        case("add_scalar", |x| add_scalar(x, -0.3)),
        case("mul_scalar", |x| mul_scalar(x, -0.3)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proptest_shapes::{Formula, check_unary, shape, slopes};
    use proptest::prelude::*;

    const ALL: &[Formula] = &[
        ("exp", exp, f64::exp, |x| x),
        ("log", log, f64::ln, |x| 0.2 + x.abs()),
        ("sqrt", sqrt, f64::sqrt, |x| 0.2 + x.abs()),
        ("abs", abs, f64::abs, |x| x + 0.1 * x.signum()),
        ("clamp", |x| clamp(x, -0.5, 0.7), |x| x.clamp(-0.5, 0.7), off_bounds),
        ("tanh", tanh, f64::tanh, |x| 2.0 * x),
        ("neg", neg, |x| -x, |x| x),
        ("add_scalar", |x| add_scalar(x, 1.25), |x| x + 1.25, |x| x),
        ("mul_scalar", |x| mul_scalar(x, -2.5), |x| x * -2.5, |x| x),
    ];

    fn off_bounds(x: f64) -> f64 {
        if (x + 0.5).abs() < 0.01 || (x - 0.7).abs() < 0.01 { x + 0.03 } else { x }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(6))]
        #[test]
        fn functions_pass_the_chain(shape in shape(3), seed in any::<u64>()) {
            for &(name, op, naive, domain) in ALL {
                check_unary(name, seed, &shape, op, naive, domain);
            }
        }
    }

    const INF: f64 = f64::INFINITY;

    #[test]
    fn case_13_exp_and_log_at_the_edges() {
        slopes("exp", exp, &[(0.0, 1.0, 1.0), (-1e4, 0.0, 0.0), (-INF, 0.0, 0.0), (1e4, INF, INF), (INF, INF, INF)]);
        slopes("log", log, &[(1.0, 0.0, 1.0), (0.0, -INF, INF), (INF, INF, 0.0), (-1.0, f64::NAN, -1.0)]);
        slopes("sqrt", sqrt, &[(4.0, 2.0, 0.25), (0.0, 0.0, INF), (INF, INF, 0.0), (-1.0, f64::NAN, f64::NAN)]);
    }

    #[test]
    fn case_13_infinite_slopes_times_zero_are_zero() {
        for (name, f, x) in [("log", log as fn(&Var) -> Var, 0.0), ("sqrt", sqrt, 0.0), ("exp", exp, 1e4)] {
            let tape = kumiki_autograd::Tape::new();
            let leaf = tape.leaf(Tensor::from_slice(&[x], &[1]));
            let y = f(&leaf);
            let grads = tape.backward_from(&[(&y, Tensor::from_slice(&[0.0], &[1]))]);
            assert_eq!(grads.get(&leaf).unwrap().item(), 0.0, "{name}");
        }
    }

    #[test]
    fn case_13_abs_clamp_and_tanh() {
        slopes("abs", abs, &[(0.0, 0.0, 0.0), (-INF, INF, -1.0), (1e4, 1e4, 1.0)]);
        let within = |x: &Var| clamp(x, -1.0, 2.0);
        slopes(
            "clamp",
            within,
            &[(-1.0, -1.0, 1.0), (2.0, 2.0, 1.0), (3.0, 2.0, 0.0), (-INF, -1.0, 0.0), (INF, 2.0, 0.0)],
        );
        slopes("clamp", within, &[(f64::NAN, f64::NAN, 0.0)]);
        slopes("clamp", |x| clamp(x, 0.0, INF), &[(INF, INF, 1.0), (-1.0, 0.0, 0.0)]);
        slopes("tanh", tanh, &[(0.0, 0.0, 1.0), (1e4, 1.0, 0.0), (-INF, -1.0, 0.0), (INF, 1.0, 0.0)]);
    }

    #[test]
    fn the_slope_of_tanh_does_not_cancel() {
        // At 8, 1 - y² has one digit left in f32.
        slopes("tanh", tanh, &[(8.0, 8f64.tanh(), 1.0 / 8f64.cosh().powi(2))]);
    }

    #[test]
    #[should_panic(expected = "clamp: the lower bound 2 must not be above the upper bound 1")]
    fn bounds_in_the_wrong_order_are_refused() {
        clamp(&Var::constant(Tensor::zeros(kumiki_tensor::DType::F32, &[1])), 2.0, 1.0);
    }

    #[test]
    #[should_panic(expected = "exp: expected floats, got i64 (x: [2])")]
    fn ids_are_refused() {
        exp(&Var::constant(Tensor::zeros(kumiki_tensor::DType::I64, &[2])));
    }
}
