//! [`Card`]: what a device must be able to do, by calls of the driver.
//!
//! Everything is put on one stream, in the order of the calls, from whatever thread they come. The context is the primary one,
//! which the process shares with other users of the card; each call binds it to its thread. Devices stay open until the
//! process ends, so that nothing here is ever destroyed.

use std::ffi::c_int;
use std::fmt::Display;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cudarc::driver::sys::{CUcontext, CUdevice_attribute as Attribute, CUresult, CUstream, CUstream_flags};

use super::api::Api;
use super::cublaslt::Products;
use super::module::Loaded;
use super::staging::Staging;
use crate::backend::{Backend, Matmul, Module, Properties, Replay};
use crate::error::Error;
use crate::source::Source;

/// The context and the stream of a card.
pub(super) struct Core {
    pub api: &'static Api,
    pub stream: CUstream,
    pub properties: Properties,
    /// Whether the stream records a graph instead of doing what it is given.
    pub recording: AtomicBool,
    index: usize,
    context: CUcontext,
}

// SAFETY: the driver's handles may be used from any thread, several at a time.
unsafe impl Send for Core {}
// SAFETY: likewise.
unsafe impl Sync for Core {}

impl Core {
    /// Makes the card the calling thread's.
    pub fn bind(&self) -> Result<(), Error> {
        // SAFETY: a context that lives as long as the process.
        let status = unsafe { (self.api.f.cuCtxSetCurrent)(self.context) };
        self.check(status, "its context")
    }

    /// An error for every status but 0, which says what was being done.
    pub fn check(&self, status: u32, what: impl Display) -> Result<(), Error> {
        self.api.check(status).map_err(|e| self.error(format!("{what}: {e}")))
    }

    pub fn error(&self, sentence: impl Display) -> Error {
        Error::new(format!("cuda:{}: {sentence}", self.index))
    }

    /// An error while a graph is recorded, which can hold launches, copies and fills on the device only.
    pub fn not_while_recording(&self, what: &str) -> Result<(), Error> {
        match self.recording.load(Ordering::Acquire) {
            true => Err(self.error(format!("{what} cannot be part of a graph"))),
            false => Ok(()),
        }
    }

    /// `None` when there is not so much memory.
    ///
    /// The plain allocator, not the stream-ordered one: the pool above asks seldom, and addresses must not belong to a
    /// graph that is being recorded.
    pub fn allocate(&self, bytes: usize) -> Result<Option<u64>, Error> {
        self.bind()?;
        let mut address = 0;
        // SAFETY: a valid place for the address.
        let status = unsafe { (self.api.f.cuMemAlloc_v2)(&raw mut address, bytes) };
        if status == CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32 {
            return Ok(None);
        }
        self.check(status, format_args!("an allocation of {bytes} bytes"))?;
        Ok(Some(address))
    }

    pub fn synchronize(&self) -> Result<(), Error> {
        self.not_while_recording("waiting for the device")?;
        self.bind()?;
        // SAFETY: a stream that lives as long as the process.
        self.check(unsafe { (self.api.f.cuStreamSynchronize)(self.stream) }, "waiting for the device")
    }
}

/// A card.
pub(super) struct Card {
    core: &'static Core,
    staging: Mutex<Option<Staging>>,
    products: Mutex<Option<Products>>,
}

impl Card {
    pub fn open(index: usize) -> Result<Card, Error> {
        let api = Api::get()?;
        let ok = |status, what| api.check(status).map_err(|e| Error::new(format!("{what}: {e}")));
        let mut count = 0;
        // SAFETY: a valid place for the number.
        ok(unsafe { (api.f.cuDeviceGetCount)(&raw mut count) }, "the number of devices")?;
        let count = usize::try_from(count).unwrap_or(0);
        if index >= count {
            return Err(Error::new(format!("there is no such device, only {count}")));
        }
        let (mut device, mut context, mut stream) = (0, null_mut(), null_mut());
        // SAFETY: valid places for the handles; the device exists, and the context is retained for ever.
        unsafe {
            ok((api.f.cuDeviceGet)(&raw mut device, index as c_int), "the device")?;
            ok((api.f.cuDevicePrimaryCtxRetain)(&raw mut context, device), "its context")?;
            ok((api.f.cuCtxSetCurrent)(context), "its context")?;
            let flag = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            ok((api.f.cuStreamCreate)(&raw mut stream, flag), "its stream")?;
        }
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: a valid place for the number.
            ok(unsafe { (api.f.cuDeviceGetAttribute)(&raw mut value, attribute, device) }, "its properties")?;
            Ok::<u32, Error>(value as u32)
        };
        let (mut name, mut memory) = ([0u8; 256], 0);
        // SAFETY: valid places, of the length that is given.
        unsafe {
            ok((api.f.cuDeviceGetName)(name.as_mut_ptr().cast(), name.len() as c_int, device), "its name")?;
            ok((api.f.cuDeviceTotalMem_v2)(&raw mut memory, device), "its memory")?;
        }
        let properties = Properties {
            name: String::from_utf8_lossy(name.split(|&byte| byte == 0).next().unwrap_or(&[])).into_owned(),
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            memory,
        };
        let core = Core { api, stream, properties, recording: AtomicBool::new(false), index, context };
        Ok(Card { core: Box::leak(Box::new(core)), staging: Mutex::default(), products: Mutex::default() })
    }
}

impl Backend for Card {
    fn properties(&self) -> &Properties {
        &self.core.properties
    }

    fn free_memory(&self) -> Result<usize, Error> {
        self.core.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid places for the numbers.
        let status = unsafe { (self.core.api.f.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        self.core.check(status, "its free memory")?;
        Ok(free)
    }

    fn keeps_memory(&self) -> bool {
        true
    }

    fn allocate(&self, bytes: usize) -> Result<Option<u64>, Error> {
        self.core.allocate(bytes)
    }

    unsafe fn free(&self, address: u64, _bytes: usize) {
        // The driver frees at once, work that still waits may use it: wait. Where that fails the context is lost, and its
        // memory with it.
        if self.core.synchronize().is_ok() {
            // SAFETY: the caller warrants that it was allocated and is not used any more.
            unsafe { (self.core.api.f.cuMemFree_v2)(address) };
        }
    }

    fn upload(&self, from: &[u8], to: u64) -> Result<(), Error> {
        self.core.not_while_recording("an upload")?;
        self.core.bind()?;
        let mut staging = self.staging.lock().map_err(|_| self.core.error("a panic broke an earlier upload"))?;
        if staging.is_none() {
            *staging = Some(Staging::new(self.core)?);
        }
        staging.as_mut().map_or(Ok(()), |staging| staging.upload(from, to))
    }

    fn download(&self, from: u64, to: &mut [u8]) -> Result<(), Error> {
        self.core.not_while_recording("a download")?;
        self.core.bind()?;
        let bytes = to.len();
        // SAFETY: `to` is as long as is said, and the call below returns when it has been written.
        let status =
            unsafe { (self.core.api.f.cuMemcpyDtoHAsync_v2)(to.as_mut_ptr().cast(), from, bytes, self.core.stream) };
        let waited = self.core.synchronize();
        self.core.check(status, format_args!("a download of {bytes} bytes"))?;
        waited
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error> {
        self.core.bind()?;
        // SAFETY: addresses on the device, which checks them.
        let status = unsafe { (self.core.api.f.cuMemcpyDtoDAsync_v2)(to, from, bytes, self.core.stream) };
        self.core.check(status, format_args!("a copy of {bytes} bytes"))
    }

    fn fill(&self, to: u64, value: u8, bytes: usize) -> Result<(), Error> {
        self.core.bind()?;
        // SAFETY: an address on the device, which checks it.
        let status = unsafe { (self.core.api.f.cuMemsetD8Async)(to, value, bytes, self.core.stream) };
        self.core.check(status, format_args!("a fill of {bytes} bytes"))
    }

    fn load(&self, source: &'static Source) -> Result<Arc<dyn Module>, Error> {
        Ok(Arc::new(Loaded::new(self.core, source)?))
    }

    fn matmul(&self, product: &Matmul) -> Result<(), Error> {
        self.core.bind()?;
        let mut products = self.products.lock().map_err(|_| self.core.error("a panic broke an earlier product"))?;
        if products.is_none() {
            *products = Some(Products::new(self.core)?);
        }
        products.as_mut().map_or(Ok(()), |products| products.run(product))
    }

    fn synchronize(&self) -> Result<(), Error> {
        self.core.synchronize()
    }

    fn time(&self, work: &mut dyn FnMut()) -> Result<Duration, Error> {
        super::graph::time(self.core, work)
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<(), Error>) -> Result<Option<Box<dyn Replay>>, Error> {
        Ok(Some(Box::new(super::graph::Graph::record(self.core, work)?)))
    }
}
