use super::*;
use crate::testing::{Chain, difference};
use crate::{expand, permute, transpose};
use kumiki_autograd::Tape;
use kumiki_tensor::{DType, Rng, poison_fresh_buffers, threads};
use proptest::prelude::*;

/// Plain loops over row-major matrices with leading axes; `index % size` would hide a wrong stride, so every leading axis
/// is walked by itself.
fn naive(a: &[f64], a_shape: &[usize], b: &[f64], b_shape: &[usize]) -> Vec<f64> {
    let batch = broadcast(&a_shape[..a_shape.len() - 2], &b_shape[..b_shape.len() - 2]).unwrap();
    let [m, k] = a_shape[a_shape.len() - 2..] else { unreachable!() };
    let n = b_shape[b_shape.len() - 1];
    let matrix = |shape: &[usize], index: &[usize]| {
        let own = &shape[..shape.len() - 2];
        let index = &index[index.len() - own.len()..];
        own.iter().zip(index).fold(0, |at, (&size, &i)| at * size + if size == 1 { 0 } else { i })
    };
    let mut out = vec![];
    for item in 0..batch.iter().product() {
        let (mut index, mut rest): (Vec<usize>, usize) = (vec![0; batch.len()], item);
        for axis in (0..batch.len()).rev() {
            index[axis] = rest % batch[axis];
            rest /= batch[axis];
        }
        let (a, b) = (&a[matrix(a_shape, &index) * m * k..], &b[matrix(b_shape, &index) * k * n..]);
        for i in 0..m {
            for j in 0..n {
                out.push((0..k).map(|p| a[i * k + p] * b[p * n + j]).sum());
            }
        }
    }
    out
}

fn size() -> impl Strategy<Value = usize> {
    prop_oneof![1 => Just(0usize), 2 => Just(1), 6 => 2usize..20, 1 => 31usize..34]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Every leading axis is in both operands, of size 1 in one, or missing in one.
    #[test]
    fn passes_the_chain(
        seed in any::<u64>(), (m, k, n) in (size(), size(), size()),
        axes in proptest::collection::vec((0usize..4, 0u8..4), 0..3), (cut_a, cut_b) in (0usize..3, 0usize..3),
    ) {
        let shape = |single: u8, cut: usize, rows, cols| {
            let leading = axes.iter().map(|&(size, kind)| if kind == single { 1 } else { size });
            leading.skip(cut).chain([rows, cols]).collect::<Vec<usize>>()
        };
        let cut_b = if cut_a == 0 { cut_b.min(axes.len()) } else { 0 };
        let (a, b) = (shape(1, cut_a.min(axes.len()), m, k), shape(2, cut_b, k, n));
        Chain::new("matmul", seed, &[("a", &a), ("b", &b)])
            .run(|_, v| matmul(&v[0], &v[1]), |x| naive(&x[0], &a, &x[1], &b));
    }

    /// Vectors on either side, and operands whose matrices or batch axes are transposed in memory.
    #[test]
    fn vectors_and_transposed_operands_pass_the_chain(
        seed in any::<u64>(), (m, k, n) in (size(), size(), size()), batch in 0usize..4,
    ) {
        let vectors = [("a", &[k][..]), ("b", &[k][..])];
        Chain::new("matmul", seed, &vectors)
            .run(|_, v| matmul(&v[0], &v[1]), |x| naive(&x[0], &[1, k], &x[1], &[k, 1]));
        Chain::new("matmul", seed, &[("a", &[k]), ("b", &[batch, k, n])])
            .run(|_, v| matmul(&v[0], &v[1]), |x| naive(&x[0], &[1, k], &x[1], &[batch, k, n]));
        Chain::new("matmul", seed, &[("a", &[batch, m, k]), ("b", &[k])])
            .run(|_, v| matmul(&v[0], &v[1]), |x| naive(&x[0], &[batch, m, k], &x[1], &[k, 1]));
        // The heads layout: [M, batch, K] and [N, batch, K].
        Chain::new("matmul", seed, &[("a", &[m, batch, k]), ("b", &[n, batch, k])]).run(
            |_, v| matmul(&permute(&v[0], &[1, 0, 2]), &permute(&v[1], &[1, 2, 0])),
            |x| {
                let element = |i: usize, h: usize, j: usize| {
                    (0..k).map(|p| x[0][(i * batch + h) * k + p] * x[1][(j * batch + h) * k + p]).sum()
                };
                let rows = (0..batch).flat_map(|h| (0..m).map(move |i| (h, i)));
                rows.flat_map(|(h, i)| (0..n).map(move |j| (h, i, j))).map(|(h, i, j)| element(i, h, j)).collect()
            },
        );
    }
}

#[test]
fn case_02_an_expanded_batch_is_read_by_its_stride() {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let tape = Tape::new();
        let a = tape.leaf(Tensor::ones(dtype, &[1, 32, 32]));
        let ones = [&[32, 32][..], &[1, 32, 32], &[32, 32, 32]].map(|shape| tape.leaf(Tensor::ones(dtype, shape)));
        let wide = expand(&a, &[32, 32, 32]);
        let products: Vec<Var> = ones.iter().flat_map(|b| [matmul(&wide, b), matmul(b, &wide)]).collect();
        for out in &products {
            assert_eq!(out.shape(), [32, 32, 32]);
            assert!(out.value().to_f64_vec().iter().all(|&x| x == 32.0));
        }
        let douts: Vec<(&Var, Tensor)> = products.iter().map(|out| (out, Tensor::ones(dtype, &[32, 32, 32]))).collect();
        let grads = tape.backward_from(&douts);
        // Six products, 32 matrices each, 32 terms each.
        assert!(grads.get(&a).unwrap().to_f64_vec().iter().all(|&x| x == 6.0 * 32.0 * 32.0));
        for (b, repeats) in ones.iter().zip([32.0, 32.0, 1.0]) {
            assert!(grads.get(b).unwrap().to_f64_vec().iter().all(|&x| x == 2.0 * 32.0 * repeats));
        }
    }
}

#[test]
fn case_09_results_do_not_read_what_was_in_their_buffer() {
    poison_fresh_buffers(true);
    let mut rng = Rng::new(9);
    for (m, k, n) in [(1, 1, 1), (7, 13, 9), (17, 5, 33), (65, 257, 33), (130, 300, 37), (1, 300, 131), (131, 40, 1)] {
        for dtype in [DType::F32, DType::F64] {
            for transposed in 0..4 {
                let mut operand = |rows, cols, t: bool| {
                    let shape = if t { [3, cols, rows] } else { [3, rows, cols] };
                    let x = rng.normal(dtype, &shape, 0.0, 1.0);
                    if t { x.transpose(1, 2) } else { x }
                };
                let (a, b) = (operand(m, k, transposed & 1 != 0), operand(k, n, transposed & 2 != 0));
                let dout = operand(m, n, false);
                let tape = Tape::new();
                let (a, b) = (tape.leaf(a), tape.leaf(b));
                let shared = crate::narrow(&b, 0, 1, 1);
                let (each, together) = (matmul(&a, &b), matmul(&a, &crate::squeeze(&shared, 0)));
                let grads = tape.backward_from(&[(&each, dout.clone()), (&together, dout.clone())]);
                let tolerance = if dtype == DType::F32 { 2e-5 } else { 1e-12 };
                let (av, bv, g) = (a.value().to_f64_vec(), b.value().to_f64_vec(), dout.to_f64_vec());
                let context = format!("{dtype} M={m} K={k} N={n} transposed={transposed}");
                let near = |got: &Tensor, expected: Vec<f64>| {
                    assert_eq!(difference(&got.to_f64_vec(), &expected, tolerance), None, "{context}");
                };
                near(each.value(), naive(&av, &[3, m, k], &bv, &[3, k, n]));
                near(together.value(), naive(&av, &[3, m, k], &bv[k * n..2 * k * n], &[k, n]));
                let mut da = vec![0.0; 3 * m * k];
                let mut db = vec![0.0; 3 * k * n];
                for (h, i, j) in (0..3 * m * n).map(|at| (at / (m * n), at / n % m, at % n)) {
                    for p in 0..k {
                        let g = g[(h * m + i) * n + j];
                        da[(h * m + i) * k + p] += g * (bv[(h * k + p) * n + j] + bv[(k + p) * n + j]);
                        db[(h * k + p) * n + j] += g * av[(h * m + i) * k + p];
                        db[(k + p) * n + j] += g * av[(h * m + i) * k + p];
                    }
                }
                near(grads.get(&a).unwrap(), da);
                near(grads.get(&b).unwrap(), db);
            }
        }
    }
}

#[test]
fn threads_do_not_change_the_result() {
    let shapes: [(&[usize], &[usize]); 5] = [
        (&[300, 270], &[270, 290]),
        (&[3, 111, 270], &[270, 190]),
        (&[16, 65, 70], &[16, 70, 75]),
        (&[2, 1, 90, 120], &[3, 120, 130]),
        (&[4, 70, 300], &[300]),
    ];
    for (a, b) in shapes {
        let run = |n| {
            threads::with_threads(n, || {
                let mut rng = Rng::new(10);
                let tape = Tape::new();
                let [a, b] = [a, b].map(|shape| tape.leaf(rng.normal(DType::F32, shape, 0.0, 1.0)));
                let out = matmul(&a, &b);
                let grads = tape.backward_from(&[(&out, rng.normal(DType::F32, out.shape(), 0.0, 1.0))]);
                [out.value(), grads.get(&a).unwrap(), grads.get(&b).unwrap()].map(Tensor::to_vec::<f32>)
            })
        };
        let one = run(1);
        assert!(run(2) == one && run(8) == one, "{a:?} x {b:?}");
    }
}

#[test]
fn a_shared_matrix_takes_the_batch_as_rows_and_as_terms() {
    let data = vec![0f32; 10_000];
    let axis = |size, a_stride, b_stride| BatchAxis { size, a_stride, b_stride, c_stride: 0 };
    // [2, 3, 5, 7] times [7, 4], the last leading axis first.
    let mut a = MatRef::new(&data, 5, 7);
    assert!(fold_rows(&mut a, &[axis(3, 35, 0), axis(2, 105, 0)]).is_empty());
    assert_eq!((a.rows, a.row_stride), (30, 7));
    // Its weight gradient: transposed, summed over the same axes.
    let (mut at, mut dout) = (MatRef::new(&data, 5, 7).t(), MatRef::new(&data, 5, 4));
    assert!(fold_terms(&mut at, &mut dout, &[axis(3, 35, 20), axis(2, 105, 60)]).is_empty());
    assert_eq!((at.cols, at.col_stride, dout.rows, dout.row_stride), (30, 7, 30, 4));
    // Rows that lie in memory in another order stay a batch.
    let mut a = MatRef::new(&data, 5, 7).t();
    assert_eq!(fold_rows(&mut a, &[axis(3, 35, 0)]).len(), 1);
}

#[test]
fn only_what_a_gradient_needs_is_saved_and_nothing_is_copied() {
    let x = Tensor::ones(DType::F32, &[70, 80]);
    let tape = Tape::new();
    let a = tape.leaf(x.clone());
    let out = matmul(&transpose(&a, 0, 1), &Var::constant(x.clone()));
    let saved = |out: &Var| (out.shape().to_vec(), tape.summary().0.last().unwrap().saved.clone());
    assert_eq!(saved(&out), (vec![80, 80], vec![("b", 4 * 70 * 80)]));
    let out = matmul(&Var::constant(x), &transpose(&a, 0, 1));
    assert_eq!(saved(&out), (vec![70, 70], vec![("a", 4 * 70 * 80)]));
    tape.backward_from(&[(&out, Tensor::ones(DType::F32, &[70, 70]))]);
}

#[test]
fn misuse_is_named() {
    let x = |shape: &[usize], dtype| Var::constant(Tensor::zeros(dtype, shape));
    let message = |a: Var, b: Var| {
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| matmul(&a, &b)));
        caught.err().and_then(|e| e.downcast_ref::<String>().cloned()).expect("a panic with a sentence")
    };
    let f = DType::F32;
    assert_eq!(message(x(&[2, 3], f), x(&[4, 5], f)), "matmul: a [2, 3] has K=3, b [4, 5] has K=4");
    assert_eq!(
        message(x(&[2, 2, 3], f), x(&[3, 3, 5], f)),
        "matmul: leading axes of a [2, 2, 3] and b [3, 3, 5] do not broadcast"
    );
    assert_eq!(message(x(&[], f), x(&[3], f)), "matmul: a [] and b [3] need at least one axis");
    assert_eq!(
        message(x(&[3], f), x(&[3], DType::F64)),
        "matmul: a ([3]) is f32, b ([3]) is f64; both must be of one float dtype"
    );
}
