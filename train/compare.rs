//! The comparison of models: the same batches in the same order, the same seed, schedule and budget.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use kumiki_models::LanguageModel;
use kumiki_models::accounting::{self, Pairs};
use serde::Serialize;

use crate::batches::{Batches, Source, Validation};
use crate::corpus::Corpus;
use crate::log::{Record, Writer};
use crate::math::{MathText, SplitName};
use crate::settings::Settings;
use crate::tokenizer::ByteTokenizer;
use crate::trainer::{Evaluation, StepReport, Trainer, evaluate};
use crate::{Error, Result, checkpoint};

/// Training text and held-out text.
#[derive(Clone, Debug)]
pub struct Data {
    /// What was asked for: a path or `math`.
    pub name: String,
    train: Source,
    val: Source,
}

impl Data {
    /// Opens `math` (built in) or the text at a path; the part `settings.val_fraction` at its end is held out.
    ///
    /// # Errors
    /// When there is no such path, or it holds too little text for the settings; with the counts.
    pub fn open(name: &str, settings: &Settings) -> Result<Data> {
        if name == "math" {
            let (train, val) =
                (Source::Math(MathText::new(SplitName::Train)), Source::Math(MathText::new(SplitName::Interpolate)));
            return Ok(Data { name: name.into(), train, val });
        }
        let split = Corpus::open(name)?.split(settings.val_fraction, settings.seq)?;
        Ok(Data { name: name.into(), train: Source::Text(split.train), val: Source::Text(split.val) })
    }

    /// The training batches in the order of the settings' seed.
    ///
    /// # Errors
    /// When the text is too short; with the counts.
    pub fn batches(&self, settings: &Settings) -> Result<Batches> {
        Batches::new(self.train.clone(), settings.batch, settings.seq, settings.seed)
    }

    /// The held-out windows, at most `settings.eval_tokens` target tokens.
    ///
    /// # Errors
    /// When the text is too short; with the counts.
    pub fn validation(&self, settings: &Settings) -> Result<Validation> {
        Validation::new(self.val.clone(), settings.batch, settings.seq, Some(settings.eval_tokens))
    }
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
    /// An evaluation is done.
    Evaluated(&'a Evaluation),
    /// The model is done.
    Done(&'a ModelResult),
}

/// One row of the comparison's table.
#[derive(Clone, Debug, Serialize)]
pub struct ModelResult {
    /// Name of the model.
    pub model: String,
    /// Distinct parameters outside of the token table.
    pub params: usize,
    /// Distinct parameters, token table included.
    pub params_total: usize,
    /// Multiply-accumulates of a forward pass over one sequence, all token pairs counted.
    pub macs: u64,
    /// Validation loss, nats per token.
    pub val_nll: f64,
    /// Validation loss, bits per byte.
    pub bits_per_byte: f64,
    /// Validation loss over the tokens of answers, for corpora that know them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer_nll: Option<f64>,
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

/// Trains one model as the settings say. Steps go to `log`, the trained model to `folder`; `show` hears of everything.
///
/// # Errors
/// As the parts do. When a step fails because the loss is no number, the parameters from before it are saved first.
pub fn train_model(
    name: &str,
    settings: &Settings,
    data: &Data,
    log: &mut Writer,
    folder: &Path,
    show: &mut dyn FnMut(Event),
) -> Result<ModelResult> {
    let started = Instant::now();
    let config = settings.model(name, ByteTokenizer::VOCAB)?;
    let mut model = LanguageModel::new(&config, settings.seed, settings.dtype()?)
        .map_err(|e| Error::new(format!("model `{name}`: {e}")))?;
    model.checkpoint_activations = settings.checkpoint_activations;
    let validation = data.validation(settings)?;
    let mut trainer = Trainer::new(model, settings.step_config()?, data.batches(settings)?, settings.seed)?;
    show(Event::Start { model: name, steps: settings.steps });
    let (mut training, mut last, mut evaluation) = (0.0, None, None);
    while trainer.steps_done() < settings.steps {
        let step_started = Instant::now();
        let report = trainer.step().map_err(|e| {
            let kept = save(&trainer, name, folder, settings).map_or_else(
                |e| format!("they could not be saved: {e}"),
                |()| format!("they are saved in {}", folder.display()),
            );
            Error::new(format!("model `{name}`: {e}; {kept}"))
        })?;
        training += step_started.elapsed().as_secs_f64();
        show(Event::Step(&report));
        let due = report.step == settings.steps || (settings.eval_every > 0 && report.step % settings.eval_every == 0);
        evaluation = if due { Some(evaluate(&trainer.model, &validation, |_| {})?) } else { None };
        if let Some(evaluation) = &evaluation {
            show(Event::Evaluated(evaluation));
        }
        log.write(&Record {
            model: Some(name.to_owned()),
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
    save(&trainer, name, folder, settings)?;
    let (report, evaluation) = last.zip(evaluation).ok_or_else(|| Error::new("steps must be at least 1, found 0"))?;
    let result = ModelResult {
        model: name.to_owned(),
        params: accounting::block_params(&config.architecture),
        params_total: accounting::total_params(&config),
        macs: accounting::macs(&config, settings.seq, Pairs::Full).total(),
        val_nll: evaluation.nll,
        bits_per_byte: evaluation.bits(),
        answer_nll: evaluation.answers.map(|(nll, _)| nll),
        val_tokens: evaluation.tokens,
        train_loss: report.loss,
        tokens: report.tokens,
        tok_s: report.tokens as f64 / training,
        seconds: started.elapsed().as_secs_f64(),
    };
    show(Event::Done(&result));
    Ok(result)
}

fn save(trainer: &Trainer, name: &str, folder: &Path, settings: &Settings) -> Result<()> {
    let settings =
        serde_json::to_string(settings).map_err(|e| Error::new(format!("cannot write the settings: {e}")))?;
    let notes = [
        ("model", name.to_owned()),
        ("step", trainer.steps_done().to_string()),
        ("tokenizer", "byte".into()),
        ("settings", settings),
    ];
    let notes: BTreeMap<String, String> = notes.map(|(k, v)| (k.to_owned(), v)).into();
    checkpoint::save(folder, &trainer.model, &notes)
}
