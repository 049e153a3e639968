//! The gated attention unit and FLASH: one layer that is attention and feed-forward at once.
//!
//! ```text
//! x = n(h);  u = SiLU(W_u x), v = SiLU(W_v x)  (E);  z = SiLU(W_z x)  (S);  q, k = RoPE(γ_{0,1} ⊙ z + β_{0,1})
//! h⁺ = h + W_o( u ⊙ Σ_j a_ij v_j ),   a_ij = relu(q_i·k_j / sqrt(S))² / (i+1),  j <= i
//! ```
//!
//! FLASH has two more pairs γ, β: inside a chunk of C tokens it weighs as above, over C; all earlier chunks by
//! `q'_i·k'_j / n_i`, linear in both, so that running sums over the `n_i` tokens before the chunk do. Its cost does not
//! grow with the square of T, and decoding needs a state of fixed size.
//!
//! Every application has a block of its own; `tied: true` shares one.
//! Saved per application and token, in numbers: h and x with their norm `2D + 1`, z before and after SiLU `2S`, the
//! rotated queries and keys `2S` or `4S`, u and v before and after SiLU and the aggregated values `5E`. The last product
//! is not kept.
//! Source: GAU and FLASH, arXiv 2202.10447; divisors and initial values are ours.

use kumiki_autograd::{Param, Tape, Var};
use kumiki_nn::{Init, Linear, RmsNorm, module};
use kumiki_ops::{self as ops, MixedChunk};
use serde::{Deserialize, Serialize};

use crate::block_cache::BlockCache;

/// The sizes of a stack of GAU or FLASH blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GauConfig {
    /// Model width D.
    pub d_model: usize,
    /// Width of the shared representation of queries and keys, S.
    pub key_width: usize,
    /// Width of gate and values, E.
    pub gate_width: usize,
    /// Block applications L.
    pub applications: usize,
    /// Whether all applications share one set of parameters.
    pub tied: bool,
    /// Base of the rotary angles.
    pub rope_base: f64,
    /// Tokens of FLASH's chunks, C; GAU has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk: Option<usize>,
}

impl GauConfig {
    /// What is wrong with the sizes, if anything.
    ///
    /// # Errors
    /// A sentence naming the field, what was expected and what was found.
    pub fn check(&self) -> Result<(), String> {
        let name = if self.chunk.is_some() { "flash" } else { "gau" };
        let zero = [
            ("d_model", self.d_model),
            ("key_width", self.key_width),
            ("gate_width", self.gate_width),
            ("applications", self.applications),
            ("chunk", self.chunk.unwrap_or(1)),
        ];
        if let Some((field, _)) = zero.iter().find(|(_, v)| *v == 0) {
            return Err(format!("{name}: {field} must be positive, found 0"));
        }
        if !self.key_width.is_multiple_of(2) {
            return Err(format!("{name}: key_width must be even for rotary positions, found {}", self.key_width));
        }
        if !(self.rope_base.is_finite() && self.rope_base > 0.0) {
            return Err(format!("{name}: rope_base must be a positive number, found {}", self.rope_base));
        }
        Ok(())
    }

    /// Vectors that are made from z: a query and a key, for FLASH twice.
    pub fn vectors(&self) -> usize {
        if self.chunk.is_some() { 4 } else { 2 }
    }
}

/// One block's parameters.
#[derive(Clone, Debug)]
pub struct GauBlock {
    /// `[D]`.
    pub norm: RmsNorm,
    /// Gate, `[E, D]`.
    pub wu: Linear,
    /// Value, `[E, D]`.
    pub wv: Linear,
    /// Shared representation, `[S, D]`.
    pub wz: Linear,
    /// Scale of each vector that is made from z, `[2, S]`, for FLASH `[4, S]`: query, key, linear query, linear key.
    pub gamma: Param,
    /// Offset of each, likewise.
    pub beta: Param,
    /// `[D, E]`.
    pub wo: Linear,
    /// Base of the rotary angles.
    pub rope_base: f64,
    /// FLASH's chunk.
    pub chunk: Option<usize>,
}
module!(GauBlock { norm, wu, wv, wz, gamma, beta, wo });

impl GauBlock {
    /// Fresh parameters: `1/sqrt(fan_in)`, the output's over `sqrt(2L)`; scales of 1, offsets of 0.
    pub fn new(config: &GauConfig, init: &Init) -> GauBlock {
        let &GauConfig { d_model: d, key_width: s, gate_width: e, applications, rope_base, chunk, .. } = config;
        let affine = [config.vectors(), s];
        GauBlock {
            norm: RmsNorm::new(d, &init.of("norm")),
            wu: Linear::new(d, e, 1.0, &init.of("wu")),
            wv: Linear::new(d, e, 1.0, &init.of("wv")),
            wz: Linear::new(d, s, 1.0, &init.of("wz")),
            gamma: init.of("gamma").full(&affine, 1.0),
            beta: init.of("beta").full(&affine, 0.0),
            wo: Linear::new(e, d, 1.0 / (2.0 * applications as f64).sqrt(), &init.of("wo")),
            rope_base,
            chunk,
        }
    }

    /// `h [B, T, D]` to the same. With a cache the tokens continue those in it.
    #[track_caller]
    pub fn forward(&self, tape: &Tape, h: &Var, cache: Option<&mut BlockCache>) -> Var {
        let start = cache.as_ref().map_or(0, |c| c.len());
        let x = self.norm.forward(tape, h);
        let [u, v] = [&self.wu, &self.wv].map(|w| ops::silu(&w.forward_to_hidden(tape, &x))); // [B, T, E]
        let z = ops::silu(&self.wz.forward(tape, &x)); // [B, T, S]
        let (gamma, beta) = (tape.param(&self.gamma), tape.param(&self.beta));
        let vector = |i: usize| {
            let row = |x: &Var| ops::narrow(x, 0, i, 1);
            let y = ops::add(&ops::mul(&z, &row(&gamma)), &row(&beta));
            let (b, t, s) = (y.dim(0), y.dim(1), y.dim(2));
            let rotated = ops::rope(&ops::reshape(&y, &[b, t, 1, s]), self.rope_base, start);
            ops::reshape(&rotated, &[b, t, s])
        };
        let (q, k) = (vector(0), vector(1));
        // u ⊙ Σ_j a_ij v_j, [B, T, E]
        let gated = match (self.chunk, cache) {
            (None, None) => ops::gau_attention_mul(&q, &k, &v, &u),
            (None, Some(cache)) => {
                let one_head = |x: &Var| x.value().unsqueeze(2);
                let (keys, values) = cache.kv().append(&one_head(&k), &one_head(&v));
                let [keys, values] = [keys, values].map(|x| Var::constant(x.squeeze(2)));
                ops::gau_attention_mul(&q, &keys, &values, &u)
            }
            (Some(chunk), cache) => {
                let (linear_q, linear_k) = (&vector(2), &vector(3));
                let x = MixedChunk { q: &q, k: &k, linear_q, linear_k, v: &v, chunk };
                match cache {
                    None => ops::mixed_chunk_attention_mul(x, &u),
                    Some(cache) => ops::mul(&Var::constant(cache.chunks(chunk).push(x)), &u),
                }
            }
        };
        ops::add(h, &self.wo.forward(tape, &gated))
    }
}
