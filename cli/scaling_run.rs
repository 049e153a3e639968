//! `kumiki scaling run`.

use std::path::PathBuf;
use std::time::Instant;

use clap::builder::PossibleValuesParser;
use kumiki::autograd::Var;
use kumiki::ops;
use kumiki::tensor::{DType, Rng};
use kumiki_train::data::Data;
use kumiki_train::grid::run::{GridRun, LAWS, Law, Outcome, Results};
use kumiki_train::grid::{Cost, Grid, Matched, Size};
use kumiki_train::laws::FitOptions;
use kumiki_train::laws::picture::Fitted;
use kumiki_train::settings::PRESETS;
use kumiki_train::{Error, Result};
use serde_json::json;

use crate::interrupt;
use crate::options::{existing, model_name};
use crate::output::{in_pool, json, line, remark};
use crate::progress::Progress;
use crate::scaling_fit;
use crate::table::{count, optional, short, table, thousands};

/// Train a grid of sizes, token budgets and models, and fit a law to each model
///
/// Cells are trained one after the other, each as a run of its own with its own schedule; interrupted, the grid goes on with
/// --resume, which also adds sizes, budgets or models. The laws are about the loss of every window's second half given the
/// first, which all models have, and for those that have it about that of all tokens.
///
/// DIR/results.json, DIR/laws.svg and DIR/cells/ are written; `kumiki scaling fit DIR/results.json` fits again.
#[derive(clap::Args)]
#[command(after_help = "\
Presets:  nano   4 sizes x 3 budgets, 250 thousand to 1 million tokens: minutes
          tiny   5 sizes x 4 budgets, 1 to 8 million tokens: hours
          small  the paper's 3 smallest sizes x 3 budgets, 10 to 40 million tokens: days
          paper  the paper's 5 sizes x 5 budgets, 62.5 million to 1 billion tokens

Examples:
  kumiki scaling run --dry-run
  kumiki scaling run --data book.txt --out runs/laws
  kumiki scaling run --data book.txt --out runs/laws --resume --budgets 250000,500000,2000000
  kumiki scaling run --data book.txt --match flops --models decoder,double")]
pub struct Args {
    /// Sizes, budgets and settings to start from
    #[arg(long, default_value = "nano", value_parser = PossibleValuesParser::new(PRESETS))]
    preset: String,
    /// A text file, a folder of texts, or `math`
    #[arg(long, value_name = "PATH|math", default_value = "math")]
    data: String,
    /// Models, separated by commas [default: decoder, double and encoder-decoder]
    #[arg(long, value_name = "A,B", value_delimiter = ',', value_parser = model_name)]
    models: Option<Vec<String>>,
    /// Sizes, separated by commas: width, layers of the first and of the second stack, as 64/4/2
    #[arg(long, value_name = "D/L/L", value_delimiter = ',', allow_hyphen_values = true)]
    sizes: Option<Vec<Size>>,
    /// Budgets in tokens, separated by commas
    #[arg(long, value_name = "N,N", value_delimiter = ',', allow_negative_numbers = true)]
    budgets: Option<Vec<u64>>,
    /// What a budget means: as many tokens for every model, or what these cost the decoder-only model
    #[arg(long = "match", value_enum, default_value_t = Match::Tokens)]
    matched: Match,
    /// Sequence length T [default: the preset's]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seq: Option<usize>,
    /// Rows of a batch [default: the preset's]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    batch: Option<usize>,
    /// Highest learning rate at D = 128; it falls with the square root of D [default: the preset's]
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    lr: Option<f64>,
    /// Held-out tokens of an evaluation [default: the preset's]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    eval_tokens: Option<u64>,
    /// Seed of initial values, batch order, blocks and gaps
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    seed: u64,
    /// A file with lengths of prompts, for `double-prompt_style`
    #[arg(long, value_name = "FILE")]
    prompt_lengths: Option<String>,
    /// Refits for the intervals of the laws; 0 for none
    #[arg(long, value_name = "N", default_value_t = 1000, allow_negative_numbers = true)]
    bootstrap: usize,
    /// Folder for the results, made if need be [default: in runs/, named after the grid]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Continue an unfinished grid in the folder, or extend a finished one: cells that are done stay
    #[arg(long)]
    resume: bool,
    /// Only say what every cell costs
    #[arg(long)]
    dry_run: bool,
    /// Print the contents of results.json (of --dry-run: the cells) instead of tables
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Match {
    /// Tokens of text
    Tokens,
    /// Floating-point operations
    Flops,
}

impl Args {
    fn grid(&self) -> Result<Grid> {
        let mut grid = Grid::preset(&self.preset)?;
        grid.corpus.clone_from(&self.data);
        grid.models = self.models.clone().unwrap_or(grid.models);
        grid.sizes = self.sizes.clone().unwrap_or(grid.sizes);
        grid.budgets = self.budgets.clone().unwrap_or(grid.budgets);
        grid.matched = match self.matched {
            Match::Tokens => Matched::Tokens,
            Match::Flops => Matched::Flops,
        };
        let settings = &mut grid.settings;
        settings.seq = self.seq.unwrap_or(settings.seq);
        settings.batch = self.batch.unwrap_or(settings.batch);
        settings.lr = self.lr.unwrap_or(settings.lr);
        settings.eval_tokens = self.eval_tokens.unwrap_or(settings.eval_tokens);
        settings.seed = self.seed;
        settings.prompt_lengths = self.prompt_lengths.clone().unwrap_or_default();
        grid.check()?;
        Ok(grid)
    }

    pub fn run(self) -> Result<()> {
        let options = FitOptions { bootstrap: self.bootstrap, seed: self.seed, ..FitOptions::default() };
        options.check()?;
        let grid = self.grid()?;
        if self.dry_run {
            return in_pool(|| self.costs(&grid.costs()?));
        }
        let default = || PathBuf::from(format!("runs/scaling-{}-{}", self.preset, self.seed));
        let folder = self.out.clone().unwrap_or_else(default);
        in_pool(|| {
            let data = Data::open(&self.data, grid.settings.val_fraction, grid.settings.seq)?;
            if let Some(note) = &data.note {
                remark(&format!("note: {note}"));
            }
            let mut run = GridRun::begin(grid, data, &folder, existing(false, self.resume))?;
            run.stop = interrupt::stop()?;
            let (cells, all) = (run.cells(), run.results.grid.cells().len());
            remark(&format!("{} of {} to train, in `{}`", cells.len(), count(all as u64, "cell"), folder.display()));
            let width = run.results.grid.models.iter().map(String::len).max().unwrap_or(0);
            let mut progress = Progress::new(width, "tok");
            for cell in &cells {
                remark(&format!("{} on {} tokens:", cell.size, thousands(cell.budget)));
                let stopped = run.train(cell, &mut |event| progress.show(event));
                if let Ok(None) = stopped {
                    continue;
                }
                progress.clear();
                interrupt::stopped();
                remark(&format!("the cells that are done stay in `{}`; --resume goes on", folder.display()));
                return stopped.map(drop);
            }
            let finished = run.finish(&options);
            // The numbers first: they must not be lost with a picture that cannot be drawn.
            if self.json {
                json(&run.results)?
            } else {
                line(&report(&run.results, run.unit()))?
            }
            finished?;
            let picture = if folder.join(LAWS).exists() { "laws.svg " } else { "" };
            remark(&format!("Files in `{}`: results.json {picture}cells/", folder.display()));
            Ok(())
        })
    }

    fn costs(&self, costs: &[Cost]) -> Result<()> {
        let rate = matrix_rate()?;
        let total: f64 = costs.iter().map(|cost| cost.flops).sum();
        if self.json {
            return json(&json!({"cells": costs, "flops": total, "matrix_flops_per_second": rate}));
        }
        let header = ["model", "size", "parameters", "tokens", "steps", "FLOPs", "at least"];
        let cells = |cost: &Cost| {
            vec![
                cost.cell.model.clone(),
                cost.cell.size.to_string(),
                thousands(cost.params as u64),
                thousands(cost.tokens),
                thousands(cost.steps),
                short(cost.flops),
                time(cost.flops / rate),
            ]
        };
        line(&table(&header, &costs.iter().map(cells).collect::<Vec<_>>()))?;
        line(&format!(
            "{}, {} FLOPs together, at least {} at the {} FLOP/s that large matrix products reach here",
            count(costs.len() as u64, "cell"),
            short(total),
            time(total / rate),
            short(rate)
        ))
    }
}

/// Operations per second of products of large matrices in f32, the best of a few.
fn matrix_rate() -> Result<f64> {
    let n = 768;
    let mut rng = Rng::new(0);
    let [a, b] = [(); 2].map(|()| Var::constant(rng.normal(DType::F32, &[n, n], 0.0, 1.0)));
    let once = || {
        let started = Instant::now();
        ops::matmul(&a, &b);
        2.0 * (n as f64).powi(3) / started.elapsed().as_secs_f64()
    };
    let best = (0..6).map(|_| once()).fold(0.0, f64::max);
    if best > 0.0 { Ok(best) } else { Err(Error::new("the clock does not advance")) }
}

/// Seconds, as people say them.
fn time(seconds: f64) -> String {
    match seconds {
        s if s < 100.0 => format!("{s:.1} s"),
        s if s < 6000.0 => format!("{:.0} min", s / 60.0),
        s if s < 360_000.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.0} days", s / 86_400.0),
    }
}

fn report(results: &Results, unit: &str) -> String {
    let header = ["model", "size", "parameters", "tokens", "FLOPs", "2nd half NLL", "val NLL", "tok/s"];
    let rows = results.rows.iter().map(|row| {
        let result = &row.result;
        vec![
            result.model.clone(),
            row.size.clone(),
            thousands(result.params as u64),
            thousands(result.tokens),
            short(row.flops),
            optional(result.second_half_nll, 4),
            optional(result.val_nll, 4),
            short(result.tok_s),
        ]
    });
    let mut text = table(&header, &rows.collect::<Vec<_>>());
    text += &format!("\n\nL = E + A/N^a + B/D^b, N parameters without the token table, D tokens, L nats per {unit}\n");
    let (mut laws, mut none) = (vec![], vec![]);
    for Law { model, of, fit } in &results.laws {
        let name = format!("{model}, {of}");
        match fit {
            Outcome::Fit(fit) => laws.push(Fitted { name, points: &[], fit: *fit }),
            Outcome::None(why) => none.push(format!("no law for {name}: {why}")),
        }
    }
    if !laws.is_empty() {
        text += &scaling_fit::report(&laws);
    }
    none.into_iter().fold(text, |text, why| text + "\n" + &why)
}
