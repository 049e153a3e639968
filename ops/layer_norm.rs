//! `layer_norm`: rows shifted to mean 0 and scaled to variance 1, times a weight, plus an optional bias.
//!
//! Forward, per row of D: `x̂ = (x - mean) · rstd` with `rstd = 1 / sqrt(mean((x - mean)²) + eps)`,
//! `y = x̂ · weight + bias`. The variance takes a pass of its own over the deviations from the mean, so that it keeps its
//! digits where the mean is large. Backward, with `g = dout · weight`: `dx = rstd · (g - mean(g) - x̂ · mean(g · x̂))`,
//! `dweight = Σ_rows dout · x̂`, `dbias = Σ_rows dout`.
//! Saved: x, weight, and per row rstd and the mean, which is F64 also for F32 rows: its rounding to f32 would be a
//! visible part of a small deviation. Cost: one read of x and one write of y, the row staying in cache for its three
//! passes; the backward reads x and dout and writes dx over dout. Source: Ba, Kiros and Hinton, Layer Normalization, 2016.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::cuda::Source;
use kumiki_tensor::{DType, Tensor, dispatch_real, kernels, threads};

use crate::cast::widened;
use crate::registry::{BenchCase, OpCase};
use crate::rms_norm::check_vector;
use crate::rows::{Formula, pass, rows_of, rows_per_task, split};
use crate::simd::{Kernel, Lanes, Real};

/// `(x - mean) / sqrt(variance + eps) · weight + bias` over the last axis, for x `[.., D]`, weight and bias `[D]`; the
/// result has x's shape. The variance is that of the row itself (divided by D).
///
/// # Panics
/// When weight or bias is not `[D]` or of another dtype than x.
#[track_caller]
pub fn layer_norm(x: &Var, weight: &Var, bias: Option<&Var>, eps: f64) -> Var {
    check_vector("layer_norm", "weight", x, weight);
    if let Some(bias) = bias {
        check_vector("layer_norm", "bias", x, bias);
    }
    let inputs: Vec<&Var> = [x, weight].into_iter().chain(bias).collect();
    if x.dtype() == DType::BF16 {
        return widened(&inputs, |v| layer_norm(&v[0], &v[1], v.get(2), eps));
    }
    let (input, scale) = (x.value().contiguous(), weight.value().contiguous());
    let shift = bias.map(|b| b.value().contiguous());
    let (rows, d) = rows_of(&input);
    let mut y = input.new_empty(x.dtype(), x.shape());
    let mut rstd = input.new_empty(x.dtype(), &[rows]);
    let mut mean = input.new_empty(DType::F64, &[rows]);
    if input.cuda().is_some() {
        cuda::forward(&input, [Some(&scale), shift.as_ref()], eps, [&mut y, &mut mean, &mut rstd]);
    } else if !y.is_empty() {
        dispatch_real!("layer_norm", x.dtype(), E => {
            let (source, weight) = (input.as_slice::<E>(), scale.as_slice::<E>());
            let bias = shift.as_ref().map(|b| b.as_slice::<E>());
            let task = rows_per_task(d);
            // Statistics of a task's rows, (mean, rstd), are handed out of the loop in a slice of pairs.
            let mut statistics = vec![(0f64, 0f64); rows];
            threads::parallel_chunks2_mut(
                (y.as_mut_slice::<E>(), task * d),
                (&mut statistics[..], task),
                task * d,
                |i, y, statistics| {
                    let x = &source[i * task * d..][..y.len()];
                    E::dispatch(Forward { x, weight, bias, eps, y, statistics });
                },
            );
            for (((m, r), mean), rstd) in
                statistics.iter().zip(mean.as_mut_slice::<f64>()).zip(rstd.as_mut_slice::<E>())
            {
                (*mean, *rstd) = (*m, Real::from_f64(*r));
            }
        });
    }
    Var::from_op(y, &inputs, || LayerNormBackward { x: input, weight: scale, mean, rstd })
}

struct LayerNormBackward {
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
}

impl Backward for LayerNormBackward {
    fn name(&self) -> &'static str {
        "layer_norm"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("x", &self.x), ("weight", &self.weight), ("mean", &self.mean), ("rstd", &self.rstd)]
    }
    fn backward(self: Box<Self>, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        if self.x.cuda().is_some() {
            return cuda::backward(&self, dout, needs);
        }
        let (rows, d) = rows_of(&self.x);
        let task = rows_per_task(d);
        let has_bias = needs.len() == 3;
        let needs = [needs[0], needs[1], has_bias && needs[2]];
        let mut dx = dout; // overwritten in place unless somebody else holds it
        let mut partial = Tensor::zeros(dx.dtype(), &[rows.div_ceil(task), 2, d]); // dweight, dbias
        if !dx.is_empty() {
            dispatch_real!("layer_norm", dx.dtype(), E => {
                let (x, weight) = (self.x.as_slice::<E>(), self.weight.as_slice::<E>());
                let (mean, rstd) = (self.mean.as_slice::<f64>(), self.rstd.as_slice::<E>());
                threads::parallel_chunks2_mut(
                    (dx.make_mut::<E>(), task * d),
                    (partial.as_mut_slice::<E>(), 2 * d),
                    task * d,
                    |i, dx, partial| {
                        let x = &x[i * task * d..][..dx.len()];
                        let (mean, rstd) = (&mean[i * task..], &rstd[i * task..]);
                        let (dweight, dbias) = partial.split_at_mut(d);
                        E::dispatch(Gradients { x, weight, mean, rstd, dx, dweight, dbias, needs });
                    },
                );
            });
        }
        let vector = |k: usize| needs[k + 1].then(|| partial.select(1, k).sum_to(&[d]));
        let mut grads = vec![needs[0].then_some(dx), vector(0)];
        if has_bias {
            grads.push(vector(1));
        }
        grads
    }
}

pub(crate) static KERNELS: Source = Source {
    file: "layer_norm.cu",
    text: include_str!("layer_norm.cu"),
    headers: &[],
    kernels: kernels![
        "layer_norm_forward" of "float" "double",
        "layer_norm_backward" of "float" "double",
        "layer_norm_dweight" of "float" "double",
    ],
};

mod cuda {
    use super::{KERNELS, LayerNormBackward};
    use crate::cuda::{by_rows, kernel_of};
    use crate::rows::rows_of;
    use kumiki_tensor::cuda::{Arg, PART, columns_of_parts, launch};
    use kumiki_tensor::{DType, Tensor};

    pub fn forward(x: &Tensor, vectors: [Option<&Tensor>; 2], eps: f64, results: [&mut Tensor; 3]) {
        let (device, (rows, d)) = (x.cuda().expect("on a CUDA device"), rows_of(x));
        let ([weight, bias], [y, mean, rstd]) =
            (vectors.map(|v| v.map_or(Arg::Null, Tensor::cuda_in)), results.map(Tensor::cuda_out));
        let args = [x.cuda_in(), weight, bias, y, mean, rstd, Arg::I64(d as i64), Arg::F64(eps)];
        // SAFETY: the kernel's arguments; a block for each of the rows of d, which x and the results have.
        unsafe { launch(device, &KERNELS, &kernel_of("layer_norm_forward", x.dtype()), by_rows(rows, d), &args) };
    }

    pub fn backward(saved: &LayerNormBackward, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        let LayerNormBackward { x, weight, mean, rstd } = saved;
        let (device, (rows, d), dtype) = (x.cuda().expect("on a CUDA device"), rows_of(x), x.dtype());
        let mut dx = dout;
        dx.own();
        // Before `dx` is written over `dout`.
        let dweight = needs[1].then(|| {
            let (parts, shape) = columns_of_parts(rows, d);
            let mut partial = x.new_empty(DType::F64, &[parts, d]);
            let sizes = [rows, d, PART].map(|n| Arg::I64(n as i64));
            let given = [x.cuda_in(), dx.cuda_in(), mean.cuda_in(), rstd.cuda_in(), partial.cuda_out()];
            // SAFETY: the kernel's arguments; `partial` has a row for each part.
            unsafe {
                let args = [&given[..], &sizes].concat();
                launch(device, &KERNELS, &kernel_of("layer_norm_dweight", dtype), shape, &args);
            };
            partial.sum_to(&[d]).cast(dtype)
        });
        let dbias = needs.get(2).map(|&need| need.then(|| dx.sum_to(&[d])));
        let dx = needs[0].then(|| {
            let given = [x.cuda_in(), weight.cuda_in(), mean.cuda_in(), rstd.cuda_in()];
            let args = [&given[..], &[dx.cuda_out(), Arg::I64(d as i64)]].concat();
            // SAFETY: as in `forward`; `dx` is its own.
            unsafe { launch(device, &KERNELS, &kernel_of("layer_norm_backward", dtype), by_rows(rows, d), &args) };
            dx
        });
        [dx, dweight].into_iter().chain(dbias).collect()
    }
}

struct Forward<'a, E> {
    x: &'a [E],
    weight: &'a [E],
    bias: Option<&'a [E]>,
    eps: f64,
    y: &'a mut [E],
    statistics: &'a mut [(f64, f64)],
}

impl<E: Real> Kernel<E> for Forward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let d = self.weight.len();
        let n = d as f64;
        for (r, (x, y)) in self.x.chunks_exact(d).zip(self.y.chunks_exact_mut(d)).enumerate() {
            let [sum] = pass::<L, _, 1, 0, 1>(&Sum, [x], []);
            // What the mean lost by rounding to E shows as the mean of the deviations, and is put right.
            let near = E::from_f64(sum / n);
            let [rest, squares] = pass::<L, _, 1, 0, 2>(&Deviations(near), [x], []);
            let mean = near.to_f64() + rest / n;
            let variance = (squares / n - (rest / n) * (rest / n)).max(0.0);
            let rstd = 1.0 / (variance + self.eps).sqrt();
            self.statistics[r] = (mean, rstd);
            let row = Row::new(mean, E::from_f64(rstd));
            match self.bias {
                Some(bias) => {
                    let [] = pass::<L, _, 3, 1, 0>(&row, [x, self.weight, bias], [y]);
                }
                None => {
                    let [] = pass::<L, _, 2, 1, 0>(&row, [x, self.weight], [y]);
                }
            }
        }
    }
}

/// Row by row: `dx` holds dout before and, if it is needed, the gradient after.
struct Gradients<'a, E> {
    x: &'a [E],
    weight: &'a [E],
    mean: &'a [f64],
    rstd: &'a [E],
    dx: &'a mut [E],
    dweight: &'a mut [E],
    dbias: &'a mut [E],
    needs: [bool; 3],
}

impl<E: Real> Kernel<E> for Gradients<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let d = self.weight.len();
        for (r, (x, dx)) in self.x.chunks_exact(d).zip(self.dx.chunks_exact_mut(d)).enumerate() {
            let row = Row::new(self.mean[r], self.rstd[r]);
            if self.needs[1] || self.needs[2] {
                let [] = pass::<L, _, 2, 2, 0>(&row, [x, dx], [self.dweight, self.dbias]);
            }
            if self.needs[0] {
                let [sum, dot] = pass::<L, _, 3, 0, 2>(&row, [x, dx, self.weight], []);
                let (sum, dot) = (E::from_f64(sum / d as f64), E::from_f64(dot / d as f64));
                let [] = pass::<L, _, 2, 1, 0>(&RowGradient { row, sum, dot }, [x, self.weight], [dx]);
            }
        }
    }
}

/// Σ x.
struct Sum;
impl<E: Real> Formula<E, 1, 0, 1> for Sum {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [x]: [L; 1], _: [L; 0], [sum]: &mut [L; 1]) -> [L; 0] {
        *sum = *sum + x;
        []
    }
}

/// Σ (x - c) and Σ (x - c)².
struct Deviations<E>(E);
impl<E: Real> Formula<E, 1, 0, 2> for Deviations<E> {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [x]: [L; 1], _: [L; 0], [sum, squares]: &mut [L; 2]) -> [L; 0] {
        let x = x - L::splat(self.0);
        *sum = *sum + x;
        *squares = x.mul_add(x, *squares);
        []
    }
}

/// The statistics of a row, the mean in two parts.
#[derive(Clone, Copy)]
struct Row<E> {
    mean: (E, E),
    rstd: E,
}

impl<E: Real> Row<E> {
    #[inline(always)]
    fn new(mean: f64, rstd: E) -> Row<E> {
        Row { mean: split(mean), rstd }
    }

    /// `x̂`.
    #[inline(always)]
    fn normal<L: Lanes<Elem = E>>(&self, x: L) -> L {
        ((x - L::splat(self.mean.0)) - L::splat(self.mean.1)) * L::splat(self.rstd)
    }
}

/// `x̂ · weight`.
impl<E: Real> Formula<E, 2, 1, 0> for Row<E> {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [x, weight]: [L; 2], _: [L; 1], _: &mut [L; 0]) -> [L; 1] {
        [self.normal(x) * weight]
    }
}

/// `x̂ · weight + bias`.
impl<E: Real> Formula<E, 3, 1, 0> for Row<E> {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [x, weight, bias]: [L; 3], _: [L; 1], _: &mut [L; 0]) -> [L; 1] {
        [self.normal(x).mul_add(weight, bias)]
    }
}

/// `dweight += dout · x̂`, `dbias += dout`.
impl<E: Real> Formula<E, 2, 2, 0> for Row<E> {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [x, dout]: [L; 2], [dweight, dbias]: [L; 2], _: &mut [L; 0]) -> [L; 2] {
        [self.normal(x).mul_add(dout, dweight), dbias + dout]
    }
}

/// Σ g and Σ g · x̂.
impl<E: Real> Formula<E, 3, 0, 2> for Row<E> {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [x, dout, weight]: [L; 3], _: [L; 0], [sum, dot]: &mut [L; 2]) -> [L; 0] {
        let g = dout * weight;
        *sum = *sum + g;
        *dot = self.normal(x).mul_add(g, *dot);
        []
    }
}

/// `rstd · (dout · weight - sum - x̂ · dot)` over dout.
struct RowGradient<E> {
    row: Row<E>,
    sum: E,
    dot: E,
}
impl<E: Real> Formula<E, 2, 1, 0> for RowGradient<E> {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [x, weight]: [L; 2], [dout]: [L; 1], _: &mut [L; 0]) -> [L; 1] {
        let back = self.row.normal(x).mul_add(L::splat(self.dot), L::splat(self.sum));
        [L::splat(self.row.rstd) * dout.mul_add(weight, -back)]
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let inputs: &[(&'static str, &[usize])] = &[("x", &[3, 2, 5]), ("weight", &[5]), ("bias", &[5])];
    vec![
        OpCase::new("layer_norm", "bias", inputs, |_, v| layer_norm(&v[0], &v[1], Some(&v[2]), 1e-5)),
        OpCase::new("layer_norm", "no bias", &inputs[..2], |_, v| layer_norm(&v[0], &v[1], None, 1e-5)),
    ]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let (n, d) = (8192, 512);
    vec![BenchCase {
        name: "layer_norm",
        inputs: vec![("x", vec![n, d]), ("weight", vec![d]), ("bias", vec![d])],
        forward: Box::new(|_, v| layer_norm(&v[0], &v[1], Some(&v[2]), 1e-5)),
        bytes: 2 * n * d * 4,
        flops: 8 * n * d,
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Chain, difference};
    use kumiki_autograd::Tape;
    use kumiki_tensor::Rng;
    use proptest::prelude::*;

    fn naive(x: &[f64], weight: &[f64], bias: Option<&[f64]>, eps: f64) -> Vec<f64> {
        let d = weight.len();
        let mut y = vec![];
        for row in x.chunks(d.max(1)) {
            let mean = row.iter().sum::<f64>() / d as f64;
            let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / d as f64;
            y.extend(
                (0..d).map(|i| (row[i] - mean) / (variance + eps).sqrt() * weight[i] + bias.map_or(0.0, |b| b[i])),
            );
        }
        y
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn the_chain_holds(seed in any::<u64>(), rows in 0usize..4, more in 0usize..4,
                           d in prop_oneof![0usize..20, 60usize..70, 127usize..132], biased in any::<bool>()) {
            // The gradient of a very short row nearly vanishes where eps does, and f32 is left with its rounding.
            let eps = if d < 4 { 1.0 } else { 1e-2 };
            if biased {
                Chain::new("layer_norm", seed, &[("x", &[rows, more, d]), ("weight", &[d]), ("bias", &[d])])
                    .run(|_, v| layer_norm(&v[0], &v[1], Some(&v[2]), eps), |v| naive(&v[0], &v[1], Some(&v[2]), eps));
            } else {
                Chain::new("layer_norm", seed, &[("x", &[rows, more, d]), ("weight", &[d])])
                    .run(|_, v| layer_norm(&v[0], &v[1], None, eps), |v| naive(&v[0], &v[1], None, eps));
            }
        }
    }

    #[test]
    fn many_rows_are_cut_into_tasks() {
        for (rows, d) in [(515, 3), (33, 1030), (20, 5000)] {
            let mut chain = Chain::new("layer_norm", 5, &[("x", &[rows, d]), ("weight", &[d]), ("bias", &[d])]);
            chain.differences = false;
            chain.run(|_, v| layer_norm(&v[0], &v[1], Some(&v[2]), 1e-2), |v| naive(&v[0], &v[1], Some(&v[2]), 1e-2));
        }
    }

    #[test]
    fn a_large_mean_costs_no_digits() {
        let d = 100;
        let x = Rng::new(4).normal(DType::F32, &[3, d], 1e4, 1.0);
        let dout = Rng::new(5).normal(DType::F32, &[3, d], 0.0, 1.0);
        let run = |dtype: DType| {
            let tape = Tape::new();
            let x = tape.leaf(x.cast(dtype));
            let y = layer_norm(&x, &Var::constant(Tensor::ones(dtype, &[d])), None, 1e-5);
            let grads = tape.backward_from(&[(&y, dout.cast(dtype))]);
            (y.value().to_f64_vec(), grads.get(&x).unwrap().to_f64_vec())
        };
        let (got, exact) = (run(DType::F32), run(DType::F64));
        assert_eq!(difference(&got.0, &exact.0, 2e-6), None);
        assert_eq!(difference(&got.1, &exact.1, 2e-5), None);
    }

    #[test]
    #[should_panic(expected = "layer_norm: bias must be [D=4], got [3] (x: [2, 4])")]
    fn shapes_are_named() {
        let zeros = |shape: &[usize]| Var::constant(Tensor::zeros(DType::F32, shape));
        layer_norm(&zeros(&[2, 4]), &zeros(&[4]), Some(&zeros(&[3])), 1e-6);
    }
}
