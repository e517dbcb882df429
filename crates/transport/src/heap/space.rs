//! Decides where regions lie within the symmetric heap's addresses. Pure.
//!
//! Each region is a chunk of memory of its own, of whole granules of the driver. So the memory of one communicator can go while the others'
//! stays, and a peer maps nothing of communicators that it is not in. A region lies at the first place where it fits.

use std::collections::BTreeMap;

/// Numbers a chunk, uniquely in this process. Offsets are used again, also by a later symmetric heap of the device. Serials never are, so
/// that a peer never takes an old mapping for another chunk.
pub type Serial = u64;

/// Where a region lies. Offsets count from the beginning of the symmetric heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The chunk that it is.
    pub chunk: Serial,
    /// Offset of the first byte.
    pub offset: u64,
    /// Whole granules.
    pub bytes: u64,
}

/// The limits of a symmetric heap, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapLimits {
    /// Regions are multiples of this.
    pub granularity: u64,
    /// The most that may be mapped.
    pub mapped_bytes_max: u64,
    /// How many addresses are reserved.
    pub span_bytes: u64,
}

/// All regions of a symmetric heap.
#[derive(Debug)]
pub struct Space {
    limits: HeapLimits,
    /// By offset. They do not overlap.
    lent: BTreeMap<u64, Placement>,
}

impl Space {
    /// A space with nothing mapped.
    pub fn new(limits: HeapLimits) -> Space {
        Space { limits, lent: BTreeMap::new() }
    }

    /// Enters a region of at least `bytes` bytes. None if the limit, or the addresses, do not allow it.
    pub fn lend(&mut self, chunk: Serial, bytes: u64) -> Option<Placement> {
        let HeapLimits { granularity, mapped_bytes_max, span_bytes } = self.limits;
        let bytes = bytes.max(1).checked_next_multiple_of(granularity)?;
        if bytes > mapped_bytes_max.saturating_sub(self.mapped_bytes()) {
            return None;
        }
        let mut offset = 0;
        for lent in self.lent.values() {
            if lent.offset - offset >= bytes {
                break;
            }
            offset = lent.offset + lent.bytes;
        }
        let placement = Placement { chunk, offset, bytes };
        (offset + bytes <= span_bytes).then(|| self.lent.insert(offset, placement))?;
        Some(placement)
    }

    /// Takes a region back. False if there is no such region.
    pub fn give_back(&mut self, placement: Placement) -> bool {
        let is_it = self.lent.get(&placement.offset) == Some(&placement);
        if is_it {
            self.lent.remove(&placement.offset);
        }
        is_it
    }

    /// Bytes of all regions.
    pub fn mapped_bytes(&self) -> u64 {
        self.lent.values().map(|placement| placement.bytes).sum()
    }

    /// The most bytes that may be mapped.
    pub fn mapped_bytes_max(&self) -> u64 {
        self.limits.mapped_bytes_max
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use windlass_base::range::Range;

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

    fn lend(space: &mut Space, bytes: u64) -> Option<Placement> {
        static SERIALS: AtomicU64 = AtomicU64::new(1);
        space.lend(SERIALS.fetch_add(1, Ordering::Relaxed), bytes)
    }

    /// Random sizes, lent and given back: aligned, never over each other, never over the limit, refused only there, and at the end everything
    /// has come back.
    #[test]
    fn a_model_agrees() {
        for seed in 1..60_u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut space = Space::new(LIMITS);
            let mut lent: Vec<Placement> = Vec::new();
            let mut refused = 0;
            for _ in 0..400 {
                if !lent.is_empty() && next(&mut state) % 5 < 2 {
                    let region = lent.swap_remove(next(&mut state) as usize % lent.len());
                    assert!(space.give_back(region), "seed {seed}");
                    assert!(!space.give_back(region), "seed {seed}: twice");
                } else {
                    let bytes = 1 + next(&mut state) % (1 << (10 + next(&mut state) % 16));
                    match lend(&mut space, bytes) {
                        Some(region) => {
                            assert_eq!(region.bytes, bytes.next_multiple_of(GRANULARITY), "seed {seed}");
                            assert!(region.offset.is_multiple_of(GRANULARITY), "seed {seed}");
                            let range =
                                |region: &Placement| Range { base: region.offset, bytes: region.bytes };
                            assert!(
                                lent.iter().all(|other| !range(other).overlaps(range(&region))),
                                "seed {seed}"
                            );
                            let free = |offset: &u64| {
                                let range_there = Range { base: *offset, bytes: region.bytes };
                                lent.iter().all(|other| !range(other).overlaps(range_there))
                            };
                            let first = (0..LIMITS.span_bytes).step_by(GRANULARITY as usize).find(free);
                            assert_eq!(first, Some(region.offset), "seed {seed}");
                            lent.push(region);
                        }
                        None => {
                            assert!(space.mapped_bytes() + bytes + GRANULARITY > LIMITS.mapped_bytes_max);
                            refused += 1;
                        }
                    }
                }
                assert!(space.mapped_bytes() <= LIMITS.mapped_bytes_max, "seed {seed}");
                assert_eq!(
                    space.mapped_bytes(),
                    lent.iter().map(|region| region.bytes).sum::<u64>(),
                    "seed {seed}"
                );
            }
            assert!(refused > 0, "seed {seed}: the limit was never reached");
            assert!(lent.drain(..).all(|region| space.give_back(region)));
            assert_eq!(space.mapped_bytes(), 0);
        }
    }

    /// Communicators cost whole granules, and nothing for those that may come.
    #[test]
    fn whole_granules() {
        let mut space = Space::new(LIMITS);
        let mapped = [1, 4 << 20, (17 << 20) + 1].map(|bytes| {
            lend(&mut space, bytes).unwrap();
            space.mapped_bytes() >> 20
        });
        assert_eq!(mapped, [2, 6, 24]);
    }

    /// A region larger than the limit is refused. An offset is used again under another serial: the old placement names nothing.
    #[test]
    fn large_regions() {
        let mut space = Space::new(LIMITS);
        let region = lend(&mut space, (70 << 20) + 1).unwrap();
        assert_eq!(space.mapped_bytes(), 72 << 20);
        assert_eq!([97 << 20, u64::MAX].map(|bytes| lend(&mut space, bytes)), [None; 2]);
        assert!(space.give_back(region));
        let again = lend(&mut space, 64 << 20).unwrap();
        assert_eq!(again.offset, region.offset);
        assert!(!space.give_back(region) && space.give_back(again));
    }
}
