//! What a model costs, by formula: parameters and multiply-accumulates of a forward pass.

use crate::language_model::{Architecture, LanguageModelConfig};
use crate::tango::Window;

/// How the token pairs of an attention are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// All `T·T`, as the papers do.
    Full,
    /// The `T(T+1)/2` that are not masked.
    Causal,
}

/// The most block applications of a model; more are taken for a mistake.
pub const MAX_APPLICATIONS: usize = 1024;

/// Multiply-accumulates of one forward pass over one sequence, by what they are spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Macs {
    /// Products with weight matrices of the blocks.
    pub projection: u64,
    /// Scores and weighted sums over token pairs.
    pub pair: u64,
    /// Running sums over earlier tokens, and reads of them.
    pub prefix: u64,
    /// The output head.
    pub head: u64,
}

impl Macs {
    /// All together.
    pub fn total(&self) -> u64 {
        self.projection + self.pair + self.prefix + self.head
    }
}

/// Parameters of one set of blocks, norms and scales included.
fn params_per_set(architecture: &Architecture) -> u128 {
    let [d, heads] = [architecture.d_model(), architecture.heads()].map(|size| size as u128);
    match architecture {
        Architecture::Tango(c) => d + 2 * heads * c.head_dim as u128 * d + 3 * c.gate_width as u128 * d + heads,
        Architecture::Transformer(c) => 2 * d + 4 * d * d + 3 * c.d_ff as u128 * d,
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
    };
    // At most four sizes and a small number are multiplied, one of them the applications.
    let plausible = sizes.iter().chain([&config.n_vocab]).all(|&size| (size as u64) < 1 << 36)
        && config.architecture.applications() <= MAX_APPLICATIONS;
    plausible.then(|| usize::try_from(wide_params(config)).ok())?
}

/// Multiply-accumulates of a forward pass over `seq` tokens. Norms, rotations and elementwise work are not counted.
pub fn macs(config: &LanguageModelConfig, seq: usize, pairs: Pairs) -> Macs {
    let (d, l, t) = (config.architecture.d_model() as u64, config.architecture.applications() as u64, seq as u64);
    // Pairs of a token with as many others as it may see, all at most.
    let counted = |window: u64| match pairs {
        Pairs::Full => t * window.min(t),
        Pairs::Causal => {
            let growing = window.min(t);
            growing * (growing + 1) / 2 + (t - growing) * growing
        }
    };
    let (matrices, pair, prefix) = match &config.architecture {
        Architecture::Tango(c) => {
            let (keys, e) = ((c.heads * c.head_dim) as u64, c.gate_width as u64);
            // Every token is added to the sums of gates and weights, and reads them, by M features a head.
            let features = |w: &Window| w.feature_map.width(c.head_dim) as u64;
            let prefix = c.window.as_ref().map_or(0, |w| 2 * t * features(w) * (e + c.heads as u64));
            (2 * keys * d + 3 * e * d, counted(c.window.map_or(t, |w| w.size as u64)) * (keys + e), prefix)
        }
        Architecture::Transformer(c) => (4 * d * d + 3 * c.d_ff as u64 * d, counted(t) * 2 * d, 0),
    };
    Macs { projection: l * t * matrices, pair: l * pair, prefix: l * prefix, head: t * d * config.n_vocab as u64 }
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
            let total = macs(&config, 8192, Pairs::Full).total() as f64;
            assert!((total / paper - 1.0).abs() < 0.005, "{total:e} against {paper:e}");
            assert!((block_params(&config.architecture) as f64 / 44.3e6 - 1.0).abs() < 0.001);
        }
    }
}
