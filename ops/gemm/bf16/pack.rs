//! Packing: panels of 32 rows of A (or columns of B), step after step of 32 terms, padded with zeros.
//!
//! A step of a panel is two tiles of 1 KiB, one for each 16 of its rows. A tile of A holds 16 rows of 32 terms; a tile of
//! B holds 16 pairs of terms, each pair for 16 columns: `(2p, j), (2p + 1, j)` side by side, as the instructions take it.

use std::arch::x86_64::*;

use kumiki_tensor::bf16;

use super::blocked::{Form, Panels};
use super::{Side, amx, dot};
use crate::simd::Level;

/// Rows of A, or columns of B, of a panel.
pub(super) const PANEL: usize = 32;
/// Terms of a step.
pub(super) const STEP: usize = 32;
/// Numbers of a tile.
const TILE: usize = 16 * STEP;
/// Numbers of a step of a panel.
pub(super) const STEP_LEN: usize = 2 * TILE;

/// A matrix to pack, seen from its panels: element `(i, p)`, row or column i of the panels and term p, is at
/// `i * stride + p * term_stride`.
#[derive(Clone, Copy)]
pub(super) struct Source<S> {
    pub start: S,
    pub stride: usize,
    pub term_stride: usize,
}

// SAFETY: it stands for a shared slice.
unsafe impl<S> Send for Source<S> {}
// SAFETY: as above.
unsafe impl<S> Sync for Source<S> {}

/// Where the first element is.
pub(super) trait Start: Copy {
    /// So many elements later.
    fn moved(self, offset: usize) -> Self;
}

impl<E> Start for *const E {
    fn moved(self, offset: usize) -> Self {
        self.wrapping_add(offset)
    }
}

/// A start in either storage.
#[derive(Clone, Copy)]
pub(super) enum Stored {
    F32(*const f32),
    BF16(*const bf16),
}

impl Start for Stored {
    fn moved(self, offset: usize) -> Self {
        match self {
            Stored::F32(x) => Stored::F32(x.wrapping_add(offset)),
            Stored::BF16(x) => Stored::BF16(x.wrapping_add(offset)),
        }
    }
}

impl<S: Start> Source<S> {
    /// From element `(i, p)` on.
    pub fn at(self, i: usize, p: usize) -> Self {
        Self { start: self.start.moved(i * self.stride + p * self.term_stride), ..self }
    }

    /// All halves of panels and steps, as lie side by side in memory: it is read along its lines.
    #[inline(always)]
    pub fn for_tiles(self, rows: usize, terms: usize, mut pack: impl FnMut(usize, usize)) {
        let (halves, steps) = (rows.div_ceil(PANEL) * 2, terms.div_ceil(STEP));
        if self.term_stride == 1 {
            (0..halves).for_each(|half| (0..steps).for_each(|step| pack(half, step)));
        } else {
            (0..steps).for_each(|step| (0..halves).for_each(|half| pack(half, step)));
        }
    }
}

/// Every number is one, rounded if need be.
#[derive(Clone, Copy)]
pub(super) struct One;

impl Form for One {
    type Start = Stored;
    const PARTS: usize = 1;
    const PASS: usize = 256;
    const ONE_PASS: usize = 256;
    const PACKED: usize = 2 << 20;
    const PARALLEL: usize = 1 << 27;

    #[inline]
    unsafe fn panels(
        side: Side,
        dst: *mut bf16,
        source: Source<Stored>,
        rows: usize,
        terms: usize,
        irregular: &mut [u32],
    ) {
        irregular.fill(0);
        // SAFETY: as the caller warrants.
        unsafe { panels(side, dst, source, rows, terms) };
    }

    #[inline]
    unsafe fn block(level: Level, steps: usize, Panels { a, b, .. }: Panels, c: *mut f32, c_stride: usize, add: bool) {
        // SAFETY: as the caller warrants.
        unsafe {
            if level == Level::Amx {
                amx::block(steps, STEP_LEN, a, b, c, c_stride, add);
            } else {
                dot::block(steps, a, b, c, c_stride, add);
            }
        }
    }
}

/// Packs `rows` rows (of A; columns of B) of `terms` terms into panels of `terms` rounded up to whole steps.
///
/// # Safety
/// The CPU has AVX512-BF16, the source holds these elements, and `dst` has room for whole panels.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn panels(side: Side, dst: *mut bf16, source: Source<Stored>, rows: usize, terms: usize) {
    let steps = terms.div_ceil(STEP);
    let pack = |half: usize, step: usize| {
        let i = half * 16;
        let to = dst.wrapping_add((half / 2 * steps + step) * STEP_LEN + half % 2 * TILE);
        let (some, terms) = (rows.saturating_sub(i).min(16), (terms - step * STEP).min(STEP));
        // SAFETY: the tile is inside its panel; so many rows and terms from there on are inside the source.
        unsafe { tile(side, to, source.at(i, step * STEP), some, terms) };
    };
    source.for_tiles(rows, terms, pack);
}

/// One tile: 16 rows, `rows` of them there, and 32 terms, `terms` of them there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
unsafe fn tile(side: Side, to: *mut bf16, source: Source<Stored>, rows: usize, terms: usize) {
    // SAFETY: as the caller warrants.
    unsafe {
        match source.start {
            Stored::F32(x) if source.term_stride == 1 => by_rows(side, to, x, source.stride, rows, terms),
            Stored::BF16(x) if source.term_stride == 1 => by_rows(side, to, x, source.stride, rows, terms),
            Stored::F32(x) if source.stride == 1 => by_terms(side, to, x, source.term_stride, rows, terms),
            Stored::BF16(x) if source.stride == 1 => by_terms(side, to, x, source.term_stride, rows, terms),
            _ => store(to, &one_by_one(source, rows, terms), side == Side::B),
        }
    }
}

/// Writes a tile as it is, or transposed.
#[inline(always)]
unsafe fn store(to: *mut bf16, block: &[__m512i; 16], turned: bool) {
    // SAFETY: `to` has room for a tile.
    unsafe {
        if turned {
            return store_transposed(to, block);
        }
        for (i, &row) in block.iter().enumerate() {
            _mm512_storeu_si512(to.add(i * STEP).cast(), row);
        }
    }
}

/// An element of the source: vectors of it become vectors of BF16.
trait Number: Copy {
    /// The first `len` of 32 numbers side by side, then zeros.
    ///
    /// # Safety
    /// The CPU has AVX512-BF16, and so many numbers are there.
    unsafe fn row(x: *const Self, len: usize) -> __m512i;
    /// The first `len` of 16 numbers at `x`, and of 16 at `y`, one after the other; nothing is read where it is 0.
    ///
    /// # Safety
    /// As [`Number::row`].
    unsafe fn two(x: *const Self, x_len: usize, y: *const Self, y_len: usize) -> __m512i;
}

impl Number for f32 {
    #[inline(always)]
    unsafe fn row(x: *const f32, len: usize) -> __m512i {
        // SAFETY: as the caller warrants.
        unsafe { f32::two(x, len.min(16), x.wrapping_add(16), len.saturating_sub(16)) }
    }
    #[inline(always)]
    unsafe fn two(x: *const f32, x_len: usize, y: *const f32, y_len: usize) -> __m512i {
        // SAFETY: masks leave out what is not there; the vectors are 512 bits of any kind.
        unsafe {
            let x = _mm512_maskz_loadu_ps(first(x_len) as u16, x);
            let y = _mm512_maskz_loadu_ps(first(y_len) as u16, y);
            std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(y, x))
        }
    }
}

impl Number for bf16 {
    #[inline(always)]
    unsafe fn row(x: *const bf16, len: usize) -> __m512i {
        // SAFETY: the mask leaves out what is not there.
        unsafe { _mm512_maskz_loadu_epi16(first(len), x.cast()) }
    }
    #[inline(always)]
    unsafe fn two(x: *const bf16, x_len: usize, y: *const bf16, y_len: usize) -> __m512i {
        // SAFETY: as above.
        unsafe {
            let x = _mm256_maskz_loadu_epi16(first(x_len) as u16, x.cast());
            let y = _mm256_maskz_loadu_epi16(first(y_len) as u16, y.cast());
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(x), y)
        }
    }
}

/// Rows whose terms are side by side, which is a tile of A; transposed, of B.
#[inline(always)]
unsafe fn by_rows<N: Number>(side: Side, to: *mut bf16, x: *const N, stride: usize, rows: usize, terms: usize) {
    // SAFETY: as the caller of `tile` warrants.
    unsafe {
        // Whole tiles apart: their numbers stay in registers.
        if rows == 16 && terms == STEP && side == Side::A {
            for i in 0..16 {
                _mm512_storeu_si512(to.add(i * STEP).cast(), N::row(x.add(i * stride), STEP));
            }
            return;
        }
        let mut block = [_mm512_setzero_si512(); 16];
        if rows == 16 && terms == STEP {
            for (i, row) in block.iter_mut().enumerate() {
                *row = N::row(x.add(i * stride), STEP);
            }
            return store(to, &block, true);
        }
        for (i, row) in block.iter_mut().enumerate().take(rows) {
            *row = N::row(x.add(i * stride), terms);
        }
        store(to, &block, side == Side::B);
    }
}

/// Terms whose rows are side by side, which is a tile of B once each number stands next to that of the following term;
/// transposed, of A.
#[inline(always)]
unsafe fn by_terms<N: Number>(side: Side, to: *mut bf16, x: *const N, stride: usize, rows: usize, terms: usize) {
    // SAFETY: as above.
    unsafe {
        let order = pairs();
        if rows == 16 && terms == STEP && side == Side::B {
            for pair in 0..16 {
                let x = x.add(2 * pair * stride);
                let both = _mm512_permutexvar_epi16(order, N::two(x, 16, x.add(stride), 16));
                _mm512_storeu_si512(to.add(pair * STEP).cast(), both);
            }
            return;
        }
        let mut block = [_mm512_setzero_si512(); 16];
        if rows == 16 && terms == STEP {
            for (pair, both) in block.iter_mut().enumerate() {
                let x = x.add(2 * pair * stride);
                *both = _mm512_permutexvar_epi16(order, N::two(x, 16, x.add(stride), 16));
            }
            return store(to, &block, true);
        }
        for (pair, both) in block.iter_mut().enumerate().take(terms.div_ceil(2)) {
            let x = x.add(2 * pair * stride);
            let second = if 2 * pair + 1 < terms { rows } else { 0 };
            *both = _mm512_permutexvar_epi16(order, N::two(x, rows, x.wrapping_add(stride), second));
        }
        store(to, &block, side == Side::A);
    }
}

/// Neither side by side, as a tile of A.
#[cold]
unsafe fn one_by_one(source: Source<Stored>, rows: usize, terms: usize) -> [__m512i; 16] {
    let mut numbers = [bf16::ZERO; TILE];
    for i in 0..rows {
        for p in 0..terms {
            // SAFETY: as the caller of `tile` warrants.
            numbers[i * STEP + p] = unsafe {
                match source.at(i, p).start {
                    Stored::F32(x) => bf16::from_f32(*x),
                    Stored::BF16(x) => *x,
                }
            };
        }
    }
    // SAFETY: both are 1 KiB of any kind.
    unsafe { std::mem::transmute(numbers) }
}

/// A mask of the first `len` of at most 32.
#[inline(always)]
fn first(len: usize) -> u32 {
    if len >= 32 { u32::MAX } else { (1 << len) - 1 }
}

/// Number `i` next to number `16 + i`.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn pairs() -> __m512i {
    const ORDER: [i16; 32] = {
        let mut order = [0; 32];
        let mut i = 0;
        while i < 32 {
            order[i] = (i / 2 + i % 2 * 16) as i16;
            i += 1;
        }
        order
    };
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) }
}

#[inline(always)]
unsafe fn store_transposed(to: *mut bf16, rows: &[__m512i; 16]) {
    // SAFETY: the CPU has AVX-512, and `to` room for a tile.
    unsafe {
        for (i, column) in transposed(rows).into_iter().enumerate() {
            _mm512_storeu_si512(to.add(i * STEP).cast(), column);
        }
    }
}

/// Transposes 16 x 16 words of four bytes, first within the 128-bit blocks of four rows, then the blocks.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
pub(super) unsafe fn transposed(rows: &[__m512i; 16]) -> [__m512i; 16] {
    // SAFETY: as the caller warrants.
    unsafe {
        let mut columns = [_mm512_setzero_si512(); 16];
        for g in [0, 4, 8, 12] {
            let [r0, r1, r2, r3] = [rows[g], rows[g + 1], rows[g + 2], rows[g + 3]];
            let (low01, high01) = (_mm512_unpacklo_epi32(r0, r1), _mm512_unpackhi_epi32(r0, r1));
            let (low23, high23) = (_mm512_unpacklo_epi32(r2, r3), _mm512_unpackhi_epi32(r2, r3));
            columns[g] = _mm512_unpacklo_epi64(low01, low23);
            columns[g + 1] = _mm512_unpackhi_epi64(low01, low23);
            columns[g + 2] = _mm512_unpacklo_epi64(high01, high23);
            columns[g + 3] = _mm512_unpackhi_epi64(high01, high23);
        }
        let mut lines = columns;
        for c in 0..4 {
            let [c0, c1, c2, c3] = [columns[c], columns[c + 4], columns[c + 8], columns[c + 12]];
            let (even01, odd01) = (_mm512_shuffle_i32x4::<0x88>(c0, c1), _mm512_shuffle_i32x4::<0xdd>(c0, c1));
            let (even23, odd23) = (_mm512_shuffle_i32x4::<0x88>(c2, c3), _mm512_shuffle_i32x4::<0xdd>(c2, c3));
            lines[c] = _mm512_shuffle_i32x4::<0x88>(even01, even23);
            lines[c + 4] = _mm512_shuffle_i32x4::<0x88>(odd01, odd23);
            lines[c + 8] = _mm512_shuffle_i32x4::<0xdd>(even01, even23);
            lines[c + 12] = _mm512_shuffle_i32x4::<0xdd>(odd01, odd23);
        }
        lines
    }
}
