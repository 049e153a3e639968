//! [`CemAttention`] and [`CemMlp`]: layers that take a few descent steps on an energy, Causal Energy Minimization.
//!
//! ```text
//! ĥ = n(h), fixed;   x ← h;   T times: x ← x + eta · P m(n(x))
//! ```
//!
//! `m` is minus the gradient of the layer's energy at the normed point, see [`kumiki_ops::cem_attention`] and
//! [`kumiki_ops::cem_mlp`]; `P` a [`Preconditioner`], or nothing. Keys, history and gate are computed once for all steps.

use kumiki_autograd::{Param, Tape, Var};
use kumiki_ops::{self as ops, CemDiagonal, CemStep};
use serde::{Deserialize, Serialize};

use crate::attention::split_heads;
use crate::descent::Descent;
use crate::init::Init;
use crate::kv_cache::KvCache;
use crate::layers::{Linear, RmsNorm};
use crate::module;

/// The part of attention's scores that passes by the projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Diagonal {
    /// None.
    None,
    /// One for all heads, `[D]`.
    Shared,
    /// One for every head, `[H, D]`.
    PerHead,
}

impl Diagonal {
    /// All of them.
    pub const ALL: [Diagonal; 3] = [Diagonal::None, Diagonal::Shared, Diagonal::PerHead];

    /// `none`, `shared` or `per_head`.
    pub fn name(self) -> &'static str {
        match self {
            Diagonal::None => "none",
            Diagonal::Shared => "shared",
            Diagonal::PerHead => "per_head",
        }
    }

    /// Rows of D numbers, for so many heads.
    pub fn rows(self, heads: usize) -> usize {
        match self {
            Diagonal::None => 0,
            Diagonal::Shared => 1,
            Diagonal::PerHead => heads,
        }
    }
}

/// `P m = softplus(d) ⊙ m + u (vᵀ m) + v (uᵀ m)`: symmetric, of rank r beside its diagonal, never a `D×D` matrix.
#[derive(Clone, Debug)]
pub struct Preconditioner {
    /// `[D]`.
    pub pre_d: Param,
    /// `[D, r]`.
    pub pre_u: Param,
    /// `[D, r]`.
    pub pre_v: Param,
}
module!(Preconditioner { pre_d, pre_u, pre_v });

impl Preconditioner {
    /// The identity: `softplus(d) = 1`, `u` of standard deviation `1/sqrt(r)`, `v = 0`.
    ///
    /// # Panics
    /// When the rank is 0 or above `d_model`.
    #[track_caller]
    pub fn new(d_model: usize, rank: usize, init: &Init) -> Preconditioner {
        assert!((1..=d_model).contains(&rank), "preconditioner: rank must be from 1 to d_model={d_model}, got {rank}");
        Preconditioner {
            pre_d: init.of("pre_d").full(&[d_model], 1f64.exp_m1().ln()),
            pre_u: init.of("pre_u").normal(&[d_model, rank], 1.0 / (rank as f64).sqrt()),
            pre_v: init.of("pre_v").full(&[d_model, rank], 0.0),
        }
    }

    /// The map of `[.., D]` to the same, to be used as often as there are steps.
    pub fn map(&self, tape: &Tape) -> impl Fn(&Var) -> Var {
        let [d, u, v] = [&self.pre_d, &self.pre_u, &self.pre_v].map(|p| entering(tape, p));
        let d = ops::softplus(&d, 1.0);
        // linear(m, uᵀ) is m u, of width r.
        let (u_t, v_t) = (ops::transpose(&u, 0, 1), ops::transpose(&v, 0, 1));
        move |m| {
            let crossed = ops::add(&ops::linear(&ops::linear(m, &v_t), &u), &ops::linear(&ops::linear(m, &u_t), &v));
            ops::add(&ops::mul(m, &d), &crossed)
        }
    }
}

/// A parameter as it enters one application of a layer that uses it in every step: its gradients add up here before they
/// meet those of other applications, so that a tied layer has the same bits recomputed and saved.
fn entering(tape: &Tape, param: &Param) -> Var {
    ops::expand(&tape.param(param), param.shape())
}

/// What both layers are made with.
#[derive(Clone, Copy, Debug)]
pub struct CemOptions {
    /// Steps T.
    pub steps: usize,
    /// The step size at the start of training.
    pub eta: f64,
    /// Rank of the preconditioner, if there is one.
    pub rank: Option<usize>,
}

/// Attention whose value is its key and whose output projection is its query projection.
#[derive(Clone, Debug)]
pub struct CemAttention {
    /// Of history and point, `[D]`.
    pub norm: RmsNorm,
    /// Queries, and back, `[H, K, D]`.
    pub wq: Param,
    /// Keys, `[H, K, D]`.
    pub wk: Param,
    /// `[D]` or `[H, D]`.
    pub diag: Option<Param>,
    /// Step size, `[1]`.
    pub eta: Param,
    /// Of the directions.
    pub preconditioner: Option<Preconditioner>,
    /// Base of the rotary angles.
    pub rope_base: f64,
    /// The steps.
    pub descent: Descent,
}
module!(CemAttention { norm, wq, wk, diag, eta, ..preconditioner });

impl CemAttention {
    /// Weights of standard deviation `1/sqrt(D)`, a diagonal of 0; `heads` of width `head_dim`.
    #[track_caller]
    pub fn new(
        d_model: usize,
        (heads, head_dim): (usize, usize),
        diagonal: Diagonal,
        rope_base: f64,
        options: CemOptions,
        init: &Init,
    ) -> CemAttention {
        let matrix =
            |name: &str| init.of(name).normal(&[heads, head_dim, d_model], 1.0 / (d_model.max(1) as f64).sqrt());
        let diag = |shape: &[usize]| Some(init.of("diag").full(shape, 0.0));
        CemAttention {
            norm: RmsNorm::new(d_model, &init.of("norm")),
            wq: matrix("wq"),
            wk: matrix("wk"),
            diag: match diagonal {
                Diagonal::None => None,
                Diagonal::Shared => diag(&[d_model]),
                Diagonal::PerHead => diag(&[heads, d_model]),
            },
            eta: init.of("eta").full(&[1], options.eta),
            preconditioner: options.rank.map(|rank| Preconditioner::new(d_model, rank, init)),
            rope_base,
            descent: Descent::new(options.steps),
        }
    }

    /// `h [B, T, D]` to the point reached. With a cache (decoding) the tokens continue those in it, whose keys and history
    /// it holds, whatever the number of steps; no gradient is recorded for the cached ones.
    #[track_caller]
    pub fn forward(&self, tape: &Tape, h: &Var, cache: Option<&mut KvCache>) -> Var {
        let norm = Norm::new(tape, &self.norm);
        let history = norm.at(h);
        let start = cache.as_ref().map_or(0, |c| c.len());
        let (mut k, mut all) = (self.keys(tape, &history, start), history.clone());
        if let Some(cache) = cache {
            let d_model = if self.diag.is_some() { h.dim(2) } else { 0 };
            let kept = history.value().narrow(2, 0, d_model).reshape(&[h.dim(0), h.dim(1), 1, d_model]);
            let (keys, kept) = cache.append(k.value(), &kept);
            let tokens = keys.dim(1);
            (k, all) = (Var::constant(keys), Var::constant(kept.reshape(&[h.dim(0), tokens, d_model])));
        }
        let (wq, diag) = (entering(tape, &self.wq), self.diag.as_ref().map(|d| entering(tape, d)));
        let evaluate = |x: &Var, _: bool| {
            let diagonal = diag.as_ref().map(|d| CemDiagonal { d, history: &all });
            ops::cem_attention(x, &wq, &k, diagonal, self.rope_base)
        };
        let steps = (&self.descent, tape);
        descend(steps, &norm, (h, &history), evaluate, &self.eta, self.preconditioner.as_ref())
    }

    /// The rotated keys of a history `[B, T, D]`, `[B, T, H, K]`.
    fn keys(&self, tape: &Tape, history: &Var, start: usize) -> Var {
        let wk = tape.param(&self.wk);
        let heads = wk.dim(0);
        let flat = ops::reshape(&wk, &[heads * wk.dim(1), wk.dim(2)]);
        ops::rope(&split_heads(&ops::linear(history, &flat), heads), self.rope_base, start)
    }

    /// The energy of every token at the normed point `x` `[B, T, D]`, given the normed history of the same shape: `[B, T]`,
    /// differentiable. Holds all scores; see [`ops::cem_attention_energy`].
    #[track_caller]
    pub fn energy(&self, tape: &Tape, x: &Var, history: &Var) -> Var {
        let (k, diag) = (self.keys(tape, history, 0), self.diag.as_ref().map(|d| tape.param(d)));
        let diagonal = diag.as_ref().map(|d| CemDiagonal { d, history });
        ops::cem_attention_energy(x, &tape.param(&self.wq), &k, diagonal, self.rope_base)
    }
}

/// A gated MLP whose projection down is its projection up, transposed.
#[derive(Clone, Debug)]
pub struct CemMlp {
    /// Of history and point, `[D]`.
    pub norm: RmsNorm,
    /// Up, and back down, `[F, D]`.
    pub w_up: Linear,
    /// The gate, of the history, `[F, D]`.
    pub w_gate: Linear,
    /// Step size, `[1]`.
    pub eta: Param,
    /// Of the directions.
    pub preconditioner: Option<Preconditioner>,
    /// The steps.
    pub descent: Descent,
}
module!(CemMlp { norm, w_up, w_gate, eta, ..preconditioner });

impl CemMlp {
    /// Weights of standard deviation `1/sqrt(D)`, those of the gate times `out_gain`.
    #[track_caller]
    pub fn new(d_model: usize, d_ff: usize, out_gain: f64, options: CemOptions, init: &Init) -> CemMlp {
        CemMlp {
            norm: RmsNorm::new(d_model, &init.of("norm")),
            w_up: Linear::new(d_model, d_ff, 1.0, &init.of("w_up")),
            w_gate: Linear::new(d_model, d_ff, out_gain, &init.of("w_gate")),
            eta: init.of("eta").full(&[1], options.eta),
            preconditioner: options.rank.map(|rank| Preconditioner::new(d_model, rank, init)),
            descent: Descent::new(options.steps),
        }
    }

    /// `h [.., D]` to the point reached.
    #[track_caller]
    pub fn forward(&self, tape: &Tape, h: &Var) -> Var {
        let norm = Norm::new(tape, &self.norm);
        let history = norm.at(h);
        let (gate, w_up) = (self.w_gate.forward_to_hidden(tape, &history), entering(tape, &self.w_up.weight));
        let evaluate = |x: &Var, with_energy: bool| ops::cem_mlp(x, &gate, &w_up, with_energy);
        let steps = (&self.descent, tape);
        descend(steps, &norm, (h, &history), evaluate, &self.eta, self.preconditioner.as_ref())
    }

    /// The energy of every token at the normed point `x` `[.., D]`, given the normed history of the same shape: `[..]`,
    /// differentiable.
    #[track_caller]
    pub fn energy(&self, tape: &Tape, x: &Var, history: &Var) -> Var {
        ops::cem_mlp_energy(x, &self.w_gate.forward(tape, history), &tape.param(&self.w_up.weight))
    }
}

/// The norm of history and points.
struct Norm {
    weight: Var,
    eps: f64,
}

impl Norm {
    fn new(tape: &Tape, norm: &RmsNorm) -> Norm {
        Norm { weight: entering(tape, &norm.weight), eps: norm.eps }
    }

    fn at(&self, x: &Var) -> Var {
        ops::rms_norm(x, &self.weight, self.eps)
    }
}

/// A descent whose energy is a function of the normed point; that of the first step, `first`, is known.
#[track_caller]
fn descend(
    (descent, tape): (&Descent, &Tape),
    norm: &Norm,
    (h, first): (&Var, &Var),
    evaluate: impl Fn(&Var, bool) -> CemStep,
    eta: &Param,
    preconditioner: Option<&Preconditioner>,
) -> Var {
    let (eta, map) = (entering(tape, eta), preconditioner.map(|p| p.map(tape)));
    let at = |step: usize, x: &Var, with_energy: bool| match step {
        0 => evaluate(first, with_energy),
        _ => evaluate(&norm.at(x), with_energy),
    };
    descent.run(h, at, |m| match &map {
        Some(map) => ops::mul(&map(m), &eta),
        None => ops::mul(m, &eta),
    })
}
