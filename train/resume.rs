//! What an interrupted or a finished run leaves for the one that continues it: its finished models.

use std::fs;
use std::path::{Path, PathBuf};

use crate::folder::{LOG, RESULTS, clear_models, clear_pictures};
use crate::log::{self, Record};
use crate::run::{Cell, DataFacts, Machine, Plan, Results, Row};
use crate::{Error, Result};

/// A run as it is found.
pub(crate) struct Old {
    path: PathBuf,
    results: Results,
    records: Vec<Record>,
}

fn cell_of(record: &Record) -> Option<Cell> {
    let (corpus, seed, model) = (record.corpus.clone()?, record.seed?, record.model.clone()?);
    Some(Cell { corpus, seed, model })
}

/// Reads the run in `folder`.
///
/// # Errors
/// When `results.json` or the log is missing, damaged or of another version, or they do not agree.
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
    let results: Results = serde_json::from_slice(&bytes)
        .map_err(|e| failed(&format!("{e}; expected the results of this version of kumiki")))?;
    let log = folder.join(LOG);
    // Before the first step there may be no log yet.
    let records = if log.is_file() || !results.rows.is_empty() { log::read(&log)? } else { vec![] };
    for row in &results.rows {
        let cell = row.cell();
        let of_cell = records.iter().filter(|record| cell_of(record).as_ref() == Some(&cell));
        let (steps, found) = (results.plan.settings.steps, of_cell.count() as u64);
        if found != steps {
            let log = log.display();
            return Err(failed(&format!("`{log}` has {found} of the {steps} steps of {cell}, which is finished")));
        }
    }
    Ok(Old { path, results, records })
}

impl Old {
    /// Whether `plan` continues this run: the same experiment and settings, and everything finished is asked for again.
    ///
    /// # Errors
    /// Names the first difference.
    pub(crate) fn check(&self, plan: &Plan) -> Result<()> {
        let Results { plan: old, rows, .. } = &self.results;
        let differs = |what: &str, then: &dyn std::fmt::Display, now: &dyn std::fmt::Display| {
            let path = self.path.display();
            Err(Error::new(format!(
                "the run of `{path}` had {what} {then}, now it is {now}; --resume needs the same, --out another folder"
            )))
        };
        if old.experiment != plan.experiment {
            return differs("the experiment", &old.experiment, &plan.experiment);
        }
        if let Some((key, then, now)) = old.settings.difference(&plan.settings) {
            return differs(&key, &then, &now);
        }
        let asked = plan.cells();
        match rows.iter().map(Row::cell).find(|cell| !asked.contains(cell)) {
            None => Ok(()),
            Some(cell) => Err(Error::new(format!(
                "`{}` has {cell} finished, which is not asked for; --resume can add to a run but leave nothing out",
                self.path.display()
            ))),
        }
    }

    /// Whether the texts of finished models are still the same, as far as their lengths and frequencies tell.
    ///
    /// # Errors
    /// Names the first that is not.
    pub(crate) fn check_data(&self, facts: &[DataFacts]) -> Result<()> {
        for now in facts.iter().filter(|facts| self.results.rows.iter().any(|row| row.corpus == facts.name)) {
            let then = self.results.data.iter().find(|then| then.name == now.name);
            if let Some(then) = then.filter(|then| *then != now) {
                let text = |facts: &DataFacts| {
                    let train = facts.train_tokens.map_or("endless".to_owned(), |n| n.to_string());
                    let entropy = facts.unigram_nll.map_or(String::new(), |e| format!(" of {e} nats"));
                    format!("{train} training tokens, {} to validate on{entropy}", facts.val_tokens)
                };
                return Err(Error::new(format!(
                    "`{}` has changed since models were trained on it: {} then, {} now; --out another folder",
                    now.name,
                    text(then),
                    text(now)
                )));
            }
        }
        Ok(())
    }

    /// What the user should know: how much is done, what starts again, and whether the machine is another.
    pub(crate) fn notes(&self, plan: &Plan) -> Vec<String> {
        let done: Vec<Cell> = self.results.rows.iter().map(Row::cell).collect();
        let all = plan.cells();
        let mut notes = vec![format!("resuming: {} of {} models are done", done.len(), all.len())];
        let last = self.records.last().and_then(|record| Some((cell_of(record)?, record.step)));
        if let Some((cell, step)) = last.filter(|(cell, _)| !done.contains(cell) && all.contains(cell)) {
            notes.push(format!("{cell} was interrupted after step {step} and starts again from its beginning"));
        }
        let (then, now) = (&self.results.machine, Machine::here());
        if !done.is_empty() && *then != now {
            let text = |m: &Machine| format!("{} on {} {}, {} threads", m.simd, m.os, m.arch, m.threads);
            notes.push(format!("what is done was done with {}, this is {}", text(then), text(&now)));
        }
        notes
    }

    /// Leaves of the run in `folder` what is finished, for `plan` to go on with, and returns its rows.
    ///
    /// # Errors
    /// When a file cannot be written or removed; then everything finished is still there.
    pub(crate) fn keep(self, folder: &Path, plan: &Plan) -> Result<Vec<Row>> {
        let Old { results, records, .. } = self;
        let done: Vec<Cell> = results.rows.iter().map(Row::cell).collect();
        let kept: Vec<Record> =
            records.into_iter().filter(|record| cell_of(record).is_some_and(|cell| done.contains(&cell))).collect();
        log::replace(&folder.join(LOG), &kept)?;
        let folders: Vec<PathBuf> = results.rows.iter().map(|row| folder.join(&row.folder)).collect();
        clear_models(folder, &folders)?;
        let old = &results.plan.corpora;
        // The picture of one corpus and those of several have other names.
        if (old.len() > 1) != (plan.corpora.len() > 1) {
            clear_pictures(folder, old.iter().map(String::as_str))?;
        }
        Ok(results.rows)
    }
}
