//! [`Run`]: the folder of a run, from its first file to the mark that it is finished.
//!
//! ```text
//! results.json              settings, data, machine, one row per trained model; `finished` is true at the very end
//! log.jsonl                 one line per step
//! curves.svg                the log as a picture
//! run.lock                  held while the run works
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

use crate::batches::Source;
use crate::compare::{Event, ModelResult, train_model, unigram_entropy};
use crate::data::Data;
use crate::folder::{self, Found, LOCK, LOG, Lock, RESULTS};
use crate::log::Writer;
use crate::memory;
use crate::settings::{MODELS, Settings};
use crate::tokenizer::ByteTokenizer;
use crate::{Error, Result};

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
    /// As [`Settings::check`] and [`Settings::model`]; also without models, with one twice, or when the memory cannot do.
    pub fn check(&self) -> Result<()> {
        self.settings.check()?;
        let Settings { batch, seq, accumulate, checkpoint_activations, .. } = self.settings;
        let dtype = self.settings.dtype()?;
        let step = memory::Step { dtype, rows: batch, seq, accumulate, recompute: checkpoint_activations };
        if self.models.is_empty() {
            return Err(Error::new(format!("there is no model to train. Known: {}", MODELS.join(", "))));
        }
        for (i, model) in self.models.iter().enumerate() {
            let config = self.settings.model(model, ByteTokenizer::VOCAB)?;
            step.check(model, &config, "--batch, --seq or --params")?;
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

/// Tokens of `math` from which the entropy of its bytes is taken.
const ENTROPY_TOKENS: u64 = 1 << 20;

/// A run and its folder.
pub struct Run {
    /// What will stand in `results.json`.
    pub results: Results,
    folder: PathBuf,
    data: Data,
    log: Writer,
    lock: Lock,
}

/// What `folder` holds, or why it is refused. `locked`: whether this run has its lock already.
fn refuse(folder: &Path, restart: bool, locked: bool) -> Result<Found> {
    let found = folder::look(folder)?;
    let name = folder.display();
    let why = match &found {
        Found::Nothing => return Ok(found),
        Found::Unfinished => {
            // Who works there says more than that the run is not finished.
            if !locked {
                Lock::check(folder)?;
            }
            if restart {
                return Ok(found);
            }
            format!("`{name}` holds an unfinished run; replace it with --restart or choose another folder with --out")
        }
        Found::Finished => {
            format!("`{name}` holds a finished run, which is never overwritten; choose another folder with --out")
        }
        Found::Other(first) => format!(
            "`{name}` is not empty and holds no run of kumiki's (it has `{first}`); choose another folder with --out"
        ),
    };
    Err(Error::new(why))
}

impl Run {
    /// Takes possession of `folder`, which is made if need be. `restart` allows to replace an unfinished run in it.
    ///
    /// # Errors
    /// When the plan does not hold, or the folder has a finished run, an unfinished one without `restart`, one that is
    /// still at work, or files that are not a run's.
    pub fn begin(plan: Plan, data: Data, folder: &Path, restart: bool) -> Result<Run> {
        plan.check()?;
        refuse(folder, restart, false)?;
        let &Settings { batch, seq, seed, eval_tokens, .. } = &plan.settings;
        let validation = data.validation(batch, seq, Some(eval_tokens))?;
        // The endless text has the same entropy however much of it is read.
        let enough = eval_tokens.min(ENTROPY_TOKENS);
        let for_entropy = match &data.val {
            Some(Source::Math(_)) => data.validation(batch, seq, Some(enough))?,
            _ => validation.clone(),
        };
        let facts = DataFacts {
            name: data.name.clone(),
            val_tokens: validation.as_ref().map_or(0, |v| v.tokens()),
            unigram_nll: for_entropy.as_ref().map(unigram_entropy),
        };
        // The last thing that can be wrong with the data, before a file is written.
        data.batches(batch, seq, seed)?;
        fs::create_dir_all(folder).map_err(|e| Error::io("create the folder", folder, e))?;
        let (kumiki, machine) = (env!("CARGO_PKG_VERSION"), Machine::here());
        let results = Results { kumiki, finished: false, plan, data: facts, machine, rows: vec![], failed: None };
        let lock = Lock::take(folder)?;
        // Once more, for another run may have come and gone since.
        if refuse(folder, restart, true)? == Found::Unfinished {
            folder::clear(folder)?;
        }
        let log = Writer::create(folder.join(LOG))?;
        let mut run = Run { results, folder: folder.to_owned(), data, log, lock };
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
        self.write()?;
        // A finished run needs no lock: nobody may replace it. That the file cannot be removed harms nobody.
        let _ = fs::remove_file(self.folder.join(LOCK));
        Ok(())
    }

    #[cfg(feature = "plots")]
    fn draw(&self) -> Result<()> {
        let Plan { experiment, preset, .. } = &self.results.plan;
        let curves = crate::plot::Curve::from_records(&crate::log::read(self.folder.join(LOG))?);
        // The path is in results.json; the picture may be shown to others.
        let name =
            Path::new(&self.data.name).file_name().map_or(self.data.name.as_str().into(), |n| n.to_string_lossy());
        let title = format!("{experiment}, preset {preset}, on {name}");
        crate::plot::write(self.folder.join(folder::CURVES), &title, &curves)
    }

    #[cfg(not(feature = "plots"))]
    fn draw(&self) -> Result<()> {
        Ok(())
    }

    /// Replaces `results.json`, whole or not at all. A folder that was removed meanwhile is made again.
    fn write(&mut self) -> Result<()> {
        if !self.folder.join(LOCK).exists() {
            fs::create_dir_all(&self.folder).map_err(|e| Error::io("create the folder", &self.folder, e))?;
            self.lock = Lock::take(&self.folder)?;
        }
        let path = self.folder.join(RESULTS);
        let partial = self.folder.join(folder::partial(RESULTS));
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
