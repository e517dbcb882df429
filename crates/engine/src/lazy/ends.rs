//! Who gives NCCL's communicator behind a lazy one its end: a destroy or finalize that waits for the device, or the abort that frees it
//! from that wait. Only one of them, and never while another thread is in NCCL with it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often an abort looks whether another thread has left NCCL.
const LOOK_EVERY: Duration = Duration::from_micros(200);

/// Held for a few stores.
#[derive(Debug, Default)]
pub(super) struct Ends(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    phase: Phase,
    /// A destroy has begun.
    is_destroyed: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Open,
    /// A finalize or destroy is in NCCL.
    Busy,
    /// It waits for the device, and takes its way back into NCCL if nobody has ended it.
    Waits,
    Over,
}

impl Ends {
    /// A destroy begins, in NCCL. False: there was one, or an abort.
    #[must_use]
    pub(super) fn destroy(&self) -> bool {
        let mut state = self.state();
        let begins = !state.is_destroyed && state.phase != Phase::Over;
        if begins {
            *state = State { phase: Phase::Busy, is_destroyed: true };
        }
        begins
    }

    /// Into NCCL, from outside or from the wait. False: an abort was faster, and NCCL's communicator is no more.
    #[must_use]
    pub(super) fn enter(&self) -> bool {
        let mut state = self.state();
        let enters = state.phase != Phase::Over;
        if enters {
            state.phase = Phase::Busy;
        }
        enters
    }

    /// Out of NCCL, to wait for the device: an abort may come now.
    pub(super) fn wait(&self) {
        self.leave_to(Phase::Waits);
    }

    /// Out of NCCL, and the communicator goes on.
    pub(super) fn leave(&self) {
        self.leave_to(Phase::Open);
    }

    /// Out of NCCL, which has ended it.
    pub(super) fn end(&self) {
        self.leave_to(Phase::Over);
    }

    /// An abort takes it, as soon as no other is in NCCL with it. False: it has ended, or does within NCCL.
    #[must_use]
    pub(super) fn abort(&self, within: Duration) -> bool {
        let until = Instant::now() + within;
        loop {
            let mut state = self.state();
            match state.phase {
                Phase::Open | Phase::Waits => {
                    state.phase = Phase::Over;
                    return true;
                }
                Phase::Over => return false,
                Phase::Busy if Instant::now() >= until => return false,
                Phase::Busy => {}
            }
            drop(state);
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn leave_to(&self, phase: Phase) {
        let mut state = self.state();
        if state.phase == Phase::Busy {
            state.phase = phase;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT_ONCE: Duration = Duration::ZERO;

    /// An abort ends a wait, and then the one that waited has no way back; in NCCL it waits for the other to come out.
    #[test]
    fn one_end() {
        let ends = Ends::default();
        assert!(ends.destroy() && !ends.destroy() && !ends.abort(AT_ONCE));
        ends.wait();
        assert!(ends.abort(AT_ONCE) && !ends.enter() && !ends.abort(AT_ONCE) && !ends.destroy());
        ends.leave();
        assert!(!ends.enter());
    }

    /// A finalize comes back and goes on; a destroy after it, too.
    #[test]
    fn finalized() {
        let ends = Ends::default();
        assert!(ends.enter());
        ends.wait();
        assert!(ends.enter());
        ends.leave();
        assert!(ends.destroy());
        ends.wait();
        assert!(ends.enter());
        ends.end();
        assert!(!ends.abort(AT_ONCE));
    }

    /// An abort comes as soon as the other has left NCCL.
    #[test]
    fn waits_for_the_other() {
        let ends = Ends::default();
        assert!(ends.destroy());
        std::thread::scope(|scope| {
            let aborting = scope.spawn(|| ends.abort(Duration::from_secs(60)));
            ends.wait();
            assert!(aborting.join().unwrap());
        });
    }
}
