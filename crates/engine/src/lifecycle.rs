//! Birth and end of communicators. NCCL makes and ends them; we note which there are.

use nccl_sys::{Entry, ncclComm_t, ncclInProgress, ncclResult_t, ncclSimInfo_t, ncclSuccess};

use crate::communicator;
use crate::forward::birth::{Birth, Handle};
use crate::forward::known::{self, End};
use crate::group;
use crate::guard;
use crate::process;
use crate::stats::count::{self, Identity};

/// Makes communicators as asked.
pub fn birth(entry: Entry, birth: &Birth) -> ncclResult_t {
    guard::around(
        || {
            process::first_communicator();
            count::function(entry);
        },
        |()| birth.run(),
        |(), result| {
            if result == ncclSuccess || result == ncclInProgress {
                birth.newborns().for_each(|(handle, identity)| note(handle, identity));
            }
        },
    )
}

/// Ends a communicator, or prepares its end.
pub fn end(entry: Entry, how: End, handle: ncclComm_t) -> ncclResult_t {
    guard::around(
        || {
            count::function(entry);
            // Before NCCL frees it: its address may at once be another thread's new communicator.
            if how != End::Finalize {
                communicator::remove(handle);
            }
        },
        |()| known::end(how, handle),
        |(), _| (),
    )
}

/// Opens a group.
pub fn group_start() -> ncclResult_t {
    guard::around(
        || count::function(Entry::ncclGroupStart),
        |()| known::group_start(),
        |(), result| {
            if result == ncclSuccess {
                group::opened();
            }
        },
    )
}

/// Closes a group.
pub fn group_end() -> ncclResult_t {
    guard::around(|| closing(Entry::ncclGroupEnd), |_| known::group_end(), after_group)
}

/// Closes a group without running it.
pub fn group_simulate_end(estimate: *mut ncclSimInfo_t) -> ncclResult_t {
    guard::around(
        || closing(Entry::ncclGroupSimulateEnd),
        |_| known::group_simulate_end(estimate),
        after_group,
    )
}

/// The group is closed before NCCL runs it, as NCCL's own count is: it may throw.
fn closing(entry: Entry) -> Vec<Handle> {
    count::function(entry);
    group::closed()
}

fn after_group(awaited: Vec<Handle>, result: ncclResult_t) {
    if result == ncclSuccess {
        awaited.into_iter().for_each(|handle| note(handle, UNKNOWN));
    }
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
