//! [`Device`]: a card, or its emulation.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex};

use crate::backend::{Backend, Matmul, Module, Properties};
use crate::buffer::Buffer;
use crate::error::Error;
use crate::pool::{MemoryStats, Pool};
use crate::source::{Arg, Launch, Source};

/// A CUDA device. Cloning is cheap; all clones are the same device.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    index: usize,
    backend: Box<dyn Backend>,
    pool: Mutex<Pool>,
    /// By the address of their source.
    modules: Mutex<HashMap<usize, Arc<dyn Module>>>,
}

/// Devices by index.
type Open = LazyLock<Mutex<HashMap<usize, Device>>>;
static OPEN: Open = LazyLock::new(Mutex::default);
#[cfg(feature = "emulator")]
static EMULATED: Open = LazyLock::new(Mutex::default);

/// Whether device 0 can be used.
///
/// # Errors
/// As [`Device::open`].
pub fn availability() -> Result<(), Error> {
    Device::open(0).map(|_| ())
}

/// The backend of a device.
fn backend(index: usize) -> Result<Box<dyn Backend>, Error> {
    #[cfg(feature = "emulator")]
    if crate::emulator::is_wanted() {
        return crate::emulator::open(index);
    }
    #[cfg(feature = "cuda")]
    return crate::driver::open(index);
    #[cfg(not(feature = "cuda"))]
    Err(Error::new(format!("cuda:{index}: this kumiki was built without CUDA (its feature `cuda`)")))
}

impl Device {
    /// The device of this index; the same one however often it is asked for.
    ///
    /// # Errors
    /// When there is no driver, or none that fits, or no such device.
    pub fn open(index: usize) -> Result<Device, Error> {
        Device::known(&OPEN, index, backend)
    }

    /// An emulated device: see the module `emulator`. Not the same as one that [`Device::open`] emulates.
    ///
    /// # Errors
    /// When there is no such device.
    #[cfg(feature = "emulator")]
    pub fn emulated(index: usize) -> Result<Device, Error> {
        Device::known(&EMULATED, index, crate::emulator::open)
    }

    /// The devices that tests run on: an emulated one in builds with the feature `emulator` (on Linux), and a card if there is
    /// one.
    pub fn for_tests() -> Vec<Device> {
        #[cfg(all(feature = "emulator", target_os = "linux"))]
        let emulated = Device::emulated(0).ok();
        #[cfg(not(all(feature = "emulator", target_os = "linux")))]
        let emulated = None;
        emulated.into_iter().chain(Device::open(0)).collect()
    }

    fn known(
        open: &Open,
        index: usize,
        backend: impl FnOnce(usize) -> Result<Box<dyn Backend>, Error>,
    ) -> Result<Device, Error> {
        let mut open = open.lock().expect("lock of the devices");
        if let Some(device) = open.get(&index) {
            return Ok(device.clone());
        }
        let device = Device(Arc::new(Inner {
            index,
            backend: backend(index)?,
            pool: Mutex::default(),
            modules: Mutex::default(),
        }));
        open.insert(index, device.clone());
        Ok(device)
    }

    /// Its index.
    pub fn index(&self) -> usize {
        self.0.index
    }

    /// What is known of it.
    pub fn properties(&self) -> &Properties {
        self.0.backend.properties()
    }

    pub(crate) fn pool(&self) -> &Mutex<Pool> {
        &self.0.pool
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.0.backend
    }

    /// Memory of so many bytes, with unspecified contents.
    ///
    /// # Errors
    /// When there is not so much memory: says what was asked, what is free and what tensors hold.
    #[expect(clippy::missing_panics_doc, reason = "the lock is poisoned only by a panic inside the allocator")]
    pub fn allocate(&self, bytes: usize) -> Result<Buffer, Error> {
        let (class, backend) = (self.class(bytes), self.backend());
        let mut pool = self.0.pool.lock().expect("lock of the pool");
        let waiting = pool.take(class);
        let address = match waiting {
            Some(address) => address,
            None => {
                let mut address = backend.allocate(class)?;
                if address.is_none() && !pool.recording {
                    // Blocks of other sizes may make room.
                    for (class, block) in pool.drain() {
                        // SAFETY: allocated with this size; nobody holds a block that waits.
                        unsafe { backend.free(block, class) };
                    }
                    address = backend.allocate(class)?;
                }
                pool.stats.device_allocations += 1;
                address.ok_or_else(|| {
                    Error::new(format!(
                        "out of memory on {self}: {bytes} bytes asked, {} free of {}, {} in use by tensors",
                        backend.free_memory().unwrap_or(0),
                        self.properties().memory,
                        pool.stats.live
                    ))
                })?
            }
        };
        pool.lent(class);
        Ok(Buffer { device: self.clone(), address, len: bytes })
    }

    fn class(&self, bytes: usize) -> usize {
        if self.backend().keeps_memory() { Pool::class(bytes) } else { bytes.max(1) }
    }

    pub(crate) fn give_back(&self, address: u64, bytes: usize) {
        let class = self.class(bytes);
        let Ok(mut pool) = self.0.pool.lock() else { return };
        pool.returned(class);
        if self.backend().keeps_memory() {
            pool.put(class, address);
        } else {
            // SAFETY: allocated with this size, and its buffer is being dropped.
            unsafe { self.backend().free(address, class) };
        }
    }

    /// The counters of its allocator.
    #[expect(clippy::missing_panics_doc, reason = "the lock is poisoned only by a panic inside the allocator")]
    pub fn memory_stats(&self) -> MemoryStats {
        self.0.pool.lock().expect("lock of the pool").stats
    }

    /// Starts a new measurement of the peak.
    #[expect(clippy::missing_panics_doc, reason = "the lock is poisoned only by a panic inside the allocator")]
    pub fn reset_peak(&self) {
        let mut pool = self.0.pool.lock().expect("lock of the pool");
        pool.stats.peak = pool.stats.live;
    }

    /// Launches a kernel of a source, which is compiled if this is its first. A grid without blocks is nothing to do.
    ///
    /// # Safety
    /// The arguments are those of the kernel, in type and number; what it reads and writes lies in the buffers, and of those
    /// that it writes nobody else holds the contents.
    ///
    /// # Errors
    /// When it does not compile or cannot be launched: names the kernel and the shape of the launch.
    ///
    /// # Panics
    /// When the source has no such kernel, or a buffer lies on another device.
    #[track_caller]
    pub unsafe fn launch(
        &self,
        source: &'static Source,
        kernel: &str,
        shape: Launch,
        args: &[Arg],
    ) -> Result<(), Error> {
        let at = source.kernels.iter().position(|&name| name == kernel);
        let at = at.unwrap_or_else(|| panic!("{} has no kernel {kernel}; it has {:?}", source.file, source.kernels));
        if shape.grid.contains(&0) {
            return Ok(());
        }
        let module = self.module(source)?;
        let mut values: Vec<[u64; 32]> = args.iter().map(|arg| self.value(arg)).collect();
        let mut params: Vec<*mut c_void> = values.iter_mut().map(|value| value.as_mut_ptr().cast()).collect();
        // SAFETY: the caller warrants that the arguments are the kernel's; `values` outlives the call.
        unsafe { module.launch(at, shape, &mut params) }
            .map_err(|e| Error::new(format!("{kernel} with {shape:?} on {self}: {e}")))
    }

    fn module(&self, source: &'static Source) -> Result<Arc<dyn Module>, Error> {
        let mut modules = self.0.modules.lock().expect("lock of the modules");
        let address = std::ptr::from_ref(source) as usize;
        if let Some(module) = modules.get(&address) {
            return Ok(module.clone());
        }
        let module = self.backend().load(source)?;
        modules.insert(address, module.clone());
        Ok(module)
    }

    /// The bytes of an argument.
    #[track_caller]
    fn value(&self, arg: &Arg) -> [u64; 32] {
        let mut value = [0; 32];
        let on_this =
            |buffer: &Buffer| assert!(buffer.device == *self, "a buffer on {} for a kernel on {self}", buffer.device);
        match *arg {
            Arg::In(buffer, offset) | Arg::Out(buffer, offset) => {
                on_this(buffer);
                value[0] = buffer.address(offset);
            }
            Arg::Null => {}
            Arg::I64(x) => value[0] = x as u64,
            Arg::I32(x) => value[0] = u64::from(x as u32),
            Arg::U32(x) => value[0] = u64::from(x),
            Arg::U64(x) => value[0] = x,
            Arg::F32(x) => value[0] = u64::from(x.to_bits()),
            Arg::F64(x) => value[0] = x.to_bits(),
            Arg::Struct(bytes) => {
                assert!(bytes.len() <= 256, "a struct of {} bytes is too large for an argument", bytes.len());
                for (word, bytes) in value.iter_mut().zip(bytes.chunks(8)) {
                    let mut whole = [0; 8];
                    whole[..bytes.len()].copy_from_slice(bytes);
                    *word = u64::from_ne_bytes(whole);
                }
            }
        }
        value
    }

    /// A product of matrices in its memory.
    ///
    /// # Safety
    /// The operands lie in buffers of this device, and nobody else holds the contents of the result.
    ///
    /// # Errors
    /// When the device, or its library, fails.
    pub unsafe fn matmul(&self, product: &Matmul) -> Result<(), Error> {
        if product.m == 0 || product.n == 0 || product.batch == 0 {
            return Ok(());
        }
        self.backend().matmul(product)
    }

    /// Waits for everything asked for so far.
    ///
    /// # Errors
    /// When some of it failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.backend().synchronize()
    }
}

// A panic between two calls leaves nothing half done: what changes lies behind locks.
impl std::panic::UnwindSafe for Device {}
impl std::panic::RefUnwindSafe for Device {}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "cuda:{}", self.0.index)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "cuda:{} ({})", self.0.index, self.properties().name)
    }
}

#[cfg(all(test, not(feature = "cuda"), not(feature = "emulator")))]
mod tests {
    #[test]
    fn a_build_without_cuda_says_so() {
        assert!(super::availability().unwrap_err().to_string().contains("built without CUDA"));
    }
}
