//! The loops around the blocks of 32 x 32: B is packed, chunk of columns by chunk, then tiles of C, cut by shape alone,
//! run in parallel. A small A is packed once as well; of a large one each tile packs the rows that it needs, pass by
//! pass, so that they never leave its core's cache.

use std::arch::x86_64::*;

use kumiki_tensor::{bf16, threads};

use super::super::pack::{Room, with_scratch};
use super::super::{MatRef, for_pieces};
use super::pack::{PANEL, STEP, STEP_LEN, Side, Source, Start, panels};
use super::{Operand, Output, amx, dot};
use crate::simd::Level;

/// Terms per pass: a panel of B of so many stays in the first cache level.
const PASS: usize = 256;
/// Packed numbers of a chunk of B at most.
const PACKED: usize = 2 << 20;
/// An A of at most so many numbers is packed once.
const SMALL: usize = 1 << 20;
/// Rows of a tile at most, and at least: that many times is a panel of B used when it has come.
const ROWS: usize = 512;
const LEAST: usize = 64;
/// Columns of a tile with several passes: its sums share the second cache level with its rows of A.
const COLUMNS: usize = 512;
/// Panels that are packed together.
const PANELS: usize = 4;

/// A block of sums: 4 KiB.
#[repr(C, align(64))]
struct Block([f32; PANEL * PANEL]);

/// Where C is.
#[derive(Clone, Copy)]
struct Target {
    start: Place,
    row_stride: usize,
    col_stride: usize,
}

#[derive(Clone, Copy)]
enum Place {
    F32(*mut f32),
    BF16(*mut bf16),
}

/// The product of all rows and some columns, B packed.
#[derive(Clone, Copy)]
struct Chunk {
    level: Level,
    m: usize,
    n: usize,
    k: usize,
    a: Source,
    /// All of A packed, or null.
    packed_a: *const bf16,
    packed_b: *const bf16,
    c: Target,
    accumulate: bool,
    parallel: bool,
}

// SAFETY: it stands for shared operands and an exclusive C, of which each tile writes its own part.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

/// The packed panels while they are written, each by one task.
#[derive(Clone, Copy)]
struct Packed(*mut bf16);
// SAFETY: as said.
unsafe impl Send for Packed {}
// SAFETY: as said.
unsafe impl Sync for Packed {}

impl Packed {
    fn at(self, offset: usize) -> *mut bf16 {
        self.0.wrapping_add(offset)
    }
}

fn source(matrix: Operand, side: Side) -> Source {
    fn place<E>(m: &MatRef<E>) -> *const E {
        m.data.as_ptr().wrapping_add(m.offset)
    }
    let (start, rows, cols) = match matrix {
        Operand::F32(m) => (Start::F32(place(&m)), m.row_stride, m.col_stride),
        Operand::BF16(m) => (Start::BF16(place(&m)), m.row_stride, m.col_stride),
    };
    let (stride, term_stride) = if side == Side::A { (rows, cols) } else { (cols, rows) };
    Source { start, stride, term_stride }
}

/// Multiply-adds per unit of [`threads::SERIAL_BELOW`](kumiki_tensor::threads::SERIAL_BELOW).
const PER_UNIT: usize = 128;

/// The caller has checked the extents, that the CPU has `level`, and that no extent is 0.
pub(super) fn run(level: Level, a: Operand, b: Operand, c: Output, accumulate: bool, parallel: bool) {
    let ((m, k), (_, n)) = (a.shape(), b.shape());
    let (a, b) = (source(a, Side::A), source(b, Side::B));
    let (row_stride, col_stride) = c.strides();
    let start = match c {
        Output::F32(c) => Place::F32(c.data.as_mut_ptr().wrapping_add(c.offset)),
        Output::BF16(c) => Place::BF16(c.data.as_mut_ptr().wrapping_add(c.offset)),
    };
    let c = Target { start, row_stride, col_stride };
    let depth = k.next_multiple_of(STEP);
    let cols = (PACKED / depth / PANEL * PANEL).clamp(PANEL, n.next_multiple_of(PANEL));
    let small = m.next_multiple_of(PANEL) * depth;
    // With one pass a tile packs its rows once by itself.
    let small = if k > PASS && small <= SMALL { small } else { 0 };
    with_scratch(Room::Outer, (cols * depth + small).div_ceil(2), |room: *mut f32| {
        let packed_b = room.cast::<bf16>();
        let mut packed_a = std::ptr::null();
        if small > 0 {
            let to = packed_b.wrapping_add(cols * depth);
            pack(Side::A, to, a, m, k, parallel);
            packed_a = to.cast_const();
        }
        for j in (0..n).step_by(cols) {
            let some = cols.min(n - j);
            pack(Side::B, packed_b, b.at(j, 0), some, k, parallel);
            let c = c.at(0, j);
            Chunk { level, m, n: some, k, a, packed_a, packed_b, c, accumulate, parallel }.run();
        }
    });
}

/// Packs all terms of `rows` rows, pass by pass: panels of the first pass, then those of the second.
fn pack(side: Side, to: *mut bf16, source: Source, rows: usize, k: usize, parallel: bool) {
    let to = Packed(to);
    let piece = PANELS * PANEL;
    let padded = rows.next_multiple_of(PANEL);
    for_pieces(rows, piece, piece * k / 16, parallel, |from, until| {
        for p in (0..k).step_by(PASS) {
            let terms = PASS.min(k - p);
            // SAFETY: the level has AVX512-BF16; each piece writes its own panels, which are in the room.
            unsafe {
                let place = to.at(p * padded + from * terms.next_multiple_of(STEP));
                panels(side, place, source.at(from, p), until - from, terms);
            }
        }
    });
}

impl Target {
    fn at(self, i: usize, j: usize) -> Self {
        let offset = i * self.row_stride + j * self.col_stride;
        let start = match self.start {
            Place::F32(c) => Place::F32(c.wrapping_add(offset)),
            Place::BF16(c) => Place::BF16(c.wrapping_add(offset)),
        };
        Self { start, ..self }
    }
}

impl Target {
    /// Asks for the first rows of a block, to write them.
    #[inline]
    fn prefetch(self, rows: usize) {
        for i in 0..rows {
            match self.at(i, 0).start {
                // SAFETY: prefetches of any address are allowed.
                Place::F32(c) => unsafe {
                    _mm_prefetch::<_MM_HINT_ET0>(c.cast());
                    _mm_prefetch::<_MM_HINT_ET0>(c.wrapping_add(16).cast());
                },
                // SAFETY: as above.
                Place::BF16(c) => unsafe { _mm_prefetch::<_MM_HINT_ET0>(c.cast()) },
            }
        }
    }
}

/// Asks for `len` packed numbers that are read soon.
#[inline]
fn prefetch(from: *const bf16, len: usize) {
    for i in (0..len).step_by(32) {
        // SAFETY: prefetches of any address are allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(i).cast()) };
    }
}

impl Chunk {
    fn run(self) {
        // An element is the same chain of sums in any tile, so their size may follow the number of threads.
        let tasks = if self.parallel { 2 * threads::current_threads() } else { 1 };
        let rows = (self.m / tasks).next_multiple_of(PANEL).clamp(LEAST, ROWS);
        let cols = if self.k <= PASS { self.n } else { COLUMNS.min(self.n) };
        let (row_tiles, col_tiles) = (self.m.div_ceil(rows), self.n.div_ceil(cols));
        let cost = rows.min(self.m) * cols * self.k / PER_UNIT;
        for_pieces(row_tiles * col_tiles, 1, cost, self.parallel, |index, _| {
            let (i, j) = (index / col_tiles * rows, index % col_tiles * cols);
            let tile = Tile { chunk: self, rows: (i, self.m.min(i + rows)), cols: (j, self.n.min(j + cols)) };
            // SAFETY: the CPU has the level, which `gemm_bf16` checked; tiles are disjoint.
            unsafe { if self.level == Level::Amx { amx::with_tiles(|| tile.run()) } else { tile.run() } }
        });
    }

    #[inline]
    fn block(&self, steps: usize, a: *const bf16, b: *const bf16, c: *mut f32, c_stride: usize, add: bool) {
        // SAFETY: the CPU has the level, tiles are configured by `run`; Tile::run warrants the rest.
        unsafe {
            if self.level == Level::Amx {
                amx::block(steps, a, b, c, c_stride, add);
            } else {
                dot::block(steps, a, b, c, c_stride, add);
            }
        }
    }
}

/// Rows and columns (from, to) of a chunk's C, cut at panels.
struct Tile {
    chunk: Chunk,
    rows: (usize, usize),
    cols: (usize, usize),
}

impl Tile {
    /// # Safety
    /// The CPU has the chunk's level, with tiles configured; nobody else works on this part of C.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn run(&self) {
        let Tile { chunk, rows, cols } = self;
        let (m, n, k) = (rows.1 - rows.0, cols.1 - cols.0, chunk.k);
        let (row_panels, col_panels) = (m.div_ceil(PANEL), n.div_ceil(PANEL));
        let own_a = chunk.packed_a.is_null();
        let a_len = if own_a { row_panels * PANEL * PASS.min(k.next_multiple_of(STEP)) / 2 } else { 0 };
        // The sums of all blocks are kept from pass to pass; with one pass those of one block do.
        let blocks = if k > PASS { row_panels * col_panels } else { 1 };
        with_scratch(Room::Inner, a_len + blocks * PANEL * PANEL, |room: *mut f32| {
            let (sums, room) = (room.cast::<Block>(), room.wrapping_add(blocks * PANEL * PANEL).cast::<bf16>());
            for p in (0..k).step_by(PASS) {
                let terms = PASS.min(k - p);
                let (steps, last) = (terms.div_ceil(STEP), p + PASS >= k);
                let a = if own_a {
                    // SAFETY: rows from `rows.0` and terms from `p` are in A; the room holds their panels.
                    unsafe { panels(Side::A, room, chunk.a.at(rows.0, p), m, terms) };
                    room.cast_const()
                } else {
                    let padded = chunk.m.next_multiple_of(PANEL);
                    chunk.packed_a.wrapping_add(p * padded + rows.0 * steps * STEP)
                };
                let padded = chunk.n.next_multiple_of(PANEL);
                let b = chunk.packed_b.wrapping_add(p * padded + cols.0 * steps * STEP);
                for j in 0..col_panels {
                    let b = b.wrapping_add(j * steps * STEP_LEN);
                    for i in 0..row_panels {
                        let a = a.wrapping_add(i * steps * STEP_LEN);
                        let c = chunk.c.at(rows.0 + i * PANEL, cols.0 + j * PANEL);
                        let (some_rows, some_cols) = (PANEL.min(m - i * PANEL), PANEL.min(n - j * PANEL));
                        // Writes that wait for their lines would hold up the products: the lines come meanwhile.
                        if last {
                            c.prefetch(some_rows);
                        }
                        let next = b.wrapping_add(steps * STEP_LEN + i * steps * STEP_LEN / row_panels);
                        prefetch(next, steps * STEP_LEN / row_panels);
                        let whole = some_rows == PANEL && some_cols == PANEL && c.col_stride == 1;
                        if let (Place::F32(to), true) = (c.start, k <= PASS && whole && !chunk.accumulate) {
                            chunk.block(steps, a, b, to, c.row_stride, false);
                            continue;
                        }
                        let block = sums.wrapping_add(if k > PASS { j * row_panels + i } else { 0 });
                        chunk.block(steps, a, b, block.cast(), PANEL, p > 0);
                        if last {
                            // SAFETY: the block is written; so many rows and columns of C are this tile's.
                            unsafe { write(&*block, c, some_rows, some_cols, chunk.accumulate) };
                        }
                    }
                }
            }
        });
    }
}

/// Rounds and writes the first rows and columns of a block.
///
/// # Safety
/// The CPU has AVX512-BF16, and C is valid there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn write(block: &Block, c: Target, rows: usize, cols: usize, accumulate: bool) {
    if c.col_stride != 1 {
        for i in 0..rows {
            for j in 0..cols {
                let sum = block.0[i * PANEL + j];
                // SAFETY: as the caller warrants.
                unsafe {
                    match c.at(i, j).start {
                        Place::F32(c) => *c = if accumulate { *c + sum } else { sum },
                        Place::BF16(c) => *c = bf16::from_f32(if accumulate { (*c).to_f32() + sum } else { sum }),
                    }
                }
            }
        }
        return;
    }
    let some = if cols == 32 { u32::MAX } else { (1 << cols) - 1 };
    let halves = [some as u16, (some >> 16) as u16];
    for i in 0..rows {
        // SAFETY: a row of the block is 32 numbers; loads and stores of C are masked to its columns.
        unsafe {
            let row = block.0.as_ptr().add(i * PANEL);
            let mut sums = [_mm512_loadu_ps(row), _mm512_loadu_ps(row.add(16))];
            match c.at(i, 0).start {
                Place::F32(c) => {
                    for ((h, sum), mask) in sums.into_iter().enumerate().zip(halves) {
                        let c = c.wrapping_add(16 * h);
                        let sum = if accumulate { _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, c)) } else { sum };
                        _mm512_mask_storeu_ps(c, mask, sum);
                    }
                }
                Place::BF16(c) => {
                    let c = c.cast::<i16>();
                    if accumulate {
                        for ((h, sum), mask) in sums.iter_mut().enumerate().zip(halves) {
                            let old = _mm256_maskz_loadu_epi16(mask, c.wrapping_add(16 * h));
                            let old = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(old));
                            *sum = _mm512_add_ps(*sum, _mm512_castsi512_ps(old));
                        }
                    }
                    let rounded = _mm512_cvtne2ps_pbh(sums[1], sums[0]);
                    _mm512_mask_storeu_epi16(c, some, std::mem::transmute::<__m512bh, __m512i>(rounded));
                }
            }
        }
    }
}
