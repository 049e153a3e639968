//! GEMM.
