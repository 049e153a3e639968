//! Token shards: ids as they lie in memory, behind a header, to be mapped.
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | `kumikids` |
//! | 8..12 | version, 1 |
//! | 12..16 | bytes of an item: 2 or 4 for ids, 1 for classes |
//! | 16..24 | number of items |
//! | 24..32 | size of the vocabulary: every item lies below it |
//! | 32..40 | XXH64 of the items' bytes, seed 0 |
//! | 40..64 | zeros |
//! | 64.. | the items |
//!
//! All numbers are little-endian. Nothing in a file is trusted: size, header, checksum and every item are checked when it is
//! opened, at the speed of memory or of the disk, so that nothing can be wrong later. As with texts, **while it is open a
//! shard must not shrink** (see [`crate::corpus`]).

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use kumiki_tensor::threads;
use memmap2::Mmap;

use crate::marks::Class;
use crate::xxh64::Xxh64;
use crate::{Error, Result};

const MAGIC: [u8; 8] = *b"kumikids";
const VERSION: u32 = 1;
/// Bytes before the items.
pub const HEADER: usize = 64;

/// The classes of tokens as items of a shard: none, and [`Class::ALL`].
pub(crate) const CLASSES: usize = Class::ALL.len() + 1;

/// Bytes that an id of a vocabulary of this size takes.
pub fn width(vocab: usize) -> usize {
    if vocab <= 1 << 16 { 2 } else { 4 }
}

/// Writes a shard. Until [`ShardWriter::finish`] the file has no header and cannot be opened as one.
pub(crate) struct ShardWriter {
    file: File,
    width: usize,
    vocab: usize,
    bytes: u64,
    sum: Xxh64,
}

impl ShardWriter {
    /// A new file, for items of `width` bytes below `vocab`.
    pub(crate) fn create(path: &Path, width: usize, vocab: usize) -> io::Result<ShardWriter> {
        let mut file = File::options().write(true).create_new(true).open(path)?;
        file.write_all(&[0; HEADER])?;
        Ok(ShardWriter { file, width, vocab, bytes: 0, sum: Xxh64::new() })
    }

    pub(crate) fn count(&self) -> u64 {
        self.bytes / self.width as u64
    }

    /// Appends whole items, little-endian.
    pub(crate) fn write(&mut self, items: &[u8]) -> io::Result<()> {
        self.file.write_all(items)?;
        self.sum.update(items);
        self.bytes += items.len() as u64;
        Ok(())
    }

    /// Writes the header and hands all to the disk; gives the checksum.
    pub(crate) fn finish(mut self) -> io::Result<u64> {
        let sum = self.sum.sum();
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&(self.width as u32).to_le_bytes());
        header[16..24].copy_from_slice(&self.count().to_le_bytes());
        header[24..32].copy_from_slice(&(self.vocab as u64).to_le_bytes());
        header[32..40].copy_from_slice(&sum.to_le_bytes());
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&header)?;
        self.file.sync_all()?;
        Ok(sum)
    }
}

/// A file of items, mapped and checked.
pub(crate) struct Shard {
    map: Mmap,
    width: usize,
    count: u64,
    vocab: u64,
    sum: u64,
}

impl Shard {
    /// Opens and checks a shard.
    ///
    /// # Errors
    /// When it cannot be read, is no shard, is of another version, has another size than its header says, an id that is
    /// beyond its vocabulary, or other bytes than were written.
    pub(crate) fn open(path: &Path) -> Result<Shard> {
        let wrong = |what: String| Error::new(format!("`{}` {what}", path.display()));
        let meta = std::fs::metadata(path).map_err(|e| Error::io("open the shard", path, e))?;
        if !meta.is_file() {
            return Err(wrong("is no regular file; expected a token shard".into()));
        }
        if meta.len() < HEADER as u64 {
            return Err(wrong(format!("has {} bytes; the header of a token shard alone has {HEADER}", meta.len())));
        }
        let file = File::open(path).map_err(|e| Error::io("open the shard", path, e))?;
        // SAFETY: the map is read-only, and what reads it copies bytes. That nobody shrinks the file meanwhile cannot be
        // enforced; the module's documentation states it as the user's part.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io("map the shard", path, e))?;
        let Some((header, _)) = map.split_first_chunk::<HEADER>() else {
            return Err(wrong("shrank while it was opened".into()));
        };
        let short = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let long = |at: usize| u64::from(short(at)) | u64::from(short(at + 4)) << 32;
        if header[..8] != MAGIC {
            return Err(wrong("is no token shard: it does not begin with `kumikids` (or was never finished)".into()));
        }
        if short(8) != VERSION {
            return Err(wrong(format!(
                "is a token shard of version {}; this program reads version {VERSION}",
                short(8)
            )));
        }
        let (width, count, vocab) = (short(12) as usize, long(16), long(24));
        if ![1, 2, 4].contains(&width) {
            return Err(wrong(format!("has items of {width} bytes; expected 1, 2 or 4")));
        }
        if vocab == 0 || vocab > 1 << (8 * width) {
            return Err(wrong(format!("says that its vocabulary has {vocab} tokens, and has ids of {width} bytes")));
        }
        if header[40..].iter().any(|&byte| byte != 0) {
            return Err(wrong("has a header that is damaged: its last 24 bytes are not zeros".into()));
        }
        let expected = u128::from(count) * width as u128 + HEADER as u128;
        if expected != map.len() as u128 {
            return Err(wrong(format!(
                "has {} bytes; a shard of {count} items of {width} bytes has {expected}",
                map.len()
            )));
        }
        let shard = Shard { width, count, vocab, sum: long(32), map };
        shard.verify().map_err(wrong)?;
        Ok(shard)
    }

    fn items(&self) -> &[u8] {
        &self.map[HEADER..]
    }

    /// The checksum, and that every item lies below the vocabulary.
    fn verify(&self) -> std::result::Result<(), String> {
        // Both look at a piece while it is near.
        const PIECE: usize = 1 << 16;
        let (mut sum, mut beyond) = (Xxh64::new(), None);
        for (n, piece) in self.items().chunks(PIECE).enumerate() {
            sum.update(piece);
            let highest = match self.width {
                1 => piece.iter().copied().max().map(u32::from),
                2 => piece.as_chunks().0.iter().map(|&id| u16::from_le_bytes(id)).max().map(u32::from),
                _ => piece.as_chunks().0.iter().map(|&id| u32::from_le_bytes(id)).max(),
            };
            if highest.is_some_and(|highest| u64::from(highest) >= self.vocab) {
                beyond = beyond.or(Some((n * PIECE / self.width) as u64));
            }
        }
        if let Some(from) = beyond {
            let at = (from..self.count).find(|&at| u64::from(self.get(at)) >= self.vocab).unwrap_or(from);
            return Err(format!("has the id {} at {at}; its vocabulary has {} tokens", self.get(at), self.vocab));
        }
        if sum.sum() != self.sum {
            return Err(format!(
                "is damaged: its items have the checksum {:016x}, and {:016x} when they were written",
                sum.sum(),
                self.sum
            ));
        }
        Ok(())
    }

    fn get(&self, at: u64) -> u32 {
        let start = at as usize * self.width;
        let bytes = &self.items()[start..start + self.width];
        bytes.iter().rev().fold(0, |id, &byte| id << 8 | u32::from(byte))
    }

    fn read(&self, range: Range<usize>, out: &mut Vec<i64>) {
        let bytes = &self.items()[range.start * self.width..range.end * self.width];
        match self.width {
            1 => out.extend(bytes.iter().map(|&id| i64::from(id))),
            2 => out.extend(bytes.as_chunks().0.iter().map(|&id| i64::from(u16::from_le_bytes(id)))),
            _ => out.extend(bytes.as_chunks().0.iter().map(|&id| i64::from(u32::from_le_bytes(id)))),
        }
    }
}

/// The files of one stretch of tokens.
pub(crate) struct Files<'a> {
    pub ids: &'a Path,
    pub classes: Option<&'a Path>,
    /// What they must be.
    pub tokens: u64,
    pub sum: u64,
}

/// A run of tokens over one or more shards; clones share the maps.
#[derive(Clone)]
pub struct Tokens {
    parts: Arc<[Part]>,
    len: u64,
    vocab: usize,
    name: Arc<str>,
    /// Whether they are questions and answers, one kind after the other.
    pub(crate) questions: bool,
}

struct Part {
    start: u64,
    ids: Shard,
    classes: Option<Shard>,
}

impl Tokens {
    /// Opens shards, and checks them on all threads. `name` is for messages.
    pub(crate) fn open(name: &str, vocab: usize, questions: bool, files: &[Files]) -> Result<Tokens> {
        let open = |file: &Files| -> Result<Part> {
            let wrong = |path: &Path, what: String| Error::new(format!("`{}` {what}", path.display()));
            let ids = Shard::open(file.ids)?;
            if (ids.width, ids.vocab) != (width(vocab), vocab as u64) {
                let (width, found) = (ids.width, ids.vocab);
                let what =
                    format!("has ids of {width} bytes below {found}; `{name}` says that its tokenizer has {vocab}");
                return Err(wrong(file.ids, what));
            }
            if (ids.count, ids.sum) != (file.tokens, file.sum) {
                let what = format!(
                    "has {} tokens with the checksum {:016x}; `{name}` says {} with {:016x}",
                    ids.count, ids.sum, file.tokens, file.sum
                );
                return Err(wrong(file.ids, what));
            }
            let classes = file.classes.map(Shard::open).transpose()?;
            if let (Some(classes), Some(path)) = (&classes, file.classes)
                && (classes.width, classes.vocab, classes.count) != (1, CLASSES as u64, ids.count)
            {
                let what =
                    format!("has {} items of {} bytes; expected {} of 1", classes.count, classes.width, ids.count);
                return Err(wrong(path, what));
            }
            Ok(Part { start: 0, ids, classes })
        };
        let cost = files.iter().map(|file| file.tokens as usize).max().unwrap_or(0);
        let opened = threads::parallel_map(files.len(), cost, |n| open(&files[n]));
        let (mut parts, mut len) = (Vec::new(), 0);
        for part in opened {
            let part = part?;
            if part.ids.count > 0 {
                let count = part.ids.count;
                parts.push(Part { start: len, ..part });
                len += count;
            }
        }
        Ok(Tokens { parts: parts.into(), len, vocab, name: name.into(), questions })
    }

    /// Number of tokens.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Ids lie below this.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// What messages call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the classes of tokens are known.
    pub fn has_classes(&self) -> bool {
        self.parts.iter().any(|part| part.classes.is_some())
    }

    /// A number that a change of the tokens changes: from the checksums, which were checked.
    pub fn fingerprint(&self) -> u64 {
        self.parts.iter().fold(crate::mix::mix(self.len), |sum, part| crate::mix::mix(sum ^ part.ids.sum))
    }

    /// How often every id is there, and every class of [`Class::ALL`].
    pub(crate) fn census(&self) -> (Vec<u64>, [u64; Class::ALL.len()]) {
        let count = |part: &Part| {
            let (mut ids, mut classes) = (vec![0u64; self.vocab], [0u64; CLASSES]);
            // Below the vocabulary, as was checked.
            match part.ids.width {
                1 => part.ids.items().iter().for_each(|&id| ids[usize::from(id)] += 1),
                2 => (part.ids.items().as_chunks().0.iter())
                    .for_each(|&id| ids[usize::from(u16::from_le_bytes(id))] += 1),
                _ => (part.ids.items().as_chunks().0.iter()).for_each(|&id| ids[u32::from_le_bytes(id) as usize] += 1),
            }
            let items = part.classes.as_ref().map_or(&[][..], Shard::items);
            items.iter().for_each(|&item| classes[usize::from(item)] += 1);
            (ids, classes)
        };
        let cost = self.parts.iter().map(|part| part.ids.count as usize).max().unwrap_or(0);
        let counted = threads::parallel_map(self.parts.len(), cost, |n| count(&self.parts[n]));
        let (mut ids, mut classes) = (vec![0; self.vocab], [0; Class::ALL.len()]);
        for (more, marked) in counted {
            ids.iter_mut().zip(more).for_each(|(sum, n)| *sum += n);
            // The first is of no class.
            classes.iter_mut().zip(&marked[1..]).for_each(|(sum, n)| *sum += n);
        }
        (ids, classes)
    }

    /// Hands the shards that have `range` to `take`, each with its part of it.
    #[track_caller]
    fn over(&self, range: Range<u64>, mut take: impl FnMut(&Part, Range<usize>)) {
        assert!(range.start <= range.end && range.end <= self.len, "tokens {range:?} of `{}`: {}", self.name, self.len);
        let first = self.parts.partition_point(|part| part.start + part.ids.count <= range.start);
        for part in self.parts[first..].iter().take_while(|part| part.start < range.end) {
            let [from, to] = [range.start.max(part.start), range.end.min(part.start + part.ids.count)];
            take(part, (from - part.start) as usize..(to - part.start) as usize);
        }
    }

    /// The ids `range`.
    ///
    /// # Panics
    /// If that does not lie inside `0..len()`.
    #[track_caller]
    pub fn ids(&self, range: Range<u64>) -> Vec<i64> {
        let mut out = Vec::with_capacity((range.end - range.start) as usize);
        self.over(range, |part, range| part.ids.read(range, &mut out));
        out
    }

    /// Appends the classes of the tokens `range`.
    ///
    /// # Panics
    /// If that does not lie inside `0..len()`.
    #[track_caller]
    pub(crate) fn classes(&self, range: Range<u64>, out: &mut Vec<Option<Class>>) {
        self.over(range, |part, range| match &part.classes {
            Some(classes) => out.extend(classes.items()[range].iter().map(|&item| of_item(item))),
            None => out.extend(std::iter::repeat_n(None, range.len())),
        });
    }
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokens(`{}`, {} of {}, {} shards)", self.name, self.len, self.vocab, self.parts.len())
    }
}

/// A class as an item of a shard.
pub(crate) fn item(class: Option<Class>) -> u8 {
    class.map_or(0, |class| class as u8 + 1)
}

fn of_item(item: u8) -> Option<Class> {
    item.checked_sub(1).and_then(|at| Class::ALL.get(usize::from(at))).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use std::path::PathBuf;

    fn write(dir: &Scratch, name: &str, vocab: usize, ids: &[u32]) -> (PathBuf, u64) {
        let path = dir.path().join(name);
        let _ = std::fs::remove_file(&path);
        let width = width(vocab);
        let mut writer = ShardWriter::create(&path, width, vocab).unwrap();
        for ids in ids.chunks(3) {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()[..width].to_vec()).collect();
            writer.write(&bytes).unwrap();
        }
        (path, writer.finish().unwrap())
    }

    fn open(parts: &[(PathBuf, u64)], vocab: usize, counts: &[u64]) -> Result<Tokens> {
        let files: Vec<Files> = parts
            .iter()
            .zip(counts)
            .map(|((ids, sum), &tokens)| Files { ids, classes: None, tokens, sum: *sum })
            .collect();
        Tokens::open("test", vocab, false, &files)
    }

    #[test]
    fn ids_come_back_over_the_ends_of_shards() {
        let dir = Scratch::new();
        for vocab in [256, 1 << 16, 100_000] {
            let all: Vec<u32> = (0..1000).map(|i| i * 7919 % vocab as u32).collect();
            let parts = [&all[..10], &[], &all[10..999], &all[999..]].map(|ids| (ids.len() as u64, ids));
            let files: Vec<_> =
                parts.iter().enumerate().map(|(n, (_, ids))| write(&dir, &format!("{n}"), vocab, ids)).collect();
            let tokens = open(&files, vocab, &parts.map(|(count, _)| count)).unwrap();
            assert_eq!((tokens.len(), tokens.vocab()), (1000, vocab));
            let expected: Vec<i64> = all.iter().map(|&id| i64::from(id)).collect();
            for range in [0..1000, 0..0, 5..15, 9..10, 10..11, 998..1000, 999..1000, 1000..1000] {
                assert_eq!(tokens.ids(range.clone()), expected[range.start as usize..range.end as usize], "{range:?}");
            }
        }
    }

    #[test]
    fn what_is_wrong_with_a_shard_is_said_when_it_is_opened() {
        let dir = Scratch::new();
        let ids: Vec<u32> = (0..100_000).map(|i| i % 257).collect();
        let (path, sum) = write(&dir, "a", 257, &ids);
        let good = std::fs::read(&path).unwrap();
        assert_eq!(good.len(), 64 + 200_000);
        assert_eq!(u64::from_le_bytes(good[32..40].try_into().unwrap()), sum);
        let bad = |change: &dyn Fn(&mut Vec<u8>), phrases: &[&str]| {
            let mut bytes = good.clone();
            change(&mut bytes);
            std::fs::write(&path, &bytes).unwrap();
            let e = Shard::open(&path).err().expect("damage must be seen").to_string();
            assert!(e.starts_with(&format!("`{}`", path.display())), "{e}");
            phrases.iter().for_each(|phrase| assert!(e.contains(phrase), "no `{phrase}` in: {e}"));
        };
        bad(&|b| b.truncate(b.len() - 1), &["has 200063 bytes", "200064"]);
        bad(&|b| b.push(0), &["has 200065 bytes", "200064"]);
        bad(&|b| b.truncate(63), &["63 bytes", "64"]);
        bad(&|b| b.clear(), &["0 bytes"]);
        bad(&|b| b[0] = b'K', &["no token shard", "kumikids"]);
        bad(&|b| b[..64].fill(0), &["never finished"]);
        bad(&|b| b[8] = 2, &["version 2", "version 1"]);
        bad(&|b| b[12] = 3, &["items of 3 bytes"]);
        bad(&|b| b[12] = 4, &["200064 bytes", "400064"]);
        bad(&|b| b[16..24].fill(0xff), &["18446744073709551615 items"]);
        bad(&|b| b[26] = 1, &["vocabulary has 65793", "ids of 2 bytes"]);
        bad(&|b| b[24..32].fill(0), &["vocabulary has 0"]);
        bad(&|b| b[63] = 1, &["not zeros"]);
        bad(&|b| b[64 + 2 * 70_000 + 1] = 0xff, &["has the id 65", "at 70000", "257 tokens"]);
        bad(&|b| b[64 + 2 * 70_000] ^= 1, &["is damaged", &format!("{sum:016x}")]);
        bad(&|b| b[32] ^= 1, &["is damaged"]);
        std::fs::remove_file(&path).unwrap();
        assert!(Shard::open(&path).err().unwrap().to_string().contains("cannot open the shard"));
        assert!(Shard::open(dir.path()).err().unwrap().to_string().contains("no regular file"));
    }

    #[test]
    fn shards_are_those_that_the_folder_speaks_of() {
        let dir = Scratch::new();
        let file = write(&dir, "a", 300, &[1, 2, 3]);
        assert!(open(std::slice::from_ref(&file), 300, &[3]).is_ok());
        let e = open(std::slice::from_ref(&file), 300, &[4]).unwrap_err().to_string();
        assert!(e.contains("has 3 tokens") && e.contains("says 4"), "{e}");
        let e = open(std::slice::from_ref(&file), 301, &[3]).unwrap_err().to_string();
        assert!(e.contains("below 300") && e.contains("has 301"), "{e}");
        let other = open(&[(file.0.clone(), file.1 ^ 1)], 300, &[3]).unwrap_err().to_string();
        assert!(other.contains("with the checksum"), "{other}");
    }

    #[test]
    fn an_unfinished_shard_is_none() {
        let dir = Scratch::new();
        let path = dir.path().join("a");
        let mut writer = ShardWriter::create(&path, 2, 256).unwrap();
        writer.write(&[1, 0, 2, 0]).unwrap();
        drop(writer);
        assert!(Shard::open(&path).err().unwrap().to_string().contains("never finished"));
        assert!(ShardWriter::create(&path, 2, 256).is_err(), "nothing is overwritten");
    }
}
