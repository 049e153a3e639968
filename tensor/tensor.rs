//! [`Tensor`]: a strided view of shared storage, with a dtype known at run time.

use std::sync::Arc;

use kumiki_gpu as gpu;

use crate::cuda;
use crate::device::Device;
use crate::dtype::{DType, Element};
use crate::shape::{Dims, Offsets, contiguous_strides, element_count};
use crate::storage::{Buffer, Storage};
use crate::threads;

/// An n-dimensional array: a view (shape, strides, offset) of storage that several tensors may share.
///
/// Cloning copies the view, not the elements. Elements change only through a unique owner
/// ([`Tensor::make_mut`]), so that a tensor never changes under another that shares its storage.
#[derive(Clone)]
pub struct Tensor {
    pub(crate) storage: Arc<Storage>,
    pub(crate) dtype: DType,
    pub(crate) shape: Dims,
    pub(crate) strides: Dims,
    pub(crate) offset: usize,
}

impl Tensor {
    /// A contiguous tensor with unspecified contents, for kernels that write every element.
    ///
    /// # Panics
    /// When the elements are too many to be counted or held, or the axes too many.
    #[track_caller]
    pub fn empty(dtype: DType, shape: &[usize]) -> Tensor {
        Tensor {
            storage: Arc::new(Storage::Host(Buffer::new(element_count(shape) * dtype.size()))),
            dtype,
            shape: Dims::new(shape),
            strides: contiguous_strides(shape),
            offset: 0,
        }
    }

    /// As [`Tensor::empty`], on a device.
    ///
    /// # Panics
    /// As [`Tensor::empty`], and when the device has not enough memory.
    #[track_caller]
    pub fn empty_on(device: &Device, dtype: DType, shape: &[usize]) -> Tensor {
        match device {
            Device::Cpu => Tensor::empty(dtype, shape),
            Device::Cuda(device) => Tensor::empty_on_cuda(device, dtype, shape),
        }
    }

    #[track_caller]
    fn empty_on_cuda(device: &gpu::Device, dtype: DType, shape: &[usize]) -> Tensor {
        let buffer = device.allocate(element_count(shape) * dtype.size()).unwrap_or_else(|error| panic!("{error}"));
        let (shape, strides) = (Dims::new(shape), contiguous_strides(shape));
        Tensor { storage: Arc::new(buffer.into()), dtype, shape, strides, offset: 0 }
    }

    /// As [`Tensor::empty`], on the device of this tensor.
    ///
    /// # Panics
    /// As [`Tensor::empty_on`].
    #[track_caller]
    pub fn new_empty(&self, dtype: DType, shape: &[usize]) -> Tensor {
        match self.cuda() {
            None => Tensor::empty(dtype, shape),
            Some(device) => Tensor::empty_on_cuda(device, dtype, shape),
        }
    }

    /// As [`Tensor::full`], on the device of this tensor.
    ///
    /// # Panics
    /// As [`Tensor::empty_on`].
    #[track_caller]
    pub fn new_full(&self, dtype: DType, shape: &[usize], value: f64) -> Tensor {
        let Some(device) = self.cuda() else { return Tensor::full(dtype, shape, value) };
        let mut out = Tensor::empty_on_cuda(device, dtype, shape);
        cuda::fill(device, &mut out, value);
        out
    }

    /// This shape and dtype, contiguous, on other storage.
    pub(crate) fn in_storage(&self, storage: Storage) -> Tensor {
        Tensor { storage: Arc::new(storage), strides: contiguous_strides(&self.shape), offset: 0, ..self.clone() }
    }

    /// The bytes of the elements, which lie in row-major order on the host.
    pub(crate) fn bytes(&self) -> &[u8] {
        debug_assert!(self.is_contiguous());
        dispatch!(self.dtype, E => {
            let elements = self.as_slice::<E>();
            // SAFETY: numbers have no padding, and every byte is initialised.
            unsafe { std::slice::from_raw_parts(elements.as_ptr().cast::<u8>(), size_of_val(elements)) }
        })
    }

    /// As [`Tensor::bytes`], to be written.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        dispatch!(self.dtype, E => {
            let elements = self.as_mut_slice::<E>();
            // SAFETY: as in `bytes`; every pattern of bits is a number.
            unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast::<u8>(), size_of_val(elements)) }
        })
    }

    /// A tensor filled with `value`, rounded to `dtype`.
    ///
    /// # Panics
    /// As [`Tensor::empty`].
    #[track_caller]
    pub fn full(dtype: DType, shape: &[usize], value: f64) -> Tensor {
        let mut out = Tensor::empty(dtype, shape);
        dispatch!(dtype, E => out.as_mut_slice::<E>().fill(E::from_f64(value)));
        out
    }

    /// A tensor of zeros.
    ///
    /// # Panics
    /// As [`Tensor::empty`].
    #[track_caller]
    pub fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
        Tensor::full(dtype, shape, 0.0)
    }

    /// A tensor of ones.
    ///
    /// # Panics
    /// As [`Tensor::empty`].
    #[track_caller]
    pub fn ones(dtype: DType, shape: &[usize]) -> Tensor {
        Tensor::full(dtype, shape, 1.0)
    }

    /// A tensor without axes that holds `value`.
    pub fn scalar(dtype: DType, value: f64) -> Tensor {
        Tensor::full(dtype, &[], value)
    }

    /// A tensor with a copy of `values` in row-major order.
    ///
    /// # Panics
    /// When the number of values is not that of the shape.
    #[track_caller]
    pub fn from_slice<E: Element>(values: &[E], shape: &[usize]) -> Tensor {
        assert!(
            values.len() == element_count(shape),
            "from_slice: shape {shape:?} needs {} values, got {}",
            element_count(shape),
            values.len()
        );
        let mut out = Tensor::empty(E::DTYPE, shape);
        out.as_mut_slice::<E>().copy_from_slice(values);
        out
    }

    /// A contiguous tensor of which `f` gives the element at every row-major position.
    ///
    /// # Panics
    /// As [`Tensor::empty`].
    #[track_caller]
    pub fn from_fn<E: Element>(shape: &[usize], f: impl FnMut(usize) -> E) -> Tensor {
        let mut out = Tensor::empty(E::DTYPE, shape);
        let mut f = f;
        out.as_mut_slice::<E>().iter_mut().enumerate().for_each(|(i, x)| *x = f(i));
        out
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The size of each axis.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The distance in elements between neighbours along each axis; 0 on an expanded axis.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// Where the view starts in [`Tensor::storage_slice`], in elements.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The number of axes.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The size of one axis.
    ///
    /// # Panics
    /// When there is no such axis.
    #[track_caller]
    pub fn dim(&self, axis: usize) -> usize {
        assert!(axis < self.rank(), "axis {axis} does not exist in shape {:?}", self.shape);
        self.shape[axis]
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        element_count(&self.shape)
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Bytes of the elements of this view (not of the storage behind it).
    pub fn byte_len(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// Whether the elements lie in row-major order without gaps.
    pub fn is_contiguous(&self) -> bool {
        let mut step = 1;
        self.is_empty()
            || self.shape.iter().zip(self.strides.iter()).rev().all(|(&dim, &stride)| {
                let fits = dim == 1 || stride == step;
                step *= dim;
                fits
            })
    }

    /// Whether two tensors share storage.
    pub fn shares_storage_with(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.storage, &other.storage)
    }

    /// Where the storage lies, the same for all tensors that share it, and its length in bytes.
    pub fn storage_extent(&self) -> (usize, usize) {
        (Arc::as_ptr(&self.storage) as usize, self.storage.len())
    }

    /// Whether this is the only tensor on its storage.
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.storage) == 1
    }

    #[track_caller]
    fn check_type<E: Element>(&self) {
        assert!(E::DTYPE == self.dtype, "expected a tensor of {}, found {}", E::DTYPE, self.dtype);
    }

    /// The whole storage, for kernels that follow [`Tensor::strides`] from [`Tensor::offset`].
    ///
    /// # Panics
    /// When the dtype is not that of `E`.
    #[track_caller]
    pub fn storage_slice<E: Element>(&self) -> &[E] {
        self.check_type::<E>();
        self.storage.as_slice(self.storage.len() / size_of::<E>())
    }

    /// The elements in row-major order.
    ///
    /// # Panics
    /// When the view is not contiguous (see [`Tensor::contiguous`]) or the dtype is not that of `E`.
    #[track_caller]
    pub fn as_slice<E: Element>(&self) -> &[E] {
        self.check_type::<E>();
        assert!(
            self.is_contiguous(),
            "as_slice: shape {:?} with strides {:?} is not contiguous",
            self.shape,
            self.strides
        );
        let len = self.len();
        if len == 0 { &[] } else { &self.storage_slice::<E>()[self.offset..self.offset + len] }
    }

    /// The elements in row-major order, to be written.
    ///
    /// # Panics
    /// When the storage is shared, the view not contiguous or the dtype not that of `E`.
    #[track_caller]
    pub fn as_mut_slice<E: Element>(&mut self) -> &mut [E] {
        self.check_type::<E>();
        assert!(
            self.is_contiguous(),
            "as_mut_slice: shape {:?} with strides {:?} is not contiguous",
            self.shape,
            self.strides
        );
        let (offset, len) = (self.offset, self.len());
        let storage = Arc::get_mut(&mut self.storage).expect("as_mut_slice: the storage is shared with another tensor");
        if len == 0 { &mut [] } else { &mut storage.as_mut_slice::<E>(offset + len)[offset..] }
    }

    /// The elements in row-major order, to be written; copies them first when another tensor shares the storage or
    /// the view is not contiguous.
    ///
    /// # Panics
    /// When `E` is not the dtype.
    #[track_caller]
    pub fn make_mut<E: Element>(&mut self) -> &mut [E] {
        self.own();
        self.as_mut_slice()
    }

    /// Copies the elements when another tensor shares the storage or the view is not contiguous: afterwards they are
    /// this tensor's own, to be written.
    pub fn own(&mut self) {
        if !self.is_unique() || !self.is_contiguous() {
            *self = self.copy();
        }
    }

    /// The elements in row-major order, as a vector.
    ///
    /// # Panics
    /// When `E` is not the dtype.
    #[track_caller]
    pub fn to_vec<E: Element>(&self) -> Vec<E> {
        self.check_type::<E>();
        self.on_host().contiguous().as_slice::<E>().to_vec()
    }

    /// The elements in row-major order, as f64, whatever the dtype.
    pub fn to_f64_vec(&self) -> Vec<f64> {
        let rows = self.on_host().contiguous();
        dispatch!(self.dtype, E => rows.as_slice::<E>().iter().map(|x| x.to_f64()).collect())
    }

    /// The only element, as f64.
    ///
    /// # Panics
    /// When there is not exactly one element.
    #[track_caller]
    pub fn item(&self) -> f64 {
        assert!(self.len() == 1, "item: expected one element, found shape {:?}", self.shape);
        let host = self.on_host();
        dispatch!(self.dtype, E => host.storage_slice::<E>()[host.offset].to_f64())
    }

    /// Whether no element is NaN or infinite.
    pub fn all_finite(&self) -> bool {
        let rows = self.on_host().contiguous();
        dispatch!(self.dtype, E => rows.as_slice::<E>().iter().all(|x| x.to_f64().is_finite()))
    }

    /// The same elements in row-major order: itself when they are so already, else a copy.
    pub fn contiguous(&self) -> Tensor {
        if self.is_contiguous() { self.clone() } else { self.copy() }
    }

    /// A contiguous copy in storage of its own.
    pub fn copy(&self) -> Tensor {
        if let Some(device) = self.cuda() {
            return cuda::cast(device, self, self.dtype);
        }
        let mut out = Tensor::empty(self.dtype, &self.shape);
        dispatch!(self.dtype, E => self.map_into::<E, E>(out.as_mut_slice(), |x| x));
        out
    }

    /// The elements converted to another dtype (itself when it has it already). Floats round to nearest; to integers
    /// they truncate and saturate.
    pub fn cast(&self, dtype: DType) -> Tensor {
        if dtype == self.dtype {
            return self.clone();
        }
        if let Some(device) = self.cuda() {
            return cuda::cast(device, self, dtype);
        }
        let mut out = Tensor::empty(dtype, &self.shape);
        dispatch!(self.dtype, A => dispatch!(dtype, B => {
            self.map_into::<A, B>(out.as_mut_slice(), |x| B::from_f64(x.to_f64()));
        }));
        out
    }

    /// Writes `f` of every element, in row-major order, to `out`.
    fn map_into<A: Element, B: Element>(&self, out: &mut [B], f: impl Fn(A) -> B + Sync + Send) {
        const CHUNK: usize = 16 * 1024;
        if self.is_contiguous() {
            let source = self.as_slice::<A>();
            threads::parallel_chunks_mut(out, CHUNK, CHUNK, |i, piece| {
                piece.iter_mut().zip(&source[i * CHUNK..]).for_each(|(y, &x)| *y = f(x));
            });
            return;
        }
        // One row at a time along the last axis, so that the odometer turns once per row.
        let source = self.storage_slice::<A>();
        let axis = self.rank() - 1; // a view without axes is contiguous
        let (row, step) = (self.shape[axis], self.strides[axis]);
        let (outer_shape, outer_strides) = (self.shape.removed(axis), self.strides.removed(axis));
        let rows = (CHUNK / row.max(1)).max(1);
        threads::parallel_chunks_mut(out, rows * row.max(1), rows * row, |i, piece| {
            let starts = Offsets::new(&outer_shape, &outer_strides, self.offset).skip_to(i * rows);
            for (y_row, start) in piece.chunks_mut(row).zip(starts) {
                if step == 1 {
                    y_row.iter_mut().zip(&source[start..]).for_each(|(y, &x)| *y = f(x));
                } else {
                    y_row.iter_mut().enumerate().for_each(|(j, y)| *y = f(source[start + j * step]));
                }
            }
        });
    }
}
