//! Handles of ours. The real library mostly looks at the first word of what it is given: it finds that this is none of its own,
//! and refuses one that reaches it. So the words stay readable for ever, and are used again. Its destroy, abort, finalize,
//! revoke and some others do not look: an ended handle is kept from them ([`is_ours`]).

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Mutex, PoisonError};

use nccl_sys::forked::WORD;

/// Handles that have ended and are not used again yet: a program may use one a little too late.
const REST: usize = 64;

/// NCCL reads more of it only after it has believed the first word.
#[derive(Debug)]
#[repr(C, align(64))]
struct Block {
    word: u64,
    rest: [u64; 63],
}

/// Held for a push or a pop.
static ENDED: Mutex<VecDeque<&'static Block>> = Mutex::new(VecDeque::new());

/// All that ever were. Held for a look.
static MINTED: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

/// Whether an address is a handle of ours, in use or ended.
pub(super) fn is_ours(address: usize) -> bool {
    MINTED.lock().unwrap_or_else(PoisonError::into_inner).contains(&address)
}

/// One that is in use.
#[derive(Debug)]
pub(super) struct Minted(&'static Block);

impl Minted {
    pub(super) fn new() -> Minted {
        let mut ended = ENDED.lock().unwrap_or_else(PoisonError::into_inner);
        let again = if ended.len() > REST { ended.pop_front() } else { None };
        drop(ended);
        if let Some(block) = again {
            return Minted(block);
        }
        let block: &'static Block = Box::leak(Box::new(Block { word: WORD, rest: [0; 63] }));
        let minted = Minted(block);
        MINTED.lock().unwrap_or_else(PoisonError::into_inner).insert(minted.address());
        minted
    }

    pub(super) fn address(&self) -> usize {
        std::ptr::from_ref(self.0) as usize
    }
}

impl Drop for Minted {
    fn drop(&mut self) {
        ENDED.lock().unwrap_or_else(PoisonError::into_inner).push_back(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No two that live are one; those that ended are used again, but not soon.
    #[test]
    fn used_again() {
        let first = Minted::new();
        let address = first.address();
        assert_ne!(Minted::new().address(), address);
        assert!(is_ours(address) && !is_ours(address + 8));
        drop(first);
        let some: Vec<usize> = (0..REST / 2).map(|_| Minted::new().address()).collect();
        assert!(!some.contains(&address));
        let distinct: std::collections::HashSet<usize> =
            (0..10_000).map(|_| Minted::new().address()).collect();
        assert!(distinct.contains(&address) && distinct.len() <= REST + 2, "{}", distinct.len());
    }
}
