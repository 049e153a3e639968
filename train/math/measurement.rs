//! Measurement: units of length, mass, volume and time; times of day.

use super::draw::{Draw, Level};
use super::ratio::Ratio;
use super::{Module, Pair};

pub(super) const MODULES: &[Module] =
    &[Module { name: "measurement__conversion", make: conversion }, Module { name: "measurement__time", make: time }];

/// A unit's name and its size in the smallest unit of its kind.
type Unit = (&'static str, i128);

const KINDS: [&[Unit]; 4] = [
    &[
        ("nanometers", 1),
        ("micrometers", 1_000),
        ("millimeters", 1_000_000),
        ("centimeters", 10_000_000),
        ("meters", 1_000_000_000),
        ("kilometers", 1_000_000_000_000),
    ],
    &[
        ("nanograms", 1),
        ("micrograms", 1_000),
        ("milligrams", 1_000_000),
        ("grams", 1_000_000_000),
        ("kilograms", 1_000_000_000_000),
        ("tonnes", 1_000_000_000_000_000),
    ],
    &[("microliters", 1), ("milliliters", 1_000), ("centiliters", 10_000), ("liters", 1_000_000)],
    &[
        ("milliseconds", 1),
        ("seconds", 1_000),
        ("minutes", 60_000),
        ("hours", 3_600_000),
        ("days", 86_400_000),
        ("weeks", 604_800_000),
    ],
];

fn conversion(draw: &mut Draw, level: Level) -> Pair {
    loop {
        let kind = *draw.pick(&KINDS);
        let (from, to) = (*draw.pick(kind), *draw.pick(kind));
        let value = match draw.below(3) {
            0 => Ratio::new(draw.digits(1, 2), draw.int(2, level.of(6, 12, 40))),
            1 => draw.digits(1, level.of(3, 5, 7)).into(),
            _ => Ratio::new(draw.digits(1, level.of(3, 5, 7)), 10i128.pow(draw.int(1, level.of(2, 4, 6)) as u32)),
        };
        let result = value * Ratio::new(from.1, to.1);
        let written = |r: Ratio| r.decimal().filter(|t| t.len() <= 24);
        // Only what ends as a decimal, and not a unit into itself.
        if let (true, Some(answer)) = (from != to, written(result)) {
            let fraction = value.den > 1 && draw.coin();
            let amount = if fraction { value.to_string() } else { written(value).unwrap_or(value.to_string()) };
            let question = match draw.coin() {
                true => format!("Express {amount} {} in {}.", from.0, to.0),
                false => format!("{amount} {} make how many {}?", from.0, to.0),
            };
            return Pair { question, answer };
        }
    }
}

/// Minutes after midnight as `H:MM AM`.
fn clock(minutes: i128) -> String {
    let (hour, minute) = (minutes / 60 % 24, minutes % 60);
    let half = if hour < 12 { "AM" } else { "PM" };
    format!("{}:{minute:02} {half}", if hour % 12 == 0 { 12 } else { hour % 12 })
}

fn time(draw: &mut Draw, level: Level) -> Pair {
    let start = draw.int(0, 1439);
    let span = draw.int(1, level.of(120, 600, 1439));
    let end = (start + span) % 1440;
    let (question, answer) = match draw.below(3) {
        0 => (format!("It is {}. What time will it be {span} minutes later?", clock(start)), clock(end)),
        1 => (format!("It is {}. What time was it {span} minutes ago?", clock(end)), clock(start)),
        _ => (format!("From {} until {} is how many minutes?", clock(start), clock(end)), span.to_string()),
    };
    Pair { question, answer }
}

#[cfg(test)]
mod tests {
    use super::super::check::{each, number};
    use super::*;

    /// A unit's exponent of ten (or seconds), from its name alone.
    fn size(unit: &str) -> f64 {
        let prefix = |p: &str| match p {
            "nano" => 1e-9,
            "micro" => 1e-6,
            "milli" => 1e-3,
            "centi" => 1e-2,
            "kilo" => 1e3,
            "" => 1.0,
            p => panic!("{p}"),
        };
        match unit {
            "tonnes" => 1e6,
            "minutes" => 60.0,
            "hours" => 3600.0,
            "days" => 86_400.0,
            "weeks" => 7.0 * 86_400.0,
            _ => {
                let root = ["meters", "grams", "liters", "seconds"].iter().find(|r| unit.ends_with(*r)).unwrap();
                prefix(&unit[..unit.len() - root.len()])
            }
        }
    }

    #[test]
    fn conversions_by_prefix() {
        each("measurement__conversion", |q, a, _| {
            let text = q.trim_start_matches("Express ").trim_end_matches(['.', '?']);
            let words: Vec<&str> = text.split(' ').collect();
            let (amount, from, to) = (number(words[0]), words[1], words[words.len() - 1]);
            let f = |r: Ratio| r.num as f64 / r.den as f64;
            let expected = f(amount) * size(from) / size(to);
            assert!((f(number(a)) / expected - 1.0).abs() < 1e-12, "{q} {a} {expected}");
        });
    }

    #[test]
    fn times_by_walking_the_clock() {
        // One minute at a time over the face of the clock.
        fn tick(time: &str) -> String {
            let (hm, half) = time.split_once(' ').unwrap();
            let (h, m) = hm.split_once(':').unwrap();
            let (h, m): (u32, u32) = (h.parse().unwrap(), m.parse().unwrap());
            if m < 59 {
                return format!("{h}:{:02} {half}", m + 1);
            }
            let half = if h == 11 { if half == "AM" { "PM" } else { "AM" } } else { half };
            format!("{}:00 {half}", h % 12 + 1)
        }
        let walk = |from: &str, n: usize| (0..n).fold(from.to_owned(), |t, _| tick(&t));
        each("measurement__time", |q, a, _| {
            let words: Vec<&str> = q.split([' ', '.', '?']).collect();
            let at = |n: usize| format!("{} {}", words[n], words[n + 1]);
            if q.starts_with("From") {
                assert_eq!(walk(&at(1), a.parse().unwrap()), at(4), "{q} {a}");
                assert!(a.parse::<u32>().unwrap() < 1440);
                return;
            }
            let span = q.split(" minutes").next().unwrap().rsplit(' ').next().unwrap().parse().unwrap();
            match q.contains("later") {
                true => assert_eq!(walk(&at(2), span), a, "{q}"),
                false => assert_eq!(walk(a, span), at(2), "{q}"),
            }
        });
    }
}
