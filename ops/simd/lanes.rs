//! The vector interface that kernels are written against.

use std::fmt::Debug;
use std::ops::{Add, Div, Mul, Neg, Sub};

use super::math;
use super::real::Real;

/// Code that is generic over the vector type; see [`Real::dispatch`].
pub trait Kernel<E: Real> {
    /// What the kernel returns.
    type Output;

    /// Runs the kernel on vectors of type `L`. Implementations must be `#[inline(always)]`, and so must everything
    /// that they call with lanes, or the instructions of the level are not used.
    fn run<L: Lanes<Elem = E>>(self) -> Self::Output;
}

/// A vector of [`Lanes::N`] numbers. Values exist only inside [`Kernel::run`].
pub trait Lanes:
    Copy
    + Send
    + Sync
    + Debug
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + 'static
{
    /// The element type.
    type Elem: Real;
    /// One truth value per lane.
    type Mask: Copy;
    /// The same register seen as unsigned integers of the element's width.
    type Bits: Copy;
    /// The number of lanes, a power of two, at most 16.
    const N: usize;
    /// How many values of this type fit in the CPU's vector registers: what a register-blocked kernel can plan with.
    const REGISTERS: usize;

    /// All lanes `x`.
    fn splat(x: Self::Elem) -> Self;
    /// Reads `N` elements.
    ///
    /// # Safety
    /// `src` must be valid for reads of `N` elements; no alignment beyond the element's is needed.
    unsafe fn load_ptr(src: *const Self::Elem) -> Self;
    /// Writes `N` elements.
    ///
    /// # Safety
    /// `dst` must be valid for writes of `N` elements; no alignment beyond the element's is needed.
    unsafe fn store_ptr(self, dst: *mut Self::Elem);
    /// Reads `len` elements; the other lanes are `fill`.
    ///
    /// # Safety
    /// `src` must be valid for reads of `len` elements, and `len <= N`.
    unsafe fn load_partial_ptr(src: *const Self::Elem, len: usize, fill: Self::Elem) -> Self;
    /// Writes the first `len` lanes.
    ///
    /// # Safety
    /// `dst` must be valid for writes of `len` elements, and `len <= N`.
    unsafe fn store_partial_ptr(self, dst: *mut Self::Elem, len: usize);

    /// The first `N` elements of `src`.
    ///
    /// # Panics
    /// When `src` is shorter.
    #[inline(always)]
    fn load(src: &[Self::Elem]) -> Self {
        assert!(src.len() >= Self::N);
        // SAFETY: the slice holds at least N elements.
        unsafe { Self::load_ptr(src.as_ptr()) }
    }

    /// Writes to the first `N` elements of `dst`.
    ///
    /// # Panics
    /// When `dst` is shorter.
    #[inline(always)]
    fn store(self, dst: &mut [Self::Elem]) {
        assert!(dst.len() >= Self::N);
        // SAFETY: the slice holds at least N elements.
        unsafe { self.store_ptr(dst.as_mut_ptr()) }
    }

    /// The whole of `src`, then `fill`.
    ///
    /// # Panics
    /// When `src` is longer than `N`.
    #[inline(always)]
    fn load_partial(src: &[Self::Elem], fill: Self::Elem) -> Self {
        assert!(src.len() <= Self::N);
        // SAFETY: exactly the slice is read, and it is at most N long.
        unsafe { Self::load_partial_ptr(src.as_ptr(), src.len(), fill) }
    }

    /// Writes as many lanes as `dst` is long.
    ///
    /// # Panics
    /// When `dst` is longer than `N`.
    #[inline(always)]
    fn store_partial(self, dst: &mut [Self::Elem]) {
        assert!(dst.len() <= Self::N);
        // SAFETY: exactly the slice is written, and it is at most N long.
        unsafe { self.store_partial_ptr(dst.as_mut_ptr(), dst.len()) }
    }

    /// The lanes as an array; entries from `N` on are zero.
    #[inline(always)]
    fn to_array(self) -> [Self::Elem; 16] {
        let mut out = [Self::Elem::ZERO; 16];
        self.store(&mut out);
        out
    }

    /// `self * b + c`, with one rounding where the level has it.
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// The square root, correctly rounded.
    fn sqrt(self) -> Self;
    /// The absolute value.
    fn abs(self) -> Self;
    /// Where `self > other` then `self` else `other`: with a NaN on either side that is `other`.
    fn max(self, other: Self) -> Self;
    /// Where `self < other` then `self` else `other`: with a NaN on either side that is `other`.
    fn min(self, other: Self) -> Self;

    /// `self > other`, false with NaN.
    fn gt(self, other: Self) -> Self::Mask;
    /// `self >= other`, false with NaN.
    fn ge(self, other: Self) -> Self::Mask;
    /// `self == other`, false with NaN.
    fn eq(self, other: Self) -> Self::Mask;
    /// `self < other`, false with NaN.
    #[inline(always)]
    fn lt(self, other: Self) -> Self::Mask {
        other.gt(self)
    }
    /// `self <= other`, false with NaN.
    #[inline(always)]
    fn le(self, other: Self) -> Self::Mask {
        other.ge(self)
    }
    /// `if_true` where the mask holds, else `if_false`.
    fn select(mask: Self::Mask, if_true: Self, if_false: Self) -> Self;
    /// True in the first `len` lanes.
    fn first_lanes(len: usize) -> Self::Mask;
    /// Both masks.
    fn mask_and(a: Self::Mask, b: Self::Mask) -> Self::Mask;
    /// Either mask.
    fn mask_or(a: Self::Mask, b: Self::Mask) -> Self::Mask;
    /// Whether the mask holds in some lane.
    fn any(mask: Self::Mask) -> bool;
    /// Whether the mask holds in every lane.
    fn all(mask: Self::Mask) -> bool;

    /// The sum of all lanes: the upper half is added to the lower one until one lane is left.
    #[inline(always)]
    fn reduce_sum(self) -> Self::Elem {
        let mut lanes = self.to_array();
        let mut half = Self::N / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
            half /= 2;
        }
        lanes[0]
    }
    /// The greatest lane, by halves as in [`Lanes::reduce_sum`]; meaningless when a lane is NaN.
    #[inline(always)]
    fn reduce_max(self) -> Self::Elem {
        let mut lanes = self.to_array();
        let mut half = Self::N / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] = if lanes[i] > lanes[i + half] { lanes[i] } else { lanes[i + half] };
            }
            half /= 2;
        }
        lanes[0]
    }
    /// The least lane, by halves as in [`Lanes::reduce_sum`]; meaningless when a lane is NaN.
    #[inline(always)]
    fn reduce_min(self) -> Self::Elem {
        -(-self).reduce_max()
    }

    /// Transposes a square: lane j of row i and lane i of row j change places, for the first `N` rows.
    fn transpose(rows: &mut [Self; 16]);

    /// `e^self`, at most 2 ulp of error (1 measured), subnormal results included.
    #[inline(always)]
    fn exp(self) -> Self {
        math::exp(self)
    }
    /// The natural logarithm, at most 2 ulp of error (1 measured); `-inf` at 0, NaN below.
    #[inline(always)]
    fn ln(self) -> Self {
        math::ln(self)
    }
    /// The hyperbolic tangent, at most 2 ulp of error.
    #[inline(always)]
    fn tanh(self) -> Self {
        math::tanh(self)
    }
    /// `1 / (1 + e^-self)`, at most 2 ulp of error, subnormal results included.
    #[inline(always)]
    fn sigmoid(self) -> Self {
        math::sigmoid(self)
    }

    /// The bits of the lanes.
    fn to_bits(self) -> Self::Bits;
    /// Lanes from bits.
    fn from_bits(bits: Self::Bits) -> Self;
    /// All lanes `x`, cut to the element's width.
    fn bits_splat(x: u64) -> Self::Bits;
    /// Wrapping addition.
    fn bits_add(a: Self::Bits, b: Self::Bits) -> Self::Bits;
    /// Wrapping subtraction.
    fn bits_sub(a: Self::Bits, b: Self::Bits) -> Self::Bits;
    /// Bitwise and.
    fn bits_and(a: Self::Bits, b: Self::Bits) -> Self::Bits;
    /// Bitwise or.
    fn bits_or(a: Self::Bits, b: Self::Bits) -> Self::Bits;
    /// Shifts left by the element's mantissa bits (23 or 52).
    fn bits_shl_mantissa(a: Self::Bits) -> Self::Bits;
    /// Shifts right by the element's mantissa bits, zeros from the left.
    fn bits_shr_mantissa(a: Self::Bits) -> Self::Bits;
    /// Shifts right by one, a zero from the left.
    fn bits_shr_one(a: Self::Bits) -> Self::Bits;

    /// `self * 2^n` with one rounding, where `shifted` is the integral `n` plus [`Constants::MAGIC`](super::Constants)
    /// and `|n|` is at most 1100 (160 in f32).
    #[inline(always)]
    fn ldexp(self, shifted: Self) -> Self {
        math::ldexp(self, shifted)
    }
}
