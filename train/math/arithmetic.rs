//! Arithmetic: sums, products and quotients of integers and decimals, nested expressions, other bases, roots.

use super::draw::{Draw, Level};
use super::numbers::in_base;
use super::ratio::Ratio;
use super::{Module, Pair};

pub(super) const MODULES: &[Module] = &[
    Module { name: "arithmetic__add_or_sub", make: add_or_sub },
    Module { name: "arithmetic__add_or_sub_in_base", make: add_or_sub_in_base },
    Module { name: "arithmetic__add_sub_multiple", make: add_sub_multiple },
    Module { name: "arithmetic__div", make: div },
    Module { name: "arithmetic__mixed", make: mixed },
    Module { name: "arithmetic__mul", make: mul },
    Module { name: "arithmetic__mul_div_multiple", make: mul_div_multiple },
    Module { name: "arithmetic__nearest_integer_root", make: nearest_integer_root },
];

const EVALUATE: &[&str] =
    &["How much is {}?", "Find the value of {}.", "Compute {}.", "{} = ?", "Reduce {} to one number."];

/// An integer or a decimal of either sign, and how it is written.
fn decimal(draw: &mut Draw, level: Level) -> (String, Ratio) {
    let most = level.of(3, 6, 10);
    let mantissa = draw.signed(1, most);
    let places = if draw.coin() { 0 } else { draw.int(1, most.into()) as u32 };
    let value = Ratio::new(mantissa, 10i128.pow(places));
    (written(value), value)
}

fn written(value: Ratio) -> String {
    value.decimal().expect("denominators are powers of ten")
}

fn add_or_sub(draw: &mut Draw, level: Level) -> Pair {
    let ((a_text, a), (b_text, b)) = (decimal(draw, level), decimal(draw, level));
    let (text, value) = match draw.below(5) {
        0 => (format!("What do you get by adding {a_text} to {b_text}?"), a + b),
        1 => (format!("Subtract {a_text} from {b_text}."), b - a),
        2 => (format!("How far apart are {a_text} and {b_text}?"), (a - b).abs()),
        3 => (draw.phrase(EVALUATE, format!("{a_text} + {b_text}")), a + b),
        _ => (draw.phrase(EVALUATE, format!("{a_text} - {b_text}")), a - b),
    };
    Pair { question: text, answer: written(value) }
}

fn mul(draw: &mut Draw, level: Level) -> Pair {
    let ((a_text, a), (b_text, b)) = (decimal(draw, level), decimal(draw, level));
    let question = match draw.below(3) {
        0 => format!("What is {a_text} multiplied by {b_text}?"),
        1 => format!("Give the product of {a_text} and {b_text}."),
        _ => draw.phrase(EVALUATE, format!("{a_text} * {b_text}")),
    };
    Pair { question, answer: written(a * b) }
}

fn div(draw: &mut Draw, level: Level) -> Pair {
    let divisor = draw.signed(1, level.of(2, 4, 7));
    let dividend = match draw.coin() {
        true => divisor * draw.signed(1, level.of(2, 4, 6)),
        false => draw.signed(1, level.of(3, 5, 8)),
    };
    let question = match draw.below(3) {
        0 => format!("What is {dividend} over {divisor} as a whole number or reduced fraction?"),
        1 => format!("By what must {divisor} be multiplied to give {dividend}?"),
        _ => draw.phrase(EVALUATE, format!("{dividend} / {divisor}")),
    };
    Pair { question, answer: Ratio::new(dividend, divisor).to_string() }
}

#[derive(Clone, Copy, PartialEq)]
enum Shape {
    Sum,
    Product,
    Number,
    Negative,
}

struct Expression {
    text: String,
    value: Ratio,
    shape: Shape,
}

impl Expression {
    fn inside(&self, brackets: bool) -> String {
        if brackets { format!("({})", self.text) } else { self.text.clone() }
    }
}

/// A random expression of `leaves` integers up to `max` joined by `ops`; never divides by zero.
fn expression(draw: &mut Draw, ops: &[char], leaves: usize, max: i128) -> Expression {
    if leaves == 1 {
        let n = draw.int(-max, max);
        let shape = if n < 0 { Shape::Negative } else { Shape::Number };
        return Expression { text: n.to_string(), value: n.into(), shape };
    }
    let on_left = 1 + draw.below(leaves - 1);
    let left = expression(draw, ops, on_left, max);
    let right = expression(draw, ops, leaves - on_left, max);
    let op = match *draw.pick(ops) {
        '/' if right.value.is_zero() => '*',
        op => op,
    };
    let value = match op {
        '+' => left.value + right.value,
        '-' => left.value - right.value,
        '*' => left.value * right.value,
        _ => left.value / right.value,
    };
    if op == '+' || op == '-' {
        let left_brackets = left.shape == Shape::Sum && draw.coin();
        let (l, r) = (left.inside(left_brackets), right.inside(right.shape == Shape::Sum));
        return Expression { text: format!("{l} {op} {r}"), value, shape: Shape::Sum };
    }
    let l = left.inside(matches!(left.shape, Shape::Sum | Shape::Negative));
    let r = right.inside(right.shape != Shape::Number);
    Expression { text: format!("{l}{op}{r}"), value, shape: Shape::Product }
}

fn evaluate(draw: &mut Draw, level: Level, ops: &[char], max: i128) -> Pair {
    // Answers that a person would not call one: drawn again.
    let largest = level.of(200, 20_000, 2_000_000);
    loop {
        let leaves = draw.int(level.of(2, 4, 6), level.of(4, 6, 9)) as usize;
        let e = expression(draw, ops, leaves, max);
        if e.value.num.abs() <= largest && e.value.den <= largest / 10 {
            return Pair { question: draw.phrase(EVALUATE, e.text), answer: e.value.to_string() };
        }
    }
}

fn add_sub_multiple(draw: &mut Draw, level: Level) -> Pair {
    evaluate(draw, level, &['+', '-'], level.of(20, 60, 200))
}

fn mul_div_multiple(draw: &mut Draw, level: Level) -> Pair {
    evaluate(draw, level, &['*', '/'], level.of(12, 20, 40))
}

fn mixed(draw: &mut Draw, level: Level) -> Pair {
    evaluate(draw, level, &['+', '-', '*', '/'], level.of(12, 20, 40))
}

fn add_or_sub_in_base(draw: &mut Draw, level: Level) -> Pair {
    let base = draw.int(2, 16) as u32;
    let (a, b) = (draw.signed(1, level.of(3, 6, 9)), draw.signed(1, level.of(3, 6, 9)));
    let (op, value) = if draw.coin() { ('+', a + b) } else { ('-', a - b) };
    let sum = format!("{} {op} {}", in_base(a, base), in_base(b, base));
    let phrases = [format!("Working in base {base}, compute {{}}."), format!("How much is {{}} (all in base {base})?")];
    let question = draw.phrase(&[&phrases[0], &phrases[1]], sum);
    Pair { question, answer: in_base(value, base) }
}

fn nearest_integer_root(draw: &mut Draw, level: Level) -> Pair {
    let n = draw.digits(2, level.of(4, 7, 10));
    let k = draw.int(2, level.of(3, 5, 10)) as u32;
    let mut root = (n as f64).powf(1.0 / f64::from(k)) as i128;
    // The float is only a start: the answer is decided by integers, n·2^k against (2·root + 1)^k.
    while n << k > (2 * root + 1).pow(k) {
        root += 1;
    }
    while root > 0 && n << k < (2 * root - 1).pow(k) {
        root -= 1;
    }
    let names = ["square", "cube", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"];
    let name = names[k as usize - 2];
    let question = match draw.coin() {
        true => format!("Which whole number is nearest to the {name} root of {n}?"),
        false => format!("Give {n}**(1/{k}), rounded to a whole number."),
    };
    Pair { question, answer: root.to_string() }
}

#[cfg(test)]
mod tests {
    use super::super::check::{each, eval, integers, number, symbols};
    use super::*;

    #[test]
    fn expressions_evaluate_to_their_answers() {
        for module in ["add_sub_multiple", "mul_div_multiple", "mixed"] {
            each(&format!("arithmetic__{module}"), |q, a, _| {
                assert_eq!(eval(symbols(q).trim_end_matches(" = ?").trim_end_matches(" ="), &[]), number(a), "{q} {a}");
            });
        }
    }

    /// The two numbers of a question, as written with their signs.
    fn two(q: &str) -> [Ratio; 2] {
        let mut numbers = q.split_whitespace().filter_map(|w| {
            let w = w.trim_end_matches([',', '.', '?', ':']);
            w.ends_with(|c: char| c.is_ascii_digit()).then(|| number(w))
        });
        [numbers.next().unwrap(), numbers.next().unwrap()]
    }

    #[test]
    fn sums_products_and_quotients() {
        each("arithmetic__add_or_sub", |q, a, _| {
            let [x, y] = two(q);
            let expected = match () {
                _ if q.contains("adding") || q.contains(" + ") => x + y,
                _ if q.contains("Subtract") => y - x,
                _ if q.contains("apart") => (x - y).abs(),
                _ => x - y,
            };
            assert_eq!(number(a), expected, "{q} {a}");
        });
        each("arithmetic__mul", |q, a, _| assert_eq!(number(a), two(q)[0] * two(q)[1], "{q} {a}"));
        each("arithmetic__div", |q, a, _| {
            let [x, y] = two(q);
            let (dividend, divisor) = if q.contains("multiplied") { (y, x) } else { (x, y) };
            assert_eq!(number(a) * divisor, dividend, "{q} {a}");
        });
    }

    #[test]
    fn sums_in_other_bases() {
        each("arithmetic__add_or_sub_in_base", |q, a, _| {
            let base = q.split("base ").nth(1).unwrap().split([',', ')']).next().unwrap().parse::<u32>().unwrap();
            let sum = q.split("compute ").nth(1).or(q.split("much is ").nth(1)).unwrap();
            let sum = sum.split(" (").next().unwrap().trim_end_matches('.');
            let words: Vec<&str> = sum.split(' ').collect();
            let value = |w: &str| i128::from_str_radix(w, base).unwrap();
            let [x, op, y] = words[..] else { panic!("{q}") };
            let expected = if op == "+" { value(x) + value(y) } else { value(x) - value(y) };
            assert_eq!(value(a), expected, "{q} {a}");
        });
    }

    #[test]
    fn roots_are_the_nearest() {
        each("arithmetic__nearest_integer_root", |q, a, _| {
            let n = integers(q)[0];
            let k = match q.find("(1/") {
                Some(_) => integers(q)[2],
                None => {
                    let names = ["square", "cube", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"];
                    names.iter().position(|w| q.contains(&format!("{w} root"))).unwrap() as i128 + 2
                }
            } as u32;
            let r = Ratio::from(a.parse::<i128>().unwrap());
            let half = Ratio::new(1, 2);
            let power = |x: Ratio| (0..k).fold(Ratio::from(1), |p, _| p * x);
            assert!(power(r - half) < n.into() && power(r + half) > n.into(), "{q} {a}");
        });
    }
}
