//! Sources of kernels, and what a launch is given.

use crate::buffer::Buffer;

/// `common.cuh`, which every source includes.
#[cfg(any(feature = "cuda", feature = "emulator"))]
pub(crate) const COMMON: &str = include_str!("common.cuh");

/// A `.cu` file, compiled as a whole when one of its kernels is first launched on a device. `common.cuh` is found by its
/// name.
#[derive(Debug)]
pub struct Source {
    /// The file's name, for messages and the cache: `rms_norm.cu`.
    pub file: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Headers that it includes beside `common.cuh`: name and text.
    pub headers: &'static [(&'static str, &'static str)],
    /// The kernels, as C++ would name them: `rms_norm_forward<float>`.
    pub kernels: &'static [&'static str],
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block along x, y and z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

impl Launch {
    /// Of one axis each, without dynamic shared memory.
    pub fn of(blocks: u32, threads: u32) -> Launch {
        Launch { grid: [blocks, 1, 1], block: [threads, 1, 1], shared: 0 }
    }
}

/// An argument of a kernel, by its type there.
#[derive(Clone, Copy, Debug)]
pub enum Arg<'a> {
    /// A pointer to the byte at an offset of a buffer that is read.
    In(&'a Buffer, usize),
    /// A pointer to the byte at an offset of a buffer that is written; the caller alone holds its contents.
    Out(&'a Buffer, usize),
    /// A null pointer: an operand that is not there.
    Null,
    /// `long long`.
    I64(i64),
    /// `int`.
    I32(i32),
    /// `unsigned`.
    U32(u32),
    /// `unsigned long long`.
    U64(u64),
    /// `float`.
    F32(f32),
    /// `double`.
    F64(f64),
    /// A struct by value, at most 256 bytes, aligned to 8.
    Struct(&'a [u8]),
}
