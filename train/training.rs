//! [`train_model`]: one model from its first step, or from where it was stopped, to its last.
//!
//! After every step come, where they are due, an evaluation, the line in the log, a save. A save that is gone on from knows
//! of the last step what is to be logged, so that all this can be done again: lines that a killed process wrote after its
//! last save are dropped, and written once more with the same numbers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use kumiki_models::Model;
use kumiki_models::accounting::{self, Pairs};
use kumiki_tensor::{memory_stats, reset_peak};

use crate::compare::{Event, ModelResult};
use crate::data::Data;
use crate::log::{Record, Writer};
use crate::marks::Class;
use crate::run::{Cell, Machine};
use crate::saves::{self, State};
use crate::settings::Settings;
use crate::stop::Stop;
use crate::tokenizer::Tokenizer;
use crate::trainer::{Evaluation, Trainer, evaluate, logit_scale};
use crate::validation::Validation;
use crate::{Error, Result, checkpoint};

/// How a training is saved and stopped. Nothing of it changes what is learnt.
#[derive(Clone, Debug)]
pub struct Keeping {
    /// Steps between saves, besides those after evaluations; 0 for these alone.
    pub save_every: u64,
    /// Saves of a model that are kept, the newest; at least 1.
    pub keep: usize,
    /// Stop after this step, if the model has more.
    pub stop_after: Option<u64>,
    /// Who may ask for a stop.
    pub stop: Stop,
}

impl Default for Keeping {
    fn default() -> Keeping {
        Keeping { save_every: 0, keep: 1, stop_after: None, stop: Stop::default() }
    }
}

/// How a training ended.
#[derive(Debug)]
pub enum Outcome {
    /// With its last step.
    Done(Box<ModelResult>),
    /// It was asked to stop after this step, and is saved.
    Stopped(u64),
}

struct Training<'a> {
    name: &'a str,
    settings: &'a Settings,
    data: &'a Data,
    folder: &'a Path,
    keeping: &'a Keeping,
    validation: Option<Validation>,
    trainer: Trainer,
    /// Of the last step.
    record: Option<Record>,
    /// After the last step.
    evaluation: Option<Evaluation>,
    /// The last save.
    saved: Option<(u64, PathBuf)>,
    training_seconds: f64,
    /// Of earlier processes.
    seconds_before: f64,
    peak_before: u64,
    started: Instant,
}

/// Trains one model as the settings say, going on from the newest save in `folder` if there is one. Steps go to `log`. The
/// training is saved in `folder` at the start, after every evaluation that finds a finite loss, as `keeping` says, and at the
/// end; never when a parameter is not finite. `show` hears of everything.
///
/// # Errors
/// As the parts do. When a loss or a gradient is no number, the sentence says in which step, and which save is the last
/// good one.
pub fn train_model(
    name: &str,
    settings: &Settings,
    data: &Data,
    log: &mut Writer,
    folder: &Path,
    keeping: &Keeping,
    show: &mut dyn FnMut(Event),
) -> Result<Outcome> {
    let mut training = Training::begin(name, settings, data, folder, keeping, show)?;
    let first = training.record.as_ref().map_or(0, |record| record.step);
    let ours = |r: &Record| {
        (r.model.as_deref(), r.corpus.as_deref(), r.seed) == (Some(name), Some(&data.name), Some(settings.seed))
    };
    let before = log.retain(|record| !ours(record) || record.step < first, ours)?;
    if before + 1 < first {
        return Err(Error::new(format!(
            "the log has {before} of the {} steps of `{name}` before the save that it is to go on from, and they cannot be had \
             again; bring it back, or begin anew with --restart",
            first - 1
        )));
    }
    // Not before the save has proved to be of use, and the log to be whole.
    if training.saved.is_some() {
        let cell = Cell { corpus: data.name.clone(), seed: settings.seed, model: name.to_owned() };
        show(Event::Note(&format!("{cell} goes on after step {first}")));
    }
    show(Event::Start { model: name, steps: settings.steps, done: first });
    if first == 0 {
        training.save()?;
    } else if let Some(step) = training.settle(log, show)? {
        return Ok(Outcome::Stopped(step));
    }
    while training.trainer.steps_done() < settings.steps {
        training.step(show)?;
        if let Some(step) = training.settle(log, show)? {
            return Ok(Outcome::Stopped(step));
        }
    }
    let result = training.finish()?;
    let gaps = result.gap_nll.map(|nll| ("validation loss of gaps", nll));
    let found = result.val_nll.map(|nll| ("validation loss", nll)).or(gaps);
    show(Event::Done { model: name, seconds: result.seconds, found });
    Ok(Outcome::Done(Box::new(result)))
}

impl<'a> Training<'a> {
    fn begin(
        name: &'a str,
        settings: &'a Settings,
        data: &'a Data,
        folder: &'a Path,
        keeping: &'a Keeping,
        show: &mut dyn FnMut(Event),
    ) -> Result<Training<'a>> {
        let started = Instant::now();
        reset_peak();
        let validation = data.validation(settings.batch, settings.seq, Some(settings.eval_tokens))?;
        let mut notes = Vec::new();
        // What a save holds is in no need of a checkpoint to begin from, which may be gone.
        let bare = Settings { init_from: String::new(), ..settings.clone() };
        let check = |state: &State| check(state, name, settings, data);
        let found = saves::newest(folder, || fresh(name, &bare, data), check, &mut notes)?;
        notes.iter().for_each(|note| show(Event::Note(note)));
        let (state, trainer) = match found {
            Some((state, trainer)) => (Some(state), trainer),
            None => (None, fresh(name, settings, data)?),
        };
        let mut training = Training {
            name,
            settings,
            data,
            folder,
            keeping,
            validation,
            trainer,
            record: None,
            evaluation: None,
            saved: None,
            training_seconds: 0.0,
            seconds_before: 0.0,
            peak_before: 0,
            started,
        };
        training.trainer.model.recompute(settings.checkpoint_activations);
        training.trainer.model.set_dropout(settings.dropout);
        if let Some(state) = state {
            training.record = state.record;
            training.evaluation = state.evaluation;
            training.training_seconds = state.training_seconds;
            training.seconds_before = state.seconds;
            training.peak_before = state.peak_bytes;
            training.saved = Some((state.step, folder.join(format!("step-{}", state.step))));
        }
        Ok(training)
    }

    /// The error, with the last good save: the parameters of the moment are no safe harbour.
    fn lost(&self, error: &dyn std::fmt::Display) -> Error {
        let good = match &self.saved {
            Some((step, folder)) => format!("; the last good checkpoint, after step {step}, is `{}`", folder.display()),
            None => String::new(),
        };
        Error::new(format!("model `{}`: {error}{good}", self.name))
    }

    fn step(&mut self, show: &mut dyn FnMut(Event)) -> Result<()> {
        let started = Instant::now();
        let report = self.trainer.step().map_err(|e| self.lost(&e))?;
        self.training_seconds += started.elapsed().as_secs_f64();
        self.evaluation = None;
        self.record = Some(Record {
            model: Some(self.name.to_owned()),
            corpus: Some(self.data.name.clone()),
            seed: Some(self.settings.seed),
            step: report.step,
            loss: report.loss,
            lr: report.lr,
            grad_norm: report.grad_norm,
            tokens: report.tokens,
            tok_s: report.tok_s,
            val_loss: None,
        });
        show(Event::Step(&report));
        Ok(())
    }

    /// All that comes after a step. Gives its number if the training is to stop there.
    fn settle(&mut self, log: &mut Writer, show: &mut dyn FnMut(Event)) -> Result<Option<u64>> {
        let (step, Settings { steps, eval_every, .. }) = (self.trainer.steps_done(), self.settings);
        let every = |n: u64| n > 0 && step.is_multiple_of(n);
        let due = step == *steps || every(*eval_every);
        let Keeping { save_every, stop_after, stop, .. } = self.keeping;
        // An evaluation may take long: whoever stops here has it when the training goes on.
        if !stop.is_asked() && due && self.evaluation.is_none() {
            self.evaluate(show)?;
        }
        let postponed = due && self.evaluation.is_none() && self.validation.is_some();
        let stops = (step < *steps || postponed) && (stop.is_asked() || stop_after.is_some_and(|after| after <= step));
        if due || stops || every(*save_every) {
            // An update can ruin parameters whose loss was still a number: such a model must not replace a good one.
            self.trainer.check_finite().map_err(|e| self.lost(&e))?;
            if self.validation.is_none() {
                self.trainer.check_loss().map_err(|e| self.lost(&e))?;
            }
        }
        if let Some(record) = self.record.as_ref().filter(|_| !postponed) {
            log.write(record)?;
        }
        if due || stops || every(*save_every) {
            // A save must not know of a step that the log may still lose.
            log.sync()?;
            self.save()?;
        }
        Ok(stops.then_some(step))
    }

    fn evaluate(&mut self, show: &mut dyn FnMut(Event)) -> Result<()> {
        let Some(validation) = &self.validation else { return Ok(()) };
        let (step, total) = (self.trainer.steps_done(), validation.tokens());
        let found = evaluate(&self.trainer.model, validation, |done| show(Event::Evaluating { done, total }))
            .map_err(|e| self.lost(&format!("validation after step {step}: {e}")))?;
        show(Event::Evaluated(&found));
        self.evaluation = Some(found);
        if let Some(record) = &mut self.record {
            record.val_loss = Some(found.nll);
        }
        Ok(())
    }

    fn seconds(&self) -> f64 {
        self.seconds_before + self.started.elapsed().as_secs_f64()
    }

    fn peak(&self) -> u64 {
        self.peak_before.max(memory_stats().peak as u64)
    }

    fn save(&mut self) -> Result<()> {
        let (step, settings) = (self.trainer.steps_done(), self.settings);
        if self.saved.as_ref().is_some_and(|(saved, _)| *saved == step) {
            return Ok(());
        }
        let json =
            serde_json::to_string(settings).map_err(|e| Error::new(format!("cannot write the settings: {e}")))?;
        let notes = [("model", self.name.into()), ("step", step.to_string()), ("settings", json)];
        let notes = notes.map(|(key, value)| (key.to_owned(), value));
        let tokenizer = &self.data.tokenizer;
        let notes: BTreeMap<String, String> = notes.into_iter().chain(tokenizer.notes()).collect();
        let state = State {
            format: State::format(),
            kumiki: env!("CARGO_PKG_VERSION").to_owned(),
            model: self.name.to_owned(),
            corpus: self.data.name.clone(),
            step,
            tokens: self.record.as_ref().map_or(0, |record| record.tokens),
            next_batch: step * settings.accumulate as u64,
            seed: settings.seed,
            next_lr: settings.step_config()?.schedule.rate(step),
            training_seconds: self.training_seconds,
            seconds: self.seconds(),
            peak_bytes: self.peak(),
            record: self.record.clone(),
            evaluation: self.evaluation,
            settings: settings.clone(),
            machine: Machine::here(),
        };
        let path = saves::save(self.folder, &state, &self.trainer, tokenizer, &notes, self.keeping.keep)?;
        self.saved = Some((step, path));
        Ok(())
    }

    fn finish(self) -> Result<ModelResult> {
        let record = self.record.as_ref().ok_or_else(|| Error::new("steps must be at least 1, found 0"))?;
        if let Some((_, save)) = &self.saved {
            saves::publish(save, self.folder)?;
        }
        let (config, evaluation) = (self.trainer.model.config(), self.evaluation);
        let of = |class| evaluation.and_then(|e| e.of(class)).map(|(nll, _)| nll);
        let of_text = evaluation.filter(|e| e.of_text);
        Ok(ModelResult {
            model: self.name.to_owned(),
            params: config.block_params(),
            params_total: config.total_params(),
            macs: accounting::total(&config.macs(self.settings.seq, Pairs::Full)),
            val_nll: of_text.map(|e| e.nll),
            second_half_nll: evaluation.map(|e| e.second_half),
            gap_nll: evaluation.filter(|e| !e.of_text).map(|e| e.nll),
            bits_per_byte: of_text.map(|e| e.bits()),
            answer_nll: of(Class::Answer),
            proof_nll: of(Class::Proof),
            source_nll: of(Class::Source),
            val_tokens: evaluation.map_or(0, |e| e.tokens),
            train_loss: record.loss,
            tokens: record.tokens,
            peak_bytes: Some(self.peak()),
            tok_s: record.tokens as f64 / self.training_seconds,
            seconds: self.seconds(),
        })
    }
}

/// Whether a save is one of this training, as far as its state tells.
///
/// # Errors
/// Names the first thing that is not as it must be.
fn check(state: &State, name: &str, settings: &Settings, data: &Data) -> Result<()> {
    let differs = |what: &str, found: &dyn std::fmt::Display, expected: &dyn std::fmt::Display| {
        Err(Error::new(format!("its {what} must be {expected}, found {found}")))
    };
    let Settings { batch, seq, accumulate, seed, steps, .. } = settings;
    if state.model != name {
        return differs("model", &format!("`{}`", state.model), &format!("`{name}`"));
    }
    if state.corpus != data.name {
        return differs("corpus", &format!("`{}`", state.corpus), &format!("`{}`", data.name));
    }
    if let Some((key, found, expected)) = state.settings.difference(settings) {
        return differs(&format!("setting {key}"), &found, &expected);
    }
    let batches = state.step.saturating_mul(*accumulate as u64);
    let tokens = batches.saturating_mul((*batch * *seq) as u64);
    let record = state.record.as_ref();
    let (logged, wanted) = (record.map_or(0, |record| record.step), state.step);
    let seen = record.map_or(0, |record| record.tokens);
    for (what, found, expected) in [
        ("seed", state.seed, *seed),
        ("settings' seed", state.settings.seed, *seed),
        ("record's step", logged, wanted),
        ("record's tokens", seen, tokens),
        ("tokens", state.tokens, tokens),
        ("next batch", state.next_batch, batches),
        ("step, which may not be beyond the last,", state.step, state.step.min(*steps)),
    ] {
        if found != expected {
            return differs(what, &found, &expected);
        }
    }
    let seconds = [("training_seconds", state.training_seconds), ("seconds", state.seconds)];
    match seconds.iter().find(|(_, x)| !(*x >= 0.0 && *x < 1e10)) {
        Some((what, found)) => differs(what, found, &"a time"),
        None => Ok(()),
    }
}

/// A training at its start.
fn fresh(name: &str, settings: &Settings, data: &Data) -> Result<Trainer> {
    let named = |e: &dyn std::fmt::Display| Error::new(format!("model `{name}`: {e}"));
    let config = settings.model(name, data.tokenizer.vocab())?;
    let model = match settings.init_from.as_str() {
        "" => Model::new(&config, settings.seed, settings.dtype()?).map_err(|e| named(&e))?,
        from => {
            let found = checkpoint::load(Path::new(from), settings.dtype()?)?;
            // The vocabulary first: with another one the configuration is another, too, and says less about why.
            if found.tokenizer != data.tokenizer {
                let vocabulary = |t: &Tokenizer| format!("the vocabulary of `{}` ({} tokens)", t.name(), t.vocab());
                return Err(named(&format!(
                    "`{from}`, which it is to begin from, has {}, `{}` has {}; expected the same",
                    vocabulary(&found.tokenizer),
                    data.name,
                    vocabulary(&data.tokenizer)
                )));
            }
            if found.model.config() != config {
                return Err(named(&format!("`{from}`, which it is to begin from, holds another model")));
            }
            let (held, asked) = (found.model.logit_scale(), logit_scale(&config, settings.mup_base_width));
            if asked.is_some_and(|asked| asked != held) {
                return Err(named(&format!(
                    "`{from}`, which it is to begin from, multiplies its logits by {held}; with mup_base_width={} they would \
                     be multiplied by {}",
                    settings.mup_base_width,
                    asked.unwrap_or(1.0)
                )));
            }
            found.model
        }
    };
    let batches = data.batches(settings.batch, settings.seq, settings.seed)?;
    let mut trainer = Trainer::new(model, settings.step_config()?, batches, settings.seed)?;
    trainer.sampling = settings.sampling(name).map_err(|e| named(&e))?;
    Ok(trainer)
}
