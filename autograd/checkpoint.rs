//! [`checkpoint`]: recompute a part of the forward pass in the backward instead of saving what it needs.

use kumiki_tensor::Tensor;

use crate::gradients::Gradients;
use crate::param::Param;
use crate::tape::{Backward, Tape, no_grad};
use crate::var::Var;

/// `f(tape, inputs)` without saved tensors but the inputs: the backward runs `f` again, on a tape of its own, and
/// walks that. Gradients reach the inputs and every parameter that `f` uses. Random masks are drawn from the tape's
/// generator, which the second run finds at the same place: both runs see the same masks.
///
/// `f` must compute the same both times; it owns what it captures (a clone of a layer is the same layer).
///
/// # Panics
/// When `f` does, or its second run gives another shape.
#[track_caller]
pub fn checkpoint(tape: &Tape, inputs: &[&Var], f: impl Fn(&Tape, &[Var]) -> Var + 'static) -> Var {
    let rng = tape.rng();
    let first = tape.similar(false, rng.clone());
    let values: Vec<Tensor> = inputs.iter().map(|x| x.value().clone()).collect();
    let constants: Vec<Var> = values.iter().cloned().map(Var::constant).collect();
    let output = no_grad(|| f(&first, &constants)).into_value();
    tape.set_rng(first.rng());
    let params = first.used_params();
    let on_tape: Vec<Var> = params.iter().map(|p| tape.param(p)).collect();
    let all: Vec<&Var> = inputs.iter().copied().chain(&on_tape).collect();
    Var::from_op(output, &all, || CheckpointBackward {
        tape: tape.similar(true, rng),
        inputs: values,
        params,
        f: Box::new(f),
    })
}

type Forward = Box<dyn Fn(&Tape, &[Var]) -> Var>;

struct CheckpointBackward {
    /// Empty, from the generator as it was before the first run.
    tape: Tape,
    inputs: Vec<Tensor>,
    params: Vec<Param>,
    f: Forward,
}

impl Backward for CheckpointBackward {
    fn name(&self) -> &'static str {
        "checkpoint"
    }

    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        self.inputs.iter().map(|x| ("input", x)).collect()
    }

    fn backward(self: Box<Self>, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        let leaves: Vec<Var> = (self.inputs.iter().zip(needs))
            .map(|(x, &need)| if need { self.tape.leaf(x.clone()) } else { Var::constant(x.clone()) })
            .collect();
        let output = (self.f)(&self.tape, &leaves);
        let mut grads =
            if output.requires_grad() { self.tape.backward_from(&[(&output, dout)]) } else { Gradients::new() };
        let zeros = |like: &Tensor| like.new_full(like.dtype(), like.shape(), 0.0);
        let dinputs: Vec<Option<Tensor>> =
            leaves.iter().map(|x| Some(grads.get(x).cloned().unwrap_or_else(|| zeros(x.value())))).collect();
        let dparams = self.params.iter().map(|p| Some(grads.take(p).unwrap_or_else(|| zeros(p.value()))));
        dinputs.into_iter().chain(dparams).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kumiki_tensor::{DType, Rng};
    use std::cell::RefCell;
    use std::rc::Rc;

    struct ScaleBackward(f64);

    impl Backward for ScaleBackward {
        fn name(&self) -> &'static str {
            "scale"
        }
        fn saved(&self) -> Vec<(&'static str, &Tensor)> {
            vec![]
        }
        fn backward(self: Box<Self>, mut dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
            dout.scale(self.0);
            vec![Some(dout)]
        }
    }

    fn scale(x: &Var, factor: f64) -> Var {
        let mut out = x.value().copy();
        out.scale(factor);
        Var::from_op(out, &[x], || ScaleBackward(factor))
    }

    #[test]
    fn the_recomputation_is_as_narrow_as_the_first_run() {
        let param = Param::new(Tensor::ones(DType::F32, &[1]));
        for narrow in [false, true] {
            let seen = Rc::new(RefCell::new(Vec::new()));
            let (log, p) = (seen.clone(), param.clone());
            let tape = Tape::new().with_narrow_products(narrow);
            let y = checkpoint(&tape, &[&tape.param(&param)], move |tape, x| {
                log.borrow_mut().push(tape.param(&p).is_narrow());
                scale(&x[0], 2.0)
            });
            tape.backward(&y);
            assert_eq!(*seen.borrow(), [narrow; 2]);
        }
    }

    #[test]
    fn the_recomputation_sees_the_same_random_numbers() {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let log = seen.clone();
        let tape = Tape::training(Rng::new(5));
        let x = tape.leaf(Tensor::scalar(kumiki_tensor::DType::F64, 1.0));
        let draw = move |tape: &Tape, x: &[Var]| {
            let factor = tape.take_rng("mask").unwrap().next_f64();
            log.borrow_mut().push(factor);
            scale(&x[0], factor)
        };
        let y = checkpoint(&tape, &[&x], draw.clone());
        let z = checkpoint(&tape, &[&y], draw);
        let grads = tape.backward(&z);
        let seen = seen.borrow();
        assert_eq!((seen[0], seen[1]), (seen[3], seen[2]), "two forward runs, then two backward runs");
        assert_ne!(seen[0], seen[1]);
        assert_eq!(grads.get(&x).unwrap().item(), z.item());
    }

    #[test]
    fn parameters_inside_get_their_gradients() {
        let w = Param::new(Tensor::scalar(kumiki_tensor::DType::F64, 3.0));
        let inner = w.clone();
        let tape = Tape::new();
        let x = Var::constant(Tensor::scalar(kumiki_tensor::DType::F64, 1.0));
        let y = checkpoint(&tape, &[&x], move |tape, _| scale(&tape.param(&inner), 2.0));
        assert_eq!(tape.summary().0.last().unwrap().name, "checkpoint");
        assert_eq!(tape.backward(&y).of(&w).unwrap().item(), 2.0);
    }
}
