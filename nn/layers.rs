//! The layers with one weight: linear map, token table, RMSNorm.

use kumiki_autograd::{Param, Tape, Var};
use kumiki_ops as ops;
use kumiki_tensor::Tensor;

use crate::init::Init;
use crate::module;

/// `y = x·Wᵀ`, without bias.
#[derive(Clone, Debug)]
pub struct Linear {
    /// `[d_out, d_in]`.
    pub weight: Param,
}
module!(transparent Linear { weight });

impl Linear {
    /// Normal weights of standard deviation `1/sqrt(d_in)` times `gain`.
    pub fn new(d_in: usize, d_out: usize, gain: f64, init: &Init) -> Linear {
        Linear { weight: init.normal(&[d_out, d_in], gain / (d_in.max(1) as f64).sqrt()) }
    }

    /// `[.., d_in]` to `[.., d_out]`.
    ///
    /// # Panics
    /// When the last axis is not `d_in`, or of another dtype than the weight.
    #[track_caller]
    pub fn forward(&self, tape: &Tape, x: &Var) -> Var {
        ops::linear(x, &tape.param(&self.weight))
    }

    /// The same to the inside of a layer wider than the model, see [`ops::linear_to_hidden`].
    ///
    /// # Panics
    /// As [`Linear::forward`].
    #[track_caller]
    pub fn forward_to_hidden(&self, tape: &Tape, x: &Var) -> Var {
        ops::linear_to_hidden(x, &tape.param(&self.weight))
    }
}

/// A table with one row per token, also used as the output head.
#[derive(Clone, Debug)]
pub struct Embedding {
    /// `[n_vocab, d_model]`.
    pub weight: Param,
}
module!(transparent Embedding { weight });

impl Embedding {
    /// Normal rows of standard deviation `std`.
    pub fn new(n_vocab: usize, d_model: usize, std: f64, init: &Init) -> Embedding {
        Embedding { weight: init.normal(&[n_vocab, d_model], std) }
    }

    /// Ids `[..]` to rows `[.., d_model]`.
    ///
    /// # Panics
    /// When an id is not below `n_vocab`, or the ids are not i64 or u32.
    #[track_caller]
    pub fn forward(&self, tape: &Tape, ids: &Tensor) -> Var {
        ops::embedding(&tape.param(&self.weight), ids)
    }
}

/// `x / sqrt(mean(x²) + eps) · weight` over the last axis.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    /// `[d_model]`.
    pub weight: Param,
    /// Added to the mean square, inside the root.
    pub eps: f64,
}
module!(transparent RmsNorm { weight });

impl RmsNorm {
    /// Weights of one and eps 1e-6.
    pub fn new(d_model: usize, init: &Init) -> RmsNorm {
        RmsNorm { weight: init.full(&[d_model], 1.0), eps: 1e-6 }
    }

    /// `[.., d_model]` to the same.
    ///
    /// # Panics
    /// When the last axis is not `d_model`, or of another dtype than the weight.
    #[track_caller]
    pub fn forward(&self, tape: &Tape, x: &Var) -> Var {
        ops::rms_norm(x, &tape.param(&self.weight), self.eps)
    }
}
