//! Decides where regions lie: chunks of memory within the symmetric heap's addresses, and regions within chunks. Pure.
//!
//! A region lies in one chunk, at the first place where it fits from the lowest address on: low chunks stay full and high
//! ones become empty, so that memory goes back. Regions are multiples of [`REGION_ALIGNMENT`]. That is 64 KiB and not the
//! 2 MiB of the hardware's pages. Rings and flags of small communicators would cost ten times what they hold, while
//! 64 KiB still keep two communicators' lines apart and are enough for every kernel, bulk copy and window.

use windlass_base::range::{Range, Ranges};

/// Offsets and sizes of regions are multiples of this, bytes.
pub const REGION_ALIGNMENT: u64 = 64 << 10;

/// The smallest step in which a symmetric heap grows: what a first pair's ring needs, bytes.
pub const CHUNK_BYTES_MIN: u64 = 4 << 20;

/// The largest step, except for regions that are larger: mapping one at every peer takes under 1 ms, bytes.
pub const CHUNK_BYTES_MAX: u64 = 32 << 20;

/// Numbers a chunk, uniquely in this process. Offsets are used again, also by a later symmetric heap of the device. Serials never are, so
/// that a peer never takes an old mapping for another chunk.
pub type Serial = u64;

/// Where a region lies. Offsets count from the beginning of the symmetric heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The chunk that it lies in.
    pub chunk: Serial,
    /// Offset of the first byte.
    pub offset: u64,
    /// A multiple of [`REGION_ALIGNMENT`].
    pub bytes: u64,
}

/// A chunk to map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// Offset of the chunk.
    pub offset: u64,
    /// Bytes that it should have, to grow rarely: as many as are mapped already, from [`CHUNK_BYTES_MIN`] to [`CHUNK_BYTES_MAX`], or more if the
    /// region needs more; less at the limit.
    pub bytes: u64,
    /// Bytes that it must have, if the device is short of memory.
    pub bytes_min: u64,
}

/// What must happen before a region can be lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// A chunk must be mapped first.
    Grow(Growth),
    /// The limit, or the addresses, do not allow it.
    Full,
}

/// The limits of a symmetric heap, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapLimits {
    /// Chunks are multiples of this.
    pub granularity: u64,
    /// The most that may be mapped.
    pub mapped_bytes_max: u64,
    /// How many addresses are reserved.
    pub span_bytes: u64,
}

/// All chunks and regions of a symmetric heap.
#[derive(Debug)]
pub struct Space {
    limits: HeapLimits,
    chunks: Ranges<Chunk>,
    mapped_bytes: u64,
    lent_bytes: u64,
}

#[derive(Debug)]
struct Chunk {
    serial: Serial,
    regions: Ranges<()>,
    is_retired: bool,
}

impl Space {
    /// A space with nothing mapped.
    pub fn new(limits: HeapLimits) -> Space {
        Space { limits, chunks: Ranges::new(), mapped_bytes: 0, lent_bytes: 0 }
    }

    /// Lends a place for `bytes` bytes, or says what stands in the way.
    pub fn lend(&mut self, bytes: u64) -> Result<Placement, Obstacle> {
        let bytes = bytes.max(1).checked_next_multiple_of(REGION_ALIGNMENT).ok_or(Obstacle::Full)?;
        for (whole, chunk) in self.chunks.iter_mut().filter(|(_, chunk)| !chunk.is_retired) {
            let Some(offset) = chunk.regions.gap(whole, bytes, REGION_ALIGNMENT) else { continue };
            if chunk.regions.insert(Range { base: offset, bytes }, ()).is_ok() {
                self.lent_bytes += bytes;
                return Ok(Placement { chunk: chunk.serial, offset, bytes });
            }
        }
        Err(self.growth_for(bytes).map_or(Obstacle::Full, Obstacle::Grow))
    }

    fn growth_for(&self, bytes: u64) -> Option<Growth> {
        let granularity = self.limits.granularity;
        let room = self.limits.mapped_bytes_max.saturating_sub(self.mapped_bytes) / granularity * granularity;
        let bytes_min = bytes.checked_next_multiple_of(granularity).filter(|needed| *needed <= room)?;
        let step = self.mapped_bytes.clamp(CHUNK_BYTES_MIN, CHUNK_BYTES_MAX);
        let wanted = bytes_min.max(step.next_multiple_of(granularity)).min(room);
        let whole = Range { base: 0, bytes: self.limits.span_bytes };
        let place = |bytes: u64| {
            let offset = self.chunks.gap(whole, bytes, granularity)?;
            Some(Growth { offset, bytes, bytes_min })
        };
        place(wanted).or_else(|| place(bytes_min))
    }

    /// Enters a chunk that has been mapped. False if another one is there.
    #[must_use]
    pub fn grown(&mut self, serial: Serial, offset: u64, bytes: u64) -> bool {
        let chunk = Chunk { serial, regions: Ranges::new(), is_retired: false };
        let entered = self.chunks.insert(Range { base: offset, bytes }, chunk).is_ok();
        if entered {
            self.mapped_bytes += bytes;
        }
        entered
    }

    /// Takes a region back. False if there is no such region.
    pub fn give_back(&mut self, placement: Placement) -> bool {
        let Some((_, chunk)) = self.chunks.find_mut(placement.offset) else { return false };
        if chunk.serial != placement.chunk || chunk.regions.remove(placement.offset).is_none() {
            return false;
        }
        self.lent_bytes -= placement.bytes;
        true
    }

    /// Lends nothing more from the chunk of a region, which is empty once its regions have come back.
    pub fn retire(&mut self, placement: Placement) {
        if let Some((_, chunk)) = self.chunks.find_mut(placement.offset) {
            chunk.is_retired |= chunk.serial == placement.chunk;
        }
    }

    /// Removes the chunks without regions, and returns them to be unmapped.
    pub fn take_empty(&mut self) -> Vec<Serial> {
        let empty: Vec<u64> = self
            .chunks
            .iter()
            .filter(|(_, chunk)| chunk.regions.is_empty())
            .map(|(range, _)| range.base)
            .collect();
        let mut serials = Vec::with_capacity(empty.len());
        for base in empty {
            if let Some((range, chunk)) = self.chunks.remove(base) {
                self.mapped_bytes -= range.bytes;
                serials.push(chunk.serial);
            }
        }
        serials
    }

    /// Bytes of all chunks.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes
    }

    /// Bytes of all regions.
    pub fn lent_bytes(&self) -> u64 {
        self.lent_bytes
    }

    /// How many chunks there are.
    pub fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// The most bytes that may be mapped.
    pub fn mapped_bytes_max(&self) -> u64 {
        self.limits.mapped_bytes_max
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const GRANULARITY: u64 = 2 << 20;
    const LIMITS: HeapLimits =
        HeapLimits { granularity: GRANULARITY, mapped_bytes_max: 96 << 20, span_bytes: 4 * (96 << 20) };

    fn next(state: &mut u64) -> u64 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state
    }

    /// Lends, and grows as the space says.
    fn lend(space: &mut Space, bytes: u64) -> Option<Placement> {
        match space.lend(bytes) {
            Ok(placement) => Some(placement),
            Err(Obstacle::Full) => None,
            Err(Obstacle::Grow(growth)) => {
                assert!(growth.bytes >= growth.bytes_min && growth.bytes_min >= bytes);
                static SERIALS: AtomicU64 = AtomicU64::new(1);
                assert!(space.grown(SERIALS.fetch_add(1, Ordering::Relaxed), growth.offset, growth.bytes));
                Some(space.lend(bytes).unwrap())
            }
        }
    }

    /// Random sizes, lent and given back: aligned, in one chunk, never over each other, never over the limit, and at
    /// the end everything has come back.
    #[test]
    fn a_model_agrees() {
        for seed in 1..60_u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut space = Space::new(LIMITS);
            let mut lent: Vec<Placement> = Vec::new();
            let mut refused = 0;
            for _ in 0..400 {
                match next(&mut state) % 5 {
                    0..=2 => {
                        let bytes = 1 + next(&mut state) % (1 << (10 + next(&mut state) % 16));
                        match lend(&mut space, bytes) {
                            Some(region) => {
                                assert!(
                                    region.bytes >= bytes && region.bytes < bytes + REGION_ALIGNMENT,
                                    "seed {seed}"
                                );
                                assert!(region.offset.is_multiple_of(REGION_ALIGNMENT), "seed {seed}");
                                let range =
                                    |region: &Placement| Range { base: region.offset, bytes: region.bytes };
                                assert!(
                                    lent.iter().all(|other| !range(other).overlaps(range(&region))),
                                    "seed {seed}"
                                );
                                lent.push(region);
                            }
                            None => refused += 1,
                        }
                    }
                    3 if !lent.is_empty() => {
                        let region = lent.swap_remove(next(&mut state) as usize % lent.len());
                        assert!(space.give_back(region), "seed {seed}");
                        assert!(!space.give_back(region), "seed {seed}: twice");
                    }
                    _ => drop(space.take_empty()),
                }
                assert!(space.mapped_bytes() <= LIMITS.mapped_bytes_max, "seed {seed}");
                assert_eq!(
                    space.lent_bytes(),
                    lent.iter().map(|region| region.bytes).sum::<u64>(),
                    "seed {seed}"
                );
            }
            assert!(refused > 0, "seed {seed}: the limit was never reached");
            assert!(lent.drain(..).all(|region| space.give_back(region)));
            space.take_empty();
            assert_eq!((space.mapped_bytes(), space.lent_bytes(), space.chunk_count()), (0, 0, 0));
        }
    }

    /// The steps of growth: a first ring costs what it holds, later steps are larger, the last one is what is left.
    #[test]
    fn steps() {
        let mut space = Space::new(LIMITS);
        let mut mapped = Vec::new();
        while lend(&mut space, 4 << 20).is_some() {
            mapped.push(space.mapped_bytes() >> 20);
        }
        mapped.dedup();
        assert_eq!(mapped, [4, 8, 16, 32, 64, 96]);
        assert_eq!(space.lend(4 << 20), Err(Obstacle::Full));
    }

    /// A retired chunk lends nothing more, and goes with its last region.
    #[test]
    fn retired() {
        let mut space = Space::new(LIMITS);
        let (kept, dead) = (lend(&mut space, 1).unwrap(), lend(&mut space, 1).unwrap());
        space.retire(Placement { chunk: u64::MAX, ..dead });
        let before = lend(&mut space, 1).unwrap();
        assert_eq!(before.chunk, dead.chunk, "another chunk was named");
        space.retire(dead);
        assert!(space.give_back(dead) && space.give_back(before));
        let after = lend(&mut space, 1).unwrap();
        assert_ne!(after.chunk, dead.chunk);
        assert!(space.take_empty().is_empty());
        assert!(space.give_back(kept));
        assert_eq!(space.take_empty(), [dead.chunk]);
    }

    /// A region larger than any step has a chunk of its own; one larger than the limit has none.
    #[test]
    fn large_regions() {
        let mut space = Space::new(LIMITS);
        let region = lend(&mut space, (70 << 20) + 1).unwrap();
        assert_eq!(space.mapped_bytes(), 72 << 20);
        assert_eq!(space.lend(97 << 20), Err(Obstacle::Full));
        assert_eq!(space.lend(u64::MAX), Err(Obstacle::Full));
        assert!(space.give_back(region));
        assert_eq!(space.take_empty().len(), 1);
        // The offset is used again under another serial: the old placement names nothing.
        let again = lend(&mut space, 64 << 20).unwrap();
        assert_eq!(again.offset, region.offset);
        assert!(!space.give_back(region) && space.give_back(again));
    }
}
