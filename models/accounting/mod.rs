//! What a model costs, by formula: parameters, multiply-accumulates of a forward pass, bytes that decoding keeps.
//!
//! The formulas are checked against models that run: parameters against their tensors, multiply-accumulates against
//! what the operators count ([`kumiki_ops::count_macs`]), bytes against a decoding cache.

mod double;

use kumiki_nn::Diagonal;
use kumiki_ops::MacCount;

use crate::cem::{AttentionKind, CemConfig, MlpKind};
use crate::language_model::{Architecture, LanguageModelConfig};

/// How token pairs, and tokens seen through running sums, are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// As the papers do: all `T·T` of an attention, `T·W` of a window, `C·C` of a chunk; every token is added to running
    /// sums and reads them.
    Full,
    /// Those that are not masked, `T(T+1)/2` of an attention; only tokens that something lies far from are added, only
    /// those that see something far read.
    Causal,
}

/// The most block applications of a model; more are taken for a mistake.
pub const MAX_APPLICATIONS: usize = 1024;

/// All multiply-accumulates together.
pub fn total(macs: &MacCount) -> u64 {
    macs.projection + macs.pair + macs.prefix + macs.head
}

/// Parameters of the block of one layer, norms and scales included.
fn params_of_layer(architecture: &Architecture, layer: usize) -> u128 {
    let d = architecture.d_model() as u128;
    match architecture {
        Architecture::Tango(c) => {
            let heads = c.heads as u128;
            d + 2 * heads * c.head_dim as u128 * d + 3 * c.gate_width as u128 * d + heads
        }
        Architecture::Transformer(c) => 2 * d + 4 * d * d + 3 * c.d_ff as u128 * d,
        Architecture::Gau(c) => {
            let s = c.key_width as u128;
            d + 3 * c.gate_width as u128 * d + s * d + 2 * c.vectors() as u128 * s
        }
        Architecture::Cem(c) => {
            let (attention, mlp) = cem_halves(c, layer);
            attention + mlp
        }
        Architecture::Decoder(c) => 2 * d + 4 * d * d + 2 * c.d_ff as u128 * d,
    }
}

/// Parameters of one layer of CEM or Llama: of its attention and of its MLP, each with its norm.
pub fn cem_halves(c: &CemConfig, layer: usize) -> (u128, u128) {
    let (d, keys, f) = (c.d_model as u128, c.heads as u128 * c.head_dim as u128, c.d_ff as u128);
    let preconditioner = c.rank.map_or(0, |rank| (1 + 2 * rank as u128) * d);
    let (attention, mlp) = c.layer(layer);
    let attention = match attention {
        AttentionKind::Mha => 4 * d * d,
        AttentionKind::Cem => 2 * keys * d + c.diagonal.rows(c.heads) as u128 * d + 1 + preconditioner,
    };
    let mlp = match mlp {
        MlpKind::Swiglu => 3 * f * d,
        MlpKind::Cem => 2 * f * d + 1 + preconditioner,
    };
    (d + attention, d + mlp)
}

/// Distinct parameters of the blocks.
fn wide_block_params(architecture: &Architecture) -> u128 {
    let sets = if architecture.tied() { 1 } else { architecture.applications() };
    (0..sets).map(|layer| params_of_layer(architecture, layer)).sum()
}

/// As [`total_params`] for sizes below `2^36`, whose product may be beyond `usize`.
fn wide_params(config: &LanguageModelConfig) -> u128 {
    let d = config.architecture.d_model() as u128;
    wide_block_params(&config.architecture) + config.n_vocab as u128 * d + d
}

/// Distinct parameters of the blocks.
pub fn block_params(architecture: &Architecture) -> usize {
    wide_block_params(architecture) as usize
}

/// Distinct parameters of a model: blocks, token table, last norm.
pub fn total_params(config: &LanguageModelConfig) -> usize {
    wide_params(config) as usize
}

/// As [`total_params`], or `None` when the sizes are so large that the count overflows: for sizes from a file.
pub fn checked_total_params(config: &LanguageModelConfig) -> Option<usize> {
    let sizes: &[usize] = match &config.architecture {
        Architecture::Tango(c) => &[c.d_model, c.heads, c.head_dim, c.gate_width, c.applications],
        Architecture::Transformer(c) => &[c.d_model, c.heads, c.d_ff, c.applications],
        Architecture::Gau(c) => &[c.d_model, c.key_width, c.gate_width, c.applications],
        Architecture::Cem(c) => &[c.d_model, c.heads, c.head_dim, c.d_ff, c.applications],
        Architecture::Decoder(c) => &[c.d_model, c.heads, c.d_ff, c.applications],
    };
    // At most four sizes and a small number are multiplied, one of them the applications.
    let plausible = sizes.iter().chain([&config.n_vocab]).all(|&size| (size as u64) < 1 << 36)
        && config.architecture.applications() <= MAX_APPLICATIONS;
    plausible.then(|| usize::try_from(wide_params(config)).ok())?
}

/// Pairs of a token with the last `window` ones.
fn near_pairs(t: u64, window: u64, pairs: Pairs) -> u64 {
    let growing = window.min(t);
    match pairs {
        Pairs::Full => t * growing,
        Pairs::Causal => growing * (growing + 1) / 2 + (t - growing) * growing,
    }
}

/// Pairs inside of chunks.
fn chunk_pairs(t: u64, chunk: u64, pairs: Pairs) -> u64 {
    let of = |len: u64| if pairs == Pairs::Full { len * len } else { len * (len + 1) / 2 };
    t / chunk * of(chunk) + of(t % chunk)
}

/// Multiply-accumulates of a forward pass over one sequence of `seq` tokens, head included. Norms, rotations and
/// elementwise work are not counted.
pub fn macs(config: &LanguageModelConfig, seq: usize, pairs: Pairs) -> MacCount {
    let (t, d) = (seq as u64, config.architecture.d_model() as u64);
    let mut sum = MacCount { head: t * d * config.n_vocab as u64, ..MacCount::default() };
    for layer in 0..config.architecture.applications() {
        let (matrices, pair, prefix) = layer_macs(&config.architecture, layer, t, pairs);
        sum.projection += t * matrices;
        sum.pair += pair;
        sum.prefix += prefix;
    }
    sum
}

/// Of one layer: with matrices for a token, with pairs, and in running sums.
fn layer_macs(architecture: &Architecture, layer: usize, t: u64, pairs: Pairs) -> (u64, u64, u64) {
    let d = architecture.d_model() as u64;
    match architecture {
        Architecture::Tango(c) => {
            let (keys, e, heads) = ((c.heads * c.head_dim) as u64, c.gate_width as u64, c.heads as u64);
            let window = c.window.as_ref().map_or(t, |w| w.size as u64);
            // The last column of the sums is the denominator's.
            let prefix = c.window.as_ref().map_or(0, |w| {
                let far = if pairs == Pairs::Full { t } else { t.saturating_sub(window) };
                2 * far * w.feature_map.width(c.head_dim) as u64 * (e + heads)
            });
            (2 * keys * d + 3 * e * d, near_pairs(t, window, pairs) * (keys + e), prefix)
        }
        Architecture::Transformer(c) => (4 * d * d + 3 * c.d_ff as u64 * d, near_pairs(t, t, pairs) * 2 * d, 0),
        Architecture::Gau(c) => {
            let (s, e) = (c.key_width as u64, c.gate_width as u64);
            let matrices = 3 * e * d + s * d;
            match c.chunk.map(|chunk| chunk as u64) {
                None => (matrices, near_pairs(t, t, pairs) * (s + e), 0),
                Some(chunk) => {
                    let far = match pairs {
                        Pairs::Full => 2 * t,
                        Pairs::Causal => t.saturating_sub(1) / chunk * chunk + t.saturating_sub(chunk),
                    };
                    (matrices, chunk_pairs(t, chunk, pairs) * (s + e), far * s * e)
                }
            }
        }
        Architecture::Cem(c) => {
            let (keys, f, steps) = ((c.heads * c.head_dim) as u64, c.d_ff as u64, c.steps as u64);
            let preconditioner = 4 * c.rank.unwrap_or(0) as u64 * d;
            let (attention, mlp) = c.layer(layer);
            let (attention, pair) = match attention {
                AttentionKind::Mha => (4 * d * d, 2 * d),
                AttentionKind::Cem => {
                    let rows = c.diagonal.rows(c.heads) as u64;
                    (keys * d + steps * (2 * keys * d + preconditioner), steps * 2 * (keys + rows * d))
                }
            };
            let mlp = match mlp {
                MlpKind::Swiglu => 3 * f * d,
                MlpKind::Cem => f * d + steps * (2 * f * d + preconditioner),
            };
            (attention + mlp, near_pairs(t, t, pairs) * pair, 0)
        }
        Architecture::Decoder(c) => (4 * d * d + 2 * c.d_ff as u64 * d, near_pairs(t, t, pairs) * 2 * d, 0),
    }
}

/// Bytes that decoding keeps of a sequence of `seq` tokens, for numbers of `float` bytes: keys and values of all of them,
/// or a window (a chunk) and running sums.
pub fn state_bytes(config: &LanguageModelConfig, seq: usize, float: usize) -> u64 {
    let started = u64::from(seq > 0); // nothing is kept before the first token
    let layers = 0..config.architecture.applications();
    started * float as u64 * layers.map(|layer| layer_state(&config.architecture, layer, seq as u64)).sum::<u64>()
}

/// Numbers that one layer keeps of `t` tokens.
fn layer_state(architecture: &Architecture, layer: usize, t: u64) -> u64 {
    match architecture {
        Architecture::Tango(c) => {
            let (keys, e, heads) = ((c.heads * c.head_dim) as u64, c.gate_width as u64, c.heads as u64);
            match &c.window {
                None => t * (keys + e),
                Some(w) => {
                    let features = w.feature_map.width(c.head_dim) as u64;
                    t.min(w.size as u64) * (keys + heads * features + e + heads) + features * (e + heads)
                }
            }
        }
        Architecture::Transformer(c) => t * 2 * c.d_model as u64,
        Architecture::Decoder(c) => t * 2 * c.d_model as u64,
        Architecture::Gau(c) => {
            let (s, e) = (c.key_width as u64, c.gate_width as u64);
            match c.chunk.map(|chunk| chunk as u64) {
                None => t * (s + e),
                // Of the current chunk every token; the sums over it are kept beside those before it.
                Some(chunk) => (t.saturating_sub(1) % chunk + t.min(1)) * (s + e) + 2 * s * e,
            }
        }
        // Keys, and the history where there is a diagonal, whatever the steps.
        Architecture::Cem(c) => match c.layer(layer).0 {
            AttentionKind::Mha => t * 2 * c.d_model as u64,
            AttentionKind::Cem => {
                let history = if c.diagonal == Diagonal::None { 0 } else { c.d_model };
                t * (c.heads * c.head_dim + history) as u64
            }
        },
    }
}

/// Numbers that the block application of a layer keeps of a token for the backward, when it is not recomputed; the files
/// of the blocks say which.
pub fn saved_numbers(architecture: &Architecture, layer: usize) -> u64 {
    let numbers = match architecture {
        Architecture::Tango(c) => {
            let features = c.window.map_or(0, |w| c.head_dim + w.feature_map.width(c.head_dim));
            let wide = if c.window.is_some() { 4 } else { 3 };
            2 * c.d_model + 1 + 2 * c.heads * (c.head_dim + features) + wide * c.gate_width + c.heads
        }
        Architecture::Transformer(c) => 8 * c.d_model + 2 + c.heads + 3 * c.d_ff,
        Architecture::Decoder(c) => 8 * c.d_model + 2 + c.heads + 2 * c.d_ff,
        Architecture::Gau(c) => 2 * c.d_model + 1 + (2 + c.vectors()) * c.key_width + 5 * c.gate_width,
        Architecture::Cem(c) => {
            let (d, keys, norm) = (c.d_model, c.heads * c.head_dim, 2 * c.d_model + 1);
            let direction = d + c.rank.map_or(0, |rank| d + 2 * rank);
            let steps = |of_step: usize| norm + c.steps * (of_step + direction) + (c.steps - 1) * norm;
            let (attention, mlp) = c.layer(layer);
            let attention = match attention {
                AttentionKind::Mha => norm + 4 * d + c.heads,
                AttentionKind::Cem => keys + steps(2 * keys + c.heads + c.diagonal.rows(c.heads) * d),
            };
            let mlp = match mlp {
                MlpKind::Swiglu => norm + 3 * c.d_ff,
                MlpKind::Cem => c.d_ff + steps(c.d_ff),
            };
            attention + mlp
        }
    };
    numbers as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TangoConfig, TransformerConfig};

    #[test]
    fn sizes_beyond_counting_are_none() {
        let config = |size: usize, applications| LanguageModelConfig {
            n_vocab: 256,
            architecture: Architecture::Tango(TangoConfig {
                d_model: size,
                heads: size,
                head_dim: size,
                gate_width: size,
                applications,
                tied: true,
                rope_base: 1e4,
                window: None,
            }),
        };
        assert_eq!(checked_total_params(&config(4, 1024)), Some(total_params(&config(4, 1024))));
        assert_eq!(checked_total_params(&config(4, 1025)), None);
        for bits in [25, 35, 40, 63] {
            assert_eq!(checked_total_params(&config(1 << bits, 4)), None, "{bits}");
        }
    }

    #[test]
    fn the_papers_macs_come_out() {
        let tango = TangoConfig {
            d_model: 512,
            heads: 16,
            head_dim: 32,
            gate_width: 28_496,
            applications: 4,
            tied: true,
            rope_base: 1e4,
            window: None,
        };
        let wango = TangoConfig {
            window: Some(crate::Window { size: 128, feature_map: kumiki_ops::FeatureMap::Hyperbolic }),
            ..tango.clone()
        };
        let transformer =
            TransformerConfig { d_model: 512, heads: 8, d_ff: 28_158, applications: 4, tied: true, rope_base: 1e4 };
        for (architecture, paper) in [
            (Architecture::Tango(tango), 9.44e12),
            (Architecture::Tango(wango), 1.90e12),
            (Architecture::Transformer(transformer), 1.94e12),
        ] {
            let config = LanguageModelConfig { n_vocab: 50_257, architecture };
            let total = total(&macs(&config, 8192, Pairs::Full)) as f64;
            assert!((total / paper - 1.0).abs() < 0.005, "{total:e} against {paper:e}");
            assert!((block_params(&config.architecture) as f64 / 44.3e6 - 1.0).abs() < 0.001);
        }
    }
}
