//! Decoding: the last `W` keys one by one, all earlier ones in the running sums. Memory and time per token do not grow.

use kumiki_autograd::no_grad;
use kumiki_tensor::{DType, Tensor, threads};

use super::{CHUNK, WindowedPrefix};
use crate::attention_tiles::{Band, Number, Rows, Scratch, TileProduct, leading};
use crate::simd::{self, add_outer, add_weighted_rows};
use crate::unit_rows::unit_rows;

/// What [`windowed_prefix`](super::windowed_prefix) has to remember of the tokens so far.
#[derive(Clone, Debug)]
pub struct WindowedPrefixState {
    window: usize,
    seen: usize,
    heads: Option<Heads>,
}

#[derive(Clone, Debug)]
enum Heads {
    F32(Vec<Head<f32>>),
    F64(Vec<Head<f64>>),
}

/// Of one head of one batch entry.
#[derive(Clone, Debug)]
struct Head<E> {
    /// At most `W` rows `(k̂, φ(k), g, 1)`; token number t is row `t % W`.
    ring: Vec<E>,
    /// `Σ_j φ(k)_j ⊗ (g_j, 1)` over the tokens that have left the ring, `[M, G+1]`.
    sums: Vec<E>,
}

impl WindowedPrefixState {
    /// Before the first token, for a window of at least 1.
    ///
    /// # Panics
    /// When the window is 0.
    #[track_caller]
    #[must_use]
    pub fn new(window: usize) -> WindowedPrefixState {
        assert!(window > 0, "windowed_prefix: the window must be at least 1 (a query sees itself), got 0");
        WindowedPrefixState { window, seen: 0, heads: None }
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
        fn of<E>(heads: &[Head<E>]) -> usize {
            heads.iter().map(|h| (h.ring.len() + h.sums.len()) * size_of::<E>()).sum()
        }
        match &self.heads {
            None => 0,
            Some(Heads::F32(heads)) => of(heads),
            Some(Heads::F64(heads)) => of(heads),
        }
    }

    /// Takes the tokens of `x` one after the other and gives the gate of each, `[B, T, H, G]`. The first tokens that come
    /// are taken together, as in training. Sums are in f32, in f64 for F64.
    ///
    /// # Panics
    /// When shapes or dtypes do not fit each other, the tokens before, or the window.
    #[track_caller]
    pub fn push(&mut self, x: WindowedPrefix) -> Tensor {
        x.check("windowed_prefix");
        assert!(x.window == self.window, "windowed_prefix: window {} after tokens of {}", x.window, self.window);
        let dtype = x.q.dtype();
        let count = x.q.dim(0) * x.q.dim(2);
        if self.heads.is_none() {
            self.heads = Some(match dtype.compute() {
                DType::F64 => Heads::F64(vec![Head::new(x.phi_k.dim(3), x.g.dim(3)); count]),
                _ => Heads::F32(vec![Head::new(x.phi_k.dim(3), x.g.dim(3)); count]),
            });
        }
        let out = match (self.heads.as_mut(), dtype.compute()) {
            (Some(Heads::F64(heads)), DType::F64) => push(heads, self.seen, x),
            (Some(Heads::F32(heads)), DType::F32) => push(heads, self.seen, x),
            _ => panic!("windowed_prefix: tokens of {dtype} after tokens of another dtype"),
        };
        self.seen += x.q.dim(1);
        out.cast(dtype)
    }
}

impl<E: Number> Head<E> {
    fn new(features: usize, values: usize) -> Head<E> {
        Head { ring: Vec::new(), sums: vec![E::ZERO; features * (values + 1)] }
    }

    /// What the first `time` tokens of a head leave.
    fn after((batch, head): (usize, usize), time: usize, window: usize, [k, phi_k, g]: [Rows<E>; 3]) -> Head<E> {
        let (features, values) = (phi_k.width, g.width + 1);
        let (stride, left) = (leading::<E>(values), time.saturating_sub(window));
        let sizes = [CHUNK * stride, features * stride];
        let mut scratch = Scratch::new::<E>(sizes.iter().sum());
        let [gates, state] = scratch.parts::<E, 2>(sizes);
        state.fill(E::ZERO);
        for j in (0..left).step_by(CHUNK) {
            let count = CHUNK.min(left - j);
            g.copy(batch, j, head, count, gates, stride);
            gates.chunks_exact_mut(stride).take(count).for_each(|row| row[g.width] = E::ONE);
            TileProduct {
                rows: features,
                depth: count,
                columns: values,
                a: phi_k.from(batch, j, head),
                a_strides: (1, phi_k.time_stride()),
                b: gates,
                b_stride: stride,
                c: state,
                c_stride: stride,
                accumulate: true,
                band: Band::Full,
                narrow: false,
            }
            .run();
        }
        let sums = state.chunks_exact(stride).flat_map(|row| &row[..values]).copied().collect();
        let width = k.width + features + values;
        let mut ring = vec![E::ZERO; (time - left) * width];
        for t in left..time {
            let row = k.row(batch, t, head).iter().chain(phi_k.row(batch, t, head)).chain(g.row(batch, t, head));
            let slot = t % window * width;
            ring[slot..][..width].iter_mut().zip(row.chain([&E::ONE])).for_each(|(y, &x)| *y = x);
        }
        Head { ring, sums }
    }

    /// Takes one token, of width `row.len()`, and gives sums of gates and weights for its query in `acc` `[G+1]`.
    fn push(&mut self, row: &[E], slot: usize, window: usize, (q, phi_q, tau): (&[E], &[E], E), acc: &mut [E]) {
        let (width, features, values) = (q.len(), phi_q.len(), acc.len());
        if self.ring.len() / row.len() < window {
            self.ring.extend_from_slice(row);
        } else {
            let old = &mut self.ring[slot * row.len()..][..row.len()];
            let (phi, g) = old[width..].split_at(features);
            add_outer(&mut self.sums, phi, g);
            old.copy_from_slice(row);
        }
        acc.fill(E::ZERO);
        add_weighted_rows(acc, phi_q, &self.sums, values);
        let weight = |row: &[E]| (simd::dot(q, &row[..width]) - tau).exp();
        let weights: Vec<E> = self.ring.chunks_exact(row.len()).map(weight).collect();
        add_weighted_rows(acc, &weights, &self.ring[width + features..], row.len());
    }
}

#[track_caller]
fn push<E: Number>(heads: &mut [Head<E>], seen: usize, x: WindowedPrefix) -> Tensor {
    let wide = |x: &Tensor| Rows::<E>::prepare(&x.cast(E::DTYPE));
    let (phi_q, phi_k, g) = (wide(x.phi_q.value()), wide(x.phi_k.value()), wide(x.g.value()));
    let tau = x.tau.value().cast(E::DTYPE).contiguous();
    let (q, k) = (unit_rows::<E>(&wide(x.q.value()), Some(&tau)), unit_rows::<E>(&wide(x.k.value()), None));
    let [batch, time, count, values] = [g.dim(0), g.dim(1), g.dim(2), g.dim(3)];
    let width = q.dim(3) + phi_q.dim(3) + values + 1;
    assert!(
        heads.len() == batch * count
            && heads.iter().all(|h| h.ring.len() % width == 0 && h.sums.len() == phi_q.dim(3) * (values + 1)),
        "windowed_prefix: tokens of other sizes than those before, got g {:?} and phi_q {:?}",
        g.shape(),
        phi_q.shape()
    );
    let rows = [Rows::new(&q), Rows::new(&k), Rows::new(&phi_q), Rows::new(&phi_k), Rows::new(&g)];
    if seen == 0 && time > 1 {
        let [_, k, _, phi_k, g] = rows;
        threads::parallel_chunks_mut(heads, 1, time * phi_k.width * values, |at, head| {
            head[0] = Head::after((at / count, at % count), time, x.window, [k, phi_k, g]);
        });
        return no_grad(|| super::windowed_prefix(x)).into_value();
    }
    let mut out = Tensor::zeros(E::DTYPE, &[batch, time, count, values]);
    let (mut row, mut acc) = (Vec::with_capacity(width), vec![E::ZERO; values + 1]);
    for (at, y) in out.as_mut_slice::<E>().chunks_exact_mut(values.max(1)).enumerate() {
        let (b, t, h) = (at / count / time, at / count % time, at % count);
        let [q, k, phi_q, phi_k, g] = rows.map(|rows| rows.row(b, t, h));
        row.clear();
        row.extend(k.iter().chain(phi_k).chain(g).chain([&E::ONE]));
        let slot = (seen + t) % x.window;
        heads[b * count + h].push(&row, slot, x.window, (q, phi_q, tau.as_slice::<E>()[h]), &mut acc);
        let inverse = if acc[values] == E::ZERO { E::ZERO } else { E::ONE / acc[values] };
        y.iter_mut().zip(&acc).for_each(|(y, &x)| *y = x * inverse);
    }
    out
}
