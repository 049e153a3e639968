//! The five coefficients of a scaling law and how far they are determined.
//!
//! # The fit
//!
//! The least sum over points of the Huber loss (δ = 10⁻³) of `log(E + A/N^α + B/D^β) - log L`, over log E, log A, log B and
//! the logarithms of the exponents (see `descent.rs`): every coefficient is positive, E may come as near to 0 as the points
//! ask for. log N and log D are centred first, or A and α, B and β would move together. The descent is started from a
//! grid of exponents and of shares that E has in the loss, and the lowest end counts.
//!
//! # Intervals
//!
//! Points are made anew from the law that was found and residuals that were left, the law is fitted to them again, many
//! times, and the interval of a coefficient is what the middle of its refits covers. Three things make such intervals
//! cover what they say where points are few:
//!
//! 1. δ is far below the noise of trainings, so that the fit is one of least absolute values: it goes nearly through five of
//!    the points, and these residuals say nothing about the noise. Only the n - 5 others are drawn from, which makes
//!    their variance Σr²/(n - 5), as it should be.
//! 2. Each is drawn with a random sign: noise is taken to be symmetric, and a few residuals become twice as many.
//! 3. The percentiles are Φ(±t) with Student's t of n - 5 degrees of freedom in place of 2.5 and 97.5 %.
//!
//! How often the true coefficients were inside of their 95 % intervals, with E = 1.69, A = 406, B = 411, α = 0.34, β = 0.28,
//! two decades of N and of D, 300 refits, least and most of the five coefficients, over 400 tables in the first three lines,
//! 300 in the next two, 200 in the last two (the ignored test `coverage` measures some of them again):
//!
//! | points | noise | covered |
//! |---|---|---|
//! | 5 × 5 | 1 %, normal | 94.5 to 96.0 % |
//! | 4 × 3 | 1 %, normal | 97.5 to 98.0 % |
//! | 3 × 3 | 1 %, normal | 95.5 to 97.8 % |
//! | 5 × 5 | 1 % times Student's t with 3 degrees of freedom | 95.0 to 97.7 % |
//! | 5 × 5 | 0.2 %, normal | 94.0 to 97.3 % |
//! | 5 × 5 | 0.03 %, normal | 94.0 to 96.0 % |
//! | 6 × 8 | 1 %, normal | 91.5 to 94.0 % |
//!
//! Not taken, on the grid of 25 with 1 %: drawing points themselves with repetition covers 97 to 100 % (60 tables) with
//! intervals 5 to 11 % wider, and of nine points it leaves six on average, for five coefficients; all residuals as they
//! are cover 84 to 89 % (200 tables), times √(n/(n - 5)) 88 to 95 %, and BCa's corrections to that 85 to 93 % (60 tables).
//! Intervals know of noise only, not of a law that is wrong: they say nothing about sizes far beyond those of the table.

use kumiki_tensor::{Rng, threads};
use serde::{Deserialize, Serialize};

use super::Point;
use super::descent::{Bottom, EXPONENTS, FREE, Logs, Theta, law};
use super::interval::{between, tail};
use crate::{Error, Result};

/// Where the Huber loss turns from squares to absolute values.
const DELTA: f64 = 1e-3;

/// A term that is nowhere more of the loss is none.
const NOTHING: f64 = 1e-6;

/// The fewest points.
pub const FEWEST: usize = FREE + 1;

/// The most points: five numbers need no more.
pub const MOST: usize = 100_000;

/// How a law is fitted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FitOptions {
    /// Refits for the intervals; 0 for none.
    pub bootstrap: usize,
    /// What the refits are drawn with.
    pub seed: u64,
    /// How much of the refits an interval is to cover, between 0 and 1.
    pub level: f64,
}

impl Default for FitOptions {
    fn default() -> FitOptions {
        FitOptions { bootstrap: 1000, seed: 0, level: 0.95 }
    }
}

impl FitOptions {
    /// # Errors
    /// When a number is out of its range.
    pub fn check(&self) -> Result<()> {
        if !(self.bootstrap == 0 || (100..=100_000).contains(&self.bootstrap)) {
            return Err(Error::new(format!(
                "the number of refits (--bootstrap) must be 0 or from 100 to 100000, found {}",
                self.bootstrap
            )));
        }
        if !(self.level > 0.0 && self.level < 1.0) {
            return Err(Error::new(format!("the level of an interval must be between 0 and 1, found {}", self.level)));
        }
        Ok(())
    }
}

/// A coefficient.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// Its value in the fit.
    pub value: f64,
    /// From where to where it lies at the fit's level; absent without refits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<[f64; 2]>,
}

impl std::ops::Deref for Estimate {
    type Target = f64;
    fn deref(&self) -> &f64 {
        &self.value
    }
}

/// A law that was fitted: `L(N, D) = E + A/N^α + B/D^β`, in nats per token. In files the exponents are `a` and `b`, as in tables.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fit {
    /// E: the loss that no size and no number of tokens gets below.
    #[serde(rename = "E")]
    pub e: Estimate,
    /// A.
    #[serde(rename = "A")]
    pub a: Estimate,
    /// B.
    #[serde(rename = "B")]
    pub b: Estimate,
    /// α, of N.
    #[serde(rename = "a")]
    pub alpha: Estimate,
    /// β, of D.
    #[serde(rename = "b")]
    pub beta: Estimate,
    /// β/(α + β): the best N for a compute C ∝ N D grows as C to this.
    pub n_exponent: Estimate,
    /// α/(α + β): the same for D.
    pub d_exponent: Estimate,
    /// Points of the fit.
    pub points: usize,
    /// √(mean r²) of r = log L less that of the law.
    pub rms: f64,
    /// 1 - Σr² / Σ(log L - its mean)².
    pub r2: f64,
    /// The level of the intervals.
    pub level: f64,
    /// Refits that they come from.
    pub bootstrap: usize,
}

impl Fit {
    /// The law's loss of a model with `params` parameters after `tokens` tokens.
    pub fn predict(&self, params: f64, tokens: f64) -> f64 {
        *self.e + *self.a / params.powf(*self.alpha) + *self.b / tokens.powf(*self.beta)
    }
}

/// Fits a law. The result depends on points, their order and the seed, not on the number of threads.
///
/// # Errors
/// With fewer than [`FEWEST`] points, numbers that are not positive and finite, points that cannot tell the five coefficients
/// apart (fewer than three values of N or of D, both moving together, five cells or fewer), and when the best
/// law is without one of its terms.
pub fn fit(points: &[Point], options: &FitOptions) -> Result<Fit> {
    options.check()?;
    check(points)?;
    let table = Centred::of(points);
    let starts = starts(&table.logs);
    let best = lowest(threads::parallel_map(starts.len(), cost(points), |i| table.logs.descend(starts[i], DELTA)));
    degenerate(&table.logs, &best.theta)?;
    let found = table.coefficients(&best.theta);
    if let Some(value) = found.iter().find(|value| !value.is_finite()) {
        return Err(Error::new(format!("the fit is degenerate: a coefficient is {value}")));
    }
    let residuals = table.logs.residuals(&best.theta);
    let refits = if options.bootstrap == 0 { vec![] } else { refits(&table, &best.theta, &residuals, options) };
    let outside = tail(options.level, points.len() - FREE);
    let estimate = |k: usize| Estimate {
        value: found[k],
        interval: (!refits.is_empty()).then(|| between(refits.iter().map(|refit| refit[k]).collect(), outside)),
    };
    let squares: f64 = residuals.iter().map(|r| r * r).sum();
    // log L is not centred.
    let n = points.len() as f64;
    let mean = table.logs.z.iter().sum::<f64>() / n;
    let spread: f64 = table.logs.z.iter().map(|z| (z - mean).powi(2)).sum();
    let [e, a, b, alpha, beta, n_exponent, d_exponent] = std::array::from_fn(estimate);
    let (rms, r2) = ((squares / n).sqrt(), 1.0 - squares / spread);
    if r2 <= 0.0 {
        return Err(Error::new(format!(
            "the best law explains the losses no better than their mean does (R² = {r2:.3}): they follow no such law"
        )));
    }
    let (level, bootstrap) = (options.level, options.bootstrap);
    Ok(Fit { e, a, b, alpha, beta, n_exponent, d_exponent, points: points.len(), rms, r2, level, bootstrap })
}

/// # Errors
/// As [`fit`], for all that can be known before it.
fn check(points: &[Point]) -> Result<()> {
    for (i, point) in points.iter().enumerate() {
        for (what, value) in [("params", point.params), ("tokens", point.tokens), ("loss", point.loss)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(Error::new(format!("point {}: {what} must be finite and above 0, found {value}", i + 1)));
            }
        }
    }
    let distinct = |of: &dyn Fn(&Point) -> Vec<f64>| {
        let mut values: Vec<Vec<f64>> = points.iter().map(of).collect();
        values.sort_by(|a, b| a.partial_cmp(b).expect("finite"));
        values.dedup();
        values.len()
    };
    let cells = distinct(&|p| vec![p.params, p.tokens]);
    let found = points.len();
    if found < FEWEST || cells < FREE {
        let one = if cells == 1 { "one cell of N and D makes no fit: " } else { "" };
        return Err(Error::new(format!(
            "{one}a law of {FREE} coefficients needs at least {FEWEST} points in {FREE} cells of N and D, found {found} in \
             {cells}"
        )));
    }
    if found > MOST {
        return Err(Error::new(format!("at most {MOST} points are fitted, found {found}; a sample of them will do")));
    }
    for (name, term, values) in
        [("N", "A/N^a", distinct(&|p| vec![p.params])), ("D", "B/D^b", distinct(&|p| vec![p.tokens]))]
    {
        if values < 3 {
            let have =
                if values == 1 { "all points have the same".to_owned() } else { "there are two values of".into() };
            return Err(Error::new(format!(
                "{have} {name}: {term} cannot be told from E with fewer than three values of {name}"
            )));
        }
    }
    let losses = distinct(&|p| vec![p.loss]);
    if losses == 1 {
        return Err(Error::new("all losses are the same: there is nothing to fit"));
    }
    // With D a power of N the two terms are one curve.
    let Logs { x, y, .. } = Centred::of(points).logs;
    let sum = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    if sum(&x, &y).powi(2) > (1.0 - 1e-6) * sum(&x, &x) * sum(&y, &y) {
        return Err(Error::new(
            "N and D move together in all points, so that A/N^a and B/D^b cannot be told apart; vary one while the \
             other stays",
        ));
    }
    Ok(())
}

/// # Errors
/// When a term has no part in the law, or its exponent ended at a bound.
fn degenerate(logs: &Logs, theta: &Theta) -> Result<()> {
    let shares: Vec<[f64; 3]> = logs.x.iter().zip(&logs.y).map(|(&x, &y)| law(theta, x, y).1).collect();
    for (k, term, what) in [(1, "A/N^a", "N"), (2, "B/D^b", "D")] {
        let (share, exponent) = (shares.iter().map(|p| p[k]).fold(0.0, f64::max), theta[k + 2].exp());
        let ended = |bound: f64| (exponent / bound - 1.0).abs() < 1e-6;
        let why = if share < NOTHING {
            format!("{term} vanishes: the losses do not fall with {what}")
        } else if ended(EXPONENTS.0) {
            format!(
                "the exponent of {term} falls to 0: the losses do not level off as {what} grows, as far as these points go"
            )
        } else if ended(EXPONENTS.1) {
            format!("the exponent of {term} rises to {}: only the least {what} has losses of its own", EXPONENTS.1)
        } else {
            continue;
        };
        return Err(Error::new(format!("the fit is degenerate: {why}")));
    }
    Ok(())
}

/// Operations of a descent, about: what a thread is woken up for.
fn cost(points: &[Point]) -> usize {
    10_000 * points.len()
}

/// Points, and the means that were taken off.
struct Centred {
    logs: Logs,
    x: f64,
    y: f64,
}

impl Centred {
    fn of(points: &[Point]) -> Centred {
        let of = |value: &dyn Fn(&Point) -> f64| points.iter().map(|point| value(point).ln()).collect::<Vec<_>>();
        let (mut x, mut y, z) = (of(&|p| p.params), of(&|p| p.tokens), of(&|p| p.loss));
        let [mean_x, mean_y] = [&mut x, &mut y].map(|values| {
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            values.iter_mut().for_each(|value| *value -= mean);
            mean
        });
        Centred { logs: Logs { x, y, z }, x: mean_x, y: mean_y }
    }

    /// E, A, B, α, β, β/(α + β), α/(α + β).
    fn coefficients(&self, theta: &Theta) -> [f64; 7] {
        let (alpha, beta) = (theta[3].exp(), theta[4].exp());
        let (a, b) = ((theta[1] + alpha * self.x).exp(), (theta[2] + beta * self.y).exp());
        [theta[0].exp(), a, b, alpha, beta, beta / (alpha + beta), alpha / (alpha + beta)]
    }
}

/// The grid: exponents, and what share of the least loss E is; the terms share what E leaves at the mean.
fn starts(logs: &Logs) -> Vec<Theta> {
    let least = logs.z.iter().copied().fold(f64::INFINITY, f64::min);
    let mean = logs.z.iter().sum::<f64>() / logs.z.len() as f64;
    let mut starts = Vec::new();
    for share in [0.05, 0.5, 0.9f64] {
        let e = least + share.ln();
        let term = (0.5 * (mean.exp() - e.exp())).ln();
        for alpha in [0.1, 0.3, 0.6, 1.2f64] {
            starts.extend([0.1, 0.3, 0.6, 1.2f64].map(|beta| [e, term, term, alpha.ln(), beta.ln()]));
        }
    }
    starts
}

/// The lowest, of equal ones the first.
fn lowest(bottoms: impl IntoIterator<Item = Bottom>) -> Bottom {
    bottoms.into_iter().min_by(|a, b| a.loss.total_cmp(&b.loss)).expect("at least one start")
}

/// The coefficients of every refit.
fn refits(table: &Centred, theta: &Theta, residuals: &[f64], options: &FitOptions) -> Vec<[f64; 7]> {
    let Logs { x, y, .. } = &table.logs;
    let law: Vec<f64> = x.iter().zip(y).map(|(&x, &y)| law(theta, x, y).0).collect();
    let mut sizes: Vec<f64> = residuals.iter().map(|r| r.abs()).collect();
    sizes.sort_by(f64::total_cmp);
    let noise = &sizes[FREE..];
    // Beside the fit, little and much of the loss as E: where refits would be caught if they were.
    let least = table.logs.z.iter().copied().fold(f64::INFINITY, f64::min);
    let with = |share: f64| [least + share.ln(), theta[1], theta[2], theta[3], theta[4]];
    let starts = [*theta, with(0.1), with(0.9)];
    let base = Rng::new(options.seed).fork("scaling law");
    threads::parallel_map(options.bootstrap, 3_000 * residuals.len(), |i| {
        let mut rng = base.fork(&i.to_string());
        let mut drawn = || {
            let bits = rng.below(2 * noise.len() as u64) as usize;
            if bits.is_multiple_of(2) { noise[bits / 2] } else { -noise[bits / 2] }
        };
        let z = law.iter().map(|f| f + drawn()).collect();
        let logs = Logs { x: x.clone(), y: y.clone(), z };
        table.coefficients(&lowest(starts.map(|start| logs.descend(start, DELTA))).theta)
    })
}

#[cfg(test)]
#[path = "fit_tests.rs"]
mod tests;
