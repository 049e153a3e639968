//! Measurements against a size: one picture of several panels side by side, where lines of one name look the same.
//!
//! An axis is linear, or logarithmic and drawn as logarithms: then x has its ticks at the points, y at 1, 2 and 5 times
//! powers of ten.

use std::path::Path;

use kumiki_tensor::files;
use plotters::prelude::*;

use crate::axis::{Frame, Ticks};
use crate::canvas::{self, Area, Drawn};
use crate::looks::{FONT, INK, Look};
use crate::plot::{check_place, write_as_named};
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
    /// A large dark dot each: what was observed, among lines of models.
    Observed,
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
/// Left and right of the legend.
const MARGIN: i32 = 24;
const TITLE: u32 = 48;
/// Of the legend, under the title.
const ROW: i32 = 24;
/// From the start of a sample in the legend to its name, and from a name to the next sample.
const GAPS: (i32, i32) = (28, 16);
/// A letter of the legend is about so wide.
const LETTER: i32 = 8;
/// How strong the colour of a band is.
const FAINT: f64 = 0.18;

/// Whether a picture can be written to `path`, as far as can be known without writing it: to be asked before hours of
/// measuring.
///
/// # Errors
/// When there is no such folder, or something else than a file is there.
pub fn check(path: &Path) -> Result<()> {
    let place = files::place(path).unwrap_or_else(|_| path.to_owned());
    let folder = place.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !folder.is_dir() || place.is_dir() || place.file_name().is_none() {
        return Err(Error::new(format!(
            "cannot write the picture `{}`: expected a file in a folder that exists",
            path.display()
        )));
    }
    check_place(path)
}

/// Writes the picture to `path`, replacing what was there, whole or not at all; as PNG where it is named so, else as SVG.
///
/// # Errors
/// When the file cannot be written.
pub fn write(path: impl AsRef<Path>, title: &str, panels: &[Panel]) -> Result<()> {
    write_as_named(path.as_ref(), size(panels), |root| draw(root, title, panels))
}

/// The picture as the text of an SVG file.
///
/// # Errors
/// When it cannot be drawn.
pub fn svg(title: &str, panels: &[Panel]) -> Result<String> {
    canvas::svg(size(panels), |root| draw(root, title, panels))
}

fn size(panels: &[Panel]) -> (u32, u32) {
    let width = PANEL.0 * panels.len().max(1) as u32;
    (width, PANEL.1 + TITLE + (ROW * legend(panels, width as i32).len().max(1) as i32) as u32)
}

fn draw(root: &Area, title: &str, panels: &[Panel]) -> Drawn<()> {
    root.fill(&WHITE)?;
    let below = root.titled(title, (FONT, 22).into_font().color(&INK))?;
    let rows = legend(panels, root.dim_in_pixel().0 as i32);
    let (above, below) = below.split_vertically(ROW * rows.len().max(1) as i32);
    draw_legend(&above, &rows)?;
    let names: Vec<&str> = rows.iter().flatten().map(|sample| sample.line.name.as_str()).collect();
    for (area, panel) in below.split_evenly((1, panels.len().max(1))).iter().zip(panels) {
        draw_panel(area, panel, &names)?;
    }
    Ok(())
}

/// A name of the legend.
struct Sample<'a> {
    /// The first line of that name.
    line: &'a Line,
    /// Its number among the names.
    n: usize,
    /// Where it starts.
    x: i32,
}

/// The names of all lines, in rows that fit into `width`.
fn legend(panels: &[Panel], width: i32) -> Vec<Vec<Sample<'_>>> {
    let mut lines: Vec<&Line> = Vec::new();
    for line in panels.iter().flat_map(|panel| &panel.lines) {
        if !lines.iter().any(|other| other.name == line.name) {
            lines.push(line);
        }
    }
    let (mut rows, mut x): (Vec<Vec<Sample>>, i32) = (Vec::new(), width);
    for (n, line) in lines.into_iter().enumerate() {
        let own = GAPS.0 + LETTER * line.name.chars().count() as i32;
        if x + own > width - MARGIN {
            rows.push(Vec::new());
            x = MARGIN;
        }
        rows.last_mut().expect("the first name begins a row").push(Sample { line, n, x });
        x += own + GAPS.1;
    }
    rows
}

fn draw_legend(area: &Area, rows: &[Vec<Sample>]) -> Drawn<()> {
    for (row, samples) in rows.iter().enumerate() {
        let y = ROW * row as i32;
        for &Sample { line, n, x } in samples {
            let look = look(line, n);
            if !line.band[0].is_empty() {
                area.draw(&Rectangle::new([(x, y + 2), (x + 22, y + 18)], look.colour.mix(FAINT).filled()))?;
            }
            if matches!(line.mark, Mark::Line | Mark::Both) {
                area.draw(&look.line(vec![(x, y + 10), (x + 22, y + 10)]))?;
            }
            if line.mark != Mark::Line {
                for (r, colour) in look.dot(radius(line, n)) {
                    area.draw(&Circle::new((x + 11, y + 10), r, colour.filled()))?;
                }
            }
            let style = (FONT, 14).into_font().color(&INK);
            area.draw(&Text::new(line.name.clone(), (x + GAPS.0, y + 3), style))?;
        }
    }
    Ok(())
}

fn look(line: &Line, n: usize) -> Look {
    if line.mark == Mark::Observed { Look::ink() } else { Look::of(n) }
}

/// Of a line's points: where lines lie on one another, later ones leave the rims of earlier ones to be seen.
fn radius(line: &Line, n: usize) -> i32 {
    if line.mark == Mark::Observed { 5 } else { 7i32.saturating_sub(n as i32).max(4) }
}

/// `names` are those of the legend.
fn draw_panel(area: &Area, panel: &Panel, names: &[&str]) -> Drawn<()> {
    let place = |points: &Vec<(f64, f64)>| placed(points, panel.x_scale, panel.scale);
    let lines: Vec<Vec<(f64, f64)>> = panel.lines.iter().map(|line| place(&line.points)).collect();
    let bands: Vec<[Vec<(f64, f64)>; 2]> = panel.lines.iter().map(|line| line.band.each_ref().map(place)).collect();
    let all = || lines.iter().chain(bands.iter().flatten()).flatten();
    let x = x_axis(all().map(|p| p.0).collect(), panel.x_scale);
    let y = axis(all().map(|p| p.1), panel.scale, false);
    let frame = Frame { title: &panel.title, x: &panel.x, y: None, alone: false };
    let mut chart = frame.draw(area, &x, &y)?;
    let number = |line: &Line| names.iter().position(|name| *name == line.name).unwrap_or(0);
    for (line, [low, high]) in panel.lines.iter().zip(&bands).filter(|(_, band)| !band[0].is_empty()) {
        let outline: Vec<(f64, f64)> = low.iter().chain(high.iter().rev()).copied().collect();
        chart.draw_series([Polygon::new(outline, look(line, number(line)).colour.mix(FAINT).filled())])?;
    }
    for (line, points) in panel.lines.iter().zip(&lines) {
        let (n, look) = (number(line), look(line, number(line)));
        if matches!(line.mark, Mark::Line | Mark::Both) {
            chart.draw_series([look.line(points.clone())])?;
        }
        // A line over a single x is invisible.
        let single = points.iter().all(|p| p.0 == points[0].0);
        if line.mark != Mark::Line || single {
            let rim = (line.mark == Mark::Observed).then(|| (radius(line, n) + 1, WHITE));
            let discs: Vec<(i32, RGBColor)> = rim.into_iter().chain(look.dot(radius(line, n))).collect();
            for &p in points {
                chart.draw_series(discs.iter().map(|(r, colour)| Circle::new(p, *r, colour.filled())))?;
            }
        }
    }
    Ok(())
}

/// The points that can be drawn, as drawing coordinates.
fn placed(points: &[(f64, f64)], x_scale: Scale, y_scale: Scale) -> Vec<(f64, f64)> {
    let fits = |value: f64, scale: Scale| value.is_finite() && (scale == Scale::Linear || value > 0.0);
    let place = |value: f64, scale: Scale| if scale == Scale::Log { value.log10() } else { value };
    let points = points.iter().filter(|p| fits(p.0, x_scale) && fits(p.1, y_scale));
    points.map(|&(x, y)| (place(x, x_scale), place(y, y_scale))).collect()
}

/// Range and ticks of the values of one coordinate, of which `whole` has ticks at whole numbers only.
fn axis(values: impl Iterator<Item = f64>, scale: Scale, whole: bool) -> ((f64, f64), Ticks) {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), y| (low.min(y), high.max(y)));
    if low > high {
        return ((0.0, 1.0), Ticks::default());
    }
    if scale == Scale::Log {
        let range = (low - 0.15, high + 0.15);
        return (range, Ticks::log(range));
    }
    let room = match high - low {
        span if span > 0.0 => 0.08 * span.max(0.01 * high.abs()),
        _ if whole => 1.0,
        _ => 0.08 * if high == 0.0 { 1.0 } else { 0.01 * high.abs() },
    };
    let range = (low - room, high + room);
    (range, Ticks::linear(range, whole))
}

/// As [`axis`], of x: a logarithmic one has its ticks at the points, and one of whole numbers at whole numbers.
pub(crate) fn x_axis(xs: Vec<f64>, scale: Scale) -> ((f64, f64), Ticks) {
    if scale == Scale::Linear || xs.is_empty() {
        let whole = xs.iter().all(|x| x.fract() == 0.0);
        return axis(xs.into_iter(), Scale::Linear, whole);
    }
    let (low, high) = xs.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(*x), high.max(*x)));
    let room = 0.05 * (high - low).max(0.2);
    let range = (low - room, high + room);
    (range, Ticks::sizes(xs, range.1 - range.0))
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
            assert!(!text.contains(">\n-0.5\n<"), "x is whole: {text}");
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
    fn a_line_over_a_single_x_is_dots() {
        let lines = vec![Line { name: "a".into(), points: vec![(3.0, 1.0)], mark: Mark::Line, ..Line::default() }];
        let (x_scale, scale) = (Scale::Linear, Scale::Linear);
        let text = svg("t", &[Panel { title: "y".into(), x: "x".into(), x_scale, scale, lines }]).unwrap();
        assert_eq!(text.matches("<circle").count(), 1);
        assert!(text.contains(">\n3\n<"), "{text}");
    }

    #[test]
    fn any_number_of_names_fits_and_each_looks_the_same_in_all_panels() {
        let line = |n: usize| Line {
            name: format!("double-single_middle-{n}"),
            points: vec![(1.0, n as f64)],
            ..Line::default()
        };
        let panel = |lines: Vec<Line>| Panel { lines, ..panel(Scale::Linear, &[]) };
        let panels = [panel((0..9).map(line).collect()), panel((7..16).rev().map(line).collect())];
        for width in [520, 1040] {
            let rows = legend(&panels, width);
            let samples: Vec<&Sample> = rows.iter().flatten().collect();
            assert_eq!(samples.len(), 16);
            for row in &rows {
                let end = |s: &Sample| s.x + GAPS.0 + LETTER * s.line.name.len() as i32;
                assert!(row.windows(2).all(|pair| end(&pair[0]) < pair[1].x));
                assert!(row.iter().all(|s| s.x >= MARGIN && end(s) <= width - MARGIN));
            }
        }
        let text = svg("t", &panels).unwrap();
        assert_eq!(text.matches("double-single_middle-15\n").count(), 1);
    }

    #[test]
    fn axes_of_few_points() {
        assert_eq!(axis([0.5, 10.0].into_iter(), Scale::Linear, false).1.labels(), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(x_axis(vec![0.0, 1.0, 2.0], Scale::Linear).1.labels(), ["0", "1", "2"]);
        assert_eq!(x_axis(vec![1.0], Scale::Linear).1.labels(), ["0", "1", "2"]);
        assert_eq!(x_axis(vec![256f64.log10()], Scale::Log).1.labels(), ["256"]);
        for y in [5.54f64, 1e-9, 3e12] {
            for scale in [Scale::Linear, Scale::Log] {
                let placed = if scale == Scale::Log { y.log10() } else { y };
                let labels = axis([placed].into_iter(), scale, false).1;
                assert!(labels.labels().len() > 2, "{y}: {labels:?}");
            }
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_picture_takes_no_other_places_than_files() {
        let dir = crate::scratch::Scratch::new();
        let (pipe, link, target) = (dir.path().join("pipe.svg"), dir.path().join("link.svg"), dir.path().join("t.svg"));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let says = |error: Error, path: &Path| {
            let expected = format!("`{}` is no regular file; expected a place for a picture", path.display());
            assert_eq!(error.to_string(), expected);
        };
        says(check(&pipe).unwrap_err(), &pipe);
        says(write(&pipe, "t", &[]).unwrap_err(), &pipe);
        std::os::unix::fs::symlink("t.svg", &link).unwrap();
        let mine = dir.file("t.svg.partial", "mine");
        for _ in 0..2 {
            check(&link).unwrap();
            write(&link, "t", &[]).unwrap();
        }
        assert!(link.is_symlink() && std::fs::read_to_string(target).unwrap().starts_with("<svg"));
        assert_eq!(std::fs::read_to_string(mine).unwrap(), "mine");
        std::os::unix::fs::symlink("no/where.svg", dir.path().join("lost.svg")).unwrap();
        assert!(check(&dir.path().join("lost.svg")).unwrap_err().to_string().contains("a folder that exists"));
    }
}
