//! Intervals of addresses that do not overlap, each with something to know about it.

use std::collections::BTreeMap;

/// Addresses from `base` up to, not with, `base + bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Range {
    /// First address.
    pub base: u64,
    /// How many, more than none.
    pub bytes: u64,
}

impl Range {
    /// The address after the last.
    pub fn end(self) -> u64 {
        self.base.saturating_add(self.bytes)
    }

    /// Whether all of `other` lies in it.
    pub fn contains(self, other: Range) -> bool {
        self.base <= other.base && other.end() <= self.end()
    }

    /// Whether they share an address.
    pub fn overlaps(self, other: Range) -> bool {
        self.base < other.end() && other.base < self.end()
    }
}

/// Ranges that do not overlap, by address. Every question is a walk down one tree.
#[derive(Clone, Debug)]
pub struct Ranges<T> {
    by_base: BTreeMap<u64, (u64, T)>,
}

impl<T> Default for Ranges<T> {
    fn default() -> Self {
        Ranges { by_base: BTreeMap::new() }
    }
}

impl<T> Ranges<T> {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Enters a range, or gives back what was to be entered: the range is empty, wraps, or shares addresses with
    /// one that is here.
    pub fn insert(&mut self, range: Range, value: T) -> Result<(), T> {
        let wraps = range.base.checked_add(range.bytes).is_none();
        if range.bytes == 0 || wraps || self.overlapping(range).next().is_some() {
            return Err(value);
        }
        self.by_base.insert(range.base, (range.bytes, value));
        Ok(())
    }

    /// Takes out the range that begins at `base`.
    pub fn remove(&mut self, base: u64) -> Option<(Range, T)> {
        let (bytes, value) = self.by_base.remove(&base)?;
        Some((Range { base, bytes }, value))
    }

    /// The range that an address lies in.
    pub fn find(&self, address: u64) -> Option<(Range, &T)> {
        let (base, (bytes, value)) = self.by_base.range(..=address).next_back()?;
        let range = Range { base: *base, bytes: *bytes };
        (address < range.end()).then_some((range, value))
    }

    /// The same, to change what is known of it.
    pub fn find_mut(&mut self, address: u64) -> Option<(Range, &mut T)> {
        let (base, (bytes, value)) = self.by_base.range_mut(..=address).next_back()?;
        let range = Range { base: *base, bytes: *bytes };
        (address < range.end()).then_some((range, value))
    }

    /// All that share an address with `range`, in order.
    pub fn overlapping(&self, range: Range) -> impl Iterator<Item = (Range, &T)> {
        let first = self.find(range.base).map_or(range.base, |(found, _)| found.base);
        let last = if range.bytes == 0 { first } else { range.end() };
        self.by_base
            .range(first..last.max(first))
            .map(|(base, (bytes, value))| (Range { base: *base, bytes: *bytes }, value))
    }

    /// The first place of `bytes` bytes within `whole` that no range touches, at a multiple of `alignment`, which is a
    /// power of two.
    pub fn gap(&self, whole: Range, bytes: u64, alignment: u64) -> Option<u64> {
        let align = |address: u64| address.checked_next_multiple_of(alignment);
        let mut start = align(whole.base)?;
        for (range, _) in self.overlapping(whole) {
            if range.base >= start && range.base - start >= bytes {
                break;
            }
            start = start.max(align(range.end())?);
        }
        (start.checked_add(bytes)? <= whole.end()).then_some(start)
    }

    /// All, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Range, &T)> {
        self.by_base.iter().map(|(base, (bytes, value))| (Range { base: *base, bytes: *bytes }, value))
    }

    /// All, in order, to change what is known of them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (Range, &mut T)> {
        self.by_base.iter_mut().map(|(base, (bytes, value))| (Range { base: *base, bytes: *bytes }, value))
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.by_base.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_base.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPAN: u64 = 64;

    /// A small generator (xorshift): tests print their seed.
    fn next(state: &mut u64) -> u64 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state
    }

    /// Whatever is done, every answer is that of an array with one cell per address.
    #[test]
    fn answers_are_those_of_an_array() {
        for seed in 1..200_u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut ranges = Ranges::new();
            let mut cells = [None::<u64>; SPAN as usize];
            for step in 0..300_u64 {
                let base = next(&mut state) % SPAN;
                let bytes = next(&mut state) % 9;
                let fits = base + bytes <= SPAN;
                let range = Range { base, bytes };
                let part = |cells: &[Option<u64>]| cells[base as usize..(base + bytes) as usize].to_vec();
                match next(&mut state) % 3 {
                    0 if fits => {
                        let free = bytes > 0 && part(&cells).iter().all(Option::is_none);
                        assert_eq!(ranges.insert(range, step).is_ok(), free, "seed {seed} step {step}");
                        if free {
                            cells[base as usize..(base + bytes) as usize].fill(Some(step));
                        }
                    }
                    1 => {
                        if let Some((gone, value)) = ranges.remove(base) {
                            let cells = &mut cells[gone.base as usize..gone.end() as usize];
                            assert!(cells.iter().all(|cell| *cell == Some(value)), "seed {seed} step {step}");
                            cells.fill(None);
                        }
                    }
                    _ => {
                        let found = ranges.find(base).map(|(_, value)| *value);
                        assert_eq!(found, cells[base as usize], "seed {seed} step {step}");
                        if fits {
                            let mut here: Vec<u64> = part(&cells).into_iter().flatten().collect();
                            here.dedup();
                            let told: Vec<u64> = ranges.overlapping(range).map(|(_, value)| *value).collect();
                            assert_eq!(told, here, "seed {seed} step {step}");
                        }
                        let alignment = 1 << (next(&mut state) % 3);
                        let whole = Range { base: 0, bytes: SPAN };
                        let free = |start: &u64| {
                            (*start..start + bytes.max(1)).all(|cell| cells.get(cell as usize) == Some(&None))
                        };
                        let expected = (0..SPAN).step_by(alignment as usize).find(free);
                        assert_eq!(
                            ranges.gap(whole, bytes.max(1), alignment),
                            expected,
                            "seed {seed} step {step}"
                        );
                    }
                }
                let bytes: u64 = ranges.iter().map(|(range, _)| range.bytes).sum();
                assert_eq!(bytes, cells.iter().flatten().count() as u64, "seed {seed} step {step}");
            }
        }
    }

    /// The end of the address space is an address like others, and nothing wraps around it.
    #[test]
    fn the_last_addresses() {
        let mut ranges = Ranges::new();
        assert!(ranges.insert(Range { base: u64::MAX - 1, bytes: 1 }, ()).is_ok());
        assert!(ranges.insert(Range { base: u64::MAX, bytes: 1 }, ()).is_err());
        assert!(ranges.insert(Range { base: u64::MAX - 4, bytes: 8 }, ()).is_err());
        assert_eq!(ranges.gap(Range { base: u64::MAX - 8, bytes: 8 }, 8, 8), None);
        assert_eq!(ranges.find(u64::MAX - 1).map(|(range, ())| range.bytes), Some(1));
    }
}
