//! `kumiki scaling fit`.

use std::path::PathBuf;

use kumiki_train::chart;
use kumiki_train::laws::picture::{self, Fitted};
use kumiki_train::laws::{Estimate, Fit, FitOptions, fit, table as tables};
use kumiki_train::{Error, Result};
use serde_json::{Value, json};

use crate::output::{self, in_pool, line, remark};
use crate::scaling_run;
use crate::table::{count, table};

/// How losses fall with the size of a model and the tokens that it is trained on
#[derive(clap::Subcommand)]
pub enum Command {
    Run(scaling_run::Args),
    Fit(Args),
}

impl Command {
    pub fn run(self) -> Result<()> {
        match self {
            Command::Run(args) => args.run(),
            Command::Fit(args) => in_pool(|| args.run()),
        }
    }
}

/// Fit a scaling law, L = E + A/N^a + B/D^b, to a table of trained models
///
/// N are parameters outside of the token table, D tokens trained on, L nats per token. The table is CSV with a header, or
/// JSON: an array of objects, or the results.json of a run. Columns or keys are params (or N), tokens (or D), loss (or nll,
/// val_nll, second_half_nll), and, if there are several, model and corpus, each of which gets a law of its own: from at least 6
/// points with 3 values of N and of D.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki scaling fit runs.csv
  kumiki scaling fit runs/sizes/results.json --bootstrap 4000 --out laws.svg")]
pub struct Args {
    /// The table
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Refits for the intervals; 0 for none
    #[arg(long, value_name = "N", default_value_t = 1000, allow_negative_numbers = true)]
    bootstrap: usize,
    /// What the refits are drawn with
    #[arg(long, value_name = "S", default_value_t = 0, allow_negative_numbers = true)]
    seed: u64,
    /// Where to draw a picture of points and laws [default: none]
    #[arg(long, value_name = "FILE.svg")]
    out: Option<PathBuf>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

impl Args {
    fn run(self) -> Result<()> {
        self.out.as_deref().map_or(Ok(()), chart::check)?;
        let series = tables::read(&self.file)?;
        let options = FitOptions { bootstrap: self.bootstrap, seed: self.seed, ..FitOptions::default() };
        options.check()?;
        let (mut models, mut failed) = (Vec::new(), Vec::new());
        for one in &series {
            let name = one.name();
            match fit(&one.points, &options) {
                Ok(fit) => models.push(Fitted { name, points: &one.points, fit }),
                Err(e) if series.len() == 1 => return Err(Error::new(format!("`{}`: {e}", self.file.display()))),
                Err(e) => {
                    remark(&format!("no law for `{name}`: {e}"));
                    failed.push(json!({"model": name, "error": e.to_string()}));
                }
            }
        }
        if models.is_empty() {
            return Err(Error::new(format!(
                "`{}`: none of {} could be fitted",
                self.file.display(),
                count(series.len() as u64, "model")
            )));
        }
        if self.json {
            output::json(&json!({"laws": models.iter().map(object).collect::<Vec<_>>(), "failed": failed}))?;
        } else {
            line(&report(&models))?;
        }
        if let Some(out) = &self.out {
            picture::write(out, "L = E + A/N^a + B/D^b", &models)?;
            remark(&format!("picture: {}", out.display()));
        }
        Ok(())
    }
}

fn object(model: &Fitted<'_>) -> Value {
    let mut object = json!({"model": model.name});
    if let (Value::Object(into), Ok(Value::Object(fit))) = (&mut object, serde_json::to_value(model.fit)) {
        into.extend(fit);
    }
    object
}

/// Coefficients of every law with their intervals, and how well it fits.
pub fn report(models: &[Fitted<'_>]) -> String {
    let interval = format!("{:.0} % from", 100.0 * models[0].fit.level);
    let header = ["model", "", "value", &interval, "to"];
    let rows: Vec<Vec<String>> = models.iter().flat_map(rows).collect();
    let mut text = table(&header, &rows);
    for Fitted { name, fit, .. } in models {
        let Fit { points, rms, r2, .. } = fit;
        text += &format!("\n{name}: {points} points, RMS of log L's residuals {rms:.5}, R² {r2:.5}");
    }
    text
}

/// The best N and D for a compute C are in the last two: as powers of it.
fn rows(model: &Fitted<'_>) -> Vec<Vec<String>> {
    let Fit { e, a, b, alpha, beta, n_exponent, d_exponent, .. } = &model.fit;
    let names = ["E", "A", "B", "a", "b", "best N ∝ C^", "best D ∝ C^"];
    let row = |(i, one): (usize, &Estimate)| {
        let [low, high] = one.interval.map_or(["–".to_owned(), "–".to_owned()], |ends| ends.map(number));
        let name = if i == 0 { model.name.clone() } else { String::new() };
        vec![name, names[i].to_owned(), number(one.value), low, high]
    };
    [*e, *a, *b, *alpha, *beta, *n_exponent, *d_exponent].iter().enumerate().map(row).collect()
}

/// With four digits, whatever its size.
fn number(x: f64) -> String {
    match x.abs() {
        1e6.. => format!("{x:.3e}"),
        1e3.. => format!("{x:.0}"),
        1e2.. => format!("{x:.1}"),
        1e1.. => format!("{x:.2}"),
        1e-4.. => format!("{x:.4}"),
        0.0 => "0".to_owned(),
        _ => format!("{x:.3e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn numbers_have_four_digits_or_so() {
        let numbers = [1.69, 406.06, 12.345, 54_321.4, 2.5e9, 1e-13, 0.0, f64::INFINITY].map(number);
        assert_eq!(numbers, ["1.6900", "406.1", "12.35", "54321", "2.500e9", "1.000e-13", "0", "inf"]);
    }
}
