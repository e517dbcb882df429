//! Known allocations by their addresses, at most so many.
//!
//! One lock is enough: only all-gathers that may be registered look here, of 8 MiB and more. All memory is allocated at init.

use crate::features::memory::allocation::Allocation;
use windlass_base::range::Range;

/// Disjoint allocations. If there is no room, the one that was found longest ago leaves for a new one.
#[derive(Debug)]
pub(crate) struct Table {
    /// By first address, each with `entered` when it was found last.
    sorted: Vec<(Allocation, u64)>,
    entries_max: usize,
    /// How many were entered so far. Allocations found between two of these count as equally recent.
    entered: u64,
}

impl Table {
    /// An empty table of at least one entry.
    pub(crate) fn new(entries_max: usize) -> Self {
        let entries_max = entries_max.max(1);
        Table { sorted: Vec::with_capacity(entries_max), entries_max, entered: 0 }
    }

    /// The allocation that holds an address.
    #[inline]
    pub(crate) fn find(&mut self, at: u64) -> Option<Allocation> {
        let past = self.sorted.partition_point(|(known, _)| known.range.base <= at);
        let (known, found_at) = self.sorted.get_mut(past.checked_sub(1)?)?;
        let is_inside = at - known.range.base < known.range.bytes;
        if is_inside {
            *found_at = self.entered;
        }
        is_inside.then_some(*known)
    }

    /// Enters an allocation in place of all that overlap it. Enters none of 0 bytes.
    pub(crate) fn enter(&mut self, new: Allocation) {
        if new.range.bytes == 0 {
            return;
        }
        self.remove(new.range);
        if self.sorted.len() == self.entries_max {
            let oldest = self.sorted.iter().enumerate().min_by_key(|(_, (_, found_at))| *found_at);
            self.sorted.remove(oldest.map_or(0, |(index, _)| index));
        }
        self.entered += 1;
        let place = self.sorted.partition_point(|(known, _)| known.range.base < new.range.base);
        self.sorted.insert(place, (new, self.entered));
    }

    /// Removes all that overlap a range.
    pub(crate) fn remove(&mut self, range: Range) {
        self.sorted.retain(|(known, _)| !known.range.overlaps(range));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::features::memory::allocation::Kind;
    use proptest::prelude::*;

    fn allocation(range: Range, id: u64) -> Allocation {
        Allocation { range, id, kind: Kind::Cuda, device: 0 }
    }

    proptest! {
        /// The table answers like a list in order of use, and never grows.
        #[test]
        fn answers_are_those_of_a_list(
            steps in proptest::collection::vec((0..5, 0..40_u64, 0..7_u64), 0..300),
            entries_max in 1..9_usize,
        ) {
            let mut table = Table::new(entries_max);
            let room = table.sorted.capacity();
            // Oldest first. The model counts finds between two insertions as equally recent, too.
            let mut list: Vec<(Range, u64, u64)> = Vec::new();
            let mut clock = 0;
            for (step, (what, base, bytes)) in (0_u64..).zip(steps) {
                let range = Range { base, bytes };
                match what {
                    0 | 1 => {
                        if bytes > 0 {
                            list.retain(|(known, ..)| !known.overlaps(range));
                        }
                        if bytes > 0 && list.len() == entries_max {
                            let oldest = list.iter().map(|(known, _, found_at)| (*found_at, known.base)).min().unwrap();
                            list.retain(|(known, ..)| known.base != oldest.1);
                        }
                        table.enter(allocation(range, step));
                        if bytes > 0 {
                            clock += 1;
                            list.push((range, step, clock));
                        }
                    }
                    2 => {
                        list.retain(|(known, ..)| !known.overlaps(range));
                        table.remove(range);
                    }
                    _ => {
                        let found = list.iter_mut().find(|(known, ..)| known.contains(Range { base, bytes: 1 }));
                        let found = found.map(|(known, step, found_at)| {
                            *found_at = clock;
                            allocation(*known, *step)
                        });
                        prop_assert_eq!(table.find(base), found);
                    }
                }
                let here: Vec<Range> = table.sorted.iter().map(|(known, _)| known.range).collect();
                let mut listed: Vec<Range> = list.iter().map(|(known, ..)| *known).collect();
                listed.sort_by_key(|known| known.base);
                prop_assert_eq!(here, listed);
                prop_assert_eq!(table.sorted.capacity(), room);
            }
        }
    }

    /// The ends of the address space are addresses like others.
    #[test]
    fn the_last_addresses() {
        let mut table = Table::new(4);
        let last = allocation(Range { base: u64::MAX - 8, bytes: 8 }, 1);
        table.enter(last);
        table.enter(allocation(Range { base: 0, bytes: 1 }, 3));
        assert_eq!(table.find(u64::MAX - 1), Some(last));
        assert_eq!(table.find(u64::MAX), None);
        assert_eq!(table.find(0).map(|found| found.id), Some(3));
        table.remove(Range { base: 0, bytes: u64::MAX });
        assert_eq!(table.sorted.len(), 0);
    }
}
