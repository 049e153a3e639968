//! In-context regression on functions drawn from a Gaussian process: at step `t` a model sees `(x_t, y_{t-1})` and predicts
//! `y_t`. Nothing about a function is known but its points so far, so a model must infer as it reads; the exact posterior,
//! which knows the kernel and its length scale, gives the root mean squared error that none can fall below on average.

pub mod cholesky;
pub mod evaluate;
pub mod exact;
pub mod functions;
pub mod kernel;
#[cfg(feature = "plots")]
pub mod picture;
mod resume;
pub mod run;
pub mod settings;
pub mod train;
