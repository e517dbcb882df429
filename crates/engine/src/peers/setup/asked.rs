//! [`Asked`]: a rank whose init has begun, between `ask` and `complete`.

use std::sync::Arc;

use windlass_bootstrap::outcome::FallbackReason;
use windlass_bootstrap::{Canceller, LocalEntry, Participant};
use windlass_transport::heap::Heap;

use crate::peers::children::Wait;
use crate::peers::setup::transports::Share;

/// A rank that has reported to its session.
#[derive(Debug)]
pub struct Asked {
    pub(in crate::peers) participant: Participant,
    pub(in crate::peers) heap: Arc<Heap>,
    pub(in crate::peers) share: Share,
    /// For a child communicator: its wait ends with the parent.
    pub(in crate::peers) until: Option<Wait>,
    /// For a child of a parent without a peer group: its entry in the roster.
    pub(in crate::peers) local_entry: Option<LocalEntry>,
}

impl Asked {
    /// What cancels its wait.
    pub fn canceller(&self) -> Canceller {
        self.participant.canceller()
    }
}

/// The fallback reason of a rank that could not report.
pub(in crate::peers) fn cannot_reach(error: std::io::Error) -> FallbackReason {
    FallbackReason::Unreachable { words: error.to_string() }
}
