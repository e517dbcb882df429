//! NCCL totally orders a communicator's operations on a GPU; here is how, over streams and captures.
//!
//! Each operation records the communicator's event right after itself in its own stream; nothing is recorded later on a
//! stream that has gone on with other communicators' work. The next operation waits for it if the stream's *id* differs.
//! In a capture the first operation waits by a node that reaches outside the graph, and one other records after them all: it stands
//! beside the streams, so that none waits for it (0.7 us an operation where each recorded in its stream), and moves behind each
//! new one. Among themselves operations of one capture are ordered by an event of that capture, whatever their
//! streams. After a first capture every operation waits: a graph may have run on any stream since.
//!
//! Not ordered are two such nodes of one graph: of two captures into it, or of a graph launched into the capture of another.

use crate::gpu::stream::{Capture, Ordering, RecordNode};
use crate::gpu::{Driver, Failure, StreamHandle};
use crate::turns::supply::{CAPTURES, Kit};

/// What was issued so far.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// The stream of the last eager operation.
    last: Option<u64>,
    last_handle: Option<StreamHandle>,
    /// A capture has taken operations: the event may be recorded by graphs.
    shared_with_graphs: bool,
    /// Captures that were seen last, by turns, each with its own event of the kit, and the node that records.
    captures: [Option<(u64, RecordNode)>; CAPTURES],
    next: usize,
}

/// Where an operation runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    pub stream: StreamHandle,
    pub place: Place,
}

/// Into the stream itself, or into a capture that it is part of.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// With the stream's id, which tells it from others.
    Eager(u64),
    Captured(Capture),
}

impl Lane {
    /// The capture is asked for first: the driver refuses to tell the id of a stream that is part of one.
    pub fn of(driver: &Driver, stream: StreamHandle) -> Result<Lane, Failure> {
        let place = match driver.capture_of(stream)? {
            Some(capture) => Place::Captured(capture),
            None => Place::Eager(driver.stream_id(stream)?),
        };
        Ok(Lane { stream, place })
    }

    pub fn capture(&self) -> Option<Capture> {
        match self.place {
            Place::Captured(capture) => Some(capture),
            Place::Eager(_) => None,
        }
    }
}

impl Order {
    /// Whether all operations so far were eager ones on the stream with this handle. A stream that was destroyed and another
    /// with its handle are not told apart: enough where only NCCL's own order is kept up, not for our rings.
    pub fn is_all_on(&self, stream: StreamHandle) -> bool {
        /// `cudaStreamPerThread`: every thread's is another.
        const PER_THREAD: usize = 2;
        !self.shared_with_graphs && self.last_handle == Some(stream) && stream.0 != PER_THREAD
    }

    /// Lets the operation that comes now in `lane` run after all before it.
    pub fn before(&self, driver: &Driver, kit: &Kit, lane: Lane) -> Result<(), Failure> {
        match lane.place {
            Place::Eager(id) if self.shared_with_graphs || self.last.is_some_and(|last| last != id) => {
                driver.wait(lane.stream, &kit.done, Ordering::Inside)
            }
            Place::Eager(_) => Ok(()),
            // Also on the same stream, where it adds nothing: which stream it was cannot be asked.
            Place::Captured(capture) => match self.find(capture) {
                Some(index) => driver.wait(lane.stream, &kit.captured[index], Ordering::Inside),
                None => driver.wait(lane.stream, &kit.done, Ordering::External),
            },
        }
    }

    /// The operation was issued in `lane`.
    pub fn after(&mut self, driver: &Driver, kit: &Kit, lane: Lane) -> Result<(), Failure> {
        let capture = match lane.place {
            Place::Captured(capture) => capture,
            Place::Eager(id) => {
                kit.done.record(lane.stream, Ordering::Inside)?;
                self.last = Some(id);
                self.last_handle = Some(lane.stream);
                return Ok(());
            }
        };
        self.shared_with_graphs = true;
        match self.captures.iter_mut().enumerate().find(|(_, known)| is_of(known, capture)) {
            Some((index, known)) => {
                if let Some((_, record)) = known {
                    driver.move_record(lane.stream, capture, record)?;
                }
                kit.captured[index].record(lane.stream, Ordering::Inside)?;
            }
            None => {
                let record = driver.add_record(lane.stream, capture, &kit.done)?;
                kit.captured[self.next].record(lane.stream, Ordering::Inside)?;
                self.captures[self.next] = Some((capture.id, record));
                self.next = (self.next + 1) % CAPTURES;
            }
        }
        Ok(())
    }

    /// Which of the kit's events belongs to this capture.
    fn find(&self, capture: Capture) -> Option<usize> {
        self.captures.iter().position(|known| is_of(known, capture))
    }
}

fn is_of(known: &Option<(u64, RecordNode)>, capture: Capture) -> bool {
    known.as_ref().is_some_and(|(id, _)| *id == capture.id)
}
