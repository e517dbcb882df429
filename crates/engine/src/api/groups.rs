//! Group start and end. At the outermost end held calls run as kernels of Windlass after NCCL's part, in an order that is equal on
//! all ranks.

use std::cell::{Cell, RefCell};

use nccl_sys::{Entry, ncclInProgress, ncclInvalidUsage, ncclResult_t, ncclSimInfo_t, ncclSuccess};

use crate::dispatch::{group_planning, lazy_calls, ordering, registration};
use crate::forward::init;
use crate::forward::known;
use crate::group::{self, Awaited, Ended, SleepWork, Waiting};
use crate::peers::{self, InitOutcome};
use windlass_base::error::panicked;
use windlass_base::error::refuse;
use windlass_base::guard;
use windlass_base::observers;
use windlass_base::stats::count;

use super::handles::{UNKNOWN, is_taken, note};
use super::{children, init_ends, session, sleep};

/// Opens a group.
pub fn start() -> ncclResult_t {
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
pub fn end() -> ncclResult_t {
    if !group::leaves_nothing() {
        return end_of_much();
    }
    let before = || {
        count::function(Entry::ncclGroupEnd);
        // Closed before NCCL runs the group, as NCCL does with its own count: NCCL may throw.
        group::close_empty()
    };
    guard::around(before, |_| known::group_end(), |inside, _| group::put_back_inside(inside))
}

#[inline(never)]
fn end_of_much() -> ncclResult_t {
    let (met, ours) = (Cell::new(ncclSuccess), Cell::new(ncclSuccess));
    let parts = group_planning::plan();
    let result = guard::around(
        || (RefCell::new(parts), RefCell::new(closing(Entry::ncclGroupEnd))),
        |(parts, ended)| {
            let candidates = std::mem::take(&mut ended.borrow_mut().candidates);
            let sleeps = std::mem::take(&mut ended.borrow_mut().sleeps);
            let (resumes, suspends): (Vec<_>, _) = sleeps.iter().partition(|work| work.resumes);
            let ready = guard::call(|| ready(&ended.borrow(), &candidates, resumes));
            // A resume that goes on behind its call.
            let (ready, wakes) =
                if ready == ncclInProgress { (ncclSuccess, ready) } else { (ready, ncclSuccess) };
            ours.set(ours.get().and(wakes));
            let Closed { nccls, result } = match ready == ncclSuccess {
                true => close(&mut ended.borrow_mut(), Simulated::No, known::group_end),
                // The driver has failed, or the streams of a communicator's ranks are unlike: NCCL must run nothing of the group.
                false => spoilt(ready),
            };
            if !candidates.is_empty() {
                let ended = guard::call(|| {
                    registration::after_group(&candidates, &ended.borrow().joints, is_taken(nccls))
                });
                ours.set(ours.get().and(ended));
            }
            let followed = std::mem::take(&mut ended.borrow_mut().followed);
            let parts = parts.take();
            if result == ncclInProgress {
                let joints = std::mem::take(&mut ended.borrow_mut().joints);
                guard::or_else(|| (), || ordering::behind_nccl(followed, parts, joints));
                if observers::are_on() {
                    observers::after(group::is_open().into());
                }
                // Its kernels are launched by another thread, behind this call.
                let refused = if suspends.is_empty() { ncclSuccess } else { refuse_suspends(&suspends) };
                return refused.and(result);
            }
            guard::or_else(|| (), || ordering::after_group(followed, result == ncclSuccess));
            if result == ncclSuccess && !parts.is_empty() {
                let ran = ordering::run_held(&parts, &ended.borrow().joints);
                ours.set(ours.get().and(ran));
            }
            if result == ncclSuccess {
                ours.set(ours.get().and(guard::call(|| sleep::run(suspends))));
            } else if !sleeps.is_empty() {
                guard::or_else(|| (), || sleep::forget(&sleeps));
            }
            if observers::are_on() {
                observers::after(group::is_open().into());
            }
            result
        },
        // The outcome of inits depends on NCCL's result alone.
        |(_, ended), result| after_group(ended.into_inner(), result, &met),
    );
    ours.get().and(result).and(met.get())
}

fn refuse_suspends(suspends: &[SleepWork]) -> ncclResult_t {
    guard::or_else(|| (), || sleep::forget(suspends));
    let why =
        format_args!("ncclCommSuspend: the group has communicators whose calls do not wait (blocking = 0)");
    refuse(ncclInvalidUsage, why)
}

/// What comes before NCCL's part. Nothing in a group that fails: NCCL runs nothing of it.
fn ready(ended: &Ended, candidates: &[Waiting], resumes: Vec<SleepWork>) -> ncclResult_t {
    if matches!(ended.awaited.first(), Some(Awaited::Failed(_))) {
        return ncclSuccess;
    }
    let woken = sleep::run(resumes);
    if !is_taken(woken) {
        return woken;
    }
    let joined = ordering::before_nccl(ended);
    if joined != ncclSuccess {
        return joined;
    }
    registration::before_group(candidates, &ended.joints).and(woken)
}

/// The results of a group.
struct Closed {
    /// The result of NCCL's own part, which runs before lazy work; an error if it was not to run.
    nccls: ncclResult_t,
    /// The result of NCCL's part and lazy work.
    result: ncclResult_t,
}

/// Has NCCL close the group without running it.
fn spoilt(why: ncclResult_t) -> Closed {
    init::spoil_group();
    known::group_end();
    Closed { nccls: why, result: why }
}

/// Closes a group without running it, and has NCCL estimate its time.
pub fn simulate_end(estimate: *mut ncclSimInfo_t) -> ncclResult_t {
    let met = Cell::new(ncclSuccess);
    // NCCL estimates only what NCCL would run.
    drop(group_planning::plan());
    let result = guard::around(
        || RefCell::new(closing(Entry::ncclGroupSimulateEnd)),
        |ended| {
            let end = || known::group_simulate_end(estimate);
            let Closed { result, .. } = close(&mut ended.borrow_mut(), Simulated::Yes, end);
            let forget = || {
                registration::forget(&ended.borrow().candidates);
                sleep::forget(&ended.borrow().sleeps);
                result
            };
            guard::or_else(|| panicked("the numbers of registered calls"), forget)
        },
        |ended, result| after_group(ended.into_inner(), result, &met),
    );
    result.and(met.get())
}

/// Closes the group before NCCL runs it, as NCCL does with its own count: NCCL may throw. Runs the sessions of its inits.
fn closing(entry: Entry) -> Ended {
    count::function(entry);
    let mut ended = group::closed();
    if !ended.awaited.is_empty() {
        let awaited = std::mem::take(&mut ended.awaited);
        ended.awaited = joined(|| session::run_all(children::before_group(awaited)));
        windlass_bootstrap::leave_room_for_nccl();
    }
    ended
}

/// Runs the sessions; a panic becomes a failure, so that NCCL still closes its group.
fn joined(join: impl FnOnce() -> Vec<Awaited>) -> Vec<Awaited> {
    guard::or_else(|| vec![Awaited::Failed(panicked("the communicator inits of a group"))], join)
}

/// Whether a group runs when it ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Simulated {
    No,
    Yes,
}

/// Has NCCL close the group, then run the lazy work. If an init in the group failed, nothing of it runs, as the peers do not come to NCCL.
/// A simulation leaves lazy work out, since only all ranks together can materialize.
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
    group::put_back_joints(ended.joints);
    let (awaited, met) = children::after_group(ended.awaited, result);
    if !is_taken(result) {
        session::lose(&awaited, result);
    }
    if result == ncclSuccess {
        for waited in awaited {
            let (handle, reason) = match waited {
                Awaited::Made(_, made) => {
                    init_ends::made(made);
                    continue;
                }
                Awaited::Handle(handle, reason) => (handle, reason),
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

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_sys::ncclInternalError;

    /// After a panic in the sessions of a group, its end returns an error, and nothing of it runs.
    #[test]
    fn a_panic_fails_the_group() {
        let awaited = joined(|| panic!("on purpose"));
        assert!(
            matches!(awaited.first(), Some(Awaited::Failed(code)) if *code == ncclInternalError),
            "{awaited:?}"
        );
    }
}
