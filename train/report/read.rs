//! A run's folder, read for the page: finished or not, of this version or an earlier one, of any experiment that has rows and
//! a log.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::folder::RESULTS;
use crate::grid::run::CELLS;
use crate::log::{self, Record};
use crate::{Error, Result};

/// What a folder says. The results stay JSON: what a version did not know is not there, and is left out of the page.
#[derive(Clone, Debug)]
pub struct RunData {
    /// What the page calls it.
    pub name: String,
    pub(super) results: Value,
    pub(super) records: Vec<Record>,
}

impl RunData {
    /// Reads several runs and gives them names that differ: the last part of their paths, with the one before where needed.
    ///
    /// # Errors
    /// When one of them is no run, or its files are damaged.
    pub fn read(folders: &[PathBuf]) -> Result<Vec<RunData>> {
        let mut runs = folders.iter().map(|folder| read(folder)).collect::<Result<Vec<_>>>()?;
        for parts in 1..=3 {
            let names: Vec<String> = folders.iter().map(|folder| name(folder, parts)).collect();
            for (n, run) in runs.iter_mut().enumerate() {
                run.name.clone_from(&names[n]);
                let earlier = names[..n].iter().filter(|other| *other == &names[n]).count();
                if parts == 3 && earlier > 0 {
                    run.name += &format!(" ({})", earlier + 1);
                }
            }
            if (1..names.len()).all(|n| !names[..n].contains(&names[n])) {
                break;
            }
        }
        Ok(runs)
    }
}

/// The last `parts` of a path.
fn name(folder: &Path, parts: usize) -> String {
    let folder = fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
    let all: Vec<String> = folder.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    all[all.len().saturating_sub(parts)..].join("/")
}

fn read(folder: &Path) -> Result<RunData> {
    let (name, path) = (folder.display(), folder.join(RESULTS));
    if !folder.is_dir() {
        return Err(Error::new(format!("`{name}` is no folder; expected the folder of a run")));
    }
    if !path.is_file() {
        return Err(Error::new(format!("`{name}` holds no run: expected `{RESULTS}` in it, found none")));
    }
    let text = fs::read(&path).map_err(|e| Error::io("read the results", &path, e))?;
    let results: Value = serde_json::from_slice(&text)
        .map_err(|e| Error::new(format!("`{}` is damaged: it is not JSON: {e}", path.display())))?;
    if !results["finished"].is_boolean() || !results["experiment"].is_string() {
        return Err(Error::new(format!(
            "`{}` is damaged, or no run of kumiki's wrote it: it does not say what was run and whether it is finished",
            path.display()
        )));
    }
    if folder.join(CELLS).is_dir() {
        return Err(Error::new(format!(
            "`{name}` holds a grid, whose cells are runs of their own; name some of `{name}/{CELLS}/…`"
        )));
    }
    let log = folder.join(crate::folder::LOG);
    // A run that was killed as it began has none.
    let records = if log.exists() { log::read(&log)? } else { vec![] };
    Ok(RunData { name: String::new(), results, records })
}

impl RunData {
    pub(super) fn text(&self, key: &str) -> &str {
        self.results[key].as_str().unwrap_or_default()
    }

    pub(super) fn rows(&self) -> &[Value] {
        self.results["rows"].as_array().map_or(&[], Vec::as_slice)
    }

    /// What is known of the corpora.
    pub(super) fn data(&self) -> &[Value] {
        self.results["data"].as_array().map_or(&[], Vec::as_slice)
    }

    /// The settings, nested ones as `outer.inner`, in the order of the file.
    pub(super) fn settings(&self) -> Vec<(String, String)> {
        let mut out = vec![];
        flatten("", &self.results["settings"], &mut out);
        out
    }

    /// The name and fingerprint of a corpus: what tells whether two runs read the same text. Of a path its last part; the rest
    /// is the business of whoever made the run.
    pub(super) fn corpus(&self, name: &str) -> (String, String) {
        let facts = self.data().iter().find(|facts| facts["name"] == name);
        let print = facts.and_then(|facts| facts["fingerprint"].as_str()).unwrap_or_default();
        let last = Path::new(name).file_name().map_or(name.into(), |last| last.to_string_lossy());
        (last.into_owned(), print.to_owned())
    }
}

/// JSON as people write it.
pub(super) fn plain(value: &Value) -> String {
    match value {
        Value::Null => "–".to_owned(),
        Value::String(text) => text.clone(),
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
        Value::Array(all) => all.iter().map(plain).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}

fn flatten(outer: &str, value: &Value, out: &mut Vec<(String, String)>) {
    let Value::Object(map) = value else { return };
    for (key, value) in map {
        let key = if outer.is_empty() { key.clone() } else { format!("{outer}.{key}") };
        match value {
            Value::Object(_) => flatten(&key, value, out),
            value => out.push((key, plain(value))),
        }
    }
}
