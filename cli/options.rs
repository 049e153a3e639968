//! The options that `compare`, `train` and `ablate` share: what a run is asked for, where it is, how it is saved.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use kumiki_train::run::{Existing, Plan};
use kumiki_train::settings::{PRESETS, Settings};
use kumiki_train::training::Keeping;
use kumiki_train::zoo::{self, Suite};
use kumiki_train::{Error, Result};

use crate::interrupt;
use crate::sources::Sources;

/// The options of a training run.
#[derive(clap::Args)]
pub struct RunOptions {
    #[command(flatten)]
    pub sources: Sources,
    /// Folder for the results, made if need be [default: in runs/, named after the run]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Replace an unfinished run in the folder (a finished one is never replaced)
    #[arg(long)]
    pub restart: bool,
    /// Continue the unfinished run in this folder (or that of --out) exactly where it stopped, or extend a finished one:
    /// models that are done stay
    ///
    /// What is not given is as it was; settings that are given must be the same.
    #[arg(long, value_name = "DIR", num_args = 0..=1, conflicts_with = "restart")]
    resume: Option<Option<PathBuf>>,
    /// Write event files for TensorBoard as it trains, in DIR/events, a folder for every model
    ///
    /// `tensorboard --logdir DIR` shows them. A run that goes on and has some goes on with them.
    #[cfg(feature = "report")]
    #[arg(long)]
    pub tensorboard: bool,
    /// Stop after this step of the model in training; --resume goes on
    #[arg(long, value_name = "N", help_heading = "Saves", allow_negative_numbers = true)]
    stop_after: Option<u64>,
    /// Steps between saves, besides those after evaluations; 0 for these alone
    #[arg(long, value_name = "N", help_heading = "Saves", allow_negative_numbers = true, default_value_t = 0)]
    save_every: u64,
    /// Saves of a model that are kept, the newest
    #[arg(long, value_name = "N", help_heading = "Saves", default_value = "1")]
    keep: NonZeroUsize,
}

impl RunOptions {
    /// What to do with a run that is in the folder already.
    pub fn existing(&self) -> Existing {
        existing(self.restart, self.resume.is_some())
    }

    /// The folder for the results, where the options name one.
    pub fn folder(&self) -> Result<Option<PathBuf>> {
        match (&self.out, &self.resume) {
            (Some(out), Some(Some(resume))) if out != resume => Err(Error::new(format!(
                "--out `{}` and --resume `{}` name two folders; a run goes on where it is",
                out.display(),
                resume.display()
            ))),
            (out, resume) => Ok(out.clone().or_else(|| resume.clone().flatten())),
        }
    }

    /// How trainings are saved and stopped.
    pub fn keeping(&self) -> Result<Keeping> {
        if self.stop_after == Some(0) {
            return Err(Error::new("--stop-after must be at least 1, found 0"));
        }
        let Self { save_every, stop_after, keep, .. } = *self;
        Ok(Keeping { save_every, keep: keep.get(), stop_after, stop: interrupt::stop()? })
    }

    /// The run that is to be gone on with, if its folder is named and has one, and its plan.
    pub fn resumed(&self, experiment: &str) -> Result<Option<(PathBuf, Plan)>> {
        match self.folder()? {
            Some(folder) if self.resume.is_some() && (self.out.is_none() || folder.join("results.json").is_file()) => {
                let plan = Plan::of_run(&folder, experiment)?;
                Ok(Some((folder, plan)))
            }
            _ => Ok(None),
        }
    }
}

/// What `--restart` and `--resume`, which exclude each other, ask for.
pub fn existing(restart: bool, resume: bool) -> Existing {
    match (restart, resume) {
        (true, _) => Existing::Restart,
        (_, true) => Existing::Resume,
        _ => Existing::Refuse,
    }
}

/// The presets side by side, for help texts.
pub fn preset_table() -> String {
    let mut text = String::from("Presets:            D   L    T  batch  steps  parameters\n");
    let rows = PRESETS.map(|name| (Suite::Tango, name)).into_iter().chain([(Suite::Cem, "paper")]);
    for (suite, name) in rows.chain(PRESETS.map(|name| (Suite::Double, name))) {
        let s = Settings::for_suite(suite, name).unwrap_or_default();
        let (batch, params) = (s.batch * s.accumulate, crate::table::short(s.params as f64));
        let name = if suite == Suite::Tango { name.to_owned() } else { format!("{name} ({})", suite.name()) };
        text +=
            &format!("  {name:<15}{:>4}{:>4}{:>5}{batch:>7}{:>7}{params:>12}\n", s.d_model, s.blocks, s.seq, s.steps);
    }
    text
}

/// Takes the name of a model of the command line.
pub fn model_name(name: &str) -> std::result::Result<String, String> {
    zoo::checked(name).map_err(|e| e.to_string())
}

/// # Errors
/// When one of the models is named twice.
pub fn check_distinct(models: &[String]) -> Result<()> {
    match models.iter().enumerate().find(|(n, model)| models[..*n].contains(model)) {
        Some((_, model)) => Err(Error::new(format!("model `{model}` is named twice"))),
        None => Ok(()),
    }
}
