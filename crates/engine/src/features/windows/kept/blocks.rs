//! Counts the windows over each block of the pool, of all communicators of the process.

use std::collections::BTreeMap;

use crate::features::memory::pool::{self, Over};
use windlass_base::lock::Mutex;

/// By the block's serial. Locked for some stores, after the lock of a window ledger and before the pool's.
static COUNTS: Mutex<BTreeMap<u64, Over>> = Mutex::new(BTreeMap::new());

/// Updates the counts after a change of a ledger. Each entry is a window's block, and whether the program has still to end the window.
pub(crate) fn changed(before: &[(u64, bool)], after: &[(u64, bool)]) {
    if before == after {
        return;
    }
    let mut counts = COUNTS.lock();
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

/// Whether the block has no window that the program has ended.
pub(crate) fn is_free(block: u64) -> bool {
    COUNTS.lock().get(&block).is_none_or(|over| over.cached() == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Windows of two communicators count together. Windows that the program has not ended do not keep a block.
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
