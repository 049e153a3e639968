//! `cross_entropy_from_hidden` on a CUDA device: the CPU's chunks, a block for each row of logits.

use kumiki_tensor::cuda::{Arg, Launch, Source, launch};
use kumiki_tensor::{DType, Tensor, kernels};

use crate::cuda::{ids_on, kernel_of};
use crate::matmul_cuda::{product, product_to};

pub(crate) static KERNELS: Source = Source {
    file: "cross_entropy_from_hidden.cu",
    text: include_str!("cross_entropy_from_hidden.cu"),
    headers: &[],
    kernels: kernels!["cross_entropy_rows" of "float" "double"],
};

/// Loss, without axes, and the gradients that are needed; all times `scale`. `hidden` `[.., D]` and `embedding` `[V, D]` are
/// contiguous; products are of BF16 factors where `narrow`. Rows are taken `chunk` at a time.
pub(super) fn loss(
    (hidden, embedding): (&Tensor, &Tensor),
    narrow: bool,
    targets: &[usize],
    scale: f64,
    needs: [bool; 2],
    chunk: usize,
) -> (Tensor, Option<Tensor>, Option<Tensor>) {
    let device = hidden.cuda().expect("on a CUDA device").clone();
    let (dtype, [vocab, d]) = (hidden.dtype(), [embedding.dim(0), embedding.dim(1)]);
    let factor = |x: &Tensor| if narrow && dtype == DType::F32 { x.cast(DType::BF16) } else { x.clone() };
    let rows = hidden.reshape(&[targets.len(), d]);
    let embedding_factor = factor(embedding);
    let ids = ids_on(&device, targets);
    let mut losses = hidden.new_empty(DType::F64, &[targets.len()]);
    let mut dhidden = needs[0].then(|| hidden.new_full(dtype, &[targets.len(), d], 0.0));
    let mut dembedding = needs[1].then(|| hidden.new_full(dtype, &[vocab, d], 0.0));
    for start in (0..targets.len()).step_by(chunk.max(1)) {
        let len = chunk.min(targets.len() - start);
        let some = factor(&rows.narrow(0, start, len));
        let mut logits = hidden.new_empty(dtype, &[len, vocab]);
        product(&mut logits, &some, &embedding_factor.transpose(0, 1), false);
        let of_chunk = ids.narrow(0, start, len);
        let Arg::Out(buffer, _) = losses.cuda_out() else { unreachable!("a place to write") };
        let args = [
            logits.cuda_out(),
            of_chunk.cuda_in(),
            Arg::Out(buffer, start * DType::F64.size()),
            Arg::I64(vocab as i64),
            Arg::F64(scale),
            Arg::I32(i32::from(needs[0] || needs[1])),
        ];
        let threads = vocab.next_multiple_of(32).clamp(32, 512) as u32;
        // SAFETY: the kernel's arguments; a block for each of `len` rows of logits, targets and losses.
        unsafe {
            launch(&device, &KERNELS, &kernel_of("cross_entropy_rows", dtype), Launch::of(len as u32, threads), &args)
        };
        let dlogits = factor(&logits);
        if let Some(dhidden) = &mut dhidden {
            product_to((dhidden, start * d), &[len, d], &dlogits, &embedding_factor, false);
        }
        if let Some(dembedding) = &mut dembedding {
            product(dembedding, &dlogits.transpose(0, 1), &some, true);
        }
    }
    let mut total = losses.sum_to(&[]);
    total.scale(scale);
    (total.cast(dtype), dhidden.map(|x| x.reshape(hidden.shape())), dembedding)
}
