//! Against plain loops, central differences, and the energy composed from other operators.

use kumiki_autograd::{Tape, Var};
use kumiki_tensor::{DType, Rng, Tensor, threads::with_threads};
use proptest::prelude::*;

use super::products::TILE;
use super::{CemDiagonal, cem_attention};
use crate::cem_energy::cem_attention_energy;
use crate::mul_scalar;
use crate::simd::{Level, with_level};
use crate::testing::{Chain, Operator, difference, follows_plain_f32};

/// B, T_q, T_k, H, K, D.
type Dims = [usize; 6];

/// How many rows the diagonal has: none, one, or one a head.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    None,
    Shared,
    PerHead,
}

const KINDS: [Kind; 3] = [Kind::None, Kind::Shared, Kind::PerHead];

fn naive(dims: Dims, kind: Kind, v: &[Vec<f64>]) -> Vec<f64> {
    let [batch, queries, keys, heads, width, d_model] = dims;
    let (x, wq, k) = (&v[0], &v[1], &v[2]);
    let angle = |t: usize, pair: usize| t as f64 * 10_000f64.powf(-2.0 * pair as f64 / width as f64);
    let turn = |row: &[f64], t: usize, sign: f64| -> Vec<f64> {
        let half = width / 2;
        let mut out = vec![0.0; width];
        for pair in 0..half {
            let (sin, cos) = angle(t, pair).sin_cos();
            out[pair] = row[pair] * cos - sign * row[pair + half] * sin;
            out[pair + half] = sign * row[pair] * sin + row[pair + half] * cos;
        }
        out
    };
    let mut out = vec![0.0; batch * queries * d_model];
    for (b, i) in (0..batch * queries).map(|n| (n / queries, n % queries)) {
        let position = i + keys - queries;
        let x = &x[(b * queries + i) * d_model..][..d_model];
        let y = &mut out[(b * queries + i) * d_model..][..d_model];
        for h in 0..heads {
            let w = |n: usize, c: usize| wq[(h * width + n) * d_model + c];
            let q: Vec<f64> = (0..width).map(|n| (0..d_model).map(|c| w(n, c) * x[c]).sum()).collect();
            let q = turn(&q, position, 1.0);
            let key = |j: usize| &k[((b * keys + j) * heads + h) * width..][..width];
            let history = |j: usize| &v[3][(b * keys + j) * d_model..][..d_model];
            let d = |c: usize| match kind {
                Kind::None => 0.0,
                Kind::Shared => v[4][c],
                Kind::PerHead => v[4][h * d_model + c],
            };
            let score = |j: usize| {
                let near: f64 = q.iter().zip(key(j)).map(|(a, b)| a * b).sum();
                let direct: f64 = match kind {
                    Kind::None => 0.0,
                    _ => (0..d_model).map(|c| x[c] * d(c) * history(j)[c]).sum(),
                };
                (near + direct) / (width as f64).sqrt()
            };
            let scores: Vec<f64> = (0..=position).map(score).collect();
            let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - greatest).exp()).sum();
            let p: Vec<f64> = scores.iter().map(|s| (s - greatest).exp() / sum).collect();
            let context: Vec<f64> = (0..width).map(|n| (0..=position).map(|j| p[j] * key(j)[n]).sum()).collect();
            let context = turn(&context, position, -1.0);
            for (c, y) in y.iter_mut().enumerate() {
                *y += (0..width).map(|n| context[n] * w(n, c)).sum::<f64>();
                if kind != Kind::None {
                    *y += d(c) * (0..=position).map(|j| p[j] * history(j)[c]).sum::<f64>();
                }
            }
        }
    }
    out
}

fn shapes([batch, queries, keys, heads, width, d_model]: Dims, kind: Kind) -> Vec<(&'static str, Vec<usize>)> {
    let mut shapes = vec![
        ("x", vec![batch, queries, d_model]),
        ("wq", vec![heads, width, d_model]),
        ("k", vec![batch, keys, heads, width]),
        ("history", vec![batch, keys, d_model]),
    ];
    match kind {
        Kind::None => shapes.truncate(3),
        Kind::Shared => shapes.push(("d", vec![d_model])),
        Kind::PerHead => shapes.push(("d", vec![heads, d_model])),
    }
    shapes
}

fn run(v: &[Var]) -> super::CemStep {
    let diagonal = (v.len() > 3).then(|| CemDiagonal { d: &v[4], history: &v[3] });
    cem_attention(&v[0], &v[1], &v[2], diagonal, 1e4)
}

fn chain(dims: Dims, kind: Kind, seed: u64, differences: bool, f32_tolerance: f64) {
    let shapes = shapes(dims, kind);
    let inputs: Vec<(&str, &[usize])> = shapes.iter().map(|(name, shape)| (*name, shape.as_slice())).collect();
    // Scores of unit size, as those of normed inputs.
    let scale = (dims[5] as f64).powf(-0.5);
    let mut chain = Chain::new("cem_attention", seed, &inputs).map_input(1, |w| w * scale);
    if kind != Kind::None {
        chain = chain.map_input(4, |d| d * scale);
    }
    (chain.differences, chain.f32_tolerance) = (differences, f32_tolerance);
    chain.bf16_tolerance = Some(8e-2);
    chain.run(|_, v| run(v).direction, |v| naive(dims, kind, v));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn small_shapes_pass_the_chain(
        (batch, queries, more, heads) in (1usize..3, 1usize..8, 0usize..5, 1usize..4),
        (half, d_model) in (1usize..5, 1usize..12), kind in 0usize..3, seed in any::<u64>(),
    ) {
        // Where every query sees one key, the direction depends on nothing but it: gradients of x are 0.
        prop_assume!(queries + more > 1);
        chain([batch, queries, queries + more, heads, 2 * half, d_model], KINDS[kind], seed, true, 2e-4);
    }
}

#[test]
fn shapes_around_the_tile_pass_the_chain() {
    for (seed, dims) in [[1, TILE - 1, TILE - 1, 2, 6, 17], [2, TILE + 1, TILE + 1, 3, 4, 9], [1, 101, 150, 2, 8, 33]]
        .into_iter()
        .enumerate()
    {
        KINDS.into_iter().for_each(|kind| chain(dims, kind, seed as u64, false, 5e-5));
    }
}

#[test]
fn packed_factors_follow_plain_f32() {
    let direction: Operator = |v| {
        let small = |x: &Var| mul_scalar(x, 0.1);
        let diagonal = v.get(4).map(small);
        let diagonal = diagonal.as_ref().map(|d| CemDiagonal { d, history: &v[3] });
        cem_attention(&v[0], &small(&v[1]), &v[2], diagonal, 1e4).direction
    };
    // Widths below and above the least that are packed with all digits, queries around tiles.
    for dims in [[2, 70, 70, 2, 16, 140], [1, 130, 130, 1, 36, 31], [2, 33, 200, 3, 8, 130]] {
        for kind in KINDS {
            let shapes: Vec<Vec<usize>> = shapes(dims, kind).into_iter().map(|(_, shape)| shape).collect();
            follows_plain_f32(&format!("cem_attention {kind:?} {dims:?}"), &shapes, direction, &[]);
        }
    }
}

#[test]
fn nothing_in_nothing_out() {
    for kind in KINDS {
        for dims in [[0, 3, 3, 2, 4, 5], [2, 0, 0, 2, 4, 5], [1, 0, 4, 2, 4, 5]] {
            let tape = Tape::new();
            let zeros = |(_, shape): &(&str, Vec<usize>)| tape.leaf(Tensor::zeros(DType::F32, shape));
            let v: Vec<Var> = shapes(dims, kind).iter().map(zeros).collect();
            let step = run(&v);
            assert_eq!((step.direction.shape(), step.energy.unwrap().len()), (&[dims[0], dims[1], 5][..], 0));
            let grads = tape.backward_from(&[(&step.direction, Tensor::zeros(DType::F32, v[0].shape()))]);
            for x in &v {
                assert!(grads.get(x).unwrap().to_f64_vec().iter().all(|&g| g == 0.0));
            }
        }
    }
}

fn random(dims: Dims, kind: Kind, dtype: DType, seed: u64) -> Vec<Tensor> {
    let mut rng = Rng::new(seed);
    shapes(dims, kind).iter().map(|(_, shape)| rng.normal(dtype, shape, 0.0, 0.5)).collect()
}

/// The energy is what the direction is the negative gradient of, and the one that is read off on the way.
#[test]
fn the_direction_is_minus_the_gradient_of_the_energy() {
    for kind in KINDS {
        for (seed, dims) in
            [[2, 5, 5, 2, 4, 6], [1, 60, 60, 3, 6, 20], [2, 3, 8, 2, 4, 6], [2, 1, 9, 2, 4, 5]].into_iter().enumerate()
        {
            let v = random(dims, kind, DType::F64, seed as u64);
            let tape = Tape::new();
            let x = tape.leaf(v[0].clone());
            let rest: Vec<Var> = v[1..].iter().map(|t| Var::constant(t.clone())).collect();
            let diagonal = (rest.len() > 2).then(|| CemDiagonal { d: &rest[3], history: &rest[2] });
            let energy = cem_attention_energy(&x, &rest[0], &rest[1], diagonal, 1e4);
            let step = cem_attention(&Var::constant(v[0].clone()), &rest[0], &rest[1], diagonal, 1e4);
            let read = step.energy.unwrap().to_f64_vec();
            assert_eq!(difference(&read, &energy.value().to_f64_vec(), 1e-12), None, "{kind:?} {dims:?}");
            let grads = tape.backward_from(&[(&energy, Tensor::ones(DType::F64, energy.shape()))]);
            let minus: Vec<f64> = grads.get(&x).unwrap().to_f64_vec().iter().map(|g| -g).collect();
            let direction = step.direction.value().to_f64_vec();
            assert_eq!(difference(&direction, &minus, 1e-9), None, "{kind:?} {dims:?}");
        }
    }
}

/// Decoding asks for the last query alone.
#[test]
fn the_last_query_alone_equals_the_whole() {
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 2e-5)] {
        for kind in KINDS {
            let v = random([2, 130, 130, 2, 8, 21], kind, dtype, 5);
            let constants = |v: &[Tensor]| v.iter().map(|t| Var::constant(t.clone())).collect::<Vec<_>>();
            let (whole, mut last) = (run(&constants(&v)), v.clone());
            last[0] = v[0].narrow(1, 129, 1);
            let of_last = |x: &Tensor| x.narrow(1, 129, 1).to_f64_vec();
            let expected = [whole.direction.value(), &whole.energy.unwrap()].map(of_last);
            let alone = |threads| {
                with_threads(threads, || {
                    let step = run(&constants(&last));
                    [step.direction.value().to_f64_vec(), step.energy.unwrap().to_f64_vec()]
                })
            };
            let one = alone(1);
            for (got, expected) in one.iter().zip(&expected) {
                assert_eq!(difference(got, expected, tolerance), None, "{kind:?} {dtype}");
            }
            assert_eq!(alone(3), one);
        }
    }
}

#[test]
fn threads_do_not_change_the_result_on_any_level() {
    for level in Level::available() {
        for kind in KINDS {
            let v = random([3, 200, 200, 2, 8, 24], kind, DType::F32, 6);
            let run = |threads| {
                with_threads(threads, || {
                    with_level(level, || {
                        let tape = Tape::new();
                        let leaves: Vec<Var> = v.iter().map(|t| tape.leaf(t.clone())).collect();
                        let y = run(&leaves).direction;
                        let dout = Rng::new(1).normal(DType::F32, y.shape(), 0.0, 1.0);
                        let grads = tape.backward_from(&[(&y, dout)]);
                        let mut out = vec![y.value().to_f64_vec()];
                        out.extend(leaves.iter().map(|x| grads.get(x).unwrap().to_f64_vec()));
                        out
                    })
                })
            };
            let one = run(1);
            assert!(run(2) == one && run(8) == one, "{kind:?}");
        }
    }
}

#[test]
#[should_panic(
    expected = "cem_attention: d must be [D=6] or [H=2, D=6]: x [1, 3, 6], wq [2, 4, 6], k [1, 3, 2, 4], d [5]"
)]
fn a_diagonal_of_the_wrong_shape_is_named() {
    let x = |shape: &[usize]| Var::constant(Tensor::zeros(DType::F32, shape));
    let (d, history) = (x(&[5]), x(&[1, 3, 6]));
    let diagonal = Some(CemDiagonal { d: &d, history: &history });
    cem_attention(&x(&[1, 3, 6]), &x(&[2, 4, 6]), &x(&[1, 3, 2, 4]), diagonal, 1e4);
}
