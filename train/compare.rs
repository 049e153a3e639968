//! The comparison of models: the same batches in the same order, the same seed, schedule and budget. What is heard of a
//! training ([`Event`]), and what it comes to ([`ModelResult`]); how it goes is in [`crate::training`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::marks::Class;
use crate::trainer::{Evaluation, StepReport};
use crate::validation::Validation;

/// The entropy of the target tokens' frequencies, in nats: the loss of the best model that does not read its context.
pub fn unigram_entropy(validation: &Validation) -> f64 {
    let mut counts = BTreeMap::<i64, u64>::new();
    validation.batches().flat_map(|batch| batch.targets()).for_each(|id| *counts.entry(id).or_default() += 1);
    let total = counts.values().sum::<u64>() as f64;
    counts.values().map(|&n| n as f64 / total).map(|p| -p * p.ln()).sum()
}

/// What happens during a run, for whoever shows it.
pub enum Event<'a> {
    /// A model starts.
    Start {
        /// Its name.
        model: &'a str,
        /// Steps it makes in all.
        steps: u64,
        /// Those that an earlier process has made.
        done: u64,
    },
    /// Something that the user should know.
    Note(&'a str),
    /// A step is done.
    Step(&'a StepReport),
    /// An evaluation has come so far.
    Evaluating {
        /// Target tokens done.
        done: u64,
        /// Target tokens of the whole evaluation.
        total: u64,
    },
    /// An evaluation is done.
    Evaluated(&'a Evaluation),
    /// The model is done.
    Done {
        /// Its name.
        model: &'a str,
        /// Seconds that it took.
        seconds: f64,
        /// What was measured at the end and what it is called, if anything.
        found: Option<(&'static str, f64)>,
    },
}

/// One row of the comparison's table.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelResult {
    /// Name of the model.
    pub model: String,
    /// Distinct parameters outside of the token table.
    pub params: usize,
    /// Distinct parameters, token table included.
    pub params_total: usize,
    /// Multiply-accumulates of a forward pass over one sequence, all token pairs counted.
    pub macs: u64,
    /// Validation loss, nats per token; absent when the text was too short to hold anything out, and of an encoder-decoder,
    /// which does not predict every token of a text.
    pub val_nll: Option<f64>,
    /// The same over the second half of every window given the first, which compares all kinds of models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_half_nll: Option<f64>,
    /// Validation loss of an encoder-decoder on gaps, nats per token of its targets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gap_nll: Option<f64>,
    /// Validation loss, bits per byte.
    pub bits_per_byte: Option<f64>,
    /// Validation loss over the tokens of answers, for corpora that know them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_nll: Option<f64>,
    /// Validation loss over the tokens of proofs, for Lean.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof_nll: Option<f64>,
    /// Validation loss over all other tokens of Lean.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_nll: Option<f64>,
    /// Target tokens of the last evaluation.
    pub val_tokens: u64,
    /// Training loss of the last step.
    pub train_loss: f64,
    /// Training tokens seen.
    pub tokens: u64,
    /// The most bytes of tensors at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<u64>,
    /// Training tokens per second, evaluations not counted.
    pub tok_s: f64,
    /// Seconds of training and evaluations.
    pub seconds: f64,
}

impl ModelResult {
    /// Validation loss over the tokens of `class`.
    pub fn of(&self, class: Class) -> Option<f64> {
        match class {
            Class::Answer => self.answer_nll,
            Class::Proof => self.proof_nll,
            Class::Source => self.source_nll,
        }
    }
}
