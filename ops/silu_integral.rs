//! `silu_integral`: the function whose slope is SiLU, which energies of SiLU layers are made of.
//!
//! Forward `Φ(x) = ∫ s σ(s) ds` from -∞ to x. By parts it is `x ln(1 + e^x) + Li₂(-e^x)`. With `z = ln(1 + e^-|x|)`, at most
//! ln 2, Landen's identity and Debye's series give `-Li₂(-e^-|x|) = L(z) = z + z²/4 + Σ_k B_2k z^(2k+1) / (2k+1)!`, of which
//! eight Bernoulli numbers are exact in f64, and the inversion of Li₂ the other half:
//!
//! ```text
//! x <= 0:  Φ = x z - L(z)                x > 0:  Φ = x²/2 - π²/6 + x z + L(z)
//! ```
//!
//! No terms cancel for negative x, so that the far tail keeps its relative accuracy. Backward `dx = dout · x σ(x)`.
//! Saved: x. Cost: one read and one write of memory.
//! Source: the energy of Causal Energy Minimization's MLP, arXiv 2605.07588; Lewin, Polylogarithms, 1981.

use kumiki_autograd::Var;

use crate::activations::ln_1p;
use crate::cuda::formulas;
use crate::elementwise::{Save, unary};
use crate::registry::OpCase;
use crate::simd::{Binary, Lanes, Real, Unary};
use crate::unary::constant;

/// `∫ s / (1 + e^-s) ds` from -∞ to `x`, any shape.
///
/// # Panics
/// When `x` is not of a float dtype.
#[track_caller]
pub fn silu_integral(x: &Var) -> Var {
    unary("silu_integral", x, SiluIntegral, Save::Input)
}

pub(crate) struct SiluIntegral;

/// `B_2k / (2k+1)!` for k = 8 to 1: coefficients of `z^(2k+1)`.
const DEBYE: [f64; 8] = [
    -1.993_929_586_072_107_6e-14,
    8.921_691_020_456_453e-13,
    -4.064_761_645_144_225_5e-11,
    1.0 / 526_901_760.0,
    -1.0 / 10_886_400.0,
    1.0 / 211_680.0,
    -1.0 / 3600.0,
    1.0 / 36.0,
];

formulas!("silu_integral.cu", ["map" of "SiluIntegral", "zip" of "SiluIntegral"], [SiluIntegral]);

impl<E: Real> Unary<E> for SiluIntegral {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        let z = ln_1p((-x.abs()).exp());
        let square = z * z;
        let mut series = constant::<L>(DEBYE[0]);
        for coefficient in &DEBYE[1..] {
            series = series.mul_add(square, constant(*coefficient));
        }
        let l = (series * z + constant(0.25)).mul_add(square, z);
        // x = -inf has z = 0: its product would be NaN.
        let bounded = constant::<L>(-1e9).max(x);
        let half = constant::<L>(0.5) * x;
        let positive =
            half.mul_add(x, constant(-std::f64::consts::PI.powi(2) / 6.0)) + x.min(constant(1e9)).mul_add(z, l);
        L::select(x.gt(L::splat(E::ZERO)), positive, bounded.mul_add(z, -l))
    }
}

impl<E: Real> Binary<E> for SiluIntegral {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, dout: L, x: L) -> L {
        dout * (constant::<L>(-1e9).max(x) * x.sigmoid())
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    vec![OpCase::new("silu_integral", "", &[("x", &[3, 7])], |_, v| silu_integral(&v[0])).map_input(0, |x| 3.0 * x)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Chain;
    use kumiki_autograd::Tape;
    use kumiki_tensor::{DType, Tensor};
    use proptest::prelude::*;

    /// By Simpson's rule from where nothing is left.
    fn naive(x: f64) -> f64 {
        let from = x.min(0.0) - 45.0;
        let steps = 40_000;
        let h = (x - from) / f64::from(steps);
        let silu = |s: f64| s / (1.0 + (-s).exp());
        let weight = |i| {
            if i == 0 || i == steps {
                1.0
            } else if i % 2 == 1 {
                4.0
            } else {
                2.0
            }
        };
        (0..=steps).map(|i| weight(i) * silu(from + f64::from(i) * h)).sum::<f64>() * h / 3.0
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn passes_the_chain(seed in any::<u64>(), len in 0usize..20, spread in 0.1..8.0f64) {
            Chain::new("silu_integral", seed, &[("x", &[len])])
                .map_input(0, |x| x * spread)
                .run(|_, v| silu_integral(&v[0]), |v| v[0].iter().map(|&x| naive(x)).collect());
        }
    }

    #[test]
    fn closed_forms_and_edges() {
        let pi2 = std::f64::consts::PI.powi(2);
        let x = [0.0, f64::NEG_INFINITY, -700.0, 40.0, 1e9];
        // Far left Φ is (x - 1) e^x; far right x²/2 - π²/6.
        let expected = [-pi2 / 12.0, 0.0, -701.0 * (-700f64).exp(), 800.0 - pi2 / 6.0, 5e17];
        let y = silu_integral(&Var::constant(Tensor::from_slice(&x, &[5]))).into_value().to_f64_vec();
        for (y, expected) in y.iter().zip(expected) {
            assert!((y - expected).abs() <= 1e-15 * expected.abs(), "{y} for {expected}");
        }
        let tape = Tape::new();
        let x = tape.leaf(Tensor::from_slice(&[0.0f32, -1e30, f32::NEG_INFINITY, 100.0], &[4]));
        let y = silu_integral(&x);
        let grads = tape.backward_from(&[(&y, Tensor::ones(DType::F32, &[4]))]);
        assert_eq!(grads.get(&x).unwrap().to_f64_vec(), [0.0, 0.0, 0.0, 100.0]);
    }
}
