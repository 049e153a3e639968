//! [`Param`]: a trainable tensor with an identity that outlives the tapes it appears on.

use std::sync::atomic::{AtomicU64, Ordering};

use kumiki_tensor::{DType, Tensor};

/// What distinguishes one parameter from every other in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(u64);

/// A trainable tensor. A clone is the same parameter (same identity, same storage until one of them is written), which
/// is how a checkpointed block can carry its parameters into a closure.
#[derive(Clone, Debug)]
pub struct Param {
    id: ParamId,
    value: Tensor,
}

impl Param {
    /// A new parameter with a starting value.
    ///
    /// # Panics
    /// When the value is not of a float dtype.
    #[track_caller]
    pub fn new(value: Tensor) -> Param {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        assert!(value.dtype().is_float(), "a parameter must be of a float dtype, found {}", value.dtype());
        Param { id: ParamId(NEXT.fetch_add(1, Ordering::Relaxed)), value }
    }

    /// Its identity.
    pub fn id(&self) -> ParamId {
        self.id
    }

    /// Its value.
    pub fn value(&self) -> &Tensor {
        &self.value
    }

    /// Its value, for an optimiser to change. Writing through [`Tensor::make_mut`] copies when a tape still holds it.
    pub fn value_mut(&mut self) -> &mut Tensor {
        &mut self.value
    }

    /// Replaces the value, as when a checkpoint is loaded.
    ///
    /// # Panics
    /// When the shape or the dtype differs from the present one.
    #[track_caller]
    pub fn set(&mut self, value: Tensor) {
        assert!(
            value.shape() == self.value.shape() && value.dtype() == self.value.dtype(),
            "a parameter of {:?} {} cannot take {:?} {}",
            self.value.shape(),
            self.value.dtype(),
            value.shape(),
            value.dtype()
        );
        self.value = value;
    }

    /// The shape of its value.
    pub fn shape(&self) -> &[usize] {
        self.value.shape()
    }

    /// The dtype of its value.
    pub fn dtype(&self) -> DType {
        self.value.dtype()
    }
}
