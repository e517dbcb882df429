//! Birth and end of communicators. NCCL makes and ends them; we note which there are.

use nccl_sys::{Entry, ncclComm_t, ncclInProgress, ncclResult_t, ncclSimInfo_t, ncclSuccess};

use crate::communicator;
use crate::forward::birth::{Birth, Handle};
use crate::forward::known::{self, End};
use crate::group;
use crate::process;
use crate::stats::count::{self, Identity};

/// Makes communicators as asked.
pub fn birth(entry: Entry, birth: &Birth) -> ncclResult_t {
    process::first_communicator();
    count::function(entry);
    let result = birth.run();
    if result == ncclSuccess || result == ncclInProgress {
        birth.newborns().for_each(|(handle, identity)| note(handle, identity));
    }
    result
}

/// Ends a communicator, or prepares its end.
pub fn end(entry: Entry, how: End, handle: ncclComm_t) -> ncclResult_t {
    count::function(entry);
    // Before NCCL frees it: its address may at once be another thread's new communicator.
    if how != End::Finalize {
        communicator::remove(handle);
    }
    known::end(how, handle)
}

/// Opens a group.
pub fn group_start() -> ncclResult_t {
    count::function(Entry::ncclGroupStart);
    let result = known::group_start();
    if result == ncclSuccess {
        group::opened();
    }
    result
}

/// Closes a group.
pub fn group_end() -> ncclResult_t {
    count::function(Entry::ncclGroupEnd);
    after_group(known::group_end())
}

/// Closes a group without running it.
pub fn group_simulate_end(estimate: *mut ncclSimInfo_t) -> ncclResult_t {
    count::function(Entry::ncclGroupSimulateEnd);
    after_group(known::group_simulate_end(estimate))
}

fn after_group(result: ncclResult_t) -> ncclResult_t {
    let awaited = group::closed();
    if result == ncclSuccess {
        awaited.into_iter().for_each(|handle| note(handle, UNKNOWN));
    }
    result
}

const UNKNOWN: Identity = Identity { rank: -1, ranks: 0, device: -1 };

/// A handle that is written now is entered; one that NCCL writes at the end of the group is awaited. What a
/// non-blocking split writes later still, is entered when it is first used.
fn note(handle: Handle, identity: Identity) {
    let written = known::read_handle(handle);
    if written.is_null() {
        if group::is_open() {
            group::await_handle(handle);
        }
        return;
    }
    let identity = if group::is_open() { identity } else { known::identity(written).unwrap_or(identity) };
    communicator::insert(written, identity);
}
