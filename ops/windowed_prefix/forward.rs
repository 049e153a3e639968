//! The forward pass, one task per batch entry and head.

use kumiki_tensor::{Tensor, threads};

use super::weights::{Pairs, Weights};
use super::{CHUNK, Problem, packed};
use crate::attention_tiles::{
    Band, Number, Rows, Scratch, SharedRows, SharedValues, TileProduct, TransposeRows, Values, leading, write_gated,
};
use crate::count::count;
use crate::simd::dot;

/// ḡ and its product with `v` (each if asked for), `[B, T, H, G]`, and the sums of weights `[B, H, T]`.
pub(super) fn forward<E: Number>(
    p: &Problem<E>,
    v: Option<&Values<E>>,
    keep: bool,
) -> (Option<Tensor>, Option<Tensor>, Tensor) {
    count(|c| {
        let rows = (p.batch * p.heads) as u64;
        let far = p.time.saturating_sub(p.window);
        let near: usize = (0..p.time).map(|i| p.window.min(i + 1)).sum();
        c.pair += rows * (near * (p.k.width + p.g.width())) as u64;
        // As many keys are far for a query as queries see some from afar; the last column is the denominator's.
        c.prefix += rows * (2 * far * p.phi_k.width * (p.g.width() + 1)) as u64;
    });
    let shape = [p.batch, p.time, p.heads, p.g.width()];
    let mut gate = (keep || v.is_none()).then(|| Tensor::empty(p.g.dtype(), &shape));
    let mut gated = v.map(|v| Tensor::empty(v.dtype(), &shape));
    let mut den = Tensor::empty(E::DTYPE, &[p.batch, p.heads, p.time]);
    let outputs = Outputs {
        gate: gate.as_mut().map(SharedValues::new),
        gated: gated.as_mut().map(SharedValues::new),
        den: SharedRows::new(den.as_mut_slice::<E>()),
    };
    let cost = p.time * (p.window.min(p.time) + CHUNK + p.phi_k.width) * (p.k.width + p.g.width());
    threads::parallel_for(p.batch * p.heads, cost, |task| {
        let at = (task / p.heads, task % p.heads);
        match packed::digits(p) {
            Some(digits) => packed::forward_head((p, digits), v, at, &outputs),
            None => self::head(p, v, at, &outputs),
        }
    });
    (gate, gated, den)
}

pub(super) struct Outputs<'a, E> {
    gate: Option<SharedValues<'a, E>>,
    gated: Option<SharedValues<'a, E>>,
    den: SharedRows<'a, E>,
}

fn head<E: Number>(p: &Problem<E>, v: Option<&Values<E>>, (batch, head): (usize, usize), outputs: &Outputs<E>) {
    let (features, values) = (p.phi_k.width, p.g.width());
    let (size, stride) = (p.tile(), leading::<E>(p.tile()));
    let (m_stride, g_stride) = (leading::<E>(features), leading::<E>(values));
    let sizes = [
        p.k.width * stride,
        features * stride,
        size * m_stride,
        size * stride,
        size * stride,
        size * g_stride,
        size * g_stride,
        features * g_stride,
        features,
        stride,
    ];
    let mut scratch = Scratch::new::<E>(sizes.iter().sum());
    let [q, phi_t, phi, scores, kernel, g, rows, state, far, sums] = scratch.parts::<E, 10>(sizes);
    state.fill(E::ZERO);
    far.fill(E::ZERO);
    let mut summed = 0;
    for i in (0..p.time).step_by(CHUNK) {
        let queries = CHUNK.min(p.time - i);
        let first = p.first_key(i);
        for j in (summed..first).step_by(CHUNK) {
            p.g.copy(batch, j, head, CHUNK, g, g_stride);
            add_to_state(p, (batch, head), j, g, state, g_stride);
            add_rows(&p.phi_k, (batch, j, head), CHUNK, far);
        }
        summed = first;

        transpose(&p.q, (batch, i, head), queries, q, stride);
        transpose(&p.phi_q, (batch, i, head), queries, phi_t, stride);
        p.phi_q.copy(batch, i, head, queries, phi, m_stride);
        // What all of the tile's queries see from afar.
        sums.fill(E::ZERO);
        sums.iter_mut().zip(phi.chunks_exact(m_stride)).take(queries).for_each(|(y, x)| *y = dot(&x[..features], far));
        TileProduct {
            rows: queries,
            depth: if first > 0 { features } else { 0 },
            columns: values,
            a: phi,
            a_strides: (m_stride, 1),
            b: state,
            b_stride: g_stride,
            c: rows,
            c_stride: g_stride,
            accumulate: false,
            band: Band::Full,
            narrow: p.narrow,
        }
        .run();
        for j in (first..i + queries).step_by(CHUNK) {
            let keys = CHUNK.min(i + queries - j);
            let (ahead, window) = ((i - j) as isize, p.window as isize);
            let pairs = Pairs { keys, queries, ahead, window, stride };
            if pairs.has_near() {
                pair_product(p, (p.k.from(batch, j, head), p.k.time_stride()), p.k.width, pairs, q, scores);
            }
            if pairs.has_far() {
                pair_product(p, (p.phi_k.from(batch, j, head), p.phi_k.time_stride()), features, pairs, phi_t, kernel);
            }
            Weights { pairs, scores, kernel, sums, rounded: false, shift: p.tau[head] }.run();
            p.g.copy(batch, j, head, keys, g, g_stride);
            TileProduct {
                rows: queries,
                depth: keys,
                columns: values,
                a: scores,
                a_strides: (1, stride),
                b: g,
                b_stride: g_stride,
                c: rows,
                c_stride: g_stride,
                accumulate: true,
                band: Band::Full,
                narrow: p.narrow,
            }
            .run();
        }
        write(p, v, (batch, i, head), (rows, g_stride), &sums[..queries], outputs);
    }
}

/// Outputs of queries from time `i` on: sums of weighted gates, `stride` apart, over those of weights.
pub(super) fn write<E: Number>(
    p: &Problem<E>,
    v: Option<&Values<E>>,
    (batch, i, head): (usize, usize, usize),
    (rows, stride): (&mut [E], usize),
    sums: &[E],
    outputs: &Outputs<E>,
) {
    for (c, (row, &sum)) in rows.chunks_exact_mut(stride).zip(sums).enumerate() {
        let row = &mut row[..p.g.width()];
        let mut factor = if sum == E::ZERO { E::ZERO } else { E::ONE / sum };
        if i + c == 0 {
            // The first token sees itself alone: exactly its own gate.
            p.g.read((batch, 0, head), row);
            factor = E::ONE;
        }
        let at = (batch * p.time + i + c) * p.heads + head;
        // SAFETY: the task of this head of this batch entry calls.
        unsafe {
            write_gated(row, factor, (batch, i + c, head), at, outputs.gate.as_ref(), outputs.gated.as_ref().zip(v))
        };
        // SAFETY: as above.
        let den = unsafe { outputs.den.row_mut((batch * p.heads + head) * p.time + i + c, 1) };
        den[0] = sum;
    }
}

/// Rows from `(batch, time, head)` on as columns of `out`.
pub(super) fn transpose<E: Number>(
    from: &Rows<E>,
    (batch, time, head): (usize, usize, usize),
    count: usize,
    out: &mut [E],
    stride: usize,
) {
    let step = from.time_stride();
    TransposeRows { from: from.from(batch, time, head), step, width: from.width, count, factor: E::ONE, out, stride }
        .run();
}

/// `out[key, query]` of keys' rows, so far apart, and packed queries, where the query sees the key.
pub(super) fn pair_product<E: Number>(
    p: &Problem<E>,
    (rows, step): (&[E], usize),
    depth: usize,
    pairs: Pairs,
    packed: &[E],
    out: &mut [E],
) {
    TileProduct {
        rows: pairs.keys,
        depth,
        columns: pairs.queries,
        a: rows,
        a_strides: (step, 1),
        b: packed,
        b_stride: pairs.stride,
        c: out,
        c_stride: pairs.stride,
        accumulate: false,
        // Key r is visible to query c when r <= c + ahead.
        band: if pairs.keys as isize - 1 <= pairs.ahead { Band::Full } else { Band::Columns(pairs.ahead) },
        narrow: p.narrow,
    }
    .run();
}

/// Adds rows from `(batch, time, head)` on to a sum.
pub(super) fn add_rows<E: Number>(
    from: &Rows<E>,
    (batch, time, head): (usize, usize, usize),
    count: usize,
    sum: &mut [E],
) {
    for t in time..time + count {
        sum.iter_mut().zip(from.row(batch, t, head)).for_each(|(y, &x)| *y += x);
    }
}

/// Adds a chunk of keys, whose gates are given, to the running sums.
pub(super) fn add_to_state<E: Number>(
    p: &Problem<E>,
    (batch, head): (usize, usize),
    time: usize,
    g: &[E],
    state: &mut [E],
    stride: usize,
) {
    TileProduct {
        rows: p.phi_k.width,
        depth: CHUNK,
        columns: p.g.width(),
        a: p.phi_k.from(batch, time, head),
        a_strides: (1, p.phi_k.time_stride()),
        b: g,
        b_stride: stride,
        c: state,
        c_stride: stride,
        accumulate: true,
        band: Band::Full,
        narrow: p.narrow,
    }
    .run();
}
