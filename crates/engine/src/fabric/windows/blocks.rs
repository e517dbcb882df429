//! How many windows there are over each block of the pool, of all communicators of the process.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::pool;

/// By serial number. Held for some stores; after the lock of a book, before the pool's.
static COUNTS: Mutex<BTreeMap<u64, u32>> = Mutex::new(BTreeMap::new());

/// A book has changed: a number a window, before and after.
pub(super) fn changed(before: &[u64], after: &[u64]) {
    if before == after {
        return;
    }
    let mut counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    for block in after {
        *counts.entry(*block).or_default() += 1;
    }
    for block in before {
        let count = counts.entry(*block).or_default();
        *count = count.saturating_sub(1);
    }
    for block in before.iter().chain(after) {
        pool::has_windows(*block, counts.get(block).copied().unwrap_or(0));
    }
    counts.retain(|_, count| *count > 0);
}

/// Whether there are none over this one.
pub(super) fn is_free(block: u64) -> bool {
    !COUNTS.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&block)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Windows of two communicators count together.
    #[test]
    fn counted_together() {
        let (one, other) = (u64::MAX, u64::MAX - 1);
        changed(&[], &[one]);
        changed(&[], &[one, other]);
        changed(&[one], &[]);
        assert!(!is_free(one) && !is_free(other));
        changed(&[one, other], &[other]);
        assert!(is_free(one) && !is_free(other));
        changed(&[other], &[]);
        assert!(is_free(other));
    }
}
