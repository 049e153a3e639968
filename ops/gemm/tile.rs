//! The register tile, and products small enough to need no packing of A.

#![expect(clippy::needless_range_loop, reason = "loops over the register tile, which the compiler unrolls")]

use crate::simd::{Kernel, Lanes, Real};

use super::pack::{self, Room, with_scratch};
use super::{KC, Product, for_pieces};

/// Where a tile of C goes and how it is combined.
#[derive(Clone, Copy)]
pub(super) struct Target<E> {
    pub c: *mut E,
    pub c_rs: usize,
    pub c_cs: usize,
    pub rows: usize,
    pub cols: usize,
    pub alpha: E,
    pub beta: E,
}

/// The register tile of a level: rows, and vectors per row. What is left holds one row of B and one number of A.
macro_rules! with_tile {
    ($lanes:ident, $function:ident ( $($argument:expr),* )) => {
        match <$lanes as $crate::simd::Lanes>::REGISTERS {
            32 => $function::<E, $lanes, 12, 2>($($argument),*),
            16 => $function::<E, $lanes, 6, 2>($($argument),*),
            _ => $function::<E, $lanes, 4, 1>($($argument),*),
        }
    };
}
pub(super) use with_tile;

/// `C = alpha A B + beta C` for one tile: `H` rows of A (`rows` of them meant; the others repeat the last one) and `V`
/// vectors of columns. With `MASKED`, B's rows end after `cols`; else they are readable to `V * N`.
///
/// # Safety
/// A is valid at `offsets[i] + p * a_cs`, B at `p * b_rs + j`, for `p < k`; the target for its rows and columns.
#[inline(always)]
pub(super) unsafe fn tile<E: Real, L: Lanes<Elem = E>, const H: usize, const V: usize, const MASKED: bool>(
    k: usize,
    (mut a, offsets, a_cs): (*const E, [usize; H], usize),
    (mut b, b_rs): (*const E, usize),
    target: Target<E>,
) {
    let mut acc = [[L::splat(E::ZERO); V]; H];
    for _ in 0..k {
        let mut row = [L::splat(E::ZERO); V];
        for v in 0..V {
            // SAFETY: as the caller warrants.
            row[v] = unsafe {
                if MASKED {
                    let len = target.cols.saturating_sub(v * L::N).min(L::N);
                    L::load_partial_ptr(b.wrapping_add(v * L::N), len, E::ZERO)
                } else {
                    L::load_ptr(b.add(v * L::N))
                }
            };
        }
        for i in 0..H {
            // SAFETY: as the caller warrants.
            let x = L::splat(unsafe { *a.add(offsets[i]) });
            for v in 0..V {
                acc[i][v] = x.mul_add(row[v], acc[i][v]);
            }
        }
        // The step after the last one may leave the slice.
        a = a.wrapping_add(a_cs);
        b = b.wrapping_add(b_rs);
    }
    // SAFETY: as the caller warrants.
    unsafe { write(&acc, target) }
}

/// # Safety
/// The target is valid for its rows and columns.
#[inline(always)]
unsafe fn write<E: Real, L: Lanes<Elem = E>, const H: usize, const V: usize>(acc: &[[L; V]; H], target: Target<E>) {
    let Target { c, c_rs, c_cs, rows, cols, alpha, beta } = target;
    let (alpha, scale) = (L::splat(alpha), L::splat(beta));
    for i in 0..H {
        if i >= rows {
            break;
        }
        for v in 0..V {
            let len = cols.saturating_sub(v * L::N).min(L::N);
            let place = c.wrapping_add(i * c_rs + v * L::N * c_cs);
            // SAFETY: `len` columns from v * N on are inside the target's row i.
            unsafe {
                if c_cs != 1 {
                    scatter(acc[i][v], alpha, beta, place, c_cs, len);
                } else if len == L::N {
                    let old = if beta == E::ZERO { L::splat(E::ZERO) } else { L::load_ptr(place) * scale };
                    acc[i][v].mul_add(alpha, old).store_ptr(place);
                } else if len > 0 {
                    let zero = E::ZERO;
                    let old = if beta == zero { L::splat(zero) } else { L::load_partial_ptr(place, len, zero) * scale };
                    acc[i][v].mul_add(alpha, old).store_partial_ptr(place, len);
                }
            }
        }
    }
}

/// # Safety
/// `c` is valid at `j * c_cs` for `j < len`.
#[inline(always)]
unsafe fn scatter<E: Real, L: Lanes<Elem = E>>(acc: L, alpha: L, beta: E, c: *mut E, c_cs: usize, len: usize) {
    let mut old = [E::ZERO; 16];
    if beta != E::ZERO {
        for j in 0..len {
            // SAFETY: as the caller warrants.
            old[j] = beta * unsafe { *c.add(j * c_cs) };
        }
    }
    let new = acc.mul_add(alpha, L::load(&old)).to_array();
    for j in 0..len {
        // SAFETY: as the caller warrants.
        unsafe { *c.add(j * c_cs) = new[j] };
    }
}

/// So few rows that packing all of B would cost more than it saves.
const IN_PLACE_ROWS: usize = 48;

/// Whether to read A in place, packing B at most one sliver at a time.
pub(super) fn fits<E: Real>(product: &Product<E>) -> bool {
    let &Product { m, n, k, .. } = product;
    m <= IN_PLACE_ROWS || m.saturating_mul(n).saturating_mul(k) <= 64 * 64 * 64
}

pub(super) fn run<E: Real>(product: Product<E>, parallel: bool) {
    let piece = 256;
    let cost = product.m * product.k * piece.min(product.n) / 16;
    for_pieces(product.n, piece, cost, parallel, |from, to| {
        // SAFETY: pieces are disjoint columns.
        let product = unsafe { product.columns(from, to) };
        let run = |sliver: *mut E| {
            // SAFETY: the level is one that level() returned; the sliver's room is as large as that of any level.
            unsafe { E::dispatch_at(product.level, InPlace { product, sliver }) }
        };
        if product.b_cs == 1 { run(std::ptr::null_mut()) } else { with_scratch(Room::Inner, KC * MAX_WIDTH, run) }
    });
}

/// Columns of the widest register tile.
const MAX_WIDTH: usize = 32;

/// `sliver` has room for one packed sliver of B, or is null when B's columns are contiguous.
struct InPlace<E> {
    product: Product<E>,
    sliver: *mut E,
}

impl<E: Real> Kernel<E> for InPlace<E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        // SAFETY: a Product's extents are checked, and the sliver is as in_place needs it.
        unsafe { with_tile!(L, in_place(self.product, self.sliver)) }
    }
}

/// # Safety
/// `sliver` holds KC rows of `V` vectors, unless B's columns are contiguous.
#[inline(always)]
unsafe fn in_place<E: Real, L: Lanes<Elem = E>, const H: usize, const V: usize>(product: Product<E>, sliver: *mut E) {
    let Product { m, n, k, a, a_rs, a_cs, b, b_rs, b_cs, alpha, c, c_rs, c_cs, .. } = product;
    let width = V * L::N;
    let mut p = 0;
    while p < k {
        let depth = KC.min(k - p);
        let beta = if p == 0 { product.beta } else { E::ONE };
        let mut j = 0;
        while j < n {
            let cols = width.min(n - j);
            // SAFETY: row p and column j are inside B, and so on for `depth` rows and `cols` columns.
            let b = unsafe {
                let b = b.add(p * b_rs + j * b_cs);
                if b_cs == 1 {
                    (b, b_rs)
                } else {
                    pack::slivers::<E, L>(sliver, width, (b, b_rs, b_cs), depth, cols);
                    (sliver.cast_const(), width)
                }
            };
            // A packed sliver is padded to its width.
            let masked = b_cs == 1 && cols < width;
            let mut i = 0;
            while i < m {
                let rest = m - i;
                // SAFETY: `rest` rows from i on are inside A and C.
                unsafe {
                    let a = (a.add(i * a_rs + p * a_cs), a_rs, a_cs);
                    let to = Target { c: c.add(i * c_rs + j * c_cs), c_rs, c_cs, rows: rest, cols, alpha, beta };
                    i += if rest >= H || (H > 6 && rest > 6) {
                        rows::<E, L, H, V>(depth, a, b, to, masked)
                    } else if H > 4 && rest > 4 {
                        rows::<E, L, 6, V>(depth, a, b, to, masked)
                    } else if rest > 2 {
                        rows::<E, L, 4, V>(depth, a, b, to, masked)
                    } else {
                        rows::<E, L, 2, V>(depth, a, b, to, masked)
                    };
                }
            }
            j += width;
        }
        p += KC;
    }
}

/// At most `H` of the target's rows; returns their number.
///
/// # Safety
/// As [`tile`], with A's rows `a_rs` apart.
#[inline(always)]
unsafe fn rows<E: Real, L: Lanes<Elem = E>, const H: usize, const V: usize>(
    k: usize,
    (a, a_rs, a_cs): (*const E, usize, usize),
    b: (*const E, usize),
    mut target: Target<E>,
    masked: bool,
) -> usize {
    target.rows = target.rows.min(H);
    let mut offsets = [0; H];
    for (i, offset) in offsets.iter_mut().enumerate() {
        *offset = i.min(target.rows - 1) * a_rs;
    }
    // SAFETY: as the caller warrants.
    unsafe {
        if target.cols <= L::N && V > 1 {
            if masked && target.cols < L::N {
                tile::<E, L, H, 1, true>(k, (a, offsets, a_cs), b, target);
            } else {
                tile::<E, L, H, 1, false>(k, (a, offsets, a_cs), b, target);
            }
        } else if masked {
            tile::<E, L, H, V, true>(k, (a, offsets, a_cs), b, target);
        } else {
            tile::<E, L, H, V, false>(k, (a, offsets, a_cs), b, target);
        }
    }
    target.rows
}
