//! Polynomials: evaluating, adding, expanding, collecting, composing, naming coefficients; powers with rational exponents.

use super::draw::{Draw, Level};
use super::poly::{Poly, power};
use super::ratio::Ratio;
use super::{Module, Pair};

pub(super) const MODULES: &[Module] = &[
    Module { name: "polynomials__add", make: add },
    Module { name: "polynomials__coefficient_named", make: coefficient_named },
    Module { name: "polynomials__collect", make: collect },
    Module { name: "polynomials__compose", make: compose },
    Module { name: "polynomials__evaluate", make: evaluate },
    Module { name: "polynomials__expand", make: expand },
    Module { name: "polynomials__simplify_power", make: simplify_power },
];

fn poly(draw: &mut Draw, level: Level, degrees: (i128, i128), max: i128) -> Poly {
    let degree = draw.int(degrees.0, degrees.1 + level.of(0, 0, 1)) as usize;
    Poly::draw(draw, degree, max)
}

fn evaluate(draw: &mut Draw, level: Level) -> Pair {
    let [f, x] = draw.letters();
    let p = poly(draw, level, (1, 3), level.of(10, 60, 2500));
    let at = draw.int(-level.of(6, 12, 70), level.of(6, 12, 70));
    let text = p.text(x);
    let question = match draw.coin() {
        true => format!("Take {f}({x}) = {text}. How much is {f}({at})?"),
        false => format!("If {f}({x}) = {text}, then {f}({at}) = ?"),
    };
    Pair { question, answer: p.at(at).to_string() }
}

fn add(draw: &mut Draw, level: Level) -> Pair {
    let [f, g, x, y, z] = draw.letters();
    let max = level.of(9, 40, 300);
    let (p, q) = (poly(draw, level, (1, 3), max), poly(draw, level, (1, 3), max));
    let factor = level.of(5, 12, 60);
    let (a, b) = (draw.nonzero(factor), draw.nonzero(factor));
    let asked = super::poly::sum([(a, format!("{f}({z})")), (b, format!("{g}({z})"))]);
    let question =
        format!("Take {f}({x}) = {} and {g}({y}) = {}. Write {asked} without {f} and {g}.", p.text(x), q.text(y));
    Pair { question, answer: p.scaled(a).plus(&q.scaled(b)).text(z) }
}

fn compose(draw: &mut Draw, level: Level) -> Pair {
    let [f, g, x, y, z] = draw.letters();
    let max = level.of(6, 20, 90);
    let p = poly(draw, level, (1, 2), max);
    let q = poly(draw, Level::Easy, (1, 2), max);
    let question = format!("Take {f}({x}) = {} and {g}({y}) = {}. Work out {f}({g}({z})).", p.text(x), q.text(y));
    Pair { question, answer: p.of(&q).text(z) }
}

fn expand(draw: &mut Draw, level: Level) -> Pair {
    let x = draw.letter();
    let count = draw.int(2, level.of(2, 3, 3)) as usize;
    let max = level.of(5, 9, 20);
    let mut product = Poly(vec![1]);
    let mut text = Vec::new();
    for _ in 0..count {
        let p = poly(draw, level, (1, 2), max);
        product = product.times(&p);
        text.push(format!("({})", p.scrambled(draw, x, level.of(0, 1, 2), max)));
    }
    let question = draw.phrase(&["Multiply out {}.", "Remove the brackets in {}."], text.join("*"));
    Pair { question, answer: product.text(x) }
}

fn collect(draw: &mut Draw, level: Level) -> Pair {
    let x = draw.letter();
    let max = level.of(9, 60, 900);
    let p = poly(draw, level, (1, 3), max);
    let text = p.scrambled(draw, x, level.of(2, 4, 6), max);
    let question = draw.phrase(&["Gather like terms: {}.", "Shorten {} by gathering like terms."], text);
    Pair { question, answer: p.text(x) }
}

fn coefficient_named(draw: &mut Draw, level: Level) -> Pair {
    let x = draw.letter();
    let max = level.of(9, 60, 900);
    let p = poly(draw, level, (1, 3), max);
    let n = draw.below(p.0.len());
    let text = p.scrambled(draw, x, level.of(2, 4, 6), max);
    let question = match n {
        0 => format!("What is the constant term of {text}?"),
        n => format!("In {text}, which number multiplies {} once terms are gathered?", power(x, n)),
    };
    Pair { question, answer: p.0[n].to_string() }
}

/// A product or quotient of powers of `x`, and its total exponent.
fn powers(draw: &mut Draw, x: char, leaves: usize, max: i128) -> (String, Ratio) {
    if leaves == 1 {
        return match draw.below(3) {
            0 => (x.to_string(), 1.into()),
            1 => {
                let n = draw.int(2, max);
                (format!("{x}**{n}"), n.into())
            }
            _ => {
                let e = Ratio::new(draw.nonzero(max), draw.int(2, max));
                let brackets = if e.is_integer() && e.num > 0 { e.to_string() } else { format!("({e})") };
                (format!("{x}**{brackets}"), e)
            }
        };
    }
    let on_left = 1 + draw.below(leaves - 1);
    let (left, a) = powers(draw, x, on_left, max);
    let (right, b) = powers(draw, x, leaves - on_left, max);
    let right = if leaves - on_left > 1 { format!("({right})") } else { right };
    let (text, total) =
        if draw.coin() { (format!("{left}*{right}"), a + b) } else { (format!("{left}/{right}"), a - b) };
    if leaves > 2 && draw.below(3) == 0 {
        let e = Ratio::new(draw.nonzero(max), draw.int(1, max));
        return (format!("({text})**({e})"), total * e);
    }
    (text, total)
}

fn simplify_power(draw: &mut Draw, level: Level) -> Pair {
    let x = draw.letter();
    let leaves = draw.int(level.of(2, 3, 5), level.of(3, 5, 8)) as usize;
    let (text, e) = powers(draw, x, leaves, level.of(4, 8, 14));
    let question = draw.phrase(&["Write {} as one power", "Bring {} to a single power"], text);
    let answer = match e {
        e if e.is_zero() => "1".into(),
        e if e == 1.into() => x.to_string(),
        e if e.is_integer() && e.num > 0 => format!("{x}**{e}"),
        e => format!("{x}**({e})"),
    };
    Pair { question: format!("{question}, where {x} > 0."), answer }
}

#[cfg(test)]
mod tests {
    use super::super::check::{each, eval, integers, symbols};

    /// `(name, letter, body)` of each `f(x) = …` in a question.
    fn functions(q: &str) -> Vec<(char, char, String)> {
        let start = q.find(['T', 'I']).unwrap();
        let body = q[start..].split(". ").next().unwrap().split(", then").next().unwrap();
        body.trim_start_matches("Take ")
            .trim_start_matches("If ")
            .split(" and ")
            .map(|f| {
                let c: Vec<char> = f.chars().collect();
                (c[0], c[2], f.split(" = ").nth(1).unwrap().to_owned())
            })
            .collect()
    }

    fn letter(text: &str) -> char {
        text.chars().find(char::is_ascii_lowercase).unwrap_or('_')
    }

    /// Equal at more points than the degree.
    fn same(a: &str, x: char, b: &str, y: char) {
        for v in -8..=8 {
            assert_eq!(eval(a, &[(x, v)]), eval(b, &[(y, v)]), "{a} | {b}");
        }
    }

    #[test]
    fn values_sums_and_compositions_by_evaluation() {
        each("polynomials__evaluate", |q, a, _| {
            let (f, x, body) = &functions(q)[0];
            let at = q.rsplit(&format!("{f}(")).next().unwrap().split(')').next().unwrap();
            assert_eq!(eval(body, &[(*x, at.parse().unwrap())]), a.parse::<i128>().unwrap().into(), "{q} {a}");
        });
        each("polynomials__add", |q, a, _| {
            let fs = functions(q);
            let asked = q.split("Write ").nth(1).unwrap().split(" without").next().unwrap();
            for v in -5..=5 {
                let mut text = asked.to_owned();
                for (f, x, body) in &fs {
                    let value = eval(body, &[(*x, v)]);
                    let call = text.find(&format!("{f}(")).unwrap();
                    text.replace_range(call..call + 4, &format!("({value})"));
                }
                assert_eq!(eval(&text, &[]), eval(a, &[(letter(a), v)]), "{q} {a}");
            }
        });
        each("polynomials__compose", |q, a, _| {
            let fs = functions(q);
            for v in -8..=8 {
                let inner = eval(&fs[1].2, &[(fs[1].1, v)]);
                let outer = eval(&fs[0].2, &[(fs[0].1, inner.num)]);
                assert_eq!(outer, eval(a, &[(letter(a), v)]), "{q} {a}");
            }
        });
    }

    #[test]
    fn expanded_and_collected_forms_are_equal_and_simple() {
        each("polynomials__expand", |q, a, _| {
            let text = &q[q.find('(').unwrap()..q.len() - 1];
            same(text, letter(text), a, letter(a));
            assert!(!a.contains('('));
        });
        each("polynomials__collect", |q, a, _| {
            let text = q.trim_start_matches("Gather like terms: ").trim_start_matches("Shorten ");
            let text = text.split(" by").next().unwrap().trim_end_matches('.');
            let x = letter(text);
            same(text, x, a, x);
            let degrees: Vec<&str> =
                a.split(" + ").flat_map(|t| t.split(" - ")).map(|t| t.split('*').next_back().unwrap()).collect();
            assert!(degrees.len() <= 5, "{a}");
        });
    }

    #[test]
    fn coefficients_by_differences() {
        each("polynomials__coefficient_named", |q, a, _| {
            let text = q.trim_start_matches("What is the constant term of ").trim_start_matches("In ");
            let text = text.split(", which").next().unwrap().trim_end_matches('?');
            let x = letter(text);
            let n = match q.split("multiplies ").nth(1) {
                None => 0,
                Some(rest) => integers(&rest.replace("**", " ")).first().copied().unwrap_or(1) as usize,
            };
            // Newton's differences at 0..=4, turned into coefficients by the falling factorials (degree <= 4).
            let values: Vec<_> = (0..=4).map(|v| eval(text, &[(x, v)]).num).collect();
            let mut d = values;
            let mut lead = Vec::new();
            while !d.is_empty() {
                lead.push(d[0]);
                d = d.windows(2).map(|w| w[1] - w[0]).collect();
            }
            let falling = [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, -1, 1, 0, 0], [0, 2, -3, 1, 0], [0, -6, 11, -6, 1]];
            let factorial = [1, 1, 2, 6, 24];
            let times24: i128 = (0..5).map(|k| lead[k] * falling[k][n] * (24 / factorial[k])).sum();
            assert_eq!(times24, 24 * a.parse::<i128>().unwrap(), "{q} {a}");
        });
    }

    #[test]
    fn powers_by_logarithms() {
        // ln of the text at x = 2 in floating point, read by a small evaluator of its own.
        fn log2(chars: &mut std::iter::Peekable<std::str::Chars>) -> f64 {
            let mut total = 0.0;
            let mut sign = 1.0;
            loop {
                let base = match chars.next().unwrap() {
                    '(' => {
                        let inner = log2(chars);
                        assert_eq!(chars.next(), Some(')'));
                        inner
                    }
                    _ => 1.0,
                };
                let mut exponent = 1.0;
                let mut op = chars.peek().copied();
                if op == Some('*') {
                    chars.next();
                    if chars.peek() == Some(&'*') {
                        chars.next();
                        let mut text = String::new();
                        if chars.peek() == Some(&'(') {
                            chars.next();
                            text.extend(std::iter::from_fn(|| chars.next_if(|c| *c != ')')));
                            chars.next();
                        } else {
                            text.extend(std::iter::from_fn(|| chars.next_if(char::is_ascii_digit)));
                        }
                        let (n, d) = text.split_once('/').unwrap_or((&text, "1"));
                        exponent = n.parse::<f64>().unwrap() / d.parse::<f64>().unwrap();
                        op = chars.peek().copied();
                        if matches!(op, Some('*' | '/')) {
                            chars.next();
                        }
                    }
                } else if op == Some('/') {
                    chars.next();
                }
                total += sign * base * exponent;
                match op {
                    Some('*') => sign = 1.0,
                    Some('/') => sign = -1.0,
                    _ => return total,
                }
            }
        }
        each("polynomials__simplify_power", |q, a, _| {
            let text = q.trim_start_matches("Write ").trim_start_matches("Bring ");
            let text = text.split(" as one").next().unwrap().split(" to a").next().unwrap();
            let expected = if a == "1" { 0.0 } else { log2(&mut a.chars().peekable()) };
            let found = log2(&mut text.chars().peekable());
            assert!((found - expected).abs() < 1e-9 * (1.0 + found.abs()), "{q} {a} {found} {expected}");
        });
        assert_eq!(symbols("Write x as"), "x");
    }
}
