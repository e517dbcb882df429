//! What is counted of symmetric heaps, for the report.

use serde::Serialize;

/// One symmetric heap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// As this process numbers it.
    pub device: i32,
    /// `WINDLASS_HEAP_MAX`, in whole granules.
    pub mapped_bytes_limit: u64,
    /// Device memory that it has.
    pub mapped_bytes: u64,
    /// The most it ever had.
    pub mapped_bytes_highest: u64,
    /// What regions have of it.
    pub lent_bytes: u64,
    /// The most they ever had.
    pub lent_bytes_highest: u64,
    /// What regions have that this rank closed and that wait for other ranks, or for graphs.
    pub waiting_bytes: u64,
    /// Regions, waiting ones too.
    pub regions: u64,
    /// Chunks.
    pub chunks: u64,
    /// How often it grew.
    pub grown: u64,
    /// How often it could not lend.
    pub refused: u64,
}

/// All peers' symmetric heaps, as mapped here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PeerCounters {
    /// How many.
    pub peers: u64,
    /// Their chunks.
    pub chunks: u64,
    /// Their bytes: memory of the peers, not ours.
    pub mapped_bytes: u64,
}

/// What cannot be seen from what is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    pub mapped_bytes_highest: u64,
    pub lent_bytes_highest: u64,
    pub grown: u64,
    pub refused: u64,
}

impl Seen {
    pub(super) fn look(&mut self, mapped_bytes: u64, lent_bytes: u64) {
        self.mapped_bytes_highest = self.mapped_bytes_highest.max(mapped_bytes);
        self.lent_bytes_highest = self.lent_bytes_highest.max(lent_bytes);
    }
}
