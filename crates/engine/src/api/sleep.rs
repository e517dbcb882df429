//! `ncclCommSuspend`, `ncclCommResume` and `ncclCommMemStats`. A communicator with a peer group gives its memory back and takes it again
//! whatever NCCL is underneath. NCCL's own part does the same where NCCL has these functions (2.29.7) and has built it.
//!
//! In a group resumes run before the group's calls, and suspends after them. As NCCL's these are calls of all ranks.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use nccl_sys::missing::is_missing;
use nccl_sys::{
    Entry, ncclComm_t, ncclCommMemStat_t, ncclInProgress, ncclInternalError, ncclInvalidArgument,
    ncclInvalidUsage, ncclResult_t, ncclStatGpuMemPersist, ncclStatGpuMemSuspended, ncclStatGpuMemTotal,
    ncclSuccess, ncclSystemError,
};

use crate::communicator::{self, Communicator};
use crate::features::registration::registering::Registering;
use crate::forward::known::{self, put};
use crate::forward::{Carried, queries};
use crate::group::{self, SleepWork};
use crate::peers::PeerGroup;
use windlass_base::error::refuse;
use windlass_base::stats::count;
use windlass_base::{guard, thread};

use super::handles::{enter_by, is_taken};
use super::queries::{ask, keep_built_apart, registering_of};
use super::windows;

/// `NCCL_SUSPEND_MEM`.
const MEMORY: c_int = 1;
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// A communicator with a peer group.
struct Sleeper {
    handle: ncclComm_t,
    communicator: &'static Communicator,
    peer_group: Arc<PeerGroup>,
}

impl Sleeper {
    fn of(handle: ncclComm_t) -> Option<Sleeper> {
        let communicator = communicator::find(handle)?;
        let peer_group = communicator.peer_group(handle)?;
        Some(Sleeper { handle, communicator, peer_group })
    }

    /// NCCL's part, if NCCL has built one and has the function.
    fn nccl(&self, entry: Entry) -> Option<ncclComm_t> {
        let real = if self.communicator.is_lazy() {
            self.communicator.lazy(self.handle)?.real()
        } else {
            Some(self.handle)
        };
        real.filter(|_| !is_missing(entry))
    }

    /// NCCL's part of a suspend or resume. What Windlass has registered with NCCL goes before, and may come back after.
    fn change_nccl(&self, resumes: bool) -> ncclResult_t {
        let entry = if resumes { Entry::ncclCommResume } else { Entry::ncclCommSuspend };
        // Divergence: an NCCL that lacks the function would answer ncclInvalidUsage. Its part stays as it is.
        let Some(real) = self.nccl(entry).filter(|_| self.peer_group.nccl_sleeps() == resumes) else {
            return ncclSuccess;
        };
        if !resumes {
            registering_of(self.handle, Registering::veto);
        }
        let inside = enter_by(self.handle);
        let mut result = if resumes { queries::resume(real) } else { queries::suspend(real, MEMORY) };
        drop(inside);
        // With blocking = 0 this thread is behind the call, which is over when NCCL's part is.
        while result == ncclInProgress && self.is_still() {
            std::thread::sleep(LOOK_EVERY);
            result = known::state(real);
        }
        if is_taken(result) {
            self.peer_group.set_nccl_sleeps(!resumes);
        }
        if is_taken(result) == resumes {
            registering_of(self.handle, Registering::allow);
        }
        result
    }

    /// Both parts: Windlass's first, in which the ranks agree. If NCCL then refuses, its part stays as it is on this rank, and the next resume
    /// does what is missing.
    fn change(&self, resumes: bool) -> ncclResult_t {
        let mut result = ncclSuccess;
        if self.peer_group.sleeps() == resumes {
            result = guard::call(|| self.peer_group.suspend_or_resume(resumes));
        }
        if !self.is_still() {
            return result;
        }
        if result == ncclSuccess {
            result = self.change_nccl(resumes);
        }
        self.note();
        count::memory(self.communicator.counters(), self.peer_group.memory_bytes(), self.peer_group.sleeps());
        result
    }

    /// Whether the communicator is there still: an abort may have ended it meanwhile.
    fn is_still(&self) -> bool {
        let found = communicator::find(self.handle).and_then(|known| known.peer_group(self.handle));
        found.is_some_and(|one| Arc::ptr_eq(&one, &self.peer_group))
    }

    /// Has calls be refused while a part sleeps.
    fn note(&self) {
        self.communicator.set_sleeps(self.peer_group.sleeps() || self.peer_group.nccl_sleeps());
    }
}

/// Has a communicator give its device memory back. Without the flag for memory nothing happens.
pub fn suspend(handle: ncclComm_t, flags: c_int) -> ncclResult_t {
    if handle.is_null() {
        return null(Entry::ncclCommSuspend);
    }
    keep_built_apart(handle);
    windows::end_cached(handle);
    match guard::or_else(|| None, || Sleeper::of(handle)) {
        Some(ours) if flags & MEMORY != 0 => begin(&ours, false),
        Some(ours) if ours.nccl(Entry::ncclCommSuspend).is_none() => {
            count::function(Entry::ncclCommSuspend);
            ncclSuccess
        }
        None if stays(Entry::ncclCommSuspend, handle) => ncclSuccess,
        _ => ask(Entry::ncclCommSuspend, handle, |_| ncclSuccess, |real| queries::suspend(real, flags)),
    }
}

/// Has it take that memory again.
pub fn resume(handle: ncclComm_t) -> ncclResult_t {
    if handle.is_null() {
        return null(Entry::ncclCommResume);
    }
    match guard::or_else(|| None, || Sleeper::of(handle)) {
        Some(ours) => begin(&ours, true),
        None if stays(Entry::ncclCommResume, handle) => ncclSuccess,
        None => ask(Entry::ncclCommResume, handle, |_| ncclSuccess, queries::resume),
    }
}

/// Whether a communicator is NCCL's alone, and NCCL lacks the function.
// Divergence: ncclSuccess, not ncclInvalidUsage, as programs that find the function suspend all their communicators alike. It keeps its memory.
fn stays(entry: Entry, handle: ncclComm_t) -> bool {
    let stays = is_missing(entry) && communicator::find(handle).is_some();
    if stays {
        count::function(entry);
    }
    stays
}

/// As NCCL answers, also where NCCL lacks the function.
fn null(entry: Entry) -> ncclResult_t {
    count::function(entry);
    refuse(ncclInvalidArgument, format_args!("{entry:?}: comm is null"))
}

/// Begins a suspend or resume: now, behind a call that does not wait, or at the end of the open group.
fn begin(ours: &Sleeper, resumes: bool) -> ncclResult_t {
    let entry = if resumes { Entry::ncclCommResume } else { Entry::ncclCommSuspend };
    count::function(entry);
    let Sleeper { handle, communicator, .. } = *ours;
    if communicator.is_nonblocking()
        && let Err(code) = communicator.check_ready(handle)
    {
        return group::fail(code);
    }
    if communicator.sleeps() != resumes {
        let state = if resumes { "is awake" } else { "sleeps already" };
        return group::fail(refuse(
            ncclInvalidUsage,
            format_args!("{entry:?}: communicator {handle:p} {state}"),
        ));
    }
    if group::is_open() {
        if communicator.is_nonblocking() || group::holds_sleep(handle) {
            let why =
                "in a group expected at most one suspend or resume, of a communicator with blocking = 1";
            return group::fail(refuse(
                ncclInvalidUsage,
                format_args!("{entry:?}: communicator {handle:p}: {why}"),
            ));
        }
        // NCCL takes a resume now, and runs it at the group's end, before the group's calls. Its suspend would come before them, too.
        let nccl_has = resumes && ours.peer_group.nccl_sleeps();
        let first = if nccl_has { ours.change_nccl(true) } else { ncclSuccess };
        if !is_taken(first) {
            return first;
        }
        communicator.set_sleeps(!resumes);
        group::hold_sleep(SleepWork { communicator: handle, resumes, nccl_has });
        return ncclSuccess;
    }
    communicator.set_sleeps(!resumes);
    run(vec![SleepWork { communicator: handle, resumes, nccl_has: false }])
}

/// Runs suspends and resumes, all at once: a thread may have several ranks of one communicator in its group. Those of communicators whose calls
/// do not wait go on behind the call.
pub(super) fn run(all: Vec<SleepWork>) -> ncclResult_t {
    let (behind, mut now): (Vec<_>, Vec<_>) = all
        .into_iter()
        .partition(|work| communicator::find(work.communicator).is_some_and(Communicator::is_nonblocking));
    let in_progress = if behind.is_empty() { ncclSuccess } else { ncclInProgress };
    for work in behind {
        communicator::go_on_behind(vec![work.communicator], None, move |has_run| match has_run {
            true => run_one(work),
            false => ncclSuccess,
        });
    }
    let Some(own) = now.pop() else { return in_progress };
    let result = std::thread::scope(|scope| {
        let others: Vec<_> = now
            .into_iter()
            .map(|work| {
                let work = Carried::new(work);
                thread::spawn_scoped(scope, "windlass-sleep", move || run_one(work.take()))
            })
            .collect();
        others.into_iter().fold(run_one(own), |before, other| {
            before.and(match other {
                Ok(thread) => thread.join().unwrap_or(ncclInternalError),
                Err(error) => refuse(ncclSystemError, format_args!("no thread for a suspend: {error}")),
            })
        })
    });
    result.and(in_progress)
}

fn run_one(SleepWork { communicator, resumes, .. }: SleepWork) -> ncclResult_t {
    match guard::or_else(|| None, || Sleeper::of(communicator)) {
        Some(ours) => ours.change(resumes),
        None => refuse(ncclInvalidArgument, format_args!("communicator {communicator:p} has been destroyed")),
    }
}

/// Forgets suspends and resumes of a group that NCCL does not run.
pub(super) fn forget(all: &[SleepWork]) {
    for work in all {
        if let Some(ours) = Sleeper::of(work.communicator) {
            if work.nccl_has {
                ours.peer_group.set_nccl_sleeps(true);
                registering_of(work.communicator, Registering::veto);
            }
            ours.note();
        }
    }
}

/// Bytes of device memory that a communicator takes, with Windlass's; whether it sleeps.
pub fn memory(handle: ncclComm_t, which: ncclCommMemStat_t, place: *mut u64) -> ncclResult_t {
    let Some(ours) = guard::or_else(|| None, || Sleeper::of(handle)) else {
        if !place.is_null() && stays(Entry::ncclCommMemStats, handle) {
            return put(place, 0, "ncclCommMemStats: value");
        }
        return ask(
            Entry::ncclCommMemStats,
            handle,
            |_| ncclSuccess,
            |real| queries::memory(real, which, place),
        );
    };
    count::function(Entry::ncclCommMemStats);
    if place.is_null() || !(0..=ncclStatGpuMemTotal.0).contains(&which.0) {
        let why = format_args!("ncclCommMemStats: value is null, or stat {} is none of 0 to 3", which.0);
        return refuse(ncclInvalidArgument, why);
    }
    let mut nccls = 0;
    if let Some(real) = ours.nccl(Entry::ncclCommMemStats) {
        let asked = queries::memory(real, which, &raw mut nccls);
        if asked != ncclSuccess {
            return asked;
        }
    }
    let own = ours.peer_group.memory_bytes();
    let value = if which == ncclStatGpuMemSuspended {
        u64::from(ours.communicator.sleeps())
    } else {
        nccls + if which == ncclStatGpuMemPersist { 0 } else { own }
    };
    put(place, value, "ncclCommMemStats: value")
}
