//! On a CUDA device: the kernels of `windowed.cu` for pairs, and the running sums of `prefix_cuda` for what lies before them.

use kumiki_tensor::cuda::{Arg, Device, Launch, Source, launch, over, type_name};
use kumiki_tensor::{DType, Tensor};

use super::WindowedPrefixBackward;
use crate::cuda::{TILE, TILE_THREADS, fused, tile_size};
use crate::prefix_cuda::{Chunks, States};

pub(crate) static KERNELS: Source = Source {
    file: "windowed.cu",
    text: include_str!("windowed.cu"),
    headers: &[TILE],
    kernels: fused!["windowed_forward" "windowed_backward_queries" "windowed_backward_keys"; "windowed_divide"; ],
};

/// The operands with `tau q̂` and `k̂` in the place of `q` and `k`.
pub(super) struct Pairs<'a> {
    saved: &'a WindowedPrefixBackward,
    q: Tensor,
    k: Tensor,
}

/// Of `tau q̂`, `k̂`, both features, `g` and `tau`.
pub(super) struct Gradients {
    pub dq: Tensor,
    pub dk: Tensor,
    pub dphi_q: Tensor,
    pub dphi_k: Tensor,
    pub dg: Tensor,
    pub dtau: Tensor,
}

impl<'a> Pairs<'a> {
    pub fn new(saved: &'a WindowedPrefixBackward, q: Tensor, k: Tensor) -> Pairs<'a> {
        Pairs { saved, q, k }
    }

    /// Gate, its product with `v`, and the sums of weights.
    pub fn forward(&self, keep: bool) -> (Option<Tensor>, Option<Tensor>, Tensor) {
        let [_, _, _, phi_k, g] = &self.saved.operands;
        let v = self.saved.v.as_ref();
        let mut gate = (keep || v.is_none()).then(|| g.new_empty(g.dtype(), g.shape()));
        let mut gated = v.map(|v| g.new_empty(v.dtype(), g.shape()));
        let mut den = g.new_empty(self.q.dtype(), &[g.dim(0), g.dim(2), g.dim(1)]);
        let (sums, phi_sums) = (States::before(phi_k, g, self.chunks()), self.features_before());
        let outputs = [
            v.map_or(Arg::Null, Tensor::cuda_in),
            gate.as_mut().map_or(Arg::Null, Tensor::cuda_out),
            gated.as_mut().map_or(Arg::Null, Tensor::cuda_out),
            den.cuda_out(),
        ];
        // SAFETY: the kernel's arguments, and blocks for all of the outputs.
        unsafe { self.launch("windowed_forward", self.tiles(g.dim(3)), [&sums, &phi_sums], &outputs) };
        (gate, gated, den)
    }

    /// From what arrives at the gate, and its product with the gate `[B, T, H]`.
    pub fn backward(&self, mut dout: Tensor, mut delta: Tensor, den: &Tensor) -> Gradients {
        let [_, _, phi_q, phi_k, g] = &self.saved.operands;
        dout.own();
        delta.own();
        let dtype = self.q.dtype();
        let sizes = [g.dim(2), g.dim(1), g.dim(3), g.len()].map(|n| Arg::I64(n as i64));
        let args = [&[dout.cuda_out(), delta.cuda_out(), den.cuda_in()], &sizes[..]].concat();
        let kernel = format!("windowed_divide<{}, {}>", type_name(dtype), type_name(g.dtype()));
        // SAFETY: the kernel's arguments; one number of `delta` and `den` for each row of `dout`.
        unsafe { launch(self.device(), &KERNELS, &kernel, over(g.len()), &args) };

        let [mut dq, mut dk] = [&self.q, &self.k].map(|x| x.new_empty(dtype, x.shape()));
        let [mut dphi_q, mut dphi_k] = [phi_q, phi_k].map(|x| x.new_empty(dtype, x.shape()));
        let mut dg = g.new_empty(g.dtype(), g.shape());
        let tiles = g.dim(1).div_ceil(tile_size(dtype));
        let mut dtau = g.new_empty(DType::F64, &[g.dim(0), g.dim(2), tiles]);
        let arrived = [dout.cuda_in(), delta.cuda_in()];
        let (sums, phi_sums) = (States::before(phi_k, g, self.chunks()), self.features_before());
        let outputs = [&arrived[..], &[dq.cuda_out(), dphi_q.cuda_out(), dtau.cuda_out()]].concat();
        let parts = self.tiles(self.q.dim(3)).max(1) + self.tiles(phi_q.dim(3));
        // SAFETY: the kernel's arguments, and blocks for all of the outputs.
        unsafe { self.launch("windowed_backward_queries", parts, [&sums, &phi_sums], &outputs) };

        let of_rows = delta.reshape(&[g.dim(0), g.dim(1), g.dim(2), 1]);
        let (sums, phi_sums) =
            (States::behind(phi_q, &dout, self.chunks()), States::behind(phi_q, &of_rows, self.chunks()));
        let outputs = [&arrived[..], &[dk.cuda_out(), dphi_k.cuda_out(), dg.cuda_out()]].concat();
        let parts = self.tiles(self.k.dim(3)) + self.tiles(phi_k.dim(3)) + self.tiles(g.dim(3));
        // SAFETY: likewise.
        unsafe { self.launch("windowed_backward_keys", parts, [&sums, &phi_sums], &outputs) };
        let dtau = dtau.sum_to(&[1, g.dim(2), 1]).reshape(&[g.dim(2)]).cast(dtype);
        Gradients { dq, dk, dphi_q, dphi_k, dg, dtau }
    }

    /// Running sums of the keys' features alone.
    fn features_before(&self) -> States {
        let phi_k = &self.saved.operands[3];
        let one = phi_k.new_full(phi_k.dtype(), &[1, 1, 1, 1], 1.0);
        let ones = one.expand(&[phi_k.dim(0), phi_k.dim(1), phi_k.dim(2), 1]);
        States::before(phi_k, &ones, self.chunks())
    }

    /// Tiles between one of queries and the last whose keys are far from all of them.
    fn lag(&self) -> usize {
        let window = self.saved.window.min(self.q.dim(1).max(1));
        (window - 1).div_ceil(tile_size(self.q.dtype()))
    }

    /// Running sums are of tiles. What is before a tile's pairs is in those of the tile `lag` before it.
    fn chunks(&self) -> Chunks {
        Chunks { chunk: tile_size(self.q.dtype()), distance: 1 + self.lag(), mean: false, narrow: self.saved.narrow }
    }

    fn tiles(&self, width: usize) -> usize {
        width.div_ceil(tile_size(self.q.dtype()))
    }

    fn device(&self) -> &Device {
        self.q.cuda().expect("on a CUDA device")
    }

    /// Launches a kernel on the operands, running sums and what follows them, with so many blocks for each tile of tokens.
    ///
    /// # Safety
    /// As [`Device::launch`], but for the operands.
    unsafe fn launch(&self, kernel: &str, parts: usize, states: [&States; 2], more: &[Arg]) {
        let [_, _, phi_q, phi_k, g] = &self.saved.operands;
        let (dtype, [batch, time, heads, width]) = (self.q.dtype(), [0, 1, 2, 3].map(|axis| self.q.dim(axis)));
        let window = self.saved.window.min(time.max(1));
        let sizes = [heads, time, window, self.lag(), width, phi_q.dim(3), g.dim(3)];
        let rows = [Some(&self.q), Some(&self.k), Some(phi_q), Some(phi_k), Some(g), self.saved.v.as_ref()];
        let strides = rows.into_iter().flat_map(|x| x.map_or([0; 3], |x| [0, 1, 2].map(|axis| x.strides()[axis])));
        // The kernels' `Windowed`.
        let problem: Vec<u8> = sizes.into_iter().chain(strides).flat_map(|n| (n as u64).to_ne_bytes()).collect();
        let operands = [&self.q, &self.k, phi_q, phi_k, g, &self.saved.tau].map(Tensor::cuda_in);
        let states = states.map(|states| states.sums().cuda_in());
        let args = [&[Arg::Struct(&problem)], &operands[..], &states, more].concat();
        let narrow = self.saved.narrow && dtype == DType::F32;
        let kernel = format!("{kernel}<{}, {}, {narrow}>", type_name(dtype), type_name(g.dtype()));
        let blocks = u32::try_from(batch * heads * self.tiles(time)).expect("so many rows do not fit in memory");
        let shape = Launch { grid: [blocks, parts as u32, 1], block: [TILE_THREADS, 1, 1], shared: 0 };
        // SAFETY: sizes and strides are those of the operands; for the rest, the caller's.
        unsafe { launch(self.device(), &KERNELS, &kernel, shape, &args) };
    }
}
