//! How many windows there are over each block of the pool, of all communicators of the process.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::features::memory::pool::{self, Over};

/// By serial number. Held for some stores; after the lock of a ledger, before the pool's.
static COUNTS: Mutex<BTreeMap<u64, Over>> = Mutex::new(BTreeMap::new());

/// A ledger has changed: the block of each window, and whether the application has to end that yet, before and after.
pub(crate) fn changed(before: &[(u64, bool)], after: &[(u64, bool)]) {
    if before == after {
        return;
    }
    let mut counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    for (block, is_owed) in after {
        let over = counts.entry(*block).or_default();
        over.windows += 1;
        over.owed += u32::from(*is_owed);
    }
    for (block, is_owed) in before {
        let over = counts.entry(*block).or_default();
        over.windows = over.windows.saturating_sub(1);
        over.owed = over.owed.saturating_sub(u32::from(*is_owed));
    }
    for (block, _) in before.iter().chain(after) {
        pool::has_windows(*block, counts.get(block).copied().unwrap_or_default());
    }
    counts.retain(|_, over| over.windows > 0);
}

/// Whether there are none over this one that the application has ended.
pub(crate) fn is_free(block: u64) -> bool {
    COUNTS.lock().unwrap_or_else(PoisonError::into_inner).get(&block).is_none_or(|over| over.cached() == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Windows of two communicators count together; those that the application has hold nothing up.
    #[test]
    fn counted_together() {
        let (one, other) = (u64::MAX, u64::MAX - 1);
        changed(&[], &[(one, false)]);
        changed(&[], &[(one, false), (other, false)]);
        changed(&[(one, false)], &[]);
        assert!(!is_free(one) && !is_free(other));
        changed(&[(one, false), (other, false)], &[(one, true), (other, false)]);
        assert!(is_free(one) && !is_free(other));
        changed(&[(one, true), (other, false)], &[(one, false)]);
        assert!(!is_free(one) && is_free(other));
        changed(&[(one, false)], &[]);
        assert!(is_free(one));
    }
}
