//! [`Run`]: the folder of a run of `gp`.
//!
//! ```text
//! results.json                            settings, machine, floor, a row per model and seed; `finished` at the end
//! log.jsonl                               one line per step: the loss is a mean squared error, tokens are points
//! rmse.svg, functions.svg                 errors against the number of observed points; predictions of three functions
//! run.lock                                held while the run works
//! seed-<n>/<model>/model.safetensors
//! ```
//!
//! As for other runs, `results.json` is replaced whole after every model, and a folder without `finished` is never taken
//! for a result.

use std::fs;
use std::path::{Path, PathBuf};

use kumiki_models::accounting::block_params;
use serde::{Deserialize, Serialize};

use super::evaluate::{Floor, HeldOut};
use super::resume;
use super::settings::{Settings, model_names};
use super::train::{Trained, train_model};
use crate::compare::Event;
use crate::folder::{self, Found, LOCK, LOG, Lock};
use crate::log::Writer;
use crate::memory;
use crate::run::{Existing, Machine, refuse, size_note};
use crate::stop::Stop;
use crate::summary::Stat;
use crate::{Error, Result};

/// What `results.json` calls this experiment.
pub const EXPERIMENT: &str = "gp";

/// What was asked for: every model with every seed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// [`EXPERIMENT`].
    pub experiment: String,
    /// The preset that the settings started from.
    pub preset: String,
    /// The settings.
    pub settings: Settings,
    /// The seeds.
    pub seeds: Vec<u64>,
    /// The models, in the order of training.
    pub models: Vec<String>,
}

/// One training of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cell {
    /// The seed.
    pub seed: u64,
    /// The model.
    pub model: String,
}

impl std::fmt::Display for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}` with seed {}", self.model, self.seed)
    }
}

impl Cell {
    /// Where its model is put, seen from the run's folder.
    pub fn folder(&self) -> String {
        format!("seed-{}/{}", self.seed, self.model)
    }
}

impl Plan {
    /// Everything that can be known to be wrong before any work is done.
    ///
    /// # Errors
    /// As [`Settings::check`] and [`Settings::model`]; also without models or seeds, with one of them twice, or when the
    /// memory cannot do.
    pub fn check(&self) -> Result<()> {
        let Plan { settings, seeds, models, .. } = self;
        settings.check()?;
        if models.is_empty() || seeds.is_empty() {
            return Err(Error::new(format!(
                "a run needs at least one model and one seed. Known models: {}",
                model_names().join(", ")
            )));
        }
        let (rows, seq) = (settings.batch, settings.prior.points);
        let step = memory::Step { dtype: kumiki_tensor::DType::F32, rows, seq, accumulate: 1, recompute: false };
        for (i, model) in models.iter().enumerate() {
            step.check_regressor(model, &settings.model(model)?, "--batch, --points or --params")?;
            if models[..i].contains(model) {
                return Err(Error::new(format!("model `{model}` is named twice")));
            }
        }
        match seeds.iter().enumerate().find(|(i, seed)| seeds[..*i].contains(seed)) {
            Some((_, seed)) => Err(Error::new(format!("seed {seed} is named twice"))),
            None => Ok(()),
        }
    }

    /// A sentence for every model that cannot have about as many parameters as the others.
    fn sizes(&self) -> Result<Vec<String>> {
        let Settings { params, d_model, blocks, .. } = self.settings;
        let mut notes = vec![];
        for model in &self.models {
            let found = block_params(&self.settings.model(model)?.architecture);
            notes.extend(size_note(model, found, params, d_model, blocks));
        }
        Ok(notes)
    }

    /// Everything to train, in order.
    pub fn cells(&self) -> Vec<Cell> {
        let of = |&seed: &u64| self.models.iter().map(move |model| Cell { seed, model: model.clone() });
        self.seeds.iter().flat_map(of).collect()
    }
}

/// A model that is done.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Which one.
    #[serde(flatten)]
    pub cell: Cell,
    /// What it was trained on.
    pub machine: Machine,
    /// What was measured.
    #[serde(flatten)]
    pub trained: Trained,
}

/// One model over its seeds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The model.
    pub model: String,
    /// How many seeds are done.
    pub seeds: usize,
    /// Distinct parameters.
    pub params: usize,
    /// Root mean squared error over all predictions.
    pub rmse: Stat,
    /// Its mean over that of the exact posterior.
    pub ratio: f64,
    /// The mean of the errors after 0, 1, 2, … observed points.
    pub by_observed: Vec<f64>,
}

/// What a model failed with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure {
    /// Which one.
    #[serde(flatten)]
    pub cell: Cell,
    /// The sentence.
    pub error: String,
}

/// The contents of `results.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Results {
    /// Version of the program.
    pub kumiki: String,
    /// Whether everything that was planned is done.
    pub finished: bool,
    /// What was asked for.
    #[serde(flatten)]
    pub plan: Plan,
    /// The machine that wrote this last.
    pub machine: Machine,
    /// What the exact posterior makes of the held-out functions.
    pub floor: Floor,
    /// The trained models, in the order of the plan.
    pub rows: Vec<Row>,
    /// The same over seeds, in the order of the plan's models.
    pub summary: Vec<Summary>,
    /// Why the run ended early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<Failure>,
}

fn summarize(plan: &Plan, floor: &Floor, rows: &[Row]) -> Vec<Summary> {
    let of = |model: &String| {
        let mine: Vec<&Trained> = rows.iter().filter(|r| r.cell.model == *model).map(|r| &r.trained).collect();
        let rmse = Stat::of(mine.iter().map(|t| t.errors.rmse))?;
        let at = |i: usize| mine.iter().map(|t| t.errors.by_observed[i]).sum::<f64>() / mine.len() as f64;
        Some(Summary {
            model: model.clone(),
            seeds: mine.len(),
            params: mine[0].params,
            ratio: rmse.mean / floor.exact.rmse,
            by_observed: (0..floor.exact.by_observed.len()).map(at).collect(),
            rmse,
        })
    };
    plan.models.iter().filter_map(of).collect()
}

/// A run and its folder.
pub struct Run {
    /// What will stand in `results.json`.
    pub results: Results,
    /// Sentences that the user should see before it starts.
    pub notes: Vec<String>,
    /// Who may ask for a stop.
    pub stop: Stop,
    folder: PathBuf,
    held_out: HeldOut,
    log: Writer,
    lock: Lock,
}

impl Run {
    /// Takes possession of `folder`, which is made if need be, and measures the floor; `measuring` is called before that,
    /// which can take long.
    ///
    /// # Errors
    /// When the plan does not hold, the folder has a run and `existing` does not allow for it, one is still at work there,
    /// one cannot be resumed (it was asked something else, or its files are damaged), or it has files that are not a run's.
    pub fn begin(plan: Plan, folder: &Path, existing: Existing, measuring: &mut dyn FnMut(&Plan)) -> Result<Run> {
        plan.check()?;
        let resuming = |found: Found| existing == Existing::Resume && found != Found::Nothing;
        // Everything that can be wrong is found before a file is written.
        if resuming(refuse(folder, existing, false)?) {
            resume::read(folder)?.check(&plan)?;
        }
        let held_out = HeldOut::new(&plan.settings.prior, plan.settings.eval_functions, plan.settings.batch);
        let mut notes = plan.sizes()?;
        measuring(&plan);
        let floor = held_out.floor()?;
        fs::create_dir_all(folder).map_err(|e| Error::io("create the folder", folder, e))?;
        let lock = Lock::take(folder)?;
        // Once more, for another run may have come and gone since.
        let found = refuse(folder, existing, true)?;
        let log = folder.join(LOG);
        let (log, rows) = if resuming(found) {
            let old = resume::read(folder)?;
            old.check(&plan)?;
            notes.extend(old.notes(&plan));
            let rows = old.keep(folder)?;
            (Writer::append(log)?, rows)
        } else {
            folder::clear(folder)?;
            (Writer::create(log)?, vec![])
        };
        let (kumiki, machine) = (env!("CARGO_PKG_VERSION").to_owned(), Machine::here());
        let (finished, summary, failed) = (false, vec![], None);
        let results = Results { kumiki, finished, plan, machine, floor, rows, summary, failed };
        let mut run = Run { results, notes, stop: Stop::default(), folder: folder.to_owned(), held_out, log, lock };
        run.write()?;
        Ok(run)
    }

    /// What is still to be trained, in order.
    pub fn cells(&self) -> Vec<Cell> {
        let done = |cell: &Cell| self.results.rows.iter().any(|row| row.cell == *cell);
        self.results.plan.cells().into_iter().filter(|cell| !done(cell)).collect()
    }

    /// Trains one of [`Run::cells`] and adds its row, or notes why there is none. Tells whether it went to its end.
    ///
    /// # Errors
    /// As [`train_model`].
    pub fn train(&mut self, cell: &Cell, show: &mut dyn FnMut(Event)) -> Result<bool> {
        let folder = self.folder.join(cell.folder());
        let settings = &self.results.plan.settings;
        match train_model(cell, settings, &self.held_out, &mut self.log, &folder, &self.stop, show) {
            Ok(None) => Ok(false),
            Ok(Some(trained)) => {
                self.results.rows.push(Row { cell: cell.clone(), machine: Machine::here(), trained });
                self.write().map(|()| true)
            }
            Err(e) => {
                self.results.failed = Some(Failure { cell: cell.clone(), error: e.to_string() });
                // What cannot be written now, on a full disk say, must not hide why it failed.
                let _ = self.write();
                Err(e)
            }
        }
    }

    /// Draws the pictures and marks the run as finished.
    ///
    /// # Errors
    /// When a model cannot be read back or a file not be written.
    pub fn finish(&mut self) -> Result<()> {
        #[cfg(feature = "plots")]
        super::picture::draw(&self.results, &self.folder)?;
        self.results.finished = true;
        self.write()?;
        // A finished run needs no lock: nobody may replace it. That the file cannot be removed harms nobody.
        let _ = fs::remove_file(self.folder.join(LOCK));
        Ok(())
    }

    /// Replaces `results.json`. A folder that was removed meanwhile is made again.
    fn write(&mut self) -> Result<()> {
        if !self.folder.join(LOCK).exists() {
            fs::create_dir_all(&self.folder).map_err(|e| Error::io("create the folder", &self.folder, e))?;
            self.lock = Lock::take(&self.folder)?;
        }
        let results = &mut self.results;
        let order = results.plan.cells();
        results.rows.sort_by_key(|row| order.iter().position(|cell| *cell == row.cell));
        results.summary = summarize(&results.plan, &results.floor, &results.rows);
        folder::write_results(&self.folder, results)
    }
}
