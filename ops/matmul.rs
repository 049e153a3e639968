//! `matmul`: products of matrices, with broadcast batch axes.
//!
//! Forward `out[.., m, n] = Σ_k a[.., m, k] b[.., k, n]`. Backward `da = dout·bᵀ`, `db = aᵀ·dout`, each summed over the
//! batch axes along which its operand was broadcast. All three are one [`contraction`]: a product at every index of the
//! batch axes that the result keeps, summed over those that it does not. Kept axes along which only `a` moves become rows
//! of `a`, summed ones become terms of k, wherever the strides allow it; so `[B, T, K] × [K, N]` and both its gradients
//! are one large product each. Operands are read by their strides, transposed or expanded ones without copies.
//! Saves of `a` and `b` only the one that the other's gradient needs. BF16 operands are saved as such and computed in F32.
//! Cost: 2·M·N·K flops per product, twice that in the backward.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::shape::{Dims, Offsets, broadcast};
use kumiki_tensor::{DType, Element, Tensor, dispatch_real};

use crate::cast::wide;
use crate::gemm::{BatchAxis, Factor, MatMut, MatRef, Operand, Output, gemm_batched, gemm_bf16};
use crate::matmul_cuda as cuda;
use crate::registry::{BenchCase, OpCase};
use crate::simd::Real;
use crate::{squeeze, unsqueeze};

/// `a` `[.., M, K]` times `b` `[.., K, N]`: `[.., M, N]`; the leading axes broadcast. An operand with one axis is a vector:
/// `[K] × [.., K, N]` gives `[.., N]`, `[.., M, K] × [K]` gives `[.., M]`, `[K] × [K]` a tensor without axes.
///
/// # Panics
/// When an operand has no axis, the K differ, leading axes do not broadcast, or dtypes differ or are not floats.
#[track_caller]
pub fn matmul(a: &Var, b: &Var) -> Var {
    assert!(
        a.dtype() == b.dtype() && a.dtype().is_float(),
        "matmul: a ({:?}) is {}, b ({:?}) is {}; both must be of one float dtype",
        a.shape(),
        a.dtype(),
        b.shape(),
        b.dtype()
    );
    assert!(a.rank() > 0 && b.rank() > 0, "matmul: a {:?} and b {:?} need at least one axis", a.shape(), b.shape());
    let (k, k_b) = (a.dim(a.rank() - 1), b.dim(b.rank().saturating_sub(2)));
    assert!(k == k_b, "matmul: a {:?} has K={k}, b {:?} has K={k_b}", a.shape(), b.shape());
    if a.rank() == 1 {
        let out = matmul(&unsqueeze(a, 0), b);
        return squeeze(&out, out.rank() - if b.rank() == 1 { 1 } else { 2 });
    }
    if b.rank() == 1 {
        let out = matmul(a, &unsqueeze(b, 1));
        return squeeze(&out, out.rank() - 1);
    }
    let batch = broadcast(leading(a.value()), leading(b.value()))
        .unwrap_or_else(|| panic!("matmul: leading axes of a {:?} and b {:?} do not broadcast", a.shape(), b.shape()));
    let unbatched = leading(b.value()).iter().all(|&size| size == 1);
    let left = if unbatched { rows_together(a.value()) } else { a.value().clone() };
    let out = contraction(&over(&batch, &wide(&left)), &over(&batch, &wide(b.value())), &batch);
    Var::from_op(out.cast(a.dtype()), &[a, b], || MatmulBackward {
        a: b.requires_grad().then_some(left),
        b: a.requires_grad().then(|| b.value().clone()),
        a_shape: Dims::new(a.shape()),
        b_shape: Dims::new(b.shape()),
        unbatched,
    })
}

struct MatmulBackward {
    a: Option<Tensor>,
    b: Option<Tensor>,
    a_shape: Dims,
    b_shape: Dims,
    /// `b` has no batch axes.
    unbatched: bool,
}

impl Backward for MatmulBackward {
    fn name(&self) -> &'static str {
        "matmul"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        self.a.iter().map(|a| ("a", a)).chain(self.b.iter().map(|b| ("b", b))).collect()
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        let dtype = dout.dtype();
        let dout = wide(&if self.unbatched { rows_together(&dout) } else { dout });
        let batch = leading(&dout);
        // The other operand was saved where this one's gradient is needed.
        let da = self.b.as_ref().map(|b| {
            let kept = padded(&self.a_shape, batch.len());
            contraction(&dout, &over(batch, &swapped(&wide(b))), &kept).reshape(&self.a_shape).cast(dtype)
        });
        let db = self.a.as_ref().map(|a| {
            let kept = padded(&self.b_shape, batch.len());
            contraction(&over(batch, &swapped(&wide(a))), &dout, &kept).reshape(&self.b_shape).cast(dtype)
        });
        vec![da, db]
    }
}

/// The axes before the matrix.
fn leading(x: &Tensor) -> &[usize] {
    &x.shape()[..x.rank() - 2]
}

/// The leading axes of `shape`, with axes of size 1 before them to make `rank`.
fn padded(shape: &[usize], rank: usize) -> Vec<usize> {
    let own = &shape[..shape.len() - 2];
    let mut out = vec![1; rank - own.len()];
    out.extend(own);
    out
}

/// The matrices of `x` repeated over a whole batch, without copies.
fn over(batch: &[usize], x: &Tensor) -> Tensor {
    let matrix = &x.shape()[x.rank() - 2..];
    x.expand(&[batch, matrix].concat())
}

fn swapped(x: &Tensor) -> Tensor {
    x.transpose(x.rank() - 2, x.rank() - 1)
}

/// Matrices of few rows copied so that those of the whole batch follow each other, to be one matrix for a `b` that they
/// share; larger ones are worth a product each, in place.
fn rows_together(x: &Tensor) -> Tensor {
    if x.dim(x.rank() - 2) < 64 { x.contiguous() } else { x.clone() }
}

/// `a[M, K] b[K, N]`, contiguous, F32 or F64; `narrow` rounds F32 factors to BF16.
pub(crate) fn matrices(a: &Tensor, b: &Tensor, narrow: bool) -> Tensor {
    let mut out = a.new_empty(a.dtype(), &[a.dim(0), b.dim(1)]);
    product_into(&mut out, a, b, narrow, false);
    out
}

/// As [`matrices`] of operands that may be stored in BF16, written as `dtype`: BF16 or what is computed in.
pub(crate) fn stored_matrices(a: &Tensor, b: &Tensor, narrow: bool, dtype: DType) -> Tensor {
    if !narrow || dtype == DType::F64 {
        return matrices(&wide(a), &wide(b), false).cast(dtype);
    }
    let (m, n) = (a.dim(0), b.dim(1));
    if a.cuda().is_some() {
        let mut out = a.new_empty(dtype, &[m, n]);
        cuda::product(&mut out, &a.cast(DType::BF16), &b.cast(DType::BF16), false);
        return out;
    }
    let mut out = Tensor::empty(dtype, &[m, n]);
    let c = match dtype {
        DType::BF16 => Output::BF16(MatMut::new(out.as_mut_slice(), m, n)),
        _ => Output::F32(MatMut::new(out.as_mut_slice(), m, n)),
    };
    gemm_bf16(operand(a), operand(b), c, false);
    out
}

/// A matrix of F32 or BF16.
fn operand(x: &Tensor) -> Operand<'_> {
    if x.dtype() == DType::BF16 { Operand::BF16(matrix(x)) } else { Operand::F32(matrix(x)) }
}

/// Adds the product of operands of one storage, or if it is narrow of either, to `sum`, which is F32 or F64.
pub(crate) fn add_matrices(sum: &mut Tensor, a: &Tensor, b: &Tensor, narrow: bool) {
    if !narrow || sum.dtype() == DType::F64 {
        return product_into(sum, a, b, false, true);
    }
    if a.cuda().is_some() {
        return cuda::product(sum, &a.cast(DType::BF16), &b.cast(DType::BF16), true);
    }
    let c = MatMut::new(sum.make_mut(), a.dim(0), b.dim(1));
    gemm_bf16(operand(a), operand(b), Output::F32(c), true);
}

fn product_into(out: &mut Tensor, a: &Tensor, b: &Tensor, narrow: bool, accumulate: bool) {
    if a.cuda().is_some() {
        let factor = |x: &Tensor| if narrow && x.dtype() == DType::F32 { x.cast(DType::BF16) } else { x.clone() };
        return cuda::product(out, &factor(a), &factor(b), accumulate);
    }
    let (m, n) = (a.dim(0), b.dim(1));
    dispatch_real!("matmul", a.dtype(), E => {
        let c = MatMut::new(out.make_mut::<E>(), m, n);
        E::product(narrow, matrix::<E>(a), matrix(b), c, accumulate);
    });
}

/// The last two axes of a tensor.
fn matrix<E: Element>(x: &Tensor) -> MatRef<'_, E> {
    let rank = x.rank();
    MatRef {
        data: x.storage_slice::<E>(),
        offset: x.offset(),
        rows: x.dim(rank - 2),
        cols: x.dim(rank - 1),
        row_stride: x.strides()[rank - 2],
        col_stride: x.strides()[rank - 1],
    }
}

/// `Σ a[.., M, K] b[.., K, N]` at every index of the leading axes, which `a` and `b` share, summed over those where `kept`
/// has size 1: a contiguous `[kept.., M, N]`. F32 or F64.
pub(crate) fn contraction(a: &Tensor, b: &Tensor, kept: &[usize]) -> Tensor {
    if a.cuda().is_some() {
        return cuda::contraction(a, b, kept);
    }
    let rank = kept.len();
    let (m, n) = (a.dim(rank), b.dim(rank + 1));
    let mut out = Tensor::empty(a.dtype(), &[kept, &[m, n]].concat());
    if out.is_empty() {
        return out;
    }
    let (mut batch, mut summed) = (vec![], vec![]);
    let mut c_stride = m * n;
    for axis in (0..rank).rev().filter(|&axis| a.dim(axis) != 1) {
        let (size, a_stride, b_stride) = (a.dim(axis), a.strides()[axis], b.strides()[axis]);
        if kept[axis] == size {
            batch.push(BatchAxis { size, a_stride, b_stride, c_stride });
            c_stride *= size;
        } else {
            summed.push(BatchAxis { size, a_stride, b_stride, c_stride: 0 });
        }
    }
    dispatch_real!("matmul", a.dtype(), E => {
        let [mut a, mut b] = [matrix::<E>(a), matrix(b)];
        let (batch, summed) = (fold_rows(&mut a, &batch), fold_terms(&mut a, &mut b, &summed));
        let strides = |stride: fn(&BatchAxis) -> usize| summed.iter().map(stride).collect::<Vec<_>>();
        let sizes = strides(|axis| axis.size);
        let a_offsets = Offsets::new(&sizes, &strides(|axis| axis.a_stride), a.offset);
        let b_offsets = Offsets::new(&sizes, &strides(|axis| axis.b_stride), b.offset);
        let c = out.as_mut_slice::<E>();
        let mut beta = E::ZERO;
        for (a_offset, b_offset) in a_offsets.zip(b_offsets) {
            let (a, b) = (MatRef { offset: a_offset, ..a }, MatRef { offset: b_offset, ..b });
            gemm_batched(E::ONE, a, b, beta, MatMut::new(c, a.rows, n), batch);
            beta = E::ONE;
        }
        if beta == E::ZERO {
            c.fill(E::ZERO); // the sum over an axis of size 0
        }
    });
    out
}

/// Makes batch axes (the last first) along which `b` stays into rows of `a`; gives those that are left. C is contiguous,
/// so its rows follow.
fn fold_rows<'a, E>(a: &mut MatRef<E>, batch: &'a [BatchAxis]) -> &'a [BatchAxis] {
    let mut left = batch;
    while let [axis, rest @ ..] = left {
        if axis.b_stride != 0 || (a.rows != 1 && axis.a_stride != a.rows * a.row_stride) {
            break;
        }
        if a.rows == 1 {
            a.row_stride = axis.a_stride;
        }
        a.rows *= axis.size;
        left = rest;
    }
    left
}

/// Makes axes that are summed over (the last first) into further terms of k; gives those that are left.
fn fold_terms<'a, E>(a: &mut MatRef<E>, b: &mut MatRef<E>, summed: &'a [BatchAxis]) -> &'a [BatchAxis] {
    let mut left = summed;
    while let [axis, rest @ ..] = left {
        if a.cols == 1 {
            (a.col_stride, b.row_stride) = (axis.a_stride, axis.b_stride);
        } else if axis.a_stride != a.cols * a.col_stride || axis.b_stride != b.rows * b.row_stride {
            break;
        }
        a.cols *= axis.size;
        b.rows *= axis.size;
        left = rest;
    }
    left
}

pub(crate) fn cases() -> Vec<OpCase> {
    type Inputs<'a> = [(&'static str, &'a [usize]); 2];
    let case = |variant, inputs: Inputs| OpCase::new("matmul", variant, &inputs, |_, v| matmul(&v[0], &v[1]));
    vec![
        case("matrices", [("a", &[3, 4]), ("b", &[4, 5])]),
        case("batch", [("a", &[2, 3, 4]), ("b", &[2, 4, 5])]),
        case("batch by matrix", [("a", &[2, 3, 4]), ("b", &[4, 5])]),
        case("matrix by batch", [("a", &[3, 4]), ("b", &[2, 4, 5])]),
        case("broadcast both ways", [("a", &[3, 1, 2, 4]), ("b", &[2, 4, 3])]),
        case("vector by batch", [("a", &[4]), ("b", &[2, 4, 5])]),
        case("batch by vector", [("a", &[2, 3, 4]), ("b", &[4])]),
        case("vectors", [("a", &[4]), ("b", &[4])]),
        OpCase::new("matmul", "transposed", &[("a", &[2, 4, 3]), ("b", &[5, 4])], |_, v| {
            matmul(&crate::transpose(&v[0], 1, 2), &crate::transpose(&v[1], 0, 1))
        }),
    ]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let case = |name, batch: usize, m: usize, k: usize, n: usize| {
        let shape = |rows, cols| if batch == 1 { vec![rows, cols] } else { vec![batch, rows, cols] };
        BenchCase {
            name,
            inputs: vec![("a", shape(m, k)), ("b", shape(k, n))],
            forward: Box::new(|_, v| matmul(&v[0], &v[1])),
            bytes: 4 * batch * (m * k + k * n + m * n),
            flops: 2 * batch * m * n * k,
        }
    };
    vec![case("matmul", 1, 1024, 1024, 1024), case("matmul (batch)", 64, 256, 64, 256)]
}

#[cfg(test)]
#[path = "matmul_tests.rs"]
mod tests;
