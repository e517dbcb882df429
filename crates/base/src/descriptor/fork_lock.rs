//! Keeps forks off while a descriptor is opened and entered into the [table](crate::descriptor), or leaves it and is closed: a child forked in
//! between would keep the descriptor open. A raw `clone` system call does not wait.
//!
//! Two counters instead of a mutex: the child need not own what its parent's thread has locked, and each side waits for a bounded time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Threads that open descriptors now.
static OPENING: AtomicUsize = AtomicUsize::new(0);
/// Threads that fork now.
static FORKING: AtomicUsize = AtomicUsize::new(0);

/// The longest wait. Descriptors are opened within microseconds, and a fork takes milliseconds. Only a signal handler that forks, or another
/// library's fork handler, may wait for the very thread that waits here.
const WAITS: Duration = Duration::from_millis(500);

/// Calls `open` while no other thread forks. It should neither wait nor allocate: a fork waits for it, perhaps with the allocator locked. After
/// [`WAITS`] either side goes on, and the child may have the descriptor.
pub fn without_forks<T>(open: impl FnOnce() -> T) -> T {
    // Both sides write their counter and then read the other one, so one of them sees the other (`SeqCst`).
    OPENING.fetch_add(1, Ordering::SeqCst);
    let began = Instant::now();
    while FORKING.load(Ordering::SeqCst) > 0 && began.elapsed() < WAITS {
        one_less(&OPENING);
        std::thread::yield_now();
        OPENING.fetch_add(1, Ordering::SeqCst);
    }
    let opened = open();
    one_less(&OPENING);
    opened
}

/// A signal handler may have forked in between: in its child the counter is 0 already.
fn one_less(counter: &AtomicUsize) {
    let _ = counter.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| count.checked_sub(1));
}

/// For `pthread_atfork`: runs before a fork.
pub extern "C" fn before_fork() {
    FORKING.fetch_add(1, Ordering::SeqCst);
    let began = Instant::now();
    while OPENING.load(Ordering::SeqCst) > 0 && began.elapsed() < WAITS {
        std::thread::yield_now();
    }
}

/// Runs in the parent after a fork.
pub extern "C" fn after_fork() {
    one_less(&FORKING);
}

/// In a child just forked: its parent's other threads neither open nor fork here.
pub fn release_in_child() {
    OPENING.store(0, Ordering::SeqCst);
    FORKING.store(0, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fork waits for descriptors that are being opened, and descriptors wait for forks. A thread does not wait for itself for ever.
    #[test]
    fn either_waits() {
        let wait_for = |counter: &AtomicUsize| {
            while counter.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            let fork = without_forks(|| {
                let fork = scope.spawn(|| before_fork());
                wait_for(&FORKING);
                assert!(!fork.is_finished());
                fork
            });
            fork.join().unwrap();
            let open = scope.spawn(|| without_forks(|| FORKING.load(Ordering::SeqCst)));
            std::thread::yield_now();
            assert!(!open.is_finished());
            after_fork();
            assert_eq!(open.join().unwrap(), 0);
        });
        without_forks(|| before_fork());
        after_fork();
    }
}
