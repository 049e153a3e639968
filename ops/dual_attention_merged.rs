//! `dual_attention_merged`: what `dual_attention` does, of two attentions merged after the fact by their log-sum-exps.
//!
//! ```text
//! (y, lse) = attention of every query to keys of its own block     (z, lze) = to context keys of earlier blocks
//! out = (e^lse y + e^lze z) / (e^lse + e^lze) = w y + (1 - w) z,   w = sigmoid(lse - lze)
//! ```
//!
//! This is how the operator is had where no kernel does both: `dual_attention` is tested against it and measured beside
//! it. In the first block `lze` is -∞ and `w` 1.
//!
//! How much the merging costs depends on what the two attentions are. Two are measured:
//! - *context masked*: a kernel for sequences of several lengths side by side does own blocks, and one with a mask of pairs
//!   the context, as in libraries whose masks know no blocks: all `T²` pairs are computed, over half of them for nothing;
//! - *blocks skipped*: both are our own kernels, which skip tiles that nobody sees. No composition does less: as many pairs
//!   as `dual_attention`. Where the products of pairs take nearly all the time it is as fast, and what remains as a difference
//!   is the memory of two more results and their gradients.
//!
//! Backward: that of the primitives. Saved: both results and log-sum-exps, `w`, `1 - w`, and the operands.

use kumiki_autograd::Var;

use crate::activations::sigmoid;
use crate::arithmetic::{add, mul, sub};
use crate::attention_with_lse::{SeenKeys, attention_with_lse};
use crate::dual_attention::{BlockStarts, DualAttention, operands};
use crate::registry::{BenchCase, OpCase};
use crate::unary::{add_scalar, neg};
use crate::views::unsqueeze;

/// The two attentions of [`crate::dual_attention`] over whole sequences, one after the other, merged: `sees` says which
/// keys of its own and which context keys a query sees.
///
/// # Panics
/// When shapes, dtypes, blocks or masks do not fit.
#[track_caller]
pub fn dual_attention_merged(operands: DualAttention, sees: [&SeenKeys; 2]) -> Var {
    let DualAttention { q, k_self, v_self, k_context, v_context } = operands;
    let (own, own_lse) = attention_with_lse(q, k_self, v_self, sees[0]);
    let (context, context_lse) = attention_with_lse(q, k_context, v_context, sees[1]);
    let share = unsqueeze(&sigmoid(&sub(&own_lse, &context_lse)), 3); // [B, T, H, 1]
    add(&mul(&own, &share), &mul(&context, &add_scalar(&neg(&share), 1.0)))
}

fn skipped(blocks: &BlockStarts) -> [SeenKeys; 2] {
    [SeenKeys::OwnBlock(blocks.clone()), SeenKeys::EarlierBlocks(blocks.clone())]
}

fn context_masked(blocks: &BlockStarts, batch: usize) -> [SeenKeys; 2] {
    let t = blocks.len();
    let context = SeenKeys::masked([batch, t, t], |b, i, j| j < blocks.start_of(b, i));
    [SeenKeys::OwnBlock(blocks.clone()), context]
}

/// Of `dual_attention`, since these stand beside its numbers.
pub(crate) fn cases() -> Vec<OpCase> {
    let names = ["q", "k_self", "v_self", "k_context", "v_context"];
    let case = |variant, sees: [SeenKeys; 2]| {
        let shapes: [&[usize]; 5] = [&[2, 6, 2, 3], &[2, 6, 2, 3], &[2, 6, 2, 5], &[2, 6, 2, 3], &[2, 6, 2, 5]];
        let inputs: Vec<_> = names.into_iter().zip(shapes).collect();
        OpCase::new("dual_attention", variant, &inputs, move |_, x| dual_attention_merged(operands(x), sees.each_ref()))
    };
    let blocks = BlockStarts::new(vec![vec![2, 3], vec![5]], 6).expect("in order");
    vec![
        case("lse-merged, blocks skipped", skipped(&blocks)),
        case("lse-merged, context masked", context_masked(&blocks, 2)),
    ]
}

/// Next to `crate::dual_attention`'s.
pub(crate) fn bench() -> Vec<BenchCase> {
    let case = |name, sees: fn(&BlockStarts) -> [SeenKeys; 2]| {
        let fused = crate::dual_attention::bench().remove(0);
        let t = fused.inputs[0].1[1];
        let sees = sees(&BlockStarts::equal(8, t));
        let forward = Box::new(move |_: &_, x: &[Var]| dual_attention_merged(operands(x), sees.each_ref()));
        BenchCase { name, forward, ..fused }
    };
    vec![
        case("dual_attention (lse-merged, context masked)", |blocks| context_masked(blocks, 1)),
        case("dual_attention (lse-merged, blocks skipped)", skipped),
    ]
}
