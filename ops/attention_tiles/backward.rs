//! The backward pass. With `dp_ij = dout_i · v_j`:
//!
//! ```text
//! dv_j = Σ_i p_ij dout_i     dk_j = scale Σ_i ds_ij q_i     dq_i = scale Σ_j ds_ij k_j
//! softmax:       p_ij = exp(s_ij - lse_i),  ds_ij = p_ij (dp_ij - delta_i),  delta_i = dout_i · out_i
//! squared ReLU:  p_ij = relu(s_ij)²,        ds_ij = 2 relu(s_ij) dp_ij
//! ```
//!
//! One task per batch entry, head and piece of the keys holds `dk` and `dv` of its keys while queries pass by. With enough
//! heads to keep threads busy a piece is all the keys of a set; otherwise a head has up to [`MOST_PIECES`]. All pieces of a
//! head add to the same rows of `dq`, tile of queries by tile and always in the same order ([`Turns`]): no more memory than
//! one `dq`, the same bits for any number of threads, and still five products per pair.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use kumiki_tensor::{Tensor, threads};

use super::softmax::SoftmaxGradient;
use super::turns::Turns;
use super::{
    KEYS, Number, Problem, Scratch, Sees, SharedRows, SharedValues, SquaredReluGradient, Tile, TransposeRows, Values,
    Weighting, cuda, leading, packed, tile_queries,
};

/// Pieces of the keys of a head, at most, but for those that lie in two sets or, where there are blocks, hold too much.
const MOST_PIECES: usize = 4;
/// What a task holds of keys and values with their gradients, at most, where there are blocks: few see keys of the own block,
/// so that all of them would make one piece. Elsewhere a piece more is one more packing of many queries.
const HELD_BYTES: usize = 1024 * 1024;
/// Tasks that keep the threads of a large machine busy.
const ENOUGH_TASKS: usize = 32;

/// The gradient of the attention's output, and what the forward pass has left.
pub(crate) struct Upstream<'a, E> {
    /// `[B, T_q, H, G]`.
    pub dout: Values<'a, E>,
    /// `[B, H, T_q]`; for softmax.
    pub lse: Option<&'a Tensor>,
    /// `[B, T_q, H]`, what a softmax subtracts from slopes of weights: `dout` times the output, less what arrives at `lse`.
    pub delta: Option<&'a Tensor>,
}

/// The gradients of `q`, `k` and `v` as far as they are needed.
pub(crate) fn backward<E: Number>(p: &Problem<E>, up: &Upstream<E>, needs: [bool; 3]) -> [Option<Tensor>; 3] {
    let [need_q, need_k, need_v] = needs;
    let (dq, [[dk, dv]]) = backward_over(std::array::from_ref(p), up, need_q, [[need_k, need_v]]);
    [dq, dk, dv]
}

/// The gradients of `q`, and of the keys and values of every set.
type OverSets<const N: usize> = (Option<Tensor>, [[Option<Tensor>; 2]; N]);

/// As [`backward`] where one softmax was over several sets of keys, see [`super::forward_over`].
pub(crate) fn backward_over<E: Number, const N: usize>(
    sets: &[Problem<E>; N],
    up: &Upstream<E>,
    need_q: bool,
    needs: [[bool; 2]; N],
) -> OverSets<N> {
    let p = &sets[0];
    if cuda::device(p).is_some() {
        return cuda::backward(sets, up, need_q, needs);
    }
    let heads = p.batch * p.heads;
    let tensor = |need: bool, dtype, time, width| need.then(|| Tensor::empty(dtype, &[p.batch, time, p.heads, width]));
    let mut dq = tensor(need_q, E::DTYPE, p.queries, p.k.width);
    let mut of_sets: [_; N] = std::array::from_fn(|n| {
        let (p, [need_k, need_v]) = (&sets[n], needs[n]);
        [tensor(need_k, E::DTYPE, p.keys, p.k.width), tensor(need_v, p.v.dtype(), p.keys, p.v.width())]
    });
    fn shared<E: Number>(t: &mut Option<Tensor>) -> Option<SharedValues<'_, E>> {
        t.as_mut().map(SharedValues::new)
    }
    let size = tile_queries::<E>(p.queries, 2 * (KEYS + leading::<E>(p.k.width) + leading::<E>(p.v.width())));
    let tiles: Vec<_> = (0..p.batch).map(|batch| p.tiles(batch, size)).collect();
    let size = tiles.iter().flatten().map(Range::len).max().unwrap_or(0);
    let pass = Pass {
        sets,
        up,
        pieces: pieces(sets),
        size,
        turns: Turns::new(heads, tiles.iter().map(Vec::len).max().unwrap_or(0)),
        tiles,
        dq: dq.as_mut().map(|t| SharedRows::new(t.as_mut_slice::<E>())),
        of_sets: of_sets.each_mut().map(|set| set.each_mut().map(shared)),
    };
    let cost = p.queries * sets.iter().map(|p| p.keys).sum::<usize>() * (p.k.width + p.v.width());
    let (next, digits) = (AtomicUsize::new(0), packed::digits(sets));
    threads::parallel_for(heads * pass.pieces.len(), cost, |_| {
        // In this order whatever thread comes first: a piece waits for earlier ones only, which have begun then.
        let task = next.fetch_add(1, Relaxed);
        let (piece, head) = (task / heads, task % heads);
        let at = (head / p.heads, head % p.heads);
        pass.turns.or_tell_others(|| match digits {
            Some(digits) => pass.packed_piece(digits, piece, at),
            None => pass.piece(piece, at),
        });
    });
    drop(pass);
    (dq, of_sets)
}

/// Keys of one of the sets.
pub(super) struct Piece {
    set: usize,
    pub keys: Range<usize>,
}

/// Cuts the keys of all sets so that every piece has about as many visible pairs, by shape alone; at least one piece. The
/// last keys come first: in causal order their queries are the last, so that the pieces after them find those done.
fn pieces<E: Number>(sets: &[Problem<E>]) -> Vec<Piece> {
    let p = &sets[0];
    let tiles: Vec<(usize, usize)> =
        sets.iter().enumerate().flat_map(|(set, p)| (0..p.keys.div_ceil(KEYS)).map(move |tile| (set, tile))).collect();
    let most = ENOUGH_TASKS.div_ceil((p.batch * p.heads).max(1)).min(MOST_PIECES).min(tiles.len().div_ceil(4)).max(1);
    let queries: Vec<_> = (0..p.batch).map(|batch| p.tiles(batch, KEYS)).collect();
    let keys = |(set, tile): (usize, usize)| tile * KEYS..sets[set].keys.min((tile + 1) * KEYS);
    let pairs = |n: usize| {
        let (p, keys) = (&sets[tiles[n].0], keys(tiles[n]));
        let of = |batch| {
            let queries: &Vec<Range<usize>> = &queries[batch];
            queries.iter().map(|queries| queries.len() * common(&p.seen(batch, queries), &keys).len()).sum::<usize>()
        };
        (0..p.batch).map(of).sum()
    };
    let key_bytes = 2 * (leading::<E>(p.k.width) + leading::<E>(p.v.width())) * size_of::<E>();
    let held = match p.sees {
        Sees::OwnBlock(_) | Sees::EarlierBlocks(_) => (HELD_BYTES / key_bytes / KEYS).max(1),
        Sees::All | Sees::Causal => usize::MAX,
    };
    let mut pieces: Vec<Piece> = Vec::new();
    for range in balanced(tiles.len(), most, pairs) {
        for of_set in tiles[range].chunk_by(|a, b| a.0 == b.0) {
            let even = of_set.len().div_ceil(of_set.len().div_ceil(held));
            pieces.extend(of_set.chunks(even).map(|part| {
                let (first, last) = (part[0], part[part.len() - 1]);
                Piece { set: first.0, keys: keys(first).start..keys(last).end }
            }));
        }
    }
    if pieces.is_empty() {
        pieces.push(Piece { set: 0, keys: 0..0 });
    }
    pieces.reverse();
    pieces
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

/// What one task holds: a tile of queries, a tile of pairs, and its piece of the keys.
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
    /// Keys and values of the piece, and their gradients.
    k: &'a mut [E],
    v: &'a mut [E],
    dk: &'a mut [E],
    dv: &'a mut [E],
}

pub(super) struct Pass<'a, E, const N: usize> {
    pub sets: &'a [Problem<'a, E>; N],
    pub up: &'a Upstream<'a, E>,
    /// In the order in which they add to `dq`.
    pub pieces: Vec<Piece>,
    /// Queries of a tile, at most.
    size: usize,
    /// Of every batch entry.
    tiles: Vec<Vec<Range<usize>>>,
    pub turns: Turns,
    pub dq: Option<SharedRows<'a, E>>,
    pub of_sets: [[Option<SharedValues<'a, E>>; 2]; N],
}

impl<E: Number, const N: usize> Pass<'_, E, N> {
    /// The keys of a piece that some of `queries` sees; `None` when it has nothing to do with them. All queries pass by the
    /// last piece: it writes `dq` where nobody has before.
    fn seen(&self, piece: usize, batch: usize, queries: &Range<usize>) -> Option<Range<usize>> {
        let Piece { set, keys } = &self.pieces[piece];
        let seen = common(&self.sets[*set].seen(batch, queries), keys);
        (self.is_last(piece) || !seen.is_empty()).then_some(seen)
    }

    pub fn is_last(&self, piece: usize) -> bool {
        piece + 1 == self.pieces.len()
    }

    fn piece(&self, piece: usize, (batch, head): (usize, usize)) {
        let Piece { set, keys: range } = &self.pieces[piece];
        let (p, [dk_out, dv_out]) = (&self.sets[*set], &self.of_sets[*set]);
        let (width, values) = (p.k.width, p.v.width());
        let (k_stride, v_stride) = (leading::<E>(width), leading::<E>(values));
        let (size, stride, keys) = (self.size, leading::<E>(self.size), KEYS.min(range.len()));
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
        p.copy_keys(&Values::Same(p.k), (batch, head), range.clone(), k, k_stride);
        p.copy_keys(&p.v, (batch, head), range.clone(), v, v_stride);
        let needs = [self.dq.is_some(), dk_out.is_some(), dv_out.is_some()];
        let mut buffers = Buffers { q_t, q, dout_t, dout, lse, delta, weights, slopes, dq, k, v, dk, dv };

        for (n, queries) in self.tiles[batch].iter().enumerate() {
            let Some(seen) = self.seen(piece, batch, queries) else { continue };
            let before = (0..piece).filter(|&piece| self.seen(piece, batch, queries).is_some()).count();
            let (i, queries) = (queries.start, queries.len());
            buffers.dq.fill(E::ZERO);
            if !seen.is_empty() {
                let tile = Tile { batch, head, i, queries, j: 0, keys: 0, diagonal: 0, stride, narrow: p.narrow };
                buffers.pack(p, self.up, tile);
            }
            for j in seen.clone().step_by(KEYS).take_while(|_| needs.contains(&true)) {
                let keys = KEYS.min(seen.end - j);
                let tile =
                    Tile { batch, head, i, queries, j, keys, diagonal: p.diagonal(i, j), stride, narrow: p.narrow };
                buffers.pair(p, tile, j - range.start, needs);
            }
            let Some(out) = &self.dq else { continue };
            let turn = self.turns.wait(batch * p.heads + head, n, before);
            for (c, row) in buffers.dq.chunks_exact(k_stride).take(queries).enumerate() {
                // SAFETY: it is this task's turn with these queries of this head.
                let out = unsafe { out.row_mut((batch * p.queries + i + c) * p.heads + head, width) };
                match before {
                    0 => out.iter_mut().zip(row).for_each(|(y, &x)| *y = x * p.scale),
                    _ => out.iter_mut().zip(row).for_each(|(y, &x)| *y += x * p.scale),
                }
            }
            turn.pass();
        }
        for (out, rows, stride, width) in
            [(dk_out, buffers.dk, k_stride, width), (dv_out, buffers.dv, v_stride, values)]
        {
            let Some(out) = out else { continue };
            for (row, j) in rows.chunks_exact(stride).zip(range.clone()) {
                // SAFETY: this task alone has this head and these keys.
                unsafe { out.write((batch * p.keys + j) * p.heads + head, &row[..width]) };
            }
        }
    }
}

impl<E: Number> Buffers<'_, E> {
    /// Copies a tile of queries with all that belongs to it.
    fn pack(&mut self, p: &Problem<E>, up: &Upstream<E>, Tile { batch, head, i, queries, stride, .. }: Tile) {
        let (k_stride, v_stride) = (leading::<E>(p.k.width), leading::<E>(p.v.width()));
        p.q.copy(batch, i, head, queries, self.q, k_stride);
        self.q.iter_mut().for_each(|x| *x *= p.scale);
        let transpose = |from: &[E], step: usize, width: usize, out: &mut [E]| {
            TransposeRows { from, step, width, count: queries, factor: E::ONE, out, stride }.run();
        };
        transpose(self.q, k_stride, p.k.width, self.q_t);
        up.dout.copy(batch, i, head, queries, self.dout, v_stride);
        transpose(self.dout, v_stride, p.v.width(), self.dout_t);
        if let Some(lse) = up.lse {
            let lse = lse.as_slice::<E>();
            self.lse[..queries].copy_from_slice(&lse[(batch * p.heads + head) * p.queries + i..][..queries]);
            self.lse[queries..].fill(E::ZERO);
        }
        if let Some(delta) = up.delta {
            let delta = delta.as_slice::<E>();
            let of_query = |c: usize| delta[(batch * p.queries + i + c) * p.heads + head];
            self.delta.iter_mut().enumerate().for_each(|(c, x)| *x = if c < queries { of_query(c) } else { E::ZERO });
        }
    }

    /// What a tile of pairs adds to the gradients; `at` is the tile's first key within the piece.
    fn pair(&mut self, p: &Problem<E>, tile: Tile, at: usize, [need_q, need_k, need_v]: [bool; 3]) {
        let mask = p.mask(tile.batch, tile.j..tile.j + tile.keys);
        if mask.is_some_and(|mask| !mask.contains(&true)) {
            return;
        }
        let Tile { queries, keys, stride, diagonal, .. } = tile;
        let (k_stride, v_stride) = (leading::<E>(p.k.width), leading::<E>(p.v.width()));
        let need_slopes = need_q || need_k;
        let (k, v) = (&self.k[at * k_stride..], &self.v[at * v_stride..]);
        p.scores((k, k_stride), tile, self.q_t, self.weights);
        if need_slopes {
            tile.transposed_product((v, v_stride), p.v.width(), self.dout_t, self.slopes);
        }
        let (scores, slopes) = (&mut *self.weights, need_slopes.then_some(&mut *self.slopes));
        match p.weighting {
            Weighting::Softmax => {
                let (lse, delta) = (&*self.lse, &*self.delta);
                SoftmaxGradient { scores, slopes, stride, keys, queries, diagonal, lse, delta }.run();
            }
            Weighting::SquaredRelu => SquaredReluGradient { scores, slopes, stride, keys, queries, diagonal }.run(),
        }
        if need_v {
            tile.over_queries(self.weights, (self.dout, v_stride), p.v.width(), &mut self.dv[at * v_stride..]);
        }
        if need_k {
            tile.over_queries(self.slopes, (self.q, k_stride), p.k.width, &mut self.dk[at * k_stride..]);
        }
        if need_q {
            tile.over_keys(self.slopes, (k, k_stride), p.k.width, self.dq, true);
        }
    }
}
