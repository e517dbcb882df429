//! A map from ranges of addresses, which do not overlap, to values.

use std::collections::BTreeMap;

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

/// Ranges that do not overlap, sorted by address. Every lookup is a walk down one tree.
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
    /// An empty map.
    pub fn new() -> Self {
        Self::default()
    }

    /// Enters a range. Gives the value back if the range is empty, wraps, or shares addresses with one that is
    /// already here.
    pub fn insert(&mut self, range: Range, value: T) -> Result<(), T> {
        let wraps = range.base.checked_add(range.bytes).is_none();
        if range.bytes == 0 || wraps || self.overlapping(range).next().is_some() {
            return Err(value);
        }
        self.by_base.insert(range.base, (range.bytes, value));
        Ok(())
    }

    /// Removes the range that begins at `base`.
    pub fn remove(&mut self, base: u64) -> Option<(Range, T)> {
        let (bytes, value) = self.by_base.remove(&base)?;
        Some((Range { base, bytes }, value))
    }

    /// The range that contains an address.
    pub fn find(&self, address: u64) -> Option<(Range, &T)> {
        let (base, (bytes, value)) = self.by_base.range(..=address).next_back()?;
        let range = Range { base: *base, bytes: *bytes };
        (address < range.end()).then_some((range, value))
    }

    /// All ranges that share an address with `range`, in order.
    pub fn overlapping(&self, range: Range) -> impl Iterator<Item = (Range, &T)> {
        let first = self.find(range.base).map_or(range.base, |(found, _)| found.base);
        let last = if range.bytes == 0 { first } else { range.end() };
        self.by_base
            .range(first..last.max(first))
            .map(|(base, (bytes, value))| (Range { base: *base, bytes: *bytes }, value))
    }

    /// The first address in `whole` from which `bytes` bytes are free of ranges. It is a multiple of `alignment`,
    /// which is a power of two.
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

    /// All ranges, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Range, &T)> {
        self.by_base.iter().map(|(base, (bytes, value))| (Range { base: *base, bytes: *bytes }, value))
    }

    /// The number of ranges.
    pub fn len(&self) -> usize {
        self.by_base.len()
    }

    /// Whether there are no ranges.
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

    /// After any operations, every answer is that of an array with one cell for each address.
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

    /// The last addresses of the address space are usable, and nothing wraps around them.
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
