//! `kumiki data prepare`: texts of many formats as token shards.
//!
//! One thread reads (`read.rs`), all encode (`encode.rs`), the calling one writes in the order of the text (`write.rs`):
//! what comes out depends on the texts, the tokenizer and the seed, never on the number of threads. A fixed number of chunks
//! goes round between them, so that memory is bounded however large the input.

mod encode;
mod inputs;
mod learn;
mod meta;
mod read;
#[cfg(feature = "parquet")]
mod table;
#[cfg(test)]
mod tests;
mod write;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use kumiki_tensor::threads::configured_threads;

use crate::kinds::Kind;
use crate::stop::Stop;
use crate::tokenizer::{TOKENIZER_FILE, Tokenizer};
use crate::{Error, Result};
use encode::{Encoded, Worker};
use inputs::{Format, Inputs};
use read::{Chunk, Draw, Reader};
use write::{Folder, PartWriter};

pub use learn::learn;
pub use meta::{META, Meta, PartMeta, Prepared, ShardMeta};
pub use write::Existing;

/// Tokens of a shard, unless asked otherwise: half a gigabyte of 2-byte ids.
pub const SHARD_TOKENS: u64 = 1 << 28;

/// What is to be prepared, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// Files, folders and patterns.
    pub inputs: Vec<String>,
    /// The folder to make.
    pub out: PathBuf,
    /// What to do if it is there.
    pub existing: Existing,
    /// What makes tokens of text; it needs a token that ends a text.
    pub tokenizer: Tokenizer,
    /// Part of the documents that is held out, in `[0, 1)`.
    pub val_fraction: f64,
    /// Which ones.
    pub seed: u64,
    /// Records that may be passed over because they cannot be used.
    pub skip_bad: u64,
    /// Whether bytes that are no UTF-8 become U+FFFD, where the tokenizer cannot take them.
    pub replace_invalid: bool,
    /// Tokens of a shard, at least 1.
    pub shard_tokens: u64,
    /// Who may ask for a stop; then nothing is made.
    pub stop: Stop,
    /// Threads that encode; `None` for those of the environment, else one per core.
    pub threads: Option<usize>,
}

/// How far it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the files that were read, encoded and written.
    pub done: u64,
    /// All bytes of the files.
    pub total: u64,
    /// Tokens written.
    pub tokens: u64,
}

/// What came out.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// As in the folder.
    pub meta: Meta,
    /// Sentences that the user should see.
    pub notes: Vec<String>,
    /// The first records that were passed over, with what is wrong.
    pub bad: Vec<String>,
}

/// Bad records that are named, at most.
const NAMED: usize = 5;

/// Prepares texts. The folder is there when all is in it, or not at all.
///
/// # Errors
/// Whatever is wrong with inputs, tokenizer or folder, by name and place; a full disk, with what was needed; a stop that
/// was asked for.
pub fn prepare(options: &Options, mut progress: impl FnMut(Progress)) -> Result<Report> {
    let Options { tokenizer, inputs, .. } = options;
    if tokenizer.end().is_none() {
        let name = tokenizer.name();
        return Err(Error::new(format!("the tokenizer `{name}` has no token that ends a text; documents need one")));
    }
    if options.shard_tokens == 0 {
        return Err(Error::new("shards of 0 tokens; expected at least 1"));
    }
    let Inputs { files, kind, mut notes } = inputs::find(inputs, options.val_fraction, options.seed)?;
    let marked = files.iter().any(|input| matches!(input.format, Format::Lean | Format::Questions));
    let folder = Folder::new(&options.out, options.existing)?;
    let total = files.iter().map(|input| input.bytes).sum();
    let mut meta = Meta {
        inputs: inputs.clone(),
        files: files.len() as u64,
        file_bytes: total,
        val_fraction: options.val_fraction,
        seed: options.seed,
        ..Meta::new(tokenizer, kind)
    };
    let mut bad = Vec::new();
    let mut parts = ["train", "val"]
        .map(|name| PartWriter::new(folder.path(), name, tokenizer.vocab(), marked, options.shard_tokens));
    let stopped = || Error::new(format!("stopped; nothing was written to `{}`", options.out.display()));
    let write = |encoded: Encoded| -> Result<()> {
        if options.stop.is_asked() {
            return Err(stopped());
        }
        let shares = [&encoded.train, &encoded.val];
        let before: u64 = parts.iter().map(PartWriter::written).sum();
        for (writer, share) in parts.iter_mut().zip(shares) {
            writer.write(share).map_err(|e| {
                // What was read for is what was written and the whole of this.
                let now: usize = shares.iter().map(|share| share.ids.len() + share.classes.len()).sum();
                let needed = (before + now as u64) as f64 * (total.max(1) as f64 / encoded.done.max(1) as f64);
                failed(&options.out, e, before, needed)
            })?;
        }
        meta.replaced += encoded.replaced;
        meta.empty += encoded.empty;
        meta.torn += encoded.torn;
        refuse_bad(&encoded.bad, meta.skipped, options.skip_bad)?;
        meta.skipped += encoded.bad.len() as u64;
        bad.extend(encoded.bad.into_iter().take(NAMED - bad.len().min(NAMED)));
        progress(Progress { done: encoded.done, total, tokens: parts.iter().map(PartWriter::tokens).sum() });
        Ok(())
    };
    let draw = Draw::new(options.val_fraction, options.seed);
    encode_all(options, &files, marked, draw, write)?;
    let written: u64 = parts.iter().map(PartWriter::written).sum();
    let finish = |e| failed(&options.out, e, written, written as f64);
    let [train, val] = parts.map(PartWriter::finish);
    (meta.train, meta.val) = (train.map_err(finish)?, val.map_err(finish)?);
    check(&meta, inputs)?;
    notes.extend(notes_on(&meta, tokenizer));
    let save = || -> io::Result<()> {
        if let Some(file) = tokenizer.file() {
            write_synced(&folder.path().join(TOKENIZER_FILE), &file)?;
        }
        let text = serde_json::to_string_pretty(&meta).map_err(io::Error::other)?;
        write_synced(&folder.path().join(META), format!("{text}\n").as_bytes())
    };
    save().map_err(finish)?;
    if options.stop.is_asked() {
        return Err(stopped());
    }
    folder.finish().map_err(finish)?;
    Ok(Report { meta, notes, bad })
}

/// # Errors
/// The first record that cannot be used beyond those that may be passed over; `before` were before these.
fn refuse_bad(bad: &[String], before: u64, most: u64) -> Result<()> {
    let Some(what) = bad.get(most.saturating_sub(before) as usize) else { return Ok(()) };
    let more = match most {
        0 => "--skip-bad N passes over up to N such records".to_owned(),
        n => format!("it is one more than the {n} that --skip-bad lets pass"),
    };
    Err(Error::new(format!("{what}; {more}")))
}

/// Reads `files`, encodes them on all threads, and hands what comes out to `take` in the order of the text.
fn encode_all(
    options: &Options,
    files: &[inputs::Input],
    marked: bool,
    draw: Draw,
    mut take: impl FnMut(Encoded) -> Result<()>,
) -> Result<()> {
    let count = match options.threads {
        Some(threads) => threads.max(1),
        None => configured_threads().map_err(Error::new)?,
    };
    // One for everyone to work on, one to go on with, and some for what waits for its turn to be written.
    let chunks = 2 * count + 3;
    let (free, free_chunks) = sync_channel(chunks);
    let (full, full_chunks) = sync_channel::<(u64, Result<Chunk>)>(chunks);
    let full_chunks = Arc::new(Mutex::new(full_chunks));
    let (done, encoded) = channel();
    for _ in 0..chunks {
        let _ = free.send(Chunk::default());
    }
    thread::scope(move |scope| {
        // Whatever ends first, the others find their channels closed and end, too.
        let reader = Reader {
            inputs: files,
            free: free_chunks,
            full,
            draw,
            cuts: options.tokenizer.cuts_cleanly(),
            done: Arc::new(AtomicU64::new(0)),
        };
        scope.spawn(move || reader.run());
        for _ in 0..count {
            let (chunks, done) = (full_chunks.clone(), done.clone());
            scope.spawn(move || {
                let mut worker = Worker::new(&options.tokenizer, files, options.replace_invalid, marked);
                loop {
                    let next = chunks.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok((number, chunk)) = next else { return };
                    let result = chunk.and_then(|mut chunk| worker.encode(&mut chunk).map(|encoded| (encoded, chunk)));
                    if done.send((number, result)).is_err() {
                        return;
                    }
                }
            });
        }
        drop((full_chunks, done));
        let (mut waiting, mut next) = (BTreeMap::new(), 0);
        for (number, result) in encoded {
            waiting.insert(number, result);
            while let Some(result) = waiting.remove(&next) {
                let (encoded, mut chunk): (Encoded, Chunk) = result?;
                take(encoded)?;
                chunk.clear();
                // Nobody needs it once all is read.
                let _ = free.send(chunk);
                next += 1;
            }
        }
        Ok(())
    })
}

/// An error of writing; of a full disk, with the bytes that all of it takes.
fn failed(out: &Path, e: io::Error, written: u64, needed: f64) -> Error {
    if !matches!(e.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) {
        return Error::io("write to", out, e);
    }
    let error = format!(
        "the disk is full: about {:.1} MB were needed, and {:.1} MB of them were written; nothing of it was kept",
        needed / 1e6,
        written as f64 / 1e6
    );
    Error::io("write to", out, io::Error::new(e.kind(), error))
}

fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = fs::File::options().write(true).create_new(true).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// # Errors
/// When there is too little to train on.
fn check(meta: &Meta, inputs: &[String]) -> Result<()> {
    let PartMeta { documents, tokens, .. } = meta.train;
    let found = tokens - documents;
    if found >= 2 {
        return Ok(());
    }
    let held = match meta.val.documents {
        0 => String::new(),
        n => format!("; {n} more were held out: --val-fraction says how many are"),
    };
    let inputs = inputs.join("`, `");
    Err(Error::new(format!(
        "`{inputs}`: {found} tokens in {documents} documents to train on; expected at least 2{held}"
    )))
}

/// What a user should see of what was done.
fn notes_on(meta: &Meta, tokenizer: &Tokenizer) -> Vec<String> {
    let mut notes = Vec::new();
    if meta.val.tokens < 2 && meta.val_fraction > 0.0 {
        let documents = meta.train.documents;
        notes.push(format!(
            "nothing is held out of {documents} documents at the fraction {}: no validation loss will be reported",
            meta.val_fraction
        ));
    }
    let (held, all) = (meta.val.bytes as f64, (meta.train.bytes + meta.val.bytes) as f64);
    // DeepMind Mathematics has its own held-out part.
    if meta.val_fraction > 0.0 && meta.kind != Kind::Mathematics && held > 2.0 * meta.val_fraction * all {
        notes.push(format!(
            "{:.0} % of the bytes are held out, more than the fraction {}: documents are held out whole",
            100.0 * held / all,
            meta.val_fraction
        ));
    }
    if meta.kind != Kind::Prose {
        let classes = if meta.kind == Kind::Lean { "proofs and other source" } else { "answers" };
        notes.push(format!("the tokens of {classes} are marked"));
    }
    let how = if tokenizer.cuts_cleanly() {
        "within a stretch without letters"
    } else {
        "though its tokenizer looks further"
    };
    for (count, what) in [
        (meta.skipped, "records could not be used and were passed over"),
        (meta.empty, "documents without text were passed over"),
        (meta.replaced, "stretches of bytes were no UTF-8 and became U+FFFD"),
        (meta.torn, &*format!("times a long document was cut {how}: tokens there may differ")),
    ] {
        if count > 0 {
            notes.push(format!("{count} {what}"));
        }
    }
    notes
}
