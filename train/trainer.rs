//! [`Trainer`]: a model, its optimiser and its place in the data; one call is one optimiser step.

use std::time::Instant;

use kumiki_autograd::{Gradients, Tape};
use kumiki_models::{Model, ModelConfig, width};
use kumiki_nn::{AdamW, Module, Schedule, clip_global_norm};
use kumiki_tensor::{DType, Rng, Tensor};
use serde::{Deserialize, Serialize};

use crate::batches::{Batch, Batches};
use crate::blocks::BlockSampling;
use crate::marks::Class;
use crate::objective::{self, Lesson, Scores};
use crate::validation::Validation;
use crate::{Error, Result};

/// What an optimiser step does, apart from the data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepConfig {
    /// The learning rate of every step.
    pub schedule: Schedule,
    /// AdamW's decay of parameters of rank 2 and more.
    pub weight_decay: f64,
    /// The largest global gradient norm.
    pub clip: f64,
    /// Batches whose gradients make one step; each target token counts the same, whatever batch it is in.
    pub accumulate: usize,
    /// The width at which nothing is scaled, of μP ([`width`]); 0 for no scaling at any.
    pub mup_base_width: usize,
    /// Whether parameters are multiplied in BF16 (sums in F32): mixed precision. Parameters are F32 either way.
    pub narrow: bool,
}

/// What a step reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Steps done, this one included.
    pub step: u64,
    /// Mean loss over the step's target tokens, in nats, before the update.
    pub loss: f64,
    /// Learning rate used.
    pub lr: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Tokens of text seen since the start.
    pub tokens: u64,
    /// Tokens per second of this step.
    pub tok_s: f64,
}

/// A training run in progress.
pub struct Trainer {
    /// The model being trained.
    pub model: Model,
    /// How sequences are cut into blocks, for a double decoder.
    pub sampling: BlockSampling,
    optimizer: AdamW,
    config: StepConfig,
    batches: Batches,
    seed: u64,
    step: u64,
    tokens: u64,
}

impl Trainer {
    /// A run at its start. `seed` is that of dropout masks, blocks and gaps; the order of batches is in `batches`.
    ///
    /// # Errors
    /// When `accumulate` is 0, or the model cannot learn from sequences of this length.
    pub fn new(model: impl Into<Model>, config: StepConfig, batches: Batches, seed: u64) -> Result<Trainer> {
        if config.accumulate == 0 {
            return Err(Error::new("accumulate must be at least 1 batch per step, found 0"));
        }
        let optimizer = AdamW::with_decay(config.weight_decay);
        let (model, sampling) = (model.into(), BlockSampling::RandomUniform);
        objective::check(&model.config(), batches.seq())?;
        let mut trainer = Trainer { model, sampling, optimizer, config, batches, seed, step: 0, tokens: 0 };
        trainer.scale_by_width();
        Ok(trainer)
    }

    /// Sets what follows from the width. Without μP logits stay as the model has them: one to begin from may have had it.
    fn scale_by_width(&mut self) {
        let Some(scale) = logit_scale(&self.model.config(), self.config.mup_base_width) else { return };
        self.model.set_logit_scale(scale);
        for (name, param) in self.model.params() {
            if width::is_hidden_matrix(&name, param) {
                self.optimizer.set_rate(param, scale);
            }
        }
    }

    /// Steps done.
    pub fn steps_done(&self) -> u64 {
        self.step
    }

    /// The optimiser with its moments.
    pub fn optimizer(&self) -> &AdamW {
        &self.optimizer
    }

    /// Goes on from a saved place: after `step` steps and `tokens` tokens, with the moments that `optimizer` had then.
    pub fn go_on(&mut self, optimizer: AdamW, step: u64, tokens: u64) {
        (self.optimizer, self.step, self.tokens) = (optimizer, step, tokens);
        // The parameters may be others than at the start.
        self.scale_by_width();
    }

    /// Whether the model may be kept: every parameter is a number with a finite square. Norms square what they get: of
    /// larger parameters they would make zeros, and the loss would look like that of a model that knows nothing.
    ///
    /// # Errors
    /// Names the first parameter that is not, and how many there are.
    pub fn check_finite(&self) -> Result<()> {
        check_params(&self.model, self.step)
    }

    /// Whether the model still works, where nothing is held out to tell: its loss on the first training row.
    ///
    /// # Errors
    /// When that loss is not finite.
    pub fn check_loss(&self) -> Result<()> {
        let Batch { seq, mut tokens, .. } = self.batches.get(0);
        tokens.truncate(seq + 1);
        let row = Batch { rows: 1, seq, tokens, classes: None };
        let loss: f64 = Scores::of(&self.model, &row, 0).rows.iter().sum();
        if loss.is_finite() {
            return Ok(());
        }
        Err(Error::new(format!("the model has diverged after step {}: its loss is {loss}", self.step)))
    }

    /// Takes the next batches and makes one step.
    ///
    /// # Errors
    /// When the loss or a gradient is not finite: the step and the cause are named, and the parameters are as they
    /// were before the step.
    pub fn step(&mut self) -> Result<StepReport> {
        let started = Instant::now();
        let accumulate = self.config.accumulate as u64;
        let batches: Vec<_> = (0..accumulate)
            .map(|i| self.step * accumulate + i)
            .map(|number| (number, self.batches.get(number)))
            .collect();
        let lesson = |(number, batch): &(u64, Batch)| {
            Lesson::new(&self.model, &self.sampling, batch, self.seed, number * batch.rows as u64)
        };
        let text: u64 = batches.iter().map(|(_, batch)| (batch.rows * batch.seq) as u64).sum();
        let lessons: Vec<Lesson> = batches.iter().map(lesson).collect();
        // Every token has the same weight: sums over all batches, divided once, never a mean of means.
        let weight = 1.0 / lessons.iter().map(Lesson::targets).sum::<u64>().max(1) as f64;
        let (mut grads, mut loss) = (Gradients::new(), 0.0);
        let masks = Rng::new(self.seed).fork("masks");
        for (i, lesson) in lessons.iter().enumerate() {
            let tape = Tape::training(masks.fork(&format!("{} {i}", self.step)));
            let tape = tape.with_narrow_products(self.config.narrow);
            let sum = lesson.loss_sum(&self.model, &tape);
            loss += sum.item() * weight;
            grads.add(tape.backward_from(&[(&sum, Tensor::scalar(sum.dtype(), weight))]));
        }
        let number = self.step + 1;
        let (lr, grad_norm) = update(&mut self.model, &mut self.optimizer, &self.config, number, loss, &mut grads)?;
        self.step = number;
        self.tokens += text;
        let tok_s = text as f64 / started.elapsed().as_secs_f64().max(1e-9);
        Ok(StepReport { step: self.step, loss, lr, grad_norm, tokens: self.tokens, tok_s })
    }
}

/// `1/m` of μP, which is the scale of logits and of the rate of hidden matrices; `None` without it.
pub(crate) fn logit_scale(config: &ModelConfig, base_width: usize) -> Option<f64> {
    (base_width > 0).then(|| base_width as f64 / config.d_model() as f64)
}

/// The end of step `number`, counted from 1: clips the gradients and moves the parameters. Gives the learning rate and the
/// norm before clipping.
///
/// # Errors
/// When the loss or a gradient is not finite: the step and the cause are named, and no parameter has changed.
pub(crate) fn update(
    model: &mut impl Module,
    optimizer: &mut AdamW,
    config: &StepConfig,
    number: u64,
    loss: f64,
    grads: &mut Gradients,
) -> Result<(f64, f64)> {
    if !loss.is_finite() {
        return Err(Error::new(format!("the loss of step {number} is {loss}")));
    }
    let lr = config.schedule.rate(number - 1);
    let mut params = model.params_mut();
    let failed = |e: kumiki_tensor::Error| Error::new(format!("step {number}: {e}"));
    let grad_norm = clip_global_norm(&params, grads, config.clip).map_err(failed)?;
    optimizer.step(&mut params, grads, lr).map_err(failed)?;
    Ok((lr, grad_norm))
}

/// As [`Trainer::check_finite`], for any model.
pub(crate) fn check_params(model: &impl Module, step: u64) -> Result<()> {
    let params = model.params();
    let bad: Vec<&str> = params.iter().filter(|(_, p)| !usable(p.value())).map(|(name, _)| name.as_str()).collect();
    match bad.first() {
        None => Ok(()),
        Some(first) => Err(Error::new(format!(
            "the model has diverged after step {step}: {} of {} parameters are not finite or far too large, the first is \
             `{first}`",
            bad.len(),
            params.len()
        ))),
    }
}

/// Whether the square of every element is finite in the tensor's own arithmetic.
fn usable(values: &Tensor) -> bool {
    let largest = if values.dtype() == DType::F64 { f64::MAX } else { f64::from(f32::MAX) }.sqrt();
    // NaN is not below anything.
    values.to_f64_vec().iter().all(|x| x.abs() < largest)
}

/// What an evaluation found.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Mean negative log-likelihood per target, in nats.
    pub nll: f64,
    /// Whether targets are all tokens of the text; those of an encoder-decoder are its gaps, which is another task.
    pub of_text: bool,
    /// The same over the second half of every window, given the first: of every kind of model it is the same.
    pub second_half: f64,
    /// Tokens of text.
    pub tokens: u64,
    /// Bytes of text that they stand for.
    pub bytes: f64,
    /// The same over the tokens of every [`Class`], where the source has it; see [`Evaluation::of`].
    pub classes: [Option<(f64, u64)>; Class::ALL.len()],
}

impl Evaluation {
    /// The loss over the tokens of `class` and their number.
    pub fn of(&self, class: Class) -> Option<(f64, u64)> {
        self.classes[class as usize]
    }

    /// Bits per byte of text.
    pub fn bits(&self) -> f64 {
        self.nll / std::f64::consts::LN_2 * (self.tokens as f64 / self.bytes)
    }

    /// `exp(nll)`.
    pub fn perplexity(&self) -> f64 {
        self.nll.exp()
    }
}

/// The negative log-likelihood of all batches of `validation`; `progress` is called with the tokens done.
///
/// # Errors
/// When there is nothing to evaluate, windows are of no use for the model, or it has diverged: a loss that is no finite number is no result.
pub fn evaluate(model: &Model, validation: &Validation, mut progress: impl FnMut(u64)) -> Result<Evaluation> {
    objective::check(&model.config(), validation.seq())?;
    let (mut sum, mut targets, mut tokens, mut rows) = (0f64, 0u64, 0u64, 0u64);
    let (mut second, mut of_text) = ((0f64, 0u64), true);
    let (mut classes, mut bytes) = ([(0f64, 0u64); Class::ALL.len()], 0.0);
    for batch in validation.batches() {
        let scores = Scores::of(model, &batch, rows);
        sum += scores.rows.iter().sum::<f64>();
        targets += scores.rows.len() as u64;
        tokens += (batch.rows * batch.seq) as u64;
        bytes += validation.bytes_of(&batch.targets());
        rows += batch.rows as u64;
        second = (second.0 + scores.second_half.0, second.1 + scores.second_half.1);
        of_text = scores.of_text;
        if !sum.is_finite() || !second.0.is_finite() {
            return Err(Error::new(format!(
                "the model has diverged: its loss over the first {tokens} tokens is {}",
                sum + second.0
            )));
        }
        for (loss, class) in scores.rows.iter().zip(batch.target_classes().into_iter().flatten()) {
            if let Some(class) = class.filter(|_| of_text) {
                let (nll, n) = &mut classes[class as usize];
                *nll += loss;
                *n += 1;
            }
        }
        progress(tokens);
    }
    if tokens == 0 {
        return Err(Error::new("there is nothing to evaluate: 0 target tokens"));
    }
    let classes = classes.map(|(nll, n)| (n > 0).then(|| (nll / n as f64, n)));
    Ok(Evaluation {
        nll: sum / targets as f64,
        of_text,
        second_half: second.0 / second.1 as f64,
        tokens,
        bytes,
        classes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Data;
    use crate::settings::Settings;

    const SEQ: usize = 24;

    fn settings() -> Settings {
        Settings { seq: SEQ, ..Settings::preset("nano").unwrap() }
    }

    fn model(name: &str) -> Model {
        Model::new(&settings().model(name, 256).unwrap(), 1, DType::F64).unwrap()
    }

    #[test]
    fn numbers_that_norms_cannot_square_are_of_no_use() {
        for (x, good) in [(1e19f32, true), (2e19, false), (-2e19, false), (f32::NAN, false), (f32::INFINITY, false)] {
            assert_eq!(usable(&Tensor::from_slice(&[0.0, x], &[2])), good, "{x}");
        }
        assert!(usable(&Tensor::from_slice(&[1e150f64], &[1])) && !usable(&Tensor::from_slice(&[1e160f64], &[1])));
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-10 * b.abs()
    }

    #[test]
    fn case_19_however_rows_are_cut_into_batches_a_token_counts_the_same() {
        let data = Data::open("math", 0.1, SEQ).unwrap();
        for name in ["tango", "double", "encoder-decoder"] {
            let step = |rows: usize, accumulate: usize| {
                let config = StepConfig { accumulate, ..settings().step_config().unwrap() };
                let mut trainer = Trainer::new(model(name), config, data.batches(rows, SEQ, 3).unwrap(), 1).unwrap();
                trainer.step().unwrap();
                trainer.step().unwrap()
            };
            let whole = step(6, 1);
            for (rows, accumulate) in [(3, 2), (2, 3), (1, 6)] {
                let cut = step(rows, accumulate);
                assert!(
                    close(cut.loss, whole.loss) && close(cut.grad_norm, whole.grad_norm),
                    "{name}: {cut:?} {whole:?}"
                );
                assert_eq!(cut.tokens, whole.tokens);
            }
            // A last batch of one row beside one of four would count four times as much in a mean of means.
            let found = |rows: usize| {
                let windows = data.validation(rows, SEQ, Some(5 * SEQ as u64)).unwrap().unwrap();
                evaluate(&model(name), &windows, |_| ()).unwrap()
            };
            let whole = found(5);
            for rows in [1, 2, 3, 4] {
                let cut = found(rows);
                assert!(close(cut.nll, whole.nll) && close(cut.second_half, whole.second_half), "{name} {rows}");
                let classes = cut.classes.iter().flatten().zip(whole.classes.iter().flatten());
                assert!(classes.clone().all(|(a, b)| close(a.0, b.0) && a.1 == b.1), "{name} {rows}");
                assert_eq!(classes.count(), usize::from(whole.of_text), "the answers, where targets are the text");
            }
        }
    }

    #[test]
    fn case_32_gradients_that_are_no_numbers_are_named_and_move_nothing() {
        let mut model = model("tango");
        let batch = Data::open("math", 0.1, SEQ).unwrap().batches(2, SEQ, 3).unwrap().get(0);
        let mut grads = {
            let lesson = Lesson::new(&model, &BlockSampling::RandomUniform, &batch, 1, 0);
            let tape = Tape::new();
            let sum = lesson.loss_sum(&model, &tape);
            tape.backward(&sum)
        };
        let values = |model: &Model| model.params().iter().map(|(_, p)| p.value().to_f64_vec()).collect::<Vec<_>>();
        let before = values(&model);
        let (config, mut adam) = (settings().step_config().unwrap(), AdamW::default());
        let (name, param) = model.params().last().map(|(name, param)| (name.clone(), (*param).clone())).unwrap();
        let mut tried = |config: StepConfig, loss: f64, grads: &mut Gradients| {
            let said = update(&mut model, &mut adam, &config, 7, loss, grads);
            (said.map_err(|e| e.to_string()), values(&model) == before)
        };
        for clip in [-1.0, 0.0, f64::NAN] {
            let (said, same) = tried(StepConfig { clip, ..config }, 1.0, &mut grads);
            assert!(said.unwrap_err().contains("step 7: the largest gradient norm must be positive") && same);
        }
        let (said, same) = tried(config, f64::NAN, &mut grads);
        assert!(said.unwrap_err().contains("the loss of step 7 is NaN") && same);
        let good = grads.of(&param).unwrap().clone();
        let mut bad = good.clone();
        bad.make_mut::<f64>()[0] = f64::NAN;
        grads.set(&param, bad);
        let (said, same) = tried(config, 1.0, &mut grads);
        let said = said.unwrap_err();
        assert!(
            said.contains(&format!("step 7: the gradient of `{name}`")) && said.contains("NaN at element 0"),
            "{said}"
        );
        assert!(same, "parameters must be as they were");
        // Nothing of the failed steps is left in the optimiser either: the next one is the first.
        grads.set(&param, good);
        let (said, same) = tried(config, 1.0, &mut grads);
        assert!(said.is_ok() && !same && adam.steps() == 1);
    }
}
