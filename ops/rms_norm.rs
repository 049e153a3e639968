//! `rms_norm`: rows divided by their root mean square, times a weight.
//!
//! Forward, per row of D: `rstd = 1 / sqrt(mean(x²) + eps)`, `y = x · rstd · weight`; eps stands inside the root.
//! Backward, with `g = dout · weight`: `dx = rstd · (g - x · rstd² · mean(g · x))`, `dweight = Σ_rows dout · x · rstd`.
//! Saved: x and weight (needed by every formula above; x usually lives on anyway) and rstd `[rows]`, which spares the
//! backward a pass; y is not. Cost: one read of x and one write of y, the row staying in cache for its second pass; the
//! backward reads x and dout and writes dx over dout. dweight is summed by blocks of rows, then over the blocks in f64.
//! Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::cuda::Source;
use kumiki_tensor::{DType, Tensor, dispatch_real, kernels, threads};

use crate::cast::widened;
use crate::registry::{BenchCase, OpCase};
use crate::rows::{Formula, pass, rows_of, rows_per_task};
use crate::simd::{Kernel, Lanes, Real};

/// `x · weight / sqrt(mean(x², last axis) + eps)` for x `[.., D]` and weight `[D]`; the result has x's shape.
///
/// # Panics
/// When the weight is not `[D]` or of another dtype than x.
#[track_caller]
pub fn rms_norm(x: &Var, weight: &Var, eps: f64) -> Var {
    check_vector("rms_norm", "weight", x, weight);
    if x.dtype() == DType::BF16 {
        return widened(&[x, weight], |v| rms_norm(&v[0], &v[1], eps));
    }
    let (input, scale) = (x.value().contiguous(), weight.value().contiguous());
    let (rows, d) = rows_of(&input);
    let mut y = input.new_empty(x.dtype(), x.shape());
    let mut rstd = input.new_empty(x.dtype(), &[rows]);
    if input.cuda().is_some() {
        cuda::forward(&input, &scale, eps, &mut y, &mut rstd);
    } else if !y.is_empty() {
        dispatch_real!("rms_norm", x.dtype(), E => {
            let (source, weight) = (input.as_slice::<E>(), scale.as_slice::<E>());
            let task = rows_per_task(d);
            threads::parallel_chunks2_mut(
                (y.as_mut_slice::<E>(), task * d),
                (rstd.as_mut_slice::<E>(), task),
                task * d,
                |i, y, rstd| {
                    let x = &source[i * task * d..][..y.len()];
                    E::dispatch(Forward { x, weight, eps, y, rstd });
                },
            );
        });
    }
    Var::from_op(y, &[x, weight], || RmsNormBackward { x: input, weight: scale, rstd })
}

/// Panics unless `v` is a vector as long as x's last axis, of x's dtype.
#[track_caller]
pub(crate) fn check_vector(op: &str, name: &str, x: &Var, v: &Var) {
    assert!(x.rank() > 0 && x.dtype().is_float(), "{op}: x must be float [.., D], got {} {:?}", x.dtype(), x.shape());
    let d = x.dim(x.rank() - 1);
    assert!(v.shape() == [d], "{op}: {name} must be [D={d}], got {:?} (x: {:?})", v.shape(), x.shape());
    assert!(v.dtype() == x.dtype(), "{op}: {name} is {}, x is {} ({:?})", v.dtype(), x.dtype(), x.shape());
}

struct RmsNormBackward {
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
}

impl Backward for RmsNormBackward {
    fn name(&self) -> &'static str {
        "rms_norm"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("x", &self.x), ("weight", &self.weight), ("rstd", &self.rstd)]
    }
    fn backward(self: Box<Self>, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        if self.x.cuda().is_some() {
            return cuda::backward(&self, dout, needs);
        }
        let (rows, d) = rows_of(&self.x);
        let task = rows_per_task(d);
        let mut dx = dout; // overwritten in place unless somebody else holds it
        let mut partial = Tensor::zeros(dx.dtype(), &[rows.div_ceil(task), d]);
        if !dx.is_empty() {
            dispatch_real!("rms_norm", dx.dtype(), E => {
                let (x, rstd) = (self.x.as_slice::<E>(), self.rstd.as_slice::<E>());
                let weight = self.weight.as_slice::<E>();
                threads::parallel_chunks2_mut(
                    (dx.make_mut::<E>(), task * d),
                    (partial.as_mut_slice::<E>(), d),
                    task * d,
                    |i, dx, dweight| {
                        let (x, rstd) = (&x[i * task * d..][..dx.len()], &rstd[i * task..][..dx.len() / d]);
                        E::dispatch(Gradients { x, weight, rstd, dx, dweight, needs: [needs[0], needs[1]] });
                    },
                );
            });
        }
        vec![needs[0].then_some(dx), needs[1].then(|| partial.sum_to(&[d]))]
    }
}

pub(crate) static KERNELS: Source = Source {
    file: "rms_norm.cu",
    text: include_str!("rms_norm.cu"),
    headers: &[],
    kernels: kernels![
        "rms_norm_forward" of "float" "double",
        "rms_norm_backward" of "float" "double",
        "rms_norm_dweight" of "float" "double",
    ],
};

mod cuda {
    use super::{KERNELS, RmsNormBackward};
    use crate::cuda::{by_rows, kernel_of};
    use crate::rows::rows_of;
    use kumiki_tensor::cuda::{Arg, PART, columns_of_parts, launch};
    use kumiki_tensor::{DType, Tensor};

    pub fn forward(x: &Tensor, weight: &Tensor, eps: f64, y: &mut Tensor, rstd: &mut Tensor) {
        let (device, (rows, d)) = (x.cuda().expect("on a CUDA device"), rows_of(x));
        let of_y = y.cuda_out();
        let args = [x.cuda_in(), weight.cuda_in(), of_y, rstd.cuda_out(), Arg::I64(d as i64), Arg::F64(eps)];
        // SAFETY: the kernel's arguments; a block for each of the rows of d, which x, y and rstd have.
        unsafe { launch(device, &KERNELS, &kernel_of("rms_norm_forward", x.dtype()), by_rows(rows, d), &args) };
    }

    pub fn backward(saved: &RmsNormBackward, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        let RmsNormBackward { x, weight, rstd } = saved;
        let (device, (rows, d)) = (x.cuda().expect("on a CUDA device"), rows_of(x));
        let mut dx = dout;
        dx.own();
        // Before `dx` is written over `dout`.
        let dweight = needs[1].then(|| {
            let (parts, shape) = columns_of_parts(rows, d);
            let mut partial = x.new_empty(DType::F64, &[parts, d]);
            let sizes = [rows as i64, d as i64, PART as i64].map(Arg::I64);
            let args = [&[x.cuda_in(), dx.cuda_in(), rstd.cuda_in(), partial.cuda_out()][..], &sizes].concat();
            // SAFETY: the kernel's arguments; `partial` has a row for each part.
            unsafe { launch(device, &KERNELS, &kernel_of("rms_norm_dweight", x.dtype()), shape, &args) };
            partial.sum_to(&[d]).cast(x.dtype())
        });
        let dx = needs[0].then(|| {
            let args = [x.cuda_in(), weight.cuda_in(), rstd.cuda_in(), dx.cuda_out(), Arg::I64(d as i64)];
            // SAFETY: as in `forward`; `dx` is its own.
            unsafe { launch(device, &KERNELS, &kernel_of("rms_norm_backward", x.dtype()), by_rows(rows, d), &args) };
            dx
        });
        vec![dx, dweight]
    }
}

struct Forward<'a, E> {
    x: &'a [E],
    weight: &'a [E],
    eps: f64,
    y: &'a mut [E],
    rstd: &'a mut [E],
}

impl<E: Real> Kernel<E> for Forward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let d = self.weight.len();
        for (r, (x, y)) in self.x.chunks_exact(d).zip(self.y.chunks_exact_mut(d)).enumerate() {
            let [squares] = pass::<L, _, 1, 0, 1>(&Squares, [x], []);
            let rstd = E::from_f64(1.0 / (squares / d as f64 + self.eps).sqrt());
            self.rstd[r] = rstd;
            let [] = pass::<L, _, 2, 1, 0>(&Scaled(rstd), [x, self.weight], [y]);
        }
    }
}

/// Row by row: `dx` holds dout before and, if it is needed, the gradient after.
struct Gradients<'a, E> {
    x: &'a [E],
    weight: &'a [E],
    rstd: &'a [E],
    dx: &'a mut [E],
    dweight: &'a mut [E],
    needs: [bool; 2],
}

impl<E: Real> Kernel<E> for Gradients<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let d = self.weight.len();
        for ((x, dx), &rstd) in self.x.chunks_exact(d).zip(self.dx.chunks_exact_mut(d)).zip(self.rstd) {
            if self.needs[1] {
                let [] = pass::<L, _, 2, 1, 0>(&AddScaledProduct(rstd), [x, dx], [self.dweight]);
            }
            if self.needs[0] {
                let [dot] = pass::<L, _, 3, 0, 1>(&TripleProducts, [x, dx, self.weight], []);
                let r = rstd.to_f64();
                let back = E::from_f64(dot * r * r / d as f64);
                let [] = pass::<L, _, 2, 1, 0>(&RowGradient { rstd, back }, [x, self.weight], [dx]);
            }
        }
    }
}

/// Σ x².
struct Squares;
impl<E: Real> Formula<E, 1, 0, 1> for Squares {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [x]: [L; 1], _: [L; 0], [sum]: &mut [L; 1]) -> [L; 0] {
        *sum = x.mul_add(x, *sum);
        []
    }
}

/// `x · rstd · weight`.
struct Scaled<E>(E);
impl<E: Real> Formula<E, 2, 1, 0> for Scaled<E> {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [x, weight]: [L; 2], _: [L; 1], _: &mut [L; 0]) -> [L; 1] {
        [x * L::splat(self.0) * weight]
    }
}

/// `dweight += dout · x · rstd`.
struct AddScaledProduct<E>(E);
impl<E: Real> Formula<E, 2, 1, 0> for AddScaledProduct<E> {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [x, dout]: [L; 2], [dweight]: [L; 1], _: &mut [L; 0]) -> [L; 1] {
        [(x * L::splat(self.0)).mul_add(dout, dweight)]
    }
}

/// Σ x · dout · weight.
struct TripleProducts;
impl<E: Real> Formula<E, 3, 0, 1> for TripleProducts {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [x, dout, weight]: [L; 3], _: [L; 0], [sum]: &mut [L; 1]) -> [L; 0] {
        *sum = (x * weight).mul_add(dout, *sum);
        []
    }
}

/// `rstd · (dout · weight - x · back)` over dout.
struct RowGradient<E> {
    rstd: E,
    back: E,
}
impl<E: Real> Formula<E, 2, 1, 0> for RowGradient<E> {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [x, weight]: [L; 2], [dout]: [L; 1], _: &mut [L; 0]) -> [L; 1] {
        [L::splat(self.rstd) * dout.mul_add(weight, -(x * L::splat(self.back)))]
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let case = |variant, x: &'static [usize], d: &'static [usize]| {
        OpCase::new("rms_norm", variant, &[("x", x), ("weight", d)], |_, v| rms_norm(&v[0], &v[1], 1e-6))
    };
    vec![case("rows of 5", &[2, 3, 5], &[5]), case("rows of 37", &[4, 37], &[37])]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let (n, d) = (8192, 512);
    vec![BenchCase {
        name: "rms_norm",
        inputs: vec![("x", vec![n, d]), ("weight", vec![d])],
        forward: Box::new(|_, v| rms_norm(&v[0], &v[1], 1e-6)),
        bytes: 2 * n * d * 4,
        flops: 4 * n * d,
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Chain, difference};
    use kumiki_autograd::Tape;
    use proptest::prelude::*;

    fn naive(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
        let d = weight.len();
        let mut y = vec![];
        for row in x.chunks(d.max(1)) {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / d as f64;
            y.extend(row.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * w));
        }
        y
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn the_chain_holds(seed in any::<u64>(), rows in 0usize..4, more in 0usize..4,
                           d in prop_oneof![0usize..20, 60usize..70, 127usize..132], eps in 1e-6..0.5f64) {
            // The gradient of a very short row nearly vanishes where eps does, and f32 is left with its rounding.
            let eps = if d < 4 { 1.0 } else { eps };
            Chain::new("rms_norm", seed, &[("x", &[rows, more, d]), ("weight", &[d])])
                .run(|_, v| rms_norm(&v[0], &v[1], eps), |v| naive(&v[0], &v[1], eps));
        }
    }

    #[test]
    fn many_rows_are_cut_into_tasks() {
        for (rows, d) in [(257, 3), (515, 1), (33, 1030), (50, 5000)] {
            let mut chain = Chain::new("rms_norm", 5, &[("x", &[rows, d]), ("weight", &[d])]);
            chain.differences = false;
            chain.run(|_, v| rms_norm(&v[0], &v[1], 1e-6), |v| naive(&v[0], &v[1], 1e-6));
        }
    }

    #[test]
    fn case_21_eps_is_inside_the_root() {
        for dtype in [DType::F32, DType::F64] {
            let x = Var::constant(Tensor::full(dtype, &[4], 0.001));
            let y = rms_norm(&x, &Var::constant(Tensor::ones(dtype, &[4])), 1e-5);
            assert!(y.value().to_f64_vec().iter().all(|y| (y - 0.301_511_344_6).abs() < 1e-7), "{y:?}");
        }
    }

    #[test]
    fn case_46_the_gradient_may_take_an_inputs_buffer() {
        let eps = 1e-4;
        let rstd = 1.0 / (0.25f64 + eps).sqrt();
        let expected = [rstd * (1.0 - rstd * rstd / 4.0), 0.0, 0.0, 0.0];
        assert!((expected[0] - 0.000_799_5).abs() < 1e-7);
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 5e-4)] {
            let unit = || Tensor::from_slice(&[1.0f64, 0.0, 0.0, 0.0], &[4]).cast(dtype).copy();
            // dout: alone in its buffer, held by the caller too, and in the buffer of x itself.
            for aliasing in 0..3 {
                let tape = Tape::new();
                let x = tape.leaf(unit());
                let y = rms_norm(&x, &Var::constant(Tensor::ones(dtype, &[4])), eps);
                let dout = if aliasing == 2 { x.value().clone() } else { unit() };
                let held = (aliasing == 1).then(|| dout.clone());
                let grads = tape.backward_from(&[(&y, dout)]);
                let dx = grads.get(&x).unwrap().to_f64_vec();
                assert_eq!(difference(&dx, &expected, tolerance), None, "aliasing {aliasing}");
                assert_eq!(x.value().to_f64_vec(), [1.0, 0.0, 0.0, 0.0]);
                assert!(held.is_none_or(|t| t.to_f64_vec() == [1.0, 0.0, 0.0, 0.0]));
            }
        }
    }

    #[test]
    fn only_needed_gradients_are_computed() {
        let (x, w) = (Tensor::full(DType::F64, &[3, 2], 2.0), Tensor::full(DType::F64, &[2], 3.0));
        let tape = Tape::new();
        let weight = tape.leaf(w.clone());
        let y = rms_norm(&Var::constant(x.clone()), &weight, 0.0);
        let grads = tape.backward_from(&[(&y, Tensor::ones(DType::F64, &[3, 2]))]);
        assert_eq!(grads.get(&weight).unwrap().to_f64_vec(), [3.0, 3.0]);
        let tape = Tape::new();
        let input = tape.leaf(x);
        let y = rms_norm(&input, &Var::constant(w), 0.0);
        let grads = tape.backward_from(&[(&y, Tensor::ones(DType::F64, &[3, 2]))]);
        assert!(grads.get(&input).unwrap().to_f64_vec().iter().all(|g| g.abs() < 1e-12));
    }

    #[test]
    fn the_result_is_the_same_for_any_thread_count() {
        let run = |threads| {
            threads::with_threads(threads, || {
                let mut rng = kumiki_tensor::Rng::new(3);
                let tape = Tape::new();
                let x = tape.leaf(rng.normal(DType::F32, &[700, 130], 0.0, 1.0));
                let w = tape.leaf(rng.normal(DType::F32, &[130], 0.0, 1.0));
                let y = rms_norm(&x, &w, 1e-6);
                let grads = tape.backward_from(&[(&y, rng.normal(DType::F32, &[700, 130], 0.0, 1.0))]);
                [&y.value().clone(), grads.get(&x).unwrap(), grads.get(&w).unwrap()].map(Tensor::to_f64_vec)
            })
        };
        let one = run(1);
        assert_eq!(one, run(2));
        assert_eq!(one, run(8));
    }

    #[test]
    #[should_panic(expected = "rms_norm: weight must be [D=64], got [63] (x: [2, 7, 64])")]
    fn shapes_are_named() {
        let x = Var::constant(Tensor::zeros(DType::F32, &[2, 7, 64]));
        rms_norm(&x, &Var::constant(Tensor::zeros(DType::F32, &[63])), 1e-6);
    }
}
