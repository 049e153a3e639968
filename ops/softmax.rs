//! `softmax log_softmax`: along one axis.
//!
//! With m the greatest element of a row and `s = Σ e^(x - m)`:
//! softmax `y = e^(x - m) / s`, backward `dx = y (dout - Σ dout y)`; log_softmax `y = x - m - ln s`, backward
//! `dx = dout - e^y Σ dout`. Both save y alone.
//! A row of -inf only has no softmax: it is NaN, and no other row notices. Sums of long rows are added up in f64.
//! Cost: rows are read from memory once and stay in cache for the passes over them. Along another axis than the last
//! one copy brings it there, and the result is a transposed view.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::cuda::Source;
use kumiki_tensor::{DType, Element, Tensor, kernels};

use crate::cast::widened;
use crate::elementwise::{CHUNK, in_chunks, writable};
use crate::reduce::checked_axes;
use crate::registry::{BenchCase, OpCase};
use crate::simd::{Kernel, Lanes, Real};
use crate::sums::row_sum;

/// `e^x / Σ e^x` along `axis`; the shape of `x`.
///
/// # Panics
/// When the axis does not exist, or `x` is not of a float dtype.
#[track_caller]
pub fn softmax(x: &Var, axis: usize) -> Var {
    normalised("softmax", x, axis, false)
}

/// `x - ln Σ e^x` along `axis`; the shape of `x`.
///
/// # Panics
/// When the axis does not exist, or `x` is not of a float dtype.
#[track_caller]
pub fn log_softmax(x: &Var, axis: usize) -> Var {
    normalised("log_softmax", x, axis, true)
}

#[track_caller]
fn normalised(name: &'static str, x: &Var, axis: usize, log: bool) -> Var {
    checked_axes(name, x, &[axis]);
    widened(&[x], |v| {
        let x = &v[0];
        let rows = axis_last(x.value(), axis);
        let y = match x.dtype() {
            _ if rows.cuda().is_some() => cuda::forward(&rows, log),
            DType::F32 => forward::<f32>(&rows, log),
            _ => forward::<f64>(&rows, log),
        };
        Var::from_op(y.transpose(axis, x.rank() - 1), &[x], || SoftmaxBackward { name, y, axis, log })
    })
}

/// Contiguous, with `axis` and the last axis exchanged.
pub(crate) fn axis_last(x: &Tensor, axis: usize) -> Tensor {
    x.transpose(axis, x.rank() - 1).contiguous()
}

struct SoftmaxBackward {
    name: &'static str,
    /// The output with `axis` last.
    y: Tensor,
    axis: usize,
    log: bool,
}

impl Backward for SoftmaxBackward {
    fn name(&self) -> &'static str {
        self.name
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("y", &self.y)]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        let last = dout.rank() - 1;
        let rows = dout.transpose(self.axis, last);
        drop(dout); // so that `rows` may be written over
        let dx = match rows.dtype() {
            _ if rows.cuda().is_some() => cuda::backward(rows, &self.y, self.log),
            DType::F32 => backward::<f32>(rows, &self.y, self.log),
            _ => backward::<f64>(rows, &self.y, self.log),
        };
        vec![Some(dx.transpose(self.axis, last))]
    }
}

pub(crate) static KERNELS: Source = Source {
    file: "softmax.cu",
    text: include_str!("softmax.cu"),
    headers: &[],
    kernels: kernels!["softmax_forward" of "float" "double", "softmax_backward" of "float" "double"],
};

mod cuda {
    use super::KERNELS;
    use crate::cuda::{by_rows, kernel_of};
    use crate::elementwise::writable;
    use crate::rows::rows_of;
    use kumiki_tensor::Tensor;
    use kumiki_tensor::cuda::{Arg, launch};

    pub fn forward(x: &Tensor, log: bool) -> Tensor {
        let (device, (rows, n)) = (x.cuda().expect("on a CUDA device"), rows_of(x));
        let mut y = x.new_empty(x.dtype(), x.shape());
        let args = [x.cuda_in(), y.cuda_out(), Arg::I64(n as i64), Arg::I32(i32::from(log))];
        // SAFETY: the kernel's arguments; a block for each of the rows of n that both have.
        unsafe { launch(device, &KERNELS, &kernel_of("softmax_forward", x.dtype()), by_rows(rows, n), &args) };
        y
    }

    pub fn backward(dout: Tensor, y: &Tensor, log: bool) -> Tensor {
        let (device, (rows, n)) = (y.cuda().expect("on a CUDA device"), rows_of(y));
        let mut dx = writable(dout);
        let args = [y.cuda_in(), dx.cuda_out(), Arg::I64(n as i64), Arg::I32(i32::from(log))];
        // SAFETY: as in `forward`; `dx` is its own.
        unsafe { launch(device, &KERNELS, &kernel_of("softmax_backward", y.dtype()), by_rows(rows, n), &args) };
        dx
    }
}

fn forward<E: Real + Element>(x: &Tensor, log: bool) -> Tensor {
    let n = x.shape()[x.rank() - 1];
    let mut y = Tensor::empty(E::DTYPE, x.shape());
    if !y.is_empty() {
        let x = x.as_slice::<E>();
        let chunk = (CHUNK / n).max(1) * n;
        in_chunks(y.as_mut_slice::<E>(), chunk, 4 * chunk, &|i, y| {
            E::dispatch(Forward { x: &x[i * chunk..][..y.len()], y, n, log });
        });
    }
    y
}

/// `dx`, over `dout`.
fn backward<E: Real + Element>(dout: Tensor, y: &Tensor, log: bool) -> Tensor {
    let n = y.shape()[y.rank() - 1];
    let mut dx = writable(dout);
    if !dx.is_empty() {
        let y = y.as_slice::<E>();
        let chunk = (CHUNK / n).max(1) * n;
        in_chunks(dx.as_mut_slice::<E>(), chunk, 2 * chunk, &|i, dx| {
            E::dispatch(Gradient { y: &y[i * chunk..][..dx.len()], dx, n, log });
        });
    }
    dx
}

struct Forward<'a, E> {
    x: &'a [E],
    y: &'a mut [E],
    n: usize,
    log: bool,
}

impl<E: Real> Kernel<E> for Forward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        for (x, y) in self.x.chunks_exact(self.n).zip(self.y.chunks_exact_mut(self.n)) {
            let max = row_max::<E, L>(x);
            if self.log {
                let ln_sum = E::from_f64(exp_sum::<E, L, false>(x, max, &mut []).ln());
                for (x, y) in x.chunks(L::N).zip(y.chunks_mut(L::N)) {
                    let x = load::<E, L>(x, E::ZERO);
                    store(x - L::splat(max) - L::splat(ln_sum), y);
                }
            } else {
                let scale = E::from_f64(1.0 / exp_sum::<E, L, true>(x, max, y));
                for y in y.chunks_mut(L::N) {
                    store(load::<E, L>(y, E::ZERO) * L::splat(scale), y);
                }
            }
        }
    }
}

struct Gradient<'a, E> {
    y: &'a [E],
    dx: &'a mut [E],
    n: usize,
    log: bool,
}

impl<E: Real> Kernel<E> for Gradient<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        for (y, dx) in self.y.chunks_exact(self.n).zip(self.dx.chunks_exact_mut(self.n)) {
            if self.log {
                let sum = L::splat(E::from_f64(row_sum::<E, L, false>(dx, dx)));
                for (y, dx) in y.chunks(L::N).zip(dx.chunks_mut(L::N)) {
                    let (y, dout) = (load::<E, L>(y, E::ZERO), load::<E, L>(dx, E::ZERO));
                    store((-y.exp()).mul_add(sum, dout), dx);
                }
            } else {
                let sum = L::splat(E::from_f64(row_sum::<E, L, true>(dx, y)));
                for (y, dx) in y.chunks(L::N).zip(dx.chunks_mut(L::N)) {
                    let (y, dout) = (load::<E, L>(y, E::ZERO), load::<E, L>(dx, E::ZERO));
                    store(y * (dout - sum), dx);
                }
            }
        }
    }
}

/// Up to N elements, then `fill`.
#[inline(always)]
pub(crate) fn load<E: Real, L: Lanes<Elem = E>>(x: &[E], fill: E) -> L {
    if x.len() == L::N { L::load(x) } else { L::load_partial(x, fill) }
}

/// As many lanes as `out` is long.
#[inline(always)]
pub(crate) fn store<E: Real, L: Lanes<Elem = E>>(x: L, out: &mut [E]) {
    if out.len() == L::N { x.store(out) } else { x.store_partial(out) }
}

/// The greatest element that is not NaN; -inf if there is none.
#[inline(always)]
pub(crate) fn row_max<E: Real, L: Lanes<Elem = E>>(x: &[E]) -> E {
    let mut max = [L::splat(E::NEG_INFINITY); 4];
    let mut chunks = x.chunks_exact(4 * L::N);
    for x in &mut chunks {
        for (k, max) in max.iter_mut().enumerate() {
            *max = L::load(&x[k * L::N..]).max(*max);
        }
    }
    for (x, max) in chunks.remainder().chunks(L::N).zip(&mut max) {
        *max = load::<E, L>(x, E::NEG_INFINITY).max(*max);
    }
    max[0].max(max[1]).max(max[2].max(max[3])).reduce_max()
}

/// `Σ e^(x - shift)`; with `STORE` the terms go to `out`, as long as `x`.
#[inline(always)]
pub(crate) fn exp_sum<E: Real, L: Lanes<Elem = E>, const STORE: bool>(x: &[E], shift: E, out: &mut [E]) -> f64 {
    let shift = L::splat(shift);
    let mut total = 0f64;
    let part = 2 * L::N * 128;
    for (p, x) in x.chunks(part).enumerate() {
        let mut sums = [L::splat(E::ZERO); 2];
        let mut i = 0;
        while i + 2 * L::N <= x.len() {
            for (k, sum) in sums.iter_mut().enumerate() {
                let at = i + k * L::N;
                let e = (L::load(&x[at..]) - shift).exp();
                if STORE {
                    e.store(&mut out[p * part + at..]);
                }
                *sum = *sum + e;
            }
            i += 2 * L::N;
        }
        for (k, x) in x[i..].chunks(L::N).enumerate() {
            let e = (load::<E, L>(x, E::ZERO) - shift).exp();
            if STORE {
                let at = p * part + i + k * L::N;
                store(e, &mut out[at..at + x.len()]);
            }
            sums[k] = sums[k] + L::select(L::first_lanes(x.len()), e, L::splat(E::ZERO));
        }
        total += (sums[0] + sums[1]).reduce_sum().to_f64();
    }
    total
}

pub(crate) fn cases() -> Vec<OpCase> {
    let case = |name, variant, axis, f: fn(&Var, usize) -> Var| {
        OpCase::new(name, variant, &[("x", &[3, 4, 5])], move |_, v| f(&v[0], axis))
    };
    vec![
        case("softmax", "last axis", 2, softmax),
        case("softmax", "first axis", 0, softmax),
        case("log_softmax", "last axis", 2, log_softmax),
        case("log_softmax", "middle axis", 1, log_softmax),
    ]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let (rows, n) = (2048, 2048);
    let case = |name, f: fn(&Var, usize) -> Var| BenchCase {
        name,
        inputs: vec![("x", vec![rows, n])],
        forward: Box::new(move |_, v| f(&v[0], 1)),
        bytes: 8 * rows * n,
        flops: 20 * rows * n,
    };
    vec![case("softmax", softmax), case("log_softmax", log_softmax)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proptest_shapes::{check_expanded, shape_and_axis, value_and_gradient};
    use crate::testing::Chain;
    use proptest::prelude::*;

    const INF: f64 = f64::INFINITY;

    fn naive(x: &[f64], shape: &[usize], axis: usize) -> Vec<f64> {
        let (n, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
        let sum = |i: usize| {
            let first = i - i / inner % n * inner;
            (0..n).map(|s| x[first + s * inner].exp()).sum::<f64>()
        };
        (0..x.len()).map(|i| x[i].exp() / sum(i)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn softmaxes_pass_the_chain((shape, axis) in shape_and_axis(3), seed in any::<u64>()) {
            let chain = Chain::new("softmax", seed, &[("x", &shape)]).map_input(0, |x| 2.0 * x);
            chain.run(|_, v| softmax(&v[0], axis), |v| naive(&v[0], &shape, axis));
            let chain = Chain { name: "log_softmax", ..chain };
            chain.run(
                |_, v| log_softmax(&v[0], axis),
                |v| naive(&v[0], &shape, axis).into_iter().map(f64::ln).collect(),
            );
            check_expanded("softmax", seed, &shape, |x| softmax(x, axis));
            check_expanded("log_softmax", seed, &shape, |x| log_softmax(x, axis));
        }
    }

    #[test]
    fn case_16_each_row_has_its_own_maximum() {
        let x = Tensor::from_slice(&[0f32, 0.0, 1000.0, 1000.0], &[2, 2]);
        for (x, axis) in [(x.clone(), 1), (x.transpose(0, 1), 0)] {
            assert_eq!(softmax(&Var::constant(x.clone()), axis).value().to_f64_vec(), [0.5; 4]);
            let log = log_softmax(&Var::constant(x), axis).value().to_f64_vec();
            assert!(log.iter().all(|y| (y + 2f64.ln()).abs() < 1e-7), "{log:?}");
        }
    }

    #[test]
    fn case_16_a_row_of_minus_infinity_is_nan_and_no_other_row_notices() {
        let x = [-INF, -INF, -INF, 0.0, -INF, 0.0];
        for op in [softmax as fn(&Var, usize) -> Var, log_softmax] {
            for dtype in [DType::F32, DType::F64] {
                let (y, dx) = value_and_gradient(&|x: &Var| op(x, 1), Tensor::from_slice(&x, &[2, 3]).cast(dtype));
                let (alone, d_alone) =
                    value_and_gradient(&|x: &Var| op(x, 1), Tensor::from_slice(&x[3..], &[1, 3]).cast(dtype));
                assert!(y[..3].iter().all(|y| y.is_nan()));
                assert_eq!(y[3..], alone);
                assert!(dx[3..].iter().chain(&d_alone).all(|d| d.is_finite()), "{dx:?}");
            }
        }
        let y = softmax(&Var::constant(Tensor::from_slice(&x, &[2, 3])), 1).value().to_f64_vec();
        assert_eq!(y[3..], [0.5, 0.0, 0.5]);
    }

    #[test]
    fn nan_spreads_in_its_row_only() {
        let x = Tensor::from_slice(&[f64::NAN, 1.0, 2.0, 3.0, 3.0, 3.0], &[2, 3]);
        let y = softmax(&Var::constant(x), 1).value().to_f64_vec();
        assert!(y[..3].iter().all(|y| y.is_nan()) && y[3..].iter().all(|y| *y == 1.0 / 3.0));
    }

    #[test]
    fn case_06_empty_axes_have_empty_gradients() {
        for op in [softmax as fn(&Var, usize) -> Var, log_softmax] {
            for shape in [[2, 0], [0, 2]] {
                assert_eq!(value_and_gradient(&|x: &Var| op(x, 1), Tensor::ones(DType::F32, &shape)), (vec![], vec![]));
            }
        }
    }

    #[test]
    fn case_05_long_rows_do_not_saturate() {
        let n = 1 << 24;
        let x = Var::constant(Tensor::zeros(DType::F32, &[1]).expand(&[n]));
        assert_eq!(softmax(&x, 0).value().select(0, n - 1).item(), 1.0 / n as f64);
    }
}
