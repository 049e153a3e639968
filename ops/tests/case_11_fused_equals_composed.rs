//! Every fused operator of norms, rotations and losses against the same from primitives: outputs, and the gradients of
//! everything that went in, through a linear layer below and a sum of squares above.

use kumiki_autograd::{Tape, Var};
use kumiki_ops::testing::difference;
use kumiki_ops::{
    add, add_scalar, concat, cross_entropy, cross_entropy_from_hidden, cross_entropy_from_hidden_sum,
    cross_entropy_rows, cross_entropy_sum, div, exp, gather, layer_norm, linear, log, log_softmax, mean, mul,
    mul_scalar, narrow, neg, pow, reshape, rms_norm, rope, rope_at, softmax, sqrt, sub, sum, sum_all, swiglu,
};
use kumiki_tensor::{DType, Rng, Tensor};

/// Runs both forms on the same inputs, in F64 and F32; a scalar result is the loss, of others the squares are summed.
fn compare(name: &str, shapes: &[&[usize]], fused: impl Fn(&[Var]) -> Var, composed: impl Fn(&[Var]) -> Var) {
    for (dtype, tolerance) in [(DType::F64, 1e-11), (DType::F32, 2e-4)] {
        let mut rng = Rng::new(11).fork(name);
        let values: Vec<Tensor> = shapes.iter().map(|s| rng.normal(DType::F64, s, 0.0, 1.0).cast(dtype)).collect();
        let run = |f: &dyn Fn(&[Var]) -> Var| {
            let tape = Tape::new();
            let leaves: Vec<Var> = values.iter().map(|v| tape.leaf(v.clone())).collect();
            let y = f(&leaves);
            let loss = if y.rank() == 0 { y.clone() } else { sum_all(&mul(&y, &y)) };
            let grads = tape.backward(&loss);
            let mut out = vec![y.value().to_f64_vec()];
            for (i, leaf) in leaves.iter().enumerate() {
                let grad = grads.get(leaf).unwrap_or_else(|| panic!("{name}: input {i} received no gradient"));
                assert!(grad.to_f64_vec().iter().any(|&g| g != 0.0), "{name}: the gradient of input {i} is zero");
                out.push(grad.to_f64_vec());
            }
            out
        };
        for (i, (got, expected)) in run(&fused).iter().zip(&run(&composed)).enumerate() {
            let problem = difference(got, expected, tolerance);
            assert!(problem.is_none(), "{name} {dtype}, output and gradients, number {i}: {problem:?}");
        }
    }
}

fn composed_rms_norm(x: &Var, weight: &Var, eps: f64) -> Var {
    let axis = [x.rank() - 1];
    mul(&div(x, &sqrt(&add_scalar(&mean(&mul(x, x), &axis, true), eps))), weight)
}

fn composed_layer_norm(x: &Var, weight: &Var, bias: &Var, eps: f64) -> Var {
    let axis = [x.rank() - 1];
    let centred = sub(x, &mean(x, &axis, true));
    let variance = mean(&pow(&centred, 2.0), &axis, true);
    add(&mul(&div(&centred, &sqrt(&add_scalar(&variance, eps))), weight), bias)
}

fn composed_rope(x: &Var, base: f64, positions: &[i64]) -> Var {
    let (t, k) = (x.dim(1), x.dim(3));
    let half = k / 2;
    let angle = |i: usize| positions[i / half] as f64 * base.powf(-2.0 * (i % half) as f64 / k as f64);
    let table =
        |f: fn(f64) -> f64| Var::constant(Tensor::from_fn::<f64>(&[1, t, 1, half], |i| f(angle(i))).cast(x.dtype()));
    let (cos, sin) = (table(f64::cos), table(f64::sin));
    let (a, b) = (narrow(x, 3, 0, half), narrow(x, 3, half, half));
    concat(&[&sub(&mul(&a, &cos), &mul(&b, &sin)), &add(&mul(&a, &sin), &mul(&b, &cos))], 3)
}

fn composed_swiglu(gate: &Var, up: &Var) -> Var {
    let one = Var::constant(Tensor::ones(gate.dtype(), &[1]));
    mul(&mul(gate, &div(&one, &add_scalar(&exp(&neg(gate)), 1.0))), up)
}

/// Losses of rows; ignored ones are multiplied by 0.
fn composed_losses(logits: &Var, ids: &[i64], ignore: i64) -> Var {
    let n = ids.len();
    let logits = reshape(logits, &[n, logits.dim(logits.rank() - 1)]);
    let safe = Tensor::from_fn::<i64>(&[n, 1], |i| if ids[i] == ignore { 0 } else { ids[i] });
    let kept = Tensor::from_fn::<f64>(&[n, 1], |i| if ids[i] == ignore { 0.0 } else { 1.0 });
    neg(&mul(&gather(&log_softmax(&logits, 1), 1, &safe), &Var::constant(kept.cast(logits.dtype()))))
}

const IDS: [i64; 6] = [4, -1, 0, 8, 8, 3];

fn targets() -> Tensor {
    Tensor::from_slice(&IDS, &[2, 3])
}

#[test]
fn case_11_rms_norm() {
    let shapes: &[&[usize]] = &[&[2, 3, 5], &[19, 5], &[19]];
    compare(
        "rms_norm",
        shapes,
        |v| rms_norm(&linear(&v[0], &v[1]), &v[2], 1e-5),
        |v| composed_rms_norm(&linear(&v[0], &v[1]), &v[2], 1e-5),
    );
}

#[test]
fn case_11_layer_norm() {
    let shapes: &[&[usize]] = &[&[2, 3, 5], &[19, 5], &[19], &[19]];
    compare(
        "layer_norm",
        shapes,
        |v| layer_norm(&linear(&v[0], &v[1]), &v[2], Some(&v[3]), 1e-5),
        |v| composed_layer_norm(&linear(&v[0], &v[1]), &v[2], &v[3], 1e-5),
    );
}

#[test]
fn case_11_softmax() {
    let composed = |x: &Var| {
        let e = exp(x);
        div(&e, &sum(&e, &[2], true))
    };
    let shapes: &[&[usize]] = &[&[2, 3, 5], &[7, 5]];
    compare("softmax", shapes, |v| softmax(&linear(&v[0], &v[1]), 2), |v| composed(&linear(&v[0], &v[1])));
}

#[test]
fn case_11_rope() {
    let shapes: &[&[usize]] = &[&[2, 3, 5], &[12, 5], &[2, 3, 2, 6]];
    let heads = |v: &[Var]| reshape(&linear(&v[0], &v[1]), &[2, 3, 2, 6]);
    // A rotation keeps the sum of squares: a factor of its own for every element brings the angles into the gradient.
    compare(
        "rope",
        shapes,
        |v| mul(&rope(&heads(v), 100.0, 4), &v[2]),
        |v| mul(&composed_rope(&heads(v), 100.0, &[4, 5, 6]), &v[2]),
    );
    compare(
        "rope_at",
        shapes,
        |v| mul(&rope_at(&heads(v), 100.0, &[3, -8, 0]), &v[2]),
        |v| mul(&composed_rope(&heads(v), 100.0, &[3, -8, 0]), &v[2]),
    );
}

#[test]
fn case_11_swiglu() {
    let shapes: &[&[usize]] = &[&[2, 3, 5], &[19, 5], &[19, 5]];
    compare(
        "swiglu",
        shapes,
        |v| swiglu(&linear(&v[0], &v[1]), &linear(&v[0], &v[2])),
        |v| composed_swiglu(&linear(&v[0], &v[1]), &linear(&v[0], &v[2])),
    );
}

#[test]
fn case_11_cross_entropy() {
    let shapes: &[&[usize]] = &[&[2, 3, 5], &[9, 5]];
    let logits = |v: &[Var]| linear(&v[0], &v[1]);
    let mean_of = |losses: Var| mul_scalar(&sum_all(&losses), 1.0 / 5.0);
    compare(
        "cross_entropy",
        shapes,
        |v| cross_entropy(&logits(v), &targets(), -1),
        |v| mean_of(composed_losses(&logits(v), &IDS, -1)),
    );
    compare(
        "cross_entropy_sum",
        shapes,
        |v| cross_entropy_sum(&logits(v), &targets(), -1),
        |v| sum_all(&composed_losses(&logits(v), &IDS, -1)),
    );
    compare(
        "cross_entropy_rows",
        shapes,
        |v| cross_entropy_rows(&logits(v), &targets(), -1),
        |v| composed_losses(&logits(v), &IDS, -1),
    );
}

#[test]
fn case_11_cross_entropy_from_hidden() {
    let shapes: &[&[usize]] = &[&[2, 3, 5], &[4, 5], &[9, 4]];
    let hidden = |v: &[Var]| linear(&v[0], &v[1]);
    compare(
        "cross_entropy_from_hidden",
        shapes,
        |v| cross_entropy_from_hidden(&hidden(v), &v[2], &targets(), -1),
        |v| cross_entropy(&linear(&hidden(v), &v[2]), &targets(), -1),
    );
    compare(
        "cross_entropy_from_hidden_sum",
        shapes,
        |v| cross_entropy_from_hidden_sum(&hidden(v), &v[2], &targets(), -1),
        |v| sum_all(&composed_losses(&linear(&hidden(v), &v[2]), &IDS, -1)),
    );
}

#[test]
fn case_11_a_tied_embedding_gathers_both_gradients() {
    // The embedding is the input of a layer below as well as the head.
    let shapes: &[&[usize]] = &[&[9, 5], &[5, 5]];
    let ids = Tensor::from_slice(&[1i64, 2, 3, 4, 5, 6, 7, 8, -1], &[9]);
    let hidden = |v: &[Var]| linear(&v[0], &v[1]);
    compare(
        "tied",
        shapes,
        |v| cross_entropy_from_hidden(&hidden(v), &v[0], &ids, -1),
        |v| {
            let logits = linear(&hidden(v), &v[0]);
            let largest = Var::constant(Tensor::full(logits.dtype(), &[1], 3.0));
            let shifted = sub(&logits, &largest);
            let lse = log(&sum(&exp(&shifted), &[1], true));
            let safe = Tensor::from_fn::<i64>(&[9, 1], |i| (i as i64 + 1) % 9);
            let kept = Tensor::from_fn::<f64>(&[9, 1], |i| if i == 8 { 0.0 } else { 0.125 }).cast(logits.dtype());
            sum_all(&mul(&sub(&lse, &gather(&shifted, 1, &safe)), &Var::constant(kept)))
        },
    );
}
