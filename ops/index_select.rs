//! `index_select`: entries of one axis by index; with the row kernels that `embedding` shares.
//!
//! Forward `y[.., i, ..] = x[.., ids[i], ..]`, a copy of rows. Backward `dx[.., v, ..] = Σ dout[.., i, ..] over ids[i] = v`:
//! positions are sorted by index first (a counting sort, stable), so that every row of `dx` is written by one task and
//! summed in index order, whatever the number of threads. Saves the ids.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::cuda::Source;
use kumiki_tensor::{DType, Tensor, dispatch, dispatch_real, kernels, threads};

use crate::registry::OpCase;
use crate::simd::{Kernel, Lanes, Real};

/// Entries `ids` (one axis, I64 or U32) of axis `axis` of `x`, in that order and as often as they are named.
///
/// # Panics
/// When an index is negative or not below the size of the axis; its position is named.
#[track_caller]
pub fn index_select(x: &Var, axis: usize, ids: &Tensor) -> Var {
    assert!(
        axis < x.rank() && ids.rank() == 1,
        "index_select: axis {axis} of {:?} by ids of shape {:?}, which must have one axis",
        x.shape(),
        ids.shape()
    );
    let size = x.dim(axis);
    let out = take_rows(x.value(), axis, &checked_ids("index_select", "entries", ids, size));
    Var::from_op(out, &[x], || IndexSelectBackward { ids: ids.clone(), axis, size })
}

struct IndexSelectBackward {
    ids: Tensor,
    axis: usize,
    size: usize,
}

impl Backward for IndexSelectBackward {
    fn name(&self) -> &'static str {
        "index_select"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("ids", &self.ids)]
    }
    fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
        let ids = checked_ids("index_select", "entries", &self.ids, self.size);
        vec![Some(add_rows(&dout, self.axis, &ids, self.size))]
    }
}

/// The ids in row-major order; `entries` says what there are `size` of.
#[track_caller]
pub(crate) fn checked_ids(op: &str, entries: &str, ids: &Tensor, size: usize) -> Vec<usize> {
    let ids: Vec<i64> = match ids.dtype() {
        DType::I64 => ids.to_vec(),
        DType::U32 => ids.to_vec::<u32>().into_iter().map(i64::from).collect(),
        other => panic!("{op}: ids must be i64 or u32, found {other}"),
    };
    if let Some(at) = ids.iter().position(|&id| id < 0 || id as u64 >= size as u64) {
        panic!("{op}: index {} at position {at} is outside of the {size} {entries}", ids[at]);
    }
    ids.into_iter().map(|id| id as usize).collect()
}

/// Elements that one task copies or sums.
const PIECE: usize = 16 * 1024;

/// `out[o, i, ..] = x[o, ids[i], ..]` where `o` runs over the axes before `axis`.
pub(crate) fn take_rows(x: &Tensor, axis: usize, ids: &[usize]) -> Tensor {
    let mut shape = x.shape().to_vec();
    let size = std::mem::replace(&mut shape[axis], ids.len());
    let inner: usize = shape[axis + 1..].iter().product();
    if let Some(device) = x.cuda() {
        return cuda::take_rows(device, x, ids, (size, inner), &shape);
    }
    let mut out = Tensor::empty(x.dtype(), &shape);
    if out.is_empty() {
        return out;
    }
    let x = x.contiguous();
    let rows = (PIECE / inner).max(1);
    dispatch!(x.dtype(), E => {
        let x = x.as_slice::<E>();
        threads::parallel_chunks_mut(out.as_mut_slice::<E>(), rows * inner, rows * inner, |piece, y| {
            for (row, y) in (piece * rows..).zip(y.chunks_mut(inner)) {
                let from = row / ids.len() * size + ids[row % ids.len()];
                y.copy_from_slice(&x[from * inner..][..inner]);
            }
        });
    });
    out
}

/// The adjoint of [`take_rows`]: every row of `dout` added at its index to zeros with `size` entries along `axis`.
/// BF16 is summed in F32.
pub(crate) fn add_rows(dout: &Tensor, axis: usize, ids: &[usize], size: usize) -> Tensor {
    let dtype = dout.dtype();
    let mut shape = dout.shape().to_vec();
    shape[axis] = size;
    let inner = shape[axis + 1..].iter().product();
    if let Some(device) = dout.cuda() {
        return cuda::add_rows(device, dout, &Sorted::new(ids, size), (size, inner), &shape);
    }
    let dout = dout.cast(dtype.compute()).contiguous();
    let mut out = Tensor::empty(dtype.compute(), &shape);
    dispatch_real!("index_add", dtype.compute(), E => {
        add_sorted(dout.as_slice::<E>(), &Sorted::new(ids, size), inner, out.as_mut_slice::<E>());
    });
    out.cast(dtype)
}

pub(crate) static KERNELS: Source = Source {
    file: "index_select.cu",
    text: include_str!("index_select.cu"),
    headers: &[],
    kernels: kernels![
        "take_rows" of "float" "double" "bf16",
        "add_rows" of "float" "double" "bf16",
    ],
};

mod cuda {
    use super::{KERNELS, Sorted};
    use crate::cuda::{ids_on, kernel_of};
    use kumiki_tensor::Tensor;
    use kumiki_tensor::cuda::{Arg, Device, launch, over};

    pub fn take_rows(
        device: &Device,
        x: &Tensor,
        ids: &[usize],
        (size, inner): (usize, usize),
        shape: &[usize],
    ) -> Tensor {
        let (x, chosen, mut out) = (x.contiguous(), ids_on(device, ids), x.new_empty(x.dtype(), shape));
        let sizes = [size, ids.len(), inner, out.len()].map(|n| Arg::I64(n as i64));
        let args = [&[x.cuda_in(), chosen.cuda_in(), out.cuda_out()][..], &sizes].concat();
        let count = shape.iter().product();
        // SAFETY: the kernel's arguments; the indices have been checked against the axis.
        unsafe { launch(device, &KERNELS, &kernel_of("take_rows", x.dtype()), over(count), &args) };
        out
    }

    pub fn add_rows(
        device: &Device,
        dout: &Tensor,
        sorted: &Sorted,
        (size, inner): (usize, usize),
        shape: &[usize],
    ) -> Tensor {
        let (dout, mut out) = (dout.contiguous(), dout.new_empty(dout.dtype(), shape));
        let (starts, order) = (ids_on(device, &sorted.starts), ids_on(device, &sorted.order));
        let sizes = [size, sorted.order.len(), inner, out.len()].map(|n| Arg::I64(n as i64));
        let args = [&[dout.cuda_in(), starts.cuda_in(), order.cuda_in(), out.cuda_out()][..], &sizes].concat();
        let count = shape.iter().product();
        // SAFETY: the kernel's arguments; each position is one of the chosen entries.
        unsafe { launch(device, &KERNELS, &kernel_of("add_rows", dout.dtype()), over(count), &args) };
        out
    }
}

/// The positions in a list of ids, sorted by id.
struct Sorted {
    /// Where the positions of each id start in `order`; one more entry than there are ids.
    starts: Vec<usize>,
    order: Vec<usize>,
}

impl Sorted {
    fn new(ids: &[usize], size: usize) -> Sorted {
        let mut starts = vec![0; size + 1];
        ids.iter().for_each(|&id| starts[id + 1] += 1);
        (0..size).for_each(|id| starts[id + 1] += starts[id]);
        let (mut next, mut order) = (starts.clone(), vec![0; ids.len()]);
        for (position, &id) in ids.iter().enumerate() {
            order[next[id]] = position;
            next[id] += 1;
        }
        Sorted { starts, order }
    }

    fn of(&self, id: usize) -> &[usize] {
        &self.order[self.starts[id]..self.starts[id + 1]]
    }
}

/// Rows that are summed one after the other. An index that is named more often is summed in runs of this length, in
/// parallel, and the sums of its runs in f64: so one frequent token neither holds up one thread nor saturates.
const RUN: usize = 64;

fn add_sorted<E: Real>(rows: &[E], sorted: &Sorted, inner: usize, out: &mut [E]) {
    if out.is_empty() {
        return;
    }
    let (count, size) = (sorted.order.len(), sorted.starts.len() - 1);
    let outer = out.len() / (size * inner);
    let long = |id: usize| sorted.of(id).len() > RUN;
    let frequent: Vec<usize> = (0..size).filter(|&id| long(id)).collect();
    let mut runs = vec![]; // index before the axis, and start in `sorted.order`
    for o in 0..outer {
        for &id in &frequent {
            runs.extend((sorted.starts[id]..sorted.starts[id + 1]).step_by(RUN).map(|start| (o, start)));
        }
    }
    let run_sums: Vec<Vec<E>> = threads::parallel_map(runs.len(), RUN * inner, |i| {
        let (o, start) = runs[i];
        let end = sorted.starts[sorted.starts.partition_point(|&s| s <= start)].min(start + RUN);
        let mut sum = vec![E::ZERO; inner];
        sum_rows(&rows[o * count * inner..], &sorted.order[start..end], &mut sum);
        sum
    });

    let per_task = (PIECE / (inner * (1 + count / size))).max(1);
    threads::parallel_chunks_mut(out, per_task * inner, per_task * inner * (1 + count / size), |task, piece| {
        for (row, y) in (task * per_task..).zip(piece.chunks_mut(inner)) {
            let (o, id) = (row / size, row % size);
            if long(id) {
                let first = runs.partition_point(|&run| run < (o, sorted.starts[id]));
                let sums = &run_sums[first..first + sorted.of(id).len().div_ceil(RUN)];
                for (column, y) in y.iter_mut().enumerate() {
                    *y = E::from_f64(sums.iter().map(|sum| sum[column].to_f64()).sum());
                }
            } else {
                sum_rows(&rows[o * count * inner..], sorted.of(id), y);
            }
        }
    });
}

/// `y = Σ rows[i] over i in order`, rows as long as `y`.
fn sum_rows<E: Real>(rows: &[E], order: &[usize], y: &mut [E]) {
    let width = y.len();
    let row = |i: usize| &rows[i * width..][..width];
    match order {
        [] => y.fill(E::ZERO),
        [only] => y.copy_from_slice(row(*only)),
        [first, rest @ ..] => {
            y.copy_from_slice(row(*first));
            E::dispatch(SumRows { rows, order: rest, y });
        }
    }
}

struct SumRows<'a, E> {
    rows: &'a [E],
    order: &'a [usize],
    y: &'a mut [E],
}

impl<E: Real> Kernel<E> for SumRows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let width = self.y.len();
        for &i in self.order {
            let row = &self.rows[i * width..][..width];
            for (y, x) in self.y.chunks_mut(L::N).zip(row.chunks(L::N)) {
                if y.len() == L::N {
                    (L::load(y) + L::load(x)).store(y);
                } else {
                    (L::load_partial(y, E::ZERO) + L::load_partial(x, E::ZERO)).store_partial(y);
                }
            }
        }
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let ids = Tensor::from_slice(&[2i64, 0, 2, 2], &[4]);
    vec![OpCase::new("index_select", "", &[("x", &[2, 3, 4])], move |_, v| index_select(&v[0], 1, &ids))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Chain, difference};
    use kumiki_autograd::Tape;
    use kumiki_tensor::Rng;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn passes_the_chain(
            seed in any::<u64>(), [outer, inner] in proptest::array::uniform2(0usize..4),
            size in 1usize..6, count in 0usize..9, wide in any::<bool>(),
        ) {
            let ids = Rng::new(seed).ids(if wide { DType::I64 } else { DType::U32 }, &[count], size as u64);
            let shape = [outer, size, inner];
            let chain = Chain { bf16_tolerance: Some(4e-3), ..Chain::new("index_select", seed, &[("x", &shape)]) };
            chain.run(|_, v| index_select(&v[0], 1, &ids), |x| {
                let mut y = vec![];
                for o in 0..outer {
                    for id in ids.to_f64_vec() {
                        for i in 0..inner {
                            y.push(x[0][(o * size + id as usize) * inner + i]);
                        }
                    }
                }
                y
            });
        }
    }

    #[test]
    fn case_04_frequent_indices_add_up_in_every_part() {
        // Index 1 is longer than a run in both halves of the outer axis; index 2 is never named.
        let (count, inner) = (3 * RUN + 5, 33);
        let ids: Vec<usize> = (0..count).map(|i| if i % 50 == 7 { 3 * (i % 2) } else { 1 }).collect();
        let dout = Rng::new(4).normal(DType::F32, &[2, count, inner], 0.0, 1.0);
        let g = dout.to_f64_vec();
        let mut expected = vec![0.0; 2 * 4 * inner];
        for o in 0..2 {
            for (i, id) in ids.iter().enumerate() {
                for c in 0..inner {
                    expected[(o * 4 + id) * inner + c] += g[(o * count + i) * inner + c];
                }
            }
        }
        for (dtype, tolerance) in [(DType::F32, 2e-6), (DType::F64, 1e-12)] {
            let dx = add_rows(&dout.cast(dtype), 1, &ids, 4);
            assert_eq!(difference(&dx.to_f64_vec(), &expected, tolerance), None);
        }
    }

    #[test]
    fn case_05_repeats_do_not_saturate() {
        let count = 1 << 14;
        // In BF16 a sum of ones stops at 256.
        let dx = add_rows(&Tensor::ones(DType::BF16, &[count, 2]), 0, &vec![0; count], 1);
        assert_eq!(dx.to_f64_vec(), [count as f64; 2]);
        // In F32, one after the other, a million times .1 is nearly 1 % off.
        let count = 1 << 20;
        let dx = add_rows(&Tensor::full(DType::F32, &[count, 1], 0.1), 0, &vec![0; count], 1).item();
        assert!((dx / (count as f64 * f64::from(0.1f32)) - 1.0).abs() < 2e-6, "{dx}");
    }

    #[test]
    fn threads_do_not_change_the_gradient() {
        let ids = Rng::new(1).ids(DType::I64, &[5000], 40).to_vec::<i64>();
        // Squared, so that small ids are named by whole runs.
        let ids: Vec<usize> = ids.iter().map(|&id| (id * id / 40) as usize).collect();
        let dout = Rng::new(2).normal(DType::F32, &[5000, 37], 0.0, 1.0);
        let run = |threads| threads::with_threads(threads, || add_rows(&dout, 0, &ids, 40).to_vec::<f32>());
        let one = run(1);
        assert!(run(2) == one && run(8) == one);
    }

    #[test]
    fn an_empty_selection_has_a_zero_gradient() {
        let tape = Tape::new();
        let x = tape.leaf(Tensor::ones(DType::F64, &[3, 2]));
        let y = index_select(&x, 0, &Tensor::zeros(DType::I64, &[0]));
        let grads = tape.backward_from(&[(&y, Tensor::zeros(DType::F64, &[0, 2]))]);
        assert_eq!(grads.get(&x).unwrap().to_f64_vec(), [0.0; 6]);
    }

    #[test]
    #[should_panic(expected = "index_select: index -4 at position 1 is outside of the 3 entries")]
    fn a_bad_index_is_named() {
        let x = Var::constant(Tensor::zeros(DType::F32, &[3]));
        index_select(&x, 0, &Tensor::from_slice(&[0i64, -4], &[2]));
    }
}
