//! What one rank knows of the state of its peer group: who is dead or has failed, and with whom work may be in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use nccl_sys::{ncclResult_t, ncclSuccess};

use crate::background::life::Life;

/// What a rank knows of itself and of the others.
#[derive(Debug)]
pub(in crate::peers) struct Ranks {
    /// The other ranks' processes.
    pub(in crate::peers) lives: Vec<Arc<Life>>,
    /// Ranks that said that they have failed, a bit each.
    lost: AtomicU64,
    /// The asynchronous error; `ncclSuccess` while there is none.
    failed: AtomicI32,
    /// Groups and calls that were issued.
    runs: AtomicU64,
    /// Peers with whom work may be in flight, one bit each.
    awaited: AtomicU64,
}

impl Ranks {
    /// The state at init, when no rank has failed.
    pub(in crate::peers) fn new(lives: Vec<Arc<Life>>) -> Ranks {
        let (lost, runs, awaited) = Default::default();
        Ranks { lives, lost, failed: AtomicI32::new(ncclSuccess.0), runs, awaited }
    }

    /// Notes that another rank says that it has failed.
    pub(in crate::peers) fn lose(&self, rank: u32) {
        self.lost.fetch_or(1 << rank, Ordering::Relaxed);
    }

    /// Whether a rank has said that it has failed.
    pub(in crate::peers) fn has_lost(&self, rank: u32) -> bool {
        self.lost.load(Ordering::Relaxed) & (1 << rank) != 0
    }

    /// Ranks whose processes have ended or that said that they have failed, a bit each.
    pub(in crate::peers) fn gone(&self) -> u64 {
        let dead = self.lives.iter().filter(|life| life.is_over());
        dead.fold(self.lost.load(Ordering::Relaxed), |gone, life| gone | 1 << life.rank)
    }

    /// The asynchronous error of this rank; `ncclSuccess` if there is none.
    pub(in crate::peers) fn error(&self) -> ncclResult_t {
        ncclResult_t(self.failed.load(Ordering::Acquire))
    }

    /// Notes that this rank has failed. Returns whether that is new. The first error stays.
    pub(in crate::peers) fn fail(&self, error: ncclResult_t) -> bool {
        let (none, relaxed) = (ncclSuccess.0, Ordering::Relaxed);
        self.failed.compare_exchange(none, error.0, Ordering::Release, relaxed).is_ok()
    }

    /// Counts a group or call that is about to be issued.
    pub(in crate::peers) fn runs_one(&self) {
        self.runs.fetch_add(1, Ordering::Relaxed);
    }

    /// Groups and calls that were issued.
    pub(in crate::peers) fn runs(&self) -> u64 {
        self.runs.load(Ordering::Relaxed)
    }

    /// Notes that work with these peers was issued. A reader takes the peers before it asks whether all work is done.
    pub(in crate::peers) fn awaits(&self, peers: u64) {
        self.awaited.fetch_or(peers, Ordering::Release);
    }

    /// Takes the peers with whom work may be in flight, one bit each. [`Ranks::awaits_still`] gives them back.
    pub(in crate::peers) fn take_awaited(&self) -> u64 {
        self.awaited.swap(0, Ordering::Acquire)
    }

    /// Gives back peers with whom work may still be in flight. Returns all such peers.
    pub(in crate::peers) fn awaits_still(&self, peers: u64) -> u64 {
        self.awaited.fetch_or(peers, Ordering::Relaxed) | peers
    }
}

#[cfg(test)]
mod tests {
    use nccl_sys::{ncclInternalError, ncclRemoteError};

    use super::*;

    /// The first error stays. Peers that were taken and given back join those noted meanwhile.
    #[test]
    fn errors_and_awaited() {
        let ranks = Ranks::new(Vec::new());
        assert_eq!((ranks.error(), ranks.gone()), (ncclSuccess, 0));
        assert!(ranks.fail(ncclRemoteError) && !ranks.fail(ncclInternalError));
        assert_eq!(ranks.error(), ncclRemoteError);
        ranks.lose(3);
        assert!(ranks.has_lost(3) && !ranks.has_lost(2));
        assert_eq!(ranks.gone(), 0b1000);
        ranks.awaits(0b01);
        let taken = ranks.take_awaited();
        ranks.awaits(0b10);
        assert_eq!((taken, ranks.awaits_still(taken)), (0b01, 0b11));
    }
}
