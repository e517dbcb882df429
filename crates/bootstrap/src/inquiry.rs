//! The caller's side of a round before a split: a rank that has said its message and waits for all others'.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::colors::Table;
use super::message::FromHost;
use super::outcome::{Failure, SessionOutcome};
use super::reactor::{Command, Reporting, Shared};
use super::waiter::{Canceller, Need, Waiter};

/// What the background thread and the waiting caller share.
#[derive(Debug, Default)]
pub struct Hearing {
    /// Held for a store; no lock is taken while it is held.
    answer: Mutex<Option<Result<Table, Failure>>>,
    changed: Condvar,
}

impl Hearing {
    pub(super) fn heard(&self, message: FromHost) -> Need {
        self.end(match message {
            FromHost::Table(table) => Ok(table),
            FromHost::Outcome(SessionOutcome::Failed(failure)) => Err(failure),
            _ => Err(Failure::Unreadable),
        });
        Need::Nothing
    }

    /// The first answer stays.
    pub(super) fn end(&self, answer: Result<Table, Failure>) {
        self.lock().get_or_insert(answer);
        self.changed.notify_all();
    }

    pub(super) fn is_over(&self) -> bool {
        self.lock().is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Result<Table, Failure>>> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A rank in a round; its message has gone out, or goes when the process listener has room.
#[derive(Debug)]
pub struct Inquiry {
    hearing: Arc<Hearing>,
    key: u64,
    shared: Arc<Shared>,
}

impl Inquiry {
    pub(super) fn new(shared: Arc<Shared>) -> Inquiry {
        Inquiry { hearing: Arc::default(), key: shared.new_key(), shared }
    }

    /// For the background thread.
    pub(super) fn reporting(&self, words: Vec<u8>) -> Reporting {
        Reporting { key: self.key, waiter: self.waiter(), words }
    }

    fn waiter(&self) -> Waiter {
        Waiter::Round(self.hearing.clone())
    }

    /// What ends the wait.
    pub fn canceller(&self) -> Canceller {
        Canceller::new(self.waiter(), self.key, self.shared.clone())
    }

    /// Waits until all have spoken or one cannot any more: as long as it takes, on the caller's thread.
    pub fn wait(self) -> Result<Table, Failure> {
        let mut answer = self.hearing.lock();
        loop {
            if let Some(answer) = answer.clone() {
                return answer;
            }
            answer = self.hearing.changed.wait(answer).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Inquiry {
    /// A message that has not gone out is withdrawn.
    fn drop(&mut self) {
        self.shared.send(Command::Leave(self.key));
    }
}
