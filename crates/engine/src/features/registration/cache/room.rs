//! Decides which entries leave to make room. Pure.

use crate::features::registration::cache::{Limits, Use};

/// An entry that could leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Resident {
    /// The first field, so that entries sort by it.
    pub last_use: Use,
    pub id: u64,
    pub bytes: u64,
}

/// Whether there is room for one more entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// There is.
    Free,
    /// There is once these entries, by id, have left. They can leave when the call `last_use` is over.
    After { leave: Vec<u64>, last_use: Use },
    /// Not even if all entries left.
    Never,
}

/// Plans room for one more entry of `bytes` bytes, beside `entries` of `entries_bytes` bytes, stuck ones included. The entries used longest
/// ago leave, as few as suffice.
pub(crate) fn plan(
    limits: Limits,
    mut entries: usize,
    mut entries_bytes: u64,
    residents: impl Iterator<Item = Resident>,
    bytes: u64,
) -> Room {
    let fits = |entries: usize, entries_bytes: u64| {
        let sum = entries_bytes.checked_add(bytes);
        entries < limits.entries_max && sum.is_some_and(|sum| sum <= limits.bytes_max)
    };
    if fits(entries, entries_bytes) {
        return Room::Free;
    }
    let mut oldest_first: Vec<Resident> = residents.collect();
    oldest_first.sort_unstable();
    let mut leave = Vec::new();
    for Resident { last_use, id, bytes } in oldest_first {
        entries -= 1;
        entries_bytes -= bytes;
        leave.push(id);
        if fits(entries, entries_bytes) {
            return Room::After { leave, last_use };
        }
    }
    Room::Never
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Room by count and by bytes, with stuck entries, and for an entry that never fits.
    #[test]
    fn who_leaves() {
        let limits = Limits { entries_max: 4, bytes_max: 20, refused_max: 0 };
        let resident = |(id, last_use, bytes)| Resident { last_use: Use(last_use), id, bytes };
        let three = [(1, 5, 6), (2, 3, 4), (3, 5, 2)].map(resident);
        let after = |leave: &[u64], last_use| Room::After { leave: leave.to_vec(), last_use: Use(last_use) };
        for (entries, entries_bytes, bytes, room) in [
            (3, 12, 8, Room::Free),
            (3, 12, 9, after(&[2], 3)),
            (3, 12, 13, after(&[2, 1], 5)),
            (3, 12, 20, after(&[2, 1, 3], 5)),
            (3, 12, 21, Room::Never),
            (3, 12, u64::MAX, Room::Never),
            // One more entry, of one byte, is stuck.
            (4, 13, 1, after(&[2], 3)),
            (4, 13, 19, after(&[2, 1, 3], 5)),
            (4, 13, 20, Room::Never),
        ] {
            let found = plan(limits, entries, entries_bytes, three.into_iter(), bytes);
            assert_eq!(found, room, "{bytes} to {entries} of {entries_bytes}");
        }
        let none = Limits { entries_max: 0, ..limits };
        assert_eq!(plan(none, 0, 0, [].into_iter(), 1), Room::Never);
    }
}
