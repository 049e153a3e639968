//! exp, ln, tanh and sigmoid, written once over the primitives of [`Lanes`].
//!
//! `exp`: with `n = round(x / ln 2)` and `r = x - n ln 2`, `e^x = 2^n (1 + r + r² P(r))`. Rounding to integer is the
//! addition of 1.5 · 2^mantissa, which also leaves `n` in the low bits, ready to become an exponent. `ln 2` is split
//! in two, so that `n · ln2_hi` is exact even without fused multiply-add. `tanh` shares the reduction through
//! `expm1(2|x|)`, which keeps its relative accuracy at 0. `ln` is the reduction of fdlibm's `e_log.c`.
//! The polynomials are Chebyshev fits made with 60 digits.

use super::lanes::Lanes;
use super::real::Real;

/// What the formulas need to know about an element type.
pub trait Constants: Sized + 'static {
    /// 1.5 · 2^mantissa: adding it rounds to an integer.
    const MAGIC: Self;
    /// 1 / ln 2.
    const LOG2_E: Self;
    /// ln 2 with so few bits that a product with an exponent is exact.
    const LN2_HI: Self;
    /// ln 2 - `LN2_HI`.
    const LN2_LO: Self;
    /// Above it `exp` overflows.
    const EXP_MAX: Self;
    /// Below it `exp` rounds to 0.
    const EXP_MIN: Self;
    /// `(e^r - 1 - r) / r²` for `|r| <= ln 2 / 2`, lowest power first.
    const EXP: &'static [Self];
    /// From here on `tanh` rounds to 1.
    const TANH_MAX: Self;
    /// `(ln((1+s)/(1-s)) - 2s) / s³` as a polynomial in `s²`, for `s² <= 0.0298`, lowest power first.
    const LN: &'static [Self];
    /// The least normal number.
    const MIN_NORMAL: Self;
    /// 2^mantissa, which makes every subnormal normal.
    const TWO_MANTISSA: Self;
    /// 2^mantissa + the exponent's bias.
    const TWO_MANTISSA_BIAS: Self;
    /// The same + the mantissa's bits, for a number scaled by `TWO_MANTISSA`.
    const TWO_MANTISSA_BIAS_SUBNORMAL: Self;
    /// The bits of 1.
    const ONE_BITS: u64;
    /// The bits of about sqrt(1/2).
    const SQRT_HALF_BITS: u64;
    /// The mantissa's bits.
    const MANTISSA_MASK: u64;
}

#[allow(clippy::excessive_precision, clippy::approx_constant)]
impl Constants for f32 {
    const MAGIC: f32 = 12_582_912.0;
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HI: f32 = 0.693_359_375;
    const LN2_LO: f32 = -2.121_944_400_5e-4;
    const EXP_MAX: f32 = 89.0;
    const EXP_MIN: f32 = -104.0;
    const EXP: &'static [f32] =
        &[0.5, 0.166_666_671_6, 0.041_666_463_02, 0.008_333_310_485, 0.001_393_375_103, 0.000_198_911_031_5];
    const TANH_MAX: f32 = 10.0;
    const LN: &'static [f32] = &[0.666_666_865_3, 0.399_885_445_8, 0.295_906_484_1];
    const MIN_NORMAL: f32 = f32::MIN_POSITIVE;
    const TWO_MANTISSA: f32 = 8_388_608.0;
    const TWO_MANTISSA_BIAS: f32 = 8_388_735.0;
    const TWO_MANTISSA_BIAS_SUBNORMAL: f32 = 8_388_758.0;
    const ONE_BITS: u64 = 0x3f80_0000;
    const SQRT_HALF_BITS: u64 = 0x3f35_04f3;
    const MANTISSA_MASK: u64 = 0x007f_ffff;
}

#[allow(clippy::excessive_precision, clippy::approx_constant)]
impl Constants for f64 {
    const MAGIC: f64 = 6_755_399_441_055_744.0;
    const LOG2_E: f64 = std::f64::consts::LOG2_E;
    const LN2_HI: f64 = 6.931_471_803_691_238_164_90e-1;
    const LN2_LO: f64 = 1.908_214_929_270_587_700_02e-10;
    const EXP_MAX: f64 = 710.0;
    const EXP_MIN: f64 = -746.0;
    const EXP: &'static [f64] = &[
        0.5,
        0.1666666666666667,
        0.04166666666666667,
        0.00833333333332607,
        0.0013888888888883703,
        0.00019841269875048905,
        2.480158732571076e-05,
        2.755725511097889e-06,
        2.755727343657049e-07,
        2.510533724466521e-08,
        2.091477283224809e-09,
    ];
    const TANH_MAX: f64 = 20.0;
    const LN: &'static [f64] = &[
        0.666666666666667,
        0.39999999999893016,
        0.2857142862890348,
        0.22222210659293473,
        0.18182923591453207,
        0.1533058183634364,
        0.14630465387106195,
    ];
    const MIN_NORMAL: f64 = f64::MIN_POSITIVE;
    const TWO_MANTISSA: f64 = 4_503_599_627_370_496.0;
    const TWO_MANTISSA_BIAS: f64 = 4_503_599_627_371_519.0;
    const TWO_MANTISSA_BIAS_SUBNORMAL: f64 = 4_503_599_627_371_571.0;
    const ONE_BITS: u64 = 0x3ff0_0000_0000_0000;
    const SQRT_HALF_BITS: u64 = 0x3fe6_a09e_0000_0000;
    const MANTISSA_MASK: u64 = 0x000f_ffff_ffff_ffff;
}

/// Horner's scheme for the odd and the even powers apart: two short chains of dependent steps instead of a long one.
#[inline(always)]
fn polynomial<L: Lanes>(coefficients: &'static [L::Elem], x: L) -> L {
    let last = coefficients.len() - 1;
    let square = x * x;
    let mut upper = L::splat(coefficients[last]);
    let mut lower = L::splat(coefficients[last - 1]);
    for i in (0..last - 1).rev() {
        let next = L::splat(coefficients[i]);
        if (last - i) % 2 == 0 {
            upper = upper.mul_add(square, next);
        } else {
            lower = lower.mul_add(square, next);
        }
    }
    if last % 2 == 1 { upper.mul_add(x, lower) } else { lower.mul_add(x, upper) }
}

/// For `x` in range: `n + MAGIC`, and `q` with `e^x = 2^n (1 + q)`.
#[inline(always)]
fn reduce_exp<L: Lanes>(x: L) -> (L, L) {
    let magic = L::splat(L::Elem::MAGIC);
    let shifted = x.mul_add(L::splat(L::Elem::LOG2_E), magic);
    let n = shifted - magic;
    let r = n.mul_add(L::splat(-L::Elem::LN2_HI), x);
    let r = n.mul_add(L::splat(-L::Elem::LN2_LO), r);
    (shifted, polynomial(L::Elem::EXP, r).mul_add(r * r, r))
}

/// `2^n` for `shifted = n + MAGIC` and `n` within the exponents of normal numbers.
#[inline(always)]
fn pow2<L: Lanes>(shifted: L::Bits) -> L {
    L::from_bits(L::bits_add(L::bits_shl_mantissa(shifted), L::bits_splat(L::Elem::ONE_BITS)))
}

/// Two factors, because neither 2^128 nor 2^-149 is a normal number: only the last product can round.
#[inline(always)]
pub(super) fn ldexp<L: Lanes>(x: L, shifted: L) -> L {
    let bits = shifted.to_bits();
    let half = L::bits_shr_one(bits);
    x * pow2::<L>(half) * pow2::<L>(L::bits_sub(bits, half))
}

#[inline(always)]
pub(super) fn exp<L: Lanes>(x: L) -> L {
    exp_bounded(L::splat(L::Elem::EXP_MAX).min(x))
}

/// `exp` below `EXP_MAX`. NaN passes: min and max return their argument when it is one.
#[inline(always)]
fn exp_bounded<L: Lanes>(x: L) -> L {
    let x = L::splat(L::Elem::EXP_MIN).max(x);
    let (shifted, q) = reduce_exp(x);
    (L::splat(L::Elem::ONE) + q).ldexp(shifted)
}

#[inline(always)]
pub(super) fn tanh<L: Lanes>(x: L) -> L {
    let one = L::splat(L::Elem::ONE);
    let two = one + one;
    let magnitude = L::splat(L::Elem::TANH_MAX).min(x.abs());
    let (shifted, q) = reduce_exp(magnitude + magnitude);
    let power = pow2::<L>(shifted.to_bits());
    let expm1 = q.mul_add(power, power - one);
    let sum = expm1 + two;
    let t = expm1 / sum;
    // Near 0 the rounding of the sum would cost a third ulp; there 1 / sum is about 1/2.
    let lost = L::select(expm1.lt(one), expm1 - (sum - two), L::splat(L::Elem::ZERO));
    let t = (t * L::splat(-L::Elem::HALF)).mul_add(lost, t);
    let sign = L::bits_and(x.to_bits(), (-L::splat(L::Elem::ZERO)).to_bits());
    L::from_bits(L::bits_or(t.to_bits(), sign))
}

#[inline(always)]
pub(super) fn sigmoid<L: Lanes>(x: L) -> L {
    let zero = L::splat(L::Elem::ZERO);
    let one = L::splat(L::Elem::ONE);
    let e = exp_bounded(-x.abs());
    let sum = one + e;
    let y = L::select(x.lt(zero), e, one) / sum;
    // As in tanh; 1 / sum is between 1/2 and 1.
    let lost = e - (sum - one);
    (y * L::splat(L::Elem::from_f64(-0.75))).mul_add(lost, y)
}

#[inline(always)]
pub(super) fn ln<L: Lanes>(x: L) -> L {
    let zero = L::splat(L::Elem::ZERO);
    let subnormal = x.lt(L::splat(L::Elem::MIN_NORMAL));
    let scaled = L::select(subnormal, x * L::splat(L::Elem::TWO_MANTISSA), x);

    // m in [sqrt(1/2), sqrt(2)) and x = m 2^k.
    let sqrt_half = L::bits_splat(L::Elem::SQRT_HALF_BITS);
    let moved = L::bits_add(scaled.to_bits(), L::bits_splat(L::Elem::ONE_BITS - L::Elem::SQRT_HALF_BITS));
    let m = L::from_bits(L::bits_add(L::bits_and(moved, L::bits_splat(L::Elem::MANTISSA_MASK)), sqrt_half));
    let two_mantissa = L::splat(L::Elem::TWO_MANTISSA);
    let biased = L::from_bits(L::bits_or(L::bits_shr_mantissa(moved), two_mantissa.to_bits()));
    let bias = L::splat(L::Elem::TWO_MANTISSA_BIAS);
    let subnormal_bias = L::splat(L::Elem::TWO_MANTISSA_BIAS_SUBNORMAL);
    let k = biased - L::select(subnormal, subnormal_bias, bias);

    let f = m - L::splat(L::Elem::ONE);
    let s = f / (f + L::splat(L::Elem::ONE + L::Elem::ONE));
    let z = s * s;
    let r = z * polynomial(L::Elem::LN, z);
    let half_square = f * f * L::splat(L::Elem::HALF);
    let tail = s.mul_add(half_square + r, k * L::splat(L::Elem::LN2_LO));
    let value = k.mul_add(L::splat(L::Elem::LN2_HI), f - (half_square - tail));

    let infinity = L::splat(L::Elem::INFINITY);
    let value = L::select(x.eq(infinity), infinity, value);
    let edge = L::select(x.eq(zero), -infinity, L::splat(L::Elem::NAN));
    L::select(x.gt(zero), value, edge)
}
