//! Exact rationals over `i128`. Every operation is checked: overflow and division by zero panic with the operands, they
//! never give a wrong answer.

use std::cmp::Ordering;
use std::fmt;
use std::ops::{Add, Div, Mul, Neg, Sub};

/// A reduced fraction with a positive denominator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ratio {
    pub(super) num: i128,
    pub(super) den: i128,
}

pub(super) fn gcd(a: i128, b: i128) -> i128 {
    let (mut a, mut b) = (a.abs(), b.abs());
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

fn checked(value: Option<i128>) -> i128 {
    value.expect("rational arithmetic overflows i128")
}

impl Ratio {
    pub(super) fn new(num: i128, den: i128) -> Ratio {
        assert!(den != 0, "division of {num} by zero");
        let g = gcd(num, den) * den.signum();
        Ratio { num: num / g, den: den / g }
    }

    pub(super) fn is_zero(self) -> bool {
        self.num == 0
    }

    pub(super) fn is_integer(self) -> bool {
        self.den == 1
    }

    pub(super) fn abs(self) -> Ratio {
        Ratio { num: self.num.abs(), den: self.den }
    }

    /// The exact decimal expansion, `-0.125`; `None` if it does not end.
    pub(super) fn decimal(self) -> Option<String> {
        let (mut den, mut twos, mut fives) = (self.den, 0u32, 0u32);
        while den % 2 == 0 {
            den /= 2;
            twos += 1;
        }
        while den % 5 == 0 {
            den /= 5;
            fives += 1;
        }
        if den != 1 {
            return None;
        }
        let places = twos.max(fives);
        let unit = 10i128.checked_pow(places)?;
        let digits = self.num.abs().checked_mul(unit / self.den)?;
        let sign = if self.num < 0 { "-" } else { "" };
        let (whole, part) = (digits / unit, digits % unit);
        Some(match places {
            0 => format!("{sign}{whole}"),
            _ => format!("{sign}{whole}.{part:0width$}", width = places as usize),
        })
    }
}

impl From<i128> for Ratio {
    fn from(n: i128) -> Ratio {
        Ratio { num: n, den: 1 }
    }
}

impl Add for Ratio {
    type Output = Ratio;
    fn add(self, o: Ratio) -> Ratio {
        let g = gcd(self.den, o.den);
        let left = checked(self.num.checked_mul(o.den / g));
        let right = checked(o.num.checked_mul(self.den / g));
        Ratio::new(checked(left.checked_add(right)), checked(self.den.checked_mul(o.den / g)))
    }
}

impl Neg for Ratio {
    type Output = Ratio;
    fn neg(self) -> Ratio {
        Ratio { num: checked(self.num.checked_neg()), den: self.den }
    }
}

impl Sub for Ratio {
    type Output = Ratio;
    fn sub(self, o: Ratio) -> Ratio {
        self + -o
    }
}

impl Mul for Ratio {
    type Output = Ratio;
    fn mul(self, o: Ratio) -> Ratio {
        // Reduced crosswise first, so only results that do not fit overflow.
        let (a, b) = (Ratio::new(self.num, o.den), Ratio::new(o.num, self.den));
        Ratio { num: checked(a.num.checked_mul(b.num)), den: checked(a.den.checked_mul(b.den)) }
    }
}

impl Div for Ratio {
    type Output = Ratio;
    fn div(self, o: Ratio) -> Ratio {
        self * Ratio::new(o.den, o.num)
    }
}

impl Ord for Ratio {
    fn cmp(&self, o: &Ratio) -> Ordering {
        (*self - *o).num.cmp(&0)
    }
}

impl PartialOrd for Ratio {
    fn partial_cmp(&self, o: &Ratio) -> Option<Ordering> {
        Some(self.cmp(o))
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.den {
            1 => write!(f, "{}", self.num),
            _ => write!(f, "{}/{}", self.num, self.den),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn r(num: i128, den: i128) -> Ratio {
        Ratio::new(num, den)
    }

    #[test]
    fn field_laws_on_a_grid() {
        let grid: Vec<Ratio> = (-4..=4).flat_map(|n| (1..=4).map(move |d| r(n, d))).collect();
        for &a in &grid {
            for &b in &grid {
                assert_eq!(a + b - b, a);
                assert_eq!((a + b) * (a - b), a * a - b * b);
                assert_eq!(a < b, a.num as f64 / (a.den as f64) < b.num as f64 / b.den as f64);
                if !b.is_zero() {
                    assert_eq!(a / b * b, a);
                }
            }
        }
    }

    #[test]
    fn text() {
        assert_eq!(r(-6, -4).to_string(), "3/2");
        assert_eq!(r(6, -3).to_string(), "-2");
        assert_eq!(r(-1, 8).decimal().unwrap(), "-0.125");
        assert_eq!(r(1203, 100).decimal().unwrap(), "12.03");
        assert_eq!(r(5, 1).decimal().unwrap(), "5");
        assert_eq!(r(1, 20).decimal().unwrap(), "0.05");
        assert_eq!(r(1, 3).decimal(), None);
    }

    #[test]
    #[should_panic(expected = "overflows")]
    fn overflow_is_never_silent() {
        let _ = r(i128::MAX, 1) + r(1, 1);
    }

    #[test]
    #[should_panic(expected = "by zero")]
    fn division_by_zero_panics() {
        let _ = r(1, 1) / r(0, 1);
    }
}
