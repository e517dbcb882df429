//! Handles the nodes of captures that record an event beside the streams: adds them, moves them, and finds those that a graph has.
//!
//! All of this is allowed while a graph is captured; only removing nodes and destroying the graph are not.

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
    /// The last nodes of its stream when it was added or moved last.
    pub last: Vec<usize>,
    /// The nodes that it comes after: `last`, and nodes from which no edge could be removed.
    after: Vec<usize>,
}

/// The nodes of a graph that record an event.
#[derive(Debug, Default)]
pub struct Records {
    /// The graph's own nodes.
    nodes: Vec<usize>,
    /// Child graphs that hold such nodes, at any depth.
    children: Vec<usize>,
}

impl Driver {
    /// Adds a node that records an event for work outside a capture, after all that `stream` holds in the capture now. Unlike
    /// [`Event::record`]'s node it stands beside the stream: nothing later waits for it.
    pub fn add_record(
        &self,
        stream: StreamHandle,
        capture: Capture,
        event: &Event,
    ) -> Result<RecordNode, Failure> {
        let last = self.last_nodes(stream)?;
        // SAFETY: the capture is under way, so its graph and nodes live; the event is alive; the output is a local.
        let add = |node: &mut usize| unsafe {
            let (before, count) = (last.as_ptr(), last.len());
            (self.calls.cuGraphAddEventRecordNode)(node, capture.graph, before, count, event.handle)
        };
        let node = self.output("cuGraphAddEventRecordNode", add, || about(stream))?;
        Ok(RecordNode { node, after: last.clone(), last })
    }

    /// Moves a record node of the same capture behind what `stream` holds now, which comes after what the node was behind before. Nothing may
    /// come after the node yet. Otherwise what `stream` holds could come after it: a cycle, and the driver refuses to instantiate the graph. A
    /// program that asks the graph for its nodes during the capture can cause that; this is not checked at each operation.
    ///
    /// The old edges are removed: a node behind all operations would make each of them signal it, beside the next operation.
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
            // In graphs that allocate memory no edge can be removed; one edge too many costs time only.
            code != SUCCESS
        });
        record.after.extend(new);
        Ok(())
    }

    /// Finds the nodes that record this event in the graph of a capture under way. Looks at every node once.
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

    /// Makes later work on `stream` in this capture come after all of `records`.
    pub fn come_after(&self, stream: StreamHandle, records: &Records) -> Result<(), Failure> {
        let nodes: Vec<usize> = records.nodes.iter().chain(&records.children).copied().collect();
        self.come_behind(stream, &nodes)
    }

    /// Makes later work on `stream` come after these nodes, which may be of another capture into the same graph. The driver does not tell such
    /// captures apart by an id, and refuses an event of one in the other. (Not for a graph from which nodes of ours were removed in between.)
    pub fn come_behind(&self, stream: StreamHandle, nodes: &[usize]) -> Result<(), Failure> {
        const ADD: u32 = 0;
        if nodes.is_empty() {
            return Ok(());
        }
        // Mostly these are the stream's own last nodes, or the application began the capture behind all that the graph holds.
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

    /// Makes the graph's own nodes record another event from now on. Those of child graphs, which belong to the application, are left alone. If
    /// that fails, they go on as before.
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
        // SAFETY: the node is of a graph that lives; the output is a local.
        let ask = |kind: &mut u32| unsafe { (self.calls.cuGraphNodeGetType)(node, kind) };
        self.output("cuGraphNodeGetType", ask, || format!("node {node:#x}"))
    }

    fn child_of(&self, node: usize) -> Result<usize, Failure> {
        // SAFETY: as above.
        let ask = |graph: &mut usize| unsafe { (self.calls.cuGraphChildGraphNodeGetGraph)(node, graph) };
        self.output("cuGraphChildGraphNodeGetGraph", ask, || format!("node {node:#x}"))
    }

    fn recorded_by(&self, node: usize) -> Result<usize, Failure> {
        // SAFETY: as above.
        let ask = |event: &mut usize| unsafe { (self.calls.cuGraphEventRecordNodeGetEvent)(node, event) };
        self.output("cuGraphEventRecordNodeGetEvent", ask, || format!("node {node:#x}"))
    }
}
