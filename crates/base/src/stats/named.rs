//! Counts of one kind as readers get them: by name, without those that are 0.

use std::collections::BTreeMap;

/// Counts for one line of a report.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named<'a>(&'a BTreeMap<String, u64>);

impl<'a> Named<'a> {
    /// None if nothing was counted.
    pub(super) fn of(counts: &'a BTreeMap<String, u64>) -> Option<Named<'a>> {
        (!counts.is_empty()).then_some(Named(counts))
    }

    /// A count; 0 if the name is missing.
    pub(super) fn count(self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// For each name that was counted, its words with the count. `list` has names and words.
    pub(super) fn there(self, list: &[(&str, &str)]) -> Vec<String> {
        let there = list.iter().filter(|(name, _)| self.count(name) > 0);
        there.map(|(name, words)| format!("{words} {}", self.count(name))).collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Counts as a reader gets them.
    pub(crate) fn counts(list: &[(&str, u64)]) -> BTreeMap<String, u64> {
        list.iter().map(|(name, count)| (name.to_string(), *count)).collect()
    }

    #[test]
    fn names() {
        let some = counts(&[("hits", 2), ("misses", 1)]);
        let named = Named::of(&some).unwrap();
        assert_eq!((named.count("hits"), named.count("none")), (2, 0));
        assert_eq!(
            named.there(&[("misses", "missed"), ("none", "none"), ("hits", "hit")]),
            ["missed 1", "hit 2"]
        );
        assert!(Named::of(&counts(&[])).is_none());
    }
}
