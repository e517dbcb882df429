//! Counts the use of symmetric heaps, for the report.

use serde::Serialize;

/// Counts of one symmetric heap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// The device's number in this process.
    pub device: i32,
    /// `WINDLASS_HEAP_MAX`, rounded down to whole granules of the driver.
    pub mapped_bytes_limit: u64,
    /// Device memory that is mapped.
    pub mapped_bytes: u64,
    /// The most that was ever mapped.
    pub mapped_bytes_highest: u64,
    /// Bytes of regions that this rank has closed and that wait for other ranks, or for graphs.
    pub waiting_bytes: u64,
    /// How many regions there are, waiting ones too.
    pub regions: u64,
    /// How often it lent.
    pub grown: u64,
    /// How often it refused to lend.
    pub refused: u64,
}

/// Counts of all mappings of peers' symmetric heaps.
#[cfg(any(test, feature = "test-support"))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PeerCounters {
    /// How many symmetric heaps of peers are mapped.
    pub peers: u64,
    /// Their chunks.
    pub chunks: u64,
    /// Their bytes: memory of the peers, not ours.
    pub mapped_bytes: u64,
}

/// Figures that the present state does not show.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    pub mapped_bytes_highest: u64,
    pub grown: u64,
    pub refused: u64,
}
