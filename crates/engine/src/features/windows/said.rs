//! [`Said`]: what a rank says in a round, and its encoding in a line of words.

use std::sync::atomic::{AtomicU64, Ordering};

use windlass_bootstrap::negotiated::RANKS_MAX;

/// The number of a window, from 1, equal on all ranks. 0 stands for none.
pub(crate) type Number = u64;

/// Words of a line of 64 bytes.
pub(crate) const SLOT_WORDS: usize = 8;
/// How many words the ranks share, all zero at first: two lines per rank, for odd and even rounds.
pub(crate) const WORDS: usize = 2 * RANKS_MAX * SLOT_WORDS;

/// A registration by one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    /// The number of this rank's window that fits. 0 for none.
    pub claim: Number,
    /// The address of the window.
    pub address: u64,
    /// Bytes of the window.
    pub bytes: u64,
    /// Bytes of the allocation that holds it. 0 if unknown.
    pub allocation: u64,
    /// Bytes from the beginning of the allocation to the window.
    pub offset: u64,
    /// The flags that the program gave.
    pub flags: u32,
    /// Whether the program already has a window over the same allocation.
    pub is_over: bool,
    /// The number of a window that this rank has dropped. 0 for none.
    pub lost: Number,
}

/// How a rank takes part in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It waits for the others.
    Registers,
    /// It has gone on, because NCCL refused its call at once. The line holds NCCL's code.
    Unfit,
    /// It takes part in no further round.
    Off,
}

const KINDS: [Kind; 3] = [Kind::Registers, Kind::Unfit, Kind::Off];
/// Set by a rank that has settled a round with an unfit rank, which then cannot take its message back.
pub(crate) const TAKEN: u64 = 0x80;

/// The word that says that the line's other words are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub round: u64,
    pub kind: Kind,
    pub is_taken: bool,
}

impl Head {
    pub(crate) fn new(round: u64, kind: Kind) -> Head {
        Head { round, kind, is_taken: false }
    }

    pub(crate) fn pack(self) -> u64 {
        let taken = if self.is_taken { TAKEN } else { 0 };
        self.round << 8 | taken | (self.kind as u64 + 1)
    }

    /// Decodes a head. None if no message was written there, or if it was taken back.
    pub(crate) fn of(word: u64) -> Option<Head> {
        let kind = ((word & 0x7f) as usize).checked_sub(1).and_then(|kind| KINDS.get(kind))?;
        Some(Head { round: word >> 8, kind: *kind, is_taken: word & TAKEN != 0 })
    }
}

const OVER: u64 = 1 << 32;

impl Said {
    /// Writes all words but the head, which must be written last.
    pub(crate) fn write(&self, line: &[AtomicU64]) {
        let flags = u64::from(self.flags) | if self.is_over { OVER } else { 0 };
        let words = [self.claim, self.address, self.bytes, self.allocation, self.offset, flags, self.lost];
        line.iter().skip(1).zip(words).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
    }

    pub(crate) fn read(line: &[AtomicU64]) -> Said {
        let word = |index: usize| line.get(index).map_or(0, |word| word.load(Ordering::Relaxed));
        Said {
            claim: word(1),
            address: word(2),
            bytes: word(3),
            allocation: word(4),
            offset: word(5),
            flags: word(6) as u32,
            is_over: word(6) & OVER != 0,
            lost: word(7),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message survives encoding and decoding.
    #[test]
    fn round_trip() {
        let line: Vec<AtomicU64> = (0..SLOT_WORDS).map(|_| AtomicU64::new(0)).collect();
        let said = Said {
            claim: 1,
            address: 2,
            bytes: 3,
            allocation: 4,
            offset: 5,
            flags: u32::MAX,
            is_over: true,
            lost: 7,
        };
        said.write(&line);
        assert_eq!(Said::read(&line), said);
        assert_eq!(line[0].load(Ordering::Relaxed), 0, "the head is not its own");
        for kind in KINDS {
            for is_taken in [false, true] {
                let head = Head { round: 1 << 40, kind, is_taken };
                assert_eq!(Head::of(head.pack()), Some(head));
            }
        }
        assert_eq!((Head::of(0), Head::of(0x7f), Head::of(TAKEN)), (None, None, None));
    }
}
