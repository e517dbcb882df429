//! Conditional nodes: nodes with body graphs that a launch runs once, repeatedly or not at all. A value decides, which device code may set
//! while the graph runs.

use crate::code::{CUDA_ERROR_INVALID_VALUE, Code};
use crate::executable::{self, Flight, Step};
use crate::graph::{Content, Graph};
use crate::simulator::{next_identity, simulator};
use crate::sync::lock;
use crate::table::Handle;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// The object behind a `CUgraphConditionalHandle`.
pub struct Condition {
    pub handle: u64,
    /// The value at the start of every launch; without it the value that the launch before left stays.
    default: Option<u32>,
    value: AtomicU32,
    /// Whether a node uses this condition; only one node may.
    taken: Mutex<bool>,
}

/// `CUgraphConditionalNodeType`.
#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    If,
    While,
    Switch,
}

/// The content of a conditional node in a graph.
pub struct Conditional {
    kind: Kind,
    condition: Arc<Condition>,
    pub bodies: Vec<Arc<Graph>>,
    /// Handles of the bodies. C programs hold a pointer to them, valid as long as the node lives.
    pub handles: Box<[Handle]>,
}

/// The work of a conditional node in an executable graph.
pub struct Branch {
    kind: Kind,
    condition: Arc<Condition>,
    bodies: Vec<Arc<Vec<Step>>>,
}

/// All conditions that a graph or an executable graph still holds.
static CONDITIONS: Mutex<Vec<Weak<Condition>>> = Mutex::new(Vec::new());

impl Condition {
    /// Makes a condition for nodes of `graph` and gives its handle.
    pub fn add(graph: &Graph, default: Option<u32>) -> u64 {
        let (handle, value, taken) = (next_identity(), AtomicU32::new(0), Mutex::new(false));
        let condition = Arc::new(Condition { handle, default, value, taken });
        lock(&CONDITIONS).push(Arc::downgrade(&condition));
        lock(&graph.conditions).push(condition);
        handle
    }

    fn find(handle: u64) -> Option<Arc<Condition>> {
        let mut all = lock(&CONDITIONS);
        all.retain(|condition| condition.strong_count() > 0);
        all.iter().filter_map(Weak::upgrade).find(|condition| condition.handle == handle)
    }

    fn value(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }
}

impl Kind {
    /// How many bodies a node may have.
    fn allows(self, bodies: u32) -> bool {
        match self {
            Kind::If => (1..=2).contains(&bodies),
            Kind::While => bodies == 1,
            Kind::Switch => (1..=1024).contains(&bodies),
        }
    }
}

/// Makes the content of a new conditional node, with empty bodies. Fails if another node uses the condition.
pub fn make(kind: u32, condition: u64, bodies: u32) -> Result<Conditional, Code> {
    let kind = match kind {
        0 => Kind::If,
        1 => Kind::While,
        2 => Kind::Switch,
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    let simulator = simulator()?;
    let condition = Condition::find(condition).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if !kind.allows(bodies) || std::mem::replace(&mut *lock(&condition.taken), true) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let bodies: Vec<_> = (0..bodies).map(|_| simulator.graphs.insert(Graph::part)).collect();
    let handles = bodies.iter().map(|body| body.handle).collect();
    Ok(Conditional { kind, condition, bodies, handles })
}

/// Fails if a body, or a child graph or body in it, has nodes other than kernels, copies, fills, empty nodes, child graphs and
/// conditional nodes. The driver does not instantiate such graphs (seen on driver 580 for event nodes).
fn refuse_others(body: &Graph) -> Result<(), Code> {
    const ALLOWED: [u32; 6] = [0, 1, 2, 4, 5, 13];
    if lock(&body.objects).has_blocks() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    for node in body.nodes() {
        let content = node.content();
        if !ALLOWED.contains(&content.node_type()) {
            crate::report::line(format_args!(
                "a conditional node's body has a node of type {}, which the driver refuses there",
                content.node_type()
            ));
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if let Content::Child(child) = content {
            refuse_others(&child)?;
        }
    }
    Ok(())
}

impl Conditional {
    /// Makes the node's work for an executable graph.
    pub fn branch(&self) -> Result<Branch, Code> {
        let body = |body: &Arc<Graph>| {
            refuse_others(body)?;
            let mut steps = Vec::new();
            executable::flatten(body, &[], &mut steps)?;
            Ok(Arc::new(steps))
        };
        let bodies: Result<Vec<_>, Code> = self.bodies.iter().map(body).collect();
        Ok(Branch { kind: self.kind, condition: self.condition.clone(), bodies: bodies? })
    }
}

impl Branch {
    /// Sets the default value at the start of a launch, also in conditional nodes within the bodies.
    pub fn begin(&self) {
        if let Some(default) = self.condition.default {
            self.condition.value.store(default, Ordering::Release);
        }
        self.bodies.iter().for_each(|steps| executable::begin(steps));
    }

    pub fn run(&self) {
        match (self.kind, self.condition.value() as usize) {
            (Kind::If, 0) => self.run_body(1),
            (Kind::If, _) => self.run_body(0),
            (Kind::Switch, which) => self.run_body(which),
            (Kind::While, _) => {
                while self.condition.value() != 0 {
                    self.run_body(0);
                }
            }
        }
    }

    /// Runs body number `which` and waits for it; does nothing if there is no such body.
    fn run_body(&self, which: usize) {
        if let Some(steps) = self.bodies.get(which) {
            Flight::new(steps.clone()).run();
        }
    }
}

/// `cudaGraphSetConditional`, for kernels of a simulated module.
#[unsafe(no_mangle)]
extern "C" fn simSetConditional(handle: u64, value: u32) -> i32 {
    if let Some(condition) = Condition::find(handle) {
        condition.value.store(value, Ordering::Release);
    }
    0
}
