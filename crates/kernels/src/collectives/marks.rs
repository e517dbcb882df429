//! How far the launches of an even wire have come, for whoever looks from outside while kernels run.
//!
//! Every launch of LL and of one-shot uses channel 0, and begins there with packet 0. A rank that has come to launch n has stored the tag of n
//! in its ring at every peer. It counts n as ended once it has found the tags of all peers. Of other wires this is not true.

use super::Kind;
use super::geometry::{Geometry, Layout};
use super::kernel::Family;
use crate::collective::{LL_SLOT_BYTES, LL_SLOTS, ONE_SHOT_LAUNCHES, Wire};

/// Where the words of one even wire lie: offsets in the part for collectives of a rank's region.
#[derive(Clone, Copy, Debug)]
pub struct Marks {
    wire: Wire,
    /// Bytes from one launch's place in a ring to the next one's, and how many places a ring has.
    launch_bytes: u64,
    launches: u64,
    ring_bytes: u64,
    /// Of the tag in packet 0: behind the payload of an LL pair, or at the end of a line.
    tag_at: u64,
}

impl Layout {
    /// The marks of LL, then those of one-shot.
    pub fn marks(&self, geometry: &Geometry) -> [Marks; 2] {
        let channels = u64::from(geometry.channels);
        let one_shot_bytes = u64::from(geometry.one_shot_slots)
            * Family::one_shot(Kind::AllReduce, geometry.ranks).line_bytes();
        [
            Marks {
                wire: self.ll,
                launch_bytes: LL_SLOT_BYTES,
                launches: LL_SLOTS,
                ring_bytes: channels * LL_SLOTS * LL_SLOT_BYTES,
                tag_at: 8,
            },
            Marks {
                wire: self.one_shot,
                launch_bytes: one_shot_bytes,
                launches: ONE_SHOT_LAUNCHES,
                ring_bytes: ONE_SHOT_LAUNCHES * one_shot_bytes,
                tag_at: 120,
            },
        ]
    }
}

impl Marks {
    /// Where a rank counts the launches that have ended on it.
    pub fn count(&self) -> u64 {
        self.wire.channels
    }

    /// Where, in the region of `receiver`, the tag of a launch of `source` lies, which is another rank.
    pub fn tag(&self, launch: u64, source: u32, receiver: u32) -> u64 {
        let ring = u64::from(source - u32::from(source > receiver));
        self.wire.rings + ring * self.ring_bytes + launch % self.launches * self.launch_bytes + self.tag_at
    }
}
