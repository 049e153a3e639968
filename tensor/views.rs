//! Views: the same elements under another shape or order, without copies (but for `reshape`, where strides forbid it).

use crate::shape::{Dims, contiguous_strides, element_count};
use crate::tensor::Tensor;

impl Tensor {
    fn view(&self, shape: Dims, strides: Dims, offset: usize) -> Tensor {
        Tensor { storage: self.storage.clone(), dtype: self.dtype, shape, strides, offset }
    }

    /// The elements in row-major order under another shape; a view where the strides allow it, else one copy.
    ///
    /// # Panics
    /// When the numbers of elements differ.
    #[track_caller]
    pub fn reshape(&self, shape: &[usize]) -> Tensor {
        assert!(
            element_count(shape) == self.len(),
            "reshape: {:?} has {} elements, {shape:?} needs {}",
            self.shape(),
            self.len(),
            element_count(shape)
        );
        match self.reshaped_strides(shape) {
            Some(strides) => self.view(Dims::new(shape), strides, self.offset),
            None => self.copy().view(Dims::new(shape), contiguous_strides(shape), 0),
        }
    }

    /// Strides under which this view reads as `shape`, if there are any: every group of old axes that is merged must
    /// be without gaps.
    fn reshaped_strides(&self, shape: &[usize]) -> Option<Dims> {
        if self.is_contiguous() {
            return Some(contiguous_strides(shape));
        }
        let old: Vec<(usize, usize)> =
            self.shape.iter().copied().zip(self.strides.iter().copied()).filter(|&(dim, _)| dim != 1).collect();
        let mut strides = contiguous_strides(shape);
        let (mut from, mut to) = (0, 0);
        while from < old.len() {
            let (mut size, mut end) = (old[from].0, from + 1);
            let mut wanted = 1;
            let first = to;
            while wanted != size || to == first {
                if wanted < size {
                    wanted *= shape[to];
                    to += 1;
                } else {
                    // The next old axis joins the group only when it continues the one before it.
                    if end == old.len() || old[end - 1].1 != old[end].0 * old[end].1 {
                        return None;
                    }
                    size *= old[end].0;
                    end += 1;
                }
                if wanted < size && to == shape.len() {
                    return None;
                }
            }
            let mut step = old[end - 1].1;
            for axis in (first..to).rev() {
                strides.values_mut()[axis] = step;
                step *= shape[axis];
            }
            from = end;
        }
        Some(strides)
    }

    /// Swaps two axes.
    ///
    /// # Panics
    /// When there is no such axis.
    #[track_caller]
    pub fn transpose(&self, a: usize, b: usize) -> Tensor {
        let (mut shape, mut strides) = (self.shape, self.strides);
        assert!(a < self.rank() && b < self.rank(), "transpose: axes {a} and {b} of shape {:?}", self.shape);
        shape.values_mut().swap(a, b);
        strides.values_mut().swap(a, b);
        self.view(shape, strides, self.offset)
    }

    /// Reorders the axes: axis `i` of the result is axis `order[i]` of this tensor.
    ///
    /// # Panics
    /// When `order` does not name every axis once.
    #[track_caller]
    pub fn permute(&self, order: &[usize]) -> Tensor {
        let mut seen = vec![false; self.rank()];
        let valid = order.len() == self.rank()
            && order.iter().all(|&a| a < seen.len() && !std::mem::replace(&mut seen[a], true));
        assert!(valid, "permute: {order:?} is not an order of the {} axes of {:?}", self.rank(), self.shape);
        let pick = |dims: &Dims| Dims::new(&order.iter().map(|&a| dims[a]).collect::<Vec<_>>());
        self.view(pick(&self.shape), pick(&self.strides), self.offset)
    }

    /// The part `start .. start + len` of an axis.
    ///
    /// # Panics
    /// When the part reaches past the end of the axis, or there is no such axis.
    #[track_caller]
    pub fn narrow(&self, axis: usize, start: usize, len: usize) -> Tensor {
        self.slice(axis, start, start.saturating_add(len), 1)
    }

    /// Every `step`-th index of an axis from `start` up to, not including, `end`.
    ///
    /// # Panics
    /// When `start > end`, `end` is past the end of the axis, `step` is 0, or there is no such axis.
    #[track_caller]
    pub fn slice(&self, axis: usize, start: usize, end: usize, step: usize) -> Tensor {
        let size = self.dim(axis);
        assert!(
            start <= end && end <= size && step > 0,
            "slice: {start}..{end} step {step} of axis {axis}, which has {size} indices in {:?}",
            self.shape
        );
        let (mut shape, mut strides) = (self.shape, self.strides);
        shape.values_mut()[axis] = (end - start).div_ceil(step);
        let offset = if start < size { self.offset + start * strides[axis] } else { self.offset };
        strides.values_mut()[axis] *= step;
        self.view(shape, strides, offset)
    }

    /// Axis `axis` at index `index`; the axis disappears.
    ///
    /// # Panics
    /// When `index` is not below the size of the axis, or there is no such axis.
    #[track_caller]
    pub fn select(&self, axis: usize, index: usize) -> Tensor {
        self.narrow(axis, index, 1).squeeze(axis)
    }

    /// Repeats axes of size 1 (and new leading axes) to reach `shape`, without copying: their stride is 0.
    ///
    /// # Panics
    /// When an axis would change a size other than 1, or `shape` has fewer axes.
    #[track_caller]
    pub fn expand(&self, shape: &[usize]) -> Tensor {
        let extra = shape.len().checked_sub(self.rank());
        let fits =
            extra.is_some_and(|n| self.shape.iter().zip(&shape[n..]).all(|(&from, &to)| from == to || from == 1));
        assert!(fits, "expand: {:?} does not broadcast to {shape:?}", self.shape);
        let extra = extra.unwrap_or(0);
        let mut strides = Dims::new(&vec![0; shape.len()]);
        for (axis, (&dim, &stride)) in self.shape.iter().zip(self.strides.iter()).enumerate() {
            strides.values_mut()[extra + axis] = if dim == shape[extra + axis] { stride } else { 0 };
        }
        self.view(Dims::new(shape), strides, self.offset)
    }

    /// Removes an axis of size 1.
    ///
    /// # Panics
    /// When the axis has another size, or there is none.
    #[track_caller]
    pub fn squeeze(&self, axis: usize) -> Tensor {
        assert!(self.dim(axis) == 1, "squeeze: axis {axis} of {:?} has not size 1", self.shape);
        self.view(self.shape.removed(axis), self.strides.removed(axis), self.offset)
    }

    /// Inserts an axis of size 1 before axis `axis`.
    ///
    /// # Panics
    /// When `axis` is more than the number of axes.
    #[track_caller]
    pub fn unsqueeze(&self, axis: usize) -> Tensor {
        assert!(axis <= self.rank(), "unsqueeze: position {axis} in {:?}", self.shape);
        self.view(self.shape.inserted(axis, 1), self.strides.inserted(axis, 1), self.offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn iota(shape: &[usize]) -> Tensor {
        Tensor::from_fn::<i64>(shape, |i| i as i64)
    }

    #[test]
    fn views_read_the_right_elements() {
        let x = iota(&[2, 3, 4]);
        assert_eq!(x.transpose(0, 2).to_vec::<i64>()[..4], [0, 12, 4, 16]);
        assert_eq!(x.permute(&[2, 0, 1]).to_vec::<i64>()[..4], [0, 4, 8, 12]);
        assert_eq!(x.narrow(1, 1, 2).narrow(2, 3, 1).to_vec::<i64>(), [7, 11, 19, 23]);
        assert_eq!(x.slice(2, 1, 4, 2).to_vec::<i64>()[..4], [1, 3, 5, 7]);
        assert_eq!(x.select(0, 1).select(0, 2).to_vec::<i64>(), [20, 21, 22, 23]);
        assert_eq!(iota(&[3, 1]).expand(&[2, 3, 2]).to_vec::<i64>(), [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]);
        assert_eq!(x.unsqueeze(1).shape(), [2, 1, 3, 4]);
        assert_eq!(x.narrow(0, 2, 0).len(), 0);
        assert_eq!(iota(&[0, 3]).transpose(0, 1).reshape(&[0]).len(), 0);
    }

    #[test]
    fn reshape_copies_only_where_it_must() {
        let x = iota(&[4, 6]);
        assert!(x.transpose(0, 1).reshape(&[2, 3, 4]).shares_storage_with(&x));
        assert!(x.transpose(0, 1).reshape(&[6, 2, 2]).shares_storage_with(&x));
        assert!(!x.transpose(0, 1).reshape(&[24]).shares_storage_with(&x));
        assert!(x.narrow(1, 0, 3).reshape(&[2, 2, 3]).shares_storage_with(&x));
        assert!(iota(&[1]).expand(&[6]).reshape(&[2, 3]).strides().iter().all(|&s| s == 0));
    }

    #[test]
    #[should_panic(expected = "reshape: [2, 3] has 6 elements, [4] needs 4")]
    fn reshape_names_both_shapes() {
        iota(&[2, 3]).reshape(&[4]);
    }

    proptest! {
        /// Whatever the view, reshaping keeps the row-major order of its elements.
        #[test]
        fn reshape_keeps_row_major_order(
            dims in proptest::collection::vec(1usize..5, 1..4),
            axes in any::<(usize, usize)>(), cut in any::<usize>(), merge in any::<bool>(),
        ) {
            let rank = dims.len();
            let x = iota(&dims).transpose(axes.0 % rank, axes.1 % rank);
            let x = x.slice(0, cut % x.dim(0), x.dim(0), 1 + cut % 2);
            let n = x.len();
            let shape: Vec<usize> = if merge {
                let mut s = x.shape().to_vec();
                if rank > 1 { s[0] *= s[1]; s.remove(1); }
                s
            } else {
                let d = (1..=n).rev().find(|d| n.is_multiple_of(*d) && *d <= 3).unwrap_or(1);
                vec![n / d, d]
            };
            prop_assert_eq!(x.reshape(&shape).to_vec::<i64>(), x.to_vec::<i64>());
            prop_assert_eq!(x.reshape(&shape).reshape(x.shape()).to_vec::<i64>(), x.to_vec::<i64>());
        }
    }
}
