//! Small models for `kumiki gradcheck`: every architecture, tied and untied, with and without recomputation.

use kumiki_autograd::{GradCheck, Param, Report, Tape, Var};
use kumiki_nn::{Diagonal, Module};
use kumiki_tensor::{DType, Rng, Tensor};

use kumiki_ops::{BlockStarts, FeatureMap};

use crate::{
    Architecture, AttentionKind, CemConfig, DoubleDecoder, DoubleDecoderConfig, EncoderDecoder, EncoderDecoderConfig,
    GauConfig, GeluConfig, IGNORE, LanguageModel, LanguageModelConfig, MlpKind, TangoConfig, TransformerConfig, Window,
};

/// A model of F64 with a batch to compute its loss on.
pub struct ModelCase {
    /// The architecture.
    pub name: &'static str,
    /// What distinguishes this case from the architecture's others.
    pub variant: String,
    params: Vec<(String, Param)>,
    loss: Box<dyn Fn(&Tape) -> Var + Send + Sync>,
}

/// Token ids of all cases.
const IDS: usize = 7;

/// Random tokens, `[2, T]`.
fn ids(label: &str, time: usize) -> Tensor {
    Rng::new(0).fork(label).ids(DType::I64, &[2, time], IDS as u64)
}

/// The targets for tokens `[2, 5]`, of which one does not count.
fn targets() -> Tensor {
    let mut targets = ids("targets", 5);
    targets.make_mut::<i64>()[3] = IGNORE;
    targets
}

/// The model with parameters at which differences can be taken.
fn prepared<M: Module>(mut model: M) -> M {
    // Parameters that start at one value move off it: with a factor of 0 the other one would have no gradient.
    for (name, param) in model.params_mut() {
        let first = param.value().to_f64_vec()[0];
        if param.value().to_f64_vec().iter().all(|&x| x == first) {
            let noise = Rng::new(0).fork(&name).normal(DType::F64, param.shape(), 0.0, 0.2);
            param.value_mut().add_assign(&noise);
        }
        // The usual 0.02 would make the first norm so steep that differences cannot follow it.
        if name == "embedding" {
            param.set(Rng::new(0).fork("table").normal(DType::F64, param.shape(), 0.0, 1.0));
        }
    }
    model
}

impl ModelCase {
    fn of<M>(
        name: &'static str,
        variant: String,
        model: M,
        loss: impl Fn(&M, &Tape) -> Var + Send + Sync + 'static,
    ) -> ModelCase
    where
        M: Module + Send + Sync + 'static,
    {
        let model = prepared(model);
        let params = model.params().into_iter().map(|(n, p)| (n, p.clone())).collect();
        ModelCase { name, variant, params, loss: Box::new(move |tape| loss(&model, tape)) }
    }

    fn new(name: &'static str, architecture: Architecture, recompute: bool) -> ModelCase {
        let tied = if architecture.tied() { "tied" } else { "untied" };
        let mut variant = if recompute { format!("{tied}, recomputed") } else { tied.to_owned() };
        if let Architecture::Cem(c) = &architecture {
            variant += &format!(", {} steps, diagonal {}, rank {}", c.steps, c.diagonal.name(), c.rank.unwrap_or(0));
        }
        let config = LanguageModelConfig { n_vocab: IDS, architecture };
        let mut model = LanguageModel::new(&config, 0, DType::F64).expect("sizes that fit");
        model.checkpoint_activations = recompute;
        ModelCase::of(name, variant, model, |m, tape| m.loss(tape, &ids("tokens", 5), &targets()))
    }

    fn double(context_loops: usize, separate_kv: bool, recompute: bool) -> ModelCase {
        let (n_vocab, d_model, heads, d_ff, rope_base) = (IDS, 8, 2, 6, 10_000.0);
        let (context_layers, generation_layers) = (2, 2);
        let config = DoubleDecoderConfig {
            n_vocab,
            d_model,
            heads,
            d_ff,
            context_layers,
            generation_layers,
            context_loops,
            separate_kv,
            rope_base,
        };
        let mut model = DoubleDecoder::new(&config, 0, DType::F64).expect("sizes that fit");
        model.checkpoint_activations = recompute;
        let mut variant = format!("context applied {context_loops} times, ");
        variant += if separate_kv { "projections of its own" } else { "shared projections" };
        variant += if recompute { ", recomputed" } else { "" };
        let blocks = BlockStarts::new(vec![vec![1, 2], vec![3]], 5).expect("in order");
        ModelCase::of("double decoder", variant, model, move |m, tape| {
            m.loss(tape, &ids("tokens", 5), &targets(), &blocks)
        })
    }

    fn encoder_decoder(recompute: bool) -> ModelCase {
        let (n_vocab, sentinels, d_model, heads, d_ff, rope_base) = (IDS, 2, 8, 2, 6, 10_000.0);
        let (encoder_layers, decoder_layers) = (2, 2);
        let config = EncoderDecoderConfig {
            n_vocab,
            sentinels,
            d_model,
            heads,
            d_ff,
            encoder_layers,
            decoder_layers,
            rope_base,
        };
        let mut model = EncoderDecoder::new(&config, 0, DType::F64).expect("sizes that fit");
        model.checkpoint_activations = recompute;
        let variant = if recompute { "recomputed" } else { "" }.to_owned();
        let mask = Tensor::from_fn::<i64>(&[2, 4], |i| i64::from(i != 3));
        ModelCase::of("encoder-decoder", variant, model, move |m, tape| {
            m.loss(tape, &ids("source", 4), Some(&mask), &ids("tokens", 5), &targets())
        })
    }

    /// The gradients of the loss for all parameters against central differences.
    pub fn check(&self) -> Report {
        let check = GradCheck { max_elements: 24, ..GradCheck::default() };
        check.run(&[], &self.params, |tape: &Tape, _| (self.loss)(tape))
    }
}

/// The cases of all architectures.
pub fn model_cases() -> Vec<ModelCase> {
    let mut cases = Vec::new();
    for (tied, recompute) in [(true, false), (false, false), (true, true), (false, true)] {
        let (d_model, heads, applications, rope_base) = (8, 2, 2, 10_000.0);
        let tango =
            TangoConfig { d_model, heads, head_dim: 4, gate_width: 6, applications, tied, rope_base, window: None };
        // Of the five tokens of a case, the last ones have two or three behind the window.
        let window = Some(Window { size: 2, feature_map: FeatureMap::Hyperbolic });
        let wango = TangoConfig { window, ..tango.clone() };
        let transformer = TransformerConfig { d_model, heads, d_ff: 6, applications, tied, rope_base };
        let gau = GauConfig { d_model, key_width: 4, gate_width: 6, applications, tied, rope_base, chunk: None };
        let flash = GauConfig { chunk: Some(2), ..gau.clone() };
        cases.push(ModelCase::new("tango", Architecture::Tango(tango), recompute));
        cases.push(ModelCase::new("wango", Architecture::Tango(wango), recompute));
        cases.push(ModelCase::new("transformer", Architecture::Transformer(transformer), recompute));
        cases.push(ModelCase::new("gau", Architecture::Gau(gau), recompute));
        cases.push(ModelCase::new("flash", Architecture::Gau(flash), recompute));
        let (attention, mlp) = (vec![AttentionKind::Cem], vec![MlpKind::Cem]);
        let cem = CemConfig {
            d_model,
            heads,
            head_dim: 4,
            d_ff: 6,
            applications,
            tied,
            rope_base,
            attention,
            mlp,
            diagonal: Diagonal::PerHead,
            rank: Some(2),
            steps: 2,
            eta: 0.5,
        };
        let shared = CemConfig { diagonal: Diagonal::Shared, rank: None, steps: 4, ..cem.clone() };
        let bare = CemConfig { diagonal: Diagonal::None, steps: 1, ..cem.clone() };
        cases.extend([cem.clone(), shared, bare].map(|c| ModelCase::new("cem", Architecture::Cem(c), recompute)));
        if !tied {
            let attention = vec![AttentionKind::Mha, AttentionKind::Cem];
            let mixed = CemConfig { attention, mlp: vec![MlpKind::Cem, MlpKind::Swiglu], ..cem };
            cases.push(ModelCase::new("cem, mixed halves", Architecture::Cem(mixed), recompute));
            let decoder = GeluConfig { d_model, heads, d_ff: 6, applications, rope_base };
            cases.push(ModelCase::new("decoder", Architecture::Decoder(decoder), recompute));
            cases.push(ModelCase::double(1, false, recompute));
            cases.push(ModelCase::double(2, true, recompute));
            cases.push(ModelCase::encoder_decoder(recompute));
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_model_has_right_gradients() {
        for case in model_cases() {
            let report = case.check();
            let what = format!("{} ({}): {report}", case.name, case.variant);
            assert!(report.error() < 1e-6 && report.without_gradient.is_empty(), "{what}");
            assert!(report.checked > 100, "{what}");
        }
    }
}
