//! The models by name, and the suites of them that papers compare.
//!
//! A name is all that tells a model of a run from the others beside the settings, so that variants are models like any
//! other: they can be trained, compared over seeds and corpora, resumed. Variants spell out what they change:
//!
//! ```text
//! wango-FEATUREMAP-WINDOW                                      wango-elu1-64
//! cem[-attention|-mlp]-tSTEPS[-none|-per_head][-rRANK][-etaX]  cem-t2, cem-attention-t1-none, cem-mlp-t4-r8-eta0.5
//! double[-SAMPLING][-separate][-loopsN]                        double, double-logspace, double-single_middle-loops2
//! ```
//!
//! Every model has one name: what is as usual (both halves, a shared diagonal, no preconditioner, step size 1; blocks cut at
//! random, context and own block projected alike, the context stack applied once) is left out.

use std::path::Path;

use kumiki_models::{
    Architecture, AttentionKind, CemConfig, DoubleDecoderConfig, EncoderDecoderConfig, GauConfig, GeluConfig,
    LanguageModelConfig, MlpKind, ModelConfig, SpanCounts, TangoConfig, TransformerConfig, Window, solve_model_width,
    solve_width,
};
use kumiki_nn::Diagonal;
use kumiki_ops::FeatureMap;

use crate::blocks::{BlockSampling, SAMPLINGS};
use crate::mix::hash;
use crate::settings::{LARGEST, Settings};
use crate::suggest::unknown;
pub use crate::variants::{CemVariant, DoubleVariant, Half, variant, variant_name};
use crate::variants::{double_variant_of, variant_of, wrong_window};
use crate::{Error, Result};

/// A paper's comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// TANGO and WANGO with other architectures, all of one size.
    Tango,
    /// Causal Energy Minimization with Llama: which half, how many steps, which diagonal, a preconditioner or none.
    Cem,
    /// Block-based double decoders with decoder-only and encoder-decoder.
    Double,
}

impl Suite {
    /// All of them.
    pub const ALL: [Suite; 3] = [Suite::Tango, Suite::Cem, Suite::Double];

    /// `tango`, `cem` or `double`.
    pub fn name(self) -> &'static str {
        match self {
            Suite::Tango => "tango",
            Suite::Cem => "cem",
            Suite::Double => "double",
        }
    }

    /// The suite of that name.
    ///
    /// # Errors
    /// Names the nearest when there is none.
    pub fn named(name: &str) -> Result<Suite> {
        let names = Suite::ALL.map(Suite::name);
        Suite::ALL.into_iter().find(|s| s.name() == name).ok_or_else(|| Error::new(unknown("suite", name, &names)))
    }

    /// The models that are compared when nobody says which.
    pub fn models(self) -> &'static [&'static str] {
        match self {
            Suite::Tango => &["tango", "wango", "recurrent", "untied", "gau", "flash"],
            Suite::Cem => &[
                "llama",
                "cem-attention-t1",
                "cem-attention-t2",
                "cem-mlp-t1",
                "cem-mlp-t2",
                "cem-t1",
                "cem-t2",
                "cem-t1-none",
                "cem-t2-none",
                "cem-t1-per_head",
                "cem-t2-per_head",
                "cem-t1-r4",
                "cem-t2-r4",
            ],
            Suite::Double => &["decoder", "double", "encoder-decoder"],
        }
    }
}

/// The suite that a model belongs to.
pub fn suite_of(name: &str) -> Suite {
    if name == "llama" || name.parse::<CemVariant>().is_ok() {
        Suite::Cem
    } else if name == "decoder" || name == "encoder-decoder" || name.parse::<DoubleVariant>().is_ok() {
        Suite::Double
    } else {
        Suite::Tango
    }
}

/// The models of all suites; there are more, see the [module](self).
pub fn model_names() -> Vec<&'static str> {
    Suite::ALL.iter().flat_map(|suite| suite.models()).copied().collect()
}

/// Whether there is such a model.
pub fn is_model(name: &str) -> bool {
    model_names().contains(&name)
        || variant(name).is_some()
        || name.parse::<CemVariant>().is_ok()
        || name.parse::<DoubleVariant>().is_ok()
}

/// `name` itself, if there is such a model.
///
/// # Errors
/// Names the nearest when there is none.
pub fn checked(name: &str) -> Result<String> {
    if is_model(name) { Ok(name.to_owned()) } else { Err(unknown_model(name)) }
}

/// The sentence for a name that no model has.
fn unknown_model(name: &str) -> Error {
    let found = (variant_of(name).map(|found| found.map(|found| found.to_string())))
        .or_else(|| double_variant_of(name).map(|found| found.map(|found| found.to_string())))
        .or_else(|| wrong_window(name).map(Err));
    match found {
        Some(Ok(found)) => Error::new(format!("unknown model `{name}`; did you mean `{found}`?")),
        Some(Err(why)) => Error::new(format!("model `{name}`: {why}")),
        None => Error::new(unknown("model", name, &model_names())),
    }
}

/// The sizes of the double-decoder paper: width D, layers of the context and of the generation stack. Heads are 64 wide.
pub const DOUBLE_SIZES: [(usize, usize, usize); 5] =
    [(192, 10, 5), (256, 10, 5), (448, 8, 4), (576, 8, 4), (832, 8, 4)];

impl Settings {
    /// The configuration of the model `name` for texts of `n_vocab` token ids, with its free width solved for the wanted size.
    ///
    /// # Errors
    /// Names the nearest model when there is none of that name; says what does not fit.
    pub fn model(&self, name: &str, n_vocab: usize) -> Result<ModelConfig> {
        if suite_of(name) != Suite::Double {
            return self.language_model(name, n_vocab).map(ModelConfig::Language);
        }
        self.check_sizes()?;
        let config = match name {
            "decoder" => ModelConfig::Language(LanguageModelConfig {
                n_vocab,
                architecture: Architecture::Decoder(self.gelu_layers()?),
            }),
            "encoder-decoder" => self.encoder_decoder(n_vocab)?,
            name => self.double(name.parse().map_err(|()| unknown_model(name))?, n_vocab)?,
        };
        let failed = |e: kumiki_tensor::Error| Error::new(format!("model `{name}`: {e}"));
        config.check().map_err(failed)?;
        solve_model_width(&config, self.params).map_err(failed)
    }

    /// How the training sequences of the model `name` are cut into blocks; only a double decoder's are.
    ///
    /// # Errors
    /// When they are to be cut at the lengths of prompts, and there is no good file of these.
    pub fn sampling(&self, name: &str) -> Result<BlockSampling> {
        let name = name.parse::<DoubleVariant>().map_or(SAMPLINGS[0], |variant| variant.sampling);
        let lengths = Some(Path::new(&self.prompt_lengths)).filter(|_| !self.prompt_lengths.is_empty());
        BlockSampling::named(name, lengths)
    }

    /// What a change of the file of prompt lengths changes, in hexadecimal; `None` without one.
    ///
    /// # Errors
    /// When the file is not good.
    pub(crate) fn prompt_lengths_fingerprint(&self) -> Result<Option<String>> {
        if self.prompt_lengths.is_empty() {
            return Ok(None);
        }
        let sampling = BlockSampling::named("prompt_style", Some(Path::new(&self.prompt_lengths)))?;
        Ok(Some(format!("{:016x}", hash(format!("{sampling:?}").as_bytes()))))
    }

    fn gelu_layers(&self) -> Result<GeluConfig> {
        let (d_model, heads) = (self.d_model, self.transformer_heads);
        if !d_model.is_multiple_of(2 * heads) {
            return Err(Error::new(format!(
                "transformer_heads must divide d_model={d_model} into even widths, found {heads} heads"
            )));
        }
        Ok(GeluConfig { d_model, heads, d_ff: 1, applications: self.blocks, rope_base: 10_000.0 })
    }

    /// Layers of the context stack, or the encoder, and of the other one.
    fn stacks(&self) -> Result<(usize, usize)> {
        let blocks = self.blocks;
        if blocks < 2 {
            return Err(Error::new(format!("two stacks need at least 2 blocks, found {blocks}")));
        }
        let first = match self.context_layers {
            0 => ((2 * blocks + 1) / 3).clamp(1, blocks - 1),
            n if n < blocks => n,
            n => return Err(Error::new(format!("context_layers must be below blocks={blocks}, found {n}"))),
        };
        Ok((first, blocks - first))
    }

    fn double(&self, variant: DoubleVariant, n_vocab: usize) -> Result<ModelConfig> {
        let GeluConfig { d_model, heads, d_ff, rope_base, .. } = self.gelu_layers()?;
        let (context_layers, generation_layers) = self.stacks()?;
        let DoubleVariant { separate_kv, loops: context_loops, .. } = variant;
        Ok(ModelConfig::Double(DoubleDecoderConfig {
            n_vocab,
            d_model,
            heads,
            d_ff,
            context_layers,
            generation_layers,
            context_loops,
            separate_kv,
            rope_base,
        }))
    }

    fn encoder_decoder(&self, n_vocab: usize) -> Result<ModelConfig> {
        let GeluConfig { d_model, heads, d_ff, rope_base, .. } = self.gelu_layers()?;
        let (encoder_layers, decoder_layers) = self.stacks()?;
        if self.seq < 2 {
            return Err(Error::new(format!(
                "`encoder-decoder` needs sequences of 2 tokens or more, found {}",
                self.seq
            )));
        }
        let sentinels = SpanCounts::of(self.seq).sentinels();
        let n_vocab = n_vocab + sentinels;
        Ok(ModelConfig::EncoderDecoder(EncoderDecoderConfig {
            n_vocab,
            sentinels,
            d_model,
            heads,
            d_ff,
            encoder_layers,
            decoder_layers,
            rope_base,
        }))
    }

    /// As [`Settings::model`], of a language model other than the double decoder's baseline.
    fn language_model(&self, name: &str, n_vocab: usize) -> Result<LanguageModelConfig> {
        let (d_model, applications, rope_base) = (self.d_model, self.blocks, 10_000.0);
        self.check_sizes()?;
        let transformer = |tied| {
            let heads = self.transformer_heads;
            Architecture::Transformer(TransformerConfig { d_model, heads, d_ff: 1, applications, tied, rope_base })
        };
        let architecture = match name {
            name if name == "tango" || name == "wango" || variant(name).is_some() => {
                let (heads, head_dim) = (self.heads, self.head_dim);
                let window = match name {
                    "tango" => None,
                    "wango" => Some(Window { size: self.window, feature_map: self.feature_map()? }),
                    name => variant(name),
                };
                if let Some(Window { size, .. }) = window.filter(|w| w.size > LARGEST) {
                    return Err(Error::new(format!("window must be from 1 to {LARGEST}, found {size}")));
                }
                Architecture::Tango(TangoConfig {
                    d_model,
                    heads,
                    head_dim,
                    gate_width: heads,
                    applications,
                    tied: true,
                    rope_base,
                    window,
                })
            }
            "recurrent" => transformer(true),
            "untied" => transformer(false),
            "gau" | "flash" => Architecture::Gau(GauConfig {
                d_model,
                key_width: self.key_width,
                gate_width: 1,
                applications,
                tied: false,
                rope_base,
                chunk: (name == "flash").then_some(self.chunk),
            }),
            "llama" => Architecture::Cem(self.llama()?),
            name => match name.parse() {
                Ok(variant) => return self.cem(name, variant, n_vocab),
                Err(()) => return Err(unknown_model(name)),
            },
        };
        self.solved(name, architecture, n_vocab)
    }

    fn solved(&self, name: &str, architecture: Architecture, n_vocab: usize) -> Result<LanguageModelConfig> {
        let failed = |e: kumiki_tensor::Error| Error::new(format!("model `{name}`: {e}"));
        architecture.check().map_err(|e| Error::new(e.to_string()))?;
        Ok(LanguageModelConfig { n_vocab, architecture: solve_width(&architecture, self.params).map_err(failed)? })
    }

    /// The baseline of CEM, its feed-forward width to be solved for.
    fn llama(&self) -> Result<CemConfig> {
        let (d_model, heads) = (self.d_model, self.transformer_heads);
        if !d_model.is_multiple_of(2 * heads) {
            return Err(Error::new(format!(
                "transformer_heads must divide d_model={d_model} into even widths, found {heads} heads"
            )));
        }
        Ok(CemConfig {
            d_model,
            heads,
            head_dim: d_model / heads,
            d_ff: 1,
            applications: self.blocks,
            tied: false,
            rope_base: 10_000.0,
            attention: vec![AttentionKind::Mha],
            mlp: vec![MlpKind::Swiglu],
            diagonal: Diagonal::None,
            rank: None,
            steps: 1,
            eta: 1.0,
        })
    }

    fn cem(&self, name: &str, variant: CemVariant, n_vocab: usize) -> Result<LanguageModelConfig> {
        let llama = self.llama()?;
        let CemVariant { half, steps, diagonal, rank, eta } = variant;
        let mut config = CemConfig { steps, diagonal, rank, eta, ..llama.clone() };
        if half != Half::Mlp {
            config.attention = kinds("cem_attention", &self.cem_attention, AttentionKind::Cem, AttentionKind::Mha)?;
        }
        if half != Half::Attention {
            config.mlp = kinds("cem_mlp", &self.cem_mlp, MlpKind::Cem, MlpKind::Swiglu)?;
        }
        if !config.has_energy() {
            let all = [("cem_attention", &self.cem_attention, Half::Mlp), ("cem_mlp", &self.cem_mlp, Half::Attention)];
            let own = all.iter().filter(|(.., other)| half != *other);
            let own: Vec<String> = own.map(|(key, list, _)| format!("{key} is `{list}`")).collect();
            return Err(Error::new(format!("model `{name}`: no layer descends: {}; that is `llama`", own.join(", "))));
        }
        match self.cem_width.as_str() {
            "own" => self.solved(name, Architecture::Cem(config), n_vocab),
            "llama" => {
                let solved = self.solved("llama", Architecture::Cem(llama), n_vocab)?.architecture;
                let Architecture::Cem(llama) = solved else { unreachable!("the solver changes a width only") };
                let architecture = Architecture::Cem(CemConfig { d_ff: llama.d_ff, ..config });
                architecture.check().map_err(|e| Error::new(format!("model `{name}`: {e}")))?;
                Ok(LanguageModelConfig { n_vocab, architecture })
            }
            other => Err(Error::new(unknown("cem_width", other, &CEM_WIDTHS))),
        }
    }

    /// Whether the size of the model `name` is solved for [`Settings::params`].
    pub fn sizes(&self, name: &str) -> bool {
        self.cem_width == "own" || name.parse::<CemVariant>().is_err()
    }

    /// Whether the settings of single models mean something, whichever model is meant.
    pub(crate) fn check_kinds(&self) -> Result<()> {
        for (key, list) in [("cem_attention", &self.cem_attention), ("cem_mlp", &self.cem_mlp)] {
            let (found, blocks) = (kinds(key, list, true, false)?.len(), self.blocks);
            if found != 1 && found != blocks {
                return Err(Error::new(format!("{key} must name one kind for all layers or {blocks}, found {found}")));
            }
        }
        if !CEM_WIDTHS.contains(&self.cem_width.as_str()) {
            return Err(Error::new(unknown("cem_width", &self.cem_width, &CEM_WIDTHS)));
        }
        self.feature_map().map(drop)
    }

    fn feature_map(&self) -> Result<FeatureMap> {
        let names = FeatureMap::ALL.map(FeatureMap::name);
        self.feature_map.parse().map_err(|_| Error::new(unknown("feature map", &self.feature_map, &names)))
    }
}

/// The values of the setting `cem_width`.
pub const CEM_WIDTHS: [&str; 2] = ["llama", "own"];

/// The kinds of all layers, or one for all, from a list as `cem,plain`.
fn kinds<K>(key: &str, list: &str, cem: K, plain: K) -> Result<Vec<K>>
where
    K: Copy,
{
    let kind = |word: &str| match word.trim() {
        "cem" => Ok(cem),
        "plain" => Ok(plain),
        other => Err(Error::new(format!("{key} must be a list of `cem` and `plain`, found `{other}` in `{list}`"))),
    };
    list.split(',').map(kind).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The architecture of a language model.
    fn architecture(settings: &Settings, name: &str) -> Architecture {
        let ModelConfig::Language(config) = settings.model(name, 256).unwrap() else { panic!("{name}") };
        config.architecture
    }

    #[test]
    fn variants_have_one_name_each() {
        let settings = Settings::preset("nano").unwrap();
        for (name, window) in
            [("wango-elu1-64", Some((FeatureMap::Elu1, 64))), ("wango-elu1-064", None), ("wango-x-1", None)]
        {
            assert_eq!(variant(name).map(|w| (w.feature_map, w.size)), window, "{name}");
            assert_eq!(settings.model(name, 256).is_ok(), window.is_some() && is_model(name));
        }
        assert!(settings.model("wango-elu1-0", 256).unwrap_err().to_string().contains("at least 1"));
        assert!(settings.model("wango-elu1-9999999", 256).unwrap_err().to_string().contains("window must be from 1"));
        let error = checked("wango-elu1-99999999999999999999").unwrap_err().to_string();
        assert!(error.contains("window must be from 1 to 1048576, found 99999999999999999999"), "{error}");
        let plain = Settings { window: 8, feature_map: "taylor2".into(), ..settings.clone() };
        assert_eq!(settings.model("wango-taylor2-8", 256).unwrap(), plain.model("wango", 256).unwrap());
        for name in ["cem-t1", "cem-mlp-t3", "cem-attention-t2-none", "cem-t8-per_head-r2-eta0.25"] {
            assert_eq!(name.parse::<CemVariant>().unwrap().to_string(), name);
            settings.model(name, 256).unwrap();
        }
        for (name, hint) in [
            ("cem", "did you mean `cem-t1`?"),
            ("cem-t01", "did you mean `cem-t1`?"),
            ("cem-r4-t2", "did you mean `cem-t2-r4`?"),
            ("cem-t2-shared", "did you mean `cem-t2`?"),
            ("cem-t0", "model `cem-t0`: steps must be from 1 to 1024, found 0"),
            ("cem-t1000000", "steps must be from 1 to 1024, found 1000000"),
            ("cem-mlp-t99999999999999999999", "steps must be from 1 to 1024, found 99999999999999999999"),
            ("cem-t1-r0", "the preconditioner's rank must be from 1 to 1048576, found 0"),
            ("cem-t1-eta0", "eta must be from 0.000001 to 1000, found 0"),
            ("cem-t1-eta-1", "eta must be from 0.000001 to 1000, found -1"),
            ("cem-t1-eta1e-300", "eta must be from 0.000001 to 1000, found 1e-300"),
            ("cem-t1-eta1001-r2", "eta must be from 0.000001 to 1000, found 1001"),
            ("cem-t1-etaNaN", "eta must be from 0.000001 to 1000, found NaN"),
            ("cem-t1-etainf", "eta must be from 0.000001 to 1000, found inf"),
            ("cem-t1-eta1e-3", "did you mean `cem-t1-eta0.001`?"),
            ("cem-eta5e-1-t2-r4", "did you mean `cem-t2-r4-eta0.5`?"),
            ("cem-t", "unknown model `cem-t`"),
            ("cem-t1-", "unknown model `cem-t1-`"),
            ("cem-t1-eta", "unknown model `cem-t1-eta`"),
            ("cemt1", "unknown model `cemt1`"),
            ("cem-t1-x", "unknown model `cem-t1-x`"),
        ] {
            assert!(!is_model(name));
            for error in [settings.model(name, 256).unwrap_err(), checked(name).unwrap_err()] {
                assert!(error.to_string().contains(hint), "{error}");
            }
        }
        let error = settings.model("cem-t1-r33", 256).unwrap_err().to_string();
        assert!(error.contains("rank must be from 1 to d_model=32, found 33"), "{error}");
    }

    #[test]
    fn halves_are_as_small_as_the_paper_says() {
        let settings = Settings::for_suite(Suite::Cem, "paper").unwrap();
        let params = |name: &str| settings.model(name, 256).unwrap().block_params() as f64;
        let Architecture::Cem(llama) = architecture(&settings, "llama") else { panic!() };
        assert_eq!((llama.d_ff, llama.d_model, llama.heads, llama.applications), (2048, 768, 12, 12));
        let (attention, mlp) = (12.0 * 4.0 * 768.0 * 768.0, 12.0 * 3.0 * 768.0 * 2048.0);
        let saved = |name: &str| params("llama") - params(name);
        assert!((saved("cem-attention-t1-none") / attention - 1.0 / 2.0).abs() < 1e-5);
        assert!((saved("cem-mlp-t1") / mlp - 1.0 / 3.0).abs() < 1e-5);
        assert!((saved("cem-t1-none") - (attention / 2.0 + mlp / 3.0)).abs() < 100.0);
        assert_eq!(params("cem-t1"), params("cem-t8"), "steps have no parameters");
    }

    #[test]
    fn layers_can_differ() {
        let mut settings = Settings::preset("nano").unwrap();
        settings.cem_attention = "plain,cem".into();
        let Architecture::Cem(c) = architecture(&settings, "cem-t2") else { panic!() };
        assert_eq!((c.attention, c.mlp), (vec![AttentionKind::Mha, AttentionKind::Cem], vec![MlpKind::Cem]));
        let Architecture::Cem(c) = architecture(&settings, "cem-mlp-t2") else { panic!() };
        assert_eq!(c.attention, [AttentionKind::Mha]);
        for (list, phrase) in [("plain", "cem_attention is `plain`"), ("plain,plain", "cem_attention is `plain,plain`")]
        {
            settings.cem_attention = list.into();
            for (name, other) in [("cem-t2", ", cem_mlp is `plain`"), ("cem-attention-t2", "")] {
                let all = Settings { cem_mlp: "plain".into(), ..settings.clone() };
                let error = all.model(name, 256).unwrap_err().to_string();
                assert_eq!(error, format!("model `{name}`: no layer descends: {phrase}{other}; that is `llama`"));
            }
            settings.model("cem-t2", 256).unwrap();
        }
        for (list, phrase) in [
            ("cem,cem,cem", "attention must name one kind for all layers or 2, found 3"),
            ("cem,mha", "cem_attention must be a list of `cem` and `plain`, found `mha` in `cem,mha`"),
            ("", "found `` in ``"),
        ] {
            settings.cem_attention = list.into();
            let error = settings.model("cem-t2", 256).unwrap_err().to_string();
            assert!(error.contains(phrase), "{error}");
        }
    }

    #[test]
    fn double_decoders_have_one_name_each_and_one_size() {
        let mut settings = Settings::for_suite(Suite::Double, "nano").unwrap();
        let double = |settings: &Settings, name: &str| match settings.model(name, 256).unwrap() {
            ModelConfig::Double(config) => config,
            other => panic!("{name}: {other:?}"),
        };
        let plain = double(&settings, "double");
        assert_eq!((plain.context_layers, plain.generation_layers, plain.d_ff), (2, 1, 4 * plain.d_model));
        for name in ["double-logspace", "double-single_middle-separate", "double-prompt_style-separate-loops3"] {
            assert_eq!(name.parse::<DoubleVariant>().unwrap().to_string(), name);
            assert!(is_model(name) && suite_of(name) == Suite::Double);
        }
        let looped = double(&settings, "double-separate-loops2");
        assert!(looped.separate_kv && looped.context_loops == 2);
        for (name, hint) in [
            ("double-loops2-separate", "did you mean `double-separate-loops2`?"),
            ("double-random_uniform", "did you mean `double`?"),
            ("double-loops0", "model `double-loops0`: loops must be from 1 to 1024, found 0"),
            ("double-loops1025", "loops must be from 1 to 1024, found 1025"),
            ("double-loops", "unknown model `double-loops`"),
            ("double-x", "unknown model `double-x`"),
            ("doubled", "unknown model `doubled`"),
        ] {
            assert!(!is_model(name));
            let error = settings.model(name, 256).unwrap_err().to_string();
            assert!(error.contains(hint), "{error}");
        }
        for (blocks, stacks) in [(2, (1, 1)), (3, (2, 1)), (6, (4, 2)), (12, (8, 4)), (15, (10, 5))] {
            assert_eq!(Settings { blocks, ..settings.clone() }.stacks().unwrap(), stacks);
        }
        settings.context_layers = 1;
        assert_eq!(double(&settings, "double").context_layers, 1);
        for (changed, phrase) in [
            (Settings { context_layers: 3, ..settings.clone() }, "context_layers must be below blocks=3, found 3"),
            (Settings { blocks: 1, ..settings.clone() }, "two stacks need at least 2 blocks, found 1"),
            (Settings { seq: 1, ..settings.clone() }, "needs sequences of 2 tokens or more, found 1"),
            (Settings { transformer_heads: 3, ..settings.clone() }, "transformer_heads must divide d_model=32"),
        ] {
            let error = changed.model("encoder-decoder", 256).unwrap_err().to_string();
            assert!(error.contains(phrase), "{error}");
        }
        let error = settings.sampling("double-prompt_style").unwrap_err().to_string();
        assert!(error.contains("need a file of prompt lengths"), "{error}");
        assert_eq!(settings.sampling("tango").unwrap(), BlockSampling::RandomUniform);
    }
}
