//! Every operator with small inputs for `kumiki gradcheck`, and with large ones for `kumiki bench ops`.

use kumiki_autograd::{GradCheck, Report, Tape, Var};
use kumiki_tensor::{DType, Rng, Tensor};

type Forward = Box<dyn Fn(&Tape, &[Var]) -> Var>;

/// An operator on small random F64 inputs.
pub struct OpCase {
    /// The operator.
    pub name: &'static str,
    /// What distinguishes this case from the operator's others.
    pub variant: &'static str,
    /// Names and values of the inputs.
    pub inputs: Vec<(&'static str, Tensor)>,
    /// The operator applied to the inputs.
    pub forward: Forward,
}

impl OpCase {
    /// A case with standard normal inputs of the given shapes.
    pub fn new(
        name: &'static str,
        variant: &'static str,
        inputs: &[(&'static str, &[usize])],
        forward: impl Fn(&Tape, &[Var]) -> Var + 'static,
    ) -> OpCase {
        let mut rng = Rng::new(0).fork(name).fork(variant);
        let inputs = inputs.iter().map(|(n, shape)| (*n, rng.normal(DType::F64, shape, 0.0, 1.0))).collect();
        OpCase { name, variant, inputs, forward: Box::new(forward) }
    }

    /// The same case with input `index` passed through `f`, for operators that are not defined or not smooth everywhere.
    pub fn map_input(mut self, index: usize, f: impl Fn(f64) -> f64) -> OpCase {
        let (_, tensor) = &mut self.inputs[index];
        tensor.make_mut::<f64>().iter_mut().for_each(|x| *x = f(*x));
        self
    }

    /// All gradients against central differences.
    pub fn check(&self) -> Report {
        GradCheck::default().run(&self.inputs, &[], &self.forward)
    }
}

/// An operator at a size worth timing, F32.
pub struct BenchCase {
    /// The operator; `name (how)` for the same in another way, after the operator itself and with the same inputs.
    pub name: &'static str,
    /// Names and shapes of the inputs, filled with standard normal numbers.
    pub inputs: Vec<(&'static str, Vec<usize>)>,
    /// The operator applied to the inputs.
    pub forward: Forward,
    /// Bytes that must move through memory, forward.
    pub bytes: usize,
    /// Floating-point operations, forward.
    pub flops: usize,
}

/// The gradient-check cases of all operators.
pub fn op_cases() -> Vec<OpCase> {
    [
        crate::activations::cases(),
        crate::arithmetic::cases(),
        crate::attention_with_lse::cases(),
        crate::cast::cases(),
        crate::causal_attention::cases(),
        crate::cem_attention::cases(),
        crate::cem_energy::cases(),
        crate::cem_mlp::cases(),
        crate::concat::cases(),
        crate::cross_entropy::cases(),
        crate::cross_entropy_from_hidden::cases(),
        crate::cumsum::cases(),
        crate::dropout::cases(),
        crate::dual_attention::cases(),
        crate::dual_attention_merged::cases(),
        crate::embedding::cases(),
        crate::feature_map::cases(),
        crate::gate_aggregate::cases(),
        crate::gather::cases(),
        crate::gau_attention::cases(),
        crate::index_select::cases(),
        crate::l2_normalize::cases(),
        crate::layer_norm::cases(),
        crate::linear::cases(),
        crate::logsumexp::cases(),
        crate::matmul::cases(),
        crate::max::cases(),
        crate::mixed_chunk_attention::cases(),
        crate::pow::cases(),
        crate::prod::cases(),
        crate::reduce::cases(),
        crate::rms_norm::cases(),
        crate::rope::cases(),
        crate::silu_integral::cases(),
        crate::softmax::cases(),
        crate::swiglu::cases(),
        crate::unary::cases(),
        crate::variance::cases(),
        crate::views::cases(),
        crate::windowed_prefix::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The benchmark cases of all operators.
pub fn bench_cases() -> Vec<BenchCase> {
    [
        crate::activations::bench(),
        crate::arithmetic::bench(),
        crate::causal_attention::bench(),
        crate::cem_attention::bench(),
        crate::cem_mlp::bench(),
        crate::cross_entropy::bench(),
        crate::cross_entropy_from_hidden::bench(),
        crate::dropout::bench(),
        crate::dual_attention::bench(),
        crate::dual_attention_merged::bench(),
        crate::embedding::bench(),
        crate::feature_map::bench(),
        crate::gate_aggregate::bench(),
        crate::gau_attention::bench(),
        crate::l2_normalize::bench(),
        crate::layer_norm::bench(),
        crate::linear::bench(),
        crate::logsumexp::bench(),
        crate::matmul::bench(),
        crate::mixed_chunk_attention::bench(),
        crate::reduce::bench(),
        crate::rms_norm::bench(),
        crate::rope::bench(),
        crate::softmax::bench(),
        crate::swiglu::bench(),
        crate::windowed_prefix::bench(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operator_has_right_gradients() {
        for case in op_cases() {
            let report = case.check();
            assert!(report.error() < 1e-6, "{} ({}): {report}", case.name, case.variant);
            assert!(report.without_gradient.is_empty(), "{} ({}): {report}", case.name, case.variant);
        }
    }
}
