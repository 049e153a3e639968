//! `kumiki gp`.

use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;
use kumiki_train::Result;
use kumiki_train::gp::run::{EXPERIMENT, Plan, Results, Run};
use kumiki_train::gp::settings::{MODELS, Settings, model_names};
use kumiki_train::run::Machine;
use kumiki_train::settings::PRESETS;

use crate::interrupt;
use crate::options::existing;
use crate::output::{in_pool, json, line, remark};
use crate::progress::Progress;
use crate::report::stat;
use crate::table::{count, short, table, thousands};

/// Train models to infer functions from their points, beside the exact posterior
///
/// Every function is drawn anew from a Gaussian process: a radial basis function kernel of variance 1 with a log-uniform
/// length scale, x uniform around 0, y with noise. Step t of a sequence shows a model (x_t, y_{t-1}) and asks for y_t. The
/// floor is the root mean squared error (RMSE) of the exact posterior mean, which knows the function's length scale and the
/// noise; no model can be better on average.
///
/// Every model has the same number of parameters and sees the same functions in the same order, for each seed; all are
/// measured on the same held-out functions. The table goes to standard output; DIR/results.json, DIR/log.jsonl,
/// DIR/rmse.svg, DIR/functions.svg and DIR/seed-N/MODEL/model.safetensors are written.
#[derive(clap::Args)]
#[command(after_help = after_help())]
pub struct Args {
    /// Sizes and budget to start from
    ///
    /// nano: seconds; tiny: minutes on two cores; small: hours; paper: days, at sizes of our choice.
    #[arg(long, default_value = "tiny", value_parser = PossibleValuesParser::new(PRESETS))]
    preset: String,
    /// Models to train, in this order, separated by commas [default: all]
    #[arg(long, value_name = "A,B", value_delimiter = ',', value_parser = PossibleValuesParser::new(model_names()))]
    models: Option<Vec<String>>,
    /// Seeds of initial values and training functions, separated by commas: every model is trained with each
    #[arg(long, alias = "seed", value_name = "N,M", value_delimiter = ',', default_value = "0")]
    #[arg(allow_negative_numbers = true)]
    seeds: Vec<u64>,
    /// Folder for the results, made if need be [default: in runs/, named after the run]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Replace an unfinished run in the folder (a finished one is never replaced)
    #[arg(long)]
    restart: bool,
    /// Continue an unfinished run in the folder, or extend a finished one: models that are done stay
    ///
    /// The settings must be the same. A model that was interrupted starts again from its beginning.
    #[arg(long, conflicts_with = "restart")]
    resume: bool,
    /// Print the contents of results.json instead of the table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: SettingOptions,
}

/// One option for every field of [`Settings`], under the same name. Values below 0 are let through, as those of
/// [`crate::options::RunOptions`].
#[derive(clap::Args)]
struct SettingOptions {
    /// Model width D
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Model")]
    d_model: Option<usize>,
    /// Attention heads
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Model")]
    heads: Option<usize>,
    /// Layers L
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Model")]
    blocks: Option<usize>,
    /// Parameters of each model's layers; widths are solved for it
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Model")]
    params: Option<usize>,

    /// Points of a function
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Functions")]
    points: Option<usize>,
    /// x is uniform from -X to X
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Functions")]
    x_range: Option<f64>,
    /// Shortest length scale
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Functions")]
    length_scale_min: Option<f64>,
    /// Longest length scale
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Functions")]
    length_scale_max: Option<f64>,
    /// Standard deviation of the noise; 0 for none
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Functions")]
    noise: Option<f64>,
    /// Held-out functions to measure on
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Functions")]
    eval_functions: Option<usize>,

    /// Optimiser steps
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Optimiser")]
    steps: Option<u64>,
    /// Functions of a step
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Optimiser")]
    batch: Option<usize>,
    /// Highest learning rate; a cosine takes it to a tenth
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Optimiser")]
    lr: Option<f64>,
    /// Steps of linear warm-up
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Optimiser")]
    warmup: Option<u64>,
    /// Decay of matrices per step and unit of learning rate
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Optimiser")]
    weight_decay: Option<f64>,
    /// Largest global gradient norm
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Optimiser")]
    clip: Option<f64>,
}

impl SettingOptions {
    /// Puts what was given in its place.
    fn over(&self, settings: &mut Settings) {
        fn put<T: Copy>(field: &mut T, given: Option<T>) {
            *field = given.unwrap_or(*field);
        }
        let prior = &mut settings.prior;
        put(&mut prior.points, self.points);
        put(&mut prior.x_range, self.x_range);
        put(&mut prior.length_scale_min, self.length_scale_min);
        put(&mut prior.length_scale_max, self.length_scale_max);
        put(&mut prior.noise, self.noise);
        put(&mut settings.d_model, self.d_model);
        put(&mut settings.heads, self.heads);
        put(&mut settings.blocks, self.blocks);
        put(&mut settings.params, self.params);
        put(&mut settings.eval_functions, self.eval_functions);
        put(&mut settings.steps, self.steps);
        put(&mut settings.batch, self.batch);
        put(&mut settings.lr, self.lr);
        put(&mut settings.warmup, self.warmup);
        put(&mut settings.weight_decay, self.weight_decay);
        put(&mut settings.clip, self.clip);
    }
}

fn after_help() -> String {
    let mut text = String::from("Presets:            D   L  points  batch   steps  parameters\n");
    for name in PRESETS {
        let s = Settings::preset(name).unwrap_or_default();
        let (points, params) = (s.prior.points, short(s.params as f64));
        text += &format!(
            "  {name:<14}{:>5}{:>4}{points:>8}{:>7}{:>8}{params:>12}\n",
            s.d_model, s.blocks, s.batch, s.steps
        );
    }
    text += "\nModels:\n";
    for model in MODELS {
        text += &format!("  {:<14}{}\n", model.name, model.about);
    }
    text + "
Examples:
  kumiki gp
  kumiki gp --preset nano
  kumiki gp --seeds 0,1,2 --out runs/functions
  kumiki gp --seeds 0,1,2,3 --out runs/functions --resume
  kumiki gp --noise 0.3 --length-scale-min 0.5 --steps 500"
}

impl Args {
    pub fn run(self) -> Result<()> {
        let mut settings = Settings::preset(&self.preset)?;
        self.settings.over(&mut settings);
        let models = self.models.unwrap_or_else(|| model_names().into_iter().map(str::to_owned).collect());
        let (experiment, preset, seeds) = (EXPERIMENT.to_owned(), self.preset, self.seeds);
        // Named after the first seed: more of them extend the same run.
        let default = || PathBuf::from(format!("runs/{experiment}-{preset}-{}", seeds.first().unwrap_or(&0)));
        let out = self.out.unwrap_or_else(default);
        let plan = Plan { experiment, preset, settings, seeds, models };
        let existing = existing(self.restart, self.resume);
        // Everything on one thread of the pool: an operator that runs there need not wake another to begin.
        in_pool(|| {
            let run = Run::begin(plan, &out, existing, &mut opening)?;
            train(run, &out, self.json)
        })
    }
}

/// Says what is about to be done.
fn opening(plan: &Plan) {
    let (machine, points) = (Machine::here(), plan.settings.batch * plan.settings.prior.points);
    remark(&format!(
        "in-context regression, preset {}: {} of {} each ({}, {})",
        plan.preset,
        count(plan.settings.steps, "step"),
        count(points as u64, "point"),
        machine.simd,
        count(machine.threads as u64, "thread"),
    ));
    let functions = count(plan.settings.eval_functions as u64, "held-out function");
    remark(&format!("measuring the exact posterior on {functions}"));
}

/// Trains what is left; prints the table and where everything lies.
fn train(mut run: Run, folder: &Path, as_json: bool) -> Result<()> {
    run.stop = interrupt::stop()?;
    let Results { plan, .. } = &run.results;
    run.notes.iter().for_each(|note| remark(&format!("note: {note}")));
    let mut progress = Progress::new(plan.models.iter().map(String::len).max().unwrap_or(0), "points");
    let (several, mut seed) = (plan.seeds.len() > 1, None);
    for cell in run.cells() {
        if several && seed != Some(cell.seed) {
            remark(&format!("with seed {}:", cell.seed));
            seed = Some(cell.seed);
        }
        let done = run.train(&cell, &mut |event| progress.show(event));
        if let Ok(true) = done {
            continue;
        }
        progress.clear();
        interrupt::stopped();
        if !run.results.rows.is_empty() {
            line(&report(&run.results))?;
        }
        remark(&format!("the models that are done stay in `{}`; --resume goes on with the others", folder.display()));
        return done.map(drop);
    }
    if as_json {
        let finished = run.finish();
        // The numbers must not be lost with a file that cannot be written.
        json(&run.results)?;
        return finished;
    }
    // The numbers first: pictures can take long, and fail.
    line(&report(&run.results))?;
    remark("drawing the pictures");
    run.finish()?;
    line(&format!("\nFiles in `{}`: results.json log.jsonl rmse.svg functions.svg seed-<n>/<model>/", folder.display()))
}

/// The numbers of observed points that the table has: few, and the most there are.
fn shown(points: usize) -> Vec<usize> {
    let mut shown: Vec<usize> = [1, 4, 16, points - 1].into_iter().filter(|&n| n < points).collect();
    shown.sort_unstable();
    shown.dedup();
    shown
}

fn report(results: &Results) -> String {
    let (floor, prior) = (&results.floor, &results.plan.settings.prior);
    let observed = shown(prior.points);
    let titles: Vec<String> = observed.iter().map(|n| format!("after {n}")).collect();
    let mut header = vec!["model", "seeds", "parameters", "RMSE", "exact", "ratio"];
    header.extend(titles.iter().map(String::as_str));
    let after = |by: &[f64]| observed.iter().map(|&n| format!("{:.3}", by[n])).collect::<Vec<_>>();
    let exact = format!("{:.3}", floor.exact.rmse);
    let mut rows: Vec<Vec<String>> = Vec::new();
    for model in &results.summary {
        let (seeds, params) = (model.seeds.to_string(), thousands(model.params as u64));
        let mut row = vec![model.model.clone(), seeds, params, stat(Some(model.rmse)), exact.clone()];
        row.push(format!("{:.3}", model.ratio));
        row.extend(after(&model.by_observed));
        rows.push(row);
    }
    let dash = || "–".to_owned();
    let mut row = vec!["exact posterior".to_owned(), dash(), dash(), exact.clone(), exact.clone(), "1.000".to_owned()];
    row.extend(after(&floor.exact.by_observed));
    rows.push(row);
    let mut text = table(&header, &rows);
    text += &format!(
        "\nRMSE against y over {} of {}, and after so many observed points; exact: the posterior mean's",
        count(floor.functions as u64, "held-out function"),
        count(prior.points as u64, "point"),
    );
    if floor.with_jitter > 0 {
        text += &format!(
            "\n{} of these had a kernel matrix that is singular within rounding: 1e-8 was added to its diagonal",
            thousands(floor.with_jitter as u64)
        );
    }
    if results.plan.seeds.len() > 1 {
        text += "\nmean ± standard error over the seeds; other columns are means";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::shown;

    #[test]
    fn columns_for_any_number_of_points() {
        assert_eq!(shown(64), [1, 4, 16, 63]);
        assert_eq!(shown(16), [1, 4, 15]);
        assert_eq!((shown(2), shown(1)), (vec![1], vec![0]));
    }
}
