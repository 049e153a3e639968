//! Integer polynomials in one letter, and the way sums of terms are written: `3*x**2 - x + 1`.

use super::draw::Draw;

/// Coefficients, constant first, without zeros at the end; the zero polynomial is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Poly(pub(super) Vec<i128>);

/// A sum of `coefficient*body`, in the order given; an empty body is a constant. Zero terms are left out.
pub(super) fn sum<S: AsRef<str>>(terms: impl IntoIterator<Item = (i128, S)>) -> String {
    let mut out = String::new();
    for (c, body) in terms {
        let body = body.as_ref();
        if c == 0 {
            continue;
        }
        out.push_str(match (out.is_empty(), c < 0) {
            (true, true) => "-",
            (true, false) => "",
            (false, true) => " - ",
            (false, false) => " + ",
        });
        match (c.abs(), body) {
            (c, "") => out.push_str(&c.to_string()),
            (1, _) => out.push_str(body),
            (c, _) => out.push_str(&format!("{c}*{body}")),
        }
    }
    if out.is_empty() { "0".into() } else { out }
}

/// `x**power`, `x` or nothing.
pub(super) fn power(letter: char, power: usize) -> String {
    match power {
        0 => String::new(),
        1 => letter.to_string(),
        n => format!("{letter}**{n}"),
    }
}

impl Poly {
    pub(super) fn new(mut coefficients: Vec<i128>) -> Poly {
        while coefficients.last() == Some(&0) {
            coefficients.pop();
        }
        Poly(coefficients)
    }

    /// Of exactly this degree, coefficients up to `max`; lower ones may be zero.
    pub(super) fn draw(draw: &mut Draw, degree: usize, max: i128) -> Poly {
        let mut c: Vec<i128> = (0..degree).map(|_| if draw.below(4) == 0 { 0 } else { draw.int(-max, max) }).collect();
        c.push(draw.nonzero(max));
        Poly(c)
    }

    pub(super) fn at(&self, x: i128) -> i128 {
        self.0.iter().rev().fold(0, |sum, c| sum * x + c)
    }

    pub(super) fn plus(&self, o: &Poly) -> Poly {
        let c = |p: &Poly, n| p.0.get(n).copied().unwrap_or(0);
        Poly::new((0..self.0.len().max(o.0.len())).map(|n| c(self, n) + c(o, n)).collect())
    }

    pub(super) fn scaled(&self, k: i128) -> Poly {
        Poly::new(self.0.iter().map(|c| k * c).collect())
    }

    pub(super) fn times(&self, o: &Poly) -> Poly {
        let mut out = vec![0; (self.0.len() + o.0.len()).saturating_sub(1)];
        for (i, a) in self.0.iter().enumerate() {
            for (j, b) in o.0.iter().enumerate() {
                out[i + j] += a * b;
            }
        }
        Poly::new(out)
    }

    /// `self(inner(x))`.
    pub(super) fn of(&self, inner: &Poly) -> Poly {
        self.0.iter().rev().fold(Poly(vec![]), |sum, &c| sum.times(inner).plus(&Poly::new(vec![c])))
    }

    pub(super) fn text(&self, letter: char) -> String {
        sum(self.0.iter().enumerate().rev().map(|(n, &c)| (c, power(letter, n))))
    }

    /// The same polynomial with terms split in up to `extra` places and in a random order.
    pub(super) fn scrambled(&self, draw: &mut Draw, letter: char, extra: usize, max: i128) -> String {
        let mut terms: Vec<(i128, String)> =
            self.0.iter().enumerate().filter(|(_, c)| **c != 0).map(|(n, &c)| (c, power(letter, n))).collect();
        for _ in 0..extra {
            let body = power(letter, draw.below(self.0.len().max(1)));
            let part = draw.nonzero(max);
            match terms.iter_mut().find(|(c, b)| *b == body && *c != part) {
                Some(term) => term.0 -= part,
                None => terms.push((-part, body.clone())),
            }
            terms.push((part, body));
        }
        draw.shuffle(&mut terms);
        sum(terms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_arithmetic() {
        let p = Poly::new(vec![1, -1, 3, 0]);
        assert_eq!(p.text('x'), "3*x**2 - x + 1");
        assert_eq!(Poly::new(vec![0, 0]).text('x'), "0");
        assert_eq!(Poly::new(vec![0, 0, 0, -1]).text('y'), "-y**3");
        let q = Poly::new(vec![2, 5]);
        for x in -3..4 {
            assert_eq!(p.times(&q).at(x), p.at(x) * q.at(x));
            assert_eq!(p.of(&q).at(x), p.at(q.at(x)));
            assert_eq!(p.plus(&q.scaled(-2)).at(x), p.at(x) - 2 * q.at(x));
        }
    }
}
