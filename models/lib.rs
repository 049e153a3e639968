//! kumiki's models: each paper architecture as one plain struct.
//!
//! A model file reads from top to bottom: configuration, block, forward pass. [`LanguageModel`] puts blocks of one
//! architecture between a token table and the head tied to it, [`SequenceRegressor`] between two linear maps; [`DoubleDecoder`]
//! and [`EncoderDecoder`] have two stacks; [`Model`] is any of those that read text;
//! [`accounting`] says what a model costs, [`width`] what of it is scaled with its width. Functions from tokens or hidden states
//! to others panic, at the caller's line, on shapes other than those they name and on tokens that the model does not have.

pub mod accounting;
mod block_cache;
mod cases;
mod cem;
mod double_decoder;
mod encoder_decoder;
mod gau;
mod gelu;
mod language_model;
mod model;
mod regression;
mod size;
mod tango;
mod transformer;
pub mod width;

pub use block_cache::BlockCache;
pub use cases::{ModelCase, model_cases};
pub use cem::{
    AttentionHalf, AttentionKind, CemBlock, CemConfig, MAX_DESCENT_STEPS, MhaHalf, MlpHalf, MlpKind, SwigluHalf,
};
pub use double_decoder::{ContextProjections, DoubleCache, DoubleDecoder, DoubleDecoderConfig, DualLayer};
pub use encoder_decoder::{CrossLayer, EncoderDecoder, EncoderDecoderCache, EncoderDecoderConfig, SpanCounts};
pub use gau::{GauBlock, GauConfig};
pub use gelu::{GeluConfig, GeluLayer};
pub use language_model::{Architecture, Block, DecodeCache, IGNORE, LanguageModel, LanguageModelConfig};
pub use model::{Model, ModelConfig, Writing};
pub use regression::{SequenceRegressor, SequenceRegressorConfig};
pub use size::{solve_model_width, solve_width, width_error};
pub use tango::{TangoBlock, TangoConfig, Window};
pub use transformer::{TransformerBlock, TransformerConfig};
