//! `kumiki bench scaling`.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use kumiki_train::chart::{self, Panel, Scale};
use kumiki_train::run::Machine;
use kumiki_train::scaling::{Row, measure};
use kumiki_train::settings::{PRESETS, Settings};
use kumiki_train::{Error, Result};

use crate::inference::{checked_vocab, lengths, lines, show};
use crate::options::{check_distinct, model_name};
use crate::output::remark;
use crate::table::{count, table, thousands};

/// Time training steps against the sequence length: time and memory per token
///
/// Steps have one sequence, and as many are timed together as make the tokens of the longest length. All models and
/// lengths take turns; medians are shown.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki bench scaling
  kumiki bench scaling --models wango,flash --seq 1024,65536 --rounds 5 --out scaling.svg")]
pub struct Scaling {
    /// Models, separated by commas
    #[arg(long, value_name = "A,B", value_delimiter = ',', default_value = "tango,wango")]
    #[arg(value_parser = model_name)]
    models: Vec<String>,
    /// Sequence lengths, separated by commas
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "1024,2048,4096,8192,16384")]
    #[arg(allow_negative_numbers = true)]
    seq: Vec<usize>,
    /// Sizes
    #[arg(long, default_value = "tiny", value_parser = PossibleValuesParser::new(PRESETS))]
    preset: String,
    /// Tokens of the vocabulary
    #[arg(long, value_name = "N", default_value_t = 256, allow_negative_numbers = true)]
    vocab: usize,
    /// Recompute blocks in the backward pass
    #[arg(long)]
    checkpoint_activations: bool,
    /// Rounds to time, after one that warms up
    #[arg(long, value_name = "N", default_value_t = 3, allow_negative_numbers = true)]
    rounds: usize,
    /// Where to draw the picture
    #[arg(long, value_name = "FILE.svg", default_value = "scaling.svg")]
    out: PathBuf,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

impl Scaling {
    pub fn run(self) -> Result<()> {
        let seq = lengths(&self.seq)?;
        check_distinct(&self.models)?;
        let settings =
            Settings { checkpoint_activations: self.checkpoint_activations, ..Settings::preset(&self.preset)? };
        if self.rounds == 0 {
            return Err(Error::new("--rounds must be at least 1, found 0"));
        }
        chart::check(&self.out)?;
        let machine = Machine::here();
        remark(&format!(
            "{} at {}: {} each, the first of which warms up",
            count(self.models.len() as u64, "model"),
            count(seq.len() as u64, "length"),
            count(self.rounds as u64 + 1, "round")
        ));
        let rows =
            measure(&settings, &self.models, checked_vocab(self.vocab)?, &seq, self.rounds, |name, seq, seconds| {
                remark(&format!("{name}, T = {seq}: {seconds:.1} s"));
            })?;
        show(self.json, &self.preset, &machine, &rows, report)?;
        let of = |title: &str, y: &dyn Fn(&Row) -> f64| Panel {
            title: title.into(),
            x: "sequence length T".into(),
            x_scale: Scale::Log,
            scale: Scale::Log,
            lines: lines(&self.models, &rows, |row| &row.model, |row| (row.seq as f64, y(row))),
        };
        let panels = [
            of("training time per token (ms)", &|row| 1e3 * row.token_s),
            of("peak memory per token (bytes)", &|row| row.token_bytes),
        ];
        chart::write(&self.out, &format!("Training steps, preset {}", self.preset), &panels)?;
        remark(&format!("picture in `{}`", self.out.display()));
        Ok(())
    }
}

/// Each length beside the model's shortest one.
fn report(rows: &[Row]) -> String {
    let header = ["model", "T", "steps", "ms per token", "to shortest", "bytes per token", "to shortest"];
    let cells = |row: &Row| {
        let first = rows.iter().find(|first| first.model == row.model).unwrap_or(row);
        vec![
            row.model.clone(),
            thousands(row.seq as u64),
            row.steps.to_string(),
            format!("{:.3}", 1e3 * row.token_s),
            format!("{:.2}×", row.token_s / first.token_s),
            thousands(row.token_bytes.round() as u64),
            format!("{:.2}×", row.token_bytes / first.token_bytes),
        ]
    };
    table(&header, &rows.iter().map(cells).collect::<Vec<_>>())
}
