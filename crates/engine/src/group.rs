//! How deep this thread is in groups, and what its open group still has to tell when it ends.
//!
//! NCCL counts per thread, and its count is the one that matters: a group that NCCL refused to open does not shift
//! ours, nor does closing what is not open, and what fails or throws at its end is closed. PyTorch closes all its open groups to make a communicator and
//! opens as many again; nothing is carried across that.

use std::cell::{Cell, RefCell};

use nccl_sys::ncclComm_t;

use crate::fabric::Asked;
use crate::forward::birth::Handle;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static MEETINGS: RefCell<Vec<(ncclComm_t, Asked)>> = const { RefCell::new(Vec::new()) };
    static AWAITED: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

/// Whether this thread has an open group.
pub fn is_open() -> bool {
    DEPTH.get() > 0
}

/// NCCL opened a group.
pub fn opened() {
    DEPTH.set(DEPTH.get() + 1);
}

/// NCCL is asked to close a group. At the outermost one, gives the handles that were waited for.
pub fn closed() -> Vec<Handle> {
    DEPTH.set(DEPTH.get().saturating_sub(1));
    if is_open() {
        return Vec::new();
    }
    // A thread that is ending may still close a group; it has nothing left to tell then.
    AWAITED.try_with(RefCell::take).unwrap_or_default()
}

/// The meetings of communicators that were asked for in the group that [`closed`] has just closed.
pub fn meetings() -> Vec<(ncclComm_t, Asked)> {
    if is_open() { Vec::new() } else { MEETINGS.try_with(RefCell::take).unwrap_or_default() }
}

/// A communicator's meeting is waited for at the end of the open group.
pub fn await_meeting(handle: ncclComm_t, asked: Asked) {
    let _ = MEETINGS.try_with(|meetings| meetings.borrow_mut().push((handle, asked)));
}

/// A handle will be written here at the end of the open group.
pub fn await_handle(handle: Handle) {
    let _ = AWAITED.try_with(|awaited| awaited.borrow_mut().push(handle));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Handles come at the outermost end only, once, and closing too often does not count below zero.
    #[test]
    fn nested() {
        let handle = Handle(std::ptr::dangling_mut());
        opened();
        opened();
        await_handle(handle);
        assert!(is_open());
        assert_eq!(closed(), []);
        assert_eq!(closed(), [handle]);
        assert!(!is_open());
        assert_eq!(closed(), []);
        opened();
        assert!(is_open());
        assert_eq!(closed(), []);
    }

    /// Groups are the thread's own.
    #[test]
    fn per_thread() {
        opened();
        assert!(!std::thread::spawn(is_open).join().unwrap());
        closed();
    }
}
