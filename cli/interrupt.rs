//! Ctrl-C during long work, a training say: once to stop after the step, with everything saved; twice to stop at once.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use kumiki_train::stop::Stop;
use kumiki_train::{Error, Result};

use crate::output::remark;

/// What shells report of a program that Ctrl-C has stopped.
pub const CODE: u8 = 130;

static STOP: OnceLock<Stop> = OnceLock::new();

/// The wish that Ctrl-C, or a request to terminate, makes from now on, during a training.
///
/// # Errors
/// When the system does not let its signals be handled.
pub fn stop() -> Result<Stop> {
    stop_saying("stopping after this step; once more to stop at once, without saving it")
}

/// As [`stop`], of what says something else about it.
///
/// # Errors
/// As [`stop`].
pub fn stop_saying(what: &'static str) -> Result<Stop> {
    if let Some(stop) = STOP.get() {
        return Ok(stop.clone());
    }
    let (stop, asked) = (Stop::default(), Stop::clone);
    let wish = asked(&stop);
    ctrlc::set_handler(move || {
        if wish.ask() {
            // Files are replaced whole or not at all, so that nothing can be half there.
            std::process::exit(i32::from(CODE));
        }
        remark(&format!("\n{what}"));
    })
    .map_err(|e| Error::new(format!("cannot handle Ctrl-C: {e}")))?;
    Ok(STOP.get_or_init(|| stop).clone())
}

static TOO_LATE: AtomicBool = AtomicBool::new(false);

/// Whether somebody has asked for a stop, and not too late.
pub fn is_asked() -> bool {
    STOP.get().is_some_and(Stop::is_asked) && !TOO_LATE.load(Ordering::Relaxed)
}

/// The work is done: who asked for a stop and saw it going on is told so, and the program ends as if nobody had.
pub fn done() {
    if is_asked() {
        TOO_LATE.store(true, Ordering::Relaxed);
        remark("too late to stop: everything is written");
    }
}
