//! CUDA's libraries, looked for at run time.
//!
//! Types and signatures are cudarc's, generated from NVIDIA's headers; its loaders are not used. They panic where a library
//! or a function is missing, know fixed file names only, and return enums that cannot hold the codes of a newer library.
//! Here a status is a number, and [`functions!`] compares every signature with cudarc's at compile time.

use std::path::PathBuf;

use crate::error::Error;

/// A library that stays loaded until the process ends.
pub(super) struct Library {
    library: libloading::Library,
    file: String,
}

impl Library {
    /// The first of `names` that the system's loader finds, in its own places or in the toolkit's; or, when `file` is given,
    /// that and no other. An error is a part of a sentence that says what was tried.
    pub fn find(file: Option<&str>, names: &[&str]) -> Result<Library, String> {
        if let Some(file) = file {
            return Library::open(file).map_err(|e| format!("{file} cannot be loaded: {e}"));
        }
        let places = [PathBuf::new()].into_iter().chain(toolkits());
        let found = places.flat_map(|place| names.iter().map(move |name| place.join(name).display().to_string()));
        found
            .into_iter()
            .find_map(|file| Library::open(&file).ok())
            .ok_or_else(|| format!("no {}", names.join(", no ")))
    }

    fn open(file: &str) -> Result<Library, libloading::Error> {
        // SAFETY: NVIDIA's libraries may be initialised on any thread, and are never unloaded.
        let library = unsafe { libloading::Library::new(file)? };
        Ok(Library { library, file: file.to_owned() })
    }

    /// A function, given as a pointer type.
    ///
    /// # Safety
    /// `F` is the function's type.
    pub unsafe fn function<F: Copy>(&self, name: &str) -> Result<F, Error> {
        // SAFETY: the caller warrants the type; the pointer is copied out, and the library stays loaded.
        let function = unsafe { self.library.get::<F>(name.as_bytes()) };
        function
            .map(|f| *f)
            .map_err(|_| Error::new(format!("{} has no function {name}: it is too old, or too new", self.file)))
    }

    /// Keeps it loaded for ever.
    pub fn leak(self) {
        std::mem::forget(self.library);
    }
}

/// Where toolkits keep their libraries.
fn toolkits() -> impl Iterator<Item = PathBuf> {
    let below: &[&str] = if cfg!(windows) { &["bin", "bin/x64"] } else { &["lib64", "lib"] };
    let set = ["CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let usual = cfg!(unix).then(|| PathBuf::from("/usr/local/cuda"));
    set.chain(usual).flat_map(move |root| below.iter().map(move |folder| root.join(folder)))
}

/// The file that a variable of the environment names.
pub(super) fn named_by(variable: &str) -> Option<String> {
    std::env::var(variable).ok().filter(|file| !file.is_empty())
}

/// A struct of a library's functions, each of which returns a status as a number, and `of`, which looks them up.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident from $sys:ident returns $status:ident { $($name:ident($($arg:ty),* $(,)?);)* }) => {
        $(#[$doc])*
        #[allow(non_snake_case)]
        pub(super) struct $table {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> u32,)*
        }

        impl $table {
            pub fn of(library: &$crate::driver::library::Library) -> Result<$table, $crate::error::Error> {
                // Compile only if these are the signatures of NVIDIA's headers.
                $(const _: unsafe fn($($arg),*) -> $sys::$status = $sys::$name;)*
                Ok($table {
                    // SAFETY: of this type, as checked above; a status is an enum of 32 bits.
                    $($name: unsafe { library.function(stringify!($name)) }?,)*
                })
            }
        }
    };
}
pub(super) use functions;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        let none = Library::find(None, &["libkumiki-1.so", "libkumiki-2.so"]).err().unwrap();
        assert_eq!(none, "no libkumiki-1.so, no libkumiki-2.so");
        let named = Library::find(Some("/nowhere/libnvrtc.so"), &["libnvrtc.so.12"]).err().unwrap();
        assert!(named.starts_with("/nowhere/libnvrtc.so cannot be loaded"), "{named}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_missing_function_is_an_error() {
        let library = Library::find(None, &["libc.so.6"]).unwrap();
        // SAFETY: never called.
        let function = unsafe { library.function::<extern "C" fn()>("cuInit") };
        assert!(function.unwrap_err().to_string().contains("libc.so.6 has no function cuInit"));
    }
}
