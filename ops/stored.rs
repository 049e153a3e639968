//! Formulas over numbers that are stored in BF16 and computed with in F32.
//!
//! A few vectors at a time are widened, computed and rounded, in one loop: while the CPU computes one group it already reads
//! the next ones. (Whole blocks, first all widened, then all computed, wait for memory and compute in turn.)

use kumiki_tensor::{bf16, round_to_bf16, widen_bf16};

use crate::rows::Formula;
use crate::simd::{Binary, Kernel, Lanes, Real, Unary, narrow_group, widen_group};

/// Numbers of a group: some vectors of any level.
const GROUP: usize = 64;

/// Applies the formula at every position and gives its sums, which are in F32; as in [`pass`](crate::rows::pass), an output is
/// given its old value.
///
/// # Panics
/// When lengths differ.
pub(crate) fn pass_stored<F, const I: usize, const O: usize, const S: usize>(
    f: &F,
    inputs: [&[bf16]; I],
    outputs: [&mut [bf16]; O],
) -> [f32; S]
where
    F: Formula<f32, I, O, S>,
{
    let len = if I > 0 { inputs[0].len() } else { outputs[0].len() };
    assert!(inputs.iter().all(|x| x.len() == len) && outputs.iter().all(|y| y.len() == len));
    f32::dispatch(Pass { f, inputs, outputs, len })
}

/// `y = f(x)`.
pub(crate) fn map_stored<F: Unary<f32>>(f: &F, x: &[bf16], y: &mut [bf16]) {
    let [] = pass_stored(&Of(f), [x], [y]);
}

/// `out = f(x, y)`.
pub(crate) fn zip_stored<F: Binary<f32>>(f: &F, x: &[bf16], y: &[bf16], out: &mut [bf16]) {
    let [] = pass_stored(&Of(f), [x, y], [out]);
}

/// `x = f(x, y)`.
pub(crate) fn zip_stored_inplace<F: Binary<f32>>(f: &F, x: &mut [bf16], y: &[bf16]) {
    let [] = pass_stored(&Over(f), [y], [x]);
}

/// `out = scale x` and `gated = scale x ⊙ gate`, each rounded once.
///
/// # Panics
/// When lengths differ.
pub(crate) fn gate_stored(scale: f32, x: &[f32], gate: &[bf16], [out, gated]: [&mut [bf16]; 2]) {
    let len = x.len();
    assert!(gate.len() == len && out.len() == len && gated.len() == len);
    f32::dispatch(Gate { scale, x, gate, out, gated });
}

struct Gate<'a> {
    scale: f32,
    x: &'a [f32],
    gate: &'a [bf16],
    out: &'a mut [bf16],
    gated: &'a mut [bf16],
}

impl Kernel<f32> for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = f32>>(self) {
        let Gate { scale, x, gate, out, gated } = self;
        for (((x, gate), out), gated) in x.iter().zip(gate).zip(out).zip(gated) {
            let x = scale * x;
            (*out, *gated) = (round_to_bf16(x), round_to_bf16(x * widen_bf16(*gate)));
        }
    }
}

/// A formula's result as the only output.
struct Of<'a, F>(&'a F);
impl<F: Unary<f32>> Formula<f32, 1, 1, 0> for Of<'_, F> {
    #[inline(always)]
    fn step<L: Lanes<Elem = f32>>(&self, [x]: [L; 1], _: [L; 1], _: &mut [L; 0]) -> [L; 1] {
        [self.0.apply(x)]
    }
}
impl<F: Binary<f32>> Formula<f32, 2, 1, 0> for Of<'_, F> {
    #[inline(always)]
    fn step<L: Lanes<Elem = f32>>(&self, [x, y]: [L; 2], _: [L; 1], _: &mut [L; 0]) -> [L; 1] {
        [self.0.apply(x, y)]
    }
}

/// A formula's result over its first argument.
struct Over<'a, F>(&'a F);
impl<F: Binary<f32>> Formula<f32, 1, 1, 0> for Over<'_, F> {
    #[inline(always)]
    fn step<L: Lanes<Elem = f32>>(&self, [y]: [L; 1], [x]: [L; 1], _: &mut [L; 0]) -> [L; 1] {
        [self.0.apply(x, y)]
    }
}

struct Pass<'a, F, const I: usize, const O: usize, const S: usize> {
    f: &'a F,
    inputs: [&'a [bf16]; I],
    outputs: [&'a mut [bf16]; O],
    len: usize,
}

impl<F: Formula<f32, I, O, S>, const I: usize, const O: usize, const S: usize> Kernel<f32> for Pass<'_, F, I, O, S> {
    type Output = [f32; S];

    #[inline(always)]
    fn run<L: Lanes<Elem = f32>>(self) -> [f32; S] {
        let Self { f, inputs, mut outputs, len } = self;
        let mut sums = [L::splat(0.0); S];
        let whole = len - len % GROUP;
        for at in (0..whole).step_by(GROUP) {
            let x = inputs.each_ref().map(|x| x[at..].first_chunk::<GROUP>().expect("a whole group"));
            let y = outputs.each_mut().map(|y| y[at..].first_chunk_mut::<GROUP>().expect("a whole group"));
            group(f, (x, y), GROUP, &mut sums);
        }
        if whole < len {
            let rest = len - whole;
            let padded = |x: &[bf16]| {
                let mut group = [bf16::ZERO; GROUP];
                group[..rest].copy_from_slice(&x[whole..]);
                group
            };
            let x = inputs.each_ref().map(|x| padded(x));
            let mut y = outputs.each_ref().map(|y| padded(y));
            group(f, (x.each_ref(), y.each_mut()), rest, &mut sums);
            for (out, y) in outputs.iter_mut().zip(&y) {
                out[whole..].copy_from_slice(&y[..rest]);
            }
        }
        let mut totals = [0.0; S];
        for (total, sum) in totals.iter_mut().zip(sums) {
            *total = sum.reduce_sum();
        }
        totals
    }
}

/// The numbers of a group, of which the first `count` are there.
#[inline(always)]
fn group<L: Lanes<Elem = f32>, F: Formula<f32, I, O, S>, const I: usize, const O: usize, const S: usize>(
    f: &F,
    (inputs, outputs): ([&[bf16; GROUP]; I], [&mut [bf16; GROUP]; O]),
    count: usize,
    sums: &mut [L; S],
) {
    let x = inputs.map(widen_group);
    let mut y = outputs.each_ref().map(|y| widen_group(y));
    for at in (0..GROUP).step_by(L::N) {
        let before = *sums;
        let new = f.step(x.each_ref().map(|x| L::load(&x[at..])), y.each_ref().map(|y| L::load(&y[at..])), sums);
        if at + L::N > count {
            // What is not there adds nothing.
            for (sum, before) in sums.iter_mut().zip(before) {
                *sum = L::select(L::first_lanes(count.saturating_sub(at)), *sum, before);
            }
        }
        for (y, new) in y.iter_mut().zip(new) {
            new.store(&mut y[at..]);
        }
    }
    for (out, y) in outputs.into_iter().zip(&y) {
        narrow_group(y, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Level, with_level};
    use kumiki_tensor::{DType, Rng};

    struct Fused;
    impl Formula<f32, 2, 2, 1> for Fused {
        #[inline(always)]
        fn step<L: Lanes<Elem = f32>>(&self, [a, b]: [L; 2], [c, d]: [L; 2], [sum]: &mut [L; 1]) -> [L; 2] {
            *sum = *sum + (a + L::splat(1.0)) * d;
            [a * c, d - b]
        }
    }

    /// Every length around groups and vectors, and nothing beside the outputs is touched.
    #[test]
    fn each_number_is_computed_in_f32_and_rounded_once() {
        let lengths = [0, 1, 15, 63, 64, 65, 200];
        for (level, len) in Level::available().into_iter().flat_map(|level| lengths.map(|len| (level, len))) {
            let numbers = |seed| Rng::new(seed).normal(DType::F32, &[len + 1], 0.0, 3.0).to_vec::<f32>();
            let [a, b, c, d] =
                [1, 2, 3, 4].map(|seed| numbers(seed).into_iter().map(bf16::from_f32).collect::<Vec<_>>());
            let (mut y, mut z) = (c.clone(), d.clone());
            let pass = || pass_stored(&Fused, [&a[..len], &b[..len]], [&mut y[..len], &mut z[..len]]);
            let [sum] = with_level(level, pass);
            let expected: f32 = (0..len).map(|i| (a[i].to_f32() + 1.0) * d[i].to_f32()).sum();
            assert!((sum - expected).abs() <= 1e-3, "{sum} for {expected}: {level}, {len}");
            for i in 0..len {
                let [a, b, c, d] = [a[i], b[i], c[i], d[i]].map(bf16::to_f32);
                assert_eq!([y[i], z[i]].map(bf16::to_f32), [a * c, d - b].map(|x| bf16::from_f32(x).to_f32()));
            }
            assert_eq!([y[len], z[len]].map(bf16::to_bits), [c[len], d[len]].map(bf16::to_bits), "{level}, {len}");
        }
    }
}
