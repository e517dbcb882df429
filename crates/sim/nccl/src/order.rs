//! NCCL's total order: operations of one communicator run one after another on a rank, whatever their streams.
//!
//! An eager operation takes a ticket when it is launched. A captured operation has none: it depends on the one before it in the same
//! capture, and never runs beside another operation. Graphs and eager operations are ordered as in NCCL, by an event after each operation
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
    /// The point after the last captured operation.
    pub captured: Mutex<Option<Captured>>,
    serial: Mutex<Serial>,
}

/// An event after the last operation, eager or captured, which orders graphs. The first operation of a capture waits for the event whenever
/// its graph runs. Once an operation was captured, eager ones wait for it, too. There is none with `NCCL_GRAPH_MIXING_SUPPORT=0`.
#[derive(Default)]
struct Serial {
    event: Option<usize>,
    is_captured: bool,
    /// Communicators in this order.
    owners: usize,
}

/// How an operation is launched.
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

    /// Waits until the operation may run. `still` is called at least every 100 ms with the time for which nothing has run; its error ends
    /// the wait.
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

    /// Ends an operation that has begun.
    pub fn end(&self, ticket: Option<u64>) {
        lock(&self.state).busy = false;
        self.skip(ticket);
    }

    /// Skips an operation that never began.
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

    /// Adds a communicator to this order.
    pub fn join(&self) {
        lock(&self.serial).owners += 1;
    }

    /// Removes a communicator; with the last one the event is destroyed.
    pub fn leave(&self) {
        let mut serial = lock(&self.serial);
        serial.owners = serial.owners.saturating_sub(1);
        if serial.owners == 0
            && let Some(event) = serial.event.take()
        {
            driver().iter().for_each(|driver| driver.end_event(event));
        }
    }

    /// Orders the operation that is launched next on `stream` after all earlier ones. `context` is the communicator's.
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

    /// Records the event after an operation that was launched on `stream`.
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

    /// Wakes threads in [`Order::begin`], which then call `still`.
    pub fn wake(&self) {
        self.changed.notify_all();
    }
}
