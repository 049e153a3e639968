//! kumiki's operators: one file each, forward and backward.
//!
//! An operator is a function on [`Var`](kumiki_autograd::Var)s. Its file reads from top to bottom: the mathematics with
//! what is saved and why; the public function with its shape checks; the saved fields and the backward; the CPU kernels;
//! the naive reference and the tests. Shape and dtype misuse panics with the operator's name and every shape.
//!
//! F32 and F64 are computed in their own arithmetic; BF16 operands are widened to F32 and the result is rounded back.

mod activations;
mod adamw;
mod arithmetic;
mod attention_tiles;
mod attention_with_lse;
mod bench;
mod broadcast;
mod cast;
mod causal_attention;
mod cem_attention;
mod cem_energy;
mod cem_mlp;
mod concat;
mod count;
mod cross_entropy;
mod cross_entropy_from_hidden;
mod cumsum;
mod dropout;
mod dual_attention;
mod dual_attention_merged;
mod elementwise;
mod embedding;
mod feature_map;
mod gate_aggregate;
mod gather;
mod gau_attention;
pub mod gemm;
mod index_select;
mod l2_normalize;
mod layer_norm;
mod linear;
mod logsumexp;
mod matmul;
mod max;
mod mixed_chunk_attention;
mod pow;
mod prod;
#[cfg(test)]
mod proptest_shapes;
mod reduce;
mod registry;
mod rms_norm;
mod rope;
mod rows;
mod silu_integral;
pub mod simd;
mod softmax;
mod sums;
mod swiglu;
#[doc(hidden)]
pub mod testing;
mod unary;
mod unit_rows;
mod variance;
mod views;
mod windowed_prefix;

pub use activations::{gelu, relu, relu_squared, sigmoid, silu, softplus};
pub use adamw::{AdamWStep, adamw_update};
pub use arithmetic::{add, div, mul, sub};
pub use attention_with_lse::{SeenKeys, attention_with_lse};
pub use bench::{ProductTiming, Roofline, Timing};
pub use cast::cast;
pub use causal_attention::{AttentionOptions, attention, causal_attention};
pub use cem_attention::{CemDiagonal, CemStep, cem_attention};
pub use cem_energy::{cem_attention_energy, cem_mlp_energy};
pub use cem_mlp::cem_mlp;
pub use concat::concat;
pub use count::{MacCount, count_macs};
pub use cross_entropy::{counted_targets, cross_entropy, cross_entropy_rows, cross_entropy_sum};
pub use cross_entropy_from_hidden::{cross_entropy_from_hidden, cross_entropy_from_hidden_sum};
pub use cumsum::cumsum;
pub use dropout::dropout;
pub use dual_attention::{BlockStarts, DualAttention, DualSees, dual_attention};
pub use dual_attention_merged::dual_attention_merged;
pub use embedding::embedding;
pub use feature_map::{FeatureMap, feature_map};
pub use gate_aggregate::{gate_aggregate, gate_aggregate_mul};
pub use gather::gather;
pub use gau_attention::{gau_attention, gau_attention_mul};
pub use index_select::index_select;
pub use l2_normalize::l2_normalize;
pub use layer_norm::layer_norm;
pub use linear::{linear, linear_to_hidden};
pub use logsumexp::logsumexp;
pub use matmul::matmul;
pub use max::max;
pub use mixed_chunk_attention::{MixedChunk, MixedChunkState, mixed_chunk_attention, mixed_chunk_attention_mul};
pub use pow::pow;
pub use prod::prod;
pub use reduce::{mean, mean_all, sum, sum_all};
pub use registry::{BenchCase, OpCase, bench_cases, op_cases};
pub use rms_norm::rms_norm;
pub use rope::{rope, rope_at};
pub use silu_integral::silu_integral;
pub use softmax::{log_softmax, softmax};
pub use swiglu::swiglu;
pub use unary::{abs, add_scalar, clamp, exp, log, mul_scalar, neg, sqrt, tanh};
pub use variance::var;
pub use views::{contiguous, expand, narrow, permute, reshape, squeeze, transpose, unsqueeze};
pub use windowed_prefix::{WindowedPrefix, WindowedPrefixState, windowed_prefix, windowed_prefix_mul};
