//! The chain of tests that every operator passes: naive f64 loops → f64 kernel → central differences → strided views
//! → f32 kernel → bf16.

use kumiki_autograd::{GradCheck, Tape, Var};
use kumiki_tensor::cuda;
use kumiki_tensor::{DType, Device, Rng, Tensor, poison_fresh_buffers};

/// An operator, its naive reference and the inputs to try both on.
pub struct Chain<'a> {
    /// The operator's name, for messages.
    pub name: &'a str,
    /// Seed of the upstream gradient; printed on failure.
    pub seed: u64,
    /// Names and F64 values of the inputs.
    pub inputs: Vec<(&'a str, Tensor)>,
    /// Relative tolerance of f32 against f64, on the scale of the largest value: 2e-5 unless the operator sums much.
    pub f32_tolerance: f64,
    /// Relative tolerance of bf16 inputs against f64; `None` when the operator has no BF16 form.
    pub bf16_tolerance: Option<f64>,
    /// Whether gradients are compared with differences (slow: for small inputs away from kinks).
    pub differences: bool,
}

impl<'a> Chain<'a> {
    /// A chain on standard normal inputs of the given shapes.
    pub fn new(name: &'a str, seed: u64, shapes: &[(&'a str, &[usize])]) -> Chain<'a> {
        poison_fresh_buffers(true);
        let mut rng = Rng::new(seed).fork(name);
        let inputs = shapes.iter().map(|(n, shape)| (*n, rng.normal(DType::F64, shape, 0.0, 1.0))).collect();
        Chain { name, seed, inputs, f32_tolerance: 2e-5, bf16_tolerance: Some(4e-2), differences: true }
    }

    /// Passes input `index` through `f`, for operators that are not defined or not smooth everywhere.
    pub fn map_input(mut self, index: usize, f: impl Fn(f64) -> f64) -> Self {
        let (_, tensor) = &mut self.inputs[index];
        tensor.make_mut::<f64>().iter_mut().for_each(|x| *x = f(*x));
        self
    }

    /// Runs the whole chain; `naive` gets the values of the inputs, row-major, and gives those of the output.
    ///
    /// # Panics
    /// At the first link that does not hold, with operator, seed, shapes and the worst element.
    #[track_caller]
    pub fn run(&self, op: impl Fn(&Tape, &[Var]) -> Var, naive: impl Fn(&[Vec<f64>]) -> Vec<f64>) {
        let values: Vec<Tensor> = self.inputs.iter().map(|(_, t)| t.clone()).collect();
        let expected = naive(&values.iter().map(Tensor::to_f64_vec).collect::<Vec<_>>());
        let (y, grads) = self.evaluate(&op, &values);
        self.close("f64 kernel against naive loops", &y, &expected, 1e-10);

        let views: Vec<Tensor> = values.iter().map(awkward_view).collect();
        let (y_views, grads_views) = self.evaluate(&op, &views);
        self.close("strided views", &y_views, &y, 1e-13);
        self.close_grads("strided views, gradient of", &grads_views, &grads, 1e-12);

        if self.differences {
            let report =
                GradCheck { seed: self.seed, max_elements: 60, ..GradCheck::default() }.run(&self.inputs, &[], &op);
            assert!(
                report.error() < 1e-6 && report.without_gradient.is_empty(),
                "{}: gradients differ from differences ({}): {report}",
                self.name,
                self.context()
            );
        }
        if crate::ON_CUDA.contains(&self.name) {
            self.run_on_cuda(&op, &y, &grads);
        }
        let lower =
            std::iter::once((DType::F32, self.f32_tolerance)).chain(self.bf16_tolerance.map(|t| (DType::BF16, t)));
        for (dtype, tolerance) in lower {
            // The reference sees the same rounded inputs: what is measured is the kernel, not the rounding before it.
            let rounded: Vec<Tensor> = values.iter().map(|t| t.cast(dtype)).collect();
            let exact: Vec<Tensor> = rounded.iter().map(|t| t.cast(DType::F64)).collect();
            let ((y, grads), (y_exact, grads_exact)) = (self.evaluate(&op, &rounded), self.evaluate(&op, &exact));
            self.close_in(dtype, "kernel", &y, &y_exact, tolerance);
            for ((name, _), (got, exact)) in self.inputs.iter().zip(grads.iter().zip(&grads_exact)) {
                self.close_in(dtype, &format!("gradient of {name}"), got, exact, tolerance);
            }
        }
    }

    /// The links of the CPU's kernels on every CUDA device that tests have, strided views included.
    fn run_on_cuda(&self, op: &impl Fn(&Tape, &[Var]) -> Var, y: &[f64], grads: &[Vec<f64>]) {
        for device in cuda::Device::for_tests().into_iter().map(Device::Cuda) {
            let there = |x: &Tensor| x.to(&device).unwrap_or_else(|error| panic!("{}: {error}", self.name));
            let values: Vec<Tensor> = self.inputs.iter().map(|(_, x)| there(x)).collect();
            let (y_there, grads_there) = self.evaluate(op, &values);
            self.close_in(DType::F64, "on CUDA", &y_there, y, 1e-10);
            for ((name, _), (got, here)) in self.inputs.iter().zip(grads_there.iter().zip(grads)) {
                self.close_in(DType::F64, &format!("on CUDA, gradient of {name}"), got, here, 1e-9);
            }

            let views: Vec<Tensor> = values.iter().map(backwards_in_memory).collect();
            let (y_views, grads_views) = self.evaluate(op, &views);
            self.close("strided views on CUDA", &y_views, &y_there, 1e-13);
            self.close_grads("strided views on CUDA, gradient of", &grads_views, &grads_there, 1e-12);

            let lower = [(DType::F32, Some(self.f32_tolerance)), (DType::BF16, self.bf16_tolerance)];
            for (dtype, tolerance) in lower.into_iter().filter_map(|(dtype, t)| Some((dtype, t?))) {
                let rounded: Vec<Tensor> = self.inputs.iter().map(|(_, x)| x.cast(dtype)).collect();
                let exact: Vec<Tensor> = rounded.iter().map(|x| x.cast(DType::F64)).collect();
                let (y, grads) = self.evaluate(op, &rounded.iter().map(there).collect::<Vec<_>>());
                let (y_exact, grads_exact) = self.evaluate(op, &exact);
                self.close_in(dtype, "kernel on CUDA", &y, &y_exact, tolerance);
                for ((name, _), (got, exact)) in self.inputs.iter().zip(grads.iter().zip(&grads_exact)) {
                    self.close_in(dtype, &format!("gradient of {name} on CUDA"), got, exact, tolerance);
                }
            }
        }
    }

    fn context(&self) -> String {
        let shapes: Vec<String> = self.inputs.iter().map(|(n, t)| format!("{n} {:?}", t.shape())).collect();
        format!("seed {}, {}", self.seed, shapes.join(", "))
    }

    /// Output and gradients of all inputs, for an upstream gradient that depends on the seed only.
    fn evaluate(&self, op: &impl Fn(&Tape, &[Var]) -> Var, values: &[Tensor]) -> (Vec<f64>, Vec<Vec<f64>>) {
        let tape = Tape::training(Rng::new(self.seed));
        let leaves: Vec<Var> = values.iter().map(|t| tape.leaf(t.clone())).collect();
        let y = op(&tape, &leaves);
        assert!(
            y.dtype() == values[0].dtype(),
            "{}: output of {} for inputs of {}",
            self.name,
            y.dtype(),
            values[0].dtype()
        );
        let dout = Rng::new(self.seed).fork("upstream").normal(DType::F64, y.shape(), 0.0, 1.0);
        let dout = dout.cast(DType::BF16).cast(y.dtype()).to(&y.value().device());
        let grads = tape.backward_from(&[(&y, dout.unwrap_or_else(|error| panic!("{error}")))]);
        let of = |leaf: &Var| {
            let grad = grads
                .get(leaf)
                .unwrap_or_else(|| panic!("{}: an input received no gradient ({})", self.name, self.context()));
            assert_eq!(grad.shape(), leaf.shape());
            grad.to_f64_vec()
        };
        (y.value().to_f64_vec(), leaves.iter().map(of).collect())
    }

    #[track_caller]
    fn close(&self, what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
        if let Some(problem) = difference(got, expected, tolerance) {
            panic!("{}: {what}: {problem} ({})", self.name, self.context());
        }
    }

    /// As [`Chain::close`], but a few roundings of terms near 1, which inputs and upstream gradients are, always pass:
    /// where such terms cancel, they are all that a result in `dtype` can hold. Those of BF16 are in f32, so that there they
    /// do not gather with the number of terms.
    #[track_caller]
    fn close_in(&self, dtype: DType, what: &str, got: &[f64], exact: &[f64], tolerance: f64) {
        let terms = self.inputs.iter().map(|(_, t)| t.len()).max().unwrap_or(0).max(1) as f64;
        let rounding = match dtype {
            DType::BF16 => 0.5f64.powi(8),
            DType::F32 => 0.5f64.powi(23) * terms.sqrt(),
            _ => 0.5f64.powi(52) * terms.sqrt(),
        };
        let near = |(got, exact): (&f64, &f64)| if (got - exact).abs() <= 4.0 * rounding { *exact } else { *got };
        assert_eq!(got.len(), exact.len(), "{}: {dtype} {what}", self.name);
        let got: Vec<f64> = got.iter().zip(exact).map(near).collect();
        self.close(&format!("{dtype} {what}"), &got, exact, tolerance);
    }

    #[track_caller]
    fn close_grads(&self, what: &str, got: &[Vec<f64>], expected: &[Vec<f64>], tolerance: f64) {
        for ((name, _), (got, expected)) in self.inputs.iter().zip(got.iter().zip(expected)) {
            self.close(&format!("{what} {name}"), got, expected, tolerance);
        }
    }
}

/// The worst element of `got` that is further from `expected` than `tolerance` times the larger of its own size and a
/// tenth of the largest expected value; `None` when all are near. NaN is near NaN only, infinities near themselves.
pub fn difference(got: &[f64], expected: &[f64], tolerance: f64) -> Option<String> {
    if got.len() != expected.len() {
        return Some(format!("{} elements, expected {}", got.len(), expected.len()));
    }
    let scale = expected.iter().filter(|x| x.is_finite()).fold(0f64, |m, x| m.max(x.abs()));
    let error = |(a, b): (&f64, &f64)| {
        if a == b || (a.is_nan() && b.is_nan()) {
            0.0
        } else if a.is_finite() && b.is_finite() {
            (a - b).abs() / b.abs().max(0.1 * scale).max(f64::MIN_POSITIVE)
        } else {
            f64::INFINITY
        }
    };
    let (worst, size) = got.iter().zip(expected).map(error).enumerate().max_by(|a, b| a.1.total_cmp(&b.1))?;
    // Written so that a NaN error fails.
    let near = size <= tolerance;
    (!near).then(|| {
        format!(
            "element {worst} is {:.12e}, expected {:.12e}, off by {size:.2e} (tolerance {tolerance:.0e})",
            got[worst], expected[worst]
        )
    })
}

/// A view with the same elements that is neither contiguous nor starts at 0: the last axis has step 2 inside a larger
/// tensor full of NaN, and the axes lie in memory in reverse order.
pub fn awkward_view(x: &Tensor) -> Tensor {
    if x.rank() == 0 {
        let mut padded = Tensor::full(x.dtype(), &[3], f64::NAN);
        padded.add_assign(&Tensor::zeros(x.dtype(), &[3]));
        return kumiki_tensor::concat(&[&padded, &x.reshape(&[1])], 0).select(0, 3);
    }
    let reversed: Vec<usize> = (0..x.rank()).rev().collect();
    let x = x.permute(&reversed);
    let mut doubled = x.shape().to_vec();
    doubled.push(1);
    let gap = Tensor::full(x.dtype(), &doubled, f64::NAN);
    let pairs = kumiki_tensor::concat(&[&gap, &x.reshape(&doubled)], doubled.len() - 1);
    pairs.select(doubled.len() - 1, 1).permute(&reversed)
}

/// The same elements, but that the axes lie in memory in reverse order.
fn backwards_in_memory(x: &Tensor) -> Tensor {
    let reversed: Vec<usize> = (0..x.rank()).rev().collect();
    x.permute(&reversed).copy().permute(&reversed)
}

/// An operator on the inputs of [`follows_plain_f32`].
#[cfg(test)]
pub(crate) type Operator = fn(&[Var]) -> Var;

/// Holds result and gradients of an operator, on random inputs of these shapes and on every level, against those that vectors
/// of F32 without special instructions give: in F32, and narrow. The latter must differ where the level is fast at it, and
/// threads change no bit. The error of an input `(of, from)` is measured by the gradient of another one, from which it comes.
#[cfg(test)]
pub(crate) fn follows_plain_f32(name: &str, shapes: &[Vec<usize>], f: Operator, measured: &[(usize, usize)]) {
    use crate::simd::{Level, with_level};
    use kumiki_autograd::Param;
    use kumiki_tensor::threads::with_threads;

    let run = |level, threads, narrow| -> Vec<Vec<f64>> {
        with_threads(threads, || {
            with_level(level, || {
                let mut rng = Rng::new(7);
                let mut normal = |shape: &[usize]| rng.normal(DType::F32, shape, 0.0, 1.0);
                let params: Vec<Param> = shapes.iter().map(|shape| Param::new(normal(shape))).collect();
                let tape = Tape::new().with_narrow_products(narrow);
                let inputs: Vec<Var> = params.iter().map(|param| tape.param(param)).collect();
                let y = f(&inputs);
                let dout = normal(y.shape()).cast(y.dtype());
                let grads = tape.backward_from(&[(&y, dout)]);
                let of = |param: &Param| grads.of(param).map_or_else(Vec::new, Tensor::to_f64_vec);
                std::iter::once(y.value().to_f64_vec()).chain(params.iter().map(of)).collect()
            })
        })
    };
    poison_fresh_buffers(true);
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let plain = run(Level::Portable, 2, false);
    for level in Level::available() {
        for (narrow, most) in [(false, 2e-6), (true, 0.02)] {
            let [one, two, eight] = [1, 2, 8].map(|threads| run(level, threads, narrow));
            assert!(one == two && one == eight, "{name} at {level}: threads change bits");
            if narrow && with_level(level, crate::gemm::is_fast) {
                assert!(one[0] != plain[0], "{name} at {level}: nothing is narrow");
            }
            for (i, (plain_i, other)) in plain.iter().zip(&one).enumerate() {
                let difference: Vec<f64> = plain_i.iter().zip(other).map(|(a, b)| a - b).collect();
                let from = measured.iter().find(|(of, _)| of + 1 == i).map_or(i, |(_, from)| from + 1);
                let off = norm(&difference) / norm(&plain[from]).max(f64::MIN_POSITIVE);
                assert!(off < most, "{name} at {level}, narrow {narrow}, {i}: off by {off}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_found_and_named() {
        assert_eq!(difference(&[1.0, f64::NAN, f64::INFINITY], &[1.0, f64::NAN, f64::INFINITY], 1e-9), None);
        assert!(difference(&[1.0, 2.1], &[1.0, 2.0], 1e-3).unwrap().contains("element 1 is 2.1"));
        assert!(difference(&[f64::NAN], &[1.0], 1e-3).is_some());
        assert!(difference(&[1.0], &[f64::NAN], 1e-3).is_some());
        assert!(difference(&[1.0], &[f64::INFINITY], 1e-3).is_some());
        assert!(difference(&[1.0], &[], 1e-3).is_some());
    }

    #[test]
    fn awkward_views_hold_the_same_elements() {
        for shape in [&[][..], &[3], &[2, 3], &[1, 4, 2], &[2, 0]] {
            let x = Rng::new(1).normal(DType::F64, shape, 0.0, 1.0);
            let y = awkward_view(&x);
            assert_eq!((y.shape(), y.to_f64_vec()), (shape, x.to_f64_vec()));
            assert!(shape.len() < 2 || y.is_empty() || !y.is_contiguous());
        }
    }
}
