//! Probability: letters drawn from a bag without putting them back.
//!
//! Letters of bags are consonants without `y`, so that the split's hash can tell them from wording.

use super::draw::{Draw, Level};
use super::ratio::Ratio;
use super::{Module, Pair};

pub(super) const MODULES: &[Module] = &[
    Module { name: "probability__swr_p_level_set", make: level_set },
    Module { name: "probability__swr_p_sequence", make: sequence },
];

struct Bag {
    /// Letters and how many of each.
    counts: Vec<(char, i128)>,
    text: String,
}

fn bag(draw: &mut Draw, level: Level, at_least: usize) -> Bag {
    let mut letters: Vec<char> = "bcdfghjkmnpqrstvwxz".chars().collect();
    draw.shuffle(&mut letters);
    let kinds = draw.int(2, level.of(3, 4, 6)) as usize;
    let most = level.of(4, 6, 8);
    let mut counts: Vec<(char, i128)> = letters[..kinds].iter().map(|&c| (c, draw.int(1, most))).collect();
    while counts.iter().map(|c| c.1).sum::<i128>() < at_least as i128 {
        let n = draw.below(kinds);
        counts[n].1 += 1;
    }
    let text = match draw.coin() {
        true => format!("{{{}}}", counts.iter().map(|(c, n)| format!("{c}: {n}")).collect::<Vec<_>>().join(", ")),
        false => {
            let mut all: Vec<char> = counts.iter().flat_map(|&(c, n)| std::iter::repeat_n(c, n as usize)).collect();
            draw.shuffle(&mut all);
            all.into_iter().collect()
        }
    };
    Bag { counts, text }
}

const NUMBERS: [&str; 6] =
    ["", "One letter is", "Two letters are", "Three letters are", "Four letters are", "Five letters are"];

/// How many are drawn, and a sequence that is possible most of the time.
fn drawn(draw: &mut Draw, level: Level) -> (Bag, Vec<char>) {
    let count = draw.int(2, level.of(2, 3, 5)) as usize;
    let bag = bag(draw, level, count);
    let any = draw.below(8) == 0;
    let mut left = bag.counts.clone();
    let picked = (0..count)
        .map(|_| {
            loop {
                let n = draw.below(left.len());
                if any || left[n].1 > 0 {
                    left[n].1 -= 1;
                    break left[n].0;
                }
            }
        })
        .collect();
    (bag, picked)
}

fn sequence(draw: &mut Draw, level: Level) -> Pair {
    let (bag, picked) = drawn(draw, level);
    let mut left = bag.counts.clone();
    let mut total: i128 = left.iter().map(|c| c.1).sum();
    let mut p = Ratio::from(1);
    for c in &picked {
        if let Some(count) = left.iter_mut().find(|l| l.0 == *c) {
            p = p * Ratio::new(count.1.max(0), total);
            count.1 -= 1;
        }
        total -= 1;
    }
    let (start, word) = (NUMBERS[picked.len()], picked.iter().collect::<String>());
    let question = format!(
        "{start} drawn without putting back from {}. How probable is it to spell {word} in this order?",
        bag.text
    );
    Pair { question, answer: p.to_string() }
}

fn choose(n: i128, k: i128) -> i128 {
    (0..k).fold(1, |c, i| c * (n - i) / (i + 1))
}

fn level_set(draw: &mut Draw, level: Level) -> Pair {
    let (bag, picked) = drawn(draw, level);
    let total: i128 = bag.counts.iter().map(|c| c.1).sum();
    let mut ways = 1;
    let mut wanted = Vec::new();
    for &(c, n) in &bag.counts {
        let k = picked.iter().filter(|p| **p == c).count() as i128;
        ways *= if k > n { 0 } else { choose(n, k) };
        if k > 0 {
            wanted.push(format!("{k} {c}"));
        }
    }
    let p = Ratio::new(ways, choose(total, picked.len() as i128));
    let wanted = match wanted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => wanted.concat(),
    };
    let start = NUMBERS[picked.len()];
    let question = format!("{start} drawn without putting back from {}. How probable is it to get {wanted}?", bag.text);
    Pair { question, answer: p.to_string() }
}

#[cfg(test)]
mod tests {
    use super::super::check::{each, number};
    use super::Ratio;
    use std::collections::BTreeMap;

    fn bag(q: &str) -> Vec<char> {
        let text = q.split("back from ").nth(1).unwrap().split(". How").next().unwrap();
        match text.strip_prefix('{') {
            None => text.chars().collect(),
            Some(inner) => inner
                .trim_end_matches('}')
                .split(", ")
                .flat_map(|part| {
                    let (c, n) = part.split_once(": ").unwrap();
                    vec![c.chars().next().unwrap(); n.parse().unwrap()]
                })
                .collect(),
        }
    }

    /// Ordered draws of different places of the bag that satisfy `wanted`, by going through every one.
    fn count(bag: &[char], want: &dyn Fn(&[char]) -> bool, depth: usize) -> (i128, i128) {
        fn go(bag: &[char], used: &mut Vec<bool>, now: &mut Vec<char>, depth: usize, hit: &mut dyn FnMut(&[char])) {
            if now.len() == depth {
                return hit(now);
            }
            for n in 0..bag.len() {
                if !used[n] {
                    used[n] = true;
                    now.push(bag[n]);
                    go(bag, used, now, depth, hit);
                    now.pop();
                    used[n] = false;
                }
            }
        }
        let (mut hits, mut all) = (0, 0);
        go(bag, &mut vec![false; bag.len()], &mut Vec::new(), depth, &mut |draw| {
            all += 1;
            hits += i128::from(want(draw));
        });
        (hits, all)
    }

    #[test]
    fn probabilities_by_going_through_all_draws() {
        let mut tried = 0;
        each("probability__swr_p_sequence", |q, a, _| {
            let (bag, word) = (bag(q), q.split("spell ").nth(1).unwrap().split(' ').next().unwrap());
            let word: Vec<char> = word.chars().collect();
            if bag.len().pow(word.len() as u32) < 10_000 {
                let (hits, all) = count(&bag, &|draw| draw == word, word.len());
                assert_eq!(Ratio::new(hits, all), number(a), "{q} {a}");
                tried += 1;
            }
        });
        each("probability__swr_p_level_set", |q, a, _| {
            let bag = bag(q);
            let wanted = q.split("to get ").nth(1).unwrap().trim_end_matches('?').replace(" and ", ", ");
            let wanted: BTreeMap<char, usize> = wanted
                .split(", ")
                .map(|w| (w.chars().last().unwrap(), w.split(' ').next().unwrap().parse().unwrap()))
                .collect();
            let depth = wanted.values().sum::<usize>();
            if bag.len().pow(depth as u32) < 10_000 {
                let right = |draw: &[char]| wanted.iter().all(|(c, n)| draw.iter().filter(|d| *d == c).count() == *n);
                let (hits, all) = count(&bag, &right, depth);
                assert_eq!(Ratio::new(hits, all), number(a), "{q} {a}");
                tried += 1;
            }
        });
        assert!(tried > 900, "{tried}");
    }
}
