//! Products of BF16 numbers, summed in F32: `C = A B`, or added to C.
//!
//! Operands are stored in BF16, or in F32 and rounded to the nearest BF16 while they are packed; C is F32, or rounded to
//! BF16 once, after the last term. Three ways give the same sums up to their order:
//!
//! - `amx`: tiles of 16 x 32 numbers, on CPUs and kernels that have them;
//! - `dot`: AVX512-BF16, pairs of terms at once;
//! - `widened`: every other CPU; operands become F32 and go through [`gemm`](super::gemm).
//!
//! The first two read the same packed blocks (`pack`) and share their loops (`blocked`). Both take subnormal numbers for
//! zero. Work is cut by shape, so results do not depend on the number of threads.
//!
//! Tiles are so much faster than vectors of F32 that larger products of F32 go through them as well, each number in three
//! parts of BF16 (`three`): six products for one, and still sooner.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod blocked;
#[cfg(target_arch = "x86_64")]
mod dot;
#[cfg(target_arch = "x86_64")]
mod pack;
pub(crate) mod packed;
#[cfg(target_arch = "x86_64")]
mod three;
mod widened;

use kumiki_tensor::bf16;

use super::{MatMut, MatRef, Product, extents, gemm};
use crate::simd::{Level, Real, level};

#[cfg(target_arch = "x86_64")]
pub(crate) use amx::is_available as has_amx;

/// The side of a product that a factor is on, whose tiles have a layout of their own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// Left; its rows are those of the product.
    A,
    /// Right; its columns are those of the product.
    B,
}

/// A matrix to read, in either storage.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// Rounded to BF16 when it is read.
    F32(MatRef<'a, f32>),
    /// As it is.
    BF16(MatRef<'a, bf16>),
}

/// The matrix to write, in either storage.
#[derive(Debug)]
pub enum Output<'a> {
    /// The sums.
    F32(MatMut<'a, f32>),
    /// The sums, rounded once.
    BF16(MatMut<'a, bf16>),
}

/// Evaluates an expression with the matrix of either storage.
macro_rules! either {
    ($type:ident, $matrix:expr, $m:ident => $body:expr) => {
        match $matrix {
            $type::F32($m) => $body,
            $type::BF16($m) => $body,
        }
    };
}

impl Operand<'_> {
    /// Rows and columns.
    #[must_use]
    pub fn shape(&self) -> (usize, usize) {
        either!(Operand, self, m => (m.rows, m.cols))
    }

    /// Every element must be inside of its slice.
    #[track_caller]
    fn check_inside(&self, name: &str) {
        let (rows, cols) = self.shape();
        if rows > 0 && cols > 0 {
            either!(Operand, self, m => {
                extents(name, m.offset, m.data.len(), (rows, m.row_stride), (cols, m.col_stride));
            });
        }
    }

    /// The transposed view.
    #[must_use]
    pub fn t(self) -> Self {
        match self {
            Operand::F32(m) => Operand::F32(m.t()),
            Operand::BF16(m) => Operand::BF16(m.t()),
        }
    }
}

impl Output<'_> {
    fn shape(&self) -> (usize, usize) {
        either!(Output, self, m => (m.rows, m.cols))
    }

    fn t(self) -> Self {
        match self {
            Output::F32(m) => Output::F32(m.t()),
            Output::BF16(m) => Output::BF16(m.t()),
        }
    }

    fn strides(&self) -> (usize, usize) {
        either!(Output, self, m => (m.row_stride, m.col_stride))
    }

    fn zero(self) {
        fn fill<E: Copy>(m: MatMut<E>, zero: E) {
            for i in 0..m.rows {
                for j in 0..m.cols {
                    m.data[m.offset + i * m.row_stride + j * m.col_stride] = zero;
                }
            }
        }
        match self {
            Output::F32(m) => fill(m, 0.0),
            Output::BF16(m) => fill(m, bf16::ZERO),
        }
    }
}

/// `C[m, n] = A[m, k] B[k, n]`, or with `accumulate` added to C: factors in BF16, sums in F32, in parallel when it is
/// worth it. Without `accumulate`, C is written without being read.
///
/// # Panics
/// When shapes do not fit, a matrix reaches outside its slice, or two elements of C share a place.
#[track_caller]
pub fn gemm_bf16(a: Operand, b: Operand, c: Output, accumulate: bool) {
    product(a, b, c, accumulate, true);
}

/// As [`gemm_bf16`], on the calling thread alone: for tiles inside fused operators.
///
/// # Panics
/// As [`gemm_bf16`].
#[track_caller]
pub fn gemm_bf16_serial(a: Operand, b: Operand, c: Output, accumulate: bool) {
    product(a, b, c, accumulate, false);
}

/// Rows and columns from which on three parts pay: packing is for each of them.
const LEAST_SIDE: usize = 48;
/// Multiply-adds from which on they pay.
const THREE_PARTS: usize = 1 << 18;
/// Terms up to which there is room for a packed panel: 24 MiB.
const MOST_TERMS: usize = 1 << 17;

/// The level, where it has instructions for BF16.
fn fast_level() -> Option<Level> {
    let level = level();
    #[cfg(target_arch = "x86_64")]
    let fast = level == Level::Amx || (level == Level::Avx512 && dot::is_available());
    #[cfg(not(target_arch = "x86_64"))]
    let fast = false;
    fast.then_some(level)
}

/// Whether [`gemm_bf16`] is faster than [`gemm`] of F32 on this CPU: otherwise it only rounds.
pub(crate) fn is_fast() -> bool {
    fast_level().is_some()
}

#[track_caller]
fn product(a: Operand, b: Operand, c: Output, accumulate: bool, parallel: bool) {
    let ((m, k), (b_rows, n), (c_rows, c_cols)) = (a.shape(), b.shape(), c.shape());
    assert!(
        b_rows == k && c_rows == m && c_cols == n,
        "gemm_bf16: shapes do not fit: A [{m}, {k}], B [{b_rows}, {n}], C [{c_rows}, {c_cols}]"
    );
    if m == 0 || n == 0 {
        return;
    }
    if k > 0 {
        a.check_inside("A");
        b.check_inside("B");
    }
    either!(Output, &c, c => {
        extents("C", c.offset, c.data.len(), (m, c.row_stride), (n, c.col_stride)).check_distinct();
    });
    if k == 0 {
        if !accumulate {
            c.zero();
        }
        return;
    }
    // Rows of C are written as vectors.
    let (row_stride, col_stride) = c.strides();
    let by_columns = n > 1 && col_stride != 1 && (row_stride == 1 || m == 1);
    let (a, b, c) = if by_columns { (b.t(), a.t(), c.t()) } else { (a, b, c) };
    match fast_level() {
        #[cfg(target_arch = "x86_64")]
        Some(level) => {
            let ((m, k), (_, n)) = (a.shape(), b.shape());
            let (a, b, c) = (source(&a), source(&b.t()), target(c));
            blocked::run::<pack::One>(level, blocked::Job { m, n, k, a, b, c, accumulate, parallel });
        }
        _ => widened::run(a, b, c, accumulate, parallel),
    }
}

/// Rows are those of A, or columns of B.
#[cfg(target_arch = "x86_64")]
fn source(matrix: &Operand) -> pack::Source<pack::Stored> {
    use pack::{Source, Stored};
    fn place<E>(m: &MatRef<E>) -> *const E {
        m.data.as_ptr().wrapping_add(m.offset)
    }
    let (start, stride, term_stride) = match matrix {
        Operand::F32(m) => (Stored::F32(place(m)), m.row_stride, m.col_stride),
        Operand::BF16(m) => (Stored::BF16(place(m)), m.row_stride, m.col_stride),
    };
    Source { start, stride, term_stride }
}

/// [`source`] of a matrix that is stored in F32.
#[cfg(target_arch = "x86_64")]
#[track_caller]
fn source_of_f32(matrix: &Operand) -> pack::Source<*const f32> {
    let Operand::F32(m) = matrix else { panic!("expected a matrix in f32, got one in bf16") };
    pack::Source { start: m.data.as_ptr().wrapping_add(m.offset), stride: m.row_stride, term_stride: m.col_stride }
}

#[cfg(target_arch = "x86_64")]
fn target(c: Output) -> blocked::Target {
    use blocked::{Place, Target};
    let (row_stride, col_stride) = c.strides();
    let start = match c {
        Output::F32(c) => Place::F32(c.data.as_mut_ptr().wrapping_add(c.offset)),
        Output::BF16(c) => Place::BF16(c.data.as_mut_ptr().wrapping_add(c.offset)),
    };
    Target { start, row_stride, col_stride }
}

/// Whether [`three_parts`] computes a product sooner than vectors of F32 do.
pub(super) fn has_three_parts<E: Real>(product: &Product<E>) -> bool {
    let &Product { level, m, n, k, alpha, beta, .. } = product;
    let large = m.min(n) >= LEAST_SIDE && k <= MOST_TERMS && m.saturating_mul(n).saturating_mul(k) >= THREE_PARTS;
    let plain = alpha == E::ONE && (beta == E::ONE || beta == E::ZERO);
    level == Level::Amx && size_of::<E>() == 4 && large && plain
}

/// The product in F32 on tiles, each number in three parts.
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "no other CPU has tiles"))]
pub(super) fn three_parts<E: Real>(product: Product<E>, parallel: bool) {
    #[cfg(target_arch = "x86_64")]
    {
        use blocked::{Job, Place, Target};
        use pack::Source;
        use three::Three;
        let Product { m, n, k, a, a_rs, a_cs, b, b_rs, b_cs, beta, c, c_rs, c_cs, .. } = product;
        let a = Source { start: a.cast(), stride: a_rs, term_stride: a_cs };
        let b = Source { start: b.cast(), stride: b_cs, term_stride: b_rs };
        let c = Target { start: Place::F32(c.cast()), row_stride: c_rs, col_stride: c_cs };
        blocked::run::<Three>(Level::Amx, Job { m, n, k, a, b, c, accumulate: beta == E::ONE, parallel });
    }
}

/// A number whose products may be [narrow](kumiki_autograd::Var::is_narrow).
pub trait Factor: Real {
    /// `C = A B`, or with `accumulate` added to C, in parallel when it is worth it; `narrow` rounds F32 factors to BF16.
    ///
    /// # Panics
    /// As [`gemm`].
    fn product(narrow: bool, a: MatRef<Self>, b: MatRef<Self>, c: MatMut<Self>, accumulate: bool);
}

impl Factor for f32 {
    #[track_caller]
    fn product(narrow: bool, a: MatRef<f32>, b: MatRef<f32>, c: MatMut<f32>, accumulate: bool) {
        if narrow {
            gemm_bf16(Operand::F32(a), Operand::F32(b), Output::F32(c), accumulate);
        } else {
            gemm(1.0, a, b, if accumulate { 1.0 } else { 0.0 }, c);
        }
    }
}

impl Factor for f64 {
    #[track_caller]
    fn product(_: bool, a: MatRef<f64>, b: MatRef<f64>, c: MatMut<f64>, accumulate: bool) {
        gemm(1.0, a, b, if accumulate { 1.0 } else { 0.0 }, c);
    }
}

#[cfg(test)]
mod tests;
