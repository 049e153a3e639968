//! [`Recipe`] and [`Kept`]: values that are computed again in the backward instead of saved.

use std::rc::Rc;

use kumiki_tensor::Tensor;
use kumiki_tensor::shape::Dims;

use crate::var::Var;

/// How a value is computed again, to the last bit, from tensors that the operator which made it keeps anyway: at no cost in
/// memory, whoever would have to save the value keeps these.
#[derive(Clone)]
pub struct Recipe {
    from: Rc<[Tensor]>,
    again: fn(&[Tensor]) -> Tensor,
    shape: Dims,
}

impl Recipe {
    /// `again(from)`, seen in this shape.
    pub fn new(from: impl Into<Rc<[Tensor]>>, shape: &[usize], again: fn(&[Tensor]) -> Tensor) -> Recipe {
        Recipe { from: from.into(), again, shape: Dims::new(shape) }
    }

    /// The same elements in another shape.
    pub fn reshape(&self, shape: &[usize]) -> Recipe {
        Recipe { shape: Dims::new(shape), ..self.clone() }
    }

    fn value(&self) -> Tensor {
        (self.again)(&self.from).reshape(&self.shape)
    }
}

/// What an operator keeps of an operand for its backward.
pub enum Kept {
    /// The operand.
    Whole(Tensor),
    /// What it is computed from.
    Again(Recipe),
}

impl Kept {
    /// Of an operand: its recipe, where it has one.
    pub fn of(x: &Var) -> Kept {
        match x.recipe() {
            Some(recipe) => Kept::Again(recipe.clone()),
            None => Kept::Whole(x.value().clone()),
        }
    }

    /// The operand.
    pub fn into_value(self) -> Tensor {
        match self {
            Kept::Whole(x) => x,
            Kept::Again(recipe) => recipe.value(),
        }
    }

    /// The tensors that are kept, under the name of the operand each: for [`Backward::saved`](crate::Backward::saved).
    pub fn tensors(&self, name: &'static str) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let tensors = match self {
            Kept::Whole(x) => std::slice::from_ref(x),
            Kept::Again(recipe) => &recipe.from,
        };
        tensors.iter().map(move |x| (name, x))
    }
}
