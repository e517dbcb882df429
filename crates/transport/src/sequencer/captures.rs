//! The nodes that order a communicator's operations in graphs. The sequencer's lock is held.
//!
//! In a capture the first operation waits for the communicator's event by a node that reaches outside the graph. One *record node* records the
//! event after all operations of the graph. It moves behind each new operation and stands beside the streams, so that no stream waits for it
//! (0.7 us an operation where each recorded in its stream). An operation of a graph comes after the nodes that the one before left, whatever
//! their streams. Captures one after the other into one graph have one id and count as one capture.

use crate::sequencer::device_resources::LaunchResources;
use crate::sequencer::order::{Graphs, Order};
use windlass_base::gpu::record::{RecordNode, Records};
use windlass_base::gpu::stream::{Capture, Ordering};
use windlass_base::gpu::{Driver, Failure, StreamHandle};

/// How many captures are remembered; the next one replaces the least recently used one. Each body of a conditional node is a capture of its
/// own, while the graph around it is captured.
const CAPTURES: usize = 16;

/// The captures that have taken operations.
#[derive(Debug, Default)]
pub(super) struct Captures {
    /// Those used last, the latest first.
    known: Vec<Known>,
    looked: Option<Looked>,
}

/// A capture that has taken operations.
#[derive(Debug)]
struct Known {
    capture: Capture,
    behind: Behind,
}

/// What the last operation of a capture left in the graph.
#[derive(Debug)]
enum Behind {
    /// The record node behind it. Nothing comes after this node.
    Record(RecordNode),
    /// The nodes that its stream held then, with [`Graphs::Apart`].
    Nodes(Vec<usize>),
}

/// The capture whose graph was searched last for record nodes. It is dropped when another capture takes its first operation.
#[derive(Debug)]
struct Looked {
    capture: Capture,
    found: Records,
}

impl Captures {
    /// Makes the operation that a capture takes now on `stream` run after all before it.
    pub(super) fn before(
        &mut self,
        driver: &Driver,
        resources: &LaunchResources,
        (stream, capture): (StreamHandle, Capture),
        (order, graphs): (&mut Order, Graphs),
    ) -> Result<(), Failure> {
        if let Some(known) = self.known(capture) {
            return match &known.behind {
                Behind::Record(record) => driver.come_behind(stream, &record.last),
                Behind::Nodes(nodes) => driver.come_behind(stream, nodes),
            };
        }
        if graphs == Graphs::Apart {
            return Ok(());
        }
        if order.is_shared {
            driver.come_after(stream, self.look(driver, resources, capture)?)?;
        }
        if order.recorded.is_none() {
            resources.done.record(resources.history.handle, Ordering::Inside)?;
            order.record_nothing();
        }
        // Every capture waits, whatever ran before: captures of the same calls are graphs of one shape, which update each other.
        driver.wait(stream, &resources.done, Ordering::External)
    }

    /// Notes that the operation was issued, after [`Captures::before`].
    pub(super) fn after(
        &mut self,
        driver: &Driver,
        resources: &LaunchResources,
        (stream, capture): (StreamHandle, Capture),
        graphs: Graphs,
    ) -> Result<(), Failure> {
        if let Some(known) = self.known(capture) {
            match &mut known.behind {
                Behind::Record(record) => driver.move_record(stream, capture, record)?,
                Behind::Nodes(nodes) => *nodes = driver.last_nodes(stream)?,
            }
            return Ok(());
        }
        let behind = match graphs {
            Graphs::Mixed => Behind::Record(self.first_record(driver, resources, stream, capture)?),
            Graphs::Apart => Behind::Nodes(driver.last_nodes(stream)?),
        };
        self.known.truncate(CAPTURES - 1);
        self.known.insert(0, Known { capture, behind });
        Ok(())
    }

    /// Adds the record node of a capture. Record nodes that its graph had before record `passed` from now on: of two that record `done`, the one
    /// that happens to run last could be behind some of the operations only.
    fn first_record(
        &mut self,
        driver: &Driver,
        resources: &LaunchResources,
        stream: StreamHandle,
        capture: Capture,
    ) -> Result<RecordNode, Failure> {
        let record = driver.add_record(stream, capture, &resources.done)?;
        if let Some(looked) = self.looked.take().filter(|looked| looked.capture == capture) {
            driver.redirect(&looked.found, &resources.passed);
        }
        Ok(record)
    }

    /// Finds the record nodes that a capture's graph already has. They are of a capture that was forgotten ([`CAPTURES`]), or of a graph that
    /// was launched into this one or made its child before. Their capture gets a new node at its next operation, as something comes after its
    /// present one now.
    ///
    /// A graph that becomes a child *after* the communicator's first operation is not found. The program does that by a launch into the capture,
    /// which a driver of CUDA 13.0 refused, or by hand between two captures. The child is not ordered against operations on other streams. If
    /// no operation of the communicator follows in the graph, the two record nodes are not ordered, and later eager work on another stream may
    /// run too early. NCCL 2.28.9 has this gap, too. A record in the user's stream would close it, for 0.8 us an operation.
    fn look(
        &mut self,
        driver: &Driver,
        resources: &LaunchResources,
        capture: Capture,
    ) -> Result<&Records, Failure> {
        let looked = match self.looked.take().filter(|looked| looked.capture == capture) {
            Some(looked) => looked,
            None => {
                let found = driver.records_of(capture, &resources.done)?;
                // A remembered capture with this handle, even of an earlier graph, is of no use any more.
                self.known.retain(|known| known.capture.graph != capture.graph);
                Looked { capture, found }
            }
        };
        Ok(&self.looked.insert(looked).found)
    }

    fn known(&mut self, capture: Capture) -> Option<&mut Known> {
        let at = self.known.iter().position(|known| known.capture.id == capture.id)?;
        self.known[..=at].rotate_right(1);
        self.known.first_mut()
    }
}
