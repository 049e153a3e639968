//! Decoding: the current chunk's keys one by one, all earlier chunks in running sums. Memory and time per token do not
//! grow.

use kumiki_tensor::{DType, Tensor, threads};

use super::forward::{add_to_state, forward};
use super::{MixedChunk, Problem, inverse};
use crate::attention_tiles::{Number, Rows, Scratch, Values, leading};
use crate::simd::{self, Real, add_outer, add_weighted_rows};

/// What [`mixed_chunk_attention`](super::mixed_chunk_attention) has to remember of the tokens so far.
#[derive(Clone, Debug)]
pub struct MixedChunkState {
    chunk: usize,
    seen: usize,
    entries: Option<Entries>,
}

#[derive(Clone, Debug)]
enum Entries {
    F32(Vec<Entry<f32>>),
    F64(Vec<Entry<f64>>),
}

/// Of one batch entry.
#[derive(Clone, Debug)]
struct Entry<E> {
    /// Rows `(k, v)` of the current chunk, at most `C`.
    near: Vec<E>,
    /// `Σ_j m_j ⊗ v_j` over the earlier chunks, `[R, E]`.
    sums: Vec<E>,
    /// The same over the current one, so that no token has more to do than another when a chunk is full.
    next: Vec<E>,
}

impl MixedChunkState {
    /// Before the first token, for chunks of at least 1.
    ///
    /// # Panics
    /// When the chunk is 0.
    #[track_caller]
    #[must_use]
    pub fn new(chunk: usize) -> MixedChunkState {
        assert!(chunk > 0, "mixed_chunk_attention: a chunk must have at least 1 token, got 0");
        MixedChunkState { chunk, seen: 0, entries: None }
    }

    /// The number of tokens seen.
    #[must_use]
    pub fn len(&self) -> usize {
        self.seen
    }

    /// Whether no token has been seen.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.seen == 0
    }

    /// Bytes held.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        fn of<E>(entries: &[Entry<E>]) -> usize {
            entries.iter().map(|e| (e.near.len() + e.sums.len() + e.next.len()) * size_of::<E>()).sum()
        }
        match &self.entries {
            None => 0,
            Some(Entries::F32(entries)) => of(entries),
            Some(Entries::F64(entries)) => of(entries),
        }
    }

    /// Takes the tokens of `x` one after the other and gives the aggregated values of each, `[B, T, E]`. The first tokens
    /// that come are taken together, as in training. Sums are in f32, in f64 for F64.
    ///
    /// # Panics
    /// When shapes or dtypes do not fit each other, the tokens before, or the chunk.
    #[track_caller]
    pub fn push(&mut self, x: MixedChunk) -> Tensor {
        x.check("mixed_chunk_attention");
        assert!(x.chunk == self.chunk, "mixed_chunk_attention: chunks of {} after chunks of {}", x.chunk, self.chunk);
        let dtype = x.q.dtype();
        if self.entries.is_none() {
            let (batch, size) = (x.v.dim(0), x.linear_k.dim(2) * x.v.dim(2));
            self.entries = Some(match dtype.compute() {
                DType::F64 => Entries::F64(vec![Entry::new(size); batch]),
                _ => Entries::F32(vec![Entry::new(size); batch]),
            });
        }
        let out = match (self.entries.as_mut(), dtype.compute()) {
            (Some(Entries::F64(entries)), DType::F64) => push(entries, self.seen, x),
            (Some(Entries::F32(entries)), DType::F32) => push(entries, self.seen, x),
            _ => panic!("mixed_chunk_attention: tokens of {dtype} after tokens of another dtype"),
        };
        self.seen += x.q.dim(1);
        out.cast(dtype)
    }
}

impl<E: Real> Entry<E> {
    fn new(size: usize) -> Entry<E> {
        Entry { near: Vec::new(), sums: vec![E::ZERO; size], next: vec![E::ZERO; size] }
    }

    /// Begins a chunk after a full one.
    fn turn(&mut self) {
        self.near.clear();
        self.sums.iter_mut().zip(&mut self.next).for_each(|(sum, next)| *sum += std::mem::replace(next, E::ZERO));
    }

    /// Takes one token; `q` and `l` are scaled already.
    fn push(&mut self, [q, k, l, m, v]: [&[E]; 5], out: &mut [E]) {
        self.near.extend(k.iter().chain(v));
        out.fill(E::ZERO);
        add_weighted_rows(out, l, &self.sums, v.len());
        add_outer(&mut self.next, m, v);
        let (width, row) = (k.len(), k.len() + v.len());
        let relu = |s: E| if s < E::ZERO { E::ZERO } else { s };
        let weights: Vec<E> =
            self.near.chunks_exact(row).map(|row| relu(simd::dot(q, &row[..width]))).map(|s| s * s).collect();
        add_weighted_rows(out, &weights, &self.near[width..], row);
    }
}

#[track_caller]
fn push<E: Number>(entries: &mut [Entry<E>], seen: usize, x: MixedChunk) -> Tensor {
    let wide = |x: &kumiki_autograd::Var| {
        let x = x.value().cast(E::DTYPE);
        Rows::<E>::prepare(&x.reshape(&[x.dim(0), x.dim(1), 1, x.dim(2)]))
    };
    let operands = [x.q, x.k, x.linear_q, x.linear_k, x.v].map(wide);
    let [batch, time, values] = [x.v.dim(0), x.v.dim(1), x.v.dim(2)];
    let (row, size) = (x.k.dim(2) + values, x.linear_k.dim(2) * values);
    assert!(
        entries.len() == batch && entries.iter().all(|e| e.near.len() % row.max(1) == 0 && e.sums.len() == size),
        "mixed_chunk_attention: tokens of other sizes than those before, got v {:?} and linear_k {:?}",
        x.v.shape(),
        x.linear_k.shape()
    );
    let [q, k, linear_q, linear_k, v] = [0, 1, 2, 3, 4].map(|i| Rows::new(&operands[i]));
    let scale = Real::from_f64(1.0 / (q.width as f64 * x.chunk as f64).sqrt());
    if seen == 0 && time > 1 {
        let chunk = x.chunk.min(time);
        let v = Values::Same(v);
        let p = Problem { batch, blocks: 1, time, chunk, q, k, linear_q, linear_k, v, scale, narrow: false };
        let out = forward(&p, None, true).0.expect("asked for");
        prefill(entries, &p);
        return out.reshape(&[batch, time, values]);
    }
    let mut out = Tensor::zeros(E::DTYPE, &[batch, time, values]);
    let (mut scaled_q, mut scaled_l) = (vec![E::ZERO; q.width], vec![E::ZERO; linear_q.width]);
    for (at, y) in out.as_mut_slice::<E>().chunks_exact_mut(values.max(1)).enumerate() {
        let (b, t) = (at / time, at % time);
        let position = seen + t;
        if position > 0 && position.is_multiple_of(x.chunk) {
            entries[b].turn();
        }
        let n = inverse::<E>(position / x.chunk * x.chunk);
        scaled_q.iter_mut().zip(q.row(b, t, 0)).for_each(|(y, &x)| *y = x * scale);
        scaled_l.iter_mut().zip(linear_q.row(b, t, 0)).for_each(|(y, &x)| *y = x * n);
        entries[b].push([&scaled_q, k.row(b, t, 0), &scaled_l, linear_k.row(b, t, 0), v.row(b, t, 0)], y);
    }
    out
}

/// What the first tokens leave: the last chunk's rows, and the sums over it and over those before.
fn prefill<E: Number>(entries: &mut [Entry<E>], p: &Problem<E>) {
    let last = (p.time - 1) / p.chunk * p.chunk;
    let (values, stride) = (p.v.width(), leading::<E>(p.v.width()));
    threads::parallel_chunks_mut(entries, 1, p.time * p.linear_k.width * values, |batch, entry| {
        let sizes = [p.tile() * stride, p.linear_k.width * stride];
        let mut scratch = Scratch::new::<E>(sizes.iter().sum());
        let [v, state] = scratch.parts::<E, 2>(sizes);
        let entry = &mut entry[0];
        for (range, sums) in [(0..last, &mut entry.sums), (last..p.time, &mut entry.next)] {
            state.fill(E::ZERO);
            add_to_state(p, (batch, 0), range, v, state);
            let rows = sums.chunks_exact_mut(values.max(1)).zip(state.chunks_exact(stride));
            rows.for_each(|(sums, state)| sums.copy_from_slice(&state[..values]));
        }
        for t in last..p.time {
            entry.near.extend(p.k.row(batch, t, 0));
            p.v.read((batch, t, 0), &mut v[..values]);
            entry.near.extend(&v[..values]);
        }
    });
}
