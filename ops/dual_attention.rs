//! `dual_attention`: one softmax over the keys of the own block and the context keys of earlier blocks.
//!
//! A sequence is cut into blocks. Per batch entry and head, with `scale = K^-1/2`, query `i` of a block that starts at `s`
//! sees its own block up to itself through one set of keys and all blocks before through another:
//!
//! ```text
//! s_ij = scale · q_i·k_self_j   s <= j <= i        c_ij = scale · q_i·k_context_j   j < s
//! lse_i = log( Σ_j exp(s_ij) + Σ_j exp(c_ij) )     y_i = Σ_j exp(s_ij - lse_i) v_self_j + Σ_j exp(c_ij - lse_i) v_context_j
//! ```
//!
//! In the first block there are no context keys: attention of the block to itself, as with a single block it is
//! `causal_attention`. The same comes out of two attentions merged by their log-sum-exps (`dual_attention_merged`), which is how
//! it can be had where no kernel does both; here tiles of either set stream past the same queries, and tiles that nobody sees are never touched.
//!
//! Backward: given `lse` and `delta_i = dout_i·y_i` each set's part is that of an attention of its own (see
//! `causal_attention`), and both add to one `dq`.
//! Saved: `q`, keys and values of both sets, `out`, `lse` `[B, H, T]`. No `T×T` array exists at any time.
//! Cost: `2 (K+G)` operations per visible pair forward, `6K + 4G` backward; `T(T+1)/2` pairs a head, whatever the blocks.
//! Source: Block-Based Double Decoders, arXiv 2605.18807.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::{DType, Error, Result, Tensor};

use crate::attention_tiles::{self, Arrived, Number, Problem, Rows, Sees, Upstream, Values, Weighting, arrive};
use crate::cast::widened;
use crate::registry::{BenchCase, OpCase};
use crate::simd::Real;

/// Where blocks start in sequences of one length: the first positions of all blocks but the first, for every batch entry or
/// for all of them alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockStarts {
    rows: Vec<Vec<usize>>,
    len: usize,
}

impl BlockStarts {
    /// Starts in sequences of `len` tokens: one list for every batch entry, or a single one for all.
    ///
    /// # Errors
    /// When there is no list, or one is not ascending from 1 to `len - 1`.
    pub fn new(rows: Vec<Vec<usize>>, len: usize) -> Result<BlockStarts> {
        if rows.is_empty() {
            return Err(Error::new("block starts: expected a list for every batch entry or one for all, found none"));
        }
        for (i, row) in rows.iter().enumerate() {
            if let Some(wrong) = row.iter().find(|&&start| start == 0 || start >= len) {
                return Err(Error::new(format!(
                    "block starts of row {i}: a block must start at 1 to {}, found {wrong} (the first block starts at 0 \
                     without being named; sequences have {len} tokens)",
                    len.saturating_sub(1)
                )));
            }
            if let Some(pair) = row.windows(2).find(|pair| pair[0] >= pair[1]) {
                let [a, b] = [pair[0], pair[1]];
                let what = if a == b { "named once" } else { "in order" };
                return Err(Error::new(format!(
                    "block starts of row {i}: expected every start {what}, found {a}, {b}"
                )));
            }
        }
        Ok(BlockStarts { rows, len })
    }

    /// So many blocks of equal lengths, as far as `len` can be cut so, in every batch entry.
    pub fn equal(blocks: usize, len: usize) -> BlockStarts {
        let mut starts: Vec<usize> = (1..blocks).map(|n| n * len / blocks).filter(|&start| start > 0).collect();
        starts.dedup();
        BlockStarts { rows: vec![starts], len }
    }

    /// The first positions of all blocks of a batch entry but the first.
    pub fn of(&self, batch: usize) -> &[usize] {
        &self.rows[if self.rows.len() == 1 { 0 } else { batch }]
    }

    /// The first position of the block that position `i` of a batch entry lies in.
    pub fn start_of(&self, batch: usize, i: usize) -> usize {
        let starts = self.of(batch);
        match starts.partition_point(|&start| start <= i) {
            0 => 0,
            n => starts[n - 1],
        }
    }

    /// The number of lists.
    pub(crate) fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is a list for each of so many batch entries, or one for all.
    pub(crate) fn fits(&self, batch: usize) -> bool {
        self.rows.len() == 1 || self.rows.len() == batch
    }

    /// The length of the sequences.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
}

/// The operands of [`dual_attention`].
#[derive(Clone, Copy)]
pub struct DualAttention<'a> {
    /// `[B, T_q, H, K]`.
    pub q: &'a Var,
    /// Keys of the own block, `[B, T_s, H, K]`.
    pub k_self: &'a Var,
    /// Their values, `[B, T_s, H, G]`.
    pub v_self: &'a Var,
    /// Keys of the context, `[B, T_c, H, K]`.
    pub k_context: &'a Var,
    /// Their values, `[B, T_c, H, G]`.
    pub v_context: &'a Var,
}

/// What a query sees.
#[derive(Clone, Copy)]
pub enum DualSees<'a> {
    /// Whole sequences in blocks: `T_q = T_s = T_c`.
    Blocks(&'a BlockStarts),
    /// The open block of a sequence that is being written: queries are the last of its keys, `T_q <= T_s`, and every context
    /// key that is not masked is from an earlier block. Masks are `[B, T_s]` and `[B, T_c]` of U32 or I64, 1 for keys that
    /// may be seen: rows of a batch may be of different lengths.
    OpenBlock {
        /// Of the own block's keys.
        self_mask: Option<&'a Tensor>,
        /// Of the context's.
        context_mask: Option<&'a Tensor>,
    },
}

/// Attention of every query to its own block and to the context of earlier ones, `[B, T_q, H, G]`.
///
/// # Panics
/// When shapes, dtypes or blocks do not fit.
#[track_caller]
pub fn dual_attention(operands: DualAttention, sees: DualSees) -> Var {
    let DualAttention { q, k_self, v_self, k_context, v_context } = operands;
    let all = [q, k_self, v_self, k_context, v_context];
    check(operands, sees);
    let bools =
        |mask: Option<&Tensor>| mask.map(|mask| mask.to_f64_vec().iter().map(|&x| x != 0.0).collect::<Vec<bool>>());
    let layout = match sees {
        DualSees::Blocks(blocks) => Layout::Blocks(blocks.clone()),
        DualSees::OpenBlock { self_mask, context_mask } => Layout::Open(bools(self_mask), bools(context_mask)),
    };
    let narrow = all.iter().any(|x| x.is_narrow());
    widened(&all, |x| {
        let mut saved = DualAttentionBackward {
            operands: [0, 1, 2, 3, 4].map(|i| Rows::<f32>::prepare(x[i].value())),
            layout,
            out: None,
            lse: None,
            narrow,
        };
        let attended = match x[0].dtype() {
            DType::F64 => saved.with_sets::<f64, _>(|sets| attention_tiles::forward_over(sets, None, true)),
            _ => saved.with_sets::<f32, _>(|sets| attention_tiles::forward_over(sets, None, true)),
        };
        let out = attended.out.expect("kept");
        (saved.out, saved.lse) = (Some(out.clone()), attended.lse);
        Var::from_op(out, &x.iter().collect::<Vec<_>>(), || saved)
    })
}

#[track_caller]
fn check(DualAttention { q, k_self, v_self, k_context, v_context }: DualAttention, sees: DualSees) {
    let all = [q, k_self, v_self, k_context, v_context];
    let shapes = || {
        let names = ["q", "k_self", "v_self", "k_context", "v_context"];
        let each: Vec<String> = names.iter().zip(all).map(|(n, x)| format!("{n} {:?}", x.shape())).collect();
        each.join(", ")
    };
    assert!(
        all.iter().all(|x| x.rank() == 4),
        "dual_attention: operands must be [B, T, H, K] and, values, [B, T, H, G], got {}",
        shapes()
    );
    assert!(
        q.dtype().is_float() && all.iter().all(|x| x.dtype() == q.dtype()),
        "dual_attention: operands must be of one float dtype, got {:?}",
        all.map(Var::dtype)
    );
    assert!(
        all.iter().all(|x| x.dim(0) == q.dim(0) && x.dim(2) == q.dim(2)),
        "dual_attention: batch axes B or head axes H differ: {}",
        shapes()
    );
    assert!(
        k_self.dim(1) == v_self.dim(1) && k_context.dim(1) == v_context.dim(1),
        "dual_attention: keys and values of a set must be of one length: {}",
        shapes()
    );
    assert!(
        k_self.dim(3) == q.dim(3) && k_context.dim(3) == q.dim(3) && v_self.dim(3) == v_context.dim(3),
        "dual_attention: q and both keys must be of one width K, both values of one width G: {}",
        shapes()
    );
    match sees {
        DualSees::Blocks(blocks) => {
            assert!(
                q.dim(1) == k_self.dim(1) && q.dim(1) == k_context.dim(1) && q.dim(1) == blocks.len,
                "dual_attention: sequences in blocks must have T={} tokens in all operands: {}",
                blocks.len,
                shapes()
            );
            assert!(
                blocks.fits(q.dim(0)),
                "dual_attention: {} lists of block starts for B={}",
                blocks.rows.len(),
                q.dim(0)
            );
        }
        DualSees::OpenBlock { self_mask, context_mask } => {
            assert!(
                q.dim(1) <= k_self.dim(1),
                "dual_attention: queries are the last of the open block's keys, so T_q <= T_s: {}",
                shapes()
            );
            for (name, mask, keys) in [("self", self_mask, k_self), ("context", context_mask, k_context)] {
                assert!(
                    mask.is_none_or(|m| m.shape() == [q.dim(0), keys.dim(1)] && !m.dtype().is_float()),
                    "dual_attention: the {name} mask must be [B={}, T={}] of u32 or i64, got {:?}",
                    q.dim(0),
                    keys.dim(1),
                    mask.map(Tensor::shape)
                );
            }
        }
    }
}

enum Layout {
    Blocks(BlockStarts),
    /// Masks of own and of context keys.
    Open(Option<Vec<bool>>, Option<Vec<bool>>),
}

struct DualAttentionBackward {
    /// q, k_self, v_self, k_context, v_context.
    operands: [Tensor; 5],
    layout: Layout,
    out: Option<Tensor>,
    lse: Option<Tensor>,
    narrow: bool,
}

impl DualAttentionBackward {
    /// The problems of the own block's and of the context's keys.
    fn with_sets<E: Number, R>(&self, f: impl FnOnce(&[Problem<E>; 2]) -> R) -> R {
        let [q, k_self, v_self, k_context, v_context] = &self.operands;
        let (sees, masks) = match &self.layout {
            Layout::Blocks(blocks) => ([Sees::OwnBlock(blocks), Sees::EarlierBlocks(blocks)], [None, None]),
            Layout::Open(own, context) => ([Sees::Causal, Sees::All], [own.as_deref(), context.as_deref()]),
        };
        let bounds = vec![None; q.dim(2)];
        let set = |k: &'_ Tensor, n: usize| (k.dim(1), sees[n], masks[n]);
        let [(own_keys, own_sees, own_mask), (context_keys, context_sees, context_mask)] =
            [set(k_self, 0), set(k_context, 1)];
        let own = Problem {
            batch: q.dim(0),
            heads: q.dim(2),
            queries: q.dim(1),
            keys: own_keys,
            q: Rows::new(q),
            k: Rows::new(k_self),
            v: Values::new(v_self),
            scale: Real::from_f64((q.dim(3).max(1) as f64).powf(-0.5)),
            weighting: Weighting::Softmax,
            sees: own_sees,
            key_mask: own_mask,
            pair_mask: None,
            bounds: &bounds,
            narrow: self.narrow,
        };
        let context = Problem {
            keys: context_keys,
            k: Rows::new(k_context),
            v: Values::new(v_context),
            sees: context_sees,
            key_mask: context_mask,
            ..own
        };
        f(&[own, context])
    }

    fn gradients<E: Number>(self, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        let (out, lse) = (self.out.clone().expect("kept"), self.lse.as_ref().expect("of a softmax"));
        let Arrived { dout, delta, .. } = arrive::<E>(dout, None, out, false);
        let up = Upstream { dout: Values::new(&dout), lse: Some(lse), delta: Some(&delta) };
        let of_sets = [[needs[1], needs[2]], [needs[3], needs[4]]];
        let (dq, [[dk_self, dv_self], [dk_context, dv_context]]) =
            self.with_sets::<E, _>(|sets| attention_tiles::backward_over(sets, &up, needs[0], of_sets));
        vec![dq, dk_self, dv_self, dk_context, dv_context]
    }
}

impl Backward for DualAttentionBackward {
    fn name(&self) -> &'static str {
        "dual_attention"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        let names = ["q", "k_self", "v_self", "k_context", "v_context"];
        let kept = [("out", &self.out), ("lse", &self.lse)];
        let kept = kept.into_iter().filter_map(|(name, x)| x.as_ref().map(|x| (name, x)));
        names.into_iter().zip(&self.operands).chain(kept).collect()
    }
    fn backward(self: Box<Self>, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        match dout.dtype() {
            DType::F64 => self.gradients::<f64>(dout, needs),
            _ => self.gradients::<f32>(dout, needs),
        }
    }
}

pub(crate) fn operands(x: &[Var]) -> DualAttention<'_> {
    DualAttention { q: &x[0], k_self: &x[1], v_self: &x[2], k_context: &x[3], v_context: &x[4] }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let names = ["q", "k_self", "v_self", "k_context", "v_context"];
    let case = |variant, tq: usize, ts: usize, tc: usize, f: fn(&[Var]) -> Var| {
        let shapes = [(tq, 3), (ts, 3), (ts, 5), (tc, 3), (tc, 5)].map(|(t, width)| vec![2, t, 2, width]);
        let inputs: Vec<(&'static str, &[usize])> = names.into_iter().zip(shapes.iter().map(Vec::as_slice)).collect();
        OpCase::new("dual_attention", variant, &inputs, move |_, x| f(x))
    };
    vec![
        case("T=6, blocks at 2, 3 and at 5", 6, 6, 6, |x| {
            let blocks = BlockStarts::new(vec![vec![2, 3], vec![5]], 6).expect("in order");
            dual_attention(operands(x), DualSees::Blocks(&blocks))
        }),
        case("open block, last 2 of 3, 4 of context, one masked", 2, 3, 4, |x| {
            let mask = Tensor::from_fn::<i64>(&[2, 4], |i| i64::from(i != 6));
            dual_attention(operands(x), DualSees::OpenBlock { self_mask: None, context_mask: Some(&mask) })
        }),
    ]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let (b, t, h, k) = (1, 2048, 8, 64);
    let inputs = ["q", "k_self", "v_self", "k_context", "v_context"].map(|name| (name, vec![b, t, h, k]));
    let blocks = BlockStarts::equal(8, t);
    vec![BenchCase {
        name: "dual_attention",
        inputs: inputs.into(),
        forward: Box::new(move |_, x| dual_attention(operands(x), DualSees::Blocks(&blocks))),
        bytes: 4 * 6 * b * t * h * k,
        flops: b * h * t * (t + 1) / 2 * 4 * k,
    }]
}

#[cfg(test)]
#[path = "dual_attention_tests.rs"]
mod tests;
