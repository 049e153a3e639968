//! [`Buffer`]: bytes in a device's memory.

use std::fmt;

use crate::device::Device;
use crate::error::Error;

/// An owned block of a device's memory, given back to the device's pool when dropped.
pub struct Buffer {
    pub(crate) device: Device,
    pub(crate) address: u64,
    pub(crate) len: usize,
}

impl Buffer {
    /// The device that holds it.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the byte at `offset`, on the device.
    ///
    /// # Panics
    /// When the offset lies beyond the end.
    #[track_caller]
    pub fn address(&self, offset: usize) -> u64 {
        assert!(offset <= self.len, "byte {offset} of a buffer of {} bytes", self.len);
        self.address + offset as u64
    }

    /// Copies `from` to the first bytes.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When `from` is longer.
    #[track_caller]
    pub fn upload(&mut self, from: &[u8]) -> Result<(), Error> {
        assert!(from.len() <= self.len, "{} bytes do not fit in a buffer of {}", from.len(), self.len);
        if from.is_empty() { Ok(()) } else { self.device.backend().upload(from, self.address) }
    }

    /// Copies the bytes from `offset` on to `to`, when everything asked for so far has been done.
    ///
    /// # Errors
    /// When the device fails, be it in work asked for before.
    ///
    /// # Panics
    /// When there are not so many.
    #[track_caller]
    pub fn download(&self, offset: usize, to: &mut [u8]) -> Result<(), Error> {
        let fits = offset.checked_add(to.len()).is_some_and(|end| end <= self.len);
        assert!(fits, "{} bytes from byte {offset} of a buffer of {}", to.len(), self.len);
        if to.is_empty() { Ok(()) } else { self.device.backend().download(self.address(offset), to) }
    }

    /// Copies the first `bytes` of a buffer of the same device.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When either is shorter, or they lie on different devices.
    #[track_caller]
    pub fn copy_from(&mut self, from: &Buffer, bytes: usize) -> Result<(), Error> {
        assert!(self.device == from.device, "a copy from {} to {}", from.device, self.device);
        assert!(bytes <= self.len && bytes <= from.len, "{bytes} bytes from {} to {}", from.len, self.len);
        if bytes == 0 { Ok(()) } else { self.device.backend().copy(from.address, self.address, bytes) }
    }

    /// Sets every byte.
    ///
    /// # Errors
    /// When the device fails.
    pub fn fill(&mut self, value: u8) -> Result<(), Error> {
        if self.is_empty() { Ok(()) } else { self.device.backend().fill(self.address, value, self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.device.give_back(self.address, self.len);
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} bytes on {}", self.len, self.device)
    }
}
