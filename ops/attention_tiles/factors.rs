//! Packed factors inside fused operators, whose numbers are of any type but whose packed products are of F32.

use super::Number;
use crate::gemm::packed::{Part, Prepacked, UNIT, multiply};
use crate::gemm::{MatRef, Operand};

/// From row to row of a tile of sums: whole units, and no power of two.
pub(crate) fn stride(columns: usize) -> usize {
    columns.next_multiple_of(UNIT) + 16
}

/// Rows that are `row_stride` apart, of numbers that are `stride` apart.
pub(crate) fn matrix<E: Number>(
    data: &[E],
    rows: usize,
    cols: usize,
    (row_stride, col_stride): (usize, usize),
) -> Operand<'_> {
    let data = E::as_f32(data).expect("narrow products are of F32");
    Operand::F32(MatRef { data, offset: 0, rows, cols, row_stride, col_stride })
}

/// A factor's rows (or the product's columns) and terms from there on.
pub(crate) fn part(factor: &Prepacked, from: usize, term: usize) -> Part<'_> {
    Part { factor, from, term }
}

/// [`multiply`].
pub(crate) fn product<E: Number>(
    factors: [Part; 2],
    extents: [usize; 3],
    (c, stride): (&mut [E], usize),
    accumulate: bool,
) {
    multiply(factors, extents, (E::as_f32_mut(c).expect("narrow products are of F32"), stride), accumulate);
}
