//! Numbers: divisors, primes, remainders, digits, rounding, bases.

use super::draw::{Draw, Level};
use super::ratio::{Ratio, gcd as common};
use super::{Module, Pair};

pub(super) const MODULES: &[Module] = &[
    Module { name: "numbers__base_conversion", make: base_conversion },
    Module { name: "numbers__div_remainder", make: div_remainder },
    Module { name: "numbers__gcd", make: gcd },
    Module { name: "numbers__is_factor", make: is_factor },
    Module { name: "numbers__is_prime", make: is_prime },
    Module { name: "numbers__lcm", make: lcm },
    Module { name: "numbers__list_prime_factors", make: list_prime_factors },
    Module { name: "numbers__place_value", make: place_value },
    Module { name: "numbers__round_number", make: round_number },
];

/// Digits 0-9a-f with a minus sign in front.
pub(super) fn in_base(n: i128, base: u32) -> String {
    let mut digits = Vec::new();
    let mut left = n.unsigned_abs();
    while left > 0 || digits.is_empty() {
        digits.push(char::from_digit((left % u128::from(base)) as u32, base).unwrap_or('?'));
        left /= u128::from(base);
    }
    let sign = if n < 0 { "-" } else { "" };
    sign.to_owned() + &digits.iter().rev().collect::<String>()
}

/// Prime factors, ascending, without repetition.
fn prime_factors(mut n: i128) -> Vec<i128> {
    let mut out = Vec::new();
    let mut p = 2;
    while p * p <= n {
        if n % p == 0 {
            out.push(p);
            while n % p == 0 {
                n /= p;
            }
        }
        p += if p == 2 { 1 } else { 2 };
    }
    if n > 1 {
        out.push(n);
    }
    out
}

fn prime(n: i128) -> bool {
    n > 1 && prime_factors(n) == [n]
}

fn truth(holds: bool) -> String {
    if holds { "True".into() } else { "False".into() }
}

fn base_conversion(draw: &mut Draw, level: Level) -> Pair {
    let from = draw.int(2, 16) as u32;
    let to = loop {
        let to = draw.int(2, 16) as u32;
        if to != from {
            break to;
        }
    };
    let n = draw.signed(1, level.of(3, 6, 9));
    let text = in_base(n, from);
    let question = match draw.coin() {
        true => format!("Rewrite {text} from base {from} in base {to}."),
        false => format!("How is {text} (base {from}) written in base {to}?"),
    };
    Pair { question, answer: in_base(n, to) }
}

fn div_remainder(draw: &mut Draw, level: Level) -> Pair {
    let divisor = draw.digits(1, level.of(2, 3, 4)) + 1;
    let n = draw.digits(2, level.of(3, 6, 9));
    let question = match draw.coin() {
        true => format!("What is left over when {n} is divided by {divisor}?"),
        false => format!("Find {n} modulo {divisor}."),
    };
    Pair { question, answer: (n % divisor).to_string() }
}

/// Two numbers that often share a factor.
fn two(draw: &mut Draw, level: Level) -> (i128, i128) {
    let shared = if draw.below(4) == 0 { 1 } else { draw.digits(1, level.of(1, 2, 3)) };
    (shared * draw.digits(1, level.of(2, 3, 4)), shared * draw.digits(1, level.of(2, 3, 4)))
}

fn gcd(draw: &mut Draw, level: Level) -> Pair {
    let (a, b) = two(draw, level);
    let phrases = ["Find the largest number dividing both {}.", "Which is the greatest divisor shared by {}?"];
    Pair { question: draw.phrase(&phrases, format!("{a} and {b}")), answer: common(a, b).to_string() }
}

fn lcm(draw: &mut Draw, level: Level) -> Pair {
    let (a, b) = two(draw, level);
    let both = match draw.coin() {
        true => draw.phrase(&["Which is the smallest multiple shared by {}?"], format!("{a} and {b}")),
        false => format!("Find the smallest positive number that {a} and {b} both divide."),
    };
    Pair { question: both, answer: (a / common(a, b) * b).to_string() }
}

fn is_factor(draw: &mut Draw, level: Level) -> Pair {
    let factor = draw.digits(1, level.of(1, 2, 3)) + 1;
    let multiple = factor * draw.digits(1, level.of(2, 4, 5));
    let n = if draw.coin() { multiple } else { multiple + draw.int(1, factor) };
    let question = match draw.below(3) {
        0 => format!("Can {n} be divided evenly by {factor}?"),
        1 => format!("Does {factor} go into {n} without remainder?"),
        _ => format!("Is {n} among the multiples of {factor}?"),
    };
    Pair { question, answer: truth(n % factor == 0) }
}

fn is_prime(draw: &mut Draw, level: Level) -> Pair {
    let mut n = draw.digits(2, level.of(4, 6, 8)) + 1;
    // Half of the time the next prime: chance alone would make "no" nearly always right.
    if draw.coin() {
        while !prime(n) {
            n += 1;
        }
    }
    let (question, holds) = match draw.below(3) {
        0 => (format!("Can {n} be written as a product of two smaller numbers?"), !prime(n)),
        1 => (format!("Does {n} have no divisors but 1 and itself?"), prime(n)),
        _ => (format!("Is {n} prime?"), prime(n)),
    };
    Pair { question, answer: truth(holds) }
}

fn list_prime_factors(draw: &mut Draw, level: Level) -> Pair {
    let n = draw.digits(2, level.of(4, 6, 8));
    let question = draw.phrase(&["Which primes divide {}?", "Name every prime that divides {}."], n);
    let factors = prime_factors(n).iter().map(ToString::to_string).collect::<Vec<_>>();
    Pair { question, answer: factors.join(", ") }
}

const PLACES: [&str; 10] = [
    "units",
    "tens",
    "hundreds",
    "thousands",
    "ten thousands",
    "hundred thousands",
    "millions",
    "ten millions",
    "hundred millions",
    "billions",
];

fn place_value(draw: &mut Draw, level: Level) -> Pair {
    let length = draw.int(2, level.of(4, 7, 10)) as u32;
    let n = draw.digits(length, length);
    let place = draw.below(length as usize);
    let question = match draw.coin() {
        true => format!("Which digit of {n} stands in the {} place?", PLACES[place]),
        false => format!("Read off the {} digit of {n}.", PLACES[place]),
    };
    Pair { question, answer: (n / 10i128.pow(place as u32) % 10).to_string() }
}

fn round_number(draw: &mut Draw, level: Level) -> Pair {
    let places = draw.below(level.of(3, 5, 8)) as u32;
    let n = draw.signed(2, level.of(4, 7, 11));
    let unit = 10i128.pow(places);
    let value = Ratio::new(n, unit);
    // Exactly half way has two conventions: avoided by rounding only where a later digit decides.
    let text = value.decimal().expect("a power of ten");
    let (step, question) = match draw.coin() {
        true => {
            let step = 10i128.pow(draw.int(0, level.of(2, 3, 5)) as u32);
            (Ratio::from(step), format!("Round {text} to a multiple of {step}."))
        }
        false => {
            let keep = draw.int(0, i128::from(places.saturating_sub(1))) as u32;
            (Ratio::new(1, 10i128.pow(keep)), format!("Give {text} to {keep} decimal places."))
        }
    };
    let scaled = value / step;
    let floor = scaled.num.div_euclid(scaled.den);
    let part = scaled - Ratio::from(floor);
    if part == Ratio::new(1, 2) {
        return round_number(draw, level);
    }
    let nearest = if part > Ratio::new(1, 2) { floor + 1 } else { floor };
    Pair { question, answer: (Ratio::from(nearest) * step).decimal().expect("a power of ten") }
}

#[cfg(test)]
mod tests {
    use super::super::check::{each, integers, number};
    use super::*;

    fn answer(a: &str) -> i128 {
        a.parse().unwrap()
    }

    #[test]
    fn bases_by_the_standard_library() {
        each("numbers__base_conversion", |q, a, _| {
            let bases: Vec<u32> = q
                .split("base ")
                .skip(1)
                .map(|w| w.trim_matches(|c: char| !c.is_ascii_digit()))
                .map(|w| w.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap())
                .collect();
            let text = q.split(' ').nth(if q.starts_with("Rewrite") { 1 } else { 2 }).unwrap();
            assert_eq!(i128::from_str_radix(text, bases[0]), i128::from_str_radix(a, bases[1]), "{q} {a}");
        });
    }

    #[test]
    fn divisors_by_trying_them() {
        each("numbers__div_remainder", |q, a, _| {
            let n = integers(q);
            assert!((0..n[1]).contains(&answer(a)) && (n[0] - answer(a)) % n[1] == 0, "{q} {a}");
        });
        each("numbers__gcd", |q, a, level| {
            let (n, g) = (integers(q), answer(a));
            assert!(n[0] % g == 0 && n[1] % g == 0, "{q} {a}");
            if level == Level::Easy {
                assert!((g + 1..=n[0]).all(|d| n[0] % d != 0 || n[1] % d != 0), "{q} {a}");
            }
            // Nothing divides both quotients, by primes.
            let shared = prime_factors(n[0] / g).into_iter().any(|p| (n[1] / g) % p == 0);
            assert!(!shared, "{q} {a}");
        });
        each("numbers__lcm", |q, a, level| {
            let (n, m) = (integers(q), answer(a));
            assert!(m > 0 && m % n[0] == 0 && m % n[1] == 0, "{q} {a}");
            // Nothing smaller: by trying, where that is quick, and by primes.
            if level != Level::Hard {
                assert!((1..m / n[0]).all(|k| k * n[0] % n[1] != 0), "{q} {a}");
            }
            assert!(prime_factors(m).iter().all(|p| m / p % n[0] != 0 || m / p % n[1] != 0), "{q} {a}");
        });
        each("numbers__is_factor", |q, a, _| {
            let n = integers(q);
            let (small, large) = (n[0].min(n[1]), n[0].max(n[1]));
            assert_eq!(a == "True", large / small * small == large, "{q} {a}");
        });
    }

    #[test]
    fn primes_by_a_sieve() {
        let limit = 100_000_200;
        // Odd numbers only; true where composite.
        let mut composite = vec![false; limit / 2];
        let mut p = 3;
        while p * p < limit {
            if !composite[p / 2] {
                (p * p..limit).step_by(2 * p).for_each(|m| composite[m / 2] = true);
            }
            p += 2;
        }
        let prime = |n: i128| n == 2 || n > 2 && n % 2 == 1 && !composite[n as usize / 2];
        let mut yes = 0;
        each("numbers__is_prime", |q, a, _| {
            let holds = prime(integers(q)[0]) != q.contains("product");
            assert_eq!(a == "True", holds, "{q} {a}");
            yes += i32::from(holds);
        });
        assert!((250..500).contains(&yes), "{yes} of 750");
        each("numbers__list_prime_factors", |q, a, _| {
            let factors = integers(a);
            let mut n = integers(q)[0];
            for &p in &factors {
                assert!(prime(p) && n % p == 0, "{q} {a}");
                while n % p == 0 {
                    n /= p;
                }
            }
            assert!(n == 1 && factors.is_sorted_by(|a, b| a < b), "{q} {a}");
        });
    }

    #[test]
    fn digits_by_text_and_rounding_by_distance() {
        each("numbers__place_value", |q, a, _| {
            let place = (0..10).filter(|&p| q.contains(&format!("the {} ", PLACES[p]))).max().unwrap();
            let text = integers(q)[0].to_string();
            assert_eq!(&text[text.len() - 1 - place..text.len() - place], a, "{q}");
        });
        each("numbers__round_number", |q, a, _| {
            let words: Vec<&str> = q.trim_end_matches('.').split(' ').collect();
            let value = number(words[1]);
            let step = match q.starts_with("Round") {
                true => number(words[words.len() - 1]),
                false => Ratio::new(1, 10i128.pow(words[3].parse().unwrap())),
            };
            let rounded = number(a);
            assert!((rounded / step).is_integer(), "{q} {a}");
            assert!((rounded - value).abs() < step / Ratio::from(2), "{q} {a}");
            assert_ne!(a, "-0");
        });
    }
}
