//! Events: each has its last recording, made in this process or, for interprocess events, in any process.

use crate::capture::Capture;
use crate::clock;
use crate::code::{
    CUDA_ERROR_CAPTURED_EVENT, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_READY,
    Code,
};
use crate::context;
use crate::device::Ordinal;
use crate::mapping::{PAGE, Reservation, anonymous_file};
use crate::simulator::simulator;
use crate::sync::{Moment, Signal, lock};
use crate::table::Handle;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub const BLOCKING_SYNC: u32 = 1;
pub const DISABLE_TIMING: u32 = 2;
pub const INTERPROCESS: u32 = 4;

pub struct Event {
    pub handle: Handle,
    pub context: Handle,
    pub device: Ordinal,
    pub flags: u32,
    pub shared: Option<Arc<SharedEvent>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    latest: Option<Recording>,
    captured: Option<CapturedPoint>,
}

/// The point in a capture at which an event was recorded.
#[derive(Clone)]
pub struct CapturedPoint {
    pub capture: Arc<Capture>,
    pub dependencies: Vec<Handle>,
}

/// One recording of an event.
#[derive(Clone)]
pub enum Recording {
    Local(Arc<Signal>),
    Shared(Arc<SharedEvent>, u64),
}

/// The state of an interprocess event: two counters in a file that processes share.
pub struct SharedEvent {
    pub file: OwnedFd,
    place: Reservation,
}

impl Recording {
    pub fn complete(&self) {
        match self {
            Recording::Local(signal) => signal.raise(),
            Recording::Shared(event, sequence) => {
                event.completed().fetch_max(*sequence, Ordering::AcqRel);
            }
        }
    }

    pub fn is_complete(&self) -> bool {
        match self {
            Recording::Local(signal) => signal.raised_at().is_some(),
            Recording::Shared(event, sequence) => event.completed().load(Ordering::Acquire) >= *sequence,
        }
    }

    pub fn wait(&self) {
        match self {
            Recording::Local(signal) => signal.wait(),
            Recording::Shared(..) => {
                while !self.is_complete() {
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
        }
    }
}

impl SharedEvent {
    pub fn new() -> Result<Self, Code> {
        Self::open(anonymous_file("sim-cuda-event", PAGE)?)
    }

    pub fn open(file: OwnedFd) -> Result<Self, Code> {
        let place = Reservation::new(PAGE, PAGE, 0)?;
        place.place(place.base, PAGE, &file, 0, libc::PROT_READ | libc::PROT_WRITE)?;
        Ok(SharedEvent { file, place })
    }

    fn counter(&self, index: usize) -> &AtomicU64 {
        // SAFETY: the page is mapped as long as `place` lives, aligned, zero at init, and only ever used as atomics.
        unsafe { &*((self.place.base as *const AtomicU64).add(index)) }
    }

    fn recorded(&self) -> &AtomicU64 {
        self.counter(0)
    }

    fn completed(&self) -> &AtomicU64 {
        self.counter(1)
    }
}

impl Event {
    pub fn new(
        handle: Handle,
        context: &context::Context,
        flags: u32,
        shared: Option<Arc<SharedEvent>>,
    ) -> Self {
        Event {
            handle,
            context: context.handle,
            device: context.device,
            flags,
            shared,
            state: Mutex::default(),
        }
    }

    /// Begins a recording. The stream's thread or graph launch that reaches it completes it.
    pub fn begin_recording(&self) -> Recording {
        let recording = match &self.shared {
            Some(shared) => {
                Recording::Shared(shared.clone(), shared.recorded().fetch_add(1, Ordering::AcqRel) + 1)
            }
            None => Recording::Local(Arc::default()),
        };
        *lock(&self.state) = State { latest: Some(recording.clone()), captured: None };
        recording
    }

    /// The recording that a wait issued now waits for; `None` if there was none.
    pub fn latest(&self) -> Option<Recording> {
        if let Some(shared) = &self.shared {
            let sequence = shared.recorded().load(Ordering::Acquire);
            return (sequence > 0).then(|| Recording::Shared(shared.clone(), sequence));
        }
        lock(&self.state).latest.clone()
    }

    pub fn capture_at(&self, point: CapturedPoint) {
        lock(&self.state).captured = Some(point);
    }

    pub fn captured(&self) -> Option<CapturedPoint> {
        lock(&self.state).captured.clone()
    }

    pub fn query(&self) -> Result<(), Code> {
        self.refuse_captured()?;
        let Some(recording) = self.latest() else { return Ok(()) };
        if !recording.is_complete() {
            return Err(CUDA_ERROR_NOT_READY);
        }
        recording.wait();
        Ok(())
    }

    pub fn synchronize(&self) -> Result<(), Code> {
        self.refuse_captured()?;
        if let Some(recording) = self.latest() {
            recording.wait();
        }
        Ok(())
    }

    fn refuse_captured(&self) -> Result<(), Code> {
        match self.captured() {
            Some(point) => {
                point.capture.invalidate();
                Err(CUDA_ERROR_CAPTURED_EVENT)
            }
            None => Ok(()),
        }
    }
}

pub fn find(handle: Handle) -> Result<Arc<Event>, Code> {
    simulator()?.events.get(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)
}

pub fn create(flags: u32) -> Result<Handle, Code> {
    let context = context::current()?;
    let known = BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS;
    if flags & !known != 0 || (flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let shared = if flags & INTERPROCESS != 0 { Some(Arc::new(SharedEvent::new()?)) } else { None };
    Ok(simulator()?.events.insert(|handle| Event::new(handle, &context, flags, shared)).handle)
}

/// Milliseconds between two completed recordings.
pub fn elapsed(start: &Event, end: &Event) -> Result<f32, Code> {
    if (start.flags | end.flags) & DISABLE_TIMING != 0 {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    let moments = (local_moment(start)?, local_moment(end)?);
    match moments {
        (Some(start), Some(end)) => Ok(milliseconds(start, end)),
        _ => Err(CUDA_ERROR_NOT_READY),
    }
}

fn milliseconds(start: Moment, end: Moment) -> f32 {
    if clock::is_modelled() {
        return (end.modelled_ns as f64 - start.modelled_ns as f64) as f32 / 1e6;
    }
    match end.real.checked_duration_since(start.real) {
        Some(duration) => duration.as_secs_f32() * 1e3,
        None => -(start.real - end.real).as_secs_f32() * 1e3,
    }
}

fn local_moment(event: &Event) -> Result<Option<Moment>, Code> {
    event.refuse_captured()?;
    match event.latest() {
        Some(Recording::Local(signal)) => Ok(signal.raised_at()),
        _ => Err(CUDA_ERROR_INVALID_HANDLE),
    }
}
