//! The head: the one word by which ranks agree on limits. It holds the newest decided number, the limit, and when the limit changed.
//!
//! 32 bits of the newest decided number, 20 bits of how many numbers ago the limit last changed, and 6 bits each of the
//! current limit and of the one before. Pure.

/// The number of a candidate, from 1.
pub type Number = u64;

/// Bits of a limit.
const LIMIT_BITS: u32 = 6;
/// The largest limit: the log2 of bytes.
pub const LIMIT_MAX: u8 = (1 << LIMIT_BITS) - 1;
const SINCE_BITS: u32 = 20;
/// Stands for a change at least so many numbers ago.
pub(crate) const LONG_AGO: u32 = (1 << SINCE_BITS) - 1;

/// The decoded head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Head {
    /// The newest decided number, modulo 2^32.
    pub decided: u32,
    /// How many numbers ago the limit last changed. [`LONG_AGO`] also stands for more.
    pub since: u32,
    /// The limit since then: log2 of bytes, 0 for none.
    pub limit: u8,
    /// The limit before that change.
    pub previous: u8,
}

impl Head {
    /// Encodes the head.
    pub(crate) fn pack(self) -> u64 {
        u64::from(self.decided) << 32
            | u64::from(self.since) << (2 * LIMIT_BITS)
            | u64::from(self.limit) << LIMIT_BITS
            | u64::from(self.previous)
    }

    /// Decodes a word. Every word is a head.
    pub(crate) fn of(word: u64) -> Head {
        Head {
            decided: (word >> 32) as u32,
            since: (word >> (2 * LIMIT_BITS)) as u32 & LONG_AGO,
            limit: (word >> LIMIT_BITS) as u8 & LIMIT_MAX,
            previous: word as u8 & LIMIT_MAX,
        }
    }

    /// How far the newest decided number is beyond `number`: negative if `number` is undecided. Both must be within
    /// 2^31 of each other, which [`crate::features::registration::agreed::LAG_MAX`] ensures.
    pub(crate) fn beyond(self, number: Number) -> i64 {
        i64::from(self.decided.wrapping_sub(number as u32) as i32)
    }

    /// The limit at a decided number that the asking rank has not passed. None if the number is undecided.
    pub(crate) fn limit_at(self, number: Number) -> Option<u8> {
        match self.beyond(number) {
            ..0 => None,
            beyond if beyond <= i64::from(self.since) => Some(self.limit),
            _ => Some(self.previous),
        }
    }

    /// The number at which the limit last changed, or a later one before which no rank asks again. `near` is any number
    /// within 2^31 of the newest.
    pub(crate) fn changed_at(self, near: Number) -> Number {
        near.saturating_add_signed(self.beyond(near)).saturating_sub(u64::from(self.since))
    }

    /// The head after the next number is decided, where the least offer is `wanted`. The limit changes only if the slowest rank has passed all
    /// numbers before the last change, so no rank ever needs more than one earlier limit.
    pub(crate) fn next(self, wanted: u8, slowest: Slowest) -> Head {
        let decided = self.decided.wrapping_add(1);
        if wanted != self.limit && slowest == Slowest::PastTheChange {
            Head { decided, since: 0, limit: wanted, previous: self.limit }
        } else {
            Head { decided, since: (self.since + 1).min(LONG_AGO), ..self }
        }
    }
}

/// How far the slowest rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slowest {
    /// It will not ask for a number before the last change.
    PastTheChange,
    /// It may ask for such a number.
    BeforeIt,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A head survives encoding and decoding, at the edges of every field.
    #[test]
    fn words() {
        let edges = [0, 1, 77, u32::MAX];
        for decided in edges {
            for since in [0, 1, LONG_AGO] {
                for (limit, previous) in [(0, 0), (LIMIT_MAX, 0), (0, LIMIT_MAX), (23, 30)] {
                    let head = Head { decided, since, limit, previous };
                    assert_eq!(Head::of(head.pack()), head);
                }
            }
        }
        assert_eq!(Head::of(0), Head::default(), "zeroed memory has decided nothing");
    }

    /// The limits before, at and after a change, also across the wrap of the number.
    #[test]
    fn limits() {
        for first in [7_u64, u64::from(u32::MAX) - 2] {
            let mut head = Head { decided: first as u32, since: 9, limit: 25, previous: 0 };
            head = head.next(23, Slowest::PastTheChange);
            head = head.next(0, Slowest::BeforeIt);
            head = head.next(0, Slowest::BeforeIt);
            assert_eq!(head, Head { decided: (first + 3) as u32, since: 2, limit: 23, previous: 25 });
            let at = |ahead: u64| head.limit_at(first + ahead);
            assert_eq!([0, 1, 3, 4].map(at), [Some(25), Some(23), Some(23), None]);
            assert_eq!([first, first + 2, first + 9].map(|near| head.changed_at(near)), [first + 1; 3]);
        }
    }

    /// A change long ago stays long ago.
    #[test]
    fn saturation() {
        let head = Head { decided: 5, since: LONG_AGO - 1, limit: 23, previous: 0 };
        let later = head.next(23, Slowest::PastTheChange).next(23, Slowest::PastTheChange);
        assert_eq!(later, Head { decided: 7, since: LONG_AGO, limit: 23, previous: 0 });
    }
}
