//! Long sequences need memory in proportion to their length, forward and backward. A binary of its own: the counters
//! are the process's.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use kumiki_autograd::{Tape, Var};
use kumiki_ops::{
    AttentionOptions, CemDiagonal, MixedChunk, WindowedPrefix, attention, causal_attention, cem_attention,
    gate_aggregate, gate_aggregate_mul, gau_attention_mul, mixed_chunk_attention_mul, reshape, windowed_prefix_mul,
};
use kumiki_tensor::{DType, Rng, Tensor, memory_stats, release_cached_memory, reset_peak};

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

#[test]
fn no_square_array_exists() {
    let mut rng = Rng::new(1);
    let mut normal = |shape: &[usize]| rng.normal(DType::F32, shape, 0.0, 1.0);
    let x: Vec<Tensor> = (0..4).map(|_| normal(&[1, T, H, WIDTH])).collect();
    let tau = Tensor::full(DType::F32, &[H], 8.0);
    let row_bytes = T * H * (WIDTH + WIDTH) * size_of::<f32>();
    let square = T * T * size_of::<f32>();
    assert!(12 * row_bytes < square / 2);

    type Operator = fn(&[Var]) -> Var;
    // Live at once with the backward pass, each of half a `row_bytes`: output, its gradient, four partial dq of blocks
    // of keys, dq, dk, dv, and tiles; the gates' operators also hold normalised q and k and the gradients of both; the product and its dv.
    // A windowed prefix has features besides, and a head's keys with their gradients are copied.
    // A step of CEM has whole rows of weights: tiles of T × 48 a thread, three forward and six backward, and gradients of keys
    // and history in eight parts; a square would be 32 rows more.
    let operators: [(&str, [usize; 2], Operator); 8] = [
        ("causal_attention", [2, 7], |x| causal_attention(&x[0], &x[1], &x[2])),
        ("attention", [2, 7], |x| attention(&x[0], &x[1], &x[2], &AttentionOptions::default())),
        ("gate_aggregate", [2, 8], |x| gate_aggregate(&x[0], &x[1], &x[2], &x[4])),
        ("gate_aggregate_mul", [2, 9], |x| gate_aggregate_mul(&x[0], &x[1], &x[2], &x[4], &x[3])),
        ("windowed_prefix_mul", [2, 12], |x| {
            let (q, k, phi_q, phi_k, g, tau) = (&x[0], &x[1], &x[0], &x[1], &x[2], &x[4]);
            windowed_prefix_mul(WindowedPrefix { q, k, phi_q, phi_k, g, tau, window: 128 }, &x[3])
        }),
        ("gau_attention_mul", [2, 9], |x| {
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
    for (name, rows, operator) in operators {
        let forward = extra(|| {
            let x: Vec<Var> = x.iter().chain([&tau]).map(|t| Var::constant(t.clone())).collect();
            operator(&x);
        });
        let both = extra(|| {
            let tape = Tape::new();
            let x: Vec<Var> = x.iter().chain([&tau]).map(|t| tape.leaf(t.clone())).collect();
            let y = operator(&x);
            let dout = Tensor::ones(DType::F32, y.shape());
            let grads = tape.backward_from(&[(&y, dout)]);
            assert!(grads.get(&x[0]).is_some());
        });
        println!(
            "{name}: (live, taken) {forward:?} bytes forward, {both:?} with backward; rows {row_bytes}, square {square}"
        );
        for ((live, taken), rows) in [forward, both].into_iter().zip(rows) {
            assert!(live < rows * row_bytes, "{name}: {live} bytes live at once, {row_bytes} for rows");
            assert!(taken < (rows + 4) * row_bytes, "{name}: {taken} bytes taken, {row_bytes} for rows");
        }
    }
}
