//! `feature_map`: WANGO's features of unit vectors, whose products stand for `exp(tau (x̂·ŷ - 1))` far away.
//!
//! With `u = x / sqrt(Σ x² + 1e-12)` per head and the near weights' shift spread evenly over both sides:
//!
//! ```text
//! hyperbolic  M = 2K              exp(-tau/2) / sqrt(2K) · [exp(sqrt(tau) u), exp(-sqrt(tau) u)]
//! elu1        M = K               exp(-tau/2) / sqrt(K) · (elu(u) + 1)
//! taylor2     M = 1+K+K(K+1)/2    exp(-tau/2) · [1, sqrt(tau) u_a, tau/sqrt(2) u_a², tau u_a u_b (a < b)]
//! ```
//!
//! Features of the first two are positive; those of `taylor2` are not, but its kernel
//! `φ(u)·φ(v) = exp(-tau) (1 + s + s²/2)`, `s = tau u·v`, is.
//!
//! Backward: `du` by the chain rule, `dx = r (du - u (u·du))` with `r = 1 / sqrt(Σ x² + 1e-12)`, and
//! `dtau = -Σ y·dy / 2 + Σ dy·(∂y/∂tau of the rest)`.
//! Saved: `x`, `tau`, and the features `y` (which are most of their own derivatives). `u` is computed again.
//! Cost: one pass over `[B, T, H, M]`. Source: WANGO, "cross-token gated residual" (2026).

use std::str::FromStr;

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::cuda::Source;
use kumiki_tensor::{DType, Tensor, kernels, threads};

use crate::attention_tiles::{Number, Rows};
use crate::cast::widened;
use crate::registry::{BenchCase, OpCase};
use crate::simd::{Kernel, Lanes, Real};
use crate::unit_rows::{unit_rows, unit_rows_backward};

/// Positions (of all heads) that one task maps.
const POSITIONS: usize = 64;

/// Which features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FeatureMap {
    /// Exponentials of both signs, `2K`.
    #[default]
    Hyperbolic,
    /// `elu + 1`, `K`.
    Elu1,
    /// The exponential's Taylor series up to the square, `1 + K + K(K+1)/2`.
    Taylor2,
}

impl FeatureMap {
    /// All of them.
    pub const ALL: [FeatureMap; 3] = [FeatureMap::Hyperbolic, FeatureMap::Elu1, FeatureMap::Taylor2];

    /// The name in configurations.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            FeatureMap::Hyperbolic => "hyperbolic",
            FeatureMap::Elu1 => "elu1",
            FeatureMap::Taylor2 => "taylor2",
        }
    }

    /// The number of features M of vectors of width K.
    #[must_use]
    pub fn width(self, k: usize) -> usize {
        match self {
            FeatureMap::Hyperbolic => 2 * k,
            FeatureMap::Elu1 => k,
            FeatureMap::Taylor2 => 1 + k + k * (k + 1) / 2,
        }
    }
}

impl FromStr for FeatureMap {
    type Err = String;

    fn from_str(name: &str) -> Result<FeatureMap, String> {
        let found = FeatureMap::ALL.into_iter().find(|map| map.name() == name);
        found.ok_or_else(|| format!("unknown feature map `{name}`; there are hyperbolic, elu1 and taylor2"))
    }
}

/// `x` `[B, T, H, K]` and `tau` `[H]` above 0, to `[B, T, H, M]`.
///
/// # Panics
/// When shapes or dtypes do not fit.
#[track_caller]
pub fn feature_map(x: &Var, tau: &Var, map: FeatureMap) -> Var {
    assert!(x.shape().len() == 4 && x.dtype().is_float(), "feature_map: x must be [B, T, H, K], got {:?}", x.shape());
    assert!(
        tau.shape() == [x.dim(2)] && tau.dtype().compute() == x.dtype().compute(),
        "feature_map: tau must be [H={}] of {}, got {:?} of {} (x: {:?})",
        x.dim(2),
        x.dtype().compute(),
        tau.shape(),
        tau.dtype(),
        x.shape()
    );
    widened(&[x, tau], |inputs| {
        let (x, tau) = (&inputs[0], &inputs[1]);
        let (rows, tau_value) = (Rows::<f32>::prepare(x.value()), tau.value().contiguous());
        let y = match x.dtype() {
            DType::F64 => forward::<f64>(&rows, &tau_value, map),
            _ => forward::<f32>(&rows, &tau_value, map),
        };
        Var::from_op(y.clone(), &[x, tau], || FeatureMapBackward { map, x: rows, tau: tau_value, y })
    })
}

struct FeatureMapBackward {
    map: FeatureMap,
    x: Tensor,
    tau: Tensor,
    y: Tensor,
}

impl Backward for FeatureMapBackward {
    fn name(&self) -> &'static str {
        "feature_map"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("x", &self.x), ("tau", &self.tau), ("y", &self.y)]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        let (dx, dtau) = match dout.dtype() {
            DType::F64 => gradients::<f64>(&self, &dout.contiguous()),
            _ => gradients::<f32>(&self, &dout.contiguous()),
        };
        vec![Some(dx), Some(dtau)]
    }
}

fn forward<E: Number>(x: &Tensor, tau: &Tensor, map: FeatureMap) -> Tensor {
    let [batch, time, heads, width] = [x.dim(0), x.dim(1), x.dim(2), x.dim(3)];
    let features = map.width(width);
    let u = unit_rows::<E>(x, None);
    if x.cuda().is_some() {
        return cuda::forward(&u, tau, map);
    }
    let tau = tau.as_slice::<E>();
    let mut y = Tensor::empty(E::DTYPE, &[batch, time, heads, features]);
    if !y.is_empty() {
        let u = u.as_slice::<E>();
        let piece = POSITIONS * heads * features;
        threads::parallel_chunks_mut(y.as_mut_slice::<E>(), piece, 8 * piece, |i, y| {
            E::dispatch(Map { map, first: i * POSITIONS * heads, width, u, tau, y });
        });
    }
    y
}

pub(crate) static KERNELS: Source = Source {
    file: "feature_map.cu",
    text: include_str!("feature_map.cu"),
    headers: &[],
    kernels: kernels!["feature_map" of "float" "double", "feature_map_backward" of "float" "double"],
};

mod cuda {
    use super::{FeatureMap, FeatureMapBackward, KERNELS};
    use crate::cuda::{by_warps, kernel_of};
    use kumiki_tensor::cuda::{Arg, launch};
    use kumiki_tensor::{DType, Tensor};

    /// The number of a map in the kernels.
    fn number(map: FeatureMap) -> Arg<'static> {
        Arg::I32(match map {
            FeatureMap::Hyperbolic => 0,
            FeatureMap::Elu1 => 1,
            FeatureMap::Taylor2 => 2,
        })
    }

    fn sizes(u: &Tensor, map: FeatureMap) -> ([Arg<'static>; 4], usize) {
        let rows = u.shape()[..3].iter().product();
        ([rows, u.dim(2), u.dim(3), map.width(u.dim(3))].map(|n| Arg::I64(n as i64)), rows)
    }

    /// Of unit rows `[B, T, H, K]`, contiguous.
    pub fn forward(u: &Tensor, tau: &Tensor, map: FeatureMap) -> Tensor {
        let device = u.cuda().expect("on a CUDA device");
        let mut y = u.new_empty(u.dtype(), &[u.dim(0), u.dim(1), u.dim(2), map.width(u.dim(3))]);
        let (sizes, rows) = sizes(u, map);
        let args = [&[number(map), u.cuda_in(), tau.cuda_in(), y.cuda_out()], &sizes[..]].concat();
        // SAFETY: the kernel's arguments; a warp for each row of u and y.
        unsafe { launch(device, &KERNELS, &kernel_of("feature_map", u.dtype()), by_warps(rows), &args) };
        y
    }

    /// The gradients of the unit rows and of `tau`.
    pub fn backward(
        FeatureMapBackward { map, tau, y, .. }: &FeatureMapBackward,
        u: &Tensor,
        dout: &Tensor,
    ) -> (Tensor, Tensor) {
        let device = u.cuda().expect("on a CUDA device");
        let mut du = u.new_empty(u.dtype(), u.shape());
        let mut dtau = u.new_empty(DType::F64, &[u.dim(0) * u.dim(1), u.dim(2)]);
        let (sizes, rows) = sizes(u, *map);
        let given = [number(*map), u.cuda_in(), tau.cuda_in(), y.cuda_in(), dout.cuda_in()];
        let args = [&given[..], &[du.cuda_out(), dtau.cuda_out()], &sizes].concat();
        // SAFETY: as above; `dtau` has a number for each row.
        unsafe { launch(device, &KERNELS, &kernel_of("feature_map_backward", u.dtype()), by_warps(rows), &args) };
        (du, dtau.sum_to(&[u.dim(2)]).cast(u.dtype()))
    }
}

/// Rows from `first` on; the head of a row is its number modulo H.
struct Map<'a, E> {
    map: FeatureMap,
    first: usize,
    width: usize,
    u: &'a [E],
    tau: &'a [E],
    y: &'a mut [E],
}

impl<E: Number> Kernel<E> for Map<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let Map { map, first, width, u, tau, y } = self;
        for (i, y) in y.chunks_exact_mut(map.width(width)).enumerate() {
            let row = first + i;
            let (u, tau) = (&u[row * width..][..width], tau[row % tau.len()]);
            let f = Factors::new(map, width, tau);
            match map {
                FeatureMap::Hyperbolic => {
                    let (root, shift) = (L::splat(f.root), L::splat(f.log));
                    let (plus, minus) = y.split_at_mut(width);
                    for ((u, plus), minus) in u.chunks(L::N).zip(plus.chunks_mut(L::N)).zip(minus.chunks_mut(L::N)) {
                        let s = L::load_partial(u, E::ZERO) * root;
                        (s + shift).exp().store_partial(plus);
                        (shift - s).exp().store_partial(minus);
                    }
                }
                FeatureMap::Elu1 => {
                    let (zero, one, factor) = (L::splat(E::ZERO), L::splat(E::ONE), L::splat(f.log.exp()));
                    for (u, y) in u.chunks(L::N).zip(y.chunks_mut(L::N)) {
                        let u = L::load_partial(u, E::ZERO);
                        (factor * L::select(u.gt(zero), u + one, u.min(zero).exp())).store_partial(y);
                    }
                }
                FeatureMap::Taylor2 => {
                    let factor = f.log.exp();
                    y[0] = factor;
                    let (linear, mut square) = y[1..].split_at_mut(width);
                    for (a, y) in linear.iter_mut().enumerate() {
                        *y = factor * f.root * u[a];
                        let (here, rest) = square.split_at_mut(width - a);
                        let scaled = factor * tau * u[a];
                        here[0] = scaled * u[a] * f.diagonal;
                        here[1..].iter_mut().zip(&u[a + 1..]).for_each(|(y, &u)| *y = scaled * u);
                        square = rest;
                    }
                }
            }
        }
    }
}

/// What depends on `tau` alone: `sqrt(tau)`, the logarithm of the common factor, and `1/sqrt(2)`.
struct Factors<E> {
    root: E,
    log: E,
    diagonal: E,
}

impl<E: Number> Factors<E> {
    #[inline(always)]
    fn new(map: FeatureMap, width: usize, tau: E) -> Factors<E> {
        let terms = match map {
            FeatureMap::Hyperbolic => 2 * width,
            FeatureMap::Elu1 => width,
            FeatureMap::Taylor2 => 1,
        };
        let spread = <E as Real>::from_f64((terms.max(1) as f64).ln());
        let root = tau.sqrt();
        Factors {
            root,
            log: -E::HALF * (tau + spread),
            diagonal: <E as Real>::from_f64(std::f64::consts::FRAC_1_SQRT_2),
        }
    }
}

fn gradients<E: Number>(saved: &FeatureMapBackward, dout: &Tensor) -> (Tensor, Tensor) {
    let (x, heads, width) = (&saved.x, saved.x.dim(2), saved.x.dim(3));
    let u = unit_rows::<E>(x, None);
    if x.cuda().is_some() {
        let (du, dtau) = cuda::backward(saved, &u, dout);
        return (unit_rows_backward::<E>(x, du, None).0, dtau);
    }
    let tau = saved.tau.as_slice::<E>();
    let mut du = Tensor::zeros(E::DTYPE, x.shape());
    let mut total = vec![0f64; heads];
    if !du.is_empty() {
        let mut sums = vec![0f64; heads * (x.dim(0) * x.dim(1)).div_ceil(POSITIONS)];
        let piece = POSITIONS * heads * width;
        let (u, y, dy) = (u.as_slice::<E>(), saved.y.as_slice::<E>(), dout.as_slice::<E>());
        let map = saved.map;
        threads::parallel_chunks2_mut((du.as_mut_slice::<E>(), piece), (&mut sums, heads), 8 * piece, |i, du, sums| {
            E::dispatch(MapBackward { map, first: i * POSITIONS * heads, width, u, tau, y, dy, du, sums });
        });
        for part in sums.chunks_exact(heads) {
            total.iter_mut().zip(part).for_each(|(t, &x)| *t += x);
        }
    }
    (unit_rows_backward::<E>(x, du, None).0, Tensor::from_slice(&total, &[heads]).cast(E::DTYPE))
}

struct MapBackward<'a, E> {
    map: FeatureMap,
    first: usize,
    width: usize,
    u: &'a [E],
    tau: &'a [E],
    y: &'a [E],
    dy: &'a [E],
    du: &'a mut [E],
    /// Per head, the gradient of `tau`.
    sums: &'a mut [f64],
}

impl<E: Number> Kernel<E> for MapBackward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let MapBackward { map, first, width, u, tau, y, dy, du, sums } = self;
        let features = map.width(width);
        sums.fill(0.0);
        for (i, du) in du.chunks_exact_mut(width).enumerate() {
            let row = first + i;
            let (u, head) = (&u[row * width..][..width], row % tau.len());
            let (y, dy) = (&y[row * features..][..features], &dy[row * features..][..features]);
            let tau = tau[head];
            let f = Factors::new(map, width, tau);
            let mut whole = L::splat(E::ZERO);
            for (y, dy) in y.chunks(L::N).zip(dy.chunks(L::N)) {
                whole = L::load_partial(y, E::ZERO).mul_add(L::load_partial(dy, E::ZERO), whole);
            }
            let mut dtau = -0.5 * Real::to_f64(whole.reduce_sum());
            match map {
                FeatureMap::Hyperbolic => {
                    let mut along = E::ZERO;
                    for a in 0..width {
                        let slope = y[a] * dy[a] - y[width + a] * dy[width + a];
                        along += u[a] * slope;
                        du[a] = f.root * slope;
                    }
                    dtau += Real::to_f64(along) / (2.0 * Real::to_f64(f.root));
                }
                FeatureMap::Elu1 => {
                    let factor = f.log.exp();
                    for a in 0..width {
                        // Below 0 the derivative of exp is the feature itself.
                        du[a] = dy[a] * if u[a] > E::ZERO { factor } else { y[a] };
                    }
                }
                FeatureMap::Taylor2 => {
                    let factor = f.log.exp();
                    let (linear, mut square) = dy[1..].split_at(width);
                    let (mut along, mut pairs) = (E::ZERO, E::ZERO);
                    for a in 0..width {
                        let (here, rest) = square.split_at(width - a);
                        let diagonal = here[0] * f.diagonal * u[a];
                        along += linear[a] * u[a];
                        pairs += diagonal * u[a];
                        let mut sum = f.root * linear[a] + tau * (diagonal + diagonal);
                        for (b, &dy) in (a + 1..width).zip(&here[1..]) {
                            sum += tau * dy * u[b];
                            du[b] += factor * tau * dy * u[a];
                            pairs += dy * u[a] * u[b];
                        }
                        du[a] += factor * sum;
                        square = rest;
                    }
                    let (along, pairs) = (Real::to_f64(along), Real::to_f64(pairs));
                    dtau += Real::to_f64(factor) * (along / (2.0 * Real::to_f64(f.root)) + pairs);
                }
            }
            sums[head] += dtau;
        }
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    FeatureMap::ALL
        .into_iter()
        .map(|map| {
            OpCase::new("feature_map", map.name(), &[("x", &[2, 3, 2, 4]), ("tau", &[2])], move |_, v| {
                feature_map(&v[0], &v[1], map)
            })
            .map_input(0, |x| x + 0.5_f64.copysign(x)) // normalising is singular at 0, elu has an edge there
            .map_input(1, f64::exp)
        })
        .collect()
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let (b, t, h, k) = (16, 256, 4, 32);
    vec![BenchCase {
        name: "feature_map",
        inputs: vec![("x", vec![b, t, h, k]), ("tau", vec![h])],
        forward: Box::new(|_, v| feature_map(&v[0], &v[1], FeatureMap::Hyperbolic)),
        bytes: 4 * b * t * h * 3 * k,
        flops: b * t * h * 24 * k,
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Chain, difference};
    use kumiki_tensor::Rng;
    use proptest::prelude::*;

    fn unit(x: &[f64]) -> Vec<f64> {
        let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-12).sqrt();
        x.iter().map(|x| x / norm).collect()
    }

    fn naive(map: FeatureMap, width: usize, x: &[f64], tau: &[f64]) -> Vec<f64> {
        let mut y = vec![];
        for (row, x) in x.chunks(width).enumerate() {
            let (u, tau) = (unit(x), tau[row % tau.len()]);
            let factor = (-tau / 2.0).exp();
            match map {
                FeatureMap::Hyperbolic => {
                    let factor = factor / (2.0 * width as f64).sqrt();
                    y.extend(u.iter().map(|u| factor * (tau.sqrt() * u).exp()));
                    y.extend(u.iter().map(|u| factor * (-tau.sqrt() * u).exp()));
                }
                FeatureMap::Elu1 => {
                    let factor = factor / (width as f64).sqrt();
                    y.extend(u.iter().map(|&u| factor * (if u > 0.0 { u + 1.0 } else { u.exp() })));
                }
                FeatureMap::Taylor2 => {
                    y.push(factor);
                    y.extend(u.iter().map(|u| factor * tau.sqrt() * u));
                    for a in 0..width {
                        for b in a..width {
                            let c = if a == b { tau / 2f64.sqrt() } else { tau };
                            y.push(factor * c * u[a] * u[b]);
                        }
                    }
                }
            }
        }
        y
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn passes_the_chain((b, t, h, k) in (1usize..3, 1usize..6, 1usize..4, 2usize..20), map in 0usize..3,
                            seed in any::<u64>()) {
            let map = FeatureMap::ALL[map];
            Chain::new("feature_map", seed, &[("x", &[b, t, h, k]), ("tau", &[h])])
                .map_input(0, |x| x + 0.5_f64.copysign(x))
                .map_input(1, |x| (0.5 * x + 1.0).exp())
                .run(|_, v| feature_map(&v[0], &v[1], map), |v| naive(map, k, &v[0], &v[1]));
        }
    }

    /// Products of features against the kernels that the features are made for.
    #[test]
    fn products_are_the_kernels() {
        let (k, tau) = (5, 3.0);
        let x = Rng::new(1).normal(DType::F64, &[1, 2, 1, k], 0.0, 1.0);
        let (a, b) = (unit(&x.to_f64_vec()[..k]), unit(&x.to_f64_vec()[k..]));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let sum = |f: &dyn Fn(f64, f64) -> f64| a.iter().zip(&b).map(|(&a, &b)| f(a, b)).sum::<f64>();
        let s = tau * dot(&a, &b);
        for (map, expected) in [
            (FeatureMap::Hyperbolic, sum(&|a, b| (tau.sqrt() * (a + b)).cosh()) / k as f64),
            (FeatureMap::Taylor2, 1.0 + s + s * s / 2.0),
        ] {
            let tau_var = Var::constant(Tensor::full(DType::F64, &[1], tau));
            let y = feature_map(&Var::constant(x.clone()), &tau_var, map).into_value().to_f64_vec();
            let m = map.width(k);
            assert_eq!(y.len(), 2 * m);
            assert_eq!(difference(&[dot(&y[..m], &y[m..])], &[(-tau).exp() * expected], 1e-13), None);
        }
    }

    #[test]
    fn zero_vectors_and_large_tau_stay_finite() {
        for map in FeatureMap::ALL {
            for tau in [1e-6, 8.0, 90.0] {
                let tape = kumiki_autograd::Tape::new();
                let x = tape.leaf(Tensor::zeros(DType::F32, &[1, 2, 1, 4]));
                let tau = tape.leaf(Tensor::full(DType::F32, &[1], tau));
                let y = feature_map(&x, &tau, map);
                let grads = tape.backward_from(&[(&y, Tensor::ones(DType::F32, y.shape()))]);
                let all = [y.value().clone(), grads.get(&x).unwrap().clone(), grads.get(&tau).unwrap().clone()];
                assert!(all.iter().all(|x| x.to_f64_vec().iter().all(|x| x.is_finite())), "{map:?}");
            }
        }
    }

    #[test]
    fn names_are_read_back() {
        for map in FeatureMap::ALL {
            assert_eq!(map.name().parse(), Ok(map));
        }
        assert!("relu".parse::<FeatureMap>().unwrap_err().contains("hyperbolic, elu1 and taylor2"));
    }
}
