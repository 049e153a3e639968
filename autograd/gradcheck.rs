//! [`gradcheck`]: every gradient of a closure against central differences, in F64.

use std::collections::HashMap;
use std::fmt;

use kumiki_tensor::{DType, Rng, Tensor};

use crate::param::{Param, ParamId};
use crate::tape::Tape;
use crate::var::Var;

/// How a gradient check is made.
#[derive(Clone, Debug)]
pub struct GradCheck {
    /// Step of the differences, relative to `max(1, |x|)`. Five-point differences: the error is of order `step⁴`.
    pub step: f64,
    /// Elements of each tensor that are checked, spread evenly over it; all when it has no more.
    pub max_elements: usize,
    /// Seed of the upstream gradient, and of the tape's generator, so that dropout draws the same masks each time.
    pub seed: u64,
}

impl Default for GradCheck {
    fn default() -> GradCheck {
        GradCheck { step: 3e-4, max_elements: 200, seed: 0 }
    }
}

/// The element whose gradient differs most.
#[derive(Clone, Debug)]
pub struct Worst {
    /// Name of the input or parameter.
    pub name: String,
    /// Index of the element.
    pub index: Vec<usize>,
    /// What the backward gives.
    pub analytic: f64,
    /// What central differences give.
    pub numeric: f64,
    /// `|analytic - numeric|` over the larger of both, or over a thousandth of the tensor's largest gradient if that is
    /// more; no less than `1e7` roundings of the differences, for below those they prove nothing.
    pub error: f64,
}

/// What a gradient check found.
#[derive(Clone, Debug)]
pub struct Report {
    /// The worst element; `None` when there was none to check.
    pub worst: Option<Worst>,
    /// Elements that were compared.
    pub checked: usize,
    /// Inputs and parameters to which no gradient arrived, though their names were given.
    pub without_gradient: Vec<String>,
}

impl Report {
    /// The error of the worst element; 0 when there was none to check.
    pub fn error(&self) -> f64 {
        self.worst.as_ref().map_or(0.0, |w| w.error)
    }

    /// Asserts that every gradient is within `tolerance` and that every name received one.
    ///
    /// # Panics
    /// Otherwise, with the report.
    #[track_caller]
    pub fn assert_below(&self, tolerance: f64) {
        assert!(
            self.error() < tolerance && self.without_gradient.is_empty(),
            "gradients differ (tolerance {tolerance:e}): {self}"
        );
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} elements checked", self.checked)?;
        if let Some(w) = &self.worst {
            let (a, n) = (w.analytic, w.numeric);
            write!(
                f,
                "; worst {:.2e} at {}{:?}: backward gives {a:.12e}, differences {n:.12e}",
                w.error, w.name, w.index
            )?;
        }
        if !self.without_gradient.is_empty() {
            write!(f, "; no gradient arrived at {}", self.without_gradient.join(", "))?;
        }
        Ok(())
    }
}

/// Checks the gradients of `f` with default settings; see [`GradCheck::run`].
///
/// ```
/// # use kumiki_autograd::{gradcheck, Tape, Var};
/// # use kumiki_tensor::{DType, Rng};
/// let x = Rng::new(1).normal(DType::F64, &[3, 4], 0.0, 1.0);
/// let report = gradcheck(&[("x", x)], &[], |_: &Tape, inputs: &[Var]| inputs[0].clone());
/// report.assert_below(1e-7);
/// ```
pub fn gradcheck(inputs: &[(&str, Tensor)], params: &[(String, Param)], f: impl Fn(&Tape, &[Var]) -> Var) -> Report {
    GradCheck::default().run(inputs, params, f)
}

impl GradCheck {
    /// Compares every gradient of `f(tape, inputs)` with five-point central differences. The output may have any
    /// shape: it is multiplied with a random upstream gradient. `params` are those that `f` asks its tape for.
    ///
    /// # Panics
    /// When an input or a parameter is not F64: differences in less cannot prove anything.
    #[track_caller]
    pub fn run(
        &self,
        inputs: &[(&str, Tensor)],
        params: &[(String, Param)],
        f: impl Fn(&Tape, &[Var]) -> Var,
    ) -> Report {
        let names = inputs.iter().map(|(n, t)| (*n, t)).chain(params.iter().map(|(n, p)| (n.as_str(), p.value())));
        for (name, tensor) in names {
            assert!(tensor.dtype() == DType::F64, "gradcheck: `{name}` must be f64, found {}", tensor.dtype());
        }
        let rng = || Some(Rng::new(self.seed).fork("dropout"));
        let tape = Tape::substituting(true, rng(), HashMap::new());
        let leaves: Vec<Var> = inputs.iter().map(|(_, t)| tape.leaf(t.clone())).collect();
        let output = f(&tape, &leaves);
        let dout = Rng::new(self.seed).fork("upstream").normal(DType::F64, output.shape(), 0.0, 1.0);
        let grads = output.requires_grad().then(|| tape.backward_from(&[(&output, dout.clone())]));
        let dout = dout.to_f64_vec();

        let values: Vec<Tensor> = inputs.iter().map(|(_, t)| t.clone()).collect();
        let evaluate = |inputs: &[Tensor], substitute: Option<(ParamId, Tensor)>| -> Vec<f64> {
            let tape = Tape::substituting(false, rng(), substitute.into_iter().collect());
            let vars: Vec<Var> = inputs.iter().cloned().map(Var::constant).collect();
            f(&tape, &vars).value().to_f64_vec()
        };
        let mut report = Report { worst: None, checked: 0, without_gradient: vec![] };
        for (k, (name, tensor)) in inputs.iter().enumerate() {
            let grad = grads.as_ref().and_then(|g| g.get(&leaves[k]));
            self.compare(&mut report, name, tensor, grad, &dout, |moved| {
                let mut all = values.clone();
                all[k] = moved;
                evaluate(&all, None)
            });
        }
        for (name, param) in params {
            let grad = grads.as_ref().and_then(|g| g.of(param));
            self.compare(&mut report, name, param.value(), grad, &dout, |moved| {
                evaluate(&values, Some((param.id(), moved)))
            });
        }
        report
    }

    fn compare(
        &self,
        report: &mut Report,
        name: &str,
        tensor: &Tensor,
        grad: Option<&Tensor>,
        dout: &[f64],
        evaluate: impl Fn(Tensor) -> Vec<f64>,
    ) {
        let analytic = match grad {
            Some(grad) => grad.to_f64_vec(),
            None => {
                report.without_gradient.push(name.to_owned());
                vec![0.0; tensor.len()]
            }
        };
        let scale = analytic.iter().fold(0f64, |m, g| m.max(g.abs()));
        let largest = dout.iter().fold(0f64, |m, w| m.max(w.abs()));
        let x = tensor.to_f64_vec();
        let count = x.len().min(self.max_elements);
        for i in (0..count).map(|k| k * x.len() / count) {
            let h = self.step * x[i].abs().max(1.0);
            let moved = |by: f64| {
                let mut y = x.clone();
                y[i] += by;
                evaluate(Tensor::from_slice(&y, tensor.shape()))
            };
            // Outputs are subtracted one by one before they are summed: less cancellation than between two sums.
            let difference = |by: f64| -> (f64, f64) {
                let (up, down) = (moved(by), moved(-by));
                let moved = || up.iter().zip(&down).zip(dout).filter(|((u, d), _)| u != d);
                let rounding = moved().map(|((u, d), w)| u.abs().max(d.abs()).max(1.0) * w.abs()).sum::<f64>();
                (moved().map(|((u, d), w)| (u - d) * w).sum(), 16.0 * f64::EPSILON * rounding)
            };
            let ((near, near_rounding), (far, far_rounding)) = (difference(h), difference(2.0 * h));
            let mut rounding = near_rounding.max(far_rounding);
            if rounding == 0.0 {
                // No output moved: by less than the largest can, if it depends on this element.
                let size = |(y, w): (&f64, &f64)| y.abs().max(1.0) * w.abs();
                rounding = 16.0 * f64::EPSILON * moved(h).iter().zip(dout).map(size).fold(0.0, f64::max);
            }
            let numeric = (8.0 * near - far) / (12.0 * h);
            let size = analytic[i].abs().max(numeric.abs()).max(1e-3 * scale);
            let gap = (analytic[i] - numeric).abs();
            // What rounding makes of the differences, or of the upstream gradient: a gap of this size says nothing, and
            // must not look large beside a gradient that nearly vanishes.
            let noise = rounding / h + 4.0 * f64::EPSILON * largest;
            let error = if gap == 0.0 { 0.0 } else { gap / size.max(1e7 * noise) };
            report.checked += 1;
            if report.worst.as_ref().is_none_or(|w| error > w.error || error.is_nan()) {
                let index = index_of(i, tensor.shape());
                report.worst = Some(Worst { name: name.to_owned(), index, analytic: analytic[i], numeric, error });
            }
            if error.is_nan() {
                return;
            }
        }
    }
}

fn index_of(position: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    let mut rest = position;
    for (i, &dim) in index.iter_mut().zip(shape).rev() {
        *i = rest % dim;
        rest /= dim;
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tape::Backward;

    struct SquareBackward {
        x: Tensor,
        factor: f64,
    }

    impl Backward for SquareBackward {
        fn name(&self) -> &'static str {
            "square"
        }
        fn saved(&self) -> Vec<(&'static str, &Tensor)> {
            vec![("x", &self.x)]
        }
        fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
            let (x, g) = (self.x.to_f64_vec(), dout.to_f64_vec());
            vec![Some(Tensor::from_fn::<f64>(dout.shape(), |i| self.factor * x[i] * g[i]))]
        }
    }

    /// `x³`, whose backward is right for `factor` 3 when it is given `x²`; wrong factors are what the check must find.
    fn cube(x: &Var, factor: f64) -> Var {
        let v = x.value().to_f64_vec();
        let out = Tensor::from_fn::<f64>(x.shape(), |i| v[i] * v[i] * v[i]);
        let square = Tensor::from_fn::<f64>(x.shape(), |i| v[i] * v[i]);
        Var::from_op(out, &[x], || SquareBackward { x: square, factor })
    }

    #[test]
    fn right_gradients_pass_and_wrong_ones_are_named() {
        let x = Rng::new(2).normal(DType::F64, &[2, 3], 0.0, 1.0);
        gradcheck(&[("x", x.clone())], &[], |_, v| cube(&v[0], 3.0)).assert_below(1e-9);
        let wrong = gradcheck(&[("x", x.clone())], &[], |_, v| cube(&v[0], 3.0001));
        assert!((3e-5..4e-5).contains(&wrong.error()), "{wrong}");
        assert_eq!(wrong.worst.unwrap().name, "x");
        let w = Param::new(x);
        let named = [("blocks.0.w".to_owned(), w.clone())];
        gradcheck(&[], &named, |tape, _| cube(&tape.param(&w), 3.0)).assert_below(1e-9);
        assert!(gradcheck(&[], &named, |tape, _| cube(&tape.param(&w), 2.0)).error() > 0.3);
        let cut = gradcheck(&[], &named, |tape, _| cube(&tape.param(&w).detach(), 3.0));
        assert_eq!(cut.without_gradient, ["blocks.0.w"]);
        assert_eq!(cut.error(), 1.0);
    }

    /// `x / sqrt(x² + 1e-12)`: the sign, all but; its gradient is below what an output of 1 can move by.
    #[test]
    fn gradients_that_differences_cannot_see_are_no_errors() {
        struct Constant(Tensor);
        impl Backward for Constant {
            fn name(&self) -> &'static str {
                "constant"
            }
            fn saved(&self) -> Vec<(&'static str, &Tensor)> {
                vec![]
            }
            fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
                let (slope, g) = (self.0.to_f64_vec(), dout.to_f64_vec());
                vec![Some(Tensor::from_fn::<f64>(dout.shape(), |i| slope[i] * g[i]))]
            }
        }
        let sign = |x: &Var, more: f64| {
            let v = x.value().to_f64_vec();
            let norm = |x: f64| (x * x + 1e-12).sqrt();
            let y = Tensor::from_fn::<f64>(x.shape(), |i| v[i] / norm(v[i]));
            let slope = Tensor::from_fn::<f64>(x.shape(), |i| 1e-12 / norm(v[i]).powi(3) + more);
            Var::from_op(y, &[x], || Constant(slope))
        };
        for seed in 0..300 {
            let x = Rng::new(seed).uniform(DType::F64, &[2], 0.5, 6.0);
            let check = GradCheck { seed, ..GradCheck::default() };
            check.run(&[("x", x.clone())], &[], |_, v| sign(&v[0], 0.0)).assert_below(1e-6);
            let wrong = check.run(&[("x", x)], &[], |_, v| sign(&v[0], 1e-8));
            assert!(wrong.error() > 1e-6, "{wrong}");
        }
    }

    #[test]
    fn indices_are_row_major() {
        assert_eq!(index_of(5, &[2, 3]), [1, 2]);
        assert_eq!(index_of(0, &[]), Vec::<usize>::new());
    }
}
