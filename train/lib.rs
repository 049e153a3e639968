//! kumiki's training: corpora, batches, trainer, logs, experiments.

pub mod batches;
pub mod corpus;
mod error;
pub mod log;
pub mod math;
mod mix;
#[cfg(feature = "plots")]
pub mod plot;
pub mod suggest;
pub mod tokenizer;

pub use error::{Error, Result};

#[cfg(test)]
mod scratch;
