//! TANGO and WANGO: a block whose residual is a gate aggregated over the earlier tokens, times a value of the token
//! itself.
//!
//! ```text
//! x = n(h);  q = W_q x, k = W_k x  (H heads of K);  g = SiLU(W_g x), v = W_v x  (E = H·G)
//! h⁺ = h + W_o( ḡ ⊙ v ),   ḡ_i = Σ_{j<=i} softmax_j(tau_h q̂_i·k̂_j) g_j
//! ```
//!
//! WANGO weighs only the last W tokens so, and those before by features of q̂ and k̂ without rotation: far away, content
//! counts and position does not. Its cost does not grow with the square of T, and decoding needs a state of fixed size.
//!
//! The block is tied: one set of parameters, applied L times; `tied: false` gives every application its own.
//!
//! Saved per application and token, in numbers: h and x with their norm `2D + 1`, rotated q and k `2HK`, the gate before
//! SiLU, ḡ and v `3E`, a sum of weights per head `H`; WANGO also the gate after SiLU, `E`, and q and k as they were and their
//! features, `2H(K + M)`. The product ḡ ⊙ v is not kept.
//! Source: TANGO and WANGO, cross-token gated residual (2026).

use kumiki_autograd::{Param, Tape, Var};
use kumiki_nn::{Init, Linear, RmsNorm, module};
use kumiki_ops::{self as ops, FeatureMap, WindowedPrefix};
use serde::{Deserialize, Serialize};

use crate::block_cache::BlockCache;

/// The sizes of a TANGO stack.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TangoConfig {
    /// Model width D.
    pub d_model: usize,
    /// Heads H.
    pub heads: usize,
    /// Key width of a head, K.
    pub head_dim: usize,
    /// Gate width of all heads together, E; a multiple of H.
    pub gate_width: usize,
    /// Block applications L.
    pub applications: usize,
    /// Whether all applications share one set of parameters.
    pub tied: bool,
    /// Base of the rotary angles.
    pub rope_base: f64,
    /// WANGO's window; TANGO has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<Window>,
}

/// What WANGO sees how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Tokens that are weighed by softmax scores, the current one included: W.
    pub size: usize,
    /// The features by which all earlier tokens are weighed.
    #[serde(with = "feature_map_name")]
    pub feature_map: FeatureMap,
}

/// A feature map as its name.
mod feature_map_name {
    use super::FeatureMap;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(map: &FeatureMap, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_str(map.name())
    }
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<FeatureMap, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

impl TangoConfig {
    /// What is wrong with the sizes, if anything.
    ///
    /// # Errors
    /// A sentence naming the field, what was expected and what was found.
    pub fn check(&self) -> Result<(), String> {
        let name = if self.window.is_some() { "wango" } else { "tango" };
        let zero = [
            ("d_model", self.d_model),
            ("heads", self.heads),
            ("head_dim", self.head_dim),
            ("gate_width", self.gate_width),
            ("applications", self.applications),
        ];
        if let Some((field, _)) = zero.iter().find(|(_, v)| *v == 0) {
            return Err(format!("{name}: {field} must be positive, found 0"));
        }
        if self.window.is_some_and(|window| window.size == 0) {
            return Err("wango: the window must be at least 1 (a token sees itself), found 0".into());
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("{name}: head_dim must be even for rotary positions, found {}", self.head_dim));
        }
        if !self.gate_width.is_multiple_of(self.heads) {
            return Err(format!(
                "{name}: gate_width must be a multiple of heads={}, found {}",
                self.heads, self.gate_width
            ));
        }
        if !(self.rope_base.is_finite() && self.rope_base > 0.0) {
            return Err(format!("{name}: rope_base must be a positive number, found {}", self.rope_base));
        }
        Ok(())
    }
}

/// One set of a block's parameters.
#[derive(Clone, Debug)]
pub struct TangoBlock {
    /// `[D]`.
    pub norm: RmsNorm,
    /// `[H·K, D]`.
    pub wq: Linear,
    /// `[H·K, D]`.
    pub wk: Linear,
    /// Gate, `[E, D]`.
    pub wg: Linear,
    /// Value, `[E, D]`.
    pub wv: Linear,
    /// `[D, E]`.
    pub wo: Linear,
    /// Logarithm of each head's inverse temperature, `[H]`.
    pub log_tau: Param,
    /// Heads H.
    pub heads: usize,
    /// Base of the rotary angles.
    pub rope_base: f64,
    /// WANGO's window.
    pub window: Option<Window>,
}
module!(TangoBlock { norm, wq, wk, wg, wv, wo, log_tau });

impl TangoBlock {
    /// Fresh parameters: `1/sqrt(fan_in)`, the output's over `sqrt(2L)`; `tau` = 8.
    pub fn new(config: &TangoConfig, init: &Init) -> TangoBlock {
        let &TangoConfig { d_model: d, heads, head_dim, gate_width: e, applications, rope_base, window, .. } = config;
        TangoBlock {
            norm: RmsNorm::new(d, &init.of("norm")),
            wq: Linear::new(d, heads * head_dim, 1.0, &init.of("wq")),
            wk: Linear::new(d, heads * head_dim, 1.0, &init.of("wk")),
            wg: Linear::new(d, e, 1.0, &init.of("wg")),
            wv: Linear::new(d, e, 1.0, &init.of("wv")),
            wo: Linear::new(e, d, 1.0 / (2.0 * applications as f64).sqrt(), &init.of("wo")),
            log_tau: init.of("log_tau").full(&[heads], 8f64.ln()),
            heads,
            rope_base,
            window,
        }
    }

    /// `h [B, T, D]` to the same. With a cache the tokens continue those in it.
    #[track_caller]
    pub fn forward(&self, tape: &Tape, h: &Var, cache: Option<&mut BlockCache>) -> Var {
        let (b, t) = (h.dim(0), h.dim(1));
        let start = cache.as_ref().map_or(0, |c| c.len());
        let heads = |y: Var| ops::reshape(&y, &[b, t, self.heads, y.dim(2) / self.heads]);
        let x = self.norm.forward(tape, h);
        let (q, k) = (heads(self.wq.forward(tape, &x)), heads(self.wk.forward(tape, &x))); // [B, T, H, K]
        // Rotation keeps norms, so that it may come before the normalisation inside of the operators.
        let [rq, mut rk] = [&q, &k].map(|x| ops::rope(x, self.rope_base, start));
        let mut g = heads(ops::silu(&self.wg.forward_to_hidden(tape, &x))); // [B, T, H, G]
        let v = self.wv.forward_to_hidden(tape, &x); // [B, T, E]
        let tau = &ops::exp(&tape.param(&self.log_tau));
        // ḡ ⊙ v, [B, T, E]
        let gated = match self.window {
            None => {
                if let Some(cache) = cache {
                    let (keys, gates) = cache.kv().append(rk.value(), g.value());
                    (rk, g) = (Var::constant(keys), Var::constant(gates));
                }
                ops::gate_aggregate_mul(&rq, &rk, &g, tau, &v)
            }
            Some(Window { size, feature_map }) => {
                let [phi_q, phi_k] = &[&q, &k].map(|x| ops::feature_map(x, tau, feature_map)); // [B, T, H, M]
                let x = WindowedPrefix { q: &rq, k: &rk, phi_q, phi_k, g: &g, tau, window: size };
                match cache {
                    None => ops::windowed_prefix_mul(x, &v),
                    Some(cache) => {
                        let gate = cache.prefix(size).push(x).reshape(v.shape());
                        ops::mul(&Var::constant(gate), &v)
                    }
                }
            }
        };
        ops::add(h, &self.wo.forward(tape, &gated))
    }
}
