//! Reads files into chunks of documents, one after the other, on one thread: whatever is slow about a document is left to
//! those who take the chunks.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender};

use super::inputs::{Format, Input, Packing, Part, Share};
use crate::lean::Lexer;
use crate::marks::Class;
use crate::mix::mix;
use crate::{Error, Result};

/// Bytes of text in a chunk, about.
const CHUNK: usize = 1 << 20;
/// For tokenizers that a cut would disturb: documents of up to this size are not cut.
const UNCUT: usize = 4 << 20;
/// A line of JSON, or a file that must be seen as a whole, may be this long.
const MOST: u64 = 256 << 20;

/// Where a document comes from, for messages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Place {
    /// Bytes of a file.
    Byte(u64),
    /// A line of it, from 1: its JSON is still to be read.
    Json(u64),
    /// Questions and answers, by line.
    Line(u64),
    /// A row of a table, from 1.
    #[cfg_attr(not(feature = "parquet"), expect(dead_code))]
    Row(u64),
}

/// A document or a part of one.
#[derive(Debug)]
pub(crate) struct Item {
    /// Its bytes in the chunk.
    pub bytes: Range<usize>,
    pub input: usize,
    pub place: Place,
    pub part: Part,
    /// Whether the document ends here.
    pub ends: bool,
    /// Its stretches of one class in the chunk's list, each by its end within the item; none for unmarked files.
    pub stretches: Range<usize>,
}

/// Documents to encode.
#[derive(Debug, Default)]
pub(crate) struct Chunk {
    pub bytes: Vec<u8>,
    pub items: Vec<Item>,
    pub stretches: Vec<(usize, Option<Class>)>,
    /// Records that cannot be used, with what is wrong.
    pub bad: Vec<String>,
    /// Rows that have no text, or one of no length.
    pub empty: u64,
    /// Places where a document had to be cut within a word.
    pub torn: u64,
    /// Bytes of the files that were read so far.
    pub done: u64,
}

impl Chunk {
    pub(crate) fn clear(&mut self) {
        // A chunk that had to be very large is not kept.
        if self.bytes.capacity() > 8 * CHUNK {
            self.bytes = Vec::new();
        }
        self.bytes.clear();
        self.items.clear();
        self.stretches.clear();
        self.bad.clear();
        self.empty = 0;
        self.torn = 0;
    }
}

/// Draws documents for the held-out part: one of every 1/fraction that follow one another.
pub(crate) struct Draw {
    fraction: f64,
    seed: u64,
    next: u64,
    turn: u64,
    chosen: u64,
}

impl Draw {
    pub(crate) fn new(fraction: f64, seed: u64) -> Draw {
        let mut draw = Draw { fraction, seed, next: 0, turn: 0, chosen: 0 };
        draw.choose();
        draw
    }

    /// The document of this turn.
    fn choose(&mut self) {
        let start = |turn: u64| (turn as f64 / self.fraction) as u64;
        let (from, to) = (start(self.turn), start(self.turn + 1));
        self.chosen = from + mix(mix(self.seed) ^ self.turn) % to.saturating_sub(from).max(1);
    }

    fn part(&mut self) -> Part {
        let number = self.next;
        self.next += 1;
        if self.fraction == 0.0 || number < self.chosen {
            return Part::Train;
        }
        self.turn += 1;
        self.choose();
        Part::Val
    }
}

/// What reads, and to whom it gives.
pub(crate) struct Reader<'a> {
    pub inputs: &'a [Input],
    /// Chunks to fill.
    pub free: Receiver<Chunk>,
    /// Filled chunks with their numbers.
    pub full: SyncSender<(u64, Result<Chunk>)>,
    pub draw: Draw,
    /// Whether documents may be cut between words.
    pub cuts: bool,
    pub done: Arc<AtomicU64>,
}

/// A chunk in the making.
struct Feed<'a> {
    reader: Reader<'a>,
    chunk: Chunk,
    number: u64,
    input: usize,
}

/// Counts what is read of a file.
struct Counted {
    file: File,
    done: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(out)?;
        self.done.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

impl Reader<'_> {
    /// Reads all, and gives an error in place of the chunk that it prevents. Ends early when nobody takes chunks any more.
    pub(crate) fn run(self) {
        let Ok(chunk) = self.free.recv() else { return };
        let mut feed = Feed { reader: self, chunk, number: 0, input: 0 };
        let read = (0..feed.reader.inputs.len()).try_for_each(|input| feed.input(input));
        let last = read.and_then(|()| feed.flush());
        if let Err(Some(error)) = last {
            let _ = feed.reader.full.send((feed.number, Err(error)));
        }
    }
}

/// `None` when nobody takes chunks any more.
type Fed<T = ()> = std::result::Result<T, Option<Error>>;

impl Feed<'_> {
    fn flush(&mut self) -> Fed {
        let empty = self.reader.free.recv().map_err(|_| None)?;
        let mut chunk = std::mem::replace(&mut self.chunk, empty);
        chunk.done = self.reader.done.load(Ordering::Relaxed);
        let number = self.number;
        self.number += 1;
        self.reader.full.send((number, Ok(chunk))).map_err(|_| None)
    }

    fn flush_if_full(&mut self) -> Fed {
        if self.chunk.bytes.len() >= CHUNK || self.chunk.items.len() >= CHUNK / 16 { self.flush() } else { Ok(()) }
    }

    fn open(&self, path: &Path, packing: Packing) -> Fed<Box<dyn Read>> {
        let file = File::open(path).map_err(|e| Error::io("read the text", path, e))?;
        let counted = Counted { file, done: self.reader.done.clone() };
        unpack(counted, packing).map_err(|e| Some(Error::new(format!("`{}`: {e}", path.display()))))
    }

    fn input(&mut self, n: usize) -> Fed {
        self.input = n;
        let inputs = self.reader.inputs;
        let Input { path, format, packing, share, bytes, .. } = &inputs[n];
        let bytes = *bytes;
        let failed = |e: io::Error| Some(Error::io("read the text", path, e));
        let draws = |share: &Share| match share {
            Share::All(part) => Some(*part),
            _ => None,
        };
        match (format, share) {
            // An empty file can be no table, and has no documents.
            _ if bytes == 0 => Ok(()),
            (Format::Text, Share::CutAt(at)) => {
                let at = place_to_cut(path, *at).map_err(failed)?;
                let mut from = self.open(path, *packing)?;
                self.text(&mut (&mut from).take(at), path, Part::Train, 0)?;
                self.text(&mut from, path, Part::Val, at)
            }
            (Format::Text, share) => {
                let mut from = self.open(path, *packing)?;
                let part = draws(share).unwrap_or(Part::Train);
                self.text(&mut from, path, part, 0)
            }
            (Format::Lean, share) => {
                let from = self.open(path, *packing)?;
                let part = draws(share).unwrap_or(Part::Train);
                self.lean(from, path, part)
            }
            (Format::Questions, share) => {
                let from = self.open(path, *packing)?;
                self.questions(BufReader::new(from), path, draws(share))
            }
            (Format::JsonLines, share) => {
                let from = self.open(path, *packing)?;
                self.json_lines(BufReader::with_capacity(1 << 17, from), path, draws(share))
            }
            (Format::Parquet, share) => self.parquet(path, draws(share)),
        }
    }

    fn part(&mut self, fixed: Option<Part>) -> Part {
        fixed.unwrap_or_else(|| self.reader.draw.part())
    }

    fn item(&mut self, start: usize, place: Place, part: Part, ends: bool, stretches: usize) {
        let bytes = start..self.chunk.bytes.len();
        let stretches = stretches..self.chunk.stretches.len();
        self.chunk.items.push(Item { bytes, input: self.input, place, part, ends, stretches });
    }

    /// One document, in pieces.
    fn text(&mut self, from: &mut dyn Read, path: &Path, part: Part, start: u64) -> Fed {
        let piece = if self.reader.cuts { CHUNK } else { UNCUT };
        let mut begin = self.chunk.bytes.len();
        let (mut at, mut any) = (start, false);
        loop {
            let room = piece - (self.chunk.bytes.len() - begin);
            let read = (&mut *from).take(room as u64).read_to_end(&mut self.chunk.bytes);
            if read.map_err(|e| Some(Error::io("read the text", path, e)))? < room {
                if any || self.chunk.bytes.len() > begin {
                    self.item(begin, Place::Byte(at), part, true, self.chunk.stretches.len());
                }
                return self.flush_if_full();
            }
            let (cut, clean) = place_in(&self.chunk.bytes[begin..]);
            self.chunk.torn += u64::from(!clean || !self.reader.cuts);
            // What stands behind the cut begins the next piece.
            let rest = self.chunk.bytes.split_off(begin + cut);
            self.item(begin, Place::Byte(at), part, false, self.chunk.stretches.len());
            self.flush()?;
            self.chunk.bytes.extend_from_slice(&rest);
            (begin, at, any) = (0, at + cut as u64, true);
        }
    }

    /// One document, seen as a whole, for proofs are told from the start of a file on.
    fn lean(&mut self, from: impl Read, path: &Path, part: Part) -> Fed {
        let (begin, first) = (self.chunk.bytes.len(), self.chunk.stretches.len());
        let read = from.take(MOST + 1).read_to_end(&mut self.chunk.bytes);
        let read = read.map_err(|e| Error::io("read the text", path, e))?;
        if read as u64 > MOST {
            return Err(Some(too_long(path, "a file in Lean")));
        }
        let (bytes, mut lexer) = (&self.chunk.bytes[begin..], Lexer::default());
        while let Some((range, class)) = lexer.next(bytes) {
            match self.chunk.stretches[first..].last_mut() {
                Some(last) if last.1 == Some(class) => last.0 = range.end,
                _ => self.chunk.stretches.push((range.end, Some(class))),
            }
        }
        if read > 0 {
            self.item(begin, Place::Byte(0), part, true, first);
        }
        self.flush_if_full()
    }

    /// The next line, with its end, behind what the chunk has. Nothing at the end of the file.
    fn line(&mut self, from: &mut impl BufRead, path: &Path) -> Fed<usize> {
        let read = from.take(MOST + 1).read_until(b'\n', &mut self.chunk.bytes);
        let read = read.map_err(|e| Error::io("read the text", path, e))?;
        if read as u64 > MOST { Err(Some(too_long(path, "a line"))) } else { Ok(read) }
    }

    fn questions(&mut self, mut from: impl BufRead, path: &Path, part: Option<Part>) -> Fed {
        for pair in 0.. {
            let (begin, first, number) = (self.chunk.bytes.len(), self.chunk.stretches.len(), 2 * pair + 1);
            let question = self.line(&mut from, path)?;
            if question == 0 {
                break;
            }
            let answer = self.line(&mut from, path)?;
            if answer == 0 {
                self.chunk.bytes.truncate(begin);
                let file = path.display();
                self.chunk.bad.push(format!("`{file}`, line {number}: a question without a line for its answer"));
                break;
            }
            self.chunk.stretches.extend([(question, None), (question + answer, Some(Class::Answer))]);
            let part = self.part(part);
            self.item(begin, Place::Line(number), part, true, first);
            self.flush_if_full()?;
        }
        self.flush_if_full()
    }

    fn json_lines(&mut self, mut from: impl BufRead, path: &Path, part: Option<Part>) -> Fed {
        for number in 1.. {
            let begin = self.chunk.bytes.len();
            if self.line(&mut from, path)? == 0 {
                break;
            }
            if self.chunk.bytes[begin..].iter().all(u8::is_ascii_whitespace) {
                self.chunk.bytes.truncate(begin);
                continue;
            }
            let part = self.part(part);
            self.item(begin, Place::Json(number), part, true, self.chunk.stretches.len());
            self.flush_if_full()?;
        }
        self.flush_if_full()
    }

    #[cfg(feature = "parquet")]
    fn parquet(&mut self, path: &Path, part: Option<Part>) -> Fed {
        let before = self.reader.done.load(Ordering::Relaxed);
        let mut table = super::table::Table::open(path)?;
        let mut row = 0;
        while let Some((texts, share)) = table.next()? {
            for text in texts {
                row += 1;
                let Some(text) = text.filter(|text| !text.data().is_empty()) else {
                    self.chunk.empty += 1;
                    continue;
                };
                let begin = self.chunk.bytes.len();
                self.chunk.bytes.extend_from_slice(text.data());
                let part = self.part(part);
                self.item(begin, Place::Row(row), part, true, self.chunk.stretches.len());
                self.flush_if_full()?;
            }
            let bytes = self.reader.inputs[self.input].bytes;
            self.reader.done.store(before + (bytes as f64 * share) as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    #[cfg(not(feature = "parquet"))]
    fn parquet(&mut self, path: &Path, _part: Option<Part>) -> Fed {
        let path = path.display();
        Err(Some(Error::new(format!("`{path}` needs the feature `parquet`, and this program was built without it"))))
    }
}

fn too_long(path: &Path, what: &str) -> Error {
    Error::new(format!("`{}`: {what} of more than {} MB; expected less", path.display(), MOST >> 20))
}

#[cfg(feature = "compressed")]
fn unpack(file: Counted, packing: Packing) -> io::Result<Box<dyn Read>> {
    Ok(match packing {
        Packing::Plain => Box::new(file),
        // Both go on with what follows the end of a first part.
        Packing::Gzip => Box::new(flate2::read::MultiGzDecoder::new(BufReader::with_capacity(1 << 16, file))),
        Packing::Zstd => Box::new(zstd::stream::read::Decoder::new(file)?),
    })
}

#[cfg(not(feature = "compressed"))]
fn unpack(file: Counted, packing: Packing) -> io::Result<Box<dyn Read>> {
    match packing {
        Packing::Plain => Ok(Box::new(file)),
        _ => Err(io::Error::other("it needs the feature `compressed`, and this program was built without it")),
    }
}

/// Where a piece of a text may be cut, and whether its tokens stay the same: between a letter and a blank or line end, as
/// near to its end as there is one; else between characters.
fn place_in(piece: &[u8]) -> (usize, bool) {
    const LOOK: usize = 1 << 16;
    let from = piece.len().saturating_sub(LOOK);
    let near = &piece[from..];
    let clean = near.windows(2).rposition(|two| two[0].is_ascii_alphabetic() && matches!(two[1], b' ' | b'\n'));
    if let Some(at) = clean {
        return (from + at + 1, true);
    }
    // Before the last byte that begins a character; in what is no text, anywhere.
    let start = piece.iter().rev().take(4).position(|&byte| byte & 0xc0 != 0x80).unwrap_or(0);
    ((piece.len() - 1 - start).max(1), false)
}

/// Where the one document of a file is cut in two: behind the first line end from `at` on, else between characters.
fn place_to_cut(path: &Path, at: u64) -> io::Result<u64> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(at))?;
    let mut near = Vec::new();
    file.take(1 << 16).read_to_end(&mut near)?;
    let line = near.iter().position(|&byte| byte == b'\n').map(|end| end + 1).filter(|&end| end < near.len());
    let character = || near.iter().take(4).position(|&byte| byte & 0xc0 != 0x80).unwrap_or(0);
    Ok(at + line.unwrap_or_else(character) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_document_of_every_so_many_is_held_out() {
        for fraction in [0.02, 0.1, 0.3, 0.5, 0.9] {
            let mut draw = Draw::new(fraction, 7);
            let parts: Vec<bool> = (0..2000).map(|_| draw.part() == Part::Val).collect();
            let held = parts.iter().filter(|&&held| held).count() as f64;
            assert!((held - 2000.0 * fraction).abs() <= 1.0, "{fraction}: {held}");
            let first = (1.0 / fraction).ceil() as usize;
            assert!(parts[..first].contains(&true), "{fraction}");
        }
        let held = |seed| (0..2000).map(move |_| 0).scan(Draw::new(0.1, seed), |d, _| Some(d.part() == Part::Val));
        assert!(held(1).eq(held(1)) && !held(1).eq(held(2)));
        let mut none = Draw::new(0.0, 0);
        assert!((0..100).all(|_| none.part() == Part::Train));
    }

    #[test]
    fn texts_are_cut_where_their_tokens_allow() {
        assert_eq!(place_in(b"one two three"), (7, true));
        assert_eq!(place_in(b"one two, 3 4"), (3, true));
        assert_eq!(place_in("日本語".as_bytes()), (6, false));
        assert_eq!(place_in(&[0x80; 10]), (9, false));
        assert_eq!(place_in(b"12"), (1, false));
    }
}
