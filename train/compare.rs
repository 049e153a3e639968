//! The comparison of models: the same batches in the same order, the same seed, schedule and budget.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use kumiki_models::Model;
use kumiki_models::accounting::{self, Pairs};
use serde::{Deserialize, Serialize};

use crate::batches::Validation;
use crate::data::Data;
use crate::log::{Record, Writer};
use crate::marks::Class;
use crate::settings::Settings;
use crate::trainer::{Evaluation, StepReport, Trainer, evaluate};
use crate::{Error, Result, checkpoint};

/// The entropy of the target tokens' frequencies, in nats: the loss of the best model that does not read its context.
pub fn unigram_entropy(validation: &Validation) -> f64 {
    let mut counts = BTreeMap::<i64, u64>::new();
    validation.batches().flat_map(|batch| batch.targets()).for_each(|id| *counts.entry(id).or_default() += 1);
    let total = counts.values().sum::<u64>() as f64;
    counts.values().map(|&n| n as f64 / total).map(|p| -p * p.ln()).sum()
}

/// What happens during a run, for whoever shows it.
pub enum Event<'a> {
    /// A model starts.
    Start {
        /// Its name.
        model: &'a str,
        /// Steps it will make.
        steps: u64,
    },
    /// A step is done.
    Step(&'a StepReport),
    /// An evaluation has come so far.
    Evaluating {
        /// Target tokens done.
        done: u64,
        /// Target tokens of the whole evaluation.
        total: u64,
    },
    /// An evaluation is done.
    Evaluated(&'a Evaluation),
    /// The model is done.
    Done {
        /// Its name.
        model: &'a str,
        /// Seconds that it took.
        seconds: f64,
        /// What was measured at the end and what it is called, if anything.
        found: Option<(&'static str, f64)>,
    },
}

/// One row of the comparison's table.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelResult {
    /// Name of the model.
    pub model: String,
    /// Distinct parameters outside of the token table.
    pub params: usize,
    /// Distinct parameters, token table included.
    pub params_total: usize,
    /// Multiply-accumulates of a forward pass over one sequence, all token pairs counted.
    pub macs: u64,
    /// Validation loss, nats per token; absent when the text was too short to hold anything out, and of an encoder-decoder,
    /// which does not predict every token of a text.
    pub val_nll: Option<f64>,
    /// The same over the second half of every window given the first, which compares all kinds of models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_half_nll: Option<f64>,
    /// Validation loss of an encoder-decoder on gaps, nats per token of its targets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gap_nll: Option<f64>,
    /// Validation loss, bits per byte.
    pub bits_per_byte: Option<f64>,
    /// Validation loss over the tokens of answers, for corpora that know them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_nll: Option<f64>,
    /// Validation loss over the tokens of proofs, for Lean.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof_nll: Option<f64>,
    /// Validation loss over all other tokens of Lean.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_nll: Option<f64>,
    /// Target tokens of the last evaluation.
    pub val_tokens: u64,
    /// Training loss of the last step.
    pub train_loss: f64,
    /// Training tokens seen.
    pub tokens: u64,
    /// Training tokens per second, evaluations not counted.
    pub tok_s: f64,
    /// Seconds of training and evaluations.
    pub seconds: f64,
}

impl ModelResult {
    /// Validation loss over the tokens of `class`.
    pub fn of(&self, class: Class) -> Option<f64> {
        match class {
            Class::Answer => self.answer_nll,
            Class::Proof => self.proof_nll,
            Class::Source => self.source_nll,
        }
    }
}

/// Trains one model as the settings say. Steps go to `log`; the model is saved in `folder` at the start, after every
/// evaluation that finds a finite loss, and at the end; never when a parameter is not finite. `show` hears of everything.
///
/// # Errors
/// As the parts do. When a loss or a gradient is no number, the sentence says in which step, and which checkpoint is the
/// last good one.
pub fn train_model(
    name: &str,
    settings: &Settings,
    data: &Data,
    log: &mut Writer,
    folder: &Path,
    show: &mut dyn FnMut(Event),
) -> Result<ModelResult> {
    let started = Instant::now();
    let named = |e: &dyn std::fmt::Display| Error::new(format!("model `{name}`: {e}"));
    let config = settings.model(name, data.tokenizer.vocab())?;
    let mut model = Model::new(&config, settings.seed, settings.dtype()?).map_err(|e| named(&e))?;
    model.recompute(settings.checkpoint_activations);
    let validation = data.validation(settings.batch, settings.seq, Some(settings.eval_tokens))?;
    let batches = data.batches(settings.batch, settings.seq, settings.seed)?;
    let mut trainer = Trainer::new(model, settings.step_config()?, batches, settings.seed)?;
    trainer.sampling = settings.sampling(name).map_err(|e| named(&e))?;
    show(Event::Start { model: name, steps: settings.steps });
    save(&trainer, name, folder, settings, data)?;
    let mut good = 0;
    // The parameters of the moment are no safe harbour: a loss that is no number was computed from them.
    let lost = |e: &dyn std::fmt::Display, good: u64| {
        named(&format!("{e}; the last good checkpoint, after step {good}, is in `{}`", folder.display()))
    };
    let (mut training, mut last, mut evaluation) = (0.0, None, None);
    while trainer.steps_done() < settings.steps {
        let step_started = Instant::now();
        let report = trainer.step().map_err(|e| lost(&e, good))?;
        training += step_started.elapsed().as_secs_f64();
        show(Event::Step(&report));
        let due = report.step == settings.steps || (settings.eval_every > 0 && report.step % settings.eval_every == 0);
        evaluation = None;
        if due && let Some(validation) = &validation {
            let total = validation.tokens();
            let found = evaluate(&trainer.model, validation, |done| show(Event::Evaluating { done, total }))
                .map_err(|e| lost(&format!("validation after step {}: {e}", report.step), good))?;
            show(Event::Evaluated(&found));
            evaluation = Some(found);
        }
        if due {
            // An update can ruin parameters whose loss was still a number: such a model must not replace a good one.
            trainer.check_finite().map_err(|e| lost(&e, good))?;
            if validation.is_none() {
                trainer.check_loss().map_err(|e| lost(&e, good))?;
            }
            save(&trainer, name, folder, settings, data)?;
            good = report.step;
        }
        log.write(&Record {
            model: Some(name.to_owned()),
            corpus: Some(data.name.clone()),
            seed: Some(settings.seed),
            step: report.step,
            loss: report.loss,
            lr: report.lr,
            grad_norm: report.grad_norm,
            tokens: report.tokens,
            tok_s: report.tok_s,
            val_loss: evaluation.as_ref().map(|e| e.nll),
        })?;
        last = Some(report);
    }
    let report = last.ok_or_else(|| Error::new("steps must be at least 1, found 0"))?;
    let of = |class| evaluation.and_then(|e| e.of(class)).map(|(nll, _)| nll);
    let of_text = evaluation.filter(|e| e.of_text);
    let result = ModelResult {
        model: name.to_owned(),
        params: config.block_params(),
        params_total: config.total_params(),
        macs: accounting::total(&config.macs(settings.seq, Pairs::Full)),
        val_nll: of_text.map(|e| e.nll),
        second_half_nll: evaluation.map(|e| e.second_half),
        gap_nll: evaluation.filter(|e| !e.of_text).map(|e| e.nll),
        bits_per_byte: of_text.map(|e| e.bits()),
        answer_nll: of(Class::Answer),
        proof_nll: of(Class::Proof),
        source_nll: of(Class::Source),
        val_tokens: evaluation.map_or(0, |e| e.tokens),
        train_loss: report.loss,
        tokens: report.tokens,
        tok_s: report.tokens as f64 / training,
        seconds: started.elapsed().as_secs_f64(),
    };
    let gaps = result.gap_nll.map(|nll| ("validation loss of gaps", nll));
    let found = result.val_nll.map(|nll| ("validation loss", nll)).or(gaps);
    show(Event::Done { model: name, seconds: result.seconds, found });
    Ok(result)
}

fn save(trainer: &Trainer, name: &str, folder: &Path, settings: &Settings, data: &Data) -> Result<()> {
    let step = trainer.steps_done().to_string();
    let settings =
        serde_json::to_string(settings).map_err(|e| Error::new(format!("cannot write the settings: {e}")))?;
    let notes = [("model", name.to_owned()), ("step", step), ("settings", settings)].map(|(k, v)| (k.to_owned(), v));
    let notes: BTreeMap<String, String> = notes.into_iter().chain(data.tokenizer.notes()).collect();
    data.tokenizer.keep(folder)?;
    checkpoint::save(folder, &trainer.model, &notes)
}
