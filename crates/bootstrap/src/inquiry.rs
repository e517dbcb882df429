//! The caller's side of a round before a split: a rank that has said its message and waits for all others'.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::canceller::Canceller;
use super::colors::Table;
use super::commands::{Command, Reporting, Shared};
use super::message::FromHost;
use super::outcome::{Failure, SessionOutcome};
use super::waiter::{Need, Waiter};

/// What the background thread and the waiting caller share.
#[derive(Debug, Default)]
struct Hearing {
    /// Held for a store; no lock is taken while it is held.
    answer: Mutex<Option<Result<Table, Failure>>>,
    changed: Condvar,
}

impl Hearing {
    /// The first answer stays.
    fn answer(&self, answer: Result<Table, Failure>) {
        self.lock().get_or_insert(answer);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Option<Result<Table, Failure>>> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiter for Hearing {
    fn heard(&self, message: FromHost) -> Need {
        self.answer(match message {
            FromHost::Table(table) => Ok(table),
            FromHost::Outcome(SessionOutcome::Failed(failure)) => Err(failure),
            _ => Err(Failure::Unreadable),
        });
        Need::Nothing
    }

    fn lost(&self, failure: Failure) {
        self.answer(Err(failure));
    }

    fn end(&self, outcome: SessionOutcome) {
        self.answer(Err(match outcome {
            SessionOutcome::Failed(failure) => failure,
            // There is no round at a port.
            _ => Failure::HostLost,
        }));
    }

    fn declines_elsewhere(&self) -> bool {
        false
    }

    fn is_over(&self) -> bool {
        self.lock().is_some()
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
        Reporting { key: self.key, waiter: self.hearing.clone(), words }
    }

    /// What ends the wait.
    pub fn canceller(&self) -> Canceller {
        Canceller::new(self.hearing.clone(), self.key, self.shared.clone())
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
