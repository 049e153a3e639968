//! `kumiki train`.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use kumiki_train::run::Plan;
use kumiki_train::settings::MODELS;
use kumiki_train::{Error, Result};

use crate::options::{Resolved, RunOptions, preset_table};

/// Train one model
///
/// The same as `compare` with a single model: same options, same files.
#[derive(clap::Args)]
#[command(after_help = after_help())]
pub struct Args {
    /// The model; `kumiki compare --help` says what they are
    #[arg(long, value_parser = PossibleValuesParser::new(MODELS))]
    model: Option<String>,
    #[command(flatten)]
    options: RunOptions,
}

fn after_help() -> String {
    preset_table()
        + "
Examples:
  kumiki train --model tango --data book.txt --out runs/book
  kumiki train --model untied --preset small --lr 1e-3
  kumiki eval --checkpoint runs/book --data book.txt
  kumiki generate --checkpoint runs/book --prompt 'Once '"
}

impl Args {
    pub fn run(self) -> Result<()> {
        let Resolved { preset, corpora, seeds, models, settings } = self.options.resolve("model", None)?;
        let models = self
            .model
            .map(|model| vec![model])
            .or(models)
            .ok_or_else(|| Error::new(format!("which model? Say so with --model. Known: {}", MODELS.join(", "))))?;
        let default = || PathBuf::from(format!("runs/train-{}-{preset}-{}", models[0], settings.seed));
        let out = self.options.out.clone().unwrap_or_else(default);
        let experiment = format!("train {}", models[0]);
        let plan = Plan { experiment, preset, settings, corpora, seeds, models };
        crate::run::run(plan, &out, self.options.existing()).map(drop)
    }
}
