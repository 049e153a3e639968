//! The backward pass, one task per batch entry and block of values: from the left for what needs `Z`, then from the right
//! for what needs `Y` and for the pairs inside of chunks.

use kumiki_tensor::{Tensor, threads};

use super::forward::{scaled_rows, transposed_queries};
use super::{Problem, inverse};
use crate::attention_tiles::{
    Band, Number, Scratch, SharedRows, SharedValues, SquaredReluGradient, Tile, TileProduct, TransposeRows, Values,
    leading,
};

/// By blocks: what operands that all blocks share get from each.
pub(super) struct Gradients {
    pub dq: Tensor,
    pub dk: Tensor,
    pub dlinear_q: Tensor,
    pub dlinear_k: Tensor,
    pub dv: Tensor,
}

/// From `dō = dout ⊙ u`, by blocks.
pub(super) fn backward<E: Number>(p: &Problem<E>, dout: &Values<E>) -> Gradients {
    let tensor = |width: usize| Tensor::empty(E::DTYPE, &[p.batch, p.time, p.blocks, width]);
    let (mut dq, mut dk) = (tensor(p.q.width), tensor(p.q.width));
    let (mut dlinear_q, mut dlinear_k) = (tensor(p.linear_q.width), tensor(p.linear_q.width));
    let mut dv = Tensor::empty(p.v.dtype(), &[p.batch, p.time, p.blocks, p.v.width()]);
    let outputs = Outputs {
        dq: SharedRows::new(dq.as_mut_slice::<E>()),
        dk: SharedRows::new(dk.as_mut_slice::<E>()),
        dlinear_q: SharedRows::new(dlinear_q.as_mut_slice::<E>()),
        dlinear_k: SharedRows::new(dlinear_k.as_mut_slice::<E>()),
        dv: SharedValues::new(&mut dv),
    };
    let cost = 3 * p.time * (p.chunk * (p.q.width + p.v.width()) + 2 * p.linear_q.width * p.v.width());
    threads::parallel_for(p.batch * p.blocks, cost, |task| {
        let at = (task / p.blocks, task % p.blocks);
        left_to_right(p, dout, at, &outputs);
        right_to_left(p, dout, at, &outputs);
    });
    Gradients { dq, dk, dlinear_q, dlinear_k, dv }
}

struct Outputs<'a, E> {
    dq: SharedRows<'a, E>,
    dk: SharedRows<'a, E>,
    dlinear_q: SharedRows<'a, E>,
    dlinear_k: SharedRows<'a, E>,
    dv: SharedValues<'a, E>,
}

/// Copies `count` rows, times `factor`, to those of an output from time `i` on.
fn write_rows<E: Number>(
    p: &Problem<E>,
    (batch, i, head): (usize, usize, usize),
    count: usize,
    out: &SharedRows<E>,
    (rows, stride): (&[E], usize),
    (width, factor): (usize, E),
) {
    for (c, row) in rows.chunks_exact(stride).take(count).enumerate() {
        // SAFETY: the task of this block of this batch entry calls, and holds no other row.
        let out = unsafe { out.row_mut((batch * p.time + i + c) * p.blocks + head, width) };
        out.iter_mut().zip(row).for_each(|(y, &x)| *y = factor * x);
    }
}

/// `dl_i = Z dō_i / n_i`, with `Z` transposed.
fn left_to_right<E: Number>(p: &Problem<E>, dout: &Values<E>, (batch, head): (usize, usize), out: &Outputs<E>) {
    let (size, values, features) = (p.tile(), p.v.width(), p.linear_q.width);
    let (v_stride, l_stride) = (leading::<E>(values), leading::<E>(features));
    // Rows of `dō`, then of values.
    let sizes = [size * v_stride, size * l_stride, values * l_stride];
    let mut scratch = Scratch::new::<E>(sizes.iter().sum());
    let [d, rows, state] = scratch.parts::<E, 3>(sizes);
    state.fill(E::ZERO);
    for start in p.starts() {
        let end = start + p.len(start);
        for i in (start..end).step_by(size) {
            let count = size.min(end - i);
            dout.copy(batch, i, head, count, d, v_stride);
            TileProduct {
                rows: count,
                depth: if start > 0 { values } else { 0 },
                columns: features,
                a: d,
                a_strides: (v_stride, 1),
                b: state,
                b_stride: l_stride,
                c: rows,
                c_stride: l_stride,
                accumulate: false,
                band: Band::Full,
                narrow: p.narrow,
            }
            .run();
            write_rows(p, (batch, i, head), count, &out.dlinear_q, (rows, l_stride), (features, inverse(start)));
        }
        for j in (start..end).step_by(size).take_while(|_| end < p.time) {
            let count = size.min(end - j);
            p.linear_k.copy(batch, j, head, count, rows, l_stride);
            p.v.copy(batch, j, head, count, d, v_stride);
            TileProduct {
                rows: values,
                depth: count,
                columns: features,
                a: d,
                a_strides: (1, v_stride),
                b: rows,
                b_stride: l_stride,
                c: state,
                c_stride: l_stride,
                accumulate: true,
                band: Band::Full,
                narrow: p.narrow,
            }
            .run();
        }
    }
}

/// What one task holds: a tile of queries in the forms that products need, a tile of pairs, a chunk of keys with their
/// gradients, and `Y` in both forms.
struct Buffers<'a, E> {
    q: &'a mut [E],
    q_t: &'a mut [E],
    d: &'a mut [E],
    d_t: &'a mut [E],
    l: &'a mut [E],
    scores: &'a mut [E],
    slopes: &'a mut [E],
    dq: &'a mut [E],
    k: &'a mut [E],
    v: &'a mut [E],
    dk: &'a mut [E],
    dv: &'a mut [E],
    dlinear_k: &'a mut [E],
    y: &'a mut [E],
    y_t: &'a mut [E],
    s: Strides,
}

/// Distances between rows of the buffers.
#[derive(Clone, Copy)]
struct Strides {
    /// Of transposed tiles of queries.
    tile: usize,
    k: usize,
    v: usize,
    l: usize,
}

fn right_to_left<E: Number>(p: &Problem<E>, dout: &Values<E>, at: (usize, usize), out: &Outputs<E>) {
    let (width, features, values) = (p.q.width, p.linear_q.width, p.v.width());
    let (size, chunk) = (p.tile(), p.chunk);
    let s = Strides {
        tile: leading::<E>(size),
        k: leading::<E>(width),
        v: leading::<E>(values),
        l: leading::<E>(features),
    };
    let sizes = [
        size * s.k,
        width * s.tile,
        size * s.v,
        values * s.tile,
        size * s.l,
        size * s.tile,
        size * s.tile,
        size * s.k,
        chunk * s.k,
        chunk * s.v,
        chunk * s.k,
        chunk * s.v,
        chunk * s.l,
        features * s.v,
        values * s.l,
    ];
    let mut scratch = Scratch::new::<E>(sizes.iter().sum());
    let [q, q_t, d, d_t, l, scores, slopes, dq, k, v, dk, dv, dlinear_k, y, y_t] = scratch.parts::<E, 15>(sizes);
    y.fill(E::ZERO);
    let mut b = Buffers { q, q_t, d, d_t, l, scores, slopes, dq, k, v, dk, dv, dlinear_k, y, y_t, s };
    for start in p.starts().rev() {
        b.chunk(p, dout, at, start, out);
    }
}

impl<E: Number> Buffers<'_, E> {
    /// All gradients of a chunk but those of its `l`, and what it adds to `Y`.
    fn chunk(
        &mut self,
        p: &Problem<E>,
        dout: &Values<E>,
        (batch, head): (usize, usize),
        start: usize,
        out: &Outputs<E>,
    ) {
        let (s, size, len) = (self.s, p.tile(), p.len(start));
        p.k.copy(batch, start, head, len, self.k, s.k);
        p.v.copy(batch, start, head, len, self.v, s.v);
        self.dk[..len * s.k].fill(E::ZERO);
        self.begin_with_later_chunks(p, (batch, head), start);
        for i in (start..start + len).step_by(size) {
            let queries = size.min(start + len - i);
            self.pack(p, dout, (batch, i, head), queries);
            if start > 0 {
                scaled_rows(&p.linear_q, (batch, i, head), queries, inverse(start), self.l, s.l);
                TileProduct {
                    rows: p.linear_q.width,
                    depth: queries,
                    columns: p.v.width(),
                    a: self.l,
                    a_strides: (1, s.l),
                    b: self.d,
                    b_stride: s.v,
                    c: self.y,
                    c_stride: s.v,
                    accumulate: true,
                    band: Band::Full,
                    narrow: p.narrow,
                }
                .run();
            }
            self.dq[..queries * s.k].fill(E::ZERO);
            for j in (start..i + queries).step_by(size) {
                let (keys, diagonal, stride) = (size.min(i + queries - j), (i - j) as isize, s.tile);
                self.pair(p, Tile { batch, head, i, queries, j, keys, diagonal, stride, narrow: p.narrow }, j - start);
            }
            write_rows(p, (batch, i, head), queries, &out.dq, (self.dq, s.k), (p.q.width, p.scale));
        }
        let at = (batch, start, head);
        write_rows(p, at, len, &out.dk, (self.dk, s.k), (p.q.width, E::ONE));
        for (c, row) in self.dv.chunks_exact(s.v).take(len).enumerate() {
            // SAFETY: this task alone has this block of this batch entry.
            unsafe { out.dv.write((batch * p.time + start + c) * p.blocks + head, &row[..p.v.width()]) };
        }
        write_rows(p, at, len, &out.dlinear_k, (self.dlinear_k, s.l), (p.linear_q.width, E::ONE));
    }

    /// `dm_j = Y v_j`, `dv_j = Yᵀ m_j`, which begins the sum.
    fn begin_with_later_chunks(&mut self, p: &Problem<E>, (batch, head): (usize, usize), start: usize) {
        let (s, len, features, values) = (self.s, p.len(start), p.linear_q.width, p.v.width());
        let later = start + len < p.time;
        if later {
            let (from, step, width, out) = (&*self.y, s.v, values, &mut *self.y_t);
            TransposeRows { from, step, width, count: features, factor: E::ONE, out, stride: s.l }.run();
        }
        TileProduct {
            rows: len,
            depth: if later { values } else { 0 },
            columns: features,
            a: self.v,
            a_strides: (s.v, 1),
            b: self.y_t,
            b_stride: s.l,
            c: self.dlinear_k,
            c_stride: s.l,
            accumulate: false,
            band: Band::Full,
            narrow: p.narrow,
        }
        .run();
        TileProduct {
            rows: len,
            depth: if later { features } else { 0 },
            columns: values,
            a: p.linear_k.from(batch, start, head),
            a_strides: (p.linear_k.time_stride(), 1),
            b: self.y,
            b_stride: s.v,
            c: self.dv,
            c_stride: s.v,
            accumulate: false,
            band: Band::Full,
            narrow: p.narrow,
        }
        .run();
    }

    /// A tile of queries and their gradient in both forms.
    fn pack(&mut self, p: &Problem<E>, dout: &Values<E>, (batch, i, head): (usize, usize, usize), queries: usize) {
        let (s, values) = (self.s, p.v.width());
        scaled_rows(&p.q, (batch, i, head), queries, p.scale, self.q, s.k);
        transposed_queries(p, (batch, i, head), queries, self.q_t, s.tile);
        dout.copy(batch, i, head, queries, self.d, s.v);
        let (from, step, width, out) = (&*self.d, s.v, values, &mut *self.d_t);
        TransposeRows { from, step, width, count: queries, factor: E::ONE, out, stride: s.tile }.run();
    }

    /// What a tile of pairs adds; `at` is the tile's first key within the chunk.
    fn pair(&mut self, p: &Problem<E>, tile: Tile, at: usize) {
        let Tile { queries, keys, stride, diagonal, .. } = tile;
        let (s, width, values) = (self.s, p.q.width, p.v.width());
        let (k, v) = (&self.k[at * s.k..], &self.v[at * s.v..]);
        tile.transposed_product((k, s.k), width, self.q_t, self.scores);
        tile.transposed_product((v, s.v), values, self.d_t, self.slopes);
        let (scores, slopes) = (&mut *self.scores, Some(&mut *self.slopes));
        SquaredReluGradient { scores, slopes, stride, keys, queries, diagonal }.run();
        tile.over_queries(self.scores, (self.d, s.v), values, &mut self.dv[at * s.v..]);
        tile.over_queries(self.slopes, (self.q, s.k), width, &mut self.dk[at * s.k..]);
        tile.over_keys(self.slopes, (k, s.k), width, self.dq, true);
    }
}
