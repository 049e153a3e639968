//! [`GeluMlp`]: the feed-forward layer of two matrices.

use kumiki_autograd::{Tape, Var};
use kumiki_ops as ops;

use crate::init::Init;
use crate::layers::Linear;
use crate::module;

/// `w_out(gelu(w_in x))`, gelu in its tanh form.
#[derive(Clone, Debug)]
pub struct GeluMlp {
    /// `[F, D]`.
    pub w_in: Linear,
    /// `[D, F]`.
    pub w_out: Linear,
}
module!(GeluMlp { w_in, w_out });

impl GeluMlp {
    /// Weights of standard deviation `1/sqrt(fan_in)`, those of `w_out` times `out_gain`.
    pub fn new(d_model: usize, d_ff: usize, out_gain: f64, init: &Init) -> GeluMlp {
        GeluMlp {
            w_in: Linear::new(d_model, d_ff, 1.0, &init.of("w_in")),
            w_out: Linear::new(d_ff, d_model, out_gain, &init.of("w_out")),
        }
    }

    /// `[.., D]` to `[.., D]`.
    #[track_caller]
    pub fn forward(&self, tape: &Tape, x: &Var) -> Var {
        self.w_out.forward(tape, &ops::gelu(&self.w_in.forward_to_hidden(tape, x)))
    }
}
