//! kumiki's CUDA tier: device, buffers, launches.
