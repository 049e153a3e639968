//! `causal_attention`, `attention`: scaled dot-product attention in one pass over the keys.
//!
//! Per batch entry and head, with `s_ij = scale · q_i·k_j` over the keys that query `i` may see:
//!
//! ```text
//! p_ij = exp(s_ij - lse_i)     lse_i = log Σ_j exp(s_ij)     y_i = Σ_j p_ij v_j
//! ```
//!
//! Backward, with `delta_i = dout_i·y_i`: `dv_j = Σ_i p_ij dout_i`, `ds_ij = p_ij (dout_i·v_j - delta_i)`,
//! `dq_i = scale Σ_j ds_ij k_j`, `dk_j = scale Σ_i ds_ij q_i`. The weights are computed again from the scores.
//!
//! Saved: `q`, `k`, `v` (operands of products that come again), `out` (for `delta`, which needs no pass over keys
//! then) and `lse` `[B, H, T_q]` (which makes a weight from a score). No `T×T` array exists at any time: scores live in
//! tiles, see `attention_tiles`.
//! Cost: `2 (K+G)` operations per visible pair forward, `6K + 4G` backward.
//! Source: the streaming softmax of Milakov and Gimelshein (2018), tiles as in Dao et al. (2022).

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::{DType, Tensor};

use crate::attention_tiles::{self, Arrived, Number, Problem, Rows, Sees, Upstream, Values, Weighting, arrive};
use crate::cast::{is_stored_for, widened};
use crate::registry::{BenchCase, OpCase};

/// Which keys a query of [`attention`] sees, and the scale of the scores.
#[derive(Clone, Debug, Default)]
pub struct AttentionOptions {
    /// Whether query `i` sees keys up to `i + T_k - T_q` only: queries are the last ones of the keys' sequence, as when
    /// decoding with a cache.
    pub causal: bool,
    /// `[B, T_k]` of U32 or I64: 1 for keys that may be seen, 0 for others. What other keys and their values hold does
    /// not matter, and they get zero gradients.
    pub key_mask: Option<Tensor>,
    /// What scores are multiplied with; `K^-1/2` when absent.
    pub scale: Option<f64>,
}

impl AttentionOptions {
    /// Every query sees the keys up to its own position.
    pub fn causal() -> AttentionOptions {
        AttentionOptions { causal: true, ..AttentionOptions::default() }
    }

    /// Batch entry `b` has `lengths[b]` keys, of `keys` that the tensors have room for.
    ///
    /// # Panics
    /// When a length is above `keys`.
    #[track_caller]
    #[must_use]
    pub fn with_key_lengths(self, lengths: &[usize], keys: usize) -> AttentionOptions {
        assert!(lengths.iter().all(|&n| n <= keys), "attention: key lengths {lengths:?} of at most {keys}");
        let mask = Tensor::from_fn::<u32>(&[lengths.len(), keys], |i| u32::from(i % keys < lengths[i / keys]));
        AttentionOptions { key_mask: Some(mask), ..self }
    }
}

/// Causal attention with scale `K^-1/2`: `q` `[B, T_q, H, K]`, `k` `[B, T_k, H, K]`, `v` `[B, T_k, H, G]` to
/// `[B, T_q, H, G]`. With `T_q < T_k` queries are the last ones: query `i` sees keys up to `i + T_k - T_q`.
///
/// # Panics
/// When shapes or dtypes do not fit, or `T_q > T_k`.
#[track_caller]
pub fn causal_attention(q: &Var, k: &Var, v: &Var) -> Var {
    run("causal_attention", q, k, v, &AttentionOptions::causal())
}

/// Attention of `q` `[B, T_q, H, K]` to `k` `[B, T_k, H, K]`, `v` `[B, T_k, H, G]`, giving `[B, T_q, H, G]`: full or
/// causal, within a sequence or across, with masked keys. The result is 0 for a query that sees no key.
///
/// # Panics
/// When shapes or dtypes do not fit, or `T_q > T_k` in the causal case.
#[track_caller]
pub fn attention(q: &Var, k: &Var, v: &Var, options: &AttentionOptions) -> Var {
    run("attention", q, k, v, options)
}

/// The shapes of `q`, `k` and `v` (called `value`) in the order B, T_q, T_k, H, K, G.
#[track_caller]
pub(crate) fn check_shapes(name: &str, q: &Var, k: &Var, value: (&str, &Var), causal: bool) -> [usize; 6] {
    let (value_name, v) = value;
    let shapes = || format!("q {:?}, k {:?}, {value_name} {:?}", q.shape(), k.shape(), v.shape());
    assert!(
        q.rank() == 4 && k.rank() == 4 && v.rank() == 4,
        "{name}: q must be [B, T_q, H, K], k [B, T_k, H, K], {value_name} [B, T_k, H, G], got {}",
        shapes()
    );
    assert!(
        q.dtype().is_float() && q.dtype() == k.dtype() && is_stored_for(v.dtype(), q.dtype()),
        "{name}: operands must be of one float dtype, got q {}, k {}, {value_name} {}",
        q.dtype(),
        k.dtype(),
        v.dtype()
    );
    let (qs, ks, vs) = (q.shape(), k.shape(), v.shape());
    assert!(qs[0] == ks[0] && ks[0] == vs[0], "{name}: batch axes B differ: {}", shapes());
    assert!(ks[1] == vs[1], "{name}: k and {value_name} must be of one length T_k: {}", shapes());
    assert!(qs[2] == ks[2] && ks[2] == vs[2], "{name}: head axes H differ: {}", shapes());
    assert!(qs[3] == ks[3], "{name}: q and k must be of one width K: {}", shapes());
    assert!(!causal || qs[1] <= ks[1], "{name}: causal queries are the last of the keys, so T_q <= T_k: {}", shapes());
    [qs[0], qs[1], ks[1], qs[2], qs[3], vs[3]]
}

#[track_caller]
fn run(name: &'static str, q: &Var, k: &Var, v: &Var, options: &AttentionOptions) -> Var {
    let [batch, _, keys, heads, width, _] = check_shapes(name, q, k, ("v", v), options.causal);
    if let Some(mask) = &options.key_mask {
        assert!(
            mask.shape() == [batch, keys] && !mask.dtype().is_float(),
            "{name}: key_mask must be [B={batch}, T_k={keys}] of u32 or i64, got {:?} of {}",
            mask.shape(),
            mask.dtype()
        );
    }
    let scale = options.scale.unwrap_or((width.max(1) as f64).powf(-0.5));
    let narrow = [q, k, v].iter().any(|x| x.is_narrow());
    widened(&[q, k, v], |x| {
        let saved = [&x[0], &x[1], &x[2]].map(|x| Rows::<f32>::prepare(x.value()));
        let plan = Plan { name, heads, scale, causal: options.causal, key_mask: options.key_mask.clone(), narrow };
        let attended = match x[0].dtype() {
            DType::F64 => plan.with::<f64, _>(&saved, |p| attention_tiles::forward(p, None, true)),
            _ => plan.with::<f32, _>(&saved, |p| attention_tiles::forward(p, None, true)),
        };
        let out = attended.out.expect("kept");
        Var::from_op(out.clone(), &[&x[0], &x[1], &x[2]], || {
            let [q, k, v] = saved;
            AttentionBackward { q, k, v, out, lse: attended.lse.expect("of a softmax"), plan }
        })
    })
}

struct Plan {
    name: &'static str,
    heads: usize,
    scale: f64,
    causal: bool,
    key_mask: Option<Tensor>,
    narrow: bool,
}

impl Plan {
    fn with<E: Number, R>(&self, [q, k, v]: &[Tensor; 3], f: impl FnOnce(&Problem<E>) -> R) -> R {
        let mask: Option<Vec<bool>> =
            self.key_mask.as_ref().map(|mask| mask.to_f64_vec().iter().map(|&x| x != 0.0).collect());
        f(&Problem {
            batch: q.dim(0),
            heads: self.heads,
            queries: q.dim(1),
            keys: k.dim(1),
            q: Rows::new(q),
            k: Rows::new(k),
            v: Values::new(v),
            scale: crate::simd::Real::from_f64(self.scale),
            weighting: Weighting::Softmax,
            sees: if self.causal { Sees::Causal } else { Sees::All },
            key_mask: mask.as_deref(),
            pair_mask: None,
            bounds: &vec![None; self.heads],
            narrow: self.narrow,
        })
    }
}

struct AttentionBackward {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: Plan,
}

impl Backward for AttentionBackward {
    fn name(&self) -> &'static str {
        self.plan.name
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        let mut saved = vec![("q", &self.q), ("k", &self.k), ("v", &self.v), ("out", &self.out), ("lse", &self.lse)];
        saved.extend(self.plan.key_mask.as_ref().map(|mask| ("key_mask", mask)));
        saved
    }
    fn backward(self: Box<Self>, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        fn gradients<E: Number>(saved: AttentionBackward, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
            let AttentionBackward { q, k, v, out, lse, plan } = saved;
            let Arrived { dout, delta, .. } = arrive::<E>(dout, None, out, false);
            let up = Upstream { dout: Values::new(&dout), lse: Some(&lse), delta: Some(&delta) };
            let needs = [needs[0], needs[1], needs[2]];
            plan.with::<E, _>(&[q, k, v], |p| attention_tiles::backward(p, &up, needs)).into()
        }
        match dout.dtype() {
            DType::F64 => gradients::<f64>(*self, dout, needs),
            _ => gradients::<f32>(*self, dout, needs),
        }
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let shapes = |tq, tk| -> [(&'static str, Vec<usize>); 3] {
        [("q", vec![2, tq, 2, 3]), ("k", vec![2, tk, 2, 3]), ("v", vec![2, tk, 2, 5])]
    };
    let case = |variant, tq, tk, f: fn(&Var, &Var, &Var) -> Var| {
        let shapes = shapes(tq, tk);
        let inputs: Vec<_> = shapes.iter().map(|(n, s)| (*n, s.as_slice())).collect();
        OpCase::new("attention", variant, &inputs, move |_, x| f(&x[0], &x[1], &x[2]))
    };
    vec![
        OpCase::new(
            "causal_attention",
            "T=5, K=3, G=2",
            &[("q", &[2, 5, 2, 3]), ("k", &[2, 5, 2, 3]), ("v", &[2, 5, 2, 2])],
            |_, x| causal_attention(&x[0], &x[1], &x[2]),
        ),
        OpCase::new(
            "causal_attention",
            "one more than a tile",
            &[("q", &[1, 97, 1, 2]), ("k", &[1, 97, 1, 2]), ("v", &[1, 97, 1, 1])],
            |_, x| causal_attention(&x[0], &x[1], &x[2]),
        ),
        case("causal, last 3 of 7", 3, 7, |q, k, v| attention(q, k, v, &AttentionOptions::causal())),
        case("full, across, 6 to 4", 6, 4, |q, k, v| attention(q, k, v, &AttentionOptions::default())),
        case("full, key lengths 2 and 4, scale 2", 3, 4, |q, k, v| {
            let options = AttentionOptions { scale: Some(2.0), ..AttentionOptions::default() };
            attention(q, k, v, &options.with_key_lengths(&[2, 4], 4))
        }),
        case("causal, first key masked", 4, 4, |q, k, v| {
            let mask = Tensor::from_fn::<i64>(&[2, 4], |i| i64::from(i % 4 > 0));
            attention(q, k, v, &AttentionOptions { key_mask: Some(mask), ..AttentionOptions::causal() })
        }),
    ]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    [(16, 256, 4, 32), (1, 4096, 4, 32), (2, 1024, 8, 64)]
        .map(|(b, t, h, k)| {
            let shape = || vec![b, t, h, k];
            BenchCase {
                name: "causal_attention",
                inputs: vec![("q", shape()), ("k", shape()), ("v", shape())],
                forward: Box::new(|_, x| causal_attention(&x[0], &x[1], &x[2])),
                bytes: 4 * b * t * h * k * 4,
                flops: b * h * t * (t + 1) / 2 * 4 * k,
            }
        })
        .into()
}

/// Plain loops over one row of scores at a time.
#[cfg(test)]
pub(crate) fn naive(
    [batch, tq, tk, heads, width, values]: [usize; 6],
    (q, k, v): (&[f64], &[f64], &[f64]),
    score: impl Fn(usize, f64) -> f64,
    sees: impl Fn(usize, usize, usize) -> bool,
) -> Vec<f64> {
    let mut out = vec![0.0; batch * tq * heads * values];
    for (b, i, h) in (0..batch * tq * heads).map(|x| (x / heads / tq, x / heads % tq, x % heads)) {
        let row = |x: &[f64], t: usize, steps: usize, width: usize| -> Vec<f64> {
            x[((b * steps + t) * heads + h) * width..][..width].to_vec()
        };
        let qi = row(q, i, tq, width);
        let scores: Vec<f64> = (0..tk)
            .map(|j| {
                let dot = qi.iter().zip(row(k, j, tk, width)).map(|(x, y)| x * y).sum();
                if sees(b, i, j) { score(h, dot) } else { f64::NEG_INFINITY }
            })
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY {
            continue;
        }
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        for (j, s) in scores.iter().enumerate() {
            let weight = (s - max).exp() / sum;
            for (c, x) in row(v, j, tk, values).iter().enumerate() {
                out[((b * tq + i) * heads + h) * values + c] += weight * x;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Level, with_level};
    use crate::testing::Chain;
    use kumiki_autograd::{GradCheck, Tape};
    use kumiki_tensor::{Rng, concat, threads::with_threads};
    use proptest::prelude::*;

    fn chain(dims: [usize; 6], options: &AttentionOptions, seed: u64, differences: bool, f32_tolerance: f64) {
        let [b, tq, tk, h, k, g] = dims;
        let mut chain =
            Chain::new("attention", seed, &[("q", &[b, tq, h, k]), ("k", &[b, tk, h, k]), ("v", &[b, tk, h, g])]);
        chain.differences = differences;
        chain.f32_tolerance = f32_tolerance;
        let mask = options.key_mask.as_ref().map(Tensor::to_f64_vec);
        let scale = options.scale.unwrap_or((k as f64).powf(-0.5));
        chain.run(
            |_, x| attention(&x[0], &x[1], &x[2], options),
            |x| {
                naive(
                    dims,
                    (&x[0], &x[1], &x[2]),
                    |_, dot| scale * dot,
                    |b, i, j| {
                        (!options.causal || j <= i + tk - tq) && mask.as_ref().is_none_or(|m| m[b * tk + j] != 0.0)
                    },
                )
            },
        );
    }

    fn random_mask(batch: usize, keys: usize, seed: u64) -> Tensor {
        let mut rng = Rng::new(seed);
        Tensor::from_fn::<i64>(&[batch, keys], |_| i64::from(!rng.next_u64().is_multiple_of(3)))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn small_shapes_pass_the_chain(
            (b, tq, more, h) in (1usize..3, 1usize..12, 0usize..6, 1usize..3), (k, g) in (1usize..10, 1usize..10),
            (causal, masked) in any::<(bool, bool)>(), seed in any::<u64>(),
        ) {
            let key_mask = masked.then(|| random_mask(b, tq + more, seed));
            let keys = |b: usize| key_mask.as_ref().map_or(tq + more, |m| m.select(0, b).to_f64_vec().iter().sum::<f64>() as usize);
            // In random tiny shapes gradients are at times small differences of large terms, hence the tolerance of the
            // golden files for f32. Where every query sees at most one key, gradients of q and k are 0: nothing to be relative to.
            prop_assume!((0..b).any(|b| keys(b) > 1));
            chain([b, tq, tq + more, h, k, g], &AttentionOptions { causal, key_mask, scale: None }, seed, true, 2e-4);
        }
    }

    #[test]
    fn shapes_around_the_tile_pass_the_chain() {
        for (seed, dims) in
            [[1, 95, 97, 1, 17, 33], [1, 193, 193, 1, 8, 1], [1, 100, 300, 1, 3, 20], [2, 1, 200, 2, 4, 48]]
                .into_iter()
                .enumerate()
        {
            let key_mask = Some(random_mask(dims[0], dims[2], 7));
            for options in [
                AttentionOptions::causal(),
                AttentionOptions { scale: Some(0.3), ..AttentionOptions::default() },
                AttentionOptions { key_mask, ..AttentionOptions::causal() },
            ] {
                chain(dims, &options, seed as u64, false, 2e-5);
            }
        }
        // More queries than keys only makes sense without order.
        chain([1, 200, 3, 2, 4, 5], &AttentionOptions::default(), 9, false, 2e-5);
    }

    #[test]
    fn every_level_agrees_with_plain_loops() {
        for level in Level::available() {
            with_level(level, || {
                chain([2, 130, 130, 2, 5, 19], &AttentionOptions::causal(), 3, false, 2e-5);
                chain([1, 7, 9, 1, 3, 3], &AttentionOptions::default().with_key_lengths(&[4], 9), 3, true, 2e-5);
            });
        }
    }

    #[test]
    fn a_single_key_gives_its_value_and_no_gradient_to_scores() {
        let inputs = [1, 2, 3].map(|seed| normal(DType::F32, seed, &[2, 1, 2, 5]));
        let all = evaluate(&inputs, &AttentionOptions::causal());
        assert_eq!(all[0].to_f64_vec(), inputs[2].to_f64_vec());
        assert_eq!(all[3].to_f64_vec(), normal(DType::F32, 5, &[2, 1, 2, 5]).to_f64_vec());
        assert!(all[1].to_f64_vec().iter().chain(&all[2].to_f64_vec()).all(|dx| dx.abs() < 1e-5));
    }

    /// So few heads and so many keys that the backward cuts the keys into blocks.
    #[test]
    fn blocks_of_keys_give_right_gradients() {
        for (causal, tq) in [(true, 800), (true, 500), (false, 100)] {
            let (mut rng, tk) = (Rng::new(4), 800);
            let mut normal = |t, width| rng.normal(DType::F64, &[1, t, 1, width], 0.0, 1.0);
            let inputs = [("q", normal(tq, 2)), ("k", normal(tk, 2)), ("v", normal(tk, 3))];
            let options = AttentionOptions { causal, ..AttentionOptions::default() };
            let check = GradCheck { max_elements: 12, ..GradCheck::default() };
            check.run(&inputs, &[], |_, x| attention(&x[0], &x[1], &x[2], &options)).assert_below(1e-6);
        }
    }

    fn evaluate(inputs: &[Tensor], options: &AttentionOptions) -> Vec<Tensor> {
        let tape = Tape::new();
        let x: Vec<Var> = inputs.iter().map(|t| tape.leaf(t.clone())).collect();
        let y = attention(&x[0], &x[1], &x[2], options);
        let dout = Rng::new(5).normal(y.dtype(), y.shape(), 0.0, 1.0);
        let grads = tape.backward_from(&[(&y, dout)]);
        std::iter::once(y.value().clone()).chain(x.iter().map(|x| grads.get(x).unwrap().clone())).collect()
    }

    fn normal(dtype: DType, seed: u64, shape: &[usize]) -> Tensor {
        Rng::new(seed).normal(dtype, shape, 0.0, 1.0)
    }

    #[test]
    fn case_15_a_fully_masked_row_is_zero() {
        let mask = Some(Tensor::from_slice(&[0u32, 1, 1], &[1, 3]));
        let options = AttentionOptions { key_mask: mask, ..AttentionOptions::causal() };
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let inputs = [1, 2, 3].map(|seed| normal(dtype, seed, &[1, 3, 2, 4]));
            let all = evaluate(&inputs, &options);
            assert_eq!(all[0].select(1, 0).to_f64_vec(), [0.0; 8]);
            assert!(all.iter().all(Tensor::all_finite));
            assert!(all[0].select(1, 1).to_f64_vec().iter().all(|&y| y != 0.0));
            // Query 1 sees key 1 alone.
            assert_eq!(all[0].select(1, 1).to_f64_vec(), inputs[2].select(1, 1).to_f64_vec());
            assert_eq!(all[1].select(1, 0).to_f64_vec(), [0.0; 8], "dq of the masked row");
        }
    }

    #[test]
    fn masked_keys_may_hold_anything() {
        let options = AttentionOptions::default().with_key_lengths(&[130], 250);
        let inputs = [
            normal(DType::F32, 1, &[1, 5, 2, 4]),
            normal(DType::F32, 2, &[1, 250, 2, 4]),
            normal(DType::F32, 3, &[1, 250, 2, 6]),
        ];
        let padded = |x: &Tensor| {
            let nan = Tensor::full(x.dtype(), &[1, 120, 2, x.dim(3)], f64::NAN);
            concat(&[&x.narrow(1, 0, 130), &nan], 1)
        };
        let clean = evaluate(&inputs, &options);
        let dirty = evaluate(&[inputs[0].clone(), padded(&inputs[1]), padded(&inputs[2])], &options);
        for (a, b) in clean.iter().zip(&dirty) {
            assert_eq!(a.to_f64_vec(), b.to_f64_vec());
        }
        assert!(clean[2].narrow(1, 130, 120).to_f64_vec().iter().all(|&x| x == 0.0));
    }

    /// A sequence continued from `T - s` cached keys: outputs and gradients of both parts are those of the whole.
    #[test]
    fn case_26_a_cache_split_anywhere_equals_the_whole() {
        let inputs = [1, 2, 3].map(|seed| normal(DType::F64, seed, &[2, 9, 2, 4]));
        let whole = evaluate(&inputs, &AttentionOptions::causal());
        let dout = normal(DType::F64, 5, &[2, 9, 2, 4]);
        for s in 0..=9 {
            let tape = Tape::new();
            let x: Vec<Var> = inputs.iter().map(|t| tape.leaf(t.clone())).collect();
            let first = |x: &Var, n| tape.leaf(x.value().narrow(1, 0, n));
            let (q1, k1, v1) = (first(&x[0], s), first(&x[1], s), first(&x[2], s));
            let q2 = tape.leaf(inputs[0].narrow(1, s, 9 - s));
            let (y1, y2) = (causal_attention(&q1, &k1, &v1), causal_attention(&q2, &x[1], &x[2]));
            let y = concat(&[y1.value(), y2.value()], 1);
            assert!(crate::testing::difference(&y.to_f64_vec(), &whole[0].to_f64_vec(), 1e-13).is_none(), "s={s}");
            let grads = tape.backward_from(&[(&y1, dout.narrow(1, 0, s)), (&y2, dout.narrow(1, s, 9 - s))]);
            let dq = concat(&[grads.get(&q1).unwrap(), grads.get(&q2).unwrap()], 1);
            let plus = |all: &Var, part: &Var| {
                let rest = Tensor::zeros(DType::F64, &[2, 9 - s, 2, 4]);
                let mut sum = concat(&[grads.get(part).unwrap(), &rest], 1);
                sum.add_assign(grads.get(all).unwrap());
                sum
            };
            for (got, expected) in [dq, plus(&x[1], &k1), plus(&x[2], &v1)].iter().zip(&whole[1..]) {
                let problem = crate::testing::difference(&got.to_f64_vec(), &expected.to_f64_vec(), 1e-12);
                assert!(problem.is_none(), "s={s}: {problem:?}");
            }
        }
    }

    #[test]
    fn later_tokens_change_nothing_before_them() {
        let inputs = [1, 2, 3].map(|seed| normal(DType::F32, seed, &[1, 200, 2, 4]));
        let y = causal_attention(&inputs[0].clone().into(), &inputs[1].clone().into(), &inputs[2].clone().into());
        for t in [1, 7, 95, 96, 97, 191, 199] {
            let moved = inputs.clone().map(|x| {
                let noise = Tensor::full(DType::F32, &[1, 1, 2, 4], 3.0);
                concat(&[&x.narrow(1, 0, t), &noise, &x.narrow(1, t + 1, 199 - t)], 1)
            });
            let z = causal_attention(&moved[0].clone().into(), &moved[1].clone().into(), &moved[2].clone().into());
            let before = |y: &Var| y.value().narrow(1, 0, t).to_f64_vec();
            assert_eq!(before(&y), before(&z), "token {t}");
            assert_ne!(y.value().select(1, t).to_f64_vec(), z.value().select(1, t).to_f64_vec());
        }
    }

    #[test]
    fn threads_change_no_bit() {
        for (b, t, h) in [(2, 150, 3), (1, 900, 1)] {
            let inputs = [1, 2, 3].map(|seed| normal(DType::F32, seed, &[b, t, h, 8]));
            let run = |threads| {
                with_threads(threads, || {
                    evaluate(&inputs, &AttentionOptions::causal()).iter().map(Tensor::to_f64_vec).collect::<Vec<_>>()
                })
            };
            let one = run(1);
            assert!(one == run(2) && one == run(8));
        }
    }

    #[test]
    fn huge_scores_stay_finite() {
        for dtype in [DType::F32, DType::F64] {
            let mut inputs = [1, 2, 3].map(|seed| normal(dtype, seed, &[1, 110, 1, 4]));
            inputs[0].scale(1e4);
            let all = evaluate(&inputs, &AttentionOptions::causal());
            assert!(all.iter().all(Tensor::all_finite));
        }
    }

    #[test]
    fn empty_axes_give_empty_or_zero_results() {
        for [b, tq, tk, h, k, g] in
            [[0, 2, 2, 1, 2, 2], [2, 0, 0, 1, 2, 2], [1, 0, 3, 2, 2, 2], [1, 2, 2, 1, 2, 0], [1, 2, 2, 0, 2, 2]]
        {
            let inputs = [
                normal(DType::F64, 1, &[b, tq, h, k]),
                normal(DType::F64, 2, &[b, tk, h, k]),
                normal(DType::F64, 3, &[b, tk, h, g]),
            ];
            let all = evaluate(&inputs, &AttentionOptions::causal());
            assert_eq!(all[0].shape(), [b, tq, h, g]);
            assert!(all.iter().all(|x| x.to_f64_vec().iter().all(|&x| x == 0.0)));
        }
        let none = [
            normal(DType::F32, 1, &[1, 2, 1, 3]),
            normal(DType::F32, 2, &[1, 0, 1, 3]),
            normal(DType::F32, 3, &[1, 0, 1, 4]),
        ];
        let all = evaluate(&none, &AttentionOptions::default());
        assert_eq!((all[0].to_f64_vec(), all[1].to_f64_vec()), (vec![0.0; 8], vec![0.0; 6]));
        // No width: all scores are 0.
        let flat = [
            normal(DType::F64, 1, &[1, 2, 1, 0]),
            normal(DType::F64, 2, &[1, 2, 1, 0]),
            Tensor::from_slice(&[1.0, 3.0], &[1, 2, 1, 1]),
        ];
        assert_eq!(evaluate(&flat, &AttentionOptions::causal())[0].to_f64_vec(), [1.0, 2.0]);
    }

    #[test]
    fn only_wanted_gradients_are_given() {
        let inputs = [1, 2, 3].map(|seed| normal(DType::F64, seed, &[1, 5, 2, 4]));
        let all = evaluate(&inputs, &AttentionOptions::causal());
        for wanted in 0..3 {
            let tape = Tape::new();
            let x: Vec<Var> = (0..3)
                .map(|i| if i == wanted { tape.leaf(inputs[i].clone()) } else { inputs[i].clone().into() })
                .collect();
            let y = causal_attention(&x[0], &x[1], &x[2]);
            let grads = tape.backward_from(&[(&y, normal(DType::F64, 5, y.shape()))]);
            assert_eq!(grads.get(&x[wanted]).unwrap().to_f64_vec(), all[1 + wanted].to_f64_vec());
        }
    }

    #[test]
    #[should_panic(
        expected = "causal_attention: q and k must be of one width K: q [1, 2, 1, 3], k [1, 2, 1, 4], v [1, 2, 1, 3]"
    )]
    fn shapes_are_named() {
        let x = |k| Var::constant(Tensor::zeros(DType::F32, &[1, 2, 1, k]));
        causal_attention(&x(3), &x(4), &x(3));
    }

    #[test]
    #[should_panic(expected = "attention: key_mask must be [B=1, T_k=2] of u32 or i64, got [2] of u32")]
    fn a_mask_must_fit() {
        let x = || Var::constant(Tensor::zeros(DType::F32, &[1, 2, 1, 3]));
        let options =
            AttentionOptions { key_mask: Some(Tensor::zeros(DType::U32, &[2])), ..AttentionOptions::causal() };
        attention(&x(), &x(), &x(), &options);
    }
}
