//! Comparison of integers, fractions and decimals: pairs, sorting, the k-th largest, the nearest.

use super::draw::{Draw, Level};
use super::ratio::Ratio;
use super::{Module, Pair};

pub(super) const MODULES: &[Module] = &[
    Module { name: "comparison__closest", make: closest },
    Module { name: "comparison__kth_biggest", make: kth_biggest },
    Module { name: "comparison__pair", make: pair },
    Module { name: "comparison__sort", make: sort },
];

/// A number and one of the ways to write it.
fn value(draw: &mut Draw, level: Level) -> (String, Ratio) {
    let most = level.of(2, 4, 7);
    let n = if draw.below(8) == 0 { 0 } else { draw.signed(1, most) };
    match draw.below(4) {
        0 => {
            let v = Ratio::new(n, draw.int(2, level.of(9, 99, 999)));
            (v.to_string(), v)
        }
        1 => {
            let v = Ratio::new(n, 10i128.pow(draw.int(1, most.into()) as u32));
            (v.decimal().expect("a power of ten"), v)
        }
        _ => (n.to_string(), n.into()),
    }
}

fn values(draw: &mut Draw, level: Level, count: usize) -> Vec<(String, Ratio)> {
    let mut out: Vec<(String, Ratio)> = Vec::new();
    while out.len() < count {
        let v = value(draw, level);
        if out.iter().all(|o| o.1 != v.1) {
            out.push(v);
        }
    }
    out
}

fn list(of: &[(String, Ratio)]) -> String {
    of.iter().map(|v| v.0.as_str()).collect::<Vec<_>>().join(", ")
}

/// Asks for one of several values, as a list or with lettered choices.
fn choose(draw: &mut Draw, what: &str, from: &[(String, Ratio)], right: usize) -> Pair {
    if draw.coin() {
        return Pair { question: format!("Of {}, which is {what}?", list(from)), answer: from[right].0.clone() };
    }
    let letter = |n: usize| (b'a' + n as u8) as char;
    let choices: Vec<String> = from.iter().enumerate().map(|(n, v)| format!("({}) {}", letter(n), v.0)).collect();
    Pair { question: format!("Choose {what}:  {}", choices.join("  ")), answer: letter(right).to_string() }
}

fn pair(draw: &mut Draw, level: Level) -> Pair {
    let (a_text, a) = value(draw, level);
    // Neighbours, now and then: far numbers are too easy.
    let (b_text, b) = match draw.below(3) {
        0 if a.is_integer() => {
            let b = a + Ratio::from(draw.int(-2, 2));
            (b.to_string(), b)
        }
        _ => value(draw, level),
    };
    if a != b && draw.below(3) == 0 {
        let (word, first) = if draw.coin() { ("larger", a > b) } else { ("smaller", a < b) };
        let answer = if first { &a_text } else { &b_text };
        return Pair { question: format!("Which one is {word}, {a_text} or {b_text}?"), answer: answer.clone() };
    }
    let (relation, holds) = match draw.below(6) {
        0 => ("above", a > b),
        1 => ("below", a < b),
        2 => ("no less than", a >= b),
        3 => ("no more than", a <= b),
        4 => ("equal to", a == b),
        _ => ("different from", a != b),
    };
    let answer = if holds { "True" } else { "False" };
    Pair { question: format!("Is {a_text} {relation} {b_text}?"), answer: answer.into() }
}

fn kth_biggest(draw: &mut Draw, level: Level) -> Pair {
    let count = draw.int(3, level.of(4, 6, 9)) as usize;
    let from = values(draw, level, count);
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|&n| from[n].1);
    let k = draw.below(count);
    let place = ["", "second ", "third ", "fourth ", "fifth ", "sixth ", "seventh ", "eighth ", "ninth "][k];
    let (word, right) = if draw.coin() { ("largest", order[count - 1 - k]) } else { ("smallest", order[k]) };
    choose(draw, &format!("the {place}{word}"), &from, right)
}

fn closest(draw: &mut Draw, level: Level) -> Pair {
    loop {
        let (target_text, target) = value(draw, level);
        let count = draw.int(3, level.of(4, 6, 8)) as usize;
        let from = values(draw, level, count);
        let mut order: Vec<usize> = (0..count).collect();
        let distance = |n: usize| (from[n].1 - target).abs();
        order.sort_by_key(|&n| distance(n));
        // Two equally near ones have no right answer.
        if distance(order[0]) != distance(order[1]) {
            return choose(draw, &format!("the one nearest {target_text}"), &from, order[0]);
        }
    }
}

fn sort(draw: &mut Draw, level: Level) -> Pair {
    let count = draw.int(3, level.of(4, 6, 9)) as usize;
    let mut all = values(draw, level, count);
    let given = list(&all);
    all.sort_by_key(|v| v.1);
    let (word, reverse) = if draw.coin() { ("rising", false) } else { ("falling", true) };
    if reverse {
        all.reverse();
    }
    let question = match draw.coin() {
        true => format!("Arrange in {word} order: {given}."),
        false => format!("List {given} in {word} order."),
    };
    Pair { question, answer: list(&all) }
}

#[cfg(test)]
mod tests {
    use super::super::check::{each, number};
    use super::Ratio;

    /// What a question offers, and which of it the answer means.
    fn offered(q: &str, a: &str) -> (Vec<Ratio>, Ratio) {
        if let Some((_, rest)) = q.split_once(":  ") {
            let all: Vec<Ratio> = rest.split("  ").map(|c| number(&c[4..])).collect();
            let right = all[usize::from(a.as_bytes()[0] - b'a')];
            return (all, right);
        }
        let inside = q.trim_start_matches("Of ").split(", which").next().unwrap();
        (inside.split(", ").map(number).collect(), number(a))
    }

    #[test]
    fn pairs_by_floating_point() {
        each("comparison__pair", |q, a, _| {
            let numbers: Vec<Ratio> =
                q.split([' ', ',', '?']).filter(|w| w.ends_with(|c: char| c.is_ascii_digit())).map(number).collect();
            let f = |r: Ratio| r.num as f64 / r.den as f64;
            let (x, y) = (f(numbers[0]), f(numbers[1]));
            if let Some(word) = ["larger", "smaller"].iter().find(|w| q.contains(*w)) {
                let expected = if *word == "larger" { x.max(y) } else { x.min(y) };
                assert_eq!(f(number(a)), expected, "{q} {a}");
                return;
            }
            let holds = match q {
                _ if q.contains("above") => x > y,
                _ if q.contains("below") => x < y,
                _ if q.contains("no less") => x >= y,
                _ if q.contains("no more") => x <= y,
                _ if q.contains("equal") => x == y,
                _ => x != y,
            };
            assert_eq!(a == "True", holds, "{q} {a}");
            assert!(a == "True" || a == "False");
        });
    }

    #[test]
    fn ranks_by_counting() {
        let names = ["second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth"];
        each("comparison__kth_biggest", |q, a, _| {
            let (all, right) = offered(q, a);
            let k = names.iter().position(|n| q.contains(&format!("{n} "))).map_or(0, |n| n + 1);
            let before = match q.contains("largest") {
                true => all.iter().filter(|v| **v > right).count(),
                false => all.iter().filter(|v| **v < right).count(),
            };
            assert_eq!(before, k, "{q} {a}");
        });
    }

    #[test]
    fn nothing_is_nearer_than_the_nearest() {
        each("comparison__closest", |q, a, _| {
            let (all, right) = offered(q, a);
            let target = number(q.split("nearest ").nth(1).unwrap().split([':', '?']).next().unwrap());
            let nearer = all.iter().filter(|v| **v != right && (**v - target).abs() <= (right - target).abs());
            assert_eq!((nearer.count(), all.contains(&right)), (0, true), "{q} {a}");
        });
    }

    #[test]
    fn sorted_lists_are_the_same_numbers_in_order() {
        each("comparison__sort", |q, a, _| {
            let given = q.split("List ").last().unwrap().split(": ").last().unwrap();
            let given = given.split(" in ").next().unwrap().trim_end_matches('.');
            let mut given: Vec<Ratio> = given.split(", ").map(number).collect();
            let sorted: Vec<Ratio> = a.split(", ").map(number).collect();
            let rising = q.contains("rising");
            assert!(sorted.is_sorted_by(|a, b| if rising { a < b } else { a > b }), "{q} {a}");
            given.retain(|v| !sorted.contains(v));
            assert!(given.is_empty(), "{q} {a}");
        });
    }
}
