//! Who of this process waits for what comes over a connection, as the background thread sees it.

use std::fmt::Debug;

use super::message::FromHost;
use super::outcome::{Failure, SessionOutcome};

/// Whom a connection is for: a rank in its session, or in a round. The background thread tells it what happens.
pub(crate) trait Waiter: Debug + Send + Sync {
    /// The host said something.
    fn heard(&self, message: FromHost) -> Need;

    /// Its connection is gone, or what came cannot be read.
    fn lost(&self, failure: Failure);

    /// It waits no more, and this came of it.
    fn end(&self, outcome: SessionOutcome);

    /// Whether it says elsewhere that it does not come after all: at its host-local rendezvous.
    fn declines_elsewhere(&self) -> bool;

    /// Whether it waits no more.
    fn is_over(&self) -> bool;
}

/// Whether a connection is still needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) enum Need {
    Connection,
    Nothing,
}
