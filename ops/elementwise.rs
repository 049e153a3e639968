//! Elementwise loops over tensors, and the operator that every formula of one number becomes.
//!
//! A formula is a small struct: [`Unary`] is its value, [`Binary`] with arguments `(dout, saved)` its gradient. Loops are
//! cut every [`CHUNK`] elements. BF16 is read and written once, and rounded once ([`stored`](crate::stored)).
//! A gradient overwrites `dout` when nobody else holds it.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::{DType, Element, Tensor, bf16, threads};

use crate::cuda::{self, OnCuda};
use crate::simd::{Binary, Real, Unary, map_binary, map_binary_inplace, map_unary, map_unary_inplace};
use crate::stored::{map_stored, zip_stored, zip_stored_inplace};

/// Elements of one task.
pub(crate) const CHUNK: usize = 16 * 1024;

/// [`threads::parallel_chunks_mut`], compiled once for each type of element and not once for each formula.
pub(crate) fn in_chunks<T: Send>(out: &mut [T], chunk: usize, cost: usize, f: &(dyn Fn(usize, &mut [T]) + Sync)) {
    threads::parallel_chunks_mut(out, chunk, cost, f);
}

/// A formula for both types of arithmetic.
pub(crate) trait Formula1: Unary<f32> + Unary<f64> + OnCuda + Sync {}
impl<F: Unary<f32> + Unary<f64> + OnCuda + Sync> Formula1 for F {}

/// A formula of two numbers for both types of arithmetic.
pub(crate) trait Formula2: Binary<f32> + Binary<f64> + OnCuda + Sync {}
impl<F: Binary<f32> + Binary<f64> + OnCuda + Sync> Formula2 for F {}

#[track_caller]
pub(crate) fn assert_float(op: &str, x: &Tensor) {
    assert!(x.dtype().is_float(), "{op}: expected floats, got {} (x: {:?})", x.dtype(), x.shape());
}

/// `f` of every element; contiguous.
pub(crate) fn map(f: &impl Formula1, x: &Tensor) -> Tensor {
    let x = x.contiguous();
    if let Some(device) = x.cuda() {
        return cuda::map(device, f, &x);
    }
    let mut out = Tensor::empty(x.dtype(), x.shape());
    match x.dtype() {
        DType::F32 => map_slice::<f32>(f, x.as_slice(), out.as_mut_slice()),
        DType::F64 => map_slice::<f64>(f, x.as_slice(), out.as_mut_slice()),
        _ => {
            let x = x.as_slice::<bf16>();
            in_chunks(out.as_mut_slice::<bf16>(), CHUNK, CHUNK, &|i, piece| {
                map_stored(f, &x[i * CHUNK..][..piece.len()], piece);
            });
        }
    }
    out
}

/// As [`map`], written over `x` when this is its only owner.
pub(crate) fn map_over(f: &impl Formula1, x: Tensor) -> Tensor {
    if x.cuda().is_some() || !x.is_unique() || !x.is_contiguous() {
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
    if let Some(device) = y.cuda() {
        return cuda::zip(device, f, &x.contiguous(), &y.contiguous());
    }
    match x.dtype() {
        DType::F32 => zip_real::<f32>(f, x, y),
        DType::F64 => zip_real::<f64>(f, x, y),
        _ => {
            let (x, y) = (x.contiguous(), y.contiguous());
            let (mut out, shared) =
                if x.is_unique() { (x, None) } else { (Tensor::empty(x.dtype(), x.shape()), Some(x)) };
            let (shared, y) = (shared.as_ref().map(|x| x.as_slice::<bf16>()), y.as_slice::<bf16>());
            in_chunks(out.as_mut_slice::<bf16>(), CHUNK, CHUNK, &|i, piece| {
                let at = i * CHUNK..i * CHUNK + piece.len();
                match shared {
                    Some(x) => zip_stored(f, &x[at.clone()], &y[at], piece),
                    None => zip_stored_inplace(f, piece, &y[at]),
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

#[cfg(test)]
mod tests {
    use crate::{mul_scalar, silu};
    use kumiki_autograd::{Tape, Var};
    use kumiki_tensor::threads::with_threads;
    use kumiki_tensor::{DType, Rng, Tensor, poison_fresh_buffers};

    /// The gradient of silu; through `mul_scalar` its `dout` comes without a second owner and is written over.
    fn gradient(x: &Tensor, dout: &Tensor, owned: bool) -> Vec<f64> {
        let tape = Tape::new();
        let leaf = tape.leaf(x.clone());
        let y = silu(&leaf);
        let y = if owned { mul_scalar(&y, 1.0) } else { y };
        tape.backward_from(&[(&y, dout.clone())]).get(&leaf).unwrap().to_f64_vec()
    }

    #[test]
    fn case_46_written_over_or_not_the_gradient_is_the_same() {
        poison_fresh_buffers(true);
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let x = Rng::new(1).normal(dtype, &[50, 70], 0.0, 2.0);
            let dout = Rng::new(2).normal(dtype, &[50, 70], 0.0, 1.0);
            for dout in [&dout, &x, &x.reshape(&[70, 50]).transpose(0, 1)] {
                let alone = gradient(&x.copy(), &dout.copy(), false);
                assert_eq!(gradient(&x, dout, false), alone);
                assert_eq!(gradient(&x, dout, true), alone);
            }
        }
    }

    #[test]
    fn thread_counts_do_not_change_a_bit() {
        for dtype in [DType::F32, DType::BF16] {
            let x = Rng::new(1).normal(dtype, &[3, 30_001], 0.0, 1.0);
            let run = |threads| with_threads(threads, || silu(&Var::constant(x.clone())).value().to_f64_vec());
            assert_eq!(run(1), run(2));
            assert_eq!(run(1), run(8));
        }
    }
}
