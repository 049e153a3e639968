//! The least sum of Huber losses of the logarithm of `E + A/N^α + B/D^β`: a damped Newton descent of five numbers.
//!
//! With x = log N and y = log D less their means, and θ = (e, a, b, u, v), the logarithm of the law is
//!
//! ```text
//! f(θ) = log(exp(e) + exp(a - exp(u) x) + exp(b - exp(v) y))      r = f - log L      F = Σ h(r)
//! ```
//!
//! where h is r²/2 up to |r| = δ and δ (|r| - δ/2) beyond. Exponents are exp(u) and exp(v): positive by themselves. With the
//! shares p of the three terms, and z their logarithms, ∇f = Σ p ∇z and ∇²f = Σ p (∇z ∇zᵀ + ∇²z) - ∇f ∇fᵀ, so
//!
//! ```text
//! ∇F = Σ h'(r) ∇f      H = Σ h''(r) ∇f ∇fᵀ + h'(r) ∇²f      W = Σ h'(r)/r ∇f ∇fᵀ
//! ```
//!
//! W is the curvature of the parabolas that touch h from above (iteratively reweighted least squares): its steps go
//! downhill from anywhere, but slowly, as δ is far below the noise and F nearly a sum of absolute values. A step solves
//! `(H + λ W) s = -∇F`; λ falls with every step that goes downhill, up to Newton's own, and grows with every one that does not.

/// Coefficients of the law.
pub(super) const FREE: usize = 5;

/// `log E, log A', log B', log α, log β`, with A' and B' the terms at the mean of log N and log D.
pub(super) type Theta = [f64; FREE];

type Matrix = [[f64; FREE]; FREE];

/// Exponents beyond these say nothing: a term is constant, or falls within a hair's breadth of N or D.
pub(super) const EXPONENTS: (f64, f64) = (1e-3, 10.0);

/// How far below or above the losses a term may be, in logarithms.
const DEPTH: f64 = 30.0;

/// Steps of a descent, at most.
const STEPS: usize = 300;

/// Points as the descent sees them.
#[derive(Clone)]
pub(super) struct Logs {
    /// log N less its mean.
    pub x: Vec<f64>,
    /// log D less its mean.
    pub y: Vec<f64>,
    /// log L.
    pub z: Vec<f64>,
}

/// Where a descent ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Bottom {
    pub theta: Theta,
    pub loss: f64,
}

/// The law's logarithm at a centred point and the shares of its three terms.
pub(super) fn law(theta: &Theta, x: f64, y: f64) -> (f64, [f64; 3]) {
    let terms = [theta[0], theta[1] - theta[3].exp() * x, theta[2] - theta[4].exp() * y];
    let top = terms.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let parts = terms.map(|term| (term - top).exp());
    let sum: f64 = parts.iter().sum();
    (top + sum.ln(), parts.map(|part| part / sum))
}

impl Logs {
    /// `log L` of the law less that of the points.
    pub fn residuals(&self, theta: &Theta) -> Vec<f64> {
        (0..self.z.len()).map(|i| law(theta, self.x[i], self.y[i]).0 - self.z[i]).collect()
    }

    fn loss(&self, theta: &Theta, delta: f64) -> f64 {
        self.residuals(theta).iter().map(|r| huber(*r, delta)).sum()
    }

    /// ∇F, H and W.
    fn slopes(&self, theta: &Theta, delta: f64) -> (Theta, Matrix, Matrix) {
        let (mut gradient, mut newton, mut touching) = ([0.0; FREE], [[0.0; FREE]; FREE], [[0.0; FREE]; FREE]);
        for i in 0..self.z.len() {
            let (f, p) = law(theta, self.x[i], self.y[i]);
            let r = f - self.z[i];
            let (slope, weight) = (r.clamp(-delta, delta), if r.abs() <= delta { 1.0 } else { delta / r.abs() });
            // dz/du and d²z/du² are the same.
            let du = -theta[3].exp() * self.x[i];
            let dv = -theta[4].exp() * self.y[i];
            let df = [p[0], p[1], p[2], p[1] * du, p[2] * dv];
            let mut second = [[0.0; FREE]; FREE];
            (0..3).for_each(|k| second[k][k] = p[k]);
            for (k, d) in [(1, du), (2, dv)] {
                second[k][k + 2] = p[k] * d;
                second[k + 2][k] = p[k] * d;
                second[k + 2][k + 2] = p[k] * (d * d + d);
            }
            let inside = f64::from(u8::from(r.abs() <= delta));
            for j in 0..FREE {
                gradient[j] += slope * df[j];
                for k in 0..FREE {
                    let square = df[j] * df[k];
                    newton[j][k] += inside * square + slope * (second[j][k] - square);
                    touching[j][k] += weight * square;
                }
            }
        }
        (gradient, newton, touching)
    }

    /// The bottom below `start`: F falls with every step, and the end is where no step makes it fall.
    pub fn descend(&self, start: Theta, delta: f64) -> Bottom {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        self.z.iter().for_each(|z| (low, high) = (low.min(*z), high.max(*z)));
        let exponents = (EXPONENTS.0.ln(), EXPONENTS.1.ln());
        let bounds = |j: usize| if j < 3 { (low - DEPTH, high + DEPTH) } else { exponents };
        let mut theta: Theta = std::array::from_fn(|j| start[j].clamp(bounds(j).0, bounds(j).1));
        let (mut loss, mut lambda) = (self.loss(&theta, delta), 1.0f64);
        let mut idle = 0;
        for _ in 0..STEPS {
            let (gradient, newton, touching) = self.slopes(&theta, delta);
            // What leans on its bound stays there.
            let fixed: [bool; FREE] = std::array::from_fn(|j| {
                theta[j] <= bounds(j).0 && gradient[j] > 0.0 || theta[j] >= bounds(j).1 && gradient[j] < 0.0
            });
            let before = loss;
            while lambda < 1e12 {
                let mut matrix: Matrix =
                    std::array::from_fn(|j| std::array::from_fn(|k| newton[j][k] + lambda * touching[j][k]));
                let most = (0..FREE).map(|j| touching[j][j]).fold(f64::MIN_POSITIVE, f64::max);
                for j in 0..FREE {
                    // A term that vanishes has no curvature.
                    matrix[j][j] += lambda * 1e-9 * most + 1e-14 * most;
                    if fixed[j] {
                        (0..FREE).for_each(|k| (matrix[j][k], matrix[k][j]) = (0.0, 0.0));
                        matrix[j][j] = 1.0;
                    }
                }
                let right = std::array::from_fn(|j| if fixed[j] { 0.0 } else { -gradient[j] });
                if let Some(step) = solve(&matrix, right) {
                    let next: Theta =
                        std::array::from_fn(|j| (theta[j] + step[j].clamp(-2.0, 2.0)).clamp(bounds(j).0, bounds(j).1));
                    let found = self.loss(&next, delta);
                    if found < loss {
                        (theta, loss, lambda) = (next, found, (lambda / 8.0).max(1e-9));
                        break;
                    }
                }
                lambda *= 4.0;
            }
            idle = if before - loss <= 1e-10 * before { idle + 1 } else { 0 };
            if idle == 3 || loss == before {
                break;
            }
        }
        Bottom { theta, loss }
    }
}

fn huber(r: f64, delta: f64) -> f64 {
    if r.abs() <= delta { 0.5 * r * r } else { delta * (r.abs() - 0.5 * delta) }
}

/// The solution by Cholesky's decomposition; `None` when `matrix` is not positive definite.
fn solve(matrix: &Matrix, mut right: Theta) -> Option<Theta> {
    let mut root = [[0.0; FREE]; FREE];
    for j in 0..FREE {
        for k in 0..=j {
            let rest = matrix[j][k] - (0..k).map(|i| root[j][i] * root[k][i]).sum::<f64>();
            if j == k && !(rest > 0.0 && rest.is_finite()) {
                return None;
            }
            root[j][k] = if j == k { rest.sqrt() } else { rest / root[k][k] };
        }
    }
    for j in 0..FREE {
        right[j] = (right[j] - (0..j).map(|i| root[j][i] * right[i]).sum::<f64>()) / root[j][j];
    }
    for j in (0..FREE).rev() {
        right[j] = (right[j] - (j + 1..FREE).map(|i| root[i][j] * right[i]).sum::<f64>()) / root[j][j];
    }
    Some(right)
}
