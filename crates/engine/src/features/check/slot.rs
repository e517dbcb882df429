//! One rank's ring of entries in the shared page, and its view of the other ranks' rings.
//!
//! A rank writes its own ring only, and never waits for readers: an entry that was overwritten is [gone](Found::Gone). The first
//! word of an entry is twice its number, plus one while the entry is being written. A reader reads that word before and after
//! the others, so it never takes a torn entry.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use windlass_bootstrap::negotiated::RANKS_MAX;

use crate::features::check::entry::{self, Entry};

/// Words of a line of 64 bytes: an entry, or the ring's head.
const LINE_WORDS: usize = 8;
const _: () = assert!(entry::WORDS < LINE_WORDS);
/// Entries of a ring. With the head they are 16 KiB.
const ENTRIES: u64 = 255;
const RING_WORDS: usize = LINE_WORDS * (ENTRIES as usize + 1);

/// How many words the ranks share. All are zero at first.
pub(crate) const fn words_of(ranks: usize) -> usize {
    ranks * RING_WORDS
}

/// One rank's slot in the shared words. One thread at a time posts, as NCCL demands of a communicator.
#[derive(Debug)]
pub(crate) struct CheckSlot<W> {
    words: W,
    from: usize,
    rank: usize,
    ranks: usize,
    /// The number of this rank's next entry.
    next: AtomicU64,
}

/// What a reader finds of a rank's entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The entry.
    Here(Entry),
    /// Not written yet.
    Missing,
    /// Will never be written: the rank tells no more calls.
    Never,
    /// Overwritten by a later one.
    Gone,
}

impl<W: Deref> CheckSlot<W>
where
    W::Target: AsRef<[AtomicU64]>,
{
    /// The slot of one of 2 to [`RANKS_MAX`] ranks, over [`words_of`] words from `from` on. None if they do not fit. A rank has one slot.
    pub(crate) fn new(words: W, from: usize, rank: u32, ranks: u32) -> Option<CheckSlot<W>> {
        let (rank, ranks) = (rank as usize, ranks as usize);
        let has_room = words.as_ref().len() >= from + words_of(ranks);
        let fits = (2..=RANKS_MAX).contains(&ranks) && rank < ranks && has_room;
        fits.then(|| CheckSlot { words, from, rank, ranks, next: AtomicU64::new(1) })
    }

    /// Writes the entry of this rank's next call. The first call has number 1.
    pub(crate) fn post(&self, entry: &Entry) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let line = self.line(self.rank, number);
        line[0].store(2 * number + 1, Ordering::Relaxed);
        // A reader that sees a word of this entry also sees the odd number above.
        fence(Ordering::Release);
        line[1..].iter().zip(entry.pack()).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
        line[0].store(2 * number, Ordering::Release);
        self.head(self.rank)[0].store(number, Ordering::Release);
    }

    /// Says that this rank tells no more calls.
    pub(crate) fn leave(&self) {
        self.head(self.rank)[1].store(1, Ordering::Release);
    }

    /// How many ranks there are.
    pub(crate) fn ranks(&self) -> usize {
        self.ranks
    }

    /// What all ranks have at this number, by rank.
    pub(crate) fn look(&self, number: u64) -> Vec<Found> {
        (0..self.ranks).map(|rank| self.find(rank, number)).collect()
    }

    /// The number of a rank's last entry. 0 for none.
    pub(crate) fn latest(&self, rank: usize) -> u64 {
        self.head(rank)[0].load(Ordering::Acquire)
    }

    /// The first number from which on no rank has overwritten its entry.
    pub(crate) fn first_left(&self) -> u64 {
        let latest = (0..self.ranks).map(|rank| self.latest(rank)).max().unwrap_or(0);
        latest.saturating_sub(ENTRIES) + 1
    }

    fn find(&self, rank: usize, number: u64) -> Found {
        // Read before the entry: a rank that has left has written all its entries.
        let has_left = self.head(rank)[1].load(Ordering::Acquire) != 0;
        let line = self.line(rank, number);
        let before = line[0].load(Ordering::Acquire);
        if before / 2 > number {
            return Found::Gone;
        }
        // The word comes from memory that others write, so it may hold anything.
        if before != number.wrapping_mul(2) {
            return if has_left { Found::Never } else { Found::Missing };
        }
        let words = std::array::from_fn(|index| line[1 + index].load(Ordering::Relaxed));
        // If a word of a later entry was read, its first word is seen now.
        fence(Ordering::Acquire);
        match line[0].load(Ordering::Relaxed) == before {
            // An entry that cannot be decoded counts as gone.
            true => Entry::unpack(words).map_or(Found::Gone, Found::Here),
            false => Found::Gone,
        }
    }

    fn head(&self, rank: usize) -> &[AtomicU64] {
        let first = self.from + rank * RING_WORDS;
        &self.words.as_ref()[first..first + LINE_WORDS]
    }

    fn line(&self, rank: usize, number: u64) -> &[AtomicU64] {
        let index = 1 + (number % ENTRIES) as usize;
        let first = self.from + rank * RING_WORDS + index * LINE_WORDS;
        &self.words.as_ref()[first..first + LINE_WORDS]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::features::check::entry::Window;

    type Slots = Vec<CheckSlot<Arc<[AtomicU64]>>>;

    fn slots(ranks: u32) -> Slots {
        let words: Arc<[AtomicU64]> = (0..8 + words_of(ranks as usize)).map(|_| AtomicU64::new(0)).collect();
        (0..ranks).map(|rank| CheckSlot::new(words.clone(), 8, rank, ranks).unwrap()).collect()
    }

    /// Every field has the same number, so that a torn entry is noticed.
    fn entry(number: u64) -> Entry {
        Entry::Window(Window { bytes: number, flags: number as u32, allocation: number, offset: number })
    }

    /// Every rank reads every rank's entries, once they are there.
    #[test]
    fn all_read_all() {
        let slots = slots(3);
        for number in 1..=3 * ENTRIES {
            for slot in &slots {
                assert_eq!(slot.look(number)[slot.rank], Found::Missing);
                slot.post(&entry(10 * number + slot.rank as u64));
            }
            let all: Vec<Found> = (0..3).map(|rank| Found::Here(entry(10 * number + rank))).collect();
            assert!(slots.iter().all(|slot| slot.look(number) == all));
        }
        assert_eq!(slots[0].look(1), [Found::Gone; 3]);
    }

    /// Overwritten entries are gone, and the entries left begin after them. A rank that has left has no further entries.
    #[test]
    fn gone() {
        let slots = slots(2);
        (1..=ENTRIES + 5).for_each(|number| slots[1].post(&entry(number)));
        assert_eq!(slots[0].first_left(), 6);
        assert_eq!(slots[0].look(5), [Found::Missing, Found::Gone]);
        assert_eq!(slots[0].look(6), [Found::Missing, Found::Here(entry(6))]);
        slots[0].post(&entry(1));
        slots[0].leave();
        assert_eq!(slots[1].look(6)[0], Found::Never);
        assert_eq!((slots[1].latest(0), slots[1].latest(1)), (1, ENTRIES + 5));
    }

    /// Any value in shared memory is handled.
    #[test]
    fn wild_words() {
        let slots = slots(2);
        slots[0].words.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
        assert_eq!((slots[0].latest(1), slots[0].first_left()), (u64::MAX, u64::MAX - ENTRIES + 1));
        for number in [1, u64::MAX / 2, u64::MAX] {
            assert_eq!(slots[0].look(number).len(), 2);
        }
    }

    /// A reader beside a writer that overwrites the ring takes whole entries only.
    #[test]
    fn never_torn() {
        let slots = slots(2);
        let last = 40 * ENTRIES;
        std::thread::scope(|scope| {
            scope.spawn(|| (1..=last).for_each(|number| slots[1].post(&entry(number))));
            let mut read = 0;
            while slots[0].latest(1) < last {
                let told = slots[0].latest(1);
                let number = told.max(1);
                for number in number.saturating_sub(ENTRIES / 2).max(1)..number + 2 {
                    match slots[0].look(number)[1] {
                        Found::Here(found) => {
                            assert_eq!(found, entry(number));
                            read += 1;
                        }
                        Found::Missing => assert!(number > told),
                        Found::Gone => {}
                        Found::Never => panic!("{number}"),
                    }
                }
            }
            read
        });
        assert_eq!(slots[0].look(last)[1], Found::Here(entry(last)));
    }

    /// There are slots for the allowed ranks and words only.
    #[test]
    fn slots_there_are() {
        let words: Arc<[AtomicU64]> = (0..words_of(2) + 8).map(|_| AtomicU64::new(0)).collect();
        let is = |from, rank, ranks| CheckSlot::new(words.clone(), from, rank, ranks).is_some();
        assert!(is(8, 1, 2) && is(0, 0, 2));
        assert!(!is(9, 0, 2) && !is(0, 2, 2) && !is(0, 0, 1) && !is(0, 0, 3));
    }
}
