//! Handles streams and events: our own, and what can be known of the application's.

use std::ffi::c_void;

use crate::gpu::failure::{NOT_READY, SUCCESS};
use crate::gpu::{Address, Context, Driver, Failure};

const NON_BLOCKING: u32 = 1;
const DISABLE_TIMING: u32 = 2;

/// A stream of any owner, as C passes it. Handles are reused: two streams are the same only if their ids are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamHandle(pub usize);

/// How an event orders work in and around captures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ordering {
    /// Within eager work, or within one capture.
    Inside,
    /// From a capture to what is outside it, as a node of its own.
    External,
}

impl Ordering {
    fn flag(self) -> u32 {
        match self {
            Ordering::Inside => 0,
            Ordering::External => 1,
        }
    }
}

/// A capture that a stream is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capture {
    /// Unique in the process.
    pub id: u64,
    /// The graph that is being made.
    pub graph: usize,
}

/// Where what is issued to a stream goes: into the stream itself, or into a capture that it is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Into the stream. Its id tells it from all others.
    Eager(u64),
    /// Into this capture.
    Captured(Capture),
}

impl Driver {
    /// Where work issued to a stream goes. Asks for the capture first: the driver refuses to tell the id of a captured stream.
    pub fn place_of(&self, stream: StreamHandle) -> Result<Place, Failure> {
        Ok(match self.capture_of(stream)? {
            Some(capture) => Place::Captured(capture),
            None => Place::Eager(self.stream_id(stream)?),
        })
    }

    /// The id of a stream, which no other stream ever has, even if it reuses the handle.
    pub fn stream_id(&self, stream: StreamHandle) -> Result<u64, Failure> {
        // SAFETY: the application vouches for its stream; the output is a local.
        let ask = |id: &mut u64| unsafe { (self.calls.cuStreamGetId)(stream.0, id) };
        self.output("cuStreamGetId", ask, || about(stream))
    }

    /// The capture that a stream is part of, if any. None for an invalidated capture, which fails at the application's own end of it.
    pub fn capture_of(&self, stream: StreamHandle) -> Result<Option<Capture>, Failure> {
        const ACTIVE: u32 = 1;
        let (mut status, mut id, mut graph) = (0, 0, 0);
        // SAFETY: as above; the dependencies are not asked for.
        let code = unsafe {
            (self.calls.cuStreamGetCaptureInfo_v2)(
                stream.0,
                &mut status,
                &mut id,
                &mut graph,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        self.check("cuStreamGetCaptureInfo_v2", code, || about(stream))?;
        Ok((status == ACTIVE).then_some(Capture { id, graph }))
    }

    /// The nodes that the next node of a captured stream would come after.
    pub fn last_nodes(&self, stream: StreamHandle) -> Result<Vec<usize>, Failure> {
        let (mut status, mut nodes, mut count) = (0, std::ptr::null(), 0);
        // SAFETY: as for `capture_of`.
        let code = unsafe {
            (self.calls.cuStreamGetCaptureInfo_v2)(
                stream.0,
                &mut status,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                &mut nodes,
                &mut count,
            )
        };
        self.check("cuStreamGetCaptureInfo_v2", code, || about(stream))?;
        if nodes.is_null() {
            return Ok(Vec::new());
        }
        // SAFETY: the driver's own list, good until the stream is used again.
        Ok(unsafe { std::slice::from_raw_parts(nodes, count) }.to_vec())
    }

    /// Makes later work on a stream wait for an event.
    pub fn wait(&self, stream: StreamHandle, event: &Event, ordering: Ordering) -> Result<(), Failure> {
        // SAFETY: the event is alive; the application vouches for its stream.
        let code = unsafe { (self.calls.cuStreamWaitEvent)(stream.0, event.handle, ordering.flag()) };
        self.check("cuStreamWaitEvent", code, || about(stream))
    }

    /// Copies bytes in a stream's order, between memory of any kind.
    pub fn copy(&self, to: Address, from: Address, bytes: u64, stream: StreamHandle) -> Result<(), Failure> {
        // SAFETY: callers pass memory that they, or the application, keep until the work is done.
        let code = unsafe { (self.calls.cuMemcpyAsync)(to, from, bytes as usize, stream.0) };
        self.check("cuMemcpyAsync", code, || {
            format!("from {from:#x} to {to:#x}, bytes {bytes}, {}", about(stream))
        })
    }
}

pub(super) fn about(stream: StreamHandle) -> String {
    format!("stream {:#x}", stream.0)
}

/// A stream of ours, not ordered against any other. Dropping it destroys it, unless it has gone with its context.
#[derive(Debug)]
pub struct Stream {
    driver: &'static Driver,
    context: Context,
    /// For calls that take any stream.
    pub handle: StreamHandle,
}

impl Stream {
    /// Makes a stream in the current context.
    pub fn new(driver: &'static Driver) -> Result<Stream, Failure> {
        let context = driver.current_context()?;
        // SAFETY: the output is a local.
        let create = |handle: &mut usize| unsafe { (driver.calls.cuStreamCreate)(handle, NON_BLOCKING) };
        let handle = driver.output("cuStreamCreate", create, || "flags non-blocking".into())?;
        Ok(Stream { driver, context, handle: StreamHandle(handle) })
    }

    /// Waits for all work of the stream.
    pub fn wait(&self) -> Result<(), Failure> {
        // SAFETY: the stream is alive.
        let code = unsafe { (self.driver.calls.cuStreamSynchronize)(self.handle.0) };
        self.driver.check("cuStreamSynchronize", code, || about(self.handle))
    }

    /// Fills `bytes` bytes at `address` with zeros, in the stream's order.
    pub fn zero(&self, address: Address, bytes: u64) -> Result<(), Failure> {
        // SAFETY: callers pass memory that they have mapped and keep until the work is done.
        let code = unsafe { (self.driver.calls.cuMemsetD8Async)(address, 0, bytes as usize, self.handle.0) };
        self.driver.check("cuMemsetD8Async", code, || format!("address {address:#x}, bytes {bytes}"))
    }

    /// Stores a word at `address`, in the stream's order.
    pub fn store(&self, address: Address, word: u32) -> Result<(), Failure> {
        // SAFETY: as above.
        let code = unsafe { (self.driver.calls.cuMemsetD32Async)(address, word, 1, self.handle.0) };
        self.driver.check("cuMemsetD32Async", code, || format!("address {address:#x}"))
    }

    /// Loads the word at `address`. Waits for this stream, and for no other.
    pub fn load(&self, address: Address) -> Result<u32, Failure> {
        let mut word = 0_u32;
        // SAFETY: callers pass memory that they have mapped; any bytes are a word.
        unsafe { self.read((&raw mut word).cast(), address, size_of::<u32>())? };
        Ok(word)
    }

    /// Reads bytes of the device, and waits in the same way.
    ///
    /// # Safety
    /// `bytes` bytes are mapped at `from`, and may be written at `to`.
    pub unsafe fn read(&self, to: *mut c_void, from: Address, bytes: usize) -> Result<(), Failure> {
        // SAFETY: the caller's guarantee; the copy has ended when this returns, because the stream is done or dead then.
        let code = unsafe { (self.driver.calls.cuMemcpyDtoHAsync_v2)(to, from, bytes, self.handle.0) };
        self.driver.check("cuMemcpyDtoHAsync_v2", code, || format!("address {from:#x}, bytes {bytes}"))?;
        self.wait()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by `new`; work that it still holds completes all the same.
        let destroy = || unsafe { (self.driver.calls.cuStreamDestroy_v2)(self.handle.0) };
        if !self.driver.is_in_forked_child() && self.driver.is_there(self.context) {
            self.driver.note("cuStreamDestroy_v2", destroy(), || about(self.handle));
        }
    }
}

/// An event. Dropping it destroys it, unless it has gone with its context.
#[derive(Debug)]
pub struct Event {
    driver: &'static Driver,
    context: Context,
    pub(super) handle: usize,
}

impl Event {
    /// Makes an event without a time in the current context.
    pub fn new(driver: &'static Driver) -> Result<Event, Failure> {
        Event::with(driver, DISABLE_TIMING)
    }

    /// Makes an event with a time in the current context.
    pub fn timed(driver: &'static Driver) -> Result<Event, Failure> {
        Event::with(driver, 0)
    }

    fn with(driver: &'static Driver, flags: u32) -> Result<Event, Failure> {
        let context = driver.current_context()?;
        // SAFETY: the output is a local.
        let create = |handle: &mut usize| unsafe { (driver.calls.cuEventCreate)(handle, flags) };
        let handle = driver.output("cuEventCreate", create, || format!("flags {flags}"))?;
        Ok(Event { driver, context, handle })
    }

    /// The time from another event to this one, in nanoseconds; none if one of them is not done. Both have a time. Does not wait.
    pub fn since(&self, earlier: &Event) -> Result<Option<i64>, Failure> {
        let mut milliseconds = 0.0;
        // SAFETY: the events are alive; the output is a local.
        match unsafe {
            (self.driver.calls.cuEventElapsedTime)(&mut milliseconds, earlier.handle, self.handle)
        } {
            SUCCESS => Ok(Some((f64::from(milliseconds) * 1e6) as i64)),
            NOT_READY => Ok(None),
            code => Err(Failure::of(self.driver, "cuEventElapsedTime", code, String::new())),
        }
    }

    /// Marks what a stream holds now.
    pub fn record(&self, stream: StreamHandle, ordering: Ordering) -> Result<(), Failure> {
        // SAFETY: the event is alive; the application vouches for its stream.
        let code =
            unsafe { (self.driver.calls.cuEventRecordWithFlags)(self.handle, stream.0, ordering.flag()) };
        self.driver.check("cuEventRecordWithFlags", code, || about(stream))
    }

    /// Whether the work that was marked last is done. Does not wait.
    pub fn is_done(&self) -> Result<bool, Failure> {
        // SAFETY: the event is alive.
        match unsafe { (self.driver.calls.cuEventQuery)(self.handle) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => Err(Failure::of(self.driver, "cuEventQuery", code, String::new())),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by `new`; the driver keeps it until pending work has passed it.
        let destroy = || unsafe { (self.driver.calls.cuEventDestroy_v2)(self.handle) };
        if !self.driver.is_in_forked_child() && self.driver.is_there(self.context) {
            self.driver.note("cuEventDestroy_v2", destroy(), String::new);
        }
    }
}
