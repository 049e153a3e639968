//! `dropout`: elements replaced by zero at random, the others scaled so that the expectation stays.
//!
//! Forward `y_i = keep_i x_i / (1 - p)`, where `keep_i` is false with probability p; backward `dx_i = keep_i dout_i / (1 - p)`.
//! The mask is a function of generator and row-major position, so it is not kept: the backward draws it again. Saves the
//! generator's place, no tensor. Inside a checkpoint the tape's generator is set back, so that both runs draw one mask.
//! Cost: one read and one write of memory, and one random word per element.
//! Source: Srivastava et al., Dropout, JMLR 15 (2014), in the "inverted" form.

use kumiki_autograd::{Backward, Tape, Var};
use kumiki_tensor::cuda::{Arg, Source, launch, over};
use kumiki_tensor::{Rng, Tensor, dispatch_real, kernels, threads};

use crate::cast::wide;
use crate::cuda::kernel_of;
use crate::registry::{BenchCase, OpCase};

/// `x` with every element zeroed with probability `p`, to within 2^-32, and the others divided by `1 - p`; any shape and
/// float dtype. The mask comes from the tape's generator ([`Tape::training`]); on a tape that does not record and has
/// none ([`Tape::inference`]), and for `p` 0, it is `x` itself.
///
/// # Panics
/// When `p` is not in `[0, 1)`, `x` is not of a float dtype, or a tape that records has no generator.
#[track_caller]
pub fn dropout(tape: &Tape, x: &Var, p: f64) -> Var {
    assert!((0.0..1.0).contains(&p), "dropout: p must be in [0, 1), got {p}");
    assert!(x.dtype().is_float(), "dropout: x must be of a float dtype, found {}", x.dtype());
    if p == 0.0 {
        return x.clone();
    }
    // Not a question of recording alone: a checkpoint's first run, which records nothing, must draw the mask too.
    let Some(rng) = tape.take_rng("dropout") else {
        assert!(
            !tape.is_recording(),
            "dropout: this tape records but has no generator for masks; start it with `Tape::training`, or use `Tape::inference`"
        );
        return x.clone();
    };
    Var::from_op(masked(x.value(), &rng, p), &[x], || DropoutBackward { rng, p })
}

struct DropoutBackward {
    rng: Rng,
    p: f64,
}

impl Backward for DropoutBackward {
    fn name(&self) -> &'static str {
        "dropout"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        vec![Some(masked(&dout, &self.rng, self.p))]
    }
}

/// Words below this are dropped.
fn threshold(p: f64) -> u32 {
    (p * 2f64.powi(32)).round() as u32 // saturates
}

pub(crate) static KERNELS: Source = Source {
    file: "dropout.cu",
    text: include_str!("dropout.cu"),
    headers: &[],
    kernels: kernels!["mask" of "float" "double" "bf16"],
};

fn masked_on_cuda(x: &Tensor, rng: &Rng, p: f64) -> Tensor {
    const WORDS: u128 = 16; // of a block
    let device = x.cuda().expect("on a CUDA device");
    let (x, mut y) = (x.contiguous(), x.new_empty(x.dtype(), x.shape()));
    let (key, stream, first) = rng.chacha8();
    let blocks = ((first % WORDS) as usize + x.len()).div_ceil(WORDS as usize);
    // The kernel's `Key`.
    let first = u64::try_from(first).expect("a generator is never drawn from so often");
    let key = [&key[..], &stream.to_ne_bytes(), &first.to_ne_bytes()].concat();
    let args = [
        Arg::Struct(&key),
        x.cuda_in(),
        y.cuda_out(),
        Arg::I64(x.len() as i64),
        Arg::I64(blocks as i64),
        Arg::U32(threshold(p)),
        Arg::F64(1.0 / (1.0 - p)),
    ];
    // SAFETY: the kernel's arguments; y is of x's shape.
    unsafe { launch(device, &KERNELS, &kernel_of("mask", x.dtype()), over(blocks), &args) };
    y
}

fn masked(x: &Tensor, rng: &Rng, p: f64) -> Tensor {
    const PIECE: usize = 4096;
    if x.cuda().is_some() {
        return masked_on_cuda(x, rng, p);
    }
    let (dropped, source) = (threshold(p), wide(x).contiguous());
    let mut y = Tensor::empty(source.dtype(), source.shape());
    dispatch_real!("dropout", source.dtype(), E => {
        let (source, scale) = (source.as_slice::<E>(), (1.0 / (1.0 - p)) as E);
        threads::parallel_chunks_mut(y.as_mut_slice::<E>(), PIECE, 4 * PIECE, |i, y| {
            let start = i * PIECE;
            let mut words = [0; PIECE];
            rng.words(start as u64, &mut words[..y.len()]);
            for ((y, &x), &word) in y.iter_mut().zip(&source[start..]).zip(&words) {
                // Chosen, not multiplied by 0: what is dropped is gone even when it is NaN.
                let kept = x * scale;
                *y = if word < dropped { 0.0 } else { kept };
            }
        });
    });
    y.cast(x.dtype())
}

pub(crate) fn cases() -> Vec<OpCase> {
    vec![OpCase::new("dropout", "p=.3", &[("x", &[5, 7])], |tape, v| dropout(tape, &v[0], 0.3))]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let (n, d) = (4096, 512);
    vec![BenchCase {
        name: "dropout",
        inputs: vec![("x", vec![n, d])],
        forward: Box::new(|tape, v| dropout(tape, &v[0], 0.1)),
        bytes: 2 * 4 * n * d,
        flops: n * d,
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matmul;
    use crate::testing::Chain;
    use kumiki_autograd::{Param, checkpoint, no_grad};
    use kumiki_tensor::{DType, Rng};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn passes_the_chain(
            seed in any::<u64>(), shape in proptest::collection::vec(0usize..7, 0..4), p in 0.01..0.99,
        ) {
            // The chain's tapes are trained from this seed.
            let rng = Tape::training(Rng::new(seed)).take_rng("dropout").unwrap();
            let chain = Chain { bf16_tolerance: Some(4e-3), ..Chain::new("dropout", seed, &[("x", &shape)]) };
            chain.run(|tape, v| dropout(tape, &v[0], p), |x| {
                x[0].iter().enumerate().map(|(i, x)| {
                    let mut word = [0];
                    rng.words(i as u64, &mut word);
                    if f64::from(word[0]) / 2f64.powi(32) < p { 0.0 } else { x / (1.0 - p) }
                }).collect()
            });
        }
    }

    #[test]
    fn the_share_of_zeros_is_p_and_the_mask_differs_from_call_to_call() {
        let tape = Tape::training(Rng::new(1));
        let x = Var::constant(Tensor::ones(DType::F32, &[300, 400]));
        let [a, b] = [0, 1].map(|_| dropout(&tape, &x, 0.3).value().to_f64_vec());
        let zeros = |y: &[f64]| y.iter().filter(|&&y| y == 0.0).count() as f64 / y.len() as f64;
        let both = a.iter().zip(&b).filter(|(a, b)| **a == 0.0 && **b == 0.0).count() as f64 / a.len() as f64;
        // Five standard deviations.
        assert!((zeros(&a) - 0.3).abs() < 7e-3 && (zeros(&b) - 0.3).abs() < 7e-3 && (both - 0.09).abs() < 5e-3);
        assert!(a.iter().all(|&y| y == 0.0 || y == f64::from((1.0 / (1.0 - 0.3)) as f32)));
    }

    #[test]
    fn threads_and_memory_layout_do_not_change_the_mask() {
        let x = Rng::new(2).normal(DType::F32, &[130, 170], 0.0, 1.0);
        let run = |x: &Tensor, threads| {
            let x = x.clone();
            threads::with_threads(threads, move || {
                dropout(&Tape::training(Rng::new(3)), &Var::constant(x), 0.5).value().to_vec::<f32>()
            })
        };
        let one = run(&x, 1);
        assert!(run(&x, 2) == one && run(&x, 8) == one);
        assert!(run(&x.transpose(0, 1).copy().transpose(0, 1), 1) == one);
    }

    #[test]
    fn does_nothing_where_nothing_is_trained() {
        let x = Var::constant(Tensor::full(DType::F32, &[8], f64::NAN));
        for y in [
            dropout(&Tape::inference(), &x, 0.5),
            dropout(&Tape::training(Rng::new(0)), &x, 0.0),
            no_grad(|| dropout(&Tape::new(), &x, 0.5)),
        ] {
            assert!(y.value().shares_storage_with(x.value()));
        }
        let y = dropout(&Tape::training(Rng::new(0)), &Var::constant(Tensor::full(DType::F32, &[99], f64::NAN)), 0.5);
        assert!(y.value().to_f64_vec().contains(&0.0), "a dropped NaN is gone");
    }

    /// One matrix and one mask per parameter.
    fn block(tape: &Tape, weights: &[Param], x: &Var) -> Var {
        weights.iter().fold(x.clone(), |x, w| dropout(tape, &matmul(&x, &tape.param(w)), 0.5))
    }

    /// Half of the matrices in each of two inner checkpoints, and a mask of its own after them.
    fn nested(tape: &Tape, weights: &[Param], x: &Var) -> Var {
        let (first, second) = weights.split_at(weights.len() / 2);
        let x = checkpointed(tape, first, x, block);
        dropout(tape, &checkpointed(tape, second, &x, block), 0.2)
    }

    fn checkpointed(tape: &Tape, weights: &[Param], x: &Var, f: fn(&Tape, &[Param], &Var) -> Var) -> Var {
        let weights = weights.to_vec();
        checkpoint(tape, &[x], move |tape, v| f(tape, &weights, &v[0]))
    }

    /// Bits of the output and of all gradients of two runs of `apply`, each with four matrices of its own: a sum of
    /// several gradients would depend on the order of additions, which checkpoints change.
    fn trained(apply: impl Fn(&Tape, &[Param], &Var) -> Var) -> Vec<Vec<u32>> {
        let mut rng = Rng::new(14);
        let weights: Vec<Param> = (0..8).map(|_| Param::new(rng.normal(DType::F32, &[24, 24], 0.0, 0.3))).collect();
        let tape = Tape::training(Rng::new(15));
        let x = tape.leaf(rng.normal(DType::F32, &[3, 11, 24], 0.0, 1.0));
        // A mask before and after as well: the generator must go on as in the plain run.
        let y = apply(&tape, &weights[..4], &dropout(&tape, &x, 0.1));
        let y = dropout(&tape, &apply(&tape, &weights[4..], &y), 0.1);
        let grads = tape.backward_from(&[(&y, rng.normal(DType::F32, y.shape(), 0.0, 1.0))]);
        let tensors =
            [y.value(), grads.get(&x).unwrap()].into_iter().chain(weights.iter().map(|w| grads.of(w).unwrap()));
        let bits = |t: &Tensor| t.to_vec::<f32>().into_iter().map(f32::to_bits).collect();
        tensors.map(bits).collect()
    }

    #[test]
    fn case_14_a_checkpoint_draws_the_same_masks() {
        let plain = trained(block);
        assert!(plain.iter().all(|bits| bits.iter().any(|&x| x != 0)));
        assert!(plain == trained(|tape, w, x| checkpointed(tape, w, x, block)));
    }

    #[test]
    fn case_14_nested_checkpoints_draw_the_same_masks() {
        let plain = trained(|tape, w, x| dropout(tape, &block(tape, w, x), 0.2));
        assert!(plain == trained(nested));
        assert!(plain == trained(|tape, w, x| checkpointed(tape, w, x, nested)));
    }

    #[test]
    #[should_panic(expected = "dropout: p must be in [0, 1), got 1")]
    fn p_of_one_is_refused() {
        dropout(&Tape::inference(), &Var::constant(Tensor::zeros(DType::F32, &[1])), 1.0);
    }

    #[test]
    #[should_panic(expected = "dropout: this tape records but has no generator")]
    fn a_tape_without_generator_is_refused() {
        dropout(&Tape::new(), &Var::constant(Tensor::zeros(DType::F32, &[1])), 0.5);
    }
}
