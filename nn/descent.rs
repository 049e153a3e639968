//! [`Descent`]: how many steps a layer that minimises an energy takes, when a token stops, and what is noted on the way.

use std::sync::{Arc, Mutex, PoisonError};

use kumiki_autograd::Var;
use kumiki_ops::{self as ops, CemStep};
use kumiki_tensor::Tensor;

/// Steps of a descent. Training and inference may take different numbers of them: they are no part of the parameters.
#[derive(Clone, Debug)]
pub struct Descent {
    /// Steps T, at most.
    pub steps: usize,
    /// A token takes no further step once its energy has fallen by less than this in one, or has risen. That is seen one
    /// evaluation after the step; nothing more is computed when all tokens have stopped.
    pub tolerance: Option<f64>,
    /// Where energies and steps are noted, if anybody wants them; energies of MLPs cost a pass more.
    pub trace: Option<Trace>,
}

/// What descents have noted, in the order of their calls; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    calls: Arc<Mutex<Vec<Call>>>,
    /// Whether the energy after the last step is wanted, too, which takes an evaluation more.
    end: bool,
}

/// One descent of all tokens of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// Tokens.
    pub tokens: usize,
    /// Steps that were taken, summed over tokens.
    pub steps: usize,
    /// The mean energy over tokens before the first step, after the first, and so on; of tokens that have stopped, the one
    /// where they did.
    pub energies: Vec<f64>,
}

impl Trace {
    /// Notes steps, and energies as far as they are met.
    pub fn of_steps() -> Trace {
        Trace::default()
    }

    /// Notes the energy after the last step, too.
    pub fn of_energies() -> Trace {
        Trace { end: true, ..Trace::default() }
    }

    /// What has been noted so far, which is forgotten.
    pub fn take(&self) -> Vec<Call> {
        std::mem::take(&mut *self.calls.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn note(&self, call: Call) {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }
}

impl Descent {
    /// So many steps for every token.
    pub fn new(steps: usize) -> Descent {
        Descent { steps, tolerance: None, trace: None }
    }

    /// From `h` `[.., D]` downhill. `evaluate(step, x, with_energy)` gives energy and direction at `x`, which is `h` itself
    /// at step 0; `update(m)` makes a change of a direction.
    #[track_caller]
    pub(crate) fn run(
        &self,
        h: &Var,
        evaluate: impl Fn(usize, &Var, bool) -> CemStep,
        update: impl Fn(&Var) -> Var,
    ) -> Var {
        let noted = self.tolerance.is_some() || self.trace.is_some();
        let leading = &h.shape()[..h.rank() - 1];
        let tokens = leading.iter().product();
        let mut active = vec![true; tokens];
        let mut before: Option<Vec<f64>> = None;
        let mut call = Call { tokens, steps: 0, energies: vec![] };
        let mean = |energies: &[f64]| energies.iter().sum::<f64>() / tokens.max(1) as f64;
        let (mut x, mut stopped) = (h.clone(), false);
        for step in 0..self.steps {
            let CemStep { direction, energy } = evaluate(step, &x, noted);
            if noted {
                let energies = energy.expect("asked for").to_f64_vec();
                if let (Some(tolerance), Some(before)) = (self.tolerance, &before) {
                    for ((active, before), now) in active.iter_mut().zip(before).zip(&energies) {
                        // Written so that NaN stops.
                        *active &= before - now >= tolerance;
                    }
                }
                call.energies.push(mean(&energies));
                before = Some(energies);
            }
            let count = active.iter().filter(|&&active| active).count();
            if count == 0 {
                stopped = true;
                break;
            }
            call.steps += count;
            let mut change = update(&direction);
            if count < tokens {
                let mask = Tensor::from_fn::<f64>(&[leading, &[1]].concat(), |i| f64::from(u8::from(active[i])));
                let mask = mask.cast(change.dtype()).to(&change.value().device());
                change = ops::mul(&change, &Var::constant(mask.unwrap_or_else(|error| panic!("{error}"))));
            }
            x = ops::add(&x, &change);
        }
        if let Some(trace) = &self.trace {
            if trace.end && !stopped {
                let energy = evaluate(self.steps, &x.detach(), true).energy.expect("asked for");
                call.energies.push(mean(&energy.to_f64_vec()));
            }
            trace.note(call);
        }
        x
    }
}
