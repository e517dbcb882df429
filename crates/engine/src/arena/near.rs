//! Slices of other ranks of this process: reached where they lie, as an address is the same for all devices of a process.
//! That takes no descriptor and no second mapping.

use crate::arena::peer::PeerSlice;
use crate::arena::place::Place;
use crate::arena::refusal::Refusal;
use crate::arena::space::Serial;
use crate::arena::{Arena, lock, registry};
use crate::gpu::Ordinal;

/// Lets the device of `local` reach a slice that another rank of this process [announced](super::Slice::announce_here)
/// to the one that asks. It stays where it is until that one has closed.
pub fn reach(place: Place, local: &Arena) -> Result<PeerSlice, Refusal> {
    registry::arena_with(place.chunk).ok_or_else(|| Refusal::Gone.told())?.reach(place, local.device())
}

impl Arena {
    /// The same for a slice of this arena.
    pub fn reach(&self, place: Place, device: Ordinal) -> Result<PeerSlice, Refusal> {
        self.reach_now(place, device).map_err(Refusal::told)
    }

    fn reach_now(&self, place: Place, device: Ordinal) -> Result<PeerSlice, Refusal> {
        self.refuse_child()?;
        let _entered = self.home.enter()?;
        let chunks = lock(&self.chunks);
        let mapping = chunks.get(&place.chunk).ok_or(Refusal::Gone)?;
        let first = mapping.address - self.reservation.base;
        let inside = place.offset >= first
            && place.bytes > 0
            && (place.offset - first)
                .checked_add(place.bytes)
                .is_some_and(|end| end <= mapping.physical().bytes);
        if !inside {
            return Err(Refusal::Strange { place, why: "the chunk does not hold it" });
        }
        mapping.allow(device)?;
        Ok(PeerSlice::here(self.reservation.base + place.offset, place.bytes))
    }

    /// Whether a chunk of this arena has this number.
    pub(super) fn has_chunk(&self, chunk: Serial) -> bool {
        lock(&self.chunks).contains_key(&chunk)
    }
}
