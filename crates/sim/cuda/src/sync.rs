//! Locks that survive a panic in another thread, and the one-shot signal of event recordings and graph launches.

use crate::clock;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Locks, also after a panic of a holder: a caught panic must not make every later call panic too.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits on a condition variable, also after a panic of a holder.
pub fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// A signal that is raised once and keeps the time of that; raising it again changes nothing.
#[derive(Default)]
pub struct Signal {
    raised: Mutex<Option<Moment>>,
    changed: Condvar,
}

#[derive(Clone, Copy)]
pub struct Moment {
    pub real: Instant,
    /// The modelled time of the thread that raised the signal.
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
