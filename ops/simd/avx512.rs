//! Lanes of 512 bits: AVX-512 F, DQ and VL. Comparisons give mask registers, tails are masked, and `scalef` replaces
//! the two-step multiplication by a power of two.
//!
//! As in `avx2.rs`, the vector types exist only inside `run`.

/// One expression of intrinsics.
macro_rules! x86 {
    ($e:expr) => {
        // SAFETY: vectors of this module exist only inside `run`, so the CPU has AVX-512 F, DQ and VL; where the
        // expression touches memory, the caller of the unsafe method warrants that memory.
        unsafe { $e }
    };
}

macro_rules! binary_operator {
    ($trait:ident, $method:ident, $intrinsic:ident) => {
        impl std::ops::$trait for Vector {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                Self(x86!($intrinsic(self.0, other.0)))
            }
        }
    };
}

macro_rules! avx512 {
    (
        $elem:ident, $register:ident, $lanes:literal, $mantissa:literal, $mask:ident, $signed:ident,
        arithmetic: $add:ident $sub:ident $mul:ident $div:ident $fmadd:ident $sqrt:ident $max:ident $min:ident
            $abs:ident $scalef:ident,
        memory: $splat:ident $load:ident $store:ident $maskload:ident $maskstore:ident,
        logic: $xor:ident $cmp:ident $blend:ident,
        integers: $to_int:ident $from_int:ident $isplat:ident $iadd:ident $isub:ident $shl:ident $shr:ident
    ) => {
        use std::arch::x86_64::*;

        use crate::simd::lanes::{Kernel, Lanes};
        use crate::simd::math::Constants;

        /// Runs a kernel on these vectors.
        #[target_feature(enable = "avx512f,avx512dq,avx512vl,avx2,fma")]
        pub fn run<K: Kernel<$elem>>(kernel: K) -> K::Output {
            kernel.run::<Vector>()
        }

        #[derive(Clone, Copy, Debug)]
        pub struct Vector($register);

        #[inline(always)]
        fn first(len: usize) -> $mask {
            ((1u32 << len.min($lanes)) - 1) as $mask
        }

        binary_operator!(Add, add, $add);
        binary_operator!(Sub, sub, $sub);
        binary_operator!(Mul, mul, $mul);
        binary_operator!(Div, div, $div);

        impl std::ops::Neg for Vector {
            type Output = Self;
            #[inline(always)]
            fn neg(self) -> Self {
                Self(x86!($xor(self.0, $splat(-0.0))))
            }
        }

        impl Lanes for Vector {
            type Elem = $elem;
            type Mask = $mask;
            type Bits = __m512i;
            const N: usize = $lanes;
            const REGISTERS: usize = 32;

            #[inline(always)]
            fn splat(x: $elem) -> Self {
                Self(x86!($splat(x)))
            }
            #[inline(always)]
            unsafe fn load_ptr(src: *const $elem) -> Self {
                Self(x86!($load(src)))
            }
            #[inline(always)]
            unsafe fn store_ptr(self, dst: *mut $elem) {
                x86!($store(dst, self.0))
            }
            #[inline(always)]
            unsafe fn load_partial_ptr(src: *const $elem, len: usize, fill: $elem) -> Self {
                Self(x86!($maskload($splat(fill), first(len), src)))
            }
            #[inline(always)]
            unsafe fn store_partial_ptr(self, dst: *mut $elem, len: usize) {
                x86!($maskstore(dst, first(len), self.0))
            }

            #[inline(always)]
            fn mul_add(self, b: Self, c: Self) -> Self {
                Self(x86!($fmadd(self.0, b.0, c.0)))
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                Self(x86!($sqrt(self.0)))
            }
            #[inline(always)]
            fn abs(self) -> Self {
                Self(x86!($abs(self.0)))
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                Self(x86!($max(self.0, other.0)))
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                Self(x86!($min(self.0, other.0)))
            }

            #[inline(always)]
            fn gt(self, other: Self) -> $mask {
                x86!($cmp::<_CMP_GT_OQ>(self.0, other.0))
            }
            #[inline(always)]
            fn ge(self, other: Self) -> $mask {
                x86!($cmp::<_CMP_GE_OQ>(self.0, other.0))
            }
            #[inline(always)]
            fn eq(self, other: Self) -> $mask {
                x86!($cmp::<_CMP_EQ_OQ>(self.0, other.0))
            }
            #[inline(always)]
            fn select(mask: $mask, if_true: Self, if_false: Self) -> Self {
                Self(x86!($blend(mask, if_false.0, if_true.0)))
            }
            #[inline(always)]
            fn first_lanes(len: usize) -> $mask {
                first(len)
            }
            #[inline(always)]
            fn mask_and(a: $mask, b: $mask) -> $mask {
                a & b
            }
            #[inline(always)]
            fn mask_or(a: $mask, b: $mask) -> $mask {
                a | b
            }
            #[inline(always)]
            fn any(mask: $mask) -> bool {
                mask != 0
            }
            #[inline(always)]
            fn all(mask: $mask) -> bool {
                mask == $mask::MAX
            }

            #[inline(always)]
            fn reduce_sum(self) -> $elem {
                x86!(halves!($elem, self.0, $add))
            }
            #[inline(always)]
            fn reduce_max(self) -> $elem {
                x86!(halves!($elem, self.0, $max))
            }
            #[inline(always)]
            fn reduce_min(self) -> $elem {
                x86!(halves!($elem, self.0, $min))
            }

            #[inline(always)]
            fn transpose(rows: &mut [Self; 16]) {
                x86!(transpose!($elem, rows))
            }

            #[inline(always)]
            fn to_bits(self) -> __m512i {
                x86!($to_int(self.0))
            }
            #[inline(always)]
            fn from_bits(bits: __m512i) -> Self {
                Self(x86!($from_int(bits)))
            }
            #[inline(always)]
            fn bits_splat(x: u64) -> __m512i {
                x86!($isplat(x as $signed))
            }
            #[inline(always)]
            fn bits_add(a: __m512i, b: __m512i) -> __m512i {
                x86!($iadd(a, b))
            }
            #[inline(always)]
            fn bits_sub(a: __m512i, b: __m512i) -> __m512i {
                x86!($isub(a, b))
            }
            #[inline(always)]
            fn bits_and(a: __m512i, b: __m512i) -> __m512i {
                x86!(_mm512_and_si512(a, b))
            }
            #[inline(always)]
            fn bits_or(a: __m512i, b: __m512i) -> __m512i {
                x86!(_mm512_or_si512(a, b))
            }
            #[inline(always)]
            fn bits_shl_mantissa(a: __m512i) -> __m512i {
                x86!($shl::<$mantissa>(a))
            }
            #[inline(always)]
            fn bits_shr_mantissa(a: __m512i) -> __m512i {
                x86!($shr::<$mantissa>(a))
            }
            #[inline(always)]
            fn bits_shr_one(a: __m512i) -> __m512i {
                x86!($shr::<1>(a))
            }
            #[inline(always)]
            fn ldexp(self, shifted: Self) -> Self {
                Self(x86!($scalef(self.0, $sub(shifted.0, $splat($elem::MAGIC)))))
            }
        }
    };
}

/// Folds the upper half onto the lower one until one lane is left.
macro_rules! halves {
    (f32, $x:expr, $op:ident) => {{
        let x = $x;
        let x = $op(x, _mm512_shuffle_f32x4::<0b01_00_11_10>(x, x));
        let x = $op(x, _mm512_shuffle_f32x4::<0b10_11_00_01>(x, x));
        let x = $op(x, _mm512_permute_ps::<0b01_00_11_10>(x));
        _mm512_cvtss_f32($op(x, _mm512_permute_ps::<0b10_11_00_01>(x)))
    }};
    (f64, $x:expr, $op:ident) => {{
        let x = $x;
        let x = $op(x, _mm512_shuffle_f64x2::<0b01_00_11_10>(x, x));
        let x = $op(x, _mm512_shuffle_f64x2::<0b10_11_00_01>(x, x));
        _mm512_cvtsd_f64($op(x, _mm512_permute_pd::<0b0101_0101>(x)))
    }};
}

/// First within the 128-bit blocks of four (two) rows, then the blocks: those at 0 and 2, then at 1 and 3.
macro_rules! transpose {
    (f32, $rows:ident) => {{
        let mut columns = [$rows[0].0; 16];
        for g in [0, 4, 8, 12] {
            let [r0, r1, r2, r3] = [$rows[g].0, $rows[g + 1].0, $rows[g + 2].0, $rows[g + 3].0];
            let (low01, high01) = (_mm512_unpacklo_ps(r0, r1), _mm512_unpackhi_ps(r0, r1));
            let (low23, high23) = (_mm512_unpacklo_ps(r2, r3), _mm512_unpackhi_ps(r2, r3));
            columns[g] = _mm512_shuffle_ps::<0b01_00_01_00>(low01, low23);
            columns[g + 1] = _mm512_shuffle_ps::<0b11_10_11_10>(low01, low23);
            columns[g + 2] = _mm512_shuffle_ps::<0b01_00_01_00>(high01, high23);
            columns[g + 3] = _mm512_shuffle_ps::<0b11_10_11_10>(high01, high23);
        }
        for c in 0..4 {
            let [c0, c1, c2, c3] = [columns[c], columns[c + 4], columns[c + 8], columns[c + 12]];
            let (even01, odd01) = (_mm512_shuffle_f32x4::<0x88>(c0, c1), _mm512_shuffle_f32x4::<0xdd>(c0, c1));
            let (even23, odd23) = (_mm512_shuffle_f32x4::<0x88>(c2, c3), _mm512_shuffle_f32x4::<0xdd>(c2, c3));
            $rows[c] = Self(_mm512_shuffle_f32x4::<0x88>(even01, even23));
            $rows[c + 4] = Self(_mm512_shuffle_f32x4::<0x88>(odd01, odd23));
            $rows[c + 8] = Self(_mm512_shuffle_f32x4::<0xdd>(even01, even23));
            $rows[c + 12] = Self(_mm512_shuffle_f32x4::<0xdd>(odd01, odd23));
        }
    }};
    (f64, $rows:ident) => {{
        let mut columns = [$rows[0].0; 8];
        for g in [0, 2, 4, 6] {
            columns[g] = _mm512_unpacklo_pd($rows[g].0, $rows[g + 1].0);
            columns[g + 1] = _mm512_unpackhi_pd($rows[g].0, $rows[g + 1].0);
        }
        for c in 0..2 {
            let [c0, c1, c2, c3] = [columns[c], columns[c + 2], columns[c + 4], columns[c + 6]];
            let (even01, odd01) = (_mm512_shuffle_f64x2::<0x88>(c0, c1), _mm512_shuffle_f64x2::<0xdd>(c0, c1));
            let (even23, odd23) = (_mm512_shuffle_f64x2::<0x88>(c2, c3), _mm512_shuffle_f64x2::<0xdd>(c2, c3));
            $rows[c] = Self(_mm512_shuffle_f64x2::<0x88>(even01, even23));
            $rows[c + 2] = Self(_mm512_shuffle_f64x2::<0x88>(odd01, odd23));
            $rows[c + 4] = Self(_mm512_shuffle_f64x2::<0xdd>(even01, even23));
            $rows[c + 6] = Self(_mm512_shuffle_f64x2::<0xdd>(odd01, odd23));
        }
    }};
}

pub(super) mod f32 {
    avx512! {
        f32, __m512, 16, 23, __mmask16, i32,
        arithmetic: _mm512_add_ps _mm512_sub_ps _mm512_mul_ps _mm512_div_ps _mm512_fmadd_ps _mm512_sqrt_ps
            _mm512_max_ps _mm512_min_ps _mm512_abs_ps _mm512_scalef_ps,
        memory: _mm512_set1_ps _mm512_loadu_ps _mm512_storeu_ps _mm512_mask_loadu_ps _mm512_mask_storeu_ps,
        logic: _mm512_xor_ps _mm512_cmp_ps_mask _mm512_mask_blend_ps,
        integers: _mm512_castps_si512 _mm512_castsi512_ps _mm512_set1_epi32 _mm512_add_epi32 _mm512_sub_epi32
            _mm512_slli_epi32 _mm512_srli_epi32
    }
}

pub(super) mod f64 {
    avx512! {
        f64, __m512d, 8, 52, __mmask8, i64,
        arithmetic: _mm512_add_pd _mm512_sub_pd _mm512_mul_pd _mm512_div_pd _mm512_fmadd_pd _mm512_sqrt_pd
            _mm512_max_pd _mm512_min_pd _mm512_abs_pd _mm512_scalef_pd,
        memory: _mm512_set1_pd _mm512_loadu_pd _mm512_storeu_pd _mm512_mask_loadu_pd _mm512_mask_storeu_pd,
        logic: _mm512_xor_pd _mm512_cmp_pd_mask _mm512_mask_blend_pd,
        integers: _mm512_castpd_si512 _mm512_castsi512_pd _mm512_set1_epi64 _mm512_add_epi64 _mm512_sub_epi64
            _mm512_slli_epi64 _mm512_srli_epi64
    }
}
