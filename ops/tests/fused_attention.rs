//! Every fused attention against the same from primitives that hold whole `T×T` arrays: outputs, and the gradients of
//! everything that went in.

use kumiki_autograd::{Tape, Var};
use kumiki_ops::testing::difference;
use kumiki_ops::{
    FeatureMap, MixedChunk, WindowedPrefix, add, causal_attention, div, exp, feature_map, gate_aggregate_mul,
    gau_attention_mul, l2_normalize, matmul, mixed_chunk_attention_mul, mul, mul_scalar, permute, relu_squared, sub,
    sum, sum_all, windowed_prefix_mul,
};
use kumiki_tensor::{DType, Rng, Tensor};

const T: usize = 23;

/// Runs both forms on the same inputs, in F64 and F32, and compares outputs and gradients of the sum of squares.
fn compare(name: &str, shapes: &[&[usize]], fused: impl Fn(&[Var]) -> Var, composed: impl Fn(&[Var]) -> Var) {
    for (dtype, tolerance) in [(DType::F64, 1e-10), (DType::F32, 2e-4)] {
        let mut rng = Rng::new(5).fork(name);
        let values: Vec<Tensor> = shapes.iter().map(|s| rng.normal(DType::F64, s, 0.0, 1.0).cast(dtype)).collect();
        let run = |f: &dyn Fn(&[Var]) -> Var| {
            let tape = Tape::new();
            let leaves: Vec<Var> = values.iter().map(|v| tape.leaf(v.clone())).collect();
            let y = f(&leaves);
            let grads = tape.backward(&sum_all(&mul(&y, &y)));
            let grads = leaves.iter().map(|leaf| grads.get(leaf).expect("a gradient").to_f64_vec());
            [y.value().to_f64_vec()].into_iter().chain(grads).collect::<Vec<_>>()
        };
        for (i, (got, expected)) in run(&fused).iter().zip(&run(&composed)).enumerate() {
            assert!(expected.iter().any(|&x| x != 0.0), "{name}: number {i} is zero");
            let problem = difference(got, expected, tolerance);
            assert!(problem.is_none(), "{name} {dtype}, output and gradients, number {i}: {problem:?}");
        }
    }
}

/// 1 for the pairs of query `i` and key `j` that `f` wants, `[T, T]`.
fn pairs(dtype: DType, f: impl Fn(usize, usize) -> f64) -> Var {
    Var::constant(Tensor::from_fn::<f64>(&[T, T], |at| f(at / T, at % T)).cast(dtype))
}

/// `[B, T, H, K]` as `[B, H, T, K]`, and back.
fn turned(x: &Var) -> Var {
    permute(x, &[0, 2, 1, 3])
}

fn products(q: &Var, k: &Var) -> Var {
    matmul(q, &permute(k, if k.rank() == 4 { &[0, 1, 3, 2] } else { &[0, 2, 1] }))
}

/// `Σ_j w_ij v_j / Σ_j w_ij`, all `[B, H, T, ..]`.
fn averaged(weights: &Var, v: &Var) -> Var {
    div(&matmul(weights, v), &sum(weights, &[3], true))
}

/// `tau` `[H]` for every pair.
fn per_head(tau: &Var) -> Var {
    kumiki_ops::reshape(tau, &[1, tau.dim(0), 1, 1])
}

#[test]
fn softmax_attentions() {
    let heads: &[usize] = &[2, T, 2, 4];
    compare(
        "causal_attention",
        &[heads, heads, heads],
        |x| causal_attention(&x[0], &x[1], &x[2]),
        |x| {
            let [q, k, v] = [0, 1, 2].map(|i| turned(&x[i]));
            let weights = exp(&mul_scalar(&products(&q, &k), 0.5));
            turned(&averaged(&mul(&weights, &pairs(q.dtype(), |i, j| f64::from(j <= i))), &v))
        },
    );
    compare(
        "gate_aggregate_mul",
        &[heads, heads, heads, heads, &[2]],
        |x| gate_aggregate_mul(&x[0], &x[1], &x[2], &exp(&x[4]), &x[3]),
        |x| {
            let [q, k, g] = [0, 1, 2].map(|i| turned(&x[i]));
            let scores = mul(&products(&l2_normalize(&q, 1e-12), &l2_normalize(&k, 1e-12)), &per_head(&exp(&x[4])));
            let weights = mul(&exp(&scores), &pairs(q.dtype(), |i, j| f64::from(j <= i)));
            mul(&turned(&averaged(&weights, &g)), &x[3])
        },
    );
}

#[test]
fn windowed_prefix_of_every_feature_map() {
    let (heads, window): (&[usize], _) = (&[2, T, 2, 4], 5);
    for map in FeatureMap::ALL {
        compare(
            map.name(),
            &[heads, heads, heads, heads, &[2]],
            |x| {
                let tau = &exp(&x[4]);
                let [phi_q, phi_k] = &[&x[0], &x[1]].map(|x| feature_map(x, tau, map));
                windowed_prefix_mul(WindowedPrefix { q: &x[0], k: &x[1], phi_q, phi_k, g: &x[2], tau, window }, &x[3])
            },
            |x| {
                let (dtype, tau) = (x[0].dtype(), exp(&x[4]));
                let [phi_q, phi_k] = [&x[0], &x[1]].map(|x| turned(&feature_map(x, &tau, map)));
                let [q, k, g] = [0, 1, 2].map(|i| turned(&x[i]));
                let cosines = products(&l2_normalize(&q, 1e-12), &l2_normalize(&k, 1e-12));
                let one = Var::constant(Tensor::ones(dtype, &[1]));
                let near = exp(&mul(&sub(&cosines, &one), &per_head(&tau)));
                let near = mul(&near, &pairs(dtype, |i, j| f64::from(j <= i && i - j < window)));
                let far = mul(&products(&phi_q, &phi_k), &pairs(dtype, |i, j| f64::from(j + window <= i)));
                mul(&turned(&averaged(&add(&near, &far), &g)), &x[3])
            },
        );
    }
}

#[test]
fn squared_relu_attentions() {
    let (keys, values, chunk): (&[usize], &[usize], _) = (&[2, T, 4], &[2, T, 6], 6);
    compare(
        "gau_attention_mul",
        &[keys, keys, values, values],
        |x| gau_attention_mul(&x[0], &x[1], &x[2], &x[3]),
        |x| {
            let weights = relu_squared(&mul_scalar(&products(&x[0], &x[1]), 0.5));
            let seen = pairs(x[0].dtype(), |i, j| if j <= i { 1.0 / (i + 1) as f64 } else { 0.0 });
            mul(&matmul(&mul(&weights, &seen), &x[2]), &x[3])
        },
    );
    compare(
        "mixed_chunk_attention_mul",
        &[keys, keys, keys, keys, values, values],
        |x| {
            let operands = MixedChunk { q: &x[0], k: &x[1], linear_q: &x[2], linear_k: &x[3], v: &x[4], chunk };
            mixed_chunk_attention_mul(operands, &x[5])
        },
        |x| {
            let dtype = x[0].dtype();
            let local = relu_squared(&mul_scalar(&products(&x[0], &x[1]), 0.5));
            let same = pairs(dtype, |i, j| if j <= i && i / chunk == j / chunk { 1.0 / chunk as f64 } else { 0.0 });
            let earlier =
                pairs(dtype, |i, j| if j / chunk < i / chunk { 1.0 / (i / chunk * chunk) as f64 } else { 0.0 });
            let weights = add(&mul(&local, &same), &mul(&products(&x[2], &x[3]), &earlier));
            mul(&matmul(&weights, &x[4]), &x[5])
        },
    );
}
