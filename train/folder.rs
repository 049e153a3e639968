//! The folder of a run as it is found on disk: what it holds, and whether somebody works in it.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use kumiki_tensor::files;

use crate::checkpoint::{MODEL_FILE, is_seed};
use crate::data::short_name;
use crate::tokenizer::TOKENIZER_FILE;
use crate::{Error, Result, gp, saves, zoo};

pub(crate) const RESULTS: &str = "results.json";
pub(crate) const LOG: &str = "log.jsonl";
pub(crate) const CURVES: &str = "curves.svg";
/// The same as pixels.
const CURVES_PNG: &str = "curves.png";
/// Of `ablate` alone.
pub(crate) const ABLATION: &str = "ablation.svg";
/// Of `gp` alone.
pub(crate) const RMSE: &str = "rmse.svg";
/// Of `gp` alone.
pub(crate) const FUNCTIONS: &str = "functions.svg";
const PICTURES: [&str; 5] = [CURVES, CURVES_PNG, ABLATION, RMSE, FUNCTIONS];
pub(crate) const LOCK: &str = "run.lock";
/// The folder of event files, for TensorBoard.
pub(crate) const EVENTS: &str = "events";
/// What they are called; here because not every program has [`crate::tensorboard`].
pub(crate) const EVENTS_FILE: &str = "events.out.tfevents.0.kumiki";

/// What a folder holds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Nothing,
    Finished,
    Unfinished,
    Other(String),
}

/// The name under which earlier versions wrote a file before they renamed it.
fn partial(name: &str) -> String {
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
    if files::is_special(&results) {
        return Ok(Found::Other(RESULTS.to_owned()));
    }
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
        let path = folder.join(&name);
        let ours = match path.is_dir() {
            true if name == EVENTS => holds_events(&path)?,
            true => is_models(&path)?,
            false => is_own(&name) && !files::is_special(&path),
        };
        if ours {
            found = Found::Unfinished;
        } else if name != LOCK {
            return Ok(Found::Other(name));
        }
    }
    Ok(found)
}

/// Whether a run names one of its files so.
pub(crate) fn is_own(name: &str) -> bool {
    let picture = name.strip_suffix(&partial("")).unwrap_or(name);
    let of_corpus = picture.starts_with("curves-") && [".svg", ".png"].iter().any(|end| picture.ends_with(end));
    of_corpus || files::is_temporary(name) || [RESULTS, LOG].iter().chain(&PICTURES).any(|whole| is(name, whole))
}

/// Whether a run may call a model so.
fn is_model(name: &str) -> bool {
    zoo::is_model(name) || gp::settings::is_model(name)
}

/// Replaces `results.json`, whole or not at all.
pub(crate) fn write_results(folder: &Path, results: &impl serde::Serialize) -> Result<()> {
    let path = folder.join(RESULTS);
    let text =
        serde_json::to_string_pretty(results).map_err(|e| Error::new(format!("cannot write the results: {e}")))?;
    files::replace(&path, &[text.as_bytes(), b"\n"]).map_err(|e| Error::io("write the results", &path, e))
}

/// Whether `folder` is that of a model, of a seed with models, or of a corpus with folders `seed-<n>` of models, and holds
/// nothing else.
fn is_models(folder: &Path) -> Result<bool> {
    if is_seed(folder) && holds_models(folder)? {
        return Ok(true);
    }
    let inside = names(folder)?;
    // A folder is made before its first file is written.
    let mut ours = is_of_model(folder) || !inside.is_empty();
    for name in inside {
        let path = folder.join(&name);
        ours &= match path.is_dir() {
            false => {
                is_of_model(folder) && (is(&name, MODEL_FILE) || name == TOKENIZER_FILE || files::is_temporary(&name))
            }
            true if is_of_model(folder) && (saves::is_save(&path) || files::is_temporary(&name)) => true,
            true => is_seed(&path) && holds_models(&path)?,
        };
    }
    Ok(ours)
}

/// Whether there is nothing in `folder` and the folders in it but event files.
fn holds_events(folder: &Path) -> Result<bool> {
    for name in names(folder)? {
        let path = folder.join(&name);
        let ours = match path.is_dir() {
            true => holds_events(&path)?,
            false => name == EVENTS_FILE || files::is_temporary(&name),
        };
        if !ours {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Removes the event files of a run, and what folders become empty by that.
pub(crate) fn clear_events(folder: &Path) -> Result<()> {
    if folder.is_symlink() || !folder.is_dir() {
        return Ok(());
    }
    for name in names(folder)? {
        match folder.join(&name).is_dir() {
            true => clear_events(&folder.join(&name))?,
            false if name == EVENTS_FILE || files::is_temporary(&name) => remove(folder, &name)?,
            false => {}
        }
    }
    // It may have other things.
    let _ = fs::remove_dir(folder);
    Ok(())
}

/// Whether `folder` has the name of a model.
fn is_of_model(folder: &Path) -> bool {
    folder.file_name().and_then(|name| name.to_str()).is_some_and(is_model)
}

/// Whether everything in `folder` is the folder of a model.
fn holds_models(folder: &Path) -> Result<bool> {
    let below = names(folder)?.into_iter().map(|name| folder.join(name));
    let all = below.map(|below| Ok(is_of_model(&below) && is_models(&below)?)).collect::<Result<Vec<_>>>()?;
    Ok(all.into_iter().all(|ours| ours))
}

fn names(folder: &Path) -> Result<Vec<String>> {
    let failed = |e| Error::io("read the folder", folder, e);
    let entries = fs::read_dir(folder).map_err(failed)?;
    entries.map(|entry| Ok(entry.map_err(failed)?.file_name().to_string_lossy().into_owned())).collect()
}

/// Where models of a run may lie in its folder: `<model>`, `seed-<n>/<model>` and `<corpus>/seed-<n>/<model>`, as they are
/// found there.
fn model_folders(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut parents = vec![folder.to_owned()];
    for name in names(folder)?.iter().map(|name| folder.join(name)).filter(|path| path.is_dir()) {
        parents.extend(names(&name)?.iter().map(|seed| name.join(seed)).filter(|path| is_seed(path) && path.is_dir()));
        parents.extend(is_seed(&name).then_some(name));
    }
    let mut models = Vec::new();
    for parent in parents {
        models.extend(names(&parent)?.iter().filter(|name| is_model(name)).map(|name| parent.join(name)));
    }
    models.retain(|path| path.is_dir());
    Ok(models)
}

fn remove(folder: &Path, name: &str) -> Result<()> {
    for file in [folder.join(partial(name)), folder.join(name)] {
        match fs::remove_file(&file) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(Error::io("remove", &file, e)),
            _ => {}
        }
    }
    Ok(())
}

/// Removes what a process left in a folder that was killed as it wrote or removed.
fn remove_temporary(folder: &Path) -> Result<()> {
    for name in names(folder)?.iter().filter(|name| files::is_temporary(name)) {
        let path = folder.join(name);
        match path.is_dir() {
            true => fs::remove_dir_all(&path).map_err(|e| Error::io("remove", &path, e))?,
            false => remove(folder, name)?,
        }
    }
    Ok(())
}

/// Removes the models of a run but for those in the folders `keep`, with their saves unless they are in the folders `begun`;
/// what folders become empty by that, and what was not written to its end.
pub(crate) fn clear_models(folder: &Path, keep: &[PathBuf], begun: &[PathBuf]) -> Result<()> {
    remove_temporary(folder)?;
    let models = model_folders(folder)?;
    models.iter().try_for_each(|model| remove_temporary(model))?;
    for model in models.iter().filter(|model| !keep.contains(model)) {
        [MODEL_FILE, TOKENIZER_FILE].iter().try_for_each(|name| remove(model, name))?;
        if begun.contains(model) {
            continue;
        }
        for (_, save) in saves::all(model) {
            files::remove_folder(&save).map_err(|e| Error::io("remove", &save, e))?;
        }
        // A folder that is not empty stays, and so do those above it.
        let mut above = model.ancestors().take_while(|path| *path != folder);
        while above.next().is_some_and(|path| fs::remove_dir(path).is_ok()) {}
    }
    Ok(())
}

/// Removes the pictures of a run. Those of single corpora are known by their names in `corpora`.
pub(crate) fn clear_pictures<'a>(folder: &Path, corpora: impl IntoIterator<Item = &'a str>) -> Result<()> {
    let shorts = corpora.into_iter().filter_map(|name| short_name(name).ok());
    let names = shorts.flat_map(|short| [curves_of(&short), format!("curves-{short}.png")]);
    names.chain(PICTURES.map(str::to_owned)).try_for_each(|name| remove(folder, &name))
}

/// The picture of one of several corpora.
pub(crate) fn curves_of(short: &str) -> String {
    format!("curves-{short}.svg")
}

/// Removes the files of a run, and nothing else. Its results go last: until then the folder is known for what it is.
pub(crate) fn clear(folder: &Path) -> Result<()> {
    let results = folder.join(RESULTS);
    let results: serde_json::Value = match results.is_file().then(|| fs::read(&results)) {
        Some(Ok(bytes)) => serde_json::from_slice(&bytes).unwrap_or_default(),
        _ => serde_json::Value::Null,
    };
    let corpora = results["corpora"].as_array().into_iter().flatten().filter_map(|name| name.as_str());
    clear_models(folder, &[], &[])?;
    clear_pictures(folder, corpora)?;
    clear_events(&folder.join(EVENTS))?;
    [LOG, RESULTS].iter().try_for_each(|name| remove(folder, name))
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
        // A pipe would be waited for, for ever.
        if files::is_special(&path) {
            return Err(Error::new(format!("`{}` is no regular file; expected the lock of a run", path.display())));
        }
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
            &["book.txt/seed-0/tango/model.safetensors", "book.txt/seed-12/wango/model.safetensors.partial"],
            &["tango/model.safetensors", "tango/seed-0/tango/model.safetensors"],
            &["seed-0/transformer/model.safetensors", "seed-1/transformer/model.safetensors.partial", "rmse.svg"],
            &["seed-0/seed-0/tango/model.safetensors", "functions.svg.partial"],
            &[".kumiki-12-3.partial", "tango/.kumiki-12-4.partial"],
            &["tango/step-10/model.safetensors", "tango/step-20/optimizer.safetensors", "tango/step-20/state.json"],
            &["tango/.kumiki-1-2.partial/state.json", "a/seed-0/tango/step-3/.kumiki-3-1.partial"],
            &["log.jsonl", "events/tango/events.out.tfevents.0.kumiki", "events/tango/.kumiki-1-2.partial"],
            &["events/a/seed-0/tango/events.out.tfevents.0.kumiki"],
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
        for name in [
            "thesis.txt",
            "tango/thesis.txt",
            "results.json",
            "tango",
            "model.safetensors",
            "book/seed-0/tango/thesis.txt",
            "book/seed-x/tango/model.safetensors",
            "book/seed-0/model.safetensors",
            "book/tango/model.safetensors",
            "seed-0/thesis.txt",
            "seed-0/transformer/thesis.txt",
            "tango/step-10/thesis.txt",
            "tango/step-010/state.json",
            "step-10/state.json",
            "events/thesis.txt",
            "events/tango/events.out.tfevents.1.host",
        ] {
            let dir = Scratch::new();
            dir.file("log.jsonl", "");
            dir.file(name, "{}");
            assert!(matches!(look(dir.path()).unwrap(), Found::Other(_)), "{name}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_is_no_file_of_a_run_and_is_not_waited_for() {
        for name in [RESULTS, LOG, CURVES] {
            let dir = Scratch::new();
            assert!(std::process::Command::new("mkfifo").arg(dir.path().join(name)).status().unwrap().success());
            assert_eq!(look(dir.path()).unwrap(), Found::Other(name.to_owned()));
        }
        let dir = Scratch::new();
        assert!(std::process::Command::new("mkfifo").arg(dir.path().join(LOCK)).status().unwrap().success());
        assert!(Lock::take(dir.path()).unwrap_err().to_string().contains("run.lock` is no regular file"));
    }

    #[test]
    fn models_that_are_kept_stay_and_empty_folders_go() {
        let dir = Scratch::new();
        let kept = dir.file("a/seed-0/tango/model.safetensors", "");
        let cut = dir.file("a/seed-0/tango/.kumiki-1-1.partial", "");
        dir.file("a/seed-0/wango/model.safetensors", "");
        dir.file("b/seed-1/tango/model.safetensors.partial", "");
        dir.file("c/seed-1/tango/model.safetensors", "");
        let mine = dir.file("c/mine.txt", "");
        clear_models(dir.path(), &[dir.path().join("a/seed-0/tango")], &[]).unwrap();
        assert!(kept.exists() && mine.exists() && !cut.exists());
        assert!(["a/seed-0/wango", "b", "c/seed-1"].iter().all(|gone| !dir.path().join(gone).exists()));
        dir.file(RESULTS, r#"{"finished": false, "corpora": ["texts/a"]}"#);
        ["curves-a.svg", "curves-a.png", "curves.png"].iter().for_each(|name| drop(dir.file(name, "")));
        let picture = dir.file("curves-mine.svg", "");
        clear(dir.path()).unwrap();
        assert!(picture.exists() && !kept.exists());
        assert!(["curves-a.svg", "curves-a.png", "curves.png"].iter().all(|gone| !dir.path().join(gone).exists()));
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
