//! [`SequenceRegressor`]: a linear map of the inputs, blocks of one architecture, a norm, and a linear map to one number
//! per position. What in-context regression needs: a model that reads a sequence of points and predicts the next value.

use kumiki_autograd::{Tape, Var};
use kumiki_nn::{Init, Linear, Module, RmsNorm};
use kumiki_ops as ops;
use kumiki_tensor::{DType, Error, Result, Tensor};
use serde::{Deserialize, Serialize};

use crate::language_model::{Architecture, Block};

/// Everything that determines a regressor but its parameters' values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SequenceRegressorConfig {
    /// Numbers at every position.
    pub inputs: usize,
    /// The blocks.
    pub architecture: Architecture,
}

impl SequenceRegressorConfig {
    /// What is wrong with the sizes, if anything.
    ///
    /// # Errors
    /// A sentence naming the field, what was expected and what was found.
    pub fn check(&self) -> Result<()> {
        self.architecture.check()?;
        match self.inputs {
            0 => Err(Error::new("inputs must be positive, found 0")),
            _ => Ok(()),
        }
    }
}

/// One prediction per position, each from the inputs up to its own.
#[derive(Clone, Debug)]
pub struct SequenceRegressor {
    /// What it was made from.
    pub config: SequenceRegressorConfig,
    /// Inputs to the model's width, `[D, inputs]`.
    pub input: Linear,
    /// One block when tied, else one per application.
    pub blocks: Vec<Block>,
    /// Before the last map, `[D]`.
    pub norm_out: RmsNorm,
    /// To the prediction, `[1, D]`.
    pub output: Linear,
}
kumiki_nn::module!(SequenceRegressor { input, blocks, norm_out, output });

impl SequenceRegressor {
    /// A model with fresh parameters of `dtype`, drawn from `seed`; those of `input` and `output` have standard deviation
    /// `1/sqrt(fan_in)`.
    ///
    /// # Errors
    /// When the sizes do not fit together.
    pub fn new(config: &SequenceRegressorConfig, seed: u64, dtype: DType) -> Result<SequenceRegressor> {
        config.check()?;
        let (architecture, init) = (&config.architecture, Init::new(seed, dtype));
        let sets = if architecture.tied() { 1 } else { architecture.applications() };
        let d_model = architecture.d_model();
        Ok(SequenceRegressor {
            input: Linear::new(config.inputs, d_model, 1.0, &init.of("input")),
            blocks: (0..sets).map(|i| architecture.block(i, &init.of(format!("blocks.{i}")))).collect(),
            norm_out: RmsNorm::new(d_model, &init.of("norm_out")),
            output: Linear::new(d_model, 1, 1.0, &init.of("output")),
            config: config.clone(),
        })
    }

    /// The distinct trainable values of the blocks alone.
    pub fn block_param_count(&self) -> usize {
        self.blocks.param_count()
    }

    /// Inputs `[B, T, inputs]` to predictions `[B, T]`; the one at `t` depends on inputs up to `t` only.
    ///
    /// # Panics
    /// When the inputs are not `[B, T, inputs]`.
    #[track_caller]
    pub fn predict(&self, tape: &Tape, inputs: &Var) -> Var {
        let width = self.config.inputs;
        assert!(
            inputs.rank() == 3 && inputs.dim(2) == width,
            "sequence regressor: inputs must be [B, T, {width}], got {:?}",
            inputs.shape()
        );
        let mut h = self.input.forward(tape, inputs);
        for i in 0..self.config.architecture.applications() {
            h = self.blocks[i % self.blocks.len()].forward(tape, &h, None);
        }
        let predictions = self.output.forward(tape, &self.norm_out.forward(tape, &h)); // [B, T, 1]
        ops::squeeze(&predictions, 2)
    }

    /// The squared error of every prediction, `[B, T]`, for `targets [B, T]` given `inputs [B, T, inputs]`.
    ///
    /// # Panics
    /// When the inputs are not `[B, T, inputs]`, or the targets not `[B, T]`.
    #[track_caller]
    pub fn squared_errors(&self, tape: &Tape, inputs: &Tensor, targets: &Tensor) -> Var {
        let predictions = self.predict(tape, &Var::constant(inputs.clone()));
        assert!(
            predictions.shape() == targets.shape(),
            "sequence regressor: targets must be {:?} as the predictions, got {:?}",
            predictions.shape(),
            targets.shape()
        );
        let error = ops::sub(&predictions, &Var::constant(targets.clone()));
        ops::mul(&error, &error)
    }

    /// Mean squared error of `targets [B, T]` given `inputs [B, T, inputs]`, a scalar.
    #[track_caller]
    pub fn loss(&self, tape: &Tape, inputs: &Tensor, targets: &Tensor) -> Var {
        ops::mean_all(&self.squared_errors(tape, inputs, targets))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TangoConfig, TransformerConfig};
    use kumiki_autograd::{GradCheck, Param};
    use kumiki_tensor::Rng;

    fn models() -> Vec<SequenceRegressor> {
        let (d_model, heads, applications, rope_base) = (8, 2, 2, 1e4);
        let of = |architecture| {
            let config = SequenceRegressorConfig { inputs: 2, architecture };
            SequenceRegressor::new(&config, 0, DType::F64).unwrap()
        };
        let transformer = |tied| {
            of(Architecture::Transformer(TransformerConfig { d_model, heads, d_ff: 6, applications, tied, rope_base }))
        };
        let (head_dim, gate_width, tied, window) = (4, 6, true, None);
        let tango = TangoConfig { d_model, heads, head_dim, gate_width, applications, tied, rope_base, window };
        vec![transformer(true), transformer(false), of(Architecture::Tango(tango))]
    }

    fn data(rows: usize, length: usize) -> (Tensor, Tensor) {
        let mut rng = Rng::new(3);
        let inputs = rng.normal(DType::F64, &[rows, length, 2], 0.0, 1.0);
        (inputs, rng.normal(DType::F64, &[rows, length], 0.0, 1.0))
    }

    #[test]
    fn gradients_equal_central_differences() {
        let (inputs, targets) = data(2, 5);
        for model in models() {
            let params: Vec<(String, Param)> = model.params().into_iter().map(|(n, p)| (n, p.clone())).collect();
            let check = GradCheck { max_elements: 24, ..GradCheck::default() };
            let report = check.run(&[], &params, |tape, _| model.loss(tape, &inputs, &targets));
            report.assert_below(1e-6);
            assert!(report.checked > 150, "{report}");
        }
    }

    #[test]
    fn no_prediction_depends_on_later_inputs() {
        let (inputs, _) = data(1, 7);
        for model in models() {
            let predict =
                |x: &Tensor| model.predict(&Tape::inference(), &Var::constant(x.clone())).value().to_f64_vec();
            let before = predict(&inputs);
            for at in 0..7 {
                for feature in 0..2 {
                    let mut changed = inputs.copy();
                    changed.make_mut::<f64>()[2 * at + feature] += 1.0;
                    let after = predict(&changed);
                    for t in 0..7 {
                        assert_eq!(before[t] == after[t], t < at, "input {at} changed, prediction {t}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_loss_is_the_mean_of_the_squared_errors_and_tied_blocks_are_one() {
        let (inputs, targets) = data(3, 4);
        let all = models();
        let tape = Tape::inference();
        let predictions = all[0].predict(&tape, &Var::constant(inputs.clone())).value().to_f64_vec();
        let squares: Vec<f64> = predictions.iter().zip(targets.to_f64_vec()).map(|(p, y)| (p - y) * (p - y)).collect();
        assert_eq!(all[0].squared_errors(&tape, &inputs, &targets).value().to_f64_vec(), squares);
        let mean = squares.iter().sum::<f64>() / 12.0;
        assert!((all[0].loss(&tape, &inputs, &targets).item() - mean).abs() < 1e-14);
        let counts: Vec<usize> = all.iter().take(2).map(|m| m.block_param_count()).collect();
        assert_eq!(counts[1], 2 * counts[0]);
        assert_eq!(all[0].param_count(), counts[0] + 8 * 2 + 8 + 8);
    }

    #[test]
    fn sizes_that_do_not_fit_are_named() {
        let mut config = models()[0].config.clone();
        config.inputs = 0;
        let error = SequenceRegressor::new(&config, 0, DType::F32).unwrap_err().to_string();
        assert_eq!(error, "inputs must be positive, found 0");
    }
}
