//! L2-normalised rows, `x̂ = x r` with `r = 1 / sqrt(Σ x² + 1e-12)`, times a factor per head: how `gate_aggregate` and
//! its relatives take queries and keys. Backward for `y = f x̂`: `dx = f r (dy - x̂ (x̂·dy))`, `df = Σ x̂·dy`.

use kumiki_tensor::cuda::Source;
use kumiki_tensor::{Tensor, kernels, threads};

use crate::attention_tiles::{Number, Rows};
use crate::simd::{Kernel, Lanes, Real};

/// Added to the sum of squares under the root.
const EPS: f64 = 1e-12;

/// Positions (of all heads) that one task normalises.
const POSITIONS: usize = 64;

/// `factor_h x̂` for every row of `x` `[B, T, H, K]`, whose last axis lies without gaps; contiguous. Without factors `[H]` `x̂`.
pub(crate) fn unit_rows<E: Number>(x: &Tensor, factors: Option<&Tensor>) -> Tensor {
    if x.cuda().is_some() {
        return cuda::unit_rows(x, factors, EPS);
    }
    let factors = factors.map(Tensor::as_slice::<E>);
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
pub(crate) fn unit_rows_backward<E: Number>(
    x: &Tensor,
    mut grad: Tensor,
    factors: Option<&Tensor>,
) -> (Tensor, Tensor) {
    if x.cuda().is_some() {
        return cuda::unit_rows_backward(x, grad, factors, EPS);
    }
    let factors = factors.map(Tensor::as_slice::<E>);
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

pub(crate) static KERNELS: Source = Source {
    file: "unit_rows.cu",
    text: include_str!("unit_rows.cu"),
    headers: &[],
    kernels: kernels!["unit_rows" of "float" "double", "unit_rows_backward" of "float" "double"],
};

pub(crate) mod cuda {
    use super::KERNELS;
    use crate::cuda::{by_warps, kernel_of};
    use kumiki_tensor::Tensor;
    use kumiki_tensor::cuda::{Arg, launch};

    /// The kernels' `Rows`.
    fn rows(x: &Tensor) -> Vec<u8> {
        let numbers = x.shape()[1..].iter().chain(&x.strides()[..3]);
        numbers.flat_map(|&n| (n as u64).to_ne_bytes()).collect()
    }

    /// Rows of `[B, T, H, K]` of F32 or F64, their last axis without gaps.
    pub fn unit_rows(x: &Tensor, factors: Option<&Tensor>, eps: f64) -> Tensor {
        let device = x.cuda().expect("on a CUDA device");
        let (rows, count) = (rows(x), x.shape()[..3].iter().product());
        let mut out = x.new_empty(x.dtype(), x.shape());
        let factors = factors.map_or(Arg::Null, Tensor::cuda_in);
        let sizes = [Arg::I64(count as i64), Arg::F64(eps)];
        let args = [&[Arg::Struct(&rows), x.cuda_in(), factors, out.cuda_out()][..], &sizes].concat();
        // SAFETY: the kernel's arguments; the rows lie where shape and strides say, and `out` has as many.
        unsafe { launch(device, &KERNELS, &kernel_of("unit_rows", x.dtype()), by_warps(count), &args) };
        out
    }

    /// Their gradient, over `grad`, and that of the factors.
    pub fn unit_rows_backward(x: &Tensor, mut grad: Tensor, factors: Option<&Tensor>, eps: f64) -> (Tensor, Tensor) {
        let device = x.cuda().expect("on a CUDA device");
        let (rows, heads) = (rows(x), x.dim(2));
        let mut along = x.new_empty(x.dtype(), &[x.dim(0) * x.dim(1), heads]);
        grad.own();
        let factors = factors.map_or(Arg::Null, Tensor::cuda_in);
        let count = along.len();
        let sizes = [Arg::I64(count as i64), Arg::F64(eps)];
        let both = [grad.cuda_out(), along.cuda_out()];
        let args = [&[Arg::Struct(&rows), x.cuda_in(), factors], &both[..], &sizes].concat();
        // SAFETY: as above; `grad` is of x's shape and its own, `along` has a number for each row.
        unsafe { launch(device, &KERNELS, &kernel_of("unit_rows_backward", x.dtype()), by_warps(count), &args) };
        (grad, along.sum_to(&[heads]))
    }
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
