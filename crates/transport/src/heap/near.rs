//! Reaches regions of other ranks of this process at their own address, which is the same for all devices of a process.
//! That takes no descriptor and no second mapping.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::heap::error::HeapError;
use crate::heap::{Heap, Holds, Peer, PeerHeap, PeerRegion, Place, Serial, registry};
use windlass_base::gpu::Ordinal;

/// Maps the region that a peer announced, for the device of `local`. Without a descriptor it is reached ([`reach`]): its rank is in this
/// process.
pub fn map(
    peer: Peer,
    place: Place,
    memory: Option<BorrowedFd<'_>>,
    local: &Heap,
    holds: &Arc<Holds>,
) -> Result<PeerRegion, HeapError> {
    match memory {
        Some(memory) => PeerHeap::of(peer)?.map(place, memory, local, holds),
        None => reach(place, local),
    }
}

/// Lets the device of `local` reach a region that another rank of this process [announced](super::Region::announce_here) to the calling
/// rank. The region stays until the calling rank has closed.
pub fn reach(place: Place, local: &Heap) -> Result<PeerRegion, HeapError> {
    registry::heap_with(place.chunk).ok_or_else(|| HeapError::Gone.told())?.reach(place, local.device())
}

impl Heap {
    /// Lets `device` reach a region of this symmetric heap.
    pub fn reach(&self, place: Place, device: Ordinal) -> Result<PeerRegion, HeapError> {
        self.reach_now(place, device).map_err(HeapError::told)
    }

    fn reach_now(&self, place: Place, device: Ordinal) -> Result<PeerRegion, HeapError> {
        let _entered = self.enter()?;
        let chunks = self.chunks.lock();
        let mapping = chunks.get(&place.chunk).ok_or(HeapError::Gone)?;
        let there = (mapping.address - self.reservation.base, mapping.physical.bytes);
        if there != (place.offset, place.bytes) {
            return Err(HeapError::Strange { place, why: "the chunk lies elsewhere" });
        }
        mapping.allow(device)?;
        Ok(PeerRegion::here(self.reservation.base + place.offset, place.bytes))
    }

    /// Whether a chunk of this symmetric heap has this number.
    pub(super) fn has_chunk(&self, chunk: Serial) -> bool {
        self.chunks.lock().contains_key(&chunk)
    }
}
