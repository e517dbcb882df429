//! What tests see and do beyond the product: counts of heaps and of peers' mappings, and access for other devices of the process.

use crate::heap::registry::{self, HEAPS, PEERS};
use crate::heap::{Heap, HeapError, PeerHeap, Place, Region};
use windlass_base::gpu::Ordinal;

/// Counts of one symmetric heap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeapCounts {
    /// `WINDLASS_HEAP_MAX`, rounded down to whole granules of the driver.
    pub mapped_bytes_limit: u64,
    /// Device memory that is mapped.
    pub mapped_bytes: u64,
    /// Bytes of regions that this rank has closed and that wait for other ranks, or for graphs.
    pub waiting_bytes: u64,
    /// How many regions there are, waiting ones too.
    pub regions: u64,
}

/// Counts of all mappings of peers' symmetric heaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerCounts {
    /// How many symmetric heaps of peers are mapped.
    pub peers: u64,
    /// Their chunks.
    pub chunks: u64,
    /// Their bytes: memory of the peers, not ours.
    pub mapped_bytes: u64,
}

/// Counts of all symmetric heaps of this process, and of all mappings of peers'.
pub fn counters() -> (Vec<HeapCounts>, PeerCounts) {
    if !registry::are_ours() {
        return Default::default();
    }
    let heaps: Vec<_> = HEAPS.lock().values().map(|heap| heap.counters()).collect();
    let mut peers = PeerCounts::default();
    for peer in PEERS.lock().values() {
        let (chunks, bytes) = peer.mapped();
        peers.peers += 1;
        peers.chunks += chunks;
        peers.mapped_bytes += bytes;
    }
    (heaps, peers)
}

impl Heap {
    /// Its counts. Zeros in a forked child.
    pub fn counters(&self) -> HeapCounts {
        if self.is_in_forked_child() {
            return HeapCounts::default();
        }
        let (regions, mapped_bytes) = self.held();
        let ledger = self.ledger.lock();
        HeapCounts {
            mapped_bytes_limit: ledger.space.mapped_bytes_max(),
            mapped_bytes,
            waiting_bytes: ledger.quarantine.waiting_bytes(),
            regions: regions as u64,
        }
    }
}

impl PeerHeap {
    /// How many chunks are mapped, and their bytes.
    pub fn mapped(&self) -> (u64, u64) {
        let mapped = self.mapped.lock();
        (mapped.chunks.len() as u64, mapped.chunks.values().map(|chunk| chunk.mapping.physical.bytes).sum())
    }
}

impl Region {
    /// Lets another device of this process read and write the region, at the same address. It holds for the whole chunk, until the chunk is
    /// unmapped.
    pub fn allow(&self, device: Ordinal) -> Result<(), HeapError> {
        let _entered = self.heap.enter()?;
        let chunks = self.heap.chunks.lock();
        let mapping = chunks.get(&self.placement.chunk).ok_or(HeapError::Gone)?;
        mapping.allow(device).map_err(|failure| HeapError::from(failure).told())
    }
}

impl Place {
    /// Whether the place makes sense, for fuzzing.
    pub fn is_sound(&self, granularity: u64) -> bool {
        self.check(granularity).is_ok()
    }
}
