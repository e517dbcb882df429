//! NCCL's total order: operations of one communicator run one after another on a rank, whatever their streams.
//!
//! An eager operation takes a ticket when it is launched. A captured one waits for the one before it in the same capture, and has no place
//! until it runs: then it only never runs beside another. Graphs and eager operations are ordered as in NCCL, by an event behind each operation
//! ([`Serial`]).

use crate::driver::{Captured, Context, Reach, Stream, driver};
use crate::refusal::{Outcome, lock};
use crate::segment::Left;
use crate::settings::settings;
use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

#[derive(Default)]
pub struct Order {
    state: Mutex<State>,
    changed: Condvar,
    /// The last operation of the last capture.
    pub captured: Mutex<Option<Captured>>,
    serial: Mutex<Serial>,
}

/// What orders graphs: an event behind the last operation, eager or of a graph. The first one of a capture waits for it when its graph is
/// launched; once there is a capture, so does every eager one. Without mixing there is none.
#[derive(Default)]
struct Serial {
    event: Option<usize>,
    is_captured: bool,
    /// Communicators in this order.
    owners: usize,
}

/// Where an operation is launched.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Eager,
    FirstOfCapture,
    InCapture,
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

    /// A communicator is in this order.
    pub fn join(&self) {
        lock(&self.serial).owners += 1;
    }

    /// One has ended.
    pub fn leave(&self) {
        let mut serial = lock(&self.serial);
        serial.owners = serial.owners.saturating_sub(1);
        if serial.owners == 0
            && let Some(event) = serial.event.take()
        {
            driver().iter().for_each(|driver| driver.end_event(event));
        }
    }

    /// What is launched now on a stream of this context comes after all before.
    pub fn before(&self, place: Place, stream: Stream, context: Context) -> Outcome {
        if !settings().mixes_graphs {
            return Ok(());
        }
        let mut serial = lock(&self.serial);
        let event = match serial.event {
            Some(event) => event,
            None => *serial.event.insert(driver()?.new_event(context)?),
        };
        match place {
            Place::Eager if serial.is_captured => driver()?.wait(event, stream, Reach::Inside),
            Place::FirstOfCapture => driver()?.wait(event, stream, Reach::Outside),
            Place::Eager | Place::InCapture => Ok(()),
        }
    }

    /// It was launched.
    pub fn after(&self, place: Place, stream: Stream) -> Outcome {
        if !settings().mixes_graphs {
            return Ok(());
        }
        let mut serial = lock(&self.serial);
        let Some(event) = serial.event else { return Ok(()) };
        serial.is_captured |= place != Place::Eager;
        let reach = if place == Place::Eager { Reach::Inside } else { Reach::Outside };
        driver()?.record(event, stream, reach)
    }

    /// Makes waiters look again.
    pub fn wake(&self) {
        self.changed.notify_all();
    }
}
