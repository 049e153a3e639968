//! The same [`Problem`] on a CUDA device: the kernels of `attention.cu`.

use kumiki_tensor::cuda::{Arg, Device, Launch, Source, launch, over, type_name};
use kumiki_tensor::{DType, Tensor};

use super::{Arrived, Attended, Number, Problem, Sees, Upstream, Values, Weighting};
use crate::cuda::{TILE, TILE_THREADS, by_warps, fused, ids_on, kernel_of, on, tile_size};
use crate::dual_attention::BlockStarts;
use crate::simd::Real;

pub(crate) static KERNELS: Source = Source {
    file: "attention.cu",
    text: include_str!("attention.cu"),
    headers: &[TILE],
    kernels: fused!["attention_forward" "attention_backward_queries" "attention_backward_keys"; "attention_arrive"; "attention_shown_lse"],
};

/// The first operand's device, where that is one.
pub(super) fn device<'a, E: Number>(p: &Problem<'a, E>) -> Option<&'a Device> {
    p.q.tensor.cuda()
}

/// As [`super::forward_over`].
pub(super) fn forward<E: Number>(sets: &[Problem<E>], gate: Option<&Values<E>>, keep: bool) -> Attended {
    let p = &sets[0];
    let like = p.q.tensor;
    let shape = [p.batch, p.queries, p.heads, p.v.width()];
    let mut out = (keep || gate.is_none()).then(|| like.new_empty(p.v.dtype(), &shape));
    let mut gated = gate.map(|gate| like.new_empty(gate.dtype(), &shape));
    let softmax = p.weighting == Weighting::Softmax;
    let mut lse = softmax.then(|| like.new_empty(E::DTYPE, &[p.batch, p.heads, p.queries]));
    let given = Given::new(sets, gate);
    let outputs = [
        gate.map_or(Arg::Null, |gate| gate.tensor().cuda_in()),
        out.as_mut().map_or(Arg::Null, Tensor::cuda_out),
        gated.as_mut().map_or(Arg::Null, Tensor::cuda_out),
        lse.as_mut().map_or(Arg::Null, Tensor::cuda_out),
    ];
    // SAFETY: the kernel's arguments, and blocks for all of the outputs.
    unsafe { given.launch("attention_forward", blocks(p, p.queries, tiles::<E>(p.v.width())), &outputs) };
    Attended { out, gated, lse }
}

/// The gradients of the queries, and of the keys and values of each set, as [`super::backward_over`].
pub(super) fn backward<E: Number, const N: usize>(
    sets: &[Problem<E>; N],
    up: &Upstream<E>,
    need_q: bool,
    needs: [[bool; 2]; N],
) -> (Option<Tensor>, [[Option<Tensor>; 2]; N]) {
    let p = &sets[0];
    let like = p.q.tensor;
    let dout = up.dout.tensor().contiguous();
    assert_eq!(dout.dtype(), p.v.dtype(), "what arrives is of the values' dtype");
    let of_rows = |x: Option<&'_ Tensor>| x.map(Tensor::contiguous);
    let (lse, delta) = (of_rows(up.lse), of_rows(up.delta));
    let arrived = [Some(&dout), lse.as_ref(), delta.as_ref()].map(|x| x.map_or(Arg::Null, |x: &Tensor| x.cuda_in()));
    let dq = need_q.then(|| {
        let mut dq = like.new_empty(E::DTYPE, &[p.batch, p.queries, p.heads, p.k.width]);
        let args = [&arrived[..], &[dq.cuda_out()]].concat();
        let shape = blocks(p, p.queries, tiles::<E>(p.k.width));
        // SAFETY: the kernel's arguments, and blocks for all of `dq`.
        unsafe { Given::new(sets, None).launch("attention_backward_queries", shape, &args) };
        dq
    });
    let of_sets = std::array::from_fn(|n| {
        let (p, [need_k, need_v]) = (&sets[n], needs[n]);
        let (of_k, of_v) = (tiles::<E>(p.k.width), tiles::<E>(p.v.width()));
        let (first, parts) = match (need_k, need_v) {
            (true, true) => (0, of_k + of_v),
            (true, false) => (0, of_k),
            (false, _) => (of_k, of_v),
        };
        let mut dk = need_k.then(|| like.new_empty(E::DTYPE, &[p.batch, p.keys, p.heads, p.k.width]));
        let mut dv = need_v.then(|| like.new_empty(p.v.dtype(), &[p.batch, p.keys, p.heads, p.v.width()]));
        if need_k || need_v {
            let outputs = [&mut dk, &mut dv].map(|x| x.as_mut().map_or(Arg::Null, Tensor::cuda_out));
            let args = [&arrived[..], &[Arg::I64(first as i64)], &outputs].concat();
            let given = Given::new(&sets[n..=n], None);
            // SAFETY: the kernel's arguments, and blocks for all that is asked for.
            unsafe { given.launch("attention_backward_keys", blocks(p, p.keys, parts), &args) };
        }
        [dk, dv]
    });
    (dq, of_sets)
}

/// As [`super::arrive`].
pub(super) fn arrive<E: Number>(dout: Tensor, gate: Option<&Tensor>, mut out: Tensor, need_gate: bool) -> Arrived {
    let device = out.cuda().expect("on a CUDA device").clone();
    let mut dout = dout.contiguous();
    let [_, queries, heads, values] = *out.shape() else { unreachable!("of four axes") };
    let mut delta = out.new_empty(E::DTYPE, &out.shape()[..3]);
    let rows = delta.len();
    let problem = words(&Sizes { heads, queries, values, gate, ..Sizes::default() }, &[[0; 8]; 2], 0.0);
    let kernel = format!("attention_arrive<{}, {}>", type_name(E::DTYPE), type_name(out.dtype()));
    let both = if gate.is_some() {
        [&mut dout, &mut out].map(|x| {
            x.own();
            x.cuda_out()
        })
    } else {
        [dout.cuda_in(), out.cuda_in()]
    };
    let gate_there = gate.map_or(Arg::Null, Tensor::cuda_in);
    let args = [Arg::Struct(&problem), gate_there, both[0], both[1], delta.cuda_out(), Arg::I64(rows as i64)];
    // SAFETY: the kernel's arguments; a warp for each row; without a gate it only reads `dout` and `out`.
    unsafe { launch(&device, &KERNELS, &kernel, by_warps(rows), &args) };
    Arrived { dout, dgate: (gate.is_some() && need_gate).then_some(out), delta }
}

/// `[B, H, T_q]` to `[B, T_q, H]`, of a query without keys -inf.
pub(crate) fn shown_lse(lse: &Tensor) -> Tensor {
    let device = lse.cuda().expect("on a CUDA device");
    let mut out = lse.new_empty(lse.dtype(), &[lse.dim(0), lse.dim(2), lse.dim(1)]);
    let sizes = [lse.dim(1), lse.dim(2), lse.len()].map(|n| Arg::I64(n as i64));
    let args = [&[lse.cuda_in(), out.cuda_out()], &sizes[..]].concat();
    // SAFETY: the kernel's arguments; as many numbers in both.
    unsafe { launch(device, &KERNELS, &kernel_of("attention_shown_lse", lse.dtype()), over(lse.len()), &args) };
    out
}

/// Tiles of an axis.
fn tiles<E: Number>(rows: usize) -> usize {
    rows.div_ceil(tile_size(E::DTYPE))
}

/// Blocks for so many rows of every head, and so many parts of each.
fn blocks<E: Number>(p: &Problem<E>, rows: usize, parts: usize) -> Launch {
    let blocks = tiles::<E>(rows) * p.heads * p.batch;
    let grid = [u32::try_from(blocks).expect("so many rows do not fit in memory"), parts as u32, 1];
    Launch { grid, block: [TILE_THREADS, 1, 1], shared: 0 }
}

/// What of the kernels' `Problem` does not depend on the set.
#[derive(Default)]
struct Sizes<'a> {
    heads: usize,
    queries: usize,
    width: usize,
    values: usize,
    sets: usize,
    squared: bool,
    start_rows: usize,
    q: [usize; 3],
    gate: Option<&'a Tensor>,
}

/// The kernels' `Problem`.
fn words(s: &Sizes, sets: &[[usize; 8]; 2], scale: f64) -> Vec<u8> {
    let sizes = [s.heads, s.queries, s.width, s.values, s.sets, usize::from(s.squared), s.start_rows];
    let all = [&sizes[..], &s.q, &s.gate.map_or([0; 3], strides), &sets[0], &sets[1]].concat();
    all.into_iter().map(|n| n as u64).chain([scale.to_bits()]).flat_map(u64::to_ne_bytes).collect()
}

/// From an entry of the batch, a token and a head to the next.
fn strides(x: &Tensor) -> [usize; 3] {
    let s = x.strides();
    [s[0], s[1], s[2]]
}

/// The operands that all kernels take, and what must lie on the device for them.
struct Given<'a> {
    device: &'a Device,
    of_types: String,
    problem: Vec<u8>,
    q: &'a Tensor,
    keys: Vec<[&'a Tensor; 2]>,
    key_masks: Vec<Option<Tensor>>,
    starts: Option<Tensor>,
    pair_mask: Option<Tensor>,
}

impl<'a> Given<'a> {
    fn new<E: Number>(sets: &[Problem<'a, E>], gate: Option<&Values<E>>) -> Given<'a> {
        let p = &sets[0];
        let device = device(p).expect("on a CUDA device");
        let blocks = sets.iter().find_map(|p| match p.sees {
            Sees::OwnBlock(blocks) | Sees::EarlierBlocks(blocks) => Some(blocks),
            Sees::All | Sees::Causal => None,
        });
        let rows = blocks.map_or(0, BlockStarts::rows);
        let starts = blocks.map(|blocks| {
            let starts = |row| (0..p.queries).map(move |i| blocks.start_of(row, i));
            ids_on(device, &(0..rows).flat_map(starts).collect::<Vec<_>>())
        });
        let mask = |seen: Option<&[bool]>| {
            seen.map(|seen| on(device, &seen.iter().map(|&x| u32::from(x)).collect::<Vec<_>>()))
        };
        let mut of_sets = [[0; 8]; 2];
        for (words, p) in of_sets.iter_mut().zip(sets) {
            let sees = match p.sees {
                Sees::All => 0,
                Sees::Causal => 1,
                Sees::OwnBlock(_) => 2,
                Sees::EarlierBlocks(_) => 3,
            };
            let ([a, b, c], [d, e, f]) = (strides(p.k.tensor), strides(p.v.tensor()));
            *words = [p.keys, sees, a, b, c, d, e, f];
        }
        let sizes = Sizes {
            heads: p.heads,
            queries: p.queries,
            width: p.k.width,
            values: p.v.width(),
            sets: sets.len(),
            squared: p.weighting == Weighting::SquaredRelu,
            start_rows: if rows > 1 { p.queries } else { 0 },
            q: strides(p.q.tensor),
            gate: gate.map(Values::tensor),
        };
        // Tensor cores have BF16 beside F32.
        let narrow = p.narrow && E::DTYPE == DType::F32;
        Given {
            device,
            of_types: format!("{}, {}, {narrow}", type_name(E::DTYPE), type_name(p.v.dtype())),
            problem: words(&sizes, &of_sets, Real::to_f64(p.scale)),
            q: p.q.tensor,
            keys: sets.iter().map(|p| [p.k.tensor, p.v.tensor()]).collect(),
            key_masks: sets.iter().map(|p| mask(p.key_mask)).collect(),
            starts,
            pair_mask: mask(p.pair_mask),
        }
    }

    /// Launches a kernel on the operands and what follows them.
    ///
    /// # Safety
    /// As [`Device::launch`], but for the operands.
    unsafe fn launch(&self, kernel: &str, shape: Launch, more: &[Arg]) {
        fn there(x: Option<&Tensor>) -> Arg<'_> {
            x.map_or(Arg::Null, Tensor::cuda_in)
        }
        let of_set = |n: usize| {
            let keys = self.keys.get(n).map_or([Arg::Null; 2], |of| of.map(Tensor::cuda_in));
            [keys[0], keys[1], there(self.key_masks.get(n).and_then(Option::as_ref))]
        };
        let ([k, v, mask], [k2, v2, mask2]) = (of_set(0), of_set(1));
        let pairs = [there(self.starts.as_ref()), there(self.pair_mask.as_ref())];
        let operands = [Arg::Struct(&self.problem), self.q.cuda_in(), k, v, mask, k2, v2, mask2];
        let args = [&operands[..], &pairs, more].concat();
        let kernel = format!("{kernel}<{}>", self.of_types);
        // SAFETY: sizes and strides of the problem are those of the operands; for the rest, the caller's.
        unsafe { launch(self.device, &KERNELS, &kernel, shape, &args) };
    }
}
