//! CPUs without instructions for BF16: operands are rounded, widened, and multiplied as F32.

use kumiki_tensor::{bf16, threads};

use super::super::{MatMut, MatRef, gemm, gemm_serial};
use super::{Operand, Output};
use crate::simd::narrow;

/// Elements that one task widens.
const PIECE: usize = 16 * 1024;

pub(super) fn run(a: Operand, b: Operand, c: Output, accumulate: bool, parallel: bool) {
    let product = if parallel { gemm::<f32> } else { gemm_serial };
    let ((m, k), (_, n)) = (a.shape(), b.shape());
    let (a, b) = (widen(a, parallel), widen(b, parallel));
    let (a, b) = (MatRef::new(&a, m, k), MatRef::new(&b, k, n));
    match c {
        Output::F32(c) => product(1.0, a, b, if accumulate { 1.0 } else { 0.0 }, c),
        Output::BF16(c) => {
            let mut sums = vec![0.0f32; m * n];
            product(1.0, a, b, 0.0, MatMut::new(&mut sums, m, n));
            if c.col_stride == 1 && c.row_stride >= n && !accumulate {
                let rows = (PIECE / n).max(1);
                let cost = if parallel { PIECE } else { 0 };
                threads::parallel_chunks_mut(&mut c.data[c.offset..], rows * c.row_stride, cost, |piece, to| {
                    let sums = sums[piece * rows * n..].chunks(n).take(rows);
                    to.chunks_mut(c.row_stride).zip(sums).for_each(|(to, sums)| narrow(sums, &mut to[..n]));
                });
                return;
            }
            for (i, row) in sums.chunks(n).enumerate() {
                for (j, &sum) in row.iter().enumerate() {
                    let to = &mut c.data[c.offset + i * c.row_stride + j * c.col_stride];
                    *to = bf16::from_f32(if accumulate { to.to_f32() + sum } else { sum });
                }
            }
        }
    }
}

/// Row-major, every element rounded to BF16.
fn widen(matrix: Operand, parallel: bool) -> Vec<f32> {
    fn copy<E: Copy + Sync>(m: MatRef<E>, parallel: bool, value: impl Fn(E) -> f32 + Sync + Send) -> Vec<f32> {
        let mut out = vec![0.0; m.rows * m.cols];
        let cost = if parallel { PIECE } else { 0 };
        threads::parallel_chunks_mut(&mut out, PIECE, cost, |piece, out| {
            for (at, to) in out.iter_mut().enumerate() {
                let (i, j) = ((piece * PIECE + at) / m.cols, (piece * PIECE + at) % m.cols);
                *to = value(m.data[m.offset + i * m.row_stride + j * m.col_stride]);
            }
        });
        out
    }
    match matrix {
        Operand::F32(m) => copy(m, parallel, |x| bf16::from_f32(x).to_f32()),
        Operand::BF16(m) => copy(m, parallel, bf16::to_f32),
    }
}
