//! What kind of text a corpus is, told from the names of its files alone.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::marks::Marking;

/// The kinds of corpora that are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Questions and answers: `math`, or files named `area__module.txt`.
    Mathematics,
    /// Files of which all are `.lean`.
    Lean,
    /// Everything else.
    Prose,
}

impl Kind {
    /// Of a text of `files`.
    pub(crate) fn of(files: &[PathBuf]) -> Kind {
        let lean = |file: &PathBuf| file.extension().is_some_and(|e| e.eq_ignore_ascii_case("lean"));
        if !files.is_empty() && files.iter().all(lean) {
            Kind::Lean
        } else if !files.is_empty() && files.iter().all(|file| is_module(file)) {
            Kind::Mathematics
        } else {
            Kind::Prose
        }
    }

    /// How the classes of its tokens are found.
    pub(crate) fn marking(self) -> Option<Marking> {
        match self {
            Kind::Mathematics => Some(Marking::Lines),
            Kind::Lean => Some(Marking::Lean),
            Kind::Prose => None,
        }
    }
}

/// Whether `file` is named `area__module.txt`, as the files of DeepMind Mathematics are.
fn is_module(file: &Path) -> bool {
    let text = file.extension().is_some_and(|e| e.eq_ignore_ascii_case("txt"));
    let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    text && stem.split_once("__").is_some_and(|(area, module)| !area.is_empty() && !module.is_empty())
}

/// DeepMind Mathematics as it is unpacked: what to train on, and what to validate on.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unpacked {
    /// Names of the folders `train…`.
    pub folders: Vec<String>,
    /// Their files.
    pub train: Vec<PathBuf>,
    /// Those of `interpolate`.
    pub val: Vec<PathBuf>,
}

impl Unpacked {
    /// `files` of `folder` in their two parts, if it is such a folder: every file is named `area__module.txt`, and there
    /// are folders `train…` and `interpolate`.
    pub(crate) fn find(folder: &Path, files: &[PathBuf]) -> Option<Unpacked> {
        if !files.iter().all(|file| is_module(file)) {
            return None;
        }
        let mut found = Unpacked { folders: vec![], train: vec![], val: vec![] };
        for file in files {
            let mut below = file.strip_prefix(folder).ok()?.components();
            let first = below.next()?.as_os_str().to_str()?;
            if below.next().is_none() {
                continue;
            }
            if first.starts_with("train") {
                if found.folders.last().is_none_or(|last| last != first) {
                    found.folders.push(first.to_owned());
                }
                found.train.push(file.clone());
            } else if first == "interpolate" {
                found.val.push(file.clone());
            }
        }
        (!found.train.is_empty() && !found.val.is_empty()).then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(names: &[&str]) -> Vec<PathBuf> {
        names.iter().map(PathBuf::from).collect()
    }

    #[test]
    fn names_tell_the_kind() {
        for (names, kind) in [
            (&["a/B.lean", "a.LEAN"][..], Kind::Lean),
            (&["a/B.lean", "a/README.md"], Kind::Prose),
            (&["d/algebra__linear_1d.txt", "d/numbers__gcd.TXT"], Kind::Mathematics),
            (&["algebra__linear_1d.txt", "notes.txt"], Kind::Prose),
            (&["__init.txt"], Kind::Prose),
            (&["a__.txt"], Kind::Prose),
            (&["a__b.md"], Kind::Prose),
            (&["book"], Kind::Prose),
            (&[], Kind::Prose),
        ] {
            assert_eq!(Kind::of(&paths(names)), kind, "{names:?}");
        }
    }

    #[test]
    fn the_unpacked_data_set_has_its_own_parts() {
        let all =
            ["d/extrapolate/a__b.txt", "d/interpolate/a__b.txt", "d/train-easy/a__b.txt", "d/train-hard/a__b.txt"];
        let find = |names: &[&str]| Unpacked::find(Path::new("d"), &paths(names));
        let found = find(&all).unwrap();
        assert_eq!(found.folders, ["train-easy", "train-hard"]);
        assert_eq!((found.train, found.val), (paths(&all[2..]), paths(&all[1..2])));
        assert_eq!(find(&all[..2]), None, "nothing to train on");
        assert_eq!(find(&all[2..]), None, "nothing held out");
        assert_eq!(find(&[all[1], all[2], "d/train-easy/notes.txt"]), None);
        assert_eq!(find(&["d/interpolate/a__b.txt", "d/train__x.txt"]), None, "a file is no folder");
    }
}
