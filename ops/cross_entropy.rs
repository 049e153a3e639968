//! `cross_entropy`: minus the log-probability of the targets under softmax of the logits.
//!
//! Forward, per row of V logits: `loss = lse - logits[target]`, `lse = max + ln Σ exp(logits - max)`; maximum and sum are
//! taken in one streaming walk over blocks that fit the first cache, in the logits' arithmetic with f64 totals. A target
//! equal to `ignore_index` has loss 0 and no gradient, whatever its row holds; means are over the others, and over none
//! they are 0. Backward: `dlogits = (exp(logits - lse) - [target]) · dout / count`.
//! Saved: the logits and lse `[rows]`, not the probabilities. lse is F64 for F32 logits too: at logits of 10⁴ its rounding
//! to f32 would be half a per mille of every probability. The target's own gradient is `expm1(logit - lse)`, which keeps
//! its digits as the loss goes to 0. Losses and sums are f64 until the result, which is F32 for BF16 logits: a loss of
//! two digits is of no use. Cost: one read of the logits, the backward one read and one write.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::cuda::Source;
use kumiki_tensor::{DType, Tensor, dispatch_real, kernels, threads};

use crate::cast::cast;
use crate::registry::{BenchCase, OpCase};
use crate::rows::{BLOCK, Formula, pass, row_max, rows_of, split};
use crate::simd::{Kernel, Lanes, Real};

/// The mean loss over targets that are not `ignore_index` (0 when there are none), without axes, for logits `[.., V]`
/// and I64 targets `[..]`.
///
/// # Panics
/// When the shapes do not fit, or a target is neither in `0..V` nor `ignore_index`.
#[track_caller]
pub fn cross_entropy(logits: &Var, targets: &Tensor, ignore_index: i64) -> Var {
    reduced("cross_entropy", logits, targets, ignore_index, Reduction::Mean)
}

/// As [`cross_entropy`], summed instead of averaged: for accumulation over micro-batches, whose sums are divided once by
/// all their [`counted_targets`].
///
/// # Panics
/// As [`cross_entropy`].
#[track_caller]
pub fn cross_entropy_sum(logits: &Var, targets: &Tensor, ignore_index: i64) -> Var {
    reduced("cross_entropy_sum", logits, targets, ignore_index, Reduction::Sum)
}

/// As [`cross_entropy`], the loss of every row, in the shape of the targets; ignored rows have loss 0.
///
/// # Panics
/// As [`cross_entropy`].
#[track_caller]
pub fn cross_entropy_rows(logits: &Var, targets: &Tensor, ignore_index: i64) -> Var {
    reduced("cross_entropy_rows", logits, targets, ignore_index, Reduction::Rows)
}

/// The number of targets that are not `ignore_index`.
///
/// # Panics
/// When the targets are not I64.
#[track_caller]
pub fn counted_targets(targets: &Tensor, ignore_index: i64) -> usize {
    assert!(targets.dtype() == DType::I64, "counted_targets: targets must be i64, got {}", targets.dtype());
    targets.contiguous().as_slice::<i64>().iter().filter(|&&t| t != ignore_index).count()
}

/// What becomes of the rows' losses.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Reduction {
    Mean,
    Sum,
    Rows,
}

/// What marks an ignored row among checked targets.
pub(crate) const IGNORED: usize = usize::MAX;

/// Targets as indices, [`IGNORED`] where they are `ignore_index`, and the number of the others.
#[track_caller]
pub(crate) fn checked_targets(
    op: &str,
    rows: &[usize],
    n_vocab: usize,
    targets: &Tensor,
    ignore_index: i64,
) -> (Vec<usize>, usize) {
    assert!(
        targets.dtype() == DType::I64 && targets.shape() == rows,
        "{op}: targets must be i64 {rows:?}, got {} {:?} (V={n_vocab})",
        targets.dtype(),
        targets.shape()
    );
    let (mut indices, mut count) = (Vec::with_capacity(targets.len()), 0);
    for (position, &target) in targets.contiguous().as_slice::<i64>().iter().enumerate() {
        if target == ignore_index {
            indices.push(IGNORED);
            continue;
        }
        let Some(index) = usize::try_from(target).ok().filter(|&t| t < n_vocab) else {
            panic!(
                "{op}: target {target} at row {position} of {rows:?} is neither in 0..V={n_vocab} nor ignore_index {ignore_index}"
            );
        };
        indices.push(index);
        count += 1;
    }
    (indices, count)
}

#[track_caller]
fn reduced(op: &'static str, logits: &Var, targets: &Tensor, ignore_index: i64, reduction: Reduction) -> Var {
    assert!(
        logits.rank() > 0 && logits.dtype().is_float(),
        "{op}: logits must be float [.., V], got {} {:?}",
        logits.dtype(),
        logits.shape()
    );
    let axis = logits.rank() - 1;
    let (indices, count) = checked_targets(op, &logits.shape()[..axis], logits.dim(axis), targets, ignore_index);
    if logits.dtype() == DType::BF16 {
        return reduced(op, &cast(logits, DType::F32), targets, ignore_index, reduction);
    }
    let input = logits.value().contiguous();
    if input.cuda().is_some() {
        let (losses, lse) = cuda::losses(&input, &indices);
        let mut output =
            if reduction == Reduction::Rows { losses.reshape(targets.shape()) } else { losses.sum_to(&[]) };
        if reduction == Reduction::Mean {
            output.scale(1.0 / count.max(1) as f64);
        }
        let output = output.cast(input.dtype());
        return Var::from_op(output, &[logits], || CrossEntropyBackward {
            logits: input,
            lse,
            targets: indices,
            count,
            reduction,
        });
    }
    let (rows, n_vocab) = rows_of(&input);
    let mut lse = Tensor::empty(DType::F64, &[rows]);
    let mut losses = vec![0f64; rows];
    dispatch_real!(op, input.dtype(), E => {
        let x = input.as_slice::<E>();
        let task = rows_per_task(n_vocab);
        let outputs = ((lse.as_mut_slice::<f64>(), task), (&mut losses[..], task));
        threads::parallel_chunks2_mut(outputs.0, outputs.1, 8 * task * n_vocab, |i, lse, losses| {
            let x = &x[i * task * n_vocab..][..lse.len() * n_vocab];
            E::dispatch(Losses { x, n_vocab, targets: &indices[i * task..], lse, losses });
        });
    });
    let dtype = input.dtype();
    let output = match reduction {
        Reduction::Rows => Tensor::from_slice(&losses, targets.shape()).cast(dtype),
        Reduction::Sum => Tensor::scalar(dtype, losses.iter().sum()),
        Reduction::Mean => Tensor::scalar(dtype, losses.iter().sum::<f64>() / count.max(1) as f64),
    };
    Var::from_op(output, &[logits], || CrossEntropyBackward { logits: input, lse, targets: indices, count, reduction })
}

struct CrossEntropyBackward {
    logits: Tensor,
    lse: Tensor,
    targets: Vec<usize>,
    count: usize,
    reduction: Reduction,
}

impl Backward for CrossEntropyBackward {
    fn name(&self) -> &'static str {
        match self.reduction {
            Reduction::Mean => "cross_entropy",
            Reduction::Sum => "cross_entropy_sum",
            Reduction::Rows => "cross_entropy_rows",
        }
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("logits", &self.logits), ("lse", &self.lse)]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        if self.logits.cuda().is_some() {
            return vec![Some(cuda::gradient(&self, dout))];
        }
        let (rows, n_vocab) = rows_of(&self.logits);
        let weights = match self.reduction {
            Reduction::Rows => dout.to_f64_vec(),
            Reduction::Sum => vec![dout.item(); rows],
            Reduction::Mean => vec![dout.item() / self.count.max(1) as f64; rows],
        };
        let mut dlogits = Tensor::empty(self.logits.dtype(), self.logits.shape());
        if dlogits.is_empty() {
            return vec![Some(dlogits)];
        }
        dispatch_real!("cross_entropy", dlogits.dtype(), E => {
            let (x, lse) = (self.logits.as_slice::<E>(), self.lse.as_slice::<f64>());
            let task = rows_per_task(n_vocab);
            threads::parallel_chunks_mut(dlogits.as_mut_slice::<E>(), task * n_vocab, 8 * task * n_vocab, |i, dx| {
                let x = &x[i * task * n_vocab..][..dx.len()];
                let (lse, targets, weights) = (&lse[i * task..], &self.targets[i * task..], &weights[i * task..]);
                E::dispatch(Gradients { x, n_vocab, lse, targets, weights, dx });
            });
        });
        vec![Some(dlogits)]
    }
}

pub(crate) static KERNELS: Source = Source {
    file: "cross_entropy.cu",
    text: include_str!("cross_entropy.cu"),
    headers: &[],
    kernels: kernels![
        "cross_entropy_forward" of "float" "double",
        "cross_entropy_backward" of "float" "double",
    ],
};

mod cuda {
    use super::{CrossEntropyBackward, IGNORED, KERNELS, Reduction};
    use crate::cuda::{by_rows, kernel_of, on};
    use crate::rows::rows_of;
    use kumiki_tensor::cuda::{Arg, Device, launch};
    use kumiki_tensor::{DType, Tensor};

    fn targets_on(device: &Device, targets: &[usize]) -> Tensor {
        on(device, &targets.iter().map(|&t| if t == IGNORED { -1 } else { t as i64 }).collect::<Vec<_>>())
    }

    /// Loss and log-sum-exp of each row, F64.
    pub fn losses(x: &Tensor, targets: &[usize]) -> (Tensor, Tensor) {
        let (device, (rows, n)) = (x.cuda().expect("on a CUDA device"), rows_of(x));
        let (mut lse, mut losses) = (x.new_empty(DType::F64, &[rows]), x.new_empty(DType::F64, &[rows]));
        let targets = targets_on(device, targets);
        let args = [x.cuda_in(), targets.cuda_in(), lse.cuda_out(), losses.cuda_out(), Arg::I64(n as i64)];
        // SAFETY: the kernel's arguments; a block for each row, of which targets and results have one number each.
        unsafe { launch(device, &KERNELS, &kernel_of("cross_entropy_forward", x.dtype()), by_rows(rows, n), &args) };
        (losses, lse)
    }

    pub fn gradient(saved: &CrossEntropyBackward, dout: Tensor) -> Tensor {
        let (x, (rows, n)) = (&saved.logits, rows_of(&saved.logits));
        let device = x.cuda().expect("on a CUDA device");
        let mut weights = dout;
        if saved.reduction == Reduction::Mean {
            weights.own();
            weights.scale(1.0 / saved.count.max(1) as f64);
        }
        let weights =
            if saved.reduction == Reduction::Rows { weights.reshape(&[rows]) } else { weights.expand(&[rows]) };
        let (weights, targets) = (weights.contiguous(), targets_on(device, &saved.targets));
        let mut dx = x.new_empty(x.dtype(), x.shape());
        let of_rows = [targets.cuda_in(), saved.lse.cuda_in(), weights.cuda_in()];
        let args = [&[x.cuda_in()], &of_rows[..], &[dx.cuda_out(), Arg::I64(n as i64)]].concat();
        // SAFETY: as above; dx is of x's shape.
        unsafe { launch(device, &KERNELS, &kernel_of("cross_entropy_backward", x.dtype()), by_rows(rows, n), &args) };
        dx
    }
}

/// Rows of logits that one task takes.
pub(crate) fn rows_per_task(n_vocab: usize) -> usize {
    (16 * 1024 / n_vocab.max(1)).clamp(1, 1024)
}

/// The log-sum-exp of a row.
#[inline(always)]
pub(crate) fn log_sum_exp<L: Lanes>(row: &[L::Elem]) -> f64 {
    let (mut max, mut total) = (f64::NEG_INFINITY, 0.0);
    for block in row.chunks(BLOCK) {
        let top = row_max::<L>(block).to_f64();
        if top > max {
            total *= (max - top).exp();
            max = top;
        }
        // Where all is -inf so far there is nothing to shift by: -inf minus -inf would be NaN.
        let shift = if max == f64::NEG_INFINITY { 0.0 } else { max };
        let [sum] = pass::<L, _, 1, 0, 1>(&Exponentials(L::Elem::from_f64(shift)), [block], []);
        total += sum;
    }
    max + total.ln()
}

/// Writes `(softmax - [target]) · weight` of a row over the row.
#[inline(always)]
pub(crate) fn gradient_over<L: Lanes>(row: &mut [L::Elem], lse: f64, target: usize, weight: f64) {
    let at_target = weight * (row[target].to_f64() - lse).exp_m1();
    let softmax = Softmax { lse: split(lse), weight: L::Elem::from_f64(weight) };
    let [] = pass::<L, _, 0, 1, 0>(&softmax, [], [row]);
    row[target] = L::Elem::from_f64(at_target);
}

struct Losses<'a, E> {
    x: &'a [E],
    n_vocab: usize,
    targets: &'a [usize],
    lse: &'a mut [f64],
    losses: &'a mut [f64],
}

impl<E: Real> Kernel<E> for Losses<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        for (r, (lse, loss)) in self.lse.iter_mut().zip(self.losses).enumerate() {
            let target = self.targets[r];
            (*lse, *loss) = (0.0, 0.0);
            if target != IGNORED {
                let row = &self.x[r * self.n_vocab..][..self.n_vocab];
                *lse = log_sum_exp::<L>(row);
                *loss = *lse - row[target].to_f64();
            }
        }
    }
}

struct Gradients<'a, E> {
    x: &'a [E],
    n_vocab: usize,
    lse: &'a [f64],
    targets: &'a [usize],
    weights: &'a [f64],
    dx: &'a mut [E],
}

impl<E: Real> Kernel<E> for Gradients<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        for (r, dx) in self.dx.chunks_exact_mut(self.n_vocab).enumerate() {
            let (target, weight) = (self.targets[r], self.weights[r]);
            if target == IGNORED {
                dx.fill(E::ZERO);
                continue;
            }
            let row = &self.x[r * self.n_vocab..][..self.n_vocab];
            let softmax = Softmax { lse: split(self.lse[r]), weight: E::from_f64(weight) };
            let [] = pass::<L, _, 1, 1, 0>(&softmax, [row], [dx]);
            dx[target] = E::from_f64(weight * (row[target].to_f64() - self.lse[r]).exp_m1());
        }
    }
}

/// Σ exp(x - shift).
struct Exponentials<E>(E);
impl<E: Real> Formula<E, 1, 0, 1> for Exponentials<E> {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [x]: [L; 1], _: [L; 0], [sum]: &mut [L; 1]) -> [L; 0] {
        *sum = *sum + (x - L::splat(self.0)).exp();
        []
    }
}

/// `exp(x - lse) · weight`.
struct Softmax<E> {
    lse: (E, E),
    weight: E,
}

impl<E: Real> Softmax<E> {
    #[inline(always)]
    fn at<L: Lanes<Elem = E>>(&self, x: L) -> L {
        ((x - L::splat(self.lse.0)) - L::splat(self.lse.1)).exp() * L::splat(self.weight)
    }
}

impl<E: Real> Formula<E, 1, 1, 0> for Softmax<E> {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, [x]: [L; 1], _: [L; 1], _: &mut [L; 0]) -> [L; 1] {
        [self.at(x)]
    }
}

impl<E: Real> Formula<E, 0, 1, 0> for Softmax<E> {
    #[inline(always)]
    fn step<L: Lanes<Elem = E>>(&self, _: [L; 0], [x]: [L; 1], _: &mut [L; 0]) -> [L; 1] {
        [self.at(x)]
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let x: &[(&'static str, &[usize])] = &[("logits", &[2, 3, 7])];
    let targets = || Tensor::from_slice(&[0i64, 6, -1, 3, 3, 2], &[2, 3]);
    let (mean, sum, rows) = (targets(), targets(), targets());
    vec![
        OpCase::new("cross_entropy", "one ignored", x, move |_, v| cross_entropy(&v[0], &mean, -1)),
        OpCase::new("cross_entropy_sum", "one ignored", x, move |_, v| cross_entropy_sum(&v[0], &sum, -1)),
        OpCase::new("cross_entropy_rows", "one ignored", x, move |_, v| cross_entropy_rows(&v[0], &rows, -1)),
    ]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let (n, v) = (512, 16384);
    let targets = Tensor::from_fn::<i64>(&[n], |i| (i * 31 % v) as i64);
    vec![BenchCase {
        name: "cross_entropy",
        inputs: vec![("logits", vec![n, v])],
        forward: Box::new(move |_, x| cross_entropy(&x[0], &targets, -1)),
        bytes: n * v * 4,
        flops: 15 * n * v,
    }]
}

#[cfg(test)]
#[path = "cross_entropy_tests.rs"]
pub(crate) mod tests;
