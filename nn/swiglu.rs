//! [`SwiGlu`]: the gated feed-forward layer.

use kumiki_autograd::{Tape, Var};
use kumiki_ops as ops;

use crate::init::Init;
use crate::layers::Linear;
use crate::module;

/// `w_down(SiLU(w_gate x) ⊙ w_up x)`.
#[derive(Clone, Debug)]
pub struct SwiGlu {
    /// `[F, D]`.
    pub w_gate: Linear,
    /// `[F, D]`.
    pub w_up: Linear,
    /// `[D, F]`.
    pub w_down: Linear,
}
module!(SwiGlu { w_gate, w_up, w_down });

impl SwiGlu {
    /// Weights of standard deviation `1/sqrt(fan_in)`, those of `w_down` times `out_gain`.
    pub fn new(d_model: usize, d_ff: usize, out_gain: f64, init: &Init) -> SwiGlu {
        SwiGlu {
            w_gate: Linear::new(d_model, d_ff, 1.0, &init.of("w_gate")),
            w_up: Linear::new(d_model, d_ff, 1.0, &init.of("w_up")),
            w_down: Linear::new(d_ff, d_model, out_gain, &init.of("w_down")),
        }
    }

    /// `[.., D]` to `[.., D]`.
    #[track_caller]
    pub fn forward(&self, tape: &Tape, x: &Var) -> Var {
        let hidden = ops::swiglu(&self.w_gate.forward_to_hidden(tape, x), &self.w_up.forward_to_hidden(tape, x));
        self.w_down.forward(tape, &hidden)
    }
}
