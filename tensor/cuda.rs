//! Launches of kernels on tensors, and those of the tensors' own operations: copies, conversions, sums.

pub use kumiki_gpu::{Arg, Device, Launch, Matmul, MatmulType, Operand, Source};

use crate::dtype::DType;
use crate::shape::{Dims, MAX_RANK};
use crate::tensor::Tensor;

/// The list of kernels that templates make: `kernels!["fill" of "float" "double", "copy" of "bf16"]`.
#[macro_export]
macro_rules! kernels {
    ($($name:literal of $($types:literal)+),+ $(,)?) => { &[$($(concat!($name, "<", $types, ">")),+),+] };
}

static KERNELS: Source = Source {
    file: "tensor.cu",
    text: include_str!("tensor.cu"),
    headers: &[],
    kernels: kernels![
        "copy" of "float, float" "float, double" "float, bf16" "double, float" "double, double" "double, bf16"
            "bf16, float" "bf16, double" "bf16, bf16" "i64, i64" "unsigned, unsigned",
        "put" of "float" "double" "bf16" "i64" "unsigned",
        "fill" of "float" "double" "bf16" "i64" "unsigned",
        "add_assign" of "float" "double" "bf16",
        "scale" of "float" "double" "bf16",
        "sum_squares" of "float" "double" "bf16",
        "sum_rows" of "float" "double" "bf16",
        "sum_parts" of "float" "double" "bf16",
    ],
};

/// The sources of this crate's kernels.
pub const SOURCES: &[&Source] = &[&KERNELS];

/// Threads of a block where nothing says otherwise.
pub const THREADS: u32 = 256;

/// The type of elements in a kernel.
pub fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::F64 => "double",
        DType::BF16 => "bf16",
        DType::I64 => "i64",
        DType::U32 => "unsigned",
    }
}

/// Launches a kernel.
///
/// # Safety
/// As [`Device::launch`].
///
/// # Panics
/// When it does not compile, or cannot be launched: with the device's sentence.
#[track_caller]
pub unsafe fn launch(device: &Device, source: &'static Source, kernel: &str, shape: Launch, args: &[Arg]) {
    // SAFETY: the caller's.
    unsafe { device.launch(source, kernel, shape, args) }.unwrap_or_else(|error| panic!("{error}"));
}

/// For a kernel that strides over `count` elements.
pub fn over(count: usize) -> Launch {
    let blocks = count.div_ceil(THREADS as usize).min(1 << 20);
    Launch::of(blocks as u32, THREADS)
}

/// Shape and strides, as the kernels' `View`.
pub fn view(shape: &[usize], strides: &[usize]) -> [u8; 8 * (2 * MAX_RANK + 1)] {
    let mut out = [0; 8 * (2 * MAX_RANK + 1)];
    let padded = |values: &[usize]| {
        let values = Dims::new(values);
        (0..MAX_RANK).map(|axis| values.get(axis).copied().unwrap_or(1)).collect::<Vec<_>>()
    };
    let numbers = padded(shape).into_iter().chain(padded(strides)).chain([shape.len()]);
    for (to, x) in out.chunks_exact_mut(8).zip(numbers) {
        to.copy_from_slice(&(x as u64).to_ne_bytes());
    }
    out
}

impl Tensor {
    /// The address of the first element on its CUDA device.
    ///
    /// # Panics
    /// When the elements do not lie on one.
    #[track_caller]
    pub fn cuda_address(&self) -> u64 {
        let buffer = self.storage.on_cuda().expect("a tensor on a CUDA device");
        buffer.address(self.first_byte())
    }

    /// The address of the first element, for a kernel that reads.
    ///
    /// # Panics
    /// When the elements do not lie on a CUDA device.
    #[track_caller]
    pub fn cuda_in(&self) -> Arg<'_> {
        Arg::In(self.storage.on_cuda().expect("a tensor on a CUDA device"), self.first_byte())
    }

    /// The address of the first element, for a kernel that writes.
    ///
    /// # Panics
    /// When the storage is shared, or does not lie on a CUDA device.
    #[track_caller]
    pub fn cuda_out(&mut self) -> Arg<'_> {
        assert!(self.is_unique(), "cuda_out: the storage is shared with another tensor");
        Arg::Out(self.storage.on_cuda().expect("a tensor on a CUDA device"), self.first_byte())
    }
}

/// `x` in another dtype, in row-major order.
pub(crate) fn cast(device: &Device, x: &Tensor, dtype: DType) -> Tensor {
    let mut out = x.new_empty(dtype, x.shape());
    let both_float = x.dtype().is_float() && dtype.is_float();
    assert!(both_float || x.dtype() == dtype, "cast: from {} to {dtype} on {device}; cast it on the CPU", x.dtype());
    let kernel = format!("copy<{}, {}>", type_name(x.dtype()), type_name(dtype));
    let view = view(x.shape(), x.strides());
    let args = [Arg::Struct(&view), x.cuda_in(), out.cuda_out(), Arg::I64(x.len() as i64)];
    // SAFETY: `copy(View, const From *, To *, i64)` reads where the view lies and writes all of `out`.
    unsafe { launch(device, &KERNELS, &kernel, over(x.len()), &args) };
    out
}

/// Pieces of a contiguous `part`, one for each row of `out`, to the elements from `start` on; `out` is contiguous, in storage of
/// its own.
pub(crate) fn put(device: &Device, part: &Tensor, out: &mut Tensor, [piece, row, start]: [usize; 3]) {
    let kernel = format!("put<{}>", type_name(out.dtype()));
    let sizes = [piece, row, start, part.len()].map(|n| Arg::I64(n as i64));
    let args = [&[part.cuda_in(), out.cuda_out()], &sizes[..]].concat();
    // SAFETY: `put(const T *, T *, i64 piece, i64 row, i64 start, i64 count)` writes the part's place in each row.
    unsafe { launch(device, &KERNELS, &kernel, over(part.len()), &args) };
}

pub(crate) fn fill(device: &Device, out: &mut Tensor, value: f64) {
    let (kernel, count) = (format!("fill<{}>", type_name(out.dtype())), out.len());
    // SAFETY: `fill(T *, double, i64)` writes all of `out`, which is contiguous.
    unsafe {
        launch(device, &KERNELS, &kernel, over(count), &[out.cuda_out(), Arg::F64(value), Arg::I64(count as i64)])
    };
}

/// `sum += x`; both contiguous, `sum` in storage of its own.
pub(crate) fn add_assign(device: &Device, sum: &mut Tensor, x: &Tensor) {
    let (kernel, count) = (format!("add_assign<{}>", type_name(sum.dtype())), sum.len());
    // SAFETY: `add_assign(T *, const T *, i64)` over as many elements as both have.
    unsafe { launch(device, &KERNELS, &kernel, over(count), &[sum.cuda_out(), x.cuda_in(), Arg::I64(count as i64)]) };
}

/// `x *= factor`; contiguous, in storage of its own.
pub(crate) fn scale(device: &Device, x: &mut Tensor, factor: f64) {
    let (kernel, count) = (format!("scale<{}>", type_name(x.dtype())), x.len());
    // SAFETY: `scale(T *, double, i64)` over all of `x`.
    unsafe {
        launch(device, &KERNELS, &kernel, over(count), &[x.cuda_out(), Arg::F64(factor), Arg::I64(count as i64)])
    };
}

/// Rows of which a block sums a column: fixed, so that the order of sums depends on the shape only.
pub const PART: usize = 1024;

/// For kernels that call `sum_columns` with [`PART`] rows a block: the number of parts, and the launch.
pub fn columns_of_parts(rows: usize, columns: usize) -> (usize, Launch) {
    let parts = rows.div_ceil(PART).max(1);
    (parts, Launch { grid: [columns.div_ceil(32) as u32, parts as u32, 1], block: [32, 8, 1], shared: 0 })
}

/// `Σ_r x[r, c]` of a contiguous `[rows, columns]`, written to `out` `[columns]`; in f64, in two steps.
pub(crate) fn sum_rows(device: &Device, x: &Tensor, [rows, columns]: [usize; 2], out: &mut Tensor) {
    let (parts, shape) = columns_of_parts(rows, columns);
    let mut partial = x.new_empty(DType::F64, &[parts, columns]);
    let name = type_name(x.dtype());
    let [rows, columns] = [rows as i64, columns as i64];
    // SAFETY: `sum_rows(const T *, double *, i64 rows, i64 columns)` writes `[gridDim.y, columns]`, and
    // `sum_parts(const double *, T *, i64 parts, i64 columns)` reads them.
    unsafe {
        let args = [x.cuda_in(), partial.cuda_out(), Arg::I64(rows), Arg::I64(columns), Arg::I64(PART as i64)];
        launch(device, &KERNELS, &format!("sum_rows<{name}>"), shape, &args);
        let args = [partial.cuda_in(), out.cuda_out(), Arg::I64(parts as i64), Arg::I64(columns)];
        launch(device, &KERNELS, &format!("sum_parts<{name}>"), over(columns as usize), &args);
    }
}

/// `Σ x²` of a contiguous tensor, as a tensor `[1]` of F64.
pub(crate) fn sum_of_squares(device: &Device, x: &Tensor) -> Tensor {
    // Fixed by the size, as the order of sums is.
    let parts = x.len().div_ceil(16 * THREADS as usize).clamp(1, 1024);
    let mut partial = x.new_empty(DType::F64, &[parts]);
    let mut out = x.new_empty(DType::F64, &[1]);
    let (kernel, count) = (format!("sum_squares<{}>", type_name(x.dtype())), x.len() as i64);
    // SAFETY: `sum_squares(const T *, double *, i64)` writes a number of each block, and `sum_parts(const double *, T *,
    // i64 parts, i64 columns)` reads them.
    unsafe {
        let args = [x.cuda_in(), partial.cuda_out(), Arg::I64(count)];
        launch(device, &KERNELS, &kernel, Launch::of(parts as u32, THREADS), &args);
        let args = [partial.cuda_in(), out.cuda_out(), Arg::I64(parts as i64), Arg::I64(1)];
        launch(device, &KERNELS, "sum_parts<double>", over(1), &args);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device as Place, Rng};

    /// `f` of a tensor on each device that there is, with the tensor itself.
    fn on_devices(x: &Tensor, f: impl Fn(&Tensor)) {
        let devices = Device::for_tests();
        assert!(!devices.is_empty() || !cfg!(target_os = "linux"));
        for device in devices {
            let there = x.to(&Place::Cuda(device)).unwrap();
            assert!(there.cuda().is_some() && there.dtype() == x.dtype() && there.shape() == x.shape());
            f(&there);
        }
    }

    #[test]
    fn elements_come_back_as_they_went() {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::I64, DType::U32] {
            for shape in [&[][..], &[3], &[0, 4], &[5, 7, 3]] {
                let x = Rng::new(1).normal(DType::F64, shape, 0.0, 3.0).cast(dtype);
                on_devices(&x, |there| {
                    assert_eq!(there.to_f64_vec(), x.to_f64_vec());
                    assert_eq!(there.to(&Place::Cpu).unwrap().to_f64_vec(), x.to_f64_vec());
                    assert_eq!(there.copy().to_f64_vec(), x.to_f64_vec());
                });
            }
        }
    }

    #[test]
    fn views_are_copied_and_converted_as_on_the_cpu() {
        let x = Rng::new(2).normal(DType::F64, &[4, 5, 6], 0.0, 3.0);
        let views: [fn(&Tensor) -> Tensor; 5] = [
            |x| x.transpose(0, 2),
            |x| x.slice(1, 1, 5, 2),
            |x| x.select(2, 3),
            |x| x.narrow(0, 1, 2).unsqueeze(1).expand(&[2, 3, 5, 6]),
            |x| x.permute(&[1, 2, 0]).reshape(&[30, 4]),
        ];
        on_devices(&x, |there| {
            for view in views {
                for dtype in [DType::F64, DType::F32, DType::BF16] {
                    let (here, there) = (view(&x).cast(dtype), view(there).cast(dtype));
                    assert_eq!((there.shape(), there.to_f64_vec()), (here.shape(), here.to_f64_vec()));
                    assert_eq!(there.cast(DType::F32).to_f64_vec(), here.cast(DType::F32).to_f64_vec());
                }
            }
        });
    }

    #[test]
    fn squares_are_summed_as_on_the_cpu() {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            for shape in [&[0, 3][..], &[1], &[301, 70]] {
                let x = Rng::new(6).normal(DType::F64, shape, 0.0, 3.0).cast(dtype);
                let expected = crate::sums_of_squares(&[&x, &x.transpose(0, x.rank() - 1)]);
                on_devices(&x, |there| {
                    let found = crate::sums_of_squares(&[there, &there.transpose(0, x.rank() - 1)]);
                    let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-12 * b;
                    assert!(found.len() == 2 && found.iter().zip(&expected).all(close), "{found:?} {expected:?}");
                });
            }
        }
    }

    #[test]
    fn parts_stand_side_by_side() {
        for dtype in [DType::F32, DType::BF16, DType::I64] {
            let x = Rng::new(5).normal(DType::F64, &[3, 4, 2], 0.0, 9.0).cast(dtype);
            on_devices(&x, |there| {
                for axis in 0..3 {
                    let of = |x: &Tensor| crate::concat(&[x, &x.narrow(axis, 1, 1), &x.narrow(axis, 0, 0)], axis);
                    assert_eq!((of(there).shape(), of(there).to_f64_vec()), (of(&x).shape(), of(&x).to_f64_vec()));
                    let over = |x: &Tensor| {
                        let mut changed = x.clone();
                        changed.put(axis, 1, &x.narrow(axis, 0, 1));
                        [changed.to_f64_vec(), x.to_f64_vec()]
                    };
                    assert_eq!(over(there), over(&x));
                }
            });
        }
    }

    #[test]
    fn filling_accumulating_scaling_and_summing_are_those_of_the_cpu() {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let x = Rng::new(3).normal(dtype, &[1100, 3, 2], 0.0, 1.0);
            let sum = Rng::new(4).normal(dtype, &[2, 3, 1100], 0.0, 1.0);
            on_devices(&x, |there| {
                assert_eq!(there.new_full(dtype, &[7], 0.1).to_f64_vec(), Tensor::full(dtype, &[7], 0.1).to_f64_vec());
                let (mut here, mut sum_there) = (sum.clone(), sum.to(&there.device()).unwrap());
                here.add_assign(&x.permute(&[2, 1, 0]));
                sum_there.add_assign(&there.permute(&[2, 1, 0]));
                assert_eq!(sum_there.to_f64_vec(), here.to_f64_vec());
                here.scale(0.3);
                sum_there.scale(0.3);
                let near = |(a, b): (f64, f64)| (a - b).abs() <= 1e-2 * b.abs();
                assert!(sum_there.to_f64_vec().into_iter().zip(here.to_f64_vec()).all(near));
                for shape in [&[][..], &[2], &[3, 1], &[1100, 1, 2], &[1, 3, 2]] {
                    let (here, there) = (x.sum_to(shape).to_f64_vec(), there.sum_to(shape).to_f64_vec());
                    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-2 * b.abs().max(1e-2);
                    assert!(there.iter().zip(&here).all(near), "{shape:?}: {there:?}, {here:?}");
                    assert_eq!(there.len(), here.len());
                }
            });
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[should_panic(expected = "an operation without a CUDA kernel met a tensor on cuda:0")]
    fn what_has_no_kernel_says_so() {
        let there = Tensor::ones(DType::F32, &[2]).to(&Place::Cuda(Device::emulated(0).unwrap())).unwrap();
        there.index_select(0, &Tensor::from_slice(&[1i64], &[1]));
    }
}
