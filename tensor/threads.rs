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

/// More threads than any machine has use for; asking for more is taken for a mistake.
pub const MAX_THREADS: usize = 1024;

static POOL: OnceLock<rayon::ThreadPool> = OnceLock::new();

/// The number of threads that `KUMIKI_THREADS` or `RAYON_NUM_THREADS` asks for, or of the machine.
///
/// # Errors
/// A sentence naming the variable when its value is not a number from 1 to [`MAX_THREADS`].
pub fn configured_threads() -> Result<usize, String> {
    for name in ["KUMIKI_THREADS", "RAYON_NUM_THREADS"] {
        if let Ok(text) = std::env::var(name) {
            return match text.trim().parse::<usize>() {
                Ok(0) | Err(_) => Err(format!("{name} must be a positive number of threads, found `{text}`")),
                Ok(n) if n > MAX_THREADS => Err(format!("{name} must be at most {MAX_THREADS} threads, found {n}")),
                Ok(n) => Ok(n),
            };
        }
    }
    Ok(std::thread::available_parallelism().map_or(1, |n| n.get()))
}

/// Address space of a thread's stack.
const STACK: usize = 2 << 20;

fn new_pool(threads: usize) -> Result<rayon::ThreadPool, String> {
    let refused = |e: &dyn std::fmt::Display| format!("the system refused to start {threads} threads: {e}");
    // Asked for at once first: a thread that starts and then finds no room for its small things ends the process.
    let room = memmap2::MmapOptions::new().len(threads * (STACK + STACK / 8)).no_reserve_swap().map_anon();
    drop(room.map_err(|e| refused(&e))?);
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .stack_size(STACK)
        .thread_name(|i| format!("kumiki-{i}"))
        .build()
        .map_err(|e| refused(&e))
}

/// Starts the pool, so that what can go wrong with it is told before any work: otherwise its first use starts it.
///
/// # Errors
/// As [`configured_threads`], and when the system refuses.
pub fn start() -> Result<(), String> {
    if POOL.get().is_none() && rayon::current_thread_index().is_none() {
        let pool = new_pool(configured_threads()?)?;
        // Somebody else may have been faster: then theirs is as good.
        let _ = POOL.set(pool);
    }
    Ok(())
}

/// Runs `f` inside the pool (or in place when the caller already is on a pool's thread).
///
/// # Panics
/// When the pool is not started yet and cannot be; see [`start`].
pub fn in_pool<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    if rayon::current_thread_index().is_some() {
        f()
    } else {
        let pool = || configured_threads().and_then(new_pool).unwrap_or_else(|error| panic!("{error}"));
        POOL.get_or_init(pool).install(f)
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
/// When `threads` is 0 or the system refuses to start them.
pub fn with_threads<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    try_with_threads(threads, f).unwrap_or_else(|error| panic!("{error}"))
}

/// As [`with_threads`], for a number that comes from outside.
///
/// # Errors
/// When the system refuses to start so many.
///
/// # Panics
/// When `threads` is 0.
pub fn try_with_threads<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> Result<R, String> {
    assert!(threads > 0, "with_threads: at least one thread is needed");
    Ok(new_pool(threads)?.install(f))
}

fn stays_serial(items: usize, cost: usize) -> bool {
    items <= 1 || items.saturating_mul(cost.max(1)) < SERIAL_BELOW
}

/// The only place where rayon's machinery is compiled: behind a `dyn`, or every loop in the engine would bring its own
/// copy of it (measured: a third of the binary). One indirect call per item is nothing beside an item's work.
fn run(items: usize, cost: usize, f: &(dyn Fn(usize) + Sync)) {
    if stays_serial(items, cost) {
        (0..items).for_each(f);
    } else {
        in_pool(|| (0..items).into_par_iter().with_max_len(1.max(items / 64)).for_each(f));
    }
}

/// A slice that tasks cut into disjoint pieces by index.
struct Pieces<T> {
    start: *mut T,
    len: usize,
    chunk: usize,
}

// SAFETY: a piece is handed to one task only (see `piece`), and `T: Send` may be moved to that task's thread.
unsafe impl<T: Send> Sync for Pieces<T> {}

impl<T> Pieces<T> {
    fn new(slice: &mut [T], chunk: usize) -> Pieces<T> {
        assert!(chunk > 0, "parallel loop: a piece must have at least one element");
        Pieces { start: slice.as_mut_ptr(), len: slice.len(), chunk }
    }

    fn count(&self) -> usize {
        self.len.div_ceil(self.chunk)
    }

    /// # Safety
    /// `index` is below `count`, no other call gets the same `index`, and the slice is borrowed for as long as the
    /// piece is used.
    #[allow(clippy::mut_from_ref)] // pieces of different indices do not overlap
    unsafe fn piece(&self, index: usize) -> &mut [T] {
        let from = index * self.chunk;
        let len = self.chunk.min(self.len - from);
        // SAFETY: `from + len <= self.len`, and the caller asks for every index once.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(from), len) }
    }
}

/// Calls `f(i)` for `i` in `0..items`, in parallel when the whole work, `items * cost` element operations, is worth it.
pub fn parallel_for(items: usize, cost: usize, f: impl Fn(usize) + Sync + Send) {
    run(items, cost, &f);
}

/// `f(i)` for `i` in `0..items`, collected in index order: the building block of reductions in a fixed order.
#[expect(clippy::missing_panics_doc, reason = "every slot is filled before it is taken")]
pub fn parallel_map<R: Send>(items: usize, cost: usize, f: impl Fn(usize) -> R + Sync + Send) -> Vec<R> {
    let mut slots: Vec<Option<R>> = Vec::new();
    slots.resize_with(items, || None);
    parallel_chunks_mut(&mut slots, 1, cost, |i, slot| slot[0] = Some(f(i)));
    slots.into_iter().map(|slot| slot.expect("every index was visited")).collect()
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
    let pieces = Pieces::new(out, chunk);
    // SAFETY: `run` visits every index below `count` once and returns after the last; `out` is borrowed until then.
    run(pieces.count(), cost, &|i| f(i, unsafe { pieces.piece(i) }));
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
    let (a, b) = (Pieces::new(a, chunk_a), Pieces::new(b, chunk_b));
    assert_eq!(a.count(), b.count(), "parallel_chunks2_mut: the outputs differ in pieces");
    // SAFETY: as in `parallel_chunks_mut`, for each of the two.
    run(a.count(), cost, &|i| f(i, unsafe { a.piece(i) }, unsafe { b.piece(i) }));
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
