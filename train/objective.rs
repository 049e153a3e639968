//! What a model learns from a batch of text: a [`Lesson`]. A language model predicts every token from those before; so does a
//! double decoder, in blocks that are drawn anew for every row; an encoder-decoder fills gaps.
//!
//! What is drawn is a pure function of the seed and of a row's number, counted over the whole run: it is the same whatever
//! the rows of a batch, and a run that is resumed draws what it would have drawn.
//!
//! **Losses that compare.** The loss of all tokens compares language models and double decoders, not the loss of gaps. What
//! compares them all is the loss of a text's second half given the first: a double decoder has its one cut in the middle, an
//! encoder-decoder reads the first half, closed by a sentinel, and writes the second, as if it were a gap; it does not lose
//! by the chance that it gives to sentinels, for they are taken for impossible.

use kumiki_autograd::{Tape, Var};
use kumiki_models::{IGNORE, Model, ModelConfig, SpanCounts};
use kumiki_ops::BlockStarts;
use kumiki_tensor::Tensor;

use crate::batches::Batch;
use crate::blocks::BlockSampling;
use crate::spans::corrupt;
use crate::{Error, Result};

/// A batch as one kind of model wants it. Tensors are of ids, `[B, T]`.
pub enum Lesson {
    /// Tokens, and what is to be predicted after each.
    Next {
        /// What is read.
        tokens: Tensor,
        /// What comes next.
        targets: Tensor,
    },
    /// The same, in blocks.
    Blocks {
        /// What is read.
        tokens: Tensor,
        /// What comes next.
        targets: Tensor,
        /// The blocks of every row.
        blocks: BlockStarts,
    },
    /// Texts with gaps.
    Spans {
        /// What the encoder reads.
        source: Tensor,
        /// What the decoder reads.
        tokens: Tensor,
        /// What comes next.
        targets: Tensor,
    },
}

/// Whether sequences of `seq` tokens can be a lesson for the model.
///
/// # Errors
/// When an encoder-decoder has too few sentinels for their gaps, or they are too short to have one.
pub fn check(config: &ModelConfig, seq: usize) -> Result<()> {
    let ModelConfig::EncoderDecoder(config) = config else { return Ok(()) };
    if seq < 2 {
        return Err(Error::new(format!("an encoder-decoder needs sequences of 2 tokens or more, found {seq}")));
    }
    let (needed, sentinels) = (SpanCounts::of(seq).sentinels(), config.sentinels);
    if needed > sentinels {
        return Err(Error::new(format!(
            "the gaps of {seq} tokens need {needed} sentinels; this encoder-decoder was made with {sentinels}, for shorter \
             sequences"
        )));
    }
    Ok(())
}

fn ids(rows: &[Vec<i64>]) -> Tensor {
    Tensor::from_slice(&rows.concat(), &[rows.len(), rows.first().map_or(0, Vec::len)])
}

impl Lesson {
    /// The rows `first`, `first + 1` and so on of a run with `seed`, for `model`. `sampling` are a double decoder's blocks.
    pub fn new(model: &Model, sampling: &BlockSampling, batch: &Batch, seed: u64, first: u64) -> Lesson {
        let shape = [batch.rows, batch.seq];
        let inputs = batch.inputs();
        let targets = || Tensor::from_slice(&batch.targets(), &shape);
        match model {
            Model::Language(_) => Lesson::Next { tokens: Tensor::from_slice(&inputs, &shape), targets: targets() },
            Model::Double(_) => Lesson::Blocks {
                tokens: Tensor::from_slice(&inputs, &shape),
                targets: targets(),
                blocks: sampling.draw(batch.rows, batch.seq, seed, first),
            },
            Model::EncoderDecoder(m) => {
                let drawn = inputs.chunks_exact(batch.seq).zip(first..);
                let (sources, targets): (Vec<_>, Vec<_>) =
                    drawn.map(|(text, row)| corrupt(&m.config, text, seed, row)).unzip();
                Lesson::of_gaps(&sources, &targets)
            }
        }
    }

    fn of_gaps(sources: &[Vec<i64>], targets: &[Vec<i64>]) -> Lesson {
        let but =
            |from: usize, to: usize| targets.iter().map(|row| row[from..row.len() - to].to_vec()).collect::<Vec<_>>();
        Lesson::Spans { source: ids(sources), tokens: ids(&but(0, 1)), targets: ids(&but(1, 0)) }
    }

    /// Targets that count in the loss.
    pub fn targets(&self) -> u64 {
        let (Lesson::Next { targets, .. } | Lesson::Blocks { targets, .. } | Lesson::Spans { targets, .. }) = self;
        targets.as_slice::<i64>().iter().filter(|&&t| t != IGNORE).count() as u64
    }

    /// The cross-entropy of all targets together.
    ///
    /// # Panics
    /// When the lesson is one for another kind of model.
    #[track_caller]
    pub fn loss_sum(&self, model: &Model, tape: &Tape) -> Var {
        match (model, self) {
            (Model::Language(m), Lesson::Next { tokens, targets }) => m.loss_sum(tape, tokens, targets),
            (Model::Double(m), Lesson::Blocks { tokens, targets, blocks }) => m.loss_sum(tape, tokens, targets, blocks),
            (Model::EncoderDecoder(m), Lesson::Spans { source, tokens, targets }) => {
                m.loss_sum(tape, source, None, tokens, targets)
            }
            (model, _) => panic!("a lesson for another kind of model than a {}", model.config().kind()),
        }
    }

    /// The cross-entropy of every target, row by row.
    fn loss_rows(&self, model: &Model) -> Vec<f64> {
        let tape = Tape::inference();
        match (model, self) {
            (Model::Language(m), Lesson::Next { tokens, targets }) => m.loss_rows(&tape, tokens, targets),
            (Model::Double(m), Lesson::Blocks { tokens, targets, blocks }) => {
                m.loss_rows(&tape, tokens, targets, blocks)
            }
            (Model::EncoderDecoder(m), Lesson::Spans { source, tokens, targets }) => {
                m.loss_rows(source, tokens, targets)
            }
            (model, _) => panic!("a lesson for another kind of model than a {}", model.config().kind()),
        }
        .to_f64_vec()
    }
}

/// What a model makes of a batch that it has not seen.
pub struct Scores {
    /// The cross-entropy of every target, row by row.
    pub rows: Vec<f64>,
    /// Whether these are the targets of the text, one by one; those of gaps are not.
    pub of_text: bool,
    /// The sum over the second half of every row given the first, and the number of its tokens.
    pub second_half: (f64, u64),
}

impl Scores {
    /// `first` is the number of the batch's first row: double decoders are judged in blocks of
    /// [`BlockSampling::RandomUniform`], whatever they learnt with, and these, like gaps, are drawn by number.
    pub fn of(model: &Model, batch: &Batch, first: u64) -> Scores {
        let rows = Lesson::new(model, &BlockSampling::RandomUniform, batch, 0, first).loss_rows(model);
        let (seq, half) = (batch.seq, batch.seq / 2);
        // Of every row of whole texts the targets from the middle on.
        let second = |rows: &[f64]| rows.chunks_exact(seq).flat_map(|row| &row[half..]).sum::<f64>();
        let sum = match model {
            Model::Language(_) => second(&rows),
            Model::Double(_) => {
                second(&Lesson::new(model, &BlockSampling::SingleMiddle, batch, 0, first).loss_rows(model))
            }
            Model::EncoderDecoder(m) => {
                let sentinel = [m.config.sentinel(0)];
                let text = || batch.tokens.chunks_exact(seq + 1);
                let sources: Vec<Vec<i64>> = text().map(|row| [&row[..=half], &sentinel].concat()).collect();
                let targets: Vec<Vec<i64>> = text().map(|row| [&sentinel, &row[half + 1..]].concat()).collect();
                let Lesson::Spans { source, tokens, targets } = Lesson::of_gaps(&sources, &targets) else {
                    unreachable!("made of gaps")
                };
                m.text_loss_rows(&source, &tokens, &targets).to_f64_vec().iter().sum()
            }
        };
        let second_half = (sum, (batch.rows * (seq - half)) as u64);
        Scores { rows, of_text: !matches!(model, Model::EncoderDecoder(_)), second_half }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Data;
    use crate::settings::Settings;
    use kumiki_tensor::DType;

    fn model(name: &str) -> Model {
        let settings = Settings::for_suite(crate::zoo::Suite::Double, "nano").unwrap();
        Model::new(&settings.model(name, 256).unwrap(), 0, DType::F64).unwrap()
    }

    fn batch(rows: usize) -> Batch {
        let data = Data::open("math", 0.0, 16).unwrap();
        data.validation(rows, 16, Some(64)).unwrap().unwrap().batches().next().unwrap()
    }

    fn rows_of(batch: &Batch, from: usize, count: usize) -> Batch {
        let tokens = batch.tokens[from * 17..(from + count) * 17].to_vec();
        Batch { rows: count, tokens, classes: None, ..batch.clone() }
    }

    #[test]
    fn losses_do_not_depend_on_how_rows_are_batched() {
        let all = batch(4);
        for name in ["decoder", "double", "encoder-decoder"] {
            let model = model(name);
            let whole = Scores::of(&model, &all, 6);
            let parts = [Scores::of(&model, &rows_of(&all, 0, 1), 6), Scores::of(&model, &rows_of(&all, 1, 3), 7)];
            let rows: Vec<f64> = parts.iter().flat_map(|p| p.rows.clone()).collect();
            assert_eq!(kumiki_ops::testing::difference(&rows, &whole.rows, 1e-12), None, "{name}");
            let (sum, count) = parts.iter().fold((0.0, 0), |a, p| (a.0 + p.second_half.0, a.1 + p.second_half.1));
            assert!((sum - whole.second_half.0).abs() < 1e-9 && count == 32, "{name}");
        }
    }

    #[test]
    fn the_second_half_is_predicted_from_the_same_tokens() {
        for name in ["decoder", "double", "encoder-decoder"] {
            let (model, before) = (model(name), batch(1));
            let of = |batch: &Batch| Scores::of(&model, batch, 0).second_half.0;
            // The last token is only a target; any other is read by what comes after it.
            for at in 0..16 {
                let mut after = before.clone();
                after.tokens[at] = (after.tokens[at] + 1) % 256;
                assert_ne!(of(&before), of(&after), "{name}, token {at}");
            }
        }
        // A text whose second half does not matter to the first: only targets from the middle on are counted.
        let (decoder, text) = (model("decoder"), batch(1));
        let rows = Scores::of(&decoder, &text, 0).rows;
        assert!((rows[8..].iter().sum::<f64>() - Scores::of(&decoder, &text, 0).second_half.0).abs() < 1e-12);
    }

    #[test]
    fn sequences_that_make_no_lesson_are_refused() {
        let config = model("encoder-decoder").config();
        for (seq, phrase) in [(1, "2 tokens or more, found 1"), (4096, "need 155 sentinels; this encoder-decoder")] {
            let error = check(&config, seq).unwrap_err().to_string();
            assert!(error.contains(phrase), "{error}");
        }
        for seq in 2..=64 {
            check(&config, seq).unwrap();
        }
        check(&model("double").config(), 4096).unwrap();
    }

    #[test]
    fn a_single_block_makes_a_double_decoder_learn_like_any_other() {
        let (model, batch) = (model("double"), batch(2));
        let lesson = Lesson::new(&model, &BlockSampling::PromptStyle(vec![3]), &batch, 1, 0);
        let Lesson::Blocks { blocks, .. } = &lesson else { panic!() };
        assert_eq!((blocks.of(0), blocks.of(1)), (&[3][..], &[3][..]));
        assert_eq!(lesson.targets(), 32);
        let sum = lesson.loss_sum(&model, &Tape::inference()).item();
        assert!((sum - lesson.loss_rows(&model).iter().sum::<f64>()).abs() < 1e-9);
    }
}
