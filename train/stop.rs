//! [`Stop`]: the wish that a training should stop, from whoever may have it: a user's Ctrl-C, another thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Clones are about the same wish. A training looks after every step, saves what it needs to go on, and stops.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Asks for it; tells whether it had been asked for before.
    pub fn ask(&self) -> bool {
        self.0.swap(true, Ordering::Relaxed)
    }

    /// Whether somebody has asked for it.
    pub fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
