//! L2-normalised rows, `x̂ = x r` with `r = 1 / sqrt(Σ x² + 1e-12)`, times a factor per head: how `gate_aggregate` and
//! its relatives take queries and keys. Backward for `y = f x̂`: `dx = f r (dy - x̂ (x̂·dy))`, `df = Σ x̂·dy`.

use kumiki_tensor::{Tensor, threads};

use crate::attention_tiles::{Number, Rows};
use crate::simd::{Kernel, Lanes, Real};

/// Added to the sum of squares under the root.
const EPS: f64 = 1e-12;

/// Positions (of all heads) that one task normalises.
const POSITIONS: usize = 64;

/// `factor_h x̂` for every row of `x` `[B, T, H, K]`, contiguous; without factors `x̂`.
pub(crate) fn unit_rows<E: Number>(x: &Tensor, factors: Option<&[E]>) -> Tensor {
    let mut out = Tensor::empty(E::DTYPE, x.shape());
    if !x.is_empty() {
        let (rows, piece) = (Rows::new(x), POSITIONS * x.dim(2) * x.dim(3));
        let shape = [x.dim(1), x.dim(2), x.dim(3)];
        threads::parallel_chunks_mut(out.as_mut_slice::<E>(), piece, 4 * piece, |i, out| {
            E::dispatch(UnitRows { first: i * POSITIONS, shape, x: rows, factors, out });
        });
    }
    out
}

/// The gradient of `x` from that of [`unit_rows`], in whose place it is written, and that of the factors `[H]`.
pub(crate) fn unit_rows_backward<E: Number>(x: &Tensor, mut grad: Tensor, factors: Option<&[E]>) -> (Tensor, Tensor) {
    let heads = x.dim(2);
    let mut total = vec![0f64; heads];
    if !x.is_empty() {
        let (rows, piece) = (Rows::new(x), POSITIONS * heads * x.dim(3));
        let shape = [x.dim(1), heads, x.dim(3)];
        let mut sums = vec![0f64; heads * (x.dim(0) * x.dim(1)).div_ceil(POSITIONS)];
        let grads = (grad.make_mut::<E>(), piece);
        threads::parallel_chunks2_mut(grads, (&mut sums, heads), 8 * piece, |i, grad, sums| {
            E::dispatch(UnitRowsBackward { first: i * POSITIONS, shape, x: rows, factors, grad, sums });
        });
        for part in sums.chunks_exact(heads) {
            total.iter_mut().zip(part).for_each(|(t, &x)| *t += x);
        }
    }
    (grad, Tensor::from_slice(&total, &[heads]).cast(E::DTYPE))
}

/// Positions from `first` on, counted through the batch; `shape` is T, H, K.
struct UnitRows<'a, E> {
    first: usize,
    shape: [usize; 3],
    x: Rows<'a, E>,
    factors: Option<&'a [E]>,
    out: &'a mut [E],
}

impl<E: Number> Kernel<E> for UnitRows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let [time, heads, width] = self.shape;
        for (i, out) in self.out.chunks_exact_mut(width).enumerate() {
            let (position, head) = (self.first + i / heads, i % heads);
            let x = self.x.row(position / time, position % time, head);
            let factor = self.factors.map_or(E::ONE, |f| f[head]) * inverse_norm::<E, L>(x);
            for (x, out) in x.chunks(L::N).zip(out.chunks_mut(L::N)) {
                (L::load_partial(x, E::ZERO) * L::splat(factor)).store_partial(out);
            }
        }
    }
}

struct UnitRowsBackward<'a, E> {
    first: usize,
    shape: [usize; 3],
    x: Rows<'a, E>,
    factors: Option<&'a [E]>,
    grad: &'a mut [E],
    /// Per head, the sum of `x̂ · grad`.
    sums: &'a mut [f64],
}

impl<E: Number> Kernel<E> for UnitRowsBackward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let [time, heads, width] = self.shape;
        self.sums.fill(0.0);
        for (i, grad) in self.grad.chunks_exact_mut(width).enumerate() {
            let (position, head) = (self.first + i / heads, i % heads);
            let x = self.x.row(position / time, position % time, head);
            let r = inverse_norm::<E, L>(x);
            let along = r * row_dot::<E, L>(x, grad);
            self.sums[head] += Real::to_f64(along);
            let factor = L::splat(self.factors.map_or(E::ONE, |f| f[head]) * r);
            let back = L::splat(-(along * r));
            for (x, grad) in x.chunks(L::N).zip(grad.chunks_mut(L::N)) {
                let x = L::load_partial(x, E::ZERO);
                (factor * x.mul_add(back, L::load_partial(grad, E::ZERO))).store_partial(grad);
            }
        }
    }
}

#[inline(always)]
fn inverse_norm<E: Number, L: Lanes<Elem = E>>(x: &[E]) -> E {
    E::ONE / (row_dot::<E, L>(x, x) + <E as Real>::from_f64(EPS)).sqrt()
}

#[inline(always)]
fn row_dot<E: Number, L: Lanes<Elem = E>>(x: &[E], y: &[E]) -> E {
    let mut sum = L::splat(E::ZERO);
    for (x, y) in x.chunks(L::N).zip(y.chunks(L::N)) {
        sum = L::load_partial(x, E::ZERO).mul_add(L::load_partial(y, E::ZERO), sum);
    }
    sum.reduce_sum()
}
