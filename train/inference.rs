//! What decoding costs at a length: time to take the prompt, time per token after it, bytes kept. Parameters are random;
//! nothing of this depends on their values.

use std::time::Instant;

use kumiki_models::Model;
use kumiki_tensor::{DType, Rng};
use serde::Serialize;

use crate::memory;
use crate::settings::Settings;
use crate::{Error, Result};

/// One model after one length.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Name of the model.
    pub model: String,
    /// Tokens of the prompt, T.
    pub seq: usize,
    /// Distinct parameters outside of the token table.
    pub params: usize,
    /// Seconds to take the prompt, at once.
    pub prefill_s: f64,
    /// Median seconds of a token that follows.
    pub token_s: f64,
    /// Bytes that are kept after the prompt.
    pub state_bytes: u64,
    /// Multiply-accumulates of the first token after the prompt, by formula.
    pub token_macs: u64,
}

/// Measures every model at every length, one sequence at a time; lengths in the outer loop, so that what the machine does
/// meanwhile hits all models alike. Models have `vocab` tokens. `tokens` are decoded after each prompt; `done` hears of every row.
///
/// # Errors
/// When there is no such model, sizes do not fit, there is nothing to measure, or a cache does not hold what the
/// accounting says.
#[expect(clippy::missing_panics_doc, reason = "a row was just added")]
pub fn measure(
    settings: &Settings,
    models: &[String],
    vocab: usize,
    lengths: &[usize],
    tokens: usize,
    mut done: impl FnMut(&Row) -> Result<()>,
) -> Result<Vec<Row>> {
    if models.is_empty() || lengths.is_empty() || tokens == 0 || lengths.contains(&0) {
        return Err(Error::new("nothing to measure: models, lengths and tokens must be at least 1"));
    }
    let dtype = settings.dtype()?;
    let model = |name: &String| -> Result<Model> {
        let config = settings.model(name, vocab)?;
        Model::new(&config, settings.seed, dtype).map_err(|e| Error::new(format!("model `{name}`: {e}")))
    };
    let built = models.iter().map(model).collect::<Result<Vec<_>>>()?;
    for (name, model) in models.iter().zip(&built) {
        let longest = lengths.iter().copied().max().unwrap_or(0) + tokens;
        memory::check_inference(name, &model.config(), longest, dtype, "--seq, --tokens or --models")?;
    }
    // The first run of all finds cold caches and buffers.
    built.iter().try_for_each(|model| after(model, vocab, lengths[0].min(64), 2).map(drop))?;
    let mut rows = Vec::new();
    for &seq in lengths {
        for (name, model) in models.iter().zip(&built) {
            let (prefill_s, token_s, bytes) = after(model, vocab, seq, tokens)?;
            let config = model.config();
            let expected = config.state_bytes(seq, dtype.size());
            if bytes != expected {
                return Err(Error::new(format!(
                    "model `{name}` keeps {bytes} bytes after {seq} tokens; its accounting says {expected}"
                )));
            }
            let (params, token_macs) = (config.block_params(), config.token_macs(seq));
            rows.push(Row { model: name.clone(), seq, params, prefill_s, token_s, state_bytes: bytes, token_macs });
            done(rows.last().expect("just added"))?;
        }
    }
    Ok(rows)
}

/// Seconds of the prompt (the shortest of several when it is short), median seconds of a token, bytes after the prompt.
fn after(model: &Model, vocab: usize, seq: usize, tokens: usize) -> Result<(f64, f64, u64)> {
    let ids = Rng::new(1).ids(DType::I64, &[seq + tokens], vocab as u64);
    let (prompt, following) = ids.as_slice::<i64>().split_at(seq);
    let start = || {
        // One block for all that is written: a rollover is a prompt of its own.
        model.start(&[prompt.to_vec()], tokens + 1).map_err(|e| Error::new(e.to_string()))
    };
    let (mut prefill, mut spent, mut runs) = (f64::INFINITY, 0.0, 0);
    let mut kept = None;
    while runs == 0 || (spent < 0.5 && runs < 9) {
        drop(kept.take());
        let started = Instant::now();
        kept = Some(start()?.0);
        let seconds = started.elapsed().as_secs_f64();
        (prefill, spent, runs) = (prefill.min(seconds), spent + seconds, runs + 1);
    }
    let mut writing = kept.expect("at least one run");
    let bytes = writing.byte_len() as u64;
    let mut times = Vec::with_capacity(tokens);
    for &id in following {
        let started = Instant::now();
        model.step(&[id], &mut writing);
        times.push(started.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok((prefill, times[times.len() / 2], bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zoo::Suite;

    #[test]
    fn every_model_is_measured_and_keeps_what_it_should() {
        let mut models: Vec<String> = Suite::Tango.models().iter().map(|&name| name.to_owned()).collect();
        models.extend(["cem-t1", "cem-attention-t2-none", "decoder", "double"].map(str::to_owned));
        models.extend(["double-separate-loops2", "encoder-decoder"].map(str::to_owned));
        let nano = Settings::preset("nano").unwrap();
        let mut seen = 0;
        let rows = measure(&nano, &models, 300, &[5, 40], 3, |_| {
            seen += 1;
            Ok(())
        })
        .unwrap();
        assert_eq!((rows.len(), seen), (24, 24));
        assert!(rows.iter().all(|row| row.prefill_s > 0.0 && row.token_s > 0.0 && row.state_bytes > 0));
        assert!(
            measure(&nano, &models, 256, &[0], 3, |_| Ok(())).unwrap_err().to_string().contains("nothing to measure")
        );
    }
}
