//! `kumiki compare`.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use kumiki_train::Result;
use kumiki_train::run::Plan;
use kumiki_train::settings::MODELS;

use crate::options::{Resolved, RunOptions, preset_table};

/// Train architectures side by side under equal conditions
///
/// Every model has the same number of parameters and sees the same batches in the same order. The table at the end goes
/// to standard output; DIR/results.json, DIR/log.jsonl, DIR/curves.svg and DIR/MODEL/model.safetensors are written.
#[derive(clap::Args)]
#[command(after_help = after_help())]
pub struct Args {
    /// The experiment: `tango` compares TANGO and WANGO with the Recurrent and the untied Transformer++
    #[arg(value_name = "EXPERIMENT", value_parser = PossibleValuesParser::new(["tango"]))]
    experiment: String,
    /// Models to train, in this order, separated by commas [default: tango,recurrent]
    #[arg(long, value_name = "A,B", value_delimiter = ',', value_parser = PossibleValuesParser::new(MODELS))]
    models: Option<Vec<String>>,
    #[command(flatten)]
    options: RunOptions,
}

fn after_help() -> String {
    preset_table()
        + "
Models:
  tango         one block applied L times; its residual is a gate averaged over earlier tokens
  wango         TANGO within a window, a linear kernel beyond it: a state of fixed size
  recurrent     Transformer++, one block applied L times
  untied        Transformer++, L blocks of their own, together as large

Examples:
  kumiki compare tango
  kumiki compare tango --preset nano --models tango,recurrent,untied
  kumiki compare tango --data ~/texts --steps 1000 --out runs/texts
  kumiki compare tango --config mine.toml --seed 1     with mine.toml: preset = \"small\"
                                                                       lr = 2e-3"
}

impl Args {
    pub fn run(self) -> Result<()> {
        let Resolved { preset, data, models, settings } = self.options.resolve("models")?;
        let models = self.models.or(models).unwrap_or_else(|| ["tango", "recurrent"].map(str::to_owned).into());
        let experiment = format!("compare {}", self.experiment);
        let default = || PathBuf::from(format!("runs/compare-{}-{preset}-{}", self.experiment, settings.seed));
        let out = self.options.out.clone().unwrap_or_else(default);
        crate::run::run(Plan { experiment, preset, settings, models }, &data, &out, self.options.restart)
    }
}
