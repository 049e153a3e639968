//! Percentiles of refits, as far out as few points ask for.

/// The share of refits to leave out at each end for an interval of the given level after a fit with `freedom` more points
/// than coefficients: Φ(-t), with t the quantile of Student's distribution. Percentiles alone are those of a normal
/// distribution of known width, and too narrow where the width itself is guessed from a few residuals.
pub(super) fn tail(level: f64, freedom: usize) -> f64 {
    let (mut low, mut high) = (0.0, 1e6);
    for _ in 0..100 {
        let middle = 0.5 * (low + high);
        if within(middle, freedom) < level {
            low = middle;
        } else {
            high = middle;
        }
    }
    below(low)
}

/// How likely a number of Student's distribution is within ±t. For whole degrees of freedom this is a finite sum
/// (Abramowitz and Stegun, 26.7.3 and 26.7.4).
fn within(t: f64, freedom: usize) -> f64 {
    let angle = (t / (freedom as f64).sqrt()).atan();
    let (sin, cos) = angle.sin_cos();
    let odd = freedom % 2 == 1;
    let (mut sum, mut term) = (0.0, if odd { cos } else { 1.0 });
    let first = if odd { 1 } else { 0 };
    for power in (first..=freedom.saturating_sub(2)).step_by(2) {
        sum += term;
        term *= (power + 1) as f64 / (power + 2) as f64 * cos * cos;
    }
    if odd { (angle + sin * sum) * std::f64::consts::FRAC_2_PI } else { sin * sum }
}

/// Φ(-t) for t from 0, by the series of the error function; what is lost in the difference is far below one refit.
fn below(t: f64) -> f64 {
    if t > 8.0 {
        return 0.0;
    }
    let (mut sum, mut term, mut k) = (0.0, t, 1.0);
    while term > 1e-18 * (sum + 1e-300) {
        sum += term;
        k += 2.0;
        term *= t * t / k;
    }
    (0.5 - sum * (-0.5 * t * t).exp() / std::f64::consts::TAU.sqrt()).max(0.0)
}

/// The numbers that leave the share `tail` of `values` outside at each end, straight between neighbours.
///
/// # Panics
/// When there are none.
pub(super) fn between(mut values: Vec<f64>, tail: f64) -> [f64; 2] {
    values.sort_by(f64::total_cmp);
    let last = values.len() - 1;
    [tail, 1.0 - tail].map(|share| {
        let place = share * last as f64;
        let at = (place as usize).min(last);
        let next = values[(at + 1).min(last)];
        values[at] + (place - at as f64) * (next - values[at])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tails_are_those_of_the_tables() {
        // Two-sided 95 % quantiles of Student's distribution, and Φ of their negatives.
        for (freedom, t, phi) in
            [(2, 4.302_653, 8.437e-6), (5, 2.570_582, 0.005_077), (7, 2.364_624, 0.009_024), (20, 2.085_963, 0.018_490)]
        {
            assert!((within(t, freedom) - 0.95).abs() < 1e-6, "{freedom}");
            assert!((tail(0.95, freedom) / phi - 1.0).abs() < 1e-3, "{freedom}: {}", tail(0.95, freedom));
        }
        assert!((within(1.0, 1) - 0.5).abs() < 1e-12 && tail(0.95, 1) == 0.0);
        assert!((tail(0.95, 100_000) - 0.025).abs() < 1e-4 && (tail(0.5, 100_000) - 0.25).abs() < 1e-4);
        assert!((below(1.0) - 0.158_655_254).abs() < 1e-9 && below(0.0) == 0.5 && below(7.9) < 1e-14);
    }

    #[test]
    fn percentiles_lie_between_neighbours() {
        let values = || vec![3.0, 1.0, 2.0, 5.0, 4.0];
        assert_eq!(between(values(), 0.0), [1.0, 5.0]);
        assert_eq!(between(values(), 0.125), [1.5, 4.5]);
        assert_eq!(between(vec![7.0], 0.1), [7.0, 7.0]);
    }
}
