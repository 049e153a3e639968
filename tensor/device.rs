//! Where a tensor's elements lie, and moving them.

use std::fmt;

use kumiki_gpu as gpu;

use crate::tensor::Tensor;

/// Where the elements of a tensor lie.
#[derive(Clone, Debug, PartialEq)]
pub enum Device {
    /// The host's memory.
    Cpu,
    /// A CUDA device's.
    Cuda(gpu::Device),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(device) => device.fmt(f),
        }
    }
}

impl Tensor {
    /// Where the elements lie.
    pub fn device(&self) -> Device {
        self.storage.device()
    }

    /// The CUDA device that holds the elements, if one does.
    pub fn cuda(&self) -> Option<&gpu::Device> {
        self.storage.on_cuda().map(gpu::Buffer::device)
    }

    /// The same elements on a device, contiguous; itself when they are there.
    ///
    /// # Errors
    /// When that device has not enough memory, or fails.
    #[expect(clippy::missing_panics_doc, reason = "a copy stays on its device")]
    pub fn to(&self, device: &Device) -> Result<Tensor, gpu::Error> {
        match (self.storage.on_cuda(), device) {
            (None, Device::Cpu) => Ok(self.clone()),
            (Some(from), Device::Cuda(to)) if from.device() == to => Ok(self.clone()),
            (None, Device::Cuda(to)) => {
                let rows = self.contiguous();
                let mut buffer = to.allocate(rows.byte_len())?;
                buffer.upload(rows.bytes())?;
                Ok(rows.in_storage(buffer.into()))
            }
            (Some(_), Device::Cpu) => {
                let rows = self.contiguous();
                let buffer = rows.storage.on_cuda().expect("a copy stays on its device");
                let mut out = Tensor::empty(self.dtype(), self.shape());
                buffer.download(rows.first_byte(), out.bytes_mut())?;
                Ok(out)
            }
            (Some(_), Device::Cuda(_)) => self.to(&Device::Cpu)?.to(device),
        }
    }

    /// Where the first element lies in the storage; of a view without elements, which may begin anywhere, at its start.
    pub(crate) fn first_byte(&self) -> usize {
        if self.is_empty() { 0 } else { self.offset() * self.dtype().size() }
    }

    /// As [`Tensor::to`] the CPU, for reading a few numbers.
    ///
    /// # Panics
    /// When the device fails.
    pub(crate) fn on_host(&self) -> Tensor {
        self.to(&Device::Cpu).unwrap_or_else(|error| panic!("{error}"))
    }
}
