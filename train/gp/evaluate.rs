//! Root mean squared errors by the number of observed points, of models and of the exact posterior, on the same functions.

use kumiki_autograd::{Tape, Var};
use kumiki_models::SequenceRegressor;
use kumiki_tensor::{Tensor, threads};
use serde::{Deserialize, Serialize};

use super::exact;
use super::functions::{Function, Stream, steps, to_tensors};
use super::kernel::Prior;
use crate::Result;

/// Root mean squared errors against the noisy observations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rmse {
    /// Over all predictions.
    pub rmse: f64,
    /// Over those after 0, 1, 2, … observed points.
    pub by_observed: Vec<f64>,
}

/// Squared errors, summed by position.
struct Squares {
    sums: Vec<f64>,
    functions: usize,
}

impl Squares {
    fn new(points: usize) -> Squares {
        Squares { sums: vec![0.0; points], functions: 0 }
    }

    /// Adds functions, one after the other.
    fn add(&mut self, errors: &[f64]) {
        for row in errors.chunks_exact(self.sums.len()) {
            self.sums.iter_mut().zip(row).for_each(|(sum, error)| *sum += error);
            self.functions += 1;
        }
    }

    fn rmse(&self) -> Rmse {
        let n = self.functions as f64;
        let all = self.sums.iter().sum::<f64>() / (n * self.sums.len() as f64);
        Rmse { rmse: all.sqrt(), by_observed: self.sums.iter().map(|sum| (sum / n).sqrt()).collect() }
    }
}

/// The functions that nothing is trained on, drawn again whenever they are needed: they take no memory.
#[derive(Clone, Debug)]
pub struct HeldOut {
    prior: Prior,
    functions: usize,
    rows: usize,
}

/// What the exact posterior makes of the held-out functions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Floor {
    /// How many functions.
    pub functions: usize,
    /// Those whose kernel matrix was singular within rounding, and was drawn from with 1e-8 added to its diagonal.
    pub with_jitter: usize,
    /// The errors of the exact posterior's mean.
    #[serde(flatten)]
    pub exact: Rmse,
}

impl HeldOut {
    /// `functions` of them, `rows` at a time.
    pub fn new(prior: &Prior, functions: usize, rows: usize) -> HeldOut {
        HeldOut { prior: prior.clone(), functions, rows: rows.max(1) }
    }

    /// Calls `f` with all functions in order, and with how many were done before.
    fn each(&self, mut f: impl FnMut(&[Function], usize) -> Result<()>) -> Result<()> {
        let stream = Stream::held_out(&self.prior);
        (0..self.functions)
            .step_by(self.rows)
            .try_for_each(|done| f(&stream.get(done as u64, self.rows.min(self.functions - done))?, done))
    }

    /// The errors of the exact posterior.
    ///
    /// # Errors
    /// When a covariance cannot be factored.
    pub fn floor(&self) -> Result<Floor> {
        let (mut squares, mut with_jitter) = (Squares::new(self.prior.points), 0);
        self.each(|functions, _| {
            with_jitter += functions.iter().filter(|function| function.jitter > 0.0).count();
            let errors = |i: usize| exact::squared_errors(&functions[i], self.prior.noise);
            for row in threads::parallel_map(functions.len(), self.prior.points.pow(3) / 6, errors) {
                squares.add(&row?);
            }
            Ok(())
        })?;
        Ok(Floor { functions: self.functions, with_jitter, exact: squares.rmse() })
    }

    /// The errors of a model. `progress` hears of the functions done.
    ///
    /// # Errors
    /// When a function cannot be drawn.
    pub fn rmse(&self, model: &SequenceRegressor, mut progress: impl FnMut(usize)) -> Result<Rmse> {
        let mut squares = Squares::new(self.prior.points);
        self.each(|functions, done| {
            let (inputs, targets) = to_tensors(functions);
            squares.add(&model.squared_errors(&Tape::inference(), &inputs, &targets).value().to_f64_vec());
            progress(done + functions.len());
            Ok(())
        })?;
        Ok(squares.rmse())
    }
}

/// What a model predicts for `y` at every point of `at` as the next one after the observations `y` at `x`.
pub fn predict_at(model: &SequenceRegressor, x: &[f64], y: &[f64], at: &[f64]) -> Vec<f64> {
    let row = |&next: &f64| steps(&[x, &[next]].concat(), y).collect::<Vec<f32>>();
    let inputs: Vec<f32> = at.iter().flat_map(row).collect();
    let inputs = Var::constant(Tensor::from_slice(&inputs, &[at.len(), x.len() + 1, 2]));
    model.predict(&Tape::inference(), &inputs).value().select(1, x.len()).to_f64_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gp::settings::Settings;
    use kumiki_tensor::DType;

    #[test]
    fn errors_are_summed_by_position() {
        let mut squares = Squares::new(2);
        squares.add(&[1.0, 4.0, 3.0, 0.0]);
        squares.add(&[5.0, 8.0]);
        let found = squares.rmse();
        assert_eq!((found.rmse, found.by_observed), (3.5f64.sqrt(), vec![3f64.sqrt(), 2.0]));
    }

    #[test]
    fn the_floor_falls_to_the_noise_and_nothing_depends_on_the_batch() {
        let prior = Prior::default();
        let floor = HeldOut::new(&prior, 200, 32).floor().unwrap();
        let by = &floor.exact.by_observed;
        assert_eq!((by.len(), floor.functions), (64, 200));
        assert!((by[0] - 1.005).abs() < 0.2 && by[0] > 2.0 * by[10] && by[10] > by[63], "{by:?}");
        assert!((0.1..0.15).contains(&by[63]), "{by:?}");
        assert!(floor.with_jitter > 0, "64 points of a smooth function are singular within rounding");
        assert_eq!(HeldOut::new(&prior, 200, 7).floor().unwrap(), floor);
    }

    #[test]
    fn a_prediction_at_the_next_point_is_that_of_the_sequence() {
        let settings = Settings::preset("nano").unwrap();
        let model = SequenceRegressor::new(&settings.model("transformer").unwrap(), 1, DType::F32).unwrap();
        let functions = Stream::held_out(&settings.prior).get(0, 1).unwrap();
        let (inputs, _) = to_tensors(&functions);
        let whole = model.predict(&Tape::inference(), &Var::constant(inputs)).value().to_f64_vec();
        let Function { x, y, .. } = &functions[0];
        for n in [0, 5, 15] {
            let found = predict_at(&model, &x[..n], &y[..n], &[0.25, x[n]]);
            assert!((found[1] - whole[n]).abs() < 1e-5, "{n}: {found:?} {}", whole[n]);
            assert_ne!(found[0], found[1]);
        }
    }
}
