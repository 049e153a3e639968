//! Event files, which TensorBoard reads: a folder for every training, in it one file of numbers named by tags.
//!
//! A file is a sequence of records: length (u64), its checksum, the bytes, their checksum, all little-endian. A checksum is
//! CRC-32C, rotated and shifted by a constant ("masked"), as files that hold checksums of themselves need it. The bytes are a
//! message `Event` in the encoding of protocol buffers, of which four fields are needed here. The first event names the
//! version of the format.
//!
//! The log has no clock. An event's time is that of the training itself, in seconds since its start: tokens over tokens per
//! second, summed up, evaluations not counted. TensorBoard shows the "relative" axis rightly and dates in 1970; and the
//! same log gives the same bytes, be it while training ([`Sink`]) or afterwards ([`export`]).

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use kumiki_tensor::files;

use crate::log::Record;
use crate::{Error, Result};

/// Of every event file. TensorBoard knows them by the word in the middle.
pub const FILE: &str = crate::folder::EVENTS_FILE;

/// What a record says, tag by tag. TensorBoard keeps 32 bits of a number.
fn scalars(record: &Record) -> impl Iterator<Item = (&'static str, f64)> {
    let Record { loss, lr, grad_norm, tok_s, val_loss, .. } = *record;
    let all = [("train/loss", loss), ("lr", lr), ("grad_norm", grad_norm), ("tok_s", tok_s)];
    all.into_iter().chain(val_loss.map(|loss| ("val/loss", loss)))
}

fn masked(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// `event` as a record of the file.
fn framed(event: &[u8]) -> Vec<u8> {
    let length = (event.len() as u64).to_le_bytes();
    [&length[..], &masked(&length).to_le_bytes(), event, &masked(event).to_le_bytes()].concat()
}

fn varint(mut n: u64, out: &mut Vec<u8>) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// A field of bytes: text or a message.
fn bytes(field: u8, value: &[u8], out: &mut Vec<u8>) {
    out.push(field << 3 | 2);
    varint(value.len() as u64, out);
    out.extend_from_slice(value);
}

/// `Event { wall_time = 1, step = 2 }`, to be gone on with.
fn event(seconds: f64, step: u64) -> Vec<u8> {
    let mut out = vec![1 << 3 | 1];
    out.extend_from_slice(&seconds.to_le_bytes());
    out.push(2 << 3);
    varint(step, &mut out);
    out
}

/// The first record of a file: `Event { file_version = 3 }`.
fn head() -> Vec<u8> {
    let mut out = event(0.0, 0);
    bytes(3, b"brain.Event:2", &mut out);
    framed(&out)
}

/// `Event { summary = 5 { value = 1 { tag = 1, simple_value = 2 } … } }`.
fn of_record(record: &Record, seconds: f64) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, number) in scalars(record) {
        let mut value = Vec::new();
        bytes(1, tag.as_bytes(), &mut value);
        value.push(2 << 3 | 5);
        value.extend_from_slice(&(number as f32).to_le_bytes());
        bytes(1, &value, &mut summary);
    }
    let mut out = event(seconds, record.step);
    bytes(5, &summary, &mut out);
    framed(&out)
}

/// A training: its corpus, seed and model.
type Key = (Option<String>, Option<u64>, Option<String>);

fn key(record: &Record) -> Key {
    (record.corpus.clone(), record.seed, record.model.clone())
}

/// One training and its file.
#[derive(Debug)]
struct Training {
    key: Key,
    folder: PathBuf,
    clock: Clock,
}

/// Seconds of a training so far.
#[derive(Debug, Default)]
struct Clock {
    seconds: f64,
    tokens: u64,
}

impl Clock {
    fn tick(&mut self, record: &Record) -> f64 {
        let seconds = record.tokens.saturating_sub(self.tokens) as f64 / record.tok_s;
        // A speed that is none stops the clock for a step.
        self.seconds += if seconds.is_finite() { seconds } else { 0.0 };
        self.tokens = record.tokens;
        self.seconds
    }
}

/// `name` as that of a folder, whatever a log says.
fn plain(name: &str) -> String {
    let letter = |c: char| if c.is_alphanumeric() || "-_.+, ".contains(c) { c } else { '_' };
    let plain: String = name.chars().map(letter).collect();
    if plain.is_empty() || plain.starts_with('.') { format!("_{plain}") } else { plain }
}

/// Writes records to event files as they come: `DIR/<model>/`, or `DIR/<corpus>/seed-<n>/<model>/` where there are several
/// corpora or seeds, so that TensorBoard shows every training under a name of its own.
#[derive(Debug)]
pub struct Sink {
    folder: PathBuf,
    wide: bool,
    trainings: Vec<Training>,
}

impl Sink {
    /// Begins with the records that a log has already: their files are written anew, whole or not at all. `wide`: whether
    /// there will be several corpora or seeds.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn open(folder: &Path, wide: bool, past: &[Record]) -> Result<Sink> {
        let mut sink = Sink { folder: folder.to_owned(), wide, trainings: vec![] };
        let mut contents: Vec<Vec<u8>> = vec![];
        for record in past {
            let at = sink.training(record);
            contents.resize_with(contents.len().max(at + 1), head);
            let seconds = sink.trainings[at].clock.tick(record);
            contents[at].extend(of_record(record, seconds));
        }
        for (training, contents) in sink.trainings.iter().zip(&contents) {
            begin(&training.folder, contents)?;
        }
        Ok(sink)
    }

    /// Adds a record; it is handed to the system before this returns.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&mut self, record: &Record) -> Result<()> {
        let known = self.trainings.len();
        let at = self.training(record);
        let training = &mut self.trainings[at];
        if at == known {
            begin(&training.folder, &head())?;
        }
        let seconds = training.clock.tick(record);
        let path = training.folder.join(FILE);
        let file = File::options().append(true).open(&path);
        let written = file.and_then(|mut file| file.write_all(&of_record(record, seconds)));
        written.map_err(|e| Error::io("write the events", &path, e))
    }

    /// Folders that were written to.
    pub fn folders(&self) -> impl Iterator<Item = &Path> {
        self.trainings.iter().map(|training| training.folder.as_path())
    }

    /// The number of the record's training, which is made known if it is a new one.
    fn training(&mut self, record: &Record) -> usize {
        let key = key(record);
        if let Some(at) = self.trainings.iter().rposition(|training| training.key == key) {
            return at;
        }
        let model = plain(record.model.as_deref().unwrap_or("model"));
        let above = match (self.wide, &record.corpus) {
            (false, _) => self.folder.clone(),
            (true, None) => self.folder.join(seed_of(record)),
            (true, Some(corpus)) => {
                let last = Path::new(corpus).file_name().map_or(corpus.into(), |name| name.to_string_lossy());
                self.folder.join(plain(&last)).join(seed_of(record))
            }
        };
        // Names that only differ in what a folder's name cannot hold.
        let taken = |folder: &PathBuf| self.trainings.iter().any(|training| training.folder == *folder);
        let mut names = std::iter::once(model.clone()).chain((2..).map(|n| format!("{model}-{n}")));
        let folder = names.find_map(|name| Some(above.join(name)).filter(|folder| !taken(folder)));
        let folder = folder.expect("names without end");
        self.trainings.push(Training { key, folder, clock: Clock::default() });
        self.trainings.len() - 1
    }
}

fn seed_of(record: &Record) -> String {
    format!("seed-{}", record.seed.unwrap_or(0))
}

fn begin(folder: &Path, contents: &[u8]) -> Result<()> {
    fs::create_dir_all(folder).map_err(|e| Error::io("create the folder", folder, e))?;
    let path = folder.join(FILE);
    files::replace(&path, &[contents]).map_err(|e| Error::io("write the events", &path, e))
}

/// Writes a whole log. Gives the folders that were written to.
///
/// # Errors
/// When a file cannot be written.
pub fn export(records: &[Record], folder: &Path) -> Result<Vec<PathBuf>> {
    let places = |r: &Record| (r.corpus.clone(), r.seed);
    let wide = records.iter().any(|record| places(record) != places(&records[0]));
    Ok(Sink::open(folder, wide, records)?.folders().map(Path::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn record(model: &str, seed: u64, step: u64) -> Record {
        Record {
            model: Some(model.into()),
            corpus: Some("texts/a<b>".into()),
            seed: Some(seed),
            step,
            loss: 1.0 / step as f64,
            lr: 3e-4,
            grad_norm: if step == 2 { f64::NAN } else { 0.5 },
            tokens: 512 * step,
            tok_s: 1024.0,
            val_loss: step.is_multiple_of(2).then_some(2.5),
        }
    }

    /// CRC-32C bit by bit.
    fn slow_crc(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0u32, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |c, _| if c & 1 == 1 { c >> 1 ^ 0x82f6_3b78 } else { c >> 1 })
        })
    }

    fn take<'a>(bytes: &mut &'a [u8], n: usize) -> &'a [u8] {
        let (first, rest) = bytes.split_at(n);
        *bytes = rest;
        first
    }

    fn read_varint(bytes: &mut &[u8]) -> u64 {
        let mut n = 0;
        for shift in (0..).step_by(7) {
            let byte = take(bytes, 1)[0];
            n |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        n
    }

    /// The fields of a message: number and bytes, fixed or counted.
    fn fields(mut message: &[u8]) -> Vec<(u64, Vec<u8>)> {
        let mut out = vec![];
        while !message.is_empty() {
            let key = read_varint(&mut message);
            let value = match key & 7 {
                0 => read_varint(&mut message).to_le_bytes().to_vec(),
                1 => take(&mut message, 8).to_vec(),
                5 => take(&mut message, 4).to_vec(),
                2 => {
                    let n = read_varint(&mut message) as usize;
                    take(&mut message, n).to_vec()
                }
                other => panic!("wire type {other}"),
            };
            out.push((key >> 3, value));
        }
        out
    }

    /// What a file says: seconds, step, tag, value. Fails on a wrong checksum.
    fn read(path: &Path) -> Vec<(f64, u64, String, f32)> {
        let file = fs::read(path).unwrap();
        let (mut rest, mut events) = (&file[..], vec![]);
        while !rest.is_empty() {
            let check = |bytes: &[u8], crc: &[u8]| {
                let expected = slow_crc(bytes).rotate_right(15).wrapping_add(0xa282_ead8);
                assert_eq!(u32::from_le_bytes(crc.try_into().unwrap()), expected);
            };
            let length = take(&mut rest, 8);
            check(length, take(&mut rest, 4));
            let event = take(&mut rest, u64::from_le_bytes(length.try_into().unwrap()) as usize);
            check(event, take(&mut rest, 4));
            events.push(fields(event));
        }
        assert_eq!(events.remove(0)[2], (3, b"brain.Event:2".to_vec()));
        let mut out = vec![];
        for event in events {
            let [(1, seconds), (2, step), (5, summary)] = &event[..] else { panic!("{event:?}") };
            let eight = |bytes: &[u8]| <[u8; 8]>::try_from(bytes).unwrap();
            for (_, value) in fields(summary) {
                let [(1, tag), (2, number)] = &fields(&value)[..] else { panic!("{value:?}") };
                let number = f32::from_le_bytes(number[..].try_into().unwrap());
                let tag = String::from_utf8(tag.clone()).unwrap();
                out.push((f64::from_le_bytes(eight(seconds)), u64::from_le_bytes(eight(step)), tag, number));
            }
        }
        out
    }

    #[test]
    fn every_number_of_the_log_is_read_back_under_its_tag() {
        assert_eq!(slow_crc(b"123456789"), 0xe306_9283, "the check value of the polynomial");
        let dir = Scratch::new();
        let steps = [1, 2, 300, 70_000];
        let records: Vec<Record> = steps.iter().map(|&step| record("tango", 0, step)).collect();
        let folders = export(&records, dir.path()).unwrap();
        assert_eq!(folders, [dir.path().join("tango")]);
        let found = read(&folders[0].join(FILE));
        let of = |tag: &str| found.iter().filter(|e| e.2 == tag).collect::<Vec<_>>();
        for (event, record) in of("train/loss").iter().zip(&records) {
            assert_eq!((event.0, event.1, event.3), (record.step as f64 / 2.0, record.step, record.loss as f32));
        }
        assert_eq!([of("train/loss").len(), of("lr").len(), of("tok_s").len(), of("val/loss").len()], [4, 4, 4, 3]);
        let norms: Vec<f32> = of("grad_norm").iter().map(|e| e.3).collect();
        assert!(norms[1].is_nan() && norms[0] == 0.5, "{norms:?}");
    }

    #[test]
    fn what_is_written_while_training_is_what_is_exported_afterwards() {
        let (live, after) = (Scratch::new(), Scratch::new());
        let one = |model: &str, seed| (1..=5).map(|step| record(model, seed, step)).collect::<Vec<_>>();
        let records = [one("tango", 0), one("wango", 0), one("tango", 1)].concat();
        // The process dies after seven steps, and the run goes on.
        for range in [0..7, 7..records.len()] {
            let mut sink = Sink::open(live.path(), true, &records[..range.start]).unwrap();
            records[range].iter().for_each(|record| sink.write(record).unwrap());
        }
        for folder in export(&records, after.path()).unwrap() {
            let relative = folder.strip_prefix(after.path()).unwrap();
            assert!(relative.starts_with("a_b_"), "{relative:?}");
            let [live, after] =
                [live.path(), after.path()].map(|root| fs::read(root.join(relative).join(FILE)).unwrap());
            assert!(live == after && after.len() > 500, "{relative:?}");
        }
    }

    #[test]
    fn events_follow_their_log_whatever_becomes_of_it() {
        let dir = Scratch::new();
        let (log, events) = (dir.path().join("log.jsonl"), dir.path().join("events"));
        let steps = |file: &str| -> Vec<u64> {
            let all = read(&events.join(file).join(FILE));
            all.iter().filter(|event| event.2 == "train/loss").map(|event| event.1).collect()
        };
        let mut writer = crate::log::Writer::create(&log).unwrap();
        writer.write(&record("tango", 0, 1)).unwrap();
        writer.with_events(&events, false).unwrap();
        assert_eq!(steps("tango"), [1]);
        (2..6).for_each(|step| writer.write(&record("tango", 0, step)).unwrap());
        writer.write(&record("gau", 0, 1)).unwrap();
        assert_eq!((steps("tango"), steps("gau")), (vec![1, 2, 3, 4, 5], vec![1]));
        // The process dies, and goes on from a save of step 3.
        drop(writer);
        let mut writer = crate::log::Writer::append(&log).unwrap();
        writer.with_events(&events, false).unwrap();
        writer.retain(|r| r.model.as_deref() == Some("tango") && r.step < 3, |_| true).unwrap();
        assert!(!events.join("gau").exists(), "what the log has lost");
        (3..8).for_each(|step| writer.write(&record("tango", 0, step)).unwrap());
        assert_eq!(steps("tango"), [1, 2, 3, 4, 5, 6, 7]);
        std::fs::remove_dir_all(&events).unwrap();
        writer.write(&record("tango", 0, 8)).unwrap();
        assert_eq!(steps("tango"), [1, 2, 3, 4, 5, 6, 7, 8]);
        // The run has become one of several seeds; what is somebody else's stays.
        let mine = dir.file("events/tango/mine.txt", "mine");
        writer.with_events(&events, true).unwrap();
        assert_eq!(steps("a_b_/seed-0/tango"), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert!(!events.join("tango").join(FILE).exists() && mine.exists());
    }

    #[test]
    fn names_of_a_log_lead_nowhere_else() {
        let dir = Scratch::new();
        let names = ["../../up", "/root", "", "..", "a/b", "a_b"];
        let folders = export(&names.map(|name| record(name, 0, 1)), dir.path()).unwrap();
        let below = |folder: &PathBuf| folder.strip_prefix(dir.path()).unwrap().to_str().unwrap().to_owned();
        let found: Vec<String> = folders.iter().map(below).collect();
        assert_eq!(found, ["_.._.._up", "_root", "_", "_..", "a_b", "a_b-2"]);
        let file = dir.file("file", "");
        let e = export(&[record("a", 0, 1)], &file).unwrap_err().to_string();
        assert!(e.contains("cannot create the folder") && e.contains("file/a`"), "{e}");
        assert!(export(&[], dir.path()).unwrap().is_empty());
    }
}
