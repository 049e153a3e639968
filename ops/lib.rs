//! kumiki's operators: one file each, forward and backward.
//!
//! An operator is a function on [`Var`](kumiki_autograd::Var)s. Its file reads from top to bottom: the mathematics with
//! what is saved and why; the public function with its shape checks; the saved fields and the backward; the CPU kernels;
//! the naive reference and the tests. Shape and dtype misuse panics with the operator's name and every shape.
//!
//! F32 and F64 are computed in their own arithmetic; BF16 operands are widened to F32 and the result is rounded back.

mod attention_tiles;
mod cast;
mod causal_attention;
mod gate_aggregate;
pub mod gemm;
mod registry;
pub mod simd;
#[doc(hidden)]
pub mod testing;
mod unit_rows;

pub use cast::cast;
pub use causal_attention::{AttentionOptions, attention, causal_attention};
pub use gate_aggregate::{gate_aggregate, gate_aggregate_mul};
pub use registry::{BenchCase, OpCase, bench_cases, op_cases};
