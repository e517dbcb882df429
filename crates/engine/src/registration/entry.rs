//! One registration, and what identifies what is registered.

use crate::range::Range;

/// The driver's id of an allocation (`CU_POINTER_ATTRIBUTE_BUFFER_ID`): no other ever has it in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferId(pub u64);

/// What identifies an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// All of it.
    pub range: Range,
    /// Which one, of all that were ever there.
    pub id: BufferId,
}

/// The number of an operation of a communicator, the same on all ranks; the first is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

/// Which registration, of all that this cache ever had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EntryId {
    pub(super) base: u64,
    pub(super) serial: u64,
}

/// What becomes of it.
#[derive(Debug)]
pub(super) enum State<H> {
    /// Found by those who want it.
    Active(H),
    /// Found by nobody; registered until nobody can use it.
    Retired(H),
    /// It could not be given back.
    Stuck,
}

/// Of the allocation that lies where the entry does.
#[derive(Debug)]
pub(super) struct Entry<H> {
    pub state: State<H>,
    id: BufferId,
    pub serial: u64,
    /// How many graphs have captured a use.
    pub holds: u64,
    pub last_use: Epoch,
    /// By the cache's clock.
    pub used_at: u64,
}

impl<H> Entry<H> {
    pub fn new(id: BufferId, handle: H, serial: u64, epoch: Epoch, used_at: u64) -> Self {
        Entry { state: State::Active(handle), id, serial, holds: 0, last_use: epoch, used_at }
    }

    /// Whether it may be found as that of the allocation with this id, where it lies.
    #[inline]
    pub fn is_active_as(&self, id: BufferId) -> bool {
        self.id == id && self.is_active()
    }

    #[inline]
    pub fn is_active(&self) -> bool {
        matches!(self.state, State::Active(_))
    }

    pub fn is_retired(&self) -> bool {
        matches!(self.state, State::Retired(_))
    }

    pub fn is_stuck(&self) -> bool {
        matches!(self.state, State::Stuck)
    }

    #[inline]
    pub fn used(&mut self, epoch: Epoch, clock: u64) {
        self.last_use = self.last_use.max(epoch);
        self.used_at = clock;
    }

    /// Whether no rank and no graph can use it, when all ranks have passed this epoch.
    pub fn is_unused_after(&self, passed: Epoch) -> bool {
        self.holds == 0 && self.last_use <= passed
    }

    /// Whether it was active until now.
    pub fn retire(&mut self) -> bool {
        match std::mem::replace(&mut self.state, State::Stuck) {
            State::Active(handle) => {
                self.state = State::Retired(handle);
                true
            }
            other => {
                self.state = other;
                false
            }
        }
    }
}
