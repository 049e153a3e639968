//! What an interrupted or a finished run of `gp` leaves for the one that continues it.

use std::fs;
use std::path::{Path, PathBuf};

use kumiki_tensor::DType;

use super::run::{Cell, EXPERIMENT, Plan, Results, Row};
use super::settings::Settings;
use crate::folder::{LOG, RESULTS, clear_models};
use crate::log::{self, Record};
use crate::run::Machine;
use crate::{Error, Result, checkpoint};

/// A run as it is found.
pub(crate) struct Old {
    path: PathBuf,
    results: Results,
    records: Vec<Record>,
    /// A sentence for every model whose row was dropped because its file is of no use any more.
    lost: Vec<String>,
}

fn is_of(record: &Record, cell: &Cell) -> bool {
    record.seed == Some(cell.seed) && record.model.as_ref() == Some(&cell.model)
}

/// Reads the run in `folder`.
///
/// # Errors
/// When `results.json` or the log is missing, damaged, of another experiment or version, or they do not agree.
pub(crate) fn read(folder: &Path) -> Result<Old> {
    let path = folder.join(RESULTS);
    if !path.is_file() {
        return Err(Error::new(format!(
            "`{}` has no {RESULTS}, so there is nothing to resume; replace what is there with --restart",
            folder.display()
        )));
    }
    let bytes = fs::read(&path).map_err(|e| Error::io("read the results", &path, e))?;
    let failed =
        |why: &dyn std::fmt::Display| Error::new(format!("`{}` cannot be resumed from: {why}", path.display()));
    let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| failed(&e))?;
    if value["experiment"] != EXPERIMENT {
        let found = &value["experiment"];
        return Err(failed(&format!("its experiment must be \"{EXPERIMENT}\", found {found}; --out another folder")));
    }
    let mut results: Results = serde_json::from_value(value)
        .map_err(|e| failed(&format!("{e}; expected the results of this version of kumiki")))?;
    let log = folder.join(LOG);
    // Before the first step there may be no log yet.
    let records = if log.is_file() || !results.rows.is_empty() { log::read(&log)? } else { vec![] };
    let steps = results.plan.settings.steps;
    for Row { cell, .. } in &results.rows {
        let found = records.iter().filter(|record| is_of(record, cell)).count() as u64;
        if found != steps {
            let log = log.display();
            return Err(failed(&format!("`{log}` has {found} of the {steps} steps of {cell}, which is finished")));
        }
    }
    let mut lost = vec![];
    results.rows.retain(|row| match usable(row, &results.plan.settings, folder) {
        Ok(()) => true,
        Err(e) => {
            lost.push(format!("{} was done, but its model is lost and is trained again: {e}", row.cell));
            false
        }
    });
    Ok(Old { path, results, records, lost })
}

/// Whether the model of a finished row is still there, whole, and the one that the row is about.
fn usable(row: &Row, settings: &Settings, folder: &Path) -> Result<()> {
    let path = folder.join(row.cell.folder());
    match checkpoint::load_regressor(&path, DType::F32)?.config == settings.model(&row.cell.model)? {
        true => Ok(()),
        false => Err(Error::new(format!("`{}` holds another model", path.display()))),
    }
}

impl Old {
    /// Whether `plan` continues this run: the same settings, and everything finished is asked for again.
    ///
    /// # Errors
    /// Names the first difference.
    pub(crate) fn check(&self, plan: &Plan) -> Result<()> {
        let (path, Results { plan: old, rows, .. }) = (self.path.display(), &self.results);
        if let Some((key, then, now)) = old.settings.difference(&plan.settings) {
            return Err(Error::new(format!(
                "the run of `{path}` had {key} {then}, now it is {now}; --resume needs the same, --out another folder"
            )));
        }
        let asked = plan.cells();
        match rows.iter().find(|row| !asked.contains(&row.cell)) {
            None => Ok(()),
            Some(Row { cell, .. }) => Err(Error::new(format!(
                "`{path}` has {cell} finished, which is not asked for; --resume can add to a run but leave nothing out"
            ))),
        }
    }

    /// What the user should know: how much is done, what starts again, and whether the machine is another.
    pub(crate) fn notes(&self, plan: &Plan) -> Vec<String> {
        let (rows, all) = (&self.results.rows, plan.cells());
        let left: Vec<&Cell> = all.iter().filter(|cell| !rows.iter().any(|row| row.cell == **cell)).collect();
        let mut notes = vec![format!("resuming: {} of {} models are done", rows.len(), all.len())];
        let last = self.records.last().and_then(|last| Some((left.iter().find(|cell| is_of(last, cell))?, last.step)));
        if let Some((cell, step)) = last {
            notes.push(format!("{cell} was interrupted after step {step} and starts again from its beginning"));
        }
        let now = Machine::here();
        if let Some(row) = rows.iter().find(|row| row.machine != now).filter(|_| !left.is_empty()) {
            notes.push(format!("{} was trained with {}, this is {now}", row.cell, row.machine));
        }
        notes.extend(self.lost.iter().cloned());
        notes
    }

    /// Leaves of the run in `folder` what is finished, and returns its rows.
    ///
    /// # Errors
    /// When a file cannot be written or removed; then everything finished is still there.
    pub(crate) fn keep(self, folder: &Path) -> Result<Vec<Row>> {
        let Old { results, records, .. } = self;
        let done = |record: &Record| results.rows.iter().any(|row| is_of(record, &row.cell));
        log::replace(&folder.join(LOG), &records.into_iter().filter(done).collect::<Vec<_>>())?;
        let folders: Vec<PathBuf> = results.rows.iter().map(|row| folder.join(row.cell.folder())).collect();
        clear_models(folder, &folders)?;
        Ok(results.rows)
    }
}
