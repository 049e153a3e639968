//! Elementwise formulas over whole slices: one dispatch per call, tails masked.

use super::lanes::{Kernel, Lanes};
use super::real::Real;

/// A formula of one number. `apply` must be `#[inline(always)]`.
pub trait Unary<E: Real> {
    /// The formula, lane by lane.
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L;
}

/// A formula of two numbers. `apply` must be `#[inline(always)]`.
pub trait Binary<E: Real> {
    /// The formula, lane by lane.
    fn apply<L: Lanes<Elem = E>>(&self, x: L, y: L) -> L;
}

/// A formula of three numbers. `apply` must be `#[inline(always)]`.
pub trait Ternary<E: Real> {
    /// The formula, lane by lane.
    fn apply<L: Lanes<Elem = E>>(&self, x: L, y: L, z: L) -> L;
}

trait Formula<E: Real, const I: usize> {
    fn on<L: Lanes<Elem = E>>(&self, x: [L; I]) -> L;
}

struct Map<'a, F, E, const I: usize> {
    formula: &'a F,
    inputs: [*const E; I],
    out: *mut E,
    len: usize,
}

impl<E: Real, F: Formula<E, I>, const I: usize> Kernel<E> for Map<'_, F, E, I> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let Self { formula, inputs, out, len } = self;
        let mut i = 0;
        while i + L::N <= len {
            let mut x = [L::splat(E::ZERO); I];
            for k in 0..I {
                // SAFETY: every slice has `len` elements, and i + N <= len.
                x[k] = unsafe { L::load_ptr(inputs[k].add(i)) };
            }
            // SAFETY: as above.
            unsafe { formula.on(x).store_ptr(out.add(i)) };
            i += L::N;
        }
        if i < len {
            let mut x = [L::splat(E::ZERO); I];
            for k in 0..I {
                // SAFETY: every slice has `len` elements, and len - i < N are left.
                x[k] = unsafe { L::load_partial_ptr(inputs[k].add(i), len - i, E::ONE) };
            }
            // SAFETY: as above.
            unsafe { formula.on(x).store_partial_ptr(out.add(i), len - i) };
        }
    }
}

struct Of<'a, F>(&'a F);

impl<E: Real, F: Unary<E>> Formula<E, 1> for Of<'_, F> {
    #[inline(always)]
    fn on<L: Lanes<Elem = E>>(&self, [x]: [L; 1]) -> L {
        self.0.apply(x)
    }
}

impl<E: Real, F: Binary<E>> Formula<E, 2> for Of<'_, F> {
    #[inline(always)]
    fn on<L: Lanes<Elem = E>>(&self, [x, y]: [L; 2]) -> L {
        self.0.apply(x, y)
    }
}

impl<E: Real, F: Ternary<E>> Formula<E, 3> for Of<'_, F> {
    #[inline(always)]
    fn on<L: Lanes<Elem = E>>(&self, [x, y, z]: [L; 3]) -> L {
        self.0.apply(x, y, z)
    }
}

/// # Safety
/// All pointers are valid for `len` elements, `out` for writes; no other thread touches `out`, and an input that
/// overlaps it starts where it starts.
#[inline]
unsafe fn map<E: Real, F, const I: usize>(formula: &F, inputs: [*const E; I], out: *mut E, len: usize)
where
    for<'a> Of<'a, F>: Formula<E, I>,
{
    E::dispatch(Map { formula: &Of(formula), inputs, out, len });
}

#[track_caller]
#[inline]
fn same_length(name: &str, out: usize, inputs: &[usize]) {
    assert!(inputs.iter().all(|&len| len == out), "{name}: slices differ in length: inputs {inputs:?}, output {out}");
}

/// `out[i] = f(x[i])`.
///
/// # Panics
/// When the lengths differ; so do the functions below.
#[track_caller]
pub fn map_unary<E: Real, F: Unary<E>>(f: &F, x: &[E], out: &mut [E]) {
    same_length("map_unary", out.len(), &[x.len()]);
    // SAFETY: the slices are as long as `out`, which is borrowed for writing alone.
    unsafe { map(f, [x.as_ptr()], out.as_mut_ptr(), out.len()) };
}

/// `x[i] = f(x[i])`.
pub fn map_unary_inplace<E: Real, F: Unary<E>>(f: &F, x: &mut [E]) {
    let data = x.as_mut_ptr();
    // SAFETY: the slices are as long as `x`, which is borrowed for writing alone; its own elements are read before
    // they are written.
    unsafe { map(f, [data], data, x.len()) };
}

/// `out[i] = f(x[i], y[i])`.
///
/// # Panics
/// When the slices are not of one length.
#[track_caller]
pub fn map_binary<E: Real, F: Binary<E>>(f: &F, x: &[E], y: &[E], out: &mut [E]) {
    same_length("map_binary", out.len(), &[x.len(), y.len()]);
    // SAFETY: the slices are as long as `out`, which is borrowed for writing alone.
    unsafe { map(f, [x.as_ptr(), y.as_ptr()], out.as_mut_ptr(), out.len()) };
}

/// `x[i] = f(x[i], y[i])`.
///
/// # Panics
/// When the slices are not of one length.
#[track_caller]
pub fn map_binary_inplace<E: Real, F: Binary<E>>(f: &F, x: &mut [E], y: &[E]) {
    same_length("map_binary_inplace", x.len(), &[y.len()]);
    let data = x.as_mut_ptr();
    // SAFETY: the slices are as long as `x`, which is borrowed for writing alone; its own elements are read before
    // they are written.
    unsafe { map(f, [data, y.as_ptr()], data, x.len()) };
}

/// `out[i] = f(x[i], y[i], z[i])`.
///
/// # Panics
/// When the slices are not of one length.
#[track_caller]
pub fn map_ternary<E: Real, F: Ternary<E>>(f: &F, x: &[E], y: &[E], z: &[E], out: &mut [E]) {
    same_length("map_ternary", out.len(), &[x.len(), y.len(), z.len()]);
    // SAFETY: the slices are as long as `out`, which is borrowed for writing alone.
    unsafe { map(f, [x.as_ptr(), y.as_ptr(), z.as_ptr()], out.as_mut_ptr(), out.len()) };
}

/// `x[i] = f(x[i], y[i], z[i])`.
///
/// # Panics
/// When the slices are not of one length.
#[track_caller]
pub fn map_ternary_inplace<E: Real, F: Ternary<E>>(f: &F, x: &mut [E], y: &[E], z: &[E]) {
    same_length("map_ternary_inplace", x.len(), &[y.len(), z.len()]);
    let data = x.as_mut_ptr();
    // SAFETY: the slices are as long as `x`, which is borrowed for writing alone; its own elements are read before
    // they are written.
    unsafe { map(f, [data, y.as_ptr(), z.as_ptr()], data, x.len()) };
}
