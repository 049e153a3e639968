//! Long sequences need memory in proportion to their length, forward and backward. A binary of its own: the counters
//! are the process's.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use kumiki_autograd::{Tape, Var};
use kumiki_ops::{
    AttentionOptions, BlockStarts, CemDiagonal, DualAttention, DualSees, MixedChunk, SeenKeys, WindowedPrefix,
    attention, causal_attention, cem_attention, dual_attention, dual_attention_merged, gate_aggregate,
    gate_aggregate_mul, gau_attention_mul, mixed_chunk_attention_mul, reshape, windowed_prefix_mul,
};
use kumiki_tensor::{DType, Rng, Tensor, memory_stats, release_cached_memory, reset_peak, threads};

/// Counts what goes past the tensors' pool.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: as the caller warrants.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller warrants.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The counters are the process's: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

const T: usize = 4096;
const H: usize = 2;
const WIDTH: usize = 32;

/// The most bytes that `f` had at once beyond those before: in live tensors, and taken from the system in any way, which
/// counts buffers that wait in the pool too. The pool starts empty.
fn extra(f: impl FnOnce()) -> (usize, usize) {
    release_cached_memory();
    reset_peak();
    let (tensors, all) = (memory_stats().live, LIVE.load(Relaxed));
    PEAK.store(all, Relaxed);
    f();
    let (tensor_peak, peak) = (memory_stats().peak - tensors, PEAK.load(Relaxed) - all);
    assert!(peak >= tensor_peak, "the pool allocates from the counted allocator");
    (tensor_peak, peak)
}

/// What `f` needs forward, on constants, and with the backward pass to all inputs; see [`extra`].
fn both_ways(x: &[Tensor], f: &dyn Fn(&[Var]) -> Var) -> [(usize, usize); 2] {
    let forward = extra(|| {
        let x: Vec<Var> = x.iter().map(|t| Var::constant(t.clone())).collect();
        f(&x);
    });
    let both = extra(|| {
        let tape = Tape::new();
        let x: Vec<Var> = x.iter().map(|t| tape.leaf(t.clone())).collect();
        let y = f(&x);
        let dout = Tensor::ones(DType::F32, y.shape());
        let grads = tape.backward_from(&[(&y, dout)]);
        assert!(grads.get(&x[0]).is_some());
    });
    [forward, both]
}

#[test]
fn no_square_array_exists() {
    let _alone = ALONE.lock();
    let mut rng = Rng::new(1);
    let mut normal = |shape: &[usize]| rng.normal(DType::F32, shape, 0.0, 1.0);
    let x: Vec<Tensor> = (0..4).map(|_| normal(&[1, T, H, WIDTH])).collect();
    let tau = Tensor::full(DType::F32, &[H], 8.0);
    let row_bytes = T * H * (WIDTH + WIDTH) * size_of::<f32>();
    let square = T * T * size_of::<f32>();
    assert!(12 * row_bytes < square / 2);

    type Operator = fn(&[Var]) -> Var;
    // Live at once with the backward pass, each of half a `row_bytes`: output, its gradient, dq, dk, dv, and for a task the
    // tiles and its keys with their gradients; a second set of keys has two gradients more; the gates' operators also hold
    // normalised q and k and the gradients of both; the product and its dv.
    // A windowed prefix has features besides, and a head's keys with their gradients are copied.
    // A step of CEM has whole rows of weights: tiles of T × 48 a thread, three forward and six backward, and gradients of keys
    // and history in eight parts; a square would be 32 rows more.
    let operators: [(&str, [usize; 2], Operator); 9] = [
        ("causal_attention", [2, 6], |x| causal_attention(&x[0], &x[1], &x[2])),
        ("attention", [2, 6], |x| attention(&x[0], &x[1], &x[2], &AttentionOptions::default())),
        ("dual_attention", [2, 7], |x| {
            let operands = DualAttention { q: &x[0], k_self: &x[1], v_self: &x[2], k_context: &x[1], v_context: &x[3] };
            dual_attention(operands, DualSees::Blocks(&BlockStarts::equal(7, T)))
        }),
        ("gate_aggregate", [2, 7], |x| gate_aggregate(&x[0], &x[1], &x[2], &x[4])),
        ("gate_aggregate_mul", [2, 8], |x| gate_aggregate_mul(&x[0], &x[1], &x[2], &x[4], &x[3])),
        ("windowed_prefix_mul", [2, 12], |x| {
            let (q, k, phi_q, phi_k, g, tau) = (&x[0], &x[1], &x[0], &x[1], &x[2], &x[4]);
            windowed_prefix_mul(WindowedPrefix { q, k, phi_q, phi_k, g, tau, window: 128 }, &x[3])
        }),
        ("gau_attention_mul", [2, 8], |x| {
            let [q, k, v, u] = [0, 1, 2, 3].map(|i| reshape(&x[i], &[1, T, H * WIDTH]));
            gau_attention_mul(&q, &k, &v, &u)
        }),
        ("mixed_chunk_attention_mul", [2, 9], |x| {
            let [q, k, v, u] = [0, 1, 2, 3].map(|i| reshape(&x[i], &[1, T, H * WIDTH]));
            let operands = MixedChunk { q: &q, k: &k, linear_q: &q, linear_k: &k, v: &v, chunk: 256 };
            mixed_chunk_attention_mul(operands, &u)
        }),
        ("cem_attention", [7, 24], |x| {
            let [point, history] = [0, 2].map(|i| reshape(&x[i], &[1, T, H * WIDTH]));
            let wq = Var::constant(Tensor::full(DType::F32, &[H, WIDTH, H * WIDTH], 0.01));
            let d = Var::constant(Tensor::full(DType::F32, &[H * WIDTH], 0.1));
            cem_attention(&point, &wq, &x[1], Some(CemDiagonal { d: &d, history: &history }), 1e4).direction
        }),
    ];
    let x: Vec<Tensor> = x.into_iter().chain([tau]).collect();
    for (name, rows, operator) in operators {
        let [forward, both] = both_ways(&x, &operator);
        println!(
            "{name}: (live, taken) {forward:?} bytes forward, {both:?} with backward; rows {row_bytes}, square {square}"
        );
        for ((live, taken), rows) in [forward, both].into_iter().zip(rows) {
            assert!(live < rows * row_bytes, "{name}: {live} bytes live at once, {row_bytes} for rows");
            assert!(taken < (rows + 4) * row_bytes, "{name}: {taken} bytes taken, {row_bytes} for rows");
        }
    }
}

/// One softmax over both sets of keys against two attentions merged: beyond result, its gradient, and gradients of operands,
/// which both must have, at most half the memory. Two threads, since each has tiles of its own.
#[test]
fn dual_attention_needs_at_most_half_of_what_merging_needs() {
    let _alone = ALONE.lock();
    let (t, heads, width) = (2048, 8, 64);
    let mut rng = Rng::new(2);
    let x: Vec<Tensor> = (0..5).map(|_| rng.normal(DType::F32, &[1, t, heads, width], 0.0, 1.0)).collect();
    let blocks = BlockStarts::equal(8, t);
    let rows = t * heads * width * size_of::<f32>();
    let beyond = |f: &dyn Fn(&[Var]) -> Var| {
        let [forward, both] = both_ways(&x, f);
        [forward.0 - rows, both.0 - 7 * rows]
    };
    threads::with_threads(2, || {
        let fused = beyond(&|x| dual_attention(operands(x), DualSees::Blocks(&blocks)));
        let context = SeenKeys::masked([1, t, t], |b, i, j| j < blocks.start_of(b, i));
        for (name, context) in [("skipped", SeenKeys::EarlierBlocks(blocks.clone())), ("masked", context)] {
            let own = SeenKeys::OwnBlock(blocks.clone());
            let merged = beyond(&|x| dual_attention_merged(operands(x), [&own, &context]));
            println!("forward, with backward: fused {fused:?} bytes, merged ({name}) {merged:?}");
            assert!(fused.iter().zip(merged).all(|(&fused, merged)| 2 * fused <= merged), "{fused:?}, {merged:?}");
        }
    });
}

fn operands(x: &[Var]) -> DualAttention<'_> {
    DualAttention { q: &x[0], k_self: &x[1], v_self: &x[2], k_context: &x[3], v_context: &x[4] }
}
