//! [`Gradients`]: what a walk over the tape gives.

use std::collections::HashMap;

use kumiki_tensor::Tensor;

use crate::param::{Param, ParamId};
use crate::tape::Tape;
use crate::var::Var;

/// The gradients of the leaves of one tape, and of parameters, perhaps summed over several tapes.
#[derive(Default)]
pub struct Gradients {
    pub(crate) tape: Option<Tape>,
    pub(crate) leaves: HashMap<usize, Tensor>,
    pub(crate) params: HashMap<ParamId, Tensor>,
}

impl Gradients {
    /// No gradients yet: the start of an accumulation with [`Gradients::add`].
    pub fn new() -> Gradients {
        Gradients::default()
    }

    /// The gradient of a leaf made by [`Tape::leaf`]; `None` when nothing that was differentiated depends on it.
    pub fn get(&self, leaf: &Var) -> Option<&Tensor> {
        leaf.node_on(self.tape.as_ref()?).and_then(|node| self.leaves.get(&node))
    }

    /// The gradient of a parameter; `None` when nothing that was differentiated depends on it.
    pub fn of(&self, param: &Param) -> Option<&Tensor> {
        self.params.get(&param.id())
    }

    /// Takes the gradient of a parameter out.
    pub fn take(&mut self, param: &Param) -> Option<Tensor> {
        self.params.remove(&param.id())
    }

    /// Sets the gradient of a parameter.
    ///
    /// # Panics
    /// When shape or dtype are not the parameter's.
    #[track_caller]
    pub fn set(&mut self, param: &Param, grad: Tensor) {
        assert!(
            grad.shape() == param.shape() && grad.dtype() == param.dtype(),
            "a gradient of {:?} {} does not fit a parameter of {:?} {}",
            grad.shape(),
            grad.dtype(),
            param.shape(),
            param.dtype()
        );
        self.params.insert(param.id(), grad);
    }

    /// Adds the parameters' gradients of another walk (gradient accumulation); those of its leaves are dropped.
    pub fn add(&mut self, other: Gradients) {
        for (id, grad) in other.params {
            match self.params.get_mut(&id) {
                Some(sum) => sum.add_assign(&grad),
                None => {
                    self.params.insert(id, grad);
                }
            }
        }
    }

    /// Multiplies every parameter's gradient by `factor`.
    pub fn scale(&mut self, factor: f64) {
        self.params.values_mut().for_each(|grad| grad.scale(factor));
    }

    /// The number of parameters with a gradient.
    pub fn len(&self) -> usize {
        self.params.len()
    }

    /// Whether no parameter has a gradient.
    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }
}
