//! Decides which thread ends NCCL's communicator behind a lazy one: a destroy or finalize that waits for the device, or an abort during
//! that wait. Exactly one of them does, and never while another thread is in NCCL with the communicator.

use std::time::Duration;

use windlass_base::lock::Mutex;
use windlass_base::thread;

/// How often an abort checks whether another thread has left NCCL.
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
    /// A finalize or destroy waits for the device, outside NCCL: an abort may take over.
    Waits,
    Over,
}

impl Ends {
    /// Begins a destroy, in NCCL. False if there was a destroy or an abort before.
    #[must_use]
    pub(super) fn destroy(&self) -> bool {
        let mut state = self.0.lock();
        let begins = !state.is_destroyed && state.phase != Phase::Over;
        if begins {
            *state = State { phase: Phase::Busy, is_destroyed: true };
        }
        begins
    }

    /// Goes into NCCL, from outside or from the wait. False if an abort was faster: NCCL's communicator is gone.
    #[must_use]
    pub(super) fn enter(&self) -> bool {
        let mut state = self.0.lock();
        let enters = state.phase != Phase::Over;
        if enters {
            state.phase = Phase::Busy;
        }
        enters
    }

    /// Leaves NCCL to wait for the device: an abort may come now.
    pub(super) fn wait(&self) {
        self.leave_to(Phase::Waits);
    }

    /// Leaves NCCL, and the communicator goes on.
    pub(super) fn leave(&self) {
        self.leave_to(Phase::Open);
    }

    /// Leaves NCCL, which has ended the communicator.
    pub(super) fn end(&self) {
        self.leave_to(Phase::Over);
    }

    /// An abort takes over, as soon as no other thread is in NCCL with the communicator; waits for that at most `within`. False if the
    /// communicator has ended, or is still ending within NCCL.
    #[must_use]
    pub(super) fn abort(&self, within: Duration) -> bool {
        let take_over = || {
            let mut state = self.0.lock();
            match state.phase {
                Phase::Open | Phase::Waits => {
                    state.phase = Phase::Over;
                    Some(true)
                }
                Phase::Over => Some(false),
                Phase::Busy => None,
            }
        };
        thread::look_until(within, LOOK_EVERY, take_over).unwrap_or(false)
    }

    fn leave_to(&self, phase: Phase) {
        let mut state = self.0.lock();
        if state.phase == Phase::Busy {
            state.phase = phase;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT_ONCE: Duration = Duration::ZERO;

    /// An abort ends a wait, and the thread that waited cannot go back into NCCL. While a thread is in NCCL, an abort waits for it.
    #[test]
    fn one_end() {
        let ends = Ends::default();
        assert!(ends.destroy() && !ends.destroy() && !ends.abort(AT_ONCE));
        ends.wait();
        assert!(ends.abort(AT_ONCE) && !ends.enter() && !ends.abort(AT_ONCE) && !ends.destroy());
        ends.leave();
        assert!(!ends.enter());
    }

    /// A finalize returns and the communicator goes on; a destroy may follow.
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

    /// An abort goes on as soon as the other thread has left NCCL.
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
