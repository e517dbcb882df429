//! Allocates host memory for lists of operations: 64 equal parts, a bit each, taken in runs. A stream or graph that may still copy a list
//! keeps its parts.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use windlass_kernels::launch::Operation;

use crate::p2p::layout::{LIST_BYTES, LISTED_MAX};

const PARTS: usize = 64;
const OPERATIONS_PER_PART: usize = LISTED_MAX / PARTS;

/// Bytes of host memory for all parts.
pub(super) const BYTES: usize = LIST_BYTES as usize;

/// Which parts are taken.
#[derive(Debug, Default)]
pub(super) struct Room {
    taken: AtomicU64,
    /// How many parts graphs have.
    of_graphs: AtomicUsize,
}

/// Adjacent parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    mask: u64,
    first: usize,
}

impl Run {
    /// Where the run begins, in bytes.
    pub(super) fn offset(self) -> usize {
        self.first * OPERATIONS_PER_PART * size_of::<Operation>()
    }
}

impl Room {
    /// Takes parts for a graph, which keeps them. All graphs together have at most three quarters.
    pub(super) fn take_for_graph(&self, operations: usize) -> Option<Run> {
        let parts = operations.div_ceil(OPERATIONS_PER_PART).max(1);
        let run = if self.of_graphs.fetch_add(parts, Ordering::AcqRel) + parts <= PARTS / 4 * 3 {
            self.take(operations)
        } else {
            None
        };
        if run.is_none() {
            self.of_graphs.fetch_sub(parts, Ordering::AcqRel);
        }
        run
    }

    /// Gives parts back when their graph is gone.
    pub(super) fn give_back_of_graph(&self, run: Run) {
        self.give_back(run);
        self.of_graphs.fetch_sub(run.mask.count_ones() as usize, Ordering::AcqRel);
    }

    /// Takes adjacent free parts for `operations` operations; none if there are too few.
    pub(super) fn take(&self, operations: usize) -> Option<Run> {
        let parts = operations.div_ceil(OPERATIONS_PER_PART).max(1);
        if parts > PARTS {
            return None;
        }
        let ones = u64::MAX >> (PARTS - parts);
        let mut taken = self.taken.load(Ordering::Acquire);
        loop {
            let first = (0..=PARTS - parts).find(|first| taken & (ones << first) == 0)?;
            let mask = ones << first;
            match self.taken.compare_exchange_weak(taken, taken | mask, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(Run { mask, first }),
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
        let room = Room::default();
        let small = room.take(1).unwrap();
        let two = room.take(OPERATIONS_PER_PART + 1).unwrap();
        assert_eq!((small.offset(), two.offset()), (0, BYTES / PARTS));
        assert_eq!(room.take(LISTED_MAX), None);
        assert_eq!(room.take(LISTED_MAX + 1), None);
        let rest = room.take(61 * OPERATIONS_PER_PART).unwrap();
        assert_eq!(room.take(1), None);
        room.give_back(two);
        let one = room.take(OPERATIONS_PER_PART).unwrap();
        assert_eq!(one.offset(), two.offset());
        for run in [small, one, rest] {
            room.give_back(run);
        }
        let all = room.take(LISTED_MAX).unwrap();
        assert_eq!((all.offset(), all.mask), (0, u64::MAX));
    }
}
