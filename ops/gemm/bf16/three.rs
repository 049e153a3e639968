//! Packing of F32 for tiles: every number in three parts of BF16, `x = h + m + l`.
//!
//! `h` is x rounded to 8 digits, `m` the next 8 digits of what is left, `l` the rest: 24 digits, so nothing is lost but
//! what is subnormal. A step of a panel is that of [`pack`](super::pack) for each part, with another order of its terms:
//! pair `p` holds terms `p` and `p + 16`, so that no number has to move to stand beside another.

use std::arch::x86_64::*;

use kumiki_tensor::bf16;

use super::Side;
use super::amx;
use super::blocked::{Block, Form, Panels};
use super::pack::{PANEL, STEP, STEP_LEN, Source, transposed};
use crate::simd::Level;

/// Packed numbers of a step of a panel.
const THREE_LEN: usize = 3 * STEP_LEN;
/// Rows, or pairs, of a tile.
const LINES: usize = STEP / 2;

/// Every number is three; a panel is irregular if it holds some that are not finite.
#[derive(Clone, Copy)]
pub(super) struct Three;

impl Form for Three {
    type Start = *const f32;
    const PARTS: usize = 3;
    const PASS: usize = 128;
    const ONE_PASS: usize = 256;
    const PACKED: usize = 6 << 20;
    const PARALLEL: usize = 1 << 24;

    #[inline]
    unsafe fn panels(
        side: Side,
        dst: *mut bf16,
        source: Source<*const f32>,
        rows: usize,
        terms: usize,
        irregular: &mut [u32],
    ) {
        // SAFETY: as the caller warrants.
        unsafe { panels(side, dst, source, rows, terms, irregular) };
    }

    #[inline]
    unsafe fn block(_: Level, steps: usize, factors: Panels, c: *mut f32, c_stride: usize, add: bool) {
        let Panels { a, b, irregular } = factors;
        // SAFETY: as the caller warrants.
        unsafe {
            if irregular {
                return irregular_block(steps, a, b, c, c_stride, add);
            }
            amx::block_of_three(steps, a, b, c, c_stride, add);
        }
    }
}

/// What is infinite has parts of zero, and infinity times the zero parts of others is NaN. What came out as NaN is the
/// product of the first parts instead, which are infinite, NaN or zero where the numbers are.
#[cold]
unsafe fn irregular_block(steps: usize, a: *const bf16, b: *const bf16, c: *mut f32, c_stride: usize, add: bool) {
    let mut sums = [Block([0.0; PANEL * PANEL]), Block([0.0; PANEL * PANEL])];
    // SAFETY: as the caller of `block` warrants; sums are blocks of 32 x 32.
    unsafe {
        if add {
            for i in 0..PANEL {
                for j in 0..PANEL {
                    let before = *c.add(i * c_stride + j);
                    sums.iter_mut().for_each(|sums| sums.0[i * PANEL + j] = before);
                }
            }
        }
        amx::block_of_three(steps, a, b, sums[0].0.as_mut_ptr(), PANEL, add);
        amx::block(steps, THREE_LEN, a, b, sums[1].0.as_mut_ptr(), PANEL, add);
        for i in 0..PANEL {
            for j in 0..PANEL {
                let [sum, first] = [0, 1].map(|k| sums[k].0[i * PANEL + j]);
                *c.add(i * c_stride + j) = if sum.is_nan() { first } else { sum };
            }
        }
    }
}

/// # Safety
/// As [`Form::panels`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn panels(
    side: Side,
    dst: *mut bf16,
    source: Source<*const f32>,
    rows: usize,
    terms: usize,
    irregular: &mut [u32],
) {
    let steps = terms.div_ceil(STEP);
    irregular.fill(0);
    let pack = |half: usize, step: usize| {
        let (panel, i) = (half / 2, half * LINES);
        let some = rows.saturating_sub(i).min(LINES);
        // SAFETY: the tile is inside its panel; `some` rows and the terms of the step are inside the source.
        let regular = unsafe {
            let to = dst.add((panel * steps + step) * THREE_LEN + half % 2 * LINES * STEP);
            tile(side, to, source.at(i, step * STEP), some, (terms - step * STEP).min(STEP))
        };
        irregular[panel] |= u32::from(!regular);
    };
    source.for_tiles(rows, terms, pack);
}

/// One tile of each part; whether all its numbers are finite.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
unsafe fn tile(side: Side, to: *mut bf16, source: Source<*const f32>, rows: usize, terms: usize) -> bool {
    // A line is a row of A, or a term of all columns of B.
    let (line_stride, along) = match side {
        Side::A => (source.stride, source.term_stride),
        Side::B => (source.term_stride, source.stride),
    };
    // SAFETY: as the caller warrants.
    unsafe {
        if along == 1 && rows == LINES && terms == STEP {
            // Numbers stay in registers.
            let second = if side == Side::A { LINES } else { LINES * source.term_stride };
            let mut left = _mm512_setzero_ps();
            for line in 0..LINES {
                let x = source.start.add(line * line_stride);
                left = store(to, line, _mm512_loadu_ps(x), _mm512_loadu_ps(x.add(second)), left);
            }
            if is_finite(left) {
                return true;
            }
        }
        let (first, second) = (lines(side, source, rows, terms, 0), lines(side, source, rows, terms, 1));
        let mut left = _mm512_setzero_ps();
        for (line, (&x, &y)) in first.iter().zip(&second).enumerate() {
            left = store(to, line, x, y, left);
        }
        if is_finite(left) {
            return true;
        }
        let mut finite = true;
        for (line, (&x, &y)) in first.iter().zip(&second).enumerate() {
            finite &= store_any(to, line, x, y);
        }
        finite
    }
}

/// The lines of 16 terms from `16 half` on, padded with zeros.
#[inline(always)]
unsafe fn lines(side: Side, source: Source<*const f32>, rows: usize, terms: usize, half: usize) -> [__m512; LINES] {
    let Source { start, stride, term_stride } = source.at(0, half * LINES);
    let terms = terms.saturating_sub(half * LINES).min(LINES);
    // SAFETY: the CPU has AVX-512; masks leave out what is not there.
    unsafe {
        let mut lines = [_mm512_setzero_si512(); LINES];
        let mut is_row = true;
        if stride != 1 && term_stride != 1 {
            let mut block = [[0f32; LINES]; LINES];
            for (i, row) in block.iter_mut().enumerate().take(rows) {
                for (p, x) in row.iter_mut().enumerate().take(terms) {
                    *x = *start.add(i * stride + p * term_stride);
                }
            }
            for (line, row) in lines.iter_mut().zip(&block) {
                *line = _mm512_loadu_si512(row.as_ptr().cast());
            }
        } else {
            // What the source has side by side becomes a vector.
            is_row = term_stride == 1;
            let (count, len, step) = if is_row { (rows, terms, stride) } else { (terms, rows, term_stride) };
            let mask = ((1u32 << len) - 1) as u16;
            for (i, line) in lines.iter_mut().enumerate().take(count) {
                *line = _mm512_maskz_loadu_epi32(mask, start.add(i * step).cast());
            }
        }
        if is_row != (side == Side::A) {
            lines = transposed(&lines);
        }
        // Not `map`: what it calls is compiled without AVX-512, call by call.
        let mut numbers = [_mm512_setzero_ps(); LINES];
        for (x, line) in numbers.iter_mut().zip(lines) {
            *x = _mm512_castsi512_ps(line);
        }
        numbers
    }
}

const HIGH: i32 = 0xffff_0000_u32 as i32;

/// Writes a line of finite numbers, each x before its y, and adds what should be nothing but small to `left`: it is NaN
/// once a number was not finite, or too large to be rounded.
#[inline(always)]
unsafe fn store(to: *mut bf16, line: usize, x: __m512, y: __m512, left: __m512) -> __m512 {
    // SAFETY: the CPU has AVX-512, and `to` room for a tile of each part.
    unsafe {
        let high = _mm512_set1_epi32(HIGH);
        let half = _mm512_set1_epi32(0x8000);
        let cut = |x: __m512| _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), high));
        let rounded = |x: __m512| {
            let x = _mm512_add_epi32(_mm512_castps_si512(x), half);
            _mm512_castsi512_ps(_mm512_and_si512(x, high))
        };
        let (hx, hy) = (rounded(x), rounded(y));
        let (x, y) = (_mm512_sub_ps(x, hx), _mm512_sub_ps(y, hy));
        let (mx, my) = (cut(x), cut(y));
        let (lx, ly) = (_mm512_sub_ps(x, mx), _mm512_sub_ps(y, my));
        let to = to.add(line * STEP);
        pair(to, hx, hy);
        pair(to.add(STEP_LEN), mx, my);
        pair(to.add(2 * STEP_LEN), lx, ly);
        _mm512_add_ps(left, _mm512_add_ps(lx, ly))
    }
}

/// The upper halves of x, each before that of its y.
#[inline(always)]
unsafe fn pair(to: *mut bf16, x: __m512, y: __m512) {
    // SAFETY: as [`store`].
    unsafe {
        let (x, y) = (_mm512_srli_epi32::<16>(_mm512_castps_si512(x)), _mm512_castps_si512(y));
        // Where the third is set the second, else the first.
        let both = _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi32(HIGH), y, x);
        _mm512_storeu_si512(to.cast(), both);
    }
}

#[inline(always)]
unsafe fn is_finite(left: __m512) -> bool {
    // SAFETY: the CPU has AVX-512.
    unsafe { _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(left, left) == 0 }
}

/// As [`store`] for any numbers, one after the other: those that rounding would make infinite are cut, and what is not
/// finite is its own `h`. Whether all are finite.
#[cold]
unsafe fn store_any(to: *mut bf16, line: usize, x: __m512, y: __m512) -> bool {
    let mut finite = true;
    // SAFETY: a vector is 16 numbers; `to` has room for a tile of each part.
    unsafe {
        for (second, vector) in [x, y].into_iter().enumerate() {
            for (pair, x) in std::mem::transmute::<__m512, [f32; 16]>(vector).into_iter().enumerate() {
                finite &= x.is_finite();
                let cut = |x: f32| f32::from_bits(x.to_bits() & HIGH as u32);
                let rounded = f32::from_bits(x.to_bits().wrapping_add(0x8000) & HIGH as u32);
                let h = match x {
                    _ if x.is_nan() => f32::NAN, // its upper half alone may be that of infinity
                    _ if rounded.is_finite() => rounded,
                    _ => cut(x),
                };
                let rest = if x.is_finite() { x - h } else { 0.0 };
                let m = cut(rest);
                for (part, x) in [h, m, rest - m].into_iter().enumerate() {
                    let place = to.add(part * STEP_LEN + line * STEP + 2 * pair + second);
                    *place = bf16::from_bits((x.to_bits() >> 16) as u16);
                }
            }
        }
    }
    finite
}
