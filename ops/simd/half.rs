//! BF16 as storage of F32: whole slices at a time, in instructions of the level.

use kumiki_tensor::{bf16, round_to_bf16, widen_bf16};

use super::lanes::{Kernel, Lanes};
use super::real::Real;

/// `out[i] = x[i]`.
///
/// # Panics
/// When the lengths differ.
pub fn widen(x: &[bf16], out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "widen: slices differ in length");
    f32::dispatch(Widen { x, out });
}

/// `out[i] = x[i]`, rounded to the nearest, of two the even one.
///
/// # Panics
/// When the lengths differ.
pub fn narrow(x: &[f32], out: &mut [bf16]) {
    assert_eq!(x.len(), out.len(), "narrow: slices differ in length");
    f32::dispatch(Narrow { x, out });
}

/// [`widen`] of an array, inside of a kernel: a plain loop, which the compiler turns into vectors of the kernel's level.
#[inline(always)]
pub(crate) fn widen_group<const N: usize>(x: &[bf16; N]) -> [f32; N] {
    let mut out = [0.0; N];
    out.iter_mut().zip(x).for_each(|(y, &x)| *y = widen_bf16(x));
    out
}

/// [`narrow`] of an array, inside of a kernel.
#[inline(always)]
pub(crate) fn narrow_group<const N: usize>(x: &[f32; N], out: &mut [bf16; N]) {
    out.iter_mut().zip(x).for_each(|(y, &x)| *y = round_to_bf16(x));
}

struct Widen<'a> {
    x: &'a [bf16],
    out: &'a mut [f32],
}

impl Kernel<f32> for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = f32>>(self) {
        self.out.iter_mut().zip(self.x).for_each(|(y, &x)| *y = widen_bf16(x));
    }
}

struct Narrow<'a> {
    x: &'a [f32],
    out: &'a mut [bf16],
}

impl Kernel<f32> for Narrow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = f32>>(self) {
        self.out.iter_mut().zip(self.x).for_each(|(y, &x)| *y = round_to_bf16(x));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Level, with_level};

    #[test]
    fn every_bf16_and_what_lies_between() {
        for level in Level::available() {
            with_level(level, || {
                let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
                let mut wide = vec![0f32; all.len()];
                widen(&all, &mut wide);
                let same = |y: f32, x: bf16| y.to_bits() == x.to_f32().to_bits() || (y.is_nan() && x.is_nan());
                assert!(wide.iter().zip(&all).all(|(&y, &x)| same(y, x)), "{level}");
                for below in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                    let x: Vec<f32> = wide.iter().map(|x| f32::from_bits(x.to_bits() | below)).collect();
                    let mut rounded = vec![bf16::ZERO; x.len()];
                    narrow(&x, &mut rounded);
                    for (y, &x) in rounded.iter().zip(&x) {
                        assert_eq!(y.to_bits(), bf16::from_f32(x).to_bits(), "{x:e} ({:x}) at {level}", x.to_bits());
                    }
                }
            });
        }
    }
}
