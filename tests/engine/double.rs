//! Double decoders and encoder-decoders: gradients, who sees what, and writing with caches.

use kumiki::autograd::{GradCheck, Param, Tape};
use kumiki::models::accounting::{Pairs, total};
use kumiki::models::{
    Architecture, DoubleDecoder, DoubleDecoderConfig, EncoderDecoder, EncoderDecoderConfig, GeluConfig, IGNORE,
    LanguageModelConfig, Model, ModelConfig,
};
use kumiki::nn::Module;
use kumiki::ops::{self, BlockStarts, count_macs, testing::difference};
use kumiki::tensor::{DType, Rng, Tensor};
use proptest::prelude::*;

use crate::common::tokens;

fn config(context_loops: usize, separate_kv: bool) -> DoubleDecoderConfig {
    DoubleDecoderConfig {
        n_vocab: 11,
        d_model: 12,
        heads: 2,
        d_ff: 17,
        context_layers: 2,
        generation_layers: 2,
        context_loops,
        separate_kv,
        rope_base: 1e4,
    }
}

/// Parameters off their round starting values, and a table of unit size.
fn shaken<M: Module>(mut model: M) -> M {
    for (name, param) in model.params_mut() {
        let spread = if name == "embedding" { 0.5 } else { 0.1 };
        let noise = Rng::new(9).fork(&name).normal(param.dtype(), param.shape(), 0.0, spread);
        param.value_mut().add_assign(&noise);
    }
    model
}

fn double(context_loops: usize, separate_kv: bool, dtype: DType) -> DoubleDecoder {
    shaken(DoubleDecoder::new(&config(context_loops, separate_kv), 3, dtype).unwrap())
}

fn encoder_decoder(dtype: DType) -> EncoderDecoder {
    let (n_vocab, d_model, heads, d_ff, rope_base) = (11, 12, 2, 17, 1e4);
    let (sentinels, encoder_layers, decoder_layers) = (2, 2, 2);
    let config =
        EncoderDecoderConfig { n_vocab, sentinels, d_model, heads, d_ff, encoder_layers, decoder_layers, rope_base };
    shaken(EncoderDecoder::new(&config, 3, dtype).unwrap())
}

fn params(model: &impl Module) -> Vec<(String, Param)> {
    model.params().into_iter().map(|(name, p)| (name, p.clone())).collect()
}

#[test]
fn every_gradient_equals_central_differences() {
    let check = GradCheck { max_elements: 20, ..GradCheck::default() };
    let (inputs, mut targets) = (tokens(1, 2, 7), tokens(2, 2, 7));
    targets.make_mut::<i64>()[3] = IGNORE;
    let blocks = BlockStarts::new(vec![vec![2, 3], vec![5]], 7).unwrap();
    for (loops, separate) in [(1, false), (2, true)] {
        for recompute in [false, true] {
            let mut model = double(loops, separate, DType::F64);
            model.checkpoint_activations = recompute;
            let report = check.run(&[], &params(&model), |tape: &Tape, _| model.loss(tape, &inputs, &targets, &blocks));
            assert!(report.error() < 1e-6 && report.without_gradient.is_empty(), "{report}");
        }
    }
    let model = encoder_decoder(DType::F64);
    let (source, mask) = (tokens(3, 2, 5), Tensor::from_fn::<i64>(&[2, 5], |i| i64::from(i != 4)));
    let report =
        check.run(&[], &params(&model), |tape: &Tape, _| model.loss(tape, &source, Some(&mask), &inputs, &targets));
    assert!(report.error() < 1e-6 && report.without_gradient.is_empty(), "{report}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn nothing_leaks_from_later_tokens_whatever_the_blocks(cuts in proptest::collection::vec(any::<bool>(), 11), at in 0usize..12) {
        let model = double(1, false, DType::F64);
        let starts = (1..12).filter(|&i| cuts[i - 1]).collect();
        let blocks = BlockStarts::new(vec![starts], 12).unwrap();
        let logits = |tokens: &Tensor| model.logits(&Tape::inference(), tokens, &blocks).into_value();
        let before = tokens(4, 1, 12);
        let mut after = before.clone();
        after.make_mut::<i64>()[at] = (after.to_f64_vec()[at] as i64 + 1) % 11;
        let (before, after) = (logits(&before), logits(&after));
        for t in 0..12 {
            let same = before.select(1, t).to_f64_vec() == after.select(1, t).to_f64_vec();
            prop_assert!(same || t >= at, "token {at} changed, position {t} did");
            prop_assert!(!same || t < at, "token {at} changed, position {t} did not");
        }
    }
}

#[test]
fn nothing_leaks_over_many_tiles_or_between_rows() {
    let (model, time) = (double(1, false, DType::F32), 300);
    let starts = [vec![70], vec![1, 64, 65, 200, 299], vec![], vec![130, 131, 257]];
    let blocks = BlockStarts::new(starts.to_vec(), time).unwrap();
    let logits = |tokens: &Tensor| model.logits(&Tape::inference(), tokens, &blocks).into_value();
    let all = tokens(4, 4, time);
    let before = logits(&all);
    for (row, at) in [(0, 69), (0, 70), (0, 250), (1, 64), (1, 130), (1, 299), (2, 1), (2, 255), (3, 129), (3, 200)] {
        let mut changed = all.clone();
        let id = &mut changed.make_mut::<i64>()[row * time + at];
        *id = (*id + 1) % 11;
        let after = logits(&changed);
        for r in 0..4 {
            let of = |x: &Tensor| x.select(0, r).to_f64_vec();
            let (before, after) = (of(&before), of(&after));
            let first = (0..time).find(|t| before[t * 11..(t + 1) * 11] != after[t * 11..(t + 1) * 11]);
            assert_eq!(first, (r == row).then_some(at), "token {at} of row {row} changed, looked at row {r}");
        }
    }
}

#[test]
fn the_first_block_never_sees_context() {
    let all = tokens(5, 1, 9);
    let blocks = BlockStarts::new(vec![vec![6]], 9).unwrap();
    let model = double(1, true, DType::F64);
    let before = model.logits(&Tape::inference(), &all, &blocks).into_value();
    let mut other = model.clone();
    let layers: Vec<_> = other.context.params_mut().into_iter().map(|(_, p)| p).collect();
    layers.into_iter().for_each(|p| *p.value_mut() = Tensor::zeros(DType::F64, p.shape()));
    let after = other.logits(&Tape::inference(), &all, &blocks).into_value();
    for t in 0..9 {
        let same = before.select(1, t).to_f64_vec() == after.select(1, t).to_f64_vec();
        assert_eq!(same, t < 6, "position {t}");
    }
}

#[test]
fn an_encoder_sees_all_and_its_decoder_nothing_later() {
    let model = encoder_decoder(DType::F64);
    let (source, written) = (tokens(6, 1, 5), tokens(7, 1, 4));
    let logits = |source: &Tensor, mask: Option<&Tensor>, written: &Tensor| {
        model.logits(&Tape::inference(), source, mask, written).into_value()
    };
    let before = logits(&source, None, &written);
    let changed = |tokens: &Tensor, at: usize| {
        let mut tokens = tokens.clone();
        tokens.make_mut::<i64>()[at] = (tokens.to_f64_vec()[at] as i64 + 1) % 11;
        tokens
    };
    let same = |x: &Tensor, t: usize| x.select(1, t).to_f64_vec() == before.select(1, t).to_f64_vec();
    for at in 0..5 {
        let after = logits(&changed(&source, at), None, &written);
        assert!((0..4).all(|t| !same(&after, t)), "source {at}");
    }
    for at in 0..4 {
        let after = logits(&source, None, &changed(&written, at));
        assert!((0..4).all(|t| same(&after, t) == (t < at)), "written {at}");
    }
    // What is masked may be anything.
    let mask = Tensor::from_fn::<i64>(&[1, 5], |i| i64::from(i < 3));
    let short = logits(&source.narrow(1, 0, 3), None, &written).to_f64_vec();
    let masked = logits(&changed(&source, 4), Some(&mask), &written).to_f64_vec();
    assert_eq!(difference(&masked, &short, 1e-12), None);
}

/// The logits after the whole of `text` in one forward pass, for blocks that start where writing has started them.
fn whole(model: &DoubleDecoder, text: &[i64], starts: &[usize]) -> Vec<f64> {
    let starts = starts.iter().copied().filter(|&s| s > 0 && s < text.len()).collect();
    let blocks = BlockStarts::new(vec![starts], text.len()).unwrap();
    let tokens = Tensor::from_slice(text, &[1, text.len()]);
    model.logits(&Tape::inference(), &tokens, &blocks).into_value().select(1, text.len() - 1).to_f64_vec()
}

#[test]
fn writing_equals_the_full_forward_at_every_step_across_rollovers() {
    for (loops, separate) in [(1, false), (2, true)] {
        let model = double(loops, separate, DType::F64);
        let ids: Vec<i64> = tokens(8, 1, 60).to_f64_vec().iter().map(|&x| x as i64).collect();
        // Lengths that roll over at different steps.
        let prompts: Vec<Vec<i64>> = [1, 2, 7, 12].map(|n| ids[..n].to_vec()).into();
        for block_len in [1, 3, 5] {
            let (mut cache, mut logits) = model.start(&prompts, block_len).unwrap();
            let mut starts: Vec<Vec<usize>> = prompts.iter().map(|p| vec![p.len() - 1]).collect();
            for step in 0..11 {
                for (row, starts) in starts.iter_mut().enumerate() {
                    if *starts.last().unwrap() != cache.block_start(row) {
                        starts.push(cache.block_start(row));
                    }
                    let expected = whole(&model, cache.tokens(row), starts);
                    let got = logits.select(0, row).to_f64_vec();
                    let problem = difference(&got, &expected, 1e-12);
                    assert!(problem.is_none(), "blocks of {block_len}, step {step}, row {row}: {}", problem.unwrap());
                }
                let next: Vec<i64> = (0..prompts.len()).map(|row| ids[20 + 3 * step + row]).collect();
                logits = model.step(&next, &mut cache);
            }
            let kept: usize = (0..prompts.len()).map(|row| cache.tokens(row).len()).sum();
            // Keys and values of D numbers each, in the two generation layers.
            assert_eq!(cache.byte_len(), kept * 2 * 2 * 12 * 8);
            assert!(starts.iter().all(|s| s.len() > 2), "every sequence has rolled over");
        }
    }
}

#[test]
fn writing_after_known_latents_is_the_same_bit_for_bit() {
    let model = double(1, false, DType::F32);
    let ids: Vec<i64> = tokens(9, 1, 30).to_f64_vec().iter().map(|&x| x as i64).collect();
    let (text, prompts) = (&ids[..13], vec![ids[13..14].to_vec(), ids[13..20].to_vec()]);
    let latents = model.read(text);
    let run = |latents: &Tensor| {
        let (mut cache, mut logits) = model.start_after(text, latents, &prompts, 4).unwrap();
        let mut all = vec![logits.to_f64_vec()];
        for step in 0..6 {
            logits = model.step(&ids[20 + step..22 + step], &mut cache);
            all.push(logits.to_f64_vec());
        }
        all
    };
    let bytes = latents.to_f64_vec();
    let restored = Tensor::from_slice(&bytes, latents.shape()).cast(DType::F32);
    assert_eq!(run(&latents), run(&restored));
    // One token after the text: as a prompt of both.
    let (_, alone) = model.start(&[ids[..14].to_vec()], 4).unwrap();
    let (_, after) = model.start_after(text, &latents, &prompts[..1], 4).unwrap();
    assert_eq!(difference(&after.to_f64_vec(), &alone.to_f64_vec(), 1e-5), None);
    // A longer one has the blocks that the text and the prompt ask for.
    let (cache, after) = model.start_after(text, &latents, &prompts[1..], 4).unwrap();
    let expected = whole(&model, cache.tokens(0), &[13, 17]);
    assert_eq!(difference(&after.to_f64_vec(), &expected, 1e-4), None);
}

#[test]
fn what_cannot_be_written_after_is_a_sentence() {
    let model = double(1, false, DType::F32);
    let error = |prompts: &[Vec<i64>], block_len| model.start(prompts, block_len).unwrap_err().to_string();
    assert!(error(&[], 4).contains("found none"));
    assert!(error(&[vec![1], vec![]], 4).contains("prompt 2 is empty"));
    assert!(error(&[vec![1, 11]], 4).contains("holds token 11; the model knows 0 to 10"));
    assert!(error(&[vec![1]], 0).contains("at least 1, found 0"));
    let latents = Tensor::zeros(DType::F32, &[1, 3, 12]);
    let error = model.start_after(&[1, 2], &latents, &[vec![1]], 4).unwrap_err().to_string();
    assert!(error.contains("must be [1, 2, 12], found [1, 3, 12]"), "{error}");
}

#[test]
fn an_encoder_decoder_with_caches_equals_its_full_forward() {
    let model = encoder_decoder(DType::F64);
    let ids: Vec<i64> = tokens(9, 1, 12).to_f64_vec().iter().map(|&x| x as i64 % 9).collect();
    let (mut cache, logits) = model.start(&ids[..7]);
    let mut all = vec![logits.to_f64_vec()];
    all.extend(ids[7..].iter().map(|&id| model.next_logits(&[id], &mut cache).to_f64_vec()));
    let source: Vec<i64> = ids[..7].iter().copied().chain([9]).collect();
    let written: Vec<i64> = [9].into_iter().chain(ids[7..].iter().copied()).collect();
    let [source, written] = [source, written].map(|ids| Tensor::from_slice(&ids, &[1, ids.len()]));
    let full = model.logits(&Tape::inference(), &source, None, &written).into_value();
    for (t, logits) in all.iter().enumerate() {
        assert_eq!(difference(logits, &full.select(1, t).to_f64_vec(), 1e-12), None, "step {t}");
    }
}

#[test]
fn sequences_written_together_are_those_written_alone() {
    let decoder = LanguageModelConfig {
        n_vocab: 11,
        architecture: Architecture::Decoder(GeluConfig {
            d_model: 12,
            heads: 2,
            d_ff: 17,
            applications: 2,
            rope_base: 1e4,
        }),
    };
    let models = [
        Model::new(&ModelConfig::Language(decoder), 3, DType::F64).unwrap(),
        Model::Double(double(1, false, DType::F64)),
        Model::EncoderDecoder(encoder_decoder(DType::F64)),
    ];
    let prompts = [vec![1], vec![3, 1, 4, 1, 5, 8, 2, 6], vec![2, 7, 1]];
    for model in models {
        let run = |prompts: &[Vec<i64>], rows: &[usize]| {
            let (mut writing, mut logits) = model.start(prompts, 3).unwrap();
            (0..6).fold(vec![vec![]; rows.len()], |mut all: Vec<Vec<f64>>, step| {
                assert_eq!(logits.shape(), [prompts.len(), model.config().text_ids()]);
                rows.iter().enumerate().for_each(|(i, _)| all[i].extend(logits.select(0, i).to_f64_vec()));
                let next: Vec<i64> = rows.iter().map(|&row| ((row + 2 * step) % 9) as i64).collect();
                logits = model.step(&next, &mut writing);
                all
            })
        };
        let together = run(&prompts, &[0, 1, 2]);
        for row in 0..3 {
            let alone = run(&prompts[row..row + 1], &[row]);
            assert_eq!(difference(&together[row], &alone[0], 1e-12), None, "{}", model.config().kind());
        }
        assert!(model.start(&[vec![]], 3).unwrap_err().to_string().contains("the prompt is empty"));
    }
}

#[test]
fn the_accounting_equals_what_operators_count_and_caches_hold() {
    for (loops, separate) in [(1, false), (2, true)] {
        let model = Model::Double(double(loops, separate, DType::F32));
        let (Model::Double(double), config) = (&model, model.config()) else { unreachable!() };
        assert_eq!(double.block_param_count(), config.block_params());
        assert_eq!(model.param_count(), config.total_params());
        assert_eq!(config.checked_total_params(), Some(config.total_params()));
        for (seq, starts) in [(1, vec![]), (9, vec![]), (21, vec![1, 2, 13])] {
            let blocks = BlockStarts::new(vec![starts], seq).unwrap();
            let (_, counted) =
                count_macs(|| double.loss(&Tape::inference(), &tokens(1, 1, seq), &tokens(2, 1, seq), &blocks));
            assert_eq!(counted, config.macs(seq, Pairs::Causal), "{seq}");
        }
        written(&model);
    }
    let model = Model::EncoderDecoder(encoder_decoder(DType::F32));
    let (Model::EncoderDecoder(sed), config) = (&model, model.config()) else { unreachable!() };
    assert_eq!(sed.block_param_count(), config.block_params());
    assert_eq!(model.param_count(), config.total_params());
    let (source, target) = (tokens(1, 1, 13), tokens(2, 1, 6));
    let (_, counted) = count_macs(|| sed.loss(&Tape::inference(), &source, None, &target, &target));
    assert_eq!(counted, sed.config.macs_of(13, 6, Pairs::Causal));
    written(&model);
}

/// What a token costs after a prompt, and what is kept of it.
fn written(model: &Model) {
    let config = model.config();
    for len in [1usize, 2, 7] {
        let prompt: Vec<i64> = (0..len as i64).collect();
        let (mut writing, _) = model.start(&[prompt], 50).unwrap();
        assert_eq!(writing.byte_len() as u64, config.state_bytes(len, 4), "{} {len}", config.kind());
        let (_, counted) = count_macs(|| model.step(&[3], &mut writing));
        // The head is a product with weights like any other here.
        assert_eq!(total(&counted), config.token_macs(len), "{} {len}", config.kind());
    }
}

#[test]
fn two_stacks_save_two_thirds_and_cost_a_fortieth() {
    let (n_vocab, d_model, heads, d_ff, rope_base) = (32_000, 448, 7, 4 * 448, 1e4);
    let double = ModelConfig::Double(DoubleDecoderConfig {
        n_vocab,
        d_model,
        heads,
        d_ff,
        context_layers: 8,
        generation_layers: 4,
        context_loops: 1,
        separate_kv: false,
        rope_base,
    });
    let architecture = Architecture::Decoder(GeluConfig { d_model, heads, d_ff, applications: 12, rope_base });
    let decoder = ModelConfig::Language(LanguageModelConfig { n_vocab, architecture });
    assert_eq!(double.block_params(), decoder.block_params());
    let more = double.training_flops(2048) / decoder.training_flops(2048) - 1.0;
    assert!((more - 0.025).abs() < 0.001, "{more}");
    assert_eq!(3 * double.state_bytes(2048, 4), decoder.state_bytes(2048, 4));
    let head = (n_vocab * d_model) as u64;
    assert_eq!(3 * (double.token_macs(2048) - head), decoder.token_macs(2048) - head);
}

/// The numbers that the accounting says are kept for the backward of a token, and no others but those of the layers' ends.
#[test]
fn layers_save_what_the_accounting_says() {
    let model = double(1, false, DType::F32);
    let (rows, time) = (2, 40);
    let saved = |f: &dyn Fn(&Tape)| {
        let tape = Tape::new();
        f(&tape);
        tape.saved_bytes()
    };
    let input = |tape: &Tape| ops::mul_scalar(&tape.leaf(Tensor::zeros(DType::F32, &[rows, time, 12])), 1.0);
    let numbers = model.config.saved_numbers();
    let context = saved(&|tape| drop(model.context[0].forward(tape, &input(tape), None)));
    let params = model.context[0].param_count();
    assert_eq!(context, 4 * (rows * time * numbers[0] as usize + params));
    let blocks = BlockStarts::new(vec![vec![7, 30]], time).unwrap();
    let generation = saved(&|tape| drop(model.generation[0].forward(tape, &input(tape), &input(tape), &blocks)));
    // The latents are kept once for all layers.
    let latents = rows * time * 12;
    assert_eq!(generation, 4 * (rows * time * numbers[2] as usize + latents + params));
}
