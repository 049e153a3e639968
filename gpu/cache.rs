//! Compiled kernels on disk.
//!
//! An entry holds its whole key, sources included, so that another key of the same hash is a miss and not a wrong kernel; and
//! a checksum, so that a damaged file is one, too. Where the folder cannot be written all goes on without.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

const MAGIC: &[u8; 8] = b"kumiki01";

/// A folder of entries.
pub(crate) struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// The user's: `KUMIKI_CACHE`, or `kumiki` where the system keeps such folders.
    pub fn of_user() -> Cache {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let folder = variable("KUMIKI_CACHE").or_else(|| {
            let system = if cfg!(windows) { variable("LOCALAPPDATA") } else { variable("XDG_CACHE_HOME") };
            Some(system.or_else(|| Some(variable("HOME")?.join(".cache")))?.join("kumiki"))
        });
        Cache { folder }
    }

    /// This folder.
    #[cfg(test)]
    pub fn at(folder: impl Into<PathBuf>) -> Cache {
        Cache { folder: Some(folder.into()) }
    }

    fn path(&self, name: &str, key: &[u8]) -> Option<PathBuf> {
        let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        Some(self.folder.as_ref()?.join(format!("{name}-{:016x}.kernels", hash(key))))
    }

    /// What was put under this key. The name is for people who look into the folder.
    pub fn get(&self, name: &str, key: &[u8]) -> Option<Vec<u8>> {
        let entry = fs::read(self.path(name, key)?).ok()?;
        let rest = entry.strip_prefix(MAGIC)?;
        let (sum, rest) = rest.split_first_chunk::<8>()?;
        if hash(rest) != u64::from_le_bytes(*sum) {
            return None;
        }
        let (length, rest) = rest.split_first_chunk::<8>()?;
        let (of_entry, value) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        (of_entry == key).then(|| value.to_vec())
    }

    /// Keeps a value if it can. Others may put the same at the same time: an entry appears whole, or not at all.
    pub fn put(&self, name: &str, key: &[u8], value: &[u8]) {
        let Some(path) = self.path(name, key) else { return };
        let body = [&(key.len() as u64).to_le_bytes(), key, value].concat();
        let entry = [MAGIC, &hash(&body).to_le_bytes()[..], &body].concat();
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let unfinished = path.with_extension(format!("{}-{next}", std::process::id()));
        let written = path.parent().map_or(Ok(()), create).and_then(|()| fs::write(&unfinished, entry));
        if written.and_then(|()| fs::rename(&unfinished, &path)).is_err() {
            let _ = fs::remove_file(&unfinished);
        }
    }
}

/// For the user alone: whoever can write here decides what runs on the card.
fn create(folder: &Path) -> std::io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// FNV-1a. The standard library's hash may change with its version.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that is removed again.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            Folder(std::env::temp_dir().join(format!("kumiki-cache-{name}-{}", std::process::id())))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_was_put_is_found_under_its_key_alone() {
        let folder = Folder::new("hit");
        let cache = Cache::at(folder.0.join("below"));
        assert_eq!(cache.get("a.cu", b"key"), None);
        cache.put("a.cu", b"key", b"value");
        assert_eq!(cache.get("a.cu", b"key").as_deref(), Some(&b"value"[..]));
        assert_eq!(cache.get("a.cu", b"yek"), None);
        cache.put("a.cu", b"key", b"");
        assert_eq!(cache.get("a.cu", b"key").as_deref(), Some(&b""[..]));
        assert_eq!(fs::read_dir(folder.0.join("below")).unwrap().count(), 1, "unfinished files are left");
    }

    #[test]
    fn a_key_of_the_same_hash_is_a_miss() {
        let folder = Folder::new("same");
        let cache = Cache::at(&folder.0);
        cache.put("a", b"one", b"value");
        fs::rename(cache.path("a", b"one").unwrap(), cache.path("a", b"two").unwrap()).unwrap();
        assert_eq!(cache.get("a", b"two"), None);
    }

    #[test]
    fn damage_anywhere_is_a_miss() {
        let folder = Folder::new("damaged");
        let cache = Cache::at(&folder.0);
        cache.put("a", b"key", b"value");
        let path = cache.path("a", b"key").unwrap();
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            fs::write(&path, damaged).unwrap();
            assert_eq!(cache.get("a", b"key"), None, "byte {at} changed");
            fs::write(&path, &whole[..at]).unwrap();
            assert_eq!(cache.get("a", b"key"), None, "cut at {at}");
        }
        cache.put("a", b"key", b"value");
        assert!(cache.get("a", b"key").is_some());
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_done_without() {
        let folder = Folder::new("unwritable");
        fs::write(&folder.0, "a file where the folder should be").unwrap();
        let cache = Cache::at(folder.0.join("below"));
        cache.put("a", b"key", b"value");
        assert_eq!(cache.get("a", b"key"), None);
        fs::remove_file(&folder.0).unwrap();
        let nowhere = Cache { folder: None };
        nowhere.put("a", b"key", b"value");
        assert_eq!(nowhere.get("a", b"key"), None);
    }
}
