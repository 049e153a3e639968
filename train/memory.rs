//! How much memory a training step needs at the very least, against what there is.
//!
//! Only what is certain is counted, so that nothing is refused that would run: parameters with their gradients and the
//! optimiser's two moments, what block applications keep for the backward, the tokens.

use kumiki_models::accounting::{block_params, saved_numbers};
use kumiki_models::{ModelConfig, SequenceRegressorConfig, SpanCounts};
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

/// What the memory of a model follows from.
struct Sizes {
    d_model: usize,
    params: u128,
    /// Numbers that every layer application keeps of a token for the backward.
    saved: Vec<u64>,
}

impl Sizes {
    fn of(config: &ModelConfig) -> Sizes {
        Sizes { d_model: config.d_model(), params: config.total_params() as u128, saved: config.saved_numbers() }
    }

    /// Of all layer applications, and of the one that keeps most.
    fn kept(&self) -> (u128, u128) {
        let most = self.saved.iter().copied().max().unwrap_or(0);
        (self.saved.iter().map(|&n| u128::from(n)).sum(), most.into())
    }
}

impl Step {
    /// A lower bound, in bytes.
    fn least(&self, sizes: &Sizes) -> u128 {
        let float = if self.dtype == DType::F64 { 8 } else { 4 };
        let tokens = self.rows as u128 * self.seq as u128;
        let (all, most) = sizes.kept();
        // Recomputed, every application keeps its input, and one at a time the rest.
        let kept = if self.recompute { sizes.saved.len() as u128 * sizes.d_model as u128 + most } else { all };
        // Value and two moments; the gradient comes as what is kept goes, except from the second batch on. A token and its
        // target are 8 bytes each.
        let params = float * sizes.params;
        let with_kept = if self.accumulate > 1 { 4 } else { 3 } * params + kept * float * tokens;
        with_kept.max(4 * params) + 16 * tokens * self.accumulate as u128
    }

    /// Whether the step of this model can fit. `options` are those that make it smaller.
    ///
    /// # Errors
    /// A sentence with what is needed and what there is.
    pub(crate) fn check(&self, name: &str, config: &ModelConfig, options: &str) -> Result<()> {
        // What is counted of an encoder-decoder is its encoder, which reads less than the text.
        let seq = match config {
            ModelConfig::EncoderDecoder(_) => SpanCounts::of(self.seq).source(),
            _ => self.seq,
        };
        fits("training", name, Step { seq, ..*self }.least(&Sizes::of(config)), available(), options)
    }

    /// As [`Step::check`], for a regressor: its two maps beside the blocks are nothing beside what is not counted.
    ///
    /// # Errors
    /// A sentence with what is needed and what there is.
    pub(crate) fn check_regressor(&self, name: &str, config: &SequenceRegressorConfig, options: &str) -> Result<()> {
        let architecture = &config.architecture;
        let (d_model, params) = (architecture.d_model(), block_params(architecture) as u128);
        let saved = (0..architecture.applications()).map(|layer| saved_numbers(architecture, layer)).collect();
        fits("training", name, self.least(&Sizes { d_model, params, saved }), available(), options)
    }
}

/// Whether a prompt of `seq` tokens can be taken and decoded from: parameters, what is kept of every token, and half of what
/// training would keep of one block application, which is there at once while the prompt passes it.
///
/// # Errors
/// A sentence with what is needed and what there is.
pub(crate) fn check_inference(name: &str, config: &ModelConfig, seq: usize, dtype: DType, options: &str) -> Result<()> {
    let (float, sizes) = (dtype.size(), Sizes::of(config));
    let passing = sizes.kept().1 * seq as u128 / 2;
    let least = (sizes.params + passing) * float as u128 + u128::from(config.state_bytes(seq, float));
    fits("inference with", name, least, available(), options)
}

/// Whether `[m, k]` by `[k, n]` can be multiplied: three matrices of F32, and with `narrow` both factors in BF16 as well.
///
/// # Errors
/// A sentence with what is needed and what there is.
pub(crate) fn check_product(shape: [usize; 3], narrow: bool) -> Result<()> {
    let [m, n, k] = shape.map(|n| n as u128);
    let factors = m * k + k * n;
    let least = 4 * (factors + m * n) + if narrow { 2 * factors } else { 0 };
    fits("multiplying", &format!("{m} x {k} by {k} x {n}"), least, available(), "M, N or K")
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
    fn products_that_cannot_fit_are_refused() {
        assert!(check_product([64, 64, 64], true).is_ok());
        let error = check_product([1 << 40, 1 << 40, 1], false).unwrap_err().to_string();
        assert!(error.contains("of memory") && error.ends_with("lower M, N or K"), "{error}");
    }

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
            let (params, tokens) = (config.total_params() as u128, 8 * 64);
            let one = u128::from(config.saved_numbers()[0]);
            let least = |step: Step| step.least(&Sizes::of(&config));
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
