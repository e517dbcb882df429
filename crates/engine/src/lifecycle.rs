//! Birth and end of communicators. NCCL makes and ends them; we note which there are, and with `WINDLASS_FABRIC=on` their
//! ranks meet first.

mod derived;
mod meeting;

use std::cell::Cell;

use nccl_sys::{Entry, ncclComm_t, ncclInProgress, ncclResult_t, ncclSimInfo_t, ncclSuccess, ncclUniqueId};

use crate::communicator::{self, Communicator};
use crate::fabric::{self, Fate, Kept};
use crate::forward::birth::{self, Birth, Handle};
use crate::forward::known::{self, End};
use crate::group::{self, Awaited};
use crate::guard;
use crate::process;
use crate::stats::count::{self, Identity};

/// Makes an id. With fabrics, its ranks meet at this process.
pub fn unique_id(place: *mut ncclUniqueId) -> ncclResult_t {
    guard::around(
        || count::function(Entry::ncclGetUniqueId),
        |()| birth::unique_id(place),
        |(), result| {
            if result == ncclSuccess && fabric::is_on() {
                birth::change_id(place, |id| fabric::host(&id));
            }
        },
    )
}

/// Makes communicators as asked.
pub fn birth(entry: Entry, birth: &Birth) -> ncclResult_t {
    if fabric::is_on() {
        return meeting::birth(entry, birth);
    }
    guard::around(
        || {
            process::first_communicator();
            count::function(entry);
        },
        |()| birth.run(),
        |(), result| {
            if result == ncclSuccess || result == ncclInProgress {
                birth.newborns().for_each(|(handle, identity)| {
                    note(handle, identity);
                });
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
            let kept = if how == End::Finalize { None } else { communicator::remove(handle) };
            match &kept {
                Some(Kept::Waiting(canceller)) => canceller.abort(),
                Some(Kept::Fabric(fabric)) if how == End::Abort => fabric.end_derived(),
                _ => {}
            }
            kept
        },
        |_| known::end(how, handle),
        // Nothing of this rank's runs any more.
        |kept, _| {
            if kept.is_some() {
                drop(kept);
                fabric::settle();
            }
        },
    )
}

/// A communicator that was not seen when it was made.
pub fn unasked(communicator: &Communicator) {
    if fabric::is_on() {
        fabric::tell(communicator.counters(), &Fate::Plain(fabric::derived()));
    }
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
    let met = Cell::new(ncclSuccess);
    let result = guard::around(
        || closing(Entry::ncclGroupEnd),
        |awaited| close(awaited, known::group_end),
        |awaited, result| after_group(awaited, result, &met),
    );
    if result == ncclSuccess { met.get() } else { result }
}

/// Closes a group without running it.
pub fn group_simulate_end(estimate: *mut ncclSimInfo_t) -> ncclResult_t {
    let met = Cell::new(ncclSuccess);
    let result = guard::around(
        || closing(Entry::ncclGroupSimulateEnd),
        |awaited| close(awaited, || known::group_simulate_end(estimate)),
        |awaited, result| after_group(awaited, result, &met),
    );
    if result == ncclSuccess { met.get() } else { result }
}

/// The group is closed before NCCL runs it, as NCCL's own count is: it may throw.
fn closing(entry: Entry) -> Vec<Awaited> {
    count::function(entry);
    let awaited = group::closed();
    if awaited.is_empty() { awaited } else { meeting::join(awaited) }
}

/// Lets NCCL close the group. If a birth in it failed, nothing of the group runs: its peers do not come to NCCL.
fn close(awaited: &[Awaited], end: impl FnOnce() -> ncclResult_t) -> ncclResult_t {
    if let Some(Awaited::Failed(code)) = awaited.first() {
        birth::spoil_group();
        end();
        return *code;
    }
    end()
}

#[inline]
fn after_group(awaited: Vec<Awaited>, result: ncclResult_t, met: &Cell<ncclResult_t>) {
    if !awaited.is_empty() {
        met.set(tell(awaited, result));
    }
}

#[cold]
#[inline(never)]
fn tell(awaited: Vec<Awaited>, result: ncclResult_t) -> ncclResult_t {
    let (awaited, met) = derived::after_group(awaited, result);
    if result == ncclSuccess {
        for waited in awaited {
            if let Awaited::Handle(handle) = waited
                && let Some((_, communicator)) = note(handle, UNKNOWN)
            {
                unasked(communicator);
            }
        }
    }
    met
}

const UNKNOWN: Identity = Identity { rank: -1, ranks: 0, device: -1 };

/// A handle that is written now is entered; one that NCCL writes at the end of the group is awaited. What a
/// non-blocking split writes later still, is entered when it is first used.
fn note(handle: Handle, identity: Identity) -> Option<(ncclComm_t, &'static Communicator)> {
    let written = known::read_handle(handle);
    if written.is_null() {
        if group::is_open() {
            group::wait_for(Awaited::Handle(handle));
        }
        return None;
    }
    let identity = if group::is_open() { identity } else { known::identity(written).unwrap_or(identity) };
    Some((written, communicator::insert(written, identity)))
}
