//! How training costs grow with the sequence: time and memory per token of a step of one sequence.

use std::time::Instant;

use kumiki_autograd::Tape;
use kumiki_models::Model;
use kumiki_nn::{AdamW, Module, clip_global_norm};
use kumiki_tensor::{DType, Rng, Tensor, memory_stats, release_cached_memory, reset_peak};
use serde::Serialize;

use crate::batches::Batch;
use crate::blocks::BlockSampling;
use crate::memory;
use crate::objective::{self, Lesson};
use crate::settings::Settings;
use crate::{Error, Result};

/// One model at one length.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Name of the model.
    pub model: String,
    /// Sequence length T.
    pub seq: usize,
    /// Steps that are timed together, so that every length has as many tokens.
    pub steps: usize,
    /// Median seconds of such steps over their tokens.
    pub token_s: f64,
    /// The most bytes of tensors that a step needs beside parameters and the optimiser's state, over its tokens.
    pub token_bytes: f64,
}

struct Case {
    model: Model,
    optimizer: AdamW,
    name: String,
    dtype: DType,
    narrow: bool,
    vocab: usize,
    seq: usize,
    times: Vec<f64>,
    bytes: usize,
}

/// Measures every model at every length `rounds` times after a round that warms up, in turns: what the machine does
/// meanwhile hits all alike. Models have `vocab` tokens. A turn has as many steps of one sequence as make the tokens of the
/// longest. `said` hears of the seconds of every turn.
///
/// # Errors
/// When there is no such model, sizes do not fit, the memory cannot do, or there is nothing to measure.
pub fn measure(
    settings: &Settings,
    models: &[String],
    vocab: usize,
    lengths: &[usize],
    rounds: usize,
    mut said: impl FnMut(&str, usize, f64),
) -> Result<Vec<Row>> {
    let tokens = lengths.iter().copied().max().unwrap_or(0);
    if models.is_empty() || tokens == 0 || rounds == 0 || lengths.contains(&0) {
        return Err(Error::new("nothing to measure: models, lengths and rounds must be at least 1"));
    }
    let dtype = settings.dtype()?;
    let mut cases = Vec::new();
    // As many sentinels as the longest sequences need.
    let settings = &Settings { seq: tokens, ..settings.clone() };
    for name in models {
        let config = settings.model(name, vocab)?;
        lengths.iter().try_for_each(|&seq| objective::check(&config, seq))?;
        let step =
            memory::Step { dtype, rows: 1, seq: tokens, accumulate: 1, recompute: settings.checkpoint_activations };
        step.check(name, &config, "--seq or --params")?;
        for &seq in lengths {
            let mut model = Model::new(&config, settings.seed, dtype).map_err(|e| Error::new(e.to_string()))?;
            model.recompute(settings.checkpoint_activations);
            let (optimizer, name) = (AdamW::default(), name.clone());
            let narrow = settings.is_narrow();
            cases.push(Case { model, optimizer, name, dtype, narrow, vocab, seq, times: vec![], bytes: 0 });
        }
    }
    for round in 0..=rounds {
        for case in &mut cases {
            let seconds = case.turn(tokens, round)?;
            said(&case.name, case.seq, seconds);
        }
    }
    let row = |mut case: Case| {
        case.times.sort_by(f64::total_cmp);
        let steps = (tokens / case.seq).max(1);
        let token_s = case.times[case.times.len() / 2] / (steps * case.seq) as f64;
        Row { model: case.name, seq: case.seq, steps, token_s, token_bytes: case.bytes as f64 / case.seq as f64 }
    };
    Ok(cases.into_iter().map(row).collect())
}

impl Case {
    /// As many steps as make `tokens`; round 0 is not counted.
    fn turn(&mut self, tokens: usize, round: usize) -> Result<f64> {
        // Buffers of another length would be kept for nothing; new ones are got in the round that warms up.
        if round == 0 {
            release_cached_memory();
        }
        let mut seconds = 0.0;
        for number in 0..(tokens / self.seq).max(1) {
            seconds += self.step(number as u64, round > 0)?;
        }
        if round > 0 {
            self.times.push(seconds);
        }
        Ok(seconds)
    }

    fn step(&mut self, number: u64, counts: bool) -> Result<f64> {
        let mut rng = Rng::new(number);
        let tokens = rng.ids(DType::I64, &[self.seq + 1], self.vocab as u64).as_slice::<i64>().to_vec();
        let batch = Batch { rows: 1, seq: self.seq, tokens, classes: None };
        let lesson = Lesson::new(&self.model, &BlockSampling::RandomUniform, &batch, number, 0);
        let weight = Tensor::scalar(self.dtype, 1.0 / lesson.targets() as f64);
        reset_peak();
        let before = memory_stats().live;
        let started = Instant::now();
        let tape = Tape::training(Rng::new(number)).with_narrow_products(self.narrow);
        let loss = lesson.loss_sum(&self.model, &tape);
        let mut grads = tape.backward_from(&[(&loss, weight)]);
        drop((loss, tape));
        let bytes = memory_stats().peak - before;
        let mut params = self.model.params_mut();
        let failed = |e: kumiki_tensor::Error| Error::new(format!("model `{}`: {e}", self.name));
        clip_global_norm(&params, &mut grads, 1.0).map_err(failed)?;
        self.optimizer.step(&mut params, &grads, 1e-3).map_err(failed)?;
        if counts {
            self.bytes = self.bytes.max(bytes);
        }
        Ok(started.elapsed().as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // What is measured is checked in tests/memory.rs: buffers are counted for the whole process.
    #[test]
    fn every_length_has_as_many_tokens() {
        let nano = Settings::preset("nano").unwrap();
        let mut said = 0;
        let rows = measure(&nano, &["wango".into(), "gau".into()], 256, &[16, 64], 1, |_, _, _| said += 1).unwrap();
        let sizes: Vec<_> = rows.iter().map(|row| (row.model.as_str(), row.seq, row.steps)).collect();
        assert_eq!(sizes, [("wango", 16, 4), ("wango", 64, 1), ("gau", 16, 4), ("gau", 64, 1)]);
        assert_eq!(said, 8);
        measure(&nano, &["encoder-decoder".into(), "double".into()], 256, &[2, 200], 1, |_, _, _| {}).unwrap();
        let error =
            measure(&nano, &["encoder-decoder".into()], 256, &[1, 200], 1, |_, _, _| {}).unwrap_err().to_string();
        assert!(error.contains("2 tokens or more, found 1"), "{error}");
        for (models, lengths, rounds) in [(0, &[8][..], 1), (1, &[], 1), (1, &[0], 1), (1, &[8], 0)] {
            let models = vec!["tango".to_owned(); models];
            assert!(measure(&nano, &models, 256, lengths, rounds, |_, _, _| {}).is_err());
        }
    }
}
