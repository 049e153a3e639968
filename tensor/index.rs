//! Moving elements by position or by index: concatenation, selection of rows, gather and its adjoint scatter-add.

use crate::dtype::{DType, Element};
use crate::shape::Offsets;
use crate::tensor::Tensor;

/// Joins tensors along `axis`. All must have the same dtype and, but for that axis, the same shape.
///
/// # Panics
/// Without tensors, or when dtypes or shapes differ.
#[track_caller]
pub fn concat(parts: &[&Tensor], axis: usize) -> Tensor {
    let first = parts.first().expect("concat: at least one tensor is needed");
    let mut shape = first.shape().to_vec();
    assert!(axis < shape.len(), "concat: axis {axis} does not exist in shape {shape:?}");
    for part in parts {
        let same = part.rank() == shape.len() && (0..shape.len()).all(|a| a == axis || part.shape()[a] == shape[a]);
        assert!(
            same && part.dtype() == first.dtype(),
            "concat: along axis {axis}, {:?} {} does not fit {:?} {}",
            part.shape(),
            part.dtype(),
            first.shape(),
            first.dtype()
        );
    }
    shape[axis] = parts.iter().map(|p| p.dim(axis)).sum();
    let mut out = first.new_empty(first.dtype(), &shape);
    let mut start = 0;
    for part in parts {
        out.put(axis, start, part);
        start += part.dim(axis);
    }
    out
}

impl Tensor {
    /// Writes `part` over the positions from `start` on along `axis`; what shares the storage keeps what it had.
    ///
    /// # Panics
    /// When dtypes, or shapes but for that axis, differ, or the part is longer than what is there.
    #[track_caller]
    pub fn put(&mut self, axis: usize, start: usize, part: &Tensor) {
        let shape = self.shape().to_vec();
        let fits = part.rank() == shape.len()
            && axis < shape.len()
            && (0..shape.len()).all(|a| a == axis || part.dim(a) == shape[a])
            && start + part.dim(axis) <= shape[axis];
        assert!(
            fits && part.dtype() == self.dtype(),
            "put: from {start} on along axis {axis}, {:?} {} does not fit into {shape:?} {}",
            part.shape(),
            part.dtype(),
            self.dtype()
        );
        self.own();
        let part = part.contiguous();
        let [row, piece, outer] = [&shape[axis..], &part.shape()[axis..], &shape[..axis]].map(|s| s.iter().product());
        let at = start * shape[axis + 1..].iter().product::<usize>();
        if let Some(device) = self.cuda().cloned() {
            return crate::cuda::put(&device, &part, self, [piece, row, at]);
        }
        dispatch!(self.dtype(), E => {
            let (x, y) = (part.as_slice::<E>(), self.as_mut_slice::<E>());
            for i in 0..outer {
                y[i * row + at..][..piece].copy_from_slice(&x[i * piece..][..piece]);
            }
        });
    }
}

/// The indices as `usize`, checked against the size of the axis that they select from.
#[track_caller]
fn checked_indices(op: &str, ids: &Tensor, size: usize) -> Vec<usize> {
    let check = |i: usize, id: i64| {
        assert!(
            id >= 0 && (id as u64) < size as u64,
            "{op}: index {id} at position {i} is outside of the axis, which has {size} entries"
        );
        id as usize
    };
    match ids.dtype() {
        DType::I64 => ids.to_vec::<i64>().into_iter().enumerate().map(|(i, id)| check(i, id)).collect(),
        DType::U32 => ids.to_vec::<u32>().into_iter().enumerate().map(|(i, id)| check(i, id.into())).collect(),
        other => panic!("{op}: indices must be i64 or u32, found {other}"),
    }
}

fn add<E: Element>(a: E, b: E) -> E {
    E::from_f64(a.to_f64() + b.to_f64())
}

impl Tensor {
    /// Entries `ids` (one axis, i64 or u32) of axis `axis`: `out[.., i, ..] = self[.., ids[i], ..]`.
    ///
    /// # Panics
    /// When an index is negative or not below the axis' size (named with its position).
    #[track_caller]
    pub fn index_select(&self, axis: usize, ids: &Tensor) -> Tensor {
        assert!(ids.rank() == 1, "index_select: ids must have one axis, found shape {:?}", ids.shape());
        let ids = checked_indices("index_select", ids, self.dim(axis));
        let mut shape = self.shape().to_vec();
        shape[axis] = ids.len();
        let source = self.contiguous();
        let (size, inner): (usize, usize) = (self.dim(axis), shape[axis + 1..].iter().product());
        let mut out = Tensor::empty(self.dtype(), &shape);
        if !out.is_empty() {
            dispatch!(self.dtype(), E => {
                let (x, y) = (source.as_slice::<E>(), out.as_mut_slice::<E>());
                for (row, y_row) in y.chunks_mut(inner).enumerate() {
                    let from = (row / ids.len() * size + ids[row % ids.len()]) * inner;
                    y_row.copy_from_slice(&x[from..from + inner]);
                }
            });
        }
        out
    }

    /// The adjoint of [`Tensor::index_select`]: a tensor of zeros with `size` entries along `axis` to which every slice
    /// of `self` is added at its index; repeated indices add up, in index order.
    ///
    /// # Panics
    /// When `ids` has not one index for every slice, or an index is negative or not below `size` (named with its position).
    #[track_caller]
    pub fn index_add(&self, axis: usize, ids: &Tensor, size: usize) -> Tensor {
        let ids = checked_indices("index_add", ids, size);
        assert!(ids.len() == self.dim(axis), "index_add: {} ids for axis {axis} of {:?}", ids.len(), self.shape());
        let mut shape = self.shape().to_vec();
        shape[axis] = size;
        let mut out = Tensor::zeros(self.dtype(), &shape);
        let source = self.contiguous();
        let inner: usize = shape[axis + 1..].iter().product();
        if !self.is_empty() {
            dispatch!(self.dtype(), E => {
                let (x, y) = (source.as_slice::<E>(), out.as_mut_slice::<E>());
                for (row, x_row) in x.chunks(inner).enumerate() {
                    let to = (row / ids.len() * size + ids[row % ids.len()]) * inner;
                    y[to..to + inner].iter_mut().zip(x_row).for_each(|(y, &x)| *y = add(*y, x));
                }
            });
        }
        out
    }

    /// Row-major storage positions in a tensor of `shape` that `ids` (same rank) select along `axis`.
    #[track_caller]
    fn gather_positions(op: &str, shape: &[usize], axis: usize, ids: &Tensor) -> Vec<usize> {
        let fits = ids.rank() == shape.len() && (0..shape.len()).all(|a| a == axis || ids.shape()[a] <= shape[a]);
        assert!(fits && axis < shape.len(), "{op}: ids {:?} along axis {axis} do not fit {shape:?}", ids.shape());
        let strides = crate::shape::contiguous_strides(shape);
        let mut others = strides;
        others.values_mut()[axis] = 0;
        let indices = checked_indices(op, ids, shape[axis]);
        Offsets::new(ids.shape(), &others, 0).zip(indices).map(|(base, id)| base + id * strides[axis]).collect()
    }

    /// Picks one element per index: `out[i, j] = self[i, ids[i, j]]` for `axis` 1 of two axes. `ids` has the rank of
    /// `self` and, on the other axes, at most its sizes; the result has the shape of `ids`.
    ///
    /// # Panics
    /// When `ids` have another rank, are larger than `self` on another axis, or hold an index out of range.
    #[track_caller]
    pub fn gather(&self, axis: usize, ids: &Tensor) -> Tensor {
        let positions = Tensor::gather_positions("gather", self.shape(), axis, ids);
        let source = self.contiguous();
        dispatch!(self.dtype(), E => {
            let x = source.as_slice::<E>();
            Tensor::from_slice(&positions.iter().map(|&p| x[p]).collect::<Vec<E>>(), ids.shape())
        })
    }

    /// The adjoint of [`Tensor::gather`]: `self` plus, at the place that each index names, the element of `source`;
    /// repeated indices add up. `source` has the shape of `ids`.
    ///
    /// # Panics
    /// When `source` has not the shape of `ids` or not this tensor's dtype, when their shape does not fit this tensor's beside
    /// `axis`, or an index is negative or not below the size of the axis (named with its position).
    #[track_caller]
    pub fn scatter_add(&self, axis: usize, ids: &Tensor, source: &Tensor) -> Tensor {
        assert!(
            source.shape() == ids.shape() && source.dtype() == self.dtype(),
            "scatter_add: source {:?} {} does not fit ids {:?} and target {}",
            source.shape(),
            source.dtype(),
            ids.shape(),
            self.dtype()
        );
        let positions = Tensor::gather_positions("scatter_add", self.shape(), axis, ids);
        let (mut out, source) = (self.copy(), source.contiguous());
        dispatch!(self.dtype(), E => {
            let (x, y) = (source.as_slice::<E>(), out.as_mut_slice::<E>());
            positions.iter().zip(x).for_each(|(&p, &x)| y[p] = add(y[p], x));
        });
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concat_joins_views_along_any_axis() {
        let x = Tensor::from_fn::<f64>(&[2, 3], |i| i as f64);
        assert_eq!(concat(&[&x, &x.narrow(0, 1, 1)], 0).to_f64_vec(), [0., 1., 2., 3., 4., 5., 3., 4., 5.]);
        assert_eq!(
            concat(&[&x.transpose(0, 1), &Tensor::ones(DType::F64, &[3, 1])], 1).to_f64_vec(),
            [0., 3., 1., 1., 4., 1., 2., 5., 1.]
        );
        assert_eq!(concat(&[&x, &Tensor::zeros(DType::F64, &[2, 0])], 1).to_f64_vec(), x.to_f64_vec());
    }

    #[test]
    fn selection_and_its_adjoint() {
        let x = Tensor::from_fn::<f32>(&[2, 3, 2], |i| i as f32);
        let ids = Tensor::from_slice(&[2u32, 0, 2], &[3]);
        let y = x.index_select(1, &ids);
        assert_eq!(y.to_f64_vec(), [4., 5., 0., 1., 4., 5., 10., 11., 6., 7., 10., 11.]);
        assert_eq!(y.index_add(1, &ids, 3).to_f64_vec(), [0., 1., 0., 0., 8., 10., 6., 7., 0., 0., 20., 22.]);
        assert_eq!(x.index_select(0, &Tensor::zeros(DType::I64, &[0])).shape(), [0, 3, 2]);
    }

    #[test]
    fn gather_and_scatter_add() {
        let x = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]);
        let ids = Tensor::from_slice(&[2i64, 2, 0, 1], &[2, 2]);
        assert_eq!(x.gather(1, &ids).to_f64_vec(), [3., 3., 4., 5.]);
        let zero = Tensor::zeros(DType::F64, &[2, 3]);
        assert_eq!(zero.scatter_add(1, &ids, &x.gather(1, &ids)).to_f64_vec(), [0., 0., 6., 4., 5., 0.]);
    }

    #[test]
    #[should_panic(expected = "index -4 at position 1 is outside of the axis, which has 3 entries")]
    fn a_bad_index_is_named() {
        Tensor::zeros(DType::F32, &[3]).index_select(0, &Tensor::from_slice(&[0i64, -4], &[2]));
    }
}
