//! The backward pass. With `dp_ij = dout_i · v_j`:
//!
//! ```text
//! dv_j = Σ_i p_ij dout_i     dk_j = scale Σ_i ds_ij q_i     dq_i = scale Σ_j ds_ij k_j
//! softmax:       p_ij = exp(s_ij - lse_i),  ds_ij = p_ij (dp_ij - delta_i),  delta_i = dout_i · out_i
//! squared ReLU:  p_ij = relu(s_ij)²,        ds_ij = 2 relu(s_ij) dp_ij
//! ```
//!
//! One task per batch entry, head and block of keys holds `dk` and `dv` of its keys while queries pass by. With enough
//! heads to keep threads busy a block is all the keys; otherwise there are up to [`MOST_BLOCKS`], each with a `dq` of
//! its own, which are summed in order at the end: O(T·K) more memory, and still five products per pair.

use std::ops::Range;

use kumiki_tensor::{Tensor, threads};

use super::softmax::SoftmaxGradient;
use super::{
    Band, KEYS, Number, Problem, Rows, Scratch, SharedRows, SquaredReluGradient, Tile, TileProduct, TransposeRows,
    Weighting, leading, tile_queries,
};
use crate::simd;

/// Blocks of keys of a head, at most.
const MOST_BLOCKS: usize = 4;
/// Tasks that keep the threads of a large machine busy.
const ENOUGH_TASKS: usize = 32;

/// The gradient that arrives, and what the forward pass has left.
pub(crate) struct Upstream<'a, E> {
    /// `[B, T_q, H, G]`.
    pub dout: Rows<'a, E>,
    /// What the attention was multiplied with: the gradient of its output is `dout ⊙ gate`.
    pub gate: Option<Rows<'a, E>>,
    /// The output of the attention, before the gate; for softmax, or when there is a gate.
    pub out: Option<Rows<'a, E>>,
    /// `[B, H, T_q]`; for softmax.
    pub lse: Option<&'a [E]>,
}

/// The gradients of `q`, `k`, `v` and the gate as far as they are needed.
pub(crate) fn backward<E: Number>(p: &Problem<E>, up: &Upstream<E>, needs: [bool; 4]) -> [Option<Tensor>; 4] {
    let blocks = key_blocks(p);
    let (queries, keys) = ([p.batch, p.queries, p.heads], [p.batch, p.keys, p.heads]);
    let tensor = |[b, t, h]: [usize; 3], width: usize| Tensor::empty(E::DTYPE, &[b, t, h, width]);
    let mut dq = needs[0].then(|| tensor([blocks.len() * queries[0], queries[1], queries[2]], p.k.width));
    let mut dk = needs[1].then(|| tensor(keys, p.k.width));
    let mut dv = needs[2].then(|| tensor(keys, p.v.width));
    let mut dgate = needs[3].then(|| tensor(queries, p.v.width));
    let outputs =
        [&mut dq, &mut dk, &mut dv, &mut dgate].map(|t| t.as_mut().map(|t| SharedRows::new(t.as_mut_slice::<E>())));
    let cost = p.queries * p.keys * (p.k.width + p.v.width);
    threads::parallel_for(p.batch * p.heads * blocks.len(), cost, |task| {
        let (head, block) = (task / blocks.len(), task % blocks.len());
        key_block(p, up, (head / p.heads, head % p.heads), block, blocks[block].clone(), &outputs);
    });
    [dq.map(|dq| summed::<E>(dq, p, blocks.len())), dk, dv, dgate]
}

/// Cuts the keys so that every block has about as many visible pairs, by shape alone.
fn key_blocks<E: Number>(p: &Problem<E>) -> Vec<Range<usize>> {
    let tiles = p.keys.div_ceil(KEYS);
    let wanted = ENOUGH_TASKS.div_ceil((p.batch * p.heads).max(1)).min(MOST_BLOCKS).min(tiles.div_ceil(4)).max(1);
    let tiles_of_queries: Vec<_> = (0..p.batch)
        .flat_map(|batch| p.tiles(batch, KEYS).into_iter().map(move |queries| (queries.len(), p.seen(batch, &queries))))
        .collect();
    let pairs = |tile: usize| {
        let keys = tile * KEYS..p.keys.min((tile + 1) * KEYS);
        tiles_of_queries.iter().map(|(queries, seen)| queries * common(seen, &keys).len()).sum()
    };
    let blocks = balanced(tiles, wanted, pairs).into_iter();
    blocks.map(|tiles| tiles.start * KEYS..p.keys.min(tiles.end * KEYS)).collect()
}

/// Cuts `0..items` into at most `wanted` ranges of about the same cost, in order; one empty range when there are no items.
pub(crate) fn balanced(items: usize, wanted: usize, cost: impl Fn(usize) -> usize) -> Vec<Range<usize>> {
    let total: usize = (0..items).map(&cost).sum();
    let (mut ends, mut seen) = (vec![0], 0);
    for item in 0..items {
        seen += cost(item);
        if seen * wanted >= total * ends.len() && ends.len() < wanted {
            ends.push(item + 1);
        }
    }
    ends.push(items);
    ends.windows(2).filter(|w| w[0] < w[1] || w[1] == 0).map(|w| w[0]..w[1]).collect()
}

/// What two ranges have in common; an empty range where that is nothing.
fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// The sum of `dq` over blocks, `[blocks · B, T, H, K]` to `[B, T, H, K]`.
fn summed<E: Number>(parts: Tensor, p: &Problem<E>, blocks: usize) -> Tensor {
    let shape = [p.batch, p.queries, p.heads, p.k.width];
    if blocks == 1 {
        return parts;
    }
    const CHUNK: usize = 16 * 1024;
    let mut dq = Tensor::empty(E::DTYPE, &shape);
    let (parts, size) = (parts.as_slice::<E>(), dq.len());
    threads::parallel_chunks_mut(dq.as_mut_slice::<E>(), CHUNK, blocks * CHUNK, |i, piece| {
        piece.copy_from_slice(&parts[i * CHUNK..][..piece.len()]);
        for block in 1..blocks {
            let part = &parts[block * size + i * CHUNK..];
            piece.iter_mut().zip(part).for_each(|(y, &x)| *y += x);
        }
    });
    dq
}

/// What one task holds: a tile of queries, a tile of pairs, and its block of keys.
struct Buffers<'a, E> {
    /// Packed queries: transposed, and as rows; both times `scale`.
    q_t: &'a mut [E],
    q: &'a mut [E],
    /// The gradient of the attention's output, in the same two forms.
    dout_t: &'a mut [E],
    dout: &'a mut [E],
    lse: &'a mut [E],
    delta: &'a mut [E],
    weights: &'a mut [E],
    slopes: &'a mut [E],
    dq: &'a mut [E],
    /// Keys and values of the block, and their gradients.
    k: &'a mut [E],
    v: &'a mut [E],
    dk: &'a mut [E],
    dv: &'a mut [E],
}

fn key_block<E: Number>(
    p: &Problem<E>,
    up: &Upstream<E>,
    (batch, head): (usize, usize),
    block: usize,
    range: Range<usize>,
    [dq_out, dk_out, dv_out, dgate_out]: &[Option<SharedRows<E>>; 4],
) {
    let (width, values) = (p.k.width, p.v.width);
    let (k_stride, v_stride) = (leading::<E>(width), leading::<E>(values));
    let size = tile_queries::<E>(p.queries, 2 * (KEYS + k_stride + v_stride));
    let (stride, keys) = (leading::<E>(size), KEYS.min(range.len()));
    let sizes = [
        width * stride,
        size * k_stride,
        values * stride,
        size * v_stride,
        stride,
        stride,
        keys * stride,
        keys * stride,
        size * k_stride,
        range.len() * k_stride,
        range.len() * v_stride,
        range.len() * k_stride,
        range.len() * v_stride,
    ];
    let mut scratch = Scratch::new::<E>(sizes.iter().sum());
    let [q_t, q, dout_t, dout, lse, delta, weights, slopes, dq, k, v, dk, dv] = scratch.parts::<E, 13>(sizes);
    dk.fill(E::ZERO);
    dv.fill(E::ZERO);
    p.copy_keys(&p.k, (batch, head), range.clone(), k, k_stride);
    p.copy_keys(&p.v, (batch, head), range.clone(), v, v_stride);
    let needs = [dq_out, dk_out, dv_out].map(Option::is_some);
    let mut buffers = Buffers { q_t, q, dout_t, dout, lse, delta, weights, slopes, dq, k, v, dk, dv };

    for queries in p.tiles(batch, size) {
        let seen = common(&p.seen(batch, &queries), &range);
        let (i, queries) = (queries.start, queries.len());
        buffers.dq.fill(E::ZERO);
        // All queries pass by the first block.
        let dgate = dgate_out.as_ref().filter(|_| block == 0);
        if !seen.is_empty() || dgate.is_some() {
            buffers.pack(p, up, Tile { batch, head, i, queries, j: 0, keys: 0, diagonal: 0, stride }, dgate);
        }
        for j in seen.clone().step_by(KEYS).take_while(|_| needs.contains(&true)) {
            let keys = KEYS.min(seen.end - j);
            let tile = Tile { batch, head, i, queries, j, keys, diagonal: p.diagonal(i, j), stride };
            buffers.pair(p, tile, j - range.start, needs);
        }
        if let Some(out) = dq_out {
            for (c, row) in buffers.dq.chunks_exact(k_stride).take(queries).enumerate() {
                // SAFETY: this task alone has this block's part for this head.
                let out =
                    unsafe { out.row_mut(((block * p.batch + batch) * p.queries + i + c) * p.heads + head, width) };
                out.iter_mut().zip(row).for_each(|(y, &x)| *y = x * p.scale);
            }
        }
    }
    for (out, rows, stride, width) in [(dk_out, buffers.dk, k_stride, width), (dv_out, buffers.dv, v_stride, values)] {
        let Some(out) = out else { continue };
        for (row, j) in rows.chunks_exact(stride).zip(range.clone()) {
            // SAFETY: this task alone has this head and these keys.
            let out = unsafe { out.row_mut((batch * p.keys + j) * p.heads + head, width) };
            out.copy_from_slice(&row[..width]);
        }
    }
}

impl<E: Number> Buffers<'_, E> {
    /// Copies a tile of queries with all that belongs to it, and writes their gradient of the gate where it is wanted.
    fn pack(
        &mut self,
        p: &Problem<E>,
        up: &Upstream<E>,
        Tile { batch, head, i, queries, stride, .. }: Tile,
        dgate: Option<&SharedRows<E>>,
    ) {
        let (k_stride, v_stride) = (leading::<E>(p.k.width), leading::<E>(p.v.width));
        p.q.copy(batch, i, head, queries, self.q, k_stride);
        self.q.iter_mut().for_each(|x| *x *= p.scale);
        let transpose = |from: &[E], step: usize, width: usize, out: &mut [E]| {
            TransposeRows { from, step, width, count: queries, factor: E::ONE, out, stride }.run();
        };
        transpose(self.q, k_stride, p.k.width, self.q_t);
        up.dout.copy(batch, i, head, queries, self.dout, v_stride);
        for (c, dout) in self.dout.chunks_exact_mut(v_stride).take(queries).enumerate() {
            let (dout, out) = (&mut dout[..p.v.width], up.out.map(|out| out.row(batch, i + c, head)));
            if let (Some(dgate), Some(out)) = (dgate, out) {
                // SAFETY: the task of this head's first block alone has these queries.
                let dgate = unsafe { dgate.row_mut((batch * p.queries + i + c) * p.heads + head, p.v.width) };
                dgate.iter_mut().zip(dout.iter().zip(out)).for_each(|(y, (&d, &o))| *y = d * o);
            }
            if let Some(gate) = &up.gate {
                dout.iter_mut().zip(gate.row(batch, i + c, head)).for_each(|(y, &g)| *y *= g);
            }
            if let (Weighting::Softmax, Some(out)) = (p.weighting, out) {
                self.delta[c] = simd::dot(dout, out);
            }
        }
        transpose(self.dout, v_stride, p.v.width, self.dout_t);
        if let Some(lse) = up.lse {
            self.lse[..queries].copy_from_slice(&lse[(batch * p.heads + head) * p.queries + i..][..queries]);
            self.lse[queries..].fill(E::ZERO);
            self.delta[queries..].fill(E::ZERO);
        }
    }

    /// What a tile of pairs adds to the gradients; `at` is the tile's first key within the block.
    fn pair(&mut self, p: &Problem<E>, tile: Tile, at: usize, [need_q, need_k, need_v]: [bool; 3]) {
        let mask = p.mask(tile.batch, tile.j..tile.j + tile.keys);
        if mask.is_some_and(|mask| !mask.contains(&true)) {
            return;
        }
        let Tile { queries, keys, stride, diagonal, .. } = tile;
        let (k_stride, v_stride) = (leading::<E>(p.k.width), leading::<E>(p.v.width));
        let need_slopes = need_q || need_k;
        let (k, v) = (&self.k[at * k_stride..], &self.v[at * v_stride..]);
        p.scores((k, k_stride), tile, self.q_t, self.weights);
        if need_slopes {
            tile.transposed_product((v, v_stride), p.v.width, self.dout_t, self.slopes);
        }
        let (scores, slopes) = (&mut *self.weights, need_slopes.then_some(&mut *self.slopes));
        match p.weighting {
            Weighting::Softmax => {
                let (lse, delta) = (&*self.lse, &*self.delta);
                SoftmaxGradient { scores, slopes, stride, keys, queries, diagonal, lse, delta }.run();
            }
            Weighting::SquaredRelu => SquaredReluGradient { scores, slopes, stride, keys, queries, diagonal }.run(),
        }
        let per_key = |a: &[E], b: &[E], c: &mut [E], b_stride: usize, columns: usize| {
            TileProduct {
                rows: keys,
                depth: queries,
                columns,
                a,
                a_strides: (stride, 1),
                b,
                b_stride,
                c: &mut c[at * b_stride..],
                c_stride: b_stride,
                accumulate: true,
                band: tile.band(Band::DepthFrom),
            }
            .run();
        };
        if need_v {
            per_key(self.weights, self.dout, self.dv, v_stride, p.v.width);
        }
        if need_k {
            per_key(self.slopes, self.q, self.dk, k_stride, p.k.width);
        }
        if need_q {
            TileProduct {
                rows: queries,
                depth: keys,
                columns: p.k.width,
                a: self.slopes,
                a_strides: (1, stride),
                b: k,
                b_stride: k_stride,
                c: self.dq,
                c_stride: k_stride,
                accumulate: true,
                band: tile.band(Band::DepthTo),
            }
            .run();
        }
    }
}
