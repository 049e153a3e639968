//! `attention` on a CUDA device: forward, and backward by queries and then by keys, so that no sum is shared by blocks.

use kumiki_tensor::cuda::{Arg, Device, Launch, Source, launch};
use kumiki_tensor::{Tensor, kernels};

use crate::cuda::kernel_of;

pub(crate) static KERNELS: Source = Source {
    file: "causal_attention.cu",
    text: include_str!("causal_attention.cu"),
    headers: &[],
    kernels: kernels![
        "attention_forward" of "float" "double",
        "attention_delta" of "float" "double",
        "attention_backward_queries" of "float" "double",
        "attention_backward_keys" of "float" "double",
    ],
};

/// As in the kernels.
const THREADS: u32 = 128;
const QUERIES: usize = 16;
const KEYS: usize = 32;

/// `q` `[B, T_q, H, K]`, `k` `[B, T_k, H, K]`, `v` `[B, T_k, H, G]`, of which the last axis lies without gaps, F32 or F64; and the
/// mask of keys `[B, T_k]`, U32.
pub(super) struct Attention<'a> {
    pub q: &'a Tensor,
    pub k: &'a Tensor,
    pub v: &'a Tensor,
    pub mask: Option<&'a Tensor>,
    pub causal: bool,
    pub scale: f64,
}

impl Attention<'_> {
    fn device(&self) -> &Device {
        self.q.cuda().expect("on a CUDA device")
    }

    /// Batch, queries, keys, heads, width, values.
    fn sizes(&self) -> [usize; 6] {
        [self.q.dim(0), self.q.dim(1), self.k.dim(1), self.q.dim(2), self.q.dim(3), self.v.dim(3)]
    }

    /// The kernels' `Problem`.
    fn problem(&self) -> Vec<u8> {
        let [_, queries, keys, heads, width, values] = self.sizes();
        let sizes = [heads, queries, keys, width, values].into_iter();
        let strides = [self.q, self.k, self.v].into_iter().flat_map(|x| x.strides()[..3].to_vec());
        let numbers = sizes.chain(strides).chain([usize::from(self.causal)]).map(|n| (n as u64).to_ne_bytes());
        numbers.chain([self.scale.to_ne_bytes()]).flatten().collect()
    }

    fn mask(&self) -> Arg<'_> {
        self.mask.map_or(Arg::Null, Tensor::cuda_in)
    }

    /// A block for each so many rows of each head, with room for so many numbers.
    fn blocks(&self, rows: usize, tile: usize, room: usize) -> Launch {
        let [batch, _, _, heads, ..] = self.sizes();
        let grid = [rows.div_ceil(tile) as u32, heads as u32, batch as u32];
        let shared = u32::try_from(room * self.q.dtype().size()).expect("a head of so many numbers fits in no block");
        Launch { grid, block: [THREADS, 1, 1], shared }
    }

    /// The output `[B, T_q, H, G]` and the logarithms of sums `[B, T_q, H]`.
    pub fn forward(&self) -> (Tensor, Tensor) {
        let [batch, queries, _, heads, width, values] = self.sizes();
        let mut out = self.q.new_empty(self.q.dtype(), &[batch, queries, heads, values]);
        let mut lse = self.q.new_empty(self.q.dtype(), &[batch, queries, heads]);
        let shape = self.blocks(queries, QUERIES, (QUERIES + KEYS) * (width + 1) + QUERIES * values);
        let problem = self.problem();
        let operands = [self.q.cuda_in(), self.k.cuda_in(), self.v.cuda_in(), self.mask()];
        let args = [&[Arg::Struct(&problem)], &operands[..], &[out.cuda_out(), lse.cuda_out()]].concat();
        let kernel = kernel_of("attention_forward", self.q.dtype());
        // SAFETY: the kernel's arguments; the problem has the tensors' sizes and strides.
        unsafe { launch(self.device(), &KERNELS, &kernel, shape, &args) };
        (out, lse)
    }

    /// The gradients that are needed, of `q`, `k` and `v`.
    pub fn backward(&self, dout: &Tensor, out: &Tensor, lse: &Tensor, needs: [bool; 3]) -> [Option<Tensor>; 3] {
        let [batch, queries, keys, heads, width, values] = self.sizes();
        let (device, dtype, problem) = (self.device(), self.q.dtype(), self.problem());
        let rows = batch * queries * heads;
        let mut delta = self.q.new_empty(dtype, &[batch, queries, heads]);
        let args = [dout.cuda_in(), out.cuda_in(), delta.cuda_out(), Arg::I64(rows as i64), Arg::I64(values as i64)];
        let by_warps = Launch::of(rows.div_ceil(THREADS as usize / 32) as u32, THREADS);
        // SAFETY: the kernel's arguments; a warp for each row.
        unsafe { launch(device, &KERNELS, &kernel_of("attention_delta", dtype), by_warps, &args) };

        let operands = [self.q.cuda_in(), self.k.cuda_in(), self.v.cuda_in(), self.mask()];
        let arrived = [dout.cuda_in(), lse.cuda_in(), delta.cuda_in()];
        let given = [&[Arg::Struct(&problem)], &operands[..], &arrived].concat();
        let room = (QUERIES + KEYS) * (width + values + 2);
        let dq = needs[0].then(|| {
            let mut dq = self.q.new_empty(dtype, self.q.shape());
            let args = [&given[..], &[dq.cuda_out()]].concat();
            let shape = self.blocks(queries, QUERIES, room + QUERIES * width);
            // SAFETY: the kernel's arguments, as in `forward`.
            unsafe { launch(device, &KERNELS, &kernel_of("attention_backward_queries", dtype), shape, &args) };
            dq
        });
        if !needs[1] && !needs[2] {
            return [dq, None, None];
        }
        let mut dk = self.k.new_empty(dtype, &[batch, keys, heads, width]);
        let mut dv = self.v.new_empty(dtype, &[batch, keys, heads, values]);
        let args = [&given[..], &[dk.cuda_out(), dv.cuda_out()]].concat();
        let shape = self.blocks(keys, KEYS, room + KEYS * (width + values));
        // SAFETY: likewise.
        unsafe { launch(device, &KERNELS, &kernel_of("attention_backward_keys", dtype), shape, &args) };
        [dq, needs[1].then_some(dk), needs[2].then_some(dv)]
    }
}
