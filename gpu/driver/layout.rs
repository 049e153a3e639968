//! Row-major products as cuBLASLt is told of them: it knows column-major matrices only.
//!
//! What lies row by row is, read column by column, the transpose. So `C = A B` becomes `C' = B' A'`: B is the left factor, A
//! the right one, nothing moves, and a row's stride is a column's.

use crate::backend::{Matmul, MatmulType, Operand};

/// A column-major matrix, or a batch of them, as it lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Matrix {
    pub dtype: MatmulType,
    pub rows: u64,
    pub columns: u64,
    /// Elements from a column to the next; at least `rows`.
    pub stride: i64,
    pub batch_stride: i64,
}

/// A factor; `transposed` when the product takes its transpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Factor {
    pub matrix: Matrix,
    pub transposed: bool,
}

/// `result = left right`, as it is for cuBLASLt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Layouts {
    /// B of the row-major product.
    pub left: Factor,
    /// A of it.
    pub right: Factor,
    pub result: Matrix,
}

/// What cuBLASLt must be told for this product, or why it cannot do it.
pub(super) fn layouts(product: &Matmul) -> Result<Layouts, String> {
    let Matmul { m, n, k, batch, a, b, c, .. } = *product;
    if a.dtype != b.dtype || !(c.dtype == a.dtype || (a.dtype, c.dtype) == (MatmulType::Bf16, MatmulType::F32)) {
        return Err(format!("{:?} times {:?} does not give {:?}", a.dtype, b.dtype, c.dtype));
    }
    if c.transposed || (batch > 1 && c.batch_stride == 0) {
        return Err("a result that is transposed, or the same for all of a batch".to_owned());
    }
    Ok(Layouts {
        left: Factor { matrix: matrix(&b, k, n)?, transposed: b.transposed },
        right: Factor { matrix: matrix(&a, m, k)?, transposed: a.transposed },
        result: matrix(&c, m, n)?,
    })
}

/// A row-major `[rows, columns]`, which may lie transposed, as its column-major transpose.
fn matrix(operand: &Operand, rows: usize, columns: usize) -> Result<Matrix, String> {
    let (rows, columns) = if operand.transposed { (columns, rows) } else { (rows, columns) };
    if rows > 1 && operand.stride < columns {
        return Err(format!("rows of {columns} elements that begin every {} elements", operand.stride));
    }
    Ok(Matrix {
        dtype: operand.dtype,
        rows: columns as u64,
        columns: rows as u64,
        // That of a single row has no meaning, and may be anything.
        stride: operand.stride.max(columns) as i64,
        batch_stride: operand.batch_stride as i64,
    })
}

/// One product instead of a batch, where the right factor is the same for all and the rows of the left one, and of the
/// result, follow each other evenly through the batch.
pub(super) fn flattened(product: &Matmul) -> Matmul {
    let Matmul { m, n, k, batch, a, b, c, .. } = *product;
    let single = |operand: Operand, columns: usize| match m == 1 && operand.batch_stride >= columns {
        true => Operand { stride: operand.batch_stride, ..operand },
        false => operand,
    };
    let (a, c) = (single(a, k), single(c, n));
    let even = |operand: Operand| operand.batch_stride == m * operand.stride;
    if batch < 2 || a.transposed || b.batch_stride != 0 || !even(a) || !even(c) {
        return *product;
    }
    let one = |operand: Operand| Operand { batch_stride: 0, ..operand };
    Matmul { m: m * batch, batch: 1, a: one(a), c: one(c), ..*product }
}

#[cfg(test)]
mod tests {
    use super::*;

    const F64: MatmulType = MatmulType::F64;

    /// Elements of a matrix of a batch, row-major.
    fn at(operand: &Operand, batch: usize, row: usize, column: usize) -> usize {
        let (row, column) = if operand.transposed { (column, row) } else { (row, column) };
        batch * operand.batch_stride + row * operand.stride + column
    }

    /// What cuBLASLt's documentation says that it computes.
    fn column_major(product: &Matmul, a: &[f64], b: &[f64], c: &mut [f64]) {
        let Layouts { left, right, result } = layouts(product).unwrap();
        let entry = |factor: &Factor, batch: usize, row: usize, column: usize| {
            let (row, column) = if factor.transposed { (column, row) } else { (row, column) };
            assert!((row as u64) < factor.matrix.rows && (column as u64) < factor.matrix.columns);
            batch * factor.matrix.batch_stride as usize + column * factor.matrix.stride as usize + row
        };
        let inner = if left.transposed { left.matrix.rows } else { left.matrix.columns };
        assert_eq!(inner, if right.transposed { right.matrix.columns } else { right.matrix.rows });
        for matrix in [left.matrix, right.matrix, result] {
            assert!(matrix.stride as u64 >= matrix.rows);
        }
        for batch in 0..product.batch {
            for column in 0..result.columns as usize {
                for row in 0..result.rows as usize {
                    let to = batch * result.batch_stride as usize + column * result.stride as usize + row;
                    let sum: f64 = (0..inner as usize)
                        .map(|i| b[entry(&left, batch, row, i)] * a[entry(&right, batch, i, column)])
                        .sum();
                    c[to] = sum + if product.accumulate { c[to] } else { 0.0 };
                }
            }
        }
    }

    fn row_major(product: &Matmul, a: &[f64], b: &[f64], c: &mut [f64]) {
        for batch in 0..product.batch {
            for row in 0..product.m {
                for column in 0..product.n {
                    let to = at(&product.c, batch, row, column);
                    let sum: f64 = (0..product.k)
                        .map(|i| a[at(&product.a, batch, row, i)] * b[at(&product.b, batch, i, column)])
                        .sum();
                    c[to] = sum + if product.accumulate { c[to] } else { 0.0 };
                }
            }
        }
    }

    /// Of `[rows, columns]`, with `gap` elements between rows.
    fn operand(rows: usize, columns: usize, transposed: bool, gap: usize, shared: bool) -> Operand {
        let (rows, columns) = if transposed { (columns, rows) } else { (rows, columns) };
        let stride = columns + gap;
        let batch_stride = if shared { 0 } else { rows * stride };
        Operand { address: 0, dtype: F64, transposed, stride, batch_stride }
    }

    fn every_product(mut test: impl FnMut(&Matmul)) {
        for (m, n, k) in [(1, 1, 1), (2, 3, 4), (1, 5, 3), (4, 1, 2), (3, 2, 1), (5, 4, 3)] {
            for bits in 0..128 {
                let bit = |i: usize| bits >> i & 1 == 1;
                let gap = if bit(2) { 3 } else { 0 };
                let batch = if bit(3) { 3 } else { 1 };
                test(&Matmul {
                    m,
                    n,
                    k,
                    batch,
                    a: operand(m, k, bit(0), gap, bit(4)),
                    b: operand(k, n, bit(1), gap, bit(5)),
                    c: operand(m, n, false, gap, false),
                    accumulate: bit(6),
                    tf32: false,
                });
            }
        }
    }

    fn numbers(count: usize, seed: usize) -> Vec<f64> {
        (0..count).map(|i| ((i * 37 + seed * 11) % 23) as f64 - 11.0).collect()
    }

    #[test]
    fn column_major_layouts_give_the_row_major_product() {
        every_product(|product| {
            let (a, b, c) = (numbers(256, 1), numbers(256, 2), numbers(256, 3));
            let (mut expected, mut found) = (c.clone(), c);
            row_major(product, &a, &b, &mut expected);
            column_major(product, &a, &b, &mut found);
            assert_eq!(found, expected, "{product:?}");
        });
    }

    #[test]
    fn a_flattened_batch_gives_the_same_product() {
        let mut flat = 0;
        every_product(|product| {
            let one = flattened(product);
            flat += usize::from(one.batch < product.batch);
            let (a, b, c) = (numbers(256, 1), numbers(256, 2), numbers(256, 3));
            let (mut expected, mut found) = (c.clone(), c);
            row_major(product, &a, &b, &mut expected);
            column_major(&one, &a, &b, &mut found);
            assert_eq!(found, expected, "{product:?} as {one:?}");
        });
        assert!(flat > 20, "only {flat} batches were flattened");
    }

    #[test]
    fn heads_between_rows_are_a_batch() {
        // C[b][t, :] of [T=3, B=2, N=4], from A of [T=3, B=2, K=5]: matrices of a batch that interleave.
        let a = Operand { address: 0, dtype: F64, transposed: false, stride: 10, batch_stride: 5 };
        let c = Operand { stride: 8, batch_stride: 4, ..a };
        let b = operand(5, 4, false, 0, false);
        let product = Matmul { m: 3, n: 4, k: 5, batch: 2, a, b, c, accumulate: false, tf32: false };
        let (a, b) = (numbers(30, 1), numbers(40, 2));
        let (mut expected, mut found) = (vec![0.0; 24], vec![0.0; 24]);
        row_major(&product, &a, &b, &mut expected);
        column_major(&product, &a, &b, &mut found);
        assert_eq!(found, expected);
    }

    #[test]
    fn what_cublaslt_cannot_do_is_an_error() {
        let good = Matmul {
            m: 2,
            n: 3,
            k: 4,
            batch: 1,
            a: operand(2, 4, false, 0, false),
            b: operand(4, 3, false, 0, false),
            c: operand(2, 3, false, 0, false),
            accumulate: false,
            tf32: false,
        };
        assert!(layouts(&good).is_ok());
        let repeated = Operand { stride: 0, ..good.b };
        assert!(layouts(&Matmul { b: repeated, ..good }).unwrap_err().contains("begin every 0 elements"));
        let single = Operand { dtype: MatmulType::F32, ..good.c };
        assert!(layouts(&Matmul { c: single, ..good }).unwrap_err().contains("does not give F32"));
        let shared = Operand { batch_stride: 0, ..good.c };
        assert!(layouts(&Matmul { c: shared, batch: 2, ..good }).is_err());
    }
}
