//! Choosing the next token, and generating text token by token.

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
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { temperature: 0.8, top_k: 0, top_p: 1.0 }
    }
}

impl Sampling {
    /// What is wrong with the settings, if anything.
    ///
    /// # Errors
    /// A sentence naming the setting, its range and what was found.
    pub fn check(&self) -> Result<()> {
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return Err(Error::new(format!("temperature must be 0 (greedy) or more, found {}", self.temperature)));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(Error::new(format!("top-p must be above 0 and at most 1, found {}", self.top_p)));
        }
        Ok(())
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
    /// of what comes next.
    ///
    /// # Errors
    /// As [`Sampling::choose`], and those of `emit`.
    pub(crate) fn write(
        &self,
        mut logits: Tensor,
        mut emit: impl FnMut(usize, i64) -> Result<bool>,
        mut step: impl FnMut(&[i64]) -> Tensor,
    ) -> Result<()> {
        let rows = self.prompts.len();
        // The first of several draws what it would alone.
        let of_row = |row: usize| if row == 0 { self.rng.clone() } else { self.rng.fork(&row.to_string()) };
        let mut rngs: Vec<Rng> = (0..rows).map(of_row).collect();
        let mut chosen = vec![0; rows];
        for n in 0..self.count {
            if n > 0 {
                logits = step(&chosen);
            }
            for (row, rng) in rngs.iter_mut().enumerate() {
                chosen[row] = self.sampling.choose(&logits.select(0, row).to_f64_vec(), rng)? as i64;
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
    request.write(logits, emit, |tokens| model.step(tokens, &mut writing))
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
        let greedy = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0 };
        assert_eq!(seen(greedy), [0, 4000, 0, 0]);
        let all = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0 };
        assert!(seen(all).iter().all(|&n| n > 100), "{:?}", seen(all));
        assert_eq!(seen(Sampling { top_k: 1000, ..all }), seen(all));
        assert_eq!(seen(Sampling { top_k: 1, ..all }), [0, 4000, 0, 0]);
        assert_eq!(seen(Sampling { top_k: 0, temperature: 1e-300, ..all })[0], 0);
    }

    #[test]
    fn frequencies_follow_temperature_and_top_p() {
        let counts = seen(Sampling { temperature: 2.0, top_k: 0, top_p: 1.0 });
        let weights: Vec<f64> = LOGITS.iter().map(|x| (x / 2.0).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (n, w) in counts.iter().zip(&weights) {
            assert!((*n as f64 / 4000.0 - w / total).abs() < 0.03, "{counts:?}");
        }
        let nucleus = seen(Sampling { temperature: 1.0, top_k: 0, top_p: 0.6 });
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
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
