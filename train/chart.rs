//! Measurements against a size: one picture of several panels side by side, with the same lines in the same colours.
//!
//! An axis is linear, or logarithmic and drawn as logarithms: then x has its ticks at the points, y at 1, 2 and 5 times
//! powers of ten.

use std::ops::Range;
use std::path::Path;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use crate::plot::{COLOURS, Drawn, FONT, INK, replace, short};
use crate::{Error, Result};

/// How points are drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mark {
    /// Joined, with a dot each.
    #[default]
    Both,
    /// Joined.
    Line,
    /// A dot each.
    Dots,
}

/// One line, named in the legend.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Line {
    /// Its name.
    pub name: String,
    /// Points, x ascending. Those that are not finite, or not above 0 on a logarithmic axis, are left out.
    pub points: Vec<(f64, f64)>,
    /// How they are drawn.
    pub mark: Mark,
    /// An area in the line's colour, drawn faintly: its lower and upper edge.
    pub band: [Vec<(f64, f64)>; 2],
}

/// How a coordinate is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// From a little below the lowest point on.
    Linear,
    /// By its logarithm.
    Log,
}

/// One panel.
#[derive(Clone, Debug, PartialEq)]
pub struct Panel {
    /// What y is, with its unit.
    pub title: String,
    /// What x is, with its unit.
    pub x: String,
    /// The axis of x.
    pub x_scale: Scale,
    /// The axis of y.
    pub scale: Scale,
    /// Its lines.
    pub lines: Vec<Line>,
}

const PANEL: (u32, u32) = (520, 460);
const HEAD: u32 = 72;
/// Of the legend, under the title.
const LEGEND: i32 = 24;
/// How strong the colour of a band is.
const FAINT: f64 = 0.18;

/// Whether a picture can be written to `path`, as far as can be known without writing it: to be asked before hours of
/// measuring.
///
/// # Errors
/// When there is no such folder, or it is a folder.
pub fn check(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !folder.is_dir() || path.is_dir() || path.file_name().is_none() {
        return Err(Error::new(format!(
            "cannot write the picture `{}`: expected a file in a folder that exists",
            path.display()
        )));
    }
    Ok(())
}

/// Writes the picture to `path`, replacing what was there, whole or not at all.
///
/// # Errors
/// When the file cannot be written.
pub fn write(path: impl AsRef<Path>, title: &str, panels: &[Panel]) -> Result<()> {
    replace(path.as_ref(), &svg(title, panels)?)
}

/// The picture as the text of an SVG file.
///
/// # Errors
/// When it cannot be drawn.
pub fn svg(title: &str, panels: &[Panel]) -> Result<String> {
    let mut out = String::new();
    let size = (PANEL.0 * panels.len().max(1) as u32, PANEL.1 + HEAD);
    let root = SVGBackend::with_string(&mut out, size).into_drawing_area();
    draw(&root, title, panels).map_err(|e| Error::new(format!("cannot draw the picture: {e}")))?;
    drop(root);
    Ok(out)
}

fn draw(root: &DrawingArea<SVGBackend<'_>, Shift>, title: &str, panels: &[Panel]) -> Drawn<()> {
    root.fill(&WHITE)?;
    let below = root.titled(title, (FONT, 22).into_font().color(&INK))?;
    let (legend, below) = below.split_vertically(LEGEND);
    draw_legend(&legend, panels.iter().max_by_key(|panel| panel.lines.len()))?;
    for (area, panel) in below.split_evenly((1, panels.len().max(1))).iter().zip(panels) {
        draw_panel(area, panel)?;
    }
    root.present()?;
    Ok(())
}

/// One row of names over all panels, whose lines are the same.
fn draw_legend(area: &DrawingArea<SVGBackend<'_>, Shift>, panel: Option<&Panel>) -> Drawn<()> {
    let mut x = 24;
    for (n, line) in panel.iter().flat_map(|panel| panel.lines.iter().enumerate()) {
        let colour = COLOURS[n % COLOURS.len()];
        if !line.band[0].is_empty() {
            area.draw(&Rectangle::new([(x, 2), (x + 22, 18)], colour.mix(FAINT).filled()))?;
        }
        if line.mark != Mark::Dots {
            area.draw(&PathElement::new(vec![(x, 10), (x + 22, 10)], colour.stroke_width(2)))?;
        }
        if line.mark != Mark::Line {
            area.draw(&Circle::new((x + 11, 10), radius(n), colour.filled()))?;
        }
        area.draw(&Text::new(line.name.clone(), (x + 28, 3), (FONT, 14).into_font().color(&INK)))?;
        // A letter of this size is about 8 wide.
        x += 28 + 8 * line.name.chars().count() as i32 + 16;
    }
    Ok(())
}

/// Of a line's points: where lines lie on one another, later ones leave the rims of earlier ones to be seen.
fn radius(n: usize) -> i32 {
    (7 - n as i32).max(2)
}

fn draw_panel(area: &DrawingArea<SVGBackend<'_>, Shift>, panel: &Panel) -> Drawn<()> {
    let place = |points: &Vec<(f64, f64)>| placed(points, panel.x_scale, panel.scale);
    let lines: Vec<Vec<(f64, f64)>> = panel.lines.iter().map(|line| place(&line.points)).collect();
    let bands: Vec<[Vec<(f64, f64)>; 2]> = panel.lines.iter().map(|line| line.band.each_ref().map(place)).collect();
    let all = || lines.iter().chain(bands.iter().flatten()).flatten();
    let (x_range, x_ticks) = match panel.x_scale {
        Scale::Log => log_x_axis(all().map(|p| p.0).collect()),
        Scale::Linear => axis(all().map(|p| p.0), Scale::Linear),
    };
    let (y_range, y_ticks) = axis(all().map(|p| p.1), panel.scale);
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, (FONT, 17).into_font().color(&INK))
        .margin(12)
        .x_label_area_size(46)
        .y_label_area_size(60)
        .build_cartesian_2d(Axis::new(x_range, x_ticks), Axis::new(y_range, y_ticks))?;
    let label = |x: f64| if panel.x_scale == Scale::Log { size(10f64.powf(x)) } else { tick(x) };
    let value = |y: f64| if panel.scale == Scale::Log { 10f64.powf(y) } else { y };
    chart
        .configure_mesh()
        .bold_line_style(RGBColor(222, 222, 228))
        .light_line_style(TRANSPARENT)
        .axis_style(INK)
        .x_desc(panel.x.as_str())
        .axis_desc_style((FONT, 15).into_font().color(&INK))
        .label_style((FONT, 13).into_font().color(&INK))
        .x_label_formatter(&|x| label(*x))
        .y_label_formatter(&|y| tick(value(*y)))
        .draw()?;
    let colour = |n: usize| COLOURS[n % COLOURS.len()];
    for (n, [low, high]) in bands.iter().enumerate().filter(|(_, band)| !band[0].is_empty()) {
        let outline: Vec<(f64, f64)> = low.iter().chain(high.iter().rev()).copied().collect();
        chart.draw_series([Polygon::new(outline, colour(n).mix(FAINT).filled())])?;
    }
    for (n, (line, points)) in panel.lines.iter().zip(&lines).enumerate() {
        if line.mark != Mark::Dots {
            chart.draw_series(LineSeries::new(points.clone(), colour(n).stroke_width(2)))?;
        }
        if line.mark != Mark::Line {
            chart.draw_series(points.iter().map(|&p| Circle::new(p, radius(n), colour(n).filled())))?;
        }
    }
    Ok(())
}

/// A size as people write it: `16384`.
pub(crate) fn size(x: f64) -> String {
    if (1.0..1e6).contains(&x) { format!("{x:.0}") } else { short(x) }
}

/// A tick's value: `20k`, `0.5`, `2e-5`.
fn tick(y: f64) -> String {
    match y.abs() {
        0.0 => "0".to_owned(),
        small if small < 1e-3 => format!("{y:.0e}"),
        small if small < 1.0 => format!("{y:.3}").trim_end_matches('0').to_owned(),
        _ => short(y),
    }
}

/// A linear axis with ticks of our choice.
pub(crate) struct Axis {
    line: RangedCoordf64,
    ticks: Vec<f64>,
}

impl Axis {
    pub(crate) fn new((from, to): (f64, f64), ticks: Vec<f64>) -> Axis {
        Axis { line: (from..to).into(), ticks }
    }
}

impl Ranged for Axis {
    type ValueType = f64;
    type FormatOption = DefaultFormatting;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.line.map(value, limit)
    }
    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.clone()
    }
    fn range(&self) -> Range<f64> {
        self.line.range()
    }
}

/// The points that can be drawn, as drawing coordinates.
fn placed(points: &[(f64, f64)], x_scale: Scale, y_scale: Scale) -> Vec<(f64, f64)> {
    let fits = |value: f64, scale: Scale| value.is_finite() && (scale == Scale::Linear || value > 0.0);
    let place = |value: f64, scale: Scale| if scale == Scale::Log { value.log10() } else { value };
    let points = points.iter().filter(|p| fits(p.0, x_scale) && fits(p.1, y_scale));
    points.map(|&(x, y)| (place(x, x_scale), place(y, y_scale))).collect()
}

/// Range and ticks of logarithmic x: the points, as far as labels have room.
pub(crate) fn log_x_axis(mut xs: Vec<f64>) -> ((f64, f64), Vec<f64>) {
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    let (first, last) = (xs.first().copied().unwrap_or(0.0), xs.last().copied().unwrap_or(1.0));
    let room = 0.05 * (last - first).max(0.2);
    let range = (first - room, last + room);
    let least = 0.08 * (range.1 - range.0);
    let mut before = f64::NEG_INFINITY;
    xs.retain(|&x| {
        let keep = x - before >= least;
        before = if keep { x } else { before };
        keep
    });
    (range, xs)
}

/// Range and ticks.
pub(crate) fn axis(ys: impl Iterator<Item = f64>, scale: Scale) -> ((f64, f64), Vec<f64>) {
    let (low, high) = ys.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), y| (low.min(y), high.max(y)));
    if low > high {
        return ((0.0, 1.0), vec![]);
    }
    if scale == Scale::Log {
        let range = (low - 0.15, high + 0.15);
        let ticks = (range.0.floor() as i32..=range.1.ceil() as i32)
            .flat_map(|e| [1f64, 2.0, 5.0].map(|m| f64::from(e) + m.log10()))
            .filter(|y| (range.0..=range.1).contains(y))
            .collect();
        return (range, ticks);
    }
    let room = 0.08 * if high > low || high != 0.0 { (high - low).max(0.01 * high.abs()) } else { 1.0 };
    let range = (low - room, high + room);
    let rough = (range.1 - range.0) / 6.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|&s| s >= rough).unwrap_or(power);
    let ticks = (0..20).map(|i| ((range.0 / step).ceil() + f64::from(i)) * step).take_while(|&y| y <= range.1);
    (range, ticks.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(scale: Scale, points: &[(f64, f64)]) -> Panel {
        let line = |name: &str| Line { name: name.into(), points: points.to_vec(), ..Line::default() };
        Panel { title: "ms".into(), x: "T".into(), x_scale: Scale::Log, scale, lines: vec![line("a & b"), line("c")] }
    }

    #[test]
    fn odd_points_are_pictures_too() {
        let odd = [(1.0, f64::NAN), (2.0, 0.0), (4.0, -1.0), (8.0, f64::INFINITY), (-1.0, 2.0)];
        for scale in [Scale::Linear, Scale::Log] {
            for points in [&odd[..], &[], &[(0.0, 0.0)], &[(256.0, 3.0)], &[(256.0, 1e-3), (16_384.0, 2e4)]] {
                let linear = Panel { x_scale: Scale::Linear, ..panel(scale, points) };
                let text = svg("A < title", &[panel(scale, points), panel(Scale::Linear, points), linear]).unwrap();
                assert!(text.contains("A &lt; title") && text.contains("a &amp; b"), "{text}");
                assert!(!text.contains("NaN") && !text.contains("inf"), "{scale:?} {points:?}");
            }
        }
        assert!(svg("none", &[]).unwrap().starts_with("<svg"));
    }

    #[test]
    fn marks_and_bands_are_drawn_as_asked() {
        let points = vec![(-1.0, 1.0), (0.0, 2.0), (1.0, 0.5)];
        let count = |mark, band: [Vec<(f64, f64)>; 2]| {
            let lines = vec![Line { name: "a".into(), points: points.clone(), mark, band }];
            let (x_scale, scale) = (Scale::Linear, Scale::Linear);
            let panel = Panel { title: "y".into(), x: "x".into(), x_scale, scale, lines };
            let text = svg("t", &[panel]).unwrap();
            assert!(text.contains(">\n-0.5\n<"), "x has round ticks: {text}");
            ["<circle", "stroke-width=\"2\"", "<polygon"].map(|what| text.matches(what).count())
        };
        let none = || [vec![], vec![]];
        let band = [points.clone(), points.iter().map(|p| (p.0, p.1 + 9.0)).collect()];
        // Those of the legend are among them.
        assert_eq!(count(Mark::Both, none()), [4, 2, 0]);
        assert_eq!(count(Mark::Line, none()), [0, 2, 0]);
        assert_eq!(count(Mark::Dots, none()), [4, 0, 0]);
        assert_eq!(count(Mark::Line, band), [0, 2, 1]);
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!([0.0, 2e-5, 0.005, 0.5, 4.53, 2e4].map(tick), ["0", "2e-5", "0.005", "0.5", "4.53", "20k"]);
        assert_eq!(axis([0.5, 10.0].into_iter(), Scale::Linear).1, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        let ticks = axis([0.0, 2.0].into_iter(), Scale::Log).1;
        assert!((ticks[0], ticks[1]) == (0.0, 2f64.log10()) && ticks.len() == 7, "{ticks:?}");
    }
}
