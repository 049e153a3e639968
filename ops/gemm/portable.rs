//! Large products where no level of our own fits the CPU: tiles of C, cut by shape alone, run in parallel, each with the
//! kernels of `matrixmultiply`, which are tuned for CPUs that we do not write lanes for (NEON, plain AVX and SSE2).

use std::any::TypeId;

use crate::simd::Real;

use super::{Product, for_pieces};

/// Rows and columns of a tile: enough that packing both sides again for every tile costs little.
const ROWS: usize = 192;
const COLUMNS: usize = 512;

pub(super) fn run<E: Real>(product: Product<E>, parallel: bool) {
    let Product { m, n, k, .. } = product;
    let row_tiles = m.div_ceil(ROWS);
    for_pieces(row_tiles * n.div_ceil(COLUMNS), 1, ROWS * COLUMNS.min(n) * k / 16, parallel, |index, _| {
        // SAFETY: the index is that of a tile; tiles are disjoint.
        unsafe { multiply(&tile(product, index % row_tiles * ROWS, index / row_tiles * COLUMNS)) };
    });
}

/// The part of a product that begins at element (i, j) of C.
///
/// # Safety
/// (i, j) must be an element of C.
unsafe fn tile<E: Real>(product: Product<E>, i: usize, j: usize) -> Product<E> {
    // SAFETY: so (i, 0) is an element of A, and (0, j) of B.
    unsafe {
        Product {
            m: ROWS.min(product.m - i),
            n: COLUMNS.min(product.n - j),
            a: product.a.add(i * product.a_rs),
            b: product.b.add(j * product.b_cs),
            c: product.c.add(i * product.c_rs + j * product.c_cs),
            ..product
        }
    }
}

/// # Safety
/// As for a [`Product`]: its elements are inside what it points to, those of C distinct and held for writing.
unsafe fn multiply<E: Real>(p: &Product<E>) {
    macro_rules! with {
        ($gemm:ident, $elem:ty) => {
            // SAFETY: warranted by the caller; E is this element. With beta 0, C is not read.
            unsafe {
                matrixmultiply::$gemm(
                    p.m,
                    p.k,
                    p.n,
                    p.alpha.to_f64() as $elem,
                    p.a.cast(),
                    p.a_rs as isize,
                    p.a_cs as isize,
                    p.b.cast(),
                    p.b_rs as isize,
                    p.b_cs as isize,
                    p.beta.to_f64() as $elem,
                    p.c.cast(),
                    p.c_rs as isize,
                    p.c_cs as isize,
                )
            }
        };
    }
    if TypeId::of::<E>() == TypeId::of::<f32>() {
        with!(sgemm, f32)
    } else {
        assert!(TypeId::of::<E>() == TypeId::of::<f64>(), "Real is f32 or f64");
        with!(dgemm, f64)
    }
}
