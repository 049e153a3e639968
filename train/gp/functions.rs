//! Functions drawn from a [`Prior`]: each a pure function of a stream and its number, so that every compared model learns
//! from the same functions in the same order, for any number of threads.

use kumiki_tensor::{DType, Rng, Tensor, threads};

use super::cholesky::Cholesky;
use super::kernel::{Prior, rbf};
use crate::Result;

/// One function and its noisy observations, in the order in which a model sees them.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// Where it was observed.
    pub x: Vec<f64>,
    /// Its true values there.
    pub f: Vec<f64>,
    /// What was observed: `f` with noise.
    pub y: Vec<f64>,
    /// The length scale of its kernel.
    pub length: f64,
    /// What the kernel matrix needed on its diagonal; see [`Cholesky::of`].
    pub jitter: f64,
}

impl Prior {
    /// Draws a function, and its true values at the points `also`.
    ///
    /// # Errors
    /// When the kernel matrix cannot be factored.
    pub fn draw(&self, rng: &Rng, also: &[f64]) -> Result<(Function, Vec<f64>)> {
        let Prior { points, x_range, length_scale_min: min, length_scale_max: max, noise } = *self;
        let x = rng.fork("x").uniform(DType::F64, &[points], -x_range, x_range).to_f64_vec();
        let exponent = rng.fork("length").next_f64();
        // The clamp keeps a rounding of the logarithm within the bounds.
        let length = (min.ln() + (max.ln() - min.ln()) * exponent).exp().clamp(min, max);
        let all = [&x[..], also].concat();
        let factor = Cholesky::of(all.len(), |i, j| rbf(all[i], all[j], length))?;
        let normal = |label: &str, n: usize| rng.fork(label).normal(DType::F64, &[n], 0.0, 1.0).to_f64_vec();
        let mut f = factor.times(&normal("values", all.len()));
        let rest = f.split_off(points);
        let y = f.iter().zip(normal("noise", points)).map(|(f, z)| f + noise * z).collect();
        Ok((Function { x, f, y, length, jitter: factor.jitter() }, rest))
    }
}

/// An endless sequence of functions.
#[derive(Clone, Debug)]
pub struct Stream {
    prior: Prior,
    rng: Rng,
}

impl Stream {
    /// What models are trained on.
    pub fn training(prior: &Prior, seed: u64) -> Stream {
        Stream { prior: prior.clone(), rng: Rng::new(seed).fork("gp training") }
    }

    /// What they are measured on: the same whatever the run's seed, so that errors of different seeds stay comparable.
    pub fn held_out(prior: &Prior) -> Stream {
        Stream { prior: prior.clone(), rng: Rng::new(0).fork("gp held out") }
    }

    /// The functions `from..from + count`.
    ///
    /// # Errors
    /// As [`Prior::draw`].
    pub fn get(&self, from: u64, count: usize) -> Result<Vec<Function>> {
        let draw = |i: usize| Ok(self.prior.draw(&self.rng.fork(&(from + i as u64).to_string()), &[])?.0);
        threads::parallel_map(count, self.prior.points.pow(3) / 6, draw).into_iter().collect()
    }
}

/// The inputs of a model over one sequence, `(x_t, y_{t-1})` for every `t`; before the first observation 0 stands for one.
pub(crate) fn steps<'a>(x: &'a [f64], y: &'a [f64]) -> impl Iterator<Item = f32> + 'a {
    let before = std::iter::once(0.0).chain(y.iter().copied());
    x.iter().zip(before).flat_map(|(&x, y)| [x as f32, y as f32])
}

/// Functions of equally many points as inputs `[B, T, 2]` and targets `[B, T]`.
pub fn to_tensors(functions: &[Function]) -> (Tensor, Tensor) {
    let points = functions.first().map_or(0, |function| function.x.len());
    let inputs: Vec<f32> = functions.iter().flat_map(|function| steps(&function.x, &function.y)).collect();
    let targets: Vec<f32> = functions.iter().flat_map(|function| function.y.iter().map(|&y| y as f32)).collect();
    let shape = [functions.len(), points];
    (Tensor::from_slice(&inputs, &[shape[0], shape[1], 2]), Tensor::from_slice(&targets, &shape))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_depends_on_seed_and_number_alone() {
        let prior = Prior { points: 48, ..Prior::default() };
        let stream = Stream::training(&prior, 7);
        let all = stream.get(0, 6).unwrap();
        assert_eq!(all[2..5], stream.get(2, 3).unwrap());
        for threads in [1, 3] {
            assert_eq!(threads::with_threads(threads, || stream.get(0, 6)).unwrap(), all);
        }
        let others = [Stream::training(&prior, 8), Stream::held_out(&prior), Stream::training(&prior, 0)];
        assert!(others.iter().all(|other| other.get(0, 1).unwrap()[0].x[0] != all[0].x[0]));
        assert!(all[0].x[0] != all[1].x[0] && all[0].f[0] != all[1].f[0]);
    }

    #[test]
    fn functions_have_the_moments_of_their_prior() {
        let prior = Prior { points: 3, length_scale_min: 0.5, length_scale_max: 0.5, ..Prior::default() };
        let all = Stream::training(&prior, 0).get(0, 20_000).unwrap();
        let n = all.len() as f64;
        let mean = |of: &dyn Fn(&Function) -> f64| all.iter().map(of).sum::<f64>() / n;
        assert!(all.iter().all(|a| a.length == 0.5 && a.x.iter().all(|x| (-2.0..2.0).contains(x))));
        // Standard errors: 0.007 of the means, 0.01 of the squares, 0.0001 of the noise's.
        assert!(mean(&|a| a.f[1]).abs() < 0.03 && (mean(&|a| a.f[1] * a.f[1]) - 1.0).abs() < 0.04);
        assert!((mean(&|a| (a.y[2] - a.f[2]).powi(2)) - 0.01).abs() < 5e-4);
        assert!((mean(&|a| a.x[0] * a.x[0]) - 4.0 / 3.0).abs() < 0.04);
        // Values at two places vary together as the kernel says.
        let gap = mean(&|a| a.f[0] * a.f[1] - rbf(a.x[0], a.x[1], 0.5));
        assert!(gap.abs() < 0.03, "{gap}");
    }

    #[test]
    fn lengths_are_log_uniform() {
        let prior = Prior { points: 1, ..Prior::default() };
        let mut lengths: Vec<f64> =
            Stream::training(&prior, 1).get(0, 20_000).unwrap().iter().map(|f| f.length).collect();
        lengths.sort_by(f64::total_cmp);
        assert!(lengths[0] >= 0.2 && lengths[19_999] <= 1.0);
        // The median of a log-uniform number is the geometric mean of its bounds.
        assert!((lengths[10_000] - 0.2f64.sqrt()).abs() < 0.01, "{}", lengths[10_000]);
    }

    #[test]
    fn values_elsewhere_belong_to_the_same_function() {
        let prior = Prior { points: 8, length_scale_min: 1.0, ..Prior::default() };
        let rng = Rng::new(3);
        let (function, _) = prior.draw(&rng, &[]).unwrap();
        let near: Vec<f64> = function.x.iter().map(|x| x + 1e-3).collect();
        let (again, values) = prior.draw(&rng, &near).unwrap();
        assert!(again.jitter > 0.0, "points so near are singular within rounding");
        assert!(values.iter().zip(&again.f).all(|(a, b)| (a - b).abs() < 0.01), "{values:?} {:?}", again.f);
        assert!(again.f.iter().zip(&function.f).all(|(a, b)| (a - b).abs() < 0.01));
    }

    #[test]
    fn a_step_sees_its_place_and_the_observation_before() {
        let function =
            |x: &[f64], y: &[f64]| Function { x: x.into(), f: vec![], y: y.into(), length: 1.0, jitter: 0.0 };
        let (inputs, targets) = to_tensors(&[function(&[1.0, 2.0], &[3.0, 4.0]), function(&[5.0, 6.0], &[7.0, 8.0])]);
        assert_eq!((inputs.shape(), targets.shape()), (&[2, 2, 2][..], &[2, 2][..]));
        assert_eq!(inputs.to_f64_vec(), [1.0, 0.0, 2.0, 3.0, 5.0, 0.0, 6.0, 7.0]);
        assert_eq!(targets.to_f64_vec(), [3.0, 4.0, 7.0, 8.0]);
    }
}
