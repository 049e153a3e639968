//! `curves.svg` and `curves.png`: loss against training tokens for one or several models on one corpus.
//!
//! The measured loss is drawn faintly, its smoothed course strongly on top, validation as points.
//! Values that are not finite leave gaps. The first drop from the untrained loss would flatten everything else, so the
//! axis ends a little above where most of the curve runs; what is higher leaves the picture at the top edge. Text stays text
//! in the file.

use crate::axis::{Chart, Frame, Ticks};
use crate::canvas::{self, Area, Drawn};
use crate::log::Record;
use crate::looks::{FONT, INK, Look};
use crate::{Error, Result};
use kumiki_tensor::files;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The points of one training; x in training tokens, y in nats a token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve {
    /// Its name in the legend, and its colour: curves of one name, the seeds of a model, share both.
    pub name: String,
    /// Training losses, x ascending.
    pub train: Vec<(f64, f64)>,
    /// Validation losses, x ascending.
    pub val: Vec<(f64, f64)>,
}

impl Curve {
    /// One curve for each model and seed of a log, in order of appearance; records without a model are called `loss`.
    pub fn from_records<'a>(records: impl IntoIterator<Item = &'a Record>) -> Vec<Curve> {
        let mut curves: Vec<Curve> = Vec::new();
        let mut keys = Vec::new();
        for record in records {
            let name = record.model.as_deref().unwrap_or("loss");
            let at = keys.iter().position(|key| *key == (name, record.seed)).unwrap_or_else(|| {
                keys.push((name, record.seed));
                curves.push(Curve { name: name.to_owned(), ..Curve::default() });
                curves.len() - 1
            });
            let x = record.tokens as f64;
            curves[at].train.push((x, record.loss));
            curves[at].val.extend(record.val_loss.map(|y| (x, y)));
        }
        curves
    }
}

const SIZE: (u32, u32) = (960, 600);

/// Writes the picture to `path`, replacing what was there: as PNG where it is named so, else as SVG. Any number of curves and
/// points, none included.
///
/// # Errors
/// When the file cannot be written.
pub fn write(path: impl AsRef<Path>, title: &str, curves: &[Curve]) -> Result<()> {
    write_as_named(path.as_ref(), SIZE, |root| draw(root, title, curves))
}

/// Writes a picture, whole or not at all, as the results next to it: as PNG where `path` is named so, else as SVG.
pub(crate) fn write_as_named(path: &Path, size: (u32, u32), draw: impl FnOnce(&Area) -> Drawn<()>) -> Result<()> {
    check_place(path)?;
    let picture = match path.extension() {
        Some(name) if name.eq_ignore_ascii_case("png") => canvas::png(size, draw)?,
        _ => canvas::svg(size, draw)?.into_bytes(),
    };
    files::replace(path, &[&picture]).map_err(|e| Error::io("write the picture", path, e))
}

/// Whether something is in the place of a picture that is none.
pub(crate) fn check_place(path: &Path) -> Result<()> {
    if files::is_special(path) {
        let path = path.display();
        return Err(Error::new(format!("`{path}` is no regular file; expected a place for a picture")));
    }
    // A table or a model given by mistake must not be lost.
    let mut start = [0; 4];
    let held = File::open(path).and_then(|mut file| file.read(&mut start)).unwrap_or(0);
    let named =
        path.extension().is_some_and(|name| ["svg", "png"].iter().any(|known| name.eq_ignore_ascii_case(known)));
    if held > 0 && !named && ![b"<svg", b"<?xm", b"\x89PNG"].contains(&&start) {
        let path = path.display();
        return Err(Error::new(format!("`{path}` is there already and is no picture; choose another place")));
    }
    Ok(())
}

/// The picture as the text of an SVG file.
///
/// # Errors
/// When it cannot be drawn.
pub fn svg(title: &str, curves: &[Curve]) -> Result<String> {
    canvas::svg(SIZE, |root| draw(root, title, curves))
}

/// The picture as the bytes of a PNG file, two pixels for every unit of the SVG.
///
/// # Errors
/// When it cannot be drawn.
pub fn png(title: &str, curves: &[Curve]) -> Result<Vec<u8>> {
    canvas::png(SIZE, |root| draw(root, title, curves))
}

fn draw(root: &Area, title: &str, curves: &[Curve]) -> Drawn<()> {
    root.fill(&WHITE)?;
    let (x_range, y_range) = ranges(curves);
    let frame = Frame { title, x: "training tokens", y: Some("loss (nats per token)"), alone: true };
    let (x, y) = ((x_range, Ticks::linear(x_range, true)), (y_range, Ticks::linear(y_range, false)));
    let mut chart = frame.draw(root, &x, &y)?;
    let mut models: Vec<Vec<&Curve>> = Vec::new();
    for curve in curves {
        match models.iter_mut().find(|model| model[0].name == curve.name) {
            Some(model) => model.push(curve),
            None => models.push(vec![curve]),
        }
    }
    for (n, model) in models.iter().enumerate() {
        model.iter().try_for_each(|curve| draw_curve(&mut chart, curve, n, y_range.1))?;
        draw_legend(&mut chart, model, n)?;
    }
    for (n, model) in models.iter().enumerate() {
        model.iter().try_for_each(|curve| draw_validation(&mut chart, curve, n, y_range.1))?;
    }
    if curves.iter().all(|c| c.train.iter().chain(&c.val).all(|p| !p.1.is_finite())) {
        let style = (FONT, 18).into_font().color(&INK).pos(Pos::new(HPos::Center, VPos::Center));
        let middle = ((x_range.0 + x_range.1) / 2.0, (y_range.0 + y_range.1) / 2.0);
        chart.draw_series([Text::new("no finite values to show", middle, style)])?;
    }
    if !curves.is_empty() {
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .margin(12)
            .legend_area_size(34)
            .background_style(WHITE.mix(0.9))
            .border_style(RGBColor(200, 200, 208))
            .label_font((FONT, 15).into_font().color(&INK))
            .draw()?;
    }
    Ok(())
}

fn draw_curve(chart: &mut Chart<'_, '_>, curve: &Curve, n: usize, top: f64) -> Drawn<()> {
    let look = Look::of(n);
    for run in runs(&thinned(curve.train.clone()), top) {
        chart.draw_series(LineSeries::new(run, look.colour.mix(0.22)))?;
    }
    for run in runs(&thinned(smoothed(&curve.train)), top) {
        // A line of one point is invisible.
        if let [only] = run[..] {
            chart.draw_series([Circle::new(only, 2, look.colour.filled())])?;
        }
        chart.draw_series([look.line(run)])?;
    }
    Ok(())
}

/// The line of a model in the legend, with the mean of the last losses of its curves.
fn draw_legend<'a, 'b: 'a>(chart: &mut Chart<'a, 'b>, model: &[&Curve], n: usize) -> Drawn<()> {
    let lasts = |points: &dyn Fn(&Curve) -> Option<f64>| model.iter().filter_map(|c| points(c)).collect::<Vec<_>>();
    let mean = |what: &str, lasts: &[f64]| {
        let seeds = if lasts.len() > 1 { format!(" (mean of {} seeds)", lasts.len()) } else { String::new() };
        format!("{}: {what} {}{seeds}", model[0].name, number(lasts.iter().sum::<f64>() / lasts.len() as f64))
    };
    let val = lasts(&|curve| curve.val.last().map(|p| p.1));
    let train = lasts(&|curve| smoothed(&curve.train).last().map(|p| p.1));
    let label = match (val.is_empty(), train.is_empty()) {
        (false, _) => mean("validation", &val),
        (true, false) => mean("training", &train),
        (true, true) => format!("{}: no points", model[0].name),
    };
    let (look, size) = (Look::of(n), if val.is_empty() { 0 } else { 4 });
    chart.draw_series(std::iter::empty::<Circle<(f64, f64), i32>>())?.label(label).legend(move |(x, y)| {
        let dots = look.dot(size);
        // A filled dot is drawn twice.
        let [under, over] =
            [dots[0], dots[dots.len() - 1]].map(|(r, c)| Circle::new((x + 13, y), r.max(0), c.filled()));
        EmptyElement::at((0, 0)) + look.line(vec![(x, y), (x + 26, y)]) + under + over
    });
    Ok(())
}

fn draw_validation(chart: &mut Chart<'_, '_>, curve: &Curve, n: usize, top: f64) -> Drawn<()> {
    // A white rim keeps points apart that lie on one another.
    let discs: Vec<(i32, RGBColor)> = [(6, WHITE)].into_iter().chain(Look::of(n).dot(5)).collect();
    for p in curve.val.iter().copied().filter(|p| p.1 <= top) {
        chart.draw_series(discs.iter().map(|(r, c)| Circle::new(p, *r, c.filled())))?;
    }
    Ok(())
}

fn number(y: f64) -> String {
    if y.is_finite() { format!("{y:.3}") } else { "not finite".into() }
}

/// Mean over a window of about a twentieth of the points: centred, so that it does not lag behind a falling curve; narrower
/// at the start for the same reason; at the end with what there is. It does not reach over gaps.
fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let reach = points.len() / 40;
    let mut out = Vec::with_capacity(points.len());
    for run in points.chunk_by(|a, b| a.1.is_finite() == b.1.is_finite()) {
        if !run[0].1.is_finite() {
            out.extend_from_slice(run);
            continue;
        }
        let mut sums = vec![0.0];
        for p in run {
            sums.push(sums[sums.len() - 1] + p.1);
        }
        out.extend((0..run.len()).map(|n| {
            let left = reach.min(n);
            let right = left.min(run.len() - 1 - n);
            (run[n].0, (sums[n + right + 1] - sums[n - left]) / (left + right + 1) as f64)
        }));
    }
    out
}

/// At most about 2000 points, keeping all gaps: more cannot be seen and make the file heavy.
fn thinned(points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    let (step, last) = (points.len().div_ceil(2000).max(1), points.len().saturating_sub(1));
    let keep = |(n, p): (usize, (f64, f64))| (n % step == 0 || n == last || !p.1.is_finite()).then_some(p);
    points.into_iter().enumerate().filter_map(keep).collect()
}

/// The stretches of finite points below `top`, cut exactly at the edge.
fn runs(points: &[(f64, f64)], top: f64) -> Vec<Vec<(f64, f64)>> {
    let mut out: Vec<Vec<(f64, f64)>> = vec![vec![]];
    let mut before: Option<(f64, f64)> = None;
    for &(x, y) in points {
        if !y.is_finite() {
            out.push(vec![]);
            before = None;
            continue;
        }
        let crossing = before.filter(|b| (b.1 > top) != (y > top)).map(|b| {
            let share = (top - b.1) / (y - b.1);
            (b.0 + share * (x - b.0), top)
        });
        let run = out.last_mut().expect("starts with one");
        run.extend(crossing);
        if y <= top {
            run.push((x, y));
        } else {
            out.push(vec![]);
        }
        before = Some((x, y));
    }
    out.retain(|run| !run.is_empty());
    out
}

/// Axes that hold all finite points, but for the highest few of the training curves, with room on all sides.
fn ranges(curves: &[Curve]) -> ((f64, f64), (f64, f64)) {
    let finite = |points: &[(f64, f64)]| points.iter().copied().filter(|p| p.1.is_finite()).collect::<Vec<_>>();
    let mut ys = Vec::new();
    let (mut low, mut high, mut first, mut last) = (f64::INFINITY, f64::NEG_INFINITY, f64::INFINITY, f64::NEG_INFINITY);
    for curve in curves {
        let (train, val) = (finite(&smoothed(&curve.train)), finite(&curve.val));
        for (x, y) in train.iter().chain(&val) {
            (first, last, low) = (first.min(*x), last.max(*x), low.min(*y));
        }
        ys.extend(train.iter().map(|p| p.1));
        high = high.max(val.iter().map(|p| p.1).fold(high, f64::max));
    }
    ys.sort_by(f64::total_cmp);
    if let Some(most) = ys.get((ys.len() * 9 / 10).min(ys.len().saturating_sub(1))) {
        high = high.max(*most);
    }
    if !low.is_finite() {
        return ((0.0, 1.0), (0.0, 1.0));
    }
    if first == last {
        (first, last) = (first - 1.0, last + 1.0);
    }
    let room = if high > low { 0.08 * (high - low) } else { low.abs().max(1.0) * 0.1 };
    ((first.min(0.0).max(first - (last - first)), last + 0.02 * (last - first)), (low - room, high + room))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn line(n: usize, y: impl Fn(f64) -> f64) -> Vec<(f64, f64)> {
        (0..n).map(|i| (i as f64 * 1000.0, y(i as f64))).collect()
    }

    fn picture(curves: &[Curve]) -> String {
        let svg = svg("A <title> & more", curves).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.contains("A &lt;title&gt; &amp; more") && svg.contains("training tokens"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        svg
    }

    #[test]
    fn odd_inputs_are_pictures_too() {
        assert!(picture(&[]).contains("no finite values"));
        let curve = |train, val| Curve { name: "tango".into(), train, val };
        assert!(picture(&[curve(vec![], vec![])]).contains("no points"));
        assert!(picture(&[curve(vec![(5.0, 2.0)], vec![])]).contains("training 2.000"));
        assert!(picture(&[curve(vec![], vec![(5.0, 2.0)])]).contains("validation 2.000"));
        picture(&[curve(line(10, |_| 3.0), vec![])]);
        picture(&[curve(line(10, |_| 0.0), vec![])]);
        assert!(picture(&[curve(line(10, |_| f64::NAN), vec![])]).contains("no finite values"));
        picture(&[curve(line(10, |i| if i > 5.0 { f64::INFINITY } else { i }), vec![(1.0, f64::NAN)])]);
        let named = |n: i32| Curve { name: n.to_string(), ..curve(line(3, |i| i + f64::from(n)), vec![(9.0, 2.0)]) };
        picture(&(0..30).map(named).collect::<Vec<_>>());
        let seeds = [1.0, 2.0].map(|y| curve(line(3, |i| i), vec![(1.0, y)]));
        let svg = picture(&seeds);
        assert_eq!((svg.matches("tango:").count(), svg.matches("validation 1.500 (mean of 2 seeds)").count()), (1, 1));
    }

    #[test]
    fn gaps_and_the_top_edge_cut_lines() {
        let points = [(0.0, 1.0), (1.0, f64::NAN), (2.0, 3.0), (3.0, 1.0), (4.0, 9.0)];
        let expected = vec![vec![(0.0, 1.0)], vec![(2.5, 2.0), (3.0, 1.0), (3.125, 2.0)]];
        assert_eq!(runs(&points, 2.0), expected);
        let svg_of = |y: fn(f64) -> f64| picture(&[Curve { name: "a".into(), train: line(9, y), val: vec![] }]);
        let lines = |s: String| s.matches("<polyline").count();
        assert!(lines(svg_of(|i| if i == 4.0 { f64::NAN } else { 1.0 + i })) > lines(svg_of(|i| 1.0 + i)));
    }

    #[test]
    fn smoothing_is_unbiased_and_follows() {
        assert!(smoothed(&line(200, |_| 5.0)).iter().all(|p| (p.1 - 5.0).abs() < 1e-12));
        // A straight fall stays where it is, up to the end's half window.
        let fall = line(400, |i| 10.0 - i);
        assert!(smoothed(&fall)[..390].iter().zip(&fall).all(|(s, p)| (s.1 - p.1).abs() < 1e-9));
        let noisy = smoothed(&line(2000, |i| 2.0 + if i % 2.0 == 0.0 { 1.0 } else { -1.0 }));
        assert!(noisy[100..].iter().all(|p| (p.1 - 2.0).abs() < 0.05));
        assert_eq!(smoothed(&[(0.0, 1.0), (1.0, f64::NAN), (2.0, 7.0)])[2].1, 7.0);
    }

    #[test]
    fn long_runs_make_small_files_and_keep_gaps() {
        let many = thinned(line(1_000_000, |i| if i == 1001.0 { f64::NAN } else { 1.0 }));
        assert!(many.len() <= 2002 && many.iter().any(|p| p.1.is_nan()));
        assert_eq!(many[many.len() - 1].0, 999_999_000.0);
        assert_eq!(thinned(line(2000, |i| i)), line(2000, |i| i));
    }

    #[test]
    fn records_become_one_curve_a_model() {
        let record = |model: &str, tokens, val_loss| Record {
            model: Some(model.into()),
            corpus: None,
            seed: None,
            step: 1,
            loss: 2.5,
            lr: 0.0,
            grad_norm: 0.0,
            tokens,
            tok_s: 0.0,
            val_loss,
        };
        let curves = Curve::from_records(&[record("a", 10, None), record("b", 10, None), record("a", 20, Some(1.5))]);
        assert_eq!(curves.len(), 2);
        assert_eq!((curves[0].train.len(), curves[0].val.clone()), (2, vec![(20.0, 1.5)]));
        let seed = |seed| Record { seed: Some(seed), ..record("a", 10, None) };
        assert_eq!(Curve::from_records(&[seed(0), seed(1), seed(0)]).len(), 2);
        let dir = Scratch::new();
        let path = dir.path().join("curves.svg");
        write(&path, "t", &curves).unwrap();
        assert!(std::fs::read_to_string(&path).unwrap().contains("validation 1.500"));
        assert!(write(dir.path().join("no/curves.svg"), "t", &curves).unwrap_err().to_string().contains("curves.svg"));
    }
}
