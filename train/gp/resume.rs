//! What an interrupted or a finished run of `gp` leaves for the one that continues it.

use std::path::{Path, PathBuf};

use kumiki_tensor::DType;

use super::run::{Cell, EXPERIMENT, Plan, Results, Row};
use super::settings::Settings;
use crate::folder::{LOG, RESULTS, clear_models};
use crate::log::{self, Record};
use crate::resume::{check_distinct, results_of, unusable};
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
/// As [`results_of`]; also when the log is missing or damaged, or they do not agree.
pub(crate) fn read(folder: &Path) -> Result<Old> {
    let path = folder.join(RESULTS);
    let mut results: Results = results_of(folder, |found| found == EXPERIMENT, EXPERIMENT)?;
    let failed = |why: &dyn std::fmt::Display| unusable(&path, why);
    check_distinct(&path, &results.rows.iter().map(|row| row.cell.clone()).collect::<Vec<_>>())?;
    let points = results.plan.settings.prior.points;
    for Row { cell, trained, .. } in &results.rows {
        let found = trained.errors.by_observed.len();
        if found != points {
            return Err(failed(&format!(
                "by_observed of {cell} must have {points} numbers, one for each point, found {found}"
            )));
        }
    }
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
        clear_models(folder, &folders, &[])?;
        Ok(results.rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    use crate::gp::kernel::Prior;
    use crate::gp::run::Run;
    use crate::run::Existing;
    use crate::scratch::Scratch;

    fn plan(seeds: &[u64]) -> Plan {
        let prior = Prior { points: 6, ..Prior::default() };
        let settings = Settings { prior, steps: 3, batch: 2, eval_functions: 4, ..Settings::preset("nano").unwrap() };
        let (experiment, preset) = (EXPERIMENT.to_owned(), "nano".to_owned());
        Plan { experiment, preset, settings, seeds: seeds.into(), models: vec!["transformer".into()] }
    }

    /// Trains up to `most` cells, and finishes when that is all.
    fn train(plan: Plan, folder: &Path, existing: Existing, most: usize) -> Run {
        let mut run = Run::begin(plan, folder, existing, &mut |_| {}).unwrap();
        let cells = run.cells();
        cells.iter().take(most).for_each(|cell| assert!(run.train(cell, &mut |_| {}).unwrap()));
        if cells.len() <= most {
            run.finish().unwrap();
        }
        run
    }

    /// What a refused attempt says; it must leave every file as it was.
    #[track_caller]
    fn refused(plan: Plan, folder: &Path) -> String {
        let files = || ["results.json", "log.jsonl"].map(|name| fs::read(folder.join(name)).ok());
        let before = files();
        let error = Run::begin(plan, folder, Existing::Resume, &mut |_| {}).err().expect("must be refused").to_string();
        assert!(files() == before, "{error}");
        error
    }

    #[test]
    fn models_that_come_no_nearer_to_the_size_are_named_before_anything_is_measured() {
        let dir = Scratch::new();
        let mut plan = plan(&[0]);
        plan.settings.params = 1500;
        let (out, mut asked) = (dir.path().join("out"), 0);
        let run = Run::begin(plan, &out, Existing::Refuse, &mut |_| {
            assert!(!out.exists());
            asked += 1;
        });
        let notes = run.unwrap().notes.join("; ");
        let expected = "`transformer` has 2208 parameters where 1500 were asked for: with d_model 16 and 2 blocks";
        assert!(asked == 1 && notes.starts_with(expected), "{notes}");
    }

    #[test]
    fn a_run_goes_on_where_it_stopped_and_grows() {
        let dir = Scratch::new();
        let (out, whole) = (dir.path().join("out"), dir.path().join("whole"));
        let first = train(plan(&[4, 2]), &out, Existing::Resume, 1);
        assert!(first.notes.is_empty() && !first.results.finished && first.results.rows.len() == 1);
        drop(first);
        // The second model was begun: a line in the log, a file in its folder.
        let begun = Record { seed: Some(2), step: 1, ..log::read(out.join(LOG)).unwrap()[0].clone() };
        log::Writer::append(out.join(LOG)).unwrap().write(&begun).unwrap();
        dir.file("out/seed-2/transformer/model.safetensors.partial", "");
        let second = train(plan(&[2, 4]), &out, Existing::Resume, 9);
        let notes = second.notes.join("; ");
        assert!(
            notes.contains("1 of 2 models are done") && notes.contains("seed 2 was interrupted after step 1"),
            "{notes}"
        );
        let straight = train(plan(&[2, 4]), &whole, Existing::Refuse, 9);
        let errors =
            |run: &Run| run.results.rows.iter().map(|r| (r.cell.seed, r.trained.errors.clone())).collect::<Vec<_>>();
        assert_eq!(errors(&second), errors(&straight));
        assert_eq!(second.results.summary, straight.results.summary);
        assert_eq!((errors(&second)[0].0, second.results.summary[0].seeds), (2, 2));
        assert_eq!(log::read(out.join(LOG)).unwrap().len(), 6);
        for seed in [2, 4] {
            let file = format!("seed-{seed}/transformer/model.safetensors");
            assert!(fs::read(out.join(&file)).unwrap() == fs::read(whole.join(&file)).unwrap(), "{seed}");
        }
        assert!(!out.join("run.lock").exists());
    }

    #[test]
    fn another_run_is_not_continued_and_stays_as_it_is() {
        let dir = Scratch::new();
        let out = dir.path().join("out");
        drop(train(plan(&[0]), &out, Existing::Refuse, 9));
        let says = |plan: Plan, phrases: &[&str]| {
            let error = refused(plan, &out);
            assert!(phrases.iter().all(|phrase| error.contains(phrase)), "{error}");
        };
        let with = |settings: Settings| Plan { settings, ..plan(&[0]) };
        let settings = plan(&[0]).settings;
        says(with(Settings { steps: 4, ..settings.clone() }), &["had steps 3, now it is 4", "results.json"]);
        let prior = Prior { noise: 0.5, ..settings.prior.clone() };
        says(with(Settings { prior, ..settings }), &["had noise 0.1, now it is 0.5"]);
        says(plan(&[1]), &["has `transformer` with seed 0 finished, which is not asked for"]);
        let damage = |file: &str, from: &str, to: &str, phrases: &[&str]| {
            let path = out.join(file);
            let good = fs::read_to_string(&path).unwrap();
            assert!(good.contains(from));
            fs::write(&path, if from.is_empty() { to.to_owned() } else { good.replace(from, to) }).unwrap();
            says(plan(&[0]), phrases);
            fs::write(&path, good).unwrap();
        };
        damage(RESULTS, "", "{", &["results.json` is damaged"]);
        damage(RESULTS, "\"experiment\": \"gp\"", "\"experiment\": \"x\"", &["experiment must be `gp`, found `x`"]);
        damage(
            RESULTS,
            "\"floor\"",
            "\"roof\"",
            &["missing field `floor` at line ", "; expected the results of this version"],
        );
        let edited = |edit: &dyn Fn(&mut Results)| {
            let mut results: Results = serde_json::from_slice(&fs::read(out.join(RESULTS)).unwrap()).unwrap();
            edit(&mut results);
            serde_json::to_string(&results).unwrap()
        };
        let observed = |n: usize| edited(&|r: &mut Results| r.rows[0].trained.errors.by_observed.resize(n, 1.0));
        for (n, found) in [(0, "found 0"), (5, "found 5"), (7, "found 7")] {
            let cell =
                "results.json` cannot be resumed from: by_observed of `transformer` with seed 0 must have 6 numbers";
            damage(RESULTS, "", &observed(n), &[cell, found]);
        }
        let twice = edited(&|r: &mut Results| r.rows.push(r.rows[0].clone()));
        damage(RESULTS, "", &twice, &["`transformer` with seed 0 has more than one row"]);
        damage(LOG, "", "", &["has 0 of the 3 steps of `transformer` with seed 0"]);

        // A model that is lost is trained again, to the same bits.
        let model = out.join("seed-0/transformer/model.safetensors");
        let good = fs::read(&model).unwrap();
        fs::write(&model, &good[..good.len() / 2]).unwrap();
        let again = train(plan(&[0]), &out, Existing::Resume, 9);
        let notes = again.notes.join("; ");
        assert!(notes.contains("is lost and is trained again"), "{notes}");
        assert!(fs::read(&model).unwrap() == good);
    }
}
