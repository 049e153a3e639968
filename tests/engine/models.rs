//! What must hold for every model: causality, equal results by other ways to the same, right gradients.

use crate::common::{architectures, model, tokens};
use kumiki::autograd::{GradCheck, Param, Tape, checkpoint};
use kumiki::models::accounting::{self, Pairs};
use kumiki::models::{Architecture, TangoConfig, Window};
use kumiki::nn::Module;
use kumiki::ops::testing::difference;
use kumiki::ops::{self, FeatureMap};
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
        // A weight of squared ReLU can be exactly 0; softmax and kernels see every earlier token.
        let sees_all = !matches!(architecture, Architecture::Gau(_));
        let mut unmoved = 0;
        for at in 0..length {
            let mut after = before.copy();
            let id = &mut after.make_mut::<i64>()[at];
            *id = (*id + 1) % 11;
            let changed = logits(&after);
            for t in 0..length {
                let same = changed.select(1, t).to_f64_vec() == reference.select(1, t).to_f64_vec();
                assert!(same || t >= at, "{name}: token {at} changed, position {t} did");
                assert!(!same || t < at || (t > at && !sees_all), "{name}: token {at} changed, position {t} did not");
                unmoved += usize::from(same && t > at);
            }
        }
        assert!(unmoved < length * (length - 1) / 2 / 3, "{name}: {unmoved} later positions see nothing");
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
            // Three tokens at once in the middle.
            let mut cache = m.new_cache();
            for (start, len) in [(0, cut), (cut, 3.min(9 - cut)), (cut + 3, 6usize.saturating_sub(cut))] {
                if len > 0 {
                    logits = m.next_logits(&all.narrow(1, start, len), &mut cache);
                }
            }
            let problem = difference(&logits.to_f64_vec(), &full.select(1, 8).to_f64_vec(), 1e-12);
            assert!(problem.is_none(), "{name}, pieces from {cut}: {}", problem.unwrap());
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
    let block = ["norm", "wu", "wv", "wz", "gamma", "beta", "wo"].map(|n| format!("blocks.0.{n}"));
    assert_eq!(names("gau tied"), [&["embedding".to_owned()][..], &block, &["norm_out".to_owned()]].concat());
    assert_eq!(names("flash tied"), names("gau tied"));
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

#[test]
fn the_accounting_equals_what_operators_count_and_caches_hold() {
    let chunks = |chunk| ("flash", crate::common::gau(false, Some(chunk)));
    let wide = Architecture::Tango(TangoConfig {
        window: Some(Window { size: 1000, feature_map: FeatureMap::Elu1 }),
        ..match crate::common::tango(true) {
            Architecture::Tango(c) => c,
            _ => unreachable!(),
        }
    });
    for (name, architecture) in architectures().into_iter().chain([chunks(1000), chunks(1), ("wide window", wide)]) {
        let m = model(&architecture, DType::F32);
        for (rows, seq) in [(1, 1), (2, 3), (1, 4), (1, 5), (3, 21)] {
            let (_, counted) =
                ops::count_macs(|| m.loss(&Tape::inference(), &tokens(1, rows, seq), &tokens(2, rows, seq)));
            let mut expected = accounting::macs(&m.config, seq, Pairs::Causal);
            for macs in [&mut expected.projection, &mut expected.pair, &mut expected.prefix, &mut expected.head] {
                *macs *= rows as u64;
            }
            assert_eq!(counted, expected, "{name}, {rows} rows of {seq}");
            let mut cache = m.new_cache();
            assert_eq!(accounting::state_bytes(&m.config, 0, 4), cache.byte_len() as u64);
            m.next_logits(&tokens(1, rows, seq), &mut cache);
            m.next_logits(&tokens(1, rows, 2), &mut cache);
            let bytes = accounting::state_bytes(&m.config, seq + 2, 4) * rows as u64;
            assert_eq!(cache.byte_len() as u64, bytes, "{name}, {rows} rows of {seq}");
        }
    }
}

/// The numbers that the documentation of every block says are kept, and no others; each storage counts once.
#[test]
fn a_block_application_saves_what_its_file_says() {
    for (name, architecture) in architectures() {
        let (rows, time) = (2, 70);
        let kept = accounting::saved_numbers(&architecture, 0) as usize;
        // Nothing keeps offsets.
        let unused = match &architecture {
            Architecture::Gau(c) => c.vectors() * c.key_width,
            _ => 0,
        };
        let m = model(&architecture, DType::F32);
        let tape = Tape::new();
        let h = ops::mul_scalar(&tape.leaf(Tensor::zeros(DType::F32, &[rows, time, 12])), 1.0);
        let y = m.blocks[0].forward(&tape, &h, None);
        // Each half of a preconditioned block also keeps the softplus of its diagonal.
        let derived = match &architecture {
            Architecture::Cem(c) if c.rank.is_some() => 2 * c.d_model,
            _ => 0,
        };
        let params = m.blocks[0].param_count() - unused + derived;
        assert_eq!(tape.saved_bytes(), 4 * (rows * time * kept + params), "{name}: {}", tape.summary());
        // Recomputed, an application keeps its input.
        let (block, tape) = (m.blocks[0].clone(), Tape::new());
        let h = ops::mul_scalar(&tape.leaf(h.into_value()), 1.0);
        checkpoint(&tape, &[&h], move |tape, h| block.forward(tape, &h[0], None));
        assert_eq!(tape.saved_bytes(), y.value().byte_len(), "{name}");
    }
}
