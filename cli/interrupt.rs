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

static STOPPED: AtomicBool = AtomicBool::new(false);

/// Work has ended before its end: if that was asked for, the program reports it.
pub fn stopped() {
    STOPPED.store(true, Ordering::Relaxed);
}

/// Whether somebody asked for a stop, and it was not too late for one.
pub fn was_obeyed() -> bool {
    is_asked() && STOPPED.load(Ordering::Relaxed)
}

/// Whether somebody has asked for a stop.
pub fn is_asked() -> bool {
    STOP.get().is_some_and(Stop::is_asked)
}
