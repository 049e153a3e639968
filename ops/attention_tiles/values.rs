//! Rows that may be stored in BF16 beside operands of F32: values, gates and what arrives for them. In BF16 training these
//! are as wide as everything else together, and memory is what they cost.

use kumiki_tensor::{DType, Tensor, bf16};

use super::{Number, Rows, SharedRows};
use crate::arithmetic::Mul;
use crate::simd::{Real, map_binary, map_binary_inplace, map_unary_inplace};
use crate::stored::gate_stored;
use crate::unary::Scale;

/// Numbers that are widened at a time where they are multiplied with.
const BLOCK: usize = 256;

/// The rows of a `[B, T, H, width]` tensor of E, or of BF16.
#[derive(Clone, Copy)]
pub(crate) enum Values<'a, E> {
    Same(Rows<'a, E>),
    Half(Rows<'a, bf16>),
}

impl<'a, E: Number> Values<'a, E> {
    /// The rows of `x`, which must have passed through [`Rows::prepare`].
    pub fn new(x: &'a Tensor) -> Self {
        if x.dtype() == DType::BF16 { Values::Half(Rows::new(x)) } else { Values::Same(Rows::new(x)) }
    }

    pub fn tensor(&self) -> &'a Tensor {
        match self {
            Values::Same(rows) => rows.tensor,
            Values::Half(rows) => rows.tensor,
        }
    }

    pub fn width(&self) -> usize {
        match self {
            Values::Same(rows) => rows.width,
            Values::Half(rows) => rows.width,
        }
    }

    /// The dtype that they are stored in.
    pub fn dtype(&self) -> DType {
        match self {
            Values::Same(_) => E::DTYPE,
            Values::Half(_) => DType::BF16,
        }
    }

    /// Copies `count` rows of a head to rows of `stride` elements.
    pub fn copy(&self, batch: usize, time: usize, head: usize, count: usize, out: &mut [E], stride: usize) {
        match self {
            Values::Same(rows) => rows.copy(batch, time, head, count, out, stride),
            Values::Half(rows) => {
                for (i, out) in out.chunks_exact_mut(stride).take(count).enumerate() {
                    let (row, rest) = out.split_at_mut(rows.width);
                    E::widen(rows.row(batch, time + i, head), row);
                    // As far as vectors are read.
                    let line = 64 / size_of::<E>();
                    rest[..rows.width.next_multiple_of(line) - rows.width].fill(E::ZERO);
                }
            }
        }
    }

    /// Copies one row.
    pub fn read(&self, (batch, time, head): (usize, usize, usize), out: &mut [E]) {
        match self {
            Values::Same(rows) => out.copy_from_slice(rows.row(batch, time, head)),
            Values::Half(rows) => E::widen(rows.row(batch, time, head), out),
        }
    }

    /// Multiplies `row` with one of these.
    pub fn multiply(&self, (batch, time, head): (usize, usize, usize), row: &mut [E]) {
        match self {
            Values::Same(rows) => map_binary_inplace(&Mul, row, rows.row(batch, time, head)),
            Values::Half(rows) => {
                let mut wide = [E::ZERO; BLOCK];
                for (x, y) in rows.row(batch, time, head).chunks(BLOCK).zip(row.chunks_mut(BLOCK)) {
                    E::widen(x, &mut wide[..x.len()]);
                    map_binary_inplace(&Mul, y, &wide[..x.len()]);
                }
            }
        }
    }
}

/// `row[i] *= factor`.
pub(crate) fn scale<E: Number>(row: &mut [E], factor: E) {
    map_unary_inplace(&Scale(Real::to_f64(factor)), row);
}

/// Writes `factor row` as row `to` of an output, and its product with the gate of the query `at` as that of another one, each
/// as far as it is there; `row` is written over.
///
/// # Safety
/// As [`SharedValues::write`].
pub(crate) unsafe fn write_gated<E: Number>(
    row: &mut [E],
    factor: E,
    at: (usize, usize, usize),
    to: usize,
    out: Option<&SharedValues<E>>,
    gated: Option<(&SharedValues<E>, &Values<E>)>,
) {
    // SAFETY: as the caller warrants.
    unsafe {
        if let (Some(SharedValues::Half(out)), Some((SharedValues::Half(gated), Values::Half(gate)))) = (out, gated) {
            let both = [out.row_mut(to, row.len()), gated.row_mut(to, row.len())];
            let x = E::as_f32(row).expect("BF16 is stored beside F32");
            return gate_stored(Real::to_f64(factor) as f32, x, gate.row(at.0, at.1, at.2), both);
        }
        if factor != E::ONE {
            scale(row, factor);
        }
        if let Some(out) = out {
            out.write(to, row);
        }
        match gated {
            Some((SharedValues::Same(gated), Values::Same(gate))) => {
                map_binary(&Mul, row, gate.row(at.0, at.1, at.2), gated.row_mut(to, row.len()));
            }
            Some((gated, gate)) => {
                gate.multiply(at, row);
                gated.write(to, row);
            }
            None => {}
        }
    }
}

/// An output of E or of BF16, of which every task writes rows of its own.
pub(crate) enum SharedValues<'a, E> {
    Same(SharedRows<'a, E>),
    Half(SharedRows<'a, bf16>),
}

impl<'a, E: Number> SharedValues<'a, E> {
    pub fn new(out: &'a mut Tensor) -> Self {
        if out.dtype() == DType::BF16 {
            SharedValues::Half(SharedRows::new(out.as_mut_slice()))
        } else {
            SharedValues::Same(SharedRows::new(out.as_mut_slice()))
        }
    }

    /// Writes a row, rounded if need be.
    ///
    /// # Safety
    /// No other call writes the same row at the same time, and all calls have rows of the same width.
    pub unsafe fn write(&self, row: usize, from: &[E]) {
        // SAFETY: as the caller warrants.
        unsafe {
            match self {
                SharedValues::Same(out) => out.row_mut(row, from.len()).copy_from_slice(from),
                SharedValues::Half(out) => E::narrow(from, out.row_mut(row, from.len())),
            }
        }
    }
}
