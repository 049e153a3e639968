//! The loops around the blocks of 32 x 32: B is packed, chunk of columns by chunk, then tiles of C, cut by shape alone,
//! run in parallel. A small A is packed once as well; of a large one each tile packs the rows that it needs, pass by
//! pass, so that they never leave its core's cache.

use std::arch::x86_64::*;
use std::slice::{from_raw_parts, from_raw_parts_mut};

use kumiki_tensor::{bf16, threads};

use super::super::for_pieces;
use super::super::pack::{Room, with_scratch};
use super::Side;
use super::amx;
use super::pack::{PANEL, STEP, STEP_LEN, Source, Start, transposed};
use crate::simd::Level;

/// An A of at most so many packed numbers is packed once.
const SMALL: usize = 1 << 20;
/// Rows of a tile at most, and at least: that many times is a panel of B used when it has come.
const ROWS: usize = 512;
const LEAST: usize = 64;
/// Columns of a tile with several passes: its sums share the second cache level with its rows of A.
const COLUMNS: usize = 512;
/// Panels that are packed together.
const PANELS: usize = 4;

/// How numbers are packed, and how blocks of them are multiplied.
pub(super) trait Form: Copy + Send + Sync {
    /// Where a matrix to pack begins.
    type Start: Start;
    /// Packed numbers for each number.
    const PARTS: usize;
    /// Terms per pass: a panel of B of so many stays in the first cache level.
    const PASS: usize;
    /// Terms that are done in one pass, without keeping sums: at least [`Form::PASS`].
    const ONE_PASS: usize;
    /// Packed numbers of a chunk of B at most.
    const PACKED: usize;
    /// Multiply-adds on tiles from which on a product of several passes is for more than one thread: the terms of each element
    /// come from other caches then, which takes longer than so few products.
    const PARALLEL: usize;

    /// Packs `rows` rows of `terms` terms into panels of whole steps; `irregular`, one for each panel, says what
    /// [`Form::block`] must know about it.
    ///
    /// # Safety
    /// The CPU has AVX512-BF16, the source holds these elements, and `dst` has room for whole panels.
    unsafe fn panels(
        side: Side,
        dst: *mut bf16,
        source: Source<Self::Start>,
        rows: usize,
        terms: usize,
        irregular: &mut [u32],
    );

    /// `c[32, 32] = a b`, or `c += a b`, of one panel of A and one of B over `steps` steps.
    ///
    /// # Safety
    /// The CPU has the level, with tiles configured; the panels hold `steps > 0` steps, and `c` is valid.
    unsafe fn block(level: Level, steps: usize, factors: Panels, c: *mut f32, c_stride: usize, add: bool);
}

/// Terms per pass of a product of `k`.
fn pass<F: Form>(k: usize) -> usize {
    if k <= F::ONE_PASS { F::ONE_PASS } else { F::PASS }
}

/// A panel of A and one of B.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    pub a: *const bf16,
    pub b: *const bf16,
    pub irregular: bool,
}

/// A block of sums: 4 KiB.
#[repr(C, align(64))]
pub(super) struct Block(pub [f32; PANEL * PANEL]);

impl Block {
    #[target_feature(enable = "avx512f")]
    fn transposed(&self) -> Block {
        let mut to = Block([0.0; PANEL * PANEL]);
        for (i, j) in [(0, 0), (0, 16), (16, 0), (16, 16)] {
            // SAFETY: the CPU has AVX-512; a quarter is 16 rows of 16 numbers, inside of the block.
            unsafe {
                let mut quarter = [_mm512_setzero_si512(); 16];
                for (r, row) in quarter.iter_mut().enumerate() {
                    *row = _mm512_loadu_si512(self.0.as_ptr().add((i + r) * PANEL + j).cast());
                }
                for (r, row) in transposed(&quarter).into_iter().enumerate() {
                    _mm512_storeu_si512(to.0.as_mut_ptr().add((j + r) * PANEL + i).cast(), row);
                }
            }
        }
        to
    }
}

/// Where C is.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub start: Place,
    pub row_stride: usize,
    pub col_stride: usize,
}

#[derive(Clone, Copy)]
pub(super) enum Place {
    F32(*mut f32),
    BF16(*mut bf16),
}

/// The product of all rows and some columns, B packed.
#[derive(Clone, Copy)]
struct Chunk<F: Form> {
    level: Level,
    m: usize,
    n: usize,
    k: usize,
    a: Source<F::Start>,
    /// All of A packed, or none.
    packed_a: Option<Packed>,
    packed_b: Packed,
    c: Target,
    accumulate: bool,
    parallel: bool,
}

// SAFETY: it stands for shared operands and an exclusive C, of which each tile writes its own part.
unsafe impl<F: Form> Send for Chunk<F> {}
// SAFETY: as above.
unsafe impl<F: Form> Sync for Chunk<F> {}

/// Packed panels, pass after pass, and what is irregular about each. While they are written, each is by one task.
#[derive(Clone, Copy)]
struct Packed {
    numbers: *mut bf16,
    irregular: *mut u32,
    panels: usize,
    /// Terms of a pass.
    pass: usize,
}
// SAFETY: as said.
unsafe impl Send for Packed {}
// SAFETY: as said.
unsafe impl Sync for Packed {}

impl Packed {
    /// Room in words of four bytes.
    fn words<F: Form>(panels: usize, k: usize) -> usize {
        panels * (k.div_ceil(STEP) * F::PARTS * STEP_LEN / 2 + k.div_ceil(pass::<F>(k))).next_multiple_of(16)
    }

    /// At the start of a room of [`Packed::words`].
    fn new<F: Form>(room: *mut f32, panels: usize, k: usize) -> Self {
        let numbers = room.cast::<bf16>();
        let irregular = room.wrapping_add(panels * k.div_ceil(STEP) * F::PARTS * STEP_LEN / 2).cast();
        Self { numbers, irregular, panels, pass: pass::<F>(k) }
    }

    /// From a panel on, in the pass that begins with term `p` and has so many steps.
    fn at<F: Form>(self, p: usize, steps: usize, panel: usize) -> (*mut bf16, *mut u32) {
        let numbers = (p / STEP * self.panels + panel * steps) * F::PARTS * STEP_LEN;
        (self.numbers.wrapping_add(numbers), self.irregular.wrapping_add(p / self.pass * self.panels + panel))
    }
}

/// Multiply-adds per unit of [`threads::SERIAL_BELOW`](kumiki_tensor::threads::SERIAL_BELOW).
const PER_UNIT: usize = 128;

/// A whole product.
#[derive(Clone, Copy)]
pub(super) struct Job<F: Form> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Source<F::Start>,
    pub b: Source<F::Start>,
    pub c: Target,
    pub accumulate: bool,
    pub parallel: bool,
}

impl<F: Form> Job<F> {
    fn transposed(self) -> Self {
        Self { m: self.n, n: self.m, a: self.b, b: self.a, c: self.c.transposed(), ..self }
    }
}

/// The caller has checked the extents, that the CPU has `level`, and that no extent is 0.
pub(super) fn run<F: Form>(level: Level, job: Job<F>) {
    // Rows are packed where they are used, and stay in that core's cache: a wide product is the transposed of a high one.
    let wide = job.k > F::ONE_PASS && job.n > 2 * job.m;
    let Job { m, n, k, a, b, c, accumulate, parallel } = if wide { job.transposed() } else { job };
    let worth = k <= F::ONE_PASS || level != Level::Amx || m.saturating_mul(n).saturating_mul(k) >= F::PARALLEL;
    let parallel = parallel && worth;
    let (row_panels, col_panels) = (m.div_ceil(PANEL), n.div_ceil(PANEL));
    let panel_len = k.div_ceil(STEP) * F::PARTS * STEP_LEN;
    let chunk = (F::PACKED / panel_len).clamp(1, col_panels);
    // With one pass, or one tile side by side, a tile packs its rows once by itself.
    let once = k > F::ONE_PASS && n > COLUMNS && row_panels * panel_len <= SMALL;
    let b_words = Packed::words::<F>(chunk, k);
    let a_words = if once { Packed::words::<F>(row_panels, k) } else { 0 };
    with_scratch(Room::Outer, b_words + a_words, |room: *mut f32| {
        let packed_a = once.then(|| {
            let to = Packed::new::<F>(room.wrapping_add(b_words), row_panels, k);
            pack::<F>(Side::A, to, a, m, k, parallel);
            to
        });
        for j in (0..n).step_by(chunk * PANEL) {
            let n = (chunk * PANEL).min(n - j);
            let packed_b = Packed::new::<F>(room, n.div_ceil(PANEL), k);
            pack::<F>(Side::B, packed_b, b.at(j, 0), n, k, parallel);
            let c = c.at(0, j);
            Chunk::<F> { level, m, n, k, a, packed_a, packed_b, c, accumulate, parallel }.run();
        }
    });
}

/// Packs all terms of `rows` rows, pass by pass: panels of the first pass, then those of the second.
fn pack<F: Form>(side: Side, to: Packed, source: Source<F::Start>, rows: usize, k: usize, parallel: bool) {
    let piece = PANELS * PANEL;
    for_pieces(rows, piece, piece * k * F::PARTS / 16, parallel, |from, until| {
        for p in (0..k).step_by(to.pass) {
            let terms = to.pass.min(k - p);
            let (numbers, irregular) = to.at::<F>(p, terms.div_ceil(STEP), from / PANEL);
            // SAFETY: the level has AVX512-BF16; each piece writes its own panels, which are in the room.
            unsafe {
                let irregular = from_raw_parts_mut(irregular, (until - from).div_ceil(PANEL));
                F::panels(side, numbers, source.at(from, p), until - from, terms, irregular);
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

    fn transposed(self) -> Self {
        Self { row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// Asks for the first rows and columns of a block, to write them.
    #[inline]
    fn prefetch(self, rows: usize, cols: usize) {
        let by_columns = self.col_stride != 1 && self.row_stride == 1;
        let (c, lines) = if by_columns { (self.transposed(), cols) } else { (self, rows) };
        for i in 0..lines {
            match c.at(i, 0).start {
                // SAFETY: prefetches of any address are allowed.
                Place::F32(c) => unsafe {
                    _mm_prefetch::<_MM_HINT_ET0>(c.cast());
                    _mm_prefetch::<_MM_HINT_ET0>(c.wrapping_add(16).cast());
                    _mm_prefetch::<_MM_HINT_ET0>(c.wrapping_add(PANEL - 1).cast());
                },
                // SAFETY: as above.
                Place::BF16(c) => unsafe {
                    _mm_prefetch::<_MM_HINT_ET0>(c.cast());
                    _mm_prefetch::<_MM_HINT_ET0>(c.wrapping_add(PANEL - 1).cast());
                },
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

impl<F: Form> Chunk<F> {
    fn run(self) {
        // An element is the same chain of sums in any tile, so their size may follow the number of threads.
        let tasks = if self.parallel { 2 * threads::current_threads() } else { 1 };
        let (mut rows, mut cols) = (ROWS, if self.k <= F::ONE_PASS { self.n } else { COLUMNS.min(self.n) });
        // Fewer columns first, if a tile has sums of its own: a panel of B that few rows use has come for little.
        if self.k > F::ONE_PASS {
            while self.m.div_ceil(rows) * self.n.div_ceil(cols) < tasks && cols > 4 * PANEL {
                cols = (cols / 2).next_multiple_of(PANEL);
            }
        }
        rows = (self.m / tasks.div_ceil(self.n.div_ceil(cols))).next_multiple_of(PANEL).clamp(LEAST, rows);
        let (row_tiles, col_tiles) = (self.m.div_ceil(rows), self.n.div_ceil(cols));
        let cost = rows.min(self.m) * cols * self.k / PER_UNIT;
        for_pieces(row_tiles * col_tiles, 1, cost, self.parallel, |index, _| {
            let (i, j) = (index / col_tiles * rows, index % col_tiles * cols);
            let tile = Tile { chunk: self, rows: (i, self.m.min(i + rows)), cols: (j, self.n.min(j + cols)) };
            // SAFETY: the CPU has the level, which the caller of `run` checked; tiles are disjoint.
            unsafe { if self.level == Level::Amx { amx::with_tiles(|| tile.run()) } else { tile.run() } }
        });
    }
}

/// Rows and columns (from, to) of a chunk's C, cut at panels.
struct Tile<F: Form> {
    chunk: Chunk<F>,
    rows: (usize, usize),
    cols: (usize, usize),
}

impl<F: Form> Tile<F> {
    /// # Safety
    /// The CPU has the chunk's level, with tiles configured; nobody else works on this part of C.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn run(&self) {
        let Tile { chunk, rows, cols } = self;
        let (m, n, k) = (rows.1 - rows.0, cols.1 - cols.0, chunk.k);
        let (row_panels, col_panels) = (m.div_ceil(PANEL), n.div_ceil(PANEL));
        let one_pass = k <= F::ONE_PASS;
        let pass = chunk.packed_b.pass;
        let a_words = if chunk.packed_a.is_some() { 0 } else { Packed::words::<F>(row_panels, pass.min(k)) };
        // The sums of all blocks are kept from pass to pass; with one pass those of one block do.
        let blocks = if one_pass { 1 } else { row_panels * col_panels };
        with_scratch(Room::Inner, a_words + blocks * PANEL * PANEL, |room: *mut f32| {
            let (sums, room) = (room.cast::<Block>(), room.wrapping_add(blocks * PANEL * PANEL));
            for p in (0..k).step_by(pass) {
                let terms = pass.min(k - p);
                let (steps, last) = (terms.div_ceil(STEP), p + pass >= k);
                let panel_len = steps * F::PARTS * STEP_LEN;
                let (a, a_irregular) = match chunk.packed_a {
                    Some(packed) => packed.at::<F>(p, steps, rows.0 / PANEL),
                    None => {
                        let own = Packed::new::<F>(room, row_panels, pass.min(k)).at::<F>(0, steps, 0);
                        // SAFETY: rows from `rows.0` and terms from `p` are in A; the room holds their panels.
                        unsafe {
                            let irregular = from_raw_parts_mut(own.1, row_panels);
                            F::panels(Side::A, own.0, chunk.a.at(rows.0, p), m, terms, irregular);
                        }
                        own
                    }
                };
                let (b, b_irregular) = chunk.packed_b.at::<F>(p, steps, cols.0 / PANEL);
                // SAFETY: packing has written both.
                let (a_irregular, b_irregular) =
                    unsafe { (from_raw_parts(a_irregular, row_panels), from_raw_parts(b_irregular, col_panels)) };
                for (j, b_irregular) in b_irregular.iter().enumerate() {
                    let b = b.wrapping_add(j * panel_len);
                    for (i, a_irregular) in a_irregular.iter().enumerate() {
                        let a = a.wrapping_add(i * panel_len);
                        let irregular = a_irregular | b_irregular != 0;
                        let factors = Panels { a, b, irregular };
                        let c = chunk.c.at(rows.0 + i * PANEL, cols.0 + j * PANEL);
                        let (some_rows, some_cols) = (PANEL.min(m - i * PANEL), PANEL.min(n - j * PANEL));
                        // Writes that wait for their lines would hold up the products: the lines come meanwhile.
                        if last {
                            c.prefetch(some_rows, some_cols);
                        }
                        prefetch(b.wrapping_add(panel_len + i * panel_len / row_panels), panel_len / row_panels);
                        let whole = some_rows == PANEL && some_cols == PANEL && c.col_stride == 1;
                        if let (Place::F32(to), true) = (c.start, one_pass && whole && !chunk.accumulate) {
                            // SAFETY: the CPU has the level, with tiles configured; the panels are packed, and
                            // this block of C is the tile's.
                            unsafe { F::block(chunk.level, steps, factors, to, c.row_stride, false) };
                            continue;
                        }
                        let block = sums.wrapping_add(if one_pass { 0 } else { j * row_panels + i });
                        // SAFETY: as above; so many rows and columns of C are this tile's.
                        unsafe {
                            F::block(chunk.level, steps, factors, block.cast(), PANEL, p > 0);
                            if last {
                                write(&*block, c, some_rows, some_cols, chunk.accumulate);
                            }
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
    if c.col_stride != 1 && c.row_stride == 1 {
        // SAFETY: as the caller warrants.
        return unsafe { write(&block.transposed(), c.transposed(), cols, rows, accumulate) };
    }
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
