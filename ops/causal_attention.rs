//! `causal_attention`, `attention`: scaled dot-product attention in one pass over the keys.
//!
//! Per batch entry and head, with `s_ij = scale · q_i·k_j` over the keys that query `i` may see:
//!
//!     p_ij = exp(s_ij - lse_i)     lse_i = log Σ_j exp(s_ij)     y_i = Σ_j p_ij v_j
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

use crate::attention_tiles::{self, Number, Problem, Rows, Upstream};
use crate::cast::widened;
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
        q.dtype().is_float() && q.dtype() == k.dtype() && q.dtype() == v.dtype(),
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
    widened(&[q, k, v], |x| {
        let saved = [&x[0], &x[1], &x[2]].map(|x| Rows::<f32>::prepare(x.value()));
        let plan = Plan { name, heads, scale, causal: options.causal, key_mask: options.key_mask.clone() };
        let attended = match x[0].dtype() {
            DType::F64 => plan.with::<f64, _>(&saved, |p| attention_tiles::forward(p, None, true)),
            _ => plan.with::<f32, _>(&saved, |p| attention_tiles::forward(p, None, true)),
        };
        let out = attended.out.expect("kept");
        Var::from_op(out.clone(), &[&x[0], &x[1], &x[2]], || {
            let [q, k, v] = saved;
            AttentionBackward { q, k, v, out, lse: attended.lse, plan }
        })
    })
}

struct Plan {
    name: &'static str,
    heads: usize,
    scale: f64,
    causal: bool,
    key_mask: Option<Tensor>,
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
            v: Rows::new(v),
            scale: crate::simd::Real::from_f64(self.scale),
            causal: self.causal,
            key_mask: mask.as_deref(),
            bounds: &vec![None; self.heads],
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
        fn gradients<E: Number>(saved: AttentionBackward, dout: &Tensor, needs: [bool; 3]) -> Vec<Option<Tensor>> {
            let AttentionBackward { q, k, v, out, lse, plan } = saved;
            let (out, dout) = (Rows::new(&out), Rows::new(dout));
            let up = Upstream { dout, gate: None, out, lse: lse.as_slice::<E>() };
            plan.with::<E, _>(&[q, k, v], |p| attention_tiles::backward(p, &up, needs)).into()
        }
        let dout = Rows::<f32>::prepare(&dout);
        let needs = [needs[0], needs[1], needs[2]];
        match dout.dtype() {
            DType::F64 => gradients::<f64>(*self, &dout, needs),
            _ => gradients::<f32>(*self, &dout, needs),
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

#[cfg(test)]
mod tests;
