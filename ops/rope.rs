//! `rope`: rotary position embedding with half-split pairs.
//!
//! Forward: in `[B, T, H, K]` the pair `(i, i + K/2)` of every head is rotated by `θ = position · base^(-2i/K)`:
//! `y_i = x_i cos θ - x_{i+K/2} sin θ`, `y_{i+K/2} = x_i sin θ + x_{i+K/2} cos θ`. Scores between rotated vectors depend
//! on the difference of their positions only. Backward: the rotation by `-θ`, which is the one for minus the position.
//! Saved: the positions; a rotation does not depend on x. Cost: one read and one write of memory.
//! Cosines and sines are computed in f64, rounded, and kept in one table for each (K, base, dtype), which grows to the
//! furthest position met; positions so far out that the table would be large get one of their own for the call.
//! Source: Su et al., RoFormer, 2021; half-split pairs as in GPT-NeoX.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::cuda::Source;
use kumiki_tensor::{DType, Tensor, dispatch_real, kernels, threads};

use crate::cast::widened;
use crate::registry::{BenchCase, OpCase};
use crate::rows::{Formula, pass};
use crate::simd::{Kernel, Lanes, Real};

/// x `[B, T, H, K]` with row t rotated to position `start + t`.
///
/// # Panics
/// When x has not four axes, K is odd, or base is not positive.
#[track_caller]
pub fn rope(x: &Var, base: f64, start: usize) -> Var {
    check(x, base);
    let start = i64::try_from(start).expect("rope: start is beyond i64");
    rotated(x, base, (0..x.dim(1) as i64).map(|t| start + t).collect())
}

/// x `[B, T, H, K]` with row t rotated to position `positions[t]`; negative positions rotate backwards.
///
/// # Panics
/// When there are not T positions, and as [`rope`].
#[track_caller]
pub fn rope_at(x: &Var, base: f64, positions: &[i64]) -> Var {
    check(x, base);
    assert!(
        positions.len() == x.dim(1),
        "rope_at: {} positions for T={} (x: {:?})",
        positions.len(),
        x.dim(1),
        x.shape()
    );
    rotated(x, base, positions.to_vec())
}

#[track_caller]
fn check(x: &Var, base: f64) {
    assert!(
        x.rank() == 4 && x.dtype().is_float(),
        "rope: x must be float [B, T, H, K], got {} {:?}",
        x.dtype(),
        x.shape()
    );
    assert!(x.dim(3).is_multiple_of(2), "rope: K={} is odd, but K must be pairs (x: {:?})", x.dim(3), x.shape());
    assert!(base > 0.0 && base.is_finite(), "rope: base must be a positive number, got {base}");
}

fn rotated(x: &Var, base: f64, positions: Vec<i64>) -> Var {
    if x.dtype() == DType::BF16 {
        return widened(&[x], |v| rotated(&v[0], base, positions));
    }
    let mut y = x.value().new_empty(x.dtype(), x.shape());
    rotate(&mut y, Some(&x.value().contiguous()), base, &positions);
    Var::from_op(y, &[x], || RopeBackward { base, positions })
}

struct RopeBackward {
    base: f64,
    positions: Vec<i64>,
}

impl Backward for RopeBackward {
    fn name(&self) -> &'static str {
        "rope"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        let back: Vec<i64> = self.positions.iter().map(|p| -p).collect();
        let mut dx = dout; // rotated in place unless somebody else holds it
        rotate(&mut dx, None, self.base, &back);
        vec![Some(dx)]
    }
}

/// The most elements that a table is allowed to keep: 2^15 positions of K = 128.
const TABLE_LIMIT: usize = 1 << 22;

type Tables = HashMap<(usize, u64, DType), Tensor>;
static TABLES: LazyLock<Mutex<Tables>> = LazyLock::new(Mutex::default);

/// Rows of K: the cosines of all pairs, then their sines. On the calling thread: the caller may hold the lock of the
/// tables, and a pool's thread that waits for others may be handed work that wants the same lock.
fn angles(k: usize, base: f64, dtype: DType, rows: usize, position: impl Fn(usize) -> f64) -> Tensor {
    let half = k / 2;
    let frequencies: Vec<f64> = (0..half).map(|i| base.powf(-2.0 * i as f64 / k as f64)).collect();
    let mut table = Tensor::empty(dtype, &[rows, k]);
    dispatch_real!("rope", dtype, E => {
        for (r, row) in table.as_mut_slice::<E>().chunks_exact_mut(k).enumerate() {
            for (i, frequency) in frequencies.iter().enumerate() {
                let (sin, cos) = (position(r) * frequency).sin_cos();
                (row[i], row[half + i]) = (Real::from_f64(cos), Real::from_f64(sin));
            }
        }
    });
    table
}

/// Table and, for each position, the row in it; the sign of the position is left to the caller.
fn table(k: usize, base: f64, dtype: DType, positions: &[i64]) -> (Tensor, Vec<usize>) {
    let furthest = positions.iter().map(|p| p.unsigned_abs()).max().unwrap_or(0);
    let limit = TABLE_LIMIT / k;
    if furthest >= limit as u64 {
        let own = angles(k, base, dtype, positions.len(), |r| positions[r].unsigned_abs() as f64);
        return (own, (0..positions.len()).collect());
    }
    let needed = furthest as usize + 1;
    // A panic elsewhere while the lock was held cannot have left half a table: entries are replaced whole.
    let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
    let known = tables.entry((k, base.to_bits(), dtype)).or_insert_with(|| Tensor::empty(dtype, &[0, k]));
    if known.dim(0) < needed {
        *known = angles(k, base, dtype, needed.next_power_of_two().max(256).min(limit.max(needed)), |r| r as f64);
    }
    (known.clone(), positions.iter().map(|p| p.unsigned_abs() as usize).collect())
}

pub(crate) static KERNELS: Source = Source {
    file: "rope.cu",
    text: include_str!("rope.cu"),
    headers: &[],
    kernels: kernels!["rope" of "float" "double"],
};

mod cuda {
    use super::KERNELS;
    use crate::cuda::kernel_of;
    use kumiki_tensor::cuda::{Arg, launch, over};
    use kumiki_tensor::{Device, Tensor};

    pub fn rotate(y: &mut Tensor, x: Option<&Tensor>, base: f64, positions: &[i64]) {
        y.own();
        let device = y.cuda().expect("on a CUDA device").clone();
        let [batch, time, heads, k] = *y.shape() else { unreachable!("of four axes") };
        let first = positions[0];
        let step = positions.get(1).map_or(0, |second| second - first);
        // Of a sequence, nothing need be sent.
        let regular = positions.windows(2).all(|pair| pair[1] - pair[0] == step);
        let listed = (!regular).then(|| {
            let there = Tensor::from_slice(positions, &[time]).to(&Device::Cuda(device.clone()));
            there.unwrap_or_else(|error| panic!("{error}"))
        });
        let kernel = kernel_of("rope", y.dtype());
        let to = y.cuda_out();
        // Without x it is written over.
        let from = x.map_or(to, Tensor::cuda_in);
        let mut args = vec![from, to, listed.as_ref().map_or(Arg::Null, Tensor::cuda_in)];
        args.extend([Arg::I64(first), Arg::I64(step), Arg::F64(base)]);
        args.extend([batch, time, heads, k].map(|n| Arg::I64(n as i64)));
        // SAFETY: the kernel's arguments; x has the shape of y, and a pair is read before it is written, by one thread.
        unsafe { launch(&device, &KERNELS, &kernel, over(time * k / 2), &args) };
    }
}

/// Rotates `y` in place, after filling it from `x` if there is one.
pub(crate) fn rotate(y: &mut Tensor, x: Option<&Tensor>, base: f64, positions: &[i64]) {
    if y.is_empty() {
        return;
    }
    if y.cuda().is_some() {
        return cuda::rotate(y, x, base, positions);
    }
    let (time, heads, k) = (y.dim(1), y.dim(2), y.dim(3));
    let (table, rows) = table(k, base, y.dtype(), positions);
    let width = heads * k;
    let tokens = (8 * 1024 / width).max(1);
    dispatch_real!("rope", y.dtype(), E => {
        let (x, table) = (x.map(|x| x.as_slice::<E>()), table.as_slice::<E>());
        threads::parallel_chunks_mut(y.make_mut::<E>(), tokens * width, tokens * width, |i, y| {
            let x = x.map(|x| &x[i * tokens * width..][..y.len()]);
            E::dispatch(Rotate { x, y, width, k, first: i * tokens, time, table, rows: &rows, positions });
        });
    });
}

/// Tokens from `first` on, counted through batch and time.
struct Rotate<'a, E> {
    x: Option<&'a [E]>,
    y: &'a mut [E],
    width: usize,
    k: usize,
    first: usize,
    time: usize,
    table: &'a [E],
    rows: &'a [usize],
    positions: &'a [i64],
}

impl<E: Real> Kernel<E> for Rotate<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let (k, half) = (self.k, self.k / 2);
        for (i, token) in self.y.chunks_exact_mut(self.width).enumerate() {
            if let Some(x) = self.x {
                token.copy_from_slice(&x[i * self.width..][..self.width]);
            }
            let t = (self.first + i) % self.time;
            let (cos, sin) = self.table[self.rows[t] * k..][..k].split_at(half);
            let turn = Turn(if self.positions[t] < 0 { -E::ONE } else { E::ONE });
            for head in token.chunks_exact_mut(k) {
                let (a, b) = head.split_at_mut(half);
                let [] = pass::<L, _, 2, 2, 0>(&turn, [cos, sin], [a, b]);
            }
        }
    }
}

/// The pair rotated by the angle times the sign.
struct Turn<E>(E);
impl<E: Real> Formula<E, 2, 2, 0> for Turn<E> {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [cos, sin]: [L; 2], [a, b]: [L; 2], _: &mut [L; 0]) -> [L; 2] {
        let sin = sin * L::splat(self.0);
        [a.mul_add(cos, -(b * sin)), a.mul_add(sin, b * cos)]
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let x: &[(&'static str, &[usize])] = &[("x", &[2, 3, 2, 6])];
    vec![
        OpCase::new("rope", "from 5", x, |_, v| rope(&v[0], 10000.0, 5)),
        OpCase::new("rope_at", "both signs", x, |_, v| rope_at(&v[0], 10000.0, &[7, -3, 0])),
    ]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let shape = [8, 1024, 8, 64];
    let n: usize = shape.iter().product();
    vec![BenchCase {
        name: "rope",
        inputs: vec![("x", shape.to_vec())],
        forward: Box::new(|_, v| rope(&v[0], 10000.0, 0)),
        bytes: 2 * n * 4,
        flops: 3 * n,
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Chain;
    use kumiki_tensor::Rng;
    use proptest::prelude::*;

    fn naive(x: &[f64], [time, heads, k]: [usize; 3], base: f64, positions: &[i64]) -> Vec<f64> {
        let mut y = x.to_vec();
        for (row, (x, y)) in x.chunks(k.max(1)).zip(y.chunks_mut(k.max(1))).enumerate() {
            let position = positions[row / heads % time] as f64;
            for i in 0..k / 2 {
                let angle = position * base.powf(-2.0 * i as f64 / k as f64);
                let (a, b) = (x[i], x[i + k / 2]);
                y[i] = a * angle.cos() - b * angle.sin();
                y[i + k / 2] = a * angle.sin() + b * angle.cos();
            }
        }
        y
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn the_chain_holds(seed in any::<u64>(), b in 0usize..3, t in 0usize..6, h in 0usize..4, half in 0usize..37,
                           start in 0usize..5000) {
            let k = 2 * half;
            let positions: Vec<i64> = (start..start + t).map(|p| p as i64).collect();
            Chain::new("rope", seed, &[("x", &[b, t, h, k])])
                .run(|_, v| rope(&v[0], 10000.0, start), |v| naive(&v[0], [t, h, k], 10000.0, &positions));
        }

        #[test]
        fn the_chain_holds_at_any_positions(seed in any::<u64>(), half in 1usize..20,
                                            positions in proptest::collection::vec(-3000i64..3000, 1..6)) {
            let (t, k) = (positions.len(), 2 * half);
            Chain::new("rope_at", seed, &[("x", &[2, t, 3, k])])
                .run(|_, v| rope_at(&v[0], 500.0, &positions), |v| naive(&v[0], [t, 3, k], 500.0, &positions));
        }
    }

    #[test]
    fn many_tokens_are_cut_into_tasks() {
        let mut chain = Chain::new("rope", 5, &[("x", &[3, 301, 2, 34])]);
        chain.differences = false;
        let positions: Vec<i64> = (9..310).collect();
        chain.run(|_, v| rope(&v[0], 10000.0, 9), |v| naive(&v[0], [301, 2, 34], 10000.0, &positions));
    }

    /// The score of q at one position and k at another.
    fn score(q: &Tensor, k: &Tensor, at: (i64, i64)) -> f64 {
        let turn = |x: &Tensor, p| rope_at(&Var::constant(x.clone()), 10000.0, &[p]).value().to_f64_vec();
        turn(q, at.0).iter().zip(turn(k, at.1)).map(|(a, b)| a * b).sum()
    }

    #[test]
    fn case_22_scores_depend_on_the_difference_of_positions() {
        let (q, k) = (Rng::new(1), Rng::new(2));
        let [q, k] = [q, k].map(|mut rng| rng.normal(DType::F64, &[1, 1, 1, 6], 0.0, 1.0));
        let near = score(&q, &k, (3, 1));
        assert!((near - score(&q, &k, (7, 5))).abs() < 1e-13);
        assert!((near - score(&q, &k, (-2, -4))).abs() < 1e-13);
        assert!((near - score(&q, &k, (3, 2))).abs() > 1e-3);
        // Pairs are halves, not neighbours: element 0 turns into element 3.
        let unit = Tensor::from_slice(&[1.0f64, 0., 0., 0., 0., 0.], &[1, 1, 1, 6]);
        let turned = rope(&Var::constant(unit), 10000.0, 1).value().to_f64_vec();
        assert_eq!(turned, [1f64.cos(), 0., 0., 1f64.sin(), 0., 0.]);
    }

    #[test]
    fn case_22_the_table_grows() {
        // A base of its own, so that no other test has grown this table before.
        let base = 777.0;
        let x = Rng::new(3).normal(DType::F64, &[1, 2, 1, 6], 0.0, 1.0);
        for start in [0usize, 255, 256, 70_000, TABLE_LIMIT / 6 - 2, TABLE_LIMIT / 6 - 1, 1 << 40] {
            let y = rope(&Var::constant(x.clone()), base, start).value().to_f64_vec();
            let expected = naive(&x.to_f64_vec(), [2, 1, 6], base, &[start as i64, start as i64 + 1]);
            assert!(y.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-12), "from {start}");
        }
    }

    #[test]
    fn a_table_is_shared_by_threads() {
        let run = |start: usize| {
            let x = Tensor::ones(DType::F32, &[1, 3, 2, 8]);
            rope(&Var::constant(x), 333.0, start).value().to_f64_vec()
        };
        let starts: Vec<usize> = (0..40).map(|i| i * 97 % 41 * 50).collect();
        let together: Vec<Vec<f64>> = std::thread::scope(|scope| {
            let handles: Vec<_> = starts.iter().map(|&s| scope.spawn(move || run(s))).collect();
            handles.into_iter().map(|h| h.join().unwrap()).collect()
        });
        assert_eq!(together, starts.iter().map(|&s| run(s)).collect::<Vec<_>>());
    }

    #[test]
    #[should_panic(expected = "rope: K=5 is odd, but K must be pairs (x: [1, 2, 3, 5])")]
    fn odd_widths_are_refused() {
        rope(&Var::constant(Tensor::zeros(DType::F32, &[1, 2, 3, 5])), 10000.0, 0);
    }

    #[test]
    #[should_panic(expected = "rope_at: 1 positions for T=2 (x: [1, 2, 3, 4])")]
    fn positions_are_counted() {
        rope_at(&Var::constant(Tensor::zeros(DType::F32, &[1, 2, 3, 4])), 10000.0, &[0]);
    }
}
