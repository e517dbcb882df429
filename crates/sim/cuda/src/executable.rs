//! Executable graphs: instantiating, updating and launching them.

use crate::capture::{self, Capturing};
use crate::clock;
use crate::code::{
    CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NOT_SUPPORTED, Code,
};
use crate::conditional::Branch;
use crate::context::Role;
use crate::event::Recording;
use crate::graph::{Content, Graph, add_content, add_node, sorted};
use crate::simulator::simulator;
use crate::stream::Stream;
use crate::sync::{Signal, lock};
use crate::table::Handle;
use crate::user_object::Held;
use crate::work::Work;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::Scope;

pub struct Executable {
    pub handle: Handle,
    pub flags: u64,
    steps: Mutex<Arc<Vec<Step>>>,
    /// User objects and blocks of the graph. Queued launches keep them alive after `cuGraphExecDestroy`.
    objects: Mutex<Arc<Held>>,
    /// Raised at the end of the last launch: launches of one executable graph never overlap.
    last_launch: Mutex<Option<Arc<Signal>>>,
}

#[derive(Clone)]
pub struct Step {
    node: Handle,
    work: Work,
    dependencies: Vec<usize>,
    enabled: bool,
}

pub fn find(handle: Handle) -> Result<Arc<Executable>, Code> {
    simulator()?.executables.get(handle).ok_or(CUDA_ERROR_INVALID_VALUE)
}

pub fn instantiate(graph: &Graph, flags: u64) -> Result<Handle, Code> {
    // Not simulated: device launch (4). Freeing at launch (1) is accepted and has no effect.
    const KNOWN: u64 = 1 | 2 | 8;
    if flags & !KNOWN != 0 {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    capture::refuse_into(graph)?;
    let mut steps = Vec::new();
    flatten(graph, &[], &mut steps)?;
    let objects = all_objects(graph);
    let executable = simulator()?.executables.insert(|handle| Executable {
        handle,
        flags,
        steps: Mutex::new(Arc::new(steps)),
        objects: Mutex::new(Arc::new(objects)),
        last_launch: Mutex::default(),
    });
    Ok(executable.handle)
}

/// References to the user objects of a graph and of the graphs in its nodes. The executable graph needs its own: the graphs may be
/// destroyed before it.
fn all_objects(graph: &Graph) -> Held {
    let mut objects = lock(&graph.objects).clone();
    for node in graph.nodes() {
        node.content().graphs().iter().for_each(|graph| objects.absorb(all_objects(graph)));
    }
    objects
}

/// Appends the steps of a graph, which depend on the steps `entry`. Gives the steps that whatever follows the graph depends on.
pub fn flatten(graph: &Graph, entry: &[usize], steps: &mut Vec<Step>) -> Result<Vec<usize>, Code> {
    let mut exits: BTreeMap<Handle, Vec<usize>> = BTreeMap::new();
    let mut inner = BTreeSet::new();
    for node in sorted(graph)? {
        let named = node.dependencies();
        let mut dependencies: Vec<usize> =
            named.iter().flat_map(|dependency| exits[dependency].clone()).collect();
        if named.is_empty() {
            dependencies = entry.to_vec();
        }
        inner.extend(named);
        let own = match node.content() {
            Content::Child(child) => flatten(&child, &dependencies, steps)?,
            content => {
                let work = match content {
                    Content::Conditional(conditional) => Work::Branch(Arc::new(conditional.branch()?)),
                    Content::Work(work) => work,
                    Content::Child(_) => Work::Empty,
                };
                steps.push(Step { node: node.handle, work, dependencies, enabled: true });
                vec![steps.len() - 1]
            }
        };
        exits.insert(node.handle, own);
    }
    if exits.is_empty() {
        return Ok(entry.to_vec());
    }
    Ok(exits.into_iter().filter(|(node, _)| !inner.contains(node)).flat_map(|(_, steps)| steps).collect())
}

/// Why an update was refused: `CUgraphExecUpdateResult` and the node of the new graph.
pub struct Mismatch {
    pub result: u32,
    pub node: Handle,
}

pub const UPDATE_TOPOLOGY_CHANGED: u32 = 2;
pub const UPDATE_NODE_TYPE_CHANGED: u32 = 3;

impl Executable {
    /// Takes over the parameters of a graph of the same topology; else says why not and changes nothing.
    pub fn update(&self, graph: &Graph) -> Result<Option<Mismatch>, Code> {
        let mut steps = Vec::new();
        flatten(graph, &[], &mut steps)?;
        refuse_branches(&steps)?;
        let mut current = lock(&self.steps);
        if steps.len() != current.len() {
            return Ok(Some(Mismatch { result: UPDATE_TOPOLOGY_CHANGED, node: 0 }));
        }
        for (old, new) in current.iter().zip(&mut steps) {
            if old.dependencies != new.dependencies {
                return Ok(Some(Mismatch { result: UPDATE_TOPOLOGY_CHANGED, node: new.node }));
            }
            if old.work.node_type() != new.work.node_type() {
                return Ok(Some(Mismatch { result: UPDATE_NODE_TYPE_CHANGED, node: new.node }));
            }
            if let (Work::Kernel(former), Work::Kernel(launch)) = (&old.work, &new.work) {
                new.work = Work::Kernel(launch.updating(former));
            }
            // Later updates of single nodes still name nodes of the graph that was instantiated.
            new.node = old.node;
            new.enabled = old.enabled;
        }
        *current = Arc::new(steps);
        *lock(&self.objects) = Arc::new(all_objects(graph));
        Ok(None)
    }

    pub fn set_work(&self, node: Handle, work: Work) -> Result<(), Code> {
        self.change(node, |step| {
            if step.work.node_type() != work.node_type() {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            step.work = work;
            Ok(())
        })
    }

    pub fn set_enabled(&self, node: Handle, enabled: bool) -> Result<(), Code> {
        self.change(node, |step| {
            step.enabled = enabled;
            Ok(())
        })
    }

    pub fn is_enabled(&self, node: Handle) -> Result<bool, Code> {
        let steps = lock(&self.steps);
        steps.iter().find(|step| step.node == node).map(|step| step.enabled).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    fn change(&self, node: Handle, edit: impl FnOnce(&mut Step) -> Result<(), Code>) -> Result<(), Code> {
        let mut steps = lock(&self.steps);
        let at = steps.iter().position(|step| step.node == node).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        edit(&mut Arc::make_mut(&mut steps)[at])
    }

    /// Captures a launch: adds the steps as a child graph after what the stream has captured.
    fn add_to(&self, capturing: &mut Capturing) -> Result<(), Code> {
        capturing.capture.refuse_invalidated()?;
        let child = self.as_child()?;
        let node =
            add_content(&capturing.capture.graph, Content::Child(child), &capturing.dependencies, None)?;
        capturing.dependencies = vec![node.handle];
        Ok(())
    }

    /// A graph for a child node, with the steps that a launch would run now.
    fn as_child(&self) -> Result<Arc<Graph>, Code> {
        let objects = Held::clone(&lock(&self.objects));
        let child = simulator()?.graphs.insert(|handle| Graph::part(handle).holding(objects));
        let steps = lock(&self.steps).clone();
        refuse_branches(&steps)?;
        let mut nodes = Vec::with_capacity(steps.len());
        for step in steps.iter() {
            let dependencies: Vec<Handle> = step.dependencies.iter().map(|index| nodes[*index]).collect();
            let work = if step.enabled { step.work.clone() } else { Work::Empty };
            nodes.push(add_node(&child, work, &dependencies)?.handle);
        }
        Ok(child)
    }

    pub fn launch(&self, stream: &Arc<Stream>) -> Result<(), Code> {
        if stream.role == Role::Legacy {
            capture::refuse_legacy(&stream.context)?;
        }
        if let Some(capturing) = &mut *lock(&stream.capturing) {
            return self.add_to(capturing);
        }
        let flight = Flight::new(lock(&self.steps).clone());
        let objects = lock(&self.objects).clone();
        let done = Arc::<Signal>::default();
        let before = lock(&self.last_launch).replace(done.clone());
        stream.submit(move || {
            before.iter().for_each(|launch| launch.wait());
            begin(&flight.steps);
            flight.run();
            drop(objects);
            done.raise();
        });
        Ok(())
    }
}

/// Refuses conditional nodes: the simulator neither updates them nor copies them into another graph.
fn refuse_branches(steps: &[Step]) -> Result<(), Code> {
    let has_branch = steps.iter().any(|step| matches!(step.work, Work::Branch(_)));
    if has_branch { Err(CUDA_ERROR_NOT_SUPPORTED) } else { Ok(()) }
}

/// Gives the conditions of all conditional nodes their default values, at the start of a launch.
pub fn begin(steps: &[Step]) {
    let branches = steps.iter().filter_map(|step| match &step.work {
        Work::Branch(branch) => Some(branch),
        _ => None,
    });
    branches.for_each(|branch| Branch::begin(branch));
}

/// One launch. Independent nodes run at the same time on several threads, because they may wait for each other across ranks.
pub struct Flight {
    steps: Arc<Vec<Step>>,
    recordings: Vec<Option<Recording>>,
    followers: Vec<Vec<usize>>,
    open: Vec<AtomicUsize>,
    /// The modelled time at which each step ended.
    ended_ns: Vec<AtomicU64>,
}

impl Flight {
    /// Prepares a launch. All event waits take the recordings from before this launch; then all recordings of the launch begin.
    pub fn new(steps: Arc<Vec<Step>>) -> Self {
        let mut followers = vec![Vec::new(); steps.len()];
        for (index, step) in steps.iter().enumerate() {
            step.dependencies.iter().for_each(|dependency| followers[*dependency].push(index));
        }
        let mut recordings: Vec<Option<Recording>> = steps
            .iter()
            .map(|step| match &step.work {
                Work::WaitEvent(event) => event.latest(),
                _ => None,
            })
            .collect();
        for (step, recording) in steps.iter().zip(&mut recordings) {
            if let Work::RecordEvent(event) = &step.work {
                *recording = Some(event.begin_recording());
            }
        }
        let open = steps.iter().map(|step| AtomicUsize::new(step.dependencies.len())).collect();
        let ended_ns = steps.iter().map(|_| AtomicU64::new(0)).collect();
        Flight { steps, recordings, followers, open, ended_ns }
    }

    /// Runs all steps and waits for them. In modelled time, too, the launch ends with its last step.
    pub fn run(&self) {
        let begun_ns = clock::now();
        std::thread::scope(|scope| {
            let mut roots = (0..self.steps.len()).filter(|index| self.steps[*index].dependencies.is_empty());
            let first = roots.next();
            for root in roots {
                scope.spawn(move || self.run_from(scope, root, begun_ns));
            }
            if let Some(root) = first {
                self.run_from(scope, root, begun_ns);
            }
        });
        let ended_ns = self.ended_ns.iter().map(|ended| ended.load(Ordering::Relaxed)).max();
        clock::set(ended_ns.unwrap_or(begun_ns));
    }

    /// Runs a step and then one that it has made ready, and so on; further ready ones get threads of their own.
    fn run_from<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, root: usize, begun_ns: u64) {
        let mut next = Some(root);
        while let Some(index) = next.take() {
            let step = &self.steps[index];
            let before =
                step.dependencies.iter().map(|before| self.ended_ns[*before].load(Ordering::Relaxed));
            clock::set(before.fold(begun_ns, u64::max));
            if step.enabled {
                step.work.run(self.recordings[index].as_ref());
            }
            // Followers read this once their last dependency has made them ready (`open`, below).
            self.ended_ns[index].store(clock::now(), Ordering::Relaxed);
            for follower in &self.followers[index] {
                let follower = *follower;
                if self.open[follower].fetch_sub(1, Ordering::AcqRel) > 1 {
                    continue;
                }
                if next.is_none() {
                    next = Some(follower);
                } else {
                    scope.spawn(move || self.run_from(scope, follower, begun_ns));
                }
            }
        }
    }
}

/// The answer of `cuGraphExecUpdate` for a mismatch.
pub const UPDATE_REFUSED: Code = CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;

pub fn destroy(handle: Handle) -> Result<(), Code> {
    simulator()?.executables.remove(handle).map(drop).ok_or(CUDA_ERROR_INVALID_HANDLE)
}
