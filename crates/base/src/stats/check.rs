//! What is counted of calls that ranks compare (`WINDLASS_CHECK`), by number, and the words for readers. Of a communicator they are
//! counted in rank 0's process.

use std::collections::BTreeMap;

use super::named::Named;

/// A count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Checked {
    /// Calls that were compared.
    Compared,
    /// Calls that were not: some rank was too far ahead, or has ended.
    NotCompared,
    /// Those in which ranks differed.
    Divergences,
    /// How often ranks were waited for so long that they were named.
    Absent,
}

/// How many there are.
pub const COUNTS: usize = Checked::Absent as usize + 1;

impl Checked {
    /// Their names in reports, in order.
    pub const NAMES: [&'static str; COUNTS] = ["compared", "not_compared", "divergences", "absent"];

    /// What is said of each only where it is.
    const RARE: [(&'static str, &'static str); 1] = [("absent", "ranks that did not come")];
}

/// One line for people, without its end; none if nothing happened.
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
