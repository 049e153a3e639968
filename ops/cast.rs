//! `cast`: the same values in another float dtype.
//!
//! Forward `y = round(x)`; backward `dx = round(dout)` to the input's dtype. Saves nothing.
//! Cost: one read and one write of memory.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::{DType, Tensor};

use crate::registry::OpCase;

/// `x` rounded to `dtype`, any shape; `x` itself when it has that dtype already.
///
/// # Panics
/// When either dtype is not a float: ids have no gradient ([`Tensor::cast`] converts them).
#[track_caller]
pub fn cast(x: &Var, dtype: DType) -> Var {
    assert!(x.dtype().is_float() && dtype.is_float(), "cast: from {} to {dtype}; both must be floats", x.dtype());
    if x.dtype() == dtype {
        return x.clone();
    }
    let from = x.dtype();
    Var::from_op(x.value().cast(dtype), &[x], || CastBackward { from })
}

struct CastBackward {
    from: DType,
}

impl Backward for CastBackward {
    fn name(&self) -> &'static str {
        "cast"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        vec![Some(dout.cast(self.from))]
    }
}

/// `x` in the dtype that arithmetic on it is done in: BF16 widened to F32, others as they are. For operators that save
/// their BF16 operands as such.
pub(crate) fn wide(x: &Tensor) -> Tensor {
    x.cast(x.dtype().compute())
}

/// Whether `x` goes with operands of `dtype`: it is the same, or BF16 that is widened to F32 where it is read.
pub(crate) fn is_stored_for(x: DType, dtype: DType) -> bool {
    dtype.is_float() && (x == dtype || (x, dtype) == (DType::BF16, DType::F32))
}

/// Runs `f` on inputs of which, when the first is BF16, such ones are widened to F32, and rounds its result back to BF16
/// then: how operators without a BF16 kernel of their own take BF16 operands.
pub(crate) fn widened(inputs: &[&Var], f: impl FnOnce(&[Var]) -> Var) -> Var {
    let narrow = inputs.first().is_some_and(|x| x.dtype() == DType::BF16);
    if !narrow {
        return f(&inputs.iter().map(|x| (*x).clone()).collect::<Vec<_>>());
    }
    let wide: Vec<Var> =
        inputs.iter().map(|x| if x.dtype() == DType::BF16 { cast(x, DType::F32) } else { (*x).clone() }).collect();
    cast(&f(&wide), DType::BF16)
}

pub(crate) fn cases() -> Vec<OpCase> {
    // Through F32 the differences would only see rounding: what can be proven is that F64 passes unchanged.
    vec![OpCase::new("cast", "f64 to f64", &[("x", &[3, 4])], |_, v| cast(&v[0], DType::F64))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use kumiki_autograd::Tape;

    #[test]
    fn values_and_gradients_are_rounded() {
        let tape = Tape::new();
        let x = tape.leaf(Tensor::from_slice(&[1.0f32, 1.001, -3.0], &[3]));
        let y = cast(&x, DType::BF16);
        assert_eq!(y.value().to_f64_vec(), [1.0, 1.0, -3.0]);
        let grads = tape.backward_from(&[(&y, Tensor::full(DType::BF16, &[3], 0.5))]);
        let dx = grads.get(&x).unwrap();
        assert_eq!((dx.dtype(), dx.to_f64_vec()), (DType::F32, vec![0.5; 3]));
    }

    #[test]
    #[should_panic(expected = "cast: from i64 to f32; both must be floats")]
    fn ids_are_refused() {
        cast(&Var::constant(Tensor::zeros(DType::I64, &[1])), DType::F32);
    }
}
