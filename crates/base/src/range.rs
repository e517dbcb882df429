//! A range of addresses.

/// The addresses from `base` up to, but without, `base + bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Range {
    /// First address.
    pub base: u64,
    /// The number of bytes, above 0.
    pub bytes: u64,
}

impl Range {
    /// The address after the last.
    pub fn end(self) -> u64 {
        self.base.saturating_add(self.bytes)
    }

    /// Whether all of `other` lies in this range.
    pub fn contains(self, other: Range) -> bool {
        self.base <= other.base && other.end() <= self.end()
    }

    /// Whether both ranges share an address.
    pub fn overlaps(self, other: Range) -> bool {
        self.base < other.end() && other.base < self.end()
    }
}
