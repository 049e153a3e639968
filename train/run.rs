//! [`Run`]: the folder of a run, from its first file to the mark that it is finished.
//!
//! ```text
//! results.json              settings, data, machine, one row per trained model; `finished` is true at the very end
//! log.jsonl                 one line per step
//! curves.svg                the log as a picture
//! <model>/model.safetensors
//! ```
//!
//! `results.json` is written first and replaced whole after every model, so that rows survive whatever happens to the
//! next model, and a folder without `finished` is never taken for a result.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use kumiki_ops::simd;
use kumiki_tensor::threads;
use serde::Serialize;

use crate::compare::{Event, ModelResult, train_model, unigram_entropy};
use crate::data::Data;
use crate::log::Writer;
use crate::settings::{MODELS, Settings};
use crate::{Error, Result, checkpoint};

/// What was asked for.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// The command, as `compare tango`.
    pub experiment: String,
    /// The preset that the settings started from.
    pub preset: String,
    /// The settings.
    pub settings: Settings,
    /// The models, in the order of training.
    pub models: Vec<String>,
}

impl Plan {
    /// Everything that can be known to be wrong before any work is done.
    ///
    /// # Errors
    /// As [`Settings::model`], [`Settings::step_config`] and [`Settings::dtype`]; also without models or with one twice.
    pub fn check(&self) -> Result<()> {
        let Settings { batch, seq, accumulate, .. } = self.settings;
        for (key, size) in [("batch", batch), ("seq", seq), ("accumulate", accumulate)] {
            if !(1..=1 << 20).contains(&size) {
                return Err(Error::new(format!("{key} must be from 1 to {}, found {size}", 1 << 20)));
            }
        }
        self.settings.step_config()?;
        self.settings.dtype()?;
        if self.models.is_empty() {
            return Err(Error::new(format!("there is no model to train. Known: {}", MODELS.join(", "))));
        }
        for (i, model) in self.models.iter().enumerate() {
            self.settings.model(model, 256)?;
            if self.models[..i].contains(model) {
                return Err(Error::new(format!("model `{model}` is named twice")));
            }
        }
        Ok(())
    }
}

/// What the numbers were measured on.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// Vector instructions in use.
    pub simd: String,
    /// Threads in use.
    pub threads: usize,
    /// Operating system.
    pub os: &'static str,
    /// Processor family.
    pub arch: &'static str,
}

impl Machine {
    /// This one.
    pub fn here() -> Machine {
        let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
        Machine { simd: simd::level().to_string(), threads: threads::current_threads(), os, arch }
    }
}

/// What is known of the text.
#[derive(Clone, Debug, Serialize)]
pub struct DataFacts {
    /// A path or `math`.
    pub name: String,
    /// Target tokens of an evaluation.
    pub val_tokens: u64,
    /// Entropy of single tokens of the held-out text, in nats: what a model must fall below.
    pub unigram_nll: Option<f64>,
}

/// What a model failed with.
#[derive(Clone, Debug, Serialize)]
pub struct Failure {
    /// Its name.
    pub model: String,
    /// The sentence.
    pub error: String,
}

/// The contents of `results.json`.
#[derive(Clone, Debug, Serialize)]
pub struct Results {
    /// Version of the program.
    pub kumiki: &'static str,
    /// Whether everything that was planned is done.
    pub finished: bool,
    /// What was asked for.
    #[serde(flatten)]
    pub plan: Plan,
    /// The text.
    pub data: DataFacts,
    /// The machine.
    pub machine: Machine,
    /// The trained models.
    pub rows: Vec<ModelResult>,
    /// Why the run ended early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<Failure>,
}

const RESULTS: &str = "results.json";
const LOG: &str = "log.jsonl";
const CURVES: &str = "curves.svg";

/// A run and its folder.
pub struct Run {
    /// What will stand in `results.json`.
    pub results: Results,
    folder: PathBuf,
    data: Data,
    log: Writer,
}

/// What a folder holds.
enum Found {
    Nothing,
    Finished,
    Unfinished,
    Other(String),
}

fn look(folder: &Path) -> Result<Found> {
    match fs::metadata(folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Found::Nothing),
        Err(e) => return Err(Error::io("open the folder", folder, e)),
        Ok(meta) if !meta.is_dir() => {
            return Err(Error::new(format!("`{}` is a file; --out needs a folder", folder.display())));
        }
        Ok(_) => {}
    }
    if let Ok(bytes) = fs::read(folder.join(RESULTS))
        && let Ok(results) = serde_json::from_slice::<serde_json::Value>(&bytes)
        && let Some(finished) = results["finished"].as_bool()
    {
        return Ok(if finished { Found::Finished } else { Found::Unfinished });
    }
    let mut entries = fs::read_dir(folder).map_err(|e| Error::io("read the folder", folder, e))?;
    Ok(entries.next().map_or(Found::Nothing, |entry| {
        Found::Other(entry.map_or_else(|e| e.to_string(), |entry| entry.file_name().to_string_lossy().into_owned()))
    }))
}

/// Removes the files of a run, and nothing else.
fn clear(folder: &Path) -> Result<()> {
    let models = MODELS.map(|model| folder.join(model).join(checkpoint::MODEL_FILE));
    for file in models.into_iter().chain([LOG, CURVES, RESULTS].map(|name| folder.join(name))) {
        match fs::remove_file(&file) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("remove", &file, e)),
            _ => {}
        }
    }
    Ok(())
}

impl Run {
    /// Takes possession of `folder`, which is made if need be. `restart` allows to replace an unfinished run in it.
    ///
    /// # Errors
    /// When the plan does not hold, or the folder has a finished run, an unfinished one without `restart`, or files that
    /// are not a run's.
    pub fn begin(plan: Plan, data: Data, folder: &Path, restart: bool) -> Result<Run> {
        plan.check()?;
        let name = folder.display();
        match look(folder)? {
            Found::Nothing => {}
            Found::Finished => {
                return Err(Error::new(format!(
                    "`{name}` holds a finished run, which is never overwritten; choose another folder with --out"
                )));
            }
            Found::Unfinished if restart => clear(folder)?,
            Found::Unfinished => {
                return Err(Error::new(format!(
                    "`{name}` holds an unfinished run; replace it with --restart or choose another folder with --out"
                )));
            }
            Found::Other(first) => {
                return Err(Error::new(format!(
                    "`{name}` is not empty and holds no run of kumiki's (it has `{first}`); choose another folder with --out"
                )));
            }
        }
        let &Settings { batch, seq, seed, eval_tokens, .. } = &plan.settings;
        let validation = data.validation(batch, seq, Some(eval_tokens))?;
        let facts = DataFacts {
            name: data.name.clone(),
            val_tokens: validation.as_ref().map_or(0, |v| v.tokens()),
            unigram_nll: validation.as_ref().map(unigram_entropy),
        };
        // The last thing that can be wrong with the data, before a file is written.
        data.batches(batch, seq, seed)?;
        fs::create_dir_all(folder).map_err(|e| Error::io("create the folder", folder, e))?;
        let (kumiki, machine) = (env!("CARGO_PKG_VERSION"), Machine::here());
        let results = Results { kumiki, finished: false, plan, data: facts, machine, rows: vec![], failed: None };
        // The log first: of two runs that start at once only one can create it.
        let log = Writer::create(folder.join(LOG))?;
        let run = Run { results, folder: folder.to_owned(), data, log };
        run.write()?;
        Ok(run)
    }

    /// Trains the model `name` and adds its row, or notes why there is none.
    ///
    /// # Errors
    /// As [`train_model`].
    pub fn train(&mut self, name: &str, show: &mut dyn FnMut(Event)) -> Result<()> {
        let folder = self.folder.join(name);
        match train_model(name, &self.results.plan.settings, &self.data, &mut self.log, &folder, show) {
            Ok(row) => {
                self.results.rows.push(row);
                self.write()
            }
            Err(e) => {
                self.results.failed = Some(Failure { model: name.to_owned(), error: e.to_string() });
                self.write()?;
                self.draw()?;
                Err(e)
            }
        }
    }

    /// Draws the curves and marks the run as finished.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn finish(&mut self) -> Result<()> {
        self.draw()?;
        self.results.finished = true;
        self.write()
    }

    #[cfg(feature = "plots")]
    fn draw(&self) -> Result<()> {
        let Plan { experiment, preset, .. } = &self.results.plan;
        let curves = crate::plot::Curve::from_records(&crate::log::read(self.folder.join(LOG))?);
        let title = format!("{experiment}, preset {preset}, on {}", self.data.name);
        crate::plot::write(self.folder.join(CURVES), &title, &curves)
    }

    #[cfg(not(feature = "plots"))]
    fn draw(&self) -> Result<()> {
        Ok(())
    }

    /// Replaces `results.json`, whole or not at all.
    fn write(&self) -> Result<()> {
        let path = self.folder.join(RESULTS);
        let partial = self.folder.join("results.json.partial");
        let text = serde_json::to_string_pretty(&self.results)
            .map_err(|e| Error::new(format!("cannot write the results: {e}")))?;
        let replace = || {
            let mut file = fs::File::create(&partial)?;
            file.write_all(text.as_bytes())?;
            file.write_all(b"\n")?;
            file.sync_all()?;
            fs::rename(&partial, &path)
        };
        replace().map_err(|e| Error::io("write the results", &path, e))
    }
}
