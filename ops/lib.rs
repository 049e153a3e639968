//! kumiki's operators: one file each, forward and backward.
//!
//! An operator is a function on [`Var`](kumiki_autograd::Var)s. Its file reads from top to bottom: the mathematics with
//! what is saved and why; the public function with its shape checks; the saved fields and the backward; the CPU kernels;
//! the naive reference and the tests. Shape and dtype misuse panics with the operator's name and every shape.
//!
//! F32 and F64 are computed in their own arithmetic; BF16 operands are widened to F32 and the result is rounded back.

mod activations;
mod arithmetic;
mod broadcast;
mod cast;
mod cumsum;
mod elementwise;
pub mod gemm;
mod logsumexp;
mod max;
mod pow;
mod prod;
#[cfg(test)]
mod proptest_shapes;
mod reduce;
mod registry;
pub mod simd;
mod softmax;
mod sums;
#[doc(hidden)]
pub mod testing;
mod unary;
mod variance;

pub use activations::{gelu, relu, relu_squared, sigmoid, silu, softplus};
pub use arithmetic::{add, div, mul, sub};
pub use cast::cast;
pub use cumsum::cumsum;
pub use logsumexp::logsumexp;
pub use max::max;
pub use pow::pow;
pub use prod::prod;
pub use reduce::{mean, mean_all, sum, sum_all};
pub use registry::{BenchCase, OpCase, bench_cases, op_cases};
pub use softmax::{log_softmax, softmax};
pub use unary::{abs, add_scalar, clamp, exp, log, mul_scalar, neg, sqrt, tanh};
pub use variance::var;
