//! Graphs and their nodes.

use crate::capture;
use crate::code::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, Code};
use crate::conditional::{Condition, Conditional};
use crate::simulator::simulator;
use crate::sync::lock;
use crate::table::Handle;
use crate::user_object::Held;
use crate::work::Work;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, OnceLock};

pub struct Graph {
    pub handle: Handle,
    /// Whether the graph is part of a child or conditional node, and destroyed with it.
    pub is_child: bool,
    /// The id of captures into this graph: the driver gives all of them the same one.
    pub capture_id: OnceLock<u64>,
    pub objects: Mutex<Held>,
    /// Conditions that were made for its conditional nodes.
    pub conditions: Mutex<Vec<Arc<Condition>>>,
    nodes: Mutex<Vec<Arc<Node>>>,
}

pub struct Node {
    pub handle: Handle,
    pub graph: Handle,
    /// The node that this one was cloned from.
    pub original: Option<Handle>,
    pub state: Mutex<NodeState>,
}

#[derive(Clone)]
pub struct NodeState {
    pub content: Content,
    pub dependencies: Vec<Handle>,
}

#[derive(Clone)]
pub enum Content {
    Work(Work),
    Child(Arc<Graph>),
    Conditional(Arc<Conditional>),
}

impl Content {
    /// `CUgraphNodeType`.
    pub fn node_type(&self) -> u32 {
        match self {
            Content::Work(work) => work.node_type(),
            Content::Child(_) => 4,
            Content::Conditional(_) => 13,
        }
    }
}

impl Content {
    /// Graphs that are part of the node and destroyed with it.
    pub fn graphs(&self) -> &[Arc<Graph>] {
        match self {
            Content::Work(_) => &[],
            Content::Child(child) => std::slice::from_ref(child),
            Content::Conditional(conditional) => &conditional.bodies,
        }
    }
}

impl Graph {
    pub fn new(handle: Handle) -> Self {
        Graph {
            handle,
            is_child: false,
            capture_id: OnceLock::new(),
            objects: Mutex::default(),
            conditions: Mutex::default(),
            nodes: Mutex::default(),
        }
    }

    /// A graph that is part of a node.
    pub fn part(handle: Handle) -> Self {
        Graph { is_child: true, ..Graph::new(handle) }
    }

    /// Makes the graph keep `objects` alive.
    pub fn holding(self, objects: Held) -> Self {
        Graph { objects: Mutex::new(objects), ..self }
    }

    pub fn nodes(&self) -> Vec<Arc<Node>> {
        lock(&self.nodes).clone()
    }

    fn holds(&self, handles: &[Handle]) -> bool {
        let nodes = lock(&self.nodes);
        handles.iter().all(|handle| nodes.iter().any(|node| node.handle == *handle))
    }
}

impl Node {
    pub fn dependencies(&self) -> Vec<Handle> {
        lock(&self.state).dependencies.clone()
    }

    pub fn content(&self) -> Content {
        lock(&self.state).content.clone()
    }
}

pub fn find(handle: Handle) -> Result<Arc<Graph>, Code> {
    simulator()?.graphs.get(handle).ok_or(CUDA_ERROR_INVALID_VALUE)
}

pub fn find_node(handle: Handle) -> Result<Arc<Node>, Code> {
    simulator()?.nodes.get(handle).ok_or(CUDA_ERROR_INVALID_VALUE)
}

pub fn add_node(graph: &Graph, work: Work, dependencies: &[Handle]) -> Result<Arc<Node>, Code> {
    add_content(graph, Content::Work(work), dependencies, None)
}

pub fn add_child(graph: &Graph, child: &Graph, dependencies: &[Handle]) -> Result<Arc<Node>, Code> {
    let copy = clone(child, true)?;
    add_content(graph, Content::Child(copy), dependencies, None)
}

pub fn add_conditional(
    graph: &Graph,
    conditional: Arc<Conditional>,
    dependencies: &[Handle],
) -> Result<Arc<Node>, Code> {
    add_content(graph, Content::Conditional(conditional), dependencies, None)
}

pub fn add_content(
    graph: &Graph,
    content: Content,
    dependencies: &[Handle],
    original: Option<Handle>,
) -> Result<Arc<Node>, Code> {
    let distinct: BTreeSet<_> = dependencies.iter().copied().collect();
    if distinct.len() < dependencies.len() || !graph.holds(dependencies) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let state = NodeState { content, dependencies: dependencies.to_vec() };
    let node = simulator()?.nodes.insert(|handle| Node {
        handle,
        graph: graph.handle,
        original,
        state: Mutex::new(state),
    });
    lock(&graph.nodes).push(node.clone());
    Ok(node)
}

/// Makes a copy with nodes of its own, which holds as many references to user objects as the original does. Fails if the
/// graph has conditional nodes.
pub fn clone(original: &Graph, is_child: bool) -> Result<Arc<Graph>, Code> {
    let simulator = simulator()?;
    let objects = lock(&original.objects).clone();
    let copy = simulator.graphs.insert(|handle| Graph { is_child, ..Graph::new(handle).holding(objects) });
    let mut copies = BTreeMap::new();
    for node in sorted(original)? {
        let content = match node.content() {
            Content::Child(child) => Content::Child(clone(&child, true)?),
            Content::Conditional(_) => return Err(CUDA_ERROR_NOT_SUPPORTED),
            work => work,
        };
        let dependencies: Vec<_> = node.dependencies().iter().map(|dependency| copies[dependency]).collect();
        let twin = add_content(&copy, content, &dependencies, Some(node.handle))?;
        copies.insert(node.handle, twin.handle);
    }
    Ok(copy)
}

pub fn destroy(handle: Handle) -> Result<(), Code> {
    let simulator = simulator()?;
    let graph = simulator.graphs.remove(handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    for node in lock(&graph.nodes).drain(..) {
        forget_node(&node)?;
    }
    // A failed capture may hold the graph for longer; its references to user objects end now.
    drop(std::mem::take(&mut *lock(&graph.objects)));
    Ok(())
}

pub fn destroy_node(handle: Handle) -> Result<(), Code> {
    let node = find_node(handle)?;
    let graph = find(node.graph)?;
    capture::refuse_into(&graph)?;
    lock(&graph.nodes).retain(|other| other.handle != handle);
    for other in graph.nodes() {
        lock(&other.state).dependencies.retain(|dependency| *dependency != handle);
    }
    forget_node(&node)
}

fn forget_node(node: &Node) -> Result<(), Code> {
    simulator()?.nodes.remove(node.handle);
    node.content().graphs().iter().try_for_each(|graph| destroy(graph.handle))
}

/// The nodes `last` and all nodes that they depend on.
pub fn ancestors(graph: &Graph, last: &[Handle]) -> BTreeSet<Handle> {
    let dependencies: BTreeMap<_, _> =
        graph.nodes().iter().map(|node| (node.handle, node.dependencies())).collect();
    let mut found = BTreeSet::new();
    let mut open = last.to_vec();
    while let Some(node) = open.pop() {
        if found.insert(node) {
            open.extend(dependencies.get(&node).into_iter().flatten());
        }
    }
    found
}

/// The nodes in an order that respects their dependencies; an error if there is a cycle.
pub fn sorted(graph: &Graph) -> Result<Vec<Arc<Node>>, Code> {
    let mut open = graph.nodes();
    let mut done = BTreeSet::new();
    let mut order = Vec::with_capacity(open.len());
    while !open.is_empty() {
        let before = open.len();
        open.retain(|node| {
            let ready = node.dependencies().iter().all(|dependency| done.contains(dependency));
            if ready {
                done.insert(node.handle);
                order.push(node.clone());
            }
            !ready
        });
        if open.len() == before {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
    }
    Ok(order)
}

/// Whether the graph or a child graph of it allocates memory.
pub fn allocates(graph: &Graph) -> bool {
    let part_allocates = |node: &Arc<Node>| node.content().graphs().iter().any(|graph| allocates(graph));
    lock(&graph.objects).has_blocks() || graph.nodes().iter().any(part_allocates)
}
