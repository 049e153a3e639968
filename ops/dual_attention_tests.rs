//! Against plain loops, causal attention, and two attentions merged by their log-sum-exps.

use kumiki_autograd::Tape;
use kumiki_tensor::{Rng, threads::with_threads};
use proptest::prelude::*;

use super::*;
use crate::attention_with_lse::SeenKeys;
use crate::causal_attention;
use crate::dual_attention_merged::dual_attention_merged;
use crate::simd::{Level, with_level};
use crate::testing::{Chain, difference};

/// Plain loops: `sees(b, i, j)` for own keys, then for context keys.
fn naive(
    [batch, tq, ts, tc, heads, width, values]: [usize; 7],
    x: &[Vec<f64>],
    sees: [&dyn Fn(usize, usize, usize) -> bool; 2],
) -> Vec<f64> {
    let mut out = vec![0.0; batch * tq * heads * values];
    for (b, i, h) in (0..batch * tq * heads).map(|n| (n / heads / tq, n / heads % tq, n % heads)) {
        let q = &x[0][((b * tq + i) * heads + h) * width..][..width];
        let mut found: Vec<(f64, Vec<f64>)> = Vec::new();
        for (set, keys) in [ts, tc].into_iter().enumerate() {
            for j in (0..keys).filter(|&j| sees[set](b, i, j)) {
                let row = (b * keys + j) * heads + h;
                let k = &x[1 + 2 * set][row * width..][..width];
                let dot: f64 = q.iter().zip(k).map(|(a, b)| a * b).sum();
                found.push((dot / (width as f64).sqrt(), x[2 + 2 * set][row * values..][..values].to_vec()));
            }
        }
        let greatest = found.iter().fold(f64::NEG_INFINITY, |a, (s, _)| a.max(*s));
        let sum: f64 = found.iter().map(|(s, _)| (s - greatest).exp()).sum();
        for (s, v) in found {
            let weight = (s - greatest).exp() / sum;
            let y = &mut out[((b * tq + i) * heads + h) * values..][..values];
            y.iter_mut().zip(v).for_each(|(y, v)| *y += weight * v);
        }
    }
    out
}

fn chain(dims: [usize; 7], seed: u64, differences: bool) -> Chain<'static> {
    let [batch, tq, ts, tc, heads, width, values] = dims;
    let shape = |t, width| vec![batch, t, heads, width];
    let shapes = [shape(tq, width), shape(ts, width), shape(ts, values), shape(tc, width), shape(tc, values)];
    let names = ["q", "k_self", "v_self", "k_context", "v_context"];
    let inputs: Vec<(&str, &[usize])> = names.into_iter().zip(shapes.iter().map(Vec::as_slice)).collect();
    let mut chain = Chain::new("dual_attention", seed, &inputs);
    (chain.differences, chain.f32_tolerance) = (differences, 2e-4);
    chain
}

fn in_blocks([batch, t, heads, width, values]: [usize; 5], blocks: &BlockStarts, seed: u64, differences: bool) {
    let dims = [batch, t, t, t, heads, width, values];
    chain(dims, seed, differences).run(
        |_, x| dual_attention(operands(x), DualSees::Blocks(blocks)),
        |x| {
            let own = |b, i, j| j <= i && blocks.start_of(b, i) <= j;
            let context = |b, i, j| j < blocks.start_of(b, i);
            naive(dims, x, [&own, &context])
        },
    );
}

/// Starts drawn by a bit for every position.
fn blocks(batch: usize, t: usize, seed: u64, one_in: u64) -> BlockStarts {
    let mut rng = Rng::new(seed);
    let mut row = || (1..t).filter(|_| rng.next_u64().is_multiple_of(one_in)).collect();
    BlockStarts::new((0..batch).map(|_| row()).collect(), t).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn small_sequences_pass_the_chain(
        (batch, t, heads) in (1usize..3, 2usize..12, 1usize..3), (width, values) in (1usize..6, 1usize..6),
        one_in in 1u64..5, seed in any::<u64>(),
    ) {
        in_blocks([batch, t, heads, width, values], &blocks(batch, t, seed, one_in), seed, true);
    }

    #[test]
    fn open_blocks_pass_the_chain(
        (batch, tq, more, tc) in (1usize..3, 1usize..5, 0usize..4, 0usize..8), heads in 1usize..3,
        masked in any::<bool>(), seed in any::<u64>(),
    ) {
        let ts = tq + more;
        prop_assume!(ts + tc > 2);
        let mut rng = Rng::new(seed);
        let mut mask = |keys: usize, own: bool| {
            // A query's own key is always there.
            Tensor::from_fn::<i64>(&[batch, keys], |i| {
                i64::from(!rng.next_u64().is_multiple_of(3) || (own && i % keys >= keys - tq) || !masked)
            })
        };
        let (own, context) = (mask(ts, true), mask(tc, false));
        let seen = [&own, &context].map(|m| m.to_f64_vec().iter().map(|&x| x != 0.0).collect::<Vec<_>>());
        let dims = [batch, tq, ts, tc, heads, 4, 3];
        let sees = DualSees::OpenBlock { self_mask: Some(&own), context_mask: Some(&context) };
        let mut chain = chain(dims, seed, true);
        // An operand of no keys has nothing to be relative to.
        chain.bf16_tolerance = chain.bf16_tolerance.filter(|_| tc > 0);
        chain.run(
            |_, x| dual_attention(operands(x), sees),
            |x| naive(dims, x, [&|b, i, j| j <= i + more && seen[0][b * ts + j], &|b, _, j| seen[1][b * tc + j]]),
        );
    }
}

#[test]
fn blocks_around_the_tiles_pass_the_chain() {
    for (seed, (t, starts)) in [
        (193, vec![vec![96], vec![95, 97]]),
        (200, vec![vec![1, 2, 3, 150, 199], vec![]]),
        (300, vec![vec![97, 194, 291], vec![100, 101]]),
    ]
    .into_iter()
    .enumerate()
    {
        in_blocks([2, t, 1, 8, 5], &BlockStarts::new(starts, t).unwrap(), seed as u64, false);
    }
}

/// The first pair further apart than 1e-10 of its size, or of 1: where a query sees one key, some gradients are nothing but
/// rounding.
fn farthest(a: &[Vec<f64>], b: &[Vec<f64>]) -> Option<(f64, f64)> {
    assert_eq!(a.iter().map(Vec::len).collect::<Vec<_>>(), b.iter().map(Vec::len).collect::<Vec<_>>());
    let near = |(x, y): &(f64, f64)| (x - y).abs() <= 1e-10 * y.abs().max(1.0);
    a.iter().flatten().copied().zip(b.iter().flatten().copied()).find(|pair| !near(pair))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Blocks of length 1 where `one_in` is 1, hardly any where it is large; other rows have others.
    #[test]
    fn fused_equals_merged(
        (batch, heads, t) in (1usize..4, 1usize..3, prop_oneof![1usize..12, 90usize..200]),
        (width, values) in (1usize..9, 1usize..9), one_in in prop_oneof![1u64..4, 20u64..400], seed in any::<u64>(),
    ) {
        let blocks = blocks(batch, t, seed, one_in);
        let mut rng = Rng::new(seed);
        let x: Vec<Tensor> = [width, width, values, width, values]
            .map(|width| rng.normal(DType::F64, &[batch, t, heads, width], 0.0, 1.0)).into();
        let fused = run(&x, |x| dual_attention(operands(x), DualSees::Blocks(&blocks)));
        let context = SeenKeys::masked([batch, t, t], |b, i, j| j < blocks.start_of(b, i));
        for context in [SeenKeys::EarlierBlocks(blocks.clone()), context] {
            let own = SeenKeys::OwnBlock(blocks.clone());
            let merged = run(&x, |x| dual_attention_merged(operands(x), [&own, &context]));
            prop_assert_eq!(farthest(&fused, &merged), None);
        }
    }
}

#[test]
fn fused_equals_merged_in_one_block_and_in_blocks_of_one() {
    for t in [1, 2, 97] {
        let x = normals(7, DType::F64, [2, t, 2, 4]);
        for rows in [vec![vec![]], vec![(1..t).collect()], vec![vec![], (1..t).collect()]] {
            let blocks = BlockStarts::new(rows, t).unwrap();
            let sees = [SeenKeys::OwnBlock(blocks.clone()), SeenKeys::EarlierBlocks(blocks.clone())];
            let fused = run(&x, |x| dual_attention(operands(x), DualSees::Blocks(&blocks)));
            let merged = run(&x, |x| dual_attention_merged(operands(x), sees.each_ref()));
            assert_eq!(farthest(&fused, &merged), None);
        }
    }
}

fn normals(seed: u64, dtype: DType, [batch, t, heads, width]: [usize; 4]) -> Vec<Tensor> {
    let mut rng = Rng::new(seed);
    (0..5).map(|_| rng.normal(dtype, &[batch, t, heads, width], 0.0, 1.0)).collect()
}

/// Output and gradients of all inputs, for an upstream gradient drawn from a fixed seed.
fn run(x: &[Tensor], f: impl Fn(&[Var]) -> Var) -> Vec<Vec<f64>> {
    let tape = Tape::new();
    let leaves: Vec<Var> = x.iter().map(|x| tape.leaf(x.clone())).collect();
    let y = f(&leaves);
    let dout = Rng::new(1).normal(y.dtype(), y.shape(), 0.0, 1.0);
    let grads = tape.backward_from(&[(&y, dout)]);
    let of = |x: &Var| grads.get(x).map_or(vec![], Tensor::to_f64_vec);
    [vec![y.value().to_f64_vec()], leaves.iter().map(of).collect()].concat()
}

#[test]
fn a_single_block_is_causal_attention() {
    let x = normals(2, DType::F32, [2, 150, 2, 8]);
    let blocks = BlockStarts::new(vec![vec![]], 150).unwrap();
    let dual = run(&x, |x| dual_attention(operands(x), DualSees::Blocks(&blocks)));
    let plain = run(&x, |x| causal_attention(&x[0], &x[1], &x[2]));
    assert_eq!(dual[..4], plain[..4], "bit for bit");
    assert!(dual[4..].iter().flatten().all(|&g| g == 0.0), "nobody sees the context");
}

#[test]
fn a_single_token_sees_itself_and_no_context() {
    let mut x = normals(2, DType::F64, [2, 1, 2, 8]);
    x[3] = Tensor::full(DType::F64, &[2, 1, 2, 8], f64::NAN);
    x[4] = x[3].clone();
    let blocks = BlockStarts::new(vec![vec![]], 1).unwrap();
    let dual = run(&x, |x| dual_attention(operands(x), DualSees::Blocks(&blocks)));
    assert_eq!(dual[0], x[2].to_f64_vec());
    assert!(dual[4..].iter().flatten().all(|&g| g == 0.0));
}

#[test]
fn equal_keys_in_both_sets_are_causal_attention_whatever_the_blocks() {
    let x = normals(3, DType::F64, [2, 101, 2, 6]);
    let same = [&x[0], &x[1], &x[2], &x[1], &x[2]].map(Clone::clone);
    let blocks = blocks(2, 101, 3, 7);
    let dual = run(&same, |x| dual_attention(operands(x), DualSees::Blocks(&blocks)));
    let plain = run(&x, |x| causal_attention(&x[0], &x[1], &x[2]));
    assert_eq!(difference(&dual[0], &plain[0], 1e-12), None);
    assert_eq!(difference(&dual[1], &plain[1], 1e-12), None);
    for (own, context, whole) in [(2, 4, 2), (3, 5, 3)] {
        let sum: Vec<f64> = dual[own].iter().zip(&dual[context]).map(|(a, b)| a + b).collect();
        assert_eq!(difference(&sum, &plain[whole], 1e-12), None);
    }
}

#[test]
fn threads_do_not_change_the_result_on_any_level() {
    let (x, blocks) = (normals(4, DType::F32, [3, 220, 2, 8]), blocks(3, 220, 4, 40));
    for level in Level::available() {
        let with = |threads| {
            with_threads(threads, || {
                with_level(level, || run(&x, |x| dual_attention(operands(x), DualSees::Blocks(&blocks))))
            })
        };
        let one = with(1);
        assert!(with(2) == one && with(8) == one);
    }
}

#[test]
fn wrong_starts_are_sentences() {
    for (rows, phrase) in [
        (vec![vec![2, 5], vec![0]], "row 1: a block must start at 1 to 7, found 0"),
        (vec![vec![8]], "row 0: a block must start at 1 to 7, found 8"),
        (vec![vec![3, 2]], "row 0: expected every start in order, found 3, 2"),
        (vec![vec![3, 3]], "row 0: expected every start named once, found 3, 3"),
        (vec![], "found none"),
    ] {
        let error = BlockStarts::new(rows, 8).unwrap_err().to_string();
        assert!(error.contains(phrase), "{error}");
    }
    let blocks = BlockStarts::new(vec![vec![2, 5]], 8).unwrap();
    assert_eq!((0..8).map(|i| blocks.start_of(3, i)).collect::<Vec<_>>(), [0, 0, 2, 2, 2, 5, 5, 5]);
}

#[test]
#[should_panic(expected = "dual_attention: sequences in blocks must have T=8 tokens in all operands: q [1, 7, 1, 2]")]
fn misfits_are_named() {
    let x: Vec<Var> = (0..5).map(|_| Var::constant(Tensor::zeros(DType::F32, &[1, 7, 1, 2]))).collect();
    let blocks = BlockStarts::new(vec![vec![]], 8).unwrap();
    dual_attention(operands(&x), DualSees::Blocks(&blocks));
}
