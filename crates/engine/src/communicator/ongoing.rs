//! What goes on behind a call that does not wait (`blocking = 0`). NCCL answers `ncclInProgress`, and goes on on a thread of its own.
//! Windlass's part comes after NCCL's, so it needs a thread, too: ranks meet, a group's kernels are launched, a finalize waits for kernels.
//!
//! Meanwhile the program hears `ncclInProgress`, and its calls are refused as NCCL refuses them. Only the thread asks NCCL then: two threads
//! must not ask for the state of a communicator at once. An abort waits until the thread has left NCCL.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar};
use std::time::Duration;

use nccl_sys::{ncclComm_t, ncclInProgress, ncclResult_t, ncclSuccess, ncclSystemError};

use crate::background::side_thread;
use crate::forward::{Carried, known};
use crate::peers::Lineage;
use windlass_base::lock::Mutex;
use windlass_base::{gpu, guard};

const LOOK_EVERY: Duration = Duration::from_micros(50);
/// How long an abort waits for work to leave NCCL.
const ABORT_WITHIN: Duration = Duration::from_secs(3);

/// Work that goes on behind one or more communicators.
#[derive(Debug)]
pub(crate) struct Ongoing {
    /// `ncclInProgress` until the work is over, then its result.
    state: Mutex<ncclResult_t>,
    changed: Condvar,
    is_cancelled: AtomicBool,
    /// Whether NCCL's part is over.
    is_nccl_over: AtomicBool,
    /// Of an init: its end ends the waits for other ranks.
    roster: Option<Arc<Lineage>>,
}

/// Ends work that was dropped: the process ends, or no thread could begin.
struct EndsOngoing(Arc<Ongoing>);

impl Ongoing {
    pub(super) fn new(roster: Option<Arc<Lineage>>) -> Arc<Ongoing> {
        let (state, changed) = (Mutex::new(ncclInProgress), Condvar::new());
        let (is_cancelled, is_nccl_over) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Ongoing { state, changed, is_cancelled, is_nccl_over, roster })
    }

    /// `ncclInProgress`, or the result.
    pub(super) fn state(&self) -> ncclResult_t {
        *self.state.lock()
    }

    /// Whether NCCL is at work, or an init: all but an abort is refused then, as NCCL refuses it.
    pub(super) fn refuses_ends(&self) -> bool {
        self.state() == ncclInProgress
            && (self.roster.is_some() || !self.is_nccl_over.load(Ordering::Acquire))
    }

    fn end(&self, code: ncclResult_t) {
        let mut state = self.state.lock();
        if *state == ncclInProgress {
            *state = code;
        }
        self.changed.notify_all();
    }

    /// Waits until the work is over, since the communicator ends. An abort cancels it.
    pub(super) fn leave(&self, aborts: bool) {
        if aborts {
            self.is_cancelled.store(true, Ordering::Relaxed);
            self.roster.iter().for_each(|roster| roster.end());
        }
        // Only NCCL's abort frees a thread that waits in a launch behind a kernel of NCCL's that hangs.
        let within = if aborts { ABORT_WITHIN } else { Duration::MAX };
        drop(self.changed.wait_timeout_while(self.state.lock(), within, |state| *state == ncclInProgress));
    }

    /// Does the work once NCCL's part of these communicators is over. The work is told whether NCCL has succeeded.
    pub(super) fn begin(
        self: Arc<Ongoing>,
        handles: Vec<ncclComm_t>,
        work: impl FnOnce(bool) -> ncclResult_t + 'static,
    ) {
        let context = gpu::opened().and_then(|driver| Some((driver, driver.current_context().ok()?)));
        let (handles, mut work) = (Carried::new(handles), Some(Carried::new(work)));
        let ends = EndsOngoing(self);
        side_thread::run_while(LOOK_EVERY, move || {
            let EndsOngoing(ongoing) = &ends;
            if ongoing.is_cancelled.load(Ordering::Relaxed) {
                return false;
            }
            let states = || handles.get().iter().map(|handle| known::state(*handle));
            if states().any(|state| state == ncclInProgress) {
                return true;
            }
            ongoing.is_nccl_over.store(true, Ordering::Release);
            let has_run = states().all(|state| state == ncclSuccess);
            context.iter().for_each(|(driver, context)| driver.stay_current(*context));
            let work = work.take().map(Carried::take);
            ongoing.end(work.map_or(ncclSuccess, |work| guard::call(|| work(has_run))));
            false
        });
    }
}

impl Drop for EndsOngoing {
    fn drop(&mut self) {
        // An init that was cancelled ends as NCCL's does. One that lost its thread fails: other ranks wait for this one to meet.
        let is_cancelled = self.0.roster.is_some() && self.0.is_cancelled.load(Ordering::Relaxed);
        self.0.end(if is_cancelled { ncclSuccess } else { ncclSystemError });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// An end waits for the work, and only an abort cancels it. The first result stays.
    #[test]
    fn ends() {
        for aborts in [false, true] {
            let one = Ongoing::new(None);
            let leaves = thread::spawn({
                let one = one.clone();
                move || one.leave(aborts)
            });
            while aborts && !one.is_cancelled.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            assert_eq!((one.state(), leaves.is_finished()), (ncclInProgress, false));
            one.end(ncclSuccess);
            leaves.join().unwrap();
            drop(EndsOngoing(one.clone()));
            assert_eq!((one.state(), one.is_cancelled.load(Ordering::Relaxed)), (ncclSuccess, aborts));
        }
    }

    /// Work that nobody does any more is a failure.
    #[test]
    fn dropped() {
        let one = Ongoing::new(None);
        drop(EndsOngoing(one.clone()));
        assert_eq!(one.state(), ncclSystemError);
    }
}
