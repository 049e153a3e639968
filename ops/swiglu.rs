//! `swiglu`: a gate through SiLU times a second projection.
//!
//! Forward: `y = gate · σ(gate) · up`. Backward: `dup = dout · gate · σ(gate)`,
//! `dgate = dout · up · σ(gate) · (1 + gate · (1 - σ(gate)))`, where `1 - σ(gate) = σ(-gate)` is formed so that large
//! gates give slopes of exactly 1 and 0. Saved: gate and up; σ is computed again, which is cheaper than to store and read it.
//! Cost: two reads and one write; the backward three reads and two writes, dup over dout.
//! Source: Shazeer, GLU Variants Improve Transformer, 2020.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::cuda::{Arg, Source, launch, over, type_name};
use kumiki_tensor::{DType, Element, Tensor, bf16, kernels, threads};

use crate::cuda::OnCuda;
use crate::elementwise::{writable, zip};
use crate::registry::{BenchCase, OpCase};
use crate::rows::{Formula, pass};
use crate::simd::{Binary, Kernel, Lanes, Real};
use crate::stored::pass_stored;

const CHUNK: usize = 8 * 1024;

/// `SiLU(gate) · up`, elementwise on equal shapes.
///
/// # Panics
/// When shapes or dtypes differ.
#[track_caller]
pub fn swiglu(gate: &Var, up: &Var) -> Var {
    assert!(
        gate.shape() == up.shape() && gate.dtype() == up.dtype() && gate.dtype().is_float(),
        "swiglu: gate {} {:?} and up {} {:?} must be floats of one shape and dtype",
        gate.dtype(),
        gate.shape(),
        up.dtype(),
        up.shape()
    );
    let y = zip(&Gated, gate.value().clone(), up.value());
    let (a, b) = (gate.value().contiguous(), up.value().contiguous());
    Var::from_op(y, &[gate, up], || SwigluBackward { gate: a, up: b })
}

struct SwigluBackward {
    gate: Tensor,
    up: Tensor,
}

impl Backward for SwigluBackward {
    fn name(&self) -> &'static str {
        "swiglu"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("gate", &self.gate), ("up", &self.up)]
    }
    fn backward(self: Box<Self>, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        let mut dup = writable(dout); // overwritten in place unless somebody else holds it
        let mut dgate = dup.new_empty(dup.dtype(), dup.shape());
        match dup.dtype() {
            _ if dup.cuda().is_some() => on_cuda(&self, &mut dup, &mut dgate),
            DType::F32 => gradients::<f32>(&self, &mut dup, &mut dgate, run),
            DType::F64 => gradients::<f64>(&self, &mut dup, &mut dgate, run),
            _ => gradients::<bf16>(&self, &mut dup, &mut dgate, |from, to| {
                let [] = pass_stored(&Slopes, from, to);
            }),
        }
        // Both come out of the same sigmoid and the same pass; the one that is not needed costs one write.
        vec![needs[0].then_some(dgate), needs[1].then_some(dup)]
    }
}

/// Runs `f` on pieces of gate, up, dup (which holds dout before) and dgate.
fn gradients<E: Element>(
    saved: &SwigluBackward,
    dup: &mut Tensor,
    dgate: &mut Tensor,
    f: impl Fn([&[E]; 2], [&mut [E]; 2]) + Sync,
) {
    let (gate, up) = (saved.gate.as_slice::<E>(), saved.up.as_slice::<E>());
    threads::parallel_chunks2_mut(
        (dup.as_mut_slice::<E>(), CHUNK),
        (dgate.as_mut_slice::<E>(), CHUNK),
        4 * CHUNK,
        |i, dup, dgate| {
            let at = i * CHUNK..i * CHUNK + dup.len();
            f([&gate[at.clone()], &up[at]], [dup, dgate]);
        },
    );
}

pub(crate) static KERNELS: Source = Source {
    file: "swiglu.cu",
    text: include_str!("swiglu.cu"),
    headers: &[crate::cuda::ELEMENTWISE],
    kernels: kernels![
        "zip" of "float, Gated" "double, Gated" "bf16, Gated",
        "swiglu_backward" of "float" "double" "bf16",
    ],
};

impl OnCuda for Gated {
    const KERNELS: &'static Source = &KERNELS;
    const NAME: &'static str = "Gated";
}

fn on_cuda(saved: &SwigluBackward, dup: &mut Tensor, dgate: &mut Tensor) {
    let device = saved.gate.cuda().expect("where the gradient is").clone();
    let kernel = format!("swiglu_backward<{}>", type_name(dup.dtype()));
    let count = dup.len();
    let args = [saved.gate.cuda_in(), saved.up.cuda_in(), dup.cuda_out(), dgate.cuda_out(), Arg::I64(count as i64)];
    // SAFETY: `swiglu_backward(const T *, const T *, T *, T *, i64)` over so many elements of contiguous tensors.
    unsafe { launch(&device, &KERNELS, &kernel, over(count), &args) };
}

fn run<E: Real>([gate, up]: [&[E]; 2], [dup, dgate]: [&mut [E]; 2]) {
    E::dispatch(Gradients { gate, up, dup, dgate });
}

/// `SiLU(gate) · up`.
pub(crate) struct Gated;
impl<E: Real> Binary<E> for Gated {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, gate: L, up: L) -> L {
        gate * gate.sigmoid() * up
    }
}

/// `dup` holds dout before.
struct Gradients<'a, E> {
    gate: &'a [E],
    up: &'a [E],
    dup: &'a mut [E],
    dgate: &'a mut [E],
}

impl<E: Real> Kernel<E> for Gradients<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let [] = pass::<L, _, 2, 2, 0>(&Slopes, [self.gate, self.up], [self.dup, self.dgate]);
    }
}

struct Slopes;
impl<E: Real> Formula<E, 2, 2, 0> for Slopes {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [gate, up]: [L; 2], [dout, _]: [L; 2], _: &mut [L; 0]) -> [L; 2] {
        let one = L::splat(E::ONE);
        // σ(g) and σ(-g) from one exponential that cannot overflow.
        let e = (-gate.abs()).exp();
        let large = one / (one + e);
        let small = e * large;
        let negative = gate.lt(L::splat(E::ZERO));
        let (s, rest) = (L::select(negative, small, large), L::select(negative, large, small));
        [dout * gate * s, dout * up * s * gate.mul_add(rest, one)]
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    vec![OpCase::new("swiglu", "", &[("gate", &[2, 3, 5]), ("up", &[2, 3, 5])], |_, v| swiglu(&v[0], &v[1]))]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let (n, f) = (2048, 2048);
    vec![BenchCase {
        name: "swiglu",
        inputs: vec![("gate", vec![n, f]), ("up", vec![n, f])],
        forward: Box::new(|_, v| swiglu(&v[0], &v[1])),
        bytes: 3 * n * f * 4,
        flops: 20 * n * f,
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Chain;
    use kumiki_autograd::Tape;
    use proptest::prelude::*;

    fn naive(gate: &[f64], up: &[f64]) -> Vec<f64> {
        gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn the_chain_holds(seed in any::<u64>(), rows in 0usize..5, f in prop_oneof![0usize..20, 60usize..70],
                           spread in 0.1..6.0f64) {
            Chain::new("swiglu", seed, &[("gate", &[rows, f]), ("up", &[rows, f])])
                .map_input(0, |g| g * spread)
                .run(|_, v| swiglu(&v[0], &v[1]), |v| naive(&v[0], &v[1]));
        }
    }

    #[test]
    fn many_elements_are_cut_into_tasks() {
        let mut chain = Chain::new("swiglu", 5, &[("gate", &[3, CHUNK + 1]), ("up", &[3, CHUNK + 1])]);
        chain.differences = false;
        chain.run(|_, v| swiglu(&v[0], &v[1]), |v| naive(&v[0], &v[1]));
    }

    #[test]
    fn case_13_edge_values_of_silu() {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let tape = Tape::new();
            let gate = tape.leaf(Tensor::from_slice(&[0.0f64, 1e4, -1e4, 100.0, -100.0], &[5]).cast(dtype));
            let up = tape.leaf(Tensor::ones(dtype, &[5]));
            let y = swiglu(&gate, &up);
            let large = gate.value().to_f64_vec();
            let close = |got: &Tensor, expected: [f64; 5]| {
                let near = |(a, b): (f64, f64)| (a - b).abs() <= 1e-30;
                assert!(got.to_f64_vec().into_iter().zip(expected).all(near), "{dtype}: {got:?}");
            };
            close(y.value(), [0.0, large[1], 0.0, large[3], 0.0]);
            let grads = tape.backward_from(&[(&y, Tensor::ones(dtype, &[5]))]);
            close(grads.get(&gate).unwrap(), [0.5, 1.0, 0.0, 1.0, 0.0]);
            close(grads.get(&up).unwrap(), [0.0, large[1], 0.0, large[3], 0.0]);
        }
    }

    #[test]
    #[should_panic(expected = "swiglu: gate f32 [2, 3] and up f32 [3] must be floats of one shape and dtype")]
    fn shapes_are_named() {
        let zeros = |shape: &[usize]| Var::constant(Tensor::zeros(DType::F32, shape));
        swiglu(&zeros(&[2, 3]), &zeros(&[3]));
    }
}
