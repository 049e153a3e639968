//! Factors that are packed once for several products, such as the keys and values of a head: what [`gemm_bf16`] does inside,
//! in steps that a fused operator calls one by one on its thread.
//!
//! [`gemm_bf16`]: super::gemm_bf16
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only x86 has instructions for it"))]

#[cfg(target_arch = "x86_64")]
use kumiki_tensor::bf16;
use kumiki_tensor::{DType, Tensor};

use super::{Operand, Side};
#[cfg(target_arch = "x86_64")]
use super::{
    amx,
    blocked::{Form, Panels},
    pack::{One, STEP_LEN},
    source,
};
#[cfg(target_arch = "x86_64")]
use crate::simd::{Level, level};

/// Rows, columns and terms begin and end at multiples of it; what is beyond a factor's last counts as zero.
pub(crate) const UNIT: usize = 32;
/// Steps of one pass: a panel of B of so many stays in the first cache level.
const PASS: usize = 8;

/// A factor of `[rows, terms]` in BF16, in panels of [`UNIT`] rows. On side B its rows are the columns of the product: it is
/// given transposed.
pub(crate) struct Prepacked {
    side: Side,
    numbers: Tensor,
    panels: usize,
    steps: usize,
}

/// Whether this CPU computes with packed factors: as [`is_fast`](super::is_fast).
pub(crate) fn is_available() -> bool {
    super::is_fast()
}

impl Prepacked {
    /// Room for so many rows and terms, none of which has a value yet.
    pub fn new(side: Side, rows: usize, terms: usize) -> Prepacked {
        let (panels, steps) = (rows.div_ceil(UNIT), terms.div_ceil(UNIT));
        let numbers = Tensor::empty(DType::BF16, &[panels * steps * UNIT * UNIT]);
        Prepacked { side, numbers, panels, steps }
    }

    /// Packs a matrix of `[rows, terms]` as the part that begins at row and term `at`.
    ///
    /// # Panics
    /// When the part does not begin at multiples of [`UNIT`], or is not within the factor.
    pub fn pack(&mut self, at: (usize, usize), matrix: Operand) {
        let (rows, terms) = matrix.shape();
        assert!(
            [at.0, at.1].iter().all(|x| x.is_multiple_of(UNIT)),
            "a part begins at a multiple of {UNIT}, got {at:?}"
        );
        let (panel, step) = (at.0 / UNIT, at.1 / UNIT);
        let (panels, steps) = (rows.div_ceil(UNIT), terms.div_ceil(UNIT));
        assert!(panel + panels <= self.panels && step + steps <= self.steps, "a part of {rows} x {terms} at {at:?}");
        #[cfg(target_arch = "x86_64")]
        {
            assert!(is_available());
            matrix.check_inside("a part");
            let (source, all) = (source(&matrix), self.steps);
            let numbers = self.numbers.as_mut_slice::<bf16>().as_mut_ptr();
            for i in 0..panels {
                let some = (rows - i * UNIT).min(UNIT);
                // SAFETY: the CPU has AVX512-BF16; rows and terms are inside the matrix, and the panel has room for the
                // steps, as asserted.
                unsafe {
                    let to = numbers.add(((panel + i) * all + step) * STEP_LEN);
                    One::panels(self.side, to, source.at(i * UNIT, 0), some, terms, &mut [0]);
                }
            }
        }
    }
}

/// Part of a factor in a product: rows (or columns of the product) from `from` on, terms from `term` on.
#[derive(Clone, Copy)]
pub(crate) struct Part<'a> {
    pub factor: &'a Prepacked,
    pub from: usize,
    pub term: usize,
}

/// `c[rows, columns] = a b`, or `c += a b`, over so many terms; rows of c are `stride` apart. Whole units of c are written.
///
/// # Panics
/// When a factor is on the wrong side, a part does not begin at a multiple of [`UNIT`], or something is not inside.
pub(crate) fn multiply(
    [a, b]: [Part; 2],
    [rows, columns, terms]: [usize; 3],
    (c, stride): (&mut [f32], usize),
    accumulate: bool,
) {
    if rows == 0 || columns == 0 {
        return;
    }
    let [rows, columns, steps] = [rows, columns, terms].map(|extent| extent.div_ceil(UNIT));
    for (part, side, panels) in [(a, Side::A, rows), (b, Side::B, columns)] {
        let Part { factor, from, term } = part;
        assert!(factor.side == side && from.is_multiple_of(UNIT) && term.is_multiple_of(UNIT));
        assert!(from / UNIT + panels <= factor.panels && term / UNIT + steps <= factor.steps);
    }
    assert!(columns * UNIT <= stride && (rows * UNIT - 1) * stride + columns * UNIT <= c.len());
    if steps == 0 {
        if !accumulate {
            c.chunks_mut(stride).take(rows * UNIT).for_each(|row| row[..columns * UNIT].fill(0.0));
        }
        return;
    }
    #[cfg(target_arch = "x86_64")]
    {
        assert!(is_available());
        let level = level();
        let panel = |part: Part, panel: usize, step: usize| {
            let place = (part.from / UNIT + panel) * part.factor.steps + part.term / UNIT + step;
            part.factor.numbers.as_slice::<bf16>().as_ptr().wrapping_add(place * STEP_LEN)
        };
        let c = c.as_mut_ptr();
        let run = || {
            for step in (0..steps).step_by(PASS) {
                let some = PASS.min(steps - step);
                for j in 0..columns {
                    for i in 0..rows {
                        let factors = Panels { a: panel(a, i, step), b: panel(b, j, step), irregular: false };
                        // SAFETY: the CPU has the level, with tiles configured; panels and c are inside, as asserted.
                        unsafe {
                            let c = c.add(i * UNIT * stride + j * UNIT);
                            One::block(level, some, factors, c, stride, accumulate || step > 0);
                        }
                    }
                }
            }
        };
        // SAFETY: the CPU has tiles where the level says so.
        unsafe { if level == Level::Amx { amx::with_tiles(run) } else { run() } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::MatRef;
    use crate::simd::{self, with_level};
    use kumiki_tensor::Rng;

    /// Parts of packed factors against sums in F64 of the rounded numbers.
    #[test]
    fn parts_of_products_equal_plain_sums() {
        let (rows, columns, terms) = (70, 45, 300);
        let random = |seed, shape: &[usize]| Rng::new(seed).normal(DType::BF16, shape, 0.0, 1.0);
        let (a, b) = (random(1, &[rows, terms]), random(2, &[columns, terms]));
        let (wide_a, b_t) = (a.cast(DType::F32), b.cast(DType::F32).transpose(0, 1).contiguous());
        for level in simd::Level::available() {
            with_level(level, || {
                if !is_available() {
                    return;
                }
                let (mut left, mut right) =
                    (Prepacked::new(Side::A, rows, terms), Prepacked::new(Side::B, columns, terms));
                // In two parts each, from either storage.
                for (from, to) in [(0, 64), (64, rows)] {
                    let part = wide_a.narrow(0, from, to - from).contiguous();
                    left.pack((from, 0), Operand::F32(MatRef::new(part.as_slice(), to - from, terms)));
                }
                for (from, to) in [(0, 96), (96, terms)] {
                    let part = b_t.narrow(0, from, to - from).contiguous();
                    right.pack((0, from), Operand::F32(MatRef::new(part.as_slice(), to - from, columns).t()));
                }
                for (from, term, count) in [(0, 0, terms), (32, 64, terms - 64), (64, 32, 70), (0, 0, 0)] {
                    let (some, stride) = (rows - from, 80);
                    for accumulate in [false, true] {
                        let mut c = vec![1f32; 96 * stride];
                        let parts = [Part { factor: &left, from, term }, Part { factor: &right, from: 0, term }];
                        // Terms are whole units.
                        let until = (term + count.next_multiple_of(UNIT)).min(terms);
                        multiply(parts, [some, columns, count], (&mut c, stride), accumulate);
                        for i in 0..some {
                            for j in 0..columns {
                                let at = |x: &Tensor, row: usize, term: usize| x.as_slice::<bf16>()[row * terms + term];
                                let sum: f64 =
                                    (term..until).map(|t| at(&a, from + i, t).to_f64() * at(&b, j, t).to_f64()).sum();
                                let expected = sum + f64::from(u8::from(accumulate));
                                let got = f64::from(c[i * stride + j]);
                                assert!((got - expected).abs() < 1e-4, "{got} for {expected} at {level}");
                            }
                        }
                    }
                }
            });
        }
    }
}
