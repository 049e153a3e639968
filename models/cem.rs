//! Causal Energy Minimization: a block whose halves take a few descent steps on an energy each.
//!
//! ```text
//! h ← attention(h);   h ← mlp(h)        each: ĥ = n(h), x ← h, then T times x ← x + eta · P m(n(x))
//! ```
//!
//! Either half can be a plain one instead (attention with its own values and output, SwiGLU), for all layers or for
//! some. Against those, a CEM attention has half the parameters (`wq, wk`) and a CEM MLP two thirds (`w_up, w_gate`).
//! A block all of plain halves is the Llama baseline.
//!
//! Saved per application and token, in numbers, with G rows of the diagonal (0, 1 or H) and T steps: a CEM attention keeps
//! `2D + 1` of the first norm, keys `HK`, and a step q and the context `2HK`, log-sum-exps `H`, the mix `GD`, the
//! direction `D`; a CEM MLP `2D + 1`, the gate `F`, and a step u `F` and the direction `D`. Every step after the first has
//! a norm of its own, `2D + 1`; a preconditioner adds `D + 2r` a step (and D in all).
//! Source: Causal Energy Minimization, arXiv 2605.07588.

use kumiki_autograd::{Tape, Var};
use kumiki_nn::{Attention, CemAttention, CemMlp, CemOptions, Descent, Diagonal, Init, RmsNorm, SwiGlu, module};
use kumiki_ops as ops;
use serde::{Deserialize, Serialize};

use crate::block_cache::BlockCache;

/// Which attention a layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionKind {
    /// Softmax attention with values and an output projection.
    Mha,
    /// Descent on an energy.
    Cem,
}

/// Which MLP a layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MlpKind {
    /// Gate, up and down.
    Swiglu,
    /// Descent on an energy.
    Cem,
}

/// The sizes of a CEM stack.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CemConfig {
    /// Model width D.
    pub d_model: usize,
    /// Heads H.
    pub heads: usize,
    /// Width of a head, K; `D/H` where a layer has plain attention.
    pub head_dim: usize,
    /// Feed-forward width F.
    pub d_ff: usize,
    /// Block applications L.
    pub applications: usize,
    /// Whether all applications share one set of parameters.
    pub tied: bool,
    /// Base of the rotary angles.
    pub rope_base: f64,
    /// The attention of every layer: one kind for all, or one for each.
    pub attention: Vec<AttentionKind>,
    /// The MLP of every layer, likewise.
    pub mlp: Vec<MlpKind>,
    /// Of CEM attention.
    pub diagonal: Diagonal,
    /// Rank of the preconditioners, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// Steps T of every descent.
    pub steps: usize,
    /// The step size at the start of training.
    pub eta: f64,
}

/// The most steps of a descent; more are taken for a mistake.
pub const MAX_DESCENT_STEPS: usize = 1024;

impl CemConfig {
    /// What is wrong with the sizes, if anything.
    ///
    /// # Errors
    /// A sentence naming the field, what was expected and what was found.
    pub fn check(&self) -> Result<(), String> {
        let &CemConfig { d_model, heads, head_dim, d_ff, applications, .. } = self;
        let sizes = [
            ("d_model", d_model),
            ("heads", heads),
            ("head_dim", head_dim),
            ("d_ff", d_ff),
            ("applications", applications),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, v)| *v == 0) {
            return Err(format!("cem: {name} must be positive, found 0"));
        }
        if !head_dim.is_multiple_of(2) {
            return Err(format!("cem: head_dim must be even for rotary positions, found {head_dim}"));
        }
        if self.attention.contains(&AttentionKind::Mha) && heads.checked_mul(head_dim) != Some(d_model) {
            return Err(format!(
                "cem: layers of plain attention need heads of d_model/heads = {d_model}/{heads}, found head_dim {head_dim}"
            ));
        }
        let sets = if self.tied { 1 } else { applications };
        for (name, kinds) in [("attention", self.attention.len()), ("mlp", self.mlp.len())] {
            if kinds != 1 && kinds != sets {
                return Err(format!("cem: {name} must name one kind for all layers or {sets}, found {kinds}"));
            }
        }
        if let Some(rank) = self.rank.filter(|rank| !(1..=d_model).contains(rank)) {
            return Err(format!("cem: the preconditioner's rank must be from 1 to d_model={d_model}, found {rank}"));
        }
        if !(1..=MAX_DESCENT_STEPS).contains(&self.steps) {
            return Err(format!("cem: steps must be from 1 to {MAX_DESCENT_STEPS}, found {}", self.steps));
        }
        if !(self.eta.is_finite() && self.eta > 0.0) {
            return Err(format!("cem: eta must be a positive number, found {}", self.eta));
        }
        if !(self.rope_base.is_finite() && self.rope_base > 0.0) {
            return Err(format!("cem: rope_base must be a positive number, found {}", self.rope_base));
        }
        Ok(())
    }

    /// The kinds of the halves of a layer.
    pub fn layer(&self, layer: usize) -> (AttentionKind, MlpKind) {
        (self.attention[layer % self.attention.len()], self.mlp[layer % self.mlp.len()])
    }

    /// Whether some layer descends on an energy, so that steps mean something.
    pub fn has_energy(&self) -> bool {
        self.attention.contains(&AttentionKind::Cem) || self.mlp.contains(&MlpKind::Cem)
    }
}

/// The first half of a block.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // a handful per model
pub enum AttentionHalf {
    /// Plain, with its norm and residual.
    Mha(MhaHalf),
    /// See [`CemAttention`].
    Cem(CemAttention),
}

/// `h + attention(n(h))`.
#[derive(Clone, Debug)]
pub struct MhaHalf {
    /// `[D]`.
    pub norm: RmsNorm,
    /// `wq, wk, wv, wo`, each `[D, D]`.
    pub attention: Attention,
}
module!(MhaHalf { norm, ..attention });

/// The second half of a block.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // as above
pub enum MlpHalf {
    /// Plain, with its norm and residual.
    Swiglu(SwigluHalf),
    /// See [`CemMlp`].
    Cem(CemMlp),
}

/// `h + swiglu(n(h))`.
#[derive(Clone, Debug)]
pub struct SwigluHalf {
    /// `[D]`.
    pub norm: RmsNorm,
    /// `w_gate, w_up [F, D]`, `w_down [D, F]`.
    pub mlp: SwiGlu,
}
module!(SwigluHalf { norm, ..mlp });

module!(
    enum AttentionHalf {
        Mha,
        Cem,
    }
);
module!(
    enum MlpHalf {
        Swiglu,
        Cem,
    }
);

/// One block's parameters.
#[derive(Clone, Debug)]
pub struct CemBlock {
    /// Over tokens.
    pub attention: AttentionHalf,
    /// Token by token.
    pub mlp: MlpHalf,
}
module!(CemBlock { attention, mlp });

impl CemBlock {
    /// Fresh parameters of layer `layer`: `1/sqrt(fan_in)`, those of outputs (`wo`, `w_down`, `w_gate` of a CEM MLP) over
    /// `sqrt(2L)`.
    pub fn new(config: &CemConfig, layer: usize, init: &Init) -> CemBlock {
        let &CemConfig { d_model, heads, head_dim, d_ff, rope_base, diagonal, rank, steps, eta, .. } = config;
        let out_gain = 1.0 / (2.0 * config.applications as f64).sqrt();
        let options = CemOptions { steps, eta, rank };
        let (attention, mlp) = config.layer(layer);
        let (first, second) = (init.of("attention"), init.of("mlp"));
        CemBlock {
            attention: match attention {
                AttentionKind::Mha => AttentionHalf::Mha(MhaHalf {
                    norm: RmsNorm::new(d_model, &first.of("norm")),
                    attention: Attention::new(d_model, heads, out_gain, rope_base, &first),
                }),
                AttentionKind::Cem => {
                    let heads = (heads, head_dim);
                    AttentionHalf::Cem(CemAttention::new(d_model, heads, diagonal, rope_base, options, &first))
                }
            },
            mlp: match mlp {
                MlpKind::Swiglu => MlpHalf::Swiglu(SwigluHalf {
                    norm: RmsNorm::new(d_model, &second.of("norm")),
                    mlp: SwiGlu::new(d_model, d_ff, out_gain, &second),
                }),
                MlpKind::Cem => MlpHalf::Cem(CemMlp::new(d_model, d_ff, out_gain, options, &second)),
            },
        }
    }

    /// `h [B, T, D]` to the same. With a cache the tokens continue those in it.
    #[track_caller]
    pub fn forward(&self, tape: &Tape, h: &Var, cache: Option<&mut BlockCache>) -> Var {
        let cache = cache.map(BlockCache::kv);
        let h = match &self.attention {
            AttentionHalf::Mha(half) => ops::add(h, &half.attention.forward(tape, &half.norm.forward(tape, h), cache)),
            AttentionHalf::Cem(half) => half.forward(tape, h, cache),
        };
        match &self.mlp {
            MlpHalf::Swiglu(half) => ops::add(&h, &half.mlp.forward(tape, &half.norm.forward(tape, &h))),
            MlpHalf::Cem(half) => half.forward(tape, &h),
        }
    }

    /// The descents of the halves that have one, `attention` and `mlp`, to be read or changed.
    pub fn descents_mut(&mut self) -> Vec<(&'static str, &mut Descent)> {
        let attention = match &mut self.attention {
            AttentionHalf::Mha(_) => None,
            AttentionHalf::Cem(half) => Some(("attention", &mut half.descent)),
        };
        let mlp = match &mut self.mlp {
            MlpHalf::Swiglu(_) => None,
            MlpHalf::Cem(half) => Some(("mlp", &mut half.descent)),
        };
        attention.into_iter().chain(mlp).collect()
    }
}
