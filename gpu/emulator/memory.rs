//! The emulated device's memory: blocks of the host's, each known with its exact length.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::Error;

/// As CUDA's allocations are aligned.
const ALIGN: usize = 256;
/// Bytes that are nobody's after each block, so that what lies beyond one does not lie in another.
const GAP: usize = 4096;

/// A block as the engine sees it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Region {
    start: u64,
    bytes: usize,
}

/// Lengths of the blocks by their addresses.
#[derive(Default)]
pub(super) struct Memory(Mutex<BTreeMap<u64, usize>>);

impl Memory {
    fn blocks(&self) -> MutexGuard<'_, BTreeMap<u64, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes + GAP, ALIGN).expect("at most the device's memory")
    }

    /// Filled with NaN, so that a kernel which reads what nothing wrote is found out.
    pub fn allocate(&self, bytes: usize) -> u64 {
        let layout = Memory::layout(bytes);
        // SAFETY: the layout is not empty; the new block is written within its length.
        let start = unsafe {
            let start = alloc(layout);
            if start.is_null() {
                std::alloc::handle_alloc_error(layout);
            }
            start.write_bytes(0xff, bytes + GAP);
            start
        };
        self.blocks().insert(start as u64, bytes);
        start as u64
    }

    pub fn free(&self, address: u64) {
        if let Some(bytes) = self.blocks().remove(&address) {
            // SAFETY: allocated above with this layout, and nobody's any more.
            unsafe { dealloc(address as *mut u8, Memory::layout(bytes)) };
        }
    }

    pub fn live(&self) -> usize {
        self.blocks().values().sum()
    }

    pub fn regions(&self) -> Vec<Region> {
        self.blocks().iter().map(|(&start, &bytes)| Region { start, bytes }).collect()
    }

    /// `f` of so many bytes from an address on.
    pub fn with<R>(&self, address: u64, bytes: usize, f: impl FnOnce(&mut [u8]) -> R) -> Result<R, Error> {
        let blocks = self.blocks();
        let (start, len) = blocks.range(..=address).next_back().map_or((0, 0), |(&start, &len)| (start, len));
        let offset = address - start;
        if usize::try_from(offset).ok().and_then(|offset| offset.checked_add(bytes)).is_none_or(|end| end > len) {
            return Err(Error::new(format!("{bytes} bytes at byte {offset} of a buffer of {len}")));
        }
        // SAFETY: inside of a block that lives while the map is locked; the kernels' and copies' order is the caller's.
        Ok(f(unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) }))
    }
}
