//! What a stream records: moments, to tell how long something took, and graphs, to do it again with one call.

use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cudarc::driver::sys::{CUevent, CUgraphExec, CUstreamCaptureMode};

use super::card::Core;
use crate::backend::Replay;
use crate::error::Error;

/// A moment on the stream.
struct Moment<'a>(&'a Core, CUevent);

impl Moment<'_> {
    fn now(core: &Core) -> Result<Moment<'_>, Error> {
        let mut event = null_mut();
        // SAFETY: a valid place for the event.
        core.check(unsafe { (core.api.f.cuEventCreate)(&raw mut event, 0) }, "an event")?;
        let moment = Moment(core, event);
        // SAFETY: an event and a stream of this context.
        core.check(unsafe { (core.api.f.cuEventRecord)(event, core.stream) }, "an event")?;
        Ok(moment)
    }
}

impl Drop for Moment<'_> {
    fn drop(&mut self) {
        // SAFETY: created by `now`; the driver keeps what it still needs.
        unsafe { (self.0.api.f.cuEventDestroy_v2)(self.1) };
    }
}

/// How long the device takes for what `work` asks of it, without what was asked before.
pub(super) fn time(core: &Core, work: &mut dyn FnMut()) -> Result<Duration, Error> {
    core.not_while_recording("a measurement of time")?;
    core.bind()?;
    let start = Moment::now(core)?;
    work();
    core.bind()?;
    let end = Moment::now(core)?;
    core.synchronize()?;
    let mut milliseconds = 0.0;
    // SAFETY: both were recorded, and reached, on this context.
    let status = unsafe { (core.api.f.cuEventElapsedTime)(&raw mut milliseconds, start.1, end.1) };
    core.check(status, "the time between two events")?;
    Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
}

/// Recorded work.
pub(super) struct Graph {
    core: &'static Core,
    graph: CUgraphExec,
}

// SAFETY: launches of one graph are put on one stream, in order; the driver's handles may be used from any thread.
unsafe impl Send for Graph {}
// SAFETY: likewise.
unsafe impl Sync for Graph {}

/// Ends a recording, whatever happens in between.
struct Recording(&'static Core);

impl Recording {
    fn end(&self) -> Result<Graph, Error> {
        let (core, mut recorded, mut graph) = (self.0, null_mut(), null_mut());
        core.recording.store(false, Ordering::Release);
        core.bind()?;
        // SAFETY: a stream that records; valid places for the handles; the recording is destroyed when the graph is made.
        unsafe {
            core.check((core.api.f.cuStreamEndCapture)(core.stream, &raw mut recorded), "the recording of a graph")?;
            let made = (core.api.f.cuGraphInstantiateWithFlags)(&raw mut graph, recorded, 0);
            (core.api.f.cuGraphDestroy)(recorded);
            core.check(made, "a graph")?;
        }
        Ok(Graph { core, graph })
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if self.0.recording.load(Ordering::Acquire) {
            let _ = self.end();
        }
    }
}

impl Graph {
    /// Records what `work` asks for, without doing it.
    pub fn record(core: &'static Core, work: &mut dyn FnMut() -> Result<(), Error>) -> Result<Graph, Error> {
        core.bind()?;
        if core.recording.swap(true, Ordering::AcqRel) {
            return Err(core.error("a graph is being recorded already"));
        }
        // The relaxed mode lets memory be allocated and kernels be loaded meanwhile; neither is put on a stream.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a stream of this context.
        let status = unsafe { (core.api.f.cuStreamBeginCapture_v2)(core.stream, mode) };
        if status != 0 {
            core.recording.store(false, Ordering::Release);
        }
        core.check(status, "the recording of a graph")?;
        let recording = Recording(core);
        work()?;
        recording.end()
    }
}

impl Replay for Graph {
    unsafe fn launch(&self) -> Result<(), Error> {
        self.core.bind()?;
        // SAFETY: the caller warrants that the memory it works on is still there.
        let status = unsafe { (self.core.api.f.cuGraphLaunch)(self.graph, self.core.stream) };
        self.core.check(status, "the launch of a graph")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.core.bind().is_ok() {
            // SAFETY: made by `record`; a launch that still runs is finished first, says the driver's documentation.
            unsafe { (self.core.api.f.cuGraphExecDestroy)(self.graph) };
        }
    }
}
