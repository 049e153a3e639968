//! Settings of a run of `gp`, its presets, and the models by name.

use kumiki_models::accounting::MAX_APPLICATIONS;
use kumiki_models::{
    Architecture, AttentionKind, CemConfig, MlpKind, SequenceRegressorConfig, TransformerConfig, solve_width,
};
use kumiki_nn::{Diagonal, Schedule};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::kernel::Prior;
use crate::settings::{LARGEST, MOST_ROWS, PRESETS};
use crate::suggest::unknown;
use crate::trainer::StepConfig;
use crate::{Error, Result};

/// A model that can be trained.
pub struct Model {
    /// Its name.
    pub name: &'static str,
    /// What it is, for people.
    pub about: &'static str,
    /// Its blocks; their free width is solved for afterwards.
    architecture: fn(&Settings) -> Architecture,
}

impl Model {
    const fn new(name: &'static str, about: &'static str, architecture: fn(&Settings) -> Architecture) -> Model {
        Model { name, about, architecture }
    }
}

/// All of them: one more is one more line.
pub const MODELS: &[Model] = &[
    Model::new("transformer", "Transformer++, every layer with parameters of its own", transformer),
    Model::new("cem-t1", "Causal Energy Minimization, 1 descent step a layer", |s| cem(s, 1)),
    Model::new("cem-t2", "2 steps", |s| cem(s, 2)),
    Model::new("cem-t4", "4 steps", |s| cem(s, 4)),
    Model::new("cem-t8", "8 steps", |s| cem(s, 8)),
];

fn transformer(settings: &Settings) -> Architecture {
    let &Settings { d_model, heads, blocks: applications, .. } = settings;
    let (d_ff, tied, rope_base) = (1, false, 10_000.0);
    Architecture::Transformer(TransformerConfig { d_model, heads, d_ff, applications, tied, rope_base })
}

/// Both halves descend, with a shared diagonal and without a preconditioner.
fn cem(settings: &Settings, steps: usize) -> Architecture {
    let &Settings { d_model, heads, blocks: applications, .. } = settings;
    Architecture::Cem(CemConfig {
        d_model,
        heads,
        head_dim: d_model / heads.max(1),
        d_ff: 1,
        applications,
        tied: false,
        rope_base: 10_000.0,
        attention: vec![AttentionKind::Cem],
        mlp: vec![MlpKind::Cem],
        diagonal: Diagonal::Shared,
        rank: None,
        steps,
        eta: 1.0,
    })
}

/// The names of [`MODELS`].
pub fn model_names() -> Vec<&'static str> {
    MODELS.iter().map(|model| model.name).collect()
}

/// Whether there is such a model.
pub fn is_model(name: &str) -> bool {
    MODELS.iter().any(|model| model.name == name)
}

/// Everything about a run but its seeds and models.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Model width D.
    pub d_model: usize,
    /// Attention heads.
    pub heads: usize,
    /// Layers L.
    pub blocks: usize,
    /// Distinct parameters of the layers; each model's free width is solved for it.
    pub params: usize,
    /// Where functions come from.
    #[serde(flatten)]
    pub prior: Prior,
    /// Functions of an optimiser step.
    pub batch: usize,
    /// Optimiser steps.
    pub steps: u64,
    /// Highest learning rate; it ends at a tenth.
    pub lr: f64,
    /// Steps of linear warm-up.
    pub warmup: u64,
    /// AdamW's decay of parameters of rank 2 and more.
    pub weight_decay: f64,
    /// The largest global gradient norm.
    pub clip: f64,
    /// Held-out functions to measure on.
    pub eval_functions: usize,
}

impl Default for Settings {
    /// The preset `tiny`.
    fn default() -> Settings {
        Settings {
            d_model: 64,
            heads: 4,
            blocks: 4,
            params: 200_000,
            prior: Prior::default(),
            batch: 32,
            steps: 2000,
            lr: 4e-3,
            warmup: 100,
            weight_decay: 0.1,
            clip: 1.0,
            eval_functions: 1024,
        }
    }
}

impl Settings {
    /// The settings of a preset, named as those of language models. The sizes of `paper` are ours: what makes it the
    /// paper's is the task.
    ///
    /// # Errors
    /// Names the nearest preset when there is none of that name.
    pub fn preset(name: &str) -> Result<Settings> {
        let tiny = Settings::default();
        Ok(match name {
            "nano" => Settings {
                d_model: 16,
                heads: 2,
                blocks: 2,
                params: 6000,
                prior: Prior { points: 16, ..Prior::default() },
                batch: 16,
                steps: 300,
                warmup: 15,
                eval_functions: 128,
                ..tiny
            },
            "tiny" => tiny,
            "small" => Settings {
                d_model: 128,
                heads: 8,
                blocks: 6,
                params: 1_200_000,
                batch: 64,
                steps: 10_000,
                lr: 2e-3,
                warmup: 500,
                eval_functions: 4096,
                ..tiny
            },
            "paper" => Settings {
                d_model: 256,
                heads: 8,
                blocks: 12,
                params: 9_400_000,
                batch: 64,
                steps: 100_000,
                lr: 1e-3,
                warmup: 2000,
                eval_functions: 8192,
                ..tiny
            },
            other => return Err(Error::new(unknown("preset", other, &PRESETS))),
        })
    }

    /// Everything that can be wrong whatever the model: ranges.
    ///
    /// # Errors
    /// A sentence naming the setting, its range and what was found.
    pub fn check(&self) -> Result<()> {
        let sizes = [
            ("d_model", self.d_model, LARGEST),
            ("heads", self.heads, LARGEST),
            ("blocks", self.blocks, MAX_APPLICATIONS),
            ("params", self.params, 1 << 40),
            ("batch", self.batch, MOST_ROWS),
            ("eval_functions", self.eval_functions, 1 << 24),
        ];
        if let Some((name, size, most)) = sizes.iter().find(|(_, size, most)| !(1..=*most).contains(size)) {
            return Err(Error::new(format!("{name} must be from 1 to {most}, found {size}")));
        }
        self.check_heads()?;
        self.prior.check()?;
        self.step_config().map(drop)
    }

    fn check_heads(&self) -> Result<()> {
        let &Settings { d_model, heads, .. } = self;
        if !d_model.is_multiple_of(heads.saturating_mul(2)) {
            return Err(Error::new(format!(
                "heads must divide d_model={d_model} into even widths, found {heads} heads"
            )));
        }
        Ok(())
    }

    /// What an optimiser step does.
    ///
    /// # Errors
    /// When a number is out of its range.
    pub fn step_config(&self) -> Result<StepConfig> {
        for (name, value) in [("lr", self.lr), ("clip", self.clip)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(Error::new(format!("{name} must be a positive number, found {value}")));
            }
        }
        if !(self.weight_decay.is_finite() && self.weight_decay >= 0.0) {
            return Err(Error::new(format!("weight_decay must be 0 or more, found {}", self.weight_decay)));
        }
        if self.steps == 0 {
            return Err(Error::new("steps must be at least 1, found 0"));
        }
        let schedule = Schedule::cosine(self.lr, self.warmup, self.steps);
        Ok(StepConfig {
            schedule,
            weight_decay: self.weight_decay,
            clip: self.clip,
            accumulate: 1,
            mup_base_width: 0,
            narrow: false,
        })
    }

    /// The configuration of the model `name`, with its free width solved for the wanted size.
    ///
    /// # Errors
    /// Names the nearest model when there is none of that name; says what does not fit.
    pub fn model(&self, name: &str) -> Result<SequenceRegressorConfig> {
        let model = MODELS.iter().find(|model| model.name == name);
        let model = model.ok_or_else(|| Error::new(unknown("model", name, &model_names())))?;
        let failed = |e: kumiki_tensor::Error| Error::new(format!("model `{name}`: {e}"));
        self.check_heads()?;
        let architecture = (model.architecture)(self);
        architecture.check().map_err(failed)?;
        Ok(SequenceRegressorConfig {
            inputs: 2,
            architecture: solve_width(&architecture, self.params).map_err(failed)?,
        })
    }

    /// The first setting in which `self` and `other` differ: its name and both values.
    pub fn difference(&self, other: &Settings) -> Option<(String, Value, Value)> {
        let map = |settings: &Settings| serde_json::to_value(settings).unwrap_or_default();
        let (mine, theirs) = (map(self), map(other));
        let (key, value) = mine.as_object()?.iter().find(|(key, value)| theirs[key.as_str()] != **value)?;
        Some((key.clone(), value.clone(), theirs[key.as_str()].clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kumiki_models::width_error;

    #[test]
    fn every_preset_gives_every_model_the_same_size() {
        for preset in PRESETS {
            let settings = Settings::preset(preset).unwrap();
            settings.check().unwrap();
            for name in model_names() {
                let error = width_error(&settings.model(name).unwrap().architecture, settings.params);
                assert!(error < if preset == "nano" { 0.02 } else { 0.01 }, "{preset} {name}: {error}");
            }
        }
        assert!(Settings::preset("tinny").unwrap_err().to_string().contains("did you mean `tiny`"));
    }

    #[test]
    fn settings_come_back_from_json_and_differences_are_named() {
        let tiny = Settings::default();
        let text = serde_json::to_string(&tiny).unwrap();
        assert!(text.contains("\"noise\":0.1"), "the prior's settings stand among the others: {text}");
        assert_eq!(serde_json::from_str::<Settings>(&text).unwrap(), tiny);
        assert_eq!(tiny.difference(&tiny), None);
        let other = Settings { prior: Prior { noise: 0.0, ..Prior::default() }, ..tiny.clone() };
        assert_eq!(tiny.difference(&other), Some(("noise".into(), 0.1.into(), 0.0.into())));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let tiny = Settings::default();
        for (settings, phrase) in [
            (Settings { d_model: 0, ..tiny.clone() }, "d_model must be from 1 to 1048576, found 0"),
            (Settings { blocks: 1025, ..tiny.clone() }, "blocks must be from 1 to 1024, found 1025"),
            (Settings { heads: 5, ..tiny.clone() }, "heads must divide d_model=64 into even widths, found 5 heads"),
            (Settings { batch: 65_537, ..tiny.clone() }, "batch must be from 1 to 65536, found 65537"),
            (Settings { eval_functions: 0, ..tiny.clone() }, "eval_functions must be from 1 to 16777216, found 0"),
            (Settings { steps: 0, ..tiny.clone() }, "steps must be at least 1, found 0"),
            (Settings { lr: f64::NAN, ..tiny.clone() }, "lr must be a positive number, found NaN"),
            (Settings { clip: -1.0, ..tiny.clone() }, "clip must be a positive number, found -1"),
            (Settings { weight_decay: -1.0, ..tiny.clone() }, "weight_decay must be 0 or more, found -1"),
            (Settings { prior: Prior { points: 0, ..Prior::default() }, ..tiny.clone() }, "points must be from 1"),
        ] {
            let error = settings.check().unwrap_err().to_string();
            assert!(error.contains(phrase), "{error}");
        }
        for (settings, name, phrase) in [
            (&tiny, "transfomer", "unknown model `transfomer`; did you mean `transformer`?"),
            (
                &Settings { heads: 3, ..tiny.clone() },
                "transformer",
                "heads must divide d_model=64 into even widths, found 3",
            ),
            (
                &Settings { heads: 3, ..tiny.clone() },
                "cem-t2",
                "heads must divide d_model=64 into even widths, found 3",
            ),
            (
                &Settings { d_model: 18, ..tiny.clone() },
                "cem-t2",
                "heads must divide d_model=18 into even widths, found 4",
            ),
            (
                &Settings { d_model: 12, ..tiny.clone() },
                "cem-t2",
                "heads must divide d_model=12 into even widths, found 4",
            ),
            (&Settings { params: 100, ..tiny.clone() }, "transformer", "out of reach"),
        ] {
            let error = settings.model(name).unwrap_err().to_string();
            assert!(error.contains(phrase), "{error}");
        }
    }
}
