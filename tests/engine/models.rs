//! What must hold for every model: causality, equal results by other ways to the same, right gradients.

use crate::common::{architectures, model, tokens};
use kumiki::autograd::{GradCheck, Param, Tape};
use kumiki::nn::Module;
use kumiki::ops::testing::difference;
use kumiki::tensor::{DType, Tensor};

fn named(model: &impl Module) -> Vec<(String, Param)> {
    model.params().into_iter().map(|(name, param)| (name, param.clone())).collect()
}

#[test]
fn every_gradient_of_every_model_equals_central_differences() {
    for (name, architecture) in architectures() {
        for checkpoint in [false, true] {
            let mut m = model(&architecture, DType::F64);
            m.checkpoint_activations = checkpoint;
            let (inputs, mut targets) = (tokens(1, 2, 9), tokens(2, 2, 9));
            targets.make_mut::<i64>()[4] = -1;
            let check = GradCheck { max_elements: 25, ..GradCheck::default() };
            let report = check.run(&[], &named(&m), |tape, _| m.loss(tape, &inputs, &targets));
            assert!(
                report.error() < 1e-6 && report.without_gradient.is_empty(),
                "{name}, checkpoint {checkpoint}: {report}"
            );
        }
    }
}

#[test]
fn no_output_depends_on_a_later_token() {
    for (name, architecture) in architectures() {
        let m = model(&architecture, DType::F64);
        let length = 13;
        let before = tokens(1, 1, length);
        let logits = |t: &Tensor| m.logits(&Tape::inference(), t).into_value();
        let reference = logits(&before);
        for at in 0..length {
            let mut after = before.copy();
            let id = &mut after.make_mut::<i64>()[at];
            *id = (*id + 1) % 11;
            let changed = logits(&after);
            for t in 0..length {
                let same = changed.select(1, t).to_f64_vec() == reference.select(1, t).to_f64_vec();
                assert_eq!(
                    same,
                    t < at,
                    "{name}: token {at} changed, position {t} {}",
                    if same { "did not" } else { "did" }
                );
            }
        }
    }
}

#[test]
fn cached_decoding_equals_the_full_forward_for_every_cut() {
    for (name, architecture) in architectures() {
        let m = model(&architecture, DType::F64);
        let all = tokens(1, 2, 9);
        let full = m.logits(&Tape::inference(), &all).into_value();
        for cut in 1..9 {
            let mut cache = m.new_cache();
            let mut logits = m.next_logits(&all.narrow(1, 0, cut), &mut cache);
            for t in cut..=9 {
                let expected = full.select(1, t - 1).to_f64_vec();
                let problem = difference(&logits.to_f64_vec(), &expected, 1e-12);
                assert!(problem.is_none(), "{name}, prompt of {cut}, position {t}: {}", problem.unwrap());
                if t < 9 {
                    logits = m.next_logits(&all.narrow(1, t, 1), &mut cache);
                }
            }
            assert_eq!(cache.len(), 9);
        }
    }
}

#[test]
fn checkpointed_gradients_are_bitwise_those_of_the_plain_run() {
    for (name, architecture) in architectures() {
        let mut m = model(&architecture, DType::F32);
        let (inputs, targets) = (tokens(1, 2, 20), tokens(2, 2, 20));
        let gradients = |m: &kumiki::models::LanguageModel| -> Vec<(String, Vec<f64>)> {
            let tape = Tape::new();
            let loss = m.loss(&tape, &inputs, &targets);
            let grads = tape.backward(&loss);
            m.params().into_iter().map(|(n, p)| (n, grads.of(p).unwrap().to_f64_vec())).collect()
        };
        let plain = gradients(&m);
        m.checkpoint_activations = true;
        assert_eq!(gradients(&m), plain, "{name}");
    }
}

#[test]
fn parameter_counts_and_names_are_those_of_the_specification() {
    for (name, architecture) in architectures() {
        let m = model(&architecture, DType::F32);
        assert_eq!(m.param_count(), kumiki::models::accounting::total_params(&m.config), "{name}");
        assert_eq!(m.block_param_count(), kumiki::models::accounting::block_params(&architecture), "{name}");
    }
    let names = |wanted: &str| -> Vec<String> {
        let (_, architecture) = architectures().into_iter().find(|(name, _)| *name == wanted).unwrap();
        model(&architecture, DType::F32).params().into_iter().map(|(n, _)| n).collect()
    };
    let block = ["norm", "wq", "wk", "wg", "wv", "wo", "log_tau"].map(|n| format!("blocks.0.{n}"));
    assert_eq!(names("wango tied"), names("tango tied"));
    assert_eq!(names("tango tied"), [&["embedding".to_owned()][..], &block, &["norm_out".to_owned()]].concat());
    let block = ["norm1", "wq", "wk", "wv", "wo", "norm2", "w_gate", "w_up", "w_down"].map(|n| format!("blocks.0.{n}"));
    assert_eq!(names("transformer tied"), [&["embedding".to_owned()][..], &block, &["norm_out".to_owned()]].concat());
    assert_eq!(names("tango untied").len(), 2 + 3 * 7);
}

#[test]
fn a_model_trained_in_f64_and_f32_agrees() {
    for (name, architecture) in architectures() {
        let loss =
            |dtype| model(&architecture, dtype).loss(&Tape::inference(), &tokens(1, 2, 30), &tokens(2, 2, 30)).item();
        let (double, single) = (loss(DType::F64), loss(DType::F32));
        assert!((double - single).abs() < 1e-5, "{name}: {double} {single}");
    }
}
