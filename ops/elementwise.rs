//! Elementwise loops over tensors, and the operator that every formula of one number becomes.
//!
//! A formula is a small struct: [`Unary`] is its value, [`Binary`] with arguments `(dout, saved)` its gradient. Loops are
//! cut every [`CHUNK`] elements. BF16 goes through an F32 block on the stack: read and written once, rounded once.
//! A gradient overwrites `dout` when nobody else holds it.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::{DType, Element, Tensor, bf16, threads};

use crate::simd::{Binary, Real, Unary, map_binary, map_binary_inplace, map_unary, map_unary_inplace};

/// Elements of one task.
pub(crate) const CHUNK: usize = 16 * 1024;

/// Elements of BF16 that are widened at a time: three such blocks of F32 stay in the first-level cache.
const BLOCK: usize = 1024;

/// [`threads::parallel_chunks_mut`], compiled once for each type of element and not once for each formula.
pub(crate) fn in_chunks<T: Send>(out: &mut [T], chunk: usize, cost: usize, f: &(dyn Fn(usize, &mut [T]) + Sync)) {
    threads::parallel_chunks_mut(out, chunk, cost, f);
}

/// A formula for both types of arithmetic.
pub(crate) trait Formula1: Unary<f32> + Unary<f64> + Sync {}
impl<F: Unary<f32> + Unary<f64> + Sync> Formula1 for F {}

/// A formula of two numbers for both types of arithmetic.
pub(crate) trait Formula2: Binary<f32> + Binary<f64> + Sync {}
impl<F: Binary<f32> + Binary<f64> + Sync> Formula2 for F {}

#[track_caller]
pub(crate) fn assert_float(op: &str, x: &Tensor) {
    assert!(x.dtype().is_float(), "{op}: expected floats, got {} (x: {:?})", x.dtype(), x.shape());
}

/// `f` of every element; contiguous.
pub(crate) fn map(f: &impl Formula1, x: &Tensor) -> Tensor {
    let x = x.contiguous();
    let mut out = Tensor::empty(x.dtype(), x.shape());
    match x.dtype() {
        DType::F32 => map_slice::<f32>(f, x.as_slice(), out.as_mut_slice()),
        DType::F64 => map_slice::<f64>(f, x.as_slice(), out.as_mut_slice()),
        _ => {
            let x = x.as_slice::<bf16>();
            in_chunks(out.as_mut_slice::<bf16>(), CHUNK, CHUNK, &|i, piece| {
                let (mut wide, mut result) = ([0f32; BLOCK], [0f32; BLOCK]);
                for (y, x) in piece.chunks_mut(BLOCK).zip(x[i * CHUNK..].chunks(BLOCK)) {
                    let (wide, result) = (&mut wide[..y.len()], &mut result[..y.len()]);
                    widen(&x[..y.len()], wide);
                    map_unary(f, wide, result);
                    narrow(result, y);
                }
            });
        }
    }
    out
}

/// As [`map`], written over `x` when this is its only owner.
pub(crate) fn map_over(f: &impl Formula1, x: Tensor) -> Tensor {
    if !x.is_unique() || !x.is_contiguous() {
        return map(f, &x);
    }
    let mut x = x;
    match x.dtype() {
        DType::F32 => in_chunks(x.as_mut_slice::<f32>(), CHUNK, CHUNK, &|_, piece| map_unary_inplace(f, piece)),
        DType::F64 => in_chunks(x.as_mut_slice::<f64>(), CHUNK, CHUNK, &|_, piece| map_unary_inplace(f, piece)),
        _ => return map(f, &x),
    }
    x
}

fn map_slice<E: Real>(f: &(impl Unary<E> + Sync), x: &[E], out: &mut [E]) {
    in_chunks(out, CHUNK, CHUNK, &|i, piece| map_unary(f, &x[i * CHUNK..][..piece.len()], piece));
}

/// `f(x, y)` of tensors with the same shape and dtype, written over `x` when this is its only owner.
pub(crate) fn zip(f: &impl Formula2, x: Tensor, y: &Tensor) -> Tensor {
    debug_assert!(x.shape() == y.shape() && x.dtype() == y.dtype());
    match x.dtype() {
        DType::F32 => zip_real::<f32>(f, x, y),
        DType::F64 => zip_real::<f64>(f, x, y),
        _ => {
            let mut out = writable(x);
            let y = y.contiguous();
            let y = y.as_slice::<bf16>();
            in_chunks(out.as_mut_slice::<bf16>(), CHUNK, CHUNK, &|i, piece| {
                let (mut a, mut b) = ([0f32; BLOCK], [0f32; BLOCK]);
                for (x, y) in piece.chunks_mut(BLOCK).zip(y[i * CHUNK..].chunks(BLOCK)) {
                    let (a, b) = (&mut a[..x.len()], &mut b[..x.len()]);
                    widen(x, a);
                    widen(&y[..x.len()], b);
                    map_binary_inplace(f, a, b);
                    narrow(a, x);
                }
            });
            out
        }
    }
}

fn zip_real<E: Real + Element>(f: &(impl Binary<E> + Sync), x: Tensor, y: &Tensor) -> Tensor {
    let y = y.contiguous();
    let y = y.as_slice::<E>();
    if x.is_unique() && x.is_contiguous() {
        let mut x = x;
        in_chunks(x.as_mut_slice::<E>(), CHUNK, CHUNK, &|i, piece| {
            map_binary_inplace(f, piece, &y[i * CHUNK..][..piece.len()]);
        });
        return x;
    }
    let x = x.contiguous();
    let mut out = Tensor::empty(x.dtype(), x.shape());
    let x = x.as_slice::<E>();
    in_chunks(out.as_mut_slice::<E>(), CHUNK, CHUNK, &|i, piece| {
        map_binary(f, &x[i * CHUNK..][..piece.len()], &y[i * CHUNK..][..piece.len()], piece);
    });
    out
}

/// The same elements, contiguous and in storage that nobody else holds.
pub(crate) fn writable(x: Tensor) -> Tensor {
    if x.is_unique() && x.is_contiguous() { x } else { x.copy() }
}

fn widen(x: &[bf16], out: &mut [f32]) {
    out.iter_mut().zip(x).for_each(|(y, x)| *y = f32::from_bits(u32::from(x.to_bits()) << 16));
}

fn narrow(x: &[f32], out: &mut [bf16]) {
    out.iter_mut().zip(x).for_each(|(y, &x)| *y = bf16::from_f32(x));
}

/// What a formula's gradient is computed from.
pub(crate) enum Save {
    /// The input: `x`.
    Input,
    /// The output: `y`.
    Output,
}

/// The operator of a formula: `y = f(x)`, `dx = f(dout, saved)`.
#[track_caller]
pub(crate) fn unary<F>(name: &'static str, x: &Var, f: F, save: Save) -> Var
where
    F: Formula1 + Formula2 + 'static,
{
    assert_float(name, x.value());
    let y = map(&f, x.value());
    let kept = match save {
        Save::Input => ("x", x.value().clone()),
        Save::Output => ("y", y.clone()),
    };
    Var::from_op(y, &[x], || UnaryBackward { name, f, label: kept.0, saved: kept.1 })
}

struct UnaryBackward<F> {
    name: &'static str,
    f: F,
    label: &'static str,
    saved: Tensor,
}

impl<F: Formula2 + 'static> Backward for UnaryBackward<F> {
    fn name(&self) -> &'static str {
        self.name
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![(self.label, &self.saved)]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        vec![Some(zip(&self.f, dout, &self.saved))]
    }
}
