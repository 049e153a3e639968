//! SIMD lanes: a kernel is written once, generic over [`Lanes`], and runs on the widest vectors that the CPU has.
//!
//! The [`Level`] is chosen once, at the first use. A kernel is a small struct that implements [`Kernel`];
//! [`Real::dispatch`] runs it through the one `#[target_feature]` function of the level, so everything on the way down
//! must be `#[inline(always)]` (a closure is not: write a method). Dispatch once per call of an operator or per tile,
//! not per row: a dispatch is a call that nothing inlines.
//!
//! An elementwise operator needs no kernel of its own, only a formula:
//! ```
//! use kumiki_ops::simd::{Lanes, Real, Unary, map_unary};
//!
//! struct Silu;
//! impl<E: Real> Unary<E> for Silu {
//!     #[inline(always)]
//!     fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
//!         x * x.sigmoid()
//!     }
//! }
//!
//! let x = [0.0f32, 1.0, -200.0];
//! let mut y = [f32::NAN; 3];
//! map_unary(&Silu, &x, &mut y);
//! assert!((y[1] - 0.731_058_6).abs() < 1e-6 && y[2] == 0.0);
//! ```
//!
//! Slice functions here run on the calling thread; operators cut the work by shape and call them per piece.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod decode;
mod half;
mod lanes;
mod level;
mod map;
mod math;
mod portable;
mod real;
mod reduce;

pub use decode::{add_outer, add_weighted_rows, row_dots};
pub use half::{narrow, widen};
pub(crate) use half::{narrow_group, widen_group};
pub use lanes::{Kernel, Lanes};
pub use level::{Level, configured_level, level, with_level};
pub use map::{
    Binary, Ternary, Unary, map_binary, map_binary_inplace, map_ternary, map_ternary_inplace, map_unary,
    map_unary_inplace,
};
pub use math::Constants;
pub use real::Real;
pub use reduce::{dot, exp_shift_inplace, max, sum, sum_exp_shifted, sum_sq};

#[cfg(test)]
mod tests;
