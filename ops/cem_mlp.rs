//! `cem_mlp`: one step of Causal Energy Minimization's MLP, from the point to the direction downhill.
//!
//! Per token with the point `x` (normed) and the gate `g = W_gate ĥ` of the history, which stays the same over the steps:
//!
//! ```text
//! u = W x      E = -Σ_f g_f Φ(u_f),  Φ' = SiLU      m = -∂E/∂x = Wᵀ a,  a = SiLU(u) ⊙ g
//! ```
//!
//! So the projection down is the projection up transposed: one weight `W` `[F, D]`, read in both directions.
//! Backward, for `dm`: `da = W dm`, `dg = da ⊙ SiLU(u)`, `du = da ⊙ g ⊙ SiLU'(u)`, `dx = Wᵀ du`, and the weight gets its
//! parts from both directions, `dW = a dmᵀ + du xᵀ`.
//!
//! Saved: x, g, W and u `[N, F]`; a is computed again. Where operands [are narrow](Var::is_narrow), products are of factors
//! rounded to BF16, and what is `[N, F]` is stored in BF16. Energies are computed where they are asked for.
//! Cost: `4 F D` flops a token, twice that in the backward; one pass over `[N, F]` each way beside the products.
//! Source: Causal Energy Minimization, arXiv 2605.07588.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::cuda::{Arg, Source, launch, over};
use kumiki_tensor::{DType, Element, Tensor, bf16, dispatch_real, kernels, threads};

use crate::arithmetic::Mul;
use crate::attention_tiles::SharedRows;
use crate::cast::{cast, is_stored_for, wide};
use crate::cem_attention::CemStep;
use crate::count::count;
use crate::cuda::kernel_of;
use crate::elementwise::{map_over, zip};
use crate::matmul::{add_matrices, stored_matrices};
use crate::registry::{BenchCase, OpCase};
use crate::rows::{Formula, pass};
use crate::silu_integral::SiluIntegral;
use crate::simd::{Kernel, Lanes, Real, Unary};
use crate::stored::pass_stored;
use crate::sums::sum_axes;
use crate::swiglu::Gated;

/// Direction at `x` `[.., D]`, for the gate `[.., F]`, which may be BF16 where the others are F32, and `w_up` `[F, D]`; with
/// the energy `[..]` if it is asked for.
///
/// # Panics
/// When shapes or dtypes do not fit.
#[track_caller]
pub fn cem_mlp(x: &Var, gate: &Var, w_up: &Var, with_energy: bool) -> CemStep {
    let shapes = || format!("x {:?}, gate {:?}, w_up {:?}", x.shape(), gate.shape(), w_up.shape());
    assert!(x.rank() > 0 && w_up.rank() == 2, "cem_mlp: x must be [.., D], w_up [F, D], got {}", shapes());
    let (d_model, leading) = (x.dim(x.rank() - 1), &x.shape()[..x.rank() - 1]);
    assert!(w_up.dim(1) == d_model, "cem_mlp: w_up must be [F, D={d_model}]: {}", shapes());
    assert!(
        gate.shape() == [leading, &[w_up.dim(0)]].concat(),
        "cem_mlp: gate must be [.., F={}] with the leading axes of x: {}",
        w_up.dim(0),
        shapes()
    );
    assert!(
        x.dtype().is_float() && is_stored_for(gate.dtype(), x.dtype()) && w_up.dtype() == x.dtype(),
        "cem_mlp: operands must be of one float dtype, got x {}, gate {}, w_up {}",
        x.dtype(),
        gate.dtype(),
        w_up.dtype()
    );
    if x.dtype() != DType::BF16 {
        return run(x, gate, w_up, with_energy);
    }
    let [x, gate, w_up] = [x, gate, w_up].map(|x| cast(x, DType::F32));
    let CemStep { direction, energy } = run(&x, &gate, &w_up, with_energy);
    CemStep { direction: cast(&direction, DType::BF16), energy }
}

fn run(x: &Var, gate: &Var, w_up: &Var, with_energy: bool) -> CemStep {
    let (leading, d_model, f) = (&x.shape()[..x.rank() - 1], w_up.dim(1), w_up.dim(0));
    let n = leading.iter().product();
    count(|c| c.projection += (2 * n * f * d_model) as u64);
    let x_rows = x.value().contiguous().reshape(&[n, d_model]);
    let narrow = [x, gate, w_up].iter().any(|x| x.is_narrow());
    let hidden = if narrow && x.dtype() == DType::F32 { DType::BF16 } else { x.dtype() };
    let gate_rows = gate.value().contiguous().reshape(&[n, f]).cast(hidden);
    let u = stored_matrices(&x_rows, &w_up.value().transpose(0, 1), narrow, hidden);
    let a = zip(&Gated, u.clone(), &gate_rows);
    let direction = stored_matrices(&a, w_up.value(), narrow, x.dtype()).reshape(x.shape());
    let energy = with_energy.then(|| energies(&u, &gate_rows).reshape(leading));
    let direction = Var::from_op(direction, &[x, gate, w_up], || CemMlpBackward {
        x: x_rows,
        gate: gate_rows,
        w_up: w_up.value().clone(),
        u,
        dtypes: [x, gate].map(|x| x.dtype()),
        narrow,
    });
    CemStep { direction, energy }
}

/// Elements of a task, about.
const CHUNK: usize = 8 * 1024;

/// `-Σ_f gate_f Φ(u_f)` of every row.
fn energies(u: &Tensor, gate: &Tensor) -> Tensor {
    let (u, gate) = (wide(u), wide(gate));
    let (n, f) = (u.dim(0), u.dim(1));
    if u.cuda().is_some() {
        return sum_axes(&zip(&Mul, map_over(&SiluIntegral, u), &gate), &[1], -1.0);
    }
    let mut out = Tensor::zeros(u.dtype(), &[n]);
    dispatch_real!("cem_mlp", u.dtype(), E => {
        let (u, gate) = (u.as_slice::<E>(), gate.as_slice::<E>());
        threads::parallel_chunks_mut(out.as_mut_slice::<E>(), 1, 4 * f, |i, out| {
            let at = i * f..(i + 1) * f;
            out[0] = Real::from_f64(-E::dispatch(EnergyRow { u: &u[at.clone()], gate: &gate[at] }));
        });
    });
    out
}

struct EnergyRow<'a, E> {
    u: &'a [E],
    gate: &'a [E],
}

impl<E: Real> Kernel<E> for EnergyRow<'_, E> {
    type Output = f64;

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) -> f64 {
        let [sum] = pass::<L, _, 2, 0, 1>(&GatedIntegral, [self.u, self.gate], []);
        sum
    }
}

struct GatedIntegral;
impl<E: Real> Formula<E, 2, 0, 1> for GatedIntegral {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [u, gate]: [L; 2], _: [L; 0], [sum]: &mut [L; 1]) -> [L; 0] {
        *sum = gate.mul_add(Unary::<E>::apply(&SiluIntegral, u), *sum);
        []
    }
}

struct CemMlpBackward {
    /// `[N, D]`.
    x: Tensor,
    /// `[N, F]`.
    gate: Tensor,
    /// `[F, D]`.
    w_up: Tensor,
    /// `[N, F]`.
    u: Tensor,
    /// Of x and of the gate that was given.
    dtypes: [DType; 2],
    narrow: bool,
}

impl Backward for CemMlpBackward {
    fn name(&self) -> &'static str {
        "cem_mlp"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("x", &self.x), ("gate", &self.gate), ("w_up", &self.w_up), ("u", &self.u)]
    }
    fn backward(self: Box<Self>, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        let CemMlpBackward { x, gate, w_up, u, dtypes: [x_dtype, gate_dtype], narrow } = *self;
        let (n, f, d_model) = (x.dim(0), w_up.dim(0), w_up.dim(1));
        let (shape, leading) = (dout.shape().to_vec(), dout.rank() - 1);
        let dm = dout.contiguous().reshape(&[n, d_model]);
        let mut dgate = stored_matrices(&dm, &w_up.transpose(0, 1), narrow, u.dtype()); // da, until the pass
        let (mut a, mut du) = (u.new_empty(u.dtype(), u.shape()), u);
        match du.dtype() {
            _ if du.cuda().is_some() => slopes_on_cuda(&gate, [&mut a, &mut du, &mut dgate]),
            DType::F32 => gradients::<f32>(&gate, [&mut a, &mut du, &mut dgate], run_slopes),
            DType::F64 => gradients::<f64>(&gate, [&mut a, &mut du, &mut dgate], run_slopes),
            _ => gradients::<bf16>(&gate, [&mut a, &mut du, &mut dgate], |gate, of| {
                let [] = pass_stored(&Slopes, [gate], of);
            }),
        }
        let dw = needs[2].then(|| {
            let mut dw = stored_matrices(&a.transpose(0, 1), &dm, narrow, x_dtype);
            add_matrices(&mut dw, &du.transpose(0, 1), &x, narrow);
            dw
        });
        let dx = needs[0].then(|| stored_matrices(&du, &w_up, narrow, x_dtype).reshape(&shape));
        let dgate = needs[1].then(|| dgate.cast(gate_dtype).reshape(&[&shape[..leading], &[f]].concat()));
        vec![dx, dgate, dw]
    }
}

pub(crate) static KERNELS: Source = Source {
    file: "cem_mlp.cu",
    text: include_str!("cem_mlp.cu"),
    headers: &[],
    kernels: kernels!["cem_mlp_slopes" of "float" "double" "bf16"],
};

/// `a`, `du` over u, `dgate` over da.
fn slopes_on_cuda(gate: &Tensor, of: [&mut Tensor; 3]) {
    let device = gate.cuda().expect("on a CUDA device");
    let (kernel, count) = (kernel_of("cem_mlp_slopes", gate.dtype()), gate.len());
    let [a, du, dgate] = of.map(|x| {
        x.own();
        x.cuda_out()
    });
    // SAFETY: the kernel's arguments; four contiguous tensors of one shape.
    unsafe { launch(device, &KERNELS, &kernel, over(count), &[gate.cuda_in(), a, du, dgate, Arg::I64(count as i64)]) };
}

/// Runs `f` on rows `[F]` of the gate, and of `a`, `du` (which holds u before) and `dgate` (da).
fn gradients<E: Element>(gate: &Tensor, of: [&mut Tensor; 3], f: impl Fn(&[E], [&mut [E]; 3]) + Sync) {
    let (n, width, gate) = (gate.dim(0), gate.dim(1), gate.as_slice::<E>());
    let [a, du, dgate] = of.map(|t| SharedRows::new(t.make_mut::<E>()));
    let rows = (CHUNK / width.max(1)).max(1);
    threads::parallel_for(n.div_ceil(rows), 6 * rows * width, |task| {
        for row in task * rows..n.min((task + 1) * rows) {
            // SAFETY: this task alone has this row of the three.
            let of = unsafe { [a.row_mut(row, width), du.row_mut(row, width), dgate.row_mut(row, width)] };
            f(&gate[row * width..][..width], of);
        }
    });
}

fn run_slopes<E: Real>(gate: &[E], [a, du, dgate]: [&mut [E]; 3]) {
    E::dispatch(Gradients { gate, a, du, dgate });
}

/// `du` holds u before, `dgate` da.
struct Gradients<'a, E> {
    gate: &'a [E],
    a: &'a mut [E],
    du: &'a mut [E],
    dgate: &'a mut [E],
}

impl<E: Real> Kernel<E> for Gradients<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let [] = pass::<L, _, 1, 3, 0>(&Slopes, [self.gate], [self.a, self.du, self.dgate]);
    }
}

struct Slopes;
impl<E: Real> Formula<E, 1, 3, 0> for Slopes {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [gate]: [L; 1], [_, u, da]: [L; 3], _: &mut [L; 0]) -> [L; 3] {
        let s = u.sigmoid();
        let silu = u * s;
        // SiLU' = σ + u σ (1 - σ).
        let slope = silu.mul_add(L::splat(E::ONE) - s, s);
        [silu * gate, da * gate * slope, da * silu]
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let shapes: [(&str, &[usize]); 3] = [("x", &[2, 3, 4]), ("gate", &[2, 3, 7]), ("w_up", &[7, 4])];
    vec![OpCase::new("cem_mlp", "", &shapes, |_, v| cem_mlp(&v[0], &v[1], &v[2], false).direction)]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let (n, d, f) = (2048, 256, 1024);
    vec![BenchCase {
        name: "cem_mlp",
        inputs: vec![("x", vec![4, n / 4, d]), ("gate", vec![4, n / 4, f]), ("w_up", vec![f, d])],
        forward: Box::new(|_, v| cem_mlp(&v[0], &v[1], &v[2], false).direction),
        bytes: 4 * (2 * n * d + n * f + f * d),
        flops: 4 * n * f * d,
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cem_energy::cem_mlp_energy;
    use crate::testing::{Chain, difference};
    use kumiki_autograd::Tape;
    use kumiki_tensor::Rng;
    use proptest::prelude::*;

    fn naive(n: usize, f: usize, d: usize, v: &[Vec<f64>]) -> Vec<f64> {
        let (x, gate, w) = (&v[0], &v[1], &v[2]);
        let mut out = vec![0.0; n * d];
        for (i, k) in (0..n * f).map(|at| (at / f, at % f)) {
            let u: f64 = (0..d).map(|c| w[k * d + c] * x[i * d + c]).sum();
            let a = u / (1.0 + (-u).exp()) * gate[i * f + k];
            (0..d).for_each(|c| out[i * d + c] += a * w[k * d + c]);
        }
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn passes_the_chain(
            seed in any::<u64>(), leading in proptest::collection::vec(0usize..5, 0..3), d in 1usize..20, f in 1usize..40,
        ) {
            let of = |width: usize| leading.iter().copied().chain([width]).collect::<Vec<_>>();
            let n: usize = leading.iter().product();
            let mut chain = Chain::new("cem_mlp", seed, &[("x", &of(d)), ("gate", &of(f)), ("w_up", &[f, d])])
                .map_input(2, |w| w / (d as f64).sqrt());
            chain.f32_tolerance = 5e-5;
            chain.bf16_tolerance = Some(8e-2);
            chain.run(|_, v| cem_mlp(&v[0], &v[1], &v[2], false).direction, |v| naive(n, f, d, v));
        }
    }

    #[test]
    fn energies_are_the_same_on_cuda() {
        let normal = |shape: &[usize]| kumiki_tensor::Rng::new(7).normal(DType::F64, shape, 0.0, 1.0);
        let inputs = [normal(&[2, 5, 4]), normal(&[2, 5, 70]), normal(&[70, 4])];
        let energy = |device: &kumiki_tensor::Device| {
            let [x, gate, w_up] = inputs.each_ref().map(|x| Var::constant(x.to(device).unwrap()));
            let energy = cem_mlp(&x, &gate, &w_up, true).energy.unwrap();
            (energy.shape().to_vec(), energy.to_f64_vec())
        };
        let (shape, here) = energy(&kumiki_tensor::Device::Cpu);
        for device in kumiki_tensor::cuda::Device::for_tests().into_iter().map(kumiki_tensor::Device::Cuda) {
            let there = energy(&device);
            assert_eq!((there.0, difference(&there.1, &here, 1e-12)), (shape.clone(), None));
        }
    }

    #[test]
    fn many_rows_are_cut_into_tasks() {
        let (n, f, d) = (90, 300, 10);
        let mut chain = Chain::new("cem_mlp", 3, &[("x", &[n, d]), ("gate", &[n, f]), ("w_up", &[f, d])]);
        (chain.differences, chain.f32_tolerance, chain.bf16_tolerance) = (false, 1e-4, None);
        chain.run(|_, v| cem_mlp(&v[0], &v[1], &v[2], false).direction, |v| naive(n, f, d, v));
    }

    /// The energy is what the direction is the negative gradient of, and the one that is read off on the way.
    #[test]
    fn the_direction_is_minus_the_gradient_of_the_energy() {
        for (seed, [n, f, d]) in [[5, 30, 8], [1, 1, 1], [70, 5, 33]].into_iter().enumerate() {
            let mut rng = Rng::new(seed as u64);
            let mut normal = |shape: &[usize]| rng.normal(DType::F64, shape, 0.0, 1.0);
            let [x, gate, w] = [&[n, d][..], &[n, f], &[f, d]].map(&mut normal).map(Var::constant);
            let tape = Tape::new();
            let leaf = tape.leaf(x.value().clone());
            let energy = cem_mlp_energy(&leaf, &gate, &w);
            let CemStep { direction, energy: read } = cem_mlp(&x, &gate, &w, true);
            let read = read.unwrap().to_f64_vec();
            assert_eq!(difference(&read, &energy.value().to_f64_vec(), 1e-12), None);
            let grads = tape.backward_from(&[(&energy, Tensor::ones(DType::F64, energy.shape()))]);
            let minus: Vec<f64> = grads.get(&leaf).unwrap().to_f64_vec().iter().map(|g| -g).collect();
            assert_eq!(difference(&direction.value().to_f64_vec(), &minus, 1e-9), None);
        }
    }

    #[test]
    #[should_panic(
        expected = "cem_mlp: gate must be [.., F=5] with the leading axes of x: x [2, 3], gate [3, 5], w_up [5, 3]"
    )]
    fn misfits_are_named() {
        let x = |shape: &[usize]| Var::constant(Tensor::zeros(DType::F32, shape));
        cem_mlp(&x(&[2, 3]), &x(&[3, 5]), &x(&[5, 3]), false);
    }
}
