//! Packing: slivers as wide as the register tile, row after row, padded with zeros.

use std::cell::Cell;

use crate::simd::{Lanes, Real};

thread_local! {
    static SCRATCH: Cell<Vec<u64>> = const { Cell::new(Vec::new()) };
}

/// Calls `f` with room for `len` elements, aligned to a cache line and with any contents.
///
/// The room is kept for the thread's next call. It is taken out of its place meanwhile, for a thread that waits for
/// others may run another product in between.
pub(super) fn with_scratch<E: Real, R>(len: usize, f: impl FnOnce(*mut E) -> R) -> R {
    const LINE: usize = 64;
    let words = (len * size_of::<E>()).div_ceil(8) + LINE / 8;
    let mut room = SCRATCH.take();
    if room.len() < words {
        room = vec![0; words];
    }
    let start = room.as_mut_ptr();
    let shift = start.cast::<u8>().align_offset(LINE) / 8;
    // SAFETY: the shift is at most LINE / 8 words, which were added; any bits are valid elements.
    let result = f(unsafe { start.add(shift) }.cast());
    SCRATCH.set(room);
    result
}

/// Writes `depth` rows of `width` elements: element `(p, j)` of the source for `j < cols`, then zeros.
///
/// For B, `p` is a row and `j` a column; for A, `p` is a column and `j` a row.
///
/// # Safety
/// `dst` is valid for `depth * width` elements, `src` at `p * p_stride + j * j_stride`; `cols <= width`, a multiple of
/// nothing in particular.
#[inline(always)]
pub(super) unsafe fn sliver<E: Real, L: Lanes<Elem = E>>(
    dst: *mut E,
    width: usize,
    (src, p_stride, j_stride): (*const E, usize, usize),
    depth: usize,
    cols: usize,
) {
    // SAFETY: every access is to row p < depth and column j < cols of the source, or j < width of the destination.
    unsafe {
        if cols < width {
            for p in 0..depth {
                for j in cols..width {
                    *dst.add(p * width + j) = E::ZERO;
                }
            }
        }
        if j_stride == 1 {
            for p in 0..depth {
                let (from, to) = (src.add(p * p_stride), dst.add(p * width));
                let mut j = 0;
                while j + L::N <= cols {
                    L::load_ptr(from.add(j)).store_ptr(to.add(j));
                    j += L::N;
                }
                while j < cols {
                    *to.add(j) = *from.add(j);
                    j += 1;
                }
            }
        } else {
            for j in 0..cols {
                let from = src.add(j * j_stride);
                for p in 0..depth {
                    *dst.add(p * width + j) = *from.add(p * p_stride);
                }
            }
        }
    }
}
