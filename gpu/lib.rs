//! kumiki's CUDA tier below tensors: devices, their memory, compiled kernels and launches.
//!
//! A [`Device`] is a card, through the driver (feature `cuda`), or, in tests, an emulation of one on the CPU that runs the
//! same sources (feature `emulator`). Nothing of CUDA is needed to build; without a driver [`Device::open`] says so. A
//! kernel is a name in a [`Source`], compiled when it is first launched. All work of a device is done in the order in which
//! it was asked for, so that a [`Buffer`] may be freed, and its memory given out again, while kernels still use it.

mod backend;
mod buffer;
#[cfg(feature = "cuda")]
mod cache;
mod device;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "emulator")]
mod emulator;
mod error;
mod graph;
mod pool;
mod source;

pub use backend::{Matmul, MatmulType, Operand, Properties};
pub use buffer::Buffer;
pub use device::{Device, availability};
#[cfg(feature = "cuda")]
pub use driver::{KernelResources, compile};
pub use error::Error;
pub use graph::Graph;
pub use pool::MemoryStats;
pub use source::{Arg, Launch, Source};
