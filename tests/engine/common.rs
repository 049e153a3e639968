//! Small models that the integration tests share.

use kumiki::models::{
    Architecture, AttentionKind, CemConfig, GauConfig, GeluConfig, LanguageModel, LanguageModelConfig, MlpKind,
    TangoConfig, TransformerConfig, Window,
};
use kumiki::nn::Diagonal;
use kumiki::ops::FeatureMap;
use kumiki::tensor::{DType, Rng, Tensor};

/// A TANGO stack of 3 applications, 2 heads; sizes are odd where they may be.
pub fn tango(tied: bool) -> Architecture {
    windowed(tied, None)
}

/// As [`tango`] with a window of 3 tokens.
pub fn wango(tied: bool, feature_map: FeatureMap) -> Architecture {
    windowed(tied, Some(Window { size: 3, feature_map }))
}

fn windowed(tied: bool, window: Option<Window>) -> Architecture {
    Architecture::Tango(TangoConfig {
        d_model: 12,
        heads: 2,
        head_dim: 4,
        gate_width: 10,
        applications: 3,
        tied,
        rope_base: 1e4,
        window,
    })
}

/// A Transformer++ stack of 3 applications, 2 heads.
pub fn transformer(tied: bool) -> Architecture {
    Architecture::Transformer(TransformerConfig {
        d_model: 12,
        heads: 2,
        d_ff: 17,
        applications: 3,
        tied,
        rope_base: 1e4,
    })
}

/// A GAU stack of 3 applications; with a chunk FLASH.
pub fn gau(tied: bool, chunk: Option<usize>) -> Architecture {
    Architecture::Gau(GauConfig {
        d_model: 12,
        key_width: 6,
        gate_width: 11,
        applications: 3,
        tied,
        rope_base: 1e4,
        chunk,
    })
}

/// A CEM stack of 3 applications, 2 heads, all halves descending.
pub fn cem(tied: bool, diagonal: Diagonal, rank: Option<usize>, steps: usize) -> CemConfig {
    CemConfig {
        d_model: 12,
        heads: 2,
        head_dim: 6,
        d_ff: 13,
        applications: 3,
        tied,
        rope_base: 1e4,
        attention: vec![AttentionKind::Cem],
        mlp: vec![MlpKind::Cem],
        diagonal,
        rank,
        steps,
        eta: 0.5,
    }
}

/// A CEM stack with plain halves here and there.
pub fn mixed() -> CemConfig {
    use AttentionKind::{Cem, Mha};
    let mlp = vec![MlpKind::Cem, MlpKind::Swiglu, MlpKind::Swiglu];
    CemConfig { attention: vec![Mha, Cem, Mha], mlp, ..cem(false, Diagonal::Shared, None, 2) }
}

/// Every architecture, tied and untied.
pub fn architectures() -> Vec<(&'static str, Architecture)> {
    vec![
        ("tango tied", tango(true)),
        ("tango untied", tango(false)),
        ("wango tied", wango(true, FeatureMap::Hyperbolic)),
        ("wango untied, elu1", wango(false, FeatureMap::Elu1)),
        ("wango tied, taylor2", wango(true, FeatureMap::Taylor2)),
        ("transformer tied", transformer(true)),
        ("transformer untied", transformer(false)),
        ("gau untied", gau(false, None)),
        ("gau tied", gau(true, None)),
        ("flash untied", gau(false, Some(4))),
        ("flash tied", gau(true, Some(3))),
        ("cem, 1 step", Architecture::Cem(cem(false, Diagonal::None, None, 1))),
        ("cem, 2 steps, shared", Architecture::Cem(cem(false, Diagonal::Shared, None, 2))),
        ("cem, 4 steps, per head, rank 3", Architecture::Cem(cem(false, Diagonal::PerHead, Some(3), 4))),
        ("cem tied, 2 steps, rank 2", Architecture::Cem(cem(true, Diagonal::None, Some(2), 2))),
        ("cem mixed", Architecture::Cem(mixed())),
        (
            "decoder",
            Architecture::Decoder(GeluConfig { d_model: 12, heads: 2, d_ff: 17, applications: 3, rope_base: 1e4 }),
        ),
    ]
}

/// A model over 11 token ids. Norm weights and temperatures are moved off their round starting values.
pub fn model(architecture: &Architecture, dtype: DType) -> LanguageModel {
    use kumiki::nn::Module;
    let config = LanguageModelConfig { n_vocab: 11, architecture: architecture.clone() };
    let mut model = LanguageModel::new(&config, 3, dtype).unwrap();
    for (name, param) in model.params_mut() {
        let spread = if name == "embedding" { 0.5 } else { 0.1 };
        let noise = Rng::new(9).fork(&name).normal(dtype, param.shape(), 0.0, spread);
        param.value_mut().add_assign(&noise);
    }
    model
}

/// Random token ids `[rows, len]`.
pub fn tokens(seed: u64, rows: usize, len: usize) -> Tensor {
    Rng::new(seed).fork("tokens").ids(DType::I64, &[rows, len], 11)
}
