//! How much memory a training step needs at the very least, against what there is.
//!
//! Only what is certain is counted, so that nothing is refused that would run: parameters with their gradients and the
//! optimiser's two moments, what block applications keep for the backward, the tokens.

use kumiki_models::accounting::{block_params, saved_numbers, state_bytes, total_params};
use kumiki_models::{Architecture, LanguageModelConfig, SequenceRegressorConfig};
use kumiki_tensor::DType;

use crate::{Error, Result};

/// Where the system does not tell: more than any machine has that this is meant for.
const GENEROUS: u64 = 4 << 40;

/// The sizes of a training step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub dtype: DType,
    pub rows: usize,
    pub seq: usize,
    pub accumulate: usize,
    /// Whether activations are recomputed instead of kept.
    pub recompute: bool,
}

impl Step {
    /// A lower bound, in bytes, for a model with `params` parameters.
    fn least(&self, architecture: &Architecture, params: u128) -> u128 {
        let float = if self.dtype == DType::F64 { 8 } else { 4 };
        let tokens = self.rows as u128 * self.seq as u128;
        let [d, applications] = [architecture.d_model(), architecture.applications()].map(|n| n as u128);
        let (all, most) = kept(architecture);
        // Recomputed, every application keeps its input, and one at a time the rest.
        let kept = if self.recompute { applications * d + most } else { all };
        // Value and two moments; the gradient comes as what is kept goes, except from the second batch on. A token and its
        // target are 8 bytes each.
        let params = float * params;
        let with_kept = if self.accumulate > 1 { 4 } else { 3 } * params + kept * float * tokens;
        with_kept.max(4 * params) + 16 * tokens * self.accumulate as u128
    }

    /// Whether the step of this model can fit. `options` are those that make it smaller.
    ///
    /// # Errors
    /// A sentence with what is needed and what there is.
    pub(crate) fn check(&self, name: &str, config: &LanguageModelConfig, options: &str) -> Result<()> {
        fits("training", name, self.least(&config.architecture, total_params(config) as u128), available(), options)
    }

    /// As [`Step::check`], for a regressor: its two maps beside the blocks are nothing beside what is not counted.
    ///
    /// # Errors
    /// A sentence with what is needed and what there is.
    pub(crate) fn check_regressor(&self, name: &str, config: &SequenceRegressorConfig, options: &str) -> Result<()> {
        let params = block_params(&config.architecture) as u128;
        fits("training", name, self.least(&config.architecture, params), available(), options)
    }
}

/// Numbers kept of a token for the backward: of all block applications, and of the one that keeps most.
fn kept(architecture: &Architecture) -> (u128, u128) {
    let layers = (0..architecture.applications()).map(|layer| saved_numbers(architecture, layer).into());
    layers.fold((0, 0), |(sum, most): (u128, u128), one| (sum + one, most.max(one)))
}

/// Whether a prompt of `seq` tokens can be taken and decoded from: parameters, what is kept of every token, and half of what
/// training would keep of one block application, which is there at once while the prompt passes it.
///
/// # Errors
/// A sentence with what is needed and what there is.
pub(crate) fn check_inference(
    name: &str,
    config: &LanguageModelConfig,
    seq: usize,
    dtype: DType,
    options: &str,
) -> Result<()> {
    let float = dtype.size();
    let passing = kept(&config.architecture).1 * seq as u128 / 2;
    let least = (total_params(config) as u128 + passing) * float as u128 + u128::from(state_bytes(config, seq, float));
    fits("inference with", name, least, available(), options)
}

fn fits(what: &str, name: &str, least: u128, available: u64, options: &str) -> Result<()> {
    if least <= u128::from(available) {
        return Ok(());
    }
    let gib = |bytes: f64| format!("{:.1} GiB", bytes / f64::from(1 << 30));
    Err(Error::new(format!(
        "{what} `{name}` needs at least {} of memory, {} are available; lower {options}",
        gib(least as f64),
        gib(available as f64)
    )))
}

/// Bytes that can be had without pushing others out.
fn available() -> u64 {
    std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| parse(&text)).unwrap_or(GENEROUS)
}

fn parse(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Settings;
    use crate::zoo::Suite;

    #[test]
    fn the_system_tells() {
        assert_eq!(parse("MemTotal:  9 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert_eq!(parse("MemTotal:  9 kB\n"), None);
        assert!(available() > 1 << 20);
    }

    #[test]
    fn a_bound_from_below_and_no_overflow() {
        let small = Settings::preset("nano").unwrap();
        let step = Step { dtype: DType::F32, rows: 8, seq: 64, accumulate: 1, recompute: false };
        for &model in Suite::Tango.models() {
            let config = small.model(model, 256).unwrap();
            let (params, tokens) = (total_params(&config) as u128, 8 * 64);
            let one = u128::from(saved_numbers(&config.architecture, 0));
            let least = |step: Step| step.least(&config.architecture, params);
            assert_eq!(least(step), 12 * params + 2 * 4 * tokens * one + 16 * tokens);
            let recomputed = Step { recompute: true, ..step };
            assert_eq!(least(recomputed), 12 * params + 4 * tokens * (one + 2 * 32) + 16 * tokens);
            let twice = Step { accumulate: 2, ..step };
            assert_eq!(least(twice), 16 * params + 2 * 4 * tokens * one + 32 * tokens);
            let huge = Step { rows: usize::MAX, seq: 1 << 20, ..step };
            let error = huge.check(model, &config, "--batch").unwrap_err().to_string();
            assert!(error.contains("needs at least") && error.contains("are available; lower --batch"), "{error}");
        }
        assert!(fits("training", "x", 1 << 30, 1 << 30, "").is_ok());
        assert!(
            fits("training", "x", 3 << 30, 1 << 30, "--seq")
                .unwrap_err()
                .to_string()
                .contains("3.0 GiB of memory, 1.0 GiB are")
        );
    }
}
