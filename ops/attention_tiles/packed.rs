//! Both passes on CPUs whose products of packed factors are sooner than vectors of F32: keys, values, queries and gradients
//! of a head are packed once, as [`Prepacked`], and meet in larger tiles than elsewhere, so that a sum of weighted rows is one
//! long product instead of many that add to it. Narrow products are of rounded factors, others of all digits.
//!
//! Forward, a task has some queries of a head: [`CHUNK`] keys at a time, `Sᵀ = K·Qᵀ`, weights, `out += P·V`. Backward, a task
//! has a piece of the keys: for each tile of them all queries that see it, `dv = P·dout`, `dk = dS·q`, `dq += dSᵀ·k`.
//! Softmax and its sums are in F32, as everywhere.

use super::backward::{Pass, Upstream};
use super::factors::{matrix, part, product, scaled, stride};
use super::forward::{Outputs, Sums, finish};
use super::softmax::{SoftmaxGradient, SoftmaxStep};
use super::{Number, Problem, Scratch, Sees, SquaredRelu, SquaredReluGradient, Values, Weighting, leading, scale};
use crate::gemm::packed::{Digits, Prepacked, UNIT};
use crate::gemm::{MatRef, Operand, Side};
use kumiki_tensor::threads;

/// Keys (forward) or queries (backward) that meet a tile together.
const CHUNK: usize = 512;
/// Queries (forward) or keys (backward) of a tile.
const TILE: usize = 128;
/// Queries of a task in the forward pass: so many use keys and values that were packed once.
const GROUP: usize = 512;

/// How factors are packed if a problem is for these passes; a small one is done before they would be.
pub(super) fn digits<E: Number>(sets: &[Problem<E>]) -> Option<Digits> {
    let [p] = sets else { return None };
    let plain = matches!(p.sees, Sees::All | Sees::Causal) && p.key_mask.is_none() && p.pair_mask.is_none();
    let large = p.queries.min(p.keys) >= UNIT && p.k.width + p.v.width() >= UNIT;
    p.v.digits(p.narrow).filter(|_| plain && large)
}

impl<E: Number> Values<'_, E> {
    /// `count` rows of a head, as they are stored.
    pub fn matrix(&self, (batch, time, head): (usize, usize, usize), count: usize) -> Operand<'_> {
        match self {
            Values::Same(rows) => matrix(rows.from(batch, time, head), count, rows.width, (rows.time_stride(), 1)),
            Values::Half(rows) => Operand::BF16(MatRef {
                data: rows.from(batch, time, head),
                offset: 0,
                rows: count,
                cols: rows.width,
                row_stride: rows.time_stride(),
                col_stride: 1,
            }),
        }
    }
}

impl<E: Number> Problem<'_, E> {
    /// The first query that sees key `j`.
    fn first_query(&self, j: usize) -> usize {
        match self.sees {
            Sees::Causal => j.saturating_sub(self.keys - self.queries),
            _ => 0,
        }
    }
}

/// Fills the outputs of [`super::forward`].
pub(super) fn forward<E: Number>(p: &Problem<E>, digits: Digits, gate: Option<&Values<E>>, outputs: &Outputs<E>) {
    let groups = p.queries.div_ceil(GROUP);
    let cost = GROUP * p.keys * (p.k.width + p.v.width()) / 8;
    threads::parallel_for(p.batch * p.heads * groups, cost, |task| {
        // The last groups see most: they come first.
        let (head, group) = (task % (p.batch * p.heads), groups - 1 - task / (p.batch * p.heads));
        let range = group * GROUP..p.queries.min((group + 1) * GROUP);
        group_of_queries((p, digits), gate, (head / p.heads, head % p.heads), range, outputs);
    });
}

fn group_of_queries<E: Number>(
    (p, digits): (&Problem<E>, Digits),
    gate: Option<&Values<E>>,
    (batch, head): (usize, usize),
    range: std::ops::Range<usize>,
    outputs: &Outputs<E>,
) {
    let (width, values, all) = (p.k.width, p.v.width(), range.len().next_multiple_of(TILE));
    let seen = p.seen(batch, &range);
    let chunk = CHUNK.min(p.keys.next_multiple_of(UNIT));
    let (s_stride, v_stride, q_stride) = (stride(TILE), stride(values), leading::<E>(width));
    let sizes = [range.len() * q_stride, chunk * s_stride, all * v_stride, all, all, all];
    let mut scratch = Scratch::new::<E>(sizes.iter().sum());
    let [rows, scores, acc, shift, sum, factor] = scratch.parts::<E, 6>(sizes);
    let mut k = Prepacked::new(digits, Side::A, chunk, width);
    let mut v = Prepacked::new(digits, Side::B, values, chunk);
    let mut q = Prepacked::new(digits, Side::B, range.len(), width);
    let mut weights = Prepacked::new(digits, Side::A, TILE, chunk);
    p.q.copy(batch, range.start, head, range.len(), rows, q_stride);
    scale(rows, p.scale);
    q.pack((0, 0), matrix(rows, range.len(), width, (q_stride, 1)));
    shift.fill(p.bounds[head].unwrap_or(E::NEG_INFINITY));
    sum.fill(E::ZERO);
    let fixed = p.bounds[head].is_some() || p.weighting == Weighting::SquaredRelu;

    for j in seen.clone().step_by(chunk) {
        let keys = chunk.min(seen.end - j);
        k.pack((0, 0), Values::Same(p.k).matrix((batch, j, head), keys));
        v.pack((0, 0), p.v.matrix((batch, j, head), keys).t());
        for at in (0..range.len()).step_by(TILE) {
            let queries = TILE.min(range.len() - at);
            let i = range.start + at;
            let keys = keys.min(p.seen(batch, &(i..i + queries)).end.saturating_sub(j));
            if keys == 0 {
                continue;
            }
            product([part(&k, 0, 0), part(&q, at, 0)], [keys, queries, width], (scores, s_stride), false);
            let (shift, sum, factor) = (&mut shift[at..], &mut sum[at..], &mut factor[at..]);
            let (stride, diagonal) = (s_stride, p.diagonal(i, j));
            match p.weighting {
                Weighting::Softmax => {
                    SoftmaxStep { scores, stride, keys, queries, diagonal, fixed, shift, sum, factor }.run();
                }
                Weighting::SquaredRelu => SquaredRelu { scores, stride, keys, queries, diagonal }.run(),
            }
            let acc = &mut acc[at * v_stride..];
            if j > seen.start && !fixed {
                for (row, &factor) in acc.chunks_exact_mut(v_stride).zip(&*factor).take(queries) {
                    if factor != E::ONE {
                        scale(row, factor);
                    }
                }
            }
            weights.pack((0, 0), matrix(scores, queries, keys, (1, s_stride)));
            product([part(&weights, 0, 0), part(&v, 0, 0)], [queries, values, keys], (acc, v_stride), j > seen.start);
        }
    }
    for at in (0..range.len()).step_by(TILE) {
        let queries = TILE.min(range.len() - at);
        let sums = Sums { acc: &mut acc[at * v_stride..], stride: v_stride, sum: &sum[at..], shift: &shift[at..] };
        finish(p, gate, (batch, head, range.start + at), sums, queries, outputs);
    }
}

/// The queries of a head, scaled, and the gradients of their outputs, each on side B in both directions.
struct Queries {
    /// `[T_q, K]`, and `[K, T_q]`.
    q_t: Prepacked,
    q: Prepacked,
    /// `[T_q, G]`, and `[G, T_q]`.
    dout_t: Prepacked,
    dout: Prepacked,
}

impl Queries {
    /// Those from `first` on; fills in `delta`.
    fn pack<E: Number>(
        (p, digits): (&Problem<E>, Digits),
        up: &Upstream<E>,
        (batch, head): (usize, usize),
        first: usize,
        delta: &mut [E],
    ) -> Queries {
        let (width, values, time) = (p.k.width, p.v.width(), p.queries);
        let [mut q_t, mut q, mut dout_t, mut dout] = [(time, width), (width, time), (time, values), (values, time)]
            .map(|(rows, terms)| Prepacked::new(digits, Side::B, rows, terms));
        scaled(
            &p.q,
            (batch, first, head),
            time - first,
            |_| p.scale,
            |i, queries| {
                q_t.pack((first + i, 0), queries);
                q.pack((0, first + i), queries.t());
            },
        );
        let all = up.dout.matrix((batch, first, head), time - first);
        dout_t.pack((first, 0), all);
        dout.pack((0, first), all.t());
        if let Some(of_all) = up.delta {
            let of_all = of_all.as_slice::<E>();
            for (i, delta) in delta.iter_mut().enumerate().take(time).skip(first) {
                *delta = of_all[(batch * time + i) * p.heads + head];
            }
        }
        Queries { q_t, q, dout_t, dout }
    }
}

impl<E: Number, const N: usize> Pass<'_, E, N> {
    /// As [`Pass::piece`] of a problem that is for [packed factors](digits).
    pub(super) fn packed_piece(&self, digits: Digits, piece: usize, (batch, head): (usize, usize)) {
        let (p, up, range) = (&self.sets[0], self.up, self.pieces[piece].keys.clone());
        let [dk_out, dv_out] = &self.of_sets[0];
        let (width, values, time) = (p.k.width, p.v.width(), p.queries);
        let first = p.first_query(range.start) / UNIT * UNIT;
        let (chunk, padded) = (CHUNK.min(time.next_multiple_of(UNIT)), time.next_multiple_of(UNIT));
        let (s_stride, k_stride, v_stride) = (stride(chunk), stride(width), stride(values));
        let sizes =
            [padded, padded, TILE * s_stride, TILE * s_stride, TILE * k_stride, TILE * v_stride, padded * k_stride];
        let mut scratch = Scratch::new::<E>(sizes.iter().sum());
        let [lse, delta, scores, slopes, dk, dv, dq] = scratch.parts::<E, 7>(sizes);
        lse.fill(E::ZERO);
        delta.fill(E::ZERO);
        if let Some(all) = up.lse {
            let all = all.as_slice::<E>();
            lse[..time].copy_from_slice(&all[(batch * p.heads + head) * time..][..time]);
        }
        let all = Queries::pack((p, digits), up, (batch, head), first, delta);
        let (mut k, mut v) =
            (Prepacked::new(digits, Side::A, TILE, width), Prepacked::new(digits, Side::A, TILE, values));
        let mut k_t = Prepacked::new(digits, Side::B, width, TILE);
        let mut by_key = Prepacked::new(digits, Side::A, TILE, chunk);
        let mut by_query = Prepacked::new(digits, Side::A, chunk, TILE);
        dq.fill(E::ZERO);

        let needs = [self.dq.is_some(), dk_out.is_some(), dv_out.is_some()];
        let [need_q, need_k, need_v] = needs;
        for j in range.clone().step_by(TILE).take_while(|_| needs.contains(&true)) {
            let keys = TILE.min(range.end - j);
            let rows_of_k = Values::Same(p.k);
            let of_tile = rows_of_k.matrix((batch, j, head), keys);
            k.pack((0, 0), of_tile);
            k_t.pack((0, 0), of_tile.t());
            v.pack((0, 0), p.v.matrix((batch, j, head), keys));
            // The last query sees every key, so that there is one.
            let from = p.first_query(j) / UNIT * UNIT;
            for i in (from..time).step_by(chunk) {
                let queries = chunk.min(time - i);
                product([part(&k, 0, 0), part(&all.q_t, i, 0)], [keys, queries, width], (scores, s_stride), false);
                if need_q || need_k {
                    product(
                        [part(&v, 0, 0), part(&all.dout_t, i, 0)],
                        [keys, queries, values],
                        (slopes, s_stride),
                        false,
                    );
                }
                let (stride, diagonal) = (s_stride, p.diagonal(i, j));
                let of_tile = (&mut *scores, (need_q || need_k).then_some(&mut *slopes));
                match (p.weighting, of_tile) {
                    (Weighting::Softmax, (scores, slopes)) => {
                        let (lse, delta) = (&lse[i..], &delta[i..]);
                        SoftmaxGradient { scores, slopes, stride, keys, queries, diagonal, lse, delta }.run();
                    }
                    (Weighting::SquaredRelu, (scores, slopes)) => {
                        SquaredReluGradient { scores, slopes, stride, keys, queries, diagonal }.run();
                    }
                }
                let sums = [
                    (need_v, &*scores, &all.dout, &mut *dv, values, v_stride),
                    (need_k, &*slopes, &all.q, &mut *dk, width, k_stride),
                ];
                for (_, weights, rows, sum, columns, stride) in sums.into_iter().filter(|(needed, ..)| *needed) {
                    by_key.pack((0, 0), matrix(weights, keys, queries, (s_stride, 1)));
                    let factors = [part(&by_key, 0, 0), part(rows, 0, i)];
                    product(factors, [keys, columns, queries], (sum, stride), i > from);
                }
                if need_q {
                    by_query.pack((0, 0), matrix(slopes, queries, keys, (1, s_stride)));
                    let dq = &mut dq[i * k_stride..];
                    product([part(&by_query, 0, 0), part(&k_t, 0, 0)], [queries, width, keys], (dq, k_stride), true);
                }
            }
            for (out, rows, stride, width) in [(dk_out, &*dk, k_stride, width), (dv_out, &*dv, v_stride, values)] {
                let Some(out) = out else { continue };
                for (c, row) in rows.chunks_exact(stride).take(keys).enumerate() {
                    // SAFETY: this task alone has this head and these keys.
                    unsafe { out.write((batch * p.keys + j + c) * p.heads + head, &row[..width]) };
                }
            }
        }
        let Some(out) = &self.dq else { return };
        let turn = self.turns.wait(batch * p.heads + head, 0, piece);
        for (i, row) in dq.chunks_exact(k_stride).take(time).enumerate() {
            // SAFETY: it is this task's turn with this head.
            let out = unsafe { out.row_mut((batch * time + i) * p.heads + head, width) };
            match piece {
                0 => out.iter_mut().zip(row).for_each(|(y, &x)| *y = x * p.scale),
                _ => out.iter_mut().zip(row).for_each(|(y, &x)| *y += x * p.scale),
            }
        }
        turn.pass();
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::{Operator, follows_plain_f32};
    use crate::{AttentionOptions, attention, causal_attention, gate_aggregate_mul, gau_attention_mul};

    /// Around tiles, chunks, groups and pieces.
    #[test]
    fn shapes_of_every_kind_follow_f32() {
        let gate: Operator = |x| gate_aggregate_mul(&x[0], &x[1], &x[2], &crate::exp(&x[4]), &x[3]);
        let gau: Operator = |x| gau_attention_mul(&x[0], &x[1], &x[2], &x[3]);
        let causal: Operator = |x| causal_attention(&x[0], &x[1], &x[2]);
        let all: Operator =
            |x| attention(&x[0], &x[1], &x[2], &AttentionOptions { causal: false, ..AttentionOptions::default() });
        let heads = |[b, tq, tk, h, k, g]: [usize; 6]| {
            vec![vec![b, tq, h, k], vec![b, tk, h, k], vec![b, tk, h, g], vec![b, tq, h, g], vec![h]]
        };
        let flat = |[b, tq, tk, k, g]: [usize; 5]| vec![vec![b, tq, k], vec![b, tk, k], vec![b, tk, g], vec![b, tq, g]];
        let cases: [(&str, Vec<Vec<usize>>, Operator); 10] = [
            ("gate, one unit", heads([1, 32, 32, 1, 4, 40]), gate),
            ("gate, past a chunk", heads([1, 530, 530, 2, 8, 33]), gate),
            ("gate, wide", heads([1, 530, 530, 1, 8, 150]), gate),
            ("gate, the last 45 of 700", heads([2, 45, 700, 1, 16, 70]), gate),
            ("gau", flat([2, 200, 200, 20, 130]), gau),
            ("gau, pieces of one head", flat([1, 1100, 1100, 32, 64]), gau),
            ("causal, past a group", heads([1, 1030, 1030, 1, 12, 24])[..3].to_vec(), causal),
            ("causal, wide keys", heads([1, 129, 131, 2, 100, 8])[..3].to_vec(), causal),
            ("all, more keys", heads([1, 33, 600, 2, 9, 31])[..3].to_vec(), all),
            ("all, more queries", heads([1, 600, 35, 2, 9, 31])[..3].to_vec(), all),
        ];
        for (name, shapes, f) in &cases {
            // What tau gets sums up what all of q gets, along q, and most of it cancels.
            follows_plain_f32(name, shapes, *f, &[(4, 0)]);
        }
    }
}
