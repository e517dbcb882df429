//! The counts of `WINDLASS_CHECK`: calls that ranks compare, by number, and their words for readers. A communicator's are counted
//! in rank 0's process.

use std::collections::BTreeMap;

use super::named::Named;

/// A count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Checked {
    /// Calls that were compared.
    Compared,
    /// Calls that were not compared: some rank was too far ahead, or has ended.
    NotCompared,
    /// Compared calls in which ranks differed.
    Divergences,
    /// How often a warning named ranks that did not come for too long.
    Absent,
}

/// The number of counts.
pub const COUNTS: usize = Checked::Absent as usize + 1;

impl Checked {
    /// The names of the counts in reports, in order.
    pub const NAMES: [&'static str; COUNTS] = ["compared", "not_compared", "divergences", "absent"];

    /// Counts that the line has only where they are not 0, with their words.
    const RARE: [(&'static str, &'static str); 1] = [("absent", "ranks that did not come")];
}

/// One line for people, without a line end; none if nothing was counted.
pub fn text(counts: &BTreeMap<String, u64>) -> Option<String> {
    let named = Named::of(counts)?;
    let [compared, rest, differ] = ["compared", "not_compared", "divergences"].map(|name| named.count(name));
    let usual = format!("check: compared {compared} calls, not compared {rest}, divergences {differ}");
    Some([vec![usual], named.there(&Checked::RARE)].concat().join(", "))
}

#[cfg(test)]
mod tests {
    use super::super::named::tests::counts;
    use super::*;

    #[test]
    fn one_line() {
        assert_eq!(text(&counts(&[])), None);
        let line = text(&counts(&[("compared", 7), ("divergences", 2)])).unwrap();
        assert_eq!(line, "check: compared 7 calls, not compared 0, divergences 2");
        let line = text(&counts(&[("absent", 1)])).unwrap();
        assert_eq!(line, "check: compared 0 calls, not compared 0, divergences 0, ranks that did not come 1");
        assert!(Checked::RARE.iter().all(|(name, _)| Checked::NAMES.contains(name)));
    }
}
