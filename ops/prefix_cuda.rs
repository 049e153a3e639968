//! Linear attention over earlier chunks, `y_i = c_i Σ_j (a_i·b_j) v_j`, on a CUDA device: what `mixed_chunk_attention` does beyond
//! its chunks.
//!
//! Chunks are summed side by side, `Σ_j b_j ⊗ v_j` `[features, values]` each, then one after the other; all of them are in
//! memory while an operator runs: `T / chunk · features · values` numbers a head. None is kept for the backward pass.

use kumiki_tensor::cuda::{Arg, Device, Launch, Source, launch, over, type_name};
use kumiki_tensor::{DType, Tensor};

use crate::cuda::{TILE, TILE_THREADS, fused, kernel_of, tile_size};

pub(crate) static KERNELS: Source = Source {
    file: "prefix.cu",
    text: include_str!("prefix.cu"),
    headers: &[TILE],
    kernels: fused!["prefix_states" "prefix_values" "prefix_features"; ; "prefix_scan"],
};

/// How sequences are cut.
#[derive(Clone, Copy)]
pub(crate) struct Chunks {
    /// Tokens of a chunk.
    pub chunk: usize,
    /// A chunk meets the sum of those that lie so many and more before it; 1 for all before it.
    pub distance: usize,
    /// Whether sums over earlier tokens are means over all tokens before the chunk.
    pub mean: bool,
    /// Whether products are narrow.
    pub narrow: bool,
}

/// Running sums of `a_j ⊗ v_j` over chunks, of features `[B, T, H, R]` and values `[B, T, H, E]`.
pub(crate) struct States {
    chunks: Chunks,
    reverse: bool,
    sums: Tensor,
    /// The dtype of values, `[B, T, H, R, E]`.
    dtype: DType,
    sizes: [usize; 5],
}

impl States {
    /// From the left, over what lies before a chunk.
    pub fn before(a: &Tensor, v: &Tensor, chunks: Chunks) -> States {
        States::new(a, v, chunks, false)
    }

    /// From the right, over what lies behind a chunk.
    pub fn behind(a: &Tensor, v: &Tensor, chunks: Chunks) -> States {
        States::new(a, v, chunks, true)
    }

    fn new(a: &Tensor, v: &Tensor, chunks: Chunks, reverse: bool) -> States {
        let sizes = [a.dim(0), a.dim(1), a.dim(2), a.dim(3), v.dim(3)];
        let [batch, time, heads, features, values] = sizes;
        let number = time.div_ceil(chunks.chunk);
        let sums = a.new_empty(a.dtype(), &[batch * heads * number, features, values]);
        let mut states = States { chunks, reverse, sums, dtype: v.dtype(), sizes };
        let tile = tile_size(a.dtype());
        let tiles = features.div_ceil(tile) * values.div_ceil(tile);
        let problem = states.problem([Some(a), Some(v), None]);
        // A mean divides by what lies before a query; from the right, queries are what is summed.
        let mean = Arg::I32(i32::from(chunks.mean && reverse));
        let kernel = states.kernel("prefix_states");
        let args = [Arg::Struct(&problem), a.cuda_in(), v.cuda_in(), states.sums.cuda_out(), mean];
        let device = a.cuda().expect("on a CUDA device");
        // SAFETY: the kernel's arguments; blocks for all tiles of all chunks' sums.
        unsafe { launch(device, &KERNELS, &kernel, blocks(batch * heads * number, tiles), &args) };
        let (size, count) = (features * values, batch * heads * features * values);
        let sizes = [Arg::I64(number as i64), Arg::I64(size as i64)];
        let ends = [Arg::I32(i32::from(reverse)), Arg::I64(count as i64)];
        let args = [&[states.sums.cuda_out()], &sizes[..], &ends].concat();
        // SAFETY: the kernel's arguments; so many numbers of each head in each chunk.
        unsafe { launch(device, &KERNELS, &kernel_of("prefix_scan", a.dtype()), over(count), &args) };
        states
    }

    /// `near + Σ_r a_i[r] sum[r]`, `[B, T, H, E]`, written over `near` where nobody else holds that, and its product with the
    /// gate.
    pub fn add_values(
        &self,
        a: &Tensor,
        mut near: Tensor,
        gate: Option<&Tensor>,
        keep: bool,
    ) -> (Option<Tensor>, Option<Tensor>) {
        let [batch, time, heads, _, values] = self.sizes;
        near.own();
        let mut gated = gate.map(|_| near.new_empty(self.dtype, &[batch, time, heads, values]));
        let problem = self.problem([Some(a), None, gate]);
        let mean = Arg::I32(i32::from(self.chunks.mean && !self.reverse));
        let (there, gate) = (near.cuda_out(), gate.map_or(Arg::Null, Tensor::cuda_in));
        let out = if keep || gated.is_none() { there } else { Arg::Null };
        let gated_there = gated.as_mut().map_or(Arg::Null, Tensor::cuda_out);
        let args = [Arg::Struct(&problem), a.cuda_in(), self.sums.cuda_in(), there, gate, out, gated_there, mean];
        let shape = self.by_tokens(values);
        // SAFETY: the kernel's arguments; blocks for all of the outputs. Each number of `near` is read where it is written.
        unsafe { launch(self.device(), &KERNELS, &self.kernel("prefix_values"), shape, &args) };
        ((keep || gated.is_none()).then_some(near), gated)
    }

    /// `Σ_c v_i[c] sum[r][c]`, `[B, T, H, R]`.
    pub fn features(&self, v: &Tensor) -> Tensor {
        let [batch, time, heads, features, _] = self.sizes;
        let mut y = self.sums.new_empty(self.sums.dtype(), &[batch, time, heads, features]);
        let problem = self.problem([None, Some(v), None]);
        let mean = Arg::I32(i32::from(self.chunks.mean && !self.reverse));
        let args = [Arg::Struct(&problem), v.cuda_in(), self.sums.cuda_in(), y.cuda_out(), mean];
        // SAFETY: the kernel's arguments; blocks for all of `y`.
        unsafe { launch(self.device(), &KERNELS, &self.kernel("prefix_features"), self.by_tokens(features), &args) };
        y
    }

    /// `[heads of all entries and their chunks, R, E]`: of each chunk what lies before it, or behind it.
    pub fn sums(&self) -> &Tensor {
        &self.sums
    }

    fn device(&self) -> &Device {
        self.sums.cuda().expect("on a CUDA device")
    }

    fn kernel(&self, name: &str) -> String {
        let narrow = self.chunks.narrow && self.sums.dtype() == DType::F32;
        format!("{name}<{}, {}, {narrow}>", type_name(self.sums.dtype()), type_name(self.dtype))
    }

    /// Blocks for the tiles of tokens of each chunk, and of so many columns.
    fn by_tokens(&self, columns: usize) -> Launch {
        let [batch, time, heads, ..] = self.sizes;
        let (tile, chunk) = (tile_size(self.sums.dtype()), self.chunks.chunk);
        blocks(batch * heads * time.div_ceil(chunk) * chunk.div_ceil(tile), columns.div_ceil(tile))
    }

    /// The kernels' `Prefix`, with the strides of features, values and gate.
    fn problem(&self, operands: [Option<&Tensor>; 3]) -> Vec<u8> {
        let [_, time, heads, features, values] = self.sizes;
        let Chunks { chunk, distance, .. } = self.chunks;
        // The sums already leave out the chunk itself.
        let lag = distance - 1;
        let sizes = [heads, time, chunk, time.div_ceil(chunk), lag, usize::from(self.reverse), features, values];
        let strides = operands.into_iter().flat_map(|x| x.map_or([0; 3], |x| [0, 1, 2].map(|axis| x.strides()[axis])));
        sizes.into_iter().chain(strides).flat_map(|n| (n as u64).to_ne_bytes()).collect()
    }
}

fn blocks(rows: usize, columns: usize) -> Launch {
    let rows = u32::try_from(rows).expect("so many rows do not fit in memory");
    Launch { grid: [rows, columns as u32, 1], block: [TILE_THREADS, 1, 1], shared: 0 }
}
