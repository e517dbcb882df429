//! The caller's side where a rank has one message for its host and waits for one answer: in a round before a split, and where
//! it [declines](super::Bootstrap::decline_at_port) to come.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::canceller::Canceller;
use super::colors::Table;
use super::commands::{Command, Reporting, Shared};
use super::message::FromHost;
use super::outcome::{Failure, SessionOutcome};
use super::waiter::{Need, Waiter};

/// What the host says.
#[derive(Clone, Debug)]
enum HostAnswer {
    Table(Table),
    Outcome(SessionOutcome),
}

/// What the background thread and the waiting caller share.
#[derive(Debug, Default)]
struct Hearing {
    /// Held for a store; no lock is taken while it is held.
    answer: Mutex<Option<HostAnswer>>,
    changed: Condvar,
}

impl Hearing {
    /// The first answer stays.
    fn answer(&self, answer: HostAnswer) {
        self.lock().get_or_insert(answer);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Option<HostAnswer>> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiter for Hearing {
    fn heard(&self, message: FromHost) -> Need {
        self.answer(match message {
            FromHost::Table(table) => HostAnswer::Table(table),
            FromHost::Outcome(outcome) => HostAnswer::Outcome(outcome),
            FromHost::Prepare(_) | FromHost::Stop => {
                HostAnswer::Outcome(SessionOutcome::Failed(Failure::Unreadable))
            }
        });
        Need::Nothing
    }

    fn lost(&self, failure: Failure) {
        self.end(SessionOutcome::Failed(failure));
    }

    fn end(&self, outcome: SessionOutcome) {
        self.answer(HostAnswer::Outcome(outcome));
    }

    fn declines_elsewhere(&self) -> bool {
        false
    }

    fn is_over(&self) -> bool {
        self.lock().is_some()
    }
}

/// A rank that waits for its answer; its message has gone out, or goes as soon as it can.
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

    /// In a round: waits until all have spoken or one cannot any more, as long as it takes, on the caller's thread.
    pub fn wait(self) -> Result<Table, Failure> {
        match self.answer() {
            HostAnswer::Table(table) => Ok(table),
            HostAnswer::Outcome(SessionOutcome::Failed(failure)) => Err(failure),
            // There is no round at a port.
            HostAnswer::Outcome(SessionOutcome::PeerGroup | SessionOutcome::OnNccl(_)) => {
                Err(Failure::Unreadable)
            }
        }
    }

    /// Of a rank that has declined: waits for its host. Well if all go to NCCL.
    pub(super) fn wait_declined(self) -> Result<(), Failure> {
        match self.answer() {
            HostAnswer::Outcome(SessionOutcome::OnNccl(_)) => Ok(()),
            HostAnswer::Outcome(SessionOutcome::Failed(failure)) => Err(failure),
            HostAnswer::Outcome(SessionOutcome::PeerGroup) | HostAnswer::Table(_) => Err(Failure::Unreadable),
        }
    }

    fn answer(&self) -> HostAnswer {
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
