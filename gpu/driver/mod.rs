//! A card, through CUDA's driver, which is looked for at run time.

use crate::backend::Backend;
use crate::error::Error;

/// The card of this index.
pub(crate) fn open(index: usize) -> Result<Box<dyn Backend>, Error> {
    Err(Error::new(format!("cuda:{index}: the driver's side is not there yet")))
}
