//! The little of the CUDA driver that ranks need: a device, buffers, a stream, events, a graph.
//!
//! Over cudarc's driver bindings, which open `libcuda` at the first call. Everything belongs to the process's one
//! device and must be used while its [`Gpu`] lives.

use anyhow::{Context, Result};
use cudarc::driver::{result, sys};
use nccl_sys::types::{cudaStream_t, ncclResult_t};
use std::ffi::{CStr, c_void};

/// A device whose primary context is current on this thread.
pub struct Gpu {
    device: sys::CUdevice,
}

impl Gpu {
    /// Takes device `ordinal` and makes its primary context current on this thread.
    pub fn open(ordinal: usize) -> Result<Self> {
        result::init().context("cuInit")?;
        let device =
            result::device::get(ordinal as i32).with_context(|| format!("no CUDA device {ordinal}"))?;
        // SAFETY: the device is valid; `drop` releases what is retained here.
        let context = unsafe { result::primary_ctx::retain(device) }.context("cuDevicePrimaryCtxRetain")?;
        // SAFETY: the context was retained on the line above.
        unsafe { result::ctx::set_current(context) }.context("cuCtxSetCurrent")?;
        Ok(Self { device })
    }

    pub fn name(&self) -> Result<String> {
        result::device::get_name(self.device).context("cuDeviceGetName")
    }

    /// Device memory of `bytes` bytes; a buffer of none still has an address.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer> {
        // SAFETY: plain allocation in the current context.
        let pointer = unsafe { result::malloc_sync(bytes.max(256)) }
            .with_context(|| format!("cannot allocate {bytes} bytes of device memory"))?;
        Ok(Buffer { pointer, bytes, freed_by: FreedBy::Driver })
    }

    pub fn stream(&self) -> Result<Stream> {
        Ok(Stream(result::stream::create(result::stream::StreamKind::NonBlocking).context("cuStreamCreate")?))
    }

    /// Free bytes of the device, whoever uses the rest.
    pub fn free_bytes(&self) -> Result<usize> {
        result::mem_get_info().map(|(free, _)| free).context("cuMemGetInfo")
    }

    /// Bytes of the device that are in use, whoever uses them.
    pub fn used_bytes(&self) -> Result<usize> {
        result::mem_get_info().map(|(free, total)| total - free).context("cuMemGetInfo")
    }

    /// A kernel of a terminated text of PTX, loaded for the life of the process.
    pub fn kernel(&self, ptx: &CStr, name: &CStr) -> Result<Kernel> {
        // SAFETY: a text, terminated.
        let module = unsafe { result::module::load_data(ptx.as_ptr().cast()) }.context("cuModuleLoadData")?;
        // SAFETY: the module was loaded on the line above and stays.
        let function = unsafe { result::module::get_function(module, name.to_owned()) };
        Ok(Kernel(function.context("cuModuleGetFunction")?))
    }

    pub fn event(&self) -> Result<Event> {
        Ok(Event(result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).context("cuEventCreate")?))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`. A failure here changes nothing for a process that ends.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Device memory, freed when dropped.
pub struct Buffer {
    pointer: sys::CUdeviceptr,
    bytes: usize,
    freed_by: FreedBy,
}

/// A function that frees what its library has allocated.
pub type Free = unsafe extern "C" fn(*mut c_void) -> ncclResult_t;

enum FreedBy {
    Driver,
    Library(Free),
}

impl Buffer {
    /// Takes over memory of a library.
    ///
    /// # Safety
    /// `pointer` is device memory of `bytes` bytes, this process's one device's, that nobody else frees; `free` frees it, and
    /// stays loaded as long as the buffer lives.
    pub unsafe fn of_library(pointer: *mut c_void, bytes: usize, free: Free) -> Self {
        Self { pointer: pointer as sys::CUdeviceptr, bytes, freed_by: FreedBy::Library(free) }
    }

    /// How many bytes it has.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address `offset` bytes into the buffer.
    pub fn at(&self, offset: usize) -> *mut c_void {
        debug_assert!(offset <= self.bytes);
        (self.pointer as usize + offset) as *mut c_void
    }

    /// Copies `data` to the beginning, in order on `stream`, and waits.
    pub fn upload(&self, stream: &Stream, data: &[u8]) -> Result<()> {
        assert!(data.len() <= self.bytes, "{} bytes into a buffer of {}", data.len(), self.bytes);
        if data.is_empty() {
            return Ok(());
        }
        // SAFETY: the buffer holds `data`, which outlives the copy because of the wait below.
        unsafe { result::memcpy_htod_async(self.pointer, data, stream.0) }.context("cuMemcpyHtoDAsync")?;
        stream.synchronize()
    }

    /// The first `bytes` bytes, read in order on `stream`.
    pub fn download(&self, stream: &Stream, bytes: usize) -> Result<Vec<u8>> {
        assert!(bytes <= self.bytes, "{bytes} bytes from a buffer of {}", self.bytes);
        let mut data = vec![0; bytes];
        if bytes > 0 {
            // SAFETY: both sides hold `bytes`; `data` outlives the copy because of the wait below.
            unsafe { result::memcpy_dtoh_async(&mut data, self.pointer, stream.0) }
                .context("cuMemcpyDtoHAsync")?;
        }
        stream.synchronize()?;
        Ok(data)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match self.freed_by {
            FreedBy::Driver => {
                // SAFETY: allocated in `Gpu::buffer`; users wait for their streams before they let go.
                let _ = unsafe { result::free_sync(self.pointer) };
            }
            FreedBy::Library(free) => {
                // SAFETY: the guarantee of `of_library`; users wait for their streams before they let go.
                let _ = unsafe { free(self.pointer as *mut c_void) };
            }
        }
    }
}

/// A stream that does not wait for the default stream.
pub struct Stream(sys::CUstream);

impl Stream {
    pub fn as_nccl(&self) -> cudaStream_t {
        self.0.cast()
    }

    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.0) }.context("cuStreamSynchronize")
    }

    /// Lets what comes wait for an event.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are alive.
        unsafe { result::stream::wait_event(self.0, event.0, flags) }.context("cuStreamWaitEvent")
    }

    /// Begins a capture; every captured stream must reach [`end_capture`](Self::end_capture).
    pub fn begin_capture(&self) -> Result<()> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive; the driver refuses if it is capturing.
        unsafe { result::stream::begin_capture(self.0, mode) }.context("cuStreamBeginCapture")
    }

    /// Ends a capture: what was put on this stream since its beginning, ready to run.
    pub fn end_capture(&self) -> Result<Graph> {
        // SAFETY: the stream is alive; the driver refuses if it is not capturing.
        let graph = unsafe { result::stream::end_capture(self.0) }.context("cuStreamEndCapture")?;
        // SAFETY: the graph came from the capture.
        let executable = unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)) };
        match executable.context("cuGraphInstantiate") {
            Ok(executable) => Ok(Graph { graph, executable }),
            Err(error) => {
                // SAFETY: the graph came from the capture and has no other user.
                let _ = unsafe { result::graph::destroy(graph) };
                Err(error)
            }
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created in `Gpu::stream`, destroyed once.
        let _ = unsafe { result::stream::destroy(self.0) };
    }
}

/// A graph ready to run.
pub struct Graph {
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

impl Graph {
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both are alive.
        unsafe { result::graph::launch(self.executable, stream.0) }.context("cuGraphLaunch")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made in `Stream::capture`; users wait for their streams before they let go.
        let _ = unsafe { result::graph::exec_destroy(self.executable) };
        // SAFETY: as above.
        let _ = unsafe { result::graph::destroy(self.graph) };
    }
}

/// A loaded kernel.
pub struct Kernel(sys::CUfunction);

impl Kernel {
    /// Launches it.
    ///
    /// # Safety
    /// `parameters` point to values of the kernel's parameters, in order and in number; the memory that they name is
    /// the kernel's until the stream has run past it.
    pub unsafe fn launch(
        &self,
        stream: cudaStream_t,
        grid: [u32; 2],
        threads: u32,
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        let [x, y] = grid;
        // SAFETY: the caller's guarantee.
        let launched = unsafe {
            result::launch_kernel(self.0, (x, y, 1), (threads, 1, 1), 0, stream.cast(), parameters)
        };
        launched.context("cuLaunchKernel")
    }
}

/// An event that keeps time.
pub struct Event(sys::CUevent);

impl Event {
    pub fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both are alive and of one context.
        unsafe { result::event::record(self.0, stream.0) }.context("cuEventRecord")
    }

    /// Microseconds from `start` to this event; both must have happened.
    pub fn us_since(&self, start: &Event) -> Result<f64> {
        // SAFETY: both are alive and were recorded.
        let ms = unsafe { result::event::elapsed(start.0, self.0) }.context("cuEventElapsedTime")?;
        Ok(f64::from(ms) * 1000.0)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created in `Gpu::event`, destroyed once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
