//! kumiki's operators: one file each, forward and backward.
//!
//! An operator is a function on [`Var`](kumiki_autograd::Var)s. Its file reads from top to bottom: the mathematics with
//! what is saved and why; the public function with its shape checks; the saved fields and the backward; the CPU kernels;
//! the naive reference and the tests. Shape and dtype misuse panics with the operator's name and every shape.
//!
//! F32 and F64 are computed in their own arithmetic; BF16 operands are widened to F32 and the result is rounded back.

mod cast;
mod cross_entropy;
mod cross_entropy_from_hidden;
pub mod gemm;
mod layer_norm;
mod registry;
mod rms_norm;
mod rope;
mod rows;
pub mod simd;
mod swiglu;
#[doc(hidden)]
pub mod testing;

pub use cast::cast;
pub use cross_entropy::{counted_targets, cross_entropy, cross_entropy_rows, cross_entropy_sum};
pub use cross_entropy_from_hidden::{cross_entropy_from_hidden, cross_entropy_from_hidden_sum};
pub use layer_norm::layer_norm;
pub use registry::{BenchCase, OpCase, bench_cases, op_cases};
pub use rms_norm::rms_norm;
pub use rope::{rope, rope_at};
pub use swiglu::swiglu;
