//! What an interrupted or a finished run leaves for the one that continues it: its finished models, and the saves of those
//! that are not.

use std::fs;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use crate::checkpoint::{self, MODEL_FILE};
use crate::data::short_name;
use crate::folder::{self, Found, LOG, RESULTS, clear_models, clear_pictures};
use crate::log::{self, Record};
use crate::run::{Cell, DataFacts, Machine, Plan, Results, Row};
use crate::settings::Settings;
use crate::{Error, Result, saves};

/// A run as it is found.
pub(crate) struct Old {
    path: PathBuf,
    results: Results,
    records: Vec<Record>,
    /// A sentence for every model whose row was dropped because its file is of no use any more.
    lost: Vec<String>,
    /// Those of them whose saves are of no use either.
    ruined: Vec<Cell>,
}

/// A training that has saves.
struct Begun {
    cell: Cell,
    folder: PathBuf,
}

fn cell_of(record: &Record) -> Option<Cell> {
    let (corpus, seed, model) = (record.corpus.clone()?, record.seed?, record.model.clone()?);
    Some(Cell { corpus, seed, model })
}

/// The sentence for results that cannot be gone on with.
pub(crate) fn unusable(path: &Path, why: &dyn std::fmt::Display) -> Error {
    Error::new(format!("`{}` cannot be resumed from: {why}", path.display()))
}

/// The results in `folder`, of any kind of run: of an experiment that is `wanted`, which sentences call `experiment`.
///
/// # Errors
/// When there are none, or they are damaged, of another experiment or of another version.
pub(crate) fn results_of<R: DeserializeOwned>(
    folder: &Path,
    wanted: impl Fn(&str) -> bool,
    experiment: &str,
) -> Result<R> {
    let path = folder.join(RESULTS);
    if !path.is_file() {
        let name = folder.display();
        return Err(Error::new(match folder::look(folder)? {
            Found::Nothing => format!("there is no run in `{name}` to resume; without --resume one begins"),
            Found::Other(first) if first != RESULTS => {
                format!("`{name}` holds no run of kumiki's to resume (it has `{first}`)")
            }
            _ => format!(
                "`{name}` has no {RESULTS}, so there is nothing to resume; replace what is there with --restart"
            ),
        }));
    }
    let bytes = fs::read(&path).map_err(|e| Error::io("read the results", &path, e))?;
    let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| unusable(&path, &e))?;
    match value["experiment"].as_str() {
        Some(found) if wanted(found) => {}
        found => {
            let found = found.map_or("none".to_owned(), |found| format!("`{found}`"));
            let why = format!("its experiment must be `{experiment}`, found {found}; --out another folder");
            return Err(unusable(&path, &why));
        }
    }
    // From the text again, not from the value: its errors say in which line.
    serde_json::from_slice(&bytes)
        .map_err(|e| unusable(&path, &format!("{e}; expected the results of this version of kumiki")))
}

/// # Errors
/// When one of `cells` is there twice: it would count as a seed more.
pub(crate) fn check_distinct<C: PartialEq + std::fmt::Display>(path: &Path, cells: &[C]) -> Result<()> {
    match cells.iter().enumerate().find(|(n, cell)| cells[..*n].contains(cell)) {
        Some((_, cell)) => Err(unusable(path, &format!("{cell} has more than one row"))),
        None => Ok(()),
    }
}

/// Reads the run of `experiment` in `folder`.
///
/// # Errors
/// As [`results_of`]; also when the log is missing or damaged, or they do not agree.
pub(crate) fn read(folder: &Path, experiment: &str) -> Result<Old> {
    let path = folder.join(RESULTS);
    let mut results: Results = results_of(folder, |found| found == experiment, experiment)?;
    let failed = |why: &dyn std::fmt::Display| unusable(&path, why);
    check_distinct(&path, &results.rows.iter().map(Row::cell).collect::<Vec<_>>())?;
    for row in &results.rows {
        let (cell, model) = (row.cell(), &row.result.model);
        let deep = format!("{}/seed-{}/{model}", short_name(&row.corpus)?, row.seed);
        if ![model, &deep].contains(&&row.folder) {
            let found = &row.folder;
            return Err(failed(&format!("the folder of {cell} must be `{model}` or `{deep}`, found `{found}`")));
        }
    }
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
    let (mut lost, mut ruined) = (vec![], vec![]);
    results.rows.retain(|row| {
        let place = folder.join(&row.folder);
        let Err(e) = usable(row, &results.plan.settings, &place.join(MODEL_FILE)) else { return true };
        let save = saves::all(&place).pop().map(|(_, save)| save.join(MODEL_FILE));
        if save.is_none_or(|save| usable(row, &results.plan.settings, &save).is_err()) {
            ruined.push(row.cell());
        }
        lost.push(format!("{} was done, but its model is lost and is trained again: {e}", row.cell()));
        false
    });
    Ok(Old { path, results, records, lost, ruined })
}

/// Whether the model of a finished row is still in this file, whole, and the one that the row is about.
fn usable(row: &Row, settings: &Settings, path: &Path) -> Result<()> {
    let found = checkpoint::load(path, settings.dtype()?)?;
    if found.model.config() == settings.model(&row.result.model, found.tokenizer.vocab())? {
        return Ok(());
    }
    Err(Error::new(format!("`{}` holds another model", path.display())))
}

impl Old {
    /// Whether `plan` continues this run: the same settings, and everything finished is asked for again.
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
        if let Some((key, then, now)) = old.settings.difference(&plan.settings) {
            return differs(&key, &then, &now);
        }
        let asked = plan.cells();
        if let Some(begun) = self.begun(old)?.into_iter().find(|begun| !asked.contains(&begun.cell)) {
            return Err(Error::new(format!(
                "`{}` has {} begun, which is not asked for and would be lost; --resume can add to a run but leave nothing out",
                self.path.display(),
                begun.cell
            )));
        }
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
        let begun = self.begun(&self.results.plan)?;
        let trained = |corpus: &str| {
            self.results.rows.iter().any(|row| row.corpus == corpus) || begun.iter().any(|b| b.cell.corpus == corpus)
        };
        for now in facts.iter().filter(|facts| trained(&facts.name)) {
            let then = self.results.data.iter().find(|then| then.name == now.name);
            if then.is_some_and(|then| then.prompt_lengths != now.prompt_lengths) {
                return Err(Error::new(format!(
                    "the prompt lengths in `{}` have changed since models were trained with them; --out another folder",
                    self.results.plan.settings.prompt_lengths
                )));
            }
            // What an earlier version has not noted is not another.
            let noted = |then: &DataFacts| match then.tokenizer.is_empty() {
                true => DataFacts { tokenizer: now.tokenizer.clone(), vocab: now.vocab, ..then.clone() },
                false => then.clone(),
            };
            if let Some(then) = then.map(noted).filter(|then| then != now) {
                let text = |facts: &DataFacts| {
                    let train = facts.train_tokens.map_or("endless".to_owned(), |n| n.to_string());
                    let entropy = facts.unigram_nll.map_or(String::new(), |e| format!(" of {e} nats"));
                    let mark = facts.fingerprint.get(..8).unwrap_or_default();
                    format!("{train} training tokens ({mark}…), {} to validate on{entropy}", facts.val_tokens)
                };
                return Err(Error::new(format!(
                    "`{}` has changed since models were trained on it: {} then, {} now; --out another folder",
                    now.name,
                    text(&then),
                    text(now)
                )));
            }
        }
        Ok(())
    }

    /// The trainings of `plan` that are not done and have saves.
    fn begun(&self, plan: &Plan) -> Result<Vec<Begun>> {
        let done: Vec<Cell> = self.results.rows.iter().map(Row::cell).collect();
        let mut begun = Vec::new();
        for cell in plan.cells().into_iter().filter(|cell| !done.contains(cell) && !self.ruined.contains(cell)) {
            let folder = self.folder().join(plan.folder_of(&cell)?);
            begun.extend((!saves::all(&folder).is_empty()).then_some(Begun { cell, folder }));
        }
        Ok(begun)
    }

    fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new(""))
    }

    /// What the user should know: how much is done, what starts again, and whether the machine is another. What goes on says so
    /// itself, when its save has been read.
    pub(crate) fn notes(&self, plan: &Plan) -> Result<Vec<String>> {
        let done: Vec<Cell> = self.results.rows.iter().map(Row::cell).collect();
        let all = plan.cells();
        let mut notes = vec![format!("resuming: {} of {} models are done", done.len(), all.len())];
        let begun = self.begun(plan)?;
        let last = self.records.last().and_then(|record| Some((cell_of(record)?, record.step)));
        let anew = |cell: &Cell| !done.contains(cell) && all.contains(cell) && begun.iter().all(|b| b.cell != *cell);
        if let Some((cell, step)) = last.filter(|(cell, _)| anew(cell)) {
            notes.push(format!("{cell} was interrupted after step {step} and starts again from its beginning"));
        }
        let now = Machine::here();
        if let Some(row) = self.results.rows.iter().find(|row| row.machine != now).filter(|_| done.len() < all.len()) {
            notes.push(format!("{} was trained with {}, this is {now}", row.cell(), row.machine));
        }
        notes.extend(self.lost.iter().cloned());
        Ok(notes)
    }

    /// Leaves of the run in `folder` what is finished or saved, for `plan` to go on with, and returns its rows.
    ///
    /// # Errors
    /// When a file cannot be written or removed; then everything finished is still there.
    pub(crate) fn keep(self, folder: &Path, plan: &Plan) -> Result<Vec<Row>> {
        let begun = self.begun(plan)?;
        let Old { results, records, .. } = self;
        let cells: Vec<Cell> = results.rows.iter().map(Row::cell).chain(begun.iter().map(|b| b.cell.clone())).collect();
        // Lines beyond a save go when its training goes on: only it knows whether the newest is of use.
        let kept: Vec<Record> =
            records.into_iter().filter(|record| cell_of(record).is_some_and(|cell| cells.contains(&cell))).collect();
        log::replace(&folder.join(LOG), &kept)?;
        let folders: Vec<PathBuf> = results.rows.iter().map(|row| folder.join(&row.folder)).collect();
        clear_models(folder, &folders, &begun.into_iter().map(|b| b.folder).collect::<Vec<_>>())?;
        let old = &results.plan.corpora;
        // The picture of one corpus and those of several have other names.
        if (old.len() > 1) != (plan.corpora.len() > 1) {
            clear_pictures(folder, old.iter().map(String::as_str))?;
        }
        Ok(results.rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Data;
    use crate::run::{Existing, Run};
    use crate::scratch::Scratch;

    fn plan(corpora: &[&str], seeds: &[u64], models: &[&str]) -> Plan {
        let names = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let tiny = Settings { steps: 2, seq: 16, batch: 2, eval_tokens: 32, d_model: 16, params: 5000, ..nano() };
        let settings = Settings { seed: seeds[0], ..tiny };
        let (experiment, preset) = ("compare tango".to_owned(), "nano".to_owned());
        Plan { experiment, preset, settings, corpora: names(corpora), seeds: seeds.into(), models: names(models) }
    }

    fn nano() -> Settings {
        Settings::preset("nano").unwrap()
    }

    fn begin(plan: Plan, folder: &Path, existing: Existing) -> Result<Run> {
        let data = plan.corpora.iter().map(|name| Data::open(name, 0.1, plan.settings.seq)).collect::<Result<_>>()?;
        Run::begin(plan, data, folder, existing)
    }

    /// Trains up to `most` cells, and finishes when that is all.
    fn train(mut run: Run, most: usize) -> Vec<String> {
        let cells = run.cells();
        cells.iter().take(most).for_each(|cell| assert!(run.train(cell, &mut |_| {}).unwrap().is_none()));
        if cells.len() <= most {
            run.finish().unwrap();
        }
        run.notes
    }

    /// What a refused attempt says; it must leave every file as it was.
    #[track_caller]
    fn refused(plan: Plan, folder: &Path) -> String {
        let files = || {
            let mut all: Vec<_> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
            all.sort();
            all.into_iter().map(|path| (fs::read(&path).ok(), path)).collect::<Vec<_>>()
        };
        let before = files();
        let error = begin(plan, folder, Existing::Resume).err().expect("must be refused").to_string();
        assert!(files() == before, "{error}");
        error
    }

    #[test]
    fn a_run_goes_on_where_it_stopped_and_grows() {
        let dir = Scratch::new();
        let out = dir.path().join("out");
        let text = dir.file("text.txt", "some text, and more of it. ".repeat(40));
        let both = ["math", text.to_str().unwrap()];
        let first = plan(&["math"], &[3], &["tango", "recurrent"]);
        assert!(train(begin(first.clone(), &out, Existing::Resume).unwrap(), 1).is_empty(), "an empty folder");
        // The second model was begun: a line in the log, a file in its folder.
        let mut cut = log::read(out.join(LOG)).unwrap();
        let begun = Record { model: Some("recurrent".into()), step: 1, ..cut[0].clone() };
        log::Writer::append(out.join(LOG)).unwrap().write(&begun).unwrap();
        let stale = dir.file("out/recurrent/model.safetensors", "stale");
        let run = begin(first, &out, Existing::Resume).unwrap();
        assert!(!stale.exists());
        assert_eq!(log::read(out.join(LOG)).unwrap(), cut);
        let notes = train(run, 9).join("; ");
        assert!(
            notes.contains("1 of 2 models are done")
                && notes.contains("`recurrent` on `math` with seed 3 was interrupted after step 1"),
            "{notes}"
        );
        cut = log::read(out.join(LOG)).unwrap();

        let model = fs::read(out.join("tango/model.safetensors")).unwrap();
        let wide = plan(&both, &[5, 3], &["recurrent", "wango", "tango"]);
        train(begin(wide.clone(), &out, Existing::Resume).unwrap(), 99);
        let old = read(&out, "compare tango").unwrap();
        let cells: Vec<Cell> = old.results.rows.iter().map(Row::cell).collect();
        assert_eq!(cells, wide.cells(), "rows stand in the order of the plan");
        assert!(old.results.finished && old.records[..cut.len()] == cut[..]);
        assert_eq!(fs::read(out.join("tango/model.safetensors")).unwrap(), model);
        let folders: Vec<&str> = old.results.rows.iter().map(|row| row.folder.as_str()).collect();
        assert_eq!(folders[3..6], ["recurrent", "math/seed-3/wango", "tango"]);
        assert!(folders.iter().all(|folder| out.join(folder).join("model.safetensors").exists()));
        assert_eq!(old.results.summary.len(), 6);
        assert!(!out.join("run.lock").exists());
    }

    #[test]
    fn another_run_is_not_continued_and_stays_as_it_is() {
        let dir = Scratch::new();
        let out = dir.path().join("out");
        let text = dir.file("text.txt", "some text, and more of it. ".repeat(40));
        let name = text.to_str().unwrap();
        let asked = plan(&[name], &[0], &["tango", "wango"]);
        train(begin(asked.clone(), &out, Existing::Refuse).unwrap(), 1);
        let with = |settings: Settings| Plan { settings, ..asked.clone() };
        let says = |plan: Plan, phrases: &[&str]| {
            let error = refused(plan, &out);
            assert!(phrases.iter().all(|phrase| error.contains(phrase)), "{error}");
        };
        let settings = asked.settings.clone();
        says(with(Settings { steps: 3, ..settings.clone() }), &["had steps 2, now it is 3", "results.json"]);
        says(with(Settings { lr: 0.5, ..settings }), &["had lr 0.003, now it is 0.5"]);
        says(
            Plan { experiment: "train tango".into(), ..asked.clone() },
            &["its experiment must be `train tango`, found `compare tango`"],
        );
        says(plan(&[name], &[0], &["wango"]), &["has `tango` on `", "with seed 0 finished, which is not asked for"]);
        says(plan(&[name], &[1, 2], &["tango"]), &["with seed 0 finished"]);
        says(plan(&["math"], &[0], &["tango"]), &["finished, which is not asked for"]);
        fs::write(&text, "some text, and more of IT. ".repeat(40)).unwrap();
        says(asked.clone(), &["has changed since", "972 training tokens"]);
        // As long, with as many bytes of each kind.
        fs::write(&text, "some text, and mroe of it. ".repeat(40)).unwrap();
        says(asked.clone(), &["has changed since"]);
        fs::write(&text, "some text, and more of it. ".repeat(40)).unwrap();

        let damage = |file: &str, to: &str, phrases: &[&str]| {
            let path = out.join(file);
            let good = fs::read(&path).unwrap();
            fs::write(&path, to).unwrap();
            says(asked.clone(), phrases);
            fs::write(&path, good).unwrap();
        };
        damage(RESULTS, "{", &["results.json` is damaged", "not JSON: EOF"]);
        let some = |more: &str| format!("{{\"finished\": false{more}, \"models\": [\"tango\"]}}");
        damage(RESULTS, &some(""), &["cannot be resumed from: its experiment must be `compare tango`, found none"]);
        damage(RESULTS, &some(", \"experiment\": \"compare tango\""), &["cannot be resumed from", "missing field"]);
        let good = fs::read_to_string(out.join(RESULTS)).unwrap();
        let elsewhere = good.replace("\"folder\": \"tango\"", "\"folder\": \"../tango\"");
        assert_ne!(elsewhere, good);
        damage(RESULTS, &elsewhere, &["the folder of `tango` on `", "must be `tango` or `", "found `../tango`"]);
        let mut twice: Results = serde_json::from_slice(&fs::read(out.join(RESULTS)).unwrap()).unwrap();
        twice.rows.push(twice.rows[0].clone());
        let twice = serde_json::to_string(&twice).unwrap();
        damage(RESULTS, &twice, &["results.json` cannot be resumed from: `tango` on `", "has more than one row"]);
        damage(LOG, "{\"step\": 1}\n", &["log.jsonl` line 1: not a log record"]);
        damage(LOG, "", &["has 0 of the 2 steps of `tango`"]);
        fs::rename(out.join(RESULTS), out.join("results.json.partial")).unwrap();
        says(asked.clone(), &["has no results.json", "--restart"]);
        fs::rename(out.join("results.json.partial"), out.join(RESULTS)).unwrap();
        train(begin(asked.clone(), &out, Existing::Resume).unwrap(), 9);

        // Models that are gone, cut or exchanged are trained again, to the same bits.
        let model = |name: &str| out.join(name).join("model.safetensors");
        let (tango, wango) = (fs::read(model("tango")).unwrap(), fs::read(model("wango")).unwrap());
        for (name, good, bad) in
            [("tango", &tango, None), ("wango", &wango, Some(&wango[..5000])), ("wango", &wango, Some(&tango[..]))]
        {
            match bad {
                None => fs::remove_file(model(name)).unwrap(),
                Some(bytes) => fs::write(model(name), bytes).unwrap(),
            }
            let notes = train(begin(asked.clone(), &out, Existing::Resume).unwrap(), 1).join("; ");
            assert!(
                notes.contains(&format!("`{name}` on")) && notes.contains("is lost and is trained again"),
                "{notes}"
            );
            assert!(fs::read(model(name)).unwrap() == *good, "{name}");
        }
    }
}
