//! Stream capture: turns issued work into graph nodes, and refuses the calls that are not permitted meanwhile.

use crate::code::{
    CUDA_ERROR_CAPTURED_EVENT, CUDA_ERROR_ILLEGAL_STATE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, Code,
};
use crate::context::{Context, Role};
use crate::graph::{self, Graph};
use crate::simulator::{next_identity, simulator};
use crate::stream::Stream;
use crate::sync::lock;
use crate::table::Handle;
use crate::work::Work;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::ThreadId;

/// `CUstreamCaptureMode`.
pub const GLOBAL: u32 = 0;
pub const THREAD_LOCAL: u32 = 1;
pub const RELAXED: u32 = 2;

/// `CUstreamCaptureStatus`.
pub const STATUS_NONE: u32 = 0;
pub const STATUS_ACTIVE: u32 = 1;
pub const STATUS_INVALIDATED: u32 = 2;

const RUNNING: u8 = 0;
const INVALIDATED: u8 = 1;
const FINISHED: u8 = 2;

static RUNNING_CAPTURES: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());

thread_local! {
    static THREAD_MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

pub struct Capture {
    pub id: u64,
    pub graph: Arc<Graph>,
    mode: u32,
    thread: ThreadId,
    context: Handle,
    origin: Weak<Stream>,
    state: AtomicU8,
    members: Mutex<Vec<Weak<Stream>>>,
    /// False after `cuStreamBeginCaptureToGraph`, whose graph exists before and outlives a failed capture.
    graph_is_ours: bool,
}

/// A stream's part in a capture, with the nodes that the stream's next node will depend on.
pub struct Capturing {
    pub capture: Arc<Capture>,
    pub dependencies: Vec<Handle>,
}

impl Capturing {
    pub fn add(&mut self, work: Work) -> Result<(), Code> {
        self.capture.refuse_invalidated()?;
        let node = graph::add_node(&self.capture.graph, work, &self.dependencies)?;
        self.dependencies = vec![node.handle];
        Ok(())
    }

    pub fn join(&mut self, dependencies: &[Handle]) {
        for dependency in dependencies {
            if !self.dependencies.contains(dependency) {
                self.dependencies.push(*dependency);
            }
        }
    }
}

impl Capture {
    pub fn invalidate(&self) {
        // A finished capture stays finished.
        let _ = self.state.compare_exchange(RUNNING, INVALIDATED, Ordering::AcqRel, Ordering::Acquire);
    }

    pub fn is_invalidated(&self) -> bool {
        self.state.load(Ordering::Acquire) == INVALIDATED
    }

    pub fn refuse_invalidated(&self) -> Result<(), Code> {
        if self.is_invalidated() { Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) } else { Ok(()) }
    }

    /// Fails once the capture has ended: its events can then order nothing.
    pub fn refuse_finished(&self) -> Result<(), Code> {
        self.refuse_invalidated()?;
        if self.state.load(Ordering::Acquire) == FINISHED { Err(CUDA_ERROR_CAPTURED_EVENT) } else { Ok(()) }
    }

    /// Makes another stream a member of the capture.
    pub fn forked_to(self: &Arc<Self>, stream: &Arc<Stream>, dependencies: Vec<Handle>) -> Capturing {
        lock(&self.members).push(Arc::downgrade(stream));
        Capturing { capture: self.clone(), dependencies }
    }

    fn binds(&self, thread_mode: u32) -> bool {
        match thread_mode {
            GLOBAL => self.mode == GLOBAL || self.mode == THREAD_LOCAL && self.is_of_this_thread(),
            THREAD_LOCAL => self.mode != RELAXED && self.is_of_this_thread(),
            _ => false,
        }
    }

    fn is_of_this_thread(&self) -> bool {
        self.thread == std::thread::current().id()
    }
}

pub fn begin(stream: &Arc<Stream>, mode: u32, into: Option<(Arc<Graph>, Vec<Handle>)>) -> Result<(), Code> {
    if mode > RELAXED {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if stream.role == Role::Legacy {
        return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    let mut running = lock(&RUNNING_CAPTURES);
    let mut capturing = lock(&stream.capturing);
    if capturing.is_some() {
        return Err(CUDA_ERROR_ILLEGAL_STATE);
    }
    let graph_is_ours = into.is_none();
    let (graph, dependencies) = match into {
        Some(into) => into,
        None => (simulator()?.graphs.insert(Graph::new), Vec::new()),
    };
    if running.iter().any(|capture| capture.graph.handle == graph.handle) {
        return Err(CUDA_ERROR_ILLEGAL_STATE);
    }
    let capture = Arc::new(Capture {
        id: *graph.capture_id.get_or_init(next_identity),
        graph,
        mode,
        thread: std::thread::current().id(),
        context: stream.context.handle,
        origin: Arc::downgrade(stream),
        state: AtomicU8::new(RUNNING),
        members: Mutex::new(vec![Arc::downgrade(stream)]),
        graph_is_ours,
    });
    running.push(capture.clone());
    *capturing = Some(Capturing { capture, dependencies });
    Ok(())
}

/// Ends the capture that began on this stream and gives its graph. A failed capture's own graph is destroyed.
pub fn end(stream: &Arc<Stream>) -> Result<Arc<Graph>, Code> {
    let (capture, last) = match &*lock(&stream.capturing) {
        Some(capturing) => (capturing.capture.clone(), capturing.dependencies.clone()),
        None => return Err(CUDA_ERROR_ILLEGAL_STATE),
    };
    if !capture.origin.upgrade().is_some_and(|origin| Arc::ptr_eq(&origin, stream)) {
        capture.invalidate();
        return Err(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != RELAXED && !capture.is_of_this_thread() {
        return Err(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    }
    let joined = graph::ancestors(&capture.graph, &last);
    let result = if capture.is_invalidated() {
        Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
    } else if all_joined(&capture, &joined) {
        Ok(capture.graph.clone())
    } else {
        Err(CUDA_ERROR_STREAM_CAPTURE_UNJOINED)
    };
    finish(&capture);
    if result.is_err() && capture.graph_is_ours {
        graph::destroy(capture.graph.handle)?;
    }
    result
}

/// Invalidates the capture when the stream `member` is destroyed. Without its origin nobody could end the capture, so then it ends here,
/// with its own graph.
pub fn lose(capture: &Arc<Capture>, member: &Arc<Stream>) -> Result<(), Code> {
    capture.invalidate();
    if !std::ptr::eq(capture.origin.as_ptr(), Arc::as_ptr(member)) {
        return Ok(());
    }
    finish(capture);
    if capture.graph_is_ours { graph::destroy(capture.graph.handle) } else { Ok(()) }
}

/// Whether `joined` has the last nodes of all member streams. A member that issued nothing after its fork has nothing to join.
fn all_joined(capture: &Arc<Capture>, joined: &BTreeSet<Handle>) -> bool {
    let members: Vec<_> = lock(&capture.members).iter().filter_map(Weak::upgrade).collect();
    members.iter().all(|member| {
        let capturing = lock(&member.capturing);
        let own = capturing.as_ref().filter(|capturing| Arc::ptr_eq(&capturing.capture, capture));
        own.is_none_or(|own| own.dependencies.iter().all(|node| joined.contains(node)))
    })
}

fn finish(capture: &Arc<Capture>) {
    lock(&RUNNING_CAPTURES).retain(|running| !Arc::ptr_eq(running, capture));
    capture.state.store(FINISHED, Ordering::Release);
    let members: Vec<_> = lock(&capture.members).iter().filter_map(Weak::upgrade).collect();
    for member in members {
        let mut capturing = lock(&member.capturing);
        if capturing.as_ref().is_some_and(|own| Arc::ptr_eq(&own.capture, capture)) {
            *capturing = None;
        }
    }
}

/// The status and id for `cuStreamIsCapturing` and `cuStreamGetCaptureInfo`.
pub fn status(stream: &Stream) -> Result<(u32, Option<u64>), Code> {
    if stream.role == Role::Legacy {
        // Asking about the legacy stream beside a capturing blocking stream is an error, but invalidates no capture.
        return match legacy_conflicts(&stream.context).is_empty() {
            true => Ok((STATUS_NONE, None)),
            false => Err(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT),
        };
    }
    Ok(match &*lock(&stream.capturing) {
        None => (STATUS_NONE, None),
        Some(capturing) if capturing.capture.is_invalidated() => {
            (STATUS_INVALIDATED, Some(capturing.capture.id))
        }
        Some(capturing) => (STATUS_ACTIVE, Some(capturing.capture.id)),
    })
}

/// Refuses a potentially unsafe call while captures forbid it, and invalidates those captures, as the driver does.
pub fn refuse_unsafe() -> Result<(), Code> {
    let mode = THREAD_MODE.get();
    let running = lock(&RUNNING_CAPTURES);
    let mut refused = false;
    for capture in running.iter().filter(|capture| capture.binds(mode)) {
        capture.invalidate();
        refused = true;
    }
    if refused { Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

/// Refuses work of the legacy stream while a blocking stream of the context captures, and invalidates that capture.
pub fn refuse_legacy(context: &Context) -> Result<(), Code> {
    let conflicts = legacy_conflicts(context);
    conflicts.iter().for_each(|capture| capture.invalidate());
    if conflicts.is_empty() { Ok(()) } else { Err(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) }
}

fn legacy_conflicts(context: &Context) -> Vec<Arc<Capture>> {
    let running = lock(&RUNNING_CAPTURES).clone();
    let conflicts = |capture: &Arc<Capture>| {
        let members = lock(&capture.members);
        let mut members = members.iter().filter_map(Weak::upgrade);
        members.any(|member| member.role == Role::Blocking && member.context.handle == context.handle)
    };
    running.into_iter().filter(conflicts).collect()
}

/// Refuses to instantiate a graph, or to destroy it or a node of it, while a capture adds to it.
pub fn refuse_into(graph: &Graph) -> Result<(), Code> {
    let is_into = lock(&RUNNING_CAPTURES).iter().any(|capture| capture.graph.handle == graph.handle);
    if is_into { Err(CUDA_ERROR_INVALID_VALUE) } else { Ok(()) }
}

pub fn running_in(context: Handle) -> bool {
    lock(&RUNNING_CAPTURES).iter().any(|capture| capture.context == context)
}

/// Refuses to wait for a context while a capture runs in it, and invalidates the capture.
pub fn refuse_running_in(context: Handle) -> Result<(), Code> {
    let running = lock(&RUNNING_CAPTURES);
    let mut refused = false;
    for capture in running.iter().filter(|capture| capture.context == context) {
        capture.invalidate();
        refused = true;
    }
    if refused { Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

pub fn exchange_thread_mode(mode: u32) -> Result<u32, Code> {
    if mode > RELAXED { Err(CUDA_ERROR_INVALID_VALUE) } else { Ok(THREAD_MODE.replace(mode)) }
}
