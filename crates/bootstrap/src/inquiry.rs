//! The caller's side of one message to a host and one answer, on the caller's thread: in a round before a split or
//! shrink, and for a rank that [declines](super::Bootstrap::decline_at_port) at a port.

use std::sync::{Arc, Condvar, PoisonError};

use super::children::plan::Table;
use super::commands::{Canceller, Command, Reporting, Shared};
use super::message::FromHost;
use super::outcome::{Failure, SessionOutcome};
use super::waiter::{Need, Waiter};
use windlass_base::lock::Mutex;

/// The host's answer.
type HostAnswer = Result<Table, SessionOutcome>;

/// What the background thread and the waiting caller share.
#[derive(Debug, Default)]
struct Hearing {
    /// Held for a store; no lock is taken while it is held.
    answer: Mutex<Option<HostAnswer>>,
    changed: Condvar,
}

impl Hearing {
    /// Keeps the first answer, and wakes the caller.
    fn answer(&self, answer: HostAnswer) {
        self.answer.lock().get_or_insert(answer);
        self.changed.notify_all();
    }
}

impl Waiter for Hearing {
    fn heard(&self, message: FromHost) -> Need {
        self.answer(match message {
            FromHost::Table(table) => Ok(table),
            FromHost::Outcome(outcome) => Err(outcome),
            FromHost::Prepare(_) | FromHost::Stop => Err(SessionOutcome::Failed(Failure::Unreadable)),
        });
        Need::Nothing
    }

    fn lost(&self, failure: Failure) {
        self.end(SessionOutcome::Failed(failure));
    }

    fn end(&self, outcome: SessionOutcome) {
        self.answer(Err(outcome));
    }

    fn declines_elsewhere(&self) -> bool {
        false
    }

    fn is_over(&self) -> bool {
        self.answer.lock().is_some()
    }
}

/// A rank that waits for its answer. Its message has gone out, or goes as soon as it can.
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

    /// The rank and its message, for the background thread.
    pub(super) fn reporting(&self, words: Vec<u8>) -> Reporting {
        Reporting { key: self.key, waiter: self.hearing.clone(), words }
    }

    /// A canceller that ends the wait.
    pub fn canceller(&self) -> Canceller {
        Canceller::new(self.hearing.clone(), self.key, self.shared.clone())
    }

    /// Waits in a round until all ranks have spoken or one no longer can, without a time limit.
    pub fn wait(self) -> Result<Table, Failure> {
        self.answer().map_err(|outcome| match outcome {
            SessionOutcome::Failed(failure) => failure,
            // A round has no such outcome.
            SessionOutcome::PeerGroup | SessionOutcome::OnNccl(_) => Failure::Unreadable,
        })
    }

    /// Waits for the host's answer to a rank that has declined. `Ok` if all ranks go to NCCL.
    pub(super) fn wait_declined(self) -> Result<(), Failure> {
        match self.answer() {
            Err(SessionOutcome::OnNccl(_)) => Ok(()),
            Err(SessionOutcome::Failed(failure)) => Err(failure),
            Err(SessionOutcome::PeerGroup) | Ok(_) => Err(Failure::Unreadable),
        }
    }

    fn answer(&self) -> HostAnswer {
        let Hearing { answer, changed } = &*self.hearing;
        let answer = changed.wait_while(answer.lock(), |answer| answer.is_none());
        let answer = answer.unwrap_or_else(PoisonError::into_inner).clone();
        answer.unwrap_or(Err(SessionOutcome::Failed(Failure::Unreadable)))
    }
}

impl Drop for Inquiry {
    /// Withdraws a message that has not gone out.
    fn drop(&mut self) {
        self.shared.send(Command::Leave(self.key));
    }
}
