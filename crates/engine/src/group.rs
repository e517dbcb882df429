//! How deep this thread is in groups, and what its open group still has to tell when it ends.
//!
//! NCCL counts per thread, and its count is the one that matters: a group that NCCL refused to open does not shift
//! ours, nor does closing what is not open, and what fails or throws at its end is closed. PyTorch closes all its open
//! groups to make a communicator and opens as many again; nothing is carried across that.

use std::cell::{Cell, RefCell};

use nccl_sys::{ncclComm_t, ncclResult_t};

use crate::fabric::{Asked, Configured, Derivation};
use crate::forward::birth::Handle;

/// This thread's open group. Few groups await anything: the list, which has a destructor to look after, is let be then.
#[derive(Clone, Copy, Default)]
struct Group {
    depth: u32,
    awaited: u32,
}

thread_local! {
    static GROUP: Cell<Group> = const { Cell::new(Group { depth: 0, awaited: 0 }) };
    static AWAITED: RefCell<Vec<Awaited>> = const { RefCell::new(Vec::new()) };
}

/// What waits for the end of a group.
#[derive(Debug)]
pub enum Awaited {
    /// A handle that NCCL writes then.
    Handle(Handle),
    /// The meeting of a communicator.
    Meeting(ncclComm_t, Box<Asked>),
    /// A communicator made from another, whose handle NCCL writes then.
    Derived(Handle, Configured, Box<Derivation>),
    /// A birth that failed before NCCL came to it: the answer of the group.
    Failed(ncclResult_t),
}

/// Whether this thread has an open group.
pub fn is_open() -> bool {
    GROUP.get().depth > 0
}

/// NCCL opened a group.
pub fn opened() {
    GROUP.with(|group| group.set(Group { depth: group.get().depth + 1, ..group.get() }));
}

/// NCCL is asked to close a group. At the outermost one, gives what waited for it.
pub fn closed() -> Vec<Awaited> {
    let awaited = GROUP.with(|group| {
        let Group { depth, awaited } = group.get();
        let left = if depth > 1 { Group { depth: depth - 1, awaited } } else { Group::default() };
        group.set(left);
        if depth > 1 { 0 } else { awaited }
    });
    if awaited == 0 {
        return Vec::new();
    }
    // A thread that is ending may still close a group; it has nothing left to tell then.
    AWAITED.try_with(RefCell::take).unwrap_or_default()
}

/// This waits for the end of the open group.
pub fn wait_for(what: Awaited) {
    if AWAITED.try_with(|awaited| awaited.borrow_mut().push(what)).is_ok() {
        GROUP.with(|group| group.set(Group { awaited: group.get().awaited + 1, ..group.get() }));
    }
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
