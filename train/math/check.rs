//! An independent reader of question texts, for tests only: the generators build text from values, this computes values
//! from text. It evaluates expressions over truncated Taylor series, so derivatives come with them.

use super::draw::{Draw, Level};
use super::ratio::Ratio;
use super::{Pair, find};

/// Coefficients of 1, ε, ε², ε³.
pub(super) type Series = [Ratio; 4];

pub(super) fn constant(v: Ratio) -> Series {
    [v, Ratio::from(0), Ratio::from(0), Ratio::from(0)]
}

/// Calls `check(question, answer, level)` for many pairs of a module.
pub(super) fn each(module: &str, mut check: impl FnMut(&str, &str, Level)) {
    let module = find(module).unwrap();
    for level in [Level::Easy, Level::Medium, Level::Hard] {
        for n in 0..250 {
            let Pair { question, answer } = (module.make)(&mut Draw::new([99, n, level as u64, 0]), level);
            check(&question, &answer, level);
        }
    }
}

/// The text without words (two letters or more) and sentence marks: what remains is mathematics.
pub(super) fn symbols(text: &str) -> String {
    let mut out = String::new();
    let mut run = String::new();
    for c in text.chars().chain(['\0']) {
        if c.is_ascii_alphanumeric() {
            run.push(c);
            continue;
        }
        if run.len() < 2 || run.starts_with(|c: char| c.is_ascii_digit()) {
            out.push_str(&run);
        }
        run.clear();
        if c != '\0' {
            out.push(c);
        }
    }
    out.trim().trim_end_matches(['.', '?']).trim().to_owned()
}

/// All signed integers in a text.
pub(super) fn integers(text: &str) -> Vec<i128> {
    text.split(|c: char| !c.is_ascii_digit() && c != '-').filter_map(|n| n.parse().ok()).collect()
}

/// A number as written: `-3`, `2/7`, `0.25`.
pub(super) fn number(text: &str) -> Ratio {
    eval(text, &[])
}

/// The value of an expression with letters set to values.
pub(super) fn eval(text: &str, letters: &[(char, i128)]) -> Ratio {
    let letters: Vec<(char, Series)> = letters.iter().map(|&(c, v)| (c, constant(v.into()))).collect();
    series(text, &letters)[0]
}

pub(super) fn series(text: &str, letters: &[(char, Series)]) -> Series {
    let chars: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
    let mut reader = Reader { chars: &chars, at: 0, letters };
    let value = reader.sum();
    assert_eq!(reader.at, chars.len(), "`{text}` is read up to {}", reader.at);
    value
}

struct Reader<'a> {
    chars: &'a [char],
    at: usize,
    letters: &'a [(char, Series)],
}

impl Reader<'_> {
    fn take(&mut self, text: &str) -> bool {
        let text: Vec<char> = text.chars().collect();
        let found = self.chars[self.at..].starts_with(&text);
        self.at += if found { text.len() } else { 0 };
        found
    }

    fn sum(&mut self) -> Series {
        let mut total = self.product();
        loop {
            if self.take("+") {
                let right = self.product();
                total = std::array::from_fn(|n| total[n] + right[n]);
            } else if self.take("-") {
                let right = self.product();
                total = std::array::from_fn(|n| total[n] - right[n]);
            } else {
                return total;
            }
        }
    }

    fn product(&mut self) -> Series {
        let mut total = self.factor();
        loop {
            if !self.chars[self.at..].starts_with(&['*', '*']) && self.take("*") {
                total = times(total, self.factor());
            } else if self.take("/") {
                total = times(total, inverse(self.factor()));
            } else {
                return total;
            }
        }
    }

    fn factor(&mut self) -> Series {
        if self.take("-") {
            return self.factor().map(|c| -c);
        }
        let base = self.atom();
        if self.take("**") {
            let exponent = self.factor()[0];
            assert!(exponent.is_integer() && exponent.num >= 0);
            return (0..exponent.num).fold(constant(1.into()), |p, _| times(p, base));
        }
        base
    }

    fn atom(&mut self) -> Series {
        if self.take("(") {
            let inner = self.sum();
            assert!(self.take(")"));
            return inner;
        }
        let rest = &self.chars[self.at..];
        let length = rest.iter().take_while(|c| c.is_ascii_digit() || **c == '.').count();
        if length == 0 {
            let letter = *rest.first().expect("expression ends too early");
            self.at += 1;
            return self.letters.iter().find(|(c, _)| *c == letter).unwrap_or_else(|| panic!("letter {letter}")).1;
        }
        self.at += length;
        let text: String = rest[..length].iter().collect();
        let (whole, part) = text.split_once('.').unwrap_or((&text, ""));
        constant(Ratio::new(format!("{whole}{part}").parse().unwrap(), 10i128.pow(part.len() as u32)))
    }
}

fn times(a: Series, b: Series) -> Series {
    std::array::from_fn(|n| (0..=n).fold(Ratio::from(0), |sum, k| sum + a[k] * b[n - k]))
}

fn inverse(a: Series) -> Series {
    let mut out = constant(Ratio::from(1) / a[0]);
    for n in 1..4 {
        let sum = (1..=n).fold(Ratio::from(0), |sum, k| sum + a[k] * out[n - k]);
        out[n] = -(sum * out[0]);
    }
    out
}

#[test]
fn the_reader_itself() {
    assert_eq!(eval("-2*(3 - -4)/7 + 2**3 - 0.5", &[]).to_string(), "11/2");
    assert_eq!(eval("-x**2 + x", &[('x', 3)]).to_string(), "-6");
    let x = [Ratio::from(2), Ratio::from(1), Ratio::from(0), Ratio::from(0)];
    let cube = series("x**3", &[('x', x)]).map(|r| r.to_string());
    assert_eq!(cube, ["8", "12", "6", "1"]);
    assert_eq!(series("1/x", &[('x', x)])[1].to_string(), "-1/4");
    assert_eq!(symbols("Solve -3*x + 1 = 4 for x."), "-3*x + 1 = 4  x");
    assert_eq!(integers("from -3 to 12, 5"), [-3, 12, 5]);
}
