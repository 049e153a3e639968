//! Products of matrices for the emulated device: plain loops in the precision of the card's library.

use super::memory::Memory;
use crate::backend::{Matmul, MatmulType, Operand};
use crate::error::Error;

pub(super) fn matmul(memory: &Memory, p: &Matmul) -> Result<(), Error> {
    let allowed = p.a.dtype == p.b.dtype
        && (p.c.dtype == p.a.dtype || (p.a.dtype, p.c.dtype) == (MatmulType::Bf16, MatmulType::F32));
    if !allowed || p.c.transposed {
        return Err(Error::new(format!(
            "a product of {:?} and {:?} to {:?} is not one of the library's",
            p.a.dtype, p.b.dtype, p.c.dtype
        )));
    }
    for entry in 0..p.batch {
        let a = matrix(memory, &p.a, entry, [p.m, p.k])?;
        let b = matrix(memory, &p.b, entry, [p.k, p.n])?;
        let mut c = if p.accumulate { matrix(memory, &p.c, entry, [p.m, p.n])? } else { vec![0.0; p.m * p.n] };
        let single = p.a.dtype != MatmulType::F64;
        for (i, row) in c.chunks_mut(p.n).enumerate() {
            for k in 0..p.k {
                let factor = a[i * p.k + k];
                for (c, b) in row.iter_mut().zip(&b[k * p.n..]) {
                    let sum = *c + factor * b;
                    *c = if single { f64::from(sum as f32) } else { sum };
                }
            }
        }
        for (i, row) in c.chunks(p.n).enumerate() {
            write_row(memory, &p.c, entry, i, row)?;
        }
    }
    Ok(())
}

fn size(dtype: MatmulType) -> usize {
    match dtype {
        MatmulType::F32 => 4,
        MatmulType::F64 => 8,
        MatmulType::Bf16 => 2,
    }
}

/// The elements of a matrix of a batch, by rows.
fn matrix(memory: &Memory, x: &Operand, entry: usize, [rows, columns]: [usize; 2]) -> Result<Vec<f64>, Error> {
    let mut out = vec![0.0; rows * columns];
    let (lines, length) = if x.transposed { (columns, rows) } else { (rows, columns) };
    let size = size(x.dtype);
    for line in 0..lines {
        let from = x.address + ((entry * x.batch_stride + line * x.stride) * size) as u64;
        memory.with(from, length * size, |bytes| {
            for (i, bytes) in bytes.chunks(size).enumerate() {
                let value = match *bytes {
                    [a, b] => f64::from(f32::from_bits(u32::from(u16::from_ne_bytes([a, b])) << 16)),
                    [a, b, c, d] => f64::from(f32::from_ne_bytes([a, b, c, d])),
                    [a, b, c, d, e, f, g, h] => f64::from_ne_bytes([a, b, c, d, e, f, g, h]),
                    _ => unreachable!("of two, four or eight bytes"),
                };
                out[if x.transposed { i * columns + line } else { line * columns + i }] = value;
            }
        })?;
    }
    Ok(out)
}

fn write_row(memory: &Memory, x: &Operand, entry: usize, row: usize, values: &[f64]) -> Result<(), Error> {
    let size = size(x.dtype);
    let bytes: Vec<u8> = match x.dtype {
        MatmulType::F64 => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        MatmulType::F32 => values.iter().flat_map(|&x| (x as f32).to_ne_bytes()).collect(),
        MatmulType::Bf16 => values.iter().flat_map(|&x| round_to_bf16(x as f32).to_ne_bytes()).collect(),
    };
    memory.with(x.address + ((entry * x.batch_stride + row * x.stride) * size) as u64, bytes.len(), |to| {
        to.copy_from_slice(&bytes)
    })
}

fn round_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16 }
}
