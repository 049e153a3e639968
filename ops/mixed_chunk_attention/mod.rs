//! `mixed_chunk_attention`, `mixed_chunk_attention_mul`: FLASH's attention, exact inside a chunk and linear beyond it.
//!
//! Per batch entry, with chunks of `C` tokens and `n_i = C ⌊i/C⌋` tokens in the chunks before that of query `i`:
//!
//! ```text
//! a_ij = relu(q_i·k_j / sqrt(S))² / C      same chunk, j <= i          ō_i = Σ_j a_ij v_j
//! a_ij = l_i·m_j / n_i                     earlier chunks              y_i = u_i ⊙ ō_i
//! ```
//!
//! **From the left**, chunks one after the other carry `Z = Σ_j m_j ⊗ v_j` `[R, E]` over the earlier chunks; pairs inside a
//! chunk meet in tiles. `1/C` and `1/sqrt(S)` are in the queries, `1/n_i` in the `l_i`.
//! Cost: `O(T (C (S + E) + R E))`; memory beside operands and result: tiles and `Z`.
//!
//! **Backward**, with `dō = dout ⊙ u`: `du = dout ⊙ ō`; inside chunks `dv`, `dq`, `dk` as in `gau_attention`; across them
//!
//! ```text
//! dl_i = Z dō_i / n_i      dm_j = Y v_j      dv_j += Yᵀ m_j      Y = Σ_i l_i ⊗ dō_i / n_i over the later chunks
//! ```
//!
//! `Z` is summed again from the left, `Y` from the right; neither is stored per chunk. One task holds a chunk of keys.
//!
//! Saved: the operands, in `mixed_chunk_attention_mul` with `u` and the output `out` ō (for `du`), but not the product,
//! nor need a `linear` after it ([`Recipe`](kumiki_autograd::Recipe)).
//! Wide values are cut into blocks as in `gau_attention`, one task per block and batch entry.
//! Source: FLASH, arXiv 2202.10447; the divisors are ours.

mod backward;
mod cuda;
mod forward;
mod stream;

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::{DType, Tensor};

use crate::attention_tiles::{Arrived, KEYS, Number, Rows, Values, arrive, with_kept_factors};
use crate::cast::{is_stored_for, widened};
use crate::gau_attention::{by_blocks, clear_scores, for_blocks, sum_blocks, value_blocks};
use crate::registry::{BenchCase, OpCase};
use crate::simd::Real;

pub use stream::MixedChunkState;

/// What [`mixed_chunk_attention`] works on.
#[derive(Clone, Copy)]
pub struct MixedChunk<'a> {
    /// Queries inside a chunk, `[B, T, S]`.
    pub q: &'a Var,
    /// Keys inside a chunk, `[B, T, S]`.
    pub k: &'a Var,
    /// Queries to earlier chunks, `[B, T, R]`.
    pub linear_q: &'a Var,
    /// Keys of earlier chunks, `[B, T, R]`.
    pub linear_k: &'a Var,
    /// Values `[B, T, E]`; they may be BF16 where the others are F32.
    pub v: &'a Var,
    /// Tokens of a chunk; at least 1.
    pub chunk: usize,
}

/// The aggregated values, `[B, T, E]`, in the dtype of `v`.
///
/// # Panics
/// When shapes or dtypes do not fit, or the chunk is 0.
#[track_caller]
pub fn mixed_chunk_attention(x: MixedChunk) -> Var {
    x.check("mixed_chunk_attention");
    let inputs = [x.q, x.k, x.linear_q, x.linear_k, x.v];
    widened(&inputs, |inputs| run("mixed_chunk_attention", inputs, x.chunk))
}

/// [`mixed_chunk_attention`] times `u` `[B, T, E]` in the dtype of `v`, elementwise, in the same pass.
///
/// # Panics
/// When shapes or dtypes do not fit, or the chunk is 0.
#[track_caller]
pub fn mixed_chunk_attention_mul(x: MixedChunk, u: &Var) -> Var {
    x.check("mixed_chunk_attention_mul");
    assert!(
        u.shape() == x.v.shape() && u.dtype() == x.v.dtype(),
        "mixed_chunk_attention_mul: u must be {:?} of {}, as v, got {:?} of {}",
        x.v.shape(),
        x.v.dtype(),
        u.shape(),
        u.dtype()
    );
    let inputs = [x.q, x.k, x.linear_q, x.linear_k, x.v, u];
    widened(&inputs, |inputs| run("mixed_chunk_attention_mul", inputs, x.chunk))
}

impl MixedChunk<'_> {
    #[track_caller]
    fn check(&self, name: &str) {
        let shape = self.q.shape();
        assert!(shape.len() == 3, "{name}: q must be [B, T, S], got {shape:?}");
        let last = |x: &Var| x.shape().last().copied().unwrap_or(0);
        let halved = is_stored_for(self.v.dtype(), self.q.dtype());
        let operands = [
            ("k", self.k, shape[2]),
            ("linear_q", self.linear_q, last(self.linear_q)),
            ("linear_k", self.linear_k, last(self.linear_q)),
            ("v", self.v, last(self.v)),
        ];
        for (operand, x, width) in operands {
            assert!(
                x.shape() == [shape[0], shape[1], width] && (x.dtype() == self.q.dtype() || operand == "v" && halved),
                "{name}: {operand} must be {:?} of {}, got {:?} of {} (q: {shape:?})",
                [shape[0], shape[1], width],
                self.q.dtype(),
                x.shape(),
                x.dtype()
            );
        }
        assert!(self.chunk > 0, "{name}: a chunk must have at least 1 token, got 0");
    }
}

/// `inputs` are q, k, linear_q, linear_k, v and perhaps u.
fn run(name: &'static str, inputs: &[Var], chunk: usize) -> Var {
    let blocks = value_blocks(inputs[4].dim(2));
    let operands = std::array::from_fn(|i| match i {
        4 => by_blocks(inputs[4].value(), blocks),
        _ => for_blocks(inputs[i].value(), blocks),
    });
    let u = inputs.get(5).map(|u| by_blocks(u.value(), blocks));
    let keep = inputs.len() == 6 && inputs.iter().any(Var::requires_grad);
    let narrow = inputs.iter().any(Var::is_narrow);
    let mut saved = MixedChunkBackward { name, operands, u, chunk, out: None, narrow };
    let (out, gated) = match inputs[0].dtype() {
        DType::F64 => saved.forward::<f64>(keep),
        _ => saved.forward::<f32>(keep),
    };
    let y = if inputs.len() == 6 { gated } else { out.clone() }.expect("asked for");
    saved.out = out.filter(|_| keep);
    let factors = saved.out.clone().zip(saved.u.clone());
    with_kept_factors(Var::from_op(y.reshape(inputs[4].shape()), &inputs.iter().collect::<Vec<_>>(), || saved), factors)
}

struct MixedChunkBackward {
    name: &'static str,
    /// q, k, linear_q, linear_k, the same for every block, and v by blocks: `[B, T, blocks, width]`.
    operands: [Tensor; 5],
    u: Option<Tensor>,
    chunk: usize,
    out: Option<Tensor>,
    narrow: bool,
}

/// The operands by blocks.
struct Problem<'a, E> {
    batch: usize,
    blocks: usize,
    time: usize,
    chunk: usize,
    q: Rows<'a, E>,
    k: Rows<'a, E>,
    linear_q: Rows<'a, E>,
    linear_k: Rows<'a, E>,
    v: Values<'a, E>,
    /// `1 / sqrt(S C)`.
    scale: E,
    narrow: bool,
}

impl<E: Number> Problem<'_, E> {
    /// The first tokens of all chunks.
    fn starts(&self) -> impl DoubleEndedIterator<Item = usize> + use<E> {
        (0..self.time).step_by(self.chunk)
    }

    /// Tokens of the chunk from `start` on.
    fn len(&self, start: usize) -> usize {
        self.chunk.min(self.time - start)
    }

    /// Queries, or keys, of a tile at most.
    fn tile(&self) -> usize {
        KEYS.min(self.chunk).min(self.time)
    }
}

/// `1 / n` for a chunk that begins after `n` tokens.
fn inverse<E: Real>(start: usize) -> E {
    E::from_f64(1.0 / start.max(1) as f64)
}

impl MixedChunkBackward {
    fn with_problem<E: Number, R>(&self, f: impl FnOnce(&Problem<E>) -> R) -> R {
        let [q, k, linear_q, linear_k, v] = &self.operands;
        f(&Problem {
            batch: q.dim(0),
            blocks: q.dim(2),
            time: q.dim(1),
            // A longer chunk has no end, and no sum overflows.
            chunk: self.chunk.min(q.dim(1).max(1)),
            q: Rows::new(q),
            k: Rows::new(k),
            linear_q: Rows::new(linear_q),
            linear_k: Rows::new(linear_k),
            v: Values::new(v),
            scale: Real::from_f64(1.0 / (q.dim(3) as f64 * self.chunk as f64).sqrt()),
            narrow: self.narrow,
        })
    }

    fn forward<E: Number>(&self, keep: bool) -> (Option<Tensor>, Option<Tensor>) {
        if self.operands[0].cuda().is_some() {
            return cuda::forward::<E>(self, keep);
        }
        let u = self.u.as_ref().map(Values::new);
        self.with_problem::<E, _>(|p| forward::forward(p, u.as_ref(), keep))
    }

    fn gradients<E: Number>(mut self, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        let (shape, by_blocks) = (dout.shape().to_vec(), by_blocks(&dout, self.operands[0].dim(2)));
        drop(dout); // so that it is written over
        let (dout, du) = match (&self.u, self.out.take()) {
            (Some(u), Some(out)) => {
                let Arrived { dout, dgate, .. } = arrive::<E>(by_blocks, Some(u), out, needs[5]);
                (dout, Some(dgate))
            }
            _ => (Rows::<E>::prepare(&by_blocks), None),
        };
        let out = match dout.cuda() {
            Some(_) => cuda::backward::<E>(&self, &dout),
            None => self.with_problem::<E, _>(|p| backward::backward(p, &Values::new(&dout))),
        };
        let whole = |x: Tensor| x.reshape(&shape);
        let shared = [out.dq, out.dk, out.dlinear_q, out.dlinear_k].map(|x| Some(sum_blocks(&x)));
        let grads = shared.into_iter().chain([Some(whole(out.dv))]).chain(du.map(|du| du.map(whole)));
        grads.zip(needs).map(|(grad, &needed)| grad.filter(|_| needed)).collect()
    }
}

impl Backward for MixedChunkBackward {
    fn name(&self) -> &'static str {
        self.name
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        let names = ["q", "k", "linear_q", "linear_k", "v"];
        let mut saved: Vec<(&'static str, &Tensor)> = names.into_iter().zip(&self.operands).collect();
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

/// Names and shapes of all operands for B, T, S, R, E.
fn shapes([b, t, s, r, e]: [usize; 5]) -> Vec<(&'static str, Vec<usize>)> {
    let operands = [("q", s), ("k", s), ("linear_q", r), ("linear_k", r), ("v", e), ("u", e)];
    operands.map(|(name, width)| (name, vec![b, t, width])).into()
}

fn operands(x: &[Var], chunk: usize) -> MixedChunk<'_> {
    MixedChunk { q: &x[0], k: &x[1], linear_q: &x[2], linear_k: &x[3], v: &x[4], chunk }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let case = |name: &'static str, variant, dims, chunk| {
        let shapes = shapes(dims);
        let used = if name == "mixed_chunk_attention" { 5 } else { 6 };
        let inputs: Vec<(&'static str, &[usize])> = shapes[..used].iter().map(|(n, s)| (*n, &s[..])).collect();
        let mut case = OpCase::new(name, variant, &inputs, move |_, x| {
            let all = operands(x, chunk);
            x.get(5).map_or_else(|| mixed_chunk_attention(all), |u| mixed_chunk_attention_mul(all, u))
        });
        let [q, k, ..] = &mut case.inputs[..] else { unreachable!("five inputs or six") };
        clear_scores(&mut q.1, &mut k.1);
        case
    };
    vec![
        case("mixed_chunk_attention", "T=7, C=3", [2, 7, 3, 4, 2], 3),
        case("mixed_chunk_attention", "C=1", [1, 5, 2, 2, 1], 1),
        case("mixed_chunk_attention", "C above T, more than a tile", [1, 98, 2, 3, 1], 200),
        case("mixed_chunk_attention_mul", "two blocks of values", [1, 4, 2, 3, 520], 2),
        case("mixed_chunk_attention_mul", "T=11, C=4", [2, 11, 3, 2, 3], 4),
    ]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    [([16, 256, 32, 32, 248], 64), ([1, 4096, 128, 128, 1024], 256)]
        .map(|([b, t, s, r, e], chunk)| BenchCase {
            name: "mixed_chunk_attention_mul",
            inputs: shapes([b, t, s, r, e]),
            forward: Box::new(move |_, x| mixed_chunk_attention_mul(operands(x, chunk), &x[5])),
            bytes: 4 * b * t * (2 * s + 2 * r + 3 * e),
            flops: 2 * b * t * (chunk.div_ceil(2) * (s + e) + 2 * r * e),
        })
        .into()
}

#[cfg(test)]
mod tests;
