//! A handle that ends a rank's wait from another thread, for `ncclCommAbort`.

use std::sync::Arc;

use super::commands::{Command, Shared};
use super::outcome::{Failure, SessionOutcome};
use super::waiter::Waiter;

/// Ends a rank's wait from another thread.
#[derive(Clone, Debug)]
pub struct Canceller {
    waiter: Arc<dyn Waiter>,
    key: u64,
    shared: Arc<Shared>,
}

impl Canceller {
    pub(super) fn new(waiter: Arc<dyn Waiter>, key: u64, shared: Arc<Shared>) -> Canceller {
        Canceller { waiter, key, shared }
    }

    /// Makes the rank fail with [`Failure::Aborted`] at once, unless its session is over. Its peers hear that it left.
    pub fn abort(&self) {
        self.waiter.end(SessionOutcome::Failed(Failure::Aborted));
        if self.waiter.is_over() {
            self.shared.send(Command::Leave(self.key));
        }
    }
}
