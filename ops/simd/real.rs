//! The two element types of CPU kernels, f32 and f64.

use std::fmt::{Debug, Display};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, DivAssign, Mul, MulAssign, Neg, Sub, SubAssign};

use kumiki_tensor::bf16;

use super::lanes::Kernel;
use super::level::{Level, level};
use super::math::Constants;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use super::{half, portable};

/// A floating-point number that has lanes: f32 or f64.
pub trait Real:
    Copy
    + Send
    + Sync
    + PartialOrd
    + Debug
    + Display
    + Default
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + DivAssign
    + Sum
    + Constants
    + 'static
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// 1/2.
    const HALF: Self;
    /// Infinity.
    const INFINITY: Self;
    /// Minus infinity.
    const NEG_INFINITY: Self;
    /// Not a number.
    const NAN: Self;
    /// The distance from 1 to the next number.
    const EPSILON: Self;

    /// The nearest number.
    fn from_f64(x: f64) -> Self;
    /// The same number in f64.
    fn to_f64(self) -> f64;
    /// `e^self`.
    fn exp(self) -> Self;
    /// The natural logarithm.
    fn ln(self) -> Self;
    /// The square root.
    fn sqrt(self) -> Self;
    /// The hyperbolic tangent.
    fn tanh(self) -> Self;
    /// The absolute value.
    fn abs(self) -> Self;
    /// The greater of two; a NaN loses.
    fn max(self, other: Self) -> Self;
    /// The lesser of two; a NaN loses.
    fn min(self, other: Self) -> Self;
    /// `self * b + c` with one rounding; without the FMA target feature this is a slow library call.
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// Whether it is a NaN.
    fn is_nan(self) -> bool;
    /// Whether it is neither infinite nor a NaN.
    fn is_finite(self) -> bool;

    /// The slice itself, where this is f32.
    fn as_f32(x: &[Self]) -> Option<&[f32]>;
    /// Likewise.
    fn as_f32_mut(x: &mut [Self]) -> Option<&mut [f32]>;
    /// `out[i] = x[i]` from storage in BF16.
    fn widen(x: &[bf16], out: &mut [Self]);
    /// `out[i] = x[i]`, rounded to be stored in BF16.
    fn narrow(x: &[Self], out: &mut [bf16]);

    /// Runs `kernel` on the vectors of [`level()`].
    #[inline]
    fn dispatch<K: Kernel<Self>>(kernel: K) -> K::Output {
        // SAFETY: level() only returns levels that this CPU has.
        unsafe { Self::dispatch_at(level(), kernel) }
    }

    /// Runs `kernel` on the vectors of a level that was read before, so that several kernels agree on the number of
    /// lanes.
    ///
    /// # Safety
    /// This CPU must have the level ([`Level::is_available`]); what [`level()`] returned does.
    unsafe fn dispatch_at<K: Kernel<Self>>(level: Level, kernel: K) -> K::Output;
}

macro_rules! real {
    ($elem:ident, $widen:expr, $narrow:expr, $as_f32:expr) => {
        impl Real for $elem {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const HALF: Self = 0.5;
            const INFINITY: Self = $elem::INFINITY;
            const NEG_INFINITY: Self = $elem::NEG_INFINITY;
            const NAN: Self = $elem::NAN;
            const EPSILON: Self = $elem::EPSILON;

            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as $elem
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            #[inline(always)]
            fn exp(self) -> Self {
                self.exp()
            }
            #[inline(always)]
            fn ln(self) -> Self {
                self.ln()
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                self.sqrt()
            }
            #[inline(always)]
            fn tanh(self) -> Self {
                self.tanh()
            }
            #[inline(always)]
            fn abs(self) -> Self {
                self.abs()
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                self.max(other)
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                self.min(other)
            }
            #[inline(always)]
            fn mul_add(self, b: Self, c: Self) -> Self {
                self.mul_add(b, c)
            }
            #[inline(always)]
            fn is_nan(self) -> bool {
                self.is_nan()
            }
            #[inline(always)]
            fn is_finite(self) -> bool {
                self.is_finite()
            }

            #[inline]
            fn as_f32(x: &[Self]) -> Option<&[f32]> {
                $as_f32(x)
            }
            #[inline]
            fn as_f32_mut(x: &mut [Self]) -> Option<&mut [f32]> {
                $as_f32(x)
            }
            fn widen(x: &[bf16], out: &mut [Self]) {
                $widen(x, out);
            }
            fn narrow(x: &[Self], out: &mut [bf16]) {
                $narrow(x, out);
            }

            #[inline]
            unsafe fn dispatch_at<K: Kernel<Self>>(level: Level, kernel: K) -> K::Output {
                match level {
                    // SAFETY: the caller warrants that the CPU has the level.
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx2 => unsafe { avx2::$elem::run(kernel) },
                    // SAFETY: as above.
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx512 | Level::Amx => unsafe { avx512::$elem::run(kernel) },
                    _ => kernel.run::<portable::$elem::Vector>(),
                }
            }
        }
    };
}

real!(f32, half::widen, half::narrow, Some);
real!(f64, widen_to_f64, narrow_from_f64, |_| None);

fn widen_to_f64(x: &[bf16], out: &mut [f64]) {
    out.iter_mut().zip(x).for_each(|(y, x)| *y = x.to_f64());
}

fn narrow_from_f64(x: &[f64], out: &mut [bf16]) {
    out.iter_mut().zip(x).for_each(|(y, &x)| *y = bf16::from_f64(x));
}
