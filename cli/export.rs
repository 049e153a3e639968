//! `kumiki export`.

use std::path::{Path, PathBuf};

use kumiki::tensor::files;
use kumiki_train::{Error, Result, csv_log, log, tensorboard};

use crate::output::{line, text};
use crate::table::count;

/// Write a run's log for other programs: as CSV or for TensorBoard
///
/// The log of a run, log.jsonl, has a line for every step; it can be exported while the run is still at work.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki export runs/mine --csv mine.csv
  kumiki export runs/mine --csv - | head
  kumiki export runs/mine --tensorboard runs/events/mine
  tensorboard --logdir runs/events

The table has the columns corpus, seed, model, step, loss, lr, grad_norm, tokens, tok_s and
val_loss: losses in nats per token, tok_s in tokens a second. Every training has a folder of
its own in DIR, with the tags train/loss, val/loss, lr, grad_norm and tok_s; times are seconds
of training.")]
pub struct Args {
    /// The folder of a run, or its log
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Write a table; - is standard output
    #[arg(long, value_name = "FILE", required_unless_present = "tensorboard")]
    csv: Option<PathBuf>,
    /// Write event files, each into a folder in DIR; those that are there are replaced
    #[arg(long, value_name = "DIR")]
    tensorboard: Option<PathBuf>,
}

impl Args {
    pub fn run(self) -> Result<()> {
        let path = log::of_run(&self.run)?;
        let records = log::read(&path)?;
        if records.is_empty() {
            return Err(Error::new(format!("`{}` has no steps yet", path.display())));
        }
        let steps = count(records.len() as u64, "step");
        if let Some(file) = &self.csv {
            let table = csv_log::csv(&records)?;
            if file == Path::new("-") {
                text(&String::from_utf8_lossy(&table))?;
            } else {
                // Only a table of ours is replaced: not a log, nor anything else.
                let ours = |found: Vec<u8>| found.split(|&b| b == b'\n').next() == table.split(|&b| b == b'\n').next();
                if file.is_file() && !std::fs::read(file).is_ok_and(ours) {
                    let file = file.display();
                    return Err(Error::new(format!(
                        "`{file}` is there already and is no table of a log; choose another file"
                    )));
                }
                files::replace(file, &[&table]).map_err(|e| Error::io("write the table", file, e))?;
                line(&format!("{steps} in `{}`", file.display()))?;
            }
        }
        if let Some(folder) = &self.tensorboard {
            let trainings = tensorboard::export(&records, folder)?.len();
            let text = format!("{steps} of {} in `{}`", count(trainings as u64, "training"), folder.display());
            // A table on standard output must stay one.
            if self.csv.as_deref() == Some(Path::new("-")) { crate::output::remark(&text) } else { line(&text)? }
        }
        Ok(())
    }
}
