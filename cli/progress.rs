//! How far a run is: a bar on a terminal, a line now and then elsewhere. On standard error.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use kumiki_train::compare::Event;
use kumiki_train::trainer::StepReport;

use crate::output::remark;
use crate::table::{clock, count, duration, short};

/// Without a terminal: at most one line in this time, besides those with a validation loss.
const QUIET: Duration = Duration::from_secs(10);

/// Shows the events of a run.
pub struct Progress {
    bar: Option<ProgressBar>,
    terminal: bool,
    name_width: usize,
    unit: &'static str,
    name: String,
    steps: u64,
    /// Steps that an earlier process has made.
    before: u64,
    validation: Option<f64>,
    started: Instant,
    last_line: Option<Instant>,
    last_step: Option<StepReport>,
}

impl Progress {
    /// For models whose names fit into `name_width`, and what is counted per second.
    pub fn new(name_width: usize, unit: &'static str) -> Progress {
        let (now, terminal) = (Instant::now(), std::io::stderr().is_terminal());
        Progress {
            bar: None,
            terminal,
            name_width,
            unit,
            name: String::new(),
            steps: 0,
            before: 0,
            validation: None,
            started: now,
            last_line: None,
            last_step: None,
        }
    }

    /// Takes note of an event.
    pub fn show(&mut self, event: Event) {
        match event {
            Event::Start { model, steps, done } => self.start(model, steps, done),
            Event::Note(note) => remark(&format!("note: {note}")),
            Event::Step(report) => self.step(report),
            Event::Evaluating { done, total } => {
                let text = format!("validating {:.0} %", 100.0 * done as f64 / total as f64);
                match &self.bar {
                    Some(bar) => bar.set_message(text),
                    None if self.is_quiet() && done < total => {
                        self.last_line = Some(Instant::now());
                        remark(&format!("{:<1$}  {text}", self.name, self.name_width));
                    }
                    None => {}
                }
            }
            Event::Evaluated(evaluation) => {
                self.validation = Some(evaluation.nll);
                match (&self.bar, self.last_step) {
                    (Some(bar), _) => bar.set_message(self.numbers()),
                    (None, Some(report)) => self.line(&report),
                    (None, None) => {}
                }
            }
            Event::Done { model, seconds, found } => self.done(model, seconds, found),
        }
    }

    fn start(&mut self, model: &str, steps: u64, before: u64) {
        *self = Progress { name: model.to_owned(), steps, before, ..Progress::new(self.name_width, self.unit) };
        if self.terminal {
            let bar = ProgressBar::new(steps);
            // With names of 9 letters and 4-digit steps the numbers just fit into 80 columns.
            let template = "{prefix} {bar:10.cyan/dim} {pos}/{len}  {wide_msg}";
            bar.set_style(
                ProgressStyle::with_template(template).expect("a template that parses").progress_chars("━━─"),
            );
            bar.set_prefix(format!("{model:<0$}", self.name_width));
            bar.set_position(before);
            bar.enable_steady_tick(Duration::from_millis(500));
            self.bar = Some(bar);
        }
    }

    fn step(&mut self, report: &StepReport) {
        self.last_step = Some(*report);
        match &self.bar {
            Some(bar) => {
                bar.set_message(self.numbers());
                bar.set_position(report.step);
            }
            // The last step has its line from the evaluation and the end.
            None if report.step < self.steps && self.is_quiet() => self.line(report),
            None => {}
        }
    }

    /// Whether nothing was written for so long that one could think it hangs.
    fn is_quiet(&self) -> bool {
        self.last_line.unwrap_or(self.started).elapsed() >= QUIET
    }

    /// `loss 2.345  val 2.401  12.3k tok/s  1m20s left`.
    fn numbers(&self) -> String {
        let Some(report) = self.last_step else { return String::new() };
        let here = (report.step - self.before) as f64;
        let left = self.started.elapsed().as_secs_f64() / here * (self.steps - report.step) as f64;
        let validation = self.validation.map_or(String::new(), |nll| format!("val {nll:.3}  "));
        let (speed, left) = (short(report.tok_s).replace(' ', ""), clock(left));
        format!("loss {:.3}  {validation}{speed} {}/s  {left} left", report.loss, self.unit)
    }

    fn line(&mut self, report: &StepReport) {
        self.last_line = Some(Instant::now());
        let steps = self.steps.to_string();
        let step = format!("{:>1$}/{steps}", report.step, steps.len());
        remark(&format!("{:<2$}  step {step}  {}", self.name, self.numbers(), self.name_width));
    }

    fn done(&mut self, model: &str, seconds: f64, found: Option<(&str, f64)>) {
        let text = format!(
            "{model:<3$}  {} in {}{}",
            count(self.steps, "step"),
            duration(seconds),
            found.map_or(String::new(), |(name, x)| format!(", {name} {x:.3}")),
            self.name_width,
        );
        self.clear();
        remark(&text);
    }

    /// Takes the bar away, so that other lines have the place.
    pub fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}
