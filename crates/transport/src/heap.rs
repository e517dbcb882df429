//! The symmetric heap: one growing block of device memory per process and device. It is lent in regions to communicators, exported to peer
//! processes by descriptor, and mapped once per peer process.
//!
//! A region's life: [`Heap::lend`] places and zeroes it. Once it [holds zeros](Region::wait_zeroed) it is [announced](Region::announce) to the
//! other ranks. They [map](PeerHeap::map) it at the same offset of their mapping; ranks of the same process [reach] it at its own address. Dropping the [`Region`] closes it on this rank, and events tell when the others have closed it. Then [`settle`]
//! unmaps it, and drops symmetric heaps and mappings that nobody uses.
//!
//! Growing, mapping and unmapping are virtual memory calls alone. Zeroing runs on a stream of Windlass that waits for no other. So all of it
//! may happen beside kernels that wait for a peer, and while the calling thread captures. The virtual memory calls may also run beside kernels
//! of all devices of a process, with peer access between their contexts (`ctests/programs/driver_beside_two.c`, driver 580).

pub mod space;

pub mod quarantine;

pub mod holds;

pub mod region;

pub mod peer;

pub mod near;

pub mod place;

pub mod probe;

pub mod registry;

pub mod error;
#[cfg(any(test, feature = "test-support"))]
pub mod test_support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use error::HeapError;
pub use holds::Holds;
pub use near::{map, reach};
pub use peer::{Peer, PeerHeap, PeerRegion};
pub use place::{Announcement, Place};
use quarantine::Content;
pub use quarantine::{Event, LeaseId, Member, Process};
pub use region::Region;
pub use registry::settle;
pub use space::{Placement, Serial};

use windlass_base::gpu::context::Entered;
use windlass_base::gpu::memory::{Mapping, Physical, Reservation, granularity};
use windlass_base::gpu::stream::{self, Stream};
use windlass_base::gpu::{Address, Driver, Failure, Home, Ordinal};
use windlass_base::lock::Mutex;

/// Addresses cost nothing. This many times the bytes that may be mapped are reserved, so that holes between chunks do not matter.
const SPAN_PER_MAPPED: u64 = 4;

/// The symmetric heap of one device.
///
/// Fields are dropped in this order: memory before its addresses, the context last.
#[derive(Debug)]
pub struct Heap {
    /// What is mapped. Locked first of the three; held across virtual memory calls, by inits and the background worker alone.
    chunks: Mutex<BTreeMap<Serial, Mapping>>,
    /// Zeroing not yet seen to be done. Locked after `chunks`; held across the query of an event.
    zeroing: Mutex<BTreeMap<LeaseId, stream::Event>>,
    /// Who has which memory. Locked last, and never held across a call of the driver, as events come from any thread.
    ledger: Mutex<HeapLedger>,
    stream: Stream,
    reservation: Arc<Reservation>,
    /// The context that its work runs in; kernels and events of ours belong there too.
    pub home: Home,
}

#[derive(Debug)]
struct HeapLedger {
    space: space::Space,
    quarantine: quarantine::Quarantine,
}

impl Heap {
    /// The symmetric heap of a device of this process, made at the first call. Limited by `WINDLASS_HEAP_MAX`.
    pub fn of(device: Ordinal) -> Result<Arc<Heap>, HeapError> {
        registry::heap(device).map_err(HeapError::told)
    }

    /// A symmetric heap apart from the process's own, for tests. Maps at most `mapped_bytes_max` bytes.
    pub fn open(
        driver: &'static Driver,
        device: Ordinal,
        mapped_bytes_max: u64,
    ) -> Result<Arc<Heap>, HeapError> {
        let home = Home::of(driver, device)?;
        let entered = home.enter()?;
        let granularity = granularity(driver, device)?;
        let mapped_bytes_max = mapped_bytes_max.min(place::SPAN_BYTES_MAX / SPAN_PER_MAPPED);
        let mapped_bytes_max = mapped_bytes_max / granularity * granularity;
        let span_bytes = mapped_bytes_max.max(granularity) * SPAN_PER_MAPPED;
        let reservation = Arc::new(Reservation::new(driver, span_bytes, granularity)?);
        let stream = Stream::new(driver)?;
        drop(entered);
        let limits = space::HeapLimits { granularity, mapped_bytes_max, span_bytes };
        let ledger =
            HeapLedger { space: space::Space::new(limits), quarantine: quarantine::Quarantine::default() };
        Ok(Arc::new(Heap {
            chunks: Mutex::default(),
            zeroing: Mutex::default(),
            ledger: Mutex::new(ledger),
            stream,
            reservation,
            home,
        }))
    }

    /// The device.
    pub fn device(&self) -> Ordinal {
        self.home.device
    }

    /// Lends at least `bytes` bytes to the communicator of `holds`. They are still being filled with zeros when this returns.
    /// Maps more memory if need be. Fails at the limit, with the numbers.
    pub fn lend(self: &Arc<Self>, bytes: u64, holds: &Arc<Holds>) -> Result<Region, HeapError> {
        self.lend_now(bytes, holds, Content::BeingZeroed).map_err(HeapError::told)
    }

    /// Lends memory of any content, for callers that need no zeros. Nothing runs on the device, so this never waits for kernels.
    pub fn lend_as_it_is(self: &Arc<Self>, bytes: u64, holds: &Arc<Holds>) -> Result<Region, HeapError> {
        self.lend_now(bytes, holds, Content::Ready).map_err(HeapError::told)
    }

    /// Notes what happened to leases. Any thread may call it at any time; it never waits for the driver.
    pub fn note(&self, event: Event) {
        if !self.is_in_forked_child() {
            self.ledger.lock().quarantine.note(event);
        }
    }

    /// Takes back the regions whose leases are over, and unmaps them. For the background worker.
    pub fn settle(&self) -> Result<(), HeapError> {
        self.refuse_child()?;
        // Without its context nothing runs on the device. Memory does not belong to the context and is still unmapped.
        let entered = if self.home.is_there() { Some(self.home.enter()?) } else { None };
        if entered.is_none() {
            self.forget_zeroing();
        }
        self.settle_within(&mut self.chunks.lock()).map_err(|failure| HeapError::from(failure).told())
    }

    /// How many regions there are, waiting ones too, and how many bytes are mapped.
    pub fn held(&self) -> (usize, u64) {
        let mapped_bytes = self.chunks.lock().values().map(|mapping| mapping.physical.bytes).sum();
        (self.ledger.lock().quarantine.len(), mapped_bytes)
    }

    /// Whether nothing is lent, and so nothing mapped.
    fn is_idle(&self) -> bool {
        self.ledger.lock().quarantine.is_empty()
    }

    fn lend_now(
        self: &Arc<Self>,
        bytes: u64,
        holds: &Arc<Holds>,
        content: Content,
    ) -> Result<Region, HeapError> {
        let _entered = self.enter()?;
        let mut chunks = self.chunks.lock();
        let placement = self.place(&mut chunks, bytes)?;
        let done = match content {
            Content::BeingZeroed => self.zero(placement).map(Some),
            Content::Ready => Ok(None),
        };
        match done {
            Ok(done) => {
                let mut zeroing = self.zeroing.lock();
                let lease = LeaseId(never_again());
                self.ledger.lock().quarantine.lend(lease, placement, holds.clone(), content);
                zeroing.extend(done.map(|done| (lease, done)));
                Ok(Region::new(self.clone(), lease, placement))
            }
            Err(failure) => {
                drop(chunks.remove(&placement.chunk));
                self.ledger.lock().space.give_back(placement);
                Err(failure.into())
            }
        }
    }

    /// Maps a region. If there is no room, takes back leases that are over and tries again.
    fn place(&self, chunks: &mut BTreeMap<Serial, Mapping>, bytes: u64) -> Result<Placement, HeapError> {
        let first = self.map(chunks, bytes);
        let worth_settling = match &first {
            Err(HeapError::Full { .. }) => true,
            Err(HeapError::Cuda(failure)) => failure.is_out_of_memory(),
            _ => false,
        };
        if !worth_settling {
            return first;
        }
        self.settle_within(chunks)?;
        self.map(chunks, bytes)
    }

    /// Maps a region, by virtual memory calls only.
    fn map(&self, chunks: &mut BTreeMap<Serial, Mapping>, bytes: u64) -> Result<Placement, HeapError> {
        let placement = {
            let mut ledger = self.ledger.lock();
            ledger.space.lend(never_again(), bytes).ok_or_else(|| HeapError::Full {
                device: self.home.device,
                asked_bytes: bytes,
                mapped_bytes: ledger.space.mapped_bytes(),
                mapped_bytes_limit: ledger.space.mapped_bytes_max(),
            })?
        };
        let mapping = self.map_chunk(placement);
        let mut ledger = self.ledger.lock();
        match mapping {
            Ok(mapping) => {
                chunks.insert(placement.chunk, mapping);
                Ok(placement)
            }
            Err(failure) => {
                ledger.space.give_back(placement);
                Err(failure.into())
            }
        }
    }

    fn map_chunk(&self, placement: Placement) -> Result<Mapping, Failure> {
        let (driver, device) = (self.home.driver, self.home.device);
        let physical = Physical::create(driver, device, placement.bytes)?;
        Mapping::new(&self.reservation, placement.offset, physical, device)
    }

    /// Unmaps a region and releases its memory. It stays lent, and its addresses stay its own.
    fn let_go(&self, placement: Placement) -> Result<(), HeapError> {
        let _entered = self.enter()?;
        drop(self.chunks.lock().remove(&placement.chunk));
        Ok(())
    }

    /// Maps new memory where a region has been let go of, and begins to fill it with zeros: it may hold what the region held before.
    fn take_again(&self, lease: LeaseId, placement: Placement) -> Result<(), HeapError> {
        let _entered = self.enter()?;
        let mut chunks = self.chunks.lock();
        if self.map_chunk(placement).map(|mapping| chunks.insert(placement.chunk, mapping)).is_err() {
            self.settle_within(&mut chunks)?;
            chunks.insert(placement.chunk, self.map_chunk(placement)?);
        }
        let done = self.zero(placement)?;
        let mut zeroing = self.zeroing.lock();
        self.ledger.lock().quarantine.unready(lease);
        zeroing.insert(lease, done);
        Ok(())
    }

    /// Ends a lease at once: no rank and no graph has the region's addresses.
    fn end(&self, lease: LeaseId, placement: Placement) -> Result<(), HeapError> {
        // Unmapped before another thread can get the place.
        self.let_go(placement)?;
        let mut ledger = self.ledger.lock();
        if ledger.quarantine.end(lease) {
            ledger.space.give_back(placement);
        }
        Ok(())
    }

    /// Begins zeroing, and returns the event that tells its end. The stream orders zeroing against zeroing alone. That is enough, because a
    /// region is lent again only after all use of it has ended.
    fn zero(&self, placement: Placement) -> Result<stream::Event, Failure> {
        let done = stream::Event::new(self.home.driver)?;
        self.stream.zero(self.address(placement), placement.bytes)?;
        done.record(self.stream.handle, stream::Ordering::Inside)?;
        Ok(done)
    }

    /// Looks whether zeroing is done, of one lease or of all. Does not wait.
    fn observe_zeroing(&self, wanted: Option<LeaseId>) -> Result<(), Failure> {
        let mut zeroing = self.zeroing.lock();
        let mut done = Vec::new();
        for (lease, event) in
            zeroing.iter().filter(|(lease, _)| wanted.is_none_or(|wanted| wanted == **lease))
        {
            if event.is_done()? {
                done.push(*lease);
            }
        }
        for lease in done {
            zeroing.remove(&lease);
            self.ledger.lock().quarantine.note(Event::Zeroed(lease));
        }
        Ok(())
    }

    /// Counts all zeroing as done: the context that it ran in is gone.
    fn forget_zeroing(&self) {
        let leases: Vec<LeaseId> = std::mem::take(&mut *self.zeroing.lock()).into_keys().collect();
        leases.into_iter().for_each(|lease| self.ledger.lock().quarantine.note(Event::Zeroed(lease)));
    }

    fn settle_within(&self, chunks: &mut BTreeMap<Serial, Mapping>) -> Result<(), Failure> {
        self.observe_zeroing(None)?;
        let over = {
            let mut ledger = self.ledger.lock();
            let over = ledger.quarantine.take_over();
            for placement in &over {
                ledger.space.give_back(*placement);
            }
            over
        };
        // Dropping a mapping unmaps and releases the chunk.
        over.iter().for_each(|placement| drop(chunks.remove(&placement.chunk)));
        Ok(())
    }

    fn address(&self, placement: Placement) -> Address {
        self.reservation.base + placement.offset
    }

    fn is_in_forked_child(&self) -> bool {
        self.home.driver.is_in_forked_child()
    }

    /// Makes the context current while the result lives. Fails in a forked child.
    fn enter(&self) -> Result<Entered<'_>, HeapError> {
        self.refuse_child()?;
        Ok(self.home.enter()?)
    }

    fn refuse_child(&self) -> Result<(), HeapError> {
        if self.is_in_forked_child() { Err(HeapError::ForkedChild) } else { Ok(()) }
    }
}

impl Drop for Heap {
    /// If leases are not over, the memory stays until the process ends: peers, graphs or our own zeroing may still touch it.
    fn drop(&mut self) {
        if self.is_in_forked_child() || self.ledger.lock().quarantine.is_empty() {
            return;
        }
        std::mem::take(&mut *self.chunks.lock()).into_values().for_each(std::mem::forget);
    }
}

/// A number that this process never used. Symmetric heaps come and go, and a peer's message about an old one may come late.
fn never_again() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
