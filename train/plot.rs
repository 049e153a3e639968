//! `curves.svg`: loss against training tokens for one or several models.
//!
//! The measured loss is drawn faintly, its smoothed course strongly on top, validation as points joined by a thin line.
//! Values that are not finite leave gaps. The first drop from the untrained loss would flatten everything else, so the
//! axis ends a little above where most of the curve runs; what is higher leaves the picture at the top edge. Colours
//! are those of Okabe and Ito, told apart by all kinds of colour vision. Text stays text in the file.

use crate::log::Record;
use crate::{Error, Result};
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::path::Path;

/// The points of one model; x in training tokens, y in nats a token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve {
    /// Its name in the legend.
    pub name: String,
    /// Training losses, x ascending.
    pub train: Vec<(f64, f64)>,
    /// Validation losses, x ascending.
    pub val: Vec<(f64, f64)>,
}

impl Curve {
    /// One curve for each model of a log, in order of appearance; records without a model are called `loss`.
    pub fn from_records(records: &[Record]) -> Vec<Curve> {
        let mut curves: Vec<Curve> = Vec::new();
        for record in records {
            let name = record.model.as_deref().unwrap_or("loss");
            let at = curves.iter().position(|c| c.name == name).unwrap_or_else(|| {
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
const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(40, 40, 48);
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(0, 0, 0),
];

/// Writes the picture to `path`, replacing what was there. Any number of curves and points, none included.
pub fn write(path: impl AsRef<Path>, title: &str, curves: &[Curve]) -> Result<()> {
    let path = path.as_ref();
    std::fs::write(path, svg(title, curves)?).map_err(|e| Error::io("write the picture", path, e))
}

/// The picture as the text of an SVG file.
pub fn svg(title: &str, curves: &[Curve]) -> Result<String> {
    let mut out = String::new();
    let root = SVGBackend::with_string(&mut out, SIZE).into_drawing_area();
    draw(&root, title, curves).map_err(|e| Error::new(format!("cannot draw the curves: {e}")))?;
    drop(root);
    Ok(out)
}

type Drawn<T> = std::result::Result<T, Box<dyn std::error::Error>>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

fn draw(root: &DrawingArea<SVGBackend<'_>, Shift>, title: &str, curves: &[Curve]) -> Drawn<()> {
    root.fill(&WHITE)?;
    let (x_range, y_range) = ranges(curves);
    let mut chart = ChartBuilder::on(root)
        .caption(title, (FONT, 24).into_font().color(&INK))
        .margin(18)
        .x_label_area_size(52)
        .y_label_area_size(66)
        .build_cartesian_2d(x_range.0..x_range.1, y_range.0..y_range.1)?;
    chart
        .configure_mesh()
        .bold_line_style(RGBColor(222, 222, 228))
        .light_line_style(TRANSPARENT)
        .axis_style(INK)
        .x_desc("training tokens")
        .y_desc("loss (nats per token)")
        .axis_desc_style((FONT, 16).into_font().color(&INK))
        .label_style((FONT, 14).into_font().color(&INK))
        .x_labels(8)
        .y_labels(8)
        .x_label_formatter(&|x| short(*x))
        .y_label_formatter(&|y| level(*y, y_range.1 - y_range.0))
        .draw()?;
    for (n, curve) in curves.iter().enumerate() {
        draw_curve(&mut chart, curve, n, y_range.1)?;
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
    root.present()?;
    Ok(())
}

fn draw_curve<'a, 'b: 'a>(chart: &mut Chart<'a, 'b>, curve: &Curve, n: usize, top: f64) -> Drawn<()> {
    let colour = COLOURS[n % COLOURS.len()];
    // The eighth curve has the first's colour, and no filling of its points.
    let again = n >= COLOURS.len();
    let strong = colour.stroke_width(if again { 1 } else { 2 });
    for run in runs(&curve.train, top) {
        chart.draw_series(LineSeries::new(run, colour.mix(0.22)))?;
    }
    let smooth = smoothed(&curve.train);
    for run in runs(&smooth, top) {
        // A line of one point is invisible.
        if let [only] = run[..] {
            chart.draw_series([Circle::new(only, 2, colour.filled())])?;
        }
        chart.draw_series(LineSeries::new(run, strong))?;
    }
    for run in runs(&curve.val, top) {
        chart.draw_series(LineSeries::new(run.clone(), colour.mix(0.6)))?;
        let inside = run.into_iter().filter(|p| p.1 < top);
        let fill = if again { WHITE.filled() } else { colour.filled() };
        for p in inside {
            chart.draw_series([Circle::new(p, 5, WHITE.filled()), Circle::new(p, 4, fill)])?;
            chart.draw_series([Circle::new(p, 4, colour.stroke_width(1))])?;
        }
    }
    let last = |points: &[(f64, f64)]| points.last().map(|p| p.1);
    let label = match (last(&curve.val), last(&smooth)) {
        (Some(v), _) => format!("{}   validation {}", curve.name, number(v)),
        (None, Some(t)) => format!("{}   training {}", curve.name, number(t)),
        (None, None) => format!("{}   no points", curve.name),
    };
    let has_val = !curve.val.is_empty();
    chart.draw_series(std::iter::empty::<Circle<(f64, f64), i32>>())?.label(label).legend(move |(x, y)| {
        let line = PathElement::new(vec![(x, y), (x + 26, y)], strong);
        let size = if has_val { 4 } else { 0 };
        EmptyElement::at((0, 0)) + line + Circle::new((x + 13, y), size, colour.filled())
    });
    Ok(())
}

fn number(y: f64) -> String {
    if y.is_finite() { format!("{y:.3}") } else { "not finite".into() }
}

/// `1500` as `1.5k`, `2000000` as `2M`.
fn short(x: f64) -> String {
    let (scale, unit) = match x.abs() {
        a if a >= 1e9 => (1e9, "G"),
        a if a >= 1e6 => (1e6, "M"),
        a if a >= 1e3 => (1e3, "k"),
        _ => (1.0, ""),
    };
    let digits = format!("{:.2}", x / scale);
    format!("{}{unit}", digits.trim_end_matches('0').trim_end_matches('.'))
}

/// A tick's value with the digits that its distance to the next one needs.
fn level(y: f64, span: f64) -> String {
    let digits = (1.0 - (span / 8.0).log10().floor()).clamp(1.0, 6.0) as usize;
    format!("{y:.digits$}")
}

/// Exponential moving average over about a fiftieth of the points, started anew after a gap.
fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let keep = 1.0 - 2.0 / (points.len() as f64 / 50.0 + 2.0);
    // Weighted sum and sum of weights: unbiased from the first point on.
    let (mut sum, mut weight) = (0.0, 0.0);
    points
        .iter()
        .map(|&(x, y)| {
            if !y.is_finite() {
                (sum, weight) = (0.0, 0.0);
                return (x, y);
            }
            sum = keep * sum + y;
            weight = keep * weight + 1.0;
            (x, sum / weight)
        })
        .collect()
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
    if let Some(most) = ys.get((ys.len() * 19 / 20).min(ys.len().saturating_sub(1))) {
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
        picture(&(0..9).map(|n| curve(line(3, |i| i + f64::from(n)), vec![])).collect::<Vec<_>>());
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
        let noisy = smoothed(&line(2000, |i| 2.0 + if i % 2.0 == 0.0 { 1.0 } else { -1.0 }));
        assert!(noisy[1000..].iter().all(|p| (p.1 - 2.0).abs() < 0.1));
        assert_eq!(smoothed(&[(0.0, 1.0), (1.0, f64::NAN), (2.0, 7.0)])[2].1, 7.0);
    }

    #[test]
    fn records_become_one_curve_a_model() {
        let record = |model: &str, tokens, val_loss| Record {
            model: Some(model.into()),
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
        let dir = Scratch::new();
        let path = dir.path().join("curves.svg");
        write(&path, "t", &curves).unwrap();
        assert!(std::fs::read_to_string(&path).unwrap().contains("validation 1.500"));
        assert!(write(dir.path().join("no/curves.svg"), "t", &curves).unwrap_err().to_string().contains("curves.svg"));
    }

    #[test]
    fn tick_labels() {
        assert_eq!([0.0, 500.0, 1500.0, 2e6, 1.25e9].map(short), ["0", "500", "1.5k", "2M", "1.25G"]);
        assert_eq!((level(2.5, 4.0), level(2.501, 0.01)), ("2.50".into(), "2.5010".into()));
    }

    #[test]
    fn show() {
        let mut state = 1u64;
        let mut noise = || {
            state = crate::mix::mix(state);
            (state >> 11) as f64 / (1u64 << 53) as f64 - 0.5
        };
        let mut curve = |name: &str, floor: f64, speed: f64| {
            let y = |i: f64| floor + (5.55 - floor) * (-i / speed).exp() + 0.4 * (-i / 150.0).exp();
            let train = (1..=250).map(|i| (f64::from(i) * 4096.0, y(f64::from(i)) + 0.18 * noise())).collect();
            let val = (1..=5).map(|i| (f64::from(i) * 50.0 * 4096.0, y(f64::from(i) * 50.0) + 0.02)).collect();
            Curve { name: name.into(), train, val }
        };
        let curves = [
            curve("tango", 1.85, 22.0),
            curve("wango", 1.80, 23.0),
            curve("recurrent", 2.12, 18.0),
            curve("untied", 2.05, 18.0),
            curve("gau", 2.02, 20.0),
            curve("flash", 2.0, 24.0),
        ];
        write("/tmp/show.svg", "Validation loss, preset tiny", &curves).unwrap();
        write("/tmp/show1.svg", "One model", &curves[..2]).unwrap();
        write("/tmp/show0.svg", "None", &[]).unwrap();
    }
}
