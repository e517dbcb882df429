//! What goes on behind a call that does not wait (`blocking = 0`). NCCL answers `ncclInProgress`, and goes on on a thread of its own.
//! Windlass's part comes after NCCL's, so it needs a thread, too: ranks meet, a group's kernels are launched, a finalize waits for kernels.
//!
//! Meanwhile the program hears `ncclInProgress`, and its calls are refused as NCCL refuses them. Only the thread asks NCCL then: two threads
//! must not ask for the state of a communicator at once. An abort waits until the thread has left NCCL.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nccl_sys::{ncclComm_t, ncclInProgress, ncclResult_t, ncclSuccess, ncclSystemError};

use crate::background::side_thread;
use crate::forward::{Carried, known};
use crate::peers::Lineage;
use windlass_base::{gpu, guard};

const LOOK_EVERY: Duration = Duration::from_micros(50);

/// Work that goes on behind one or more communicators.
#[derive(Debug)]
pub(crate) struct Progress {
    state: Mutex<State>,
    changed: Condvar,
    /// Of an init: its end ends the waits for other ranks.
    roster: Option<Arc<Lineage>>,
}

#[derive(Debug)]
struct State {
    /// `ncclInProgress` until the work is over, then its result.
    code: ncclResult_t,
    is_cancelled: bool,
}

/// Ends work that was dropped: the process ends, or no thread could begin.
struct Ends(Arc<Progress>);

impl Progress {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `ncclInProgress`, or the result.
    pub(super) fn state(&self) -> ncclResult_t {
        self.lock().code
    }

    fn end(&self, code: ncclResult_t) {
        let mut state = self.lock();
        if state.code == ncclInProgress {
            state.code = code;
        }
        self.changed.notify_all();
    }

    /// Waits until the work is over, since the communicator ends. Cancels an init, and before an abort all work.
    pub(super) fn leave(&self, aborts: bool) {
        if aborts || self.roster.is_some() {
            self.lock().is_cancelled = true;
            self.roster.iter().for_each(|roster| roster.end());
        }
        let goes_on = |state: &mut State| state.code == ncclInProgress;
        drop(self.changed.wait_while(self.lock(), goes_on));
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        // Without a meeting the communicator is NCCL's.
        self.0.end(if self.0.roster.is_some() { ncclSuccess } else { ncclSystemError });
    }
}

/// Does work once NCCL's part is over, which it is told to have succeeded or not. Until then these communicators are in progress.
pub(crate) fn begin(
    handles: Vec<ncclComm_t>,
    roster: Option<Arc<Lineage>>,
    work: impl FnOnce(bool) -> ncclResult_t + 'static,
) {
    let state = Mutex::new(State { code: ncclInProgress, is_cancelled: false });
    let ends = Ends(Arc::new(Progress { state, changed: Condvar::new(), roster }));
    for handle in &handles {
        super::find(*handle).into_iter().for_each(|known| known.goes_on(*handle, &ends.0));
    }
    let context = gpu::opened().and_then(|driver| Some((driver, driver.current_context().ok()?)));
    let (handles, mut work) = (Carried::new(handles), Some(Carried::new(work)));
    side_thread::run_while(LOOK_EVERY, move || {
        let Ends(progress) = &ends;
        if progress.lock().is_cancelled {
            return false;
        }
        let states = || handles.get().iter().map(|handle| known::state(*handle));
        if states().any(|state| state == ncclInProgress) {
            return true;
        }
        let has_run = states().all(|state| state == ncclSuccess);
        context.iter().for_each(|(driver, context)| driver.stay_current(*context));
        let work = work.take().map(Carried::take);
        progress.end(work.map_or(ncclSuccess, |work| guard::call(|| work(has_run))));
        false
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn progress() -> Arc<Progress> {
        let state = Mutex::new(State { code: ncclInProgress, is_cancelled: false });
        Arc::new(Progress { state, changed: Condvar::new(), roster: None })
    }

    /// An end waits for the work, and only an abort cancels it. The first result stays.
    #[test]
    fn ends() {
        for aborts in [false, true] {
            let one = progress();
            let leaves = thread::spawn({
                let one = one.clone();
                move || one.leave(aborts)
            });
            while aborts && !one.lock().is_cancelled {
                thread::yield_now();
            }
            assert_eq!((one.state(), leaves.is_finished()), (ncclInProgress, false));
            one.end(ncclSuccess);
            leaves.join().unwrap();
            drop(Ends(one.clone()));
            assert_eq!((one.state(), one.lock().is_cancelled), (ncclSuccess, aborts));
        }
    }

    /// Work that nobody does any more is a failure.
    #[test]
    fn dropped() {
        let one = progress();
        drop(Ends(one.clone()));
        assert_eq!(one.state(), ncclSystemError);
    }
}
