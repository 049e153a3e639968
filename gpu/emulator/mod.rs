//! A device that runs kernels on the CPU, for tests: the sources are compiled by `g++`, with a header that stands for CUDA's
//! built-ins, and run one block after another, a fiber for each thread, with every access to memory checked.
//!
//! What it reports, with block, thread and line: accesses outside of buffers and of shared arrays, reads of shared memory that
//! nothing wrote, races in shared memory, barriers and operations of a warp that not all threads come to. Memory that nothing
//! wrote is NaN. `KUMIKI_EMULATOR=backwards` runs blocks and threads in the opposite order: results must be the same.

mod compile;
mod matmul;
mod memory;
#[cfg(all(test, target_os = "linux"))]
mod tests;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Arc, Mutex};

use libloading::Library;

use crate::backend::{Backend, Matmul, Module, Properties};
use crate::error::Error;
use crate::source::{Launch, Source};
use memory::{Memory, Region};

/// Devices that are there.
const DEVICES: usize = 2;

/// Whether devices are to be emulated: `KUMIKI_CUDA=emulator`.
pub(crate) fn is_wanted() -> bool {
    std::env::var("KUMIKI_CUDA").is_ok_and(|value| value == "emulator")
}

/// The emulated device of this index.
pub(crate) fn open(index: usize) -> Result<Box<dyn Backend>, Error> {
    if index >= DEVICES {
        return Err(Error::new(format!("cuda:{index}: there is no such device, only {DEVICES} (emulated)")));
    }
    let properties = Properties {
        name: "emulated".into(),
        capability: (8, 0),
        multiprocessors: 2,
        shared_per_block: 227 * 1024,
        memory: 4 << 30,
    };
    Ok(Box::new(Emulator { properties, memory: Arc::default() }))
}

struct Emulator {
    properties: Properties,
    memory: Arc<Memory>,
}

impl Backend for Emulator {
    fn properties(&self) -> &Properties {
        &self.properties
    }
    fn free_memory(&self) -> Result<usize, Error> {
        Ok(self.properties.memory.saturating_sub(self.memory.live()))
    }
    fn keeps_memory(&self) -> bool {
        false
    }
    fn allocate(&self, bytes: usize) -> Result<Option<u64>, Error> {
        let fits = self.memory.live().checked_add(bytes).is_some_and(|live| live <= self.properties.memory);
        Ok(fits.then(|| self.memory.allocate(bytes)))
    }
    unsafe fn free(&self, address: u64, _: usize) {
        self.memory.free(address);
    }
    fn upload(&self, from: &[u8], to: u64) -> Result<(), Error> {
        self.memory.with(to, from.len(), |memory| memory.copy_from_slice(from))
    }
    fn download(&self, from: u64, to: &mut [u8]) -> Result<(), Error> {
        self.memory.with(from, to.len(), |memory| to.copy_from_slice(memory))
    }
    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error> {
        let mut between = vec![0; bytes];
        self.download(from, &mut between)?;
        self.upload(&between, to)
    }
    fn fill(&self, to: u64, value: u8, bytes: usize) -> Result<(), Error> {
        self.memory.with(to, bytes, |memory| memory.fill(value))
    }
    fn load(&self, source: &'static Source) -> Result<Arc<dyn Module>, Error> {
        let library = compile::library(source)?;
        Ok(Arc::new(Compiled { source, library, memory: self.memory.clone(), running: Mutex::new(()) }))
    }
    fn matmul(&self, product: &Matmul) -> Result<(), Error> {
        matmul::matmul(&self.memory, product)
    }
    fn synchronize(&self) -> Result<(), Error> {
        Ok(())
    }
}

/// A source as a shared object, with its own engine.
struct Compiled {
    source: &'static Source,
    library: Library,
    memory: Arc<Memory>,
    /// The engine, and `__shared__` arrays, are static: one launch at a time.
    running: Mutex<()>,
}

type Kernel = unsafe extern "C" fn(*mut *mut c_void);
type Run = unsafe extern "C" fn(
    kernel: Kernel,
    grid: *const c_uint,
    block: *const c_uint,
    shared: c_uint,
    params: *mut *mut c_void,
    regions: *const Region,
    count: usize,
    order: c_int,
    message: *mut c_char,
    capacity: usize,
) -> c_int;

impl Compiled {
    /// What CUDA would refuse.
    fn check(&self, shape: Launch) -> Result<(), Error> {
        let [x, y, z] = shape.block;
        let threads = u64::from(x) * u64::from(y) * u64::from(z);
        if threads == 0 || threads > 1024 || z > 64 {
            return Err(Error::new(format!(
                "a block must have 1 to 1024 threads, of which at most 64 along z; it has {threads}"
            )));
        }
        if shape.grid[1] > 65535 || shape.grid[2] > 65535 || shape.grid[0] > i32::MAX as u32 {
            return Err(Error::new("a grid has at most 2147483647, 65535 and 65535 blocks along x, y and z"));
        }
        if shape.shared > 227 * 1024 {
            return Err(Error::new(format!(
                "{} bytes of dynamic shared memory, of 232448 that there are",
                shape.shared
            )));
        }
        Ok(())
    }
}

impl Module for Compiled {
    unsafe fn launch(&self, kernel: usize, shape: Launch, params: &mut [*mut c_void]) -> Result<(), Error> {
        self.check(shape)?;
        let missing = |error: libloading::Error| Error::new(format!("{}: {error}", self.source.file));
        // SAFETY: the types are those of engine.cpp and of the trampolines that `compile` writes.
        let (run, kernel) = unsafe {
            let run = self.library.get::<Run>(b"emulator_launch").map_err(missing)?;
            (run, *self.library.get::<Kernel>(format!("kernel_{kernel}").as_bytes()).map_err(missing)?)
        };
        let regions = self.memory.regions();
        let order = c_int::from(std::env::var("KUMIKI_EMULATOR").is_ok_and(|order| order == "backwards"));
        let mut message = [0; 1024];
        let _alone = self.running.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // SAFETY: the caller warrants that `params` are the kernel's; the others live until the call returns.
        let failed = unsafe {
            run(
                kernel,
                shape.grid.as_ptr(),
                shape.block.as_ptr(),
                shape.shared,
                params.as_mut_ptr(),
                regions.as_ptr(),
                regions.len(),
                order,
                message.as_mut_ptr(),
                message.len(),
            )
        };
        if failed == 0 {
            return Ok(());
        }
        // SAFETY: snprintf has ended it with a zero.
        let message = unsafe { CStr::from_ptr(message.as_ptr()) }.to_string_lossy().into_owned();
        let Some((what, address)) = message.split_once('\n') else { return Err(Error::new(message)) };
        let place = compile::line_of(&self.library, address).map(|line| format!(" ({line})")).unwrap_or_default();
        Err(Error::new(format!("{what}{place}")))
    }
}
