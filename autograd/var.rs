//! [`Var`]: a tensor with, perhaps, a place on a tape.

use std::fmt;

use kumiki_tensor::{DType, Tensor};

use crate::kept::Recipe;
use crate::tape::{Backward, Tape, grad_enabled};

/// A tensor on a tape, or a constant. Operators take and return these; cloning is cheap.
#[derive(Clone)]
pub struct Var {
    value: Tensor,
    place: Option<(Tape, usize)>,
    recipe: Option<Recipe>,
    narrow: bool,
}

impl Var {
    /// A value that no gradient flows into.
    pub fn constant(value: Tensor) -> Var {
        Var { value, place: None, recipe: None, narrow: false }
    }

    pub(crate) fn on_tape(value: Tensor, tape: Tape, node: usize) -> Var {
        Var { value, place: Some((tape, node)), recipe: None, narrow: false }
    }

    /// The result of an operator: `output`, computed from `inputs`, with the operator's backward. When no input is on
    /// a tape, or inside [`crate::no_grad`], the result is a constant and `backward` is not called, so that nothing is saved.
    ///
    /// # Panics
    /// When the inputs lie on different tapes.
    #[track_caller]
    pub fn from_op<B: Backward>(output: Tensor, inputs: &[&Var], backward: impl FnOnce() -> B) -> Var {
        let narrow = inputs.iter().any(|x| x.narrow);
        let mut places = inputs.iter().filter_map(|x| x.place.as_ref());
        let Some((tape, _)) = places.next().filter(|_| grad_enabled()) else {
            return Var { narrow, ..Var::constant(output) };
        };
        assert!(places.all(|(other, _)| other.is(tape)), "the inputs of an operator lie on different tapes");
        let nodes = inputs.iter().map(|x| x.place.as_ref().map(|&(_, node)| node)).collect();
        let node = tape.push(nodes, &output, Box::new(backward()));
        Var { narrow, ..Var::on_tape(output, tape.clone(), node) }
    }

    /// The value.
    pub fn value(&self) -> &Tensor {
        &self.value
    }

    /// Notes how the value is computed again from what the operator that made it keeps. A constant, of which nothing is
    /// kept, stays without.
    pub fn with_recipe(self, recipe: impl FnOnce() -> Recipe) -> Var {
        let recipe = self.requires_grad().then(recipe);
        Var { recipe, ..self }
    }

    /// How the value is computed again, where that is known.
    pub fn recipe(&self) -> Option<&Recipe> {
        self.recipe.as_ref()
    }

    /// The same, marked as [`Var::is_narrow`] says.
    pub(crate) fn narrowed(self) -> Var {
        Var { narrow: true, ..self }
    }

    /// Whether products with this value, and those of its gradient, may round their factors to BF16 and sum in F32: a
    /// parameter of a tape [`with_narrow_products`](Tape::with_narrow_products), or computed from one. Operators that cannot do
    /// so ignore it.
    pub fn is_narrow(&self) -> bool {
        self.narrow
    }

    /// The value without its place on the tape, leaving the tape's nodes as they are.
    pub fn into_value(self) -> Tensor {
        self.value
    }

    /// The same value as a constant: gradients stop here.
    pub fn detach(&self) -> Var {
        Var::constant(self.value.clone())
    }

    /// Whether a gradient can flow into this value.
    pub fn requires_grad(&self) -> bool {
        self.place.is_some() && grad_enabled()
    }

    pub(crate) fn node_on(&self, tape: &Tape) -> Option<usize> {
        self.place.as_ref().filter(|(own, _)| own.is(tape)).map(|&(_, node)| node)
    }

    /// The shape of the value.
    pub fn shape(&self) -> &[usize] {
        self.value.shape()
    }

    /// The dtype of the value.
    pub fn dtype(&self) -> DType {
        self.value.dtype()
    }

    /// The number of axes.
    pub fn rank(&self) -> usize {
        self.value.rank()
    }

    /// The size of one axis.
    ///
    /// # Panics
    /// When there is no such axis.
    #[track_caller]
    pub fn dim(&self, axis: usize) -> usize {
        self.value.dim(axis)
    }

    /// The only element, as f64.
    ///
    /// # Panics
    /// When there is not exactly one element.
    #[track_caller]
    pub fn item(&self) -> f64 {
        self.value.item()
    }
}

impl From<Tensor> for Var {
    fn from(value: Tensor) -> Var {
        Var::constant(value)
    }
}

impl fmt::Debug for Var {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match &self.place {
            Some((_, node)) => write!(f, "Var #{node} {:?}", self.value),
            None => write!(f, "Var const {:?}", self.value),
        }
    }
}
