//! The CUDA side of the loops over elements, and which operators have one.
//!
//! A formula's struct has a counterpart of the same name in the `.cu` file beside it; [`OnCuda`] names both. Kernels of
//! other operators stand in their own files.

use kumiki_tensor::cuda::{Arg, Device, Launch, Source, launch, over, type_name, view};
use kumiki_tensor::{DType, Element, Tensor};

/// The header of all formulas.
pub(crate) const ELEMENTWISE: (&str, &str) = ("elementwise.cuh", include_str!("elementwise.cuh"));

/// The header of products of tiles.
pub(crate) const TILE: (&str, &str) = ("tile.cuh", include_str!("tile.cuh"));
/// As there.
pub(crate) const TILE_THREADS: u32 = 128;
/// Rows and columns of a tile of numbers of this type, as there.
pub(crate) fn tile_size(dtype: DType) -> usize {
    if dtype == DType::F64 { 32 } else { 64 }
}

/// The kernels of an operator on tiles: of a type, one of the values, and whether products are narrow; of both types; of one.
macro_rules! fused {
    ($($tiled:literal)+; $($other:literal)*; $($plain:literal)*) => { kumiki_tensor::kernels![
        $($tiled of "float, float, false" "float, float, true" "float, bf16, false" "float, bf16, true" "double, double, false",)+
        $($other of "float, float" "float, bf16" "double, double",)*
        $($plain of "float" "double",)*
    ] };
}
pub(crate) use fused;

/// Operators that run on a CUDA device; the others panic there with a sentence.
pub const ON_CUDA: &[&str] = &[
    "abs",
    "add",
    "add_scalar",
    "attention",
    "attention_with_lse",
    "cast",
    "causal_attention",
    "cem_attention",
    "cem_attention_energy",
    "cem_mlp",
    "cem_mlp_energy",
    "clamp",
    "concat",
    "contiguous",
    "cross_entropy",
    "cross_entropy_from_hidden",
    "cross_entropy_from_hidden_sum",
    "cross_entropy_rows",
    "cross_entropy_sum",
    "cumsum",
    "div",
    "dropout",
    "dual_attention",
    "embedding",
    "exp",
    "expand",
    "feature_map",
    "gate_aggregate",
    "gate_aggregate_mul",
    "gather",
    "gau_attention",
    "gau_attention_mul",
    "gelu",
    "index_select",
    "l2_normalize",
    "layer_norm",
    "linear",
    "log",
    "log_softmax",
    "logsumexp",
    "matmul",
    "max",
    "mean",
    "mixed_chunk_attention",
    "mixed_chunk_attention_mul",
    "mul",
    "mul_scalar",
    "narrow",
    "neg",
    "permute",
    "pow",
    "prod",
    "relu",
    "relu_squared",
    "reshape",
    "rms_norm",
    "rope",
    "rope_at",
    "sigmoid",
    "silu",
    "silu_integral",
    "softmax",
    "softplus",
    "sqrt",
    "squeeze",
    "sub",
    "sum",
    "swiglu",
    "tanh",
    "transpose",
    "unsqueeze",
    "var",
    "windowed_prefix",
    "windowed_prefix_mul",
];

/// The sources of the operators' kernels.
pub const SOURCES: &[&Source] = &[
    &crate::activations::KERNELS,
    &crate::adamw::KERNELS,
    &crate::arithmetic::KERNELS,
    &crate::attention_tiles::CUDA_KERNELS,
    &crate::cem_attention::CUDA_KERNELS,
    &crate::cem_mlp::KERNELS,
    &crate::cross_entropy::KERNELS,
    &crate::cross_entropy_from_hidden_cuda::KERNELS,
    &crate::cumsum::KERNELS,
    &crate::dropout::KERNELS,
    &crate::feature_map::KERNELS,
    &crate::gau_attention::KERNELS,
    &crate::index_select::KERNELS,
    &crate::layer_norm::KERNELS,
    &crate::logsumexp::KERNELS,
    &crate::max::KERNELS,
    &crate::pow::KERNELS,
    &crate::prefix_cuda::KERNELS,
    &crate::prod::KERNELS,
    &crate::rms_norm::KERNELS,
    &crate::rope::KERNELS,
    &crate::silu_integral::KERNELS,
    &crate::softmax::KERNELS,
    &crate::swiglu::KERNELS,
    &crate::unary::KERNELS,
    &crate::unit_rows::KERNELS,
    &crate::variance::KERNELS,
    &crate::views::KERNELS,
    &crate::windowed_prefix::CUDA_KERNELS,
];

/// A formula's counterpart on a CUDA device.
pub(crate) trait OnCuda {
    /// Where its struct is.
    const KERNELS: &'static Source;
    /// The struct.
    const NAME: &'static str;
    /// Its numbers.
    fn numbers(&self) -> [f64; 2] {
        [0.0; 2]
    }
}

/// The source of a file's formulas, such as `formulas!("f.cu", ["map" of "Silu" "Clamp"], [Silu, Clamp(|f| [f.lo, f.hi])])`,
/// and [`OnCuda`] of each, with its numbers where it has some.
macro_rules! formulas {
    (
        $file:literal, [$($kernel:literal of $($name:literal)+),+ $(,)?], [$($formula:ident $(($numbers:expr))?),+ $(,)?]
    ) => {
        pub(crate) static KERNELS: kumiki_tensor::cuda::Source = kumiki_tensor::cuda::Source {
            file: $file,
            text: include_str!($file),
            headers: &[crate::cuda::ELEMENTWISE],
            kernels: &[$($(
                concat!($kernel, "<float, ", $name, ">"),
                concat!($kernel, "<double, ", $name, ">"),
                concat!($kernel, "<bf16, ", $name, ">"),
            )+)+],
        };
        $(impl crate::cuda::OnCuda for $formula {
            const KERNELS: &'static kumiki_tensor::cuda::Source = &KERNELS;
            const NAME: &'static str = stringify!($formula);
            $(fn numbers(&self) -> [f64; 2] {
                let numbers: fn(&Self) -> [f64; 2] = $numbers;
                numbers(self)
            })?
        })+
    };
}
pub(crate) use formulas;

fn kernel<F: OnCuda>(of: &str, dtype: DType) -> String {
    format!("{of}<{}, {}>", type_name(dtype), F::NAME)
}

/// `name<type>`.
pub(crate) fn kernel_of(name: &str, dtype: DType) -> String {
    format!("{name}<{}>", type_name(dtype))
}

/// A block for each row of `d` numbers.
pub(crate) fn by_rows(rows: usize, d: usize) -> Launch {
    let threads = d.next_multiple_of(32).clamp(32, 256);
    Launch::of(
        u32::try_from(rows).expect("so many rows do not fit in memory"),
        if d == 0 { 32 } else { threads as u32 },
    )
}

/// A warp for each of so many rows.
pub(crate) fn by_warps(rows: usize) -> Launch {
    const WARPS: usize = 4;
    Launch::of(u32::try_from(rows.div_ceil(WARPS)).expect("so many rows do not fit in memory"), 32 * WARPS as u32)
}

/// Numbers on a device, in one axis.
pub(crate) fn on<E: Element>(device: &Device, numbers: &[E]) -> Tensor {
    let there = Tensor::from_slice(numbers, &[numbers.len()]).to(&kumiki_tensor::Device::Cuda(device.clone()));
    there.unwrap_or_else(|error| panic!("{error}"))
}

/// Indices on a device.
pub(crate) fn ids_on(device: &Device, ids: &[usize]) -> Tensor {
    on(device, &ids.iter().map(|&id| id as i64).collect::<Vec<_>>())
}

/// `f` of every element of a contiguous tensor.
pub(crate) fn map<F: OnCuda>(device: &Device, f: &F, x: &Tensor) -> Tensor {
    let mut out = x.new_empty(x.dtype(), x.shape());
    let (count, [a, b]) = (x.len(), f.numbers());
    let args = [x.cuda_in(), out.cuda_out(), Arg::I64(count as i64), Arg::F64(a), Arg::F64(b)];
    // SAFETY: `map(const T *, T *, i64, double, double)` reads and writes so many elements of contiguous tensors.
    unsafe { launch(device, F::KERNELS, &kernel::<F>("map", x.dtype()), over(count), &args) };
    out
}

/// `f` of the elements of two contiguous tensors of one shape and dtype.
pub(crate) fn zip<F: OnCuda>(device: &Device, f: &F, x: &Tensor, y: &Tensor) -> Tensor {
    let mut out = x.new_empty(x.dtype(), x.shape());
    let (count, [a, b]) = (x.len(), f.numbers());
    let args = [x.cuda_in(), y.cuda_in(), out.cuda_out(), Arg::I64(count as i64), Arg::F64(a), Arg::F64(b)];
    // SAFETY: `zip(const T *, const T *, T *, i64, double, double)` over so many elements of contiguous tensors.
    unsafe { launch(device, F::KERNELS, &kernel::<F>("zip", x.dtype()), over(count), &args) };
    out
}

/// `f` of two tensors that broadcast to `shape`.
pub(crate) fn zip_views<F: OnCuda>(device: &Device, f: &F, x: &Tensor, y: &Tensor, shape: &[usize]) -> Tensor {
    let mut out = x.new_empty(x.dtype(), shape);
    let (x, y) = (x.expand(shape), y.expand(shape));
    let (of_x, of_y) = (view(x.shape(), x.strides()), view(y.shape(), y.strides()));
    let (count, [a, b]) = (out.len(), f.numbers());
    let args = [
        Arg::Struct(&of_x),
        Arg::Struct(&of_y),
        x.cuda_in(),
        y.cuda_in(),
        out.cuda_out(),
        Arg::I64(count as i64),
        Arg::F64(a),
        Arg::F64(b),
    ];
    // SAFETY: `zip_views(View, View, const T *, const T *, T *, i64, double, double)` reads where the views lie.
    unsafe { launch(device, F::KERNELS, &kernel::<F>("zip_views", x.dtype()), over(count), &args) };
    out
}
