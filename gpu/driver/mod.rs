//! A card, through CUDA's driver, which is looked for at run time: nothing of CUDA is needed to build, and what is missing at
//! run time is an error that names it. `library` finds the driver, NVRTC and cuBLASLt; `card` does what [`Backend`] asks.

mod api;
mod card;
mod cublaslt;
mod graph;
mod layout;
mod library;
mod module;
mod nvrtc;
mod resources;
mod staging;
#[cfg(test)]
mod tests;

pub use resources::{KernelResources, compile};

use crate::backend::Backend;
use crate::error::Error;

/// The card of this index.
pub(crate) fn open(index: usize) -> Result<Box<dyn Backend>, Error> {
    match card::Card::open(index) {
        Ok(card) => Ok(Box::new(card)),
        Err(e) => Err(Error::new(format!("cuda:{index}: {e}"))),
    }
}
