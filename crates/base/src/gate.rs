//! Keeps a thread of ours out of NCCL's communicator while the application's is in it: NCCL allows one thread at a time.
//!
//! Calls of the application [pass](Gate::pass), as many as there are at once; ours [closes](Gate::try_close) the gate if nobody
//! is inside, and never waits. A call waits while ours is inside, which is milliseconds and needs no other call of anybody's.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// Set while ours is inside; what is below counts those who have passed, and those who are about to see that it is closed.
const CLOSED: u32 = 1 << 31;

/// Open to all, or closed by one.
#[derive(Debug)]
pub struct Gate {
    state: AtomicU32,
    /// Held while it is closed: for those who wait.
    closed: Mutex<()>,
}

/// A call is inside until this is dropped.
#[derive(Debug)]
pub struct Passed<'gate>(&'gate Gate);

/// Nobody else is inside until this is dropped.
#[derive(Debug)]
pub struct Closed<'gate> {
    gate: &'gate Gate,
    /// Dropped after the state says that it is open.
    _waiting: MutexGuard<'gate, ()>,
}

impl Passed<'_> {
    /// Whether the other has passed the same.
    pub fn is_of_same_gate(&self, other: &Passed<'_>) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Gate {
    /// One that is open.
    pub const fn new() -> Gate {
        Gate { state: AtomicU32::new(0), closed: Mutex::new(()) }
    }

    /// Goes in: at once unless it is closed.
    #[inline]
    pub fn pass(&self) -> Passed<'_> {
        while self.state.fetch_add(1, Ordering::Acquire) & CLOSED != 0 {
            self.state.fetch_sub(1, Ordering::Relaxed);
            self.wait();
        }
        Passed(self)
    }

    #[cold]
    fn wait(&self) {
        drop(self.closed.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Whether it is closed at this moment.
    pub fn is_closed(&self) -> bool {
        self.state.load(Ordering::Relaxed) & CLOSED != 0
    }

    /// Closes it, unless somebody is inside.
    pub fn try_close(&self) -> Option<Closed<'_>> {
        let waiting = match self.closed.try_lock() {
            Ok(waiting) => waiting,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let closed = self.state.compare_exchange(0, CLOSED, Ordering::Acquire, Ordering::Relaxed);
        // Made only where it is closed: dropping it opens.
        closed.is_ok().then(|| Closed { gate: self, _waiting: waiting })
    }
}

impl Default for Gate {
    fn default() -> Gate {
        Gate::new()
    }
}

impl Drop for Passed<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.state.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.gate.state.fetch_sub(CLOSED, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// Many inside at once, also twice by one thread; none while it is closed.
    #[test]
    fn one_kind_at_a_time() {
        let gate = Gate::new();
        let (first, second) = (gate.pass(), gate.pass());
        assert!(gate.try_close().is_none());
        assert!(!gate.is_closed(), "who could not close it has not");
        drop(first);
        assert!(gate.try_close().is_none());
        drop(second);
        let closed = gate.try_close().unwrap();
        assert!(gate.try_close().is_none());
        drop(closed);
        drop(gate.pass());
        assert!(gate.try_close().is_some());
    }

    /// Eight threads that pass beside one that closes: never both inside, and nobody is left waiting.
    #[test]
    fn under_load() {
        let gate = Gate::new();
        let (inside, closings, over) = (AtomicU32::new(0), AtomicU32::new(0), AtomicBool::new(false));
        let threads = 8;
        std::thread::scope(|scope| {
            let callers: Vec<_> = (0..threads)
                .map(|_| {
                    scope.spawn(|| {
                        // Until the other had its turn, too: for which all must be outside at once, where few processors leave most
                        // of them standing somewhere.
                        for call in 0.. {
                            if call >= 20_000 {
                                if closings.load(Ordering::Relaxed) > 0 {
                                    break;
                                }
                                std::thread::sleep(std::time::Duration::from_millis(1));
                            }
                            let _passed = gate.pass();
                            inside.fetch_add(1, Ordering::Relaxed);
                            std::hint::spin_loop();
                            inside.fetch_sub(1, Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                    if let Some(_closed) = gate.try_close() {
                        closings.fetch_add(1, Ordering::Relaxed);
                        assert_eq!(inside.load(Ordering::Relaxed), 0);
                    }
                }
            });
            callers.into_iter().for_each(|caller| caller.join().unwrap());
            over.store(true, Ordering::Relaxed);
        });
        assert!(gate.try_close().is_some());
    }
}
