//! `attention_with_lse`: attention to part of the keys, with the log-sum-exps that it takes to merge it with other parts.
//!
//! Per batch entry and head, with `s_ij = K^-1/2 q_i·k_j` over the keys that query `i` sees:
//!
//! ```text
//! lse_i = log Σ_j exp(s_ij)     y_i = Σ_j exp(s_ij - lse_i) v_j
//! ```
//!
//! A query that sees no key has `y_i = 0` and `lse_i = -∞`: a part that weighs nothing.
//!
//! Backward: written so, `y` depends on the scores both directly and through `lse`, with `∂y_i/∂lse_i = -y_i`. So `lse` takes
//! `dlse_i - delta_i` in all, `delta_i = dout_i·y_i`, and with `p_ij = exp(s_ij - lse_i)`
//!
//! ```text
//! ds_ij = p_ij (dout_i·v_j + dlse_i - delta_i)     dv_j = Σ_i p_ij dout_i
//! ```
//!
//! That is attention's own backward with another `delta`, in one pass. The tape walks an output at a time: `y` lies behind
//! `lse` on it, hands `-delta` down to it as any operator would, and leaves `dout` to it besides.
//! Saved: `q`, `k`, `v`, `lse` `[B, H, T_q]`, `out`.
//! Cost: as `causal_attention`, for the pairs that are seen.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::{DType, Tensor};

use crate::attention_tiles::{
    self, Arrived, Number, Problem, Rows, Sees, Upstream, Values, Weighting, arrive, shown_lse,
};
use crate::cast::cast;
use crate::causal_attention::check_shapes;
use crate::concat::concat;
use crate::dual_attention::BlockStarts;
use crate::registry::OpCase;
use crate::simd::Real;
use crate::unary::exp;
use crate::views::unsqueeze;

/// Which keys a query of [`attention_with_lse`] sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SeenKeys {
    /// All.
    All,
    /// Query `i` those up to `i + T_k - T_q`.
    Causal,
    /// Query `i` those of its block up to itself; `T_q = T_k`.
    OwnBlock(BlockStarts),
    /// Query `i` those of the blocks before its own; `T_q = T_k`.
    EarlierBlocks(BlockStarts),
    /// Those that a mask shows, `[B, T_k, T_q]`. It knows of no tile that it hides: all pairs are computed.
    Masked(Arc<[bool]>),
}

impl SeenKeys {
    /// A mask that shows query `i` of batch entry `b` the keys `j` for which `sees(b, i, j)`.
    pub fn masked([batch, queries, keys]: [usize; 3], sees: impl Fn(usize, usize, usize) -> bool) -> SeenKeys {
        let of = |b, j| (0..queries).map(move |i| (b, i, j));
        let pairs = (0..batch).flat_map(|b| (0..keys).flat_map(move |j| of(b, j)));
        SeenKeys::Masked(pairs.map(|(b, i, j)| sees(b, i, j)).collect())
    }
}

/// Attention of `q` `[B, T_q, H, K]` to `k` `[B, T_k, H, K]`, `v` `[B, T_k, H, G]`: its result `[B, T_q, H, G]`, and the
/// log-sum-exp of every query's scores `[B, T_q, H]`, F32 for BF16 operands.
///
/// # Panics
/// When shapes, dtypes or blocks do not fit, or `T_q > T_k` in the causal case.
#[track_caller]
pub fn attention_with_lse(q: &Var, k: &Var, v: &Var, sees: &SeenKeys) -> (Var, Var) {
    const NAME: &str = "attention_with_lse";
    let [batch, queries, keys, ..] = check_shapes(NAME, q, k, ("v", v), *sees == SeenKeys::Causal);
    if let SeenKeys::OwnBlock(blocks) | SeenKeys::EarlierBlocks(blocks) = sees {
        assert!(
            queries == keys && blocks.len() == keys && blocks.fits(batch),
            "{NAME}: blocks of {} tokens, in {} rows, for q {:?}, k {:?}",
            blocks.len(),
            blocks.rows(),
            q.shape(),
            k.shape()
        );
    }
    if let SeenKeys::Masked(mask) = sees {
        assert!(
            mask.len() == batch * keys * queries,
            "{NAME}: a mask of {} pairs for B={batch}, T_q={queries}, T_k={keys}",
            mask.len()
        );
    }
    let dtype = q.dtype();
    let wide = [q, k, v].map(|x| if dtype == DType::BF16 { cast(x, DType::F32) } else { x.clone() });
    let operands = wide.each_ref().map(|x| Rows::<f32>::prepare(x.value()));
    let attended = match dtype {
        DType::F64 => with_problem::<f64, _>(&operands, sees, |p| attention_tiles::forward(p, None, true)),
        _ => with_problem::<f32, _>(&operands, sees, |p| attention_tiles::forward(p, None, true)),
    };
    let (out, kept) = (attended.out.expect("kept"), attended.lse.expect("of a softmax"));
    // Within the kernels a query without keys has +inf.
    let lse = match dtype {
        _ if kept.cuda().is_some() => shown_lse(&kept),
        DType::F64 => by_query::<f64>(&kept, |x| if x == f64::INFINITY { -x } else { x }),
        _ => by_query::<f32>(&kept, |x| if x == f32::INFINITY { -x } else { x }),
    };
    let handed = Rc::new(RefCell::new(None));
    let lse = Var::from_op(lse, &wide.each_ref(), || {
        let [q, k, v] = operands;
        LseBackward { q, k, v, lse: kept, sees: sees.clone(), dout: handed.clone() }
    });
    let y = Var::from_op(out.clone(), &[&lse], || AttendedBackward { out, dout: handed });
    (if dtype == DType::BF16 { cast(&y, dtype) } else { y }, lse)
}

/// `[B, H, T]` to `[B, T, H]`.
fn by_query<E: Number>(lse: &Tensor, f: impl Fn(E) -> E) -> Tensor {
    let [batch, heads, queries] = [lse.dim(0), lse.dim(1), lse.dim(2)];
    let lse = lse.as_slice::<E>();
    Tensor::from_fn(&[batch, queries, heads], |n| {
        let (b, i, h) = (n / heads / queries, n / heads % queries, n % heads);
        f(lse[(b * heads + h) * queries + i])
    })
}

fn with_problem<E: Number, R>([q, k, v]: &[Tensor; 3], sees: &SeenKeys, f: impl FnOnce(&Problem<E>) -> R) -> R {
    f(&Problem {
        narrow: false,
        batch: q.dim(0),
        heads: q.dim(2),
        queries: q.dim(1),
        keys: k.dim(1),
        q: Rows::new(q),
        k: Rows::new(k),
        v: Values::new(v),
        scale: Real::from_f64((q.dim(3).max(1) as f64).powf(-0.5)),
        weighting: Weighting::Softmax,
        sees: match sees {
            SeenKeys::All | SeenKeys::Masked(_) => Sees::All,
            SeenKeys::Causal => Sees::Causal,
            SeenKeys::OwnBlock(blocks) => Sees::OwnBlock(blocks),
            SeenKeys::EarlierBlocks(blocks) => Sees::EarlierBlocks(blocks),
        },
        key_mask: None,
        pair_mask: match sees {
            SeenKeys::Masked(mask) => Some(mask),
            _ => None,
        },
        bounds: &vec![None; q.dim(2)],
    })
}

/// Of `y`, the second of the two on the tape.
struct AttendedBackward {
    out: Tensor,
    dout: Rc<RefCell<Option<Tensor>>>,
}

impl Backward for AttendedBackward {
    fn name(&self) -> &'static str {
        "attention_with_lse"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("out", &self.out)]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        let Arrived { dout, mut delta, .. } = match self.out.dtype() {
            DType::F64 => arrive::<f64>(dout, None, self.out, false),
            _ => arrive::<f32>(dout, None, self.out, false),
        };
        delta.scale(-1.0);
        self.dout.replace(Some(dout));
        vec![Some(delta)]
    }
}

/// Of `lse`, and of `y` where that was asked.
struct LseBackward {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    sees: SeenKeys,
    dout: Rc<RefCell<Option<Tensor>>>,
}

impl Backward for LseBackward {
    fn name(&self) -> &'static str {
        "attention_with_lse"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("q", &self.q), ("k", &self.k), ("v", &self.v), ("lse", &self.lse)]
    }
    fn backward(self: Box<Self>, dlse: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        fn gradients<E: Number>(saved: LseBackward, dlse: Tensor, needs: [bool; 3]) -> Vec<Option<Tensor>> {
            let LseBackward { q, k, v, lse, sees, dout } = saved;
            let dout = dout.take().unwrap_or_else(|| {
                let shape = [q.dim(0), q.dim(1), q.dim(2), v.dim(3)];
                v.new_full(v.dtype(), &[1, 1, 1, v.dim(3)], 0.0).expand(&shape)
            });
            let mut delta = dlse;
            delta.own();
            delta.scale(-1.0);
            let up = Upstream { dout: Values::new(&dout), lse: Some(&lse), delta: Some(&delta) };
            with_problem::<E, _>(&[q, k, v], &sees, |p| attention_tiles::backward(p, &up, needs)).into()
        }
        let needs = [needs[0], needs[1], needs[2]];
        match dlse.dtype() {
            DType::F64 => gradients::<f64>(*self, dlse, needs),
            _ => gradients::<f32>(*self, dlse, needs),
        }
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let case = |variant, tq: usize, tk: usize, f: fn(Var, Var) -> Var, sees: SeenKeys| {
        let inputs: [(_, &[usize]); 3] = [("q", &[2, tq, 2, 3]), ("k", &[2, tk, 2, 3]), ("v", &[2, tk, 2, 5])];
        OpCase::new("attention_with_lse", variant, &inputs, move |_, x| {
            let (y, lse) = attention_with_lse(&x[0], &x[1], &x[2], &sees);
            f(y, unsqueeze(&lse, 3))
        })
    };
    let both = |y: Var, lse: Var| concat(&[&y, &lse], 3);
    // Where a query may see no key: finite, and flat there.
    let sums = |y: Var, lse: Var| concat(&[&y, &exp(&lse)], 3);
    let blocks = || BlockStarts::new(vec![vec![2, 3], vec![5]], 6).expect("in order");
    vec![
        case("all, across, 4 to 3", 4, 3, both, SeenKeys::All),
        case("causal, last 3 of 7", 3, 7, both, SeenKeys::Causal),
        case("own blocks", 6, 6, both, SeenKeys::OwnBlock(blocks())),
        case("earlier blocks", 6, 6, sums, SeenKeys::EarlierBlocks(blocks())),
        case("masked", 4, 3, sums, SeenKeys::masked([2, 4, 3], |b, i, j| (b + i + 2 * j) % 4 > 1)),
        case("the result alone", 4, 4, |y, _| y, SeenKeys::Causal),
        case("lse alone", 4, 4, |_, lse| lse, SeenKeys::Causal),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::causal_attention::{self, causal_attention};
    use crate::testing::difference;
    use kumiki_autograd::Tape;
    use kumiki_tensor::{Rng, threads::with_threads};

    fn normals(seed: u64, dtype: DType, [t, keys]: [usize; 2]) -> [Tensor; 3] {
        let mut rng = Rng::new(seed);
        [t, keys, keys].map(|t| rng.normal(dtype, &[2, t, 2, 8], 0.0, 1.0))
    }

    /// Result, log-sum-exp, and gradients of q, k and v.
    fn run(x: &[Tensor; 3], sees: &SeenKeys) -> Vec<Vec<f64>> {
        let tape = Tape::new();
        let leaves = x.each_ref().map(|x| tape.leaf(x.clone()));
        let (y, lse) = attention_with_lse(&leaves[0], &leaves[1], &leaves[2], sees);
        let mut rng = Rng::new(1);
        let dout = rng.normal(y.dtype(), y.shape(), 0.0, 1.0);
        let dlse = rng.normal(lse.dtype(), lse.shape(), 0.0, 1.0);
        let grads = tape.backward_from(&[(&y, dout), (&lse, dlse)]);
        let grads = leaves.iter().map(|x| grads.get(x).unwrap().to_f64_vec());
        [y.value().to_f64_vec(), lse.value().to_f64_vec()].into_iter().chain(grads).collect()
    }

    /// Every kind of visibility against a mask of the same pairs, and that against plain loops.
    #[test]
    fn whatever_is_seen_equals_its_mask_and_plain_loops() {
        let (t, keys) = (150, 150);
        let x = normals(2, DType::F64, [t, keys]);
        let blocks = BlockStarts::new(vec![vec![1, 96, 100], vec![]], t).unwrap();
        type Seen<'a> = &'a dyn Fn(usize, usize, usize) -> bool;
        let of: [(SeenKeys, Seen); 4] = [
            (SeenKeys::All, &|_, _, _| true),
            (SeenKeys::Causal, &|_, i, j| j <= i),
            (SeenKeys::OwnBlock(blocks.clone()), &|b, i, j| j <= i && blocks.start_of(b, i) <= j),
            (SeenKeys::EarlierBlocks(blocks.clone()), &|b, i, j| j < blocks.start_of(b, i)),
        ];
        for (sees, seen) in of {
            let masked = SeenKeys::masked([2, t, keys], seen);
            let (got, expected) = (run(&x, &sees), run(&x, &masked));
            for (got, expected) in got.iter().zip(&expected) {
                assert_eq!(difference(got, expected, 1e-12), None, "{sees:?}");
            }
            let of = x.each_ref().map(Tensor::to_f64_vec);
            let scale = 8f64.powf(-0.5);
            let plain =
                causal_attention::naive([2, t, keys, 2, 8, 8], (&of[0], &of[1], &of[2]), |_, dot| scale * dot, seen);
            assert_eq!(difference(&got[0], &plain, 1e-12), None, "{sees:?}");
        }
    }

    #[test]
    fn without_a_gradient_of_lse_it_is_causal_attention() {
        let x = normals(3, DType::F32, [130, 130]);
        let gradients = |f: &dyn Fn(&[Var]) -> Var| {
            let tape = Tape::new();
            let leaves: Vec<Var> = x.iter().map(|x| tape.leaf(x.clone())).collect();
            let y = f(&leaves);
            let dout = Rng::new(1).normal(y.dtype(), y.shape(), 0.0, 1.0);
            let grads = tape.backward_from(&[(&y, dout)]);
            leaves
                .iter()
                .map(|x| grads.get(x).unwrap().to_f64_vec())
                .chain([y.value().to_f64_vec()])
                .collect::<Vec<_>>()
        };
        let plain = gradients(&|x| causal_attention(&x[0], &x[1], &x[2]));
        assert!(gradients(&|x| attention_with_lse(&x[0], &x[1], &x[2], &SeenKeys::Causal).0) == plain, "bit for bit");
    }

    #[test]
    fn bf16_operands_give_f32_sums() {
        let x = normals(4, DType::BF16, [5, 5]);
        let (got, expected) =
            (run(&x, &SeenKeys::Causal), run(&x.each_ref().map(|x| x.cast(DType::F32)), &SeenKeys::Causal));
        assert_eq!(got[1], expected[1]);
        assert_eq!(difference(&got[0], &expected[0], 1e-2), None);
    }

    #[test]
    fn threads_change_no_bit() {
        let x = normals(5, DType::F32, [500, 500]);
        let blocks = SeenKeys::EarlierBlocks(BlockStarts::new(vec![vec![100, 120], vec![300]], 500).unwrap());
        let with = |threads| with_threads(threads, || run(&x, &blocks));
        let one = with(1);
        assert!(with(2) == one && with(8) == one);
    }

    #[test]
    #[should_panic(expected = "attention_with_lse: blocks of 7 tokens, in 1 rows, for q [2, 8, 2, 8], k [2, 8, 2, 8]")]
    fn blocks_must_fit() {
        let x = normals(6, DType::F32, [8, 8]).map(Var::constant);
        let blocks = BlockStarts::new(vec![vec![3]], 7).unwrap();
        attention_with_lse(&x[0], &x[1], &x[2], &SeenKeys::OwnBlock(blocks));
    }
}
