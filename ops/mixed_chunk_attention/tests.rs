use super::*;
use crate::testing::{Chain, difference};
use kumiki_autograd::Tape;
use kumiki_tensor::{Rng, concat, threads::with_threads};
use proptest::prelude::*;

/// As the mathematics say, pair by pair.
fn naive([b, t, s, r, e]: [usize; 5], chunk: usize, x: &[Vec<f64>]) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut out = vec![0.0; b * t * e];
    for (batch, i) in (0..b * t).map(|x| (x / t, x % t)) {
        let row = |x: &'_ [f64], i: usize, width: usize| x[(batch * t + i) * width..][..width].to_vec();
        for j in 0..=i {
            let weight = if i / chunk == j / chunk {
                let score = dot(&row(&x[0], i, s), &row(&x[1], j, s)) / (s as f64).sqrt();
                score.max(0.0).powi(2) / chunk as f64
            } else {
                dot(&row(&x[2], i, r), &row(&x[3], j, r)) / (i / chunk * chunk) as f64
            };
            for (y, v) in out[(batch * t + i) * e..][..e].iter_mut().zip(row(&x[4], j, e)) {
                *y += weight * v;
            }
        }
    }
    if let Some(u) = x.get(5) {
        out.iter_mut().zip(u).for_each(|(y, u)| *y *= u);
    }
    out
}

fn chain(dims: [usize; 5], chunk: usize, gated: bool, seed: u64, differences: bool) {
    let shapes = shapes(dims);
    let shapes: Vec<(&str, &[usize])> = shapes.iter().map(|(n, s)| (*n, &s[..])).collect();
    let mut chain = Chain::new("mixed_chunk_attention", seed, &shapes[..if gated { 6 } else { 5 }]);
    chain.differences = differences;
    if let (true, [q, k, ..]) = (differences, &mut chain.inputs[..]) {
        clear_scores(&mut q.1, &mut k.1);
    }
    chain.f32_tolerance = 1e-4; // products of four factors, summed over keys
    chain.run(
        |_, x| {
            let all = operands(x, chunk);
            x.get(5).map_or_else(|| mixed_chunk_attention(all), |u| mixed_chunk_attention_mul(all, u))
        },
        |x| naive(dims, chunk, x),
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn small_shapes_pass_the_chain(
        (b, t, chunk) in (1usize..3, 1usize..14, 1usize..16), (s, r, e) in (1usize..8, 1usize..8, 1usize..10),
        gated: bool, seed in any::<u64>(),
    ) {
        // With one chunk no earlier one exists, and its operands' gradients are 0.
        prop_assume!(t > chunk);
        chain([b, t, s, r, e], chunk, gated, seed, true);
    }
}

/// Chunks below, at and above a tile; times around chunks; blocks of values.
#[test]
fn times_around_the_chunks_pass_the_chain() {
    for (seed, chunk) in [1, 2, 31, 95, 96, 97, 200].into_iter().enumerate() {
        for time in [chunk - 1, chunk, chunk + 1, 2 * chunk + 1, 67, 131] {
            if time > 0 {
                chain([1, time, 4, 3, 5], chunk, true, seed as u64, false);
            }
        }
    }
    chain([2, 130, 17, 33, 64], 40, false, 1, false);
    chain([1, 70, 8, 16, 1040], 16, true, 2, false);
    chain([1, 20, 8, 16, 521], 8, true, 3, false);
}

fn random(seed: u64, dtype: DType, dims: [usize; 5]) -> Vec<Tensor> {
    let mut rng = Rng::new(seed);
    shapes(dims).iter().map(|(_, shape)| rng.normal(dtype, shape, 0.0, 1.0)).collect()
}

fn constants(x: &[Tensor]) -> Vec<Var> {
    x.iter().cloned().map(Var::constant).collect()
}

#[test]
fn a_stream_equals_the_whole_wherever_it_is_cut() {
    let (time, chunk) = (23, 5);
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
        let x = random(1, dtype, [2, time, 4, 3, 6]);
        let all = constants(&x);
        let whole = mixed_chunk_attention(operands(&all, chunk)).into_value();
        let mut sizes = vec![];
        for cut in 0..=time {
            let mut state = MixedChunkState::new(chunk);
            assert!(state.is_empty() && state.byte_len() == 0);
            let mut parts = vec![];
            let pieces = [(0, cut), (cut, time - cut)].into_iter().filter(|p| p.1 > 0);
            // All at once, then one by one.
            for (start, len) in pieces.flat_map(|(start, len)| match start {
                0 => vec![(start, len)],
                _ => (start..start + len).map(|t| (t, 1)).collect(),
            }) {
                let part: Vec<Tensor> = x.iter().map(|x| x.narrow(1, start, len)).collect();
                parts.push(state.push(operands(&constants(&part), chunk)));
            }
            let parts: Vec<&Tensor> = parts.iter().collect();
            let got = concat(&parts, 1).to_f64_vec();
            assert_eq!(difference(&got, &whole.to_f64_vec(), tolerance), None, "cut at {cut}");
            assert_eq!(state.len(), time);
            sizes.push(state.byte_len());
        }
        let size = if dtype == DType::F64 { 8 } else { 4 };
        // 23 tokens: 3 in the current chunk; two sums.
        assert!(sizes.iter().all(|&bytes| bytes == 2 * (3 * (4 + 6) + 2 * 3 * 6) * size), "{sizes:?}");
    }
}

#[test]
fn one_chunk_over_everything_is_gau_attention_with_another_divisor() {
    let (time, width) = (50, 4);
    let x = constants(&random(3, DType::F64, [1, time, width, 2, 3]));
    let chunked = mixed_chunk_attention(operands(&x, time)).value().to_f64_vec();
    let gau = crate::gau_attention(&x[0], &x[1], &x[4]).value().to_f64_vec();
    for (i, (a, b)) in chunked.iter().zip(&gau).enumerate() {
        assert!((a * time as f64 - b * (i / 3 + 1) as f64).abs() < 1e-10, "{i}");
    }
    // Any longer chunk has the same pairs; the largest that a file can ask for does not overflow.
    let longest = mixed_chunk_attention(operands(&x, usize::MAX)).value().to_f64_vec();
    assert!(longest.iter().all(|x| x.is_finite()));
}

#[test]
fn any_number_of_threads_gives_the_same_bits_and_no_tokens_give_none() {
    let run = |threads| {
        with_threads(threads, || {
            let tape = Tape::new();
            let x: Vec<Var> = random(4, DType::F32, [3, 90, 16, 8, 640]).into_iter().map(|x| tape.leaf(x)).collect();
            let y = mixed_chunk_attention_mul(operands(&x, 32), &x[5]);
            let grads = tape.backward(&crate::sum_all(&y));
            x.iter().map(|x| grads.get(x).unwrap().clone()).collect::<Vec<_>>()
        })
    };
    for (a, b) in run(1).iter().zip(run(3)) {
        assert!(a.to_f64_vec() == b.to_f64_vec());
    }
    for dims in [[0, 3, 2, 2, 2], [1, 0, 2, 2, 2], [1, 3, 2, 2, 0]] {
        let x = constants(&random(5, DType::F32, dims));
        assert!(mixed_chunk_attention_mul(operands(&x, 2), &x[5]).value().is_empty());
    }
}

#[test]
#[should_panic(expected = "a chunk must have at least 1 token, got 0")]
fn a_chunk_of_nothing_is_refused() {
    mixed_chunk_attention(operands(&constants(&random(1, DType::F32, [1, 2, 2, 2, 2])), 0));
}

#[test]
#[should_panic(
    expected = "mixed_chunk_attention: linear_k must be [1, 2, 3] of f32, got [1, 2, 4] of f32 (q: [1, 2, 5])"
)]
fn shapes_that_do_not_fit_are_named() {
    let x = |width| Var::constant(Tensor::zeros(DType::F32, &[1, 2, width]));
    let (q, l, m, v) = (x(5), x(3), x(4), x(6));
    mixed_chunk_attention(MixedChunk { q: &q, k: &q, linear_q: &l, linear_k: &m, v: &v, chunk: 2 });
}
