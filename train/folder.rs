//! The folder of a run as it is found on disk: what it holds, and whether somebody works in it.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::Path;

use crate::checkpoint::MODEL_FILE;
use crate::settings::MODELS;
use crate::{Error, Result};

pub(crate) const RESULTS: &str = "results.json";
pub(crate) const LOG: &str = "log.jsonl";
pub(crate) const CURVES: &str = "curves.svg";
pub(crate) const LOCK: &str = "run.lock";

/// What a folder holds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Nothing,
    Finished,
    Unfinished,
    Other(String),
}

/// The name under which a file is written before it is renamed.
pub(crate) fn partial(name: &str) -> String {
    format!("{name}.partial")
}

/// Whether `name` is that of a file which `whole` becomes or is.
fn is(name: &str, whole: &str) -> bool {
    name == whole || name == partial(whole)
}

/// What is in `folder`. Files of a run without `results.json` are what a run leaves that is killed as it begins.
pub(crate) fn look(folder: &Path) -> Result<Found> {
    match fs::metadata(folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Found::Nothing),
        Err(e) => return Err(Error::io("open the folder", folder, e)),
        Ok(meta) if !meta.is_dir() => {
            return Err(Error::new(format!("`{}` is a file; --out needs a folder", folder.display())));
        }
        Ok(_) => {}
    }
    let results = folder.join(RESULTS);
    // Only a regular file is opened: a pipe of that name would wait for ever.
    if results.is_file()
        && let Ok(bytes) = fs::read(&results)
    {
        let value = serde_json::from_slice::<serde_json::Value>(&bytes).unwrap_or_default();
        return Ok(match value["finished"].as_bool() {
            Some(true) => Found::Finished,
            Some(false) => Found::Unfinished,
            // Ours is replaced whole and always has the key.
            None => Found::Other(RESULTS.to_owned()),
        });
    }
    let mut found = Found::Nothing;
    for name in names(folder)? {
        let model = MODELS.contains(&name.as_str()) && folder.join(&name).is_dir();
        let ours = match model {
            true => names(&folder.join(&name))?.iter().all(|file| is(file, MODEL_FILE)),
            false => [RESULTS, LOG, CURVES].iter().any(|whole| is(&name, whole)),
        };
        if ours {
            found = Found::Unfinished;
        } else if name != LOCK {
            return Ok(Found::Other(name));
        }
    }
    Ok(found)
}

fn names(folder: &Path) -> Result<Vec<String>> {
    let failed = |e| Error::io("read the folder", folder, e);
    let entries = fs::read_dir(folder).map_err(failed)?;
    entries.map(|entry| Ok(entry.map_err(failed)?.file_name().to_string_lossy().into_owned())).collect()
}

/// Removes the files of a run, and nothing else. Its results go last: until then the folder is known for what it is.
pub(crate) fn clear(folder: &Path) -> Result<()> {
    let models = MODELS.map(|model| (folder.join(model), MODEL_FILE));
    for (folder, name) in models.into_iter().chain([LOG, CURVES, RESULTS].map(|name| (folder.to_owned(), name))) {
        for file in [folder.join(partial(name)), folder.join(name)] {
            match fs::remove_file(&file) {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(Error::io("remove", &file, e)),
                _ => {}
            }
        }
    }
    Ok(())
}

/// The right to work in a folder, for as long as it lives. The system takes it back when the process ends, however.
#[derive(Debug)]
pub(crate) struct Lock {
    // Closing the file gives the lock back.
    _file: File,
}

impl Lock {
    /// Takes the lock of `folder`, which must exist.
    ///
    /// # Errors
    /// When another run has it, or the file cannot be made.
    pub(crate) fn take(folder: &Path) -> Result<Lock> {
        let path = folder.join(LOCK);
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(|e| Error::io("create the lock", &path, e))?;
        match file.try_lock() {
            Ok(()) => Ok(Lock { _file: file }),
            // Some network file systems have no locks; to train there is better than not to.
            Err(TryLockError::Error(e)) if e.kind() == ErrorKind::Unsupported => Ok(Lock { _file: file }),
            Err(TryLockError::Error(e)) => Err(Error::io("lock", &path, e)),
            Err(TryLockError::WouldBlock) => Err(Error::new(format!(
                "another run is working in `{}`; wait for it or choose another folder with --out",
                folder.display()
            ))),
        }
    }

    /// Fails as [`Lock::take`] when another run works in `folder`; makes no file.
    pub(crate) fn check(folder: &Path) -> Result<()> {
        if folder.join(LOCK).is_file() { Lock::take(folder).map(drop) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn whatever_a_killed_run_leaves_can_be_restarted() {
        for files in [
            &["log.jsonl", "results.json.partial"][..],
            &["log.jsonl", "run.lock"],
            &["tango/model.safetensors.partial"],
            &["curves.svg.partial", "untied/model.safetensors"],
        ] {
            let dir = Scratch::new();
            files.iter().for_each(|name| drop(dir.file(name, "")));
            assert_eq!(look(dir.path()).unwrap(), Found::Unfinished, "{files:?}");
            clear(dir.path()).unwrap();
            assert!(files.iter().all(|name| *name == LOCK || !dir.path().join(name).exists()), "{files:?}");
        }
        let dir = Scratch::new();
        dir.file(LOCK, "");
        assert_eq!(look(dir.path()).unwrap(), Found::Nothing);
    }

    #[test]
    fn what_is_not_a_runs_is_left_alone() {
        for name in ["thesis.txt", "tango/thesis.txt", "results.json", "tango", "model.safetensors"] {
            let dir = Scratch::new();
            dir.file("log.jsonl", "");
            dir.file(name, "{}");
            assert!(matches!(look(dir.path()).unwrap(), Found::Other(_)), "{name}");
        }
    }

    #[test]
    fn one_run_at_a_time() {
        let dir = Scratch::new();
        Lock::check(dir.path()).unwrap();
        assert!(!dir.path().join(LOCK).exists());
        let first = Lock::take(dir.path()).unwrap();
        for again in [Lock::take(dir.path()).map(drop), Lock::check(dir.path())] {
            assert!(again.unwrap_err().to_string().contains("another run is working in"));
        }
        drop(first);
        Lock::take(dir.path()).unwrap();
    }
}
