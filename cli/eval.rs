//! `kumiki eval`.

use std::path::PathBuf;

use clap::ValueEnum;
use kumiki::models::Model;
use kumiki::nn::Trace;
use kumiki_train::cem;
use kumiki_train::checkpoint::{self, Checkpoint};
use kumiki_train::data::Data;
use kumiki_train::marks::Class;
use kumiki_train::settings::Settings;
use kumiki_train::trainer::evaluate;
use kumiki_train::{Error, Result};
use serde_json::json;

use crate::output;
use crate::table::thousands;

/// Measure the loss of a trained model on a text
///
/// Windows of the training's length from the start of the held-out part (or of the training part) are predicted token by
/// token; of questions and answers, from all over it. The part that is held out is the one that training held out. Answers,
/// proofs and other Lean source have their own lines.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki eval --checkpoint runs/compare-tango-tiny-0/tango --data math
  kumiki eval --checkpoint runs/book --data book.txt --split train --tokens 100000
  kumiki eval --checkpoint runs/cem --data book.txt --steps 8 --energy-tol 0.01
  kumiki eval --checkpoint runs/book --data book.txt --json")]
pub struct Args {
    /// A folder with a trained model, or the file in it
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// A text file, a folder of texts or of prepared tokens, or `math`
    #[arg(long, value_name = "PATH|math")]
    data: String,
    /// Tokens to predict, at most [default: as in training]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    tokens: Option<u64>,
    /// Which part of the text
    #[arg(long, value_enum, default_value_t = Split::Val)]
    split: Split,
    #[command(flatten)]
    steps: StepOptions,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// How layers that descend on an energy (those of Causal Energy Minimization) are run.
#[derive(clap::Args)]
pub struct StepOptions {
    /// Steps of every descent, at most [default: as in training]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Descents (cem)")]
    steps: Option<usize>,
    /// A token takes no further step once its energy falls by less than this in one
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Descents (cem)")]
    energy_tol: Option<f64>,
}

impl StepOptions {
    /// Changes the model's descents as asked for, and gives a trace of the steps that they take then.
    pub fn apply(&self, model: &mut Model) -> Result<Option<Trace>> {
        cem::Steps { steps: self.steps, tolerance: self.energy_tol }.apply(model)
    }
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Split {
    /// Held out from training
    Val,
    /// Seen in training
    Train,
}

/// The settings that a checkpoint was trained with; those of the default preset when it does not say.
pub fn settings_of(path: &std::path::Path, checkpoint_notes: Option<&String>) -> Result<Settings> {
    let Some(text) = checkpoint_notes else { return Ok(Settings::default()) };
    let wrong =
        |e: &dyn std::fmt::Display| Error::new(format!("`{}`: its settings cannot be used: {e}", path.display()));
    let settings: Settings = serde_json::from_str(text).map_err(|e| wrong(&e))?;
    settings.check().map_err(|e| wrong(&e))?;
    Ok(settings)
}

impl Args {
    pub fn run(self) -> Result<()> {
        output::in_pool(|| self.evaluate())
    }

    fn evaluate(self) -> Result<()> {
        let Checkpoint { mut model, tokenizer, notes } =
            checkpoint::load(&self.checkpoint, kumiki::tensor::DType::F32)?;
        let trace = self.steps.apply(&mut model)?;
        let settings = settings_of(&self.checkpoint, notes.get("settings"))?;
        let data = Data::open(&self.data, settings.val_fraction, settings.seq)?;
        let whose = format!("the model in `{}`", self.checkpoint.display());
        data.check_tokenizer(&whose, tokenizer.name(), tokenizer.vocab())?;
        if self.tokens == Some(0) {
            return Err(Error::new("--tokens must be at least 1, found 0"));
        }
        // Memory must not follow from numbers in a file; the loss does not depend on the rows of a batch.
        let rows = settings.batch.min((1 << 20) / settings.seq).max(1);
        let tokens = self.tokens.unwrap_or(settings.eval_tokens);
        let windows = match self.split {
            Split::Val => data.validation(rows, settings.seq, Some(tokens))?,
            Split::Train => Some(data.training_windows(rows, settings.seq, Some(tokens))?),
        };
        let windows = windows.ok_or_else(|| {
            Error::new(format!(
                "{}; --split train evaluates what there is",
                data.note.as_deref().unwrap_or("nothing is held out")
            ))
        })?;
        if let Some(note) = &data.note {
            output::remark(&format!("note: {note}"));
        }
        let found = evaluate(&model, &windows, |_| {})
            .map_err(|e| Error::new(format!("`{}`: {e}", self.checkpoint.display())))?;
        let mean_steps = trace.and_then(|trace| cem::mean_steps(&trace.take()));
        let name = notes.get("model").map_or("?", String::as_str);
        let split = if self.split == Split::Train { "train" } else { "val" };
        let of = |class| found.of(class).map(|(nll, _)| nll);
        let unit = if tokenizer.is_bytes() && tokenizer.end().is_none() { "byte" } else { "token" };
        let whole = |x: f64| found.of_text.then_some(x);
        if self.json {
            return output::json(&json!({
                "checkpoint": self.checkpoint, "model": name, "step": notes.get("step").and_then(|s| s.parse::<u64>().ok()),
                "data": self.data, "split": split, "tokens": found.tokens, "bytes": found.bytes, "tokenizer": tokenizer.name(),
                "nll": whole(found.nll), "perplexity": whole(found.perplexity()), "bits_per_byte": whole(found.bits()),
                "gap_nll": (!found.of_text).then_some(found.nll), "second_half_nll": found.second_half, "answer_nll": of(Class::Answer), "proof_nll": of(Class::Proof),
                "source_nll": of(Class::Source), "mean_steps": mean_steps,
            }));
        }
        output::line(&format!(
            "{}, step {}, on `{}` ({split})",
            output::plain(name),
            notes.get("step").map_or("?", String::as_str),
            self.data
        ))?;
        output::line(&format!("tokens         {}", thousands(found.tokens)))?;
        if found.of_text {
            output::line(&format!("NLL            {:.4} nats per {unit}", found.nll))?;
            output::line(&format!("perplexity     {:.4}", found.perplexity()))?;
            output::line(&format!("bits per byte  {:.4}", found.bits()))?;
        } else {
            output::line(&format!("NLL of gaps    {:.4} nats per token of what fills them", found.nll))?;
        }
        output::line(&format!("second half    {:.4} nats per {unit}, given the first", found.second_half))?;
        if let Some(mean) = mean_steps {
            output::line(&format!("steps          {mean:.3} of a token in a descent, on average"))?;
        }
        for class in Class::ALL {
            if let Some((nll, count)) = found.of(class) {
                let (label, count) = (format!("{} NLL", class.name()), thousands(count));
                output::line(&format!("{label:<15}{nll:.4} nats per {unit}, over {count} {unit}s"))?;
            }
        }
        Ok(())
    }
}
