//! A device that runs kernels on the CPU, for tests.

use crate::backend::Backend;
use crate::error::Error;

/// Whether devices are to be emulated: `KUMIKI_CUDA=emulator`.
pub(crate) fn is_wanted() -> bool {
    std::env::var("KUMIKI_CUDA").is_ok_and(|value| value == "emulator")
}

/// The emulated device of this index.
pub(crate) fn open(index: usize) -> Result<Box<dyn Backend>, Error> {
    Err(Error::new(format!("cuda:{index}: the emulator is not there yet")))
}
