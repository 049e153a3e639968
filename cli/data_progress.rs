//! How far the preparation of data is: a bar on a terminal, a line now and then elsewhere. On standard error.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use kumiki_train::prepare::Progress;

use crate::output::remark;
use crate::table::{clock, short};

/// Without a terminal: at most one line in this time.
const QUIET: Duration = Duration::from_secs(10);

/// Bytes read, their speed, and the time that is left.
pub struct ByteProgress {
    what: &'static str,
    bar: Option<ProgressBar>,
    started: Instant,
    shown: Instant,
}

impl ByteProgress {
    /// `what` is being done.
    pub fn new(what: &'static str) -> ByteProgress {
        let now = Instant::now();
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(0);
            let style = ProgressStyle::with_template("{prefix} {bar:20.cyan/dim} {wide_msg}");
            bar.set_style(style.expect("a template that parses").progress_chars("━━─"));
            bar.set_prefix(what);
            bar
        });
        ByteProgress { what, bar, started: now, shown: now }
    }

    /// Takes note of how far it is.
    pub fn show(&mut self, at: Progress) {
        let seconds = self.started.elapsed().as_secs_f64();
        let speed = at.done as f64 / seconds.max(1e-3);
        let left = at.total.saturating_sub(at.done) as f64 / speed.max(1.0);
        let bytes = |n: f64| short(n).replace(' ', "");
        let text = || {
            let (done, total, speed) = (bytes(at.done as f64), bytes(at.total as f64), bytes(speed));
            let tokens = if at.tokens > 0 { format!("  {} tokens", bytes(at.tokens as f64)) } else { String::new() };
            format!("{done}B of {total}B  {speed}B/s  {} left{tokens}", clock(left))
        };
        match &self.bar {
            Some(bar) => {
                bar.set_length(at.total);
                bar.set_position(at.done);
                bar.set_message(text());
            }
            None if self.shown.elapsed() >= QUIET => {
                self.shown = Instant::now();
                remark(&format!("{}  {}", self.what, text()));
            }
            None => {}
        }
    }

    /// Takes the bar away, so that other lines have the place.
    pub fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// The most memory that this process had so far, in bytes; where the system tells.
pub fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}
