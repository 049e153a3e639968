//! The options that are settings of a run.

use clap::builder::PossibleValuesParser;
use kumiki::ops::FeatureMap;
use kumiki_train::zoo::CEM_WIDTHS;
use kumiki_train::{Error, Result};
use serde::Serialize;
use serde_json::Value;

/// One option for every field of [`kumiki_train::settings::Settings`], under the same name. Values below 0 are let through, so that the answer is
/// the range (of whole numbers: see `main.rs`); where they may be fractions as anything with a hyphen, for `-1e-3` is no
/// number to clap.
#[derive(clap::Args, Serialize)]
pub struct SettingOptions {
    /// Seed of initial values and batch order
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<u64>,

    /// Model width D
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Model")]
    d_model: Option<usize>,
    /// Heads of TANGO and WANGO
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Model")]
    heads: Option<usize>,
    /// Key width of their heads
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Model")]
    head_dim: Option<usize>,
    /// Tokens that WANGO weighs one by one, W
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Model")]
    window: Option<usize>,
    /// WANGO's features for the tokens before
    #[arg(long, value_parser = PossibleValuesParser::new(FeatureMap::ALL.map(FeatureMap::name)), help_heading = "Model")]
    feature_map: Option<String>,
    /// Heads of all other models with softmax attention: Transformer++, Llama and CEM, decoders, encoder-decoder
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Model")]
    transformer_heads: Option<usize>,
    /// Width of the queries and keys of GAU and FLASH, S
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Model")]
    key_width: Option<usize>,
    /// Tokens of FLASH's chunks, C
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Model")]
    chunk: Option<usize>,
    /// Which layers of CEM descend in their attention, `cem` or `plain`: one for all, or a list of L, separated by commas
    #[arg(long, value_name = "KINDS", help_heading = "Model")]
    cem_attention: Option<String>,
    /// Which layers of CEM descend in their MLP, likewise
    #[arg(long, value_name = "KINDS", help_heading = "Model")]
    cem_mlp: Option<String>,
    /// Feed-forward width of CEM: that of the Llama with --params parameters, or one of its own for as many
    #[arg(long, value_parser = PossibleValuesParser::new(CEM_WIDTHS), help_heading = "Model")]
    cem_width: Option<String>,
    /// Of the L layers of double decoder and encoder-decoder, those of the context stack or the encoder; 0 for two thirds
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Model")]
    context_layers: Option<usize>,
    /// A file with lengths of prompts, whole numbers between white space: where `double-prompt_style` cuts
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    prompt_lengths: Option<String>,
    /// A checkpoint whose parameters to begin with, instead of drawing them; the optimiser begins anew
    #[arg(long, value_name = "PATH", help_heading = "Model")]
    init_from: Option<String>,
    /// Block applications L
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Model")]
    blocks: Option<usize>,
    /// Parameters of each model outside of the token table; widths are solved for it
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Model")]
    params: Option<usize>,
    /// Arithmetic: f32, bf16 (products with parameters in bf16, all else in f32; for training), or f64 for proofs
    #[arg(long, value_parser = PossibleValuesParser::new(["f32", "bf16", "f64"]), help_heading = "Model")]
    dtype: Option<String>,
    /// Recompute blocks in the backward pass: less memory, more time
    #[arg(long, value_name = "true|false", help_heading = "Model")]
    checkpoint_activations: Option<bool>,

    /// Optimiser steps
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Budget")]
    steps: Option<u64>,
    /// Sequence length T, in tokens: bytes, unless --data is prepared otherwise
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Budget")]
    seq: Option<usize>,
    /// Rows of a batch
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Budget")]
    batch: Option<usize>,
    /// Batches per optimiser step
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Budget")]
    accumulate: Option<usize>,

    /// Highest learning rate
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Optimiser")]
    lr: Option<f64>,
    /// Learning rate at the end, as a part of the highest
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Optimiser")]
    lr_floor: Option<f64>,
    /// Steps of linear warm-up
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Optimiser")]
    warmup: Option<u64>,
    /// Course of the learning rate after the warm-up (wsd: constant, then a line over the last fifth)
    #[arg(long, value_parser = PossibleValuesParser::new(["cosine", "linear", "wsd", "constant"]))]
    #[arg(help_heading = "Optimiser")]
    schedule: Option<String>,
    /// Decay of matrices per step and unit of learning rate
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Optimiser")]
    weight_decay: Option<f64>,
    /// μP: scale learning rates and logits by the width, as 1 at this width; 0 for no scaling
    ///
    /// What suits a model of this width then suits wider ones; see `kumiki mup check`.
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Optimiser")]
    mup_base_width: Option<usize>,
    /// Largest global gradient norm
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Optimiser")]
    clip: Option<f64>,
    /// Probability with which training leaves out elements of the embedded tokens and of what every layer adds
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Optimiser")]
    dropout: Option<f64>,

    /// Steps between evaluations; 0 for one at the end
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Evaluation")]
    eval_every: Option<u64>,
    /// Held-out tokens of an evaluation
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Evaluation")]
    eval_tokens: Option<u64>,
    /// Part of a text, at its end, that is held out
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Evaluation")]
    val_fraction: Option<f64>,
}

impl SettingOptions {
    /// The options that were given, by the names of settings.
    ///
    /// # Errors
    /// When one is no finite number.
    pub fn given(&self) -> Result<Vec<(String, Value)>> {
        // Infinities and NaN turn into null in JSON, like absence.
        let floats = [
            ("lr", self.lr),
            ("lr_floor", self.lr_floor),
            ("weight_decay", self.weight_decay),
            ("clip", self.clip),
            ("dropout", self.dropout),
            ("val_fraction", self.val_fraction),
        ];
        if let Some((name, Some(x))) = floats.iter().find(|(_, x)| x.is_some_and(|x| !x.is_finite())) {
            return Err(Error::new(format!("--{} must be a finite number, found {x}", name.replace('_', "-"))));
        }
        match serde_json::to_value(self) {
            Ok(Value::Object(all)) => Ok(all.into_iter().filter(|(_, value)| !value.is_null()).collect()),
            other => unreachable!("options are a struct of plain fields, found {other:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Args as _;
    use kumiki_train::settings::Settings;

    #[test]
    fn every_setting_is_an_option() {
        let command = SettingOptions::augment_args(clap::Command::new("test"));
        let mut options: Vec<String> = command.get_arguments().map(|a| a.get_id().to_string()).collect();
        let mut keys = Settings::keys();
        options.sort();
        keys.sort();
        assert_eq!(options, keys);
    }
}
