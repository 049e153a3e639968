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
    pack::{One, STEP, STEP_LEN},
    source, source_of_f32,
    three::Three,
};
use crate::simd::{Level, level};

/// Rows, columns and terms begin and end at multiples of it; what is beyond a factor's last counts as zero.
pub(crate) const UNIT: usize = 32;

/// From this width on packing of all digits pays.
const WIDE: usize = 128;

/// What packed numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Digits {
    /// Rounded to BF16.
    Rounded,
    /// All of F32's, in three parts.
    All,
}

impl Digits {
    /// In which products of F32 are done sooner on packed factors of so many numbers a row than by vectors, if any; `narrow`
    /// ones may be rounded.
    pub fn of(narrow: bool, width: usize) -> Option<Digits> {
        match narrow {
            true => super::is_fast().then_some(Digits::Rounded),
            false => (level() == Level::Amx && width >= WIDE).then_some(Digits::All),
        }
    }

    /// Packed numbers for each number.
    fn parts(self) -> usize {
        match self {
            Digits::Rounded => 1,
            Digits::All => 3,
        }
    }
}

/// A factor of `[rows, terms]`, in panels of [`UNIT`] rows. On side B its rows are the columns of the product: it is given
/// transposed.
pub(crate) struct Prepacked {
    digits: Digits,
    side: Side,
    numbers: Tensor,
    panels: usize,
    steps: usize,
    /// Whether infinity or NaN was among its numbers.
    irregular: bool,
}

impl Prepacked {
    /// Room for so many rows and terms, none of which has a value yet.
    pub fn new(digits: Digits, side: Side, rows: usize, terms: usize) -> Prepacked {
        let (panels, steps) = (rows.div_ceil(UNIT), terms.div_ceil(UNIT));
        let numbers = Tensor::empty(DType::BF16, &[panels * steps * digits.parts() * UNIT * UNIT]);
        Prepacked { digits, side, numbers, panels, steps, irregular: false }
    }

    /// A matrix of `[rows, terms]`, packed.
    ///
    /// # Panics
    /// When it is in BF16 where all digits of F32 are packed.
    pub fn of(digits: Digits, side: Side, matrix: Operand) -> Prepacked {
        let (rows, terms) = matrix.shape();
        let mut packed = Prepacked::new(digits, side, rows, terms);
        packed.pack((0, 0), matrix);
        packed
    }

    /// Packs a matrix of `[rows, terms]` as the part that begins at row and term `at`.
    ///
    /// # Panics
    /// When the part does not begin at multiples of [`UNIT`], is not within the factor, or is in BF16 where all digits of
    /// F32 are packed.
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
            assert!(super::is_fast());
            matrix.check_inside("a part");
            let step_len = self.digits.parts() * STEP_LEN;
            let (side, all) = (self.side, self.steps);
            let numbers = self.numbers.as_mut_slice::<bf16>().as_mut_ptr();
            let mut irregular = [0];
            for i in 0..panels {
                let some = (rows - i * UNIT).min(UNIT);
                // SAFETY: the CPU has AVX512-BF16; rows and terms are inside the matrix, and the panel has room for the
                // steps, as asserted.
                unsafe {
                    let to = numbers.add(((panel + i) * all + step) * step_len);
                    match self.digits {
                        Digits::Rounded => {
                            One::panels(side, to, source(&matrix).at(i * UNIT, 0), some, terms, &mut irregular);
                        }
                        Digits::All => {
                            let source = source_of_f32(&matrix).at(i * UNIT, 0);
                            Three::panels(side, to, source, some, terms, &mut irregular);
                        }
                    }
                }
                self.irregular |= irregular[0] != 0;
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
/// When a factor is on the wrong side or packed in another way, a part does not begin at a multiple of [`UNIT`], or
/// something is not inside.
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
        assert!(
            factor.side == side
                && factor.digits == a.factor.digits
                && from.is_multiple_of(UNIT)
                && term.is_multiple_of(UNIT)
        );
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
        let extents = [rows, columns, steps];
        match a.factor.digits {
            Digits::Rounded => blocks::<One>([a, b], extents, (c, stride), accumulate),
            Digits::All => blocks::<Three>([a, b], extents, (c, stride), accumulate),
        }
    }
}

/// [`multiply`] by whole units, which are inside of everything.
#[cfg(target_arch = "x86_64")]
fn blocks<F: Form>(
    [a, b]: [Part; 2],
    [rows, columns, steps]: [usize; 3],
    (c, stride): (&mut [f32], usize),
    accumulate: bool,
) {
    let level = level();
    assert!(super::is_fast() && (F::PARTS == 1 || level == Level::Amx));
    let panel = |part: Part, panel: usize, step: usize| {
        let place = (part.from / UNIT + panel) * part.factor.steps + part.term / UNIT + step;
        part.factor.numbers.as_slice::<bf16>().as_ptr().wrapping_add(place * F::PARTS * STEP_LEN)
    };
    let irregular = a.factor.irregular || b.factor.irregular;
    let (c, pass) = (c.as_mut_ptr(), F::PASS / STEP);
    let run = || {
        for step in (0..steps).step_by(pass) {
            let some = pass.min(steps - step);
            for j in 0..columns {
                for i in 0..rows {
                    let factors = Panels { a: panel(a, i, step), b: panel(b, j, step), irregular };
                    // SAFETY: the CPU has the level, with tiles configured; panels and c are inside, as the caller warrants.
                    unsafe {
                        let c = c.add(i * UNIT * stride + j * UNIT);
                        F::block(level, some, factors, c, stride, accumulate || step > 0);
                    }
                }
            }
        }
    };
    // SAFETY: the CPU has tiles where the level says so.
    unsafe { if level == Level::Amx { amx::with_tiles(run) } else { run() } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::MatRef;
    use crate::simd::{self, with_level};
    use kumiki_tensor::Rng;

    const ROWS: usize = 70;
    const COLUMNS: usize = 45;
    const TERMS: usize = 300;

    /// `[ROWS, TERMS]` and `[COLUMNS, TERMS]`, packed in two parts each.
    fn packed(digits: Digits, a: &Tensor, b: &Tensor) -> [Prepacked; 2] {
        let mut left = Prepacked::new(digits, Side::A, ROWS, TERMS);
        let mut right = Prepacked::new(digits, Side::B, COLUMNS, TERMS);
        for (from, to) in [(0, 64), (64, ROWS)] {
            let part = a.narrow(0, from, to - from).contiguous();
            left.pack((from, 0), Operand::F32(MatRef::new(part.as_slice(), to - from, TERMS)));
        }
        let b_t = b.transpose(0, 1).contiguous();
        for (from, to) in [(0, 96), (96, TERMS)] {
            let part = b_t.narrow(0, from, to - from).contiguous();
            right.pack((0, from), Operand::F32(MatRef::new(part.as_slice(), to - from, COLUMNS).t()));
        }
        [left, right]
    }

    /// The levels that have a packing, with it.
    fn on_every_level(narrow: bool, f: impl Fn(Digits) + Sync) {
        for level in simd::Level::available() {
            with_level(level, || Digits::of(narrow, WIDE).into_iter().for_each(&f));
        }
    }

    /// Parts of packed factors against sums in F64; where they are rounded, of rounded numbers.
    #[test]
    fn parts_of_products_equal_plain_sums() {
        for narrow in [true, false] {
            let dtype = if narrow { DType::BF16 } else { DType::F32 };
            let random = |seed, shape: &[usize]| Rng::new(seed).normal(dtype, shape, 0.0, 1.0).cast(DType::F32);
            let (a, b) = (random(1, &[ROWS, TERMS]), random(2, &[COLUMNS, TERMS]));
            on_every_level(narrow, |digits| {
                let [left, right] = packed(digits, &a, &b);
                for (from, term, count) in [(0, 0, TERMS), (32, 64, TERMS - 64), (64, 32, 70), (0, 0, 0)] {
                    let (some, stride) = (ROWS - from, 80);
                    for accumulate in [false, true] {
                        let mut c = vec![1f32; 96 * stride];
                        let parts = [Part { factor: &left, from, term }, Part { factor: &right, from: 0, term }];
                        // Terms are whole units.
                        let until = (term + count.next_multiple_of(UNIT)).min(TERMS);
                        multiply(parts, [some, COLUMNS, count], (&mut c, stride), accumulate);
                        for (i, j) in (0..some).flat_map(|i| (0..COLUMNS).map(move |j| (i, j))) {
                            let at = |x: &Tensor, row: usize, t: usize| f64::from(x.as_slice::<f32>()[row * TERMS + t]);
                            let sum: f64 = (term..until).map(|t| at(&a, from + i, t) * at(&b, j, t)).sum();
                            let expected = sum + f64::from(u8::from(accumulate));
                            let got = f64::from(c[i * stride + j]);
                            assert!((got - expected).abs() < 2e-5, "{got} for {expected}, {digits:?}");
                        }
                    }
                }
            });
        }
    }

    /// An infinite number makes its row infinite or NaN, and no other.
    #[test]
    fn infinity_stays_in_its_row() {
        let numbers = |rows: usize| Tensor::from_fn::<f32>(&[rows, TERMS], |i| 1.0 + i as f32 / 1e5);
        let (mut a, b) = (numbers(ROWS), numbers(COLUMNS));
        a.as_mut_slice::<f32>()[3 * TERMS + 7] = f32::INFINITY;
        for narrow in [true, false] {
            on_every_level(narrow, |digits| {
                let [left, right] = packed(digits, &a, &b);
                let mut c = vec![0f32; 96 * 80];
                let parts = [&left, &right].map(|factor| Part { factor, from: 0, term: 0 });
                multiply(parts, [ROWS, COLUMNS, TERMS], (&mut c, 80), false);
                for (row, c) in c.chunks(80).enumerate().take(ROWS) {
                    let right = |&x: &f32| if row == 3 { x == f32::INFINITY } else { (295.0..500.0).contains(&x) };
                    assert!(c[..COLUMNS].iter().all(right), "row {row}: {c:?}, {digits:?}");
                }
            });
        }
    }
}
