//! NVRTC: sources to machine code, at run time.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::null_mut;
use std::sync::OnceLock;

use cudarc::nvrtc::sys::{self, nvrtcProgram};

use super::library::{Library, functions, named_by};
use crate::cache::Cache;
use crate::error::Error;
use crate::source::Source;

const COMMON: (&str, &str) = ("common.cuh", crate::source::COMMON);

/// Products and sums may be fused; nothing else may differ from what the source says.
const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=true"];

/// 12 first: a driver loads what a compiler of its own or an older CUDA made, not what a newer one did.
const NAMES: &[&str] = if cfg!(windows) {
    &["nvrtc64_120_0.dll", "nvrtc64_130_0.dll"]
} else {
    &["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so"]
};

functions! {
    /// What is used of NVRTC.
    Functions from sys returns nvrtcResult {
        nvrtcVersion(*mut c_int, *mut c_int);
        nvrtcGetNumSupportedArchs(*mut c_int);
        nvrtcGetSupportedArchs(*mut c_int);
        nvrtcCreateProgram(*mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
        nvrtcAddNameExpression(nvrtcProgram, *const c_char);
        nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char);
        nvrtcGetProgramLogSize(nvrtcProgram, *mut usize);
        nvrtcGetProgramLog(nvrtcProgram, *mut c_char);
        nvrtcGetLoweredName(nvrtcProgram, *const c_char, *mut *const c_char);
        nvrtcGetCUBINSize(nvrtcProgram, *mut usize);
        nvrtcGetCUBIN(nvrtcProgram, *mut c_char);
        nvrtcGetPTXSize(nvrtcProgram, *mut usize);
        nvrtcGetPTX(nvrtcProgram, *mut c_char);
        nvrtcDestroyProgram(*mut nvrtcProgram);
    }
}

/// NVRTC, as found on this machine.
pub(super) struct Compiler {
    f: Functions,
    pub version: (u32, u32),
    /// The architectures that it knows, ascending: 90 for `sm_90`.
    known: Vec<u32>,
}

/// A compiled source.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Compiled {
    /// A cubin, or PTX with its final zero.
    pub image: Vec<u8>,
    /// What the kernels are called in it, in the source's order.
    pub lowered: Vec<String>,
    /// By which NVRTC.
    pub version: (u32, u32),
}

impl Compiler {
    /// That of this machine.
    pub fn get() -> Result<&'static Compiler, Error> {
        static COMPILER: OnceLock<Compiler> = OnceLock::new();
        if let Some(compiler) = COMPILER.get() {
            return Ok(compiler);
        }
        let compiler = Compiler::find(named_by("KUMIKI_NVRTC").as_deref(), NAMES)?;
        Ok(COMPILER.get_or_init(|| compiler))
    }

    /// In this file, or else under one of these names.
    pub fn find(file: Option<&str>, names: &[&str]) -> Result<Compiler, Error> {
        let library = Library::find(file, names).map_err(|tried| {
            Error::new(format!(
                "no NVRTC, CUDA's compiler at run time ({tried}): install it by `pip install nvidia-cuda-nvrtc-cu12` or \
                 with the CUDA toolkit; KUMIKI_NVRTC may name the file"
            ))
        })?;
        let f = Functions::of(&library)?;
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: valid places for the numbers, and as many as it says that there are.
        let known = unsafe {
            check((f.nvrtcVersion)(&raw mut major, &raw mut minor))?;
            check((f.nvrtcGetNumSupportedArchs)(&raw mut count))?;
            let mut known = vec![0; count.max(0) as usize];
            check((f.nvrtcGetSupportedArchs)(known.as_mut_ptr()))?;
            known
        };
        library.leak();
        let mut known: Vec<u32> = known.into_iter().filter_map(|arch| u32::try_from(arch).ok()).collect();
        known.sort_unstable();
        Ok(Compiler { f, version: (major as u32, minor as u32), known })
    }

    /// For a card of this capability, from the cache if it is there.
    pub fn for_card(&self, source: &Source, capability: (u32, u32)) -> Result<Compiled, Error> {
        self.cached(source, &self.architecture(capability)?, &Cache::of_user())
    }

    /// The card's own architecture; where this NVRTC does not know it, the newest older one as PTX, which the driver compiles.
    fn architecture(&self, (major, minor): (u32, u32)) -> Result<String, Error> {
        let own = major * 10 + minor;
        match self.known.iter().rev().find(|&&known| known <= own) {
            Some(&known) if known == own => Ok(format!("sm_{own}")),
            Some(known) => Ok(format!("compute_{known}")),
            None => Err(Error::new(format!(
                "NVRTC {}.{} does not know cards as old as this one, sm_{own}: install an older one",
                self.version.0, self.version.1
            ))),
        }
    }

    /// From the cache, or into it.
    pub fn cached(&self, source: &Source, architecture: &str, cache: &Cache) -> Result<Compiled, Error> {
        let key = self.key(source, architecture);
        if let Some(compiled) = cache.get(source.file, &key).and_then(|entry| self.decode(&entry, source)) {
            return Ok(compiled);
        }
        let (compiled, _) = self.compile(source, architecture, &[])?;
        cache.put(source.file, &key, &encode(&compiled));
        Ok(compiled)
    }

    /// Everything that the result depends on.
    fn key(&self, source: &Source, architecture: &str) -> Vec<u8> {
        let (major, minor) = self.version;
        let mut key = format!("NVRTC {major}.{minor} {architecture} {OPTIONS:?} {:?}\n", source.kernels);
        for (name, text) in [(source.file, source.text), COMMON].into_iter().chain(source.headers.iter().copied()) {
            key += &format!("{name} {}\n{text}", text.len());
        }
        key.into_bytes()
    }

    /// For `sm_90` and the like machine code, for `compute_90` PTX; with the compiler's log.
    pub fn compile(&self, source: &Source, architecture: &str, more: &[&str]) -> Result<(Compiled, String), Error> {
        let text = |text: &str| {
            CString::new(text).map_err(|_| Error::new(format!("{}: a zero in its text, headers or names", source.file)))
        };
        let texts = |list: &mut dyn Iterator<Item = &str>| list.map(text).collect::<Result<Vec<_>, _>>();
        let headers = || [COMMON].into_iter().chain(source.headers.iter().copied());
        let names = texts(&mut headers().map(|(name, _)| name))?;
        let bodies = texts(&mut headers().map(|(_, body)| body))?;
        let kernels = texts(&mut source.kernels.iter().copied())?;
        let target = format!("--gpu-architecture={architecture}");
        let options = texts(&mut OPTIONS.into_iter().chain([target.as_str()]).chain(more.iter().copied()))?;
        let (file, body) = (text(source.file)?, text(source.text)?);

        let mut program = Program { f: &self.f, program: null_mut() };
        // SAFETY: texts that end with a zero and outlive the program, in lists as long as is said.
        unsafe {
            let (names, bodies) = (pointers(&names), pointers(&bodies));
            let (list, count) = (bodies.as_ptr(), bodies.len() as c_int);
            let create = self.f.nvrtcCreateProgram;
            check(create(&raw mut program.program, body.as_ptr(), file.as_ptr(), count, list, names.as_ptr()))?;
        }
        for kernel in &kernels {
            // SAFETY: a program that is not compiled yet, and a text that ends with a zero.
            check(unsafe { (self.f.nvrtcAddNameExpression)(program.program, kernel.as_ptr()) })?;
        }
        // SAFETY: texts that end with a zero, in a list as long as is said.
        let status = unsafe {
            let options = pointers(&options);
            (self.f.nvrtcCompileProgram)(program.program, options.len() as c_int, options.as_ptr())
        };
        let log = program.bytes(self.f.nvrtcGetProgramLogSize, self.f.nvrtcGetProgramLog)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
        check(status).map_err(|e| {
            let (major, minor) = self.version;
            let what = format!("{} does not compile for {architecture} with NVRTC {major}.{minor}: {e}", source.file);
            let first = log.lines().filter(|line| !line.trim().is_empty()).take(12);
            Error::new(first.fold(what, |all, line| all + "\n" + line))
        })?;
        let lowered = kernels.iter().map(|kernel| program.lowered(kernel)).collect::<Result<_, _>>()?;
        let image = match architecture.starts_with("sm_") {
            true => program.bytes(self.f.nvrtcGetCUBINSize, self.f.nvrtcGetCUBIN)?,
            false => program.bytes(self.f.nvrtcGetPTXSize, self.f.nvrtcGetPTX)?,
        };
        Ok((Compiled { image, lowered, version: self.version }, log))
    }

    fn decode(&self, mut entry: &[u8], source: &Source) -> Option<Compiled> {
        let mut take = || {
            let (length, rest) = entry.split_first_chunk::<8>()?;
            let part;
            (part, entry) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
            Some(part.to_vec())
        };
        let image = take()?;
        let lowered = source.kernels.iter().map(|_| String::from_utf8(take()?).ok()).collect::<Option<_>>()?;
        entry.is_empty().then_some(Compiled { image, lowered, version: self.version })
    }
}

fn encode(compiled: &Compiled) -> Vec<u8> {
    let parts = [&compiled.image[..]].into_iter().chain(compiled.lowered.iter().map(String::as_bytes));
    parts.flat_map(|part| [&(part.len() as u64).to_le_bytes(), part].concat()).collect()
}

fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).collect()
}

/// A program, destroyed with this.
struct Program<'a> {
    f: &'a Functions,
    program: nvrtcProgram,
}

impl Program<'_> {
    fn bytes(
        &self,
        size: unsafe extern "C" fn(nvrtcProgram, *mut usize) -> u32,
        get: unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> u32,
    ) -> Result<Vec<u8>, Error> {
        let mut length = 0;
        // SAFETY: a valid place for the length.
        check(unsafe { size(self.program, &raw mut length) })?;
        let mut bytes = vec![0u8; length];
        // SAFETY: as long as is asked for.
        check(unsafe { get(self.program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }

    fn lowered(&self, kernel: &CStr) -> Result<String, Error> {
        let mut name = std::ptr::null();
        // SAFETY: a compiled program, which keeps the name that it gives; copied before it is destroyed.
        unsafe {
            check((self.f.nvrtcGetLoweredName)(self.program, kernel.as_ptr(), &raw mut name))
                .map_err(|e| Error::new(format!("no kernel {}: {e}", kernel.to_string_lossy())))?;
            Ok(CStr::from_ptr(name).to_string_lossy().into_owned())
        }
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: created, and not destroyed yet.
            unsafe { (self.f.nvrtcDestroyProgram)(&raw mut self.program) };
        }
    }
}

/// An error for every status but 0.
fn check(status: u32) -> Result<(), Error> {
    let name = match status {
        0 => return Ok(()),
        1 => "NVRTC_ERROR_OUT_OF_MEMORY",
        2 => "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
        3 => "NVRTC_ERROR_INVALID_INPUT",
        4 => "NVRTC_ERROR_INVALID_PROGRAM",
        5 => "NVRTC_ERROR_INVALID_OPTION",
        6 => "NVRTC_ERROR_COMPILATION",
        7 => "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
        10 => "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
        11 => "NVRTC_ERROR_INTERNAL_ERROR",
        _ => return Err(Error::new(format!("NVRTC answers {status}"))),
    };
    Err(Error::new(name))
}

#[cfg(test)]
impl Compiler {
    /// The architecture for a capability.
    pub fn target(&self, capability: (u32, u32)) -> Result<String, Error> {
        self.architecture(capability)
    }
}
