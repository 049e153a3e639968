//! Scaling laws: how the loss falls with the size of a model and the tokens that it is trained on,
//!
//! ```text
//! L(N, D) = E + A / N^α + B / D^β
//! ```
//!
//! after Hoffmann et al., "Training Compute-Optimal Large Language Models" (2022), approach 3. [`fit`](fn@fit) finds the five
//! coefficients of a table of trained models and says how well the table determines them; `table` reads such tables.

mod descent;
pub mod fit;
mod interval;
#[cfg(feature = "plots")]
pub mod picture;
#[cfg(feature = "tables")]
pub mod table;

pub use fit::{Estimate, Fit, FitOptions, fit};
use serde::{Deserialize, Serialize};

/// One trained model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// N: parameters outside of the token table.
    pub params: f64,
    /// D: tokens trained on, repeated ones counted again.
    pub tokens: f64,
    /// L: nats per token, of text that was not trained on.
    pub loss: f64,
}
