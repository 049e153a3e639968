//! `embedding`: a row of a table for every id.
//!
//! Forward `y[.., :] = weight[ids[..], :]`. Backward `dweight[v] = Σ dout[t] over ids[t] = v`, repeats added; rows are
//! sorted by id and summed by the kernels of [`index_select`](crate::index_select()), the same for any number of threads.
//! Saves the ids. Cost: one read and one write of `[.., D]`; backward also one write of `[V, D]`.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::{DType, Tensor};

use crate::index_select::{add_rows, checked_ids, take_rows};
use crate::registry::{BenchCase, OpCase};

/// Rows of `weight` `[V, D]` by `ids` (I64 or U32, any shape): `[.., D]`.
///
/// # Panics
/// When `weight` has not two axes, or an id is negative or not below V; its position (row-major) and V are named.
#[track_caller]
pub fn embedding(weight: &Var, ids: &Tensor) -> Var {
    assert!(weight.rank() == 2, "embedding: weight must be [V, D], got {:?} (ids: {:?})", weight.shape(), ids.shape());
    let v = weight.dim(0);
    let rows = take_rows(weight.value(), 0, &checked_ids("embedding", "rows (V) of the weight", ids, v));
    let shape: Vec<usize> = ids.shape().iter().copied().chain([weight.dim(1)]).collect();
    Var::from_op(rows.reshape(&shape), &[weight], || EmbeddingBackward { ids: ids.clone(), v })
}

struct EmbeddingBackward {
    ids: Tensor,
    v: usize,
}

impl Backward for EmbeddingBackward {
    fn name(&self) -> &'static str {
        "embedding"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("ids", &self.ids)]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        let ids = checked_ids("embedding", "rows (V) of the weight", &self.ids, self.v);
        let rows = dout.reshape(&[ids.len(), dout.dim(dout.rank() - 1)]);
        vec![Some(add_rows(&rows, 0, &ids, self.v))]
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let ids = Tensor::from_slice(&[3u32, 0, 3, 1, 0, 0], &[2, 3]);
    vec![OpCase::new("embedding", "", &[("weight", &[5, 4])], move |_, v| embedding(&v[0], &ids))]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let (v, d, n) = (32_000, 512, 4096);
    let ids = kumiki_tensor::Rng::new(0).ids(DType::I64, &[n], v as u64);
    vec![BenchCase {
        name: "embedding",
        inputs: vec![("weight", vec![v, d])],
        forward: Box::new(move |_, x| embedding(&x[0], &ids)),
        bytes: 2 * 4 * n * d + 8 * n,
        flops: 0,
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Chain;
    use kumiki_autograd::Tape;
    use kumiki_tensor::{Rng, threads};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn passes_the_chain(
            seed in any::<u64>(), v in 1usize..9, d in 0usize..18,
            shape in proptest::collection::vec(0usize..4, 0..3), wide in any::<bool>(),
        ) {
            let ids = Rng::new(seed).ids(if wide { DType::I64 } else { DType::U32 }, &shape, v as u64);
            let chain = Chain { bf16_tolerance: Some(4e-3), ..Chain::new("embedding", seed, &[("weight", &[v, d])]) };
            chain.run(|_, x| embedding(&x[0], &ids), |x| {
                ids.to_f64_vec().iter().flat_map(|&id| (0..d).map(move |c| (id as usize, c))).map(|(id, c)| x[0][id * d + c]).collect()
            });
        }
    }

    #[test]
    fn case_04_repeated_ids_add_up() {
        let tape = Tape::new();
        let weight = tape.leaf(Tensor::full(DType::F32, &[1, 1], 0.1));
        let y = embedding(&weight, &Tensor::zeros(DType::I64, &[2]));
        let grads = tape.backward_from(&[(&y, Tensor::from_slice(&[0.2f32, 0.3], &[2, 1]))]);
        assert_eq!(grads.get(&weight).unwrap().to_vec::<f32>(), [0.5]);
    }

    #[test]
    fn ids_and_gradient_may_be_strided_and_threads_change_nothing() {
        let (v, d) = (50, 40);
        let ids = Rng::new(3).ids(DType::I64, &[70, 30], v as u64).transpose(0, 1); // [30, 70]
        let dout = Rng::new(4).normal(DType::F32, &[d, 70, 30], 0.0, 1.0).transpose(0, 2); // [30, 70, D]
        let run = |threads: usize| {
            threads::with_threads(threads, || {
                let tape = Tape::new();
                let weight = tape.leaf(Rng::new(5).normal(DType::F32, &[v, d], 0.0, 1.0));
                let y = embedding(&weight, &ids);
                let grads = tape.backward_from(&[(&y, dout.clone())]);
                (y.value().to_vec::<f32>(), grads.get(&weight).unwrap().to_vec::<f32>())
            })
        };
        let (y, dweight) = run(1);
        assert!(run(2) == (y.clone(), dweight.clone()) && run(8) == (y, dweight.clone()));
        let mut expected = vec![0f64; v * d];
        for (id, row) in ids.to_f64_vec().iter().zip(dout.to_f64_vec().chunks(d)) {
            expected[*id as usize * d..][..d].iter_mut().zip(row).for_each(|(e, g)| *e += g);
        }
        let dweight: Vec<f64> = dweight.iter().map(|&x| x.into()).collect();
        assert_eq!(crate::testing::difference(&dweight, &expected, 2e-6), None);
    }

    #[test]
    #[should_panic(expected = "embedding: index 7 at position 2 is outside of the 5 rows (V) of the weight")]
    fn a_bad_id_is_named() {
        let weight = Var::constant(Tensor::zeros(DType::F32, &[5, 2]));
        embedding(&weight, &Tensor::from_slice(&[0i64, 4, 7, 9], &[2, 2]));
    }

    #[test]
    #[should_panic(expected = "embedding: ids must be i64 or u32, found f32")]
    fn float_ids_are_refused() {
        let weight = Var::constant(Tensor::zeros(DType::F32, &[5, 2]));
        embedding(&weight, &Tensor::zeros(DType::F32, &[1]));
    }
}
