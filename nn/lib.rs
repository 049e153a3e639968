//! kumiki's layers, initialisation, optimisers and schedules.
//!
//! A layer is a struct with public fields, a `new` that takes its sizes and a generator, and a `forward` that takes the
//! [`Tape`](kumiki_autograd::Tape) and the input. [`Module`] lists its parameters by name. A `forward` panics, at the caller's
//! line, on inputs of another shape or dtype than it names.

mod adamw;
mod attention;
mod cem;
mod clip;
mod descent;
mod dropout;
mod gelu_mlp;
mod init;
mod kv_cache;
mod layers;
mod module;
mod schedule;
mod sgd;
mod swiglu;

pub use adamw::AdamW;
pub use attention::Attention;
pub use cem::{CemAttention, CemMlp, CemOptions, Diagonal, Preconditioner};
pub use clip::clip_global_norm;
pub use descent::{Call, Descent, Trace};
pub use dropout::Dropout;
pub use gelu_mlp::GeluMlp;
pub use init::Init;
pub use kumiki_autograd::Param;
pub use kv_cache::KvCache;
pub use layers::{Embedding, Linear, RmsNorm};
pub use module::Module;
#[doc(hidden)]
pub use module::child_path;
pub use schedule::{Decay, Schedule};
pub use sgd::Sgd;
pub use swiglu::SwiGlu;
