//! Inits and ends of communicators. NCCL makes and ends them, and Windlass keeps a record of each. Unless `WINDLASS_PEER_GROUPS=off`,
//! their ranks meet first.

use std::ffi::c_int;

use nccl_sys::missing::is_missing;
use nccl_sys::{
    Entry, ncclComm_t, ncclInProgress, ncclInternalError, ncclInvalidArgument, ncclResult_t, ncclSuccess,
    ncclUniqueId,
};

use crate::communicator::{self, Communicator};
use crate::features::memory::pool;
use crate::features::recycling;
use crate::features::registration::registering;
use crate::forward::init::{self, InitCall, InitFunction};
use crate::forward::known::{self, End};
use crate::forward::{Carried, device};
use crate::{group, lazy, peers};
use windlass_base::error::{panicked, refuse};
use windlass_base::gate::Passed;
use windlass_base::stats::count;
use windlass_base::{guard, process, thread};

use super::handles::{check_awake, ended, enter_by, is_taken, note, share};
use super::{queries, session};

/// Makes an id. With peer groups, this process hosts the session of its ranks.
pub fn unique_id(place: *mut ncclUniqueId) -> ncclResult_t {
    guard::around(
        || {
            process::let_forked_children_restart();
            count::function(Entry::ncclGetUniqueId);
            process::know_version();
            // NCCL gives its own error for a null place.
            if place.is_null() { None } else { peers::spare_id() }
        },
        |spare| match spare {
            Some(id) => init::give_id(place, id),
            None => init::unique_id(place),
        },
        |_, result| {
            if result == ncclSuccess && peers::is_on() {
                init::change_id(place, |id| peers::host(&id));
            }
        },
    )
}

/// Makes communicators. With peer groups, waits for the session.
pub fn init(entry: Entry, init: &InitCall) -> ncclResult_t {
    let result = make(entry, init);
    group::restore_device();
    result
}

fn make(entry: Entry, init: &InitCall) -> ncclResult_t {
    if peers::is_on() {
        let before = || {
            init.parent.map_or(Ok(()), |parent| check_awake(entry, parent))?;
            Ok(init.parent.and_then(|parent| before_init(init, parent)))
        };
        return match guard::or_else(|| Err(panicked("the way to a communicator init")), before) {
            Ok(_inside) => session::init_with_session(entry, init),
            Err(code) => group::fail(code),
        };
    }
    guard::around(
        || {
            process::first_communicator();
            count::function(entry);
            recycling::make_room(device::current().ok());
            if init.aborted_parent().is_some() {
                pool::distrust(None);
            }
        },
        |()| init.run(),
        |(), result| {
            if result == ncclSuccess || result == ncclInProgress {
                init.new_communicators().for_each(|(handle, identity)| {
                    note(handle, identity);
                });
            }
        },
    )
}

/// Before an init from a parent: keeps threads of Windlass out of the parent meanwhile, and later if the child may use its resources.
fn before_init(init: &InitCall, parent: ncclComm_t) -> Option<Passed<'static>> {
    if init.aborted_parent().is_some() {
        // Such a shrink frees this rank from peers that hang, so Windlass must not wait for them either.
        end_registering(parent, true);
        return None;
    }
    if matches!(init.function, InitFunction::Grow { .. }) {
        share(parent);
    }
    enter_by(parent)
}

/// Finalizes, destroys or aborts a communicator.
pub fn end(entry: Entry, how: End, handle: ncclComm_t) -> ncclResult_t {
    if let Err(code) = guard::or_else(|| Ok(()), || leave_ongoing(how, handle)) {
        count::function(entry);
        return code;
    }
    let result = end_now(entry, how, handle);
    if how == End::Finalize && is_taken(result) {
        return guard::or_else(|| ncclInternalError, || finish_behind(handle).unwrap_or(result));
    }
    result
}

fn end_now(entry: Entry, how: End, handle: ncclComm_t) -> ncclResult_t {
    guard::around(
        || {
            count::function(entry);
            group::restore_device();
            let end = before_end(how, handle);
            let lazy = communicator::find(handle).and_then(|communicator| communicator.lazy(handle));
            // Removed before NCCL frees it, as another thread's new communicator may get its address at once. A lazy communicator's handle
            // is one of Windlass, and must be found by an abort that ends the wait of its destroy.
            let stays = how == End::Finalize || how == End::Destroy && lazy.is_some();
            (lazy, if stays { None } else { communicator::remove(handle) }, end)
        },
        |(lazy, _, registered)| match lazy {
            Some(lazy) => lazy.end(how),
            None if lazy::is_ours(handle) => ended(handle),
            None if *registered == registering::End::Left => stop(how, handle),
            None => known::end(how, handle),
        },
        // No kernel of this rank runs any more.
        |(lazy, kept, _), _| {
            let is_ended = lazy.is_some() && how == End::Destroy;
            let kept = if is_ended { communicator::remove(handle) } else { kept };
            drop(lazy);
            if kept.is_some() {
                drop(kept);
                peers::settle();
            }
            crate::features::windows::free_left();
        },
    )
}

/// For calls that do not wait: the end waits for what Windlass does behind them. Like NCCL it refuses all but an abort
/// during an init, while NCCL is at work, or after a failure: the communicator lives on.
fn leave_ongoing(how: End, handle: ncclComm_t) -> Result<(), ncclResult_t> {
    let Some(known) = nonblocking(handle) else { return Ok(()) };
    if how != End::Abort && known.refuses_ends(handle) {
        // As NCCL does. The ranks go on to meet.
        let why = format_args!(
            "communicator {handle:p} is in use: end it when ncclCommGetAsyncError no longer answers ncclInProgress"
        );
        return Err(refuse(ncclInvalidArgument, why));
    }
    if how != End::Finalize {
        known.leave_ongoing(handle, how == End::Abort);
    }
    if how == End::Abort { Ok(()) } else { known.check_ready(handle) }
}

/// A finalize that does not wait is over when kernels of Windlass are, too.
fn finish_behind(handle: ncclComm_t) -> Option<ncclResult_t> {
    let peer_group = nonblocking(handle)?.peer_group(handle)?;
    communicator::go_on_behind(vec![handle], None, move |_| {
        peer_group.wait_idle();
        ncclSuccess
    });
    Some(ncclInProgress)
}

fn nonblocking(handle: ncclComm_t) -> Option<&'static Communicator> {
    communicator::find(handle).filter(|known| known.is_nonblocking())
}

/// Stops Windlass's part: an abort stops kernels and waits at once; finalize and destroy wait for issued work, as NCCL does.
fn before_end(how: End, handle: ncclComm_t) -> registering::End {
    let Some(communicator) = communicator::find(handle) else { return registering::End::Clean };
    let peer_group = communicator.peer_group(handle);
    match (how, &peer_group) {
        (End::Abort, Some(peer_group)) => {
            peer_group.abort();
            peer_group.lineage.end();
        }
        (End::Finalize, Some(_)) if communicator.is_nonblocking() => {}
        (End::Finalize | End::Destroy, Some(peer_group)) => peer_group.wait_idle(),
        (_, None) => communicator.cancel_session(handle),
    }
    drop(peer_group);
    end_registering(handle, how == End::Abort)
}

fn end_registering(handle: ncclComm_t, aborts: bool) -> registering::End {
    let peer_group = communicator::find(handle).and_then(|known| known.peer_group(handle));
    let windows =
        peer_group.as_ref().map_or(registering::End::Clean, |peer_group| peer_group.end_windows(aborts));
    if aborts {
        // NCCL has registrations, too: of graphs' buffers and of the application's. After the windows, none of which Windlass drops any more.
        pool::distrust(peer_group.as_ref().and_then(|peer_group| peer_group.device()));
    }
    let registering = peer_group.as_ref().and_then(|peer_group| peer_group.features.registering.as_ref());
    let registering = registering.map_or(registering::End::Clean, |registering| registering.end(aborts));
    if windows == registering::End::Left { windows } else { registering }
}

/// Ends a communicator with registrations that could not be ended: peers may still write to the memory, or NCCL would use freed entries.
/// Its kernels stop, and NCCL's memory of it stays until the process ends.
fn stop(how: End, handle: ncclComm_t) -> ncclResult_t {
    if how == End::Finalize {
        return known::end(how, handle);
    }
    let handle = Carried::new(handle);
    // Not on this thread, which may have a group open.
    let stopped = thread::spawn("windlass-abort", move || known::abort_init(handle.take(), || false));
    match stopped.map(|thread| thread.join()) {
        Ok(Ok(_)) => {
            log::warn!("a communicator was aborted while registered calls ran: NCCL's memory of it stays");
            ncclSuccess
        }
        Ok(Err(_)) | Err(_) => refuse(ncclInternalError, format_args!("no thread to abort a communicator")),
    }
}

/// Revokes a communicator: stops its work on this rank. NCCL refuses later calls.
pub fn revoke(handle: ncclComm_t, flags: c_int) -> ncclResult_t {
    guard::around(
        || {
            count::function(Entry::ncclCommRevoke);
            if !is_missing(Entry::ncclCommRevoke) {
                communicator::find(handle).into_iter().for_each(|known| known.leave_ongoing(handle, true));
                end_registering(handle, true);
            }
            queries::lazy_of(handle).filter(|_| !is_missing(Entry::ncclCommRevoke))
        },
        |lazy| match lazy {
            Some(lazy) => lazy.revoke(flags),
            None if lazy::is_ours(handle) => ended(handle),
            None => known::revoke(handle, flags),
        },
        |lazy, result| {
            if !is_taken(result) {
                return;
            }
            if let Some(lazy) = lazy {
                lazy.peer_group.abort();
            } else if let Some(communicator) = communicator::find(handle) {
                communicator.peer_group(handle).iter().for_each(|peer_group| peer_group.abort());
                communicator.give_up_peer_group();
            }
        },
    )
}

/// The asynchronous error of a communicator: NCCL's, or if NCCL has none, the peer group's. Does not wait.
pub fn async_error(handle: ncclComm_t, place: *mut ncclResult_t) -> ncclResult_t {
    guard::around(
        || {
            count::function(Entry::ncclCommGetAsyncError);
            let own = communicator::find(handle).and_then(|communicator| communicator.state(handle));
            (queries::lazy_of(handle), own)
        },
        |(lazy, own)| match (lazy.as_ref().map(|lazy| lazy.real()), own) {
            (None, None) => known::async_error(handle, place),
            (Some(Some(real)), _) => known::async_error(real, place),
            (_, own) => guard::call(|| {
                known::put(place, own.unwrap_or(ncclSuccess), "ncclCommGetAsyncError: asyncError")
            }),
        },
        |_, result| {
            if result == ncclSuccess
                && let Some(communicator) = communicator::find(handle)
                && communicator.has_peer_group()
                && let Some(peer_group) = communicator.peer_group(handle)
            {
                known::add_error(place, peer_group.error());
            }
        },
    )
}
