//! Makes the handles that Windlass gives to the application. The real library mostly checks the first word of a handle, and refuses one
//! of these if it gets one. So their memory stays readable for ever, and is reused. NCCL's destroy, abort, finalize, revoke and some
//! others do not check: they must never get an ended handle ([`is_ours`]).

use std::collections::{BTreeSet, VecDeque};

use windlass_base::lock::Mutex;

use nccl_sys::forked::WORD;

/// How many ended handles are not reused yet: a program may use one a little too late.
const REST: usize = 64;

/// The memory behind a handle. NCCL reads more than the first word only if it accepts that.
#[derive(Debug)]
#[repr(C, align(64))]
struct Block {
    word: u64,
    rest: [u64; 63],
}

/// Held for a push or a pop.
static ENDED: Mutex<VecDeque<&'static Block>> = Mutex::new(VecDeque::new());

/// The addresses of all handles ever made. Held for a lookup.
static MINTED: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

/// Whether an address is a handle of Windlass, in use or ended.
pub(super) fn is_ours(address: usize) -> bool {
    MINTED.lock().contains(&address)
}

/// A handle in use.
#[derive(Debug)]
pub(super) struct Minted(&'static Block);

impl Minted {
    pub(super) fn new() -> Minted {
        let mut ended = ENDED.lock();
        let again = if ended.len() > REST { ended.pop_front() } else { None };
        drop(ended);
        if let Some(block) = again {
            return Minted(block);
        }
        let block: &'static Block = Box::leak(Box::new(Block { word: WORD, rest: [0; 63] }));
        let minted = Minted(block);
        MINTED.lock().insert(minted.address());
        minted
    }

    pub(super) fn address(&self) -> usize {
        std::ptr::from_ref(self.0) as usize
    }
}

impl Drop for Minted {
    fn drop(&mut self) {
        ENDED.lock().push_back(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No two handles in use are equal; ended ones are reused, but not soon.
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
