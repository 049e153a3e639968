//! [`Sgd`]: gradient descent with momentum.

use std::collections::HashMap;

use kumiki_autograd::{Gradients, Param, ParamId};
use kumiki_tensor::{Result, Tensor};

use crate::adamw::gradients_of_all;

/// `velocity = momentum·velocity + grad; param -= lr·velocity`.
#[derive(Clone, Debug, Default)]
pub struct Sgd {
    /// How much of the last velocity is kept, in `[0, 1)`.
    pub momentum: f64,
    velocity: HashMap<ParamId, Tensor>,
}

impl Sgd {
    /// An optimiser that has made no step.
    pub fn new(momentum: f64) -> Sgd {
        Sgd { momentum, velocity: HashMap::new() }
    }

    /// One step of all parameters at rate `lr`.
    ///
    /// # Errors
    /// Names a parameter that received no gradient; then nothing has changed.
    pub fn step(&mut self, params: &mut [(String, &mut Param)], grads: &Gradients, lr: f64) -> Result<()> {
        let all = gradients_of_all(params, grads)?;
        for ((_, param), grad) in params.iter_mut().zip(all) {
            let mut step = grad.clone();
            if self.momentum != 0.0 {
                if let Some(mut velocity) = self.velocity.remove(&param.id()) {
                    velocity.scale(self.momentum);
                    step.add_assign(&velocity);
                }
                self.velocity.insert(param.id(), step.clone());
            }
            step.scale(-lr);
            param.value_mut().add_assign(&step);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn momentum_sums_up() {
        let mut p = Param::new(Tensor::from_slice(&[1.0f64], &[1]));
        let mut sgd = Sgd::new(0.5);
        for expected in [0.9, 0.75] {
            let mut grads = Gradients::new();
            grads.set(&p, Tensor::from_slice(&[1.0f64], &[1]));
            sgd.step(&mut [("p".into(), &mut p)], &grads, 0.1).unwrap();
            assert!((p.value().item() - expected).abs() < 1e-15);
        }
        assert!(sgd.step(&mut [("p".into(), &mut p)], &Gradients::new(), 0.1).unwrap_err().to_string().contains("`p`"));
    }
}
