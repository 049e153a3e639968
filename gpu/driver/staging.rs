//! Uploads by way of pinned memory: the bytes have been read when the call returns, the copy itself waits its turn.

use std::ffi::c_void;
use std::ptr::null_mut;

use cudarc::driver::sys::{CUevent, CUevent_flags};

use super::card::Core;
use crate::error::Error;

/// Small enough that reading one piece overlaps sending the one before it.
const PIECE: usize = 1 << 20;
/// Small uploads take a piece each: enough of them that a step's worth need not wait for the device.
const PIECES: usize = 16;

/// Pinned memory in pieces, used in turn.
pub(super) struct Staging {
    core: &'static Core,
    pieces: Vec<Piece>,
    next: usize,
}

struct Piece {
    memory: *mut c_void,
    /// Reached when the copy out of `memory` is done.
    sent: CUevent,
}

// SAFETY: memory and events of the process, used under the lock around `Staging`.
unsafe impl Send for Staging {}

impl Staging {
    /// For a core that is bound.
    pub fn new(core: &'static Core) -> Result<Staging, Error> {
        let mut memory = null_mut();
        // SAFETY: a valid place for the address.
        let status = unsafe { (core.api.f.cuMemHostAlloc)(&raw mut memory, PIECE * PIECES, 0) };
        core.check(status, format_args!("{} bytes of pinned memory", PIECE * PIECES))?;
        let mut pieces = Vec::with_capacity(PIECES);
        for at in 0..PIECES {
            let mut sent = null_mut();
            // SAFETY: a valid place for the event.
            let status =
                unsafe { (core.api.f.cuEventCreate)(&raw mut sent, CUevent_flags::CU_EVENT_DISABLE_TIMING as u32) };
            core.check(status, "an event")?;
            pieces.push(Piece { memory: memory.wrapping_byte_add(at * PIECE), sent });
        }
        Ok(Staging { core, pieces, next: 0 })
    }

    /// For a core that is bound.
    pub fn upload(&mut self, from: &[u8], to: u64) -> Result<(), Error> {
        let (f, stream) = (&self.core.api.f, self.core.stream);
        for (at, bytes) in from.chunks(PIECE).enumerate() {
            let piece = &self.pieces[self.next];
            self.next = (self.next + 1) % PIECES;
            // SAFETY: an event that was never recorded counts as reached; after it the piece is free, and it holds the
            // bytes. It stays untouched until the event recorded here is reached.
            let status = unsafe {
                let waited = (f.cuEventSynchronize)(piece.sent);
                self.core.check(waited, "an upload before this one")?;
                piece.memory.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                let sent = (f.cuMemcpyHtoDAsync_v2)(to + (at * PIECE) as u64, piece.memory, bytes.len(), stream);
                if sent == 0 { (f.cuEventRecord)(piece.sent, stream) } else { sent }
            };
            self.core.check(status, format_args!("an upload of {} bytes", from.len()))?;
        }
        Ok(())
    }
}
