//! Lanes of 256 bits: AVX2 with fused multiply-add.
//!
//! The vector types never leave this folder: only `run`, whose caller knows that the CPU has the instructions, hands
//! them to a kernel. Every intrinsic below rests on that.

/// One expression of intrinsics.
macro_rules! x86 {
    ($e:expr) => {
        // SAFETY: vectors of this module exist only inside `run`, so the CPU has AVX2 and FMA; where the expression
        // touches memory, the caller of the unsafe method warrants that memory.
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

macro_rules! avx2 {
    (
        $elem:ident, $register:ident, $lanes:literal, $mantissa:literal, $bits:ident, $signed:ident,
        arithmetic: $add:ident $sub:ident $mul:ident $div:ident $fmadd:ident $sqrt:ident $max:ident $min:ident,
        memory: $splat:ident $load:ident $store:ident $maskload:ident,
        logic: $and:ident $or:ident $xor:ident $andnot:ident $cmp:ident $blend:ident $movemask:ident,
        integers: $to_int:ident $from_int:ident $isplat:ident $iadd:ident $isub:ident $shl:ident $shr:ident
    ) => {
        use std::arch::x86_64::*;

        use crate::simd::lanes::{Kernel, Lanes};

        /// Runs a kernel on these vectors.
        #[target_feature(enable = "avx2,fma")]
        pub fn run<K: Kernel<$elem>>(kernel: K) -> K::Output {
            kernel.run::<Vector>()
        }

        #[derive(Clone, Copy, Debug)]
        pub struct Vector($register);

        /// A window of `N` entries at `N - len` has its first `len` all ones.
        static WINDOW: [$signed; 2 * $lanes] = {
            let mut window = [0; 2 * $lanes];
            let mut i = 0;
            while i < $lanes {
                window[i] = -1;
                i += 1;
            }
            window
        };

        #[inline(always)]
        fn first(len: usize) -> __m256i {
            let start = $lanes - len.min($lanes);
            // SAFETY: start + N is at most the table's length; the CPU has AVX2 as for all of this module.
            unsafe { _mm256_loadu_si256(WINDOW.as_ptr().add(start).cast()) }
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
            type Mask = $register;
            type Bits = __m256i;
            const N: usize = $lanes;
            const REGISTERS: usize = 16;

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
                Self(x86!($blend($splat(fill), $maskload(src, first(len)), $from_int(first(len)))))
            }
            #[inline(always)]
            unsafe fn store_partial_ptr(self, dst: *mut $elem, len: usize) {
                x86!(store_first!($elem, dst, len, self.0))
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
                Self(x86!($andnot($splat(-0.0), self.0)))
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
            fn gt(self, other: Self) -> $register {
                x86!($cmp::<_CMP_GT_OQ>(self.0, other.0))
            }
            #[inline(always)]
            fn ge(self, other: Self) -> $register {
                x86!($cmp::<_CMP_GE_OQ>(self.0, other.0))
            }
            #[inline(always)]
            fn eq(self, other: Self) -> $register {
                x86!($cmp::<_CMP_EQ_OQ>(self.0, other.0))
            }
            #[inline(always)]
            fn select(mask: $register, if_true: Self, if_false: Self) -> Self {
                Self(x86!($blend(if_false.0, if_true.0, mask)))
            }
            #[inline(always)]
            fn first_lanes(len: usize) -> $register {
                x86!($from_int(first(len)))
            }
            #[inline(always)]
            fn mask_and(a: $register, b: $register) -> $register {
                x86!($and(a, b))
            }
            #[inline(always)]
            fn mask_or(a: $register, b: $register) -> $register {
                x86!($or(a, b))
            }
            #[inline(always)]
            fn any(mask: $register) -> bool {
                x86!($movemask(mask)) != 0
            }
            #[inline(always)]
            fn all(mask: $register) -> bool {
                x86!($movemask(mask)) == (1 << $lanes) - 1
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
            fn to_bits(self) -> __m256i {
                x86!($to_int(self.0))
            }
            #[inline(always)]
            fn from_bits(bits: __m256i) -> Self {
                Self(x86!($from_int(bits)))
            }
            #[inline(always)]
            fn bits_splat(x: u64) -> __m256i {
                x86!($isplat(x as $signed))
            }
            #[inline(always)]
            fn bits_add(a: __m256i, b: __m256i) -> __m256i {
                x86!($iadd(a, b))
            }
            #[inline(always)]
            fn bits_sub(a: __m256i, b: __m256i) -> __m256i {
                x86!($isub(a, b))
            }
            #[inline(always)]
            fn bits_and(a: __m256i, b: __m256i) -> __m256i {
                x86!(_mm256_and_si256(a, b))
            }
            #[inline(always)]
            fn bits_or(a: __m256i, b: __m256i) -> __m256i {
                x86!(_mm256_or_si256(a, b))
            }
            #[inline(always)]
            fn bits_shl_mantissa(a: __m256i) -> __m256i {
                x86!($shl::<$mantissa>(a))
            }
            #[inline(always)]
            fn bits_shr_mantissa(a: __m256i) -> __m256i {
                x86!($shr::<$mantissa>(a))
            }
            #[inline(always)]
            fn bits_shr_one(a: __m256i) -> __m256i {
                x86!($shr::<1>(a))
            }
        }
    };
}

/// Folds the upper half onto the lower one until one lane is left; the swaps keep every step a 256-bit operation.
macro_rules! halves {
    (f32, $x:expr, $op:ident) => {{
        let x = $x;
        let x = $op(x, _mm256_permute2f128_ps::<1>(x, x));
        let x = $op(x, _mm256_permute_ps::<0b01_00_11_10>(x));
        _mm256_cvtss_f32($op(x, _mm256_permute_ps::<0b10_11_00_01>(x)))
    }};
    (f64, $x:expr, $op:ident) => {{
        let x = $x;
        let x = $op(x, _mm256_permute2f128_pd::<1>(x, x));
        _mm256_cvtsd_f64($op(x, _mm256_permute_pd::<0b0101>(x)))
    }};
}

/// First within the 128-bit blocks of four (two) rows, then the blocks.
macro_rules! transpose {
    (f32, $rows:ident) => {{
        let mut columns = [$rows[0].0; 8];
        for g in [0, 4] {
            let [r0, r1, r2, r3] = [$rows[g].0, $rows[g + 1].0, $rows[g + 2].0, $rows[g + 3].0];
            let (low01, high01) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
            let (low23, high23) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
            columns[g] = _mm256_shuffle_ps::<0b01_00_01_00>(low01, low23);
            columns[g + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(low01, low23);
            columns[g + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(high01, high23);
            columns[g + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(high01, high23);
        }
        for c in 0..4 {
            $rows[c] = Self(_mm256_permute2f128_ps::<0x20>(columns[c], columns[c + 4]));
            $rows[c + 4] = Self(_mm256_permute2f128_ps::<0x31>(columns[c], columns[c + 4]));
        }
    }};
    (f64, $rows:ident) => {{
        let [r0, r1, r2, r3] = [$rows[0].0, $rows[1].0, $rows[2].0, $rows[3].0];
        let (low01, high01) = (_mm256_unpacklo_pd(r0, r1), _mm256_unpackhi_pd(r0, r1));
        let (low23, high23) = (_mm256_unpacklo_pd(r2, r3), _mm256_unpackhi_pd(r2, r3));
        $rows[0] = Self(_mm256_permute2f128_pd::<0x20>(low01, low23));
        $rows[1] = Self(_mm256_permute2f128_pd::<0x20>(high01, high23));
        $rows[2] = Self(_mm256_permute2f128_pd::<0x31>(low01, low23));
        $rows[3] = Self(_mm256_permute2f128_pd::<0x31>(high01, high23));
    }};
}

/// Writes 4, 2 and 1 lanes as the bits of `len` say: masked stores are slow on AMD's cores.
macro_rules! store_first {
    (f32, $dst:ident, $len:ident, $x:expr) => {{
        if $len == 8 {
            return _mm256_storeu_ps($dst, $x);
        }
        let (mut dst, mut x) = ($dst, _mm256_castps256_ps128($x));
        if $len & 4 != 0 {
            _mm_storeu_ps(dst, x);
            dst = dst.add(4);
            x = _mm256_extractf128_ps::<1>($x);
        }
        if $len & 2 != 0 {
            _mm_storeu_si64(dst.cast(), _mm_castps_si128(x));
            dst = dst.add(2);
            x = _mm_movehl_ps(x, x);
        }
        if $len & 1 != 0 {
            _mm_store_ss(dst, x);
        }
    }};
    (f64, $dst:ident, $len:ident, $x:expr) => {{
        if $len == 4 {
            return _mm256_storeu_pd($dst, $x);
        }
        let (mut dst, mut x) = ($dst, _mm256_castpd256_pd128($x));
        if $len & 2 != 0 {
            _mm_storeu_pd(dst, x);
            dst = dst.add(2);
            x = _mm256_extractf128_pd::<1>($x);
        }
        if $len & 1 != 0 {
            _mm_store_sd(dst, x);
        }
    }};
}

pub(super) mod f32 {
    avx2! {
        f32, __m256, 8, 23, u32, i32,
        arithmetic: _mm256_add_ps _mm256_sub_ps _mm256_mul_ps _mm256_div_ps _mm256_fmadd_ps _mm256_sqrt_ps
            _mm256_max_ps _mm256_min_ps,
        memory: _mm256_set1_ps _mm256_loadu_ps _mm256_storeu_ps _mm256_maskload_ps,
        logic: _mm256_and_ps _mm256_or_ps _mm256_xor_ps _mm256_andnot_ps _mm256_cmp_ps _mm256_blendv_ps
            _mm256_movemask_ps,
        integers: _mm256_castps_si256 _mm256_castsi256_ps _mm256_set1_epi32 _mm256_add_epi32 _mm256_sub_epi32
            _mm256_slli_epi32 _mm256_srli_epi32
    }
}

pub(super) mod f64 {
    avx2! {
        f64, __m256d, 4, 52, u64, i64,
        arithmetic: _mm256_add_pd _mm256_sub_pd _mm256_mul_pd _mm256_div_pd _mm256_fmadd_pd _mm256_sqrt_pd
            _mm256_max_pd _mm256_min_pd,
        memory: _mm256_set1_pd _mm256_loadu_pd _mm256_storeu_pd _mm256_maskload_pd,
        logic: _mm256_and_pd _mm256_or_pd _mm256_xor_pd _mm256_andnot_pd _mm256_cmp_pd _mm256_blendv_pd
            _mm256_movemask_pd,
        integers: _mm256_castpd_si256 _mm256_castsi256_pd _mm256_set1_epi64x _mm256_add_epi64 _mm256_sub_epi64
            _mm256_slli_epi64 _mm256_srli_epi64
    }
}
