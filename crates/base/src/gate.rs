//! Keeps a thread of Windlass out of NCCL's communicator while the program's threads are in it: NCCL allows one at a
//! time.
//!
//! Calls of the program [pass](Gate::pass), any number at once. Windlass's thread [closes](Gate::try_close) the gate if no call
//! is inside; it never waits. A call waits while the gate is closed: milliseconds, and no other call is needed to open it.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::lock::{Mutex, MutexGuard};

/// The bit that is set while the gate is closed. The lower bits count calls inside, and calls that are about to see that
/// it is closed.
const CLOSED: u32 = 1 << 31;

/// Open to all calls, or closed by one thread.
#[derive(Debug)]
pub struct Gate {
    state: AtomicU32,
    /// Locked while the gate is closed: waiting calls block on it.
    closed: Mutex<()>,
}

/// A call is inside the gate until this value is dropped.
#[derive(Debug)]
pub struct Passed<'gate>(&'gate Gate);

/// The gate is closed until this value is dropped.
#[derive(Debug)]
pub struct Closed<'gate> {
    gate: &'gate Gate,
    /// The fields drop after `drop`, so waiting calls wake when the state is open.
    _waiting: MutexGuard<'gate, ()>,
}

impl Passed<'_> {
    /// Whether both calls are inside the same gate.
    pub fn is_of_same_gate(&self, other: &Passed<'_>) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Gate {
    /// An open gate.
    pub const fn new() -> Gate {
        Gate { state: AtomicU32::new(0), closed: Mutex::new(()) }
    }

    /// Enters the gate: at once if it is open, else after it opens.
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
        drop(self.closed.lock());
    }

    /// Whether the gate is closed at this moment.
    pub fn is_closed(&self) -> bool {
        self.state.load(Ordering::Relaxed) & CLOSED != 0
    }

    /// Closes the gate. Gives none, without waiting, if a call is inside or another thread has closed it.
    pub fn try_close(&self) -> Option<Closed<'_>> {
        let waiting = self.closed.try_lock()?;
        let closed = self.state.compare_exchange(0, CLOSED, Ordering::Acquire, Ordering::Relaxed);
        // A `Closed` may be made only if the exchange succeeded, since its drop opens the gate.
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

    /// Many calls are inside at once, also two of one thread; none is while the gate is closed.
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

    /// Eight threads pass while another one closes: both are never inside, and no thread is left waiting.
    #[test]
    fn under_load() {
        let gate = Gate::new();
        let (inside, closings, over) = (AtomicU32::new(0), AtomicU32::new(0), AtomicBool::new(false));
        let threads = 8;
        std::thread::scope(|scope| {
            let callers: Vec<_> = (0..threads)
                .map(|_| {
                    scope.spawn(|| {
                        // Goes on until the gate was closed once: all eight threads must be outside at one moment, which is rare on
                        // few processors.
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
