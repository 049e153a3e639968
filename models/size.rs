//! The size solver: the free width that brings a model to a wanted number of parameters.

use kumiki_tensor::{Error, Result};

use crate::accounting::block_params;
use crate::language_model::Architecture;
use crate::{LanguageModelConfig, ModelConfig};

/// Sets the free width (E or F) of `architecture` such that the distinct parameters outside of the token table come as
/// close to `target` as the width's steps allow: E goes in multiples of H; that of GAU and FLASH in the largest steps up to
/// 64 that stay within a thousandth of the target, so that it can be cut into blocks.
///
/// # Errors
/// When even the nearest size has more than twice the parameters wanted; the sentence says how many parameters it has.
pub fn solve_width(architecture: &Architecture, target: usize) -> Result<Architecture> {
    let solved = match architecture {
        Architecture::Tango(c) => nearest(architecture, c.heads, target),
        Architecture::Transformer(_) | Architecture::Cem(_) | Architecture::Decoder(_) => {
            nearest(architecture, 1, target)
        }
        Architecture::Gau(_) => {
            let near =
                |step: &usize| Some(nearest(architecture, *step, target)).filter(|a| width_error(a, target) <= 1e-3);
            [64, 16, 8, 4, 2].iter().find_map(near).unwrap_or_else(|| nearest(architecture, 1, target))
        }
    };
    solved.check()?;
    in_reach(block_params(&solved), target).map(|()| solved)
}

/// As [`solve_width`], for a model of any kind.
///
/// # Errors
/// As [`solve_width`].
pub fn solve_model_width(config: &ModelConfig, target: usize) -> Result<ModelConfig> {
    let with = |width: usize| {
        let mut config = config.clone();
        match &mut config {
            ModelConfig::Language(_) => {}
            ModelConfig::Double(c) => c.d_ff = width,
            ModelConfig::EncoderDecoder(c) => c.d_ff = width,
        }
        config
    };
    if let ModelConfig::Language(LanguageModelConfig { n_vocab, architecture }) = config {
        let architecture = solve_width(architecture, target)?;
        return Ok(ModelConfig::Language(LanguageModelConfig { n_vocab: *n_vocab, architecture }));
    }
    let solved = with(nearest_width(1, target, |width| with(width).block_params()));
    solved.check()?;
    in_reach(solved.block_params(), target).map(|()| solved)
}

/// # Errors
/// When `found` is more than twice the parameters wanted.
fn in_reach(found: usize, target: usize) -> Result<()> {
    if found > target.saturating_mul(2) {
        return Err(Error::new(format!(
            "a target of {target} parameters is out of reach: the nearest that these blocks can have is {found}"
        )));
    }
    Ok(())
}

/// The multiple of `step`, at least one, with which a model comes nearest to `target`; its parameters grow linearly.
fn nearest_width(step: usize, target: usize, params: impl Fn(usize) -> usize) -> usize {
    let (one, two) = (params(step), params(2 * step));
    step * (1 + (target.saturating_sub(one) + (two - one) / 2) / (two - one))
}

fn nearest(architecture: &Architecture, step: usize, target: usize) -> Architecture {
    with_width(architecture, nearest_width(step, target, |width| block_params(&with_width(architecture, width))))
}

/// How far the parameters are from `target`, as a part of it.
pub fn width_error(architecture: &Architecture, target: usize) -> f64 {
    (block_params(architecture) as f64 - target as f64).abs() / target as f64
}

fn with_width(architecture: &Architecture, width: usize) -> Architecture {
    let mut out = architecture.clone();
    match &mut out {
        Architecture::Tango(c) => c.gate_width = width,
        Architecture::Transformer(c) => c.d_ff = width,
        Architecture::Gau(c) => c.gate_width = width,
        Architecture::Cem(c) => c.d_ff = width,
        Architecture::Decoder(c) => c.d_ff = width,
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GauConfig, TangoConfig, TransformerConfig};

    fn tango(d_model: usize, heads: usize, head_dim: usize, tied: bool) -> Architecture {
        Architecture::Tango(TangoConfig {
            d_model,
            heads,
            head_dim,
            gate_width: 0,
            applications: 4,
            tied,
            rope_base: 1e4,
            window: None,
        })
    }

    fn transformer(d_model: usize, heads: usize, tied: bool) -> Architecture {
        Architecture::Transformer(TransformerConfig { d_model, heads, d_ff: 0, applications: 4, tied, rope_base: 1e4 })
    }

    fn gau(d_model: usize, key_width: usize, chunk: Option<usize>) -> Architecture {
        let (applications, rope_base) = (4, 1e4);
        let (gate_width, tied) = (0, false);
        Architecture::Gau(GauConfig { d_model, key_width, gate_width, applications, tied, rope_base, chunk })
    }

    #[test]
    fn paper_widths_come_out() {
        let Architecture::Tango(c) = solve_width(&tango(512, 16, 32, true), 44_300_000).unwrap() else { panic!() };
        assert_eq!(c.gate_width, 28_496);
        let Architecture::Transformer(c) = solve_width(&transformer(512, 8, true), 44_300_000).unwrap() else {
            panic!()
        };
        assert_eq!(c.d_ff, 28_158);
        for chunk in [None, Some(256)] {
            let solved = solve_width(&gau(512, 128, chunk), 44_300_000).unwrap();
            let Architecture::Gau(c) = &solved else { panic!() };
            assert_eq!(c.gate_width, 7168);
            assert!(width_error(&solved, 44_300_000) < 1e-3, "{}", width_error(&solved, 44_300_000));
        }
    }

    #[test]
    fn small_targets_are_met_within_one_percent_or_refused() {
        let gaus = [gau(128, 32, None), gau(128, 32, Some(64))];
        let others = [tango(128, 4, 32, true), transformer(128, 4, true), transformer(128, 4, false)];
        for architecture in gaus.into_iter().chain(others) {
            assert!(width_error(&solve_width(&architecture, 400_000).unwrap(), 400_000) < 0.01);
        }
        let error = solve_width(&transformer(128, 4, false), 10_000).unwrap_err().to_string();
        assert!(error.contains("out of reach"), "{error}");
    }
}
