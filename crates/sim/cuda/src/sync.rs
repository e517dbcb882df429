//! Locks that survive a panic elsewhere, and the one-shot signal that events and markers are made of.

use crate::clock;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Locks whatever happened before: a caught panic must not turn every later call into another one.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits on a condition variable, whatever happened before.
pub fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Raised once, at a time that is kept.
#[derive(Default)]
pub struct Signal {
    raised: Mutex<Option<Moment>>,
    changed: Condvar,
}

#[derive(Clone, Copy)]
pub struct Moment {
    pub real: Instant,
    /// The modelled time of whoever raised.
    pub modelled_ns: u64,
}

impl Signal {
    pub fn raise(&self) {
        let now = || Moment { real: Instant::now(), modelled_ns: clock::now() };
        lock(&self.raised).get_or_insert_with(now);
        self.changed.notify_all();
    }

    pub fn raised_at(&self) -> Option<Moment> {
        *lock(&self.raised)
    }

    pub fn wait(&self) {
        let mut raised = lock(&self.raised);
        let moment = loop {
            match *raised {
                Some(moment) => break moment,
                None => raised = wait(&self.changed, raised),
            }
        };
        clock::not_before(moment.modelled_ns);
    }
}
