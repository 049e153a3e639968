//! Files that are replaced, and folders that are made, whole or not at all.
//!
//! What is new is written under a name of its own, flushed to the disk and renamed: a crash in between leaves what was
//! there before. A symbolic link stays one, its target is replaced. What is there and is no regular file (a pipe, a device, a
//! folder) is refused, for a rename would put a file in its place.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// As many links after one another as systems follow.
const MOST_LINKS: usize = 40;

/// Whether `path`, or what it links to, is there and is no regular file.
pub fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| !meta.is_file())
}

/// Where a file called `path` is written: `path` itself, or what it links to, which need not be there yet.
///
/// # Errors
/// When something else than a regular file is there, or links lead nowhere.
pub fn place(path: &Path) -> io::Result<PathBuf> {
    if is_special(path) {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is no regular file"));
    }
    let mut place = path.to_owned();
    for _ in 0..MOST_LINKS {
        match fs::symlink_metadata(&place) {
            Ok(meta) if meta.is_symlink() => {
                // An absolute target takes the place of all.
                place = place.parent().unwrap_or(Path::new("")).join(fs::read_link(&place)?);
            }
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
            _ => return Ok(place),
        }
    }
    Err(io::Error::new(ErrorKind::InvalidInput, "its symbolic links lead nowhere"))
}

/// Writes `parts` one after the other to `path`, replacing what was there.
///
/// # Errors
/// As [`place`], and when the folder does not exist or cannot be written; the file that was there stays as it was.
pub fn replace(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let place = place(path)?;
    let (mut file, temporary) = fresh(&place)?;
    let mut write = || {
        if let Ok(meta) = fs::metadata(&place) {
            // Some file systems have no permissions to keep.
            let _ = file.set_permissions(meta.permissions());
        }
        parts.iter().try_for_each(|part| file.write_all(part))?;
        file.sync_all()?;
        fs::rename(&temporary, &place)?;
        sync_names(&place);
        Ok(())
    };
    // What is left of a failed attempt helps nobody; that it cannot be removed changes nothing either.
    write().inspect_err(|_| drop(fs::remove_file(&temporary)))
}

/// Makes the folder `path`, with what `fill` writes into the folder that it is given. What `fill` writes by [`replace`] is
/// on the disk before the folder has its name.
///
/// # Errors
/// Those of `fill`; also when something is there already, or the folder cannot be made. Nothing is left then.
pub fn make_folder<E: From<io::Error>>(path: &Path, fill: impl FnOnce(&Path) -> Result<(), E>) -> Result<(), E> {
    let ((), temporary) = fresh_by(path, |temporary| fs::create_dir(temporary))?;
    let make = || {
        // Renaming would put it in the place of an empty folder.
        if path.symlink_metadata().is_ok() {
            return Err(io::Error::new(ErrorKind::AlreadyExists, "it is there already").into());
        }
        fill(&temporary)?;
        fs::rename(&temporary, path)?;
        sync_names(path);
        Ok(())
    };
    make().inspect_err(|_| drop(fs::remove_dir_all(&temporary)))
}

/// Removes the folder `path` and everything in it: it loses its name first, so that it is never there in part.
///
/// # Errors
/// When it cannot be renamed or removed. A folder that is not there is no error.
pub fn remove_folder(path: &Path) -> io::Result<()> {
    let moved = fresh_by(path, |temporary| match temporary.symlink_metadata() {
        Ok(_) => Err(ErrorKind::AlreadyExists.into()),
        Err(_) => fs::rename(path, temporary),
    });
    match moved {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        moved => fs::remove_dir_all(moved?.1),
    }
}

/// Gives the file `from` the second name `to`, replacing what was there; a copy where the file system has no such names.
///
/// # Errors
/// As [`replace`].
pub fn link(from: &Path, to: &Path) -> io::Result<()> {
    let place = place(to)?;
    match fresh_by(&place, |temporary| fs::hard_link(from, temporary)) {
        Ok(((), temporary)) => {
            let renamed = fs::rename(&temporary, &place);
            // Of two names of one file a rename does nothing, and both stay.
            let _ = fs::remove_file(&temporary);
            sync_names(&place);
            renamed
        }
        Err(e) if e.kind() == ErrorKind::NotFound => Err(e),
        Err(_) => replace(to, &[&fs::read(from)?]),
    }
}

/// Puts the names in the folder of `path` on the disk, where a system can do that: without, a loss of power could undo a
/// rename.
fn sync_names(path: &Path) {
    if cfg!(unix)
        && let Some(folder) = path.parent()
        && let Ok(folder) = File::open(if folder.as_os_str().is_empty() { Path::new(".") } else { folder })
    {
        let _ = folder.sync_all();
    }
}

/// A new file next to `place`.
fn fresh(place: &Path) -> io::Result<(File, PathBuf)> {
    fresh_by(place, |path| File::options().write(true).create_new(true).open(path))
}

/// What `make` makes under a new name next to `place`, and that name.
fn fresh_by<T>(place: &Path, mut make: impl FnMut(&Path) -> io::Result<T>) -> io::Result<(T, PathBuf)> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = place.with_file_name(format!("{START}{}-{n}{END}", std::process::id()));
        match make(&path) {
            // Of a process with the same number on another machine, or long ago.
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            made => return Ok((made?, path)),
        }
    }
}

const START: &str = ".kumiki-";
const END: &str = ".partial";

/// Whether a file or folder of this name is what a process left that was killed as it wrote or removed.
pub fn is_temporary(name: &str) -> bool {
    let numbers = name.strip_prefix(START).and_then(|rest| rest.strip_suffix(END)).and_then(|n| n.split_once('-'));
    numbers.is_some_and(|(a, b)| [a, b].iter().all(|n| n.parse::<u32>().is_ok()))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, symlink};

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("kumiki-files-{}-{name}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Scratch(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn links_stay_and_their_targets_are_replaced() {
        let dir = Scratch::new("links");
        let at = |name: &str| dir.0.join(name);
        fs::create_dir(at("sub")).unwrap();
        fs::write(at("sub/target"), "old").unwrap();
        fs::set_permissions(at("sub/target"), fs::Permissions::from_mode(0o600)).unwrap();
        symlink("sub/target", at("link")).unwrap();
        symlink(at("link"), at("to-link")).unwrap();
        symlink("not-yet", at("sub/dangling")).unwrap();
        symlink("round", at("round")).unwrap();
        for name in ["link", "to-link"] {
            replace(&at(name), &[name.as_bytes(), b"!"]).unwrap();
            assert_eq!(fs::read_to_string(at("sub/target")).unwrap(), format!("{name}!"));
            assert!(fs::symlink_metadata(at(name)).unwrap().is_symlink());
        }
        assert_eq!(fs::metadata(at("sub/target")).unwrap().permissions().mode() & 0o777, 0o600);
        replace(&at("sub/dangling"), &[b"new"]).unwrap();
        assert_eq!(fs::read(at("sub/not-yet")).unwrap(), b"new");
        assert!(replace(&at("round"), &[b"x"]).is_err());
        assert_eq!(fs::read_dir(&dir.0).unwrap().count() + fs::read_dir(at("sub")).unwrap().count(), 7);
    }

    #[test]
    fn what_is_no_regular_file_and_what_others_wrote_stay() {
        let dir = Scratch::new("special");
        let (pipe, link, file) = (dir.0.join("pipe"), dir.0.join("link"), dir.0.join("file"));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        symlink("pipe", &link).unwrap();
        for path in [&pipe, &link, &dir.0] {
            assert_eq!(replace(path, &[b"x"]).unwrap_err().to_string(), "it is no regular file");
        }
        assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        fs::write(dir.0.join("file.partial"), "mine").unwrap();
        replace(&file, &[b"x"]).unwrap();
        assert_eq!(fs::read(dir.0.join("file.partial")).unwrap(), b"mine");
        assert!(replace(&dir.0.join("no/file"), &[b"x"]).is_err());
        assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 4, "nothing temporary is left");
    }

    #[test]
    fn folders_are_there_whole_or_not_at_all() {
        let dir = Scratch::new("folders");
        let (path, file) = (dir.0.join("a"), dir.0.join("b"));
        let fill = |inside: &Path| replace(&inside.join("x"), &[b"1"]);
        make_folder(&path, fill).unwrap();
        assert_eq!(fs::read(path.join("x")).unwrap(), b"1");
        assert_eq!(make_folder(&path, fill).unwrap_err().kind(), ErrorKind::AlreadyExists);
        let cut = |inside: &Path| fill(inside).and_then(|()| Err(ErrorKind::StorageFull.into()));
        assert_eq!(make_folder(&dir.0.join("c"), cut).unwrap_err().kind(), ErrorKind::StorageFull);
        fs::write(&file, "old").unwrap();
        for _ in 0..2 {
            link(&path.join("x"), &file).unwrap();
            assert_eq!(fs::read(&file).unwrap(), b"1");
        }
        assert_eq!(link(&dir.0.join("no"), &file).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 2, "nothing temporary is left");
        remove_folder(&path).unwrap();
        remove_folder(&path).unwrap();
        assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 1);
    }

    #[test]
    fn temporary_names_are_known_and_never_taken() {
        let dir = Scratch::new("names");
        let (_file, first) = fresh(&dir.0.join("a")).unwrap();
        let (_file, second) = fresh(&dir.0.join("a")).unwrap();
        assert_ne!(first, second);
        for path in [first, second] {
            assert!(is_temporary(path.file_name().unwrap().to_str().unwrap()));
        }
        assert!(
            ["a.partial", ".kumiki-1.partial", ".kumiki-1-x.partial", "kumiki-1-2.partial"]
                .iter()
                .all(|name| !is_temporary(name))
        );
    }
}
