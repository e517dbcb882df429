//! NCCL totally orders a communicator's operations on a GPU; here is how, over streams and captures.
//!
//! Each operation records the communicator's event right after itself in its own stream; nothing is recorded later on a
//! stream that has gone on with other communicators' work. The next operation waits for it if the stream's *id* differs.
//! In a capture the first operation waits by a node that reaches outside the graph, and one other records after them all: it stands
//! beside the streams, so that none waits for it (0.7 us an operation where each recorded in its stream), and moves behind each
//! new one. Among themselves operations of one graph come after the nodes that the one before left, whatever their streams; captures
//! one after the other into one graph have one id, so they are one to us. After a first capture every operation waits: a graph
//! may have run on any stream since.
//!
//! [`Graphs::Apart`]: a capture holds kernels alone, as NCCL's does then, so that it may be the body of a conditional node, which event nodes
//! may not be part of. Operations of one capture are in order all the same; that a graph runs beside nothing else of the communicator's
//! is the program's guarantee. What it breaks by breaking that it breaks in NCCL, too: two operations of a communicator at once.
//!
//! Of one graph one node records, or the one that happens to run last could be behind a part only. Captures into a graph that has
//! such a node already (of one that [`CAPTURES`] others made us forget) and those into which a graph was
//! launched or put as a child before come after it, and the node that gave way records another event from then on.
//! It is looked for in the graph at the first operation of a capture that is not known.
//!
//! Not seen is a graph that becomes a child of one *after* the communicator's first operation there (by a launch into the capture,
//! which a driver of CUDA 13.0 was seen to refuse, or by the application's own hand between two captures): it is not ordered
//! against operations on other streams; and if none of the communicator's follows in the graph, its node and ours are not ordered,
//! so that what follows eagerly on another stream may come too early. NCCL 2.28.9 has this gap too. A record in the user's stream would
//! close it, for 0.8 us an operation.

use crate::sequencer::device_resources::LaunchResources;
use windlass_base::gpu::record::{RecordNode, Records};
use windlass_base::gpu::stream::{Capture, Ordering, Place};
use windlass_base::gpu::{Driver, Failure, StreamHandle};

/// Captures that are in progress at once and use one communicator; the next one forgets that which was used least lately. Each body of a
/// conditional node is captured by itself, while the graph around it is.
const CAPTURES: usize = 16;

/// How graphs that captured a communicator's operations run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Graphs {
    /// Beside others and beside eager operations, which are to be ordered against them.
    #[default]
    Mixed,
    /// Never while any other operation of the communicator is in flight, by the program's word (NCCL_GRAPH_MIXING_SUPPORT=0).
    Apart,
}

/// What was issued so far.
#[derive(Debug, Default)]
pub(super) struct Order {
    graphs: Graphs,
    /// The stream of the last eager operation.
    last: Option<u64>,
    /// A capture has taken operations: the event may be recorded by graphs.
    shared_with_graphs: bool,
    /// The captures that were seen last, the last one first.
    captures: Vec<Known>,
    looked: Option<Looked>,
}

/// A capture that has taken operations.
#[derive(Debug)]
struct Known {
    capture: Capture,
    behind: Behind,
}

/// What the last operation of a capture left there.
#[derive(Debug)]
enum Behind {
    /// A node behind it. Nothing comes after that.
    Record(RecordNode),
    /// What its stream held then: of graphs apart.
    Nodes(Vec<usize>),
}

/// The capture whose graph was looked through last, while no other took a first operation.
#[derive(Debug)]
struct Looked {
    capture: Capture,
    found: Records,
}

/// Where an operation runs.
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

    /// Whether all operations so far were eager ones where this one is.
    pub(super) fn is_all_in(&self, lane: Lane) -> bool {
        !self.shared_with_graphs && matches!(lane.place, Place::Eager(id) if self.last == Some(id))
    }

    /// Whether a capture has taken operations.
    pub(super) fn is_shared_with_graphs(&self) -> bool {
        self.shared_with_graphs
    }

    /// Lets the operation that comes now in `lane` run after all before it.
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
        // Also on the same stream, where it adds nothing: which stream it was cannot be asked.
        driver.wait(lane.stream, &resources.done, Ordering::External)
    }

    /// The operation was issued in `lane`, after [`Order::before`] there.
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
                self.last = Some(id);
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

    /// The node of a capture that records from now on; those that did give way.
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

    /// What of a capture's graph records already, of another capture's operations. That capture gets a new node at its next
    /// operation: something comes after its present one now.
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
                // Perhaps a graph of before with the same handle: of no use any more either.
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
