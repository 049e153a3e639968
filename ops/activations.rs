//! Activations: `sigmoid silu gelu softplus relu relu_squared`, each one pass over memory each way.
//!
//! With `σ(x) = 1 / (1 + e^-x)`:
//!
//! | | y | dx | saved |
//! |---|---|---|---|
//! | sigmoid | `σ(x)` | `dout · e / (1 + e)²`, `e = e^-\|x\|` | x |
//! | silu | `x σ(x)` | `dout · (σ + x σ (1 - σ))` | x |
//! | gelu | `x σ(2u)`, `u = √(2/π) (x + 0.044715 x³)` | `dout · (σ + x σ (1 - σ) 2u')` | x |
//! | softplus | `ln(1 + e^(βx)) / β` | `dout · σ(βx)` | x |
//! | relu | `max(x, 0)` | `dout` where `x > 0` | x |
//! | relu_squared | `max(x, 0)²` | `dout · 2 max(x, 0)` | x |
//!
//! `gelu` is the tanh form (arXiv 1606.08415), written with σ: `(1 + tanh u) / 2 = σ(2u)`, which does not cancel for
//! negative x. A saturated σ is exactly 0 or 1, so factors that would overflow beside it are bounded first: no
//! `0 · ∞` at any x, infinities included. Softplus adds `ln(1 + e^-|βx|)` to `max(βx, 0)`: exact for large x without a
//! threshold, and relatively exact for very negative x.

use kumiki_autograd::{Recipe, Var};

use crate::cuda::formulas;
use crate::elementwise::{Save, map, unary};
use crate::registry::{BenchCase, OpCase};
use crate::simd::{Binary, Lanes, Real, Unary};
use crate::unary::{constant, sigmoid_slope};

/// `1 / (1 + e^-x)`, any shape.
///
/// # Panics
/// When `x` is not of a float dtype.
#[track_caller]
pub fn sigmoid(x: &Var) -> Var {
    unary("sigmoid", x, Sigmoid, Save::Input)
}

/// `x / (1 + e^-x)`, any shape. Whoever needs the result in the backward may keep `x`, and [compute it again](Recipe).
///
/// # Panics
/// When `x` is not of a float dtype.
#[track_caller]
pub fn silu(x: &Var) -> Var {
    let y = unary("silu", x, Silu, Save::Input);
    y.with_recipe(|| Recipe::new([x.value().clone()], x.shape(), |x| map(&Silu, &x[0])))
}

/// The Gaussian error linear unit in its tanh form, any shape.
///
/// # Panics
/// When `x` is not of a float dtype.
#[track_caller]
pub fn gelu(x: &Var) -> Var {
    unary("gelu", x, Gelu, Save::Input)
}

/// `ln(1 + e^(βx)) / β`, any shape.
///
/// # Panics
/// When `beta` is not a positive finite number.
#[track_caller]
pub fn softplus(x: &Var, beta: f64) -> Var {
    assert!(beta > 0.0 && beta.is_finite(), "softplus: beta must be positive and finite, got {beta}");
    unary("softplus", x, Softplus { beta }, Save::Input)
}

/// `max(x, 0)`, any shape; NaN stays NaN. The slope at 0 is 0.
///
/// # Panics
/// When `x` is not of a float dtype.
#[track_caller]
pub fn relu(x: &Var) -> Var {
    unary("relu", x, Relu, Save::Input)
}

/// `max(x, 0)²`, any shape; NaN stays NaN.
///
/// # Panics
/// When `x` is not of a float dtype.
#[track_caller]
pub fn relu_squared(x: &Var) -> Var {
    unary("relu_squared", x, ReluSquared, Save::Input)
}

#[inline(always)]
fn bounded<L: Lanes>(x: L, bound: f64) -> L {
    // In this order NaN stays NaN.
    constant::<L>(bound).min(constant::<L>(-bound).max(x))
}

/// Beyond it the square root of the largest f32 is far, and every σ saturated.
const SILU_BOUND: f64 = 1e9;
/// Here σ(2u) is exactly 0 or 1 in f64, and x³ far from overflow in f32.
const GELU_BOUND: f64 = 100.0;

formulas!(
    "activations.cu",
    [
        "map" of "Sigmoid" "Silu" "Gelu" "Softplus" "Relu" "ReluSquared",
        "zip" of "Sigmoid" "Silu" "Gelu" "Softplus" "Relu" "ReluSquared",
    ],
    [Sigmoid, Silu, Gelu, Softplus(|f| [f.beta, 0.0]), Relu, ReluSquared]
);

struct Sigmoid;

impl<E: Real> Unary<E> for Sigmoid {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        x.sigmoid()
    }
}

impl<E: Real> Binary<E> for Sigmoid {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, dout: L, x: L) -> L {
        dout * sigmoid_slope(x)
    }
}

struct Silu;

impl<E: Real> Unary<E> for Silu {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        // Only -inf must be bounded: σ is 0 there.
        constant::<L>(-SILU_BOUND).max(x) * x.sigmoid()
    }
}

impl<E: Real> Binary<E> for Silu {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, dout: L, x: L) -> L {
        let s = x.sigmoid();
        dout * (s * (L::splat(E::ONE) - s)).mul_add(bounded(x, SILU_BOUND), s)
    }
}

const SQRT_2_PI: f64 = 0.797_884_560_802_865_4;
const CUBIC: f64 = 0.044_715;

struct Gelu;

/// `σ(2u)` of a bounded x.
#[inline(always)]
fn gelu_gate<L: Lanes>(x: L) -> L {
    let slope = constant::<L>(2.0 * SQRT_2_PI * CUBIC).mul_add(x * x, constant(2.0 * SQRT_2_PI));
    (x * slope).sigmoid()
}

impl<E: Real> Unary<E> for Gelu {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        constant::<L>(-GELU_BOUND).max(x) * gelu_gate(bounded(x, GELU_BOUND))
    }
}

impl<E: Real> Binary<E> for Gelu {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, dout: L, x: L) -> L {
        let x = bounded(x, GELU_BOUND);
        let s = gelu_gate(x);
        let du = constant::<L>(6.0 * SQRT_2_PI * CUBIC).mul_add(x * x, constant(2.0 * SQRT_2_PI));
        dout * (s * (L::splat(E::ONE) - s)).mul_add(x * du, s)
    }
}

struct Softplus {
    beta: f64,
}

/// `ln(1 + e)` for `0 <= e <= 1`: the rounding of `1 + e` is undone by the ratio of e to what was really added.
#[inline(always)]
pub(crate) fn ln_1p<L: Lanes>(e: L) -> L {
    let one = L::splat(L::Elem::ONE);
    let sum = one + e;
    let added = sum - one;
    L::select(added.eq(L::splat(L::Elem::ZERO)), e, sum.ln() * (e / added))
}

impl<E: Real> Unary<E> for Softplus {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        let zero = L::splat(E::ZERO);
        let small = ln_1p((-(x * constant(self.beta)).abs()).exp()) * constant(1.0 / self.beta);
        // x itself, not βx / β: exact, and finite where βx overflows.
        zero.max(x) + small
    }
}

impl<E: Real> Binary<E> for Softplus {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, dout: L, x: L) -> L {
        dout * (x * constant(self.beta)).sigmoid()
    }
}

struct Relu;

impl<E: Real> Unary<E> for Relu {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        L::splat(E::ZERO).max(x)
    }
}

impl<E: Real> Binary<E> for Relu {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, dout: L, x: L) -> L {
        let zero = L::splat(E::ZERO);
        L::select(x.gt(zero), dout, zero)
    }
}

struct ReluSquared;

impl<E: Real> Unary<E> for ReluSquared {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        let y = L::splat(E::ZERO).max(x);
        y * y
    }
}

impl<E: Real> Binary<E> for ReluSquared {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, dout: L, x: L) -> L {
        let y = L::splat(E::ZERO).max(x);
        dout * (y + y)
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let case = |name, f: fn(&Var) -> Var| OpCase::new(name, "", &[("x", &[3, 5])], move |_, v| f(&v[0]));
    let off_kink = |case: OpCase| case.map_input(0, |x| x + 0.1 * x.signum());
    vec![
        case("sigmoid", sigmoid),
        case("silu", silu),
        case("gelu", gelu),
        case("softplus", |x| softplus(x, 1.0)),
        case("softplus", |x| softplus(x, 2.5)),
        off_kink(case("relu", relu)),
        off_kink(case("relu_squared", relu_squared)),
    ]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let n = 4 << 20;
    let case = |name, f: fn(&Var) -> Var, flops| BenchCase {
        name,
        inputs: vec![("x", vec![1024, n / 1024])],
        forward: Box::new(move |_, v| f(&v[0])),
        bytes: 8 * n,
        flops: flops * n,
    };
    vec![case("silu", silu, 25), case("gelu", gelu, 30), case("relu_squared", relu_squared, 2)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proptest_shapes::{Formula, check_unary, shape, slopes};
    use proptest::prelude::*;

    const ALL: &[Formula] = &[
        ("sigmoid", sigmoid, |x| 1.0 / (1.0 + (-x).exp()), |x| 2.0 * x),
        ("silu", silu, |x| x / (1.0 + (-x).exp()), |x| 2.0 * x),
        ("gelu", gelu, |x| 0.5 * x * (1.0 + (SQRT_2_PI * (x + CUBIC * x * x * x)).tanh()), |x| x),
        ("softplus", |x| softplus(x, 1.0), |x| x.exp().ln_1p(), |x| 3.0 * x),
        ("softplus 5", |x| softplus(x, 5.0), |x| (5.0 * x).exp().ln_1p() / 5.0, |x| x),
        ("relu", relu, |x| x.max(0.0), |x| x + 0.1 * x.signum()),
        ("relu_squared", relu_squared, |x| x.max(0.0).powi(2), |x| x + 0.1 * x.signum()),
    ];

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8))]
        #[test]
        fn activations_pass_the_chain(shape in shape(3), seed in any::<u64>()) {
            for &(name, op, naive, domain) in ALL {
                check_unary(name, seed, &shape, op, naive, domain);
            }
        }
    }

    const INF: f64 = f64::INFINITY;

    #[test]
    fn case_13_silu_and_sigmoid() {
        let edges = [(0.0, 0.0, 0.5), (1e4, 1e4, 1.0), (-1e4, 0.0, 0.0), (INF, INF, 1.0), (-INF, 0.0, 0.0)];
        slopes("silu", silu, &edges);
        slopes("silu", silu, &[(1e30, 1e30, 1.0), (-1e30, 0.0, 0.0)]);
        slopes(
            "sigmoid",
            sigmoid,
            &[(0.0, 0.5, 0.25), (1e4, 1.0, 0.0), (-1e4, 0.0, 0.0), (INF, 1.0, 0.0), (-INF, 0.0, 0.0)],
        );
    }

    #[test]
    fn case_13_softplus_is_linear_for_large_x_without_overflow() {
        let plain = |x: &Var| softplus(x, 1.0);
        slopes("softplus", plain, &[(100.0, 100.0, 1.0), (0.0, 2f64.ln(), 0.5), (1e4, 1e4, 1.0), (-1e4, 0.0, 0.0)]);
        slopes("softplus", plain, &[(INF, INF, 1.0), (-INF, 0.0, 0.0), (1e38, 1e38, 1.0)]);
        slopes("softplus 5", |x| softplus(x, 5.0), &[(20.0, 20.0, 1.0), (1e38, 1e38, 1.0), (-1e38, 0.0, 0.0)]);
        // Relative accuracy where the value is far below the spacing of numbers at 1.
        slopes(
            "softplus",
            plain,
            &[
                (-30.0, (-30f64).exp().ln_1p(), 1.0 / (1.0 + 30f64.exp())),
                (-9.0, (-9f64).exp().ln_1p(), 1.0 / (1.0 + 9f64.exp())),
            ],
        );
    }

    #[test]
    fn case_13_gelu_is_saturated_far_out() {
        slopes(
            "gelu",
            gelu,
            &[(100.0, 100.0, 1.0), (-100.0, 0.0, 0.0), (0.0, 0.0, 0.5), (1e4, 1e4, 1.0), (-1e4, 0.0, 0.0)],
        );
        slopes("gelu", gelu, &[(INF, INF, 1.0), (-INF, 0.0, 0.0), (1e30, 1e30, 1.0), (-1e30, 0.0, 0.0)]);
    }

    #[test]
    fn case_13_relus() {
        slopes("relu", relu, &[(0.0, 0.0, 0.0), (INF, INF, 1.0), (-INF, 0.0, 0.0), (f64::NAN, f64::NAN, 0.0)]);
        slopes(
            "relu_squared",
            relu_squared,
            &[(0.0, 0.0, 0.0), (1e4, 1e8, 2e4), (-1e4, 0.0, 0.0), (-INF, 0.0, 0.0), (INF, INF, INF)],
        );
    }

    #[test]
    #[should_panic(expected = "softplus: beta must be positive and finite, got 0")]
    fn a_bad_beta_is_refused() {
        softplus(&Var::constant(kumiki_tensor::Tensor::zeros(kumiki_tensor::DType::F32, &[1])), 0.0);
    }
}
