//! Freed memory of a device waits here for the next request of its size: asking the driver is slow, and waits for the device.

use std::collections::BTreeMap;

/// What a device's allocator has done so far, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// In buffers now.
    pub live: usize,
    /// The most `live` has been since the last reset.
    pub peak: usize,
    /// Waiting in the pool.
    pub cached: usize,
    /// Blocks asked from the device since the start.
    pub device_allocations: usize,
}

/// Blocks that wait, by size.
pub(crate) type Waiting = BTreeMap<usize, Vec<u64>>;

/// Blocks that wait, and what was lent.
#[derive(Default)]
pub(crate) struct Pool {
    free: Waiting,
    pub stats: MemoryStats,
    /// Whether the blocks that wait belong to a graph that is being recorded: none of them may be freed.
    pub recording: bool,
}

impl Pool {
    /// The size of the block for a request: the next of 1, 1.25, 1.5, 1.75 times a power of two, and at least 512.
    pub fn class(bytes: usize) -> usize {
        let bytes = bytes.max(512);
        let step = (bytes.next_power_of_two() / 8).max(512);
        bytes.div_ceil(step) * step
    }

    /// A waiting block of this size.
    pub fn take(&mut self, class: usize) -> Option<u64> {
        let address = self.free.get_mut(&class)?.pop()?;
        self.stats.cached -= class;
        Some(address)
    }

    pub fn put(&mut self, class: usize, address: u64) {
        self.free.entry(class).or_default().push(address);
        self.stats.cached += class;
    }

    pub fn lent(&mut self, bytes: usize) {
        self.stats.live += bytes;
        self.stats.peak = self.stats.peak.max(self.stats.live);
    }

    pub fn returned(&mut self, bytes: usize) {
        self.stats.live -= bytes;
    }

    /// Takes all waiting blocks aside, and lets these wait instead.
    pub fn exchange(&mut self, others: Waiting) -> Waiting {
        let bytes = |waiting: &Waiting| waiting.iter().map(|(class, blocks)| class * blocks.len()).sum::<usize>();
        self.stats.cached = self.stats.cached + bytes(&others) - bytes(&self.free);
        std::mem::replace(&mut self.free, others)
    }

    /// All waiting blocks, with their sizes.
    pub fn drain(&mut self) -> Vec<(usize, u64)> {
        self.stats.cached = 0;
        std::mem::take(&mut self.free)
            .into_iter()
            .flat_map(|(class, blocks)| blocks.into_iter().map(move |b| (class, b)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_cover_requests_with_little_slack() {
        for bytes in (0..5000).chain([1 << 20, (1 << 20) + 1, 12_345_678]) {
            let class = Pool::class(bytes);
            assert!(class >= bytes && class.is_multiple_of(512) && class <= bytes + (bytes / 4).max(1024));
            assert_eq!(Pool::class(class), class);
        }
    }

    #[test]
    fn a_block_that_waits_is_given_out_again() {
        let mut pool = Pool::default();
        pool.put(1024, 7);
        assert_eq!((pool.take(512), pool.take(1024), pool.take(1024)), (None, Some(7), None));
        assert_eq!(pool.stats.cached, 0);
    }

    #[test]
    fn blocks_taken_aside_are_not_given_out() {
        let mut pool = Pool::default();
        pool.put(1024, 7);
        let aside = pool.exchange(Waiting::new());
        assert_eq!((pool.stats.cached, pool.take(1024)), (0, None));
        pool.put(512, 9);
        let others = pool.exchange(aside);
        assert_eq!((pool.stats.cached, pool.take(1024), others), (1024, Some(7), Waiting::from([(512, vec![9])])));
    }
}
