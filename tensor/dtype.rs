//! Element types, known at run time; [`Element`] ties each to its Rust type inside leaf kernels.

use std::fmt;

pub use half::bf16;

/// The element type of a [`crate::Tensor`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float: the default for training.
    F32,
    /// 64-bit float: works everywhere, so that gradients can be proven.
    F64,
    /// 16-bit "brain" float: storage and matmul operands; arithmetic on it is done in F32.
    BF16,
    /// 64-bit signed ids (tokens, targets; -1 marks an ignored target).
    I64,
    /// 32-bit unsigned ids (indices).
    U32,
}

impl DType {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 | DType::U32 => 4,
            DType::F64 | DType::I64 => 8,
            DType::BF16 => 2,
        }
    }

    /// Whether values are real numbers (and may carry gradients).
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::BF16)
    }

    /// The type in which arithmetic on this one is done: F32 for BF16, itself otherwise.
    pub const fn compute(self) -> DType {
        match self {
            DType::BF16 => DType::F32,
            other => other,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::BF16 => "bf16",
            DType::I64 => "i64",
            DType::U32 => "u32",
        })
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that a tensor can hold. Every bit pattern is a valid value, which is what lets buffers be recycled.
pub trait Element:
    sealed::Sealed + Copy + Default + PartialEq + PartialOrd + fmt::Debug + Send + Sync + 'static
{
    /// The run-time name of this type.
    const DTYPE: DType;
    /// The value as f64 (i64 beyond 2^53 rounds).
    fn to_f64(self) -> f64;
    /// The nearest value of this type; integers truncate and saturate.
    fn from_f64(x: f64) -> Self;
}

macro_rules! element {
    ($($t:ty: $d:ident),*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$d;
            #[inline(always)]
            fn to_f64(self) -> f64 { self as f64 }
            #[inline(always)]
            fn from_f64(x: f64) -> Self { x as $t }
        }
    )*};
}
element!(f32: F32, f64: F64, i64: I64, u32: U32);

/// `bf16::to_f32`, in steps that a compiler turns into vectors.
#[inline(always)]
#[must_use]
pub fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// `bf16::from_f32`, to the nearest, of two the even one; in steps that a compiler turns into vectors.
#[inline(always)]
#[must_use]
pub fn round_to_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    // A NaN may have all that makes it one in the lower half.
    let bits = if x.is_nan() { bits | 0x0040_0000 } else { rounded };
    bf16::from_bits((bits >> 16) as u16)
}

impl sealed::Sealed for bf16 {}
impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
    #[inline(always)]
    fn to_f64(self) -> f64 {
        bf16::to_f64(self)
    }
    #[inline(always)]
    fn from_f64(x: f64) -> Self {
        bf16::from_f64(x)
    }
}

/// Runs an expression with `$E` bound to the Rust type of `$dtype`.
#[macro_export]
macro_rules! dispatch {
    ($dtype:expr, $E:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $E = f32;
                $body
            }
            $crate::DType::F64 => {
                type $E = f64;
                $body
            }
            $crate::DType::BF16 => {
                type $E = $crate::bf16;
                $body
            }
            $crate::DType::I64 => {
                type $E = i64;
                $body
            }
            $crate::DType::U32 => {
                type $E = u32;
                $body
            }
        }
    };
}

/// Runs an expression with `$E` bound to f32 or f64, the types of arithmetic; any other dtype panics, naming `$op`.
#[macro_export]
macro_rules! dispatch_real {
    ($op:expr, $dtype:expr, $E:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $E = f32;
                $body
            }
            $crate::DType::F64 => {
                type $E = f64;
                $body
            }
            other => panic!("{}: expected f32 or f64 elements, found {other}", $op),
        }
    };
}
