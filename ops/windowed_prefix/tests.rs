use super::*;
use crate::testing::{Chain, difference};
use kumiki_autograd::Tape;
use kumiki_tensor::{Rng, concat, threads::with_threads};
use proptest::prelude::*;

/// As the mathematics say, pair by pair.
fn naive([b, t, h, k, m, g]: [usize; 6], window: usize, x: &[Vec<f64>]) -> Vec<f64> {
    let row = |x: &[f64], width: usize, b: usize, i: usize, head: usize| -> Vec<f64> {
        x[((b * t + i) * h + head) * width..][..width].to_vec()
    };
    let unit = |x: Vec<f64>| -> Vec<f64> {
        let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-12).sqrt();
        x.iter().map(|x| x / norm).collect()
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut out = vec![];
    for batch in 0..b {
        for i in 0..t {
            for head in 0..h {
                let (mut sums, mut den) = (vec![0.0; g], 0.0);
                let (q, phi_q) = (unit(row(&x[0], k, batch, i, head)), row(&x[2], m, batch, i, head));
                for j in 0..=i {
                    let w = if i - j < window {
                        (x[5][head] * (dot(&q, &unit(row(&x[1], k, batch, j, head))) - 1.0)).exp()
                    } else {
                        dot(&phi_q, &row(&x[3], m, batch, j, head))
                    };
                    den += w;
                    let gates = row(&x[4], g, batch, j, head);
                    sums.iter_mut().zip(gates).for_each(|(s, gate)| *s += w * gate);
                }
                out.extend(sums.iter().map(|s| s / den));
            }
        }
    }
    if let Some(v) = x.get(6) {
        out.iter_mut().zip(v).for_each(|(y, v)| *y *= v);
    }
    out
}

fn chain(dims: [usize; 6], window: usize, gated: Option<bool>, seed: u64, differences: bool) {
    let [b, t, h, k, m, g] = dims;
    let v: &[usize] = if gated == Some(true) { &[b, t, h * g] } else { &[b, t, h, g] };
    let shapes: [(&str, &[usize]); 7] = [
        ("q", &[b, t, h, k]),
        ("k", &[b, t, h, k]),
        ("phi_q", &[b, t, h, m]),
        ("phi_k", &[b, t, h, m]),
        ("g", &[b, t, h, g]),
        ("tau", &[h]),
        ("v", v),
    ];
    let used = if gated.is_some() { 7 } else { 6 };
    let away = |x: f64| x + 0.5_f64.copysign(x);
    let mut chain = Chain::new("windowed_prefix", seed, &shapes[..used])
        .map_input(0, away)
        .map_input(1, away)
        .map_input(2, |x| (0.5 * x).exp())
        .map_input(3, |x| (0.5 * x).exp())
        .map_input(5, |x| (0.3 * x + 1.0).exp());
    chain.differences = differences;
    chain.f32_tolerance = 2e-4; // that of the golden files: gradients are at times small differences of large terms
    chain.run(
        |_, x| {
            let all = operands(x, window);
            x.get(6).map_or_else(|| windowed_prefix(all), |v| windowed_prefix_mul(all, v))
        },
        |x| naive(dims, window, x),
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn small_shapes_pass_the_chain(
        (b, t, h) in (1usize..3, 2usize..14, 1usize..3), (k, m, g) in (2usize..8, 1usize..8, 1usize..10),
        window in 1usize..16, gated in any::<Option<bool>>(), seed in any::<u64>(),
    ) {
        chain([b, t, h, k, m, g], window, gated, seed, true);
    }
}

/// Times around chunks and windows: 1, W-1, W, W+1, 2W+1, primes; windows below, at and above a chunk.
#[test]
fn times_around_the_chunks_and_the_window_pass_the_chain() {
    for (seed, window) in [1, 2, 31, 63, 64, 65, 100, 129].into_iter().enumerate() {
        for time in [1, window - 1, window, window + 1, 2 * window + 1, 67, 131, 257] {
            if time > 0 {
                chain([1, time, 2, 4, 5, 3], window, Some(false), seed as u64, false);
            }
        }
    }
    chain([2, 200, 1, 17, 33, 64], 40, None, 1, false);
    chain([1, 193, 2, 8, 16, 239], 32, Some(true), 2, false);
}

fn random(seed: u64, dtype: DType, [b, t, h, k, m, g]: [usize; 6]) -> Vec<Tensor> {
    let mut rng = Rng::new(seed);
    let mut normal = |width: usize| rng.normal(dtype, &[b, t, h, width], 0.0, 1.0);
    let (q, key, phi_q, phi_k, gates, v) = (normal(k), normal(k), normal(m), normal(m), normal(g), normal(g));
    let positive = |x: Tensor| crate::exp(&Var::constant(x)).into_value();
    vec![q, key, positive(phi_q), positive(phi_k), gates, Tensor::full(dtype, &[h], 6.0), v]
}

fn constants(x: &[Tensor]) -> Vec<Var> {
    x.iter().cloned().map(Var::constant).collect()
}

#[test]
fn a_window_over_everything_is_gate_aggregate() {
    let dims = [2, 150, 2, 8, 6, 5];
    let x = random(1, DType::F64, dims);
    let run = |wide: bool| {
        let tape = Tape::new();
        let x: Vec<Var> = x.iter().map(|x| tape.leaf(x.clone())).collect();
        let y = match wide {
            true => windowed_prefix(operands(&x, 150)),
            false => crate::gate_aggregate(&x[0], &x[1], &x[4], &x[5]),
        };
        let grads = tape.backward_from(&[(&y, Rng::new(2).normal(DType::F64, y.shape(), 0.0, 1.0))]);
        let of = |i: usize| grads.get(&x[i]).unwrap().to_f64_vec();
        [y.value().to_f64_vec(), of(0), of(1), of(4), of(5)]
    };
    for (a, b) in run(true).iter().zip(&run(false)) {
        assert_eq!(difference(a, b, 1e-12), None);
    }
}

#[test]
fn the_stream_equals_the_whole_at_every_split() {
    for (window, dims) in
        [(usize::MAX, [1, 7, 1, 4, 3, 2]), (1, [2, 9, 2, 4, 3, 2]), (5, [1, 23, 2, 4, 3, 8]), (40, [1, 30, 1, 3, 2, 4])]
    {
        let x = random(3, DType::F64, dims);
        let whole = windowed_prefix(operands(&constants(&x), window)).into_value().to_f64_vec();
        for split in 0..=dims[1] {
            let mut state = WindowedPrefixState::new(window);
            let mut part = |from: usize, len: usize| {
                let mut part: Vec<Tensor> = x[..5].iter().map(|x| x.narrow(1, from, len)).collect();
                part.push(x[5].clone());
                state.push(operands(&constants(&part), window))
            };
            let mut parts = vec![part(0, split)];
            parts.extend((split..dims[1]).map(|t| part(t, 1)));
            let streamed = concat(&parts.iter().collect::<Vec<_>>(), 1).to_f64_vec();
            assert_eq!(difference(&streamed, &whole, 1e-12), None, "window {window}, split at {split}");
        }
    }
}

#[test]
fn the_state_stops_growing_once_the_window_is_full() {
    let mut state = WindowedPrefixState::new(4);
    let x = constants(&random(4, DType::F32, [1, 1, 2, 4, 8, 6]));
    assert!(state.is_empty() && state.byte_len() == 0);
    (0..4).for_each(|_| drop(state.push(operands(&x, 4))));
    let full = state.byte_len();
    (0..50).for_each(|_| drop(state.push(operands(&x, 4))));
    assert_eq!((state.byte_len(), state.len()), (full, 54));
    assert_eq!(full, 2 * 4 * (4 * (4 + 8 + 6 + 1) + 8 * 7));
}

#[test]
fn what_comes_later_does_not_matter() {
    let x = random(5, DType::F64, [1, 140, 1, 4, 3, 2]);
    let before = windowed_prefix(operands(&constants(&x), 20)).into_value();
    for changed in [0, 63, 64, 100, 139] {
        let mut x = x.clone();
        for x in &mut x[..5] {
            let width = x.dim(3);
            x.make_mut::<f64>()[changed * width..].iter_mut().for_each(|x| *x += 3.0);
        }
        let after = windowed_prefix(operands(&constants(&x), 20)).into_value();
        let (a, b) = (before.narrow(1, 0, changed), after.narrow(1, 0, changed));
        assert_eq!(a.to_f64_vec(), b.to_f64_vec(), "a change at {changed} is seen before");
        assert_ne!(before.select(1, changed).to_f64_vec(), after.select(1, changed).to_f64_vec());
    }
}

#[test]
fn large_tau_stays_finite_and_right() {
    for tau in [29.0, 31.0, 90.0, 250.0] {
        let mut x = random(6, DType::F32, [1, 80, 1, 4, 3, 2]);
        x[5] = Tensor::full(DType::F32, &[1], tau);
        // As feature maps do: of the order of exp(-tau/2) each.
        for phi in [2, 3] {
            let small = (-tau / 2.0).max(-30.0).exp() as f32;
            x[phi].make_mut::<f32>().iter_mut().for_each(|x| *x *= small);
        }
        let run = |dtype: DType| {
            let tape = Tape::new();
            let x: Vec<Var> = x.iter().map(|x| tape.leaf(x.cast(dtype))).collect();
            let y = windowed_prefix(operands(&x, 7));
            let grads = tape.backward_from(&[(&y, Tensor::ones(dtype, y.shape()))]);
            let mut all = y.value().to_f64_vec();
            all.extend((0..6).flat_map(|i| grads.get(&x[i]).unwrap().to_f64_vec()));
            all
        };
        let (single, exact) = (run(DType::F32), run(DType::F64));
        assert!(exact.iter().all(|x| x.is_finite()), "tau {tau}");
        assert_eq!(difference(&single, &exact, 1e-3), None, "tau {tau}");
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let x = random(7, DType::F32, [2, 200, 3, 8, 16, 24]);
    let run = |threads: usize| {
        with_threads(threads, || {
            let tape = Tape::new();
            let x: Vec<Var> = x.iter().map(|x| tape.leaf(x.clone())).collect();
            let y = windowed_prefix_mul(operands(&x, 30), &x[6]);
            let grads = tape.backward_from(&[(&y, Tensor::ones(DType::F32, y.shape()))]);
            let mut all = y.value().to_f64_vec();
            all.extend(x.iter().flat_map(|x| grads.get(x).unwrap().to_f64_vec()));
            all
        })
    };
    let one = run(1);
    assert!(one == run(2) && one == run(8));
}

#[test]
fn empty_axes() {
    for dims in [[0, 5, 2, 3, 2, 2], [1, 0, 2, 3, 2, 2], [1, 5, 0, 3, 2, 2], [1, 5, 2, 3, 2, 0], [1, 70, 1, 3, 0, 2]] {
        let tape = Tape::new();
        let x: Vec<Var> = random(8, DType::F32, dims).into_iter().map(|x| tape.leaf(x)).collect();
        let y = windowed_prefix_mul(operands(&x, 3), &x[6]);
        let grads = tape.backward_from(&[(&y, Tensor::ones(DType::F32, y.shape()))]);
        assert!(x.iter().all(|x| grads.get(x).unwrap().to_f64_vec().iter().all(|g| g.is_finite())), "{dims:?}");
    }
}

#[test]
fn what_is_saved_is_linear_in_time() {
    let tape = Tape::new();
    let x: Vec<Var> = random(9, DType::F32, [1, 100, 2, 4, 8, 6]).into_iter().map(|x| tape.leaf(x)).collect();
    windowed_prefix_mul(operands(&x, 10), &x[6]);
    let summary = tape.summary().to_string();
    // q, k, phi_q, phi_k, g, v, gate; tau; den.
    let bytes = 4 * (100 * 2 * (4 + 4 + 8 + 8 + 6 + 6 + 6) + 2 + 2 * 100);
    assert!(summary.contains(&bytes.to_string()), "{bytes} in {summary}");
}

fn panics_with(part: &str, f: impl FnOnce() + std::panic::UnwindSafe) {
    let message = *std::panic::catch_unwind(f).unwrap_err().downcast::<String>().unwrap();
    assert!(message.contains(part), "{message}");
}

#[test]
fn misuse_is_named() {
    let x = random(10, DType::F32, [1, 4, 2, 3, 2, 2]);
    let call = |change: fn(&mut Vec<Tensor>), window: usize| {
        let mut x = x.clone();
        change(&mut x);
        move || drop(windowed_prefix(operands(&constants(&x), window)))
    };
    panics_with(
        "k must be [1, 4, 2, 3] of f32, got [1, 4, 2, 5]",
        call(|x| x[1] = Tensor::zeros(DType::F32, &[1, 4, 2, 5]), 2),
    );
    panics_with("phi_k must be [1, 4, 2, 2]", call(|x| x[3] = Tensor::zeros(DType::F32, &[1, 4, 2, 3]), 2));
    panics_with("g must be", call(|x| x[4] = Tensor::zeros(DType::F64, &[1, 4, 2, 2]), 2));
    panics_with("tau must be [H=2]", call(|x| x[5] = Tensor::zeros(DType::F32, &[3]), 2));
    panics_with("the window must be at least 1", call(|_| (), 0));
}
