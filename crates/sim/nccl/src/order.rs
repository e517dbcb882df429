//! NCCL's total order: operations of one communicator run one after another on a rank, whatever their streams.
//!
//! An eager operation takes a ticket when it is launched. A captured one waits for the one before it in the same capture;
//! else it has no place until it runs: it only never runs beside another.

use crate::driver::Captured;
use crate::refusal::lock;
use crate::segment::Left;
use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

#[derive(Default)]
pub struct Order {
    state: Mutex<State>,
    changed: Condvar,
    /// The last operation of the last capture.
    pub captured: Mutex<Option<Captured>>,
}

#[derive(Default)]
struct State {
    next: u64,
    serving: u64,
    /// Tickets that ended before their turn came.
    ended: BTreeSet<u64>,
    busy: bool,
}

const NAP: Duration = Duration::from_millis(100);

impl Order {
    pub fn ticket(&self) -> u64 {
        let mut state = lock(&self.state);
        state.next += 1;
        state.next - 1
    }

    /// Waits for the turn. `still` is asked now and then, with how long nothing has run, and may end the wait.
    pub fn begin(
        &self,
        ticket: Option<u64>,
        mut still: impl FnMut(Duration) -> Result<(), Left>,
    ) -> Result<(), Left> {
        let mut state = lock(&self.state);
        let mut idle_since = Instant::now();
        let mut seen = state.serving;
        while state.busy || ticket.is_some_and(|ticket| ticket != state.serving) {
            if state.busy || seen != state.serving {
                seen = state.serving;
                idle_since = Instant::now();
            }
            still(idle_since.elapsed())?;
            state = self.changed.wait_timeout(state, NAP).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        still(Duration::ZERO)?;
        state.busy = true;
        Ok(())
    }

    /// Ends an operation that had begun.
    pub fn end(&self, ticket: Option<u64>) {
        lock(&self.state).busy = false;
        self.skip(ticket);
    }

    /// Gives up the turn of an operation that never began.
    pub fn skip(&self, ticket: Option<u64>) {
        let mut state = lock(&self.state);
        state.ended.extend(ticket);
        while {
            let serving = state.serving;
            state.ended.remove(&serving)
        } {
            state.serving += 1;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Makes waiters look again.
    pub fn wake(&self) {
        self.changed.notify_all();
    }
}
