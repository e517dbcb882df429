//! The little of the CUDA driver that ranks need: a device, buffers, a stream, events, a graph.
//!
//! Over cudarc, which opens `libcuda` at the first call. Buffers are cuMemAlloc's, as programs have them: cudarc's own come from pools.

use anyhow::{Context, Result};
use cudarc::driver::{CudaContext, CudaEvent, CudaGraph, CudaStream, result, sys};
use nccl_sys::types::{cudaStream_t, ncclResult_t};
use std::ffi::{CStr, c_void};
use std::sync::Arc;

/// A stream that does not wait for the default stream.
pub type Stream = Arc<CudaStream>;
/// A graph ready to run, on the stream of its capture.
pub type Graph = CudaGraph;
/// An event that keeps time.
pub type Event = CudaEvent;

/// A device whose primary context is current on this thread.
pub struct Gpu(Arc<CudaContext>);

impl Gpu {
    /// Takes device `ordinal` and makes its primary context current on this thread.
    pub fn open(ordinal: usize) -> Result<Self> {
        Ok(Self(CudaContext::new(ordinal).with_context(|| format!("cannot use CUDA device {ordinal}"))?))
    }

    pub fn name(&self) -> Result<String> {
        self.0.name().context("cuDeviceGetName")
    }

    /// Device memory of `bytes` bytes; a buffer of none still has an address.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer> {
        // SAFETY: plain allocation in the current context.
        let pointer = unsafe { result::malloc_sync(bytes.max(256)) }
            .with_context(|| format!("cannot allocate {bytes} bytes of device memory"))?;
        Ok(Buffer { pointer, bytes, free: None })
    }

    pub fn stream(&self) -> Result<Stream> {
        self.0.new_stream().context("cuStreamCreate")
    }

    /// Free bytes of the device, whoever uses the rest.
    pub fn free_bytes(&self) -> Result<usize> {
        self.0.mem_get_info().map(|(free, _)| free).context("cuMemGetInfo")
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
        self.0.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).context("cuEventCreate")
    }
}

/// What `issue` puts on a stream, as a graph.
pub fn capture(stream: &Stream, issue: impl FnOnce() -> Result<()>) -> Result<Graph> {
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream.begin_capture(mode).context("cuStreamBeginCapture")?;
    let issued = issue();
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
    issued?;
    graph.context("cuStreamEndCapture")?.context("the capture gave no graph")
}

/// Device memory, freed when dropped.
pub struct Buffer {
    pointer: sys::CUdeviceptr,
    /// How many bytes it has.
    pub bytes: usize,
    /// None: the driver frees it.
    free: Option<Free>,
}

/// A function that frees what its library has allocated.
pub type Free = unsafe extern "C" fn(*mut c_void) -> ncclResult_t;

impl Buffer {
    /// Takes over memory of a library.
    ///
    /// # Safety
    /// `pointer` is device memory of `bytes` bytes, this process's one device's, that nobody else frees; `free` frees it, and
    /// stays loaded as long as the buffer lives.
    pub unsafe fn of_library(pointer: *mut c_void, bytes: usize, free: Free) -> Self {
        Self { pointer: pointer as sys::CUdeviceptr, bytes, free: Some(free) }
    }

    /// The address `offset` bytes into the buffer.
    pub fn at(&self, offset: usize) -> *mut c_void {
        debug_assert!(offset <= self.bytes);
        (self.pointer as usize + offset) as *mut c_void
    }

    /// Copies `data` to byte `at` and further, in order on `stream`, and waits.
    pub fn upload(&self, stream: &Stream, at: usize, data: &[u8]) -> Result<()> {
        assert!(at + data.len() <= self.bytes, "{} bytes at {at} of a buffer of {}", data.len(), self.bytes);
        if data.is_empty() {
            return Ok(());
        }
        // SAFETY: the buffer holds `data`, which outlives the copy because of the wait below.
        unsafe { result::memcpy_htod_async(self.pointer + at as u64, data, stream.cu_stream()) }
            .context("cuMemcpyHtoDAsync")?;
        stream.synchronize().context("cuStreamSynchronize")
    }

    /// The first `bytes` bytes, read in order on `stream`.
    pub fn download(&self, stream: &Stream, bytes: usize) -> Result<Vec<u8>> {
        assert!(bytes <= self.bytes, "{bytes} bytes from a buffer of {}", self.bytes);
        let mut data = vec![0; bytes];
        if bytes > 0 {
            // SAFETY: both sides hold `bytes`; `data` outlives the copy because of the wait below.
            unsafe { result::memcpy_dtoh_async(&mut data, self.pointer, stream.cu_stream()) }
                .context("cuMemcpyDtoHAsync")?;
        }
        stream.synchronize().context("cuStreamSynchronize")?;
        Ok(data)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match self.free {
            None => {
                // SAFETY: allocated in `Gpu::buffer`; users wait for their streams before they let go.
                let _ = unsafe { result::free_sync(self.pointer) };
            }
            Some(free) => {
                // SAFETY: the guarantee of `of_library`; users wait for their streams before they let go.
                let _ = unsafe { free(self.pointer as *mut c_void) };
            }
        }
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
