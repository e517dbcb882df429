//! How deep this thread is in groups, and what its open group still has to tell when it ends.
//!
//! NCCL counts per thread, and its count is the one that matters: a group that NCCL refused to open does not shift
//! ours, nor does closing what is not open, and what fails or throws at its end is closed. PyTorch closes all its open groups to make a communicator and
//! opens as many again; nothing is carried across that.

use std::cell::{Cell, RefCell};

use nccl_sys::{ncclComm_t, ncclResult_t};

use crate::fabric::Asked;
use crate::forward::birth::Handle;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static AWAITED: RefCell<Vec<Awaited>> = const { RefCell::new(Vec::new()) };
}

/// What waits for the end of a group.
#[derive(Debug)]
pub enum Awaited {
    /// A handle that NCCL writes then.
    Handle(Handle),
    /// The meeting of a communicator.
    Meeting(ncclComm_t, Box<Asked>),
    /// A birth that failed before NCCL came to it: the answer of the group.
    Failed(ncclResult_t),
}

/// Whether this thread has an open group.
pub fn is_open() -> bool {
    DEPTH.get() > 0
}

/// NCCL opened a group.
pub fn opened() {
    DEPTH.set(DEPTH.get() + 1);
}

/// NCCL is asked to close a group. At the outermost one, gives what waited for it.
pub fn closed() -> Vec<Awaited> {
    DEPTH.set(DEPTH.get().saturating_sub(1));
    if is_open() {
        return Vec::new();
    }
    // A thread that is ending may still close a group; it has nothing left to tell then.
    AWAITED.try_with(RefCell::take).unwrap_or_default()
}

/// This waits for the end of the open group.
pub fn wait_for(what: Awaited) {
    let _ = AWAITED.try_with(|awaited| awaited.borrow_mut().push(what));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Handles come at the outermost end only, once, and closing too often does not count below zero.
    #[test]
    fn nested() {
        let none = |awaited: Vec<Awaited>| awaited.is_empty();
        opened();
        opened();
        wait_for(Awaited::Handle(Handle(std::ptr::dangling_mut())));
        assert!(is_open());
        assert!(none(closed()));
        assert!(matches!(closed()[..], [Awaited::Handle(_)]));
        assert!(!is_open());
        assert!(none(closed()));
        opened();
        assert!(is_open());
        assert!(none(closed()));
    }

    /// Groups are the thread's own.
    #[test]
    fn per_thread() {
        opened();
        assert!(!std::thread::spawn(is_open).join().unwrap());
        closed();
    }
}
