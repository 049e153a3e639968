//! How long a device takes, and [`Graph`]: work that was recorded, to be done again by one call.

use std::time::Duration;

use crate::backend::Replay;
use crate::device::Device;
use crate::error::Error;
use crate::pool::Waiting;

/// Recorded work, and the memory that it needs beside the buffers that the caller holds.
pub struct Graph {
    device: Device,
    work: Box<dyn Replay>,
    /// Blocks that were free at the end of the recording but not before it: intermediate results, each time.
    memory: Waiting,
}

impl Device {
    /// How long the device takes for what `work` asks of it, without what was asked before.
    ///
    /// # Errors
    /// When the device fails.
    pub fn time<R>(&self, work: impl FnOnce() -> R) -> Result<(R, Duration), Error> {
        let (mut work, mut result) = (Some(work), None);
        let duration = self.backend().time(&mut || result = work.take().map(|work| work()))?;
        let result = result.ok_or_else(|| Error::new(format!("{self} measured nothing")))?;
        Ok((result, duration))
    }

    /// Records what `work` asks of the device, without doing it: launches, products, fills and copies on the device. Uploads,
    /// downloads and waiting are errors meanwhile. `None`, and `work` is not called, where the device cannot record.
    ///
    /// Do the same once before: kernels are then compiled, and ways of multiplying chosen. Nobody else may use the device
    /// while it records, for that would be recorded, too.
    ///
    /// # Errors
    /// When `work` fails, or the device does.
    #[expect(clippy::missing_panics_doc, reason = "the lock is poisoned only by a panic inside the allocator")]
    pub fn record(&self, mut work: impl FnMut() -> Result<(), Error>) -> Result<Option<Graph>, Error> {
        // Memory that the graph uses must not be given out to others between its launches. So it gets blocks of its own.
        let blocks = {
            let mut pool = self.pool().lock().expect("lock of the pool");
            if pool.recording {
                return Err(Error::new(format!("{self}: a graph is being recorded already")));
            }
            pool.recording = true;
            pool.exchange(Waiting::new())
        };
        let mut aside = Aside { device: self, blocks };
        let recorded = self.backend().record(&mut work);
        let memory = aside.bring_back();
        std::mem::forget(aside);
        match recorded {
            Ok(Some(work)) => Ok(Some(Graph { device: self.clone(), work, memory })),
            other => {
                self.take_back(memory);
                other.map(|_| None)
            }
        }
    }

    fn take_back(&self, memory: Waiting) {
        let Ok(mut pool) = self.pool().lock() else { return };
        for (class, blocks) in memory {
            blocks.into_iter().for_each(|block| pool.put(class, block));
        }
    }
}

/// The blocks that waited before a recording.
struct Aside<'a> {
    device: &'a Device,
    blocks: Waiting,
}

impl Aside<'_> {
    /// Ends the recording for the pool; gives the blocks that wait now.
    fn bring_back(&mut self) -> Waiting {
        let Ok(mut pool) = self.device.pool().lock() else { return Waiting::new() };
        pool.recording = false;
        pool.exchange(std::mem::take(&mut self.blocks))
    }
}

impl Drop for Aside<'_> {
    // Reached by a panic in the work.
    fn drop(&mut self) {
        let memory = self.bring_back();
        self.device.take_back(memory);
    }
}

impl Graph {
    /// Asks for the recorded work once more.
    ///
    /// # Safety
    /// Every buffer that the recorded work used and that outlived the recording is still there, and nobody else holds the
    /// contents of those that it writes.
    ///
    /// # Errors
    /// When the device fails.
    pub unsafe fn launch(&self) -> Result<(), Error> {
        // SAFETY: the caller warrants the buffers that he holds; the others are `memory`.
        unsafe { self.work.launch() }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // What is asked for later comes after the launches so far.
        self.device.take_back(std::mem::take(&mut self.memory));
    }
}
