//! `gather`: one element per index.
//!
//! Forward, for `axis` 1 of two: `y[i, j] = x[i, ids[i, j]]`. Backward scatter-add, `dx[i, v] = Σ dout[i, j] over
//! ids[i, j] = v`: elements of `dout` are sorted by their place in `dx` (stable), so that those with the same place are
//! summed in order, in f64. Saves the ids. Cost: O(n log n) for n indices, and one write of `dx`.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::shape::{Dims, Offsets, contiguous_strides};
use kumiki_tensor::{Element, Tensor, dispatch};

use crate::index_select::{add_rows, checked_ids, take_rows};
use crate::registry::OpCase;

/// Picks one element of `x` for every index in `ids` (I64 or U32): the result at `[.., i, ..]` is `x[.., ids[.., i, ..],
/// ..]`. `ids` has the rank of `x` and, on the axes other than `axis`, at most its sizes; the result has its shape.
///
/// # Panics
/// When shapes do not fit, or an index is negative or not below the size of the axis; its position is named.
#[track_caller]
pub fn gather(x: &Var, axis: usize, ids: &Tensor) -> Var {
    let places = places(x.shape(), axis, ids);
    if x.value().cuda().is_some() {
        let out = take_rows(&x.value().reshape(&[x.value().len()]), 0, &places).reshape(ids.shape());
        return Var::from_op(out, &[x], || GatherBackward { ids: ids.clone(), axis, shape: Dims::new(x.shape()) });
    }
    let mut out = Tensor::empty(x.dtype(), ids.shape());
    let rows = x.value().contiguous();
    dispatch!(x.dtype(), E => {
        let x = rows.as_slice::<E>();
        out.as_mut_slice::<E>().iter_mut().zip(places).for_each(|(y, place)| *y = x[place]);
    });
    Var::from_op(out, &[x], || GatherBackward { ids: ids.clone(), axis, shape: Dims::new(x.shape()) })
}

/// The row-major place in `shape` of the element that each index names.
#[track_caller]
fn places(shape: &[usize], axis: usize, ids: &Tensor) -> Vec<usize> {
    let fits = ids.rank() == shape.len() && (0..shape.len()).all(|a| a == axis || ids.shape()[a] <= shape[a]);
    assert!(
        fits && axis < shape.len(),
        "gather: ids of shape {:?} along axis {axis} do not fit x of shape {shape:?}",
        ids.shape()
    );
    let strides = contiguous_strides(shape);
    let mut others = strides;
    others.values_mut()[axis] = 0;
    let ids_in_order = checked_ids("gather", "entries", ids, shape[axis]);
    Offsets::new(ids.shape(), &others, 0).zip(ids_in_order).map(|(base, id)| base + id * strides[axis]).collect()
}

struct GatherBackward {
    ids: Tensor,
    axis: usize,
    shape: Dims,
}

impl Backward for GatherBackward {
    fn name(&self) -> &'static str {
        "gather"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("ids", &self.ids)]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        let places = places(&self.shape, self.axis, &self.ids);
        if dout.cuda().is_some() {
            let of_all = add_rows(&dout.reshape(&[places.len()]), 0, &places, self.shape.iter().product());
            return vec![Some(of_all.reshape(&self.shape))];
        }
        let mut order: Vec<usize> = (0..places.len()).collect();
        order.sort_by_key(|&i| places[i]);
        let mut dx = Tensor::zeros(dout.dtype(), &self.shape);
        let dout = dout.contiguous();
        dispatch!(dout.dtype(), E => {
            let (g, y) = (dout.as_slice::<E>(), dx.as_mut_slice::<E>());
            for same in order.chunk_by(|&i, &j| places[i] == places[j]) {
                y[places[same[0]]] = E::from_f64(same.iter().map(|&i| g[i].to_f64()).sum());
            }
        });
        vec![Some(dx)]
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let ids = Tensor::from_slice(&[2u32, 2, 0, 1], &[2, 2]);
    vec![OpCase::new("gather", "", &[("x", &[2, 3])], move |_, v| gather(&v[0], 1, &ids))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Chain;
    use kumiki_autograd::Tape;
    use kumiki_tensor::{DType, Rng};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn passes_the_chain(
            seed in any::<u64>(), [outer, inner] in proptest::array::uniform2(0usize..4),
            size in 1usize..6, count in 0usize..9, cut in any::<bool>(),
        ) {
            // On the other axes the ids may be fewer than the entries of x.
            let (rows, columns) = if cut { (outer / 2, inner / 2) } else { (outer, inner) };
            let ids = Rng::new(seed).ids(DType::I64, &[rows, count, columns], size as u64);
            let shape = [outer, size, inner];
            let chain = Chain { bf16_tolerance: Some(4e-3), ..Chain::new("gather", seed, &[("x", &shape)]) };
            chain.run(|_, v| gather(&v[0], 1, &ids), |x| {
                let id = ids.to_f64_vec();
                let mut y = vec![];
                for o in 0..rows {
                    for n in 0..count {
                        for i in 0..columns {
                            let v = id[(o * count + n) * columns + i] as usize;
                            y.push(x[0][(o * size + v) * inner + i]);
                        }
                    }
                }
                y
            });
        }
    }

    #[test]
    fn case_04_a_repeated_index_adds_up() {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let tape = Tape::new();
            let x = tape.leaf(Tensor::full(dtype, &[1], 0.1));
            let y = gather(&x, 0, &Tensor::zeros(DType::I64, &[2]));
            let dout = Tensor::from_slice(&[0.2, 0.3], &[2]).cast(dtype);
            let exact: f64 = dout.to_f64_vec().iter().sum();
            let dx = tape.backward_from(&[(&y, dout)]).get(&x).unwrap().item();
            assert_eq!(dx, Tensor::scalar(dtype, exact).item());
            assert!((dx - 0.5).abs() < 2e-3);
        }
    }

    #[test]
    #[should_panic(expected = "gather: index 3 at position 1 is outside of the 3 entries")]
    fn a_bad_index_is_named() {
        let x = Var::constant(Tensor::zeros(DType::F32, &[1, 3]));
        gather(&x, 1, &Tensor::from_slice(&[0u32, 3], &[1, 2]));
    }

    #[test]
    #[should_panic(expected = "gather: ids of shape [2, 1] along axis 1 do not fit x of shape [1, 3]")]
    fn ids_that_do_not_fit_are_named() {
        gather(&Var::constant(Tensor::zeros(DType::F32, &[1, 3])), 1, &Tensor::zeros(DType::I64, &[2, 1]));
    }
}
