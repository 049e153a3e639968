//! Sums over axes: the kernel behind `sum`, `mean` and the gradients of broadcast operands.
//!
//! A tensor is seen as `[outer, n, inner]` and summed over the middle, with weight from a second tensor if there is
//! one. At most [`ROWS`] terms are added up in the tensor's arithmetic, each lane for itself; these partial sums are
//! added in f64, in a fixed order. So f32 does not saturate, no sum depends on threads, and it costs what reading costs.

use kumiki_tensor::threads::parallel_map;
use kumiki_tensor::{DType, Element, Tensor};

use crate::arithmetic::Mul;
use crate::broadcast::zip_broadcast;
use crate::elementwise::{CHUNK, in_chunks};
use crate::simd::{Kernel, Lanes, Real};

/// Terms that one lane adds up before f64 takes over.
const ROWS: usize = 128;
/// Elements that one task sums: above that the summed axis is cut.
const TASK: usize = 2 * CHUNK;
/// Columns that are summed at a time.
const COLUMNS: usize = 1024;
/// Columns below this number are widened by taking several rows as one.
const NARROW: usize = 64;

/// Sums the axes along which `shape` broadcasts to the shape of `x`; [`Tensor::sum_to`], faster.
pub(crate) fn sum_to(x: &Tensor, shape: &[usize]) -> Tensor {
    if x.shape() == shape {
        return x.clone();
    }
    match layout(x.shape(), &broadcast_axes(x.shape(), shape)) {
        Some(dims) if on_host(x) => sum_middle(&x.reshape(&dims), None, 1.0).reshape(shape),
        _ => x.sum_to(shape),
    }
}

/// Whether the kernel below sums it; the tensor's own sums the others.
fn on_host(x: &Tensor) -> bool {
    x.dtype() != DType::BF16 && x.cuda().is_none()
}

/// `sum_to(x · y, shape)`, where y broadcasts to the shape of x; without the products in memory where one run of axes is
/// summed.
pub(crate) fn product_sum_to(x: Tensor, y: &Tensor, shape: &[usize]) -> Tensor {
    if x.shape() == shape {
        return if y.shape() == shape { crate::elementwise::zip(&Mul, x, y) } else { zip_broadcast(&Mul, &x, y) };
    }
    match layout(x.shape(), &broadcast_axes(x.shape(), shape)) {
        Some(dims) if on_host(&x) => {
            let y = y.expand(x.shape()).reshape(&dims);
            sum_middle(&x.reshape(&dims), Some(&y), 1.0).reshape(shape)
        }
        _ => sum_to(&zip_broadcast(&Mul, &x, y), shape),
    }
}

/// `scale` times the sum over `axes`, which are in order; in the shape without them. F32 or F64.
pub(crate) fn sum_axes(x: &Tensor, axes: &[usize], scale: f64) -> Tensor {
    let kept: Vec<usize> = (0..x.rank()).filter(|axis| !axes.contains(axis)).collect();
    let shape: Vec<usize> = kept.iter().map(|&axis| x.shape()[axis]).collect();
    if x.cuda().is_some() {
        let to: Vec<usize> = (0..x.rank()).map(|axis| if axes.contains(&axis) { 1 } else { x.shape()[axis] }).collect();
        let mut sum = x.sum_to(&to).reshape(&shape);
        sum.scale(scale);
        return sum;
    }
    let view = match layout(x.shape(), axes) {
        Some(dims) => x.reshape(&dims),
        // Axes between the summed ones: one copy brings those together.
        None => {
            let order: Vec<usize> = kept.iter().chain(axes).copied().collect();
            let n = axes.iter().map(|&axis| x.shape()[axis]).product();
            x.permute(&order).reshape(&[shape.iter().product(), n, 1])
        }
    };
    sum_middle(&view, None, scale).reshape(&shape)
}

/// The axes of `from` that `to` lacks or has with size 1 only.
fn broadcast_axes(from: &[usize], to: &[usize]) -> Vec<usize> {
    let extra = from.len() - to.len();
    (0..from.len()).filter(|&axis| axis < extra || to[axis - extra] != from[axis]).collect()
}

/// `[outer, n, inner]` when the given axes are neighbours, but for axes of size 1.
fn layout(shape: &[usize], axes: &[usize]) -> Option<[usize; 3]> {
    let mut dims = [1; 3];
    let mut part = 0;
    for (axis, &size) in shape.iter().enumerate().filter(|&(_, &size)| size != 1) {
        part = match (axes.contains(&axis), part) {
            (true, 0 | 1) => 1,
            (true, _) => return None,
            (false, 0) => 0,
            (false, _) => 2,
        };
        dims[part] *= size;
    }
    Some(dims)
}

/// `scale · Σ_r x[o, r, i] y[o, r, i]`, shape `[outer, inner]`.
fn sum_middle(x: &Tensor, y: Option<&Tensor>, scale: f64) -> Tensor {
    match x.dtype() {
        DType::F32 => sum_real::<f32>(x, y, scale),
        DType::F64 => sum_real::<f64>(x, y, scale),
        other => unreachable!("sums are taken in f32 and f64, not {other}"),
    }
}

/// One operand `[outer, n, inner]` in its storage; the last axis that varies has step 1.
#[derive(Clone, Copy)]
struct Operand<'a, E> {
    data: &'a [E],
    /// From one outer index to the next.
    outer: usize,
    /// From one row to the next.
    row: usize,
}

impl<'a, E: Real> Operand<'a, E> {
    fn new(x: &'a Tensor) -> Self
    where
        E: Element,
    {
        Operand { data: &x.storage_slice::<E>()[x.offset()..], outer: x.strides()[0], row: x.strides()[1] }
    }

    /// From row `r` and column `c` of outer index `o` on.
    fn at(self, o: usize, r: usize, c: usize) -> Self {
        Operand { data: &self.data[o * self.outer + r * self.row + c..], ..self }
    }
}

/// Itself, or a copy when the kernel cannot follow its strides.
fn readable(x: &Tensor) -> Tensor {
    let [_, row, step] = *x.strides() else { unreachable!("three axes") };
    let follows = if x.dim(2) > 1 { step == 1 } else { row == 1 || x.dim(1) == 1 };
    if follows { x.clone() } else { x.contiguous() }
}

fn sum_real<E: Real + Element>(x: &Tensor, y: Option<&Tensor>, scale: f64) -> Tensor {
    let [outer, n, inner] = *x.shape() else { unreachable!("three axes") };
    let mut out = Tensor::empty(E::DTYPE, &[outer, inner]);
    if out.is_empty() {
        return out;
    }
    if n == 0 {
        // 0 · scale: a mean of nothing is NaN.
        out.as_mut_slice::<E>().fill(Real::from_f64(0.0 * scale));
        return out;
    }
    let (x, y) = (readable(x), y.map(readable));
    let (x, y) = (Operand::<E>::new(&x), y.as_ref().map(Operand::<E>::new));
    let block = ROWS.max(TASK / inner);
    let blocks = n.div_ceil(block);
    if blocks == 1 {
        let chunk = if inner <= CHUNK { (CHUNK / n / inner).max(1) * inner } else { CHUNK };
        in_chunks(out.as_mut_slice::<E>(), chunk, chunk * n, &|i, piece| {
            let start = i * chunk;
            if inner == 1 {
                let (x, y) = (x.at(start, 0, 0), y.map(|y| y.at(start, 0, 0)));
                return E::dispatch(RowSums { x, y, n, scale, out: piece });
            }
            let mut sums = vec![0f64; inner.min(chunk)];
            let mut done = 0;
            while done < piece.len() {
                let (o, c) = ((start + done) / inner, (start + done) % inner);
                let sums = &mut sums[..(inner - c).min(piece.len() - done)];
                sums.fill(0.0);
                add_columns(x.at(o, 0, c), y.map(|y| y.at(o, 0, c)), n, sums);
                piece[done..].iter_mut().zip(&*sums).for_each(|(out, &sum)| *out = Real::from_f64(sum * scale));
                done += sums.len();
            }
        });
        return out;
    }
    let partial = parallel_map(outer * blocks, block * inner, |i| {
        let (o, r) = (i / blocks, i % blocks * block);
        let (x, y, rows) = (x.at(o, r, 0), y.map(|y| y.at(o, r, 0)), block.min(n - r));
        let mut sums = vec![0f64; inner];
        if inner == 1 {
            E::dispatch(RowSums { x, y, n: rows, scale: 1.0, out: &mut sums });
        } else {
            add_columns(x, y, rows, &mut sums);
        }
        sums
    });
    in_chunks(out.as_mut_slice::<E>(), inner, blocks * inner, &|o, out| {
        let mut sums = vec![0f64; inner];
        for block in &partial[o * blocks..(o + 1) * blocks] {
            sums.iter_mut().zip(block).for_each(|(sum, part)| *sum += part);
        }
        out.iter_mut().zip(&sums).for_each(|(out, &sum)| *out = Real::from_f64(sum * scale));
    });
    out
}

/// `scale` times the sum of each row of n neighbouring elements.
struct RowSums<'a, E, T> {
    x: Operand<'a, E>,
    y: Option<Operand<'a, E>>,
    n: usize,
    scale: f64,
    out: &'a mut [T],
}

impl<E: Real, T: Element> Kernel<E> for RowSums<'_, E, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        for (o, out) in self.out.iter_mut().enumerate() {
            let x = &self.x.at(o, 0, 0).data[..self.n];
            let sum = match self.y {
                Some(y) => row_sum::<E, L, true>(x, &y.at(o, 0, 0).data[..self.n]),
                None => row_sum::<E, L, false>(x, x),
            };
            *out = T::from_f64(sum * self.scale);
        }
    }
}

/// `acc + x`, or `acc + x · y` with weights.
#[inline(always)]
fn add<L: Lanes, const WEIGHTED: bool>(acc: L, x: L, y: L) -> L {
    if WEIGHTED { x.mul_add(y, acc) } else { acc + x }
}

/// The sum of x, or of the products `x · y`.
#[inline(always)]
pub(crate) fn row_sum<E: Real, L: Lanes<Elem = E>, const WEIGHTED: bool>(x: &[E], y: &[E]) -> f64 {
    let part = 4 * L::N * ROWS;
    let mut total = 0f64;
    for (x, y) in x.chunks(part).zip(y.chunks(part)) {
        let mut acc = [L::splat(E::ZERO); 4];
        let mut i = 0;
        while i + 4 * L::N <= x.len() {
            let (x, y) = (&x[i..i + 4 * L::N], &y[i..i + 4 * L::N]);
            for (k, acc) in acc.iter_mut().enumerate() {
                *acc = add::<L, WEIGHTED>(*acc, L::load(&x[k * L::N..]), L::load(&y[k * L::N..]));
            }
            i += 4 * L::N;
        }
        for (k, (x, y)) in x[i..].chunks(L::N).zip(y[i..].chunks(L::N)).enumerate() {
            let (x, y) = (L::load_partial(x, E::ZERO), L::load_partial(y, E::ZERO));
            acc[k] = add::<L, WEIGHTED>(acc[k], x, y);
        }
        total += ((acc[0] + acc[1]) + (acc[2] + acc[3])).reduce_sum().to_f64();
    }
    total
}

/// Adds to every element of `sums` its column of `rows` rows.
fn add_columns<'a, E: Real>(x: Operand<'a, E>, y: Option<Operand<'a, E>>, rows: usize, sums: &mut [f64]) {
    let columns = sums.len();
    let joined = NARROW.div_ceil(columns).min(rows);
    if joined == 1 || x.row != columns || y.is_some_and(|y| y.row != columns) {
        return E::dispatch(ColumnSums { x, y, rows, sums });
    }
    let mut wide = [0f64; 2 * NARROW];
    let wide = &mut wide[..joined * columns];
    let widened = |x: Operand<'a, E>| Operand { row: joined * columns, ..x };
    E::dispatch(ColumnSums { x: widened(x), y: y.map(widened), rows: rows / joined, sums: wide });
    for row in wide.chunks(columns) {
        sums.iter_mut().zip(row).for_each(|(sum, part)| *sum += part);
    }
    let done = rows / joined * joined;
    let rest = |x: Operand<'a, E>| x.at(0, done, 0);
    if done < rows {
        E::dispatch(ColumnSums { x: rest(x), y: y.map(rest), rows: rows - done, sums });
    }
}

struct ColumnSums<'a, E> {
    x: Operand<'a, E>,
    y: Option<Operand<'a, E>>,
    rows: usize,
    sums: &'a mut [f64],
}

impl<E: Real> Kernel<E> for ColumnSums<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        match self.y {
            Some(y) => column_sums::<E, L, true>(self.x, y, self.rows, self.sums),
            None => column_sums::<E, L, false>(self.x, self.x, self.rows, self.sums),
        }
    }
}

/// Rows are read from end to end, four at a time, into sums that stay in the first-level cache: a walk down the columns
/// would touch another page with every step.
#[inline(always)]
fn column_sums<E: Real, L: Lanes<Elem = E>, const WEIGHTED: bool>(
    x: Operand<E>,
    y: Operand<E>,
    rows: usize,
    sums: &mut [f64],
) {
    let mut acc = [E::ZERO; COLUMNS];
    for first in (0..rows).step_by(ROWS) {
        for (p, sums) in sums.chunks_mut(COLUMNS).enumerate() {
            let acc = &mut acc[..sums.len()];
            acc.fill(E::ZERO);
            let mut r = first;
            let end = rows.min(first + ROWS);
            while r + 4 <= end {
                add_rows::<E, L, WEIGHTED, 4>(x.at(0, r, p * COLUMNS), y.at(0, r, p * COLUMNS), acc);
                r += 4;
            }
            while r < end {
                add_rows::<E, L, WEIGHTED, 1>(x.at(0, r, p * COLUMNS), y.at(0, r, p * COLUMNS), acc);
                r += 1;
            }
            sums.iter_mut().zip(&*acc).for_each(|(sum, part)| *sum += part.to_f64());
        }
    }
}

/// Adds the next R rows to `acc`.
#[inline(always)]
fn add_rows<E: Real, L: Lanes<Elem = E>, const WEIGHTED: bool, const R: usize>(
    x: Operand<E>,
    y: Operand<E>,
    acc: &mut [E],
) {
    let len = acc.len();
    let (mut xs, mut ys) = ([&x.data[..len]; R], [&y.data[..len]; R]);
    for r in 1..R {
        (xs[r], ys[r]) = (&x.data[r * x.row..][..len], &y.data[r * y.row..][..len]);
    }
    let mut c = 0;
    while c + L::N <= len {
        let mut sum = L::load(&acc[c..]);
        for r in 0..R {
            sum = add::<L, WEIGHTED>(sum, L::load(&xs[r][c..]), L::load(&ys[r][c..]));
        }
        sum.store(&mut acc[c..]);
        c += L::N;
    }
    if c < len {
        let mut sum = L::load_partial(&acc[c..], E::ZERO);
        for r in 0..R {
            let (x, y) = (L::load_partial(&xs[r][c..], E::ZERO), L::load_partial(&ys[r][c..], E::ZERO));
            sum = add::<L, WEIGHTED>(sum, x, y);
        }
        sum.store_partial(&mut acc[c..]);
    }
}
