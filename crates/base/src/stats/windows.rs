//! What is counted of windows that are kept, by number, and the words for readers.

use std::collections::BTreeMap;

use super::named::Named;

/// A count of registrations of communicators whose ranks keep windows, or of windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Kept {
    /// Registrations that a kept window answered.
    Hits,
    /// Those for which NCCL made one.
    Made,
    /// Those that were refused.
    Refused,
    /// How often a window was kept when it was deregistered.
    Cached,
    /// Kept windows that were dropped since a call came over them.
    Dropped,
}

/// How many there are.
pub const COUNTS: usize = Kept::Dropped as usize + 1;

impl Kept {
    /// Their names in reports, in order.
    pub const NAMES: [&'static str; COUNTS] = ["hits", "made", "refused", "cached", "dropped"];

    /// What is said of each only where it is.
    const RARE: [(&'static str, &'static str); 2] =
        [("refused", "refused"), ("dropped", "dropped for calls over them")];
}

/// One line for people, without its end; none if nothing happened.
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
