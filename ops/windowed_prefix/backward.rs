//! The backward pass, one task per batch entry and head: from the left for all that needs `S` or pairs, then from the
//! right for what needs `R`.

use kumiki_tensor::{Tensor, threads};

use super::forward::{add_rows, add_to_state, pair_product, transpose};
use super::weights::{Pairs, Slopes};
use super::{CHUNK, Problem, packed};
use crate::attention_tiles::{
    Band, Number, Scratch, SharedRows, SharedValues, TileProduct, TransposeRows, Values, leading, scale,
};

/// The gradient that arrives, and what the forward pass has left.
pub(super) struct Upstream<'a, E> {
    /// dḡ, `[B, T, H, G]`.
    pub dout: Values<'a, E>,
    /// `dḡ·ḡ`, `[B, T, H]`.
    pub delta: &'a [E],
    /// `[B, H, T]`.
    pub den: &'a [E],
}

impl<E: Number> Upstream<'_, E> {
    /// For the queries of a head from time `i` on: `dḡ·ḡ`, and one over the sum of weights.
    pub fn of_queries(
        &self,
        p: &Problem<E>,
        (batch, i, head): (usize, usize, usize),
        count: usize,
        [delta, inverse]: [&mut [E]; 2],
    ) {
        let den = &self.den[(batch * p.heads + head) * p.time + i..];
        for (c, (delta, inverse)) in delta.iter_mut().zip(inverse).take(count).enumerate() {
            *delta = self.delta[(batch * p.time + i + c) * p.heads + head];
            *inverse = if den[c] == E::ZERO { E::ZERO } else { E::ONE / den[c] };
        }
    }
}

/// Gradients of `tau q̂`, `k̂`, the features, `g`, and per head that of `tau`, times `tau`.
pub(super) struct Gradients {
    pub dq: Tensor,
    pub dk: Tensor,
    pub dphi_q: Tensor,
    pub dphi_k: Tensor,
    pub dg: Tensor,
    pub near: Vec<f64>,
}

pub(super) fn backward<E: Number>(p: &Problem<E>, up: &Upstream<E>) -> Gradients {
    let tensor = |width: usize| Tensor::empty(E::DTYPE, &[p.batch, p.time, p.heads, width]);
    let (mut dq, mut dk) = (tensor(p.k.width), tensor(p.k.width));
    let (mut dphi_q, mut dphi_k) = (tensor(p.phi_k.width), tensor(p.phi_k.width));
    let mut dg = Tensor::empty(p.g.dtype(), &[p.batch, p.time, p.heads, p.g.width()]);
    let mut near = vec![0f64; p.batch * p.heads];
    let outputs = Outputs {
        dq: SharedRows::new(dq.as_mut_slice::<E>()),
        dk: SharedRows::new(dk.as_mut_slice::<E>()),
        dphi_q: SharedRows::new(dphi_q.as_mut_slice::<E>()),
        dphi_k: SharedRows::new(dphi_k.as_mut_slice::<E>()),
        dg: SharedValues::new(&mut dg),
    };
    let cost = 3 * p.time * (p.window.min(p.time) + CHUNK + p.phi_k.width) * (p.k.width + p.g.width());
    threads::parallel_chunks_mut(&mut near, 1, cost, |task, near| {
        let at = (task / p.heads, task % p.heads);
        near[0] = match packed::digits(p) {
            Some(digits) => packed::backward_head((p, digits), up, at, &outputs),
            None => head(p, up, at, &outputs),
        };
    });
    let near = (0..p.heads).map(|h| near.iter().skip(h).step_by(p.heads).sum()).collect();
    Gradients { dq, dk, dphi_q, dphi_k, dg, near }
}

pub(super) struct Outputs<'a, E> {
    pub dq: SharedRows<'a, E>,
    pub dk: SharedRows<'a, E>,
    pub dphi_q: SharedRows<'a, E>,
    pub dphi_k: SharedRows<'a, E>,
    dg: SharedValues<'a, E>,
}

impl<E: Number> Outputs<'_, E> {
    /// `count` rows of gates' gradients, so far apart, from time `i` on.
    pub fn write_gates(
        &self,
        p: &Problem<E>,
        (batch, i, head): (usize, usize, usize),
        count: usize,
        (rows, stride): (&[E], usize),
    ) {
        for (c, row) in rows.chunks_exact(stride).take(count).enumerate() {
            // SAFETY: the task of this head of this batch entry calls.
            unsafe { self.dg.write((batch * p.time + i + c) * p.heads + head, &row[..p.g.width()]) };
        }
    }
}

/// What one task holds: a tile of queries in the forms that products need, a tile of pairs, all keys of the head with
/// their gradients, and running sums.
struct Buffers<'a, E> {
    q: &'a mut [E],
    q_t: &'a mut [E],
    phi: &'a mut [E],
    phi_t: &'a mut [E],
    /// Rows `dḡ_i`.
    d: &'a mut [E],
    d_t: &'a mut [E],
    /// Of every query: `dḡ_i·ḡ_i`, and one over the sum of its weights.
    delta: &'a mut [E],
    inverse: &'a mut [E],
    scores: &'a mut [E],
    kernel: &'a mut [E],
    slopes: &'a mut [E],
    dq: &'a mut [E],
    dphi: &'a mut [E],
    /// `S` or `R`, and the sum beside it: `Σ_j φ(k)_j` or `Σ_i d_i·ḡ_i φ(q)_i`.
    state: &'a mut [E],
    state_t: &'a mut [E],
    far: &'a mut [E],
    k: &'a mut [E],
    phi_k: &'a mut [E],
    g: &'a mut [E],
    dk: &'a mut [E],
    dphi_k: &'a mut [E],
    dg: &'a mut [E],
}

/// Distances between rows of the buffers.
#[derive(Clone, Copy)]
pub(super) struct Strides {
    /// Of transposed tiles of queries, and of tiles `[key, query]`.
    pub tile: usize,
    pub k: usize,
    pub phi: usize,
    pub g: usize,
}

fn head<E: Number>(p: &Problem<E>, up: &Upstream<E>, at: (usize, usize), out: &Outputs<E>) -> f64 {
    let (width, features, values) = (p.k.width, p.phi_k.width, p.g.width());
    let (size, time) = (p.tile(), p.time);
    let s = Strides {
        tile: leading::<E>(size),
        k: leading::<E>(width),
        phi: leading::<E>(features),
        g: leading::<E>(values),
    };
    let sizes = [
        size * s.k,
        width * s.tile,
        size * s.phi,
        features * s.tile,
        size * s.g,
        values * s.tile,
        s.tile,
        s.tile,
        size * s.tile,
        size * s.tile,
        size * s.tile,
        size * s.k,
        size * s.phi,
        features * s.g,
        values * s.phi,
        features,
        time * s.k,
        time * s.phi,
        time * s.g,
        time * s.k,
        time * s.phi,
        time * s.g,
    ];
    let mut scratch = Scratch::new::<E>(sizes.iter().sum());
    let mut parts = scratch.parts::<E, 22>(sizes).into_iter();
    let mut next = || parts.next().expect("a size for every buffer");
    // In the order of the sizes.
    let mut b = Buffers {
        q: next(),
        q_t: next(),
        phi: next(),
        phi_t: next(),
        d: next(),
        d_t: next(),
        delta: next(),
        inverse: next(),
        scores: next(),
        kernel: next(),
        slopes: next(),
        dq: next(),
        dphi: next(),
        state: next(),
        state_t: next(),
        far: next(),
        k: next(),
        phi_k: next(),
        g: next(),
        dk: next(),
        dphi_k: next(),
        dg: next(),
    };
    for sums in [&mut *b.dk, &mut *b.dphi_k, &mut *b.dg, &mut *b.state, &mut *b.far] {
        sums.fill(E::ZERO);
    }
    p.k.copy(at.0, 0, at.1, time, b.k, s.k);
    p.phi_k.copy(at.0, 0, at.1, time, b.phi_k, s.phi);
    p.g.copy(at.0, 0, at.1, time, b.g, s.g);
    let near = b.left_to_right(p, up, at, s, out);
    b.right_to_left(p, up, at, s);
    for (out, rows, stride, width) in [(&out.dk, &*b.dk, s.k, width), (&out.dphi_k, &*b.dphi_k, s.phi, features)] {
        write_rows(p, (at.0, 0, at.1), time, out, (rows, stride), width);
    }
    out.write_gates(p, (at.0, 0, at.1), time, (b.dg, s.g));
    near
}

/// Copies `count` rows, so far apart, to those of an output from time `i` on.
pub(super) fn write_rows<E: Number>(
    p: &Problem<E>,
    (batch, i, head): (usize, usize, usize),
    count: usize,
    out: &SharedRows<E>,
    (rows, stride): (&[E], usize),
    width: usize,
) {
    for (c, row) in rows.chunks_exact(stride).take(count).enumerate() {
        // SAFETY: the task of this head of this batch entry calls, and holds no other row.
        let out = unsafe { out.row_mut((batch * p.time + i + c) * p.heads + head, width) };
        out.copy_from_slice(&row[..width]);
    }
}

impl<E: Number> Buffers<'_, E> {
    /// All gradients but what keys get from afar; gives `tau` times the gradient of `tau`.
    fn left_to_right(
        &mut self,
        p: &Problem<E>,
        up: &Upstream<E>,
        (batch, head): (usize, usize),
        s: Strides,
        out: &Outputs<E>,
    ) -> f64 {
        let features = p.phi_k.width;
        let (mut near, mut summed) = (0f64, 0);
        for i in (0..p.time).step_by(CHUNK) {
            let queries = CHUNK.min(p.time - i);
            let first = p.first_key(i);
            for j in (summed..first).step_by(CHUNK) {
                add_to_state(p, (batch, head), j, &self.g[j * s.g..], self.state, s.g);
                add_rows(&p.phi_k, (batch, j, head), CHUNK, self.far);
            }
            summed = first;

            p.q.copy(batch, i, head, queries, self.q, s.k);
            transpose(&p.q, (batch, i, head), queries, self.q_t, s.tile);
            transpose(&p.phi_q, (batch, i, head), queries, self.phi_t, s.tile);
            self.pack(p, up, (batch, head), i, s);
            self.dq[..queries * s.k].fill(E::ZERO);
            self.features_from_state(p, first, queries, s);

            for j in (first..i + queries).step_by(CHUNK) {
                let keys = CHUNK.min(i + queries - j);
                let (ahead, window) = ((i - j) as isize, p.window as isize);
                let pairs = Pairs { keys, queries, ahead, window, stride: s.tile };
                near += self.pair(p, (i, j), pairs, s, p.tau[head]);
            }
            let rows = [(&out.dq, &*self.dq, s.k, p.k.width), (&out.dphi_q, &*self.dphi, s.phi, features)];
            for (out, rows, stride, width) in rows {
                write_rows(p, (batch, i, head), queries, out, (rows, stride), width);
            }
        }
        near
    }

    /// What products need of the tile's queries.
    fn pack(&mut self, p: &Problem<E>, up: &Upstream<E>, (batch, head): (usize, usize), i: usize, s: Strides) {
        let (queries, values) = (CHUNK.min(p.time - i), p.g.width());
        p.phi_q.copy(batch, i, head, queries, self.phi, s.phi);
        up.dout.copy(batch, i, head, queries, self.d, s.g);
        let (from, out) = (&*self.d, &mut *self.d_t);
        TransposeRows { from, step: s.g, width: values, count: queries, factor: E::ONE, out, stride: s.tile }.run();
        up.of_queries(p, (batch, i, head), queries, [self.delta, self.inverse]);
    }

    /// `dφ(q) = (S dḡ - dḡ·ḡ Σ_j φ(k)_j) / den`, which begins the sum.
    fn features_from_state(&mut self, p: &Problem<E>, first: usize, queries: usize, s: Strides) {
        let (features, values) = (p.phi_q.width, p.g.width());
        let depth = if first > 0 { values } else { 0 };
        if first > 0 {
            self.transpose_state(features, values, s);
        }
        TileProduct {
            rows: queries,
            depth,
            columns: features,
            a: self.d,
            a_strides: (s.g, 1),
            b: self.state_t,
            b_stride: s.phi,
            c: self.dphi,
            c_stride: s.phi,
            accumulate: false,
            band: Band::Full,
            narrow: p.narrow,
        }
        .run();
        let of_query = self.delta.iter().zip(&*self.inverse);
        for (row, (&delta, &inverse)) in self.dphi.chunks_exact_mut(s.phi).zip(of_query).take(queries) {
            row.iter_mut().zip(&*self.far).for_each(|(y, &far)| *y = (*y - delta * far) * inverse);
        }
    }

    fn transpose_state(&mut self, features: usize, values: usize, s: Strides) {
        let (from, step, width, out) = (&*self.state, s.g, values, &mut *self.state_t);
        TransposeRows { from, step, width, count: features, factor: E::ONE, out, stride: s.phi }.run();
    }

    /// What a tile of pairs adds to the gradients; gives its part of `tau` times the gradient of `tau`.
    fn pair(&mut self, p: &Problem<E>, (i, j): (usize, usize), pairs: Pairs, s: Strides, shift: E) -> f64 {
        let (width, features, values) = (p.k.width, p.phi_k.width, p.g.width());
        let (k, phi_k, g) = (&self.k[j * s.k..], &self.phi_k[j * s.phi..], &self.g[j * s.g..]);
        let (has_near, has_far) = (pairs.has_near(), pairs.has_far());
        if has_near {
            pair_product(p, (k, s.k), width, pairs, self.q_t, self.scores);
        }
        if has_far {
            pair_product(p, (phi_k, s.phi), features, pairs, self.phi_t, self.kernel);
        }
        pair_product(p, (g, s.g), values, pairs, self.d_t, self.slopes);
        let (scores, kernel, slopes) = (&mut *self.scores, &mut *self.kernel, &mut *self.slopes);
        let near =
            Slopes { pairs, query: i, scores, kernel, slopes, delta: self.delta, inverse: self.inverse, shift }.run();

        let per_key = |a: &[E], b: &[E], c: &mut [E], stride: usize, columns: usize| {
            TileProduct {
                rows: pairs.keys,
                depth: pairs.queries,
                columns,
                a,
                a_strides: (pairs.stride, 1),
                b,
                b_stride: stride,
                c: &mut c[j * stride..],
                c_stride: stride,
                accumulate: true,
                band: Band::Full,
                narrow: p.narrow,
            }
            .run();
        };
        let per_query = |a: &[E], b: &[E], c: &mut [E], stride: usize, columns: usize| {
            TileProduct {
                rows: pairs.queries,
                depth: pairs.keys,
                columns,
                a,
                a_strides: (1, pairs.stride),
                b,
                b_stride: stride,
                c,
                c_stride: stride,
                accumulate: true,
                band: Band::Full,
                narrow: p.narrow,
            }
            .run();
        };
        per_key(self.kernel, self.d, self.dg, s.g, values);
        if has_near {
            per_key(self.scores, self.q, self.dk, s.k, width);
            per_query(self.scores, k, self.dq, s.k, width);
        }
        if has_far {
            per_key(self.slopes, self.phi, self.dphi_k, s.phi, features);
            per_query(self.slopes, phi_k, self.dphi, s.phi, features);
        }
        near
    }

    /// What keys get from queries that are far from all of their chunk: `dφ(k) += R g - Σ_i d_i·ḡ_i φ(q)_i` and
    /// `dg += Rᵀ φ(k)`.
    fn right_to_left(&mut self, p: &Problem<E>, up: &Upstream<E>, at: (usize, usize), s: Strides) {
        let (features, values) = (p.phi_k.width, p.g.width());
        self.state.fill(E::ZERO);
        self.far.fill(E::ZERO);
        let Some(mut i) = p.time.checked_sub(1).map(|last| last / CHUNK * CHUNK) else { return };
        // Chunks that no tile of queries has in its running sums get nothing.
        for j in (0..p.first_key(i)).step_by(CHUNK).rev() {
            while p.first_key(i) > j {
                self.pack(p, up, at, i, s);
                let of_query = self.delta.iter().zip(&*self.inverse);
                for (row, (&delta, &inverse)) in
                    self.phi.chunks_exact_mut(s.phi).zip(of_query).take(CHUNK.min(p.time - i))
                {
                    scale(row, inverse);
                    self.far.iter_mut().zip(&*row).for_each(|(y, &x)| *y += delta * x);
                }
                TileProduct {
                    rows: features,
                    depth: CHUNK.min(p.time - i),
                    columns: values,
                    a: self.phi,
                    a_strides: (1, s.phi),
                    b: self.d,
                    b_stride: s.g,
                    c: self.state,
                    c_stride: s.g,
                    accumulate: true,
                    band: Band::Full,
                    narrow: p.narrow,
                }
                .run();
                i -= CHUNK;
            }
            self.transpose_state(features, values, s);
            let product = |a: &[E], a_stride: usize, depth, b: &[E], c: &mut [E], stride: usize, columns| {
                TileProduct {
                    rows: CHUNK,
                    depth,
                    columns,
                    a: &a[j * a_stride..],
                    a_strides: (a_stride, 1),
                    b,
                    b_stride: stride,
                    c: &mut c[j * stride..],
                    c_stride: stride,
                    accumulate: true,
                    band: Band::Full,
                    narrow: p.narrow,
                }
                .run();
            };
            product(self.g, s.g, values, self.state_t, self.dphi_k, s.phi, features);
            for row in self.dphi_k[j * s.phi..].chunks_exact_mut(s.phi).take(CHUNK) {
                row.iter_mut().zip(&*self.far).for_each(|(y, &x)| *y -= x);
            }
            product(self.phi_k, s.phi, features, self.state, self.dg, s.g, values);
        }
    }
}
