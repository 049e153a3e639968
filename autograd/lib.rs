//! kumiki's tape: variables, parameters, the reverse walker, gradcheck.
//!
//! A forward pass on a [`Tape`] appends one node per operator; [`Tape::backward`] walks them once, in reverse order of
//! creation, and gives the [`Gradients`] of every leaf. This crate knows no operator: an operator is a function that
//! computes a tensor and hands it to [`Var::from_op`] with its [`Backward`].

mod checkpoint;
mod gradcheck;
mod gradients;
mod kept;
mod param;
mod profile;
mod tape;
mod var;

pub use checkpoint::checkpoint;
pub use gradcheck::{GradCheck, Report, Worst, gradcheck};
pub use gradients::Gradients;
pub use kept::{Kept, Recipe};
pub use param::{Param, ParamId};
pub use profile::{Cost, Profile};
pub use tape::{Backward, NodeSummary, Tape, no_grad};
pub use var::Var;
