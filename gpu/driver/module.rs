//! Compiled sources on a card, and launches of their kernels.

use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::Mutex;

use cudarc::driver::sys::{CUfunction, CUfunction_attribute as Attribute, CUjit_option as Jit};

use super::card::Core;
use super::nvrtc::{Compiled, Compiler};
use crate::backend::Module;
use crate::error::Error;
use crate::source::{Launch, Source};

/// Shared memory that a block may have without being asked for.
const USUAL: u32 = 48 << 10;

/// A source on its card, for as long as the process lives.
pub(super) struct Loaded {
    core: &'static Core,
    kernels: Vec<Kernel>,
}

struct Kernel {
    function: CUfunction,
    /// Bytes of its own, beside those of a launch.
    shared: u32,
    /// The most dynamic shared memory that was asked for.
    allowed: Mutex<u32>,
}

// SAFETY: the driver's handles may be used from any thread, several at a time.
unsafe impl Send for Loaded {}
// SAFETY: likewise.
unsafe impl Sync for Loaded {}

impl Loaded {
    /// Compiles, or finds compiled.
    pub fn new(core: &'static Core, source: &Source) -> Result<Loaded, Error> {
        let compiler = Compiler::get().map_err(|e| core.error(format_args!("{} is not compiled: {e}", source.file)))?;
        let compiled = compiler.for_card(source, core.properties.capability).map_err(|e| core.error(e))?;
        Loaded::from(core, &compiled).map_err(|e| {
            let ((of, nvrtc), (driver, minor)) = (compiler.version, core.api.version);
            core.error(format_args!(
                "{}, compiled by NVRTC {of}.{nvrtc}, is not loaded by the driver, which is for CUDA {driver}.{minor}: {e}",
                source.file
            ))
        })
    }

    fn from(core: &'static Core, compiled: &Compiled) -> Result<Loaded, Error> {
        core.bind()?;
        let (f, mut module, mut log) = (&core.api.f, null_mut(), vec![0u8; 4096]);
        let mut options = [Jit::CU_JIT_ERROR_LOG_BUFFER, Jit::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        // A number is given where a pointer would be.
        let mut values = [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut::<c_void>(log.len())];
        // SAFETY: a cubin, or PTX with its final zero; as many values as options, of their types; the log outlives the call.
        let status = unsafe {
            let image = compiled.image.as_ptr().cast();
            (f.cuModuleLoadDataEx)(&raw mut module, image, 2, options.as_mut_ptr(), values.as_mut_ptr())
        };
        core.api.check(status).map_err(|e| {
            let log = String::from_utf8_lossy(log.split(|&byte| byte == 0).next().unwrap_or(&[])).trim().to_owned();
            Error::new(if log.is_empty() { e.to_string() } else { format!("{e}\n{log}") })
        })?;
        let kernels = compiled.lowered.iter().map(|name| {
            let (mut function, mut shared) = (null_mut(), 0);
            let text = CString::new(name.as_str()).map_err(|_| Error::new("a kernel's name has a zero"))?;
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
            // SAFETY: the module was loaded above; valid places for the results.
            let status = unsafe {
                let found = (f.cuModuleGetFunction)(&raw mut function, module, text.as_ptr());
                if found == 0 { (f.cuFuncGetAttribute)(&raw mut shared, attribute, function) } else { found }
            };
            core.api.check(status).map_err(|e| Error::new(format!("{name}: {e}")))?;
            Ok(Kernel { function, shared: shared as u32, allowed: Mutex::new(USUAL.saturating_sub(shared as u32)) })
        });
        Ok(Loaded { core, kernels: kernels.collect::<Result<_, Error>>()? })
    }

    /// Asks for more dynamic shared memory than blocks usually have.
    fn allow(&self, kernel: &Kernel, shared: u32) -> Result<(), Error> {
        let mut allowed = kernel.allowed.lock().map_err(|_| Error::new("a panic broke an earlier launch"))?;
        if shared <= *allowed {
            return Ok(());
        }
        let all = self.core.properties.shared_per_block;
        if shared.saturating_add(kernel.shared) > all {
            return Err(Error::new(format!(
                "{shared} bytes of dynamic shared memory beside {} static ones, but a block can have only {all}",
                kernel.shared
            )));
        }
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a kernel of a module that stays loaded.
        let result = unsafe { (self.core.api.f.cuFuncSetAttribute)(kernel.function, attribute, shared as i32) };
        self.core.api.check(result)?;
        *allowed = shared;
        Ok(())
    }
}

impl Module for Loaded {
    unsafe fn launch(&self, kernel: usize, shape: Launch, params: &mut [*mut c_void]) -> Result<(), Error> {
        let (kernel, Launch { grid, block, shared }) = (&self.kernels[kernel], shape);
        self.core.bind()?;
        self.allow(kernel, shared)?;
        // SAFETY: the caller warrants the arguments, which the call copies; `Device::launch` says kernel and shape.
        self.core.api.check(unsafe {
            let (f, stream) = (self.core.api.f.cuLaunchKernel, self.core.stream);
            let [gx, gy, gz] = grid;
            let [bx, by, bz] = block;
            f(kernel.function, gx, gy, gz, bx, by, bz, shared, stream, params.as_mut_ptr(), null_mut())
        })
    }
}
