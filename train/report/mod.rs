//! `report.html`: one or several runs as a page that needs nothing but a browser.
//!
//! Everything is in the one file: style, script, numbers. It loads nothing, and a policy in its head has the browser refuse
//! what would. The tables are plain HTML, sorted by a click; the charts are drawn by `charts.js` from numbers that stand as JSON
//! in the page, long logs thinned (`series.rs`). All text of runs goes through the template, which escapes it, or through JSON in
//! which no `<` is left.

mod page;
mod read;
mod series;
mod table;

use std::path::Path;

use kumiki_tensor::files;

pub use read::RunData;

use crate::{Error, Result};

/// The page of these runs. Without a title they name it.
pub fn html(runs: &[RunData], title: Option<&str>) -> String {
    page::html(runs, title)
}

/// Whether a page can be written to `path`, as far as can be known without writing it.
///
/// # Errors
/// When something that is no page is there.
fn check(path: &Path) -> Result<()> {
    let name = path.display();
    if files::is_special(path) {
        return Err(Error::new(format!("`{name}` is no regular file; expected a place for a page")));
    }
    // A log or a checkpoint given by mistake must not be lost.
    let held = std::fs::read(path).unwrap_or_default();
    let page = held.trim_ascii_start().get(..9).is_some_and(|start| start.eq_ignore_ascii_case(b"<!doctype"));
    if !held.is_empty() && !page {
        return Err(Error::new(format!("`{name}` is there already and is no page; choose another place")));
    }
    Ok(())
}

/// Writes the page to `path`, replacing a page that was there, whole or not at all.
///
/// # Errors
/// When the file cannot be written, or something that is no page is there.
pub fn write(path: &Path, runs: &[RunData], title: Option<&str>) -> Result<()> {
    check(path)?;
    files::replace(path, &[html(runs, title).as_bytes()]).map_err(|e| Error::io("write the page", path, e))
}

#[cfg(test)]
mod tests;
