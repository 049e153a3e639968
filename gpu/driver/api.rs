//! The driver's functions, and what its errors mean.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;
use sys::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUmodule, CUstream};

use super::library::{Library, functions};
use crate::error::Error;

/// The oldest driver that has all that is used, as it reports itself: CUDA 12.0.
const OLDEST: c_int = 12_000;

functions! {
    /// What is used of the driver.
    Functions from sys returns CUresult {
        cuInit(c_uint);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGet(*mut CUdevice, c_int);
        cuDeviceGetName(*mut c_char, c_int, CUdevice);
        cuDeviceTotalMem_v2(*mut usize, CUdevice);
        cuDeviceGetAttribute(*mut c_int, sys::CUdevice_attribute, CUdevice);
        cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        cuCtxSetCurrent(CUcontext);
        cuStreamCreate(*mut CUstream, c_uint);
        cuStreamSynchronize(CUstream);
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemAlloc_v2(*mut CUdeviceptr, usize);
        cuMemFree_v2(CUdeviceptr);
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
        cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
        cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
        cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
        cuMemsetD2D8Async(CUdeviceptr, usize, c_uchar, usize, usize, CUstream);
        cuEventCreate(*mut CUevent, c_uint);
        cuEventRecord(CUevent, CUstream);
        cuEventSynchronize(CUevent);
        cuEventElapsedTime(*mut f32, CUevent, CUevent);
        cuEventDestroy_v2(CUevent);
        cuModuleLoadDataEx(*mut CUmodule, *const c_void, c_uint, *mut sys::CUjit_option, *mut *mut c_void);
        cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
        cuFuncGetAttribute(*mut c_int, sys::CUfunction_attribute, CUfunction);
        cuFuncSetAttribute(CUfunction, sys::CUfunction_attribute, c_int);
        cuLaunchKernel(CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void);
        cuStreamBeginCapture_v2(CUstream, sys::CUstreamCaptureMode);
        cuStreamEndCapture(CUstream, *mut CUgraph);
        cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, c_ulonglong);
        cuGraphLaunch(CUgraphExec, CUstream);
        cuGraphExecDestroy(CUgraphExec);
        cuGraphDestroy(CUgraph);
    }
}

/// `cuGetErrorName`, `cuGetErrorString`: here the code is a number.
type Describe = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;

/// The driver, initialised.
pub(super) struct Api {
    pub f: Functions,
    name: Describe,
    text: Describe,
    /// The CUDA version that it supports.
    pub version: (u32, u32),
}

impl Api {
    /// The driver of this machine.
    pub fn get() -> Result<&'static Api, Error> {
        static API: OnceLock<Api> = OnceLock::new();
        if let Some(api) = API.get() {
            return Ok(api);
        }
        let name = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
        let library = Library::find(None, &[name])
            .map_err(|_| Error::new(format!("no NVIDIA driver is installed here ({name} cannot be loaded)")))?;
        let api = Api::of(&library)?;
        library.leak();
        Ok(API.get_or_init(|| api))
    }

    fn of(library: &Library) -> Result<Api, Error> {
        // SAFETY: a function of one pointer, in every version of the driver, that may be called before cuInit.
        let version = unsafe {
            let mut version = 0;
            let get = library.function::<unsafe extern "C" fn(*mut c_int) -> u32>("cuDriverGetVersion")?;
            if get(&raw mut version) == 0 { version } else { 0 }
        };
        is_new_enough(version)?;
        let api = Api {
            f: Functions::of(library)?,
            // SAFETY: as in NVIDIA's headers, where the code is an enum of 32 bits.
            name: unsafe { library.function("cuGetErrorName") }?,
            // SAFETY: likewise.
            text: unsafe { library.function("cuGetErrorString") }?,
            version: split(version),
        };
        // SAFETY: there is only the flag 0.
        let status = unsafe { (api.f.cuInit)(0) };
        api.check(status).map_err(|e| Error::new(format!("the driver cannot be used: {e}")))?;
        Ok(api)
    }

    /// An error for every status but 0: its name and description, and whether the device is lost by it.
    pub fn check(&self, status: u32) -> Result<(), Error> {
        if status == 0 {
            return Ok(());
        }
        let sentence = match (self.describe(self.name, status), self.describe(self.text, status)) {
            (Some(name), Some(text)) => format!("{name}: {text}"),
            (Some(name), None) => name,
            _ => format!("the driver answers {status}"),
        };
        Err(Error::new(match loses_the_context(status) {
            true => format!(
                "{sentence}; this, or work asked for before, broke the context, which is lost: start the process again"
            ),
            false => sentence,
        }))
    }

    fn describe(&self, function: Describe, status: u32) -> Option<String> {
        let mut text = std::ptr::null();
        // SAFETY: a valid place for the pointer; what it then points to is a constant of the driver, or it is null.
        unsafe {
            (function(status, &raw mut text) == 0 && !text.is_null())
                .then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    }
}

fn is_new_enough(version: c_int) -> Result<(), Error> {
    let ((major, minor), (needed, of_it)) = (split(version), split(OLDEST));
    (version >= OLDEST).then_some(()).ok_or_else(|| {
        Error::new(format!("the driver supports CUDA {major}.{minor}, needed is {needed}.{of_it}: update the driver"))
    })
}

/// 12, 9 of 12090.
fn split(version: c_int) -> (u32, u32) {
    (version as u32 / 1000, version as u32 % 1000 / 10)
}

/// Whether, by the driver's documentation, the process must be started again after this error.
fn loses_the_context(status: u32) -> bool {
    use sys::CUresult as R;
    [
        R::CUDA_ERROR_ECC_UNCORRECTABLE,
        R::CUDA_ERROR_NVLINK_UNCORRECTABLE,
        R::CUDA_ERROR_ILLEGAL_ADDRESS,
        R::CUDA_ERROR_LAUNCH_TIMEOUT,
        R::CUDA_ERROR_CONTEXT_IS_DESTROYED,
        R::CUDA_ERROR_ASSERT,
        R::CUDA_ERROR_HARDWARE_STACK_ERROR,
        R::CUDA_ERROR_ILLEGAL_INSTRUCTION,
        R::CUDA_ERROR_MISALIGNED_ADDRESS,
        R::CUDA_ERROR_INVALID_ADDRESS_SPACE,
        R::CUDA_ERROR_INVALID_PC,
        R::CUDA_ERROR_LAUNCH_FAILED,
    ]
    .map(|lost| lost as u32)
    .into_iter()
    // CUDA_ERROR_CONTAINED and CUDA_ERROR_TENSOR_MEMORY_LEAK, which 12.9 does not have yet.
    .chain([226, 721])
    .any(|lost| lost == status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_driver_is_told_with_both_versions() {
        let sentence = is_new_enough(11_040).unwrap_err().to_string();
        assert_eq!(sentence, "the driver supports CUDA 11.4, needed is 12.0: update the driver");
        assert!(is_new_enough(12_000).is_ok() && is_new_enough(13_040).is_ok());
    }

    #[test]
    fn an_illegal_address_loses_the_context_and_a_wrong_argument_does_not() {
        assert!(loses_the_context(700) && loses_the_context(719));
        assert!(!loses_the_context(1) && !loses_the_context(2) && !loses_the_context(12_345));
    }
}
