//! kumiki: a tensor engine, its operators, layers and models. This crate re-exports the rooms under short names.
pub use kumiki_autograd as autograd;
pub use kumiki_gpu as gpu;
pub use kumiki_models as models;
pub use kumiki_nn as nn;
pub use kumiki_ops as ops;
pub use kumiki_tensor as tensor;
pub use kumiki_train as train;
