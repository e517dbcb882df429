//! Locks that survive a panic elsewhere, and the one-shot signal that events and markers are made of.

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
    raised: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Signal {
    pub fn raise(&self) {
        lock(&self.raised).get_or_insert_with(Instant::now);
        self.changed.notify_all();
    }

    pub fn raised_at(&self) -> Option<Instant> {
        *lock(&self.raised)
    }

    pub fn wait(&self) {
        let mut raised = lock(&self.raised);
        while raised.is_none() {
            raised = wait(&self.changed, raised);
        }
    }
}
