//! Streams: finding the stream of a handle, and issuing work to its queue or into its capture.

use crate::capture::{self, Capturing};
use crate::code::{
    CUDA_ERROR_CAPTURED_EVENT, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_READY,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION, CUDA_ERROR_STREAM_CAPTURE_MERGE,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, Code,
};
use crate::context::{self, Context, Role};
use crate::event::{CapturedPoint, Event};
use crate::guard;
use crate::lane::{Lane, Marker};
use crate::simulator::{next_identity, simulator};
use crate::sync::lock;
use crate::table::Handle;
use crate::work::Work;
use std::cell::RefCell;
use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex};

pub const LEGACY: Handle = 1;
pub const PER_THREAD: Handle = 2;

/// `CU_STREAM_NON_BLOCKING`.
pub const NON_BLOCKING: u32 = 1;

/// Lower numbers have priority on a GPU; the simulator stores the number and schedules all streams alike.
pub const PRIORITY_LEAST: i32 = 0;
pub const PRIORITY_GREATEST: i32 = -5;

pub struct Stream {
    pub handle: Handle,
    pub id: u64,
    pub context: Arc<Context>,
    pub flags: u32,
    pub priority: i32,
    pub role: Role,
    pub lane: Arc<Lane>,
    pub capturing: Mutex<Option<Capturing>>,
}

/// A thread's per-thread default streams, by context id. When the thread ends they finish their work and take no more.
type ThreadStreams = HashMap<u64, Arc<Stream>>;

/// Closes a thread's streams when the thread ends.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        OWN.with(|own| {
            std::mem::take(&mut *own.borrow_mut()).values().for_each(|stream| stream.lane.close())
        });
    }
}

thread_local! {
    /// Never dropped itself: exit handlers of an ending thread may still make new ones.
    static OWN: ManuallyDrop<RefCell<ThreadStreams>> = ManuallyDrop::default();
    static END: End = const { End };
}

impl Stream {
    fn new(handle: Handle, context: Arc<Context>, flags: u32, priority: i32) -> Self {
        let role = if flags & NON_BLOCKING != 0 { Role::NonBlocking } else { Role::Blocking };
        let lane = context.new_lane(role);
        Stream {
            handle,
            id: next_identity(),
            context,
            flags,
            priority,
            role,
            lane,
            capturing: Mutex::default(),
        }
    }

    fn legacy(context: Arc<Context>) -> Self {
        Stream {
            handle: LEGACY,
            id: context.legacy_id,
            flags: 0,
            priority: PRIORITY_LEAST,
            role: Role::Legacy,
            lane: context.legacy.clone(),
            capturing: Mutex::default(),
            context,
        }
    }

    pub fn submit(&self, operation: impl FnOnce() + Send + 'static) -> Marker {
        self.context.submit(&self.lane, self.role, operation)
    }

    pub fn is_capturing(&self) -> bool {
        lock(&self.capturing).is_some()
    }

    fn markers(self: &Arc<Self>) -> Vec<Marker> {
        match self.role {
            Role::Legacy => self.context.markers_for_legacy(),
            _ => self.lane.marker().into_iter().collect(),
        }
    }

    /// Refuses calls that are not permitted on a capturing stream in any mode, and invalidates the capture: queries, waits, callbacks, and
    /// `cuStreamGetId` (seen on driver 580; whether `cuStreamGetId` invalidates the capture there is not known).
    pub fn refuse_member(&self) -> Result<(), Code> {
        match &*lock(&self.capturing) {
            Some(capturing) => {
                capturing.capture.invalidate();
                Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
            }
            None => Ok(()),
        }
    }

    fn refuse_capturing(&self) -> Result<(), Code> {
        self.refuse_member()?;
        if self.role == Role::Legacy {
            capture::refuse_legacy(&self.context)?;
        }
        capture::refuse_unsafe()
    }

    pub fn query(self: &Arc<Self>) -> Result<(), Code> {
        self.refuse_capturing()?;
        let markers = self.markers();
        if !markers.iter().all(Marker::is_reached) {
            return Err(CUDA_ERROR_NOT_READY);
        }
        markers.iter().for_each(Marker::wait);
        Ok(())
    }

    pub fn synchronize(self: &Arc<Self>) -> Result<(), Code> {
        self.refuse_capturing()?;
        self.markers().iter().for_each(Marker::wait);
        Ok(())
    }
}

/// The stream of a handle; default streams are those of this thread's current context.
pub fn find(handle: Handle) -> Result<Arc<Stream>, Code> {
    let simulator = simulator()?;
    match handle {
        0 if guard::null_is_per_thread() => find(PER_THREAD),
        0 | LEGACY => Ok(Arc::new(Stream::legacy(context::current()?))),
        PER_THREAD => {
            let context = context::current()?;
            let _ = END.try_with(|_| ());
            Ok(OWN.with(|own| {
                let make = || Arc::new(Stream::new(PER_THREAD, context.clone(), 0, PRIORITY_LEAST));
                own.borrow_mut().entry(context.id).or_insert_with(make).clone()
            }))
        }
        _ => simulator.streams.get(handle).ok_or(CUDA_ERROR_INVALID_HANDLE),
    }
}

pub fn create(flags: u32, priority: i32) -> Result<Handle, Code> {
    let context = context::current()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let priority = priority.clamp(PRIORITY_GREATEST, PRIORITY_LEAST);
    Ok(simulator()?.streams.insert(|handle| Stream::new(handle, context, flags, priority)).handle)
}

/// Destroys a stream without waiting: its queued work still runs, a capture on it is invalidated.
pub fn destroy(handle: Handle) -> Result<(), Code> {
    let simulator = simulator()?;
    if handle <= PER_THREAD {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    let stream = simulator.streams.remove(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    retire(&stream)
}

/// Closes the queue and ends the capture of a stream that is no longer in the table.
pub fn retire(stream: &Arc<Stream>) -> Result<(), Code> {
    stream.lane.close();
    let capturing = lock(&stream.capturing).take();
    match capturing {
        Some(capturing) => capture::lose(&capturing.capture, stream),
        None => Ok(()),
    }
}

/// Issues work into the capture of a capturing stream, which gives `None`, else into the stream's queue.
pub fn issue(stream: &Arc<Stream>, work: Work) -> Result<Option<Marker>, Code> {
    if stream.role == Role::Legacy {
        capture::refuse_legacy(&stream.context)?;
    }
    if let Some(capturing) = &mut *lock(&stream.capturing) {
        capturing.add(work)?;
        return Ok(None);
    }
    let recording = match &work {
        Work::RecordEvent(event) => return Ok(Some(record_in_order(stream, event))),
        Work::WaitEvent(event) => event.latest(),
        _ => None,
    };
    Ok(Some(stream.submit(move || work.run(recording.as_ref()))))
}

fn record_in_order(stream: &Arc<Stream>, event: &Arc<Event>) -> Marker {
    let recording = event.begin_recording();
    stream.submit(move || recording.complete())
}

/// How an event operation behaves in a capture.
#[derive(Clone, Copy, PartialEq)]
pub enum Scope {
    /// It orders nodes of the capture among each other.
    Capture,
    /// It becomes an event node of the graph. The driver's flag for this is invalid outside of captures.
    External,
}

pub fn record_event(stream: &Arc<Stream>, event: &Arc<Event>, scope: Scope) -> Result<(), Code> {
    if event.context != stream.context.handle {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    if scope == Scope::Capture
        && let Some(capturing) = &*lock(&stream.capturing)
    {
        let point = CapturedPoint {
            capture: capturing.capture.clone(),
            dependencies: capturing.dependencies.clone(),
        };
        capturing.capture.refuse_invalidated()?;
        event.capture_at(point);
        return Ok(());
    }
    if scope == Scope::External && !stream.is_capturing() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    issue(stream, Work::RecordEvent(event.clone())).map(drop)
}

pub fn wait_event(stream: &Arc<Stream>, event: &Arc<Event>, scope: Scope) -> Result<(), Code> {
    if scope == Scope::External {
        if !stream.is_capturing() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        return issue(stream, Work::WaitEvent(event.clone())).map(drop);
    }
    let point = event.captured();
    let mut capturing = lock(&stream.capturing);
    match (&mut *capturing, point) {
        (None, None) => {
            drop(capturing);
            issue(stream, Work::WaitEvent(event.clone())).map(drop)
        }
        (Some(capturing), None) => {
            capturing.capture.invalidate();
            Err(CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
        }
        (Some(capturing), Some(point)) if Arc::ptr_eq(&capturing.capture, &point.capture) => {
            capturing.capture.refuse_invalidated()?;
            capturing.join(&point.dependencies);
            Ok(())
        }
        (Some(capturing), Some(point))
            if point.capture.refuse_finished() == Err(CUDA_ERROR_CAPTURED_EVENT) =>
        {
            capturing.capture.invalidate();
            Err(CUDA_ERROR_INVALID_VALUE)
        }
        (Some(capturing), Some(point)) => {
            capturing.capture.invalidate();
            point.capture.invalidate();
            Err(CUDA_ERROR_STREAM_CAPTURE_MERGE)
        }
        (None, Some(point)) => {
            point.capture.refuse_finished()?;
            if stream.role == Role::Legacy {
                point.capture.invalidate();
                return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
            }
            *capturing = Some(point.capture.forked_to(stream, point.dependencies));
            Ok(())
        }
    }
}
