//! On a CUDA device: pairs inside of chunks are `attention_tiles`', of blocks, and what lies before them `prefix_cuda`'s.

use kumiki_tensor::Tensor;

use super::MixedChunkBackward;
use super::backward::Gradients;
use crate::attention_tiles::{self, Number, Problem, Rows, Sees, Upstream, Values, Weighting};
use crate::dual_attention::BlockStarts;
use crate::prefix_cuda::{Chunks, States};
use crate::simd::Real;

fn chunks(saved: &MixedChunkBackward) -> Chunks {
    // A longer chunk has no end, and no sum overflows.
    let chunk = saved.chunk.min(saved.operands[0].dim(1).max(1));
    Chunks { chunk, distance: 1, mean: true, narrow: saved.narrow }
}

/// Inside of chunks.
fn with_pairs<E: Number, R>(saved: &MixedChunkBackward, f: impl FnOnce(&Problem<E>) -> R) -> R {
    let [q, k, _, _, v] = &saved.operands;
    let time = q.dim(1);
    let chunk = chunks(saved).chunk;
    let starts = BlockStarts::new(vec![(chunk..time).step_by(chunk).collect()], time).expect("in order");
    f(&Problem {
        batch: q.dim(0),
        heads: q.dim(2),
        queries: time,
        keys: time,
        q: Rows::new(q),
        k: Rows::new(k),
        v: Values::new(v),
        scale: Real::from_f64(1.0 / (q.dim(3) as f64 * saved.chunk as f64).sqrt()),
        weighting: Weighting::SquaredRelu,
        sees: Sees::OwnBlock(&starts),
        key_mask: None,
        pair_mask: None,
        bounds: &vec![None; q.dim(2)],
        narrow: saved.narrow,
    })
}

/// The output and its product with `u`, as far as they are asked for.
pub(super) fn forward<E: Number>(saved: &MixedChunkBackward, keep: bool) -> (Option<Tensor>, Option<Tensor>) {
    let [_, _, linear_q, linear_k, v] = &saved.operands;
    let near = with_pairs::<E, _>(saved, |p| attention_tiles::forward(p, None, true)).out.expect("kept");
    States::before(linear_k, v, chunks(saved)).add_values(linear_q, near, saved.u.as_ref(), keep)
}

/// From `dō`, by blocks.
pub(super) fn backward<E: Number>(saved: &MixedChunkBackward, dout: &Tensor) -> Gradients {
    let [_, _, linear_q, linear_k, v] = &saved.operands;
    let up = Upstream { dout: Values::new(dout), lse: None, delta: None };
    let [dq, dk, dv] = with_pairs::<E, _>(saved, |p| attention_tiles::backward(p, &up, [true; 3]));
    let dlinear_q = States::before(linear_k, v, chunks(saved)).features(dout);
    let behind = States::behind(linear_q, dout, chunks(saved));
    let dlinear_k = behind.features(v);
    let (dv, _) = behind.add_values(linear_k, dv.expect("asked for"), None, true);
    let (dq, dk, dv) = (dq.expect("asked for"), dk.expect("asked for"), dv.expect("kept"));
    Gradients { dq, dk, dlinear_q, dlinear_k, dv }
}
