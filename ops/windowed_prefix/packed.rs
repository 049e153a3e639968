//! Both passes on CPUs whose products of packed factors are sooner than vectors of F32: what a head has is packed once, as
//! [`Prepacked`], and meets in larger tiles than elsewhere, so that a sum of weighted rows is one long product. Narrow
//! products are of rounded factors, others of all digits.
//!
//! Forward as elsewhere. Backward, from the left, what queries get from `S`; then from the right a tile of keys after the
//! other, with `R` of all queries that are far from all of it, and pairs with those before: its gradients are complete then.

use super::backward::{self, Strides, Upstream, write_rows};
use super::forward::{self, add_rows, write};
use super::weights::{Pairs, Slopes, Weights};
use super::{Number, Problem, Values};
use crate::attention_tiles::Scratch;
use crate::attention_tiles::factors::{matrix, part, product, scaled, stride};
use crate::gemm::Side;
use crate::gemm::packed::{Digits, Prepacked, UNIT};
use crate::simd::dot;

/// Queries (forward) or keys (backward) of a tile.
const TILE: usize = 128;
/// Keys (forward) or queries (backward) that meet a tile together.
const CHUNK: usize = 512;

/// How factors are packed if a problem is for these passes; a small one is done before they would be.
pub(super) fn digits<E: Number>(p: &Problem<E>) -> Option<Digits> {
    p.g.digits(p.narrow).filter(|_| p.time.min(p.g.width()) >= UNIT)
}

impl<E: Number> Problem<'_, E> {
    /// Before it, all keys are far from the tile of queries from `i` on.
    fn near_from(&self, i: usize) -> usize {
        (i + 1).saturating_sub(self.window) / UNIT * UNIT
    }

    /// From it on, all queries are far from the keys before `end`.
    fn far_from(&self, end: usize) -> usize {
        (end - 1 + self.window).next_multiple_of(UNIT).min(self.time)
    }
}

/// As [`forward`] of a head of a problem that is for [packed factors](digits).
pub(super) fn forward_head<E: Number>(
    (p, digits): (&Problem<E>, Digits),
    v: Option<&Values<E>>,
    (batch, head): (usize, usize),
    outputs: &forward::Outputs<E>,
) {
    let (width, features, values, time) = (p.k.width, p.phi_k.width, p.g.width(), p.time);
    let chunk = CHUNK.min(time.next_multiple_of(UNIT));
    let (s_stride, g_stride) = (stride(TILE), stride(values));
    let sizes = [
        chunk * s_stride,
        chunk * s_stride,
        TILE * g_stride,
        features.next_multiple_of(UNIT) * g_stride,
        features,
        TILE,
    ];
    let mut scratch = Scratch::new::<E>(sizes.iter().sum());
    let [scores, kernel, rows, state, far, sums] = scratch.parts::<E, 6>(sizes);
    let at = (batch, 0, head);
    let [q_rows, k_rows, phi_q_rows, phi_k_rows] = [p.q, p.k, p.phi_q, p.phi_k].map(Values::Same);
    let k = Prepacked::of(digits, Side::A, k_rows.matrix(at, time));
    let phi_k = Prepacked::of(digits, Side::A, phi_k_rows.matrix(at, time));
    let phi_k_t = Prepacked::of(digits, Side::A, phi_k_rows.matrix(at, time).t());
    let g = Prepacked::of(digits, Side::B, p.g.matrix(at, time).t());
    let mut packed_state = Prepacked::new(digits, Side::B, values, features);
    let mut weights = Prepacked::new(digits, Side::A, TILE, chunk);
    far.fill(E::ZERO);

    let mut summed = 0;
    for i in (0..time).step_by(TILE) {
        let (queries, first) = (TILE.min(time - i), p.near_from(i));
        if first > summed {
            let factors = [part(&phi_k_t, 0, summed), part(&g, 0, summed)];
            product(factors, [features, values, first - summed], (state, g_stride), summed > 0);
            add_rows(&p.phi_k, (batch, summed, head), first - summed, far);
            packed_state.pack((0, 0), matrix(state, features, values, (g_stride, 1)).t());
            summed = first;
        }
        let at = (batch, i, head);
        let q = Prepacked::of(digits, Side::B, q_rows.matrix(at, queries));
        let phi_q = Prepacked::of(digits, Side::B, phi_q_rows.matrix(at, queries));
        sums.fill(E::ZERO);
        if first > 0 {
            for (c, sum) in sums.iter_mut().enumerate().take(queries) {
                *sum = dot(p.phi_q.row(batch, i + c, head), far);
            }
            let from_left = Prepacked::of(digits, Side::A, phi_q_rows.matrix(at, queries));
            let factors = [part(&from_left, 0, 0), part(&packed_state, 0, 0)];
            product(factors, [queries, values, features], (rows, g_stride), false);
        }
        for j in (first..i + queries).step_by(chunk) {
            let keys = chunk.min(i + queries - j);
            let (ahead, window) = (i as isize - j as isize, p.window as isize);
            let pairs = Pairs { keys, queries, ahead, window, stride: s_stride };
            if pairs.has_near() {
                product([part(&k, j, 0), part(&q, 0, 0)], [keys, queries, width], (scores, s_stride), false);
            }
            if pairs.has_far() {
                product([part(&phi_k, j, 0), part(&phi_q, 0, 0)], [keys, queries, features], (kernel, s_stride), false);
            }
            Weights { pairs, scores, kernel, sums, rounded: digits == Digits::Rounded, shift: p.tau[head] }.run();
            weights.pack((0, 0), matrix(scores, queries, keys, (1, s_stride)));
            product([part(&weights, 0, 0), part(&g, 0, j)], [queries, values, keys], (rows, g_stride), j > 0);
        }
        write(p, v, at, (rows, g_stride), &sums[..queries], outputs);
    }
}

/// What a head's queries bring, each on side B with queries as rows, and as terms.
struct Queries {
    q: Prepacked,
    q_t: Prepacked,
    phi: Prepacked,
    phi_t: Prepacked,
    d: Prepacked,
    d_t: Prepacked,
}

impl Queries {
    fn pack<E: Number>((p, digits): (&Problem<E>, Digits), up: &Upstream<E>, (batch, head): (usize, usize)) -> Queries {
        let both = |rows: Values<E>| {
            let at = (batch, 0, head);
            [
                Prepacked::of(digits, Side::B, rows.matrix(at, p.time)),
                Prepacked::of(digits, Side::B, rows.matrix(at, p.time).t()),
            ]
        };
        let [[q, q_t], [phi, phi_t], [d, d_t]] = [both(Values::Same(p.q)), both(Values::Same(p.phi_q)), both(up.dout)];
        Queries { q, q_t, phi, phi_t, d, d_t }
    }

    /// Begins `dφ(q)` with `(S dḡ - dḡ·ḡ Σ_j φ(k)_j) / den`.
    fn see_from_afar<E: Number>(
        &self,
        (p, digits): (&Problem<E>, Digits),
        (batch, head): (usize, usize),
        [state, far, tile, dphi_q]: [&mut [E]; 4],
        [delta, inverse]: [&[E]; 2],
        s: Strides,
    ) {
        let (features, values, time) = (p.phi_k.width, p.g.width(), p.time);
        // Tiles of keys that some queries see from afar: those that do not are paired with it later.
        let tiles = (0..time).step_by(TILE).map(|j| time.min(j + TILE)).take_while(|&end| p.far_from(end) < time);
        let Some(last) = tiles.clone().last() else { return };
        let phi_k_t = Prepacked::of(digits, Side::A, Values::Same(p.phi_k).matrix((batch, 0, head), last).t());
        let g = Prepacked::of(digits, Side::B, p.g.matrix((batch, 0, head), last).t());
        let mut packed = Prepacked::new(digits, Side::A, features, values);
        let mut summed = 0;
        for end in tiles {
            let factors = [part(&phi_k_t, 0, summed), part(&g, 0, summed)];
            product(factors, [features, values, end - summed], (state, s.g), summed > 0);
            add_rows(&p.phi_k, (batch, summed, head), end - summed, far);
            packed.pack((0, 0), matrix(state, features, values, (s.g, 1)));
            summed = end;
            let i = p.far_from(end);
            let queries = p.far_from(time.min(end + TILE)) - i;
            product([part(&packed, 0, 0), part(&self.d, i, 0)], [features, queries, values], (tile, s.tile), false);
            for c in 0..queries {
                let (delta, inverse) = (delta[i + c], inverse[i + c]);
                let row = dphi_q[(i + c) * s.phi..].iter_mut().zip(tile[c..].iter().step_by(s.tile)).zip(&*far);
                row.for_each(|((y, &x), &far)| *y = (x - delta * far) * inverse);
            }
        }
    }
}

/// Features of a head's queries over the sums of their weights, `[M, T]`, on side A.
fn weighted_queries<E: Number>(
    (p, digits): (&Problem<E>, Digits),
    (batch, head): (usize, usize),
    inverse: &[E],
) -> Prepacked {
    let mut packed = Prepacked::new(digits, Side::A, p.phi_q.width, p.time);
    scaled(&p.phi_q, (batch, 0, head), p.time, |i| inverse[i], |i, rows| packed.pack((0, i), rows.t()));
    packed
}

/// As [`backward`] of a head of a problem that is for [packed factors](digits).
pub(super) fn backward_head<E: Number>(
    (p, digits): (&Problem<E>, Digits),
    up: &Upstream<E>,
    (batch, head): (usize, usize),
    out: &backward::Outputs<E>,
) -> f64 {
    let (width, features, values, time) = (p.k.width, p.phi_k.width, p.g.width(), p.time);
    let (chunk, padded) = (CHUNK.min(time.next_multiple_of(UNIT)), time.next_multiple_of(UNIT));
    let s = Strides { tile: stride(chunk), k: stride(width), phi: stride(features), g: stride(values) };
    let sizes = [
        padded,
        padded,
        features.next_multiple_of(UNIT) * s.g,
        features,
        TILE.max(features.next_multiple_of(UNIT)) * s.tile,
        TILE * s.tile,
        TILE * s.tile,
        padded * s.k,
        padded * s.phi,
        TILE * s.k,
        TILE * s.phi,
        TILE * s.g,
    ];
    let mut scratch = Scratch::new::<E>(sizes.iter().sum());
    let [delta, inverse, state, far, scores, kernel, slopes, dq, dphi_q, dk, dphi_k, dg] =
        scratch.parts::<E, 12>(sizes);
    for sums in [&mut *delta, &mut *inverse, &mut *far, &mut *dq, &mut *dphi_q] {
        sums.fill(E::ZERO);
    }
    up.of_queries(p, (batch, 0, head), time, [delta, inverse]);
    let queries = Queries::pack((p, digits), up, (batch, head));
    queries.see_from_afar((p, digits), (batch, head), [state, far, scores, dphi_q], [delta, inverse], s);

    // From here on `R`.
    let [k_rows, phi_k_rows] = [p.k, p.phi_k].map(Values::Same);
    let left = weighted_queries((p, digits), (batch, head), inverse);
    let mut by_key = Prepacked::new(digits, Side::A, TILE, chunk);
    let mut by_query = Prepacked::new(digits, Side::A, chunk, TILE);
    let mut right = [(values, features), (features, values)].map(|(r, t)| Prepacked::new(digits, Side::B, r, t));
    far.fill(E::ZERO);
    let (mut near, mut summed) = (0f64, time);
    for j in (0..time).step_by(TILE).rev() {
        let keys = TILE.min(time - j);
        let at = (batch, j, head);
        let k = Prepacked::of(digits, Side::A, k_rows.matrix(at, keys));
        let phi_k = Prepacked::of(digits, Side::A, phi_k_rows.matrix(at, keys));
        let g = Prepacked::of(digits, Side::A, p.g.matrix(at, keys));
        let (k_t, phi_k_t) = (
            Prepacked::of(digits, Side::B, k_rows.matrix(at, keys).t()),
            Prepacked::of(digits, Side::B, phi_k_rows.matrix(at, keys).t()),
        );
        let until = p.far_from(j + keys);
        if until < summed {
            let factors = [part(&left, 0, until), part(&queries.d_t, 0, until)];
            product(factors, [features, values, summed - until], (state, s.g), summed < time);
            for i in until..summed {
                let factor = delta[i] * inverse[i];
                far.iter_mut().zip(p.phi_q.row(batch, i, head)).for_each(|(y, &x)| *y += factor * x);
            }
            let rows = matrix(state, features, values, (s.g, 1));
            right[0].pack((0, 0), rows.t());
            right[1].pack((0, 0), rows);
            summed = until;
        }
        dk.fill(E::ZERO);
        dphi_k.fill(E::ZERO);
        if until < time {
            product([part(&phi_k, 0, 0), part(&right[0], 0, 0)], [keys, values, features], (dg, s.g), false);
            product([part(&g, 0, 0), part(&right[1], 0, 0)], [keys, features, values], (dphi_k, s.phi), false);
            for row in dphi_k.chunks_exact_mut(s.phi).take(keys) {
                row.iter_mut().zip(&*far).for_each(|(y, &x)| *y -= x);
            }
        }
        for i in (j..until).step_by(chunk) {
            let count = chunk.min(until - i);
            let (ahead, window) = ((i - j) as isize, p.window as isize);
            let pairs = Pairs { keys, queries: count, ahead, window, stride: s.tile };
            let (has_near, has_far) = (pairs.has_near(), pairs.has_far());
            if has_near {
                product([part(&k, 0, 0), part(&queries.q, i, 0)], [keys, count, width], (scores, s.tile), false);
            }
            if has_far {
                product(
                    [part(&phi_k, 0, 0), part(&queries.phi, i, 0)],
                    [keys, count, features],
                    (kernel, s.tile),
                    false,
                );
            }
            product([part(&g, 0, 0), part(&queries.d, i, 0)], [keys, count, values], (slopes, s.tile), false);
            let (delta, inverse, shift) = (&delta[i..], &inverse[i..], p.tau[head]);
            near += Slopes { pairs, query: i, scores, kernel, slopes, delta, inverse, shift }.run();

            by_key.pack((0, 0), matrix(kernel, keys, count, (s.tile, 1)));
            let factors = [part(&by_key, 0, 0), part(&queries.d_t, 0, i)];
            product(factors, [keys, values, count], (dg, s.g), until < time || i > j);
            let sums = [
                (has_near, &*scores, &queries.q_t, &k_t, (&mut *dk, &mut dq[i * s.k..]), (width, s.k)),
                (
                    has_far,
                    &*slopes,
                    &queries.phi_t,
                    &phi_k_t,
                    (&mut *dphi_k, &mut dphi_q[i * s.phi..]),
                    (features, s.phi),
                ),
            ];
            for (_, weights, of_queries, of_keys, (d_key, d_query), (columns, stride)) in
                sums.into_iter().filter(|(any, ..)| *any)
            {
                by_key.pack((0, 0), matrix(weights, keys, count, (s.tile, 1)));
                product([part(&by_key, 0, 0), part(of_queries, 0, i)], [keys, columns, count], (d_key, stride), true);
                by_query.pack((0, 0), matrix(weights, count, keys, (1, s.tile)));
                product([part(&by_query, 0, 0), part(of_keys, 0, 0)], [count, columns, keys], (d_query, stride), true);
            }
        }
        write_rows(p, at, keys, &out.dk, (dk, s.k), width);
        write_rows(p, at, keys, &out.dphi_k, (dphi_k, s.phi), features);
        out.write_gates(p, at, keys, (dg, s.g));
    }
    write_rows(p, (batch, 0, head), time, &out.dq, (dq, s.k), width);
    write_rows(p, (batch, 0, head), time, &out.dphi_q, (dphi_q, s.phi), features);
    near
}

#[cfg(test)]
mod tests {
    use super::super::{operands, shapes, windowed_prefix, windowed_prefix_mul};
    use crate::testing::{Operator, follows_plain_f32};
    use kumiki_autograd::Var;

    /// Weights that sum to something, and a moderate tau.
    fn tame(x: &[Var]) -> Vec<Var> {
        let mut x = x.to_vec();
        for i in [2, 3, 5] {
            x[i] = crate::exp(&crate::mul_scalar(&x[i], 0.5));
        }
        x
    }

    /// Around units, tiles, chunks and windows; values of which all digits are packed, and narrower ones.
    #[test]
    fn shapes_of_every_kind_follow_f32() {
        let window = |window: usize| -> Operator {
            match window {
                1 => |x| windowed_prefix(operands(&tame(x), 1)),
                33 => |x| windowed_prefix_mul(operands(&tame(x), 33), &x[6]),
                64 => |x| windowed_prefix_mul(operands(&tame(x), 64), &x[6]),
                _ => |x| windowed_prefix(operands(&tame(x), 600)),
            }
        };
        let cases = [
            ("one unit", [1, 32, 1, 4, 3, 40], 33),
            ("a unit and a token, wide", [2, 33, 2, 8, 5, 130], 1),
            ("tiles and a rest", [1, 300, 2, 8, 17, 33], 64),
            ("tiles and a rest, wide", [1, 300, 2, 32, 64, 200], 64),
            ("near, then far", [1, 450, 2, 40, 33, 129], 33),
            ("a window of more than a chunk", [1, 1300, 1, 8, 12, 136], 600),
            ("all is near", [1, 530, 1, 8, 12, 136], 600),
            ("nearly all is far", [1, 270, 1, 8, 40, 150], 1),
        ];
        for (name, dims, w) in cases {
            let count = if matches!(w, 1 | 600) { 6 } else { 7 };
            let shapes: Vec<Vec<usize>> = shapes(dims).into_iter().map(|(_, shape)| shape).take(count).collect();
            // What tau gets sums up what all of q gets, along q, and most of it cancels.
            follows_plain_f32(name, &shapes, window(w), &[(5, 0)]);
        }
    }

    #[test]
    fn no_features() {
        let shapes: Vec<Vec<usize>> =
            shapes([1, 200, 1, 8, 0, 140]).into_iter().map(|(_, shape)| shape).take(6).collect();
        follows_plain_f32("no features", &shapes, |x| windowed_prefix(operands(&tame(x), 20)), &[(5, 0)]);
    }
}
