//! `kumiki mup check`.

use std::path::PathBuf;

use clap::Subcommand;
use kumiki_train::chart::{self, Line, Panel, Scale};
use kumiki_train::mup::{self, Check, Row, Scaling, Slope, measure, slopes};
use kumiki_train::{Error, Result};
use serde_json::json;

use crate::options::model_name;
use crate::output::{self, in_pool, line, remark};
use crate::table::{count, table};

/// Scaling of learning rates and logits by the width (--mup-base-width)
#[derive(Subcommand)]
pub enum Command {
    Check(Args),
}

impl Command {
    pub fn run(self) -> Result<()> {
        match self {
            Command::Check(args) => in_pool(|| args.run()),
        }
    }
}

/// Measure activations over widths after a few steps, with standard rates and with μP
///
/// Mean absolute sizes and changes of the embedded tokens, the residual after every block application and the logits, on one
/// held-out batch of `math`. Under μP changes should not depend on the width: exponents near 0.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki mup check
  kumiki mup check --model tango --widths 64,128,256,512 --base 64 --out tango.svg")]
pub struct Args {
    /// The model, one with a single stack of blocks
    #[arg(long, value_name = "NAME", default_value = "untied", value_parser = model_name)]
    model: String,
    /// Widths D, separated by commas
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "32,64,128,256")]
    #[arg(allow_negative_numbers = true)]
    widths: Vec<usize>,
    /// The width at which nothing is scaled
    #[arg(long, value_name = "N", default_value_t = 32, allow_negative_numbers = true)]
    base: usize,
    /// Width of a head, at all widths
    #[arg(long, value_name = "N", default_value_t = 16, allow_negative_numbers = true)]
    head_dim: usize,
    /// Steps of training
    #[arg(long, value_name = "N", default_value_t = 4, allow_negative_numbers = true)]
    steps: u64,
    /// Trainings of every width, with seeds from 0, that are averaged over
    #[arg(long, value_name = "N", default_value_t = 3, allow_negative_numbers = true)]
    seeds: u64,
    /// Learning rate of every step
    #[arg(long, value_name = "X", default_value_t = 3e-3, allow_hyphen_values = true)]
    lr: f64,
    /// Where to draw the picture
    #[arg(long, value_name = "FILE.svg", default_value = "mup.svg")]
    out: PathBuf,
    /// Print one JSON object instead of the tables
    #[arg(long)]
    json: bool,
}

impl Args {
    fn run(self) -> Result<()> {
        chart::check(&self.out)?;
        if !(1..=1000).contains(&self.seeds) {
            return Err(Error::new(format!("--seeds must be from 1 to 1000, found {}", self.seeds)));
        }
        let check = Check {
            model: self.model,
            widths: self.widths,
            base_width: self.base,
            head_dim: self.head_dim,
            steps: self.steps,
            seeds: (0..self.seeds).collect(),
            lr: self.lr,
        };
        let rows = measure(&check, |scaling, width, seed| {
            remark(&format!("{}, D = {width}, seed {seed}", scaling.name()));
        })?;
        let slopes = slopes(&rows);
        let last: Vec<Row> = rows.iter().filter(|row| row.step == check.steps).cloned().collect();
        if self.json {
            output::json(&json!({"check": check, "rows": rows, "slopes": slopes}))?;
        } else {
            let after = format!("after {} at a rate of {}", count(check.steps, "step"), check.lr);
            line(&format!("{}: mean absolute change {after}", check.model))?;
            line(&report(&check, &last, &slopes, |row| row.change, |slope| slope.change))?;
            line(&format!("\n{}: mean absolute value {after}", check.model))?;
            line(&report(&check, &last, &slopes, |row| row.size, |slope| slope.size))?;
        }
        let title = format!("{}: activations over widths, {}", check.model, count(check.steps, "step"));
        chart::write(&self.out, &title, &panels(&last))?;
        remark(&format!("picture in `{}`", self.out.display()));
        Ok(())
    }
}

/// A line for every width, and one of exponents.
fn report(check: &Check, last: &[Row], slopes: &[Slope], value: fn(&Row) -> f64, slope: fn(&Slope) -> f64) -> String {
    let parts = mup::part_names(last);
    let header: Vec<&str> = ["rates", "D"].into_iter().chain(parts.iter().map(String::as_str)).collect();
    let mut lines = vec![];
    for scaling in Scaling::ALL {
        for &width in &check.widths {
            let mut cells = vec![scaling.name().to_owned(), width.to_string()];
            let here = last.iter().filter(|row| row.scaling == scaling && row.width == width);
            cells.extend(here.map(|row| format!("{:.4}", value(row))));
            lines.push(cells);
        }
        let mut cells = vec![scaling.name().to_owned(), "exponent".to_owned()];
        cells.extend(slopes.iter().filter(|s| s.scaling == scaling).map(|s| format!("{:+.2}", slope(s))));
        lines.push(cells);
    }
    table(&header, &lines)
}

/// Both scalings beside each other, on the same axes.
fn panels(last: &[Row]) -> Vec<Panel> {
    let parts = mup::part_names(last);
    let residual = parts.iter().rev().nth(1).cloned().unwrap_or_default();
    let panel = |part: &str, what: &str, y: fn(&Row) -> f64| Panel {
        title: format!("{part}: {what}"),
        x: "width D".into(),
        x_scale: Scale::Log,
        scale: Scale::Log,
        lines: Scaling::ALL
            .into_iter()
            .map(|scaling| {
                let here = last.iter().filter(|row| row.scaling == scaling && row.part == part);
                let mut points: Vec<(f64, f64)> = here.map(|row| (row.width as f64, y(row))).collect();
                points.sort_by(|a, b| a.0.total_cmp(&b.0));
                Line { name: scaling.name().into(), points, ..Line::default() }
            })
            .collect(),
    };
    vec![
        panel("logits", "mean |change|", |row| row.change),
        panel(&residual, "mean |change|", |row| row.change),
        panel("logits", "mean |value|", |row| row.size),
        panel(&residual, "mean |value|", |row| row.size),
    ]
}
