//! kumiki's tensors: dtype, shape, strided views, storage, random numbers, threads, files.

pub mod threads;
