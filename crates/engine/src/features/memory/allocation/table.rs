//! A table of disjoint ranges with two words each. Any thread finds a range by an address, without a lock.
//!
//! It is a sorted list under one sequence number, which is odd during a change. A reader that sees a change returns None
//! rather than wait, as it can ask the driver instead. A writer holds a lock for a walk through
//! the list, some microseconds at most. All memory is allocated at init.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};

use windlass_base::range::Range;

/// The table. If it is full, the range that was found longest ago leaves for a new one.
#[derive(Debug)]
pub(crate) struct Table {
    version: AtomicU64,
    /// The first `count` of these are in use, by their first addresses.
    sorted: Box<[Head]>,
    count: AtomicUsize,
    /// The fixed part of each entry, at the index in its head. It does not move when other entries come and go.
    rests: Box<[Rest]>,
    /// Counts insertions. Ranges found since the last insertion count as equally recent, so that finding one again writes nothing
    /// that other threads read.
    clock: AtomicU64,
    /// The unused indices of `rests`. Locked by writers. Never grows.
    empty: Mutex<Vec<usize>>,
}

#[derive(Debug, Default)]
struct Head {
    base: AtomicU64,
    place: AtomicUsize,
}

#[derive(Debug, Default)]
struct Rest {
    bytes: AtomicU64,
    words: [AtomicU64; 2],
    found_at: AtomicU64,
}

impl Head {
    fn copy(&self, from: &Head) {
        self.base.store(from.base.load(Ordering::Relaxed), Ordering::Relaxed);
        self.place.store(from.place.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

impl Table {
    /// An empty table of at least one entry.
    pub(crate) fn new(entries_max: usize) -> Self {
        let entries_max = entries_max.max(1);
        Table {
            version: AtomicU64::new(0),
            sorted: (0..entries_max).map(|_| Head::default()).collect(),
            count: AtomicUsize::new(0),
            rests: (0..entries_max).map(|_| Rest::default()).collect(),
            clock: AtomicU64::new(0),
            empty: Mutex::new((0..entries_max).rev().collect()),
        }
    }

    /// The range that holds an address. None if there is none, or if the table changed meanwhile.
    #[inline]
    pub(crate) fn find(&self, at: u64) -> Option<(Range, [u64; 2])> {
        let version = self.version.load(Ordering::Acquire);
        if version & 1 == 1 {
            return None;
        }
        let heads = self.heads();
        let head = heads
            .get(heads.partition_point(|head| head.base.load(Ordering::Relaxed) <= at).checked_sub(1)?)?;
        let rest = self.rests.get(head.place.load(Ordering::Relaxed))?;
        let base = head.base.load(Ordering::Relaxed);
        let range = Range { base, bytes: rest.bytes.load(Ordering::Relaxed) };
        let words = rest.words.each_ref().map(|word| word.load(Ordering::Relaxed));
        // All loads above come before the number is loaded again.
        fence(Ordering::Acquire);
        if self.version.load(Ordering::Relaxed) != version || at.wrapping_sub(base) >= range.bytes {
            return None;
        }
        let clock = self.clock.load(Ordering::Relaxed);
        // If another range has this place by now, that range only stays a little longer.
        if rest.found_at.load(Ordering::Relaxed) != clock {
            rest.found_at.store(clock, Ordering::Relaxed);
        }
        Some((range, words))
    }

    /// Inserts a range and removes those that overlap it.
    pub(crate) fn enter(&self, range: Range, words: [u64; 2]) {
        if range.bytes == 0 {
            return;
        }
        let mut change = Change::begin(self);
        // Another thread may just have inserted the same range. Writing it again would make all readers miss, come here, and
        // write it again.
        if self.find(range.base) == Some((range, words)) {
            return;
        }
        change.remove(range);
        if change.empty.is_empty() {
            change.remove_oldest();
        }
        change.insert(range, words);
    }

    /// Removes all ranges that overlap `range`.
    pub(crate) fn remove(&self, range: Range) {
        Change::begin(self).remove(range);
    }

    /// How many ranges there are.
    fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    fn heads(&self) -> &[Head] {
        self.sorted.get(..self.len()).unwrap_or_default()
    }
}

/// A writer's turn. It disturbs readers only once it changes something.
struct Change<'a> {
    table: &'a Table,
    empty: MutexGuard<'a, Vec<usize>>,
    /// Whether the sequence number is odd now.
    has_begun: bool,
}

impl<'a> Change<'a> {
    fn begin(table: &'a Table) -> Change<'a> {
        let empty = table.empty.lock().unwrap_or_else(PoisonError::into_inner);
        Change { table, empty, has_begun: false }
    }

    /// Makes the sequence number odd, before the first change.
    fn writes(&mut self) {
        if !self.has_begun {
            self.has_begun = true;
            self.table.version.fetch_add(1, Ordering::Relaxed);
            // No change is visible before the number is odd.
            fence(Ordering::Release);
        }
    }

    fn bytes_of(&self, head: &Head) -> u64 {
        let rest = self.table.rests.get(head.place.load(Ordering::Relaxed));
        rest.map_or(0, |rest| rest.bytes.load(Ordering::Relaxed))
    }

    fn remove(&mut self, range: Range) {
        if range.bytes == 0 {
            return;
        }
        let heads = self.table.heads();
        let base = |head: &Head| head.base.load(Ordering::Relaxed);
        // Disjoint ranges in the order of their bases are also in the order of their ends.
        let first =
            heads.partition_point(|head| base(head).saturating_add(self.bytes_of(head)) <= range.base);
        let past = heads.partition_point(|head| base(head) < range.end()).max(first);
        self.take_out(first, past);
    }

    fn remove_oldest(&mut self) {
        let found_at = |head: &Head| {
            let rest = self.table.rests.get(head.place.load(Ordering::Relaxed));
            rest.map_or(0, |rest| rest.found_at.load(Ordering::Relaxed))
        };
        let oldest = self.table.heads().iter().enumerate().min_by_key(|(_, head)| found_at(head));
        if let Some(index) = oldest.map(|(index, _)| index) {
            self.take_out(index, index + 1);
        }
    }

    /// Removes the heads from `first` up to, but not including, `past`.
    fn take_out(&mut self, first: usize, past: usize) {
        let heads = self.table.heads();
        let (Some(leaving), Some(later)) = (heads.get(first..past), heads.get(past..)) else { return };
        if leaving.is_empty() {
            return;
        }
        self.writes();
        self.empty.extend(leaving.iter().map(|head| head.place.load(Ordering::Relaxed)));
        heads.iter().skip(first).zip(later).for_each(|(to, from)| to.copy(from));
        self.table.count.store(heads.len() - leaving.len(), Ordering::Relaxed);
    }

    /// Inserts a range. Needs a free place, and no overlapping range.
    fn insert(&mut self, range: Range, words: [u64; 2]) {
        let (table, count) = (self.table, self.table.len());
        let index = table.heads().partition_point(|head| head.base.load(Ordering::Relaxed) < range.base);
        // The last of these heads is the first unused one.
        let Some(moving) = table.sorted.get(index..=count) else { return };
        let Some(place) = self.empty.pop() else { return };
        self.writes();
        moving.iter().zip(moving.iter().skip(1)).rev().for_each(|(from, to)| to.copy(from));
        let (Some(head), Some(rest)) = (moving.first(), table.rests.get(place)) else { return };
        head.base.store(range.base, Ordering::Relaxed);
        head.place.store(place, Ordering::Relaxed);
        rest.bytes.store(range.bytes, Ordering::Relaxed);
        rest.words.iter().zip(words).for_each(|(to, word)| to.store(word, Ordering::Relaxed));
        let clock = table.clock.load(Ordering::Relaxed) + 1;
        rest.found_at.store(clock, Ordering::Relaxed);
        table.clock.store(clock, Ordering::Relaxed);
        table.count.store(count + 1, Ordering::Relaxed);
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        if self.has_begun {
            // Before the lock is released.
            self.table.version.fetch_add(1, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range_of(table: &Table, head: &Head) -> Range {
        let place = head.place.load(Ordering::Relaxed);
        Range {
            base: head.base.load(Ordering::Relaxed),
            bytes: table.rests[place].bytes.load(Ordering::Relaxed),
        }
    }

    proptest! {
        /// The table answers like a list in order of use, and never loses a place.
        #[test]
        fn answers_are_those_of_a_list(
            steps in proptest::collection::vec((0..5, 0..40_u64, 0..7_u64), 0..300),
            entries_max in 1..9_usize,
        ) {
            let table = Table::new(entries_max);
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
                        table.enter(range, [step, !step]);
                        if bytes > 0 {
                            clock += 1;
                            list.push((range, step, clock));
                        }
                    }
                    2 => {
                        list.retain(|(known, ..)| bytes == 0 || !known.overlaps(range));
                        table.remove(range);
                    }
                    _ => {
                        let found = list.iter_mut().find(|(known, ..)| known.contains(Range { base, bytes: 1 }));
                        let found = found.map(|(known, step, found_at)| {
                            *found_at = clock;
                            (*known, [*step, !*step])
                        });
                        prop_assert_eq!(table.find(base), found);
                    }
                }
                let here: Vec<Range> = table.heads().iter().map(|head| range_of(&table, head)).collect();
                let mut listed: Vec<Range> = list.iter().map(|(known, ..)| *known).collect();
                listed.sort_by_key(|known| known.base);
                prop_assert_eq!(here, listed);
                prop_assert_eq!(table.empty.lock().unwrap().len() + list.len(), entries_max);
            }
        }
    }

    /// The ends of the address space are addresses like others.
    #[test]
    fn the_last_addresses() {
        let table = Table::new(4);
        let last = Range { base: u64::MAX - 8, bytes: 8 };
        table.enter(last, [1, 2]);
        table.enter(Range { base: 0, bytes: 1 }, [3, 4]);
        assert_eq!(table.find(u64::MAX - 1), Some((last, [1, 2])));
        assert_eq!(table.find(u64::MAX), None);
        assert_eq!(table.find(0).map(|(_, words)| words), Some([3, 4]));
        table.remove(Range { base: 0, bytes: u64::MAX });
        assert_eq!(table.len(), 0);
    }

    /// Readers beside a writer see whole entries or none.
    #[test]
    fn nobody_reads_half() {
        let table = Table::new(8);
        let (turns, done) = (300_000_u64, AtomicU64::new(0));
        std::thread::scope(|scope| {
            for reader in 0..3_u64 {
                let (table, done) = (&table, &done);
                scope.spawn(move || {
                    let mut at = reader;
                    while done.load(Ordering::Relaxed) == 0 {
                        at = (at * 5 + 3) % 256;
                        if let Some((range, [first, second])) = table.find(at) {
                            assert!(range.contains(Range { base: at, bytes: 1 }));
                            assert_eq!((first, second), (range.base * 1000 + range.bytes, !first));
                        }
                    }
                });
            }
            for turn in 0..turns {
                let range = Range { base: turn * 7 % 240, bytes: 1 + turn % 13 };
                let word = range.base * 1000 + range.bytes;
                table.enter(range, [word, !word]);
                if turn % 5 == 0 {
                    table.remove(Range { base: turn * 11 % 256, bytes: 9 });
                }
            }
            done.store(1, Ordering::Relaxed);
        });
    }
}
