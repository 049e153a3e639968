//! Every level that this CPU has, against plain loops in f64.

use proptest::prelude::*;

use super::*;
use crate::simd::with_level;

/// A matrix with room around and between its elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    offset: usize,
    row_stride: usize,
    col_stride: usize,
}

/// 0 row-major, 1 transposed, 2 with gaps, 3 transposed with gaps, 4 both strides spread, 5 and 6 one stride 0, 7 both.
pub(super) fn layout(kind: usize, rows: usize, cols: usize) -> Layout {
    let (offset, row_stride, col_stride) = match kind {
        0 => (0, cols, 1),
        1 => (0, 1, rows),
        2 => (3, cols + 5, 1),
        3 => (1, 1, rows + 3),
        4 => (2, 2 * cols + 1, 2),
        5 => (0, 0, 1),
        6 => (0, 1, 0),
        _ => (4, 0, 0),
    };
    Layout { offset, row_stride, col_stride }
}

impl Layout {
    pub(super) fn at(self, i: usize, j: usize) -> usize {
        self.offset + i * self.row_stride + j * self.col_stride
    }
    pub(super) fn len(self, rows: usize, cols: usize) -> usize {
        if rows == 0 || cols == 0 { 0 } else { self.at(rows - 1, cols - 1) + 1 }
    }
    pub(super) fn read<E>(self, data: &[E], rows: usize, cols: usize) -> MatRef<'_, E> {
        let Self { offset, row_stride, col_stride } = self;
        MatRef { data, offset, rows, cols, row_stride, col_stride }
    }
    pub(super) fn write<E>(self, data: &mut [E], rows: usize, cols: usize) -> MatMut<'_, E> {
        let Self { offset, row_stride, col_stride } = self;
        MatMut { data, offset, rows, cols, row_stride, col_stride }
    }
}

/// Numbers in [-1, 1) that no two places share.
pub(super) fn noise<E: Real>(len: usize, seed: u64) -> Vec<E> {
    (0..len as u64)
        .map(|i| {
            let mut x = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed.wrapping_mul(0xd1b5_4a32_d192_ed03);
            x = (x ^ (x >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            E::from_f64((x >> 40) as f64 / f64::from(1 << 23) - 1.0)
        })
        .collect()
}

#[derive(Clone, Debug)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    kinds: [usize; 3],
    alpha: f64,
    beta: f64,
}

fn check<E: Real>(case: &Case) {
    let &Case { m, n, k, kinds, alpha, beta } = case;
    let (la, lb, lc) = (layout(kinds[0], m, k), layout(kinds[1], k, n), layout(kinds[2], m, n));
    let a = noise::<E>(la.len(m, k), 1);
    let b = noise::<E>(lb.len(k, n), 2);
    let before: Vec<E> = if beta == 0.0 { vec![E::NAN; lc.len(m, n)] } else { noise(lc.len(m, n), 3) };
    for level in Level::available() {
        let run = |threads: usize, serial: bool| -> Vec<E> {
            threads::with_threads(threads, || {
                with_level(level, || {
                    let mut c = before.clone();
                    let (a, b, c_view) = (la.read(&a, m, k), lb.read(&b, k, n), lc.write(&mut c, m, n));
                    let product = if serial { gemm_serial::<E> } else { gemm::<E> };
                    product(E::from_f64(alpha), a, b, E::from_f64(beta), c_view);
                    c
                })
            })
        };
        let c = run(1, true);
        for threads in [1, 2, 8] {
            let other = run(threads, false);
            let same = c.iter().zip(&other).all(|(x, y)| x == y || (x.is_nan() && y.is_nan()));
            assert!(same, "{threads} threads differ from serial: {case:?} at {level:?}");
        }
        let mut inside = vec![false; c.len()];
        for i in 0..m {
            for j in 0..n {
                // The rounding errors of the reference's own sum are carried along: they would count in f64.
                let (mut want, mut lost, mut size) = (0.0, 0.0, 1e-30);
                for p in 0..k {
                    let term = alpha * a[la.at(i, p)].to_f64() * b[lb.at(p, j)].to_f64();
                    let sum: f64 = want + term;
                    let part = sum - want;
                    lost += (want - (sum - part)) + (term - part);
                    want = sum;
                    size += term.abs();
                }
                want += lost;
                let place = lc.at(i, j);
                if beta != 0.0 {
                    want += beta * before[place].to_f64();
                    size += (beta * before[place].to_f64()).abs();
                }
                inside[place] = true;
                let error = (c[place].to_f64() - want).abs() / size;
                // Half an epsilon per rounding at most, about sqrt(k) of them where terms differ: equal terms (stride 0
                // along k) are rounded the same way again and again.
                let equal = la.col_stride == 0 && lb.row_stride == 0;
                let roundings = if equal { k as f64 } else { 4.0 * (k as f64).sqrt() };
                let limit = E::EPSILON.to_f64() * (4.0 + 0.5 * roundings);
                assert!(error <= limit, "C[{i}, {j}] = {}, not {want}: {case:?} at {level:?}", c[place]);
            }
        }
        for (i, inside) in inside.iter().enumerate() {
            let same = c[i] == before[i] || (c[i].is_nan() && before[i].is_nan());
            assert!(*inside || same, "element {i} outside C changed: {case:?} at {level:?}");
        }
    }
}

fn case() -> impl Strategy<Value = Case> {
    let extent = || {
        prop_oneof![
            4 => 0usize..20,
            2 => prop::sample::select(vec![1, 5, 6, 7, 8, 11, 12, 13, 15, 16, 17, 31, 32, 33]),
            1 => 60usize..140,
        ]
    };
    let depth = prop_oneof![4 => extent(), 1 => prop::sample::select(vec![255, 256, 257, 511, 513])];
    let factor = || prop_oneof![Just(0.0), Just(1.0), Just(-1.0), Just(0.37)];
    let kinds = (0usize..8, 0usize..8, 0usize..5);
    (extent(), extent(), depth, kinds, factor(), factor()).prop_map(|(m, n, k, (a, b, c), alpha, beta)| Case {
        m,
        n,
        k,
        kinds: [a, b, c],
        alpha,
        beta,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn products_agree_with_plain_loops(case in case()) {
        check::<f32>(&case);
        check::<f64>(&case);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// As large as products in three parts are (`bf16`).
    #[test]
    fn larger_products_agree_with_plain_loops(
        m in 48usize..140, n in 48usize..140,
        k in prop_oneof![100usize..300, prop::sample::select(vec![128, 255, 256, 257, 384, 513])],
        kinds in (0usize..8, 0usize..8, 0usize..5), beta in prop_oneof![Just(0.0), Just(1.0)],
    ) {
        check::<f32>(&Case { m, n, k, kinds: kinds.into(), alpha: 1.0, beta });
    }
}

#[test]
fn passes_and_tiles_of_every_kind_meet() {
    for (m, n, k) in [(301, 260, 300), (64, 640, 2100), (1100, 50, 530), (50, 1100, 256), (131, 1030, 257)] {
        for kinds in [[0, 0, 0], [1, 0, 2], [0, 1, 3], [4, 3, 4], [5, 6, 1]] {
            for beta in [0.0, 1.0] {
                check::<f32>(&Case { m, n, k, kinds, alpha: 1.0, beta });
            }
        }
    }
}

/// A product of every level, of the given elements apart from noise.
fn with_special(
    m: usize,
    n: usize,
    k: usize,
    special: &[(usize, f32)],
    scale: f32,
) -> Vec<(Level, Vec<f32>, Vec<f64>)> {
    let mut a = noise::<f32>(m * k, 1);
    a.iter_mut().for_each(|x| *x *= scale);
    let mut b = noise::<f32>(k * n, 2);
    b[..n].fill(0.0);
    special.iter().for_each(|&(place, x)| a[place] = x);
    let mut want = vec![0.0; m * n];
    for i in 0..m {
        for p in 0..k {
            for j in 0..n {
                want[i * n + j] += f64::from(a[i * k + p]) * f64::from(b[p * n + j]);
            }
        }
    }
    let run = |level| {
        let mut c = vec![0.0; m * n];
        let (a, b) = (MatRef::new(&a, m, k), MatRef::new(&b, k, n));
        with_level(level, || gemm(1.0, a, b, 0.0, MatMut::new(&mut c, m, n)));
        (level, c, want.clone())
    };
    Level::available().into_iter().map(run).collect()
}

/// Infinity, NaN and the largest numbers come out as plain loops have them, on every level.
#[test]
fn infinite_numbers_stay_infinite() {
    for k in [200, 300] {
        let (m, n) = (70, 65);
        let special = [
            (k + 3, f32::INFINITY),
            (2 * k + 250 % k, f32::NEG_INFINITY),
            (3 * k, f32::INFINITY), // times zero
            (4 * k + 5, f32::NAN),
            (4 * k + 6, f32::from_bits(0x7fff_ffff)),
            (5 * k + 5, f32::from_bits(0x7f80_0001)),
            (6 * k + 7, f32::MAX),
            (7 * k, f32::MIN), // times zero
            (8 * k + 1, 3.394e38),
            (60 * k + 9, f32::INFINITY),
        ];
        for (level, c, want) in with_special(m, n, k, &special, 1.0) {
            for (place, (&found, &want)) in c.iter().zip(&want).enumerate() {
                let context = format!("{found}, not {want}, at ({}, {}), {level}", place / n, place % n);
                if want.is_nan() || want.is_infinite() {
                    assert!(
                        found.is_nan() == want.is_nan() && (want.is_nan() || f64::from(found) == want),
                        "{context}"
                    );
                } else {
                    assert!((f64::from(found) - want).abs() <= 1e-6 * want.abs().max(k as f64), "{context}");
                }
            }
        }
    }
}

/// The smallest numbers may lose what is subnormal, and no more.
#[test]
fn small_numbers_lose_only_what_is_subnormal() {
    let (m, n, k) = (64, 64, 256);
    for scale in [1e-30f32, 1e-36, 1e-38, 1e-42] {
        for (level, c, want) in with_special(m, n, k, &[], scale) {
            let room = k as f64 * (6.0 * f64::from(f32::MIN_POSITIVE) + f64::from(scale) * 1e-7);
            for (&found, &want) in c.iter().zip(&want) {
                assert!((f64::from(found) - want).abs() <= room, "{found}, not {want}, of {scale} on {level}");
            }
        }
    }
}

#[test]
fn blocks_of_every_kind_meet() {
    // Several row tiles, column tiles, chunks of k; then one row, one column.
    for (m, n, k) in [(301, 260, 300), (64, 40, 2100), (1, 1100, 70), (1030, 1, 67), (3, 700, 300), (700, 3, 300)] {
        for kinds in [[0, 0, 0], [1, 0, 2], [0, 1, 3], [4, 3, 4], [5, 6, 1]] {
            let case = Case { m, n, k, kinds, alpha: 0.5, beta: 0.0 };
            check::<f32>(&case);
            check::<f64>(&Case { beta: 0.25, ..case });
        }
    }
}

/// B has more columns and rows than one chunk; factored, so that the right values are cheap.
#[test]
fn chunks_of_b_meet() {
    let (m, n, k) = (50, 1100, 2061);
    let a: Vec<f32> = (0..m * k).map(|i| (i % 7) as f32 - 3.0).collect();
    let b: Vec<f32> = (0..k * n).map(|i| (i / n % 3 * (i % n % 5)) as f32).collect();
    let mut c = vec![f32::NAN; m * n];
    gemm(1.0, MatRef::new(&a, m, k), MatRef::new(&b, k, n), 0.0, MatMut::new(&mut c, m, n));
    for i in 0..m {
        let row: f32 = (0..k).map(|p| a[i * k + p] * (p % 3) as f32).sum();
        for j in 0..n {
            assert_eq!(c[i * n + j], row * (j % 5) as f32, "[{i}, {j}]");
        }
    }
}

/// Independent of the loops above: integers that f32 holds exactly.
#[test]
fn case_09_beta_zero_overwrites_nan() {
    for (m, n, k) in [(2, 3, 4), (67, 45, 33), (131, 97, 50), (1, 33, 9), (33, 1, 9)] {
        let a: Vec<f32> = (0..m * k).map(|i| (i % 5) as f32).collect();
        let b: Vec<f32> = (0..k * n).map(|i| (i % 3) as f32).collect();
        let mut c = vec![f32::NAN; m * n];
        gemm(1.0, MatRef::new(&a, m, k), MatRef::new(&b, k, n), 0.0, MatMut::new(&mut c, m, n));
        for i in 0..m {
            for j in 0..n {
                let want: f32 = (0..k).map(|p| a[i * k + p] * b[p * n + j]).sum();
                assert_eq!(c[i * n + j], want);
            }
        }
    }
}

#[test]
fn case_02_an_expanded_batch_is_read_in_place() {
    let ones = vec![1.0f32; 32 * 32];
    let mut c = vec![f32::NAN; 32 * 32 * 32];
    let axis = BatchAxis { size: 32, a_stride: 0, b_stride: 0, c_stride: 32 * 32 };
    let view = MatRef::new(&ones, 32, 32);
    gemm_batched(1.0, view, view, 0.0, MatMut::new(&mut c, 32, 32), &[axis]);
    assert!(c.iter().all(|&x| x == 32.0));
}

/// `[B, T, H, K]` operands, heads interleaved, few and many items, small and large products.
#[test]
fn batches_are_products_one_by_one() {
    for (batch, time, heads, width) in [(2, 7, 3, 5), (5, 33, 4, 16), (1, 300, 2, 64), (3, 0, 2, 4)] {
        let row = heads * width;
        let q = noise::<f64>(batch * time * row, 5);
        let k = noise::<f64>(time * row, 6);
        let view = |data, rows, row_stride| MatRef { data, offset: 0, rows, cols: width, row_stride, col_stride: 1 };
        let mut scores = vec![f64::NAN; batch * heads * time * time];
        let axes = [
            BatchAxis { size: batch, a_stride: time * row, b_stride: 0, c_stride: heads * time * time },
            BatchAxis { size: heads, a_stride: width, b_stride: width, c_stride: time * time },
        ];
        let run = |threads: usize, scores: &mut [f64]| {
            threads::with_threads(threads, || {
                let c = MatMut::new(scores, time, time);
                gemm_batched(1.0, view(&q, time, row), view(&k, time, row).t(), 0.0, c, &axes);
            });
        };
        run(1, &mut scores);
        let mut again = vec![f64::NAN; scores.len()];
        run(8, &mut again);
        assert_eq!(scores, again);
        for (index, &got) in scores.iter().enumerate() {
            let (j, i) = (index % time, index / time % time);
            let (h, b) = (index / time / time % heads, index / time / time / heads);
            let at = |data: &[f64], b: usize, t: usize, x: usize| data[(b * time + t) * row + h * width + x];
            let want: f64 = (0..width).map(|x| at(&q, b, i, x) * at(&k, 0, j, x)).sum();
            assert!((got - want).abs() < 1e-13, "[{b}, {h}, {i}, {j}]: {got}, not {want}");
        }
    }
}

fn panics_with(part: &str, f: impl FnOnce() + std::panic::UnwindSafe) {
    let message = *std::panic::catch_unwind(f).unwrap_err().downcast::<String>().unwrap();
    assert!(message.contains(part), "{message}");
}

#[test]
fn misuse_is_refused_before_anything_is_read() {
    let data = [1.0f32; 12];
    let a = MatRef::new(&data, 3, 4);
    panics_with("A [3, 4], B [3, 4], C [3, 4]", || {
        gemm(1.0, a, a, 0.0, MatMut::new(&mut [0.0; 12], 3, 4));
    });
    panics_with("A reaches element 15 of 12", || {
        let long = MatRef { offset: 4, ..a };
        gemm(1.0, long, a.t(), 0.0, MatMut::new(&mut [0.0; 9], 3, 3));
    });
    panics_with("C reaches element 8 of 8", || gemm(1.0, a, a.t(), 0.0, MatMut::new(&mut [0.0; 8], 3, 3)));
    panics_with("B reaches past the address space", || {
        let far = MatRef { row_stride: usize::MAX / 2, ..a.t() };
        gemm(1.0, a, far, 0.0, MatMut::new(&mut [0.0; 9], 3, 3));
    });
    panics_with("elements of C overlap", || {
        let mut c = [0.0; 9];
        let c = MatMut { row_stride: 2, ..MatMut::new(&mut c, 3, 3) };
        gemm(1.0, a, a.t(), 0.0, c);
    });
    panics_with("elements of C overlap", || {
        let axis = BatchAxis { size: 2, a_stride: 0, b_stride: 0, c_stride: 0 };
        gemm_batched(1.0, a, a.t(), 0.0, MatMut::new(&mut [0.0; 9], 3, 3), &[axis]);
    });
}
