//! Counts attempts to materialize a lazy communicator, by numbers that are equal on all ranks. A rank whose attempt failed tells the others,
//! which would wait for it in NCCL: their attempt of the same number fails, too. The next attempt has the next number on all ranks, and the
//! peer group goes on. A rank that had finished the failed attempt holds an NCCL communicator that not all ranks have.
// Divergence: with NCCL alone who waits in an init for a rank that has failed may wait for ever.

use std::sync::atomic::{AtomicU64, Ordering};

use once_cell::sync::OnceCell;

use super::requests::{Matter, Others};

/// Called with the number of an attempt that failed on another rank. It runs on the background worker, so it must not wait.
type Heard = Box<dyn Fn(u64) + Send + Sync>;

/// What this rank knows of a lazy communicator's attempts.
pub(crate) struct Attempts {
    others: Others,
    /// All attempts with a lower number count as failed on some rank.
    lost: AtomicU64,
    heard: OnceCell<Heard>,
}

impl std::fmt::Debug for Attempts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attempts").field("lost", &self.lost).finish_non_exhaustive()
    }
}

impl Attempts {
    /// The state before the first attempt.
    pub(super) fn new(others: Others) -> Attempts {
        Attempts { others, lost: AtomicU64::new(0), heard: OnceCell::new() }
    }

    /// Sets the function that is called when an attempt has failed on another rank. Only the first call counts. The function must not wait.
    pub(crate) fn on_lost(&self, heard: impl Fn(u64) + Send + Sync + 'static) {
        let _ = self.heard.set(Box::new(heard));
    }

    /// Whether this rank knows that the attempt has failed on some rank.
    pub(crate) fn has_lost(&self, attempt: u64) -> bool {
        attempt < self.lost.load(Ordering::Acquire)
    }

    /// Notes that this rank's attempt has failed, and tells the other ranks, even if this communicator ends right after.
    pub(crate) fn lose(&self, attempt: u64) {
        self.note(attempt);
        self.others.tell(Matter::LostAttempt(attempt));
    }

    /// Notes that another rank's attempt has failed.
    pub(super) fn hear_of_lost(&self, attempt: u64) {
        if self.note(attempt)
            && let Some(heard) = self.heard.get()
        {
            heard(attempt);
        }
    }

    /// Returns whether this failure was not known before.
    fn note(&self, attempt: u64) -> bool {
        let after = attempt.saturating_add(1);
        self.lost.fetch_max(after, Ordering::AcqRel) < after
    }
}
