//! kumiki's tensors: dtype, shape, strided views, storage, random numbers, threads, files.
//!
//! A [`Tensor`] knows nothing of gradients; those are the business of `kumiki-autograd`. Misuse (shapes, dtypes, axes)
//! panics with a sentence at the caller's line; what comes from outside (files) is a [`Result`].

#[macro_use]
mod dtype;
#[macro_use]
pub mod cuda;
mod device;
mod error;
pub mod files;
mod fmt;
mod header;
mod huge_pages;
mod index;
mod reduce;
mod rng;
pub mod safetensors;
pub mod shape;
mod storage;
mod tensor;
pub mod threads;
mod views;

pub use device::Device;
pub use dtype::{DType, Element, bf16, round_to_bf16, widen_bf16};
pub use error::{Error, Result};
pub use huge_pages::prefer_huge_pages;
pub use index::concat;
pub use reduce::sums_of_squares;
pub use rng::{Rng, RngState};
pub use storage::{MemoryStats, memory_stats, poison_fresh_buffers, release_cached_memory, reset_peak};
pub use tensor::Tensor;
