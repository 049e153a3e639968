//! Axes of pictures: where their ticks are and what is written there.
//!
//! A tick's label has the digits that its distance to the next one needs, and all labels of a linear axis have the same unit
//! and as many digits.

use std::ops::Range;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use crate::canvas::{Area, Canvas, Drawn};
use crate::looks::{FONT, INK};

/// The most ticks of a logarithmic axis that have room.
const MOST: usize = 12;

/// Ticks: coordinates and labels.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Ticks(Vec<(f64, String)>);

impl Ticks {
    /// Of a linear axis, at multiples of 1, 2 or 5 times a power of ten; of a `whole` one at whole numbers only.
    pub fn linear((low, high): (f64, f64), whole: bool) -> Ticks {
        let rough = (high - low) / 6.0;
        let power = 10f64.powf(rough.log10().floor());
        let round = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|&s| s >= rough).unwrap_or(power);
        let step = if whole { round.max(1.0) } else { round };
        let at = (0..20).map(|i| ((low / step).ceil() + f64::from(i)) * step);
        let at: Vec<f64> = at.take_while(|&x| x <= high).collect();
        let most = at.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        Ticks(at.into_iter().map(|x| (x, written(x, step, most))).collect())
    }

    /// Of an axis of logarithms, at 1, 2 and 5 times powers of ten; where these are too few, at all multiples of powers of
    /// ten, or at round numbers.
    pub fn log((low, high): (f64, f64)) -> Ticks {
        let at = |multiples: &[f64], every: i32| -> Vec<(f64, String)> {
            let powers = (low.floor() as i32..=high.ceil() as i32).filter(|e| e.rem_euclid(every) == 0);
            let all = powers.flat_map(|e| multiples.iter().map(move |m| (f64::from(e) + m.log10(), f64::from(e), m)));
            let inside = all.filter(|(y, ..)| (low..=high).contains(y));
            inside.map(|(y, e, m)| (y, written(m * 10f64.powf(e), 10f64.powf(e), m * 10f64.powf(e)))).collect()
        };
        let mut ticks = at(&[1.0, 2.0, 5.0], 1);
        if ticks.len() < 3 {
            ticks = at(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], 1);
        }
        if ticks.len() < 3 {
            let round = Ticks::linear((10f64.powf(low), 10f64.powf(high)), false).0;
            return Ticks(round.into_iter().filter(|(y, _)| *y > 0.0).map(|(y, label)| (y.log10(), label)).collect());
        }
        if ticks.len() <= MOST {
            return Ticks(ticks);
        }
        Ticks((1..).map(|every| at(&[1.0], every)).find(|ticks| ticks.len() <= MOST).unwrap_or_default())
    }

    /// Of an axis of logarithms, at sizes, as far as they have room on an axis of this length.
    pub fn sizes(mut logs: Vec<f64>, length: f64) -> Ticks {
        logs.sort_by(f64::total_cmp);
        let mut before = f64::NEG_INFINITY;
        logs.retain(|&x| {
            let keep = x - before >= 0.08 * length;
            before = if keep { x } else { before };
            keep
        });
        Ticks(logs.into_iter().map(|x| (x, size(10f64.powf(x)))).collect())
    }

    /// What is written at a tick.
    pub fn label(&self, at: f64) -> String {
        self.0.iter().find(|tick| tick.0 == at).map_or(String::new(), |tick| tick.1.clone())
    }

    /// The labels in order.
    #[cfg(test)]
    pub fn labels(&self) -> Vec<&str> {
        self.0.iter().map(|tick| tick.1.as_str()).collect()
    }
}

/// `value` to the digit of `step`, in the unit that suits the largest value of the axis.
fn written(value: f64, step: f64, most: f64) -> String {
    // Steps are 1, 2 or 5 times a power of ten, but for rounding.
    let place = |x: f64| (x.abs().log10() + 1e-9).floor() as i32;
    let digits = |power: i32| power.saturating_sub(place(step)).clamp(0, 17) as usize;
    if value == 0.0 {
        return "0".to_owned();
    }
    if !(1e-3..1e12).contains(&most) {
        return format!("{value:.0$e}", digits(place(value)));
    }
    let (power, unit) = match place(most) {
        9.. => (9, "G"),
        6.. => (6, "M"),
        3.. => (3, "k"),
        _ => (0, ""),
    };
    format!("{:.2$}{}", value / 10f64.powi(power), unit, digits(power))
}

/// A positive number in few digits: `37k`, `1.2M`.
pub(crate) fn short(x: f64) -> String {
    written(x, 10f64.powf(x.log10().floor() - 1.0), x)
}

/// A size as people write it: `16384`.
fn size(x: f64) -> String {
    if (1.0..1e6).contains(&x) { format!("{x:.0}") } else { significant(x, 3) }
}

/// `x` with so many digits that count: `0.0123`, `1.50e-5`.
pub(crate) fn significant(x: f64, digits: usize) -> String {
    let place = if x == 0.0 { 0 } else { x.abs().log10().floor() as i32 };
    let after = digits.saturating_sub(1);
    if !(-4..6).contains(&place) {
        return format!("{x:.after$e}");
    }
    format!("{x:.0$}", (after as i32 - place).max(0) as usize)
}

/// An axis with ticks of our choice.
pub(crate) struct Axis {
    line: RangedCoordf64,
    ticks: Vec<f64>,
}

impl Axis {
    pub fn new((from, to): (f64, f64), ticks: &Ticks) -> Axis {
        Axis { line: (from..to).into(), ticks: ticks.0.iter().map(|tick| tick.0).collect() }
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

/// Where a chart is drawn, once its axes are.
pub(crate) type Chart<'a, 'b> = ChartContext<'a, Canvas<'b>, Cartesian2d<Axis, Axis>>;

/// What is written around a chart.
pub(crate) struct Frame<'a> {
    pub title: &'a str,
    pub x: &'a str,
    /// Left out where the title says it.
    pub y: Option<&'a str>,
    /// Whether the chart is a picture of its own, not one of several panels.
    pub alone: bool,
}

impl Frame<'_> {
    /// Draws title, axes and grid.
    pub fn draw<'a, 'b>(
        &self,
        area: &'a Area<'b>,
        (x_range, x_ticks): &((f64, f64), Ticks),
        (y_range, y_ticks): &((f64, f64), Ticks),
    ) -> Drawn<Chart<'a, 'b>> {
        let text = |size: i32| (FONT, size).into_font().color(&INK);
        let [title, axis, label, margin, below, left] =
            if self.alone { [24, 16, 14, 18, 52, 66] } else { [17, 15, 13, 12, 46, 64] };
        let mut chart = ChartBuilder::on(area)
            .caption(self.title, text(title))
            .margin(margin)
            .x_label_area_size(below)
            .y_label_area_size(left)
            .build_cartesian_2d(Axis::new(*x_range, x_ticks), Axis::new(*y_range, y_ticks))?;
        chart
            .configure_mesh()
            .bold_line_style(RGBColor(222, 222, 228))
            .light_line_style(TRANSPARENT)
            .axis_style(INK)
            .x_desc(self.x)
            .y_desc(self.y.unwrap_or_default())
            .axis_desc_style(text(axis))
            .label_style(text(label))
            .x_label_formatter(&|x| x_ticks.label(*x))
            .y_label_formatter(&|y| y_ticks.label(*y))
            .draw()?;
        Ok(chart)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_round_and_differ() {
        let linear = |low, high| Ticks::linear((low, high), false);
        assert_eq!(linear(-0.3, 10.8).labels(), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(linear(-1.0, 1.2).labels(), ["-1.0", "-0.5", "0", "0.5", "1.0"]);
        assert_eq!(linear(5.5335, 5.5405).labels(), ["5.534", "5.536", "5.538", "5.540"]);
        assert_eq!(linear(0.0, 2100.0).labels(), ["0", "0.5k", "1.0k", "1.5k", "2.0k"]);
        assert_eq!(linear(1e6, 1.004e6).labels(), ["1.000M", "1.001M", "1.002M", "1.003M", "1.004M"]);
        assert_eq!(linear(0.0, 2.1e-5).labels(), ["0", "5e-6", "1.0e-5", "1.5e-5", "2.0e-5"]);
        for exponent in -12..15 {
            for (low, span) in [(0.3, 1.0), (1.4499, 1e-5), (-7.0, 1e-3), (99.9, 0.4)] {
                let (low, span) = (low * 10f64.powi(exponent), span * 10f64.powi(exponent));
                let ticks = linear(low, low + span);
                let labels = ticks.labels();
                assert!((3..=8).contains(&labels.len()), "{labels:?}");
                assert!((1..labels.len()).all(|n| !labels[..n].contains(&labels[n])), "{labels:?}");
                assert!(labels.iter().all(|label| !label.ends_with('.')), "{labels:?}");
            }
        }
    }

    #[test]
    fn whole_axes_have_whole_ticks() {
        for (low, high, labels) in
            [(-0.1, 2.1, &["0", "1", "2"][..]), (0.5, 1.5, &["1"]), (0.0, 12.0, &["0", "2", "4", "6", "8", "10", "12"])]
        {
            assert_eq!(Ticks::linear((low, high), true).labels(), labels);
        }
    }

    #[test]
    fn axes_of_logarithms_have_some_ticks_and_not_too_many() {
        let log = |low: f64, high: f64| Ticks::log((low.log10(), high.log10()));
        assert_eq!(log(0.9, 120.0).labels(), ["1", "2", "5", "10", "20", "50", "100"]);
        assert_eq!(log(1.9e-5, 6e-5).labels(), ["2e-5", "3e-5", "4e-5", "5e-5", "6e-5"]);
        assert_eq!(log(0.21, 1.4).labels(), ["0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "1"]);
        assert_eq!(log(1.03, 2.1).labels(), ["1.2", "1.4", "1.6", "1.8", "2.0"]);
        assert_eq!(log(0.9, 1.1e9).labels(), ["1", "10", "100", "1k", "10k", "100k", "1M", "10M", "100M", "1G"]);
        assert!(log(1e-200, 1e200).labels().len() > 3);
        assert_eq!(Ticks::sizes([16_384f64, 64.0, 65.0, 64.0].map(f64::log10).into(), 3.0).labels(), ["64", "16384"]);
    }

    #[test]
    fn digits_that_count() {
        assert_eq!([37_056.0, 296_448.0, 1_181_184.0, 1.6e7, 12.0].map(short), ["37k", "296k", "1.2M", "16M", "12"]);
        assert_eq!([0.2, 0.01234, 12.345, 1234.5].map(|x| significant(x, 3)), ["0.200", "0.0123", "12.3", "1234"]);
        assert_eq!([0.0, 1.5e-6, 2e7].map(|x| significant(x, 3)), ["0.00", "1.50e-6", "2.00e7"]);
    }
}
