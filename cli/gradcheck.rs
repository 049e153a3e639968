//! `kumiki gradcheck`.

use kumiki::autograd::Report;
use kumiki::models::model_cases;
use kumiki::ops::op_cases;
use kumiki_train::suggest::unknown;
use kumiki_train::{Error, Result};
use serde_json::json;

use crate::output::{in_pool, json, line};

/// An error of a gradient from here on is a failure.
const LIMIT: f64 = 1e-6;

/// Prove that every gradient is right
///
/// Every operator and every model is run in f64, and the gradient of every input and parameter is compared with central
/// differences. The table shows the worst element of each; from a relative error of 1e-6 on the command fails.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki gradcheck
  kumiki gradcheck --filter rms_norm
  kumiki gradcheck --json | jq '.[] | select(.error > 1e-8)'")]
pub struct Args {
    /// Only operators and models whose name contains this
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    filter: String,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// A check that has not been made yet.
struct Case {
    kind: &'static str,
    name: &'static str,
    variant: String,
    check: Box<dyn Fn() -> Report>,
}

impl Case {
    fn title(&self) -> String {
        if self.variant.is_empty() { self.name.to_owned() } else { format!("{} ({})", self.name, self.variant) }
    }
}

fn all() -> Vec<Case> {
    let operators = op_cases().into_iter().map(|case| {
        let variant = case.variant.to_owned();
        Case { kind: "operator", name: case.name, variant, check: Box::new(move || case.check()) }
    });
    let models = model_cases().into_iter().map(|case| {
        let variant = case.variant.clone();
        Case { kind: "model", name: case.name, variant, check: Box::new(move || case.check()) }
    });
    operators.chain(models).collect()
}

/// Those of `names` that contain `filter`; an error when there is none.
pub fn check_filter(kind: &str, filter: &str, names: &[&str]) -> Result<()> {
    if names.iter().any(|name| name.contains(filter)) {
        return Ok(());
    }
    let mut known: Vec<&str> = Vec::new();
    for name in names {
        if !known.contains(name) {
            known.push(name);
        }
    }
    Err(Error::new(unknown(kind, filter, &known)))
}

impl Args {
    pub fn run(self) -> Result<()> {
        in_pool(|| self.check())
    }

    fn check(self) -> Result<()> {
        let mut cases = all();
        check_filter("operator or model", &self.filter, &cases.iter().map(|case| case.name).collect::<Vec<_>>())?;
        cases.retain(|case| case.name.contains(&self.filter));
        let width = cases.iter().map(|case| case.title().chars().count()).max().unwrap_or(0);
        if !self.json {
            line(&format!("{:<width$}  elements  worst error  at", "operator or model"))?;
        }
        let (mut found, mut failed, mut worst) = (Vec::new(), Vec::new(), 0f64);
        for case in &cases {
            let report = (case.check)();
            let error = report.error();
            worst = if error > worst || error.is_nan() { error } else { worst };
            // Written so that a NaN fails.
            let good = error < LIMIT && report.without_gradient.is_empty() && report.checked > 0;
            if !good {
                failed.push(case.title());
            }
            let mut place = report.worst.as_ref().map_or(String::new(), |w| format!("{}{:?}", w.name, w.index));
            if self.json {
                found.push(json!({
                    "kind": case.kind, "name": case.name, "variant": case.variant, "elements": report.checked,
                    "error": error.is_finite().then_some(error), "at": place, "without_gradient": report.without_gradient,
                    "passed": good,
                }));
                continue;
            }
            if !report.without_gradient.is_empty() {
                place += &format!("; no gradient for {}", report.without_gradient.join(", "));
            }
            let mark = if good { "" } else { "  FAILED" };
            line(&format!("{:<width$}  {:>8}  {error:>11.1e}  {place}{mark}", case.title(), report.checked))?;
        }
        if self.json {
            json(&found)?;
        }
        if !failed.is_empty() {
            return Err(Error::new(format!(
                "{} of {} gradient checks fail: {}",
                failed.len(),
                cases.len(),
                failed.join(", ")
            )));
        }
        if !self.json {
            line(&format!("all {} below {LIMIT:.0e}; the worst is {worst:.1e}", cases.len()))?;
        }
        Ok(())
    }
}
