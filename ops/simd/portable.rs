//! Lanes on the `wide` crate: what the build's target guarantees (SSE2, NEON, wasm SIMD), else plain arrays.

macro_rules! portable {
    ($elem:ident, $float:ident, $uint:ident, $bits:ident, $lanes:literal, $mantissa:literal) => {
        pub(super) mod $elem {
            use std::ops::{Add, Div, Mul, Neg, Sub};

            use wide::{$float, $uint};

            use crate::simd::lanes::Lanes;

            #[derive(Clone, Copy, Debug)]
            pub struct Vector($float);

            #[inline(always)]
            fn float(bits: $uint) -> $float {
                // SAFETY: both are plain vectors of the same size, valid for any bits.
                unsafe { std::mem::transmute(bits) }
            }

            #[inline(always)]
            fn uint(x: $float) -> $uint {
                // SAFETY: both are plain vectors of the same size, valid for any bits.
                unsafe { std::mem::transmute(x) }
            }

            impl Add for Vector {
                type Output = Self;
                #[inline(always)]
                fn add(self, other: Self) -> Self {
                    Self(self.0 + other.0)
                }
            }
            impl Sub for Vector {
                type Output = Self;
                #[inline(always)]
                fn sub(self, other: Self) -> Self {
                    Self(self.0 - other.0)
                }
            }
            impl Mul for Vector {
                type Output = Self;
                #[inline(always)]
                fn mul(self, other: Self) -> Self {
                    Self(self.0 * other.0)
                }
            }
            impl Div for Vector {
                type Output = Self;
                #[inline(always)]
                fn div(self, other: Self) -> Self {
                    Self(self.0 / other.0)
                }
            }
            impl Neg for Vector {
                type Output = Self;
                #[inline(always)]
                fn neg(self) -> Self {
                    Self(-self.0)
                }
            }

            impl Lanes for Vector {
                type Elem = $elem;
                type Mask = $float;
                type Bits = $uint;
                const N: usize = $lanes;
                // Each is a pair of 128-bit registers, of which the poorest target (SSE2) has 16.
                const REGISTERS: usize = 8;

                #[inline(always)]
                fn splat(x: $elem) -> Self {
                    Self($float::splat(x))
                }
                #[inline(always)]
                unsafe fn load_ptr(src: *const $elem) -> Self {
                    // SAFETY: the caller warrants N readable elements; the array has the element's alignment.
                    Self($float::new(unsafe { *src.cast::<[$elem; $lanes]>() }))
                }
                #[inline(always)]
                unsafe fn store_ptr(self, dst: *mut $elem) {
                    // SAFETY: the caller warrants N writable elements; the array has the element's alignment.
                    unsafe { *dst.cast::<[$elem; $lanes]>() = self.0.to_array() }
                }
                #[inline(always)]
                unsafe fn load_partial_ptr(src: *const $elem, len: usize, fill: $elem) -> Self {
                    let mut lanes = [fill; $lanes];
                    // SAFETY: the caller warrants `len` readable elements and `len <= N`.
                    unsafe { std::ptr::copy_nonoverlapping(src, lanes.as_mut_ptr(), len) };
                    Self($float::new(lanes))
                }
                #[inline(always)]
                unsafe fn store_partial_ptr(self, dst: *mut $elem, len: usize) {
                    let lanes = self.0.to_array();
                    // SAFETY: the caller warrants `len` writable elements and `len <= N`.
                    unsafe { std::ptr::copy_nonoverlapping(lanes.as_ptr(), dst, len) };
                }

                #[inline(always)]
                fn mul_add(self, b: Self, c: Self) -> Self {
                    Self(self.0.mul_add(b.0, c.0))
                }
                #[inline(always)]
                fn sqrt(self) -> Self {
                    Self(self.0.sqrt())
                }
                #[inline(always)]
                fn abs(self) -> Self {
                    Self(self.0.abs())
                }
                #[inline(always)]
                fn max(self, other: Self) -> Self {
                    #[cfg(target_feature = "sse2")]
                    return Self(self.0.fast_max(other.0));
                    // Elsewhere the vector maximum treats NaN in other ways.
                    #[cfg(not(target_feature = "sse2"))]
                    return Self::select(self.gt(other), self, other);
                }
                #[inline(always)]
                fn min(self, other: Self) -> Self {
                    #[cfg(target_feature = "sse2")]
                    return Self(self.0.fast_min(other.0));
                    #[cfg(not(target_feature = "sse2"))]
                    return Self::select(self.lt(other), self, other);
                }

                #[inline(always)]
                fn gt(self, other: Self) -> $float {
                    self.0.simd_gt(other.0)
                }
                #[inline(always)]
                fn ge(self, other: Self) -> $float {
                    self.0.simd_ge(other.0)
                }
                #[inline(always)]
                fn eq(self, other: Self) -> $float {
                    self.0.simd_eq(other.0)
                }
                #[inline(always)]
                fn select(mask: $float, if_true: Self, if_false: Self) -> Self {
                    Self(mask.select(if_true.0, if_false.0))
                }
                #[inline(always)]
                fn first_lanes(len: usize) -> $float {
                    let mut lanes = [0; $lanes];
                    lanes[..len.min($lanes)].fill($bits::MAX);
                    float($uint::new(lanes))
                }
                #[inline(always)]
                fn mask_and(a: $float, b: $float) -> $float {
                    a & b
                }
                #[inline(always)]
                fn mask_or(a: $float, b: $float) -> $float {
                    a | b
                }
                #[inline(always)]
                fn any(mask: $float) -> bool {
                    mask.any()
                }
                #[inline(always)]
                fn all(mask: $float) -> bool {
                    mask.all()
                }

                #[inline(always)]
                fn transpose(rows: &mut [Self; 16]) {
                    let mut square = [$float::ZERO; $lanes];
                    for i in 0..$lanes {
                        square[i] = rows[i].0;
                    }
                    let square = $float::transpose(square);
                    for i in 0..$lanes {
                        rows[i] = Self(square[i]);
                    }
                }

                #[inline(always)]
                fn to_bits(self) -> $uint {
                    uint(self.0)
                }
                #[inline(always)]
                fn from_bits(bits: $uint) -> Self {
                    Self(float(bits))
                }
                #[inline(always)]
                fn bits_splat(x: u64) -> $uint {
                    $uint::splat(x as $bits)
                }
                #[inline(always)]
                fn bits_add(a: $uint, b: $uint) -> $uint {
                    a + b
                }
                #[inline(always)]
                fn bits_sub(a: $uint, b: $uint) -> $uint {
                    a - b
                }
                #[inline(always)]
                fn bits_and(a: $uint, b: $uint) -> $uint {
                    a & b
                }
                #[inline(always)]
                fn bits_or(a: $uint, b: $uint) -> $uint {
                    a | b
                }
                #[inline(always)]
                fn bits_shl_mantissa(a: $uint) -> $uint {
                    a << $mantissa
                }
                #[inline(always)]
                fn bits_shr_mantissa(a: $uint) -> $uint {
                    a >> $mantissa
                }
                #[inline(always)]
                fn bits_shr_one(a: $uint) -> $uint {
                    a >> 1
                }
            }
        }
    };
}

portable!(f32, f32x8, u32x8, u32, 8, 23);
portable!(f64, f64x4, u64x4, u64, 4, 52);
