//! Every registered case of every operator that runs on a CUDA device, there and on the CPU: result and gradients in F64.
//! Operators without kernels are named here, so that a new one cannot be forgotten.

use kumiki_autograd::{Tape, Var};
use kumiki_ops::testing::difference;
use kumiki_ops::{ON_CUDA, OpCase, op_cases};
use kumiki_tensor::{DType, Device, Rng, Tensor, cuda};

fn evaluate(case: &OpCase, device: &Device) -> Vec<Vec<f64>> {
    let there = |x: &Tensor| x.to(device).expect("memory");
    let tape = Tape::training(Rng::new(3));
    let leaves: Vec<Var> = case.inputs.iter().map(|(_, x)| tape.leaf(there(x))).collect();
    let y = (case.forward)(&tape, &leaves);
    let dout = Rng::new(4).normal(DType::F64, y.shape(), 0.0, 1.0);
    let grads = tape.backward_from(&[(&y, there(&dout))]);
    let of = |leaf: &Var| grads.get(leaf).expect("a gradient").to_f64_vec();
    std::iter::once(y.value().to_f64_vec()).chain(leaves.iter().map(of)).collect()
}

#[test]
fn every_case_is_the_same_on_cuda() {
    let cases = op_cases();
    let without: Vec<&str> = cases.iter().map(|case| case.name).filter(|name| !ON_CUDA.contains(name)).collect();
    assert!(without.is_empty(), "without kernels: {without:?}");
    for device in cuda::Device::for_tests().into_iter().map(Device::Cuda) {
        for case in &cases {
            let (here, there) = (evaluate(case, &Device::Cpu), evaluate(case, &device));
            assert_eq!(here.len(), there.len());
            for (i, (here, there)) in here.iter().zip(&there).enumerate() {
                let problem = difference(there, here, 1e-9);
                assert!(problem.is_none(), "{} ({}), {i}: {}", case.name, case.variant, problem.unwrap_or_default());
            }
        }
    }
}
