//! `gau_attention`, `gau_attention_mul`: the attention of the gated attention unit, one head with squared-ReLU weights.
//!
//! Per batch entry, over the keys `j` that query `i` (position `i` of the sequence, from 0) may see:
//!
//! ```text
//! s_ij = q_i·k_j / sqrt(S (i+1))     a_ij = relu(s_ij)²     ō_i = Σ_j a_ij v_j     y_i = u_i ⊙ ō_i
//! ```
//!
//! that is `relu(q_i·k_j / sqrt(S))² / (i+1)`: the number of visible keys divides, and its root is in the queries, so that
//! a weight needs no statistics of its row.
//!
//! Backward, for `dō = dout ⊙ u`: `du = dout ⊙ ō`, `dv_j = Σ_i a_ij dō_i`, `ds_ij = 2 relu(s_ij) (dō_i·v_j)`, and from
//! `ds` as in any attention `dq`, `dk`. The second derivative jumps at `s = 0`, the first does not.
//!
//! Saved: `q`, `k`, `v` (operands of products that come again); in `gau_attention_mul` also `u` and the output `out` ō
//! (for `du`), but not the product, nor need a `linear` after it ([`Recipe`](kumiki_autograd::Recipe)). Scaled queries and weights are computed again. No `T×T` array exists: scores live in
//! tiles, see `attention_tiles`. Wide values are cut into blocks, see [`value_blocks`], each with weights of its own, so
//! that tiles stay in cache and there is work for many cores.
//! Cost: `2 (S n + E)` operations per visible pair forward with `n` blocks, `6 S n + 4 E` backward.
//! Source: GAU, arXiv 2202.10447; the divisor is ours.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::cuda::{Arg, Source, launch, over};
use kumiki_tensor::{DType, Tensor, kernels, threads};

use crate::attention_tiles::{
    self, Arrived, Attended, Number, Problem, Rows, Sees, Upstream, Values, Weighting, arrive, with_kept_factors,
};
use crate::cast::{is_stored_for, widened};
use crate::cuda::kernel_of;
use crate::registry::{BenchCase, OpCase};
use crate::simd::Real;

/// `q` `[B, T_q, S]`, `k` `[B, T_k, S]`, `v` `[B, T_k, E]` to `[B, T_q, E]` in the dtype of `v`, which may be BF16 where the
/// others are F32. With `T_q < T_k` queries are the last ones: query `i` sees keys up to `i + T_k - T_q`, as when decoding
/// with a cache.
///
/// # Panics
/// When shapes or dtypes do not fit, or `T_q > T_k`.
#[track_caller]
pub fn gau_attention(q: &Var, k: &Var, v: &Var) -> Var {
    check("gau_attention", q, k, v);
    widened(&[q, k, v], |x| run("gau_attention", &x[0], &x[1], &x[2], None))
}

/// [`gau_attention`] times `u` `[B, T_q, E]` in the dtype of `v`, elementwise, in the same pass.
///
/// # Panics
/// When shapes or dtypes do not fit, or `T_q > T_k`.
#[track_caller]
pub fn gau_attention_mul(q: &Var, k: &Var, v: &Var, u: &Var) -> Var {
    let [batch, queries, _, _, values] = check("gau_attention_mul", q, k, v);
    assert!(
        u.shape() == [batch, queries, values] && u.dtype() == v.dtype(),
        "gau_attention_mul: u must be [B={batch}, T_q={queries}, E={values}] of {}, got {:?} of {}",
        v.dtype(),
        u.shape(),
        u.dtype()
    );
    widened(&[q, k, v, u], |x| run("gau_attention_mul", &x[0], &x[1], &x[2], Some(&x[3])))
}

/// The shapes in the order B, T_q, T_k, S, E.
#[track_caller]
fn check(name: &str, q: &Var, k: &Var, v: &Var) -> [usize; 5] {
    let shapes = || format!("q {:?}, k {:?}, v {:?}", q.shape(), k.shape(), v.shape());
    assert!(
        q.rank() == 3 && k.rank() == 3 && v.rank() == 3,
        "{name}: q must be [B, T_q, S], k [B, T_k, S], v [B, T_k, E], got {}",
        shapes()
    );
    assert!(
        q.dtype().is_float() && q.dtype() == k.dtype() && is_stored_for(v.dtype(), q.dtype()),
        "{name}: operands must be of one float dtype, got q {}, k {}, v {}",
        q.dtype(),
        k.dtype(),
        v.dtype()
    );
    let (qs, ks, vs) = (q.shape(), k.shape(), v.shape());
    assert!(qs[0] == ks[0] && ks[0] == vs[0], "{name}: batch axes B differ: {}", shapes());
    assert!(ks[1] == vs[1], "{name}: k and v must be of one length T_k: {}", shapes());
    assert!(qs[2] == ks[2], "{name}: q and k must be of one width S: {}", shapes());
    assert!(qs[1] <= ks[1], "{name}: queries are the last of the keys, so T_q <= T_k: {}", shapes());
    [qs[0], qs[1], ks[1], qs[2], vs[2]]
}

/// Blocks of equal width into which values of `width` are cut: as few as keep a block at 512 or below, none below 64. A
/// width without such a divisor stays whole.
pub(crate) fn value_blocks(width: usize) -> usize {
    (width.div_ceil(512).max(1)..=width / 64).find(|&n| width.is_multiple_of(n)).unwrap_or(1)
}

/// `x` `[B, T, E]` as `[B, T, blocks, E / blocks]`, its last axis without gaps.
pub(crate) fn by_blocks(x: &Tensor, blocks: usize) -> Tensor {
    let split = |x: &Tensor| x.reshape(&[x.dim(0), x.dim(1), blocks, x.dim(2) / blocks]);
    split(&if x.dim(2) <= 1 || x.strides()[2] == 1 { x.clone() } else { x.contiguous() })
}

/// `x` `[B, T, S]` as the same queries or keys for every block, `[B, T, blocks, S]`.
pub(crate) fn for_blocks(x: &Tensor, blocks: usize) -> Tensor {
    by_blocks(x, 1).expand(&[x.dim(0), x.dim(1), blocks, x.dim(2)])
}

/// The sum over blocks, `[B, T, blocks, S]` to `[B, T, S]`.
pub(crate) fn sum_blocks(x: &Tensor) -> Tensor {
    x.sum_to(&[x.dim(0), x.dim(1), 1, x.dim(3)]).reshape(&[x.dim(0), x.dim(1), x.dim(3)])
}

/// `x` `[B, T, S]`, each row times `1 / sqrt(S (i+1))` for its position `i`, of which the first is `start`.
fn scaled<E: Number>(x: &Tensor, start: usize) -> Tensor {
    if x.cuda().is_some() {
        return scaled_on_cuda(x, start);
    }
    let (time, width) = (x.dim(1), x.dim(2));
    let mut out = x.copy();
    if !x.is_empty() {
        const ROWS: usize = 64;
        threads::parallel_chunks_mut(out.as_mut_slice::<E>(), ROWS * width, ROWS * width, |piece, rows| {
            for (i, row) in rows.chunks_exact_mut(width).enumerate() {
                let position = start + (piece * ROWS + i) % time;
                let factor: E = Real::from_f64(((width * (position + 1)) as f64).sqrt().recip());
                row.iter_mut().for_each(|x| *x *= factor);
            }
        });
    }
    out
}

pub(crate) static KERNELS: Source = Source {
    file: "gau_attention.cu",
    text: include_str!("gau_attention.cu"),
    headers: &[],
    kernels: kernels!["scale_by_position" of "float" "double"],
};

fn scaled_on_cuda(x: &Tensor, start: usize) -> Tensor {
    let device = x.cuda().expect("on a CUDA device");
    let (x, mut out) = (x.contiguous(), x.new_empty(x.dtype(), x.shape()));
    let sizes = [x.len(), x.dim(1), x.dim(2), start].map(|n| Arg::I64(n as i64));
    let args = [&[x.cuda_in(), out.cuda_out()], &sizes[..]].concat();
    // SAFETY: the kernel's arguments, two contiguous tensors of one shape.
    unsafe { launch(device, &KERNELS, &kernel_of("scale_by_position", x.dtype()), over(x.len()), &args) };
    out
}

fn run(name: &'static str, q: &Var, k: &Var, v: &Var, u: Option<&Var>) -> Var {
    let blocks = value_blocks(v.dim(2));
    let u_blocks = u.map(|u| by_blocks(u.value(), blocks));
    let mut saved = GauBackward {
        name,
        q: q.value().clone(),
        k: for_blocks(k.value(), blocks),
        v: by_blocks(v.value(), blocks),
        u: u_blocks,
        out: None,
        narrow: [q, k, v].into_iter().chain(u).any(Var::is_narrow),
    };
    let inputs: Vec<&Var> = [q, k, v].into_iter().chain(u).collect();
    let keep = u.is_some() && inputs.iter().any(|x| x.requires_grad());
    let Attended { out, gated, .. } = match q.dtype() {
        DType::F64 => saved.forward::<f64>(keep),
        _ => saved.forward::<f32>(keep),
    };
    let y = if u.is_some() { gated } else { out.clone() }.expect("asked for");
    saved.out = out.filter(|_| keep);
    let factors = saved.out.clone().zip(saved.u.clone());
    with_kept_factors(Var::from_op(y.reshape(&[q.dim(0), q.dim(1), v.dim(2)]), &inputs, || saved), factors)
}

struct GauBackward {
    name: &'static str,
    /// `[B, T_q, S]`.
    q: Tensor,
    /// `[B, T_k, blocks, S]`, the same for every block; the others by blocks, too.
    k: Tensor,
    v: Tensor,
    u: Option<Tensor>,
    out: Option<Tensor>,
    narrow: bool,
}

impl GauBackward {
    /// The position of the first query.
    fn start(&self) -> usize {
        self.k.dim(1) - self.q.dim(1)
    }

    fn with_problem<E: Number, R>(&self, f: impl FnOnce(&Problem<E>) -> R) -> R {
        let blocks = self.k.dim(2);
        let q = for_blocks(&scaled::<E>(&self.q, self.start()), blocks);
        f(&Problem {
            batch: q.dim(0),
            heads: blocks,
            queries: q.dim(1),
            keys: self.k.dim(1),
            q: Rows::new(&q),
            k: Rows::new(&self.k),
            v: Values::new(&self.v),
            scale: E::ONE,
            weighting: Weighting::SquaredRelu,
            sees: Sees::Causal,
            key_mask: None,
            pair_mask: None,
            bounds: &vec![None; blocks],
            narrow: self.narrow,
        })
    }

    fn forward<E: Number>(&self, keep: bool) -> Attended {
        let u = self.u.as_ref().map(Values::new);
        self.with_problem::<E, _>(|p| attention_tiles::forward(p, u.as_ref(), keep))
    }

    fn gradients<E: Number>(mut self, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        let by_blocks = by_blocks(&dout, self.k.dim(2));
        drop(dout); // so that it is written over
        let (dout, du) = match (&self.u, self.out.take()) {
            (Some(u), Some(out)) => {
                let Arrived { dout, dgate, .. } = arrive::<E>(by_blocks, Some(u), out, needs[3]);
                (dout, dgate)
            }
            _ => (Rows::<E>::prepare(&by_blocks), None),
        };
        let up = Upstream { dout: Values::new(&dout), lse: None, delta: None };
        let wanted = [needs[0], needs[1], needs[2]];
        let [dq, dk, dv] = self.with_problem::<E, _>(|p| attention_tiles::backward(p, &up, wanted));
        let dq = dq.map(|dq| scaled::<E>(&sum_blocks(&dq), self.start()));
        let whole = |x: Tensor| x.reshape(&[x.dim(0), x.dim(1), x.dim(2) * x.dim(3)]);
        let mut grads = vec![dq, dk.map(|dk| sum_blocks(&dk)), dv.map(whole)];
        grads.extend(self.u.is_some().then(|| du.map(whole)));
        grads
    }
}

impl Backward for GauBackward {
    fn name(&self) -> &'static str {
        self.name
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        let mut saved = vec![("q", &self.q), ("k", &self.k), ("v", &self.v)];
        saved.extend(self.u.as_ref().map(|u| ("u", u)));
        saved.extend(self.out.as_ref().map(|out| ("out", out)));
        saved
    }
    fn backward(self: Box<Self>, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        match dout.dtype() {
            DType::F64 => self.gradients::<f64>(dout, needs),
            _ => self.gradients::<f32>(dout, needs),
        }
    }
}

/// Changes queries and keys such that every score is far from 0, on either side: across the jump of the second derivative
/// there differences see a mixture.
pub(crate) fn clear_scores(q: &mut Tensor, k: &mut Tensor) {
    for (x, signed) in [(q, true), (k, false)] {
        let width = x.dim(2).max(1);
        for (i, x) in x.make_mut::<f64>().iter_mut().enumerate() {
            *x = match (i % width, signed) {
                (0, true) => 2f64.copysign(*x) + 0.1 * *x,
                (0, false) => 2.0 + 0.1 * *x,
                _ => 0.1 * *x,
            };
        }
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let case = |name, variant, [b, tq, tk, s, e]: [usize; 5]| {
        let shapes: [(&'static str, &[usize]); 4] =
            [("q", &[b, tq, s]), ("k", &[b, tk, s]), ("v", &[b, tk, e]), ("u", &[b, tq, e])];
        let inputs = if name == "gau_attention" { &shapes[..3] } else { &shapes[..] };
        let mut case = OpCase::new(name, variant, inputs, move |_, x| match x.get(3) {
            Some(u) => gau_attention_mul(&x[0], &x[1], &x[2], u),
            None => gau_attention(&x[0], &x[1], &x[2]),
        });
        let [q, k, ..] = &mut case.inputs[..] else { unreachable!("three inputs or four") };
        clear_scores(&mut q.1, &mut k.1);
        case
    };
    vec![
        case("gau_attention", "T=5", [2, 5, 5, 3, 4]),
        case("gau_attention", "one more than a tile", [1, 97, 97, 2, 1]),
        case("gau_attention", "last 2 of 5", [1, 2, 5, 4, 3]),
        case("gau_attention_mul", "two blocks of values", [1, 3, 3, 2, 520]),
        case("gau_attention_mul", "last 3 of 4", [2, 3, 4, 5, 2]),
    ]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    [(16, 256, 32, 248), (1, 4096, 128, 1024)]
        .map(|(b, t, s, e)| BenchCase {
            name: "gau_attention_mul",
            inputs: vec![("q", vec![b, t, s]), ("k", vec![b, t, s]), ("v", vec![b, t, e]), ("u", vec![b, t, e])],
            forward: Box::new(|_, x| gau_attention_mul(&x[0], &x[1], &x[2], &x[3])),
            bytes: 4 * b * t * (2 * s + 3 * e),
            flops: b * t * (t + 1) / 2 * 2 * (s + e),
        })
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Chain;
    use kumiki_autograd::Tape;
    use kumiki_tensor::{Rng, concat, threads::with_threads};
    use proptest::prelude::*;

    fn naive([b, tq, tk, s, e]: [usize; 5], x: &[Vec<f64>]) -> Vec<f64> {
        let mut out = vec![0.0; b * tq * e];
        for (batch, i) in (0..b * tq).map(|x| (x / tq, x % tq)) {
            let position = i + tk - tq;
            for j in 0..=position {
                let (q, k) = (&x[0][(batch * tq + i) * s..][..s], &x[1][(batch * tk + j) * s..][..s]);
                let score: f64 = q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() / (s as f64).sqrt();
                let weight = score.max(0.0).powi(2) / (position + 1) as f64;
                for c in 0..e {
                    out[(batch * tq + i) * e + c] += weight * x[2][(batch * tk + j) * e + c];
                }
            }
        }
        if let Some(u) = x.get(3) {
            out.iter_mut().zip(u).for_each(|(y, u)| *y *= u);
        }
        out
    }

    fn chain(dims: [usize; 5], gated: bool, seed: u64, differences: bool) {
        let [b, tq, tk, s, e] = dims;
        let shapes: [(&str, &[usize]); 4] =
            [("q", &[b, tq, s]), ("k", &[b, tk, s]), ("v", &[b, tk, e]), ("u", &[b, tq, e])];
        let mut chain = Chain::new("gau_attention", seed, if gated { &shapes[..] } else { &shapes[..3] });
        chain.differences = differences;
        if let (true, [q, k, ..]) = (differences, &mut chain.inputs[..]) {
            clear_scores(&mut q.1, &mut k.1);
        }
        chain.f32_tolerance = 1e-4; // products of four factors, summed over keys
        chain.run(
            |_, x| match x.get(3) {
                Some(u) => gau_attention_mul(&x[0], &x[1], &x[2], u),
                None => gau_attention(&x[0], &x[1], &x[2]),
            },
            |x| naive(dims, x),
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn small_shapes_pass_the_chain(
            (b, tq, more) in (1usize..3, 1usize..12, 0usize..6), (s, e) in (1usize..10, 1usize..10),
            gated: bool, seed in any::<u64>(),
        ) {
            chain([b, tq, tq + more, s, e], gated, seed, true);
        }
    }

    #[test]
    fn shapes_around_the_tile_and_blocks_pass_the_chain() {
        for (seed, dims) in
            [[1, 95, 97, 17, 33], [1, 193, 193, 8, 1], [2, 1, 200, 4, 48], [1, 100, 100, 32, 1040], [1, 3, 3, 2, 521]]
                .into_iter()
                .enumerate()
        {
            chain(dims, true, seed as u64, false);
        }
    }

    #[test]
    fn blocks_divide_the_width_and_stay_small() {
        assert_eq!([1, 63, 248, 512, 513, 520, 521, 1024, 7168].map(value_blocks), [1, 1, 1, 1, 3, 2, 1, 2, 14]);
    }

    fn inputs(dtype: DType, [b, t, s, e]: [usize; 4]) -> Vec<Tensor> {
        let mut rng = Rng::new(1);
        [s, s, e, e].map(|width| rng.normal(dtype, &[b, t, width], 0.0, 1.0)).into()
    }

    fn apply(x: &[Tensor]) -> Tensor {
        let x: Vec<Var> = x.iter().cloned().map(Var::constant).collect();
        gau_attention_mul(&x[0], &x[1], &x[2], &x[3]).into_value()
    }

    #[test]
    fn the_last_queries_alone_equal_the_whole() {
        let x = inputs(DType::F64, [2, 120, 6, 10]);
        let whole = apply(&x);
        for start in [1, 40, 119] {
            let last = |x: &Tensor| x.narrow(1, start, 120 - start);
            let y = apply(&[last(&x[0]), x[1].clone(), x[2].clone(), last(&x[3])]);
            let gap =
                y.to_f64_vec().iter().zip(last(&whole).to_f64_vec()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(gap < 1e-13, "{gap}");
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits_and_no_tokens_give_none() {
        let run = |threads| {
            with_threads(threads, || {
                let tape = Tape::new();
                let x: Vec<Var> = inputs(DType::F32, [1, 200, 16, 640]).into_iter().map(|x| tape.leaf(x)).collect();
                let y = gau_attention_mul(&x[0], &x[1], &x[2], &x[3]);
                let grads = tape.backward(&crate::sum_all(&y));
                x.iter().map(|x| grads.get(x).unwrap().clone()).collect::<Vec<_>>()
            })
        };
        for (a, b) in run(1).iter().zip(run(3)) {
            assert!(a.to_f64_vec() == b.to_f64_vec());
        }
        for shape in [[0, 3, 2, 2], [1, 0, 2, 2], [1, 3, 2, 0]] {
            assert!(apply(&inputs(DType::F32, shape)).is_empty());
        }
        let x = inputs(DType::F32, [1, 4, 2, 2]);
        assert_eq!(concat(&[&apply(&x), &apply(&x)], 0).dim(0), 2);
    }

    #[test]
    #[should_panic(expected = "gau_attention: q and k must be of one width S: q [1, 2, 3], k [1, 2, 4], v [1, 2, 5]")]
    fn shapes_that_do_not_fit_are_named() {
        let x = |width| Var::constant(Tensor::zeros(DType::F32, &[1, 2, width]));
        gau_attention(&x(3), &x(4), &x(5));
    }
}
