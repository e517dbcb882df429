//! A piece of an arena, lent to one communicator.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::arena::place::{Announcement, Place};
use crate::arena::quarantine::{Event, LeaseId, Member};
use crate::arena::refusal::Refusal;
use crate::arena::space::Placement;
use crate::arena::{Arena, lock};
use crate::gpu::memory::Mapping;
use crate::gpu::{Address, Failure, Ordinal};

/// How often a wait for zeros looks: zeroing runs at a terabyte a second.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// Dropping it closes it on this rank, without a driver call: only when no kernel of ours can touch it any more, except
/// from graphs, which its communicator's [`Holds`](super::Holds) count.
#[derive(Debug)]
pub struct Slice {
    arena: Arc<Arena>,
    lease: LeaseId,
    placement: Placement,
}

impl Slice {
    pub(super) fn new(arena: Arc<Arena>, lease: LeaseId, placement: Placement) -> Slice {
        Slice { arena, lease, placement }
    }

    /// Where it begins, for all devices of this process that may access it.
    pub fn address(&self) -> Address {
        self.arena.address(self.placement)
    }

    /// Whose memory it is.
    pub fn device(&self) -> Ordinal {
        self.arena.device()
    }

    /// How much, at least what was asked for.
    pub fn bytes(&self) -> u64 {
        self.placement.bytes
    }

    /// Its arena, which events go to.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// What events call it.
    pub fn lease(&self) -> LeaseId {
        self.lease
    }

    /// Whether it holds zeros by now. Waits for nothing.
    pub fn is_zeroed(&self) -> Result<bool, Refusal> {
        self.arena.refuse_child()?;
        let _entered = self.arena.home.enter()?;
        self.arena.observe_zeroing(Some(self.lease))?;
        Ok(lock(&self.arena.ledger).quarantine.is_zeroed(self.lease))
    }

    /// Waits until it holds zeros, at most so long. Blocks no stream and holds no lock.
    pub fn wait_zeroed(&self, at_most: Duration) -> Result<(), Refusal> {
        let began = Instant::now();
        while !self.is_zeroed().map_err(Refusal::told)? {
            if began.elapsed() >= at_most {
                let late =
                    Refusal::NotZeroed { bytes: self.bytes(), waited_ms: began.elapsed().as_millis() as u64 };
                return Err(late.told());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// From now on these ranks may touch it: it goes back only after each has closed or died. Gives what they need to
    /// map it; members of this process need only the place, see [`announce_here`](Self::announce_here). Refused before it
    /// holds zeros. May be called again for further members.
    pub fn announce(&self, members: &[Member]) -> Result<Announcement, Refusal> {
        self.announce_with(members, |mapping, place| {
            Ok(Announcement { place, descriptor: mapping.physical().export()? })
        })
    }

    /// The same for members that are all in this process: they [reach](super::reach) it where it lies.
    pub fn announce_here(&self, members: &[Member]) -> Result<Place, Refusal> {
        self.announce_with(members, |_, place| Ok(place))
    }

    fn announce_with<T>(
        &self,
        members: &[Member],
        give: impl FnOnce(&Mapping, Place) -> Result<T, Failure>,
    ) -> Result<T, Refusal> {
        let announced = || {
            self.arena.refuse_child()?;
            let _entered = self.arena.home.enter()?;
            self.arena.observe_zeroing(Some(self.lease))?;
            let chunks = lock(&self.arena.chunks);
            // A chunk with a lease in it is mapped.
            let mapping = chunks.get(&self.placement.chunk).ok_or(Refusal::Gone)?;
            let place = Place {
                span_bytes: self.arena.reservation.bytes,
                chunk: self.placement.chunk,
                chunk_offset: mapping.address - self.arena.reservation.base,
                chunk_bytes: mapping.physical().bytes,
                offset: self.placement.offset,
                bytes: self.placement.bytes,
            };
            let given = give(mapping, place)?;
            if !lock(&self.arena.ledger).quarantine.announce(self.lease, members) {
                return Err(Refusal::NotZeroed { bytes: self.bytes(), waited_ms: 0 });
            }
            Ok(given)
        };
        announced().map_err(Refusal::told)
    }

    /// Lets another device of this process read and write it, at the same address. It holds for the whole chunk, until
    /// that is unmapped.
    pub fn allow(&self, device: Ordinal) -> Result<(), Refusal> {
        self.arena.refuse_child()?;
        let _entered = self.arena.home.enter()?;
        let chunks = lock(&self.arena.chunks);
        let mapping = chunks.get(&self.placement.chunk).ok_or(Refusal::Gone)?;
        mapping.allow(device).map_err(|failure| Refusal::from(failure).told())
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        self.arena.note(Event::ClosedHere(self.lease));
    }
}
