//! Turns: several tasks add to the same rows in an order that is known beforehand.
//!
//! Waiting is busy, for a task only waits where the one before it is a tile behind. Tasks must begin in the order of their
//! turns, so that what is waited for always goes on.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// How many of the tasks that share a place have been there, for the places of every head.
pub(crate) struct Turns {
    done: Vec<AtomicUsize>,
    places: usize,
    failed: AtomicBool,
}

/// The right to a place, until it is passed on.
pub(crate) struct Turn<'a>(&'a AtomicUsize);

impl Turns {
    pub fn new(heads: usize, places: usize) -> Turns {
        let done = (0..heads * places).map(|_| AtomicUsize::new(0)).collect();
        Turns { done, places, failed: AtomicBool::new(false) }
    }

    /// Returns when `before` tasks have passed on this place, all that come before the caller.
    ///
    /// # Panics
    /// When a task has panicked, which would never pass its turn on.
    pub fn wait(&self, head: usize, place: usize, before: usize) -> Turn<'_> {
        let done = &self.done[head * self.places + place];
        let mut tries = 0;
        // Pairs with `pass`: what the tasks before have written is seen.
        while done.load(Ordering::Acquire) != before {
            assert!(!self.failed.load(Ordering::Relaxed), "another task of this operator has panicked");
            tries += 1;
            if tries < 100 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        Turn(done)
    }

    /// Runs a task; if it panics, others do not wait for it.
    pub fn or_tell_others(&self, task: impl FnOnce()) {
        struct Tell<'a>(&'a AtomicBool);
        impl Drop for Tell<'_> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    self.0.store(true, Ordering::Relaxed);
                }
            }
        }
        let _tell = Tell(&self.failed);
        task();
    }
}

impl Turn<'_> {
    pub fn pass(self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kumiki_tensor::threads::{parallel_for, with_threads};
    use std::sync::Mutex;

    #[test]
    fn places_are_visited_in_order_by_any_number_of_threads() {
        for threads in [1, 2, 8] {
            let (turns, next) = (Turns::new(2, 3), AtomicUsize::new(0));
            let visits: Vec<Mutex<Vec<usize>>> = (0..6).map(|_| Mutex::default()).collect();
            with_threads(threads, || {
                parallel_for(2 * 20, 1 << 20, |_| {
                    let task = next.fetch_add(1, Ordering::Relaxed);
                    let (rank, head) = (task / 2, task % 2);
                    for place in 0..3 {
                        let turn = turns.wait(head, place, rank);
                        visits[head * 3 + place].lock().unwrap().push(rank);
                        turn.pass();
                    }
                });
            });
            for visits in visits {
                assert_eq!(visits.into_inner().unwrap(), (0..20).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn nobody_waits_for_a_task_that_panicked() {
        let turns = Turns::new(1, 1);
        let caught = std::panic::catch_unwind(|| turns.or_tell_others(|| panic!("first")));
        assert!(caught.is_err());
        let message = std::panic::catch_unwind(|| turns.wait(0, 0, 1).pass()).unwrap_err();
        assert!(message.downcast_ref::<&str>().unwrap().contains("another task of this operator has panicked"));
    }
}
