use super::*;
use crate::testing::{Chain, difference};
use kumiki_autograd::Tape;
use kumiki_tensor::Rng;
use proptest::prelude::*;

/// The loss of every row by plain loops.
pub(crate) fn naive(logits: &[f64], n_vocab: usize, targets: &[i64], ignore: i64) -> Vec<f64> {
    let loss = |(r, &t): (usize, &i64)| {
        if t == ignore {
            return 0.0;
        }
        let row = &logits[r * n_vocab..][..n_vocab];
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln() - row[t as usize]
    };
    targets.iter().enumerate().map(loss).collect()
}

pub(crate) fn mean(losses: &[f64], targets: &[i64], ignore: i64) -> f64 {
    losses.iter().sum::<f64>() / targets.iter().filter(|&&t| t != ignore).count().max(1) as f64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn the_chain_holds(seed in any::<u64>(), b in 0usize..4, t in 0usize..4,
                       v in prop_oneof![1usize..20, 60usize..70], picks in proptest::collection::vec(any::<u32>(), 16),
                       ignore in -2i64..3, reduction in 0..3) {
        let ids: Vec<i64> = picks[..b * t]
            .iter()
            .map(|&p| if p % 4 == 0 { ignore } else { i64::from(p) % v as i64 })
            .collect();
        let targets = Tensor::from_slice(&ids, &[b, t]);
        let mut chain = Chain::new("cross_entropy", seed, &[("logits", &[b, t, v])]);
        chain.bf16_tolerance = None; // losses of bf16 logits are f32: a test of their own below
        let losses = |x: &[Vec<f64>]| naive(&x[0], v, &ids, ignore);
        match reduction {
            0 => chain.run(|_, x| cross_entropy(&x[0], &targets, ignore), |x| vec![mean(&losses(x), &ids, ignore)]),
            1 => chain.run(|_, x| cross_entropy_sum(&x[0], &targets, ignore), |x| vec![losses(x).iter().sum()]),
            _ => chain.run(|_, x| cross_entropy_rows(&x[0], &targets, ignore), losses),
        }
    }
}

#[test]
fn long_rows_and_many_rows() {
    for (rows, v) in [(3, 9001), (1500, 5), (40, 4096)] {
        let ids: Vec<i64> = (0..rows).map(|i| if i % 7 == 3 { -1 } else { (i * 37 % v) as i64 }).collect();
        let targets = Tensor::from_slice(&ids, &[rows]);
        let mut chain = Chain::new("cross_entropy", 5, &[("logits", &[rows, v])]).map_input(0, |x| 5.0 * x);
        (chain.differences, chain.bf16_tolerance) = (false, None);
        chain.run(|_, x| cross_entropy(&x[0], &targets, -1), |x| vec![mean(&naive(&x[0], v, &ids, -1), &ids, -1)]);
    }
}

#[test]
fn bf16_logits_give_an_f32_loss() {
    let logits = Rng::new(8).normal(DType::BF16, &[6, 50], 0.0, 3.0);
    let targets = Tensor::from_slice(&[1i64, 0, 49, -1, 7, 7], &[6]);
    let run = |logits: Tensor| {
        let tape = Tape::new();
        let x = tape.leaf(logits);
        let loss = cross_entropy(&x, &targets, -1);
        let dtype = loss.dtype();
        (dtype, loss.item(), tape.backward(&loss).get(&x).unwrap().clone())
    };
    let ((dtype, loss, dx), (_, exact, dexact)) = (run(logits.clone()), run(logits.cast(DType::F64)));
    assert_eq!((dtype, dx.dtype()), (DType::F32, DType::BF16));
    assert!((loss - exact).abs() < 1e-6 * exact);
    assert_eq!(difference(&dx.to_f64_vec(), &dexact.to_f64_vec(), 5e-3), None);
}

/// Loss and gradient for targets over three classes.
fn three_classes(ids: &[i64], ignore: i64) -> (f64, Vec<f64>) {
    let tape = Tape::new();
    let x = tape.leaf(Tensor::from_fn::<f32>(&[ids.len(), 3], |i| i as f32 * 0.5));
    let loss = cross_entropy(&x, &Tensor::from_slice(ids, &[ids.len()]), ignore);
    let value = loss.item();
    (value, tape.backward(&loss).get(&x).unwrap().to_f64_vec())
}

#[test]
fn case_18_ignored_targets() {
    assert_eq!(three_classes(&[-1, -1], -1), (0.0, vec![0.0; 6]));
    let (loss, dx) = three_classes(&[255, 1, 255], 255);
    let (alone, dalone) = three_classes(&[1], 255);
    // Rows are 0, .5, 1 apart from a shift.
    assert!((loss - alone).abs() < 1e-6);
    assert!(dx[..3].iter().chain(&dx[6..]).all(|&g| g == 0.0), "{dx:?}");
    assert_eq!(difference(&dx[3..6], &dalone, 1e-6), None);
    // What an ignored row holds is of no consequence.
    let tape = Tape::new();
    let x = tape.leaf(Tensor::from_slice(&[f32::NAN, 1.0, f32::INFINITY, 0.0, 0.0, 0.0], &[2, 3]));
    let loss = cross_entropy(&x, &Tensor::from_slice(&[-1i64, 0], &[2]), -1);
    assert!((loss.item() - 3f64.ln()).abs() < 1e-6);
    assert!(tape.backward(&loss).get(&x).unwrap().to_f64_vec()[..3].iter().all(|&g| g == 0.0));
}

#[test]
#[should_panic(expected = "cross_entropy: target -4 at row 1 of [2] is neither in 0..V=3 nor ignore_index 255")]
fn case_18_a_bad_target_is_named() {
    three_classes(&[255, -4], 255);
}

#[test]
#[should_panic(expected = "cross_entropy: target 3 at row 0 of [1] is neither in 0..V=3 nor ignore_index -1")]
fn case_18_a_target_past_the_end_is_named() {
    three_classes(&[3], -1);
}

#[test]
fn case_19_sums_weight_micro_batches_by_tokens() {
    // Logits [0, ln(e^l - 1)] with target 0 have loss l.
    let batch = |rows: usize, loss: f64| {
        let other = (loss.exp() - 1.0).ln();
        let x = Tensor::from_fn::<f64>(&[rows, 2], |i| if i % 2 == 0 { 0.0 } else { other });
        (x, Tensor::zeros(DType::I64, &[rows]))
    };
    let batches = [batch(10, 1.0), batch(100, 2.0)];
    let tokens: usize = batches.iter().map(|(_, t)| counted_targets(t, -1)).sum();
    let mut total = 0.0;
    let mut grads = vec![];
    for (x, targets) in &batches {
        let tape = Tape::new();
        let x = tape.leaf(x.clone());
        let loss = cross_entropy_sum(&x, targets, -1);
        total += loss.item() / tokens as f64;
        let weight = Tensor::scalar(DType::F64, 1.0 / tokens as f64);
        grads.extend(tape.backward_from(&[(&loss, weight)]).get(&x).unwrap().to_f64_vec());
    }
    assert!((total - 210.0 / 110.0).abs() < 1e-12);

    let tape = Tape::new();
    let x = tape.leaf(kumiki_tensor::concat(&[&batches[0].0, &batches[1].0], 0));
    let loss = cross_entropy(&x, &Tensor::zeros(DType::I64, &[110]), -1);
    assert!((loss.item() - total).abs() < 1e-12);
    assert_eq!(difference(&grads, &tape.backward(&loss).get(&x).unwrap().to_f64_vec(), 1e-12), None);
}

#[test]
fn huge_logits_stay_finite() {
    for dtype in [DType::F32, DType::F64] {
        let values = [1e4, 1e4, f64::NEG_INFINITY, -1e4, -1e4, -1e4 - 1.0, 0.0, f64::NEG_INFINITY, f64::NEG_INFINITY];
        let tape = Tape::new();
        let x = tape.leaf(Tensor::from_slice(&values, &[3, 3]).cast(dtype));
        let rows = cross_entropy_rows(&x, &Tensor::from_slice(&[1i64, 2, 0], &[3]), -1);
        let expected = [2f64.ln(), (2.0 + (-1f64).exp()).ln() + 1.0, 0.0];
        assert_eq!(difference(&rows.value().to_f64_vec(), &expected, 1e-6), None);
        let dx = tape.backward_from(&[(&rows, Tensor::ones(dtype, &[3]))]).get(&x).unwrap().to_f64_vec();
        let p = 1.0 / (2.0 + (-1f64).exp());
        assert_eq!(difference(&dx, &[0.5, -0.5, 0.0, p, p, -2.0 * p, 0.0, 0.0, 0.0], 1e-6), None);
    }
}

#[test]
fn empty_axes() {
    for (n, v) in [(3, 0), (0, 5), (0, 0)] {
        let tape = Tape::new();
        let x = tape.leaf(Tensor::zeros(DType::F32, &[n, v]));
        let loss = cross_entropy(&x, &Tensor::full(DType::I64, &[n], -1.0), -1);
        assert_eq!(loss.item(), 0.0);
        assert_eq!(tape.backward(&loss).get(&x).unwrap().shape(), [n, v]);
    }
}

#[test]
fn a_maximum_in_a_later_block_rescales() {
    // Ascending logits: every block brings a new maximum.
    let v = 3 * BLOCK + 5;
    let x = Tensor::from_fn::<f32>(&[1, v], |i| i as f32 * 0.01);
    let loss = cross_entropy(&Var::constant(x.clone()), &Tensor::zeros(DType::I64, &[1]), -1).item();
    let exact = naive(&x.to_f64_vec(), v, &[0], -1)[0];
    assert!((loss - exact).abs() < 1e-6 * exact, "{loss} {exact}");
}

#[test]
#[should_panic(expected = "cross_entropy: targets must be i64 [2], got i64 [3] (V=5)")]
fn shapes_are_named() {
    cross_entropy(&Var::constant(Tensor::zeros(DType::F32, &[2, 5])), &Tensor::zeros(DType::I64, &[3]), -1);
}
