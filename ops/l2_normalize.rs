//! `l2_normalize`: rows of unit length.
//!
//! Forward, over the last axis, `y = x r`, `r = 1/√(Σx² + eps)`: eps is under the root, so a row of zeros stays zero.
//! Backward `dx = r (dout − x c)`, `c = r² Σ x dout`: the part of `dout` along `x` is taken out. At a zero row
//! `dx = dout/√eps`, finite. Saves `x`; `r` costs one more pass over a row that is in cache anyway.
//! Sums are taken in blocks, and the blocks in f64. Cost: one read and one write of memory.
//! Where it is used: TANGO's queries and keys, per head.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::{Tensor, dispatch_real, threads};

use crate::cast::wide;
use crate::registry::{BenchCase, OpCase};
use crate::rows::rows_of;
use crate::simd::{Kernel, Lanes, Real};
use crate::unit_rows;

/// `x / √(Σx² + eps)` over the last axis of `x` `[.., K]`; F32 or F64, BF16 computed in F32.
///
/// # Panics
/// When `x` has no axis or is not of a float dtype, or `eps` is not positive.
#[track_caller]
pub fn l2_normalize(x: &Var, eps: f64) -> Var {
    assert!(
        x.rank() > 0 && x.dtype().is_float(),
        "l2_normalize: x must be [.., K] of a float dtype, got {:?} {}",
        x.shape(),
        x.dtype()
    );
    assert!(eps > 0.0 && eps.is_finite(), "l2_normalize: eps must be positive, got {eps}");
    let (value, width) = (wide(x.value()).contiguous(), x.dim(x.rank() - 1));
    if value.cuda().is_some() {
        let y = unit_rows::cuda::unit_rows(&one_head(&value), None, eps).reshape(value.shape()).cast(x.dtype());
        return Var::from_op(y, &[x], || L2NormalizeBackward { x: x.value().clone(), eps });
    }
    let mut y = Tensor::empty(value.dtype(), value.shape());
    dispatch_real!("l2_normalize", value.dtype(), E => {
        let source = value.as_slice::<E>();
        by_rows(y.as_mut_slice::<E>(), width, |start, y| {
            E::dispatch(Forward { x: &source[start..start + y.len()], y, width, eps });
        });
    });
    Var::from_op(y.cast(x.dtype()), &[x], || L2NormalizeBackward { x: x.value().clone(), eps })
}

struct L2NormalizeBackward {
    x: Tensor,
    eps: f64,
}

impl Backward for L2NormalizeBackward {
    fn name(&self) -> &'static str {
        "l2_normalize"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("x", &self.x)]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        let (x, dout, eps) = (wide(&self.x).contiguous(), wide(&dout).contiguous(), self.eps);
        if x.cuda().is_some() {
            let (dx, _) = unit_rows::cuda::unit_rows_backward(&one_head(&x), one_head(&dout), None, eps);
            return vec![Some(dx.reshape(x.shape()).cast(self.x.dtype()))];
        }
        let width = x.dim(x.rank() - 1);
        let mut dx = Tensor::empty(x.dtype(), x.shape());
        dispatch_real!("l2_normalize", x.dtype(), E => {
            let (x, dout) = (x.as_slice::<E>(), dout.as_slice::<E>());
            by_rows(dx.as_mut_slice::<E>(), width, |start, dx| {
                let rows = start..start + dx.len();
                E::dispatch(Reverse { x: &x[rows.clone()], dout: &dout[rows], dx, width, eps });
            });
        });
        vec![Some(dx.cast(self.x.dtype()))]
    }
}

/// The rows as `[1, rows, 1, K]`.
fn one_head(x: &Tensor) -> Tensor {
    let (rows, width) = rows_of(x);
    x.reshape(&[1, rows, 1, width])
}

/// Cuts `out` into pieces of whole rows and calls `f` with the start of each.
fn by_rows<E: Send>(out: &mut [E], width: usize, f: impl Fn(usize, &mut [E]) + Sync + Send) {
    if out.is_empty() {
        return;
    }
    let piece = (8 * 1024 / width).max(1) * width;
    threads::parallel_chunks_mut(out, piece, 2 * piece, |i, rows| f(i * piece, rows));
}

/// `Σ x y`, in f64 from one block to the next.
#[inline(always)]
fn dot<E: Real, L: Lanes<Elem = E>>(x: &[E], y: &[E]) -> f64 {
    const BLOCK: usize = 1024;
    let mut total = 0.0;
    for (x, y) in x.chunks(BLOCK).zip(y.chunks(BLOCK)) {
        let mut sums = [L::splat(E::ZERO); 2];
        for (i, (x, y)) in x.chunks(L::N).zip(y.chunks(L::N)).enumerate() {
            let (x, y) = if x.len() == L::N {
                (L::load(x), L::load(y))
            } else {
                (L::load_partial(x, E::ZERO), L::load_partial(y, E::ZERO))
            };
            sums[i % 2] = x.mul_add(y, sums[i % 2]);
        }
        total += (sums[0] + sums[1]).reduce_sum().to_f64();
    }
    total
}

#[inline(always)]
fn reciprocal_norm<E: Real, L: Lanes<Elem = E>>(x: &[E], eps: f64) -> f64 {
    let mut squares = dot::<E, L>(x, x);
    if !squares.is_finite() {
        // In F32 squares overflow from 2e19 on: once more in f64, where they do not.
        squares = x.iter().map(|x| x.to_f64() * x.to_f64()).sum();
    }
    1.0 / (squares + eps).sqrt()
}

struct Forward<'a, E> {
    x: &'a [E],
    y: &'a mut [E],
    width: usize,
    eps: f64,
}

impl<E: Real> Kernel<E> for Forward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        for (x, y) in self.x.chunks_exact(self.width).zip(self.y.chunks_exact_mut(self.width)) {
            let r = L::splat(E::from_f64(reciprocal_norm::<E, L>(x, self.eps)));
            for (x, y) in x.chunks(L::N).zip(y.chunks_mut(L::N)) {
                if y.len() == L::N {
                    (L::load(x) * r).store(y);
                } else {
                    (L::load_partial(x, E::ZERO) * r).store_partial(y);
                }
            }
        }
    }
}

struct Reverse<'a, E> {
    x: &'a [E],
    dout: &'a [E],
    dx: &'a mut [E],
    width: usize,
    eps: f64,
}

impl<E: Real> Kernel<E> for Reverse<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let rows = self.x.chunks_exact(self.width).zip(self.dout.chunks_exact(self.width));
        for ((x, dout), dx) in rows.zip(self.dx.chunks_exact_mut(self.width)) {
            let r = reciprocal_norm::<E, L>(x, self.eps);
            let minus_c = L::splat(E::from_f64(-dot::<E, L>(x, dout) * r * r));
            let r = L::splat(E::from_f64(r));
            for ((x, dout), dx) in x.chunks(L::N).zip(dout.chunks(L::N)).zip(dx.chunks_mut(L::N)) {
                if dx.len() == L::N {
                    (L::load(x).mul_add(minus_c, L::load(dout)) * r).store(dx);
                } else {
                    let (x, dout) = (L::load_partial(x, E::ZERO), L::load_partial(dout, E::ZERO));
                    (x.mul_add(minus_c, dout) * r).store_partial(dx);
                }
            }
        }
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    vec![
        OpCase::new("l2_normalize", "", &[("x", &[2, 3, 5])], |_, v| l2_normalize(&v[0], 1e-12)),
        OpCase::new("l2_normalize", "large eps", &[("x", &[3, 4])], |_, v| l2_normalize(&v[0], 0.5)),
    ]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let (rows, k) = (4096 * 8, 64);
    vec![BenchCase {
        name: "l2_normalize",
        inputs: vec![("x", vec![rows, k])],
        forward: Box::new(|_, v| l2_normalize(&v[0], 1e-12)),
        bytes: 2 * 4 * rows * k,
        flops: 3 * rows * k,
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Chain;
    use kumiki_autograd::Tape;
    use kumiki_tensor::{DType, Rng};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn passes_the_chain(
            seed in any::<u64>(), rows in proptest::collection::vec(0usize..4, 0..3), width in 0usize..40,
            eps in prop_oneof![Just(1e-12), Just(0.1)],
        ) {
            let shape: Vec<usize> = rows.iter().copied().chain([width]).collect();
            // Bounded away from 0: a row of one element near 0 has a kink as narrow as √eps, which differences step over.
            let chain = Chain::new("l2_normalize", seed, &[("x", &shape)]).map_input(0, |x| x + 0.5f64.copysign(x));
            chain.run(|_, v| l2_normalize(&v[0], eps), |x| {
                let mut y = x[0].clone();
                for row in y.chunks_mut(width.max(1)) {
                    let norm = (row.iter().map(|x| x * x).sum::<f64>() + eps).sqrt();
                    row.iter_mut().for_each(|x| *x /= norm);
                }
                y
            });
        }
    }

    fn value_and_gradient(x: Tensor, dout: Tensor) -> (Vec<f64>, Vec<f64>) {
        let tape = Tape::new();
        let x = tape.leaf(x);
        let y = l2_normalize(&x, 1e-12);
        let grads = tape.backward_from(&[(&y, dout)]);
        (y.value().to_f64_vec(), grads.get(&x).unwrap().to_f64_vec())
    }

    #[test]
    fn a_row_of_zeros_gives_zeros_and_a_finite_gradient() {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let (y, dx) = value_and_gradient(Tensor::zeros(dtype, &[2, 40]), Tensor::ones(dtype, &[2, 40]));
            assert!(y.iter().all(|&y| y == 0.0));
            assert!(dx.iter().all(|dx| (dx / 1e6 - 1.0).abs() < 4e-3), "1/√eps");
        }
    }

    #[test]
    fn large_numbers_do_not_overflow() {
        let (y, dx) = value_and_gradient(Tensor::full(DType::F32, &[1, 4], 3e20), Tensor::ones(DType::F32, &[1, 4]));
        assert_eq!(y, [0.5; 4]);
        assert!(dx.iter().all(|&dx| dx.abs() < 1e-20), "{dx:?}");
    }

    #[test]
    fn case_05_long_rows_do_not_saturate() {
        let (y, _) = value_and_gradient(Tensor::ones(DType::F32, &[1 << 25]), Tensor::ones(DType::F32, &[1 << 25]));
        assert_eq!(y[0], f64::from((0.5f64.powi(25).sqrt()) as f32));
    }

    #[test]
    fn threads_do_not_change_the_result() {
        let mut rng = Rng::new(6);
        let (x, dout) = (rng.normal(DType::F32, &[999, 67], 0.0, 1.0), rng.normal(DType::F32, &[999, 67], 0.0, 1.0));
        let run = |n| threads::with_threads(n, || value_and_gradient(x.clone(), dout.clone()));
        let one = run(1);
        assert!(run(2) == one && run(8) == one);
    }

    #[test]
    #[should_panic(expected = "l2_normalize: eps must be positive, got 0")]
    fn eps_of_zero_is_refused() {
        l2_normalize(&Var::constant(Tensor::zeros(DType::F32, &[1])), 0.0);
    }
}
