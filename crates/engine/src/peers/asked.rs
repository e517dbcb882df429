//! A rank whose init has begun.

use std::sync::Arc;

use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::outcome::FallbackReason;
use windlass_bootstrap::{Canceller, LocalEntry, Participant};
use windlass_transport::heap::Heap;

use super::children::Wait;
use super::transports::Share;

/// A rank that has reported to its session.
#[derive(Debug)]
pub struct Asked {
    pub(super) participant: Participant,
    pub(super) token: Token,
    pub(super) rank: u32,
    pub(super) heap: Arc<Heap>,
    pub(super) share: Share,
    /// Of a communicator made from another: its wait ends with that one.
    pub(super) until: Option<Wait>,
    /// Of one that is made from another without a peer group.
    pub(super) local_entry: Option<LocalEntry>,
}

impl Asked {
    /// What ends its wait.
    pub fn canceller(&self) -> Option<Canceller> {
        self.participant.cancellers().into_iter().next()
    }
}

/// Why a rank could not report.
pub(super) fn cannot_reach(error: std::io::Error) -> FallbackReason {
    FallbackReason::Unreachable { words: error.to_string() }
}
