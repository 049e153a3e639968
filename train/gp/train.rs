//! The training of one model: fresh functions in every step, mean squared error, AdamW.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use kumiki_autograd::Tape;
use kumiki_models::SequenceRegressor;
use kumiki_nn::{AdamW, Module};
use kumiki_tensor::DType;
use serde::{Deserialize, Serialize};

use super::evaluate::{HeldOut, Rmse};
use super::functions::{Stream, to_tensors};
use super::run::Cell;
use super::settings::Settings;
use crate::checkpoint;
use crate::compare::Event;
use crate::log::{Record, Writer};
use crate::stop::Stop;
use crate::trainer::{StepReport, check_params, update};
use crate::{Error, Result};

/// What a training found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trained {
    /// Distinct parameters.
    pub params: usize,
    /// Errors on the held-out functions.
    #[serde(flatten)]
    pub errors: Rmse,
    /// Mean squared error of the last step's batch.
    pub train_loss: f64,
    /// Seconds of training and evaluation.
    pub seconds: f64,
}

/// A model with its optimiser and its place among the functions; one call is one step.
pub(crate) struct Training {
    pub(crate) model: SequenceRegressor,
    optimizer: AdamW,
    settings: Settings,
    functions: Stream,
    step: u64,
}

impl Training {
    pub(crate) fn new(name: &str, settings: &Settings, seed: u64) -> Result<Training> {
        let model = SequenceRegressor::new(&settings.model(name)?, seed, DType::F32);
        let model = model.map_err(|e| Error::new(format!("model `{name}`: {e}")))?;
        let (settings, functions) = (settings.clone(), Stream::training(&settings.prior, seed));
        Ok(Training { model, optimizer: AdamW::with_decay(settings.weight_decay), settings, functions, step: 0 })
    }

    /// Draws the next functions and makes one step; points are counted as tokens.
    ///
    /// # Errors
    /// As [`update`]; then the parameters are as they were before the step.
    pub(crate) fn step(&mut self) -> Result<StepReport> {
        let started = Instant::now();
        let batch = self.settings.batch;
        let (inputs, targets) = to_tensors(&self.functions.get(self.step * batch as u64, batch)?);
        let tape = Tape::new();
        let loss = self.model.loss(&tape, &inputs, &targets);
        let (value, mut grads) = (loss.item(), tape.backward(&loss));
        let (number, config) = (self.step + 1, self.settings.step_config()?);
        let (lr, grad_norm) = update(&mut self.model, &mut self.optimizer, &config, number, value, &mut grads)?;
        self.step = number;
        let tok_s = targets.len() as f64 / started.elapsed().as_secs_f64().max(1e-9);
        Ok(StepReport { step: number, loss: value, lr, grad_norm, tokens: number * targets.len() as u64, tok_s })
    }
}

/// Trains the model of `cell` as the settings say and measures it. Steps go to `log`, where the loss is the mean squared
/// error; the model is saved in `folder` at the end, never when it has diverged. `show` hears of everything. `None` when it
/// was asked to stop: what it has learnt is lost, for these models take minutes.
///
/// # Errors
/// As the parts do. When a loss or a gradient is no number, the sentence says in which step.
pub fn train_model(
    cell: &Cell,
    settings: &Settings,
    held_out: &HeldOut,
    log: &mut Writer,
    folder: &Path,
    stop: &Stop,
    show: &mut dyn FnMut(Event),
) -> Result<Option<Trained>> {
    let started = Instant::now();
    let named = |e: Error| Error::new(format!("{cell}: {e}"));
    let mut training = Training::new(&cell.model, settings, cell.seed)?;
    show(Event::Start { model: &cell.model, steps: settings.steps, done: 0 });
    let mut train_loss = f64::NAN;
    while training.step < settings.steps {
        if stop.is_asked() {
            return Ok(None);
        }
        let report = training.step().map_err(named)?;
        show(Event::Step(&report));
        train_loss = report.loss;
        log.write(&Record {
            model: Some(cell.model.clone()),
            corpus: None,
            seed: Some(cell.seed),
            step: report.step,
            loss: report.loss,
            lr: report.lr,
            grad_norm: report.grad_norm,
            tokens: report.tokens,
            tok_s: report.tok_s,
            val_loss: None,
        })?;
    }
    check_params(&training.model, training.step).map_err(named)?;
    let total = settings.eval_functions as u64;
    let errors = held_out.rmse(&training.model, |done| show(Event::Evaluating { done: done as u64, total }))?;
    if !errors.rmse.is_finite() {
        let (step, rmse) = (training.step, errors.rmse);
        return Err(named(Error::new(format!("the model has diverged after step {step}: its RMSE is {rmse}"))));
    }
    let settings =
        serde_json::to_string(settings).map_err(|e| Error::new(format!("cannot write the settings: {e}")))?;
    let notes = [("model", cell.model.clone()), ("seed", cell.seed.to_string()), ("settings", settings)];
    let notes: BTreeMap<String, String> = notes.map(|(key, value)| (key.to_owned(), value)).into();
    checkpoint::save_regressor(folder, &training.model, &notes)?;
    let (params, seconds) = (training.model.param_count(), started.elapsed().as_secs_f64());
    show(Event::Done { model: &cell.model, seconds, found: Some(("RMSE", errors.rmse)) });
    Ok(Some(Trained { params, errors, train_loss, seconds }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kumiki_tensor::threads;

    #[test]
    fn a_run_is_the_same_for_any_number_of_threads_and_learns() {
        let settings = Settings { steps: 60, warmup: 6, ..Settings::preset("nano").unwrap() };
        let losses = |threads| {
            threads::with_threads(threads, || {
                let mut training = Training::new("transformer", &settings, 3).unwrap();
                (0..settings.steps).map(|_| training.step().unwrap().loss).collect::<Vec<f64>>()
            })
        };
        let one = losses(1);
        assert_eq!(one, losses(3));
        let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
        let (first, last) = (mean(&one[..10]), mean(&one[50..]));
        // That of a model which ignores its inputs is 1.01.
        assert!(first > last && last < 0.9, "{first} {last}");
    }

    #[test]
    fn a_loss_that_is_no_number_is_named_and_changes_nothing() {
        let settings = Settings { lr: 1e30, warmup: 0, ..Settings::preset("nano").unwrap() };
        let mut training = Training::new("transformer", &settings, 0).unwrap();
        let error = loop {
            let before = training.model.params()[0].1.value().to_f64_vec();
            match training.step() {
                Ok(_) => assert!(training.step < 5, "so high a rate must end somewhere"),
                Err(error) => break (error.to_string(), before),
            }
        };
        assert!(error.0.contains("step 2"), "{}", error.0);
        assert_eq!(training.model.params()[0].1.value().to_f64_vec(), error.1);
    }
}
