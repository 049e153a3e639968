//! [`Dropout`]: parts of what layers say are left out at random while a model learns.

use kumiki_autograd::{Tape, Var};
use kumiki_ops as ops;

/// Leaves elements out with this probability, in `[0, 1)`, on tapes that have a generator; elsewhere, and for 0, it does
/// nothing. See [`ops::dropout`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropout(pub f64);

impl Dropout {
    /// `x` of any shape with elements left out.
    #[track_caller]
    pub fn forward(self, tape: &Tape, x: &Var) -> Var {
        if self.0 == 0.0 || !tape.has_rng() { x.clone() } else { ops::dropout(tape, x, self.0) }
    }

    /// What a layer made of `before`, where elements of what it added are left out: `before + dropout(after - before)`.
    #[track_caller]
    pub fn residual(self, tape: &Tape, before: &Var, after: Var) -> Var {
        if self.0 == 0.0 || !tape.has_rng() {
            return after;
        }
        ops::add(before, &ops::dropout(tape, &ops::sub(&after, before), self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kumiki_tensor::{Rng, Tensor};

    #[test]
    fn what_a_layer_adds_is_left_out_or_doubled_and_what_was_there_stays() {
        let [before, after] = [1.0, 4.0].map(|x| Var::constant(Tensor::from_slice(&[x; 400], &[20, 20])));
        let tape = Tape::training(Rng::new(3));
        let dropped = Dropout(0.5).residual(&tape, &before, after.clone()).value().to_f64_vec();
        let kept = dropped.iter().filter(|&&x| x == 7.0).count();
        assert!(dropped.iter().all(|&x| x == 1.0 || x == 7.0) && (150..250).contains(&kept), "{kept}");
        for (p, tape) in [(0.5, Tape::inference()), (0.0, tape)] {
            assert_eq!(Dropout(p).residual(&tape, &before, after.clone()).value().to_f64_vec(), [4.0; 400]);
            assert_eq!(Dropout(p).forward(&tape, &after).value().to_f64_vec(), [4.0; 400]);
        }
    }
}
