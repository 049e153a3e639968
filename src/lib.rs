//! kumiki (組木): a tensor engine written from scratch, with tape autodiff, fused operators, layers, and the
//! architectures of three 2026 papers as plain structs. This crate re-exports the rooms under short names; see
//! `docs/architecture.md` for who may use whom.
//!
//! ```
#![doc = include_str!("../examples/embed.rs")]
//! ```

pub use kumiki_autograd as autograd;
pub use kumiki_gpu as gpu;
pub use kumiki_models as models;
pub use kumiki_nn as nn;
pub use kumiki_nn::module;
pub use kumiki_ops as ops;
pub use kumiki_tensor as tensor;
pub use kumiki_train as train;
