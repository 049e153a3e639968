//! What a device must be able to do: the driver's, or the emulation's.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::source::{Launch, Source};

/// What is known of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// As its maker calls it.
    pub name: String,
    /// Compute capability: 9, 0 for `sm_90`.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory that a block may ask for.
    pub shared_per_block: u32,
    /// Bytes of memory in all.
    pub memory: usize,
}

/// The type of a matrix' elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatmulType {
    /// IEEE single; sums in the same.
    F32,
    /// IEEE double; sums in the same.
    F64,
    /// bfloat16; sums in single.
    Bf16,
}

/// A row-major matrix, or a batch of them, in a device's memory.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Address of the first element.
    pub address: u64,
    /// The type of its elements.
    pub dtype: MatmulType,
    /// Whether the matrix lies there transposed.
    pub transposed: bool,
    /// Elements from a row to the next, as it lies there.
    pub stride: usize,
    /// Elements from a matrix of the batch to the next; 0 when all are the same.
    pub batch_stride: usize,
}

/// `C[m, n] = A[m, k] B[k, n]`, added to C if `accumulate`, for each of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Matmul {
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Columns of A and rows of B.
    pub k: usize,
    /// Matrices of the batch.
    pub batch: usize,
    /// The left factor.
    pub a: Operand,
    /// The right factor, of the type of the left one.
    pub b: Operand,
    /// The result; not transposed. Of the type of the factors, or F32 where those are BF16.
    pub c: Operand,
    /// Whether the product is added to what C holds.
    pub accumulate: bool,
    /// Whether factors of F32 may be rounded to TF32.
    pub tf32: bool,
}

/// Addresses are the device's, sizes bytes. Copies, fills and launches happen in the order of the calls; `upload` has read
/// its bytes when it returns, `download` has written them.
pub(crate) trait Backend: Send + Sync {
    fn properties(&self) -> &Properties;
    /// Bytes that could be allocated now.
    fn free_memory(&self) -> Result<usize, Error>;
    /// Whether freed memory should be kept for the next request. An emulation that guards each buffer wants none kept.
    fn keeps_memory(&self) -> bool;
    /// `None` when there is not so much memory.
    fn allocate(&self, bytes: usize) -> Result<Option<u64>, Error>;
    /// # Safety
    /// `address` comes from `allocate(bytes)`, and nothing asked for later uses it.
    unsafe fn free(&self, address: u64, bytes: usize);
    fn upload(&self, from: &[u8], to: u64) -> Result<(), Error>;
    fn download(&self, from: u64, to: &mut [u8]) -> Result<(), Error>;
    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error>;
    /// Sets every byte.
    fn fill(&self, to: u64, value: u8, bytes: usize) -> Result<(), Error>;
    /// Compiles, or finds compiled.
    fn load(&self, source: &'static Source) -> Result<Arc<dyn Module>, Error>;
    fn matmul(&self, product: &Matmul) -> Result<(), Error>;
    /// Waits for everything asked for so far.
    fn synchronize(&self) -> Result<(), Error>;
    /// How long the device takes for what `work` asks of it.
    fn time(&self, work: &mut dyn FnMut()) -> Result<Duration, Error> {
        self.synchronize()?;
        let start = Instant::now();
        work();
        self.synchronize()?;
        Ok(start.elapsed())
    }
    /// Records what `work` asks for, without doing it. `None`, and `work` is not called, where the device cannot.
    fn record(&self, work: &mut dyn FnMut() -> Result<(), Error>) -> Result<Option<Box<dyn Replay>>, Error> {
        let _ = work;
        Ok(None)
    }
}

/// Recorded work.
pub(crate) trait Replay: Send + Sync {
    /// Asks for it once more.
    ///
    /// # Safety
    /// What it reads and writes is still there, and of what it writes nobody holds the contents.
    unsafe fn launch(&self) -> Result<(), Error>;
}

/// A compiled source on its device.
pub(crate) trait Module: Send + Sync {
    /// Launches the kernel at this place in [`Source::kernels`]. `params` point to its arguments.
    ///
    /// # Safety
    /// The arguments are those of the kernel.
    unsafe fn launch(&self, kernel: usize, shape: Launch, params: &mut [*mut c_void]) -> Result<(), Error>;
}
