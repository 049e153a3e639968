//! `kumiki train`.

use std::path::PathBuf;

use kumiki_train::run::Plan;
use kumiki_train::zoo::{Suite, model_names, suite_of};
use kumiki_train::{Error, Result};

use crate::options::{RunOptions, model_name, preset_table};
use crate::sources::Resolved;

/// Train one model
///
/// The same as `compare` with a single model: same options, same files.
#[derive(clap::Args)]
#[command(after_help = after_help())]
pub struct Args {
    /// The model; `kumiki compare --help` says what they are
    #[arg(long, value_name = "NAME", value_parser = model_name)]
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
  kumiki train --model tango --steps 20 --stop-after 13 --out runs/some
  kumiki train --resume runs/some                      the other 7 steps
  kumiki train --model cem-mlp-t2 --cem-mlp cem,plain,cem,plain
  kumiki eval --checkpoint runs/book --data book.txt
  kumiki generate --checkpoint runs/book --prompt 'Once '"
}

impl Args {
    pub fn run(self) -> Result<()> {
        let old = self.options.resumed("train ")?;
        let Resolved { preset, corpora, seeds, models, settings, .. } = {
            let suite = |file: Option<&str>| self.model.as_deref().or(file).map_or(Suite::Tango, suite_of);
            let old = old.as_ref().map(|(folder, plan)| (folder.as_path(), plan));
            self.options.sources.resolve(&["model"], None, old, suite)?
        };
        let models = self.model.map(|model| vec![model]).or(models).ok_or_else(|| {
            Error::new(format!("which model? Say so with --model. Known: {}", model_names().join(", ")))
        })?;
        let default = || PathBuf::from(format!("runs/train-{}-{preset}-{}", models[0], settings.seed));
        let out = self.options.folder()?.unwrap_or_else(default);
        let experiment = format!("train {}", models[0]);
        let plan = Plan { experiment, preset, settings, corpora, seeds, models };
        crate::run::run(plan, &out, &self.options).map(drop)
    }
}
