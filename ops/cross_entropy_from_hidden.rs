//! `cross_entropy_from_hidden`: the loss of `logits = hidden · embeddingᵀ` without the logits of all rows at once.
//!
//! Rows are taken in chunks of about [`CHUNK`] logits, a number that depends on shapes only. For each chunk: logits by one
//! product; log-sum-exp and loss per row as in `cross_entropy`; and, when gradients will be wanted, at once
//! `dlogits = (softmax - [target]) / count` over the logits, `dhidden = dlogits · embedding` and
//! `dembedding += dlogitsᵀ · hidden`, while the chunk is at hand. The backward only multiplies both by dout.
//! Saved: dhidden and dembedding, which the backward would have to make room for anyway; neither logits nor embedding.
//! The alternative, to save one lse a row and form the chunks' logits again in the backward, costs a fourth product
//! beside the three.
//! Chunks in which all targets are ignored are skipped. With an embedding that [is narrow](Var::is_narrow) factors are
//! rounded to BF16, sums and everything else stay F32. BF16 operands are widened; the loss is then F32.
//! Cost: 2·N·D·V flops, 6·N·D·V with gradients; extra memory one chunk.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::{DType, Tensor, dispatch_real, threads};

use crate::cast::cast;
use crate::cross_entropy::{IGNORED, checked_targets, gradient_over, log_sum_exp, rows_per_task};
use crate::cross_entropy_from_hidden_cuda::loss as on_cuda;
use crate::gemm::{Factor, MatMut, MatRef};
use crate::registry::{BenchCase, OpCase};
use crate::simd::{Kernel, Lanes, Real, Unary, map_unary_inplace};

/// Logits held at a time, but for a floor of [`MIN_ROWS`] rows.
const CHUNK: usize = 1 << 22;
/// A product of fewer rows would spend its time on reading the embedding.
const MIN_ROWS: usize = 64;

/// The mean of `cross_entropy(hidden · embeddingᵀ, targets)` over targets that are not `ignore_index`, without axes, for
/// hidden `[.., D]`, embedding `[V, D]` and I64 targets `[..]`; 0 when all are ignored.
///
/// # Panics
/// When the shapes do not fit, or a target is neither in `0..V` nor `ignore_index`.
#[track_caller]
pub fn cross_entropy_from_hidden(hidden: &Var, embedding: &Var, targets: &Tensor, ignore_index: i64) -> Var {
    loss("cross_entropy_from_hidden", hidden, embedding, targets, ignore_index, true)
}

/// As [`cross_entropy_from_hidden`], summed instead of averaged: for accumulation over micro-batches, whose sums are
/// divided once by all their [`counted_targets`](crate::counted_targets).
///
/// # Panics
/// As [`cross_entropy_from_hidden`].
#[track_caller]
pub fn cross_entropy_from_hidden_sum(hidden: &Var, embedding: &Var, targets: &Tensor, ignore_index: i64) -> Var {
    loss("cross_entropy_from_hidden_sum", hidden, embedding, targets, ignore_index, false)
}

#[track_caller]
fn loss(op: &'static str, hidden: &Var, embedding: &Var, targets: &Tensor, ignore_index: i64, mean: bool) -> Var {
    let fits = hidden.rank() > 0
        && embedding.rank() == 2
        && hidden.dim(hidden.rank() - 1) == embedding.dim(1)
        && hidden.dtype() == embedding.dtype()
        && hidden.dtype().is_float();
    assert!(
        fits,
        "{op}: hidden must be float [.., D] and embedding [V, D] of one dtype, got {} {:?} and {} {:?}",
        hidden.dtype(),
        hidden.shape(),
        embedding.dtype(),
        embedding.shape()
    );
    let n_vocab = embedding.dim(0);
    let (indices, count) = checked_targets(op, &hidden.shape()[..hidden.rank() - 1], n_vocab, targets, ignore_index);
    if hidden.dtype() == DType::BF16 {
        let (hidden, embedding) = (cast(hidden, DType::F32), cast(embedding, DType::F32));
        return loss(op, &hidden, &embedding, targets, ignore_index, mean);
    }
    crate::count::count(|c| c.head += (hidden.value().len() * n_vocab) as u64);
    let scale = if mean { 1.0 / count.max(1) as f64 } else { 1.0 };
    let needs = [hidden.requires_grad(), embedding.requires_grad()];
    let (h, e) = (hidden.value().contiguous(), embedding.value().contiguous());
    if h.cuda().is_some() {
        let chunk = (CHUNK / n_vocab.max(1)).max(MIN_ROWS);
        let (total, dhidden, dembedding) = on_cuda((&h, &e), embedding.is_narrow(), &indices, scale, needs, chunk);
        return Var::from_op(total, &[hidden, embedding], || CrossEntropyFromHiddenBackward {
            op,
            dhidden,
            dembedding,
        });
    }
    let (total, dhidden, dembedding) = dispatch_real!(op, h.dtype(), E => {
        let mut dhidden = needs[0].then(|| Tensor::empty(h.dtype(), h.shape()));
        let mut dembedding = needs[1].then(|| Tensor::empty(e.dtype(), e.shape()));
        let total = in_chunks(
            h.as_slice::<E>(),
            (e.as_slice::<E>(), embedding.is_narrow()),
            (n_vocab, e.dim(1)),
            &indices,
            scale,
            dhidden.as_mut().map(|t| t.as_mut_slice::<E>()),
            dembedding.as_mut().map(|t| t.as_mut_slice::<E>()),
        );
        (total, dhidden, dembedding)
    });
    Var::from_op(Tensor::scalar(h.dtype(), total * scale), &[hidden, embedding], || CrossEntropyFromHiddenBackward {
        op,
        dhidden,
        dembedding,
    })
}

struct CrossEntropyFromHiddenBackward {
    op: &'static str,
    dhidden: Option<Tensor>,
    dembedding: Option<Tensor>,
}

impl Backward for CrossEntropyFromHiddenBackward {
    fn name(&self) -> &'static str {
        self.op
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        let named = [("dhidden", &self.dhidden), ("dembedding", &self.dembedding)];
        named.into_iter().filter_map(|(name, t)| t.as_ref().map(|t| (name, t))).collect()
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        let factor = dout.item();
        [self.dhidden, self.dembedding].into_iter().map(|t| t.map(|t| scaled(t, factor))).collect()
    }
}

/// The gradient times `factor`, in place.
fn scaled(mut gradient: Tensor, factor: f64) -> Tensor {
    const CHUNK: usize = 16 * 1024;
    if gradient.cuda().is_some() {
        gradient.scale(factor);
    } else if factor != 1.0 {
        dispatch_real!("cross_entropy_from_hidden", gradient.dtype(), E => {
            let by = Times(factor as E);
            threads::parallel_chunks_mut(gradient.make_mut::<E>(), CHUNK, CHUNK, |_, x| map_unary_inplace(&by, x));
        });
    }
    gradient
}

struct Times<E>(E);
impl<E: Real> Unary<E> for Times<E> {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        x * L::splat(self.0)
    }
}

/// The sum of all losses; fills the gradients that are given, those of the sum times `scale`.
fn in_chunks<E: Factor + kumiki_tensor::Element>(
    hidden: &[E],
    (embedding, narrow): (&[E], bool),
    (n_vocab, d): (usize, usize),
    targets: &[usize],
    scale: f64,
    mut dhidden: Option<&mut [E]>,
    mut dembedding: Option<&mut [E]>,
) -> f64 {
    let chunk = (CHUNK / n_vocab.max(1)).max(MIN_ROWS).min(targets.len().max(1));
    let gradients = dhidden.is_some() || dembedding.is_some();
    let mut buffer = Tensor::empty(E::DTYPE, &[chunk, n_vocab]);
    let logits = buffer.as_mut_slice::<E>();
    let embedding = MatRef::new(embedding, n_vocab, d);
    let mut losses = vec![0f64; chunk];
    let mut total = 0.0;
    let mut accumulate = false; // the first chunk writes dembedding, the others add to it
    for (i, targets) in targets.chunks(chunk).enumerate() {
        let rows = targets.len();
        let at = i * chunk * d..(i * chunk + rows) * d;
        let hidden = MatRef::new(&hidden[at.clone()], rows, d);
        if targets.iter().all(|&t| t == IGNORED) {
            if let Some(dhidden) = &mut dhidden {
                dhidden[at].fill(E::ZERO);
            }
            continue;
        }
        let logits = &mut logits[..rows * n_vocab];
        E::product(narrow, hidden, embedding.t(), MatMut::new(logits, rows, n_vocab), false);
        let task = rows_per_task(n_vocab);
        threads::parallel_chunks2_mut(
            (logits, task * n_vocab),
            (&mut losses[..rows], task),
            16 * task * n_vocab,
            |i, rows, losses| {
                let targets = &targets[i * task..][..losses.len()];
                E::dispatch(Chunk { rows, losses, targets, n_vocab, scale: gradients.then_some(scale) });
            },
        );
        total += losses[..rows].iter().sum::<f64>();
        let dlogits = MatRef::new(&logits[..], rows, n_vocab);
        if let Some(dhidden) = &mut dhidden {
            E::product(narrow, dlogits, embedding, MatMut::new(&mut dhidden[at], rows, d), false);
        }
        if let Some(dembedding) = &mut dembedding {
            E::product(narrow, dlogits.t(), hidden, MatMut::new(dembedding, n_vocab, d), accumulate);
            accumulate = true;
        }
    }
    if let Some(dembedding) = dembedding.filter(|_| !accumulate) {
        dembedding.fill(E::ZERO);
    }
    total
}

/// Losses of rows of logits, which become their gradients if there is a scale.
struct Chunk<'a, E> {
    rows: &'a mut [E],
    losses: &'a mut [f64],
    targets: &'a [usize],
    n_vocab: usize,
    scale: Option<f64>,
}

impl<E: Real> Kernel<E> for Chunk<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let rows = self.rows.chunks_exact_mut(self.n_vocab);
        for ((row, loss), &target) in rows.zip(self.losses).zip(self.targets) {
            if target == IGNORED {
                *loss = 0.0;
                row.fill(E::ZERO);
                continue;
            }
            let lse = log_sum_exp::<L>(row);
            *loss = lse - row[target].to_f64();
            if let Some(scale) = self.scale {
                gradient_over::<L>(row, lse, target, scale);
            }
        }
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let inputs: &[(&'static str, &[usize])] = &[("hidden", &[2, 3, 4]), ("embedding", &[7, 4])];
    let targets = || Tensor::from_slice(&[0i64, 6, -1, 3, 3, 2], &[2, 3]);
    let (mean, sum) = (targets(), targets());
    vec![
        OpCase::new("cross_entropy_from_hidden", "one ignored", inputs, move |_, v| {
            cross_entropy_from_hidden(&v[0], &v[1], &mean, -1)
        }),
        OpCase::new("cross_entropy_from_hidden_sum", "one ignored", inputs, move |_, v| {
            cross_entropy_from_hidden_sum(&v[0], &v[1], &sum, -1)
        }),
    ]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let (n, d, v) = (512, 256, 8192);
    let targets = Tensor::from_fn::<i64>(&[n], |i| (i * 31 % v) as i64);
    vec![BenchCase {
        name: "cross_entropy_from_hidden",
        inputs: vec![("hidden", vec![n, d]), ("embedding", vec![v, d])],
        forward: Box::new(move |_, x| cross_entropy_from_hidden(&x[0], &x[1], &targets, -1)),
        bytes: (n * d + v * d) * 4,
        flops: 2 * n * d * v,
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cross_entropy::tests::{mean, naive};
    use crate::testing::{Chain, difference};
    use kumiki_autograd::{Param, Tape};
    use kumiki_tensor::Rng;
    use proptest::prelude::*;

    fn logits(hidden: &[f64], embedding: &[f64], d: usize) -> Vec<f64> {
        let mut out = vec![];
        for h in hidden.chunks(d) {
            out.extend(embedding.chunks(d).map(|e| h.iter().zip(e).map(|(a, b)| a * b).sum::<f64>()));
        }
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn the_chain_holds(seed in any::<u64>(), b in 0usize..4, t in 0usize..4, d in 1usize..20, v in 1usize..40,
                           picks in proptest::collection::vec(any::<u32>(), 16), summed in any::<bool>()) {
            let ids: Vec<i64> = picks[..b * t].iter().map(|&p| if p % 4 == 0 { -1 } else { i64::from(p) % v as i64 }).collect();
            let targets = Tensor::from_slice(&ids, &[b, t]);
            let mut chain = Chain::new("cross_entropy_from_hidden", seed, &[("hidden", &[b, t, d]), ("embedding", &[v, d])]);
            chain.bf16_tolerance = None; // losses of bf16 operands are f32: a test of their own below
            let losses = |x: &[Vec<f64>]| naive(&logits(&x[0], &x[1], d), v, &ids, -1);
            if summed {
                chain.run(|_, x| cross_entropy_from_hidden_sum(&x[0], &x[1], &targets, -1), |x| vec![losses(x).iter().sum()]);
            } else {
                chain.run(|_, x| cross_entropy_from_hidden(&x[0], &x[1], &targets, -1), |x| vec![mean(&losses(x), &ids, -1)]);
            }
        }
    }

    /// Loss and gradients, on any number of threads.
    fn run(n: usize, d: usize, v: usize, ids: &[i64], dtype: DType) -> [Vec<f64>; 3] {
        let (mut h, mut e) = (Rng::new(1), Rng::new(2));
        let tape = Tape::new();
        let h = tape.leaf(h.normal(DType::F32, &[n, d], 0.0, 1.0).cast(dtype));
        let e = tape.leaf(e.normal(DType::F32, &[v, d], 0.0, 0.3).cast(dtype));
        let loss = cross_entropy_from_hidden(&h, &e, &Tensor::from_slice(ids, &[n]), -1);
        let value = loss.value().to_f64_vec();
        let grads = tape.backward(&loss);
        [value, grads.get(&h).unwrap().to_f64_vec(), grads.get(&e).unwrap().to_f64_vec()]
    }

    #[test]
    fn a_narrow_embedding_rounds_factors() {
        let mut rng = Rng::new(4);
        let mut rounded = |shape: &[usize]| rng.normal(DType::BF16, shape, 0.0, 0.5).cast(DType::F32);
        let (h, e) = (rounded(&[70, 40]), Param::new(rounded(&[90, 40])));
        let targets = Tensor::from_slice(&(0..70).map(|i| i % 91 - 1).collect::<Vec<i64>>(), &[70]);
        let run = |tape: Tape| {
            let h = tape.leaf(h.clone());
            let loss = cross_entropy_from_hidden(&h, &tape.param(&e), &targets, -1);
            let value = loss.value().to_f64_vec();
            let grads = tape.backward(&loss);
            [value, grads.get(&h).unwrap().to_f64_vec(), grads.of(&e).unwrap().to_f64_vec()]
        };
        let (wide, narrow) = (run(Tape::new()), run(Tape::new().with_narrow_products(true)));
        // The loss has the same factors in both; the logits' gradients are rounded when they become factors.
        assert_eq!(difference(&wide[0], &narrow[0], 1e-5), None);
        for i in [1, 2] {
            assert!(difference(&wide[i], &narrow[i], 1e-6).is_some());
            let most = wide[i].iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            assert!(wide[i].iter().zip(&narrow[i]).all(|(a, b)| (a - b).abs() < most / 256.0));
        }
    }

    #[test]
    fn several_chunks_one_of_them_ignored() {
        // V so large that a chunk is MIN_ROWS rows; the second chunk is ignored as a whole.
        let (n, d, v) = (3 * MIN_ROWS + 5, 3, CHUNK / MIN_ROWS + 3);
        let ids: Vec<i64> =
            (0..n).map(|i| if i / MIN_ROWS == 1 || i % 5 == 0 { -1 } else { (i * 7919 % v) as i64 }).collect();
        let (got, exact) = (run(n, d, v, &ids, DType::F32), run(n, d, v, &ids, DType::F64));
        for (got, exact) in got.iter().zip(&exact) {
            assert_eq!(difference(got, exact, 2e-5), None);
        }
        assert!(exact[1][MIN_ROWS * d..2 * MIN_ROWS * d].iter().all(|&g| g == 0.0));
        let (h, e) =
            (Rng::new(1).normal(DType::F32, &[n, d], 0.0, 1.0), Rng::new(2).normal(DType::F32, &[v, d], 0.0, 0.3));
        let losses = naive(&logits(&h.to_f64_vec(), &e.to_f64_vec(), d), v, &ids, -1);
        assert!((exact[0][0] - mean(&losses, &ids, -1)).abs() < 1e-10);
    }

    #[test]
    fn the_result_is_the_same_for_any_thread_count() {
        let ids: Vec<i64> = (0..150).map(|i| i * 13 % 500).collect();
        let on = |threads| threads::with_threads(threads, || run(150, 40, 500, &ids, DType::F32));
        let one = on(1);
        assert_eq!(one, on(2));
        assert_eq!(one, on(8));
    }

    #[test]
    fn bf16_operands_give_an_f32_loss() {
        let h = Rng::new(1).normal(DType::BF16, &[6, 8], 0.0, 1.0);
        let e = Rng::new(2).normal(DType::BF16, &[20, 8], 0.0, 1.0);
        let targets = Tensor::from_slice(&[1i64, 0, 19, -1, 7, 7], &[6]);
        let run = |dtype: DType| {
            let tape = Tape::new();
            let (h, e) = (tape.leaf(h.cast(dtype)), tape.leaf(e.cast(dtype)));
            let loss = cross_entropy_from_hidden(&h, &e, &targets, -1);
            let (dtype, value) = (loss.dtype(), loss.item());
            let grads = tape.backward(&loss);
            (dtype, value, [&h, &e].map(|x| grads.get(x).unwrap().clone()))
        };
        let ((dtype, loss, grads), (_, exact, exact_grads)) = (run(DType::BF16), run(DType::F64));
        assert_eq!(dtype, DType::F32);
        assert!((loss - exact).abs() < 1e-6 * exact);
        for (got, exact) in grads.iter().zip(&exact_grads) {
            assert_eq!(got.dtype(), DType::BF16);
            assert_eq!(difference(&got.to_f64_vec(), &exact.to_f64_vec(), 5e-3), None);
        }
    }

    #[test]
    fn case_18_all_targets_ignored() {
        let [loss, dh, de] = run(5, 4, 7, &[-1; 5], DType::F32);
        assert_eq!((loss, dh, de), (vec![0.0], vec![0.0; 20], vec![0.0; 28]));
    }

    #[test]
    #[should_panic(
        expected = "cross_entropy_from_hidden: target -4 at row 0 of [1] is neither in 0..V=7 nor ignore_index -1"
    )]
    fn case_18_a_bad_target_is_named() {
        run(1, 4, 7, &[-4], DType::F32);
    }

    #[test]
    fn empty_axes() {
        let run = |n: usize, d: usize, v: usize, id: i64| {
            let tape = Tape::new();
            let (h, e) = (tape.leaf(Tensor::ones(DType::F32, &[n, d])), tape.leaf(Tensor::ones(DType::F32, &[v, d])));
            let loss = cross_entropy_from_hidden(&h, &e, &Tensor::full(DType::I64, &[n], id as f64), -1);
            let value = loss.item();
            let grads = tape.backward(&loss);
            assert_eq!(grads.get(&h).unwrap().to_f64_vec(), vec![0.0; n * d]);
            assert_eq!(grads.get(&e).unwrap().to_f64_vec(), vec![0.0; v * d]);
            value
        };
        assert!((run(3, 0, 5, 2) - 5f64.ln()).abs() < 1e-6); // no features: all logits are 0
        assert_eq!(run(3, 4, 0, -1), 0.0);
        assert_eq!(run(0, 4, 5, 2), 0.0);
    }

    #[test]
    fn gradients_are_scaled_and_only_made_when_needed() {
        let h = Rng::new(1).normal(DType::F64, &[5, 4], 0.0, 1.0);
        let e = Rng::new(2).normal(DType::F64, &[7, 4], 0.0, 1.0);
        let targets = Tensor::from_slice(&[1i64, 2, 3, -1, 5], &[5]);
        let tape = Tape::new();
        let hidden = tape.leaf(h.clone());
        let loss = cross_entropy_from_hidden(&hidden, &Var::constant(e.clone()), &targets, -1);
        assert_eq!(tape.summary().0[1].saved, [("dhidden", 5 * 4 * 8)]);
        let tripled = tape.backward_from(&[(&loss, Tensor::scalar(DType::F64, 3.0))]);
        let tape = Tape::new();
        let (hidden2, embedding) = (tape.leaf(h), tape.leaf(e));
        let sum = cross_entropy_from_hidden_sum(&hidden2, &embedding, &targets, -1);
        let grads = tape.backward_from(&[(&sum, Tensor::scalar(DType::F64, 0.75))]);
        assert!((sum.item() - 4.0 * loss.item()).abs() < 1e-12);
        let (a, b) = (tripled.get(&hidden).unwrap().to_f64_vec(), grads.get(&hidden2).unwrap().to_f64_vec());
        assert_eq!(difference(&a, &b, 1e-12), None);
    }

    #[test]
    #[should_panic(
        expected = "hidden must be float [.., D] and embedding [V, D] of one dtype, got f32 [2, 3] and f32 [5, 4]"
    )]
    fn shapes_are_named() {
        let zeros = |shape: &[usize]| Var::constant(Tensor::zeros(DType::F32, shape));
        cross_entropy_from_hidden(&zeros(&[2, 3]), &zeros(&[5, 4]), &Tensor::zeros(DType::I64, &[2]), -1);
    }
}
