//! `kumiki inference`.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use kumiki_train::chart::{self, Line, Panel, Scale};
use kumiki_train::inference::{Row, measure};
use kumiki_train::run::Machine;
use kumiki_train::settings::{LARGEST, PRESETS, Settings};
use kumiki_train::zoo::Suite;
use kumiki_train::{Error, Result};
use serde::Serialize;
use serde_json::json;

use crate::options::{check_distinct, model_name};
use crate::output::{in_pool, json, line, remark};
use crate::table::{count, short, table, thousands};

/// Measure what decoding costs: prompt, time per token and bytes kept, against the length
///
/// One sequence at a time, random parameters: the times do not depend on what a model has learnt. Models with keys and
/// values slow down and grow with every token; a window or a chunk with running sums does not. A double decoder keeps
/// those of its generation layers only; that it reads all of its text again for every block it writes is not in the time of
/// a token, but is the time of a prompt of that length.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki inference
  kumiki inference --suite double --out double-decoding.svg
  kumiki inference --models tango,wango --seq 256,4096 --tokens 64 --out decoding.svg
  kumiki inference --preset nano --json")]
pub struct Args {
    /// Which paper's models, and sizes
    #[arg(long, value_name = "NAME", default_value = "tango", value_parser = PossibleValuesParser::new(Suite::ALL.map(Suite::name)))]
    suite: String,
    /// Models, separated by commas [default: all of the suite]; `kumiki compare --help` says what there is
    #[arg(long, value_name = "A,B", value_delimiter = ',', value_parser = model_name)]
    models: Option<Vec<String>>,
    /// Lengths of the prompt, separated by commas
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "256,1024,4096,16384")]
    #[arg(allow_negative_numbers = true)]
    seq: Vec<usize>,
    /// Sizes
    #[arg(long, default_value = "tiny", value_parser = PossibleValuesParser::new(PRESETS))]
    preset: String,
    /// Tokens of the vocabulary
    #[arg(long, value_name = "N", default_value_t = 256, allow_negative_numbers = true)]
    vocab: usize,
    /// Tokens to decode after each prompt
    #[arg(long, value_name = "N", default_value_t = 32, allow_negative_numbers = true)]
    tokens: usize,
    /// Where to draw the picture
    #[arg(long, value_name = "FILE.svg", default_value = "inference.svg")]
    out: PathBuf,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

/// The longest sequence: beyond it a mistake is likelier than a wish.
const LONGEST: usize = 1 << 20;

/// The size of a vocabulary, in range.
pub fn checked_vocab(vocab: usize) -> Result<usize> {
    match (1..=LARGEST).contains(&vocab) {
        true => Ok(vocab),
        false => Err(Error::new(format!("--vocab must be from 1 to {LARGEST}, found {vocab}"))),
    }
}

/// Lengths for a measurement: at least one, each in range, sorted, none twice.
pub fn lengths(seq: &[usize]) -> Result<Vec<usize>> {
    if let Some(wrong) = seq.iter().find(|n| !(1..=LONGEST).contains(*n)) {
        return Err(Error::new(format!("--seq must be from 1 to {LONGEST}, found {wrong}")));
    }
    let mut seq = seq.to_vec();
    seq.sort_unstable();
    seq.dedup();
    Ok(seq)
}

/// Prints rows as JSON or as a table, with the machine that they were measured on.
pub fn show<R: Serialize>(
    as_json: bool,
    preset: &str,
    machine: &Machine,
    rows: &[R],
    table: impl Fn(&[R]) -> String,
) -> Result<()> {
    if as_json {
        return json(&json!({"preset": preset, "machine": machine, "rows": rows}));
    }
    line(&table(rows))?;
    line(&format!("{}, {}, preset {preset}", machine.simd, count(machine.threads as u64, "thread")))
}

/// The rows of one model after the other, as lines.
pub fn lines<'a, R: 'a>(
    names: &[String],
    rows: &'a [R],
    name: impl Fn(&R) -> &str,
    point: impl Fn(&R) -> (f64, f64),
) -> Vec<Line> {
    let line = |wanted: &String| Line {
        name: wanted.clone(),
        points: rows.iter().filter(|row| name(row) == wanted).map(&point).collect(),
        ..Line::default()
    };
    names.iter().map(line).collect()
}

impl Args {
    pub fn run(self) -> Result<()> {
        let seq = lengths(&self.seq)?;
        if !(1..=LONGEST).contains(&self.tokens) {
            return Err(Error::new(format!("--tokens must be from 1 to {LONGEST}, found {}", self.tokens)));
        }
        chart::check(&self.out)?;
        let suite = Suite::named(&self.suite)?;
        let names = self.models.clone().unwrap_or_else(|| suite.models().iter().map(|&name| name.to_owned()).collect());
        let settings = Settings::for_suite(suite, &self.preset)?;
        check_distinct(&names)?;
        in_pool(|| {
            let machine = Machine::here();
            let rows = measure(&settings, &names, checked_vocab(self.vocab)?, &seq, self.tokens, |row| {
                remark(&format!(
                    "{} after {}: {:.3} ms a token",
                    row.model,
                    count(row.seq as u64, "token"),
                    1e3 * row.token_s
                ));
                Ok(())
            })?;
            show(self.json, &self.preset, &machine, &rows, report)?;
            let of = |title: &str, y: &dyn Fn(&Row) -> f64| Panel {
                title: title.into(),
                x: "tokens before".into(),
                x_scale: Scale::Log,
                scale: Scale::Log,
                lines: lines(&names, &rows, |row| &row.model, |row| (row.seq as f64, y(row))),
            };
            let panels = [
                of("time of a token (ms)", &|row| 1e3 * row.token_s),
                of("time of the prompt per token (ms)", &|row| 1e3 * row.prefill_s / row.seq as f64),
                of("bytes kept", &|row| row.state_bytes as f64),
            ];
            chart::write(&self.out, &format!("Decoding, preset {}", self.preset), &panels)?;
            remark(&format!("picture in `{}`", self.out.display()));
            Ok(())
        })
    }
}

fn report(rows: &[Row]) -> String {
    let header =
        ["model", "T", "parameters", "prompt ms", "prompt tok/s", "token ms", "tok/s", "MACs of a token", "bytes kept"];
    // Beside the decoder-only model, where there is one: what two stacks save.
    let beside = |row: &Row, text: String, of: fn(&Row) -> f64| {
        let base = rows.iter().find(|base| base.model == "decoder" && base.seq == row.seq);
        base.map_or_else(|| text.clone(), |base| format!("{text} ({:.3})", of(row) / of(base)))
    };
    let cells = |row: &Row| {
        vec![
            row.model.clone(),
            thousands(row.seq as u64),
            thousands(row.params as u64),
            format!("{:.1}", 1e3 * row.prefill_s),
            short(row.seq as f64 / row.prefill_s),
            beside(row, format!("{:.3}", 1e3 * row.token_s), |row| row.token_s),
            short(1.0 / row.token_s),
            beside(row, short(row.token_macs as f64), |row| row.token_macs as f64),
            beside(row, short(row.state_bytes as f64), |row| row.state_bytes as f64),
        ]
    };
    let text = table(&header, &rows.iter().map(cells).collect::<Vec<_>>());
    if rows.iter().any(|row| row.model == "decoder") { text + "\nin brackets: to the decoder-only model" } else { text }
}
