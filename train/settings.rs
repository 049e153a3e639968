//! Settings of a run: what the presets fix and what a user may change, by option or by configuration file.

use std::sync::LazyLock;

use kumiki_models::accounting::MAX_APPLICATIONS;
use kumiki_nn::{Decay, Schedule};
use kumiki_tensor::DType;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use crate::presets;
pub use crate::presets::PRESETS;
use crate::suggest::unknown;
use crate::trainer::StepConfig;
use crate::zoo::Suite;
use crate::{Error, Result};

/// The largest size of an axis; products of two of them are far from overflowing.
pub const LARGEST: usize = 1 << 20;

/// The most rows of a batch, and batches of a step.
pub(crate) const MOST_ROWS: usize = 1 << 16;

/// The most steps: more are taken for a mistake.
const MOST_STEPS: u64 = 1_000_000_000_000;

/// The most target tokens of an evaluation: `math` has no end.
const MOST_EVAL: u64 = 1 << 32;

/// Settings that are a list: a text with commas, or a list in a configuration file.
const LISTS: [&str; 2] = ["cem_attention", "cem_mlp"];

/// Everything about a run but its data and the model's name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields)]
pub struct Settings {
    /// Model width D.
    pub d_model: usize,
    /// Heads of TANGO and WANGO.
    pub heads: usize,
    /// Key width of their heads.
    pub head_dim: usize,
    /// Tokens that WANGO weighs one by one, W.
    pub window: usize,
    /// WANGO's features for the tokens before: `hyperbolic`, `elu1` or `taylor2`.
    pub feature_map: String,
    /// Heads of all other models with softmax attention: Transformer++, Llama and CEM, decoders, encoder-decoder.
    pub transformer_heads: usize,
    /// Width of the queries and keys of GAU and FLASH, S.
    pub key_width: usize,
    /// Tokens that FLASH weighs one by one, C: its chunks.
    pub chunk: usize,
    /// Which layers of CEM descend in their attention, `cem` or `plain`: one for all, or a list of L.
    pub cem_attention: String,
    /// Which do in their MLP, likewise.
    pub cem_mlp: String,
    /// The feed-forward width of CEM: `llama`, that of the Llama of the wanted size, or `own`, solved for the same size.
    pub cem_width: String,
    /// Of the L layers of double decoder and encoder-decoder, those of the context stack or the encoder; 0 for two thirds.
    pub context_layers: usize,
    /// A file with lengths of prompts, for double decoders of `prompt_style`; empty for none.
    pub prompt_lengths: String,
    /// A checkpoint whose parameters a training begins with, with a fresh optimiser; empty to draw them from the seed.
    pub init_from: String,
    /// Block applications L.
    pub blocks: usize,
    /// Distinct parameters outside of the token table; each model's free width is solved for it.
    pub params: usize,
    /// Sequence length T.
    pub seq: usize,
    /// Rows of a batch.
    pub batch: usize,
    /// Batches per optimiser step.
    pub accumulate: usize,
    /// Optimiser steps.
    pub steps: u64,
    /// Highest learning rate.
    pub lr: f64,
    /// The rate at the end, as a part of the highest.
    pub lr_floor: f64,
    /// Steps of linear warm-up.
    pub warmup: u64,
    /// `cosine`, `linear`, `wsd` (a line over the last fifth) or `constant`.
    pub schedule: String,
    /// AdamW's decay of parameters of rank 2 and more.
    pub weight_decay: f64,
    /// The width at which μP scales nothing: others have scaled rates and logits; 0 for no scaling.
    pub mup_base_width: usize,
    /// The largest global gradient norm.
    pub clip: f64,
    /// Probability with which training leaves out elements of the embedded tokens and of what every layer adds.
    pub dropout: f64,
    /// Seed of initial values, batch order and masks.
    pub seed: u64,
    /// Steps between evaluations; 0 evaluates only at the end.
    pub eval_every: u64,
    /// Target tokens of an evaluation.
    pub eval_tokens: u64,
    /// The part of a text, at its end, that is held out.
    pub val_fraction: f64,
    /// `f32`, `bf16` (products with parameters in BF16, all else, parameters too, in F32) or `f64`.
    pub dtype: String,
    /// Recompute block applications in the backward instead of saving them.
    pub checkpoint_activations: bool,
}

// Derived with the fields as they stand; what the derivation is for begins with the preset `tiny`, so that what was written
// before a setting was there can still be read.
impl Serialize for Settings {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        Settings::serialize(self, to)
    }
}

impl<'de> Deserialize<'de> for Settings {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Settings, D::Error> {
        let mut all = Settings::default().to_map();
        let found = serde_json::Map::deserialize(from)?;
        if let Some(key) = found.keys().find(|key| !all.contains_key(*key)) {
            let keys = Settings::keys();
            let known: Vec<&str> = keys.iter().map(String::as_str).collect();
            return Err(D::Error::custom(unknown("setting", key, &known)));
        }
        all.extend(found);
        Settings::deserialize(Value::Object(all)).map_err(|e| D::Error::custom(format!("settings: {e}")))
    }
}

impl Default for Settings {
    /// The preset `tiny`.
    fn default() -> Settings {
        static TINY: LazyLock<Settings> =
            LazyLock::new(|| Settings::preset(presets::FIRST).unwrap_or_else(|e| panic!("{e}")));
        TINY.clone()
    }
}

impl Settings {
    /// The settings of a preset.
    ///
    /// # Errors
    /// Names the nearest preset when there is none of that name.
    pub fn preset(name: &str) -> Result<Settings> {
        Settings::for_suite(Suite::Tango, name)
    }

    /// The settings of a preset for the models of a suite: as [`Settings::preset`], but for sizes of that suite's own.
    ///
    /// # Errors
    /// Names the nearest preset when there is none of that name.
    pub fn for_suite(suite: Suite, name: &str) -> Result<Settings> {
        presets::settings(suite, name)
    }

    /// Of this width D, with these layers of the first and of the second stack, heads of 64 (of D/2 below 128).
    pub fn with_stacks(self, (d_model, first, second): (usize, usize, usize)) -> Settings {
        let transformer_heads = (d_model / 64).max(2);
        Settings { d_model, transformer_heads, blocks: first + second, context_layers: first, ..self }
    }

    /// As many parameters as L layers of attention and a feed-forward layer of `F = 4D` have, and this learning rate.
    pub fn with_layers(self, lr: f64) -> Settings {
        let Settings { d_model: d, blocks, .. } = self;
        Settings { params: blocks * (12 * d * d + 2 * d), lr, ..self }
    }

    /// The names of all settings, those of the model first.
    pub fn keys() -> Vec<String> {
        presets::keys()
    }

    /// Sets the field `key`, as an option or a line of a configuration file does.
    ///
    /// # Errors
    /// Names the nearest setting when there is none of that name; says what was expected when the value does not fit.
    pub fn set(&mut self, key: &str, value: Value) -> Result<()> {
        let mut all = self.to_map();
        if !all.contains_key(key) {
            let known: Vec<&str> = all.keys().map(String::as_str).collect();
            return Err(Error::new(unknown("setting", key, &known)));
        }
        // What JSON cannot hold arrives as null.
        if value.is_null() {
            return Err(Error::new(format!("setting `{key}` must be a finite number")));
        }
        let value = match (&all[key], value) {
            (Value::Number(own), Value::Number(found)) if own.is_u64() && !found.is_u64() => {
                return Err(Error::new(format!("setting `{key}` must be a whole number from 0, found {found}")));
            }
            (_, Value::Array(kinds)) if LISTS.contains(&key) => {
                let text = |kind: &Value| kind.as_str().map(str::to_owned);
                let words: Option<Vec<String>> = kinds.iter().map(text).collect();
                let found = Value::Array(kinds);
                let words = words.ok_or_else(|| {
                    Error::new(format!("setting `{key}` must be a text in quotes or a list of them, found {found}"))
                })?;
                Value::String(words.join(","))
            }
            (_, value) => value,
        };
        all.insert(key.to_owned(), value);
        *self = Settings::deserialize(Value::Object(all)).map_err(|e| Error::new(format!("setting `{key}`: {e}")))?;
        Ok(())
    }

    /// The first setting in which `self` and `other` differ, but for the seed: its name and both values.
    pub fn difference(&self, other: &Settings) -> Option<(String, Value, Value)> {
        let other = other.to_map();
        let differs = |(key, value): &(String, Value)| key != "seed" && other.get(key) != Some(value);
        let (key, value) = self.to_map().into_iter().find(differs)?;
        let found = other.get(&key).cloned().unwrap_or_default();
        Some((key, value, found))
    }

    /// Every setting under its name.
    pub fn to_map(&self) -> serde_json::Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(map)) => map,
            other => unreachable!("settings are a struct of plain fields, found {other:?}"),
        }
    }

    pub(crate) fn check_sizes(&self) -> Result<()> {
        let sizes = [
            ("d_model", self.d_model, LARGEST),
            ("heads", self.heads, LARGEST),
            ("head_dim", self.head_dim, LARGEST),
            ("window", self.window, LARGEST),
            ("transformer_heads", self.transformer_heads, LARGEST),
            ("key_width", self.key_width, LARGEST),
            ("chunk", self.chunk, LARGEST),
            ("blocks", self.blocks, MAX_APPLICATIONS),
            ("params", self.params, 1 << 40),
            ("batch", self.batch, MOST_ROWS),
            ("seq", self.seq, LARGEST),
            ("accumulate", self.accumulate, MOST_ROWS),
        ];
        match sizes.iter().find(|(_, size, limit)| !(1..=*limit).contains(size)) {
            Some((key, size, limit)) => Err(Error::new(format!("{key} must be from 1 to {limit}, found {size}"))),
            None => Ok(()),
        }
    }

    /// Everything that can be wrong whatever the model and the data: ranges and names.
    ///
    /// # Errors
    /// A sentence naming the setting, its range and what was found.
    pub fn check(&self) -> Result<()> {
        self.check_sizes()?;
        self.check_kinds()?;
        crate::corpus::check_fraction(self.val_fraction)?;
        if !(1..=MOST_EVAL).contains(&self.eval_tokens) {
            return Err(Error::new(format!("eval_tokens must be from 1 to {MOST_EVAL}, found {}", self.eval_tokens)));
        }
        self.step_config()?;
        self.dtype().map(drop)
    }

    /// What an optimiser step does.
    ///
    /// # Errors
    /// When a number is out of its range or the schedule has no such name.
    pub fn step_config(&self) -> Result<StepConfig> {
        let positive = [("lr", self.lr), ("clip", self.clip)];
        if let Some((name, value)) = positive.iter().find(|(_, v)| !(v.is_finite() && *v > 0.0)) {
            return Err(Error::new(format!("{name} must be a positive number, found {value}")));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(Error::new(format!("dropout must be at least 0 and below 1, found {}", self.dropout)));
        }
        if !(0.0..=1.0).contains(&self.lr_floor) {
            return Err(Error::new(format!("lr_floor must be between 0 and 1, found {}", self.lr_floor)));
        }
        if !(self.weight_decay.is_finite() && self.weight_decay >= 0.0) {
            return Err(Error::new(format!("weight_decay must be 0 or more, found {}", self.weight_decay)));
        }
        if self.mup_base_width > LARGEST {
            let found = self.mup_base_width;
            return Err(Error::new(format!("mup_base_width must be from 0 to {LARGEST}, found {found}")));
        }
        if !(1..=MOST_STEPS).contains(&self.steps) {
            return Err(Error::new(format!("steps must be from 1 to {MOST_STEPS}, found {}", self.steps)));
        }
        let decay = match self.schedule.as_str() {
            "cosine" => Decay::Cosine,
            "linear" => Decay::Linear,
            "wsd" => Decay::Wsd { decay_steps: self.steps.div_ceil(5) },
            "constant" => Decay::Constant,
            other => return Err(Error::new(unknown("schedule", other, &["cosine", "linear", "wsd", "constant"]))),
        };
        let schedule =
            Schedule { peak: self.lr, floor: self.lr_floor * self.lr, warmup: self.warmup, total: self.steps, decay };
        let Settings { weight_decay, clip, accumulate, mup_base_width, .. } = *self;
        Ok(StepConfig { schedule, weight_decay, clip, accumulate, mup_base_width, narrow: self.is_narrow() })
    }

    /// The dtype of parameters, and of arithmetic but for [narrow](Settings::is_narrow) products.
    ///
    /// # Errors
    /// When it is not one that training supports.
    pub fn dtype(&self) -> Result<DType> {
        match self.dtype.as_str() {
            "f32" | "bf16" => Ok(DType::F32),
            "f64" => Ok(DType::F64),
            other => Err(Error::new(unknown("dtype", other, &["f32", "bf16", "f64"]))),
        }
    }

    /// Whether training multiplies parameters in BF16, summing in F32. Whatever is measured is measured in F32.
    pub fn is_narrow(&self) -> bool {
        self.dtype == "bf16"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_gives_every_model_the_same_size() {
        let models = |suite: Suite| if suite == Suite::Cem { &["llama"] } else { suite.models() };
        let all = PRESETS.into_iter().flat_map(|preset| Suite::ALL.map(|suite| (preset, suite)));
        for (preset, suite) in all {
            let settings = Settings::for_suite(suite, preset).unwrap();
            settings.step_config().unwrap();
            for model in models(suite) {
                let config = settings.model(model, 256).unwrap();
                let error = (config.block_params() as f64 / settings.params as f64 - 1.0).abs();
                let most = match preset {
                    "nano" => 0.02,
                    "paper" => 0.001,
                    _ => 0.01,
                };
                assert!(error < most, "{preset} {model}: {error}");
            }
        }
    }

    #[test]
    fn case_42_fields_are_set_by_name() {
        let mut settings = Settings::default();
        settings.set("checkpoint_activations", true.into()).unwrap();
        settings.set("checkpoint_activations", false.into()).unwrap();
        settings.set("lr", 1.into()).unwrap();
        settings.set("cem_mlp", serde_json::json!(["cem", "plain"])).unwrap();
        assert_eq!(settings, Settings { lr: 1.0, cem_mlp: "cem,plain".into(), ..Settings::default() });
        for (key, value, hint) in [
            ("stepz", Value::from(1), "unknown setting `stepz`; did you mean `steps`?"),
            ("steps", Value::from("many"), "setting `steps`: invalid type: string \"many\", expected u64"),
            ("steps", Value::from(-1), "setting `steps` must be a whole number from 0, found -1"),
            ("heads", Value::from(2.5), "setting `heads` must be a whole number from 0, found 2.5"),
            (
                "cem_mlp",
                serde_json::json!(["cem", 1]),
                "`cem_mlp` must be a text in quotes or a list of them, found [\"cem\",1]",
            ),
            ("feature_map", serde_json::json!(["elu1"]), "setting `feature_map`: invalid type: sequence"),
            ("lr", Value::from(f64::INFINITY), "setting `lr` must be a finite number"),
        ] {
            let before = settings.clone();
            let error = settings.set(key, value).unwrap_err().to_string();
            assert!(error.contains(hint), "{error}");
            assert_eq!(settings, before);
        }
        assert!(Settings::keys().iter().any(|key| key == "val_fraction"));
    }

    #[test]
    fn ranges_are_sentences() {
        let tiny = Settings::default();
        tiny.check().unwrap();
        for (settings, phrase) in [
            (Settings { blocks: 1025, ..tiny.clone() }, "blocks must be from 1 to 1024, found 1025"),
            (Settings { accumulate: 65_537, ..tiny.clone() }, "accumulate must be from 1 to 65536, found 65537"),
            (Settings { batch: 1 << 20, ..tiny.clone() }, "batch must be from 1 to 65536, found 1048576"),
            (
                Settings { mup_base_width: LARGEST + 1, ..tiny.clone() },
                "mup_base_width must be from 0 to 1048576, found 1048577",
            ),
            (Settings { eval_tokens: 0, ..tiny.clone() }, "eval_tokens must be from 1 to 4294967296, found 0"),
            (
                Settings { cem_attention: "rubbish".into(), ..tiny.clone() },
                "cem_attention must be a list of `cem` and `plain`, found `rubbish` in `rubbish`",
            ),
            (
                Settings { cem_mlp: "cem,plain".into(), ..tiny.clone() },
                "cem_mlp must name one kind for all layers or 4, found 2",
            ),
            (Settings { cem_width: "lama".into(), ..tiny.clone() }, "unknown cem_width `lama`; did you mean `llama`?"),
            (
                Settings { feature_map: "elu2".into(), ..tiny.clone() },
                "unknown feature map `elu2`; did you mean `elu1`?",
            ),
            (Settings { val_fraction: -1.0, ..tiny.clone() }, "the validation fraction is -1"),
            (Settings { val_fraction: 1e308, ..tiny.clone() }, "expected 0 <= fraction < 1"),
            (Settings { val_fraction: f64::NAN, ..tiny }, "expected 0 <= fraction < 1"),
        ] {
            let error = settings.check().unwrap_err().to_string();
            assert!(error.contains(phrase), "{error}");
        }
    }

    #[test]
    fn misspelt_names_are_answered_with_the_nearest() {
        let settings = Settings::default();
        for (error, hint) in [
            (Settings::preset("tinny").unwrap_err(), "did you mean `tiny`"),
            (settings.model("tangoo", 256).unwrap_err(), "did you mean `tango`"),
            (
                Settings { schedule: "cosin".into(), ..settings.clone() }.step_config().unwrap_err(),
                "did you mean `cosine`",
            ),
            (Settings { dtype: "f16".into(), ..settings.clone() }.dtype().unwrap_err(), "unknown dtype `f16`"),
            (Settings { lr: f64::NAN, ..settings.clone() }.step_config().unwrap_err(), "lr must be a positive number"),
            (Settings { blocks: 0, ..settings.clone() }.model("tango", 256).unwrap_err(), "blocks must be from 1"),
            (
                Settings { d_model: 1 << 40, ..settings.clone() }.model("tango", 256).unwrap_err(),
                "d_model must be from 1",
            ),
            (Settings { transformer_heads: 3, ..settings.clone() }.model("untied", 256).unwrap_err(), "found 3 heads"),
        ] {
            assert!(error.to_string().contains(hint), "{error}");
        }
    }
}
