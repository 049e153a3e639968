//! Runs the built binary.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// A folder of its own, removed when dropped.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Scratch {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("kumiki-cli-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    pub fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    /// Writes a file, with its folders, and returns its path.
    pub fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        self.path(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The command, with the environment of whoever runs the tests out of the way.
pub fn kumiki(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kumiki"));
    command.args(args).stdin(Stdio::null()).env("KUMIKI_THREADS", "2").env_remove("KUMIKI_SIMD");
    command
}

/// What a run printed: standard output and standard error.
pub struct Said {
    pub code: i32,
    pub out: String,
    pub err: String,
}

/// Runs to the end.
pub fn run(args: &[&str]) -> Said {
    said(kumiki(args).output().unwrap())
}

pub fn said(output: Output) -> Said {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Said { code: output.status.code().unwrap_or(-1), out: text(output.stdout), err: text(output.stderr) }
}

/// Runs to the end, which must be a good one.
#[track_caller]
pub fn succeed(args: &[&str]) -> Said {
    let said = run(args);
    assert_eq!(said.code, 0, "{args:?}: {}", said.err);
    said
}

/// Runs to the end, which must be an error with exit code `code` whose text has all of `phrases`, and no panic.
#[track_caller]
pub fn fail(code: i32, args: &[&str], phrases: &[&str]) -> String {
    let said = run(args);
    assert_eq!(said.code, code, "{args:?}: {}", said.err);
    for phrase in phrases {
        assert!(said.err.contains(phrase), "{args:?}: no `{phrase}` in: {}", said.err);
    }
    assert!(!said.err.contains("panicked"), "{args:?}: {}", said.err);
    if code == 1 {
        let last = said.err.lines().last().unwrap_or_default();
        assert!(last.starts_with("kumiki: "), "{args:?}: the last line must be the error: {}", said.err);
    }
    said.err
}

pub fn json(path: &str) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

pub fn exists(path: &str) -> bool {
    Path::new(path).exists()
}
