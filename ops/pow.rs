//! `pow`: a fixed real power.
//!
//! Forward `y = x^p`; backward `dx = dout · p x^(p-1)`, which is 0 for p = 0, at x = 0 too. Saves x.
//! Whole powers are products by squaring, half ones those of a square root; both have the right edges by themselves: 0,
//! infinity and, for whole ones, negative numbers. As for `log`, an upstream gradient of 0 gives 0 where the slope is infinite.
//! Cost: one pass over memory each way.

use kumiki_autograd::Var;

use crate::cuda::formulas;
use crate::elementwise::{Save, unary};
use crate::registry::OpCase;
use crate::simd::{Binary, Lanes, Real, Unary};
use crate::unary::{constant, where_it_counts};

/// `x^exponent`, any shape. Multiples of 1/2 up to 16 in size are products (of negative numbers too, when whole), or
/// products of square roots; the rest is `powf` of the standard library, one number at a time. NaN for a negative number
/// to a broken exponent.
///
/// # Panics
/// When `x` is not of a float dtype.
#[track_caller]
pub fn pow(x: &Var, exponent: f64) -> Var {
    let twice = 2.0 * exponent;
    if twice.fract() != 0.0 || exponent.abs() > 16.0 {
        return unary("pow", x, Pow { exponent }, Save::Input);
    }
    if exponent.fract() == 0.0 {
        unary("pow", x, WholePow { exponent: exponent as i32 }, Save::Input)
    } else {
        unary("pow", x, HalfPow { twice: twice as i32 }, Save::Input)
    }
}

formulas!("pow.cu", ["map" of "WholePow" "HalfPow" "Pow", "zip" of "WholePow" "HalfPow" "Pow"],
    [WholePow(|f| [f64::from(f.exponent), 0.0]), HalfPow(|f| [f64::from(f.twice), 0.0]), Pow(|f| [f.exponent, 0.0])]
);

struct WholePow {
    exponent: i32,
}

/// `x^n` by squaring; the branches depend on `n` only.
#[inline(always)]
fn whole_power<L: Lanes>(x: L, n: i32) -> L {
    let one = L::splat(L::Elem::ONE);
    let (mut result, mut square, mut rest) = (one, x, n.unsigned_abs());
    while rest > 0 {
        if rest & 1 == 1 {
            result = result * square;
        }
        rest >>= 1;
        if rest > 0 {
            square = square * square;
        }
    }
    if n < 0 { one / result } else { result }
}

impl<E: Real> Unary<E> for WholePow {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        whole_power(x, self.exponent)
    }
}

impl<E: Real> Binary<E> for WholePow {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, dout: L, x: L) -> L {
        if self.exponent == 0 {
            return L::splat(E::ZERO);
        }
        where_it_counts(dout, dout * constant(f64::from(self.exponent)) * whole_power(x, self.exponent - 1))
    }
}

/// `x^(twice / 2)` for an odd number.
struct HalfPow {
    twice: i32,
}

impl<E: Real> Unary<E> for HalfPow {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        whole_power(x.sqrt(), self.twice)
    }
}

impl<E: Real> Binary<E> for HalfPow {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, dout: L, x: L) -> L {
        let slope = constant::<L>(0.5 * f64::from(self.twice)) * whole_power(x.sqrt(), self.twice - 2);
        where_it_counts(dout, dout * slope)
    }
}

struct Pow {
    exponent: f64,
}

/// In f64, where `powf` is right to the last place of f32, whatever the lanes.
#[inline(always)]
fn power<L: Lanes>(x: L, exponent: f64) -> L {
    let mut lanes = x.to_array();
    for x in lanes.iter_mut().take(L::N) {
        *x = L::Elem::from_f64(x.to_f64().powf(exponent));
    }
    L::load(&lanes)
}

impl<E: Real> Unary<E> for Pow {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        power(x, self.exponent)
    }
}

impl<E: Real> Binary<E> for Pow {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, dout: L, x: L) -> L {
        where_it_counts(dout, dout * constant(self.exponent) * power(x, self.exponent - 1.0))
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let case = |variant, exponent| OpCase::new("pow", variant, &[("x", &[3, 5])], move |_, v| pow(&v[0], exponent));
    let positive = |case: OpCase| case.map_input(0, |x| 0.2 + x.abs());
    vec![case("3", 3.0), positive(case("-1.5", -1.5)), positive(case("0.7", 0.7))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proptest_shapes::{Formula, check_unary, shape, slopes};
    use proptest::prelude::*;

    const ALL: &[Formula] = &[
        ("pow 3", |x| pow(x, 3.0), |x| x.powf(3.0), |x| x),
        ("pow -2", |x| pow(x, -2.0), |x| x.powf(-2.0), |x| x + 0.5 * x.signum()),
        ("pow 0", |x| pow(x, 0.0), |_| 1.0, |x| x),
        ("pow 1.5", |x| pow(x, 1.5), |x| x.powf(1.5), |x| 0.2 + x.abs()),
        ("pow -0.5", |x| pow(x, -0.5), |x| x.powf(-0.5), |x| 0.2 + x.abs()),
        ("pow 0.7", |x| pow(x, 0.7), |x| x.powf(0.7), |x| 0.2 + x.abs()),
        ("pow 17", |x| pow(x, 17.0), |x| x.powf(17.0), |x| x.clamp(-1.2, 1.2)),
    ];

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(6))]
        #[test]
        fn powers_pass_the_chain(shape in shape(3), seed in any::<u64>()) {
            for &(name, op, naive, domain) in ALL {
                check_unary(name, seed, &shape, op, naive, domain);
            }
        }
    }

    const INF: f64 = f64::INFINITY;

    #[test]
    fn case_13_powers_at_zero_of_negatives_and_at_infinity() {
        slopes("pow 2", |x| pow(x, 2.0), &[(0.0, 0.0, 0.0), (-3.0, 9.0, -6.0), (-1e4, 1e8, -2e4), (-INF, INF, -INF)]);
        slopes("pow 3", |x| pow(x, 3.0), &[(0.0, 0.0, 0.0), (-2.0, -8.0, 12.0), (-INF, -INF, INF)]);
        slopes("pow 1", |x| pow(x, 1.0), &[(0.0, 0.0, 1.0), (-INF, -INF, 1.0)]);
        slopes("pow 0", |x| pow(x, 0.0), &[(0.0, 1.0, 0.0), (-2.0, 1.0, 0.0), (INF, 1.0, 0.0)]);
        slopes(
            "pow -1",
            |x| pow(x, -1.0),
            &[(-2.0, -0.5, -0.25), (0.0, INF, -INF), (INF, 0.0, 0.0), (-1e4, -1e-4, -1e-8)],
        );
        slopes("pow 21", |x| pow(x, 21.0), &[(-1.0, -1.0, 21.0), (0.0, 0.0, 0.0)]);
        slopes("pow 0.5", |x| pow(x, 0.5), &[(4.0, 2.0, 0.25), (0.0, 0.0, INF), (-1.0, f64::NAN, f64::NAN)]);
        slopes("pow 2.5", |x| pow(x, 2.5), &[(0.0, 0.0, 0.0), (4.0, 32.0, 20.0)]);
        slopes("pow -0.5", |x| pow(x, -0.5), &[(4.0, 0.5, -0.0625), (0.0, INF, -INF), (INF, 0.0, 0.0)]);
        slopes("pow 0.7", |x| pow(x, 0.7), &[(1.0, 1.0, 0.7), (0.0, 0.0, INF), (INF, INF, 0.0)]);
    }
}
