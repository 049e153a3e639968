//! The training log: one JSON object a line, complete on disk after every step.
//!
//! Numbers that JSON cannot hold (NaN, infinities) are written as `null` and read back as NaN, so every line is valid
//! JSON for any reader. A run that was killed may leave a cut last line: reading passes over it, appending removes it.

use crate::folder::LOG;
use crate::grid::run::CELLS;
use crate::{Error, Result};
#[cfg(feature = "export")]
use crate::{folder::clear_events, tensorboard::Sink};
use kumiki_tensor::files;
use serde::{Deserialize, Deserializer, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

/// One step of one model. Unknown keys of a line are ignored when reading.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Which model, where several share a log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// On which corpus.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub corpus: Option<String>,
    /// With which seed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Optimiser steps done, this one included.
    pub step: u64,
    /// Training loss of the step's batch, nats a token.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// Learning rate used in the step.
    #[serde(deserialize_with = "number")]
    pub lr: f64,
    /// Global gradient norm before clipping.
    #[serde(deserialize_with = "number")]
    pub grad_norm: f64,
    /// Target tokens seen since the start of training.
    pub tokens: u64,
    /// Tokens a second.
    #[serde(deserialize_with = "number")]
    pub tok_s: f64,
    /// Validation loss, nats a token, on the steps that have one.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "some_number")]
    pub val_loss: Option<f64>,
}

fn number<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(d)?.unwrap_or(f64::NAN))
}

// A validation loss that is there but null was NaN; one that is absent was not measured.
fn some_number<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<Option<f64>, D::Error> {
    number(d).map(Some)
}

/// Writes records to a file, each line in one write.
#[derive(Debug)]
pub struct Writer {
    file: File,
    path: PathBuf,
    /// Who else hears of records.
    #[cfg(feature = "export")]
    events: Option<Events>,
}

/// The events of a log, for TensorBoard.
#[cfg(feature = "export")]
#[derive(Debug)]
struct Events {
    folder: PathBuf,
    wide: bool,
    sink: Sink,
}

impl Writer {
    fn new(file: File, path: &Path) -> Writer {
        Writer {
            file,
            path: path.to_owned(),
            #[cfg(feature = "export")]
            events: None,
        }
    }

    /// From now on writes event files, too: into `folder`, which becomes what the log is, and follows it. `wide`: see
    /// [`Sink::open`].
    ///
    /// # Errors
    /// When the log cannot be read, or a file cannot be written.
    #[cfg(feature = "export")]
    pub fn with_events(&mut self, folder: &Path, wide: bool) -> Result<()> {
        let records = if self.path.exists() { read(&self.path)? } else { vec![] };
        clear_events(folder)?;
        let sink = Sink::open(folder, wide, &records)?;
        self.events = Some(Events { folder: folder.to_owned(), wide, sink });
        Ok(())
    }

    /// Starts a new log; an existing file is an error, never overwritten.
    ///
    /// # Errors
    /// When the file is there already, or cannot be written.
    pub fn create(path: impl AsRef<Path>) -> Result<Writer> {
        let path = path.as_ref();
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .map_err(|e| Error::io("create the log", path, e))?;
        Ok(Writer::new(file, path))
    }

    /// Goes on with a log (or starts it), after removing a last line that was cut.
    ///
    /// # Errors
    /// When it is no regular file, or cannot be read or written.
    pub fn append(path: impl AsRef<Path>) -> Result<Writer> {
        let path = path.as_ref();
        check_regular(path)?;
        let open = |e| Error::io("open the log", path, e);
        if path.exists() {
            let bytes = std::fs::read(path).map_err(open)?;
            let whole = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
            let tail = &bytes[whole..];
            if !tail.is_empty() {
                let mut file = OpenOptions::new().append(true).open(path).map_err(open)?;
                // Only the line end may be missing: then the record is kept, as `read` keeps it.
                let complete = serde_json::from_slice::<Record>(tail).is_ok();
                let mended = if complete { file.write_all(b"\n") } else { file.set_len(whole as u64) };
                mended.map_err(open)?;
            }
        }
        let file = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(open)?;
        Ok(Writer::new(file, path))
    }

    /// Drops all records but those that `keep` holds; the file is replaced whole or not at all, and only if it changes. Gives
    /// the number of those left that `count` holds.
    ///
    /// # Errors
    /// As [`read`] and [`replace`].
    pub fn retain(&mut self, keep: impl Fn(&Record) -> bool, count: impl Fn(&Record) -> bool) -> Result<u64> {
        if !self.path.exists() {
            return Ok(0);
        }
        let records = read(&self.path)?;
        let kept: Vec<Record> = records.iter().filter(|record| keep(record)).cloned().collect();
        if kept.len() < records.len() {
            replace(&self.path, &kept)?;
            self.file = Writer::append(&self.path)?.file;
            #[cfg(feature = "export")]
            if let Some(Events { folder, wide, .. }) = self.events.take() {
                self.with_events(&folder, wide)?;
            }
        }
        Ok(kept.iter().filter(|record| count(record)).count() as u64)
    }

    /// Returns when everything written is on the disk: what is saved after it may count on it.
    ///
    /// # Errors
    /// When the disk does not take it.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| Error::io("write the log", &self.path, e))
    }

    /// Makes a log again that was removed while it was open: what was written is still behind the open file.
    fn restore(&mut self) -> std::io::Result<()> {
        let mut lines = Vec::new();
        self.file.rewind()?;
        self.file.read_to_end(&mut lines)?;
        if let Some(folder) = self.path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let mut file = File::options().read(true).append(true).create_new(true).open(&self.path)?;
        file.write_all(&lines)?;
        self.file = file;
        Ok(())
    }

    /// Adds one line and hands it to the system before it returns.
    ///
    /// # Errors
    /// When the line cannot be written, or a log that was removed cannot be made again.
    pub fn write(&mut self, record: &Record) -> Result<()> {
        if !self.path.exists() {
            self.restore().map_err(|e| Error::io("restore the log, which was removed,", &self.path, e))?;
        }
        let mut line = serde_json::to_string(record).map_err(|e| Error::new(format!("cannot write a record: {e}")))?;
        line.push('\n');
        // One unbuffered write: a line is never half there while the process lives.
        self.file.write_all(line.as_bytes()).map_err(|e| Error::io("write the log", &self.path, e))?;
        #[cfg(feature = "export")]
        if let Some(Events { folder, wide, sink }) = &mut self.events {
            match sink.write(record) {
                // Removed as it is written, as the log may be: it is made again, and has this record by that.
                Err(_) if !folder.exists() => {
                    let (folder, wide) = (folder.clone(), *wide);
                    self.with_events(&folder, wide)?;
                }
                written => written?,
            }
        }
        Ok(())
    }
}

/// Replaces the log at `path` by one of these records, whole or not at all.
///
/// # Errors
/// When it cannot be written; the old log is then still there.
pub fn replace(path: &Path, records: &[Record]) -> Result<()> {
    let mut text = String::new();
    for record in records {
        text += &serde_json::to_string(record).map_err(|e| Error::new(format!("cannot write a record: {e}")))?;
        text.push('\n');
    }
    files::replace(path, &[text.as_bytes()]).map_err(|e| Error::io("rewrite the log", path, e))
}

/// A pipe would be waited for, for ever.
fn check_regular(path: &Path) -> Result<()> {
    if files::is_special(path) {
        return Err(Error::new(format!("`{}` is no regular file; expected a log", path.display())));
    }
    Ok(())
}

/// Where the log of a run is: in its folder; a file is taken as it is.
///
/// # Errors
/// When the folder has no log, with what it has instead where that can be told.
pub fn of_run(path: &Path) -> Result<PathBuf> {
    let log = if path.is_dir() { path.join(LOG) } else { path.to_owned() };
    if log.is_file() || files::is_special(&log) {
        return Ok(log);
    }
    let name = path.display();
    Err(Error::new(match path.join(CELLS).is_dir() {
        true => format!("`{name}` holds a grid, whose cells are runs of their own; name one of `{name}/{CELLS}/…`"),
        false if path.is_dir() => format!("`{name}` holds no run: expected `{LOG}` in it, found none"),
        false => format!("there is no `{name}`; expected the folder of a run, or its `{LOG}`"),
    }))
}

/// Reads a whole log. A last line without its end that does not parse is passed over.
///
/// # Errors
/// When it cannot be read, or any other line does not parse: names the file, the line and the reason.
pub fn read(path: impl AsRef<Path>) -> Result<Vec<Record>> {
    let path = path.as_ref();
    check_regular(path)?;
    let bytes = std::fs::read(path).map_err(|e| Error::io("read the log", path, e))?;
    let mut records = Vec::new();
    for (n, line) in bytes.split_inclusive(|&b| b == b'\n').enumerate() {
        if line.trim_ascii().is_empty() {
            continue;
        }
        match serde_json::from_slice(line) {
            Ok(record) => records.push(record),
            Err(_) if !line.ends_with(b"\n") => {}
            Err(e) => {
                return Err(Error::new(format!("`{}` line {}: not a log record: {e}", path.display(), n + 1)));
            }
        }
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn record(step: u64) -> Record {
        Record {
            model: Some("tango".into()),
            corpus: None,
            seed: None,
            step,
            loss: 1.0 / 3.0,
            lr: 3e-4,
            grad_norm: 0.1 + 0.2,
            tokens: u64::MAX,
            tok_s: 12_345.678,
            val_loss: None,
        }
    }

    #[test]
    fn round_trip_is_exact_and_every_line_is_there_at_once() {
        let dir = Scratch::new();
        let path = dir.path().join("log.jsonl");
        let mut log = Writer::create(&path).unwrap();
        for step in 1..=3 {
            log.write(&record(step)).unwrap();
            assert_eq!(read(&path).unwrap(), (1..=step).map(record).collect::<Vec<_>>());
        }
        assert!(Writer::create(&path).unwrap_err().to_string().contains("log.jsonl"));
        let line: serde_json::Value =
            serde_json::from_str(std::fs::read_to_string(&path).unwrap().lines().next().unwrap()).unwrap();
        let keys: Vec<_> = line.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys.len(), 7, "{keys:?}");
        for key in ["step", "loss", "lr", "grad_norm", "tokens", "tok_s", "model"] {
            assert!(keys.contains(&key), "{key}");
        }
    }

    #[test]
    fn numbers_that_are_not_finite_stay_valid_json() {
        let dir = Scratch::new();
        let path = dir.path().join("log.jsonl");
        let bad = Record { loss: f64::NAN, grad_norm: f64::INFINITY, val_loss: Some(f64::NAN), ..record(1) };
        Writer::create(&path).unwrap().write(&bad).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!(line["loss"].is_null() && line["grad_norm"].is_null());
        let back = &read(&path).unwrap()[0];
        assert!(back.loss.is_nan() && back.grad_norm.is_nan() && back.val_loss.unwrap().is_nan());
    }

    #[test]
    fn a_cut_last_line_is_passed_over_and_removed_by_append() {
        let dir = Scratch::new();
        let path = dir.path().join("log.jsonl");
        let whole = serde_json::to_string(&record(1)).unwrap() + "\n";
        for cut in 1..whole.len() - 1 {
            std::fs::write(&path, format!("{whole}{}", &whole[..cut])).unwrap();
            assert_eq!(read(&path).unwrap(), [record(1)], "cut at {cut}");
        }
        Writer::append(&path).unwrap().write(&record(2)).unwrap();
        assert_eq!(read(&path).unwrap(), [record(1), record(2)]);
        std::fs::write(&path, whole.trim_end()).unwrap();
        Writer::append(&path).unwrap().write(&record(2)).unwrap();
        assert_eq!(read(&path).unwrap(), [record(1), record(2)]);
        let fresh = dir.path().join("fresh.jsonl");
        Writer::append(&fresh).unwrap().write(&record(7)).unwrap();
        assert_eq!(read(&fresh).unwrap(), [record(7)]);
    }

    #[test]
    fn a_log_that_is_removed_while_it_is_written_comes_back() {
        let dir = Scratch::new();
        let folder = dir.path().join("run");
        std::fs::create_dir(&folder).unwrap();
        let path = folder.join("log.jsonl");
        let mut log = Writer::create(&path).unwrap();
        for step in 1..=4 {
            log.write(&record(step)).unwrap();
            // Windows keeps files that are open.
            if step % 2 == 1 && cfg!(unix) {
                std::fs::remove_dir_all(&folder).unwrap();
            }
        }
        assert_eq!(read(&path).unwrap(), (1..=4).map(record).collect::<Vec<_>>());
    }

    #[test]
    fn a_bad_line_in_the_middle_is_an_error_with_its_number() {
        let dir = Scratch::new();
        let path = dir.file("log.jsonl", "{\"step\": 1}\n");
        let e = read(&path).unwrap_err().to_string();
        assert!(e.contains("log.jsonl") && e.contains("line 1") && e.contains("loss"), "{e}");
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_is_no_log_and_is_not_waited_for() {
        let dir = Scratch::new();
        let pipe = dir.path().join("log.jsonl");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for found in [read(&pipe).map(drop), Writer::append(&pipe).map(drop), Writer::create(&pipe).map(drop)] {
            assert!(found.unwrap_err().to_string().contains("log.jsonl`"));
        }
        assert!(replace(&pipe, &[]).unwrap_err().to_string().contains("it is no regular file"));
    }
}
