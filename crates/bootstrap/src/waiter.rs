//! Who of this process waits for what comes over a connection, and what ends its wait.

use std::sync::Arc;

use super::inquiry::Hearing;
use super::message::FromHost;
use super::outcome::{Failure, SessionOutcome};
use super::participant::Ranks;
use super::participation::WithoutHost;
use super::reactor::{Command, Shared};

/// Whom a connection is for.
#[derive(Clone, Debug)]
pub enum Waiter {
    /// A rank in its session, by its place in its participant.
    Rank(Arc<Ranks>, usize),
    /// A rank in a round.
    Round(Arc<Hearing>),
}

/// Whether a connection is still needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Need {
    Connection,
    Nothing,
}

impl Waiter {
    pub(super) fn heard(&self, message: FromHost) -> Need {
        match self {
            Waiter::Rank(ranks, index) => ranks.heard(*index, message),
            Waiter::Round(hearing) => hearing.heard(message),
        }
    }

    /// Its connection is gone, or what came cannot be read.
    pub(super) fn lost(&self, failure: Failure) {
        match self {
            Waiter::Rank(ranks, index) => ranks.lost(*index, failure),
            Waiter::Round(hearing) => hearing.end(Err(failure)),
        }
    }

    pub(super) fn end(&self, outcome: SessionOutcome) {
        match (self, outcome) {
            (Waiter::Rank(ranks, index), outcome) => ranks.end(*index, outcome),
            (Waiter::Round(hearing), SessionOutcome::Failed(failure)) => hearing.end(Err(failure)),
            // There is no round at a port.
            (Waiter::Round(hearing), _) => hearing.end(Err(Failure::HostLost)),
        }
    }

    /// Whether it says elsewhere that it does not come after all: at its host-local rendezvous.
    pub(super) fn declines_elsewhere(&self) -> bool {
        match self {
            Waiter::Rank(ranks, index) => ranks.without_host(*index) == WithoutHost::GoesToNccl,
            Waiter::Round(_) => false,
        }
    }

    fn is_over(&self) -> bool {
        match self {
            Waiter::Rank(ranks, index) => ranks.is_over(*index),
            Waiter::Round(hearing) => hearing.is_over(),
        }
    }
}

/// Ends a rank's wait from another thread.
#[derive(Clone, Debug)]
pub struct Canceller {
    waiter: Waiter,
    key: u64,
    shared: Arc<Shared>,
}

impl Canceller {
    pub(super) fn new(waiter: Waiter, key: u64, shared: Arc<Shared>) -> Canceller {
        Canceller { waiter, key, shared }
    }

    /// The rank fails with [`Failure::Aborted`] at once, unless its session is over; its peers hear that it left.
    pub fn abort(&self) {
        self.waiter.end(SessionOutcome::Failed(Failure::Aborted));
        if self.waiter.is_over() {
            self.shared.send(Command::Leave(self.key));
        }
    }
}
