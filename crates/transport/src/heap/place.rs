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
    /// Where the chunk begins.
    pub chunk_offset: u64,
    /// Bytes of the chunk.
    pub chunk_bytes: u64,
    /// Where the region begins, from the beginning of the symmetric heap.
    pub offset: u64,
    /// Bytes of the region.
    pub bytes: u64,
}

/// A place, and a descriptor of its chunk's memory. The descriptor is closed on `exec`. Drop it once it is sent: the memory stays as long as
/// it is open.
#[derive(Debug)]
pub struct Announcement {
    /// The numbers.
    pub place: Place,
    /// The chunk's memory.
    pub descriptor: Ours,
}

impl Place {
    /// Bytes of a place on the wire.
    pub const WIRE_BYTES: usize = 48;

    /// Encodes a place as little-endian words.
    pub fn to_wire(self) -> [u8; Place::WIRE_BYTES] {
        let words =
            [self.span_bytes, self.chunk, self.chunk_offset, self.chunk_bytes, self.offset, self.bytes];
        let mut wire = [0; Place::WIRE_BYTES];
        for (bytes, word) in wire.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        wire
    }

    /// Decodes a place. Whether it makes sense is checked when it is mapped.
    pub fn from_wire(wire: [u8; Place::WIRE_BYTES]) -> Place {
        let mut words = [0; 6];
        for (word, bytes) in words.iter_mut().zip(wire.chunks_exact(8)) {
            bytes.iter().rev().for_each(|byte| *word = *word << 8 | u64::from(*byte));
        }
        let [span_bytes, chunk, chunk_offset, chunk_bytes, offset, bytes] = words;
        Place { span_bytes, chunk, chunk_offset, chunk_bytes, offset, bytes }
    }

    /// Whether the place makes sense, for fuzzing.
    #[cfg(any(test, feature = "test-support"))]
    pub fn is_sound(&self, granularity: u64) -> bool {
        self.check(granularity).is_ok()
    }

    /// Refuses a place that no symmetric heap can have: a peer's numbers are not trusted unchecked.
    pub(super) fn check(&self, granularity: u64) -> Result<(), HeapError> {
        let within = |offset: u64, bytes: u64, whole_offset: u64, whole_bytes: u64| {
            bytes > 0
                && offset >= whole_offset
                && (offset - whole_offset).checked_add(bytes).is_some_and(|end| end <= whole_bytes)
        };
        let aligned = [self.span_bytes, self.chunk_offset, self.chunk_bytes]
            .iter()
            .all(|bytes| bytes.is_multiple_of(granularity));
        let sound = self.span_bytes <= SPAN_BYTES_MAX
            && aligned
            && within(self.chunk_offset, self.chunk_bytes, 0, self.span_bytes)
            && within(self.offset, self.bytes, self.chunk_offset, self.chunk_bytes);
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
    const PLACE: Place = Place {
        span_bytes: 64 * MIB,
        chunk: 7,
        chunk_offset: 8 * MIB,
        chunk_bytes: 4 * MIB,
        offset: 10 * MIB,
        bytes: 2 * MIB,
    };

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
            Place { chunk_offset: u64::MAX - MIB + 1, ..PLACE },
            Place { chunk_offset: 9 * MIB, ..PLACE },
            Place { chunk_bytes: 0, ..PLACE },
            Place { chunk_bytes: u64::MAX, ..PLACE },
            Place { offset: 7 * MIB, ..PLACE },
            Place { offset: u64::MAX, ..PLACE },
            Place { bytes: 0, ..PLACE },
            Place { bytes: 2 * MIB + 1, ..PLACE },
            Place { bytes: u64::MAX, ..PLACE },
        ];
        for place in strange {
            assert!(place.check(2 * MIB).is_err(), "{place:?}");
        }
    }
}
