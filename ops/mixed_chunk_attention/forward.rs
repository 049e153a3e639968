//! The forward pass, one task per batch entry and block of values.

use kumiki_tensor::{Tensor, threads};

use super::{Problem, inverse};
use crate::attention_tiles::{
    Band, Number, Rows, Scratch, SharedValues, SquaredRelu, Tile, TileProduct, TransposeRows, Values, leading,
    write_gated,
};
use crate::count::count;

/// ō and its product with `u` (each if asked for), `[B, T, blocks, width]`.
pub(super) fn forward<E: Number>(
    p: &Problem<E>,
    u: Option<&Values<E>>,
    keep: bool,
) -> (Option<Tensor>, Option<Tensor>) {
    count(|c| {
        let rows = (p.batch * p.blocks) as u64;
        let near: usize = p.starts().map(|start| p.len(start) * (p.len(start) + 1) / 2).sum();
        c.pair += rows * (near * (p.q.width + p.v.width())) as u64;
        let last = p.starts().next_back().unwrap_or(0);
        // All but the last chunk are added, all but the first read.
        let far = last + p.time.saturating_sub(p.chunk);
        c.prefix += rows * (far * p.linear_q.width * p.v.width()) as u64;
    });
    let shape = [p.batch, p.time, p.blocks, p.v.width()];
    let mut out = (keep || u.is_none()).then(|| Tensor::empty(p.v.dtype(), &shape));
    let mut gated = u.map(|u| Tensor::empty(u.dtype(), &shape));
    let outputs = [&mut out, &mut gated].map(|t| t.as_mut().map(SharedValues::new));
    let cost = p.time * (p.chunk * (p.q.width + p.v.width()) + 2 * p.linear_q.width * p.v.width());
    threads::parallel_for(p.batch * p.blocks, cost, |task| {
        block(p, u, (task / p.blocks, task % p.blocks), &outputs);
    });
    (out, gated)
}

fn block<E: Number>(
    p: &Problem<E>,
    u: Option<&Values<E>>,
    (batch, head): (usize, usize),
    [out, gated]: &[Option<SharedValues<E>>; 2],
) {
    let (size, values, features) = (p.tile(), p.v.width(), p.linear_q.width);
    let (stride, v_stride, l_stride) = (leading::<E>(size), leading::<E>(values), leading::<E>(features));
    let sizes =
        [p.q.width * stride, size * l_stride, size * stride, size * v_stride, size * v_stride, features * v_stride];
    let mut scratch = Scratch::new::<E>(sizes.iter().sum());
    let [q, l, scores, v, sums, state] = scratch.parts::<E, 6>(sizes);
    state.fill(E::ZERO);
    for start in p.starts() {
        let end = start + p.len(start);
        for i in (start..end).step_by(size) {
            let queries = size.min(end - i);
            scaled_rows(&p.linear_q, (batch, i, head), queries, inverse(start), l, l_stride);
            let depth = if start > 0 { features } else { 0 };
            TileProduct {
                rows: queries,
                depth,
                columns: values,
                a: l,
                a_strides: (l_stride, 1),
                b: state,
                b_stride: v_stride,
                c: sums,
                c_stride: v_stride,
                accumulate: false,
                band: Band::Full,
                narrow: p.narrow,
            }
            .run();
            transposed_queries(p, (batch, i, head), queries, q, stride);
            for j in (start..i + queries).step_by(size) {
                let keys = size.min(i + queries - j);
                let tile =
                    Tile { batch, head, i, queries, j, keys, diagonal: (i - j) as isize, stride, narrow: p.narrow };
                tile.transposed_product((p.k.from(batch, j, head), p.k.time_stride()), p.k.width, q, scores);
                SquaredRelu { scores, stride, keys, queries, diagonal: tile.diagonal }.run();
                p.v.copy(batch, j, head, keys, v, v_stride);
                tile.over_keys(scores, (v, v_stride), values, sums, true);
            }
            for (c, row) in sums.chunks_exact_mut(v_stride).take(queries).enumerate() {
                let (row, at) = (&mut row[..values], (batch * p.time + i + c) * p.blocks + head);
                // SAFETY: this task alone has this block of this batch entry.
                unsafe { write_gated(row, E::ONE, (batch, i + c, head), at, out.as_ref(), gated.as_ref().zip(u)) };
            }
        }
        if end < p.time {
            add_to_state(p, (batch, head), start..end, v, state);
        }
    }
}

/// `Z += Σ_j m_j ⊗ v_j` over the tokens of `range`; `v` is room for a tile of values.
pub(super) fn add_to_state<E: Number>(
    p: &Problem<E>,
    (batch, head): (usize, usize),
    range: std::ops::Range<usize>,
    v: &mut [E],
    state: &mut [E],
) {
    let (size, v_stride) = (p.tile(), leading::<E>(p.v.width()));
    for j in range.clone().step_by(size) {
        let keys = size.min(range.end - j);
        p.v.copy(batch, j, head, keys, v, v_stride);
        TileProduct {
            rows: p.linear_k.width,
            depth: keys,
            columns: p.v.width(),
            a: p.linear_k.from(batch, j, head),
            a_strides: (1, p.linear_k.time_stride()),
            b: v,
            b_stride: v_stride,
            c: state,
            c_stride: v_stride,
            accumulate: true,
            band: Band::Full,
            narrow: p.narrow,
        }
        .run();
    }
}

/// Queries times `scale`, as columns.
pub(super) fn transposed_queries<E: Number>(
    p: &Problem<E>,
    (batch, time, head): (usize, usize, usize),
    count: usize,
    out: &mut [E],
    stride: usize,
) {
    let (from, step, width) = (p.q.from(batch, time, head), p.q.time_stride(), p.q.width);
    TransposeRows { from, step, width, count, factor: p.scale, out, stride }.run();
}

/// Rows times `factor`.
pub(super) fn scaled_rows<E: Number>(
    rows: &Rows<E>,
    (batch, time, head): (usize, usize, usize),
    count: usize,
    factor: E,
    out: &mut [E],
    stride: usize,
) {
    rows.copy(batch, time, head, count, out, stride);
    out[..count * stride].iter_mut().for_each(|x| *x *= factor);
}
