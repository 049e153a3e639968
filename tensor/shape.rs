//! Shapes and strides: up to eight axes, kept inline; broadcasting rules.

use std::fmt;
use std::ops::Deref;

/// The most axes that a tensor can have.
pub const MAX_RANK: usize = 8;

/// A short list of sizes or strides without a heap allocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dims {
    rank: u8,
    values: [usize; MAX_RANK],
}

impl Dims {
    /// The list with the given values.
    ///
    /// # Panics
    /// With more than [`MAX_RANK`] values.
    #[track_caller]
    pub fn new(values: &[usize]) -> Dims {
        assert!(values.len() <= MAX_RANK, "a tensor has at most {MAX_RANK} axes, got {} ({values:?})", values.len());
        let mut dims = Dims { rank: values.len() as u8, values: [0; MAX_RANK] };
        dims.values[..values.len()].copy_from_slice(values);
        dims
    }

    /// The values, to be changed.
    pub fn values_mut(&mut self) -> &mut [usize] {
        &mut self.values[..self.rank as usize]
    }

    /// The list with `value` inserted before position `at`.
    ///
    /// # Panics
    /// When `at` is past the end, or the list is full.
    #[track_caller]
    pub fn inserted(&self, at: usize, value: usize) -> Dims {
        let mut values = self.to_vec();
        values.insert(at, value);
        Dims::new(&values)
    }

    /// The list without position `at`.
    ///
    /// # Panics
    /// When there is no such position.
    #[track_caller]
    pub fn removed(&self, at: usize) -> Dims {
        let mut values = self.to_vec();
        values.remove(at);
        Dims::new(&values)
    }
}

impl Deref for Dims {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.values[..self.rank as usize]
    }
}

impl fmt::Debug for Dims {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{:?}", &**self)
    }
}

/// The number of elements of a shape.
///
/// # Panics
/// When the product does not fit in memory's address space (as sizes in bytes of 8 per element).
#[track_caller]
pub fn element_count(shape: &[usize]) -> usize {
    if shape.contains(&0) {
        return 0;
    }
    shape
        .iter()
        .try_fold(1usize, |n, &d| n.checked_mul(d))
        .filter(|&n| n <= isize::MAX as usize / 8)
        .unwrap_or_else(|| panic!("shape {shape:?} has more elements than memory can address"))
}

/// Row-major strides of a shape, in elements.
pub fn contiguous_strides(shape: &[usize]) -> Dims {
    let mut strides = Dims::new(shape);
    let mut step = 1;
    for (stride, &dim) in strides.values_mut().iter_mut().zip(shape).rev() {
        *stride = step;
        step *= dim.max(1);
    }
    strides
}

/// The shape that two shapes broadcast to, aligned at the last axis; `None` when some axis has two sizes other than 1.
pub fn broadcast(a: &[usize], b: &[usize]) -> Option<Dims> {
    let rank = a.len().max(b.len());
    let mut out = Dims::new(&[1; MAX_RANK][..rank.min(MAX_RANK)]);
    for (i, size) in out.values_mut().iter_mut().enumerate() {
        let at = |s: &[usize]| if i + s.len() < rank { 1 } else { s[i + s.len() - rank] };
        *size = match (at(a), at(b)) {
            (x, y) if x == y => x,
            (1, y) => y,
            (x, 1) => x,
            _ => return None,
        };
    }
    Some(out)
}

/// Storage offsets of a strided view in row-major order of its indices.
pub struct Offsets {
    shape: Dims,
    strides: Dims,
    index: [usize; MAX_RANK],
    offset: usize,
    left: usize,
}

impl Offsets {
    /// The offsets of a view that starts at `offset`.
    pub fn new(shape: &[usize], strides: &[usize], offset: usize) -> Offsets {
        Offsets {
            shape: Dims::new(shape),
            strides: Dims::new(strides),
            index: [0; MAX_RANK],
            offset,
            left: element_count(shape),
        }
    }

    /// Goes to the element with row-major position `position`.
    pub fn skip_to(mut self, position: usize) -> Offsets {
        self.left = self.left.saturating_sub(position);
        let mut rest = position;
        for axis in (0..self.shape.len()).rev() {
            let dim = self.shape[axis].max(1);
            self.index[axis] = rest % dim;
            self.offset += self.index[axis] * self.strides[axis];
            rest /= dim;
        }
        self
    }
}

impl Iterator for Offsets {
    type Item = usize;
    #[inline]
    fn next(&mut self) -> Option<usize> {
        if self.left == 0 {
            return None;
        }
        self.left -= 1;
        let out = self.offset;
        for axis in (0..self.shape.len()).rev() {
            self.index[axis] += 1;
            self.offset += self.strides[axis];
            if self.index[axis] < self.shape[axis] {
                break;
            }
            self.offset -= self.index[axis] * self.strides[axis];
            self.index[axis] = 0;
        }
        Some(out)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcasting_aligns_at_the_last_axis() {
        assert_eq!(broadcast(&[5, 4], &[1]).as_deref(), Some(&[5, 4][..]));
        assert_eq!(broadcast(&[4, 1], &[1, 4]).as_deref(), Some(&[4, 4][..]));
        assert_eq!(broadcast(&[], &[2, 0]).as_deref(), Some(&[2, 0][..]));
        assert_eq!(broadcast(&[3], &[2]), None);
        assert_eq!(broadcast(&[0], &[2]), None);
    }

    #[test]
    fn offsets_walk_any_strides_from_any_position() {
        let all: Vec<usize> = Offsets::new(&[2, 3, 2], &[1, 2, 0], 5).collect();
        assert_eq!(all, [5, 5, 7, 7, 9, 9, 6, 6, 8, 8, 10, 10]);
        for start in 0..=12 {
            assert_eq!(Offsets::new(&[2, 3, 2], &[1, 2, 0], 5).skip_to(start).collect::<Vec<_>>(), all[start..]);
        }
        assert_eq!(Offsets::new(&[2, 0], &[1, 1], 0).count(), 0);
        assert_eq!(Offsets::new(&[], &[], 3).collect::<Vec<_>>(), [3]);
    }

    #[test]
    #[should_panic(expected = "more elements than memory can address")]
    fn an_absurd_shape_is_refused() {
        element_count(&[1 << 33, 1 << 33]);
    }
}
