//! Packed factors inside fused operators, whose numbers are of any type but whose packed products are of F32.

use super::{Number, Rows, Scratch, Values, leading, scale};
use crate::gemm::packed::{Digits, Part, Prepacked, UNIT, multiply};
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

impl<E: Number> Values<'_, E> {
    /// How they are packed where that is sooner than vectors: not in all digits if they are stored in BF16.
    pub fn digits(&self, narrow: bool) -> Option<Digits> {
        let there = size_of::<E>() == 4 && (narrow || matches!(self, Values::Same(_)));
        Digits::of(narrow, self.width()).filter(|_| there)
    }
}

/// Gives `count` rows of a head from `(batch, time, head)` on, each times `factor` of its number from there on, and where they
/// begin: [`UNIT`] rows at a time.
pub(crate) fn scaled<E: Number>(
    rows: &Rows<E>,
    (batch, time, head): (usize, usize, usize),
    count: usize,
    factor: impl Fn(usize) -> E,
    mut to: impl FnMut(usize, Operand),
) {
    let stride = leading::<E>(rows.width);
    let mut scratch = Scratch::new::<E>(UNIT * stride);
    let [unit] = scratch.parts::<E, 1>([UNIT * stride]);
    for i in (0..count).step_by(UNIT) {
        let some = UNIT.min(count - i);
        rows.copy(batch, time + i, head, some, unit, stride);
        unit.chunks_exact_mut(stride).enumerate().take(some).for_each(|(c, row)| scale(row, factor(i + c)));
        to(i, matrix(unit, some, rows.width, (stride, 1)));
    }
}
