//! kumiki's training: corpora, batches, trainer, logs, experiments.

#[cfg(feature = "plots")]
pub mod ablation;
#[cfg(feature = "plots")]
mod axis;
pub mod batches;
pub mod bench;
pub mod blocks;
#[cfg(feature = "plots")]
mod canvas;
pub mod cem;
#[cfg(feature = "plots")]
pub mod chart;
pub mod checkpoint;
pub mod compare;
pub mod corpus;
#[cfg(feature = "export")]
pub mod csv_log;
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
pub mod mup;
pub mod objective;
#[cfg(feature = "plots")]
pub mod plot;
pub mod prefix;
pub mod prepare;
pub mod presets;
#[cfg(feature = "report")]
pub mod report;
mod resume;
pub mod run;
pub mod sample;
pub mod saves;
pub mod scaling;
pub mod settings;
pub mod shards;
mod spans;
pub mod stop;
pub mod suggest;
pub mod summary;
#[cfg(feature = "export")]
pub mod tensorboard;
pub mod tokenizer;
pub mod trainer;
pub mod training;
pub mod validation;
mod variants;
mod xxh64;
pub mod zoo;

pub use error::{Error, Result};

#[cfg(test)]
mod scratch;
