//! Text on disk: one file or a folder of files, seen as one long run of bytes.
//!
//! Files are memory-mapped: opening costs no memory, reading touches only the pages read, and the system may drop them
//! again, so a corpus of any size runs in bounded memory. A folder is a list of maps with a virtual concatenation in
//! name order (nothing is inserted between files). Bytes are taken as they are: no decoding, no change of line ends.
//!
//! **While it is open the files must not shrink.** A map of a file that another program truncates makes the system
//! stop this process (SIGBUS) when a lost page is read; a file that is rewritten in place gives the new bytes. A
//! file that is deleted, or replaced by renaming over it, is safe: the map keeps the old one.

use crate::mix::{hash, mix};
use crate::{Error, Result};
use memmap2::Mmap;
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Extensions that are taken as text in a folder, in any case of letters.
pub const EXTENSIONS: [&str; 3] = ["txt", "md", "lean"];

/// Part of a text that is held out when nothing else is asked: the last 2 %.
pub const VAL_FRACTION: f64 = 0.02;

/// A run of bytes over one or more mapped files; cloning and slicing share the maps.
#[derive(Clone)]
pub struct Corpus {
    parts: Arc<[Part]>,
    range: Range<u64>,
    name: Arc<str>,
}

struct Part {
    start: u64,
    data: Data,
}

enum Data {
    Map(Mmap),
    Owned(Vec<u8>),
}

impl Data {
    fn bytes(&self) -> &[u8] {
        match self {
            Data::Map(map) => map,
            Data::Owned(bytes) => bytes,
        }
    }
}

/// A text cut in two by position.
#[derive(Clone, Debug)]
pub struct Split {
    /// The first part: at least one window of `T+1` tokens.
    pub train: Corpus,
    /// The last part; empty when nothing could be held out (see [`Split::note`]).
    pub val: Corpus,
}

impl Corpus {
    /// Opens a file of any extension, or all [`EXTENSIONS`] files below a folder, sorted by path. Hidden files and
    /// folders (leading dot) are passed over, links to folders are not followed, empty files add nothing.
    ///
    /// # Errors
    /// When the path is missing, unreadable, no regular file, empty, or a folder without text; the sentence names it.
    pub fn open(path: impl AsRef<Path>) -> Result<Corpus> {
        let path = path.as_ref();
        Corpus::of_files(path, &files(path)?)
    }

    /// The text of `files`, which were found at `path`. Errors as [`Corpus::open`].
    pub(crate) fn of_files(path: &Path, files: &[PathBuf]) -> Result<Corpus> {
        let mut parts = Vec::new();
        let mut start = 0;
        for file in files {
            if let Some(map) = map(file)? {
                let len = map.len() as u64;
                parts.push(Part { start, data: Data::Map(map) });
                start += len;
            }
        }
        if start == 0 {
            let what = match files {
                [only] if only == path => "0 bytes".into(),
                _ => format!("all {} text files are empty", files.len()),
            };
            return Err(Error::new(format!("`{}` is empty ({what}); expected text", path.display())));
        }
        Ok(Corpus { parts: parts.into(), range: 0..start, name: path.display().to_string().into() })
    }

    /// A corpus in memory; `name` stands in error messages. May be empty.
    pub fn from_bytes(name: &str, bytes: impl Into<Vec<u8>>) -> Corpus {
        let bytes = bytes.into();
        let range = 0..bytes.len() as u64;
        Corpus { parts: [Part { start: 0, data: Data::Owned(bytes) }].into(), range, name: name.into() }
    }

    /// Bytes, which are also byte tokens.
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Whether there is nothing to read.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What messages call it: the path it was opened from.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Copies the bytes `start .. start + out.len()`, across file boundaries.
    ///
    /// # Panics
    /// If that range does not lie inside `0..len()`.
    #[track_caller]
    pub fn read(&self, start: u64, out: &mut [u8]) {
        let end = start.checked_add(out.len() as u64).filter(|&end| end <= self.len());
        assert!(end.is_some(), "corpus `{}`: read of {} bytes at {start}, length {}", self.name, out.len(), self.len());
        if out.is_empty() {
            return;
        }
        let mut at = self.range.start + start;
        let mut rest = out;
        let mut part = self.parts.partition_point(|p| p.start <= at) - 1;
        while !rest.is_empty() {
            let bytes = self.parts[part].data.bytes();
            let offset = (at - self.parts[part].start) as usize;
            let n = rest.len().min(bytes.len() - offset);
            let (now, later) = rest.split_at_mut(n);
            now.copy_from_slice(&bytes[offset..offset + n]);
            rest = later;
            at += n as u64;
            part += 1;
        }
    }

    /// The file that has the byte `at`: its place among the files, all of its bytes (those before and behind this
    /// part of the text, too), and where in them the byte is.
    ///
    /// # Panics
    /// If `at` does not lie inside `0..len()`.
    #[track_caller]
    pub(crate) fn file_at(&self, at: u64) -> (usize, &[u8], usize) {
        assert!(at < self.len(), "corpus `{}`: byte {at}, length {}", self.name, self.len());
        let at = self.range.start + at;
        let part = self.parts.partition_point(|p| p.start <= at) - 1;
        (part, self.parts[part].data.bytes(), (at - self.parts[part].start) as usize)
    }

    /// A number that a change of the text changes: its length and its bytes, of a text beyond 256 MiB every so many blocks.
    pub fn fingerprint(&self) -> u64 {
        const BLOCK: u64 = 1 << 16;
        const MOST: u64 = 1 << 12;
        let step = self.len().div_ceil(BLOCK).div_ceil(MOST).max(1) * BLOCK;
        let mut buffer = vec![0; BLOCK as usize];
        let mut sum = mix(self.len());
        for start in (0..self.len()).step_by(step as usize) {
            let block = &mut buffer[..BLOCK.min(self.len() - start) as usize];
            self.read(start, block);
            sum = mix(sum ^ hash(block));
        }
        sum
    }

    /// The bytes `range` as token ids.
    ///
    /// # Panics
    /// If `range` does not lie inside `0..len()`.
    #[track_caller]
    pub fn ids(&self, range: Range<u64>) -> Vec<i64> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.read(range.start, &mut bytes);
        bytes.into_iter().map(i64::from).collect()
    }

    /// A part of this corpus, sharing its maps.
    ///
    /// # Panics
    /// If `range` does not lie inside `0..len()`.
    #[track_caller]
    pub fn slice(&self, range: Range<u64>) -> Corpus {
        assert!(range.start <= range.end && range.end <= self.len(), "slice {range:?} of corpus of {}", self.len());
        let base = self.range.start;
        Corpus { range: base + range.start..base + range.end, ..self.clone() }
    }

    /// Holds out the last `⌊len · val_fraction⌋` bytes for validation. Training keeps at least the `T+1` tokens of one
    /// window, at the cost of the validation part.
    ///
    /// # Errors
    /// When there are fewer than `T+1` tokens in all, or the fraction is outside `[0, 1)`.
    pub fn split(&self, val_fraction: f64, seq: usize) -> Result<Split> {
        check_fraction(val_fraction)?;
        let (len, need) = (self.len(), seq as u64 + 1);
        if len < need {
            return Err(Error::new(format!(
                "`{}` is too short: {len} tokens found, {need} needed to train at sequence length {seq} (T + 1); \
                 a validation of whole windows needs {need} more",
                self.name
            )));
        }
        let val = ((len as f64 * val_fraction) as u64).min(len - need);
        Ok(Split { train: self.slice(0..len - val), val: self.slice(len - val..len) })
    }
}

impl std::fmt::Debug for Corpus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Corpus(`{}`, bytes {:?}, {} files)", self.name, self.range, self.parts.len())
    }
}

impl Split {
    /// A sentence for the user when validation is missing or shorter than one window of `seq + 1` tokens.
    pub fn note(&self, seq: usize) -> Option<String> {
        let (train, val, need) = (self.train.len(), self.val.len(), seq as u64 + 1);
        let start = format!("`{}`: {train} tokens to train on and {val} held out, ", self.train.name);
        match val {
            0 | 1 => Some(start + "too few to validate: no validation loss will be reported"),
            _ if val < need => {
                Some(format!("{start}fewer than a window of {need}: validation uses one shorter window"))
            }
            _ => None,
        }
    }
}

/// Whether a part of a text of this size can be held out.
pub(crate) fn check_fraction(val_fraction: f64) -> Result<()> {
    if !(0.0..1.0).contains(&val_fraction) {
        return Err(Error::new(format!("the validation fraction is {val_fraction}; expected 0 <= fraction < 1")));
    }
    Ok(())
}

/// The files of the text at `path`: itself, or all files of a folder that are text. Errors as [`Corpus::open`].
pub(crate) fn files(path: &Path) -> Result<Vec<PathBuf>> {
    let meta = fs::metadata(path).map_err(|e| Error::io("open the text", path, e))?;
    if !meta.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = Vec::new();
    collect(path, &mut found)?;
    found.sort();
    if found.is_empty() {
        let looked = EXTENSIONS.map(|e| format!(".{e}")).join(", ");
        let path = path.display();
        return Err(Error::new(format!("`{path}` has no text: no file ends in {looked} (subfolders included)")));
    }
    Ok(found)
}

fn collect(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    let read = |e| Error::io("read the folder", folder, e);
    for entry in fs::read_dir(folder).map_err(read)? {
        let entry = entry.map_err(read)?;
        if entry.file_name().to_string_lossy().starts_with('.') {
            continue;
        }
        let path = entry.path();
        let text = path.extension().and_then(|e| e.to_str()).map(str::to_ascii_lowercase);
        // The entry's own type: a link to a folder could lead round in a circle.
        if entry.file_type().map_err(read)?.is_dir() {
            collect(&path, found)?;
        } else if text.is_some_and(|e| EXTENSIONS.contains(&e.as_str())) && !path.is_dir() {
            found.push(path);
        }
    }
    Ok(())
}

/// `None` for an empty file, which cannot be mapped everywhere.
fn map(path: &Path) -> Result<Option<Mmap>> {
    let meta = fs::metadata(path).map_err(|e| Error::io("open the text", path, e))?;
    // Checked before opening: opening a pipe would wait for ever.
    if !meta.is_file() {
        return Err(Error::new(format!("`{}` is neither a regular file nor a folder; expected text", path.display())));
    }
    if meta.len() == 0 {
        return Ok(None);
    }
    let file = File::open(path).map_err(|e| Error::io("read the text", path, e))?;
    // SAFETY: the map is read-only; what reads it copies bytes or classifies them, and holds for any bytes. That nobody
    // shrinks the file meanwhile cannot be enforced; the module's documentation states it as the user's part and names
    // what happens.
    let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io("map the text", path, e))?;
    Ok((!map.is_empty()).then_some(map))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn all(corpus: &Corpus) -> Vec<u8> {
        let mut out = vec![0; corpus.len() as usize];
        corpus.read(0, &mut out);
        out
    }

    #[test]
    fn a_folder_is_its_text_files_in_name_order() {
        let dir = Scratch::new();
        dir.file("b.txt", "B\r\n");
        dir.file("a/z.LEAN", [0x92, 0xff]);
        dir.file("a.md", "A");
        dir.file("c.txt", "");
        dir.file("notes.bin", "no");
        dir.file(".git/x.txt", "no");
        let corpus = Corpus::open(dir.path()).unwrap();
        assert_eq!(all(&corpus), [&[0x92, 0xff][..], b"AB\r\n"].concat());
        for start in 0..=6 {
            for end in start..=6 {
                let mut out = vec![0; end - start];
                corpus.read(start as u64, &mut out);
                assert_eq!(out, all(&corpus)[start..end]);
            }
        }
        let tail = corpus.slice(1..5).slice(1..4);
        assert_eq!(all(&tail), b"AB\r");
        assert_eq!(tail.ids(0..2), [65, 66]);
    }

    #[test]
    #[should_panic(expected = "length 3")]
    fn reading_past_a_slice_panics_though_the_file_goes_on() {
        Corpus::from_bytes("memory", *b"abcdef").slice(1..4).read(1, &mut [0; 3]);
    }

    #[test]
    fn case_41_a_named_file_has_any_extension_and_any_bytes() {
        let dir = Scratch::new();
        let bytes: Vec<u8> = (0..=255).chain(*b"a\r\nb").collect();
        assert_eq!(all(&Corpus::open(dir.file("data.bin", &bytes)).unwrap()), bytes);
    }

    #[test]
    fn errors_name_path_expected_and_found() {
        let dir = Scratch::new();
        let message = |p: &Path| Corpus::open(p).unwrap_err().to_string();
        let missing = dir.path().join("nowhere.txt");
        assert!(message(&missing).contains("nowhere.txt"), "{}", message(&missing));
        let empty = dir.file("sub/empty.txt", "");
        assert!(message(&empty).contains("empty.txt") && message(&empty).contains("0 bytes"));
        assert!(message(&dir.path().join("sub")).contains("all 1 text files are empty"));
        dir.file("none/x.csv", "1");
        let none = message(&dir.path().join("none"));
        assert!(none.contains("none") && none.contains(".txt, .md, .lean"), "{none}");
        use std::error::Error as _;
        let source = Corpus::open(&missing).unwrap_err();
        let io = source.source().unwrap().downcast_ref::<std::io::Error>().unwrap();
        assert_eq!(io.kind(), std::io::ErrorKind::NotFound);
    }

    #[cfg(unix)]
    #[test]
    fn links_in_circles_pipes_and_unreadable_files() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let dir = Scratch::new();
        let file = dir.file("in/a.txt", "x");
        symlink(dir.path().join("in"), dir.path().join("in/again.txt")).unwrap();
        symlink(&file, dir.path().join("in/b.txt")).unwrap();
        assert_eq!(all(&Corpus::open(dir.path()).unwrap()), b"xx");
        assert!(Corpus::open("/dev/null").unwrap_err().to_string().contains("regular file"));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o000)).unwrap();
        // Root may read everything: then there is nothing to see.
        if File::open(&file).is_err() {
            let e = Corpus::open(&file).unwrap_err().to_string();
            assert!(e.contains("a.txt") && e.contains("ermission"), "{e}");
        }
    }

    #[test]
    fn case_36_counts_are_named_and_one_window_trains() {
        let corpus = |n: usize| Corpus::from_bytes("text", vec![b'x'; n]);
        for found in [0, 64] {
            let e = corpus(found).split(VAL_FRACTION, 64).unwrap_err().to_string();
            assert!(e.contains(&format!("{found} tokens found, 65 needed")), "{e}");
        }
        let one = corpus(65).split(0.5, 64).unwrap();
        assert_eq!((one.train.len(), one.val.len()), (65, 0));
        assert!(one.note(64).unwrap().contains("no validation loss"));
        let short = corpus(1000).split(VAL_FRACTION, 64).unwrap();
        assert_eq!((short.train.len(), short.val.len()), (980, 20));
        assert!(short.note(64).unwrap().contains("shorter window"));
        let good = corpus(100_000).split(VAL_FRACTION, 64).unwrap();
        assert_eq!((good.train.len(), good.val.len(), good.note(64)), (98_000, 2000, None));
        assert!(corpus(100).split(1.0, 4).is_err() && corpus(100).split(f64::NAN, 4).is_err());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn case_41_a_large_file_stays_on_disk() {
        let resident = || {
            let status = fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find(|l| l.starts_with("RssAnon")).unwrap().to_owned();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() // KiB
        };
        let dir = Scratch::new();
        let path = dir.file("big.txt", "start");
        let size = 5u64 << 30; // sparse, and past 32-bit offsets
        File::options().write(true).open(&path).unwrap().set_len(size).unwrap();
        let before = resident();
        let corpus = Corpus::open(&path).unwrap();
        let split = corpus.split(0.02, 256).unwrap();
        let mut out = [1; 257];
        for at in (0..split.val.len() - 257).step_by(1 << 20) {
            split.val.read(at, &mut out);
            assert_eq!(out, [0; 257]);
        }
        assert_eq!(corpus.ids(0..6), [115, 116, 97, 114, 116, 0]);
        // Far below the file's size, far above what other tests of this process may hold.
        assert!(resident() < before + (512 << 10), "reading grew memory from {before} to {} KiB", resident());
    }
}
