//! kumiki's operators: one file each, forward and backward.

pub mod gemm;
pub mod simd;
