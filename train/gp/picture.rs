//! The pictures of a run of `gp`: errors against the number of observed points, and what models make of single functions.

use std::path::Path;

use kumiki_models::SequenceRegressor;
use kumiki_tensor::{DType, Rng};

use super::evaluate::predict_at;
use super::exact::{Exact, Prediction};
use super::kernel::Prior;
use super::run::{Cell, Results};
use crate::axis::significant;
use crate::chart::{self, Line, Mark, Panel, Scale};
use crate::folder::{FUNCTIONS, RMSE};
use crate::{Result, checkpoint};

/// Functions that are shown.
const SHOWN: usize = 3;
/// How many of their points are given, if they have more.
const GIVEN: usize = 16;
/// Points of a line.
const GRID: usize = 161;

/// Draws both pictures into the run's folder, with what is finished. Predictions are those of each model's first seed.
///
/// # Errors
/// When a model cannot be read back, a function not be drawn, or a file not be written.
pub fn draw(results: &Results, folder: &Path) -> Result<()> {
    let title = format!("Functions of a Gaussian process, preset {}", results.plan.preset);
    chart::write(folder.join(RMSE), &title, &errors(results))?;
    let mut models = Vec::new();
    for name in &results.plan.models {
        let first = results.rows.iter().map(|row| &row.cell).find(|cell: &&Cell| cell.model == *name);
        if let Some(cell) = first {
            models.push((name.as_str(), checkpoint::load_regressor(&folder.join(cell.folder()), DType::F32)?));
        }
    }
    let prior = &results.plan.settings.prior;
    let panels: Vec<Panel> = (0..SHOWN).map(|n| function(prior, n, &models)).collect::<Result<_>>()?;
    chart::write(folder.join(FUNCTIONS), &title, &panels)
}

fn line(name: &str, points: Vec<(f64, f64)>) -> Line {
    Line { name: name.to_owned(), points, mark: Mark::Line, ..Line::default() }
}

/// The errors themselves, and over those of the exact posterior. Models come first: they have one colour in both.
fn errors(results: &Results) -> [Panel; 2] {
    let floor = &results.floor.exact.by_observed;
    let numbered = |values: &mut dyn Iterator<Item = f64>| values.enumerate().map(|(n, y)| (n as f64, y)).collect();
    let models = |of: &dyn Fn(usize, f64) -> f64| -> Vec<Line> {
        let values = |by: &[f64]| numbered(&mut by.iter().enumerate().map(|(n, &y)| of(n, y)));
        results.summary.iter().map(|model| line(&model.model, values(&model.by_observed))).collect()
    };
    let panel = |title: &str, scale, lines| {
        let (title, x, x_scale) = (title.to_owned(), "observed points".to_owned(), Scale::Linear);
        Panel { title, x, x_scale, scale, lines }
    };
    let mut all = models(&|_, y| y);
    all.push(line("exact posterior", numbered(&mut floor.iter().copied())));
    [
        panel("RMSE against y", Scale::Log, all),
        panel("RMSE over the exact posterior's", Scale::Linear, models(&|n, y| y / floor[n])),
    ]
}

/// The `n`-th function that is shown: drawn from a stream of its own, nothing was trained or measured on it.
fn function(prior: &Prior, n: usize, models: &[(&str, SequenceRegressor)]) -> Result<Panel> {
    let at = |i: usize| prior.x_range * (2.0 * i as f64 / (GRID - 1) as f64 - 1.0);
    let grid: Vec<f64> = (0..GRID).map(at).collect();
    let given = GIVEN.min(prior.points - 1);
    // Time grows with the third power of the points, and more than the given ones are not shown.
    let few = Prior { points: given.max(1), ..prior.clone() };
    let (function, truth) = few.draw(&Rng::new(0).fork("gp shown").fork(&n.to_string()), &grid)?;
    let (x, y) = (&function.x[..given], &function.y[..given]);
    let exact = Exact::of(x, y, function.length, prior.noise)?;
    let posterior: Vec<Prediction> = grid.iter().map(|&x| exact.at(x)).collect();
    let over = |values: &mut dyn Iterator<Item = f64>| grid.iter().copied().zip(values).collect::<Vec<_>>();
    let edge = |sds: f64| over(&mut posterior.iter().map(|p| p.mean + sds * p.sd));
    let mut lines: Vec<Line> =
        models.iter().map(|(name, model)| line(name, over(&mut predict_at(model, x, y, &grid).into_iter()))).collect();
    lines.push(Line { band: [edge(-2.0), edge(2.0)], ..line("exact posterior ± 2 sd", edge(0.0)) });
    lines.push(line("true function", over(&mut truth.into_iter())));
    let observed = x.iter().copied().zip(y.iter().copied()).collect();
    lines.push(Line { mark: Mark::Observed, ..line("observed", observed) });
    let title = format!("y after {given} points, length scale {}", significant(function.length, 2));
    Ok(Panel { title, x: "x".into(), x_scale: Scale::Linear, scale: Scale::Linear, lines })
}
