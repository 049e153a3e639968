//! The thread pool and the loops that run on it.
//!
//! Work is always cut by *shape*, never by the number of threads, and partial results are combined in index order;
//! so the same seed gives bitwise the same result for any number of threads.
//!
//! The pool has `KUMIKI_THREADS` threads, else `RAYON_NUM_THREADS`, else one per available core. Code that already
//! runs inside a rayon pool (an embedder's own) uses that pool.

use std::sync::OnceLock;

use rayon::prelude::*;

/// Work below this many "element operations" runs on the calling thread: waking a second thread costs more.
pub const SERIAL_BELOW: usize = 32 * 1024;

static POOL: OnceLock<rayon::ThreadPool> = OnceLock::new();

/// The number of threads that `KUMIKI_THREADS` or `RAYON_NUM_THREADS` asks for, or of the machine.
///
/// # Errors
/// A sentence naming the variable when its value is not a positive number.
pub fn configured_threads() -> Result<usize, String> {
    for name in ["KUMIKI_THREADS", "RAYON_NUM_THREADS"] {
        if let Ok(text) = std::env::var(name) {
            return match text.trim().parse::<usize>() {
                Ok(0) | Err(_) => Err(format!("{name} must be a positive number of threads, found `{text}`")),
                Ok(n) => Ok(n),
            };
        }
    }
    Ok(std::thread::available_parallelism().map_or(1, |n| n.get()))
}

fn new_pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("kumiki-{i}"))
        .build()
        .expect("the operating system refused to start worker threads")
}

/// Runs `f` inside the pool (or in place when the caller already is on a pool's thread).
pub fn in_pool<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    if rayon::current_thread_index().is_some() {
        f()
    } else {
        POOL.get_or_init(|| new_pool(configured_threads().unwrap_or_else(|error| panic!("{error}")))).install(f)
    }
}

/// The number of threads that loops started here will use.
pub fn current_threads() -> usize {
    if rayon::current_thread_index().is_some() {
        rayon::current_num_threads()
    } else {
        in_pool(rayon::current_num_threads)
    }
}

/// Runs `f` on a fresh pool of `threads` threads: for tests and measurements.
///
/// # Panics
/// When `threads` is 0.
pub fn with_threads<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    assert!(threads > 0, "with_threads: at least one thread is needed");
    new_pool(threads).install(f)
}

fn stays_serial(items: usize, cost: usize) -> bool {
    items <= 1 || items.saturating_mul(cost.max(1)) < SERIAL_BELOW
}

/// Calls `f(i)` for `i` in `0..items`, in parallel when the whole work, `items * cost` element operations, is worth it.
pub fn parallel_for(items: usize, cost: usize, f: impl Fn(usize) + Sync + Send) {
    if stays_serial(items, cost) {
        (0..items).for_each(f);
    } else {
        in_pool(|| (0..items).into_par_iter().with_max_len(1.max(items / 64)).for_each(f));
    }
}

/// `f(i)` for `i` in `0..items`, collected in index order: the building block of reductions in a fixed order.
pub fn parallel_map<R: Send>(items: usize, cost: usize, f: impl Fn(usize) -> R + Sync + Send) -> Vec<R> {
    if stays_serial(items, cost) {
        (0..items).map(f).collect()
    } else {
        in_pool(|| (0..items).into_par_iter().map(f).collect())
    }
}

/// Cuts `out` into pieces of `chunk` elements (the last may be shorter) and calls `f(index, piece)` for each;
/// `cost` is the number of element operations per piece.
///
/// # Panics
/// When `chunk` is 0.
pub fn parallel_chunks_mut<T: Send>(
    out: &mut [T],
    chunk: usize,
    cost: usize,
    f: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    if stays_serial(out.len().div_ceil(chunk), cost) {
        out.chunks_mut(chunk).enumerate().for_each(|(i, piece)| f(i, piece));
    } else {
        in_pool(|| out.par_chunks_mut(chunk).enumerate().for_each(|(i, piece)| f(i, piece)));
    }
}

/// As [`parallel_chunks_mut`] with two outputs cut in step: `a` by `chunk_a`, `b` by `chunk_b`, the same number of pieces.
///
/// # Panics
/// When a chunk is 0 or the two are not cut into the same number of pieces.
pub fn parallel_chunks2_mut<A: Send, B: Send>(
    (a, chunk_a): (&mut [A], usize),
    (b, chunk_b): (&mut [B], usize),
    cost: usize,
    f: impl Fn(usize, &mut [A], &mut [B]) + Sync + Send,
) {
    assert_eq!(
        a.len().div_ceil(chunk_a),
        b.len().div_ceil(chunk_b),
        "parallel_chunks2_mut: the outputs differ in pieces"
    );
    if stays_serial(a.len().div_ceil(chunk_a), cost) {
        a.chunks_mut(chunk_a).zip(b.chunks_mut(chunk_b)).enumerate().for_each(|(i, (x, y))| f(i, x, y));
    } else {
        in_pool(|| {
            a.par_chunks_mut(chunk_a).zip(b.par_chunks_mut(chunk_b)).enumerate().for_each(|(i, (x, y))| f(i, x, y));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_visit_every_item_for_any_thread_count() {
        for threads in [1, 2, 8] {
            with_threads(threads, || {
                assert_eq!(current_threads(), threads);
                let mut out = vec![0usize; 100_003];
                parallel_chunks_mut(&mut out, 1000, 1000, |i, piece| {
                    piece.iter_mut().enumerate().for_each(|(j, x)| *x = i * 1000 + j);
                });
                assert!(out.iter().enumerate().all(|(i, &x)| i == x));
                assert_eq!(parallel_map(1000, 1000, |i| i * 2), (0..1000).map(|i| i * 2).collect::<Vec<_>>());
            });
        }
    }

    #[test]
    fn empty_loops_do_nothing() {
        parallel_for(0, 1_000_000, |_| panic!("no item to visit"));
        parallel_chunks_mut(&mut [0u8; 0], 7, 1_000_000, |_, _| panic!("no piece to visit"));
    }
}
