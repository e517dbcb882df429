//! Maps another process's symmetric heap, once for all communicators and all devices of this process.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::heap::{Heap, HeapError, Holds, Place, Process, Serial, registry};
use windlass_base::gpu::memory::{Mapping, Physical, Reservation, granularity};
use windlass_base::gpu::{Address, Driver, Ordinal};
use windlass_base::lock::Mutex;

/// Names a symmetric heap of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Peer {
    /// The process that owns it.
    pub process: Process,
    /// Its device, by the UUID, which is the same in every process.
    pub device_uuid: [u8; 16],
}

/// The mapping of a peer's symmetric heap.
#[derive(Debug)]
pub struct PeerHeap {
    driver: &'static Driver,
    /// Locked first; held across virtual memory calls, by inits and the background worker alone.
    pub(super) mapped: Mutex<Mapped>,
    /// Locked after `mapped`, and never held across a call of the driver, as any thread may close a region.
    uses: Mutex<BTreeMap<Serial, Uses>>,
}

#[derive(Debug, Default)]
pub(super) struct Mapped {
    pub(super) chunks: BTreeMap<Serial, PeerChunk>,
    /// Has the same offsets as the peer's own addresses.
    reservation: Option<Arc<Reservation>>,
}

#[derive(Debug)]
pub(super) struct PeerChunk {
    pub(super) mapping: Mapping,
    offset: u64,
}

#[derive(Debug, Default)]
struct Uses {
    open: usize,
    /// Of regions that are closed here, but that graphs may still touch.
    closing: Vec<Arc<Holds>>,
}

impl Uses {
    fn are_over(&self) -> bool {
        self.open == 0 && self.closing.iter().all(|holds| holds.are_none())
    }
}

/// A peer's region, as our devices reach it. Dropping it closes it, without a driver call. Drop it only when no kernel of ours can touch it
/// any more, except from graphs, which `holds` counts.
#[derive(Debug)]
pub struct PeerRegion {
    /// Where the region begins, for the devices that it was mapped for.
    pub address: Address,
    /// Bytes of the region.
    pub bytes: u64,
    /// None for a region of this process, which needs no second mapping.
    _mapped: Option<Use>,
}

/// One use of a mapped chunk.
#[derive(Debug)]
struct Use {
    heap: Arc<PeerHeap>,
    chunk: Serial,
    holds: Arc<Holds>,
}

impl PeerHeap {
    /// The mapping of a peer's symmetric heap in this process, with nothing mapped at first.
    pub fn of(peer: Peer) -> Result<Arc<PeerHeap>, HeapError> {
        registry::peer(peer).map_err(HeapError::told)
    }

    /// A mapping apart from the process's own, for tests.
    pub fn new(driver: &'static Driver) -> Arc<PeerHeap> {
        Arc::new(PeerHeap { driver, mapped: Mutex::default(), uses: Mutex::default() })
    }

    /// Maps the region that a peer announced, for the device of `local`, unless that was done already. The descriptor stays the caller's. A
    /// failure leaves nothing behind.
    pub fn map(
        self: &Arc<Self>,
        place: Place,
        descriptor: BorrowedFd<'_>,
        local: &Heap,
        holds: &Arc<Holds>,
    ) -> Result<PeerRegion, HeapError> {
        self.map_now(place, descriptor, local, holds).map_err(HeapError::told)
    }

    fn map_now(
        self: &Arc<Self>,
        place: Place,
        descriptor: BorrowedFd<'_>,
        local: &Heap,
        holds: &Arc<Holds>,
    ) -> Result<PeerRegion, HeapError> {
        let _entered = local.enter()?;
        place.check(granularity(self.driver, local.device())?)?;
        let mut mapped = self.mapped.lock();
        let made = self.map_chunk(&mut mapped, place, descriptor, local.device());
        self.forget_unused(&mut mapped);
        let base = made?;
        self.uses.lock().entry(place.chunk).or_default().open += 1;
        let mapped = Use { heap: self.clone(), chunk: place.chunk, holds: holds.clone() };
        Ok(PeerRegion { address: base + place.offset, bytes: place.bytes, _mapped: Some(mapped) })
    }

    /// Maps the chunk, and returns the address that offset 0 of the peer's symmetric heap has here.
    fn map_chunk(
        &self,
        mapped: &mut Mapped,
        place: Place,
        descriptor: BorrowedFd<'_>,
        device: Ordinal,
    ) -> Result<Address, HeapError> {
        let strange = |why| Err(HeapError::Strange { place, why });
        let reservation = match &mapped.reservation {
            Some(reservation) if reservation.bytes != place.span_bytes => {
                return strange("its symmetric heap had another size before");
            }
            Some(reservation) => reservation.clone(),
            None => {
                Arc::new(Reservation::new(self.driver, place.span_bytes, granularity(self.driver, device)?)?)
            }
        };
        if let Some(chunk) = mapped.chunks.get(&place.chunk) {
            if (chunk.offset, chunk.mapping.physical.bytes) != (place.offset, place.bytes) {
                return strange("the chunk lay elsewhere before");
            }
            chunk.mapping.allow(device)?;
            return Ok(reservation.base);
        }
        // The peer uses these addresses again, so its former chunk there is over, and must be unmapped here.
        self.unmap_unused(mapped);
        let end = place.offset + place.bytes;
        let overlaps = |chunk: &PeerChunk| {
            chunk.offset < end && place.offset < chunk.offset + chunk.mapping.physical.bytes
        };
        if mapped.chunks.values().any(overlaps) {
            return strange("another chunk is in use there");
        }
        let physical = Physical::import(self.driver, descriptor, place.bytes)?;
        let mapping = Mapping::new(&reservation, place.offset, physical, device)?;
        mapped.chunks.insert(place.chunk, PeerChunk { mapping, offset: place.offset });
        mapped.reservation = Some(reservation.clone());
        Ok(reservation.base)
    }

    /// Unmaps chunks that no region of ours uses any more, so that the peer's memory really goes back. For the background worker.
    pub fn settle(&self) {
        if self.driver.is_in_forked_child() {
            return;
        }
        let mut mapped = self.mapped.lock();
        self.unmap_unused(&mut mapped);
        self.forget_unused(&mut mapped);
    }

    /// Gives the addresses back if there is no chunk, not even one whose memory was let go of.
    fn forget_unused(&self, mapped: &mut Mapped) {
        if mapped.chunks.is_empty() && self.uses.lock().is_empty() {
            mapped.reservation = None;
        }
    }

    fn unmap_unused(&self, mapped: &mut Mapped) {
        let over: Vec<Serial> = {
            let mut uses = self.uses.lock();
            let over: Vec<Serial> =
                uses.iter().filter(|(_, uses)| uses.are_over()).map(|(serial, _)| *serial).collect();
            over.iter().for_each(|serial| drop(uses.remove(serial)));
            over
        };
        over.iter().for_each(|serial| drop(mapped.chunks.remove(serial)));
    }

    /// Maps a chunk again that was let go of, for the device of `local`. Returns where offset 0 of the peer's symmetric heap lies.
    fn map_again(
        &self,
        place: Place,
        descriptor: BorrowedFd<'_>,
        local: &Heap,
    ) -> Result<Address, HeapError> {
        let _entered = local.enter()?;
        place.check(granularity(self.driver, local.device())?)?;
        self.map_chunk(&mut self.mapped.lock(), place, descriptor, local.device())
    }

    pub(super) fn is_idle(&self) -> bool {
        self.mapped.lock().chunks.is_empty()
    }
}

impl PeerRegion {
    /// A region of this process. Its owner's quarantine keeps the region until this rank has closed.
    pub(super) fn here(address: Address, bytes: u64) -> PeerRegion {
        PeerRegion { address, bytes, _mapped: None }
    }

    /// Unmaps the region, for all devices of this process, and keeps its addresses. No kernel may run that touches it.
    pub fn let_go(&self) {
        if let Some(Use { heap, chunk, .. }) = &self._mapped {
            drop(heap.mapped.lock().chunks.remove(chunk));
        }
    }

    /// Maps the region again, for the device of `local`: its owner has announced it again. One of this process is
    /// [reached](super::reach) again instead.
    pub fn map_again(&self, place: Place, descriptor: BorrowedFd<'_>, local: &Heap) -> Result<(), HeapError> {
        let used = self._mapped.as_ref().ok_or(HeapError::Gone)?;
        let base = used.heap.map_again(place, descriptor, local)?;
        match (base + place.offset, place.bytes) == (self.address, self.bytes) {
            true => Ok(()),
            false => Err(HeapError::Strange { place, why: "the region lay elsewhere before" }.told()),
        }
    }

    /// Ends the use at once: no graph holds the region's address, and no other device of this process uses it.
    pub fn end(self) {
        self.let_go();
        if let Some(Use { heap, chunk, .. }) = &self._mapped {
            heap.uses.lock().remove(chunk);
        }
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        if self.heap.driver.is_in_forked_child() {
            return;
        }
        if let Some(uses) = self.heap.uses.lock().get_mut(&self.chunk) {
            uses.open -= 1;
            uses.closing.retain(|holds| !holds.are_none());
            if !self.holds.are_none() {
                uses.closing.push(self.holds.clone());
            }
        }
    }
}
