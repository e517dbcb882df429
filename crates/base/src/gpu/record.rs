//! Nodes of captures that record an event, beside the streams: adding them, moving them, finding those that a graph has.
//!
//! All that is done here to a graph is allowed while it is captured: only nodes may not go, and it may not be destroyed.

use crate::gpu::failure::{Failure, SUCCESS};
use crate::gpu::library::Driver;
use crate::gpu::stream::{Capture, Event, StreamHandle, about};

/// `CUgraphNodeType`.
const CHILD_GRAPH: u32 = 4;
const EVENT_RECORD: u32 = 7;

/// A node of a capture that records an event.
#[derive(Debug)]
pub struct RecordNode {
    node: usize,
    /// What its stream held when it was added or moved last.
    last: Vec<usize>,
    /// What it comes after: these, and what no edge could be taken from.
    after: Vec<usize>,
}

impl RecordNode {
    /// What it is behind.
    pub fn last(&self) -> &[usize] {
        &self.last
    }
}

/// What of a graph records an event.
#[derive(Debug, Default)]
pub struct Records {
    /// Nodes of the graph's own.
    nodes: Vec<usize>,
    /// Child graphs with such nodes, however deep.
    children: Vec<usize>,
}

impl Driver {
    /// Adds a node that records an event for what is outside a capture, after all that this stream of it holds now. Unlike
    /// [`Event::record`]'s, it stands beside the stream: nothing that comes later waits for it.
    pub fn add_record(
        &self,
        stream: StreamHandle,
        capture: Capture,
        event: &Event,
    ) -> Result<RecordNode, Failure> {
        let last = self.last_nodes(stream)?;
        let mut node = 0;
        // SAFETY: the capture is under way, so its graph and nodes live; the event is alive; the output is a local.
        let code = unsafe {
            (self.calls.cuGraphAddEventRecordNode)(
                &mut node,
                capture.graph,
                last.as_ptr(),
                last.len(),
                event.handle,
            )
        };
        self.check("cuGraphAddEventRecordNode", code, || about(stream))?;
        Ok(RecordNode { node, after: last.clone(), last })
    }

    /// Moves such a node of the same capture behind what this stream of it holds now, which comes after what it was behind.
    /// Nothing may come after the node yet, or what this stream holds could come after that: a cycle, which the driver refuses
    /// to make executable. Who asks the graph for its nodes during the capture can bring that about; it is not looked for at
    /// each operation.
    ///
    /// The old edges go: behind all operations at once, each of them would have to signal beside what is next in its own order.
    pub fn move_record(
        &self,
        stream: StreamHandle,
        capture: Capture,
        record: &mut RecordNode,
    ) -> Result<(), Failure> {
        let last = self.last_nodes(stream)?;
        record.last.clone_from(&last);
        let (kept, new): (Vec<usize>, Vec<usize>) =
            last.into_iter().partition(|node| record.after.contains(node));
        for before in &new {
            // SAFETY: as above; edges may come and go while a graph is captured.
            let code = unsafe { (self.calls.cuGraphAddDependencies)(capture.graph, before, &record.node, 1) };
            self.check("cuGraphAddDependencies", code, || about(stream))?;
        }
        record.after.retain(|before| {
            if kept.contains(before) {
                return true;
            }
            // SAFETY: as above.
            let code =
                unsafe { (self.calls.cuGraphRemoveDependencies)(capture.graph, before, &record.node, 1) };
            // Graphs that allocate let no edge go: one too many costs time only.
            code != SUCCESS
        });
        record.after.extend(new);
        Ok(())
    }

    /// What of the graph of a capture under way records this event. Looks at every node once.
    pub fn records_of(&self, capture: Capture, event: &Event) -> Result<Records, Failure> {
        let mut records = Records::default();
        let mut open = Vec::new();
        for top in self.nodes_of(capture.graph)? {
            open.push(top);
            while let Some(node) = open.pop() {
                match self.type_of(node)? {
                    CHILD_GRAPH => open.extend(self.nodes_of(self.child_of(node)?)?),
                    EVENT_RECORD if self.recorded_by(node)? == event.handle => {
                        let found = if node == top { &mut records.nodes } else { &mut records.children };
                        found.push(top);
                        open.clear();
                    }
                    _ => {}
                }
            }
        }
        Ok(records)
    }

    /// Lets what comes next on a stream of their capture come after all of these.
    pub fn come_after(&self, stream: StreamHandle, records: &Records) -> Result<(), Failure> {
        let nodes: Vec<usize> = records.nodes.iter().chain(&records.children).copied().collect();
        self.come_behind(stream, &nodes)
    }

    /// Lets what comes next on a stream come after these nodes, which may be of another capture into the same graph: the driver
    /// tells these by no id, and refuses an event of the one in the other. (Not for a graph from which nodes of ours were
    /// removed between.)
    pub fn come_behind(&self, stream: StreamHandle, nodes: &[usize]) -> Result<(), Failure> {
        const ADD: u32 = 0;
        if nodes.is_empty() {
            return Ok(());
        }
        // The stream's own last, mostly; or the application has begun the capture behind all that the graph holds.
        let last = self.last_nodes(stream)?;
        let new: Vec<usize> = nodes.iter().filter(|node| !last.contains(node)).copied().collect();
        if new.is_empty() {
            return Ok(());
        }
        // SAFETY: the capture is under way, so its nodes live.
        let code =
            unsafe { (self.calls.cuStreamUpdateCaptureDependencies)(stream.0, new.as_ptr(), new.len(), ADD) };
        self.check("cuStreamUpdateCaptureDependencies", code, || about(stream))
    }

    /// Lets them record another event from now on; not what child graphs have, which is the application's. Where that
    /// fails they go on as they did.
    pub fn redirect(&self, records: &Records, event: &Event) {
        for node in &records.nodes {
            // SAFETY: the capture is under way, so its nodes live; the event is alive.
            let code = unsafe { (self.calls.cuGraphEventRecordNodeSetEvent)(*node, event.handle) };
            self.note("cuGraphEventRecordNodeSetEvent", code, || format!("node {node:#x}"));
        }
    }

    fn nodes_of(&self, graph: usize) -> Result<Vec<usize>, Failure> {
        let mut count = 0;
        let detail = || format!("graph {graph:#x}");
        // SAFETY: the graph lives, as above or as part of one that does; without a list only the number is written.
        let code = unsafe { (self.calls.cuGraphGetNodes)(graph, std::ptr::null_mut(), &mut count) };
        self.check("cuGraphGetNodes", code, detail)?;
        let mut nodes = vec![0; count];
        if count > 0 {
            // SAFETY: as above; the list has so much room.
            let code = unsafe { (self.calls.cuGraphGetNodes)(graph, nodes.as_mut_ptr(), &mut count) };
            self.check("cuGraphGetNodes", code, detail)?;
            nodes.truncate(count);
        }
        Ok(nodes)
    }

    fn type_of(&self, node: usize) -> Result<u32, Failure> {
        let mut kind = 0;
        // SAFETY: the node is of a graph that lives; the output is a local.
        let code = unsafe { (self.calls.cuGraphNodeGetType)(node, &mut kind) };
        self.check("cuGraphNodeGetType", code, || format!("node {node:#x}"))?;
        Ok(kind)
    }

    fn child_of(&self, node: usize) -> Result<usize, Failure> {
        let mut graph = 0;
        // SAFETY: as above.
        let code = unsafe { (self.calls.cuGraphChildGraphNodeGetGraph)(node, &mut graph) };
        self.check("cuGraphChildGraphNodeGetGraph", code, || format!("node {node:#x}"))?;
        Ok(graph)
    }

    fn recorded_by(&self, node: usize) -> Result<usize, Failure> {
        let mut event = 0;
        // SAFETY: as above.
        let code = unsafe { (self.calls.cuGraphEventRecordNodeGetEvent)(node, &mut event) };
        self.check("cuGraphEventRecordNodeGetEvent", code, || format!("node {node:#x}"))?;
        Ok(event)
    }
}
