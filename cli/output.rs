//! Standard output, without the panics of `println!` when it is closed.

use std::io::{self, Write};
use std::path::Path;

use kumiki::tensor::threads;
use kumiki_train::{Error, Result};
use serde::Serialize;

/// Writes `text` as it is and hands it on at once.
pub fn text(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|e| Error::io("write to", Path::new("standard output"), e))
}

/// Writes a line.
pub fn line(line: &str) -> Result<()> {
    text(&format!("{line}\n"))
}

/// Writes a value as JSON on one line.
pub fn json(value: &impl Serialize) -> Result<()> {
    line(&serde_json::to_string(value).map_err(|e| Error::new(format!("cannot write JSON: {e}")))?)
}

/// Runs `f` on the threads of the pool. That they cannot be started is an error here, a panic later.
pub fn in_pool<R: Send>(f: impl FnOnce() -> Result<R> + Send) -> Result<R> {
    threads::start().map_err(Error::new)?;
    threads::in_pool(f)
}

/// `text` with control characters written out: what comes from a file must not steer the terminal.
pub fn plain(text: &str) -> String {
    let write = |c: char| if c.is_control() && c != '\n' { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(write).collect()
}

/// Writes a remark to standard error; that it cannot be read there is no reason to stop.
pub fn remark(line: &str) {
    let _ = writeln!(io::stderr(), "{}", plain(line));
}

/// How the user called this program, for commands to copy: by its path when it is not on the search path.
pub fn program() -> String {
    std::env::args().next().filter(|name| name.contains(['/', '\\'])).unwrap_or_else(|| "kumiki".to_owned())
}

/// `text` as one word of a shell command.
pub fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::{plain, quoted};

    #[test]
    fn control_characters_are_written_out() {
        assert_eq!(plain("a\u{1b}[31m\r\u{9b}é\n"), "a\\u{1b}[31m\\r\\u{9b}é\n");
    }

    #[test]
    fn words_survive_a_shell() {
        assert_eq!(quoted("runs/a-1"), "runs/a-1");
        assert_eq!(quoted("my run"), "'my run'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}
