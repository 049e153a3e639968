//! The coordinate check of μP: how large activations are, and how far a few steps have moved them, over models of growing
//! width; with standard learning rates and with scaled ones ([`kumiki_models::width`]).
//!
//! Everything is measured on the same held-out batch after every step. Heads keep their width and become more, and feed-forward
//! widths grow with D. Under μP changes are about as large at every width; under the standard rates those of logits grow.
//! Source: Yang et al., Tensor Programs V, arXiv 2203.03466, appendix D.1.

use kumiki_autograd::Tape;
use kumiki_models::{LanguageModel, Model, ModelConfig};
use kumiki_ops as ops;
use kumiki_tensor::Tensor;
use serde::Serialize;

use crate::data::Data;
use crate::settings::Settings;
use crate::tokenizer::ByteTokenizer;
use crate::trainer::Trainer;
use crate::{Error, Result, memory};

/// What is measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// Name of the model: one with a single stack of blocks.
    pub model: String,
    /// Widths D, at least two.
    pub widths: Vec<usize>,
    /// The width at which μP scales nothing.
    pub base_width: usize,
    /// Width of a head, at all widths.
    pub head_dim: usize,
    /// Steps of training.
    pub steps: u64,
    /// Seeds, that are averaged over.
    pub seeds: Vec<u64>,
    /// The learning rate at every step.
    pub lr: f64,
}

impl Default for Check {
    fn default() -> Check {
        let (widths, seeds) = (vec![32, 64, 128, 256], vec![0, 1, 2]);
        Check { model: "untied".into(), widths, base_width: 32, head_dim: 16, steps: 4, seeds, lr: 3e-3 }
    }
}

/// Which rates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scaling {
    /// The same at every width.
    Standard,
    /// Those of μP.
    Mup,
}

impl Scaling {
    /// Both.
    pub const ALL: [Scaling; 2] = [Scaling::Standard, Scaling::Mup];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Scaling::Standard => "standard",
            Scaling::Mup => "μP",
        }
    }
}

/// One part of the model at one width after some steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Which rates.
    pub scaling: Scaling,
    /// Width D.
    pub width: usize,
    /// Steps done.
    pub step: u64,
    /// `embedding`, `block 1` and so on for the residual after every application, `logits`.
    pub part: String,
    /// Mean absolute value.
    pub size: f64,
    /// Mean absolute difference to what it was before the first step.
    pub change: f64,
}

/// How a part grows with the width after the last step: exponents, fitted to all widths.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Slope {
    /// Which rates.
    pub scaling: Scaling,
    /// As in [`Row`].
    pub part: String,
    /// Of the mean absolute value.
    pub size: f64,
    /// Of the mean absolute change.
    pub change: f64,
}

impl Check {
    fn settings(&self, width: usize, scaling: Scaling, seed: u64) -> Result<Settings> {
        let heads = width / self.head_dim;
        let sizes = Settings {
            d_model: width,
            heads,
            head_dim: self.head_dim,
            transformer_heads: heads,
            steps: self.steps,
            warmup: 0,
            schedule: "constant".into(),
            mup_base_width: if scaling == Scaling::Mup { self.base_width } else { 0 },
            seed,
            ..Settings::preset("nano")?
        };
        sizes.check_sizes()?;
        let settings = sizes.with_layers(self.lr);
        settings.check()?;
        Ok(settings)
    }

    fn check(&self) -> Result<()> {
        let head = self.head_dim;
        let mut distinct = self.widths.clone();
        distinct.sort_unstable();
        distinct.dedup();
        if distinct.len() < 2 || distinct.len() < self.widths.len() {
            return Err(Error::new(format!("widths must be two or more, all different, found {:?}", self.widths)));
        }
        if let Some(width) = self.widths.iter().find(|&&w| head == 0 || w == 0 || w % head > 0) {
            return Err(Error::new(format!("every width must be a multiple of head_dim={head}, found {width}")));
        }
        if self.base_width == 0 || self.seeds.is_empty() {
            return Err(Error::new("a base width of at least 1 and at least one seed are needed"));
        }
        // All of them before the first is trained.
        for &width in &self.widths {
            let settings = self.settings(width, Scaling::Mup, 0)?;
            let config = settings.model(&self.model, ByteTokenizer::VOCAB)?;
            if !matches!(config, ModelConfig::Language(_)) {
                let (model, kind) = (&self.model, config.kind());
                return Err(Error::new(format!(
                    "model `{model}`: the check is of models with one stack, and it is of the kind {kind}"
                )));
            }
            let Settings { batch: rows, seq, accumulate, .. } = settings;
            let step = memory::Step { dtype: settings.dtype()?, rows, seq, accumulate, recompute: false };
            step.check(&self.model, &config, "--widths")?;
        }
        Ok(())
    }
}

/// The parts of the model on these tokens, by name.
fn parts(model: &LanguageModel, tokens: &Tensor) -> Vec<(String, Tensor)> {
    let tape = Tape::inference();
    let mut h = model.embedding.forward(&tape, tokens);
    let mut found = vec![("embedding".to_owned(), h.value().clone())];
    for i in 0..model.config.architecture.applications() {
        h = model.blocks[i % model.blocks.len()].forward(&tape, &h, None);
        found.push((format!("block {}", i + 1), h.value().clone()));
    }
    let read = model.read_out(&tape, &h);
    found.push(("logits".to_owned(), ops::linear(&read, &tape.param(&model.embedding.weight)).into_value()));
    found
}

fn mean_abs(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = values.len().max(1) as f64;
    values.map(f64::abs).sum::<f64>() / n
}

/// Trains all models and measures them before the first step and after every one. `progress` hears of every training.
///
/// # Errors
/// When sizes do not fit, the model is of another kind, or it diverges.
pub fn measure(check: &Check, mut progress: impl FnMut(Scaling, usize, u64)) -> Result<Vec<Row>> {
    check.check()?;
    let mut rows: Vec<Row> = Vec::new();
    for scaling in Scaling::ALL {
        for &width in &check.widths {
            let start = rows.len();
            for &seed in &check.seeds {
                progress(scaling, width, seed);
                let found = one(check, scaling, width, seed)?;
                if rows.len() == start {
                    rows.extend(found);
                    continue;
                }
                for (row, other) in rows[start..].iter_mut().zip(found) {
                    (row.size, row.change) = (row.size + other.size, row.change + other.change);
                }
            }
            for row in &mut rows[start..] {
                let n = check.seeds.len() as f64;
                (row.size, row.change) = (row.size / n, row.change / n);
            }
        }
    }
    Ok(rows)
}

fn one(check: &Check, scaling: Scaling, width: usize, seed: u64) -> Result<Vec<Row>> {
    let settings = check.settings(width, scaling, seed)?;
    let Settings { batch, seq, .. } = settings;
    let data = Data::open("math", settings.val_fraction, seq)?;
    let config = settings.model(&check.model, data.tokenizer.vocab())?;
    let model = Model::new(&config, seed, settings.dtype()?).map_err(|e| Error::new(e.to_string()))?;
    let held_out = data.validation(batch, seq, Some((batch * seq) as u64))?;
    let held_out = held_out.and_then(|windows| windows.batches().next());
    let held_out = held_out.ok_or_else(|| Error::new("nothing is held out"))?;
    let tokens = Tensor::from_slice(&held_out.inputs(), &[held_out.rows, seq]);
    let mut trainer = Trainer::new(model, settings.step_config()?, data.batches(batch, seq, seed)?, seed)?;
    let now = |trainer: &Trainer| match &trainer.model {
        Model::Language(model) => parts(model, &tokens),
        other => unreachable!("checked: it is a language model, found a {}", other.config().kind()),
    };
    let first: Vec<Vec<f64>> = now(&trainer).iter().map(|(_, values)| values.to_f64_vec()).collect();
    let mut rows = Vec::new();
    for step in 0..=check.steps {
        if step > 0 {
            trainer.step()?;
        }
        for ((part, values), before) in now(&trainer).into_iter().zip(&first) {
            let values = values.to_f64_vec();
            let size = mean_abs(values.iter().copied());
            let change = mean_abs(values.iter().zip(before).map(|(x, y)| x - y));
            if !size.is_finite() {
                return Err(Error::new(format!("D = {width}, {}: {part} is not finite", scaling.name())));
            }
            rows.push(Row { scaling, width, step, part, size, change });
        }
    }
    Ok(rows)
}

/// The parts in order.
pub fn part_names(rows: &[Row]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for row in rows {
        if !names.contains(&row.part) {
            names.push(row.part.clone());
        }
    }
    names
}

/// The exponents after the last step.
pub fn slopes(rows: &[Row]) -> Vec<Slope> {
    let last = rows.iter().map(|row| row.step).max().unwrap_or(0);
    let of = |scaling: Scaling, part: String| {
        let here: Vec<&Row> =
            rows.iter().filter(|row| row.scaling == scaling && row.step == last && row.part == part).collect();
        let slope = |y: fn(&Row) -> f64| exponent(here.iter().map(|row| (row.width as f64, y(row))));
        Slope { scaling, part, size: slope(|row| row.size), change: slope(|row| row.change) }
    };
    Scaling::ALL
        .into_iter()
        .flat_map(|scaling| part_names(rows).into_iter().map(move |part| of(scaling, part)))
        .collect()
}

/// The slope of the line through the logarithms, by least squares.
fn exponent(points: impl Iterator<Item = (f64, f64)>) -> f64 {
    let logs: Vec<(f64, f64)> = points.map(|(x, y)| (x.ln(), y.ln())).collect();
    let n = logs.len() as f64;
    let (x, y) = (logs.iter().map(|p| p.0).sum::<f64>() / n, logs.iter().map(|p| p.1).sum::<f64>() / n);
    let (xy, xx) = logs.iter().fold((0.0, 0.0), |(xy, xx), p| (xy + (p.0 - x) * (p.1 - y), xx + (p.0 - x).powi(2)));
    xy / xx
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use crate::trainer::evaluate;
    use crate::training::{Keeping, Outcome, train_model};
    use crate::zoo::model_names;
    use crate::{checkpoint, log};
    use kumiki_models::width::is_hidden_matrix;
    use kumiki_nn::Module;
    use kumiki_tensor::DType;

    fn nano() -> Settings {
        Settings::preset("nano").unwrap()
    }

    /// After `steps` steps at width 64: every parameter, bit by bit, and the logits' scale.
    fn trained(name: &str, mup_base_width: usize, steps: u64) -> (Vec<Vec<f64>>, f64) {
        let sizes = Settings { d_model: 64, transformer_heads: 4, ..nano() };
        let settings = Settings { mup_base_width, ..sizes }.with_layers(1e-2);
        let data = Data::open("math", 0.1, settings.seq).unwrap();
        let model = Model::new(&settings.model(name, 256).unwrap(), 0, DType::F32).unwrap();
        let batches = data.batches(4, settings.seq, 0).unwrap();
        let mut trainer = Trainer::new(model, settings.step_config().unwrap(), batches, 0).unwrap();
        for _ in 0..steps {
            trainer.step().unwrap();
        }
        let values = trainer.model.params().iter().map(|(_, p)| p.value().to_f64_vec()).collect();
        (values, trainer.model.logit_scale())
    }

    #[test]
    fn at_the_base_width_nothing_changes() {
        for name in ["untied", "tango", "cem-t2-r4", "double", "encoder-decoder"] {
            let off = trained(name, 0, 2);
            assert_eq!(off, trained(name, 64, 2), "{name}");
            let (other, scale) = trained(name, 32, 2);
            assert_eq!(scale, 0.5, "{name}");
            assert_ne!(off.0, other, "{name}");
        }
    }

    #[test]
    fn a_training_goes_on_exactly_and_its_model_keeps_the_scale() {
        let dir = Scratch::new();
        let sizes = Settings { d_model: 64, transformer_heads: 4, steps: 4, eval_every: 0, eval_tokens: 512, ..nano() };
        let settings = Settings { mup_base_width: 32, ..sizes }.with_layers(1e-2);
        let data = Data::open("math", 0.1, settings.seq).unwrap();
        let train = |name: &str, stop_after: Option<u64>| {
            let folder = dir.path().join(name);
            std::fs::create_dir_all(&folder).unwrap();
            let mut log = log::Writer::append(folder.join("log.jsonl")).unwrap();
            let keeping = Keeping { stop_after, ..Keeping::default() };
            let outcome = train_model("untied", &settings, &data, &mut log, &folder, &keeping, &mut |_| {}).unwrap();
            (outcome, folder)
        };
        let (whole, whole_folder) = train("whole", None);
        assert!(matches!(train("halves", Some(2)).0, Outcome::Stopped(2)));
        let (halves, folder) = train("halves", None);
        let (Outcome::Done(whole), Outcome::Done(halves)) = (whole, halves) else { panic!("both come to their end") };
        assert_eq!((whole.val_nll, whole.train_loss), (halves.val_nll, halves.train_loss));
        let bytes = |folder: &std::path::Path| std::fs::read(folder.join(checkpoint::MODEL_FILE)).unwrap();
        assert_eq!(bytes(&whole_folder), bytes(&folder));

        let mut model = checkpoint::load(&folder, DType::F32).unwrap().model;
        assert_eq!(model.logit_scale(), 0.5);
        let held_out = data.validation(settings.batch, settings.seq, Some(settings.eval_tokens)).unwrap().unwrap();
        let loss = |model: &Model| Some(evaluate(model, &held_out, |_| {}).unwrap().nll);
        assert_eq!(loss(&model), whole.val_nll);
        // What writes is scaled as what is trained.
        let Model::Language(inner) = &model else { panic!() };
        let ids = Tensor::from_slice(&[5i64, 6, 7], &[1, 3]);
        let all = inner.logits(&Tape::inference(), &ids).value().select(1, 2).to_f64_vec();
        let last = inner.next_logits(&ids, &mut inner.new_cache()).to_f64_vec();
        assert!(all.iter().zip(&last).all(|(a, b)| (a - b).abs() < 1e-5));
        model.set_logit_scale(1.0);
        assert_ne!(loss(&model), whole.val_nll);

        // Another scale is not begun from.
        let init_from = folder.to_str().unwrap().to_owned();
        let other = Settings { init_from, mup_base_width: 16, ..settings.clone() };
        let mut log = log::Writer::append(dir.path().join("log.jsonl")).unwrap();
        let place = dir.path().join("other");
        let error = train_model("untied", &other, &data, &mut log, &place, &Keeping::default(), &mut |_| {});
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("multiplies its logits by 0.5; with mup_base_width=16 they would be multiplied by 0.25")
        );
    }

    #[test]
    fn matrices_over_a_width_are_those_whose_inputs_grow() {
        let at = |name: &str, d_model: usize| {
            let heads = d_model / 16;
            let settings = Settings { d_model, heads, transformer_heads: heads, ..nano() }.with_layers(1e-3);
            Model::new(&settings.model(name, 256).unwrap(), 0, DType::F32).unwrap()
        };
        let names = model_names();
        for name in names.iter().chain(&["cem-t1-per_head-r4", "double-separate"]) {
            let (narrow, wide) = (at(name, 32), at(name, 64));
            for ((path, a), (_, b)) in narrow.params().into_iter().zip(wide.params()) {
                // Of CEM's `P = .. + u (vᵀ m)`, v sums over the width.
                let (part, axis) = (path.rsplit('.').next().unwrap(), if path.ends_with("pre_v") { 0 } else { 1 });
                let grows = a.value().rank() >= 2 && {
                    let axis = if a.value().rank() == 3 { 2 } else { axis };
                    b.shape()[axis] > a.shape()[axis]
                };
                let elementwise = ["embedding", "diag"].contains(&part);
                assert_eq!(is_hidden_matrix(&path, a), grows && !elementwise, "{name} {path} {:?}", a.shape());
            }
        }
    }

    /// Measured over these widths to 256: changes of logits as D^0.98 and D^1.10 under standard rates, D^-0.02 and D^-0.04 under μP.
    #[test]
    fn case_80_changes_do_not_grow_with_the_width() {
        // Rows: rates, widths, steps, parts.
        for model in ["untied", "tango"] {
            let check = Check { model: model.into(), widths: vec![32, 64, 128], seeds: vec![0, 1], ..Check::default() };
            let rows = measure(&check, |_, _, _| {}).unwrap();
            assert_eq!(rows.len(), 2 * 3 * 5 * 4);
            let unscaled = |row: &&Row| row.width == 32;
            let [standard, mup] = Scaling::ALL.map(|s| rows.iter().filter(move |row| row.scaling == s));
            let numbers = |row: &Row| (row.step, row.part.clone(), row.size, row.change);
            assert!(standard.filter(unscaled).map(numbers).eq(mup.filter(unscaled).map(numbers)));
            for slope in slopes(&rows) {
                let (name, part) = (slope.scaling.name(), &slope.part);
                match slope.scaling {
                    Scaling::Mup => assert!(slope.change.abs() < 0.2, "{model} {name} {part}: {}", slope.change),
                    Scaling::Standard if part == "embedding" => assert!(slope.change.abs() < 0.2, "{model} {part}"),
                    Scaling::Standard => assert!(slope.change > 0.4, "{model} {name} {part}: {}", slope.change),
                }
            }
        }
    }

    #[test]
    fn exponents_are_those_of_powers() {
        let points = [2.0, 4.0, 16.0].map(|x: f64| (x, 3.0 * x.powf(-0.7)));
        assert!((exponent(points.into_iter()) + 0.7).abs() < 1e-12);
    }

    #[test]
    fn what_does_not_fit_is_a_sentence() {
        let small = Check { widths: vec![16, 32], ..Check::default() };
        for (check, phrase) in [
            (Check { widths: vec![32], ..small.clone() }, "widths must be two or more, all different, found [32]"),
            (
                Check { widths: vec![32, 24], ..small.clone() },
                "every width must be a multiple of head_dim=16, found 24",
            ),
            (Check { base_width: 0, ..small.clone() }, "a base width of at least 1"),
            (Check { model: "double".into(), ..small.clone() }, "it is of the kind double decoder"),
            (Check { steps: 0, ..small.clone() }, "steps must be from 1"),
            (Check { lr: -1.0, ..small }, "lr must be a positive number"),
        ] {
            let error = measure(&check, |_, _, _| {}).unwrap_err().to_string();
            assert!(error.contains(phrase), "{error}");
        }
    }
}
