//! The loop of operators of two tensors that broadcast.
//!
//! Neighbouring axes along which both operands continue are merged; what is left is rows of the last merged axis, in
//! which each operand either runs along or stands still. An operand that does neither (a transposed or stepped view) is
//! copied first. So equal shapes are one long row, `[D]` against `[.., D]` rows of D, a scalar a row that stands still.

use kumiki_tensor::shape::{MAX_RANK, Offsets, broadcast};
use kumiki_tensor::{DType, Element, Tensor};

use crate::cuda;
use crate::elementwise::{CHUNK, Formula2, in_chunks};
use crate::simd::{Binary, Kernel, Lanes, Real};

/// The shape of the result, after the checks that every operator of two tensors makes.
#[track_caller]
pub(crate) fn checked_shape(op: &str, a: &Tensor, b: &Tensor) -> Vec<usize> {
    let both = || format!("(a: {:?} {}, b: {:?} {})", a.shape(), a.dtype(), b.shape(), b.dtype());
    assert!(a.dtype().is_float() && a.dtype() == b.dtype(), "{op}: a and b must be floats of one dtype {}", both());
    match broadcast(a.shape(), b.shape()) {
        Some(shape) => shape.to_vec(),
        None => panic!("{op}: a and b do not broadcast {}", both()),
    }
}

/// `f(a, b)` with broadcasting; contiguous. Shapes and dtypes have been checked.
pub(crate) fn zip_broadcast(f: &impl Formula2, a: &Tensor, b: &Tensor) -> Tensor {
    let shape = broadcast(a.shape(), b.shape()).expect("checked by the operator");
    if let Some(device) = a.cuda() {
        return cuda::zip_views(device, f, a, b, &shape);
    }
    match a.dtype() {
        DType::F32 => zip_rows::<f32>(f, a, b, &shape),
        DType::F64 => zip_rows::<f64>(f, a, b, &shape),
        narrow => zip_rows::<f32>(f, &a.cast(DType::F32), &b.cast(DType::F32), &shape).cast(narrow),
    }
}

/// Merged axes of the result: size, and the stride of each operand. The last one is the row.
struct Plan {
    sizes: [usize; MAX_RANK + 1],
    strides: [[usize; MAX_RANK + 1]; 2],
    axes: usize,
}

impl Plan {
    fn new(shape: &[usize], a: &Tensor, b: &Tensor) -> Plan {
        let (a, b) = (a.expand(shape), b.expand(shape));
        // Filled from the last axis, then turned round.
        let mut plan = Plan { sizes: [1; MAX_RANK + 1], strides: [[1; MAX_RANK + 1]; 2], axes: 0 };
        for axis in (0..shape.len()).rev().filter(|&axis| shape[axis] != 1) {
            let step = [a.strides()[axis], b.strides()[axis]];
            let last = plan.axes.wrapping_sub(1);
            if plan.axes > 0 && (0..2).all(|k| step[k] == plan.sizes[last] * plan.strides[k][last]) {
                plan.sizes[last] *= shape[axis];
            } else {
                plan.sizes[plan.axes] = shape[axis];
                (0..2).for_each(|k| plan.strides[k][plan.axes] = step[k]);
                plan.axes += 1;
            }
        }
        plan.axes = plan.axes.max(1);
        plan.sizes[..plan.axes].reverse();
        plan.strides.iter_mut().for_each(|s| s[..plan.axes].reverse());
        plan
    }

    fn row(&self) -> usize {
        self.sizes[self.axes - 1]
    }

    /// Whether operand `k` runs along rows (`Some(true)`), stands still in them, or neither.
    fn runs(&self, k: usize) -> Option<bool> {
        match self.strides[k][self.axes - 1] {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    /// Where the rows of operand `k` start, from row `row` on.
    fn starts(&self, k: usize, offset: usize, row: usize) -> Offsets {
        let outer = self.axes - 1;
        Offsets::new(&self.sizes[..outer], &self.strides[k][..outer], offset).skip_to(row)
    }
}

fn zip_rows<E: Real + Element>(f: &(impl Binary<E> + Sync), a: &Tensor, b: &Tensor, shape: &[usize]) -> Tensor {
    let mut out = Tensor::empty(E::DTYPE, shape);
    if out.is_empty() {
        return out;
    }
    let plan = Plan::new(shape, a, b);
    let a = if plan.runs(0).is_some() { a.clone() } else { a.contiguous() };
    let b = if plan.runs(1).is_some() { b.clone() } else { b.contiguous() };
    let plan = Plan::new(shape, &a, &b);
    let (x, y) = (a.storage_slice::<E>(), b.storage_slice::<E>());
    let row = plan.row();
    let chunk = if row <= CHUNK { CHUNK / row * row } else { CHUNK };
    in_chunks(out.as_mut_slice::<E>(), chunk, chunk, &|i, out| {
        let first = i * chunk / row;
        let rows = plan.starts(0, a.offset(), first).zip(plan.starts(1, b.offset(), first));
        let column = i * chunk % row;
        let runs = (plan.runs(0) != Some(false), plan.runs(1) != Some(false));
        E::dispatch(Rows { f, x, y, out, row, column, starts: rows, runs });
    });
    out
}

/// A piece of the result that starts in column `column` of its first row.
struct Rows<'a, F, E, I> {
    f: &'a F,
    x: &'a [E],
    y: &'a [E],
    out: &'a mut [E],
    row: usize,
    column: usize,
    starts: I,
    runs: (bool, bool),
}

impl<E: Real, F: Binary<E>, I: Iterator<Item = (usize, usize)>> Kernel<E> for Rows<'_, F, E, I> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        match self.runs {
            (true, true) => self.rows::<L, true, true>(),
            (true, false) => self.rows::<L, true, false>(),
            (false, true) => self.rows::<L, false, true>(),
            (false, false) => self.rows::<L, false, false>(),
        }
    }
}

impl<E: Real, F: Binary<E>, I: Iterator<Item = (usize, usize)>> Rows<'_, F, E, I> {
    #[inline(always)]
    fn rows<L: Lanes<Elem = E>, const X: bool, const Y: bool>(self) {
        let (mut out, mut column) = (self.out, self.column);
        for (x, y) in self.starts {
            let len = out.len().min(self.row - column);
            if len == 0 {
                return;
            }
            let (now, later) = out.split_at_mut(len);
            let x = if X { &self.x[x + column..][..len] } else { &self.x[x..][..1] };
            let y = if Y { &self.y[y + column..][..len] } else { &self.y[y..][..1] };
            segment::<E, F, L, X, Y>(self.f, x, y, now);
            (out, column) = (later, 0);
        }
    }
}

/// A row of the result, or a part: `x` and `y` are as long as `out`, or one element that stands still.
#[inline(always)]
fn segment<E: Real, F: Binary<E>, L: Lanes<Elem = E>, const X: bool, const Y: bool>(
    f: &F,
    x: &[E],
    y: &[E],
    out: &mut [E],
) {
    let (still_x, still_y) = (L::splat(x[0]), L::splat(y[0]));
    let mut i = 0;
    while i + L::N <= out.len() {
        let a = if X { L::load(&x[i..]) } else { still_x };
        let b = if Y { L::load(&y[i..]) } else { still_y };
        f.apply(a, b).store(&mut out[i..]);
        i += L::N;
    }
    if i < out.len() {
        let a = if X { L::load_partial(&x[i..], E::ONE) } else { still_x };
        let b = if Y { L::load_partial(&y[i..], E::ONE) } else { still_y };
        f.apply(a, b).store_partial(&mut out[i..]);
    }
}
