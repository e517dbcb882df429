//! The counts of kept windows, by number, and their words for readers.

use std::collections::BTreeMap;

use super::named::Named;

/// A count of windows, or of registrations in communicators whose ranks keep windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Kept {
    /// Registrations that a kept window served.
    Hits,
    /// Registrations for which NCCL made a window.
    Made,
    /// Registrations that were refused.
    Refused,
    /// How often a window was kept when it was deregistered.
    Cached,
    /// Kept windows that were dropped because a call used their memory.
    Dropped,
}

/// The number of counts.
pub const COUNTS: usize = Kept::Dropped as usize + 1;

impl Kept {
    /// The names of the counts in reports, in order.
    pub const NAMES: [&'static str; COUNTS] = ["hits", "made", "refused", "cached", "dropped"];

    /// Counts that the line has only where they are not 0, with their words.
    const RARE: [(&'static str, &'static str); 2] =
        [("refused", "refused"), ("dropped", "dropped for calls over them")];
}

/// One line for people, without a line end; none if nothing was counted.
pub fn text(counts: &BTreeMap<String, u64>) -> Option<String> {
    let named = Named::of(counts)?;
    let [hits, made, cached] = ["hits", "made", "cached"].map(|name| named.count(name));
    let usual = format!("windows: hits {hits}, made {made}, cached {cached}");
    Some([vec![usual], named.there(&Kept::RARE)].concat().join(", "))
}

#[cfg(test)]
mod tests {
    use super::super::named::tests::counts;
    use super::*;

    #[test]
    fn one_line() {
        assert_eq!(text(&counts(&[])), None);
        let line = text(&counts(&[("hits", 7), ("made", 2), ("cached", 9), ("dropped", 1)])).unwrap();
        assert_eq!(line, "windows: hits 7, made 2, cached 9, dropped for calls over them 1");
        assert!(Kept::RARE.iter().all(|(name, _)| Kept::NAMES.contains(name)));
    }
}
