//! Saves: what an unfinished training needs to go on exactly where it was, in folders `step-<n>` beside each other.
//!
//! ```text
//! step-<n>/tokenizer.json           unless the tokenizer's name says all
//! step-<n>/model.safetensors        the parameters, with all that makes it a model of its own (see [`checkpoint`])
//! step-<n>/optimizer.safetensors    `m.<parameter>` and `v.<parameter>`: AdamW's moments; in the header the number of steps
//! step-<n>/state.json               [`State`]
//! ```
//!
//! A save is written under a temporary name, flushed to the disk and renamed, and only then the oldest is removed: whenever
//! the process or the machine dies, the last good one is there. Nothing that files say is trusted: the three must belong
//! together, moments and parameters must fit each other.
//!
//! There is no state of a generator to save: batches, masks, blocks and gaps are functions of the seed and of the number of
//! a step or a row.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use kumiki_nn::{AdamW, Module};
use kumiki_tensor::{Tensor, files, safetensors};
use serde::{Deserialize, Serialize};

use crate::checkpoint::{self, MODEL_FILE};
use crate::log::Record;
use crate::run::Machine;
use crate::settings::Settings;
use crate::tokenizer::{TOKENIZER_FILE, Tokenizer};
use crate::trainer::{Evaluation, Trainer};
use crate::{Error, Result};

/// AdamW's moments.
pub const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// Everything that is not a tensor.
pub const STATE_FILE: &str = "state.json";
/// What state.json begins with.
const STATE: &str = "kumiki training state, version ";
const OPTIMIZER: &str = "kumiki AdamW state, version ";
const VERSION: u64 = 1;
const START: &str = "step-";

/// Where a training is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// What kind of file it is, with its version.
    pub format: String,
    /// Version of the program that wrote it.
    pub kumiki: String,
    /// The model's name.
    pub model: String,
    /// The corpus.
    pub corpus: String,
    /// Optimiser steps done.
    pub step: u64,
    /// Tokens of text seen.
    pub tokens: u64,
    /// The number of the batch that comes next: with the seed it determines the order of the text, its epochs included.
    pub next_batch: u64,
    /// The seed of batches, masks, blocks and gaps.
    pub seed: u64,
    /// The learning rate of the step that comes next.
    pub next_lr: f64,
    /// Seconds of all steps.
    pub training_seconds: f64,
    /// Seconds of all steps and evaluations.
    pub seconds: f64,
    /// The most bytes of tensors at once.
    pub peak_bytes: u64,
    /// The line of the log that belongs to the last step; absent before the first.
    pub record: Option<Record>,
    /// The evaluation after the last step; absent when there was none, or it was not come to.
    pub evaluation: Option<Evaluation>,
    /// The settings, the seed included.
    pub settings: Settings,
    /// What it was written on.
    pub machine: Machine,
}

impl State {
    /// What state files of this version say that they are.
    pub fn format() -> String {
        format!("{STATE}{VERSION}")
    }
}

/// The step in a save's name.
pub fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(START)?;
    // As it is written: `step-007` is none of ours.
    digits.parse().ok().filter(|step: &u64| step.to_string() == digits)
}

/// Whether `folder` is named as a save and has no other files than one.
pub(crate) fn is_save(folder: &Path) -> bool {
    let named = folder.file_name().and_then(|name| name.to_str()).and_then(step_of).is_some();
    let own = |name: &str| [MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, TOKENIZER_FILE].contains(&name);
    let own = |entry: fs::DirEntry| entry.file_name().to_str().is_some_and(|n| own(n) || files::is_temporary(n));
    named && fs::read_dir(folder).is_ok_and(|entries| entries.flatten().all(own))
}

/// The saves in a model's folder, the oldest first. What cannot be read has none.
pub fn all(folder: &Path) -> Vec<(u64, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut saves: Vec<(u64, PathBuf)> = (entries.map(|entry| entry.path()))
        .filter(|path| path.is_dir())
        .filter_map(|path| Some((step_of(path.file_name()?.to_str()?)?, path)))
        .collect();
    saves.sort();
    saves
}

/// Saves a training in the model's `folder`, made if need be, and removes the oldest saves but for `keep`, and none that has
/// files of somebody else. A save of the same step, which was of no use or would have been gone on from, is replaced. `notes` are those of the model's file, that of `tokenizer` among them. Gives the save's folder.
///
/// # Errors
/// When it cannot be written; then all earlier saves are still there, and the sentence says how many bytes it needed.
pub fn save(
    folder: &Path,
    state: &State,
    trainer: &Trainer,
    tokenizer: &Tokenizer,
    notes: &BTreeMap<String, String>,
    keep: usize,
) -> Result<PathBuf> {
    let path = folder.join(format!("{START}{}", state.step));
    set_aside(&path)?;
    fs::create_dir_all(folder).map_err(|e| Error::io("create the folder", folder, e))?;
    files::make_folder(&path, |path| tokenizer.keep(path).and_then(|()| write(path, state, trainer, notes)))
        .map_err(|e| e.context(&format!("cannot save step {} in `{}`", state.step, folder.display())))?;
    let mut saves = all(folder);
    saves.retain(|(step, path)| *step <= state.step && is_save(path));
    for (_, old) in &saves[..saves.len().saturating_sub(keep.max(1))] {
        files::remove_folder(old).map_err(|e| Error::io("remove the old save", old, e))?;
    }
    Ok(path)
}

/// Removes a save that is of no use.
///
/// # Errors
/// When something else has its name, or lies in it: that is not ours to remove.
fn set_aside(save: &Path) -> Result<()> {
    match save.symlink_metadata() {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Ok(meta) if meta.is_dir() && is_save(save) => {
            files::remove_folder(save).map_err(|e| Error::io("remove the useless save", save, e))
        }
        _ => Err(Error::new(format!(
            "`{}` is in the way: it is no save, or has files that are none of a save's; move it elsewhere",
            save.display()
        ))),
    }
}

fn write(path: &Path, state: &State, trainer: &Trainer, notes: &BTreeMap<String, String>) -> Result<()> {
    checkpoint::save(path, &trainer.model, notes)?;
    let optimizer = trainer.optimizer();
    let (mut tensors, params) = (Vec::new(), trainer.model.params());
    for (name, param) in &params {
        if let Some((m, v)) = optimizer.moments(param) {
            tensors.extend([(format!("m.{name}"), m), (format!("v.{name}"), v)]);
        }
    }
    let metadata = [("format", format!("{OPTIMIZER}{VERSION}")), ("steps", optimizer.steps().to_string())];
    let metadata = metadata.map(|(key, value)| (key.to_owned(), value)).into();
    let tensors = tensors.iter().map(|(name, tensor)| (name.as_str(), *tensor));
    safetensors::save(&path.join(OPTIMIZER_FILE), tensors, &metadata).map_err(|e| Error::new(e.to_string()))?;
    let text = serde_json::to_string_pretty(state).map_err(|e| Error::new(format!("cannot write the state: {e}")))?;
    let path = path.join(STATE_FILE);
    files::replace(&path, &[text.as_bytes(), b"\n"])
        .map_err(|e| Error::io(&format!("write {} bytes to", text.len() + 1), &path, e))
}

/// Reads `state.json` of a save.
///
/// # Errors
/// When it is missing, damaged, of another version, or of another step than the folder's name says.
pub fn read_state(save: &Path) -> Result<State> {
    let path = save.join(STATE_FILE);
    if files::is_special(&path) {
        return Err(Error::new(format!("`{}` is no regular file; expected a state", path.display())));
    }
    let bytes = fs::read(&path).map_err(|e| Error::io("read the state", &path, e))?;
    let failed = |why: &dyn std::fmt::Display| Error::new(format!("cannot load `{}`: {why}", path.display()));
    let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| failed(&e))?;
    let (found, expected) = (value["format"].as_str().unwrap_or("none"), State::format());
    if found != expected {
        return Err(failed(&format!("its format must be `{expected}`, found `{found}`")));
    }
    // From the text again, not from the value: its errors say in which line.
    let state: State = serde_json::from_slice(&bytes).map_err(|e| failed(&e))?;
    match save.file_name().and_then(|name| name.to_str()).and_then(step_of) {
        Some(step) if step != state.step => {
            Err(failed(&format!("it is of step {}, its folder is named after step {step}", state.step)))
        }
        _ => Ok(state),
    }
}

/// Reads a save back into `trainer`, which has the model that it is about.
///
/// # Errors
/// When a file is missing or damaged, the three do not belong together, the model is another, or `check` finds fault with the
/// state; then `trainer` is of no use.
pub fn restore(save: &Path, trainer: &mut Trainer, check: impl Fn(&State) -> Result<()>) -> Result<State> {
    let state = read_state(save)?;
    check(&state).map_err(|e| e.context(&format!("cannot resume from `{}`", save.join(STATE_FILE).display())))?;
    let dtype = state.settings.dtype()?;
    let found = checkpoint::load(&save.join(MODEL_FILE), dtype)?;
    let file = save.join(MODEL_FILE);
    let failed = |file: &Path, why: &str| Error::new(format!("cannot resume from `{}`: {why}", file.display()));
    if found.model.config() != trainer.model.config() {
        return Err(failed(&file, "it holds another model than the settings ask for"));
    }
    let step = found.notes.get("step").map_or("none", String::as_str);
    if step != state.step.to_string() {
        return Err(failed(&file, &format!("it is of step {step}, {STATE_FILE} beside it of step {}", state.step)));
    }
    let file = save.join(OPTIMIZER_FILE);
    let contents = match safetensors::load(&file) {
        Err(_) if !file.exists() => {
            return Err(failed(
                &file,
                "there is no such file, and without the moments of AdamW a training does not go on as it was; to begin a \
                 new one from these weights use --init-from",
            ));
        }
        contents => contents.map_err(|e| Error::new(e.to_string()))?,
    };
    let said = |key: &str| contents.metadata.get(key).map_or("none", String::as_str);
    let expected = format!("{OPTIMIZER}{VERSION}");
    if said("format") != expected {
        return Err(failed(&file, &format!("its format must be `{expected}`, found `{}`", said("format"))));
    }
    if said("steps") != state.step.to_string() {
        return Err(failed(&file, &format!("it is of step {}, {STATE_FILE} of step {}", said("steps"), state.step)));
    }
    trainer.model = found.model;
    let optimizer = moments(&contents, trainer, state.step).map_err(|why| failed(&file, &why))?;
    trainer.go_on(optimizer, state.step, state.tokens);
    trainer.check_finite().map_err(|e| failed(&save.join(MODEL_FILE), &e.to_string()))?;
    Ok(state)
}

/// The optimiser of the model of `trainer` after `step` steps.
fn moments(contents: &safetensors::Contents, trainer: &Trainer, step: u64) -> std::result::Result<AdamW, String> {
    let params = trainer.model.params();
    let expected = if step == 0 { 0 } else { 2 * params.len() };
    if contents.tensors.len() != expected {
        return Err(format!("it must hold {expected} tensors after step {step}, found {}", contents.tensors.len()));
    }
    let mut optimizer = trainer.optimizer().clone();
    let mut all = Vec::new();
    for (name, param) in params.iter().filter(|_| step > 0) {
        let moment = |kind: &str| -> std::result::Result<Tensor, String> {
            let name = format!("{kind}.{name}");
            let tensor = contents.tensors.get(&name).ok_or(format!("it has no tensor `{name}`"))?;
            let (expected, found) = ((param.dtype().compute(), param.shape()), (tensor.dtype(), tensor.shape()));
            let sound = |x: &f64| x.is_finite() && (kind == "m" || *x >= 0.0);
            if expected == found && !tensor.to_f64_vec().iter().all(sound) {
                let what = if kind == "m" { "finite" } else { "finite and not below 0" };
                return Err(format!("all values of `{name}` must be {what}"));
            }
            match expected == found {
                true => Ok(tensor.clone()),
                false => {
                    Err(format!("`{name}` must be {} {:?}, found {} {:?}", expected.0, expected.1, found.0, found.1))
                }
            }
        };
        all.push((&**param, moment("m")?, moment("v")?));
    }
    optimizer.restore(step, all);
    Ok(optimizer)
}

/// The newest save in a model's folder that is whole and that `check` finds right, read into a trainer that `fresh` makes;
/// `None` when there is none. What was passed over, and why, is added to `lost`, and removed.
///
/// # Errors
/// That of the newest save, when there are saves and none is of use; those of `fresh`.
pub fn newest(
    folder: &Path,
    fresh: impl Fn() -> Result<Trainer>,
    check: impl Fn(&State) -> Result<()>,
    lost: &mut Vec<String>,
) -> Result<Option<(State, Trainer)>> {
    let mut first = None;
    let mut useless = Vec::new();
    for (_, path) in all(folder).iter().rev() {
        let mut trainer = fresh()?;
        match restore(path, &mut trainer, &check) {
            Ok(state) => {
                useless.into_iter().try_for_each(set_aside)?;
                lost.extend(first.map(|e| format!("{e}; going on from step {} instead", state.step)));
                return Ok(Some((state, trainer)));
            }
            Err(e) => {
                first = first.or(Some(e));
                useless.push(path);
            }
        }
    }
    match first {
        None => Ok(None),
        Some(e) => Err(e.context("no save is of use; remove them to begin again")),
    }
}

/// Puts the model of the save `save` where finished models are: directly into the model's folder.
///
/// # Errors
/// When it cannot be written.
pub(crate) fn publish(save: &Path, folder: &Path) -> Result<()> {
    for name in [TOKENIZER_FILE, MODEL_FILE] {
        let to = folder.join(name);
        match files::link(&save.join(name), &to) {
            Err(e) if e.kind() == ErrorKind::NotFound && name != MODEL_FILE => {}
            linked => linked.map_err(|e| Error::io("write", &to, e))?,
        }
    }
    Ok(())
}
