//! Small models for `kumiki gradcheck`: every architecture, tied and untied, with and without recomputation.

use kumiki_autograd::{GradCheck, Param, Report, Tape};
use kumiki_nn::{Diagonal, Module};
use kumiki_tensor::{DType, Rng, Tensor};

use kumiki_ops::FeatureMap;

use crate::{
    Architecture, AttentionKind, CemConfig, GauConfig, IGNORE, LanguageModel, LanguageModelConfig, MlpKind,
    TangoConfig, TransformerConfig, Window,
};

/// A language model of F64 with a batch to compute its loss on.
pub struct ModelCase {
    /// The architecture.
    pub name: &'static str,
    /// What distinguishes this case from the architecture's others.
    pub variant: String,
    model: LanguageModel,
    tokens: Tensor,
    targets: Tensor,
}

impl ModelCase {
    fn new(name: &'static str, architecture: Architecture, recompute: bool) -> ModelCase {
        let tied = if architecture.tied() { "tied" } else { "untied" };
        let mut variant = if recompute { format!("{tied}, recomputed") } else { tied.to_owned() };
        if let Architecture::Cem(c) = &architecture {
            variant += &format!(", {} steps, diagonal {}, rank {}", c.steps, c.diagonal.name(), c.rank.unwrap_or(0));
        }
        let config = LanguageModelConfig { n_vocab: 7, architecture };
        let mut model = LanguageModel::new(&config, 0, DType::F64).expect("sizes that fit");
        model.checkpoint_activations = recompute;
        let mut rng = Rng::new(0).fork("model cases");
        // Parameters that start at one value move off it: with a factor of 0 the other one would have no gradient.
        for (name, param) in model.params_mut() {
            let first = param.value().to_f64_vec()[0];
            if param.value().to_f64_vec().iter().all(|&x| x == first) {
                let noise = Rng::new(0).fork(&name).normal(DType::F64, param.shape(), 0.0, 0.2);
                param.value_mut().add_assign(&noise);
            }
        }
        // The usual 0.02 would make the first norm so steep that differences cannot follow it.
        let shape = model.embedding.weight.shape().to_vec();
        model.embedding.weight.set(rng.normal(DType::F64, &shape, 0.0, 1.0));
        let tokens = rng.ids(DType::I64, &[2, 5], 7);
        let mut targets = rng.ids(DType::I64, &[2, 5], 7);
        targets.make_mut::<i64>()[3] = IGNORE;
        ModelCase { name, variant, model, tokens, targets }
    }

    /// The gradients of the loss for all parameters against central differences.
    pub fn check(&self) -> Report {
        let params: Vec<(String, Param)> = self.model.params().into_iter().map(|(n, p)| (n, p.clone())).collect();
        let check = GradCheck { max_elements: 24, ..GradCheck::default() };
        check.run(&[], &params, |tape: &Tape, _| self.model.loss(tape, &self.tokens, &self.targets))
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
