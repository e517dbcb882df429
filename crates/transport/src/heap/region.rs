//! A piece of a symmetric heap, lent to one communicator.

use std::sync::Arc;
use std::time::Duration;

use crate::heap::{Announcement, Event, Heap, HeapError, LeaseId, Member, Place, Placement};
use windlass_base::gpu::memory::Mapping;
use windlass_base::gpu::{Address, Failure, Ordinal};
use windlass_base::thread;

/// How often a wait for zeros looks: zeroing runs at a terabyte a second.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// Dropping it closes the region on this rank, without a driver call. Drop it only when no kernel of ours can touch it any more, except from
/// graphs, which its communicator's [`Holds`](super::Holds) count.
#[derive(Debug)]
pub struct Region {
    /// Its symmetric heap, to which events of the region go.
    pub heap: Arc<Heap>,
    /// The lease by which events name the region.
    pub lease: LeaseId,
    pub(super) placement: Placement,
}

impl Region {
    pub(super) fn new(heap: Arc<Heap>, lease: LeaseId, placement: Placement) -> Region {
        Region { heap, lease, placement }
    }

    /// Where the region begins, for all devices of this process that may access it.
    pub fn address(&self) -> Address {
        self.heap.address(self.placement)
    }

    /// The device whose memory it is.
    pub fn device(&self) -> Ordinal {
        self.heap.device()
    }

    /// Bytes of the region, at least as many as were asked for.
    pub fn bytes(&self) -> u64 {
        self.placement.bytes
    }

    /// Whether it holds zeros by now. Waits for nothing.
    pub fn is_zeroed(&self) -> Result<bool, HeapError> {
        let _entered = self.heap.enter()?;
        self.heap.observe_zeroing(Some(self.lease))?;
        Ok(self.heap.ledger.lock().quarantine.is_zeroed(self.lease))
    }

    /// Waits until it holds zeros, at most for `at_most`. Blocks no stream and holds no lock.
    pub fn wait_zeroed(&self, at_most: Duration) -> Result<(), HeapError> {
        let is_zeroed = || self.is_zeroed().map(|is_zeroed| is_zeroed.then_some(())).transpose();
        let zeroed = thread::look_until(at_most, LOOK_EVERY, is_zeroed);
        let late =
            || Err(HeapError::NotZeroed { bytes: self.bytes(), waited_ms: at_most.as_millis() as u64 });
        zeroed.unwrap_or_else(late).map_err(HeapError::told)
    }

    /// Lets these ranks touch the region: it is taken back only after each has closed or died. Returns what they need to map it. Members of this
    /// process need only the place, see [`announce_here`](Self::announce_here). Fails before the region holds zeros. May be called again for
    /// further members.
    pub fn announce(&self, members: &[Member]) -> Result<Announcement, HeapError> {
        self.announce_with(members, |mapping, place| {
            Ok(Announcement { place, descriptor: mapping.physical.export()? })
        })
    }

    /// The same for members that are all in this process: they [reach](super::reach) the region at its own address.
    pub fn announce_here(&self, members: &[Member]) -> Result<Place, HeapError> {
        self.announce_with(members, |_, place| Ok(place))
    }

    fn announce_with<T>(
        &self,
        members: &[Member],
        give: impl FnOnce(&Mapping, Place) -> Result<T, Failure>,
    ) -> Result<T, HeapError> {
        let announced = || {
            let _entered = self.heap.enter()?;
            self.heap.observe_zeroing(Some(self.lease))?;
            let chunks = self.heap.chunks.lock();
            let mapping = chunks.get(&self.placement.chunk).ok_or(HeapError::Gone)?;
            let place = Place {
                span_bytes: self.heap.reservation.bytes,
                chunk: self.placement.chunk,
                offset: self.placement.offset,
                bytes: self.placement.bytes,
            };
            let given = give(mapping, place)?;
            if !self.heap.ledger.lock().quarantine.announce(self.lease, members) {
                return Err(HeapError::NotZeroed { bytes: self.bytes(), waited_ms: 0 });
            }
            Ok(given)
        };
        announced().map_err(HeapError::told)
    }

    /// Gives the region's memory back, and keeps its addresses. No kernel may run that touches it. Peers' mappings keep the memory while there
    /// are any.
    pub fn let_go(&self) -> Result<(), HeapError> {
        self.heap.let_go(self.placement).map_err(HeapError::told)
    }

    /// Takes memory again at the same address, which begins to be filled with zeros. To be announced again.
    pub fn take_again(&self) -> Result<(), HeapError> {
        self.heap.take_again(self.lease, self.placement)
    }

    /// Ends the lease at once. No rank may touch the region any more, and no graph may hold its address.
    pub fn end(self) -> Result<(), HeapError> {
        self.heap.end(self.lease, self.placement).map_err(HeapError::told)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.heap.note(Event::ClosedHere(self.lease));
    }
}
