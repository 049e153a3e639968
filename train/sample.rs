//! Choosing the next token, and generating text token by token.

use std::collections::BTreeSet;

use kumiki_models::Model;
use kumiki_tensor::{Rng, Tensor};

use crate::{Error, Result};

/// How a token is chosen from the logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by this; 0 takes the most likely token.
    pub temperature: f64,
    /// Only the `top_k` most likely tokens; 0 for all.
    pub top_k: usize,
    /// Only the most likely tokens that together reach this probability; 1 for all.
    pub top_p: f64,
    /// Tokens that the sequence has already become less likely by this, if it is above 1; see [`Sampling::penalize`].
    pub repetition_penalty: f64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { temperature: 0.8, top_k: 0, top_p: 1.0, repetition_penalty: 1.0 }
    }
}

impl Sampling {
    /// What is wrong with the settings, if anything.
    ///
    /// # Errors
    /// A sentence naming the setting, its range and what was found.
    pub fn check(&self) -> Result<()> {
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return Err(Error::new(format!(
                "temperature must be 0 (greedy) or a finite number above it, found {}",
                self.temperature
            )));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(Error::new(format!("top-p must be above 0 and at most 1, found {}", self.top_p)));
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            let found = self.repetition_penalty;
            return Err(Error::new(format!(
                "repetition-penalty must be a finite number above 0 (1 for none), found {found}"
            )));
        }
        Ok(())
    }

    /// Divides the logits of the tokens `seen` by the penalty where they are positive, and multiplies them where they are
    /// negative: whatever the sign, a penalty above 1 makes them less likely, however often they were seen. Comes before
    /// everything else. At 1 not a bit changes.
    ///
    /// Source: CTRL, Keskar et al., arXiv 1909.05858, section 4.1, which divides; negative logits, which that would raise, are
    /// multiplied, as is usual since.
    pub fn penalize(&self, logits: &mut [f64], seen: &BTreeSet<i64>) {
        if self.repetition_penalty == 1.0 {
            return;
        }
        for &id in seen {
            // What is no number stays for `choose` to find.
            if let Some(logit) = usize::try_from(id).ok().and_then(|id| logits.get_mut(id)).filter(|x| x.is_finite()) {
                let changed =
                    if *logit > 0.0 { *logit / self.repetition_penalty } else { *logit * self.repetition_penalty };
                *logit = changed.clamp(f64::MIN, f64::MAX);
            }
        }
    }

    /// A token for `logits`; of several that are most likely the first.
    ///
    /// # Errors
    /// When no logit is a number, or one is positive infinity or NaN: a model that has diverged.
    pub fn choose(&self, logits: &[f64], rng: &mut Rng) -> Result<usize> {
        if let Some(bad) = logits.iter().position(|x| x.is_nan() || *x == f64::INFINITY) {
            return Err(Error::new(format!(
                "the model gives a logit of {} for token {bad}; it has diverged",
                logits[bad]
            )));
        }
        // Most likely first; the stable sort keeps the lower id first among equals.
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let Some(&best) = order.first().filter(|&&i| logits[i] > f64::NEG_INFINITY) else {
            return Err(Error::new(format!("none of the {} logits is a number", logits.len())));
        };
        if self.temperature == 0.0 {
            return Ok(best);
        }
        if self.top_k > 0 {
            order.truncate(self.top_k);
        }
        // Shifted by the largest: whatever the temperature, the first weight is 1 and none overflows.
        let weights: Vec<f64> = order.iter().map(|&i| ((logits[i] - logits[best]) / self.temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut kept = 0.0;
        let mut count = 0;
        while count < weights.len() && (count == 0 || kept < self.top_p * total) {
            kept += weights[count];
            count += 1;
        }
        let mut left = rng.next_f64() * kept;
        for (&token, &weight) in order[..count].iter().zip(&weights) {
            left -= weight;
            if left < 0.0 {
                return Ok(token);
            }
        }
        Ok(order[count - 1])
    }
}

/// The length of a double decoder's blocks when nobody says another: about what it meets in training on 256 tokens.
pub const BLOCK_LEN: usize = 64;

/// The most tokens of a text, prompt included.
pub const LONGEST: usize = 1 << 20;

/// What is to be written.
pub struct Request {
    /// One for every sequence; all are continued at once.
    pub prompts: Vec<Vec<i64>>,
    /// Tokens to add to each, at most.
    pub count: usize,
    /// The length of a double decoder's blocks, see [`BLOCK_LEN`]; other models have none.
    pub block_len: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Where chance comes from. Every sequence draws from its own numbers: it is the same whatever is written beside it.
    pub rng: Rng,
}

impl Request {
    /// Everything that can be wrong without a model. `before` tokens are before every prompt.
    ///
    /// # Errors
    /// As [`Sampling::check`]; when a prompt is empty, blocks are of no length, or a sequence would be longer than [`LONGEST`].
    pub fn check(&self, before: usize) -> Result<()> {
        self.sampling.check()?;
        if let Some(empty) = self.prompts.iter().position(Vec::is_empty) {
            let which = if self.prompts.len() == 1 { "the prompt".to_owned() } else { format!("prompt {}", empty + 1) };
            return Err(Error::new(format!("{which} is empty; at least one token is needed to continue from")));
        }
        if self.block_len == 0 {
            return Err(Error::new("--block-len must be at least 1 token, found 0"));
        }
        let len = before + self.prompts.iter().map(Vec::len).max().unwrap_or(0);
        if len.saturating_add(self.count) > LONGEST {
            let count = self.count;
            return Err(Error::new(format!(
                "a prompt of {len} tokens and {count} more are too long: together they may have {LONGEST}"
            )));
        }
        Ok(())
    }

    /// Chooses tokens, given the logits `[B, n]` of the first; `step` takes one token for every sequence and gives the logits
    /// of what comes next. The tokens `before` are before every prompt.
    ///
    /// # Errors
    /// As [`Sampling::choose`], and those of `emit`.
    pub(crate) fn write(
        &self,
        before: &[i64],
        mut logits: Tensor,
        mut emit: impl FnMut(usize, i64) -> Result<bool>,
        mut step: impl FnMut(&[i64]) -> Tensor,
    ) -> Result<()> {
        let rows = self.prompts.len();
        // The first of several draws what it would alone.
        let of_row = |row: usize| if row == 0 { self.rng.clone() } else { self.rng.fork(&row.to_string()) };
        let mut rngs: Vec<Rng> = (0..rows).map(of_row).collect();
        let mut chosen = vec![0; rows];
        let of_prompt = |prompt: &Vec<i64>| before.iter().chain(prompt).copied().collect();
        let mut seen: Vec<BTreeSet<i64>> = self.prompts.iter().map(of_prompt).collect();
        for n in 0..self.count {
            if n > 0 {
                logits = step(&chosen);
            }
            for (row, rng) in rngs.iter_mut().enumerate() {
                let mut of_row = logits.select(0, row).to_f64_vec();
                self.sampling.penalize(&mut of_row, &seen[row]);
                chosen[row] = self.sampling.choose(&of_row, rng)? as i64;
                seen[row].insert(chosen[row]);
                if !emit(row, chosen[row])? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// Writes what is asked for. `emit` is called with a sequence's number and its next token; it returns whether to go on.
///
/// # Errors
/// When a prompt is empty, holds an id that the model does not have or is too long, or as [`Sampling::choose`] does.
pub fn generate(model: &Model, request: &Request, emit: impl FnMut(usize, i64) -> Result<bool>) -> Result<()> {
    request.check(0)?;
    let started = model.start(&request.prompts, request.block_len);
    let (mut writing, logits) = started.map_err(|e| Error::new(e.to_string()))?;
    request.write(&[], logits, emit, |tokens| model.step(tokens, &mut writing))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f64; 4] = [0.0, 2.0, 1.0, 2.0];

    fn seen(sampling: Sampling) -> Vec<usize> {
        let mut rng = Rng::new(1);
        let mut counts = vec![0; LOGITS.len()];
        (0..4000).for_each(|_| counts[sampling.choose(&LOGITS, &mut rng).unwrap()] += 1);
        counts
    }

    #[test]
    fn case_40_temperature_zero_is_greedy_and_top_k_is_clamped() {
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        assert_eq!(seen(greedy), [0, 4000, 0, 0]);
        let all = Sampling { temperature: 1.0, ..Sampling::default() };
        assert!(seen(all).iter().all(|&n| n > 100), "{:?}", seen(all));
        assert_eq!(seen(Sampling { top_k: 1000, ..all }), seen(all));
        assert_eq!(seen(Sampling { top_k: 1, ..all }), [0, 4000, 0, 0]);
        assert_eq!(seen(Sampling { top_k: 0, temperature: 1e-300, ..all })[0], 0);
    }

    #[test]
    fn frequencies_follow_temperature_and_top_p() {
        let counts = seen(Sampling { temperature: 2.0, ..Sampling::default() });
        let weights: Vec<f64> = LOGITS.iter().map(|x| (x / 2.0).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (n, w) in counts.iter().zip(&weights) {
            assert!((*n as f64 / 4000.0 - w / total).abs() < 0.03, "{counts:?}");
        }
        let nucleus = seen(Sampling { temperature: 1.0, top_p: 0.6, ..Sampling::default() });
        assert!(nucleus[0] == 0 && nucleus[2] == 0 && nucleus[1] > 1500 && nucleus[3] > 1500, "{nucleus:?}");
    }

    #[test]
    fn bad_settings_and_logits_are_sentences() {
        let mut rng = Rng::new(1);
        let plain = Sampling::default();
        assert!(plain.choose(&[0.0, f64::NAN], &mut rng).unwrap_err().to_string().contains("diverged"));
        assert!(
            plain.choose(&[f64::NEG_INFINITY; 2], &mut rng).unwrap_err().to_string().contains("none of the 2 logits")
        );
        assert_eq!(plain.choose(&[f64::NEG_INFINITY, -1e308], &mut rng).unwrap(), 1);
        for bad in [
            Sampling { temperature: -1.0, ..plain },
            Sampling { temperature: f64::NAN, ..plain },
            Sampling { top_p: 0.0, ..plain },
            Sampling { top_p: 1.5, ..plain },
            Sampling { repetition_penalty: 0.0, ..plain },
            Sampling { repetition_penalty: -1.0, ..plain },
            Sampling { repetition_penalty: f64::NAN, ..plain },
            Sampling { repetition_penalty: f64::INFINITY, ..plain },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_penalty_lowers_what_was_seen_whatever_its_sign() {
        let seen: BTreeSet<i64> = [0, 1, 2, 3, 9, -1].into();
        let after = |repetition_penalty, logits: [f64; 5]| {
            let mut logits = logits;
            Sampling { repetition_penalty, ..Sampling::default() }.penalize(&mut logits, &seen);
            logits
        };
        assert_eq!(after(2.0, [3.0, -3.0, 0.0, 8.0, 8.0]), [1.5, -6.0, 0.0, 4.0, 8.0]);
        assert_eq!(after(0.5, [3.0, -3.0, 0.0, 8.0, 8.0]), [6.0, -1.5, 0.0, 16.0, 8.0]);
        let odd = [0.1 + 0.2, -1e-320, f64::MAX, f64::NEG_INFINITY, f64::NAN];
        assert_eq!(after(1.0, odd).map(f64::to_bits), odd.map(f64::to_bits), "not a bit at 1");
        // What a penalty does alone is no divergence.
        assert_eq!(after(1e-300, [1e300, 0.0, 0.0, 0.0, 0.0])[0], f64::MAX);
        assert_eq!(after(1e300, [-1e300, 0.0, 0.0, 0.0, 0.0])[0], f64::MIN);
        let kept = after(2.0, [f64::NEG_INFINITY, f64::INFINITY, 0.0, f64::NAN, 0.0]);
        assert!(kept[0] == f64::NEG_INFINITY && kept[1] == f64::INFINITY && kept[3].is_nan(), "{kept:?}");
    }

    #[test]
    fn greedy_text_with_a_high_penalty_repeats_nothing_in_any_kind_of_model() {
        let nano = crate::settings::Settings::for_suite(crate::zoo::Suite::Double, "nano").unwrap();
        for name in ["tango", "wango", "untied", "flash", "cem-t1", "decoder", "double", "encoder-decoder"] {
            let config = nano.model(name, 256).unwrap();
            let model = Model::new(&config, 1, kumiki_tensor::DType::F32).unwrap();
            let write = |repetition_penalty, prompts: &[&[i64]]| {
                let sampling = Sampling { temperature: 0.0, repetition_penalty, ..Sampling::default() };
                let prompts: Vec<Vec<i64>> = prompts.iter().map(|prompt| prompt.to_vec()).collect();
                let mut rows = prompts.clone();
                let request = Request { prompts, count: 24, block_len: 8, sampling, rng: Rng::new(0) };
                let push = |row: usize, id| {
                    rows[row].push(id);
                    Ok(true)
                };
                generate(&model, &request, push).unwrap();
                rows
            };
            let rows = write(1e30, &[&[7, 9, 8], &[1, 2, 3]]);
            for row in &rows {
                let distinct: BTreeSet<i64> = row.iter().copied().collect();
                assert_eq!(distinct.len(), row.len(), "{name}: {row:?}");
            }
            assert_eq!(write(1e30, &[&[1, 2, 3]])[0], rows[1], "{name}: a sequence has its own");
            assert_ne!(write(1.0, &[&[1, 2, 3]])[0], rows[1], "{name}");
        }
    }
}
