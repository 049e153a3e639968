//! What arrives at an attention-like operator, before its backward pass proper: one pass over the rows of all heads.

use kumiki_tensor::{DType, Element, Tensor, bf16, threads};

use super::{Number, Rows, SharedRows, cuda};
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
/// shape, and `out` are then written over, each if nobody else holds it.
pub(crate) fn arrive<E: Number>(dout: Tensor, gate: Option<&Tensor>, out: Tensor, need_gate: bool) -> Arrived {
    if out.cuda().is_some() {
        return cuda::arrive::<E>(dout, gate, out, need_gate);
    }
    let mut delta = Tensor::empty(E::DTYPE, &out.shape()[..3]);
    let to = delta.as_mut_slice::<E>();
    let of_half = |[sum]: [f32; 1]| Real::from_f64(f64::from(sum));
    let Some(gate) = gate else {
        let dout = Rows::<E>::prepare(&dout);
        match dout.dtype() {
            DType::BF16 => products::<bf16, E>(to, [&dout, &out], |x| of_half(pass_stored(&Dot, x, []))),
            _ => products::<E, E>(to, [&dout, &out], |[x, y]| simd::dot(x, y)),
        }
        return Arrived { dout, dgate: None, delta };
    };
    let (mut dout, mut out) = (writable(dout), writable(out));
    match dout.dtype() {
        DType::BF16 => {
            gated::<bf16, E>(to, [&mut dout, &mut out], gate, |gate, to| of_half(pass_stored(&Both, gate, to)))
        }
        _ => gated::<E, E>(to, [&mut dout, &mut out], gate, |x, to| Real::from_f64(E::dispatch(RowOfBoth { x, to }))),
    }
    // Where it is not needed it has cost one write, to lines that were read anyway.
    Arrived { dout, dgate: need_gate.then_some(out), delta }
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

/// `f` of each row of the gate `[B, T, H, G]`, and of two tensors that it rewrites.
fn gated<S: Element, E: Number>(
    to: &mut [E],
    rewritten: [&mut Tensor; 2],
    gate: &Tensor,
    f: impl Fn([&[S]; 1], [&mut [S]; 2]) -> E + Sync,
) {
    let [_, time, heads, width] = *gate.shape() else { unreachable!("of four axes") };
    let gate = Rows::<S>::new(gate);
    let [dout, out] = rewritten.map(|x| SharedRows::new(x.as_mut_slice::<S>()));
    threads::parallel_chunks_mut(to, heads.max(1), 4 * heads * width, |token, to| {
        for (head, to) in to.iter_mut().enumerate() {
            let row = token * heads + head;
            // SAFETY: the task of this token alone asks for its rows.
            let rows = unsafe { [dout.row_mut(row, width), out.row_mut(row, width)] };
            *to = f([gate.row(token / time, token % time, head)], rows);
        }
    });
}

struct RowOfBoth<'a, E> {
    x: [&'a [E]; 1],
    to: [&'a mut [E]; 2],
}

impl<E: Real> Kernel<E> for RowOfBoth<'_, E> {
    type Output = f64;

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) -> f64 {
        let [sum] = pass::<L, _, 1, 2, 1>(&Both, self.x, self.to);
        sum
    }
}

/// Of the gate: over `dout` the gradient of the output, over the output that of the gate; and the sum of the former times the
/// output.
struct Both;
impl<E: Real> Formula<E, 1, 2, 1> for Both {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [gate]: [L; 1], [dout, out]: [L; 2], [sum]: &mut [L; 1]) -> [L; 2] {
        let arrived = dout * gate;
        *sum = arrived.mul_add(out, *sum);
        [arrived, dout * out]
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
