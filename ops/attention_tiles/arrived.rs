//! What arrives at an attention-like operator, before its backward pass proper: one pass over the rows of all heads.

use kumiki_tensor::{DType, Element, Tensor, bf16, threads};

use super::{Number, Rows, SharedRows};
use crate::elementwise::writable;
use crate::rows::{Formula, pass};
use crate::simd::{self, Kernel, Lanes, Real};
use crate::stored::pass_stored;

/// For every query of every head.
pub(crate) struct Arrived {
    /// The gradient of the attention's output, `[B, T_q, H, G]`: what arrives, times the gate if there is one.
    pub dout: Tensor,
    /// Of the gate, in its dtype.
    pub dgate: Option<Tensor>,
    /// The gradient's product with the output, `[B, T_q, H]`: what a softmax subtracts.
    pub delta: Tensor,
}

/// Of an attention with this `out` `[B, T_q, H, G]`, which was multiplied with `gate` if there is one. `dout`, of the same
/// shape, is then written over if nobody else holds it.
pub(crate) fn arrive<E: Number>(dout: Tensor, gate: Option<&Tensor>, out: &Tensor, need_gate: bool) -> Arrived {
    let mut delta = Tensor::empty(E::DTYPE, &out.shape()[..3]);
    let to = delta.as_mut_slice::<E>();
    let of_half = |[sum]: [f32; 1]| Real::from_f64(f64::from(sum));
    let Some(gate) = gate else {
        let dout = Rows::<E>::prepare(&dout);
        match dout.dtype() {
            DType::BF16 => products::<bf16, E>(to, [&dout, out], |x| of_half(pass_stored(&Dot, x, []))),
            _ => products::<E, E>(to, [&dout, out], |[x, y]| simd::dot(x, y)),
        }
        return Arrived { dout, dgate: None, delta };
    };
    let mut dout = writable(dout);
    let mut dgate = need_gate.then(|| Tensor::empty(gate.dtype(), out.shape()));
    let grads = (&mut dout, dgate.as_mut());
    match grads.0.dtype() {
        DType::BF16 => gated::<bf16, E>(to, grads, [gate, out], |x, dout, dgate| {
            of_half(match dgate {
                Some(dgate) => pass_stored(&Both, x, [dout, dgate]),
                None => pass_stored(&One, x, [dout]),
            })
        }),
        _ => gated::<E, E>(to, grads, [gate, out], |x, dout, dgate| {
            Real::from_f64(match dgate {
                Some(dgate) => E::dispatch(RowOfBoth { x, to: [dout, dgate] }),
                None => E::dispatch(RowOfOne { x, to: dout }),
            })
        }),
    }
    Arrived { dout, dgate, delta }
}

/// `f` of each row of two tensors `[B, T, H, G]`.
fn products<S: Element, E: Number>(to: &mut [E], x: [&Tensor; 2], f: impl Fn([&[S]; 2]) -> E + Sync) {
    let [_, time, heads, width] = *x[1].shape() else { unreachable!("of four axes") };
    let x = x.map(Rows::<S>::new);
    threads::parallel_chunks_mut(to, heads.max(1), 2 * heads * width, |token, to| {
        for (head, to) in to.iter_mut().enumerate() {
            *to = f(x.map(|x| x.row(token / time, token % time, head)));
        }
    });
}

/// `f` of each row of two tensors `[B, T, H, G]`, and of gradients that it rewrites.
fn gated<S: Element, E: Number>(
    to: &mut [E],
    (dout, dgate): (&mut Tensor, Option<&mut Tensor>),
    x: [&Tensor; 2],
    f: impl Fn([&[S]; 2], &mut [S], Option<&mut [S]>) -> E + Sync,
) {
    let [_, time, heads, width] = *x[1].shape() else { unreachable!("of four axes") };
    let x = x.map(Rows::<S>::new);
    let (dout, dgate) =
        (SharedRows::new(dout.as_mut_slice::<S>()), dgate.map(|t| SharedRows::new(t.as_mut_slice::<S>())));
    threads::parallel_chunks_mut(to, heads.max(1), 4 * heads * width, |token, to| {
        for (head, to) in to.iter_mut().enumerate() {
            let row = token * heads + head;
            // SAFETY: the task of this token alone asks for its rows.
            let (dout, dgate) =
                unsafe { (dout.row_mut(row, width), dgate.as_ref().map(|dgate| dgate.row_mut(row, width))) };
            *to = f(x.map(|x| x.row(token / time, token % time, head)), dout, dgate);
        }
    });
}

struct RowOfBoth<'a, E> {
    x: [&'a [E]; 2],
    to: [&'a mut [E]; 2],
}

impl<E: Real> Kernel<E> for RowOfBoth<'_, E> {
    type Output = f64;

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) -> f64 {
        let [sum] = pass::<L, _, 2, 2, 1>(&Both, self.x, self.to);
        sum
    }
}

struct RowOfOne<'a, E> {
    x: [&'a [E]; 2],
    to: &'a mut [E],
}

impl<E: Real> Kernel<E> for RowOfOne<'_, E> {
    type Output = f64;

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) -> f64 {
        let [sum] = pass::<L, _, 2, 1, 1>(&One, self.x, [self.to]);
        sum
    }
}

/// Of the gate and the output, over `dout` the gradient of the output, and that of the gate; and the sum of the former times
/// the output.
struct Both;
impl<E: Real> Formula<E, 2, 2, 1> for Both {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [gate, out]: [L; 2], [dout, _]: [L; 2], [sum]: &mut [L; 1]) -> [L; 2] {
        let arrived = dout * gate;
        *sum = arrived.mul_add(out, *sum);
        [arrived, dout * out]
    }
}

/// As [`Both`], without the gradient of the gate.
struct One;
impl<E: Real> Formula<E, 2, 1, 1> for One {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [gate, out]: [L; 2], [dout]: [L; 1], [sum]: &mut [L; 1]) -> [L; 1] {
        let arrived = dout * gate;
        *sum = arrived.mul_add(out, *sum);
        [arrived]
    }
}

/// The sum of products alone.
struct Dot;
impl<E: Real> Formula<E, 2, 0, 1> for Dot {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [x, y]: [L; 2], _: [L; 0], [sum]: &mut [L; 1]) -> [L; 0] {
        *sum = x.mul_add(y, *sum);
        []
    }
}
