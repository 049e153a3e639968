//! The folder in the making: shards of both parts, one after the other, and the files that describe them.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::encode::{Counts, Share};
use super::meta::{META, PartMeta, ShardMeta};
use crate::shards::{CLASSES, ShardWriter};
use crate::{Error, Result};

/// What happens to a folder of prepared data that is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Existing {
    /// It stays, and preparation is refused.
    #[default]
    Refuse,
    /// It is replaced once the new one is whole.
    Replace,
}

/// A folder beside the one that is to be, under a name of its own until it is whole.
pub(super) struct Folder {
    place: PathBuf,
    partial: PathBuf,
    /// Held as long as this process works in it.
    _lock: File,
    whole: bool,
}

impl Folder {
    /// # Errors
    /// When something is at `place` that must stay, another process prepares it, or nothing can be written there.
    pub(super) fn new(place: &Path, existing: Existing) -> Result<Folder> {
        let failed = |e| Error::io("make the folder", place, e);
        let wrong = |what: &str| Err(Error::new(format!("`{}` {what}", place.display())));
        let name = place.file_name().map(|name| name.to_string_lossy().into_owned());
        let Some(name) = name else { return wrong("has no name of its own; expected a folder to make") };
        let parent = place.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let partial = parent.join(format!(".{name}.partial"));
        let old = partial.with_extension("old");
        if fs::symlink_metadata(place).is_err() && old.join(META).is_file() {
            // A process was killed as it was about to replace them: they come back.
            fs::rename(&old, place).map_err(failed)?;
        }
        match fs::symlink_metadata(place) {
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(failed(e)),
            Ok(meta) if !meta.is_dir() => return wrong("is there and no folder"),
            Ok(_) if fs::read_dir(place).map_err(failed)?.next().is_none() => {}
            Ok(_) if !place.join(META).is_file() => {
                return wrong("is a folder with other things than prepared data; expected one that is new or empty");
            }
            Ok(_) if existing == Existing::Refuse => {
                return wrong("has prepared data already; --replace replaces it, another --out leaves it");
            }
            Ok(_) => {}
        }
        fs::create_dir_all(parent).map_err(failed)?;
        // What a process left that was stopped: its lock is free.
        let lock = Path::new("lock");
        fs::create_dir_all(&partial).map_err(failed)?;
        let file = File::options().write(true).create(true).truncate(false).open(partial.join(lock)).map_err(failed)?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return wrong("is being prepared by another process"),
            // File systems without locks do without.
            Err(TryLockError::Error(_)) | Ok(()) => {}
        }
        for entry in fs::read_dir(&partial).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if entry.file_name() != lock {
                fs::remove_file(entry.path()).map_err(failed)?;
            }
        }
        Ok(Folder { place: place.to_owned(), partial, _lock: file, whole: false })
    }

    pub(super) fn path(&self) -> &Path {
        &self.partial
    }

    /// Gives the folder its name.
    pub(super) fn finish(mut self) -> io::Result<()> {
        fs::remove_file(self.partial.join("lock"))?;
        #[cfg(unix)]
        File::open(&self.partial)?.sync_all()?;
        let old = self.partial.with_extension("old");
        let there = fs::symlink_metadata(&self.place).is_ok();
        if there {
            // Of a process that was killed while it removed what it had replaced.
            match fs::remove_dir_all(&old) {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
                _ => fs::rename(&self.place, &old)?,
            }
        }
        if let Err(e) = fs::rename(&self.partial, &self.place) {
            if there {
                fs::rename(&old, &self.place)?;
            }
            return Err(e);
        }
        self.whole = true;
        if there { fs::remove_dir_all(&old) } else { Ok(()) }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !self.whole {
            // What is left of a failed attempt helps nobody; that it cannot be removed changes nothing.
            let _ = fs::remove_dir_all(&self.partial);
        }
    }
}

/// Writes the shards of a part.
pub(super) struct PartWriter<'a> {
    folder: &'a Path,
    name: &'static str,
    wide: usize,
    vocab: usize,
    marked: bool,
    /// Tokens of a shard.
    most: u64,
    open: Option<(ShardWriter, Option<ShardWriter>)>,
    shards: Vec<ShardMeta>,
    counts: Counts,
    written: u64,
}

impl<'a> PartWriter<'a> {
    pub(super) fn new(folder: &'a Path, name: &'static str, vocab: usize, marked: bool, most: u64) -> PartWriter<'a> {
        PartWriter {
            folder,
            name,
            wide: crate::shards::width(vocab),
            vocab,
            marked,
            most,
            open: None,
            shards: Vec::new(),
            counts: Counts::default(),
            written: 0,
        }
    }

    /// Bytes written so far.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    pub(super) fn tokens(&self) -> u64 {
        self.counts.tokens
    }

    pub(super) fn write(&mut self, share: &Share) -> io::Result<()> {
        self.counts.add(&share.counts);
        let (mut ids, mut classes) = (share.ids.as_slice(), share.classes.as_slice());
        while !ids.is_empty() {
            let (writer, marks) = match &mut self.open {
                Some(open) => open,
                none => {
                    let stem = format!("{}-{:05}", self.name, self.shards.len());
                    let ids = ShardWriter::create(&self.folder.join(format!("{stem}.tokens")), self.wide, self.vocab)?;
                    let marks = self
                        .marked
                        .then(|| ShardWriter::create(&self.folder.join(format!("{stem}.classes")), 1, CLASSES));
                    none.insert((ids, marks.transpose()?))
                }
            };
            let n = (self.most - writer.count()).min((ids.len() / self.wide) as u64) as usize;
            let (now, later) = ids.split_at(n * self.wide);
            writer.write(now)?;
            self.written += now.len() as u64;
            if let Some(marks) = marks {
                let (now, later) = classes.split_at(n);
                marks.write(now)?;
                self.written += n as u64;
                classes = later;
            }
            ids = later;
            if writer.count() == self.most {
                self.close()?;
            }
        }
        Ok(())
    }

    fn close(&mut self) -> io::Result<()> {
        let Some((ids, classes)) = self.open.take() else { return Ok(()) };
        let stem = format!("{}-{:05}", self.name, self.shards.len());
        let tokens = ids.count();
        let checksum = format!("{:016x}", ids.finish()?);
        let classes = match classes {
            Some(classes) => {
                classes.finish()?;
                Some(format!("{stem}.classes"))
            }
            None => None,
        };
        self.shards.push(ShardMeta { file: format!("{stem}.tokens"), tokens, checksum, classes });
        Ok(())
    }

    pub(super) fn finish(mut self) -> io::Result<PartMeta> {
        self.close()?;
        let Counts { documents, tokens, bytes, classes: [answer, proof, source] } = self.counts;
        let of = |n: u64| self.marked.then_some(n);
        Ok(PartMeta {
            documents,
            tokens,
            bytes,
            answer_tokens: of(answer),
            proof_tokens: of(proof),
            source_tokens: of(source),
            shards: self.shards,
        })
    }
}
