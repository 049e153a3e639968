//! Calculus: derivatives of polynomials in one and two letters.

use super::draw::{Draw, Level};
use super::poly::{power, sum};
use super::{Module, Pair};

pub(super) const MODULES: &[Module] = &[Module { name: "calculus__differentiate", make: differentiate }];

/// `coefficient * x**i * y**j`.
type Term = (i128, usize, usize);

fn text(terms: &[Term], x: char, y: char) -> String {
    sum(terms.iter().map(|&(c, i, j)| {
        let factors = [power(x, i), power(y, j)];
        (c, factors.iter().filter(|f| !f.is_empty()).cloned().collect::<Vec<_>>().join("*"))
    }))
}

fn differentiate(draw: &mut Draw, level: Level) -> Pair {
    let [x, y] = draw.letters();
    let order = draw.int(1, level.of(2, 3, 3)) as usize;
    let degree = draw.int(order as i128, level.of(4, 6, 9)) as usize;
    let second = draw.below(3) == 0;
    let max = level.of(15, 300, 20_000);
    let mut terms: Vec<Term> = (0..=degree)
        .filter_map(|i| {
            let keep = i == degree || draw.below(3) > 0;
            let j = if second { draw.below(4) } else { 0 };
            keep.then(|| (draw.nonzero(max), i, j))
        })
        .collect();
    let mut derived: Vec<Term> = terms
        .iter()
        .filter(|t| t.1 >= order)
        .map(|&(c, i, j)| ((i - order + 1..=i).fold(c, |c, n| c * n as i128), i - order, j))
        .collect();
    derived.sort_by_key(|t| std::cmp::Reverse((t.1, t.2)));
    draw.shuffle(&mut terms);
    let name = ["first", "second", "third"][order - 1];
    let f = text(&terms, x, y);
    let question = match draw.coin() {
        true => format!("Give the {name} derivative of {f} in {x}."),
        false => format!("Taking {x} as the variable, what is the {name} derivative of {f}?"),
    };
    Pair { question, answer: text(&derived, x, y) }
}

#[cfg(test)]
mod tests {
    use super::super::check::{constant, each, eval, series};
    use super::super::ratio::Ratio;

    #[test]
    fn derivatives_agree_with_taylor_series() {
        each("calculus__differentiate", |q, a, _| {
            let (f, x) = match q.strip_prefix("Taking ") {
                Some(rest) => (q.split("derivative of ").nth(1).unwrap().trim_end_matches('?'), &rest[..1]),
                None => {
                    let body = q.split("derivative of ").nth(1).unwrap();
                    let (f, x) = body.rsplit_once(" in ").unwrap();
                    (f, x.trim_end_matches('.'))
                }
            };
            let x = x.chars().next().unwrap();
            let y = f.chars().find(|c| c.is_ascii_lowercase() && *c != x).unwrap_or('_');
            let order = ["first", "second", "third"].iter().position(|w| q.contains(w)).unwrap() + 1;
            let factorial: i128 = (1..=order as i128).product();
            // Degree 9 in x and 3 in y: equal on a 10 by 4 grid means equal.
            for (vx, vy) in (-5..5).flat_map(|vx| (1..5).map(move |vy| (vx, vy))) {
                let at = [vx.into(), 1.into(), 0.into(), 0.into()];
                let taylor = series(f, &[(x, at), (y, constant(Ratio::from(vy)))]);
                let expected = taylor[order] * Ratio::from(factorial);
                assert_eq!(eval(a, &[(x, vx), (y, vy)]), expected, "{q} {a}");
            }
        });
    }
}
