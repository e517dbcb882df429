//! NCCL totally orders a communicator's operations on a GPU; here is how, over streams and captures.
//!
//! Each operation records the communicator's event right after itself in its own stream; nothing is recorded later on a
//! stream that has gone on with other communicators' work. The next operation waits for it if the stream's *id* differs.
//! In a capture the first operation waits by a node that reaches outside the graph, each records by one, and among
//! themselves operations of one capture are ordered by an event of that capture. After a first capture every operation
//! waits: a graph may have run on any stream since.

use crate::gpu::stream::{Capture, Ordering};
use crate::gpu::{Driver, Failure, StreamHandle};
use crate::mailbox::supply::{CAPTURES, Kit};

/// What was issued so far.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// The stream of the last eager operation.
    last: Option<u64>,
    /// A capture has taken operations: the event may be recorded by graphs.
    shared_with_graphs: bool,
    /// Captures that were seen last, by turns, each with its own event of the kit.
    captures: [Option<Inside>; CAPTURES],
    next: usize,
}

#[derive(Clone, Copy, Debug)]
struct Inside {
    capture: u64,
    stream: u64,
}

/// Where an operation runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    pub stream: StreamHandle,
    /// What tells it from others.
    pub id: u64,
    pub capture: Option<Capture>,
}

impl Order {
    /// Lets the operation that comes now in `lane` run after all before it.
    pub fn before(&self, driver: &Driver, kit: &Kit, lane: Lane) -> Result<(), Failure> {
        match lane.capture {
            None if self.shared_with_graphs || self.last.is_some_and(|last| last != lane.id) => {
                driver.wait(lane.stream, &kit.done, Ordering::Inside)
            }
            None => Ok(()),
            Some(capture) => match self.find(capture) {
                Some((_, inside)) if inside.stream == lane.id => Ok(()),
                Some((index, _)) => driver.wait(lane.stream, &kit.captured[index], Ordering::Inside),
                None => driver.wait(lane.stream, &kit.done, Ordering::External),
            },
        }
    }

    /// The operation was issued in `lane`.
    pub fn after(&mut self, kit: &Kit, lane: Lane) -> Result<(), Failure> {
        let Some(capture) = lane.capture else {
            kit.done.record(lane.stream, Ordering::Inside)?;
            self.last = Some(lane.id);
            return Ok(());
        };
        self.shared_with_graphs = true;
        kit.done.record(lane.stream, Ordering::External)?;
        let index = match self.find(capture) {
            Some((index, _)) => index,
            None => {
                let index = self.next;
                self.next = (index + 1) % CAPTURES;
                index
            }
        };
        kit.captured[index].record(lane.stream, Ordering::Inside)?;
        self.captures[index] = Some(Inside { capture: capture.id, stream: lane.id });
        Ok(())
    }

    fn find(&self, capture: Capture) -> Option<(usize, Inside)> {
        let mut known = self.captures.iter().enumerate();
        known.find_map(|(index, inside)| {
            inside.filter(|inside| inside.capture == capture.id).map(|inside| (index, inside))
        })
    }
}
