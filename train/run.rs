//! [`Run`]: the folder of a run, from its first file to the mark that it is finished.
//!
//! ```text
//! results.json              settings, data, machine, one row per trained model; `finished` is true at the very end
//! log.jsonl                 one line per step
//! curves.svg, curves.png    the log as a picture; of several corpora one each, curves-<corpus>.svg
//! events/                   event files for TensorBoard, if they were asked for
//! run.lock                  held while the run works
//! <model>/model.safetensors                 a finished model
//! <model>/step-<n>/                         saves of a training, see [`crate::saves`]
//! <corpus>/seed-<n>/<model>/                instead, if there are several corpora or seeds
//! ```
//!
//! `results.json` is written first and replaced whole after every model, so that rows survive whatever happens to the
//! next model, and a folder without `finished` is never taken for a result. Rows say in which folder their model is: a run
//! that is extended leaves finished models where they are.

use std::fs;
use std::path::{Path, PathBuf};

use kumiki_ops::simd;
use kumiki_tensor::threads;
use serde::{Deserialize, Serialize};

use crate::batches::Source;
use crate::compare::{Event, ModelResult, unigram_entropy};
use crate::data::{Data, short_name, vocab_of};
use crate::folder::{self, Found, LOCK, LOG, Lock, RESULTS};
use crate::grid::run::EXPERIMENT;
use crate::kinds::Kind;
use crate::log::Writer;
use crate::memory;
use crate::resume;
use crate::settings::Settings;
use crate::summary::{Summary, summarize};
use crate::tokenizer::ByteTokenizer;
use crate::training::{Keeping, Outcome, train_model};
use crate::zoo::model_names;
use crate::{Error, Result};

/// What was asked for: every model on every corpus with every seed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// The command, as `compare tango`.
    pub experiment: String,
    /// The preset that the settings started from.
    pub preset: String,
    /// The settings; their seed is the first of `seeds`.
    pub settings: Settings,
    /// The corpora: paths or `math`.
    pub corpora: Vec<String>,
    /// The seeds.
    pub seeds: Vec<u64>,
    /// The models, in the order of training.
    pub models: Vec<String>,
}

/// One training of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    /// The corpus.
    pub corpus: String,
    /// The seed.
    pub seed: u64,
    /// The model.
    pub model: String,
}

impl std::fmt::Display for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}` on `{}` with seed {}", self.model, self.corpus, self.seed)
    }
}

/// What to do with a run that is in the folder already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Leave it alone: an error.
    Refuse,
    /// Replace it, unless it is finished.
    Restart,
    /// Keep what is finished and do the rest.
    Resume,
}

impl Plan {
    /// What the run in `folder` was asked for, whose experiment begins with `experiment`.
    ///
    /// # Errors
    /// When there is no such run, or its results are damaged.
    pub fn of_run(folder: &Path, experiment: &str) -> Result<Plan> {
        Plan::found(folder, |found| found.starts_with(experiment), experiment.trim())
    }

    /// As [`Plan::of_run`], of whatever command trains models on corpora.
    ///
    /// # Errors
    /// As there.
    pub fn of_any_run(folder: &Path) -> Result<Plan> {
        let commands = ["train", "compare", "ablate", EXPERIMENT];
        let wanted = |found: &str| commands.contains(&found.split(' ').next().unwrap_or_default());
        Plan::found(folder, wanted, &commands.join("`, `"))
    }

    fn found(folder: &Path, wanted: impl Fn(&str) -> bool, experiment: &str) -> Result<Plan> {
        let results: Results = resume::results_of(folder, wanted, experiment)?;
        match results.plan.models.is_empty() {
            false => Ok(results.plan),
            true => Err(resume::unusable(&folder.join(RESULTS), &"it names no model")),
        }
    }

    /// Everything that can be known to be wrong before any work is done.
    ///
    /// # Errors
    /// As [`Settings::check`] and [`Settings::model`]; also without models, with a model, corpus or seed twice, with
    /// corpora that cannot be told apart, or when the memory cannot do.
    pub fn check(&self) -> Result<()> {
        self.settings.check()?;
        let Settings { batch, seq, accumulate, checkpoint_activations, .. } = self.settings;
        let dtype = self.settings.dtype()?;
        let step = memory::Step { dtype, rows: batch, seq, accumulate, recompute: checkpoint_activations };
        if self.models.is_empty() {
            return Err(Error::new(format!("there is no model to train. Known: {}", model_names().join(", "))));
        }
        let vocabs = self.vocabs()?;
        for (i, model) in self.models.iter().enumerate() {
            for &vocab in &vocabs {
                let config = self.settings.model(model, vocab)?;
                step.check(model, &config, "--batch, --seq or --params")?;
            }
            self.settings.sampling(model).map_err(|e| Error::new(format!("model `{model}`: {e}")))?;
            if self.models[..i].contains(model) {
                return Err(Error::new(format!("model `{model}` is named twice")));
            }
        }
        if let Some((_, seed)) = self.seeds.iter().enumerate().find(|(i, seed)| self.seeds[..*i].contains(seed)) {
            return Err(Error::new(format!("seed {seed} is named twice")));
        }
        if self.seeds.is_empty() || self.corpora.is_empty() {
            return Err(Error::new("a run needs at least one corpus and one seed"));
        }
        self.check_corpora()
    }

    fn check_corpora(&self) -> Result<()> {
        let mut shorts: Vec<String> = Vec::new();
        for name in &self.corpora {
            if name.is_empty() {
                return Err(Error::new("the name of a corpus is empty; expected a path or `math`"));
            }
            // Some file systems do not tell cases apart.
            let short = short_name(name)?.to_lowercase();
            if let Some(at) = shorts.iter().position(|other| *other == short) {
                let other = &self.corpora[at];
                return Err(Error::new(match name == other {
                    true => format!("corpus `{name}` is named twice"),
                    false => format!(
                        "corpora `{other}` and `{name}` have the same last name `{short}`, which names their folders; \
                         rename one of them"
                    ),
                }));
            }
            if self.is_wide() && (folder::is_own(&short) || short.starts_with(LOCK) || short == folder::EVENTS) {
                return Err(Error::new(format!(
                    "corpus `{name}` has the name of a file that the run writes; rename it"
                )));
            }
            shorts.push(short);
        }
        Ok(())
    }

    /// The sizes of the vocabularies of the corpora, each once; those of bytes where there is no corpus yet.
    fn vocabs(&self) -> Result<Vec<usize>> {
        let mut all = self.corpora.iter().map(|name| vocab_of(name)).collect::<Result<Vec<_>>>()?;
        all.sort_unstable();
        all.dedup();
        Ok(if all.is_empty() { vec![ByteTokenizer::VOCAB] } else { all })
    }

    /// A sentence for every model that cannot have about as many parameters as the others.
    fn sizes(&self) -> Result<Vec<String>> {
        let Settings { params, d_model, blocks, .. } = self.settings;
        let mut notes = vec![];
        let vocabs = self.vocabs()?;
        for model in self.models.iter().filter(|model| self.settings.sizes(model)) {
            for &vocab in &vocabs {
                let config = self.settings.model(model, vocab)?;
                let note = size_note(model, config.block_params(), params, d_model, blocks);
                notes.extend(note.filter(|note| !notes.contains(note)));
            }
        }
        Ok(notes)
    }

    /// Whether there are several corpora or seeds.
    pub fn is_wide(&self) -> bool {
        self.corpora.len() * self.seeds.len() > 1
    }

    /// Everything to train, in order.
    pub fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for corpus in &self.corpora {
            for &seed in &self.seeds {
                cells.extend(self.models.iter().map(|model| Cell {
                    corpus: corpus.clone(),
                    seed,
                    model: model.clone(),
                }));
            }
        }
        cells
    }

    /// Where a new model of this plan is put, seen from the run's folder.
    pub(crate) fn folder_of(&self, cell: &Cell) -> Result<String> {
        if !self.is_wide() {
            return Ok(cell.model.clone());
        }
        Ok(format!("{}/seed-{}/{}", short_name(&cell.corpus)?, cell.seed, cell.model))
    }
}

/// The sentence for a model that is far from the size that all models should have.
pub(crate) fn size_note(model: &str, found: usize, params: usize, d_model: usize, blocks: usize) -> Option<String> {
    let far = (found as f64 / params as f64 - 1.0).abs() > 0.05;
    far.then(|| {
        format!(
            "`{model}` has {found} parameters where {params} were asked for: with d_model {d_model} and {blocks} blocks it \
             comes no nearer"
        )
    })
}

/// What the numbers were measured on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Vector instructions in use.
    pub simd: String,
    /// Threads in use.
    pub threads: usize,
    /// Operating system.
    pub os: String,
    /// Processor family.
    pub arch: String,
}

impl Machine {
    /// This one.
    pub fn here() -> Machine {
        let [os, arch] = [std::env::consts::OS, std::env::consts::ARCH].map(str::to_owned);
        Machine { simd: simd::level().to_string(), threads: threads::current_threads(), os, arch }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Machine { simd, threads, os, arch } = self;
        write!(f, "{simd} on {os} {arch}, {threads} threads")
    }
}

/// What is known of a text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataFacts {
    /// A path or `math`.
    pub name: String,
    /// What kind of text it is.
    pub kind: Kind,
    /// The tokenizer's name, `byte` for text as it is; empty in what was written before it was noted.
    #[serde(default)]
    pub tokenizer: String,
    /// Tokens of its vocabulary.
    #[serde(default)]
    pub vocab: usize,
    /// Tokens to train on; absent for the endless `math`.
    pub train_tokens: Option<u64>,
    /// What a change of the text changes; see [`Data::fingerprint`].
    pub fingerprint: String,
    /// Target tokens of an evaluation.
    pub val_tokens: u64,
    /// Entropy of single tokens of the held-out text, in nats: what a model must fall below.
    pub unigram_nll: Option<f64>,
    /// What a change of the lengths at which blocks are cut changes, where there are such.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_lengths: Option<String>,
}

impl DataFacts {
    /// What a token is called: a byte where that is all that there is.
    pub fn unit(&self) -> &'static str {
        if ["byte", ""].contains(&&*self.tokenizer) { "byte" } else { "token" }
    }

    fn of(data: &Data, settings: &Settings) -> Result<DataFacts> {
        let &Settings { batch, seq, seed, eval_tokens, .. } = settings;
        let validation = data.validation(batch, seq, Some(eval_tokens))?;
        // The endless text has the same entropy however much of it is read.
        let enough = eval_tokens.min(ENTROPY_TOKENS);
        let for_entropy = match &data.val {
            Some(Source::Math(_)) => data.validation(batch, seq, Some(enough))?,
            _ => validation.clone(),
        };
        // The last thing that can be wrong with the data, before a file is written.
        data.batches(batch, seq, seed)?;
        Ok(DataFacts {
            name: data.name.clone(),
            kind: data.kind,
            tokenizer: data.tokenizer.name().to_owned(),
            vocab: data.tokenizer.vocab(),
            train_tokens: data.train_tokens(),
            fingerprint: data.fingerprint(),
            val_tokens: validation.as_ref().map_or(0, |v| v.tokens()),
            unigram_nll: for_entropy.as_ref().map(unigram_entropy),
            prompt_lengths: settings.prompt_lengths_fingerprint()?,
        })
    }
}

/// A model that is done.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// The corpus.
    pub corpus: String,
    /// The seed.
    pub seed: u64,
    /// Where the model is, seen from the run's folder.
    pub folder: String,
    /// What it was trained on.
    pub machine: Machine,
    /// What was measured.
    #[serde(flatten)]
    pub result: ModelResult,
}

impl Row {
    /// What it is a row of.
    pub fn cell(&self) -> Cell {
        Cell { corpus: self.corpus.clone(), seed: self.seed, model: self.result.model.clone() }
    }
}

/// What a model failed with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure {
    /// The corpus.
    pub corpus: String,
    /// The seed.
    pub seed: u64,
    /// The model's name.
    pub model: String,
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
    /// The corpora.
    pub data: Vec<DataFacts>,
    /// The machine that wrote this last.
    pub machine: Machine,
    /// The trained models, in the order of the plan.
    pub rows: Vec<Row>,
    /// The same over seeds: one for every corpus and model.
    pub summary: Vec<Summary>,
    /// Why the run ended early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<Failure>,
}

/// Tokens of `math` from which the entropy of its bytes is taken.
const ENTROPY_TOKENS: u64 = 1 << 20;

/// A run and its folder.
pub struct Run {
    /// What will stand in `results.json`.
    pub results: Results,
    /// Sentences that the user should see before it starts.
    pub notes: Vec<String>,
    /// How trainings are saved and stopped.
    pub keeping: Keeping,
    folder: PathBuf,
    data: Vec<Data>,
    log: Writer,
    lock: Lock,
}

/// What `folder` holds, or why it is refused. `locked`: whether this run has its lock already.
pub(crate) fn refuse(folder: &Path, existing: Existing, locked: bool) -> Result<Found> {
    let found = folder::look(folder)?;
    let name = folder.display();
    let why = match &found {
        Found::Nothing => return Ok(found),
        Found::Finished if existing == Existing::Resume => return Ok(found),
        Found::Unfinished => {
            // Who works there says more than that the run is not finished.
            if !locked {
                Lock::check(folder)?;
            }
            if existing != Existing::Refuse {
                return Ok(found);
            }
            format!(
                "`{name}` holds an unfinished run; continue it with --resume, replace it with --restart, or choose another \
                 folder with --out"
            )
        }
        Found::Finished => format!(
            "`{name}` holds a finished run, which is never overwritten; extend it with --resume or choose another folder \
             with --out"
        ),
        Found::Other(first) if first == RESULTS => {
            let path = folder.join(first);
            // Only a regular file is opened: a pipe would be waited for, for ever.
            let wrong = || serde_json::from_slice::<serde_json::Value>(&fs::read(&path).ok()?).err();
            let parsed = path.is_file().then(wrong);
            let why = match parsed {
                None if path.is_dir() => "it is a folder".to_owned(),
                None => "it is no regular file".to_owned(),
                Some(Some(e)) => format!("it is not JSON: {e}"),
                Some(None) => "it does not say whether it is finished".to_owned(),
            };
            format!(
                "`{}` is damaged, or no run of kumiki's wrote it: {why}; remove it, or choose another folder with --out",
                path.display()
            )
        }
        Found::Other(first) => format!(
            "`{name}` is not empty and holds no run of kumiki's (it has `{first}`); choose another folder with --out"
        ),
    };
    Err(Error::new(why))
}

impl Run {
    /// Takes possession of `folder`, which is made if need be. `data` are the plan's corpora, in order.
    ///
    /// # Errors
    /// When the plan does not hold, the folder has a run and `existing` does not allow for it, one is still at work there,
    /// one cannot be resumed (it was asked something else, or its files are damaged), or it has files that are not a run's.
    pub fn begin(plan: Plan, data: Vec<Data>, folder: &Path, existing: Existing) -> Result<Run> {
        plan.check()?;
        let resuming = |found: Found| existing == Existing::Resume && found != Found::Nothing;
        // Everything that can be wrong is found before a file is written.
        let old = if resuming(refuse(folder, existing, false)?) {
            Some(resume::read(folder, &plan.experiment)?)
        } else {
            None
        };
        old.iter().try_for_each(|old| old.check(&plan))?;
        let facts = data.iter().map(|data| DataFacts::of(data, &plan.settings)).collect::<Result<Vec<_>>>()?;
        old.iter().try_for_each(|old| old.check_data(&facts))?;
        fs::create_dir_all(folder).map_err(|e| Error::io("create the folder", folder, e))?;
        let lock = Lock::take(folder)?;
        // Once more, for another run may have come and gone since.
        let found = refuse(folder, existing, true)?;
        let mut rows = vec![];
        let mut notes = plan.sizes()?;
        notes.extend(data.iter().filter_map(|data| data.note.clone()));
        let log = folder.join(LOG);
        let log = if resuming(found) {
            let old = resume::read(folder, &plan.experiment)?;
            old.check(&plan)?;
            old.check_data(&facts)?;
            notes.extend(old.notes(&plan)?);
            rows = old.keep(folder, &plan)?;
            Writer::append(log)?
        } else {
            folder::clear(folder)?;
            Writer::create(log)?
        };
        let (kumiki, machine) = (env!("CARGO_PKG_VERSION").to_owned(), Machine::here());
        let (data_facts, summary, finished, failed) = (facts, vec![], false, None);
        let results = Results { kumiki, finished, plan, data: data_facts, machine, rows, summary, failed };
        let keeping = Keeping::default();
        let mut run = Run { results, notes, keeping, folder: folder.to_owned(), data, log, lock };
        run.write()?;
        Ok(run)
    }

    /// Whether the run has event files, which a run that goes on must go on with.
    pub fn has_events(&self) -> bool {
        self.folder.join(folder::EVENTS).is_dir()
    }

    /// Writes event files for TensorBoard from now on, which say what the log says, its beginning included.
    ///
    /// # Errors
    /// When one cannot be written, or the log cannot be read.
    #[cfg(feature = "export")]
    pub fn write_events(&mut self) -> Result<()> {
        self.log.with_events(&self.folder.join(folder::EVENTS), self.results.plan.is_wide())
    }

    /// What is still to be trained, in order.
    pub fn cells(&self) -> Vec<Cell> {
        let done: Vec<Cell> = self.results.rows.iter().map(Row::cell).collect();
        self.results.plan.cells().into_iter().filter(|cell| !done.contains(cell)).collect()
    }

    /// Trains one of [`Run::cells`] and adds its row, or notes why there is none. Gives the step after which it was stopped,
    /// if it was.
    ///
    /// # Errors
    /// As [`train_model`].
    pub fn train(&mut self, cell: &Cell, show: &mut dyn FnMut(Event)) -> Result<Option<u64>> {
        let folder = self.results.plan.folder_of(cell)?;
        let data = (self.data.iter().find(|data| data.name == cell.corpus))
            .ok_or_else(|| Error::new(format!("`{}` is no corpus of this run", cell.corpus)))?;
        let settings = Settings { seed: cell.seed, ..self.results.plan.settings.clone() };
        let (place, keeping) = (self.folder.join(&folder), self.keeping.clone());
        match train_model(&cell.model, &settings, data, &mut self.log, &place, &keeping, show) {
            Ok(Outcome::Done(result)) => {
                let Cell { corpus, seed, .. } = cell.clone();
                self.results.rows.push(Row { corpus, seed, folder, machine: Machine::here(), result: *result });
                self.write().map(|()| None)
            }
            Ok(Outcome::Stopped(step)) => self.draw().map(|()| Some(step)),
            Err(e) => {
                let Cell { corpus, seed, model } = cell.clone();
                self.results.failed = Some(Failure { corpus, seed, model, error: e.to_string() });
                // What cannot be written now, on a full disk say, must not hide why it failed.
                let _ = self.write().and_then(|()| self.draw());
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
        let Plan { experiment, preset, corpora, .. } = &self.results.plan;
        let records = crate::log::read(self.folder.join(LOG))?;
        for corpus in corpora {
            let mut curves =
                crate::plot::Curve::from_records(records.iter().filter(|r| r.corpus.as_ref() == Some(corpus)));
            // Its losses are not those of a text.
            curves.iter_mut().filter(|c| c.name == "encoder-decoder").for_each(|c| c.name += ", gaps");
            // One of several that a failure kept from being begun.
            if curves.is_empty() && corpora.len() > 1 {
                continue;
            }
            // The path is in results.json; the picture may be shown to others.
            let short = short_name(corpus)?;
            let title = format!("{experiment}, preset {preset}, on {short}");
            let name = if corpora.len() > 1 { folder::curves_of(&short) } else { folder::CURVES.to_owned() };
            let path = self.folder.join(name);
            crate::plot::write(&path, &title, &curves)?;
            crate::plot::write(path.with_extension("png"), &title, &curves)?;
        }
        Ok(())
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
        let results = &mut self.results;
        let order = results.plan.cells();
        results.rows.sort_by_key(|row| order.iter().position(|cell| *cell == row.cell()));
        results.summary = summarize(&results.plan, &results.rows);
        folder::write_results(&self.folder, results)
    }
}
