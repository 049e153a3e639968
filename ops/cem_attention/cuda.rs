//! On a CUDA device: the kernels of `cem_attention.cu`.

use kumiki_tensor::Tensor;
use kumiki_tensor::cuda::{Arg, Device, Launch, Source, launch, type_name};
use kumiki_tensor::{DType, kernels};

use super::CemAttentionBackward;
use super::backward::{DiagonalGradients, Gradients};
use super::forward::Attended;
use crate::arithmetic::Mul;
use crate::broadcast::zip_broadcast;
use crate::cuda::{TILE, TILE_THREADS, tile_size};
use crate::sums::{product_sum_to, sum_axes};

pub(crate) static KERNELS: Source = Source {
    file: "cem_attention.cu",
    text: include_str!("cem_attention.cu"),
    headers: &[TILE],
    kernels: kernels![
        "cem_forward" of "float, false" "float, true" "double, false",
        "cem_mix" of "float, false" "float, true" "double, false",
        "cem_delta" of "float, false" "float, true" "double, false",
        "cem_backward_queries" of "float, false" "float, true" "double, false",
        "cem_backward_direct" of "float, false" "float, true" "double, false",
        "cem_backward_keys" of "float, false" "float, true" "double, false",
        "cem_backward_history" of "float, false" "float, true" "double, false",
    ],
};

/// As `forward::forward`.
pub(super) fn forward(saved: &CemAttentionBackward) -> Attended {
    let on = OnDevice::new(saved);
    let [batch, queries, _, heads, width, d_model, groups] = on.sizes;
    let mut context = saved.q.new_empty(on.dtype, saved.q.shape());
    let mut lse = saved.q.new_empty(on.dtype, &[batch, queries, heads]);
    let outputs = [context.cuda_out(), lse.cuda_out()];
    // SAFETY: the kernel's arguments, and blocks for all of the outputs.
    unsafe { on.launch("cem_forward", (queries, heads, width), None, &outputs) };
    let mix = (groups > 0).then(|| {
        let mut mix = saved.q.new_empty(on.dtype, &[batch, queries, groups, d_model]);
        // SAFETY: likewise.
        unsafe { on.launch("cem_mix", (queries, groups, d_model), Some(&lse), &[mix.cuda_out()]) };
        mix
    });
    Attended { context, mix, lse }
}

/// `Σ_g d_g ⊙ x_g` `[N, D]`, of `[B, T_q, G, D]`.
pub(super) fn on_diagonal(saved: &CemAttentionBackward, x: &Tensor) -> Tensor {
    let d = &saved.diagonal.as_ref().expect("a diagonal").d;
    let (groups, d_model) = (d.dim(0), d.dim(1));
    let rows = x.reshape(&[x.len() / (groups * d_model), groups, d_model]);
    sum_axes(&zip_broadcast(&Mul, &rows, d), &[1], 1.0)
}

/// As `backward::backward`, of `dcontext` in the frame of position 0 and `dm` `[B, T_q, D]`.
pub(super) fn backward(saved: &CemAttentionBackward, dcontext: &Tensor, dm: &Tensor) -> Gradients {
    let on = OnDevice::new(saved);
    let [batch, queries, keys, heads, width, d_model, groups] = on.sizes;
    let lse = saved.lse.as_ref();
    let empty = |shape: &[usize]| saved.q.new_empty(on.dtype, shape);
    let arrived = [dcontext.cuda_in(), dm.cuda_in()];
    let mut delta = empty(&[batch, queries, heads]);
    // SAFETY: the kernel's arguments, and blocks for all of the output; so for the others below.
    unsafe { on.launch("cem_delta", (queries, heads, 1), lse, &[arrived[0], arrived[1], delta.cuda_out()]) };
    let given = [arrived[0], arrived[1], delta.cuda_in()];
    let mut dq = empty(saved.q.shape());
    // SAFETY: as above.
    unsafe {
        on.launch("cem_backward_queries", (queries, heads, width), lse, &[&given[..], &[dq.cuda_out()]].concat());
    }
    let mut dk = empty(&[batch, keys, heads, width]);
    // SAFETY: as above.
    unsafe { on.launch("cem_backward_keys", (keys, heads, width), lse, &[&given[..], &[dk.cuda_out()]].concat()) };
    let diagonal = (groups > 0).then(|| {
        let mut pull = empty(&[batch, queries, groups, d_model]);
        // SAFETY: as above.
        unsafe {
            let args = [&given[..], &[pull.cuda_out()]].concat();
            on.launch("cem_backward_direct", (queries, groups, d_model), lse, &args);
        }
        let mut dhistory = empty(&[batch, keys, d_model]);
        // SAFETY: as above.
        unsafe {
            let args = [&given[..], &[dhistory.cuda_out()]].concat();
            on.launch("cem_backward_history", (keys, 1, d_model), lse, &args);
        }
        let mix = saved.diagonal.as_ref().and_then(|g| g.mix.clone()).expect("of the forward");
        let by_groups =
            |x: &Tensor| x.reshape(&[batch * queries, x.len() / (batch * queries * d_model).max(1), d_model]);
        let over_rows = |x: &Tensor, y: &Tensor| product_sum_to(by_groups(x), &by_groups(y), &[groups, d_model]);
        let mut dd = over_rows(&mix, dm);
        dd.add_assign(&over_rows(&pull, &saved.x));
        DiagonalGradients { dx: on_diagonal(saved, &pull).reshape(&[batch, queries, d_model]), dd, dhistory }
    });
    Gradients { dq, dk, diagonal }
}

struct OnDevice<'a> {
    saved: &'a CemAttentionBackward,
    dtype: DType,
    /// B, T_q, T_k, H, K, D, G; D and G are 0 without a diagonal.
    sizes: [usize; 7],
}

impl<'a> OnDevice<'a> {
    fn new(saved: &'a CemAttentionBackward) -> OnDevice<'a> {
        let (q, k) = (&saved.q, &saved.k);
        let [d_model, groups] = saved.diagonal.as_ref().map_or([0; 2], |g| [g.d.dim(1), g.d.dim(0)]);
        OnDevice { saved, dtype: q.dtype(), sizes: [q.dim(0), q.dim(1), k.dim(1), q.dim(2), q.dim(3), d_model, groups] }
    }

    fn device(&self) -> &Device {
        self.saved.q.cuda().expect("on a CUDA device")
    }

    /// Launches a kernel with blocks for tiles of so many tokens, so many times each, and of so many columns.
    ///
    /// # Safety
    /// As [`Device::launch`], but for the operands.
    unsafe fn launch(
        &self,
        kernel: &str,
        (tokens, times, columns): (usize, usize, usize),
        lse: Option<&Tensor>,
        more: &[Arg],
    ) {
        let CemAttentionBackward { q, k, x, diagonal, .. } = self.saved;
        let [batch, queries, keys, heads, width, d_model, groups] = self.sizes;
        let tile = tile_size(self.dtype);
        let strides = [0, 1, 2].map(|axis| k.strides()[axis]);
        let beta = (width as f64).powf(-0.5);
        // The kernels' `Cem`.
        let numbers = [heads, queries, keys, width, d_model, groups].into_iter().chain(strides).map(|n| n as u64);
        let problem: Vec<u8> = numbers.chain([beta.to_bits()]).flat_map(u64::to_ne_bytes).collect();
        let (history, d) = diagonal.as_ref().map(|g| (&g.history, &g.d)).unzip();
        let [history, d, lse] = [history, d, lse].map(|x| x.map_or(Arg::Null, Tensor::cuda_in));
        let operands = [Arg::Struct(&problem), q.cuda_in(), k.cuda_in(), x.cuda_in(), history, d, lse];
        let blocks = u32::try_from(batch * times * tokens.div_ceil(tile)).expect("so many rows do not fit in memory");
        let shape = Launch { grid: [blocks, columns.div_ceil(tile) as u32, 1], block: [TILE_THREADS, 1, 1], shared: 0 };
        let narrow = self.saved.narrow && self.dtype == DType::F32;
        let kernel = format!("{kernel}<{}, {narrow}>", type_name(self.dtype));
        // SAFETY: sizes and strides are those of the operands; for the rest, the caller's.
        unsafe { launch(self.device(), &KERNELS, &kernel, shape, &[&operands[..], more].concat()) };
    }
}
