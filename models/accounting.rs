//! What a model costs, by formula: parameters, multiply-accumulates of a forward pass, bytes that decoding keeps.
//!
//! The formulas are checked against models that run: parameters against their tensors, multiply-accumulates against
//! what the operators count ([`kumiki_ops::count_macs`]), bytes against a decoding cache.

use kumiki_ops::MacCount;

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

/// Parameters of one set of blocks, norms and scales included.
fn params_per_set(architecture: &Architecture) -> u128 {
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
    }
}

/// As [`total_params`] for sizes below `2^36`, whose product may be beyond `usize`.
fn wide_params(config: &LanguageModelConfig) -> u128 {
    let architecture = &config.architecture;
    let sets = if architecture.tied() { 1 } else { architecture.applications() };
    let d = architecture.d_model() as u128;
    sets as u128 * params_per_set(architecture) + config.n_vocab as u128 * d + d
}

/// Distinct parameters of the blocks.
pub fn block_params(architecture: &Architecture) -> usize {
    let sets = if architecture.tied() { 1 } else { architecture.applications() };
    sets * params_per_set(architecture) as usize
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
    let (d, l, t) = (config.architecture.d_model() as u64, config.architecture.applications() as u64, seq as u64);
    let (matrices, pair, prefix) = match &config.architecture {
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
    };
    MacCount { projection: l * t * matrices, pair: l * pair, prefix: l * prefix, head: t * d * config.n_vocab as u64 }
}

/// Bytes that decoding keeps of a sequence of `seq` tokens, for numbers of `float` bytes: keys and values of all of them,
/// or a window (a chunk) and running sums.
pub fn state_bytes(config: &LanguageModelConfig, seq: usize, float: usize) -> u64 {
    let t = seq as u64;
    let numbers = match &config.architecture {
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
        Architecture::Gau(c) => {
            let (s, e) = (c.key_width as u64, c.gate_width as u64);
            match c.chunk.map(|chunk| chunk as u64) {
                None => t * (s + e),
                // Of the current chunk every token; the sums over it are kept beside those before it.
                Some(chunk) => (t.saturating_sub(1) % chunk + t.min(1)) * (s + e) + 2 * s * e,
            }
        }
    };
    let started = u64::from(seq > 0); // nothing is kept before the first token
    started * config.architecture.applications() as u64 * numbers * float as u64
}

/// Numbers that one block application keeps of a token for the backward, when it is not recomputed; the files of the blocks
/// say which.
pub fn saved_numbers(architecture: &Architecture) -> u64 {
    let numbers = match architecture {
        Architecture::Tango(c) => {
            let features = c.window.map_or(0, |w| c.head_dim + w.feature_map.width(c.head_dim));
            2 * c.d_model + 1 + 2 * c.heads * (c.head_dim + features) + 4 * c.gate_width + c.heads
        }
        Architecture::Transformer(c) => 8 * c.d_model + 2 + c.heads + 3 * c.d_ff,
        Architecture::Gau(c) => 2 * c.d_model + 1 + (2 + c.vectors()) * c.key_width + 5 * c.gate_width,
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
