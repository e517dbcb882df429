//! Allocates host memory for lists of operations, from which streams or graphs copy them: 64 equal parts, a bit each, taken in runs. Streams
//! have the room of the communicator's launch resources. Graphs, of which any number may live, have slabs of the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use windlass_base::gpu::{Address, Driver, Failure};
use windlass_base::lock::Mutex;
use windlass_kernels::launch::Operation;

use crate::p2p::layout::{LIST_BYTES, LISTED_MAX};
use crate::sequencer::host::HostMemory;

const PARTS: usize = 64;
const OPERATIONS_PER_PART: usize = LISTED_MAX / PARTS;

/// Bytes of host memory for all parts.
pub(super) const BYTES: usize = LIST_BYTES as usize;

/// Which parts of some host memory are taken. A graph's destructor gives parts back, so there is no lock.
#[derive(Debug)]
pub(super) struct Room {
    base: Address,
    taken: AtomicU64,
}

/// Adjacent parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// The address of the first part, on the host.
    pub(super) address: Address,
    mask: u64,
}

/// The room of graphs. A slab is used again once the graphs are gone, and freed with the device's resources only: to free it waits for
/// kernels. To allocate does not (driver 580, beside kernels that spin on two GPUs: 20 ms).
#[derive(Debug, Default)]
pub(super) struct Slabs(Mutex<Vec<(HostMemory, Arc<Room>)>>);

impl Slabs {
    /// Takes parts for a graph, which keeps the room until it gives them back. Makes a slab if there are too few. Needs a current context and
    /// a capture mode that allows to allocate.
    pub(super) fn take(
        &self,
        driver: &'static Driver,
        operations: usize,
    ) -> Result<Option<(Arc<Room>, Run)>, Failure> {
        let slabs = &mut *self.0.lock();
        let taken = |room: &Arc<Room>| room.take(operations).map(|run| (room.clone(), run));
        if let Some(taken) = slabs.iter().find_map(|(_, room)| taken(room)) {
            return Ok(Some(taken));
        }
        let memory = HostMemory::new(driver, BYTES)?;
        let room = Arc::new(Room::new(memory.beside().0.as_ptr() as Address));
        slabs.push((memory, room.clone()));
        Ok(taken(&room))
    }
}

impl Run {
    /// How many operations fit.
    pub(super) fn operations(self) -> usize {
        self.mask.count_ones() as usize * OPERATIONS_PER_PART
    }
}

impl Room {
    /// [`BYTES`] bytes at `base`, which nobody has taken.
    pub(super) fn new(base: Address) -> Room {
        Room { base, taken: AtomicU64::new(0) }
    }

    /// Takes adjacent free parts for `operations` operations, at most [`LISTED_MAX`]; none if there are too few.
    pub(super) fn take(&self, operations: usize) -> Option<Run> {
        let parts = operations.div_ceil(OPERATIONS_PER_PART).max(1);
        let ones = u64::MAX >> (PARTS - parts);
        let mut taken = self.taken.load(Ordering::Acquire);
        loop {
            let first = (0..=PARTS - parts).find(|first| taken & (ones << first) == 0)?;
            let mask = ones << first;
            match self.taken.compare_exchange_weak(taken, taken | mask, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    let offset = first * OPERATIONS_PER_PART * size_of::<Operation>();
                    return Some(Run { address: self.base + offset as Address, mask });
                }
                Err(now) => taken = now,
            }
        }
    }

    /// Gives parts back when nobody copies from them any more.
    pub(super) fn give_back(&self, run: Run) {
        self.taken.fetch_and(!run.mask, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs never overlap; what comes back can be had again; too much is refused.
    #[test]
    fn runs() {
        let room = Room::new(1 << 20);
        let small = room.take(1).unwrap();
        let two = room.take(OPERATIONS_PER_PART + 1).unwrap();
        assert_eq!((small.address, two.address), (1 << 20, (1 << 20) + (BYTES / PARTS) as Address));
        assert_eq!(room.take(LISTED_MAX), None);
        let rest = room.take(61 * OPERATIONS_PER_PART).unwrap();
        assert_eq!(room.take(1), None);
        room.give_back(two);
        let one = room.take(OPERATIONS_PER_PART).unwrap();
        assert_eq!(one.address, two.address);
        for run in [small, one, rest] {
            room.give_back(run);
        }
        let all = room.take(LISTED_MAX).unwrap();
        assert_eq!((all.address, all.operations()), (1 << 20, LISTED_MAX));
    }
}
