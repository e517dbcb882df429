//! What a rank tells its peers of a region: the numbers of its [`Place`], and one descriptor.

use windlass_base::descriptor::Ours;

use crate::heap::error::HeapError;
use crate::heap::space::Serial;

/// The most addresses of a symmetric heap: 16 TiB.
pub(super) const SPAN_BYTES_MAX: u64 = 1 << 44;

/// Where a region lies in its owner's symmetric heap. The same offsets hold in every mapping of the symmetric heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Bytes of addresses of the owner's symmetric heap; a peer reserves as many.
    pub span_bytes: u64,
    /// The chunk's number, which its owner never uses again.
    pub chunk: Serial,
    /// Where the region begins, from the beginning of the symmetric heap.
    pub offset: u64,
    /// Bytes of the region.
    pub bytes: u64,
}

/// A place, and a descriptor of its memory. The descriptor is closed on `exec`. Drop it once it is sent: the memory stays as long as
/// it is open.
#[derive(Debug)]
pub struct Announcement {
    /// The numbers.
    pub place: Place,
    /// The region's memory.
    pub descriptor: Ours,
}

impl Place {
    /// Bytes of a place on the wire.
    pub const WIRE_BYTES: usize = 32;

    /// Encodes a place as little-endian words.
    pub fn to_wire(self) -> [u8; Place::WIRE_BYTES] {
        let words = [self.span_bytes, self.chunk, self.offset, self.bytes];
        let mut wire = [0; Place::WIRE_BYTES];
        for (bytes, word) in wire.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        wire
    }

    /// Decodes a place. Whether it makes sense is checked when it is mapped.
    pub fn from_wire(wire: [u8; Place::WIRE_BYTES]) -> Place {
        let mut words = [0; 4];
        for (word, bytes) in words.iter_mut().zip(wire.chunks_exact(8)) {
            bytes.iter().rev().for_each(|byte| *word = *word << 8 | u64::from(*byte));
        }
        let [span_bytes, chunk, offset, bytes] = words;
        Place { span_bytes, chunk, offset, bytes }
    }

    /// Refuses a place that no symmetric heap can have: a peer's numbers are not trusted unchecked.
    pub(super) fn check(&self, granularity: u64) -> Result<(), HeapError> {
        let numbers = [self.span_bytes, self.offset, self.bytes];
        let sound = self.span_bytes <= SPAN_BYTES_MAX
            && numbers.iter().all(|bytes| bytes.is_multiple_of(granularity))
            && self.bytes > 0
            && self.offset.checked_add(self.bytes).is_some_and(|end| end <= self.span_bytes);
        if sound {
            Ok(())
        } else {
            Err(HeapError::Strange { place: *self, why: "no symmetric heap is like that" })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const PLACE: Place = Place { span_bytes: 64 * MIB, chunk: 7, offset: 10 * MIB, bytes: 2 * MIB };

    /// What is sent arrives.
    #[test]
    fn over_the_wire() {
        assert_eq!(Place::from_wire(PLACE.to_wire()), PLACE);
        assert_eq!(PLACE.to_wire()[8..16], [7, 0, 0, 0, 0, 0, 0, 0]);
    }

    /// Every number that could make a peer map or touch what it must not is refused.
    #[test]
    fn nonsense() {
        assert!(PLACE.check(2 * MIB).is_ok());
        let strange = [
            Place { span_bytes: 1 << 50, ..PLACE },
            Place { span_bytes: 8 * MIB, ..PLACE },
            Place { offset: u64::MAX - 2 * MIB + 1, ..PLACE },
            Place { offset: 9 * MIB, ..PLACE },
            Place { offset: 64 * MIB, ..PLACE },
            Place { offset: u64::MAX, ..PLACE },
            Place { bytes: 0, ..PLACE },
            Place { bytes: 2 * MIB + 1, ..PLACE },
            Place { bytes: 56 * MIB, ..PLACE },
            Place { bytes: u64::MAX, ..PLACE },
        ];
        for place in strange {
            assert!(place.check(2 * MIB).is_err(), "{place:?}");
        }
    }
}
