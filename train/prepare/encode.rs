//! Chunks of documents as bytes of token ids: what every thread does on its own.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;

use super::inputs::{Input, Part};
use super::read::{Chunk, Item, Place};
use crate::marks::Class;
use crate::shards::{item, width};
use crate::tokenizer::{Encoder, Tokenizer};
use crate::{Error, Result};

/// What a part gets of a chunk.
#[derive(Debug, Default)]
pub(super) struct Share {
    /// Ids as they are in a shard.
    pub ids: Vec<u8>,
    /// Their classes, if any file has some.
    pub classes: Vec<u8>,
    pub counts: Counts,
}

/// How much a part has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub documents: u64,
    pub tokens: u64,
    /// Bytes of text that the tokens stand for.
    pub bytes: u64,
    /// Tokens by class, in the order of [`Class::ALL`].
    pub classes: [u64; Class::ALL.len()],
}

impl Counts {
    pub(super) fn add(&mut self, other: &Counts) {
        self.documents += other.documents;
        self.tokens += other.tokens;
        self.bytes += other.bytes;
        self.classes.iter_mut().zip(other.classes).for_each(|(sum, more)| *sum += more);
    }
}

/// A chunk, encoded.
#[derive(Debug, Default)]
pub(super) struct Encoded {
    pub train: Share,
    pub val: Share,
    /// Records that cannot be used, with what is wrong.
    pub bad: Vec<String>,
    /// Wrong stretches of bytes that were replaced.
    pub replaced: u64,
    /// Documents without text.
    pub empty: u64,
    pub torn: u64,
    pub done: u64,
}

/// What one thread encodes with.
pub(super) struct Worker<'a> {
    pub tokenizer: &'a Tokenizer,
    pub inputs: &'a [Input],
    pub replace_invalid: bool,
    /// Whether classes are kept.
    pub marked: bool,
    encoder: Encoder<'a>,
    ids: Vec<u32>,
    starts: Vec<usize>,
}

/// A line of JSON; what else is in it does not matter.
#[derive(Deserialize)]
struct Line<'a> {
    #[serde(borrow)]
    text: Cow<'a, str>,
}

impl<'a> Worker<'a> {
    pub(super) fn new(
        tokenizer: &'a Tokenizer,
        inputs: &'a [Input],
        replace_invalid: bool,
        marked: bool,
    ) -> Worker<'a> {
        let encoder = tokenizer.encoder();
        Worker { tokenizer, inputs, replace_invalid, marked, encoder, ids: Vec::new(), starts: Vec::new() }
    }

    /// # Errors
    /// Names the file and the place of bytes that the tokenizer cannot take.
    pub(super) fn encode(&mut self, chunk: &mut Chunk) -> Result<Encoded> {
        let bad = std::mem::take(&mut chunk.bad);
        let mut out = Encoded { bad, empty: chunk.empty, torn: chunk.torn, done: chunk.done, ..Encoded::default() };
        for item in &chunk.items {
            let bytes = &chunk.bytes[item.bytes.clone()];
            match item.place {
                Place::Json(line) => match json_text(&self.inputs[item.input].path, line, bytes) {
                    Ok(text) if text.is_empty() => out.empty += 1,
                    Ok(text) => self.item(item, text.as_bytes(), &[], &mut out)?,
                    Err(what) => out.bad.push(what),
                },
                _ => self.item(item, bytes, &chunk.stretches[item.stretches.clone()], &mut out)?,
            }
        }
        Ok(out)
    }

    fn item(
        &mut self,
        item: &Item,
        bytes: &[u8],
        stretches: &[(usize, Option<Class>)],
        out: &mut Encoded,
    ) -> Result<()> {
        let bytes = self.valid(item, bytes, out)?;
        let share = if item.part == Part::Val { &mut out.val } else { &mut out.train };
        let wide = width(self.tokenizer.vocab());
        let before = share.ids.len();
        if self.tokenizer.is_bytes() && !self.marked {
            // By far the most bytes: no detour over larger numbers.
            share.ids.resize(before + 2 * bytes.len(), 0);
            for (id, &byte) in share.ids[before..].as_chunks_mut::<2>().0.iter_mut().zip(bytes.iter()) {
                *id = [byte, 0];
            }
        } else {
            self.ids.clear();
            self.starts.clear();
            match self.marked {
                true => self.encoder.encode_placed(&bytes, &mut self.ids, &mut self.starts)?,
                false => self.encoder.encode(&bytes, &mut self.ids)?,
            }
            push_ids(&mut share.ids, &self.ids, wide);
            if self.marked {
                classify(&self.starts, stretches, share);
            }
        }
        if item.ends {
            push_ids(&mut share.ids, &[self.tokenizer.end().unwrap_or_default()], wide);
            share.counts.documents += 1;
            // The end of a text belongs to no class.
            share.classes.extend(self.marked.then_some(0));
        }
        share.counts.tokens += ((share.ids.len() - before) / wide) as u64;
        share.counts.bytes += bytes.len() as u64;
        Ok(())
    }

    /// `bytes` as the tokenizer takes them.
    fn valid<'t>(&self, item: &Item, bytes: &'t [u8], out: &mut Encoded) -> Result<Cow<'t, [u8]>> {
        if self.tokenizer.is_bytes() {
            return Ok(Cow::Borrowed(bytes));
        }
        let Err(e) = std::str::from_utf8(bytes) else { return Ok(Cow::Borrowed(bytes)) };
        if self.replace_invalid {
            out.replaced += bytes.utf8_chunks().filter(|chunk| !chunk.invalid().is_empty()).count() as u64;
            return Ok(Cow::Owned(String::from_utf8_lossy(bytes).into_owned().into_bytes()));
        }
        let (file, at) = (self.inputs[item.input].path.display(), e.valid_up_to());
        let place = match item.place {
            Place::Byte(start) => format!("byte {}", start + at as u64),
            Place::Line(line) | Place::Json(line) => format!("line {line}, byte {at} of question and answer"),
            Place::Row(row) => format!("row {row}, byte {at}"),
        };
        let byte = bytes.get(at).copied().unwrap_or_default();
        Err(Error::new(format!(
            "`{file}` is no UTF-8 at {place}: {byte:#04x}; --replace-invalid puts U+FFFD there, and --tokenizer byte takes \
             any bytes"
        )))
    }
}

/// The `text` of a line of JSON.
///
/// # Errors
/// What is wrong with the line, with the name of its file.
pub(super) fn json_text<'t>(path: &Path, line: u64, bytes: &'t [u8]) -> std::result::Result<Cow<'t, str>, String> {
    let file = path.display();
    // Without its end, a line that breaks off does so in its own column.
    let bytes = bytes.trim_ascii_end();
    serde_json::from_slice::<Line>(bytes).map(|line| line.text).map_err(|e| {
        // The keys tell what to do about a line that has no text.
        let keys = serde_json::from_slice::<HashMap<String, serde_json::Value>>(bytes).ok().map(|object| {
            let mut keys: Vec<String> = object.into_keys().map(|key| format!("`{key}`")).collect();
            keys.sort();
            keys.join(", ")
        });
        // The message counts lines from this one.
        let e = e.to_string().replace(" at line 1 column", ", at column");
        match keys {
            Some(keys) => format!("`{file}`, line {line}: no usable `text` ({e}); its keys are {keys}"),
            None => format!("`{file}`, line {line} is no JSON object: {e}"),
        }
    })
}

fn push_ids(out: &mut Vec<u8>, ids: &[u32], wide: usize) {
    match wide {
        2 => out.extend(ids.iter().flat_map(|&id| (id as u16).to_le_bytes())),
        _ => out.extend(ids.iter().flat_map(|id| id.to_le_bytes())),
    }
}

/// A token is of the class of its first byte.
fn classify(starts: &[usize], stretches: &[(usize, Option<Class>)], share: &mut Share) {
    let mut at = 0;
    for &start in starts {
        while stretches.get(at).is_some_and(|&(end, _)| end <= start) {
            at += 1;
        }
        let class = stretches.get(at).and_then(|&(_, class)| class);
        share.classes.push(item(class));
        if let Some(class) = class {
            share.counts.classes[class as usize] += 1;
        }
    }
}
