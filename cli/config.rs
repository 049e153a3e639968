//! `kumiki config`.

use std::path::PathBuf;

use clap::Subcommand;
use clap::builder::PossibleValuesParser;
use kumiki_train::run::Plan;
use kumiki_train::settings::Settings;
use kumiki_train::zoo::{Suite, suite_of};
use kumiki_train::{Error, Result};
use serde_json::{Value, json};

use crate::options::preset_table;
use crate::output::text;
use crate::sources::{Origins, Resolved, Several, Sources};

/// Show settings and presets
#[derive(Subcommand)]
pub enum Command {
    Show(Box<Show>),
    Presets(Presets),
}

impl Command {
    pub fn run(self) -> Result<()> {
        match self {
            Command::Show(args) => args.run(),
            Command::Presets(args) => args.run(),
        }
    }
}

/// Print the settings that a run would have, as a file for --config, with where each is from
///
/// Takes the options of `train` and `compare` that are settings. What counts, last first: an option, the file, the preset;
/// of a run that is gone on with, its own settings instead of a preset.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki config show --preset small > mine.toml
  kumiki config show --config mine.toml --lr 1e-3
  kumiki config show --resume runs/mine                what a run has")]
pub struct Show {
    /// Whose presets [default: those of the first model in --config, else tango]
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(Suite::ALL.map(Suite::name)))]
    suite: Option<String>,
    /// The settings with which the run in this folder would go on
    #[arg(long, value_name = "DIR", conflicts_with = "suite")]
    resume: Option<PathBuf>,
    #[command(flatten)]
    several: Several,
    #[command(flatten)]
    sources: Sources,
}

impl Show {
    fn run(self) -> Result<()> {
        let old = match &self.resume {
            Some(folder) => Some((folder.as_path(), Plan::of_any_run(folder)?)),
            None => None,
        };
        let suite = self.suite.as_deref().map(Suite::named).transpose()?;
        let resolved = self.sources.resolve(
            &["model", "models"],
            Some(&self.several),
            old.as_ref().map(|(folder, plan)| (*folder, plan)),
            |model| suite.unwrap_or_else(|| model.map_or(Suite::Tango, suite_of)),
        )?;
        // `train` takes one model, `compare` several; the models of an `ablate` follow from its settings.
        let one = match &old {
            Some((_, plan)) if plan.experiment.starts_with("ablate ") => None,
            Some((_, plan)) => Some(plan.experiment.starts_with("train ")),
            None => Some(resolved.models.as_ref().is_some_and(|models| models.len() == 1)),
        };
        text(&file(&resolved, one)?)
    }
}

/// The settings as the text of a configuration. `one`: whether they are for a command of one model, if for one that takes
/// models.
fn file(resolved: &Resolved, one: Option<bool>) -> Result<String> {
    let Resolved { preset, corpora, seeds, models, settings, origins } = resolved;
    let several = |one: &str, many: &str, mut values: Vec<Value>| match values.len() {
        1 => (one.to_owned(), values.remove(0)),
        _ => (many.to_owned(), values.into()),
    };
    let texts = |all: &[String]| all.iter().map(|text| json!(text)).collect::<Vec<_>>();
    let mut lines = vec![("preset".to_owned(), json!(preset), "preset")];
    match (one, models) {
        (Some(true), Some(models)) => lines.push(("model".to_owned(), json!(models[0]), "models")),
        (Some(false), Some(models)) => lines.push(("models".to_owned(), json!(models), "models")),
        _ => {}
    }
    let (key, value) = several("data", "corpora", texts(corpora));
    lines.push((key, value, "corpora"));
    let all = settings.to_map();
    let keys = Settings::keys();
    for key in keys.iter().filter(|key| *key != "seed") {
        lines.push((key.clone(), all[key].clone(), key));
    }
    let (key, value) = several("seed", "seeds", seeds.iter().map(|seed| json!(seed)).collect());
    lines.push((key, value, "seeds"));
    let lines = lines.into_iter().map(|(key, value, origin)| Ok((line(&key, value)?, said(origins, origin))));
    let lines = lines.collect::<Result<Vec<_>>>()?;
    let width = lines.iter().map(|(line, _)| line.chars().count()).filter(|&n| n <= 40).max().unwrap_or(0);
    Ok(lines.iter().map(|(line, origin)| format!("{line:<width$}  # {origin}\n")).collect())
}

/// `key = value` in TOML.
fn line(key: &str, value: Value) -> Result<String> {
    let written = toml::Value::try_from(&value).map_err(|_| {
        let (most, option) = (i64::MAX, key.replace('_', "-"));
        Error::new(format!(
            "{key} {value} cannot be written as TOML, whose numbers end at {most}; leave it out and give it with --{option}"
        ))
    })?;
    Ok(format!("{key} = {written}"))
}

/// Where a value is from, for a comment: a path may have letters that would end it.
fn said(origins: &Origins, key: &str) -> String {
    let said = origins.get(key).map(ToString::to_string).unwrap_or_default();
    said.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// List the presets
#[derive(clap::Args)]
#[command(after_help = "`kumiki config show --preset NAME` prints all that a preset sets.")]
pub struct Presets {}

impl Presets {
    fn run(self) -> Result<()> {
        text(&preset_table())
    }
}
