//! [`AdamW`]: Adam with decoupled weight decay.

use std::collections::HashMap;

use kumiki_autograd::{Gradients, Param, ParamId};
use kumiki_ops::{AdamWStep, adamw_update};
use kumiki_tensor::{DType, Error, Result, Tensor};

/// With gradient `g`, step number `t` from 1 and rate `lr`:
///
/// ```text
/// param -= lr·weight_decay·param                        (rank >= 2 only: norms and scales are not decayed)
/// m = beta1·m + (1 - beta1)·g;   v = beta2·v + (1 - beta2)·g²
/// param -= lr · m/(1 - beta1^t) / (sqrt(v/(1 - beta2^t)) + eps)
/// ```
///
/// A parameter may have a rate of its own, a multiple of `lr` ([`AdamW::set_rate`]); its decay stays `lr·weight_decay`, so that
/// how long a parameter remembers does not depend on its rate. Moments are F64 for F64 parameters and F32 for all others.
#[derive(Clone, Debug)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decay of parameters of rank 2 and more, per unit of `lr`.
    pub weight_decay: f64,
    steps: u64,
    moments: HashMap<ParamId, (Tensor, Tensor)>,
    rates: HashMap<ParamId, f64>,
}

impl Default for AdamW {
    /// The experiments' choice: betas 0.9 and 0.95, eps 1e-8, decay 0.1.
    fn default() -> AdamW {
        let (moments, rates) = (HashMap::new(), HashMap::new());
        AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, steps: 0, moments, rates }
    }
}

/// The gradient of every parameter, in order.
///
/// # Errors
/// Names the parameter that has none.
pub(crate) fn gradients_of_all<'g>(params: &[(String, &mut Param)], grads: &'g Gradients) -> Result<Vec<&'g Tensor>> {
    let missing =
        |name: &str| Error::new(format!("parameter `{name}` received no gradient: the loss does not depend on it"));
    params.iter().map(|(name, param)| grads.of(param).ok_or_else(|| missing(name))).collect()
}

impl AdamW {
    /// The experiments' choice with another decay.
    pub fn with_decay(weight_decay: f64) -> AdamW {
        AdamW { weight_decay, ..AdamW::default() }
    }

    /// Steps made so far, common to all parameters.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The two moments of a parameter; `None` before its first step.
    pub fn moments(&self, param: &Param) -> Option<&(Tensor, Tensor)> {
        self.moments.get(&param.id())
    }

    /// From now on the parameter moves at `rate` times the rate of a step; at first all do at 1.
    ///
    /// # Panics
    /// When the rate is not positive.
    #[track_caller]
    pub fn set_rate(&mut self, param: &Param, rate: f64) {
        assert!(rate.is_finite() && rate > 0.0, "AdamW: a rate must be a positive number, got {rate}");
        self.rates.insert(param.id(), rate);
    }

    /// Continues from saved state: the number of steps, and for each parameter its two moments.
    pub fn restore<'a>(&mut self, steps: u64, moments: impl IntoIterator<Item = (&'a Param, Tensor, Tensor)>) {
        self.steps = steps;
        self.moments = moments.into_iter().map(|(param, m, v)| (param.id(), (m, v))).collect();
    }

    /// One step of all parameters at rate `lr`.
    ///
    /// # Errors
    /// Names a parameter that received no gradient; then nothing has changed.
    pub fn step(&mut self, params: &mut [(String, &mut Param)], grads: &Gradients, lr: f64) -> Result<()> {
        let all = gradients_of_all(params, grads)?;
        self.steps += 1;
        let t = self.steps.min(i32::MAX as u64) as i32;
        for ((_, param), grad) in params.iter_mut().zip(all) {
            let (m, v) = self.moments.entry(param.id()).or_insert_with(|| {
                let zeros = || param.value().new_full(param.dtype().compute(), param.shape(), 0.0);
                (zeros(), zeros())
            });
            let decay = if param.value().rank() >= 2 { self.weight_decay } else { 0.0 };
            let rate = self.rates.get(&param.id()).copied().unwrap_or(1.0);
            let step = AdamWStep {
                lr: lr * rate,
                beta1: self.beta1,
                beta2: self.beta2,
                eps: self.eps,
                // Per unit of the rate that it is multiplied by.
                weight_decay: decay / rate,
                correction1: 1.0 - self.beta1.powi(t),
                correction2: 1.0 - self.beta2.powi(t),
            };
            if param.dtype() == DType::BF16 {
                let mut wide = param.value().cast(DType::F32);
                adamw_update(&step, &mut wide, &grad.cast(DType::F32), m, v);
                *param.value_mut() = wide.cast(DType::BF16);
            } else {
                adamw_update(&step, param.value_mut(), grad, m, v);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grads_of(params: &[&Param], value: f64) -> Gradients {
        let mut grads = Gradients::new();
        params.iter().for_each(|p| grads.set(p, Tensor::full(p.dtype(), p.shape(), value)));
        grads
    }

    #[test]
    fn case_30_equal_parameters_stay_equal() {
        let mut params: Vec<Param> = (0..3).map(|_| Param::new(Tensor::full(DType::F32, &[5], 0.3))).collect();
        let mut adam = AdamW::default();
        for step in 0..5 {
            let grads = grads_of(&params.iter().collect::<Vec<_>>(), 0.1 * f64::from(step) - 0.2);
            let mut named: Vec<(String, &mut Param)> = params.iter_mut().map(|p| ("p".to_owned(), p)).collect();
            adam.step(&mut named, &grads, 0.01).unwrap();
        }
        assert_eq!(adam.steps(), 5);
        assert_eq!(params[0].value().to_vec::<f32>(), params[1].value().to_vec::<f32>());
        assert_eq!(params[0].value().to_vec::<f32>(), params[2].value().to_vec::<f32>());
    }

    #[test]
    fn only_rank_two_decays_and_the_first_step_is_lr() {
        let (mut matrix, mut vector) =
            (Param::new(Tensor::ones(DType::F64, &[1, 1])), Param::new(Tensor::ones(DType::F64, &[1])));
        let grads = grads_of(&[&matrix, &vector], 1e-3);
        AdamW::default().step(&mut [("w".into(), &mut matrix), ("b".into(), &mut vector)], &grads, 0.01).unwrap();
        assert!((vector.value().item() - 0.99).abs() < 1e-6);
        assert!((matrix.value().item() - (0.99 - 0.001)).abs() < 1e-6);
    }

    #[test]
    fn a_rate_changes_the_step_and_not_the_decay() {
        let mut params = [(); 2].map(|()| Param::new(Tensor::ones(DType::F64, &[1, 1])));
        let mut adam = AdamW::default();
        adam.set_rate(&params[0], 0.25);
        let grads = grads_of(&params.iter().collect::<Vec<_>>(), 1e-3);
        let mut named: Vec<(String, &mut Param)> = params.iter_mut().map(|p| ("w".into(), p)).collect();
        adam.step(&mut named, &grads, 0.01).unwrap();
        assert!((params[0].value().item() - (1.0 - 0.001 - 0.0025)).abs() < 1e-6);
        assert!((params[1].value().item() - (1.0 - 0.001 - 0.01)).abs() < 1e-6);
    }

    #[test]
    fn a_parameter_without_gradient_is_named_and_nothing_changes() {
        let (mut a, mut b) = (Param::new(Tensor::ones(DType::F32, &[1])), Param::new(Tensor::ones(DType::F32, &[1])));
        let grads = grads_of(&[&a], 1.0);
        let mut adam = AdamW::default();
        let error = adam.step(&mut [("first".into(), &mut a), ("second".into(), &mut b)], &grads, 0.1).unwrap_err();
        assert!(error.to_string().contains("`second` received no gradient"));
        assert_eq!((a.value().item(), adam.steps()), (1.0, 0));
    }

    #[test]
    fn bf16_parameters_keep_f32_moments() {
        let mut p = Param::new(Tensor::ones(DType::BF16, &[2, 2]));
        let grads = grads_of(&[&p], 1.0);
        let mut adam = AdamW::default();
        adam.step(&mut [("p".into(), &mut p)], &grads, 0.1).unwrap();
        assert_eq!((p.dtype(), adam.moments(&p).unwrap().0.dtype()), (DType::BF16, DType::F32));
        assert!((p.value().to_f64_vec()[0] - 0.89).abs() < 0.005);
    }
}
