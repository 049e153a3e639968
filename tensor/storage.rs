//! CPU buffers from a pool of size classes, and the byte counters that tests and `bench` read.
//!
//! A freed buffer goes back to its class, so that a training step after the first few asks the system for nothing.
//! Memory is zeroed once, when the system gives it, and afterwards holds old values: it is never uninitialised.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex};

use kumiki_gpu as gpu;

use crate::device::Device;
use crate::dtype::Element;
use crate::huge_pages::prefer_huge_pages;

/// Buffers start on a cache line, which is also the width of the widest SIMD register.
const ALIGN: usize = 64;

/// What the CPU allocator has done so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes in buffers that tensors hold now.
    pub live: usize,
    /// The most `live` has been since the last [`reset_peak`].
    pub peak: usize,
    /// Bytes waiting in the pool.
    pub cached: usize,
    /// Buffers asked from the system since the start.
    pub system_allocations: usize,
}

#[derive(Default)]
struct Pool {
    free: HashMap<usize, Waiting>,
    /// Counts returns of buffers.
    clock: u64,
}

/// Buffers of one class that wait in the pool.
#[derive(Default)]
struct Waiting {
    buffers: Vec<NonNull<u8>>,
    /// When one was returned last.
    used: u64,
}

impl Pool {
    /// Gives the system a buffer of the class that was used longest ago, other than `class`; `false` when there is none.
    fn evict(&mut self, class: usize) -> bool {
        let others = self.free.iter_mut().filter(|(other, waiting)| **other != class && !waiting.buffers.is_empty());
        let Some((&oldest, waiting)) = others.min_by_key(|(_, waiting)| waiting.used) else { return false };
        let Some(start) = waiting.buffers.pop() else { return false };
        CACHED.fetch_sub(oldest, Relaxed);
        // SAFETY: a buffer in the pool was allocated with the layout of its class and nobody refers to it.
        unsafe { dealloc(start.as_ptr(), Layout::from_size_align_unchecked(oldest, ALIGN)) }
        true
    }
}

// SAFETY: the pool owns the pointed-to memory; nothing else refers to it while it is in the pool.
unsafe impl Send for Pool {}

static POOL: LazyLock<Mutex<Pool>> = LazyLock::new(Mutex::default);
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static HIGHEST: AtomicUsize = AtomicUsize::new(0);
static CACHED: AtomicUsize = AtomicUsize::new(0);
static SYSTEM: AtomicUsize = AtomicUsize::new(0);
static POISON: AtomicBool = AtomicBool::new(cfg!(debug_assertions));

/// The counters of the CPU allocator, for all threads together.
pub fn memory_stats() -> MemoryStats {
    MemoryStats {
        live: LIVE.load(Relaxed),
        peak: PEAK.load(Relaxed),
        cached: CACHED.load(Relaxed),
        system_allocations: SYSTEM.load(Relaxed),
    }
}

/// Starts a new measurement of the peak from the bytes that are live now.
pub fn reset_peak() {
    PEAK.store(LIVE.load(Relaxed), Relaxed);
}

/// Whether recycled buffers are filled with NaN (integers with -1 or the largest value) before they are handed out,
/// so that a kernel that reads what it did not write fails its test. On in debug builds; tests turn it on in release.
pub fn poison_fresh_buffers(on: bool) {
    POISON.store(on, Relaxed);
}

/// The class of a request: the next of 1, 1.25, 1.5, 1.75 times a power of two, so that at most a quarter is slack.
fn size_class(bytes: usize) -> usize {
    let bytes = bytes.max(ALIGN);
    let step = (bytes.next_power_of_two() / 8).max(ALIGN);
    bytes.div_ceil(step) * step
}

/// An owned block of bytes, aligned to 64, returned to the pool when dropped.
pub(crate) struct Buffer {
    start: NonNull<u8>,
    len: usize,
    class: usize,
}

// SAFETY: a buffer owns its memory exclusively; access follows `&`/`&mut` of the buffer.
unsafe impl Send for Buffer {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// A buffer of `bytes` bytes with unspecified (but initialised) contents.
    pub fn new(bytes: usize) -> Buffer {
        let class = size_class(bytes);
        let recycled = POOL.lock().expect("pool lock").free.get_mut(&class).and_then(|waiting| waiting.buffers.pop());
        let start = match recycled {
            Some(start) => {
                CACHED.fetch_sub(class, Relaxed);
                start
            }
            None => {
                SYSTEM.fetch_add(1, Relaxed);
                let layout = Layout::from_size_align(class, ALIGN).expect("buffer size");
                // SAFETY: the layout's size is at least ALIGN, hence not zero.
                let start = NonNull::new(unsafe { alloc(layout) }).unwrap_or_else(|| {
                    panic!("out of memory: {class} bytes asked, {} in use by tensors", LIVE.load(Relaxed))
                });
                prefer_huge_pages(start.as_ptr(), class);
                // SAFETY: so many bytes were just allocated.
                unsafe { start.write_bytes(0, class) };
                start
            }
        };
        let live = LIVE.fetch_add(class, Relaxed) + class;
        PEAK.fetch_max(live, Relaxed);
        HIGHEST.fetch_max(live, Relaxed);
        let mut buffer = Buffer { start, len: bytes, class };
        if POISON.load(Relaxed) {
            buffer.as_mut_slice::<u32>(bytes / 4).fill(u32::MAX);
        }
        buffer
    }

    /// The first `count` elements.
    pub fn as_slice<E: Element>(&self, count: usize) -> &[E] {
        assert!(count <= self.len / size_of::<E>(), "{count} elements do not fit in {} bytes", self.len);
        // SAFETY: the memory is initialised, aligned to 64, long enough, and every bit pattern is an E.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast::<E>(), count) }
    }

    /// The first `count` elements, to be written.
    pub fn as_mut_slice<E: Element>(&mut self, count: usize) -> &mut [E] {
        assert!(count <= self.len / size_of::<E>(), "{count} elements do not fit in {} bytes", self.len);
        // SAFETY: as in `as_slice`, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast::<E>(), count) }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }
}

#[track_caller]
fn no_kernel(buffer: &gpu::Buffer) -> ! {
    panic!("an operation without a CUDA kernel met a tensor on {}", buffer.device())
}

/// What tensors share: memory of the host, or of a device.
pub(crate) enum Storage {
    Host(Buffer),
    Cuda(gpu::Buffer),
}

impl Storage {
    /// The host's memory.
    #[track_caller]
    fn host(&self) -> &Buffer {
        match self {
            Storage::Host(buffer) => buffer,
            Storage::Cuda(buffer) => no_kernel(buffer),
        }
    }

    #[track_caller]
    pub fn as_slice<E: Element>(&self, count: usize) -> &[E] {
        self.host().as_slice(count)
    }

    #[track_caller]
    pub fn as_mut_slice<E: Element>(&mut self, count: usize) -> &mut [E] {
        match self {
            Storage::Host(buffer) => buffer.as_mut_slice(count),
            Storage::Cuda(buffer) => no_kernel(buffer),
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Storage::Host(buffer) => buffer.len(),
            Storage::Cuda(buffer) => buffer.len(),
        }
    }

    pub fn on_cuda(&self) -> Option<&gpu::Buffer> {
        match self {
            Storage::Host(_) => None,
            Storage::Cuda(buffer) => Some(buffer),
        }
    }

    pub fn device(&self) -> Device {
        self.on_cuda().map_or(Device::Cpu, |buffer| Device::Cuda(buffer.device().clone()))
    }
}

impl From<gpu::Buffer> for Storage {
    fn from(buffer: gpu::Buffer) -> Storage {
        Storage::Cuda(buffer)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let live = LIVE.fetch_sub(self.class, Relaxed) - self.class;
        // Half as much again as the busiest moment: room for classes that are busy at different times, and no more. Where
        // that is spent, classes that are used no longer (of another model, another length) make room.
        let highest = HIGHEST.load(Relaxed);
        let most = highest + highest / 2;
        if let Ok(mut pool) = POOL.lock() {
            while live + CACHED.load(Relaxed) + self.class > most && pool.evict(self.class) {}
            if live + CACHED.load(Relaxed) + self.class <= most {
                CACHED.fetch_add(self.class, Relaxed);
                pool.clock += 1;
                let now = pool.clock;
                let waiting = pool.free.entry(self.class).or_default();
                waiting.used = now;
                waiting.buffers.push(self.start);
                return;
            }
        }
        // SAFETY: allocated in `new` with this very layout, and no longer referred to.
        unsafe { dealloc(self.start.as_ptr(), Layout::from_size_align_unchecked(self.class, ALIGN)) }
    }
}

/// Gives the memory that waits in the pool back to the system.
#[expect(clippy::missing_panics_doc, reason = "the lock is poisoned only by a panic inside the pool")]
pub fn release_cached_memory() {
    let mut pool = POOL.lock().expect("pool lock");
    for (class, waiting) in pool.free.drain() {
        for start in waiting.buffers {
            CACHED.fetch_sub(class, Relaxed);
            // SAFETY: a buffer in the pool was allocated with the layout of its class and nobody refers to it.
            unsafe { dealloc(start.as_ptr(), Layout::from_size_align_unchecked(class, ALIGN)) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_cover_requests_with_little_slack() {
        for bytes in (1..5000).chain([1 << 20, (1 << 20) + 1, 12_345_678]) {
            let class = size_class(bytes);
            assert!(class >= bytes && class.is_multiple_of(ALIGN));
            assert!(class <= bytes + (bytes / 4).max(2 * ALIGN), "{bytes} -> {class}");
            assert_eq!(size_class(class), class);
        }
    }

    #[test]
    fn a_recycled_buffer_is_poisoned_when_asked() {
        poison_fresh_buffers(true);
        let bytes = 777_777; // a class that no other test uses
        let mut first = Buffer::new(bytes);
        first.as_mut_slice::<f32>(10).fill(1.0);
        drop(first);
        assert!(Buffer::new(bytes).as_slice::<f32>(10).iter().all(|x| x.is_nan()));
    }
}
