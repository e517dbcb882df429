//! Init and end of communicators. NCCL makes and ends them; we note which there are, and unless `WINDLASS_PEER_GROUPS=off` their
//! ranks meet first.

mod children;
pub mod memory;
mod nccl_children;
pub mod questions;
mod session;
pub mod switching_off;
pub mod windows;

use std::cell::{Cell, RefCell};
use std::ffi::c_int;

use nccl_sys::missing::is_missing;
use nccl_sys::{
    Entry, ncclComm_t, ncclInProgress, ncclInternalError, ncclInvalidArgument, ncclResult_t, ncclSimInfo_t,
    ncclSuccess, ncclUniqueId,
};

use crate::communicator::{self, Communicator};
use crate::dispatch::group_order::Schedule;
use crate::dispatch::{group_planning, lazy_calls, ordering, registration};
use crate::forward::Carried;
use crate::forward::init::{self, Handle, InitCall};
use crate::forward::known::{self, End};
use crate::group::{self, Awaited, Ended};
use crate::lazy;
use crate::peers::registering;
use crate::peers::{self, InitOutcome};
use crate::pool;
use windlass_base::error::{panicked, refuse};
use windlass_base::gate::Passed;
use windlass_base::guard;
use windlass_base::process;
use windlass_base::stats::count::{self, Identity};
use windlass_base::thread;
use windlass_bootstrap::outcome::FallbackReason;

/// To be held while NCCL runs anything of a communicator: no thread of ours is in it then. What an open group has begun goes on
/// till its end.
#[inline]
pub fn enter(communicator: &'static Communicator) -> Option<Passed<'static>> {
    let passed = communicator.pass()?;
    if group::is_open() {
        group::stay_inside(communicator.pass()?);
    }
    Some(passed)
}

/// The same, by handle.
fn enter_by(handle: ncclComm_t) -> Option<Passed<'static>> {
    communicator::find(handle).and_then(enter)
}

/// Makes an id. With peer groups, its ranks meet at this process.
pub fn unique_id(place: *mut ncclUniqueId) -> ncclResult_t {
    guard::around(
        || {
            process::let_forked_children_restart();
            count::function(Entry::ncclGetUniqueId);
            process::know_version();
            // Of a null place NCCL says what it says.
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

/// Makes communicators as asked.
pub fn init(entry: Entry, init: &InitCall) -> ncclResult_t {
    if peers::is_on() {
        let before = || Ok(init.parent().and_then(|parent| before_init(init, parent)));
        return match guard::or_else(|| Err(panicked("the way to a communicator init")), before) {
            Ok(_inside) => session::init_with_session(entry, init),
            Err(code) => {
                session::refused(code);
                code
            }
        };
    }
    guard::around(
        || {
            process::first_communicator();
            count::function(entry);
            peers::make_room(peers::device_now());
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

/// Nothing of ours is in a parent meanwhile, nor later beside what may use its resources.
fn before_init(init: &InitCall, parent: ncclComm_t) -> Option<Passed<'static>> {
    if init.aborted_parent().is_some() {
        // It frees this rank from peers that hang: nothing of ours waits for them either.
        end_registering(parent, true);
        return None;
    }
    if matches!(init, InitCall::Grow { .. }) {
        let peer_group = communicator::find(parent).and_then(|known| known.peer_group(parent));
        peer_group
            .as_ref()
            .and_then(|peer_group| peer_group.registering())
            .into_iter()
            .for_each(|one| one.share());
        windows::share(parent);
    }
    enter_by(parent)
}

/// Ends a communicator, or prepares its end.
pub fn end(entry: Entry, how: End, handle: ncclComm_t) -> ncclResult_t {
    guard::around(
        || {
            count::function(entry);
            let end = before_end(how, handle);
            let lazy = communicator::find(handle).and_then(|communicator| communicator.lazy(handle));
            // Before NCCL frees it: its address may at once be another thread's new communicator. A lazy communicator's is ours, and an
            // abort that frees its destroy must find it.
            let stays = how == End::Finalize || how == End::Destroy && lazy.is_some();
            (lazy, if stays { None } else { communicator::remove(handle) }, end)
        },
        |(lazy, _, registered)| match lazy {
            Some(lazy) => lazy.end(how),
            None if lazy::is_ours(handle) => ended(handle),
            None if *registered == registering::End::Left => stop(how, handle),
            None => known::end(how, handle),
        },
        // Nothing of this rank's runs any more.
        |(lazy, kept, _), _| {
            let is_ended = lazy.is_some() && how == End::Destroy;
            let kept = if is_ended { communicator::remove(handle) } else { kept };
            drop(lazy);
            if kept.is_some() {
                drop(kept);
                peers::settle();
            }
            peers::windows::free_left();
        },
    )
}

/// NCCL would look into it as if it were its own.
fn ended(handle: ncclComm_t) -> ncclResult_t {
    refuse(ncclInvalidArgument, format_args!("communicator {handle:p} has been destroyed"))
}

/// An abort frees the GPU and whoever waits at once; the other ends wait for what was issued, as NCCL does.
fn before_end(how: End, handle: ncclComm_t) -> registering::End {
    let Some(communicator) = communicator::find(handle) else { return registering::End::Clean };
    let peer_group = communicator.peer_group(handle);
    match (how, &peer_group) {
        (End::Abort, Some(peer_group)) => {
            peer_group.abort();
            peer_group.end_children();
        }
        (End::Finalize | End::Destroy, Some(peer_group)) => peer_group.wait_idle(),
        (_, None) => communicator.cancel_session(handle),
    }
    drop(peer_group);
    end_registering(handle, how == End::Abort)
}

fn end_registering(handle: ncclComm_t, aborts: bool) -> registering::End {
    let peer_group = communicator::find(handle).and_then(|known| known.peer_group(handle));
    peer_group.iter().for_each(|peer_group| peer_group.end_checking());
    let windows =
        peer_group.as_ref().map_or(registering::End::Clean, |peer_group| peer_group.end_windows(aborts));
    if aborts {
        // NCCL registers, too: buffers of graphs, and what the application says. After the windows, which none of ours drops any more.
        pool::distrust(peer_group.as_ref().and_then(|peer_group| peer_group.device()));
    }
    let registering = peer_group.as_ref().and_then(|peer_group| peer_group.registering());
    let registering = registering.map_or(registering::End::Clean, |registering| registering.end(aborts));
    if windows == registering::End::Left { windows } else { registering }
}

/// Ends a communicator of which peers may still be writing to what is registered, or which NCCL would look for where it has
/// freed it: its kernels leave, and NCCL's part of it stays to the end of the process.
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

/// Stops a communicator's work everywhere on this rank; what is called on it later is NCCL's to refuse.
pub fn revoke(handle: ncclComm_t, flags: c_int) -> ncclResult_t {
    guard::around(
        || {
            count::function(Entry::ncclCommRevoke);
            if !is_missing(Entry::ncclCommRevoke) {
                end_registering(handle, true);
            }
            questions::lazy_of(handle).filter(|_| !is_missing(Entry::ncclCommRevoke))
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
                lazy.peer_group().abort();
            } else if let Some(communicator) = communicator::find(handle) {
                communicator.peer_group(handle).iter().for_each(|peer_group| peer_group.abort());
                communicator.give_up_peer_group();
            }
        },
    )
}

/// What went wrong beside calls: NCCL's answer, or where that has none, ours. Waits for nothing.
pub fn async_error(handle: ncclComm_t, place: *mut ncclResult_t) -> ncclResult_t {
    guard::around(
        || {
            count::function(Entry::ncclCommGetAsyncError);
            questions::lazy_of(handle)
        },
        |lazy| match lazy.as_ref().map(|lazy| lazy.real()) {
            None => known::async_error(handle, place),
            Some(Some(real)) => known::async_error(real, place),
            Some(None) => guard::call(|| known::put(place, ncclSuccess, "ncclCommGetAsyncError: asyncError")),
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

/// A communicator that was not seen when it was made.
pub fn count_as_child(communicator: &Communicator) {
    if peers::is_on() {
        peers::tell(communicator.counters(), &InitOutcome::OnNccl(FallbackReason::Child));
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
    if !group::leaves_nothing() {
        return end_of_much();
    }
    let before = || {
        count::function(Entry::ncclGroupEnd);
        // Before NCCL runs it, as NCCL's own count is: it may throw.
        group::close_empty();
    };
    guard::around(before, |()| known::group_end(), |(), _| ())
}

#[inline(never)]
fn end_of_much() -> ncclResult_t {
    let (met, ours) = (Cell::new(ncclSuccess), Cell::new(ncclSuccess));
    let parts = group_planning::plan();
    let result = guard::around(
        || (parts, RefCell::new(closing(Entry::ncclGroupEnd))),
        |(parts, ended)| {
            let schedule = scheduled(ended, |ended| ordering::schedule(parts, ended));
            let run = |places: &[usize]| {
                let ran = ordering::run_held(parts, places);
                if ours.get() == ncclSuccess {
                    ours.set(ran);
                }
            };
            run(&schedule.before);
            let candidates = std::mem::take(&mut ended.borrow_mut().candidates);
            let ready = guard::call(|| registration::before_group(&candidates));
            let Closed { nccls, result } = match ready == ncclSuccess {
                true => close(&mut ended.borrow_mut(), Simulated::No, known::group_end),
                // The driver has failed; NCCL is to run nothing of it.
                false => spoilt(ready),
            };
            if !candidates.is_empty() {
                let ended = guard::call(|| registration::after_group(&candidates, is_taken(nccls)));
                ours.set(if ours.get() == ncclSuccess { ended } else { ours.get() });
            }
            if is_taken(nccls) {
                let followed = std::mem::take(&mut ended.borrow_mut().followed);
                guard::or_else(|| (), || ordering::after_group(followed));
            }
            if is_taken(result) {
                run(&schedule.after);
            }
            result
        },
        // What became of its inits is NCCL's word alone.
        |(parts, ended), result| {
            drop(parts);
            after_group(ended.into_inner(), result, &met);
        },
    );
    let of_group = if ours.get() == ncclSuccess { result } else { ours.get() };
    if of_group == ncclSuccess { met.get() } else { of_group }
}

/// When what was held runs. Without an answer none of the group does.
fn scheduled(ended: &RefCell<Ended>, schedule: impl FnOnce(&Ended) -> Schedule) -> Schedule {
    let fail = || {
        ended.borrow_mut().awaited.insert(0, Awaited::Failed(panicked("the order of a group")));
        Schedule::default()
    };
    guard::or_else(fail, || schedule(&ended.borrow()))
}

/// What came of a group.
struct Closed {
    /// NCCL's own part of it, which runs before what lazy communicators held: an error if it was not to run.
    nccls: ncclResult_t,
    /// All of it.
    result: ncclResult_t,
}

/// NCCL closes the group and runs nothing of it.
fn spoilt(why: ncclResult_t) -> Closed {
    init::spoil_group();
    known::group_end();
    Closed { nccls: why, result: why }
}

/// Closes a group without running it.
pub fn group_simulate_end(estimate: *mut ncclSimInfo_t) -> ncclResult_t {
    let met = Cell::new(ncclSuccess);
    // The estimate is NCCL's, of what it would run.
    drop(group_planning::plan());
    let result = guard::around(
        || RefCell::new(closing(Entry::ncclGroupSimulateEnd)),
        |ended| {
            let end = || known::group_simulate_end(estimate);
            let Closed { result, .. } = close(&mut ended.borrow_mut(), Simulated::Yes, end);
            let forget = || {
                registration::forget(&ended.borrow().candidates);
                result
            };
            guard::or_else(|| panicked("the numbers of registered calls"), forget)
        },
        |ended, result| after_group(ended.into_inner(), result, &met),
    );
    if result == ncclSuccess { met.get() } else { result }
}

fn is_taken(result: ncclResult_t) -> bool {
    result == ncclSuccess || result == ncclInProgress
}

/// The group is closed before NCCL runs it, as NCCL's own count is: it may throw.
fn closing(entry: Entry) -> Ended {
    count::function(entry);
    let mut ended = group::closed();
    if !ended.awaited.is_empty() {
        let awaited = std::mem::take(&mut ended.awaited);
        ended.awaited = joined(|| session::run_all(nccl_children::before_group(awaited)));
    }
    ended
}

/// What waits for NCCL once its sessions are over. NCCL closes its group whatever became of them.
fn joined(join: impl FnOnce() -> Vec<Awaited>) -> Vec<Awaited> {
    guard::or_else(|| vec![Awaited::Failed(panicked("the communicator inits of a group"))], join)
}

/// Whether a group runs when it ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Simulated {
    No,
    Yes,
}

/// Lets NCCL close the group. If an init in it failed, nothing of the group runs: its peers do not come to NCCL. What lazy communicators
/// held comes to NCCL now; a simulation knows nothing of it, since only all ranks together can materialize them.
fn close(ended: &mut Ended, simulated: Simulated, end: impl FnOnce() -> ncclResult_t) -> Closed {
    let held = std::mem::take(&mut ended.lazy_work);
    if let Some(Awaited::Failed(code)) = ended.awaited.first() {
        init::spoil_group();
        end();
        return Closed { nccls: *code, result: *code };
    }
    if held.is_empty() || simulated == Simulated::Yes {
        let nccls = end();
        return Closed { nccls, result: nccls };
    }
    let Some(held) = guard::or_else(|| None, || Some(lazy_calls::begin(held))) else {
        init::spoil_group();
        end();
        let code = panicked("what lazy communicators of a group held");
        return Closed { nccls: code, result: code };
    };
    let nccls = end();
    Closed { nccls, result: if is_taken(nccls) { lazy_calls::finish(held) } else { nccls } }
}

#[inline]
fn after_group(ended: Ended, result: ncclResult_t, met: &Cell<ncclResult_t>) {
    if !ended.is_empty() {
        met.set(tell(ended, result));
    }
}

#[cold]
#[inline(never)]
fn tell(ended: Ended, result: ncclResult_t) -> ncclResult_t {
    group::put_back(ended.held);
    let (awaited, met) = nccl_children::after_group(ended.awaited, result);
    if !is_taken(result) {
        session::lose(&awaited, result);
    }
    if result == ncclSuccess {
        for waited in awaited {
            let (handle, reason) = match waited {
                Awaited::Made(_, made) => {
                    session::made(made);
                    continue;
                }
                Awaited::Handle(handle) => (handle, FallbackReason::Child),
                Awaited::Grouped(handle) => (handle, FallbackReason::Grouped),
                _ => continue,
            };
            if let Some((_, communicator)) = note(handle, UNKNOWN)
                && peers::is_on()
            {
                peers::tell(communicator.counters(), &InitOutcome::OnNccl(reason));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// After a panic in what decides of a group, its answer is an error, and nothing of it runs.
    #[test]
    fn a_panic_fails_the_group() {
        let is_failed = |ended: &Ended| {
            let first = ended.awaited.first();
            assert!(matches!(first, Some(Awaited::Failed(code)) if *code == ncclInternalError), "{first:?}");
        };
        let awaited = vec![Awaited::Failed(ncclInvalidArgument)];
        let ended = RefCell::new(Ended { awaited, ..Ended::default() });
        assert_eq!(scheduled(&ended, |_| panic!("on purpose")), Schedule::default());
        is_failed(&ended.borrow());
        is_failed(&Ended { awaited: joined(|| panic!("on purpose")), ..Ended::default() });
    }
}
