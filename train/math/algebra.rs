//! Algebra: linear equations in one and two unknowns, roots and factors of polynomials, sequences.

use super::draw::{Draw, Level};
use super::poly::{Poly, sum};
use super::{Module, Pair};

pub(super) const MODULES: &[Module] = &[
    Module { name: "algebra__linear_1d", make: linear_1d },
    Module { name: "algebra__linear_2d", make: linear_2d },
    Module { name: "algebra__polynomial_factor", make: polynomial_factor },
    Module { name: "algebra__polynomial_roots", make: polynomial_roots },
    Module { name: "algebra__sequence_next_term", make: sequence_next_term },
    Module { name: "algebra__sequence_nth_term", make: sequence_nth_term },
];

/// `left = right` with the terms of `total = 0` spread over both sides, in any order, some split in two.
fn equation(draw: &mut Draw, total: &[(i128, String)], splits: usize, max: i128) -> String {
    let mut sides = [Vec::new(), Vec::new()];
    for (c, body) in total {
        let mut left = *c;
        for _ in 0..draw.below(splits + 1) {
            let part = draw.nonzero(max);
            left -= part;
            let side = draw.below(2);
            sides[side].push((if side == 0 { part } else { -part }, body.clone()));
        }
        let side = draw.below(2);
        sides[side].push((if side == 0 { left } else { -left }, body.clone()));
    }
    let [left, right] = sides.map(|mut side| {
        draw.shuffle(&mut side);
        sum(side)
    });
    format!("{left} = {right}")
}

fn linear_1d(draw: &mut Draw, level: Level) -> Pair {
    let x = draw.letter();
    let solution = draw.int(-level.of(10, 60, 500), level.of(10, 60, 500));
    let max = level.of(12, 100, 900);
    loop {
        let slope = draw.nonzero(max);
        let terms = [(slope, x.to_string()), (-slope * solution, String::new())];
        let text = equation(draw, &terms, level.of(1, 2, 3), max);
        // Splitting may cancel the unknown's terms out of sight; then there is nothing to solve.
        if text.contains(x) {
            let question = match draw.below(3) {
                0 => format!("Find {x} from {text}."),
                1 => format!("Which {x} satisfies {text}?"),
                _ => format!("Let {text}. What is {x}?"),
            };
            return Pair { question, answer: solution.to_string() };
        }
    }
}

fn linear_2d(draw: &mut Draw, level: Level) -> Pair {
    let [x, y] = draw.letters();
    let max = level.of(6, 12, 60);
    let range = level.of(6, 30, 200);
    let (sx, sy) = (draw.int(-range, range), draw.int(-range, range));
    let m: [i128; 4] = loop {
        let m = [0; 4].map(|_| draw.int(-max, max));
        if m[0] * m[3] != m[1] * m[2] && m[0] != 0 {
            break m;
        }
    };
    let texts = [(m[0], m[1]), (m[2], m[3])].map(|(a, b)| {
        let terms = [(a, x.to_string()), (b, y.to_string()), (-a * sx - b * sy, String::new())];
        equation(draw, &terms, level.of(0, 1, 2), max)
    });
    let both = texts.join(" and ");
    let question = match draw.coin() {
        true => format!("Given {both}, what is {x}?"),
        false => format!("Two equations hold: {both}. Find {x}."),
    };
    Pair { question, answer: sx.to_string() }
}

/// Distinct integer roots with how often each occurs, ascending.
fn draw_roots(draw: &mut Draw, level: Level) -> Vec<(i128, usize)> {
    let count = draw.int(2, level.of(2, 3, 4));
    let range = level.of(9, 20, 60);
    let mut roots: Vec<(i128, usize)> = Vec::new();
    for _ in 0..count {
        let root = draw.int(-range, range);
        match roots.iter_mut().find(|(r, _)| *r == root) {
            Some((_, times)) => *times += 1,
            None => roots.push((root, 1 + usize::from(draw.below(8) == 0))),
        }
    }
    roots.sort();
    roots
}

fn product(roots: &[(i128, usize)], factor: i128) -> Poly {
    let all = roots.iter().flat_map(|&(r, times)| std::iter::repeat_n(r, times));
    all.fold(Poly(vec![factor]), |p, r| p.times(&Poly(vec![-r, 1])))
}

fn polynomial_roots(draw: &mut Draw, level: Level) -> Pair {
    let x = draw.letter();
    let roots = draw_roots(draw, level);
    let p = product(&roots, draw.nonzero(level.of(3, 9, 40)));
    let question = match draw.coin() {
        true => format!("List all solutions of {} = 0.", p.text(x)),
        false => format!("For which {x} is {} zero?", p.text(x)),
    };
    let answer = roots.iter().map(|r| r.0.to_string()).collect::<Vec<_>>().join(", ");
    Pair { question, answer }
}

fn polynomial_factor(draw: &mut Draw, level: Level) -> Pair {
    let x = draw.letter();
    let roots = draw_roots(draw, level);
    let factor = draw.nonzero(level.of(3, 9, 40));
    let text = product(&roots, factor).text(x);
    let question = draw.phrase(&["Write {} as a product of linear factors.", "Fully factorise {}."], text);
    let mut parts: Vec<String> = roots
        .iter()
        .rev()
        .map(|&(r, times)| {
            let base = match r {
                0 => x.to_string(),
                r => format!("({x} {} {})", if r < 0 { '+' } else { '-' }, r.abs()),
            };
            if times == 1 { base } else { format!("{base}**{times}") }
        })
        .collect();
    let sign = if factor < 0 { "-" } else { "" };
    if factor.abs() != 1 {
        parts.insert(0, factor.abs().to_string());
    }
    Pair { question, answer: sign.to_owned() + &parts.join("*") }
}

/// A polynomial law of degree 1 to 3, and enough terms to settle it with one to spare.
fn sequence(draw: &mut Draw, level: Level) -> (Poly, usize, String) {
    let degree = draw.int(1, level.of(2, 3, 3)) as usize;
    let law = Poly::draw(draw, degree, level.of(15, 120, 2000));
    let count = degree + 2 + draw.below(4);
    let terms: Vec<String> = (1..=count as i128).map(|n| law.at(n).to_string()).collect();
    (law, count, terms.join(", "))
}

fn sequence_next_term(draw: &mut Draw, level: Level) -> Pair {
    let (law, count, terms) = sequence(draw, level);
    let question = draw.phrase(&["Continue by one term: {}.", "Which number comes after {}?"], terms);
    Pair { question, answer: law.at(count as i128 + 1).to_string() }
}

fn sequence_nth_term(draw: &mut Draw, level: Level) -> Pair {
    let (law, _, terms) = sequence(draw, level);
    let n = draw.letter();
    let question = match draw.coin() {
        true => format!("Find a formula in {n} for term number {n} of {terms}."),
        false => format!("A sequence starts {terms}. Express its term {n} through {n}."),
    };
    Pair { question, answer: law.text(n) }
}

#[cfg(test)]
mod tests {
    use super::super::check::{each, eval, integers, symbols};

    fn is_letter(c: &char) -> bool {
        c.is_ascii_lowercase()
    }

    /// The letters that stand alone in a text.
    fn letters(symbols: &str) -> Vec<char> {
        let mut all: Vec<char> = symbols.chars().filter(is_letter).collect();
        all.sort();
        all.dedup();
        all
    }

    #[test]
    fn linear_solutions_put_back() {
        each("algebra__linear_1d", |q, a, _| {
            let text = symbols(q);
            let x = letters(&text)[0];
            let (left, right) = text.split_once('=').unwrap();
            // What is left of the wording: the letter asked for, before or after the equation.
            let clean = |s: &str| s.trim_matches(['.', ' ']).to_owned();
            let left = left.trim().strip_prefix(&format!("{x}  ")).unwrap_or(left).to_owned();
            let right = right.split(". ").next().unwrap();
            let value = [(x, a.parse().unwrap())];
            assert_eq!(eval(&clean(&left), &value), eval(&clean(right), &value), "{q} {a}");
        });
    }

    #[test]
    fn pairs_of_linear_equations_by_elimination() {
        each("algebra__linear_2d", |q, a, _| {
            let body = q.trim_start_matches("Given ").trim_start_matches("Two equations hold: ");
            let body = body.split(", what").next().unwrap().split(". Find").next().unwrap();
            let (one, two) = body.split_once(" and ").unwrap();
            let asked = q.trim_end_matches(['.', '?']).chars().last().unwrap();
            let other = letters(&symbols(body)).into_iter().find(|c| *c != asked).unwrap_or('?');
            // left - right at three points gives the coefficients; the determinant's rule gives the unknown.
            let row = |text: &str| {
                let (l, r) = text.split_once('=').unwrap();
                let f = |x, y| {
                    let at = [(asked, x), (other, y)];
                    eval(l, &at) - eval(r, &at)
                };
                let c = f(0, 0);
                (f(1, 0) - c, f(0, 1) - c, c)
            };
            let ((a1, b1, c1), (a2, b2, c2)) = (row(one), row(two));
            assert_eq!((b1 * c2 - b2 * c1) / (a1 * b2 - a2 * b1), a.parse::<i128>().unwrap().into(), "{q} {a}");
        });
    }

    #[test]
    fn roots_put_back_and_none_missing() {
        each("algebra__polynomial_roots", |q, a, _| {
            let text = symbols(q);
            let x = *letters(&text).last().unwrap();
            let text = text.trim_end_matches("= 0").trim();
            let text = text.strip_prefix(&format!("{x}  ")).unwrap_or(text);
            let roots = integers(a);
            assert!(roots.is_sorted_by(|a, b| a < b), "{a}");
            // Every root lies within the generator's range: try them all.
            let found: Vec<i128> = (-60..=60).filter(|&v| eval(text, &[(x, v)]).is_zero()).collect();
            assert_eq!(found, roots, "{q}");
        });
    }

    #[test]
    fn factors_multiply_out() {
        each("algebra__polynomial_factor", |q, a, _| {
            let text = q.trim_start_matches("Write ").trim_start_matches("Fully factorise ");
            let text = text.split(" as a").next().unwrap().trim_end_matches('.');
            let x = *letters(a).last().unwrap();
            for v in -9..=9 {
                assert_eq!(eval(text, &[(x, v)]), eval(a, &[(x, v)]), "{q} {a}");
            }
            let brackets = a.matches('(').count();
            assert!(a.matches(x).count() - brackets <= 1 && !a.contains("**2)"), "not linear: {a}");
        });
    }

    #[test]
    fn sequences_by_differences() {
        // The next term by Newton's differences, which does not look at the law.
        fn next(terms: &[i128]) -> i128 {
            match terms.iter().all(|t| *t == terms[0]) {
                true => terms[0],
                false => {
                    let steps: Vec<i128> = terms.windows(2).map(|w| w[1] - w[0]).collect();
                    terms[terms.len() - 1] + next(&steps)
                }
            }
        }
        each("algebra__sequence_next_term", |q, a, _| {
            assert_eq!(next(&integers(q)), a.parse::<i128>().unwrap(), "{q} {a}");
        });
        each("algebra__sequence_nth_term", |q, a, _| {
            let n = letters(a)[0];
            for (at, term) in integers(q).into_iter().enumerate() {
                assert_eq!(eval(a, &[(n, at as i128 + 1)]), term.into(), "{q} {a}");
            }
        });
    }
}
