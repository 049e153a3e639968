//! One row of C: bound by reading B once.

#![expect(clippy::needless_range_loop, reason = "loops over a few registers, which the compiler unrolls")]

use crate::simd::{Kernel, Lanes, Real};

use super::pack::{Room, with_scratch};
use super::{Product, for_pieces};

/// Columns per piece.
const COLUMNS: usize = 512;

/// One row of C, and B contiguous along one of its axes.
pub(super) fn fits<E: Real>(product: &Product<E>) -> bool {
    let by_rows = product.b_cs == 1 && product.c_cs == 1;
    product.m == 1 && (by_rows || product.b_rs == 1)
}

pub(super) fn run<E: Real>(product: Product<E>, parallel: bool) {
    if product.a_cs != 1 && product.k > 1 {
        return with_scratch(Room::Outer, product.k, |a: *mut E| {
            for p in 0..product.k {
                // SAFETY: the room is k elements, and A has k columns.
                unsafe { *a.add(p) = *product.a.add(p * product.a_cs) };
            }
            run(Product { a, a_cs: 1, ..product }, parallel);
        });
    }
    let cost = product.k * COLUMNS.min(product.n) / 8;
    for_pieces(product.n, COLUMNS, cost, parallel, |from, to| {
        // SAFETY: pieces are disjoint columns; the level is one that level() returned.
        unsafe { E::dispatch_at(product.level, Piece(product.columns(from, to))) }
    });
}

struct Piece<E>(Product<E>);

impl<E: Real> Kernel<E> for Piece<E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        // SAFETY: a Product's extents are checked, and A is contiguous.
        unsafe { if self.0.b_cs == 1 && self.0.c_cs == 1 { sums::<E, L>(self.0) } else { dots::<E, L>(self.0) } }
    }
}

/// C as a sum of B's rows, four at a time.
///
/// # Safety
/// A, and the rows of B and C, are contiguous.
#[inline(always)]
unsafe fn sums<E: Real, L: Lanes<Elem = E>>(product: Product<E>) {
    let Product { n, k, alpha, a, b, b_rs, beta, c, .. } = product;
    let mut p = 0;
    while p < k {
        let count = (k - p).min(4);
        let mut x = [L::splat(E::ZERO); 4];
        for q in 0..count {
            // SAFETY: p + q < k.
            x[q] = L::splat(alpha * unsafe { *a.add(p + q) });
        }
        let scale = L::splat(if p == 0 { beta } else { E::ONE });
        let fresh = p == 0 && beta == E::ZERO;
        let mut j = 0;
        while j < n {
            let len = L::N.min(n - j);
            // SAFETY: `len` elements from column j on are inside B's rows and C.
            unsafe {
                let mut sum = if fresh { L::splat(E::ZERO) } else { load::<E, L>(c.add(j), len) * scale };
                if count == 4 {
                    for q in 0..4 {
                        sum = x[q].mul_add(load::<E, L>(b.add((p + q) * b_rs + j), len), sum);
                    }
                } else {
                    for q in 0..count {
                        sum = x[q].mul_add(load::<E, L>(b.add((p + q) * b_rs + j), len), sum);
                    }
                }
                if len == L::N { sum.store_ptr(c.add(j)) } else { sum.store_partial_ptr(c.add(j), len) }
            }
            j += L::N;
        }
        p += 4;
    }
}

/// # Safety
/// `src` is valid for `len` elements, at most `N`.
#[inline(always)]
unsafe fn load<E: Real, L: Lanes<Elem = E>>(src: *const E, len: usize) -> L {
    // SAFETY: as the caller warrants.
    unsafe { if len == L::N { L::load_ptr(src) } else { L::load_partial_ptr(src, len, E::ZERO) } }
}

/// C as dot products with B's columns, four at a time.
///
/// # Safety
/// A and the columns of B are contiguous.
#[inline(always)]
unsafe fn dots<E: Real, L: Lanes<Elem = E>>(product: Product<E>) {
    let n = product.n;
    let mut j = 0;
    // SAFETY: the columns from j on are inside B and C.
    unsafe {
        while j + 4 <= n {
            columns::<E, L, 4>(product, j);
            j += 4;
        }
        while j < n {
            columns::<E, L, 1>(product, j);
            j += 1;
        }
    }
}

/// # Safety
/// As [`dots`], and `j + COLS <= n`.
#[inline(always)]
unsafe fn columns<E: Real, L: Lanes<Elem = E>, const COLS: usize>(product: Product<E>, j: usize) {
    let Product { k, alpha, a, b, b_cs, beta, c, c_cs, .. } = product;
    let mut acc = [[L::splat(E::ZERO); 2]; COLS];
    let mut p = 0;
    while p < k {
        for half in 0..2 {
            let from = p + half * L::N;
            let len = k.saturating_sub(from).min(L::N);
            if len == 0 {
                break;
            }
            // SAFETY: `len` terms from `from` on are inside A and B's columns.
            unsafe {
                let x = load::<E, L>(a.add(from), len);
                for (q, acc) in acc.iter_mut().enumerate() {
                    acc[half] = x.mul_add(load::<E, L>(b.add((j + q) * b_cs + from), len), acc[half]);
                }
            }
        }
        p += 2 * L::N;
    }
    for (q, acc) in acc.iter().enumerate() {
        let sum = alpha * (acc[0] + acc[1]).reduce_sum();
        // SAFETY: column j + q is inside C.
        unsafe {
            let place = c.add((j + q) * c_cs);
            *place = if beta == E::ZERO { sum } else { beta * *place + sum };
        }
    }
}
