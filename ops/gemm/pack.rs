//! Packing: slivers as wide as the register tile, row after row, padded with zeros.

use std::cell::Cell;

use kumiki_tensor::prefer_huge_pages;

use crate::simd::{Lanes, Real};

/// Which room of a thread: a product that holds one may need the other.
#[derive(Clone, Copy)]
pub(super) enum Room {
    /// Shared slivers, or a copied vector.
    Outer,
    /// What one tile packs for itself.
    Inner,
}

thread_local! {
    static ROOMS: [Cell<Vec<u64>>; 2] = const { [Cell::new(Vec::new()), Cell::new(Vec::new())] };
}

/// Calls `f` with room for `len` elements, aligned to a cache line and with any contents.
///
/// The room is kept for the thread's next call. It is taken out of its place meanwhile, for a thread that waits for
/// others may run another product in between.
pub(super) fn with_scratch<E: Real, R>(which: Room, len: usize, f: impl FnOnce(*mut E) -> R) -> R {
    const LINE: usize = 64;
    let words = (len * size_of::<E>()).div_ceil(8) + LINE / 8;
    let mut room = ROOMS.with(|rooms| rooms[which as usize].take());
    if room.len() < words {
        room = vec![0; words];
        prefer_huge_pages(room.as_mut_ptr().cast(), words * 8);
    }
    let start = room.as_mut_ptr();
    let shift = start.cast::<u8>().align_offset(LINE) / 8;
    // SAFETY: the shift is at most LINE / 8 words, which were added; any bits are valid elements.
    let result = f(unsafe { start.add(shift) }.cast());
    ROOMS.with(|rooms| rooms[which as usize].set(room));
    result
}

/// Packs `cols` columns of `depth` rows into slivers one after the other, each `depth` rows of `width` elements; the
/// last one is padded with zeros. Element `(p, j)` is at `p * p_stride + j * j_stride`: for B, `p` is a row and `j` a
/// column; for A the other way round.
///
/// Up to [`SLACK`] elements after a sliver are written too, before those after it are.
///
/// # Safety
/// `src` is valid for these elements, `dst` for `depth * cols.next_multiple_of(width)`, and where `width` is not a
/// multiple of `N`, for [`SLACK`] more.
#[inline(always)]
pub(super) unsafe fn slivers<E: Real, L: Lanes<Elem = E>>(
    dst: *mut E,
    width: usize,
    (src, p_stride, j_stride): (*const E, usize, usize),
    depth: usize,
    cols: usize,
) {
    let full = cols / width;
    let whole = width.next_multiple_of(L::N);
    // SAFETY: every access is to row p < depth and column j < cols of the source, or inside the slivers.
    unsafe {
        if j_stride == 1 {
            // A few slivers at once, so that whole cache lines of a row are used when they are read.
            let mut first = 0;
            while first < full {
                let count = SLIVERS_AT_ONCE.min(full - first);
                for p in 0..depth {
                    let row = src.add(p * p_stride + first * width);
                    let place = dst.add(first * width * depth + p * width);
                    for s in 0..count {
                        let (from, to) = (row.add(s * width), place.add(s * width * depth));
                        // Whole vectors where what they read is there, and what they overwrite is still to come.
                        if p + 1 < depth && (first + s) * width + whole <= cols {
                            copy::<E, L>(from, to, whole);
                        } else {
                            copy::<E, L>(from, to, width);
                        }
                    }
                }
                first += count;
            }
        } else {
            for s in 0..full {
                let (from, to) = (src.add(s * width * j_stride), dst.add(s * width * depth));
                let done = if p_stride == 1 { transposed::<E, L>(to, width, from, j_stride, depth) } else { 0 };
                for p in done..depth {
                    let row = from.add(p * p_stride);
                    for j in 0..width {
                        *to.add(p * width + j) = *row.add(j * j_stride);
                    }
                }
            }
        }
        let rest = cols - full * width;
        if rest > 0 {
            let (from, to) = (src.add(full * width * j_stride), dst.add(full * width * depth));
            // Two loops, not one with a choice: of that the compiler makes scattered stores, at AVX-512.
            for p in 0..depth {
                let (row, place) = (from.add(p * p_stride), to.add(p * width));
                for j in 0..rest {
                    *place.add(j) = *row.add(j * j_stride);
                }
                for j in rest..width {
                    *place.add(j) = E::ZERO;
                }
            }
        }
    }
}

const SLIVERS_AT_ONCE: usize = 8;

/// See [`slivers`].
pub(super) const SLACK: usize = 16;

/// Packs one sliver whose columns are contiguous, `N` rows at a time through registers; returns the rows done.
///
/// A row is written as whole vectors: what goes past its end is overwritten by the next row.
///
/// # Safety
/// As [`slivers`], for one full sliver at least `N` elements long in both directions.
#[inline(always)]
unsafe fn transposed<E: Real, L: Lanes<Elem = E>>(
    dst: *mut E,
    width: usize,
    src: *const E,
    j_stride: usize,
    depth: usize,
) -> usize {
    let blocks = width.div_ceil(L::N);
    if blocks > 2 {
        return 0;
    }
    let mut p = 0;
    while p + L::N <= depth {
        let mut block = [[L::splat(E::ZERO); 16]; 2];
        for (v, rows) in block.iter_mut().enumerate().take(blocks) {
            for (r, row) in rows.iter_mut().enumerate().take(L::N.min(width - v * L::N)) {
                // SAFETY: column v * N + r < width, and N rows from p on are left.
                *row = unsafe { L::load_ptr(src.add((v * L::N + r) * j_stride + p)) };
            }
            L::transpose(rows);
        }
        for q in 0..L::N {
            for (v, rows) in block.iter().enumerate().take(blocks) {
                // SAFETY: inside the sliver or its slack, for N - 1 <= SLACK.
                unsafe { rows[q].store_ptr(dst.add((p + q) * width + v * L::N)) };
            }
        }
        p += L::N;
    }
    p
}

/// # Safety
/// Both are valid for `len` elements and do not overlap.
#[inline(always)]
unsafe fn copy<E: Real, L: Lanes<Elem = E>>(from: *const E, to: *mut E, len: usize) {
    let mut j = 0;
    // SAFETY: as the caller warrants.
    unsafe {
        while j + L::N <= len {
            L::load_ptr(from.add(j)).store_ptr(to.add(j));
            j += L::N;
        }
        while j < len {
            *to.add(j) = *from.add(j);
            j += 1;
        }
    }
}
