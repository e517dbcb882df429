//! Ranges that do not overlap, as in [`crate::range`], with a short way to one whose first address is known: its place is
//! remembered by a hash of that, and looked at before anything else. A tree of 256 costs 45 ns where its branches cannot be
//! foretold; this costs under 10, and a call asks for each of its buffers.

use crate::range::{Range, Ranges};

/// The values stay where they are put; the ranges tell the place.
#[derive(Debug)]
pub(super) struct Places<T> {
    values: Vec<Option<(Range, T)>>,
    empty: Vec<usize>,
    by_address: Ranges<usize>,
    /// The place of the range whose first address has this hash and that was looked for last. Wrong ones do no harm.
    hints: Vec<usize>,
}

/// As many as there are registrations at most, so that few share one; a power of two.
const HINTS_MAX: usize = 1024;

impl<T> Places<T> {
    /// For about so many.
    pub fn new(count: usize) -> Self {
        let hints = count.saturating_mul(2).clamp(2, HINTS_MAX).next_power_of_two();
        Places {
            values: Vec::new(),
            empty: Vec::new(),
            by_address: Ranges::new(),
            hints: vec![usize::MAX; hints],
        }
    }

    #[inline]
    fn hint_of(&self, base: u64) -> usize {
        /// Allocations lie at multiples of large powers of two: the upper bits of the product differ all the same.
        const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
        (base.wrapping_mul(GOLDEN) >> 32) as usize & (self.hints.len() - 1)
    }

    /// What is at exactly this range.
    #[inline]
    pub fn find_exact(&mut self, range: Range) -> Option<&mut T> {
        let hint = self.hint_of(range.base);
        let mut place = *self.hints.get(hint)?;
        if !matches!(self.values.get(place), Some(Some((known, _))) if *known == range) {
            place = *self.by_address.find(range.base)?.1;
            *self.hints.get_mut(hint)? = place;
        }
        let (known, value) = self.values.get_mut(place)?.as_mut()?;
        (*known == range).then_some(value)
    }

    /// What begins at this address.
    pub fn at(&self, base: u64) -> Option<(Range, &T)> {
        let (range, place) = self.by_address.find(base)?;
        let (_, value) = self.values.get(*place)?.as_ref()?;
        (range.base == base).then_some((range, value))
    }

    /// The same, to change it.
    pub fn at_mut(&mut self, base: u64) -> Option<(Range, &mut T)> {
        let (range, place) = self.by_address.find(base)?;
        let (_, value) = self.values.get_mut(*place)?.as_mut()?;
        (range.base == base).then_some((range, value))
    }

    /// Enters one, or gives it back: see [`Ranges::insert`].
    pub fn insert(&mut self, range: Range, value: T) -> Result<(), T> {
        let place = self.empty.last().copied().unwrap_or(self.values.len());
        if self.by_address.insert(range, place).is_err() {
            return Err(value);
        }
        match self.values.get_mut(place) {
            Some(empty) => {
                *empty = Some((range, value));
                self.empty.pop();
            }
            None => self.values.push(Some((range, value))),
        }
        Ok(())
    }

    /// Takes out what begins at `base`.
    pub fn remove(&mut self, base: u64) -> Option<T> {
        let (_, place) = self.by_address.remove(base)?;
        self.empty.push(place);
        let (_, value) = self.values.get_mut(place)?.take()?;
        Some(value)
    }

    /// All that share an address with `range`, in order.
    pub fn overlapping(&self, range: Range) -> impl Iterator<Item = (Range, &T)> {
        self.by_address.overlapping(range).filter_map(|(range, place)| Some((range, self.value(*place)?)))
    }

    /// All, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Range, &T)> {
        self.by_address.iter().filter_map(|(range, place)| Some((range, self.value(*place)?)))
    }

    fn value(&self, place: usize) -> Option<&T> {
        let (_, value) = self.values.get(place)?.as_ref()?;
        Some(value)
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.by_address.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every answer is that of a list, whatever the hints say, and places are used again.
        #[test]
        fn answers_are_those_of_a_list(steps in proptest::collection::vec((0..3, 0..24_u64, 1..5_u64), 0..200)) {
            let mut places = Places::new(2);
            let mut list: Vec<(Range, usize)> = Vec::new();
            let mut most = 0;
            for (step, (what, base, bytes)) in steps.into_iter().enumerate() {
                let range = Range { base, bytes };
                let begins = list.iter().position(|(known, _)| known.base == base);
                match what {
                    0 => {
                        let free = !list.iter().any(|(known, _)| known.overlaps(range));
                        prop_assert_eq!(places.insert(range, step).is_ok(), free);
                        if free {
                            list.push((range, step));
                        }
                    }
                    1 => {
                        let gone = begins.map(|at| list.swap_remove(at).1);
                        prop_assert_eq!(places.remove(base), gone);
                    }
                    _ => {
                        let exact = list.iter().find(|(known, _)| *known == range).map(|(_, value)| *value);
                        prop_assert_eq!(places.find_exact(range).copied(), exact);
                        let at = begins.map(|at| list[at]);
                        prop_assert_eq!(places.at(base).map(|(range, value)| (range, *value)), at);
                        prop_assert_eq!(places.at_mut(base).map(|(range, value)| (range, *value)), at);
                    }
                }
                list.sort_unstable_by_key(|(range, _)| range.base);
                most = most.max(list.len());
                let told: Vec<_> = places.iter().map(|(range, value)| (range, *value)).collect();
                prop_assert_eq!(&told, &list);
                let told: Vec<_> = places.overlapping(range).map(|(range, value)| (range, *value)).collect();
                list.iter().filter(|(known, _)| known.overlaps(range)).zip(&told).for_each(|(a, b)| assert_eq!(a, b));
                prop_assert_eq!(told.len(), list.iter().filter(|(known, _)| known.overlaps(range)).count());
                prop_assert!(places.len() == list.len() && places.values.len() <= most);
            }
        }
    }
}
