//! Every way of this CPU against sums of the rounded numbers in f64.

use kumiki_tensor::{bf16, threads};
use proptest::prelude::*;

use super::super::tests::{layout, noise};
use super::*;
use crate::simd::with_level;

#[derive(Clone, Debug)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    kinds: [usize; 3],
    narrow: [bool; 3],
    accumulate: bool,
}

fn check(case: &Case) {
    let &Case { m, n, k, kinds, narrow, accumulate } = case;
    let (la, lb, lc) = (layout(kinds[0], m, k), layout(kinds[1], k, n), layout(kinds[2], m, n));
    let (a, b) = (noise::<f32>(la.len(m, k), 1), noise::<f32>(lb.len(k, n), 2));
    let before = if accumulate { noise(lc.len(m, n), 3) } else { vec![f32::NAN; lc.len(m, n)] };
    let halves = |x: &[f32]| x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>();
    let (a16, b16, before16) = (halves(&a), halves(&b), halves(&before));
    for level in Level::available() {
        let run = |count: usize| -> Vec<f32> {
            threads::with_threads(count, || {
                with_level(level, || {
                    let wide = (Operand::F32(la.read(&a, m, k)), Operand::F32(lb.read(&b, k, n)));
                    let half = (Operand::BF16(la.read(&a16, m, k)), Operand::BF16(lb.read(&b16, k, n)));
                    let a = if narrow[0] { half.0 } else { wide.0 };
                    let b = if narrow[1] { half.1 } else { wide.1 };
                    if narrow[2] {
                        let mut c = before16.clone();
                        gemm_bf16(a, b, Output::BF16(lc.write(&mut c, m, n)), accumulate);
                        c.into_iter().map(bf16::to_f32).collect()
                    } else {
                        let mut c = before.clone();
                        gemm_bf16(a, b, Output::F32(lc.write(&mut c, m, n)), accumulate);
                        c
                    }
                })
            })
        };
        let c = run(1);
        for count in [2, 8] {
            let other = run(count);
            assert!(c.iter().zip(&other).all(|(x, y)| x == y || (x.is_nan() && y.is_nan())), "{count}: {case:?}");
        }
        let mut inside = vec![false; c.len()];
        for i in 0..m {
            for j in 0..n {
                let (mut want, mut size) = (0.0, 1e-30);
                for p in 0..k {
                    let term = a16[la.at(i, p)].to_f64() * b16[lb.at(p, j)].to_f64();
                    want += term;
                    size += term.abs();
                }
                let place = lc.at(i, j);
                if accumulate {
                    let old = if narrow[2] { before16[place].to_f64() } else { f64::from(before[place]) };
                    want += old;
                    size += old.abs();
                }
                inside[place] = true;
                // Half a unit of F32 for every term that is added, and of BF16 for the last rounding.
                let mut room = size * (k + 1) as f64 * f64::from(f32::EPSILON) / 2.0;
                if narrow[2] {
                    room += want.abs() / 256.0 + room / 256.0;
                }
                let found = f64::from(c[place]);
                assert!((found - want).abs() <= room, "({i}, {j}): {found}, not {want} ± {room}: {case:?} at {level}");
            }
        }
        for (place, inside) in inside.into_iter().enumerate() {
            let old = if narrow[2] { before16[place].to_f32() } else { before[place] };
            assert!(
                inside || c[place] == old || old.is_nan() && c[place].is_nan(),
                "{place} is no part of C: {case:?}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn equals_sums_of_rounded_numbers(
        m in prop_oneof![0usize..70, Just(16), Just(31), Just(32), Just(33)],
        n in prop_oneof![0usize..70, Just(16), Just(31), Just(32), Just(33)],
        k in prop_oneof![0usize..100, Just(31), Just(32), Just(33), 500usize..530],
        kinds in (0usize..5, 0usize..5, 0usize..5),
        narrow in any::<[bool; 3]>(), accumulate in any::<bool>(),
    ) {
        check(&Case { m, n, k, kinds: kinds.into(), narrow, accumulate });
    }
}

#[test]
fn tiles_and_passes_and_chunks_meet() {
    let case = |m, n, k, kinds, narrow, accumulate| check(&Case { m, n, k, kinds, narrow, accumulate });
    case(129, 513, 64, [0, 1, 0], [true, false, true], false);
    case(160, 70, 1100, [1, 0, 0], [true; 3], true);
    case(300, 40, 4000, [0, 0, 0], [false; 3], false); // an A that tiles pack themselves
    case(80, 150, 16_384, [0, 1, 1], [false, true, true], false); // two chunks of B
    case(300, 600, 300, [1, 0, 0], [false, true, false], true); // an A that is packed once
    case(3, 1100, 2048, [0, 1, 1], [false, true, true], false); // wide, as the transposed of what is high
    case(70, 300, 700, [1, 0, 0], [true; 3], true);
    case(33, 100, 300, [0, 0, 2], [false; 3], true);
    case(1, 700, 600, [0, 1, 0], [true; 3], false);
    case(700, 1, 600, [0, 1, 0], [true; 3], false);
}

#[test]
#[should_panic(expected = "gemm_bf16: shapes do not fit: A [2, 3], B [4, 2], C [2, 2]")]
fn misfits_are_named() {
    let (x, mut c) = ([0.0f32; 8], [0.0f32; 4]);
    let (a, b) = (MatRef::new(&x, 2, 3), MatRef::new(&x, 4, 2));
    gemm_bf16(Operand::F32(a), Operand::F32(b), Output::F32(MatMut::new(&mut c, 2, 2)), false);
}

#[test]
#[should_panic(expected = "gemm: C reaches element 5 of 4")]
fn a_matrix_outside_its_slice_is_named() {
    let (x, mut c) = ([0.0f32; 8], [0.0f32; 4]);
    let (a, b) = (MatRef::new(&x, 3, 2), MatRef::new(&x, 2, 2));
    gemm_bf16(Operand::F32(a), Operand::F32(b), Output::F32(MatMut::new(&mut c, 3, 2)), false);
}
