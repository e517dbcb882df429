//! The background thread's view of a rank of this process that waits for messages over a connection.

use std::fmt::Debug;

use super::message::FromHost;
use super::outcome::{Failure, SessionOutcome};

/// A rank that waits in its session or in a round. The background thread calls these methods.
pub(crate) trait Waiter: Debug + Send + Sync {
    /// The host sent this message.
    fn heard(&self, message: FromHost) -> Need;

    /// Its connection has closed, or a message cannot be read.
    fn lost(&self, failure: Failure);

    /// Ends its wait with this outcome.
    fn end(&self, outcome: SessionOutcome);

    /// Whether the rank declines elsewhere: at its host-local rendezvous.
    fn declines_elsewhere(&self) -> bool;

    /// Whether its wait has ended.
    fn is_over(&self) -> bool;
}

/// Whether a connection is still needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) enum Need {
    Connection,
    Nothing,
}
