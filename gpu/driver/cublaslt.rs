//! Products of matrices, by cuBLASLt.
//!
//! The same product takes the same algorithm each time, and adds in the same order. The way is chosen by the library's
//! heuristics from layouts and alignment alone, and kept. Where the inner axis is split over blocks, only the scheme that writes
//! the parts to the workspace, in the type of the sums, and adds them in a kernel of its own is allowed: the others
//! add to the result itself, which for BF16 would round each part. One stream is all that works on the card, so
//! that one workspace is enough, and cuBLAS' promise of equal bits, which holds for one stream, is kept.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::null_mut;

use cudarc::cublaslt::sys::{self, cublasLtMatmulDescAttributes_t as DescAttribute};
use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
use sys::{cublasComputeType_t as Compute, cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cudaDataType_t as Type};
use sys::{cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatmulPreference_t, cublasLtMatrixLayout_t};

use super::card::Core;
use super::layout::{Layouts, Matrix, flattened, layouts};
use super::library::{Library, functions, named_by};
use crate::backend::{Matmul, MatmulType, Operand};
use crate::error::Error;

/// What NVIDIA recommends for its newer cards.
const WORKSPACE: usize = 32 << 20;
/// Blocks of a grid along its last axis, over which batches may be spread.
const LARGEST_BATCH: usize = 65_535;
/// More than any model's step has; a text that grows has others at every length.
const PLANS: usize = 4096;

const NAMES: &[&str] = if cfg!(windows) {
    &["cublasLt64_12.dll", "cublasLt64_13.dll"]
} else {
    &["libcublasLt.so.12", "libcublasLt.so.13", "libcublasLt.so"]
};

functions! {
    /// What is used of cuBLASLt.
    Functions from sys returns cublasStatus_t {
        cublasLtCreate(*mut cublasLtHandle_t);
        cublasLtMatmulDescCreate(*mut cublasLtMatmulDesc_t, Compute, Type);
        cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, DescAttribute, *const c_void, usize);
        cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t);
        cublasLtMatrixLayoutCreate(*mut cublasLtMatrixLayout_t, Type, u64, u64, i64);
        cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t, LayoutAttribute, *const c_void, usize);
        cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t);
        cublasLtMatmulPreferenceCreate(*mut cublasLtMatmulPreference_t);
        cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, Preference, *const c_void, usize);
        cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t);
        cublasLtMatmulAlgoGetHeuristic(
            cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
            cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, c_int,
            *mut sys::cublasLtMatmulHeuristicResult_t, *mut c_int,
        );
        cublasLtMatmul(
            cublasLtHandle_t, cublasLtMatmulDesc_t, *const c_void,
            *const c_void, cublasLtMatrixLayout_t, *const c_void, cublasLtMatrixLayout_t, *const c_void,
            *const c_void, cublasLtMatrixLayout_t, *mut c_void, cublasLtMatrixLayout_t,
            *const sys::cublasLtMatmulAlgo_t, *mut c_void, usize, sys::cudaStream_t,
        );
    }
}

/// cuBLASLt on a card, the workspace, and how the products so far were done.
pub(super) struct Products {
    core: &'static Core,
    f: &'static Functions,
    handle: cublasLtHandle_t,
    workspace: u64,
    plans: HashMap<Key, Plan>,
}

// SAFETY: handles of the process, used under the lock around `Products`.
unsafe impl Send for Products {}

/// All that the choice of an algorithm depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    layouts: Layouts,
    batch: usize,
    tf32: bool,
    /// Bytes, of left, right and result: views may begin anywhere.
    alignment: [u32; 3],
}

/// How a product is done.
struct Plan {
    description: Handle<cublasLtMatmulDesc_t>,
    left: Handle<cublasLtMatrixLayout_t>,
    right: Handle<cublasLtMatrixLayout_t>,
    result: Handle<cublasLtMatrixLayout_t>,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// An object of the library, destroyed with this.
struct Handle<T: Copy>(T, unsafe extern "C" fn(T) -> u32);

impl<T: Copy> Drop for Handle<T> {
    fn drop(&mut self) {
        // SAFETY: created by the library, and not destroyed yet.
        unsafe { (self.1)(self.0) };
    }
}

impl Products {
    /// For a core that is bound.
    pub fn new(core: &'static Core) -> Result<Products, Error> {
        let f = find(named_by("KUMIKI_CUBLASLT").as_deref(), NAMES).map_err(|e| core.error(e))?;
        let mut handle = null_mut();
        // SAFETY: a valid place for the handle.
        check(unsafe { (f.cublasLtCreate)(&raw mut handle) }).map_err(|e| core.error(format_args!("cuBLASLt: {e}")))?;
        let workspace = core
            .allocate(WORKSPACE)?
            .ok_or_else(|| core.error(format_args!("out of memory: {WORKSPACE} bytes for products of matrices")))?;
        Ok(Products { core, f: Box::leak(Box::new(f)), handle, workspace, plans: HashMap::new() })
    }

    /// For a core that is bound.
    pub fn run(&mut self, product: &Matmul) -> Result<(), Error> {
        let product = flattened(product);
        if product.k == 0 {
            return if product.accumulate { Ok(()) } else { self.zeros(&product) };
        }
        for first in (0..product.batch).step_by(LARGEST_BATCH) {
            let from = |operand: Operand| Operand {
                address: operand.address + (first * operand.batch_stride * size(operand.dtype)) as u64,
                ..operand
            };
            let batch = LARGEST_BATCH.min(product.batch - first);
            let part = Matmul { batch, a: from(product.a), b: from(product.b), c: from(product.c), ..product };
            self.multiply(&part).map_err(|e| {
                let Matmul { m, n, k, a, c, .. } = part;
                let types = format!("{:?} to {:?}", a.dtype, c.dtype);
                self.core.error(format_args!("[{m}, {k}] times [{k}, {n}], {batch} of them, {types}, by cuBLASLt: {e}"))
            })?;
        }
        Ok(())
    }

    fn multiply(&mut self, product: &Matmul) -> Result<(), Error> {
        let Matmul { a, b, c, batch, accumulate, tf32, .. } = *product;
        let alignment = [b, a, c].map(|operand| 1 << operand.address.trailing_zeros().min(8));
        let layouts = layouts(product).map_err(|why| Error::new(format!("it cannot do {why}")))?;
        let key = Key { layouts, batch, tf32, alignment };
        if !self.plans.contains_key(&key) {
            if self.plans.len() >= PLANS {
                self.plans.clear();
            }
            let plan = Plan::new(self.f, self.handle, &key)?;
            self.plans.insert(key, plan);
        }
        let plan = &self.plans[&key];
        // As F64 and as F32, which take eight bytes and the first four.
        let (one, beta) = (1.0f64, f64::from(u8::from(accumulate)));
        let (one32, beta32) = (1.0f32, beta as f32);
        let scales: [*const c_void; 2] = match a.dtype {
            MatmulType::F64 => [(&raw const one).cast(), (&raw const beta).cast()],
            _ => [(&raw const one32).cast(), (&raw const beta32).cast()],
        };
        let address = |operand: Operand| std::ptr::without_provenance_mut::<c_void>(operand.address as usize);
        let workspace = std::ptr::without_provenance_mut(self.workspace as usize);
        // SAFETY: layouts and algorithm belong together; the addresses are the caller's, who warrants them; the scales are
        // read during the call.
        check(unsafe {
            (self.f.cublasLtMatmul)(
                self.handle,
                plan.description.0,
                scales[0],
                address(b),
                plan.left.0,
                address(a),
                plan.right.0,
                scales[1],
                address(c),
                plan.result.0,
                address(c),
                plan.result.0,
                &raw const plan.algorithm,
                workspace,
                WORKSPACE,
                self.core.stream.cast(),
            )
        })
    }

    /// A product over an inner axis of no elements.
    fn zeros(&self, product: &Matmul) -> Result<(), Error> {
        let (c, bytes) = (product.c, size(product.c.dtype));
        let width = product.n * bytes;
        let pitch = (c.stride * bytes).max(width);
        for at in 0..product.batch {
            let to = c.address + (at * c.batch_stride * bytes) as u64;
            // SAFETY: the caller warrants the address.
            let status =
                unsafe { (self.core.api.f.cuMemsetD2D8Async)(to, pitch, 0, width, product.m, self.core.stream) };
            self.core.check(status, "zeros")?;
        }
        Ok(())
    }
}

impl Plan {
    fn new(f: &Functions, handle: cublasLtHandle_t, key: &Key) -> Result<Plan, Error> {
        let Layouts { left, right, result } = key.layouts;
        let (compute, scale) = match (left.matrix.dtype, key.tf32) {
            (MatmulType::F64, _) => (Compute::CUBLAS_COMPUTE_64F, Type::CUDA_R_64F),
            (MatmulType::F32, true) => (Compute::CUBLAS_COMPUTE_32F_FAST_TF32, Type::CUDA_R_32F),
            _ => (Compute::CUBLAS_COMPUTE_32F, Type::CUDA_R_32F),
        };
        let (mut description, mut preference) = (null_mut(), null_mut());
        // SAFETY: valid places for the handles.
        unsafe {
            check((f.cublasLtMatmulDescCreate)(&raw mut description, compute, scale))?;
        }
        let description = Handle(description, f.cublasLtMatmulDescDestroy);
        // SAFETY: likewise.
        check(unsafe { (f.cublasLtMatmulPreferenceCreate)(&raw mut preference) })?;
        let preference = Handle(preference, f.cublasLtMatmulPreferenceDestroy);

        let describe = |attribute, value: i32| {
            // SAFETY: the attributes asked for here are of 32 bits.
            check(unsafe { (f.cublasLtMatmulDescSetAttribute)(description.0, attribute, (&raw const value).cast(), 4) })
        };
        describe(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, i32::from(left.transposed))?;
        describe(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, i32::from(right.transposed))?;

        let prefer = |attribute, value: u32| {
            // SAFETY: the attributes asked for here are of 32 bits.
            check(unsafe {
                (f.cublasLtMatmulPreferenceSetAttribute)(preference.0, attribute, (&raw const value).cast(), 4)
            })
        };
        let workspace = WORKSPACE as u64;
        let most = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: this attribute is of 64 bits.
        check(unsafe {
            (f.cublasLtMatmulPreferenceSetAttribute)(preference.0, most, (&raw const workspace).cast(), 8)
        })?;
        let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        prefer(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, scheme as u32)?;
        prefer(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.alignment[0])?;
        prefer(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.alignment[1])?;
        prefer(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.alignment[2])?;
        prefer(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.alignment[2])?;

        let left = layout(f, &left.matrix, key.batch)?;
        let right = layout(f, &right.matrix, key.batch)?;
        let result = layout(f, &result, key.batch)?;
        let (mut found, mut count) = (MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed(), 0);
        // SAFETY: objects of the library, and a place for one answer. Its status is read as a number, for it may be
        // none that the bindings know.
        unsafe {
            let (ask, to, n) = (f.cublasLtMatmulAlgoGetHeuristic, found.as_mut_ptr(), &raw mut count);
            check(ask(handle, description.0, left.0, right.0, result.0, result.0, preference.0, 1, to, n))?;
            check((&raw const (*to).state).cast::<u32>().read())?;
            if count < 1 {
                return Err(Error::new("it knows no way to do this"));
            }
            let algorithm = (&raw const (*to).algo).read();
            Ok(Plan { description, left, right, result, algorithm })
        }
    }
}

fn layout(f: &Functions, matrix: &Matrix, batch: usize) -> Result<Handle<cublasLtMatrixLayout_t>, Error> {
    let dtype = match matrix.dtype {
        MatmulType::F32 => Type::CUDA_R_32F,
        MatmulType::F64 => Type::CUDA_R_64F,
        MatmulType::Bf16 => Type::CUDA_R_16BF,
    };
    let mut layout = null_mut();
    // SAFETY: a valid place for the handle.
    let status =
        unsafe { (f.cublasLtMatrixLayoutCreate)(&raw mut layout, dtype, matrix.rows, matrix.columns, matrix.stride) };
    check(status)?;
    let layout = Handle(layout, f.cublasLtMatrixLayoutDestroy);
    let batch = batch as i32;
    let count = LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
    let offset = LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
    // SAFETY: the count is of 32 bits, at most `LARGEST_BATCH`; the offset, in elements, of 64.
    unsafe {
        check((f.cublasLtMatrixLayoutSetAttribute)(layout.0, count, (&raw const batch).cast(), 4))?;
        check((f.cublasLtMatrixLayoutSetAttribute)(layout.0, offset, (&raw const matrix.batch_stride).cast(), 8))?;
    }
    Ok(layout)
}

/// cuBLASLt in this file, or else under one of these names.
pub(super) fn find(file: Option<&str>, names: &[&str]) -> Result<Functions, Error> {
    let library = Library::find(file, names).map_err(|tried| {
        Error::new(format!(
            "no cuBLASLt, for products of matrices ({tried}): install it by `pip install nvidia-cublas-cu12` or with the \
             CUDA toolkit; KUMIKI_CUBLASLT may name the file"
        ))
    })?;
    let f = Functions::of(&library)?;
    library.leak();
    Ok(f)
}

fn size(dtype: MatmulType) -> usize {
    match dtype {
        MatmulType::F64 => 8,
        MatmulType::F32 => 4,
        MatmulType::Bf16 => 2,
    }
}

/// An error for every status but 0.
fn check(status: u32) -> Result<(), Error> {
    let name = match status {
        0 => return Ok(()),
        1 => "CUBLAS_STATUS_NOT_INITIALIZED",
        3 => "CUBLAS_STATUS_ALLOC_FAILED",
        7 => "CUBLAS_STATUS_INVALID_VALUE",
        8 => "CUBLAS_STATUS_ARCH_MISMATCH",
        11 => "CUBLAS_STATUS_MAPPING_ERROR",
        13 => "CUBLAS_STATUS_EXECUTION_FAILED",
        14 => "CUBLAS_STATUS_INTERNAL_ERROR",
        15 => "CUBLAS_STATUS_NOT_SUPPORTED",
        16 => "CUBLAS_STATUS_LICENSE_ERROR",
        _ => return Err(Error::new(format!("status {status}"))),
    };
    Err(Error::new(name))
}
