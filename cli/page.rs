//! `kumiki report`.

use std::path::PathBuf;

use kumiki_train::Result;
use kumiki_train::report::{RunData, write};

use crate::output::line;

/// Show runs as one page: curves, tables, settings
///
/// The page is a single file that loads nothing: it can be opened anywhere, kept and sent. Runs may be unfinished, of several
/// corpora and seeds, and of different experiments; those on the same corpus share their charts and tables.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki report runs/mine
  kumiki report runs/mine runs/other --out both.html --title 'Two rates'
  kumiki report runs/grid/cells/*")]
pub struct Args {
    /// The folders of runs
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// The page; one that is there is replaced
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    out: PathBuf,
    /// What stands above it [default: the names of the runs]
    #[arg(long, value_name = "TEXT")]
    title: Option<String>,
}

impl Args {
    pub fn run(self) -> Result<()> {
        let runs = RunData::read(&self.runs)?;
        write(&self.out, &runs, self.title.as_deref())?;
        line(&format!("Page: {}", self.out.display()))
    }
}
