//! `adamw_update`: one optimiser step of one tensor, in one pass over its memory.
//!
//! With gradient `g`: `p -= lr·decay·p; m = β1·m + (1-β1)·g; v = β2·v + (1-β2)·g²;
//! p -= lr·(m/correction1) / (sqrt(v/correction2) + eps)`. Reads four values and writes three per element.
//! Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv 1711.05101.

use kumiki_tensor::cuda::{Arg, Device, Source, launch, over};
use kumiki_tensor::{Tensor, dispatch_real, kernels, threads};

use crate::cuda::kernel_of;
use crate::simd::{Kernel, Lanes, Real};

/// The numbers of one step; they are the same for all elements of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct AdamWStep {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decay of the parameter, per unit of `lr`.
    pub weight_decay: f64,
    /// `1 - beta1^t` of step `t`.
    pub correction1: f64,
    /// `1 - beta2^t` of step `t`.
    pub correction2: f64,
}

/// Elements per task.
const CHUNK: usize = 16 * 1024;

/// Updates `param` and its moments `m` and `v` in place by gradient `grad`. All have one shape and dtype, F32 or F64.
///
/// # Panics
/// When shapes or dtypes differ, or the dtype is another.
#[track_caller]
pub fn adamw_update(step: &AdamWStep, param: &mut Tensor, grad: &Tensor, m: &mut Tensor, v: &mut Tensor) {
    for (name, t) in [("gradient", grad), ("first moment", &*m), ("second moment", &*v)] {
        assert!(
            t.shape() == param.shape() && t.dtype() == param.dtype(),
            "adamw_update: {name} {:?} {} does not fit the parameter {:?} {}",
            t.shape(),
            t.dtype(),
            param.shape(),
            param.dtype()
        );
    }
    let grad = grad.contiguous();
    if let Some(device) = grad.cuda() {
        return on_cuda(device, step, param, &grad, m, v);
    }
    dispatch_real!("adamw_update", param.dtype(), E => {
        let g = grad.as_slice::<E>();
        let moments: Vec<(&mut [E], &mut [E])> =
            m.make_mut::<E>().chunks_mut(CHUNK).zip(v.make_mut::<E>().chunks_mut(CHUNK)).collect();
        let mut pieces: Vec<_> = param.make_mut::<E>().chunks_mut(CHUNK).zip(g.chunks(CHUNK)).zip(moments).collect();
        threads::parallel_chunks_mut(&mut pieces, 1, 8 * CHUNK.min(g.len()), |_, piece| {
            let ((p, g), (m, v)) = &mut piece[0];
            E::dispatch(Update { step: *step, p, g, m, v });
        });
    });
}

pub(crate) static KERNELS: Source = Source {
    file: "adamw.cu",
    text: include_str!("adamw.cu"),
    headers: &[],
    kernels: kernels!["adamw" of "float" "double"],
};

fn on_cuda(device: &Device, step: &AdamWStep, param: &mut Tensor, grad: &Tensor, m: &mut Tensor, v: &mut Tensor) {
    let s = step;
    let numbers = [s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.correction1, s.correction2];
    let numbers: Vec<u8> = numbers.iter().flat_map(|x| x.to_ne_bytes()).collect();
    let count = param.len();
    [&mut *param, &mut *m, &mut *v].into_iter().for_each(Tensor::own);
    let kernel = kernel_of("adamw", param.dtype());
    let tensors = [param.cuda_out(), grad.cuda_in(), m.cuda_out(), v.cuda_out()];
    let args = [&[Arg::Struct(&numbers)], &tensors[..], &[Arg::I64(count as i64)]].concat();
    // SAFETY: the kernel's arguments; all four are contiguous and of so many elements.
    unsafe { launch(device, &KERNELS, &kernel, over(count), &args) };
}

struct Update<'a, E> {
    step: AdamWStep,
    p: &'a mut [E],
    g: &'a [E],
    m: &'a mut [E],
    v: &'a mut [E],
}

impl<E: Real> Kernel<E> for Update<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let Update { step: s, p, g, m, v } = self;
        let splat = |x: f64| L::splat(E::from_f64(x));
        let (keep, beta1, beta2) = (splat(1.0 - s.lr * s.weight_decay), splat(s.beta1), splat(s.beta2));
        let (rest1, rest2) = (splat(1.0 - s.beta1), splat(1.0 - s.beta2));
        // As the common implementations round: the rate over the first correction, the root over that of the second.
        let (rate, root) = (splat(-s.lr / s.correction1), splat(s.correction2.sqrt()));
        let eps = splat(s.eps);
        let blocks = p.chunks_mut(L::N).zip(g.chunks(L::N)).zip(m.chunks_mut(L::N).zip(v.chunks_mut(L::N)));
        for ((p, g), (m, v)) in blocks {
            let load = |x: &[E]| if x.len() == L::N { L::load(x) } else { L::load_partial(x, E::ONE) };
            let store = |x: L, out: &mut [E]| if out.len() == L::N { x.store(out) } else { x.store_partial(out) };
            let grad = load(g);
            let first = load(m).mul_add(beta1, grad * rest1);
            let second = load(v).mul_add(beta2, grad * grad * rest2);
            let change = first / (second.sqrt() / root + eps);
            store(change.mul_add(rate, load(p) * keep), p);
            store(first, m);
            store(second, v);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kumiki_tensor::{DType, Device as Place, Rng};

    /// Step 3 with moments that two others left behind, element by element in f64.
    fn naive(s: &AdamWStep, p: f64, g: f64, m: f64, v: f64) -> [f64; 3] {
        let (m, v) = (s.beta1 * m + (1.0 - s.beta1) * g, s.beta2 * v + (1.0 - s.beta2) * g * g);
        let p = p - s.lr * s.weight_decay * p;
        [p - s.lr * (m / s.correction1) / ((v / s.correction2).sqrt() + s.eps), m, v]
    }

    #[test]
    fn one_pass_equals_the_formula() {
        let step = AdamWStep {
            lr: 0.01,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            correction1: 1.0 - 0.9f64.powi(3),
            correction2: 1.0 - 0.95f64.powi(3),
        };
        let devices: Vec<_> = Device::for_tests().into_iter().map(Place::Cuda).chain([Place::Cpu]).collect();
        let dtypes = [(DType::F64, 1e-14), (DType::F32, 3e-6)];
        for (device, (dtype, tolerance)) in devices.iter().flat_map(|device| dtypes.map(|dtype| (device, dtype))) {
            for len in [0, 1, 7, 16, 33, 40_001] {
                let mut rng = Rng::new(3);
                let mut draw = |f: fn(f64) -> f64| {
                    let mut t = rng.normal(DType::F64, &[len], 0.0, 1.0);
                    t.make_mut::<f64>().iter_mut().for_each(|x| *x = f(*x));
                    t.cast(dtype).to(device).unwrap()
                };
                let (mut p, g, mut m, mut v) =
                    (draw(|x| x), draw(|x| x), draw(|x| 0.1 * x), draw(|x| 0.1 + 0.01 * x * x));
                let before = [&p, &g, &m, &v].map(Tensor::to_f64_vec);
                adamw_update(&step, &mut p, &g, &mut m, &mut v);
                let after = [&p, &m, &v].map(Tensor::to_f64_vec);
                for i in 0..len {
                    let expected = naive(&step, before[0][i], before[1][i], before[2][i], before[3][i]);
                    for (k, &want) in expected.iter().enumerate() {
                        let got = after[k][i];
                        assert!((got - want).abs() <= tolerance * want.abs().max(0.1), "{dtype} {i} {k}: {got} {want}");
                    }
                }
            }
        }
    }
}
