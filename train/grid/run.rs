//! [`GridRun`]: the folder of a grid.
//!
//! ```text
//! results.json                                         the grid, a row for every cell that is done, the laws
//! laws.svg                                             points and laws
//! cells/<model>-<D>-<layers>-<layers>-<tokens>/        a run of its own, see [`crate::run`]
//! ```
//!
//! Cells are runs, so that all that holds of runs holds of them: one that is done stays, one that was interrupted begins
//! again, one that had other settings or another text is refused. `results.json` is put together from what they say.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Cell, Grid};
use crate::compare::{Event, ModelResult};
use crate::data::Data;
use crate::folder::{self, Found, Lock, RESULTS};
use crate::laws::{Fit, FitOptions, Point, fit};
use crate::run::{Existing, Machine, Plan, Run, refuse};
use crate::stop::Stop;
use crate::{Error, Result};

/// What `results.json` calls this experiment.
pub const EXPERIMENT: &str = "scaling";
/// The folder of its cells.
pub(crate) const CELLS: &str = "cells";
/// The picture.
pub const LAWS: &str = "laws.svg";

/// A cell that is done.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Its size, `D/first/second`.
    pub size: String,
    /// The budget that it belongs to, tokens.
    pub budget: u64,
    /// The loss that compares all models: of the second half of every window given the first.
    pub loss: Option<f64>,
    /// Floating-point operations of the training.
    pub flops: f64,
    /// What was measured.
    #[serde(flatten)]
    pub result: ModelResult,
}

/// A law of one model.
#[derive(Clone, Debug, Serialize)]
pub struct Law {
    /// The model.
    pub model: String,
    /// `second half` or `all tokens`: which loss it is about.
    pub of: &'static str,
    /// The law, or why there is none.
    #[serde(flatten)]
    pub fit: Outcome,
}

/// What fitting came to.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(clippy::large_enum_variant)] // a few per grid
pub enum Outcome {
    /// A law.
    Fit(Fit),
    /// Why there is none.
    None(String),
}

/// The contents of `results.json`.
#[derive(Clone, Debug, Serialize)]
pub struct Results {
    /// Version of the program.
    pub kumiki: String,
    /// Whether everything that was planned is done.
    pub finished: bool,
    /// [`EXPERIMENT`].
    pub experiment: &'static str,
    /// What was asked for.
    #[serde(flatten)]
    pub grid: Grid,
    /// The machine that wrote this last.
    pub machine: Machine,
    /// The cells that are done, in the grid's order.
    pub rows: Vec<Row>,
    /// One for every model and loss that has rows, once all cells are done.
    pub laws: Vec<Law>,
}

/// A grid at work in its folder.
pub struct GridRun {
    /// What will stand in `results.json`.
    pub results: Results,
    /// Who may ask for a stop.
    pub stop: Stop,
    folder: PathBuf,
    data: Data,
    _lock: Lock,
}

impl GridRun {
    /// Takes possession of `folder`, which is made if need be. Cells that are done count when `existing` says so.
    ///
    /// # Errors
    /// When the grid does not hold, the folder has one and `existing` does not allow for it, it belongs to another grid, or
    /// has files that are not a grid's.
    pub fn begin(grid: Grid, data: Data, folder: &Path, existing: Existing) -> Result<GridRun> {
        grid.check()?;
        // A grid of many cells is never thrown away at once.
        if existing == Existing::Refuse && folder::look(folder)? == Found::Unfinished {
            let name = folder.display();
            return Err(Error::new(format!(
                "`{name}` holds an unfinished run; continue it with --resume, or choose another folder with --out"
            )));
        }
        if refuse(folder, existing, false)? != Found::Nothing {
            check(folder, &grid)?;
        }
        fs::create_dir_all(folder).map_err(|e| Error::io("create the folder", folder, e))?;
        let lock = Lock::take(folder)?;
        let (kumiki, machine) = (env!("CARGO_PKG_VERSION").to_owned(), Machine::here());
        let (finished, experiment, rows, laws) = (false, EXPERIMENT, vec![], vec![]);
        let results = Results { kumiki, finished, experiment, grid, machine, rows, laws };
        let mut run = GridRun { results, stop: Stop::default(), folder: folder.to_owned(), data, _lock: lock };
        let cells = run.results.grid.cells();
        run.results.rows = cells.iter().filter_map(|cell| run.row_of(cell).transpose()).collect::<Result<_>>()?;
        run.write()?;
        Ok(run)
    }

    /// What losses are per: `byte` or `token`.
    pub fn unit(&self) -> &'static str {
        if self.data.tokenizer.name() == "byte" { "byte" } else { "token" }
    }

    /// What is still to be done, in order.
    pub fn cells(&self) -> Vec<Cell> {
        let done = |cell: &Cell| self.results.rows.iter().any(|row| is_of(row, cell));
        self.results.grid.cells().into_iter().filter(|cell| !done(cell)).collect()
    }

    fn folder_of(&self, cell: &Cell) -> PathBuf {
        self.folder.join(CELLS).join(cell.folder())
    }

    fn plan(&self, cell: &Cell) -> Result<Plan> {
        let settings = self.results.grid.settings_of(cell)?;
        let (preset, seeds) = (self.results.grid.preset.clone(), vec![settings.seed]);
        let (corpora, models) = (vec![self.data.name.clone()], vec![cell.model.clone()]);
        Ok(Plan { experiment: EXPERIMENT.to_owned(), preset, settings, corpora, seeds, models })
    }

    /// The row of a cell whose run is finished; `None` when it is not, or has not begun.
    fn row_of(&self, cell: &Cell) -> Result<Option<Row>> {
        let folder = self.folder_of(cell);
        if !folder.join(RESULTS).is_file() {
            return Ok(None);
        }
        // Everything that a run checks when it goes on is checked here.
        let run = self.resumed(cell)?;
        if !run.cells().is_empty() {
            return Ok(None);
        }
        self.finished(run, cell).map(Some)
    }

    fn resumed(&self, cell: &Cell) -> Result<Run> {
        Run::begin(self.plan(cell)?, vec![self.data.clone()], &self.folder_of(cell), Existing::Resume)
    }

    fn finished(&self, mut run: Run, cell: &Cell) -> Result<Row> {
        run.finish()?;
        let result = run.results.rows.first().map(|row| row.result.clone());
        let result = result.ok_or_else(|| Error::new(format!("{cell} has no row though it is done")))?;
        let flops = self.results.grid.cost(cell.clone())?.flops;
        let loss = result.second_half_nll;
        Ok(Row { size: cell.size.to_string(), budget: cell.budget, loss, flops, result })
    }

    /// Trains one of [`GridRun::cells`]. Gives the step after which it was stopped, if it was.
    ///
    /// # Errors
    /// As the run of the cell does.
    pub fn train(&mut self, cell: &Cell, show: &mut dyn FnMut(Event)) -> Result<Option<u64>> {
        let mut run = self.resumed(cell)?;
        run.keeping.stop = self.stop.clone();
        for part in run.cells() {
            if let Some(step) = run.train(&part, show)? {
                return Ok(Some(step));
            }
        }
        let row = self.finished(run, cell)?;
        self.results.rows.push(row);
        let order = self.results.grid.cells();
        self.results.rows.sort_by_key(|row| order.iter().position(|cell| is_of(row, cell)));
        self.write().map(|()| None)
    }

    /// Fits the laws, draws them, and marks the grid as finished.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn finish(&mut self, options: &FitOptions) -> Result<()> {
        self.results.laws = laws(&self.results, options);
        self.results.finished = true;
        self.write()?;
        self.draw()
    }

    #[cfg(feature = "plots")]
    fn draw(&self) -> Result<()> {
        use crate::laws::picture::{Fitted, write};
        let points: Vec<(String, Vec<Point>, Fit)> = (self.results.laws.iter())
            .filter(|law| law.of == LOSSES[0].0)
            .filter_map(|law| match law.fit {
                Outcome::Fit(fit) => Some((law.model.clone(), points(&self.results, &law.model, LOSSES[0].1), fit)),
                Outcome::None(_) => None,
            })
            .collect();
        let models: Vec<Fitted> =
            points.iter().map(|(name, points, fit)| Fitted { name: name.clone(), points, fit: *fit }).collect();
        if models.is_empty() {
            return Ok(());
        }
        write(self.folder.join(LAWS), &format!("Loss of the second half, preset {}", self.results.grid.preset), &models)
    }

    #[cfg(not(feature = "plots"))]
    fn draw(&self) -> Result<()> {
        Ok(())
    }

    fn write(&self) -> Result<()> {
        folder::write_results(&self.folder, &self.results)
    }
}

fn is_of(row: &Row, cell: &Cell) -> bool {
    row.result.model == cell.model && row.budget == cell.budget && row.size == cell.size.to_string()
}

/// A loss of a row, if it has it.
type Loss = fn(&ModelResult) -> Option<f64>;

/// The losses that laws are fitted to.
const LOSSES: [(&str, Loss); 2] =
    [("second half", |result| result.second_half_nll), ("all tokens", |result| result.val_nll)];

fn points(results: &Results, model: &str, loss: Loss) -> Vec<Point> {
    let rows = results.rows.iter().map(|row| &row.result).filter(|result| result.model == model);
    let point = |result: &ModelResult| {
        loss(result).map(|loss| Point { params: result.params as f64, tokens: result.tokens as f64, loss })
    };
    rows.filter_map(point).collect()
}

fn laws(results: &Results, options: &FitOptions) -> Vec<Law> {
    let mut laws = Vec::new();
    for (of, loss) in LOSSES {
        for model in &results.grid.models {
            let points = points(results, model, loss);
            if points.is_empty() {
                continue;
            }
            let fit = match fit(&points, options) {
                Ok(fit) => Outcome::Fit(fit),
                Err(e) => Outcome::None(e.to_string()),
            };
            laws.push(Law { model: model.clone(), of, fit });
        }
    }
    laws
}

/// Of `results.json` what cells have come to.
#[derive(Deserialize)]
struct Rows {
    rows: Vec<Row>,
}

/// Whether `results.json` in the folder is of this grid, or of a part of it.
///
/// # Errors
/// Names what differs.
fn check(folder: &Path, grid: &Grid) -> Result<()> {
    let path = folder.join(RESULTS);
    let bytes = fs::read(&path).map_err(|e| Error::io("read the results", &path, e))?;
    let failed = |why: String| Error::new(format!("`{}` cannot be resumed from: {why}", path.display()));
    let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| failed(e.to_string()))?;
    if value["experiment"] != EXPERIMENT {
        let found = &value["experiment"];
        return Err(failed(format!("its experiment must be \"{EXPERIMENT}\", found {found}; --out another folder")));
    }
    let wrong = |e: serde_json::Error| failed(format!("{e}; expected the results of this version of kumiki"));
    // From the text again, not from the value: its errors say in which line.
    let old: Grid = serde_json::from_slice(&bytes).map_err(wrong)?;
    if let Some((key, then, now)) = old.settings.difference(&grid.settings) {
        return Err(failed(format!(
            "{key} was {then}, now it is {now}; --resume needs the same, --out another folder"
        )));
    }
    let differs = [
        ("the corpus", old.corpus.clone(), grid.corpus.clone()),
        ("the seed", old.settings.seed.to_string(), grid.settings.seed.to_string()),
        ("what budgets mean", format!("{:?}", old.matched), format!("{:?}", grid.matched)),
    ];
    if let Some((what, then, now)) = differs.iter().find(|(_, then, now)| then != now) {
        return Err(failed(format!("{what} was `{then}`, now it is `{now}`; --out another folder")));
    }
    let Rows { rows } = serde_json::from_slice(&bytes).map_err(wrong)?;
    let cells = grid.cells();
    match rows.iter().find(|row| !cells.iter().any(|cell| is_of(row, cell))) {
        None => Ok(()),
        Some(row) => Err(failed(format!(
            "`{}` of {} on {} tokens is finished and not asked for; --resume can add to a grid but leave nothing out",
            row.result.model, row.size, row.budget
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use crate::settings::Settings;

    fn grid(sizes: &[&str], budgets: &[u64]) -> Grid {
        let nano = Grid::preset("nano").unwrap();
        let settings = Settings { seq: 16, batch: 2, eval_tokens: 64, ..nano.settings.clone() };
        let sizes = sizes.iter().map(|size| size.parse().unwrap()).collect();
        let models = vec!["double".into(), "encoder-decoder".into()];
        Grid { sizes, budgets: budgets.to_vec(), models, settings, ..nano }
    }

    fn run(grid: Grid, folder: &Path, existing: Existing, most: usize) -> Result<GridRun> {
        let data = Data::open("math", 0.0, 16)?;
        let mut run = GridRun::begin(grid, data, folder, existing)?;
        let cells = run.cells();
        cells.iter().take(most).try_for_each(|cell| run.train(cell, &mut |_| {}).map(drop))?;
        if cells.len() <= most {
            run.finish(&FitOptions { bootstrap: 100, ..FitOptions::default() })?;
        }
        Ok(run)
    }

    #[test]
    fn a_grid_goes_on_cell_by_cell_and_grows() {
        let dir = Scratch::new();
        let (out, whole) = (dir.path().join("out"), dir.path().join("whole"));
        let small = || grid(&["16/1/1"], &[64, 96]);
        let first = run(small(), &out, Existing::Refuse, 1).unwrap();
        assert!(!first.results.finished && first.results.rows.len() == 1);
        drop(first);
        let second = run(small(), &out, Existing::Resume, 9).unwrap();
        assert!(second.results.finished && second.results.rows.len() == 4);
        let Outcome::None(why) = &second.results.laws[0].fit else { panic!("four points make no law") };
        assert!(why.contains("2"), "{why}");
        drop(second);
        let large = || grid(&["16/1/1", "24/1/1", "32/1/1"], &[64, 96, 160]);
        let third = run(large(), &out, Existing::Resume, 99).unwrap();
        let straight = run(large(), &whole, Existing::Refuse, 99).unwrap();
        let losses = |run: &GridRun| {
            run.results
                .rows
                .iter()
                .map(|r| (r.size.clone(), r.budget, r.result.model.clone(), r.loss))
                .collect::<Vec<_>>()
        };
        assert_eq!(losses(&third), losses(&straight));
        assert_eq!(third.results.rows.len(), 18);
        assert!(third.results.rows.iter().all(|row| row.loss.unwrap() > 1.0 && row.flops > 0.0));
        assert!(third.results.laws.iter().any(|law| law.model == "encoder-decoder" && law.of == "second half"));
        assert!(third.results.laws.iter().all(|law| law.model == "double" || law.of == "second half"));
        drop(third);
        for (other, phrase) in [
            (small(), "is finished and not asked for"),
            (Grid { settings: Settings { batch: 4, ..large().settings }, ..large() }, "batch was 2, now it is 4"),
            (
                Grid { matched: super::super::Matched::Flops, ..large() },
                "what budgets mean was `Tokens`, now it is `Flops`",
            ),
        ] {
            let error = run(other, &out, Existing::Resume, 0).err().unwrap().to_string();
            assert!(error.contains(phrase), "{error}");
        }
        let error = run(large(), &out, Existing::Refuse, 0).err().unwrap().to_string();
        assert!(error.contains("--resume") || error.contains("finished"), "{error}");
    }
}
