//! `kumiki cem energy`, `kumiki cem steps`.

use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;
use clap::{ArgGroup, Subcommand};
use kumiki::models::Model;
use kumiki::tensor::DType;
use kumiki_train::cem::{self, Energies, Found, energies, losses};
use kumiki_train::chart::{self, Line, Mark, Panel, Scale};
use kumiki_train::data::Data;
use kumiki_train::settings::{PRESETS, Settings};
use kumiki_train::validation::Validation;
use kumiki_train::{Error, Result, checkpoint};
use serde_json::json;

use crate::eval::settings_of;
use crate::options::model_name;
use crate::output::{self, in_pool, line, remark};
use crate::table::{count, table};

/// Look into a model of Causal Energy Minimization: how its energies fall, what steps are worth
#[derive(Subcommand)]
pub enum Command {
    Energy(Energy),
    Steps(Steps),
}

impl Command {
    pub fn run(self) -> Result<()> {
        match self {
            Command::Energy(args) => in_pool(|| args.run()),
            Command::Steps(args) => in_pool(|| args.run()),
        }
    }
}

/// What both commands look at.
#[derive(clap::Args)]
#[command(group = ArgGroup::new("subject").required(true).args(["checkpoint", "model"]))]
struct Subject {
    /// A folder with a trained model, or the file in it
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// A fresh model instead, by its name
    #[arg(long, value_name = "NAME", value_parser = model_name)]
    model: Option<String>,
    /// Sizes of the fresh model
    #[arg(long, default_value = "nano", value_parser = PossibleValuesParser::new(PRESETS))]
    #[arg(conflicts_with = "checkpoint")]
    preset: String,
    /// A text file, a folder of texts, or `math`; its held-out part is read
    #[arg(long, value_name = "PATH|math", default_value = "math")]
    data: String,
    /// Tokens to read, at most
    #[arg(long, value_name = "N", default_value_t = 16_384, allow_negative_numbers = true)]
    tokens: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Subject {
    /// Model, text, and what to call the model.
    fn open(&self) -> Result<(Model, Validation, String)> {
        let open = |settings: &Settings| Data::open(&self.data, settings.val_fraction, settings.seq);
        let (model, settings, name, data) = match &self.checkpoint {
            Some(path) => {
                let found = checkpoint::load(path, DType::F32)?;
                let settings = settings_of(path, found.notes.get("settings"))?;
                let data = open(&settings)?;
                let whose = format!("the model in `{}`", path.display());
                data.check_tokenizer(&whose, found.tokenizer.name(), found.tokenizer.vocab())?;
                let name = found.notes.get("model").cloned().unwrap_or_else(|| "?".to_owned());
                (found.model, settings, output::plain(&name), data)
            }
            None => {
                let name = self.model.clone().unwrap_or_default();
                let settings = Settings::preset(&self.preset)?;
                let data = open(&settings)?;
                let config = settings.model(&name, data.tokenizer.vocab())?;
                let model = Model::new(&config, settings.seed, DType::F32);
                (model.map_err(|e| Error::new(e.to_string()))?, settings, format!("{name}, fresh"), data)
            }
        };
        if self.tokens == 0 {
            return Err(Error::new("--tokens must be at least 1, found 0"));
        }
        let rows = settings.batch.min((1 << 20) / settings.seq).max(1);
        let windows = data.validation(rows, settings.seq, Some(self.tokens))?;
        let windows =
            windows.ok_or_else(|| Error::new(data.note.unwrap_or_else(|| "nothing is held out".to_owned())))?;
        Ok((model, windows, name))
    }
}

fn picture(path: &Path, title: &str, panels: &[Panel]) -> Result<()> {
    chart::write(path, title, panels)?;
    remark(&format!("picture: {}", path.display()));
    Ok(())
}

/// Show the mean energy of every layer before and after each of its steps
///
/// Energies of different layers and halves are on scales of their own: what counts is how each falls.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki cem energy --checkpoint runs/compare-cem-tiny-0/cem-t2 --steps 6
  kumiki cem energy --model cem-t2 --preset tiny --data book.txt --out energy.svg")]
pub struct Energy {
    #[command(flatten)]
    subject: Subject,
    /// Steps of every descent [default: the model's own]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    steps: Option<usize>,
    /// Where to draw the picture
    #[arg(long, value_name = "FILE.svg", default_value = "energy.svg")]
    out: PathBuf,
}

impl Energy {
    fn run(self) -> Result<()> {
        chart::check(&self.out)?;
        let (mut model, windows, name) = self.subject.open()?;
        let rows = energies(&mut model, &windows, self.steps)?;
        let panel = |half: &str, title: &str| Panel {
            title: format!("{title}: mean energy, less that before the first step"),
            x: "steps".into(),
            x_scale: Scale::Linear,
            scale: Scale::Linear,
            lines: rows.iter().filter(|row| row.half == half).map(fall).collect(),
        };
        let panels = [panel("attention", "attention"), panel("mlp", "MLP")];
        let panels: Vec<Panel> = panels.into_iter().filter(|panel| !panel.lines.is_empty()).collect();
        if self.subject.json {
            output::json(&json!({"model": name, "tokens": windows.tokens(), "energies": rows}))?;
        } else {
            let most = rows.iter().map(|row| row.energies.len()).max().unwrap_or(0);
            let mut header = vec!["half".to_owned(), "layer".to_owned(), "at the start".to_owned()];
            header.extend((1..most).map(|step| if step == 1 { "after 1 step".into() } else { step.to_string() }));
            let cells = |row: &Energies| {
                let mut cells = vec![row.half.clone(), row.layer.to_string()];
                cells.extend(row.energies.iter().map(|energy| format!("{energy:.4}")));
                cells
            };
            let header: Vec<&str> = header.iter().map(String::as_str).collect();
            line(&table(&header, &rows.iter().map(cells).collect::<Vec<_>>()))?;
        }
        picture(&self.out, &format!("Energies of {name} on {}", short(&self.subject.data)), &panels)
    }
}

/// The last part of a path: the picture may be shown to others.
fn short(data: &str) -> String {
    Path::new(data).file_name().map_or(data.into(), |name| name.to_string_lossy().into_owned())
}

fn fall(row: &Energies) -> Line {
    let first = row.energies.first().copied().unwrap_or(0.0);
    let points = row.energies.iter().enumerate().map(|(step, energy)| (step as f64, energy - first)).collect();
    Line { name: format!("layer {}", row.layer), points, ..Line::default() }
}

/// Measure the loss with other numbers of steps than in training
///
/// The model's descents take 1, 2, 3 and so on steps; then at most that many, and a token stops once its energy falls by
/// less than a tolerance in a step.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki cem steps --checkpoint runs/compare-cem-tiny-0/cem-t2 --data book.txt
  kumiki cem steps --checkpoint runs/compare-cem-tiny-0/cem-t2 --energy-tol 1,0.3,0.1")]
pub struct Steps {
    #[command(flatten)]
    subject: Subject,
    /// The most steps
    #[arg(long, value_name = "N", default_value_t = 8, allow_negative_numbers = true)]
    most: usize,
    /// Tolerances to stop at, separated by commas
    #[arg(long, value_name = "X,X", value_delimiter = ',', allow_hyphen_values = true)]
    energy_tol: Vec<f64>,
    /// Where to draw the picture
    #[arg(long, value_name = "FILE.svg", default_value = "steps.svg")]
    out: PathBuf,
}

impl Steps {
    fn run(self) -> Result<()> {
        chart::check(&self.out)?;
        let limit = kumiki::models::MAX_DESCENT_STEPS;
        if !(1..=limit).contains(&self.most) {
            return Err(Error::new(format!("--most must be from 1 to {limit}, found {}", self.most)));
        }
        let (mut model, windows, name) = self.subject.open()?;
        let found = losses(&mut model, &windows, self.most, &self.energy_tol, |one| {
            remark(&format!("{}: NLL {:.4}, {:.2} steps a token", what(one), one.nll, one.mean_steps));
            Ok(())
        })?;
        if self.subject.json {
            output::json(&json!({"model": name, "tokens": windows.tokens(), "losses": found}))?;
        } else {
            let cells = |one: &Found| {
                vec![
                    what(one),
                    format!("{:.3}", one.mean_steps),
                    format!("{:.4}", one.nll),
                    format!("{:.4}", one.nll.exp()),
                ]
            };
            let header = ["descents", "steps of a token", "NLL", "perplexity"];
            line(&table(&header, &found.iter().map(cells).collect::<Vec<_>>()))?;
        }
        let points = |adaptive| {
            found.iter().filter(|f| f.tolerance.is_some() == adaptive).map(|f| (f.mean_steps, f.nll)).collect()
        };
        let (fixed, mut adaptive): (Vec<_>, Vec<_>) = (points(false), points(true));
        adaptive.sort_by(|a: &(f64, f64), b| a.0.total_cmp(&b.0));
        let mut lines = vec![Line { name: "as many for all tokens".into(), points: fixed, ..Line::default() }];
        if !adaptive.is_empty() {
            lines.push(Line {
                name: "until the energy falls too little".into(),
                points: adaptive,
                mark: Mark::Dots,
                ..Line::default()
            });
        }
        let panel = Panel {
            title: format!("loss on {} (nats per token)", short(&self.subject.data)),
            x: "steps of a token in a descent, mean".into(),
            x_scale: Scale::Linear,
            scale: Scale::Linear,
            lines,
        };
        picture(&self.out, &format!("Steps at inference: {name}"), &[panel])
    }
}

fn what(one: &Found) -> String {
    match one.tolerance {
        None => count(one.steps as u64, "step"),
        Some(tolerance) => format!("at most {}, tolerance {}", one.steps, cem::short(tolerance)),
    }
}
