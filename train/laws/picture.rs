//! Losses against training tokens, both logarithmic: one panel a model, and in it, for every size, the points that were measured
//! and the curve of the law that was fitted.

use std::path::Path;

use plotters::prelude::*;

use super::{Fit, Point};
use crate::Result;
use crate::axis::{Frame, Ticks, short};
use crate::canvas::{self, Area, Drawn};
use crate::chart::{Scale, x_axis};
use crate::looks::{FONT, INK, Look};
use crate::plot::write_as_named;

/// A model's points and their law.
#[derive(Clone, Debug, PartialEq)]
pub struct Fitted<'a> {
    /// The model.
    pub name: String,
    /// What was measured.
    pub points: &'a [Point],
    /// What was fitted to it.
    pub fit: Fit,
}

const PANEL: (u32, u32) = (620, 460);
const HEAD: u32 = 44;
/// Of the sizes' names, at the right of every panel.
const LEGEND: u32 = 110;
/// Panels in a row.
const ROW: usize = 2;
/// Sizes of a panel: more cannot be told apart, so that some of them, evenly chosen, stand for all.
const SIZES: usize = 14;
/// Straight pieces of a curve: places are whole pixels, and shorter pieces would show it.
const STEPS: usize = 24;

/// Writes the picture to `path`, replacing what was there, whole or not at all; as PNG where it is named so, else as SVG.
///
/// # Errors
/// When the file cannot be written.
pub fn write(path: impl AsRef<Path>, title: &str, models: &[Fitted<'_>]) -> Result<()> {
    let cells = cells(models);
    write_as_named(path.as_ref(), size(cells), |root| draw(root, title, models, cells))
}

/// The picture as the text of an SVG file.
///
/// # Errors
/// When it cannot be drawn.
pub fn svg(title: &str, models: &[Fitted<'_>]) -> Result<String> {
    let cells = cells(models);
    canvas::svg(size(cells), |root| draw(root, title, models, cells))
}

/// Rows and columns of panels.
fn cells(models: &[Fitted<'_>]) -> (usize, usize) {
    let columns = models.len().clamp(1, ROW);
    (models.len().div_ceil(columns).max(1), columns)
}

fn size((rows, columns): (usize, usize)) -> (u32, u32) {
    (PANEL.0 * columns as u32, PANEL.1 * rows as u32 + HEAD)
}

fn draw(root: &Area<'_>, title: &str, models: &[Fitted<'_>], cells: (usize, usize)) -> Drawn<()> {
    root.fill(&WHITE)?;
    let below = root.titled(title, (FONT, 22).into_font().color(&INK))?;
    for (area, model) in below.split_evenly(cells).iter().zip(models) {
        let (chart, legend) = area.split_horizontally(PANEL.0 - LEGEND);
        let sizes = sizes(model.points);
        draw_panel(&chart, model, &sizes)?;
        draw_legend(&legend, &sizes)?;
    }
    Ok(())
}

/// The sizes that are shown, ascending.
fn sizes(points: &[Point]) -> Vec<f64> {
    let mut all: Vec<f64> = points.iter().map(|point| point.params).collect();
    all.sort_by(f64::total_cmp);
    all.dedup();
    let shown = all.len().min(SIZES);
    (0..shown).map(|i| all[if shown < 2 { i } else { i * (all.len() - 1) / (shown - 1) }]).collect()
}

fn dot<C>(at: C, n: usize) -> Vec<Circle<C, i32>>
where
    C: Copy,
{
    Look::of(n).dot(5).into_iter().map(|(radius, colour)| Circle::new(at, radius, colour.filled())).collect()
}

fn draw_legend(area: &Area<'_>, sizes: &[f64]) -> Drawn<()> {
    let text = (FONT, 14).into_font().color(&INK);
    area.draw(&Text::new("N", (28, 44), text.clone()))?;
    // The largest size has the lowest curve.
    for (n, &params) in sizes.iter().enumerate() {
        let y = 72 + 22 * n as i32;
        area.draw(&Look::of(n).line(vec![(0, y), (22, y)]))?;
        dot((11, y), n).iter().try_for_each(|circle| area.draw(circle))?;
        area.draw(&Text::new(short(params), (28, y - 7), text.clone()))?;
    }
    Ok(())
}

/// The curve of `params`, over all tokens of the model.
fn curve(fit: &Fit, params: f64, (from, to): (f64, f64)) -> Vec<(f64, f64)> {
    let at = |i: usize| from * (to / from).powf(i as f64 / STEPS as f64);
    (0..=STEPS).map(|i| (at(i), fit.predict(params, at(i)))).collect()
}

fn draw_panel(area: &Area<'_>, model: &Fitted<'_>, sizes: &[f64]) -> Drawn<()> {
    let Fitted { name, points, fit } = model;
    let tokens = || points.iter().map(|point| point.tokens);
    let reach = (tokens().fold(f64::INFINITY, f64::min), tokens().fold(0.0, f64::max));
    let curves: Vec<Vec<(f64, f64)>> = sizes.iter().map(|&params| curve(fit, params, reach)).collect();
    let measured = |params: f64| points.iter().filter(move |p| p.params == params).map(|p| (p.tokens, p.loss));
    let dots: Vec<Vec<(f64, f64)>> = sizes.iter().map(|&params| measured(params).collect()).collect();
    let x = x_axis(tokens().map(f64::log10).collect(), Scale::Log);
    let y = y_axis(curves.iter().chain(&dots).flatten().map(|p| p.1));
    let frame = Frame { title: name, x: "training tokens D", y: Some("loss (nats per token)"), alone: false };
    let mut chart = frame.draw(area, &x, &y)?;
    let place = |p: &(f64, f64)| (p.0.log10(), p.1.log10());
    for (n, curve) in curves.iter().enumerate() {
        chart.draw_series([Look::of(n).line(curve.iter().map(place).collect())])?;
    }
    for (n, dots) in dots.iter().enumerate() {
        chart.draw_series(dots.iter().flat_map(|p| dot(place(p), n)))?;
    }
    Ok(())
}

/// Range and ticks of logarithmic losses.
fn y_axis(losses: impl Iterator<Item = f64>) -> ((f64, f64), Ticks) {
    let logs = losses.filter(|y| y.is_finite() && *y > 0.0).map(f64::log10);
    let (low, high) = logs.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), y| (low.min(y), high.max(y)));
    if !low.is_finite() {
        return ((0.0, 1.0), Ticks::default());
    }
    // Noise should not fill the panel where losses hardly differ.
    let room = (0.06 * (high - low)).max(0.005);
    let range = (low - room, high + room);
    (range, Ticks::log(range))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::laws::{FitOptions, fit};
    use crate::scratch::Scratch;

    fn points(sizes: usize) -> Vec<Point> {
        let law = |n: f64, d: f64| 1.5 + (1e6 / n).powf(0.4) + 0.7 * (1e7 / d).powf(0.3);
        let at = |i: usize| (1e6 * 2f64.powi((i / 4) as i32), 1e7 * 4f64.powi((i % 4) as i32));
        (0..4 * sizes).map(at).map(|(params, tokens)| Point { params, tokens, loss: law(params, tokens) }).collect()
    }

    #[test]
    fn every_size_has_its_points_and_its_curve() {
        let points = points(5);
        let fit = fit(&points, &FitOptions { bootstrap: 0, ..FitOptions::default() }).unwrap();
        let model = |name: &str| Fitted { name: name.into(), points: &points, fit };
        let text = svg("A < title", &[model("a & b"), model("c"), model("d")]).unwrap();
        for phrase in ["A &lt; title", "a &amp; b", "training tokens D", ">\n16M\n<", "nats per token"] {
            assert!(text.contains(phrase), "no {phrase} in {text}");
        }
        assert!(!text.contains("NaN") && !text.contains("inf"));
        // In the legend, too.
        assert_eq!(text.matches("<circle").count(), 3 * (20 + 5));
        assert_eq!(text.matches("stroke-width=\"2\"").count(), 3 * (5 + 5));
        assert!(svg("none", &[]).unwrap().starts_with("<svg"));
        let dir = Scratch::new();
        write(dir.path().join("laws.svg"), "t", &[model("m")]).unwrap();
        write(dir.path().join("laws.PNG"), "t", &[model("m")]).unwrap();
        assert!(std::fs::read(dir.path().join("laws.PNG")).unwrap().starts_with(b"\x89PNG"));
        assert!(write(dir.path().join("no/laws.svg"), "t", &[]).unwrap_err().to_string().contains("laws.svg"));
    }

    #[test]
    fn many_sizes_are_thinned_from_end_to_end() {
        let shown = sizes(&points(40));
        assert_eq!((shown.len(), shown[0], shown[SIZES - 1]), (SIZES, 1e6, 1e6 * 2f64.powi(39)));
        assert!(shown.is_sorted_by(|a, b| a < b));
        assert_eq!(sizes(&points(1)), [1e6]);
    }

    #[test]
    fn ticks_are_round() {
        let ticks = |losses: &[f64]| {
            let (_, ticks) = y_axis(losses.iter().copied());
            ticks.labels().into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(ticks(&[2.05, 3.9]), ["2", "3", "4"]);
        assert_eq!(ticks(&[2.501, 2.5034]), ["2.48", "2.50", "2.52"]);
        assert_eq!(ticks(&[0.5, 10.0]), ["0.5", "1", "2", "5", "10"]);
        assert!(ticks(&[3.0]).len() > 2);
        assert!(ticks(&[]).is_empty());
    }
}
