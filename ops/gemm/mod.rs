//! Matrix products: `C = alpha A B + beta C` for any non-negative strides of A and B.
//!
//! - `blocked`: large products with AVX2 or AVX-512. A and B are packed into slivers as wide as the register tile, then
//!   tiles of C, cut by shape, are computed in parallel.
//! - `portable`: large products on other CPUs, through the crate `matrixmultiply`.
//! - `tile`: the register tile, and small products that read their operands in place.
//! - `vector`: one row or one column, bound by memory.
//! - `bf16`: factors of BF16, sums of F32; and larger products of F32 on CPUs with tiles (AMX).
//!
//! The way is chosen by shape and strides alone, and on each way an element of C is one fixed chain of operations,
//! whichever thread or tile computes it. So results are bitwise the same for any number of threads, and the three entry
//! points agree.

mod bf16;
mod blocked;
mod pack;
mod portable;
mod tile;
mod vector;

use kumiki_tensor::threads;

use crate::simd::{Level, Real, level};

#[cfg(target_arch = "x86_64")]
pub(crate) use bf16::has_amx;
pub use bf16::{Factor, Operand, Output, gemm_bf16, gemm_bf16_serial};
pub(crate) use bf16::{Side, is_fast, packed};

/// Terms per pass over C: B's sliver of this depth and A's block stay in the first two cache levels.
pub(crate) const KC: usize = 256;

/// A matrix to read: element `(i, j)` is `data[offset + i * row_stride + j * col_stride]`. Strides may be 0.
#[derive(Clone, Copy, Debug)]
pub struct MatRef<'a, E> {
    /// What the matrix is a view of.
    pub data: &'a [E],
    /// Where element (0, 0) is.
    pub offset: usize,
    /// The number of rows.
    pub rows: usize,
    /// The number of columns.
    pub cols: usize,
    /// From one row to the next.
    pub row_stride: usize,
    /// From one column to the next.
    pub col_stride: usize,
}

impl<'a, E> MatRef<'a, E> {
    /// A row-major matrix at the start of `data`.
    #[must_use]
    pub fn new(data: &'a [E], rows: usize, cols: usize) -> Self {
        Self { data, offset: 0, rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// The transposed view.
    #[must_use]
    pub fn t(self) -> Self {
        let Self { data, offset, rows, cols, row_stride, col_stride } = self;
        Self { data, offset, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }
}

/// A matrix to write, laid out as in [`MatRef`]; no two elements may share a place.
#[derive(Debug)]
pub struct MatMut<'a, E> {
    /// What the matrix is a view of.
    pub data: &'a mut [E],
    /// Where element (0, 0) is.
    pub offset: usize,
    /// The number of rows.
    pub rows: usize,
    /// The number of columns.
    pub cols: usize,
    /// From one row to the next.
    pub row_stride: usize,
    /// From one column to the next.
    pub col_stride: usize,
}

impl<'a, E> MatMut<'a, E> {
    /// A row-major matrix at the start of `data`.
    #[must_use]
    pub fn new(data: &'a mut [E], rows: usize, cols: usize) -> Self {
        Self { data, offset: 0, rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// The transposed view.
    #[must_use]
    pub fn t(self) -> Self {
        let Self { data, offset, rows, cols, row_stride, col_stride } = self;
        Self { data, offset, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }
}

/// One batch axis of [`gemm_batched`]: how far each matrix moves from one index to the next. `a_stride` and `b_stride`
/// may be 0 for a matrix that all share.
#[derive(Clone, Copy, Debug)]
pub struct BatchAxis {
    /// The number of products along the axis.
    pub size: usize,
    /// From one A to the next.
    pub a_stride: usize,
    /// From one B to the next.
    pub b_stride: usize,
    /// From one C to the next.
    pub c_stride: usize,
}

/// The most batch axes of [`gemm_batched`].
pub const MAX_BATCH_AXES: usize = 4;

/// One product with its extents checked: every element is inside its slice, and C's are distinct and held for writing.
#[derive(Clone, Copy)]
struct Product<E> {
    level: Level,
    m: usize,
    n: usize,
    k: usize,
    alpha: E,
    a: *const E,
    a_rs: usize,
    a_cs: usize,
    b: *const E,
    b_rs: usize,
    b_cs: usize,
    beta: E,
    c: *mut E,
    c_rs: usize,
    c_cs: usize,
}

// SAFETY: it stands for two shared slices and one exclusive slice of Send + Sync elements; whoever runs parts of a
// product on several threads gives each of them other elements of C.
unsafe impl<E: Real> Send for Product<E> {}
// SAFETY: as above.
unsafe impl<E: Real> Sync for Product<E> {}

/// Extent and stride of each axis of an operand: rows, columns, then the batch.
#[derive(Clone, Copy)]
struct Axes {
    axes: [(usize, usize); 2 + MAX_BATCH_AXES],
    used: usize,
}

impl Axes {
    #[inline]
    fn new(rows: (usize, usize), cols: (usize, usize), batch: &[BatchAxis], stride: fn(&BatchAxis) -> usize) -> Self {
        let mut axes = [(1, 0); 2 + MAX_BATCH_AXES];
        axes[0] = rows;
        axes[1] = cols;
        for (to, axis) in axes[2..].iter_mut().zip(batch) {
            *to = (axis.size, stride(axis));
        }
        Self { axes, used: 2 + batch.len() }
    }

    /// The offset of the last element, if it can be counted at all. No extent is 0.
    #[inline]
    fn last(&self, offset: usize) -> Option<usize> {
        let mut last = offset;
        for &(extent, stride) in &self.axes[..self.used] {
            last = last.checked_add((extent - 1).checked_mul(stride)?)?;
        }
        Some(last)
    }

    #[cold]
    fn describe(&self) -> String {
        format!("(extent, stride) {:?}", &self.axes[..self.used])
    }

    #[track_caller]
    #[inline]
    fn check_inside(&self, name: &str, offset: usize, len: usize) {
        match self.last(offset) {
            Some(last) if last < len => {}
            Some(last) => {
                panic!("gemm: {name} reaches element {last} of {len}: offset {offset}, {}", self.describe())
            }
            None => panic!("gemm: {name} reaches past the address space: offset {offset}, {}", self.describe()),
        }
    }

    /// Each axis must step over everything that the finer ones reach.
    #[track_caller]
    #[inline]
    fn check_distinct(&self) {
        let mut sorted = self.axes;
        let sorted = &mut sorted[..self.used];
        if self.used == 2 {
            if sorted[0].1 > sorted[1].1 {
                sorted.swap(0, 1);
            }
        } else {
            sorted.sort_unstable_by_key(|&(_, stride)| stride);
        }
        let mut reach = 0;
        for &mut (extent, stride) in sorted {
            assert!(extent == 1 || stride > reach, "gemm: elements of C overlap: {}", self.describe());
            reach += (extent - 1) * stride;
        }
    }
}

/// The axes of one matrix, every element of which must be inside its slice.
#[track_caller]
fn extents(name: &str, offset: usize, len: usize, rows: (usize, usize), cols: (usize, usize)) -> Axes {
    let axes = Axes::new(rows, cols, &[], |_| 0);
    axes.check_inside(name, offset, len);
    axes
}

#[track_caller]
fn checked<E: Real>(
    alpha: E,
    a: MatRef<E>,
    b: MatRef<E>,
    beta: E,
    c: MatMut<E>,
    batch: &[BatchAxis],
) -> Option<Product<E>> {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    assert!(
        b.rows == k && c.rows == m && c.cols == n,
        "gemm: shapes do not fit: A [{m}, {k}], B [{}, {n}], C [{}, {}]",
        b.rows,
        c.rows,
        c.cols
    );
    if m == 0 || n == 0 || batch.iter().any(|axis| axis.size == 0) {
        return None;
    }
    assert!(batch.len() <= MAX_BATCH_AXES, "gemm: at most {MAX_BATCH_AXES} batch axes, found {}", batch.len());
    if k > 0 {
        let axes = Axes::new((m, a.row_stride), (k, a.col_stride), batch, |axis| axis.a_stride);
        axes.check_inside("A", a.offset, a.data.len());
        let axes = Axes::new((k, b.row_stride), (n, b.col_stride), batch, |axis| axis.b_stride);
        axes.check_inside("B", b.offset, b.data.len());
    }
    let axes = Axes::new((m, c.row_stride), (n, c.col_stride), batch, |axis| axis.c_stride);
    axes.check_inside("C", c.offset, c.data.len());
    axes.check_distinct();
    Some(Product {
        level: level(),
        m,
        n,
        k,
        alpha,
        // With k = 0 nothing is read, and the offsets of A and B were not checked.
        a: a.data.as_ptr().wrapping_add(a.offset),
        a_rs: a.row_stride,
        a_cs: a.col_stride,
        b: b.data.as_ptr().wrapping_add(b.offset),
        b_rs: b.row_stride,
        b_cs: b.col_stride,
        beta,
        c: c.data.as_mut_ptr().wrapping_add(c.offset),
        c_rs: c.row_stride,
        c_cs: c.col_stride,
    })
}

/// `C[m, n] = alpha A[m, k] B[k, n] + beta C`, in parallel when it is worth it.
///
/// With `beta` 0, C is written without being read. Products with `alpha` 0 or `k` 0 read neither A nor B.
///
/// # Panics
/// When shapes do not fit, a matrix reaches outside its slice, or two elements of C share a place.
#[track_caller]
pub fn gemm<E: Real>(alpha: E, a: MatRef<E>, b: MatRef<E>, beta: E, c: MatMut<E>) {
    if let Some(product) = checked(alpha, a, b, beta, c, &[]) {
        product.run(true);
    }
}

/// As [`gemm`], on the calling thread alone: for tiles inside fused operators.
///
/// # Panics
/// As [`gemm`].
#[track_caller]
pub fn gemm_serial<E: Real>(alpha: E, a: MatRef<E>, b: MatRef<E>, beta: E, c: MatMut<E>) {
    if let Some(product) = checked(alpha, a, b, beta, c, &[]) {
        product.run(false);
    }
}

/// [`gemm`] at every index of the batch axes; `a`, `b` and `c` describe the first product.
///
/// # Panics
/// As [`gemm`], over the whole batch.
#[track_caller]
pub fn gemm_batched<E: Real>(alpha: E, a: MatRef<E>, b: MatRef<E>, beta: E, c: MatMut<E>, batch: &[BatchAxis]) {
    let Some(product) = checked(alpha, a, b, beta, c, batch) else {
        return;
    };
    let items: usize = batch.iter().map(|axis| axis.size).product();
    if items < PARALLEL_ITEMS && product.cost() >= threads::SERIAL_BELOW {
        (0..items).for_each(|i| product.at(batch, i).run(true));
    } else {
        threads::parallel_for(items, product.cost(), |i| product.at(batch, i).run(false));
    }
}

/// Multiply-adds up to which plain loops win.
const PLAIN: usize = 64;

/// From this many products on, a batch is parallel over its products instead of inside each.
const PARALLEL_ITEMS: usize = 8;

impl<E: Real> Product<E> {
    /// Work in the units of [`threads::SERIAL_BELOW`]: a multiply-add costs about a sixteenth of an element operation.
    fn cost(&self) -> usize {
        self.m.saturating_mul(self.n).saturating_mul(self.k) / 16
    }

    /// `C^T = B^T A^T`.
    fn transposed(self) -> Self {
        Self {
            m: self.n,
            n: self.m,
            a: self.b,
            a_rs: self.b_cs,
            a_cs: self.b_rs,
            b: self.a,
            b_rs: self.a_cs,
            b_cs: self.a_rs,
            c_rs: self.c_cs,
            c_cs: self.c_rs,
            ..self
        }
    }

    /// The product at an index of the batch, the last axis fastest.
    fn at(&self, batch: &[BatchAxis], index: usize) -> Self {
        let (mut rest, mut a, mut b, mut c) = (index, 0, 0, 0);
        for axis in batch.iter().rev() {
            let i = rest % axis.size;
            rest /= axis.size;
            a += i * axis.a_stride;
            b += i * axis.b_stride;
            c += i * axis.c_stride;
        }
        Self { a: self.a.wrapping_add(a), b: self.b.wrapping_add(b), c: self.c.wrapping_add(c), ..*self }
    }

    /// Columns `from..to` of C.
    ///
    /// # Safety
    /// `from < to <= n`, and no other thread works on these columns.
    unsafe fn columns(self, from: usize, to: usize) -> Self {
        // SAFETY: the first element of column `from` is inside both slices.
        unsafe { Self { n: to - from, b: self.b.add(from * self.b_cs), c: self.c.add(from * self.c_cs), ..self } }
    }

    fn run(self, parallel: bool) {
        if self.k == 0 || self.alpha == E::ZERO {
            return self.scale();
        }
        // Rows of C are written as vectors.
        let by_columns = self.c_cs != 1 && self.c_rs == 1 && self.m > 1;
        let this = if (self.n == 1 && self.m > 1) || (by_columns && self.n > 1) { self.transposed() } else { self };
        if this.m.saturating_mul(this.n).saturating_mul(this.k) <= PLAIN {
            this.plain();
        } else if bf16::has_three_parts(&this) {
            bf16::three_parts(this, parallel);
        } else if vector::fits(&this) {
            vector::run(this, parallel);
        } else if tile::fits(&this) {
            tile::run(this, parallel);
        } else if this.level == Level::Portable {
            portable::run(this, parallel);
        } else {
            blocked::run(this, parallel);
        }
    }

    /// Loops as one would write them: nothing else is as fast for 2 x 3 x 4.
    fn plain(self) {
        for i in 0..self.m {
            for j in 0..self.n {
                let mut sum = E::ZERO;
                for p in 0..self.k {
                    // SAFETY: (i, p) and (p, j) are elements of A and B.
                    sum += unsafe {
                        *self.a.add(i * self.a_rs + p * self.a_cs) * *self.b.add(p * self.b_rs + j * self.b_cs)
                    };
                }
                // SAFETY: (i, j) is an element of C.
                let c = unsafe { &mut *self.c.add(i * self.c_rs + j * self.c_cs) };
                *c = if self.beta == E::ZERO { self.alpha * sum } else { self.alpha * sum + self.beta * *c };
            }
        }
    }

    fn scale(self) {
        for i in 0..self.m {
            for j in 0..self.n {
                // SAFETY: (i, j) is an element of C.
                let c = unsafe { &mut *self.c.add(i * self.c_rs + j * self.c_cs) };
                *c = if self.beta == E::ZERO { E::ZERO } else { self.beta * *c };
            }
        }
    }
}

/// Calls `f(from, to)` for pieces of `0..len` of `piece` elements.
fn for_pieces(len: usize, piece: usize, cost: usize, parallel: bool, f: impl Fn(usize, usize) + Sync + Send) {
    let items = len.div_ceil(piece);
    let one = |i: usize| f(i * piece, len.min((i + 1) * piece));
    if parallel {
        threads::parallel_for(items, cost, one);
    } else {
        (0..items).for_each(one);
    }
}

#[cfg(test)]
mod tests;
