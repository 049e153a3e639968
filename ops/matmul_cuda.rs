//! Products of matrices on a CUDA device, by its library.

use kumiki_tensor::cuda::{Matmul, MatmulType, Operand};
use kumiki_tensor::shape::Dims;
use kumiki_tensor::{DType, Tensor};

/// `out[.., m, n] = a[.., m, k] b[.., k, n]`, added to it if `accumulate`. Of at most one leading axis, the same in all; `out` is
/// contiguous, in storage of its own, of the dtype of the factors or F32 where those are BF16.
pub(super) fn product(out: &mut Tensor, a: &Tensor, b: &Tensor, accumulate: bool) {
    out.own();
    let shape = Dims::new(out.shape());
    product_to((out, 0), &shape, a, b, accumulate);
}

/// As [`product`], to a part of `out` that begins at an element and has this shape; contiguous, in storage of its own.
///
/// # Panics
/// When there are not so many elements.
pub(super) fn product_to(
    (out, start): (&mut Tensor, usize),
    shape: &[usize],
    a: &Tensor,
    b: &Tensor,
    accumulate: bool,
) {
    let device = a.cuda().expect("on a CUDA device").clone();
    assert!(out.is_unique() && start + shape.iter().product::<usize>() <= out.len());
    let (a, b) = (readable(a), readable(b));
    let rank = shape.len();
    let (m, n, k) = (a.dim(rank - 2), b.dim(rank - 1), a.dim(rank - 1));
    if k == 0 {
        // What was there, or nothing.
        if !accumulate {
            assert!(start == 0 && shape == out.shape(), "a part of nothing");
            *out = out.new_full(out.dtype(), shape, 0.0);
        }
        return;
    }
    let batch = if rank == 3 { shape[0] } else { 1 };
    let c = Operand {
        address: out.cuda_address() + (start * out.dtype().size()) as u64,
        dtype: type_of(out),
        transposed: false,
        stride: n,
        batch_stride: m * n,
    };
    let product = Matmul { m, n, k, batch, a: operand(&a), b: operand(&b), c, accumulate, tf32: false };
    // SAFETY: the operands lie in tensors of the device, and `out` is in storage of its own.
    unsafe { device.matmul(&product) }.unwrap_or_else(|error| panic!("{error}"));
}

/// Either its rows or its columns lie without gaps.
fn is_readable(x: &Tensor) -> bool {
    let rank = x.rank();
    let ([rows, columns], strides) = ([x.dim(rank - 2), x.dim(rank - 1)], &x.strides()[rank - 2..]);
    let along = |step: usize, from: usize, len: usize, lines: usize| step == 1 && (lines == 1 || from >= len);
    along(strides[1], strides[0], columns, rows) || along(strides[0], strides[1], rows, columns)
}

fn readable(x: &Tensor) -> Tensor {
    if is_readable(x) { x.clone() } else { x.copy() }
}

fn type_of(x: &Tensor) -> MatmulType {
    match x.dtype() {
        DType::F64 => MatmulType::F64,
        DType::BF16 => MatmulType::Bf16,
        _ => MatmulType::F32,
    }
}

fn operand(x: &Tensor) -> Operand {
    let rank = x.rank();
    let ([rows, columns], strides) = ([x.dim(rank - 2), x.dim(rank - 1)], &x.strides()[rank - 2..]);
    let transposed = !(strides[1] == 1 && (rows == 1 || strides[0] >= columns));
    let (stride, length) = if transposed { (strides[1], rows) } else { (strides[0], columns) };
    Operand {
        address: x.cuda_address(),
        dtype: type_of(x),
        transposed,
        // Of one line it does not matter, but the library wants a possible one.
        stride: stride.max(length),
        batch_stride: if rank == 3 { x.strides()[0] } else { 0 },
    }
}

/// As the CPU's `contraction`: summed axes are brought beside k, kept ones together, by copies where strides forbid views.
pub(super) fn contraction(a: &Tensor, b: &Tensor, kept: &[usize]) -> Tensor {
    let rank = kept.len();
    let (m, n, k) = (a.dim(rank), b.dim(rank + 1), a.dim(rank + 1));
    let out_shape = [kept, &[m, n]].concat();
    if out_shape.contains(&0) {
        return a.new_empty(a.dtype(), &out_shape);
    }
    let (stay, go): (Vec<usize>, Vec<usize>) = (0..rank).partition(|&axis| kept[axis] == a.dim(axis));
    let batch: usize = stay.iter().map(|&axis| kept[axis]).product();
    let terms = k * go.iter().map(|&axis| a.dim(axis)).product::<usize>();
    let order = |middle: [Vec<usize>; 3]| [stay.clone(), middle.concat()].concat();
    let a = a.permute(&order([vec![rank], go.clone(), vec![rank + 1]])).reshape(&[batch, m, terms]);
    let b = b.permute(&order([go, vec![rank], vec![rank + 1]])).reshape(&[batch, terms, n]);
    // Matrices that follow each other, for one that they share, are one matrix.
    let (a, b) = if b.strides()[0] == 0 && a.strides()[0] == m * a.strides()[1] {
        (a.reshape(&[batch * m, terms]), b.select(0, 0))
    } else {
        (a, b)
    };
    let shape = [&a.shape()[..a.rank() - 1], &[n]].concat();
    let mut out = a.new_empty(a.dtype(), &shape);
    product(&mut out, &a, &b, false);
    out.reshape(&out_shape)
}
