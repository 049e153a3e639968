//! The size solver: the free width that brings a model to a wanted number of parameters.

use kumiki_tensor::{Error, Result};

use crate::accounting::block_params;
use crate::language_model::Architecture;

/// Sets the free width (E or F) of `architecture` such that the distinct parameters outside of the token table come as
/// close to `target` as the width's steps allow (E goes in multiples of H).
///
/// # Errors
/// When even the smallest width has more than twice the parameters wanted; the sentence says how many.
pub fn solve_width(architecture: &Architecture, target: usize) -> Result<Architecture> {
    let step = match architecture {
        Architecture::Tango(c) => c.heads,
        Architecture::Transformer(_) => 1,
    };
    let at = |steps: usize| with_width(architecture, steps * step);
    let (one, two) = (block_params(&at(1)), block_params(&at(2)));
    let steps = 1 + (target.saturating_sub(one) + (two - one) / 2) / (two - one);
    let solved = at(steps);
    solved.check()?;
    if block_params(&solved) > 2 * target {
        return Err(Error::new(format!(
            "a target of {target} parameters is out of reach: with the smallest width these blocks have {}",
            block_params(&solved)
        )));
    }
    Ok(solved)
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
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TangoConfig, TransformerConfig};

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

    #[test]
    fn paper_widths_come_out() {
        let Architecture::Tango(c) = solve_width(&tango(512, 16, 32, true), 44_300_000).unwrap() else { panic!() };
        assert_eq!(c.gate_width, 28_496);
        let Architecture::Transformer(c) = solve_width(&transformer(512, 8, true), 44_300_000).unwrap() else {
            panic!()
        };
        assert_eq!(c.d_ff, 28_158);
    }

    #[test]
    fn small_targets_are_met_within_one_percent_or_refused() {
        for architecture in [tango(128, 4, 32, true), transformer(128, 4, true), transformer(128, 4, false)] {
            assert!(width_error(&solve_width(&architecture, 400_000).unwrap(), 400_000) < 0.01);
        }
        let error = solve_width(&transformer(128, 4, false), 10_000).unwrap_err().to_string();
        assert!(error.contains("out of reach"), "{error}");
    }
}
