//! Products of tiles that stay in cache: `C = A·B` and `C += A·B` for operands of some tens of kilobytes, on the calling
//! thread, without packing. The fused attention operators are made of these.
//!
//! `A` is read element by element (broadcast), so any strides do: a transposed operand costs nothing. `B` and `C` are
//! row-major with rows of [`leading`] elements, so that whole vectors can be read and written; what lies beyond the last
//! column is unspecified. A [`Band`] says which part of a triangular operand or result is worth computing.
//!
//! A block of `M` rows and `V` vectors of `C` is kept in registers while the depth is walked.

use crate::gemm::{MatMut, MatRef, Operand, Output, gemm_bf16_serial, is_fast};
use crate::simd::{Kernel, Lanes, Real};

/// Elements from one row of a tile to the next for rows of `columns` elements: whole cache lines, and an odd number of
/// them, so that the rows of a column panel do not fall into the same few cache sets.
pub(crate) fn leading<E>(columns: usize) -> usize {
    let line = 64 / size_of::<E>();
    (columns.div_ceil(line) | 1) * line
}

/// Which entries of a product matter, where one of the three matrices is triangular with its diagonal moved by `d`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Band {
    /// All of them.
    Full,
    /// Only columns `c >= r - d` of row `r` of `C` are wanted; others may be left as they are.
    Columns(isize),
    /// `A[r, p]` is zero for `p < r - d`.
    DepthFrom(isize),
    /// `A[r, p]` is zero for `p > r + d`.
    DepthTo(isize),
}

/// `C[r, c] (+)= Σ_p A[r, p] B[p, c]`.
pub(crate) struct TileProduct<'a, E> {
    /// Rows of `A` and `C`.
    pub rows: usize,
    /// Columns of `A`, rows of `B`.
    pub depth: usize,
    /// Columns of `B` and `C`.
    pub columns: usize,
    pub a: &'a [E],
    /// Distances between rows and between columns of `A`.
    pub a_strides: (usize, usize),
    pub b: &'a [E],
    /// Distance between rows of `B`; a [`leading`].
    pub b_stride: usize,
    pub c: &'a mut [E],
    /// Distance between rows of `C`; a [`leading`].
    pub c_stride: usize,
    /// Whether `C` is added to instead of written.
    pub accumulate: bool,
    pub band: Band,
    /// Whether factors of F32 may be rounded to BF16, where that is faster.
    pub narrow: bool,
}

/// Multiply-adds from which on rounding and packing the factors pay.
const NARROW: usize = 32 * 32 * 32;

impl<E: Real> TileProduct<'_, E> {
    /// Computes the product.
    pub fn run(self) {
        let (rows, depth, columns) = (self.rows, self.depth, self.columns);
        if rows == 0 || columns == 0 {
            return;
        }
        // The reads and writes below are unchecked; these are the farthest of each.
        assert!(depth == 0 || (rows - 1) * self.a_strides.0 + (depth - 1) * self.a_strides.1 < self.a.len());
        let line = 64 / size_of::<E>();
        assert!(columns.next_multiple_of(line) <= self.b_stride.min(self.c_stride));
        assert!(depth * self.b_stride <= self.b.len() && rows * self.c_stride <= self.c.len());
        if self.narrow && size_of::<E>() == 4 && rows * depth * columns >= NARROW && is_fast() {
            return self.run_narrow();
        }
        E::dispatch(self);
    }

    /// The whole product, whatever the band: what it would leave out is zero or not wanted.
    fn run_narrow(self) {
        let TileProduct { rows, depth, columns, a_strides: (row_stride, col_stride), .. } = self;
        let (Some(a), Some(b), Some(c)) = (E::as_f32(self.a), E::as_f32(self.b), E::as_f32_mut(self.c)) else {
            unreachable!("only F32 is narrowed")
        };
        let a = MatRef { data: a, offset: 0, rows, cols: depth, row_stride, col_stride };
        let b = MatRef { data: b, offset: 0, rows: depth, cols: columns, row_stride: self.b_stride, col_stride: 1 };
        let c = MatMut { data: c, offset: 0, rows, cols: columns, row_stride: self.c_stride, col_stride: 1 };
        gemm_bf16_serial(Operand::F32(a), Operand::F32(b), Output::F32(c), self.accumulate);
    }
}

impl<E: Real> Kernel<E> for TileProduct<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        match L::REGISTERS {
            32.. => self.panels::<L, 8, 3>(),
            16.. => self.panels::<L, 6, 2>(),
            _ => self.panels::<L, 2, 2>(),
        }
    }
}

impl<E: Real> TileProduct<'_, E> {
    #[inline(always)]
    fn panels<L: Lanes<Elem = E>, const M: usize, const V: usize>(mut self) {
        let vectors = self.columns.div_ceil(L::N);
        let mut v = 0;
        while v < vectors {
            match V.min(vectors - v) {
                1 => self.panel::<L, M, 1>(v * L::N),
                2 => self.panel::<L, M, 2>(v * L::N),
                _ => self.panel::<L, M, 3>(v * L::N),
            }
            v += V;
        }
    }

    /// `V` vectors of columns from `column` on, for all rows: this part of `B` stays in the nearest cache.
    #[inline(always)]
    fn panel<L: Lanes<Elem = E>, const M: usize, const V: usize>(&mut self, column: usize) {
        let mut row = 0;
        while row < self.rows {
            let (mut from, mut to) = (0, self.depth);
            let first = row as isize;
            match self.band {
                Band::Full => {}
                Band::Columns(d) => {
                    if ((column + V * L::N - 1) as isize) < first - d {
                        break; // nor is any row below wanted
                    }
                }
                Band::DepthFrom(d) => from = (first - d).clamp(0, to as isize) as usize,
                Band::DepthTo(d) => to = (first + M as isize + d).clamp(0, to as isize) as usize,
            }
            // SAFETY: `run` has checked that A holds all rows and columns and that B and C hold whole vectors up to
            // the last column; `column` is a multiple of N below it, and the panel has no more vectors than are left.
            unsafe { self.block::<L, M, V>(row, column, from, to) };
            row += M;
        }
    }

    #[inline(always)]
    unsafe fn block<L: Lanes<Elem = E>, const M: usize, const V: usize>(
        &mut self,
        row: usize,
        column: usize,
        from: usize,
        to: usize,
    ) {
        let live = M.min(self.rows - row);
        let (a_row, a_column) = self.a_strides;
        let mut a = [self.a.as_ptr(); M];
        for (i, a) in a.iter_mut().enumerate() {
            // Rows past the end read the last one again; what they give is not stored.
            // SAFETY: the row exists.
            *a = unsafe { a.add((row + i.min(live - 1)) * a_row) };
        }
        // SAFETY: the column lies within every row of B.
        let b = unsafe { self.b.as_ptr().add(column) };
        let mut sum = [[L::splat(E::ZERO); V]; M];
        for p in from..to {
            let mut x = [L::splat(E::ZERO); V];
            for (v, x) in x.iter_mut().enumerate() {
                // SAFETY: p < depth, and the vector lies within the row.
                *x = unsafe { L::load_ptr(b.add(p * self.b_stride + v * L::N)) };
            }
            for (sum, a) in sum.iter_mut().zip(&a) {
                // SAFETY: p < depth.
                let y = L::splat(unsafe { *a.add(p * a_column) });
                for (sum, x) in sum.iter_mut().zip(&x) {
                    *sum = y.mul_add(*x, *sum);
                }
            }
        }
        for (i, sum) in sum.iter().enumerate() {
            if i < live {
                for (v, sum) in sum.iter().enumerate() {
                    // SAFETY: the row is one of C's, and the vector lies within it.
                    unsafe {
                        let c = self.c.as_mut_ptr().add((row + i) * self.c_stride + column + v * L::N);
                        let base = if self.accumulate { L::load_ptr(c) } else { L::splat(E::ZERO) };
                        (base + *sum).store_ptr(c);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Level, with_level};
    use kumiki_tensor::{DType, Rng};
    use proptest::prelude::*;

    fn random(seed: u64, len: usize) -> Vec<f64> {
        Rng::new(seed).normal(DType::F64, &[len], 0.0, 1.0).to_f64_vec()
    }

    fn check<E: Real>(
        [rows, depth, columns]: [usize; 3],
        transposed: bool,
        accumulate: bool,
        band: Band,
        tolerance: f64,
    ) {
        let convert = |x: &[f64]| x.iter().map(|&x| <E as Real>::from_f64(x)).collect::<Vec<E>>();
        let (a_stride, stride) = (depth.max(rows) + 1, leading::<E>(columns));
        let a_strides = if transposed { (1, a_stride) } else { (a_stride, 1) };
        let mut a = random(1, a_stride * (a_stride + 1));
        for r in 0..rows {
            for p in 0..depth {
                let (ri, pi) = (r as isize, p as isize);
                let zero = match band {
                    Band::DepthFrom(d) => pi < ri - d,
                    Band::DepthTo(d) => pi > ri + d,
                    _ => false,
                };
                if zero {
                    a[r * a_strides.0 + p * a_strides.1] = 0.0;
                }
            }
        }
        let (a, b, mut c) = (convert(&a), convert(&random(2, depth * stride)), convert(&random(3, rows * stride)));
        let before = c.clone();
        TileProduct {
            rows,
            depth,
            columns,
            a: &a,
            a_strides,
            b: &b,
            b_stride: stride,
            c: &mut c,
            c_stride: stride,
            accumulate,
            band,
            narrow: false,
        }
        .run();
        for r in 0..rows {
            for column in 0..columns {
                if matches!(band, Band::Columns(d) if (column as isize) < r as isize - d) {
                    continue;
                }
                let mut expected = if accumulate { Real::to_f64(before[r * stride + column]) } else { 0.0 };
                for p in 0..depth {
                    let x = Real::to_f64(a[r * a_strides.0 + p * a_strides.1]);
                    expected += x * Real::to_f64(b[p * stride + column]);
                }
                let got = Real::to_f64(c[r * stride + column]);
                let context = format!("[{rows}, {depth}, {columns}] {band:?} at ({r}, {column})");
                assert!((got - expected).abs() <= tolerance, "{got} for {expected}, {context}");
            }
        }
    }

    proptest! {
        #[test]
        fn products_equal_plain_loops(
            sizes in [0usize..30, 0usize..20, 0usize..70],
            (transposed, accumulate) in any::<(bool, bool)>(),
            kind in 0..4, d in -30isize..30,
        ) {
            let band = [Band::Full, Band::Columns(d), Band::DepthFrom(d), Band::DepthTo(d)][kind as usize];
            for level in Level::available() {
                with_level(level, || {
                    check::<f64>(sizes, transposed, accumulate, band, 1e-12);
                    check::<f32>(sizes, transposed, accumulate, band, 1e-4);
                });
            }
        }
    }

    #[test]
    fn leading_dimensions_are_odd_numbers_of_lines() {
        assert_eq!([1, 16, 17, 32, 96, 239, 256].map(leading::<f32>), [16, 16, 48, 48, 112, 240, 272]);
        assert_eq!(leading::<f64>(9), 24);
    }
}
