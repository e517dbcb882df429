//! Counters of the bootstrap of this process.

use std::sync::atomic::{AtomicU64, Ordering};

use super::outcome::SessionOutcome;

/// Counters; relaxed, for reports and tests.
#[derive(Debug, Default)]
pub struct Counts {
    /// Sessions whose ports are open now.
    pub sessions_open: AtomicU64,
    /// Sessions opened so far.
    pub sessions: AtomicU64,
    /// Sessions not opened, because too many were open: their ids have no id tag.
    pub sessions_refused: AtomicU64,
    /// Sessions here that ended in a peer group.
    pub peer_groups: AtomicU64,
    /// Sessions here that ended on NCCL.
    pub on_nccl: AtomicU64,
    /// Sessions here that failed.
    pub failures: AtomicU64,
    /// Rounds here in which all ranks spoke.
    pub rounds: AtomicU64,
    /// Rounds here that failed.
    pub rounds_failed: AtomicU64,
    /// Calls that were forgotten before all of their ranks had come, because there were too many.
    pub calls_forgotten: AtomicU64,
    /// Spare ids that were given out again.
    pub ids_recycled: AtomicU64,
    /// Spare ids that were not kept, because there were too many.
    pub ids_dropped: AtomicU64,
    /// Connections relayed to NCCL's roots.
    pub relays: AtomicU64,
    /// Connections of NCCL's that broke, or did not reach its root.
    pub relays_broken: AtomicU64,
    /// Bytes relayed, both ways, by connections that have ended.
    pub relayed_bytes: AtomicU64,
    /// Connections closed because they said nothing, had a wrong token, or were too many.
    pub turned_away: AtomicU64,
    /// Times that an operation failed for want of a descriptor or another resource.
    pub starved: AtomicU64,
    /// Connections of ranks closed because a message was oversized or made no sense.
    pub unreadable: AtomicU64,
}

impl Counts {
    pub(super) fn up(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn down(counter: &AtomicU64) {
        counter.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn add(counter: &AtomicU64, value: u64) {
        counter.fetch_add(value, Ordering::Relaxed);
    }

    pub(super) fn outcome(&self, outcome: &SessionOutcome) {
        Counts::up(match outcome {
            SessionOutcome::PeerGroup => &self.peer_groups,
            SessionOutcome::OnNccl(_) => &self.on_nccl,
            SessionOutcome::Failed(_) => &self.failures,
        });
    }
}
