//! kumiki's training: corpora, batches, trainer, logs, experiments.

#[cfg(feature = "plots")]
pub mod ablation;
#[cfg(feature = "plots")]
mod axis;
pub mod batches;
pub mod bench;
pub mod blocks;
pub mod cem;
#[cfg(feature = "plots")]
pub mod chart;
pub mod checkpoint;
pub mod compare;
pub mod corpus;
pub mod data;
mod error;
mod folder;
pub mod gp;
pub mod grid;
pub mod inference;
pub mod kinds;
pub mod laws;
mod lean;
pub mod log;
#[cfg(feature = "plots")]
mod looks;
pub mod marks;
pub mod math;
mod memory;
mod mix;
pub mod objective;
#[cfg(feature = "plots")]
pub mod plot;
pub mod prefix;
pub mod prepare;
mod resume;
pub mod run;
pub mod sample;
pub mod scaling;
pub mod settings;
pub mod shards;
mod spans;
pub mod suggest;
pub mod summary;
pub mod tokenizer;
pub mod trainer;
mod variants;
mod xxh64;
pub mod zoo;

pub use error::{Error, Result};

#[cfg(test)]
mod scratch;
