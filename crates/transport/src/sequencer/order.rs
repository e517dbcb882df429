//! Orders a communicator's operations on a GPU totally, as NCCL does, over streams and captures. The sequencer's lock is held.
//!
//! An eager operation records the communicator's event, `done`, right behind itself in its own stream. Nothing is recorded there later, when
//! the stream may hold work of other communicators. The next operation waits for the event if its stream has another *id*.
//!
//! In a capture the first operation waits for the event by a node that reaches outside the graph. One *record node* records the event after
//! all operations of the graph. It moves behind each new operation and stands beside the streams, so that no stream waits for it (0.7 us an
//! operation where each recorded in its stream). An operation of a graph comes after the nodes that the one before left, whatever their
//! streams. Captures one after the other into one graph have one id and count as one capture. After the first capture every operation waits,
//! because a graph may have run on any stream since.

use crate::sequencer::device_resources::LaunchResources;
use windlass_base::gpu::record::{RecordNode, Records};
use windlass_base::gpu::stream::{Capture, Ordering, Place};
use windlass_base::gpu::{Driver, Failure, StreamHandle};

/// How many captures are remembered; the next one replaces the least recently used one. Each body of a conditional node is a capture of its
/// own, while the graph around it is captured.
const CAPTURES: usize = 16;

/// How graphs that captured a communicator's operations run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Graphs {
    /// Beside other graphs and eager operations, so all are ordered against each other.
    #[default]
    Mixed,
    /// Never while another operation of the communicator is in flight: the program guarantees it (NCCL_GRAPH_MIXING_SUPPORT=0). A program that
    /// breaks its word has two operations in flight at once, in NCCL, too.
    ///
    /// A capture then holds kernels alone, as NCCL's does, so that it may be the body of a conditional node, which may hold no event nodes.
    /// Operations of one capture are still in order.
    Apart,
}

/// The order of the operations issued so far.
#[derive(Debug, Default)]
pub(super) struct Order {
    graphs: Graphs,
    /// Id of the stream of the last eager operation; nobody asks for it once `shared_with_graphs`.
    last: Option<u64>,
    /// The event was recorded, or a capture has taken operations.
    is_recorded: bool,
    /// A capture has taken operations, so graphs may record the event.
    shared_with_graphs: bool,
    /// The captures used last, the latest first.
    captures: Vec<Known>,
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

/// Where an operation runs: on a stream that is eager or captured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    pub stream: StreamHandle,
    pub place: Place,
}

impl Lane {
    pub(super) fn of(driver: &Driver, stream: StreamHandle) -> Result<Lane, Failure> {
        Ok(Lane { stream, place: driver.place_of(stream)? })
    }

    pub(super) fn capture(&self) -> Option<Capture> {
        match self.place {
            Place::Captured(capture) => Some(capture),
            Place::Eager(_) => None,
        }
    }
}

impl Order {
    pub(super) fn new(graphs: Graphs) -> Order {
        Order { graphs, ..Order::default() }
    }

    /// Where work issued to a stream goes. Once graphs share the order every eager operation waits for the event, and no stream's id is asked.
    pub(super) fn lane(&self, driver: &Driver, stream: StreamHandle) -> Result<Lane, Failure> {
        if !self.shared_with_graphs {
            return Lane::of(driver, stream);
        }
        let place = driver.capture_of(stream)?.map_or(Place::Eager(0), Place::Captured);
        Ok(Lane { stream, place })
    }

    /// Whether all operations so far were eager, on the stream of `lane`.
    pub(super) fn is_all_in(&self, lane: Lane) -> bool {
        !self.shared_with_graphs && matches!(lane.place, Place::Eager(id) if self.last == Some(id))
    }

    /// Whether a capture has taken operations.
    pub(super) fn is_shared_with_graphs(&self) -> bool {
        self.shared_with_graphs
    }

    /// Makes the operation that comes now in `lane` run after all before it.
    pub(super) fn before(
        &mut self,
        driver: &Driver,
        resources: &LaunchResources,
        lane: Lane,
    ) -> Result<(), Failure> {
        let capture = match lane.place {
            Place::Eager(id) if self.shared_with_graphs || self.last.is_some_and(|last| last != id) => {
                return driver.wait(lane.stream, &resources.done, Ordering::Inside);
            }
            Place::Eager(_) => return Ok(()),
            Place::Captured(capture) => capture,
        };
        if let Some(known) = self.known(capture) {
            return match &known.behind {
                Behind::Record(record) => driver.come_behind(lane.stream, record.last()),
                Behind::Nodes(nodes) => driver.come_behind(lane.stream, nodes),
            };
        }
        if self.graphs == Graphs::Apart {
            return Ok(());
        }
        if self.shared_with_graphs {
            driver.come_after(lane.stream, self.look(driver, resources, capture)?)?;
        }
        if !self.is_recorded {
            resources.done.record(resources.history.handle, Ordering::Inside)?;
            self.is_recorded = true;
        }
        // Every capture waits, whatever ran before: captures of the same calls are graphs of one shape, which update each other.
        driver.wait(lane.stream, &resources.done, Ordering::External)
    }

    /// Notes that the operation was issued in `lane`, after [`Order::before`].
    pub(super) fn after(
        &mut self,
        driver: &Driver,
        resources: &LaunchResources,
        lane: Lane,
    ) -> Result<(), Failure> {
        let capture = match lane.place {
            Place::Captured(capture) => capture,
            Place::Eager(id) => {
                resources.done.record(lane.stream, Ordering::Inside)?;
                (self.last, self.is_recorded) = (Some(id), true);
                return Ok(());
            }
        };
        let graphs = self.graphs;
        self.shared_with_graphs |= graphs == Graphs::Mixed;
        if let Some(known) = self.known(capture) {
            match &mut known.behind {
                Behind::Record(record) => driver.move_record(lane.stream, capture, record)?,
                Behind::Nodes(nodes) => *nodes = driver.last_nodes(lane.stream)?,
            }
            return Ok(());
        }
        let behind = match graphs {
            Graphs::Mixed => Behind::Record(self.first_record(driver, resources, lane.stream, capture)?),
            Graphs::Apart => Behind::Nodes(driver.last_nodes(lane.stream)?),
        };
        self.captures.truncate(CAPTURES - 1);
        self.captures.insert(0, Known { capture, behind });
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
                self.captures.retain(|known| known.capture.graph != capture.graph);
                Looked { capture, found }
            }
        };
        Ok(&self.looked.insert(looked).found)
    }

    fn known(&mut self, capture: Capture) -> Option<&mut Known> {
        let at = self.captures.iter().position(|known| known.capture.id == capture.id)?;
        self.captures[..=at].rotate_right(1);
        self.captures.first_mut()
    }
}
