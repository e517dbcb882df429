//! The functions of `libcuda.so.1` that the simulator calls, and wrappers around them. Any thread may use them.

use crate::refusal::{Outcome, refuse};
use crate::work::SimWork;
use libc::{c_char, c_int, c_uint, c_ulonglong, c_void};
use libloading::os::unix::Library;
use nccl_sys::*;
use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

mod memory;
mod sharing;

pub use memory::Mapping;
pub use sharing::Space;

pub type Stream = usize;
pub type Context = usize;
type Result = c_int;

const SUCCESS: Result = 0;
const EVENT_DISABLE_TIMING: c_uint = 2;

macro_rules! driver_calls {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*);)*) => {
        /// The driver's entry points, looked up once.
        pub struct Driver {
            _library: Library,
            $($field: unsafe extern "C" fn($($argument),*) -> Result,)*
        }

        fn open() -> std::result::Result<Driver, String> {
            // SAFETY: loading the driver runs its constructors, as every CUDA program does.
            let library = unsafe { Library::new("libcuda.so.1") }.map_err(|error| error.to_string())?;
            Ok(Driver {
                // SAFETY: the signatures are those of cuda.h for these versioned names.
                $($field: unsafe { *library.get($symbol).map_err(|error| error.to_string())? },)*
                _library: library,
            })
        }
    };
}

driver_calls! {
    init = b"cuInit\0": fn(c_uint);
    device_count = b"cuDeviceGetCount\0": fn(*mut c_int);
    device_get = b"cuDeviceGet\0": fn(*mut c_int, c_int);
    device_bus_id = b"cuDeviceGetPCIBusId\0": fn(*mut c_char, c_int, c_int);
    primary_retain = b"cuDevicePrimaryCtxRetain\0": fn(*mut Context, c_int);
    context_current = b"cuCtxGetCurrent\0": fn(*mut Context);
    context_set = b"cuCtxSetCurrent\0": fn(Context);
    context_device = b"cuCtxGetDevice\0": fn(*mut c_int);
    stream_capturing = b"cuStreamIsCapturing\0": fn(Stream, *mut c_int);
    capture_info = b"cuStreamGetCaptureInfo_v2\0": fn(Stream, *mut c_int, *mut u64, *mut usize, *mut *const usize, *mut usize);
    capture_dependencies = b"cuStreamUpdateCaptureDependencies\0": fn(Stream, *const usize, usize, c_uint);
    stream_wait = b"cuStreamWaitEvent\0": fn(Stream, usize, c_uint);
    launch_kernel = b"simLaunch\0": fn(Stream, extern "C" fn(*mut c_void), *mut c_void, *const SimWork);
    need_stack = b"simNeedStack\0": fn(usize);
    init_joined = b"simInitJoined\0": fn();
    before_leaks = b"simBeforeLeaks\0": fn(extern "C" fn());
    keep_event = b"simKeepEvent\0": fn(usize);
    event_create = b"cuEventCreate\0": fn(*mut usize, c_uint);
    event_record = b"cuEventRecordWithFlags\0": fn(usize, Stream, c_uint);
    event_destroy = b"cuEventDestroy_v2\0": fn(usize);
    pointer_attribute = b"cuPointerGetAttribute\0": fn(*mut c_void, c_int, usize);
    address_range = b"cuMemGetAddressRange_v2\0": fn(*mut usize, *mut usize, usize);
    granularity = b"cuMemGetAllocationGranularity\0": fn(*mut usize, *const AllocationProperties, c_int);
    plain_allocate = b"cuMemAlloc_v2\0": fn(*mut usize, usize);
    plain_free = b"cuMemFree_v2\0": fn(usize);
    memory_create = b"cuMemCreate\0": fn(*mut c_ulonglong, usize, *const AllocationProperties, c_ulonglong);
    memory_release = b"cuMemRelease\0": fn(c_ulonglong);
    address_reserve = b"cuMemAddressReserve\0": fn(*mut usize, usize, usize, usize, c_ulonglong);
    address_free = b"cuMemAddressFree\0": fn(usize, usize);
    memory_map = b"cuMemMap\0": fn(usize, usize, usize, c_ulonglong, c_ulonglong);
    memory_unmap = b"cuMemUnmap\0": fn(usize, usize);
    set_access = b"cuMemSetAccess\0": fn(usize, usize, *const AccessDescription, usize);
    retain_handle = b"cuMemRetainAllocationHandle\0": fn(*mut c_ulonglong, usize);
    export_handle = b"cuMemExportToShareableHandle\0": fn(*mut c_int, c_ulonglong, c_int, c_ulonglong);
    import_handle = b"cuMemImportFromShareableHandle\0": fn(*mut c_ulonglong, usize, c_int);
}

/// `CUmemLocation`.
#[repr(C)]
struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    win32_metadata: *mut c_void,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct AccessDescription {
    location: Location,
    flags: c_int,
}

/// A point in a capture.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Captured {
    pub capture: u64,
    /// The last node that the stream's next work depends on; `None` at the start.
    pub node: Option<usize>,
}

/// Whether an event in a capture orders work of the capture, or becomes an external event node.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    Inside = 0,
    Outside = 1,
}

thread_local! {
    /// The device that NCCL's copy of CUDA's runtime has for this thread. Never dropped: exit handlers call NCCL.
    static DEVICE: Cell<c_int> = const { Cell::new(0) };
}

/// Set by this library's exit handler. The real library has a CUDA runtime of its own, whose exit handler runs at the same point. After
/// it, every call fails: also calls from older exit handlers and destructors, which run later.
static IS_RUNTIME_OVER: AtomicBool = AtomicBool::new(false);

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    // SAFETY: the handler is a function of this library, which stays loaded until it has run.
    unsafe { libc::atexit(end_runtime) };
}

extern "C" fn end_runtime() {
    IS_RUNTIME_OVER.store(true, Ordering::Relaxed);
}

/// Lets driver calls work again, for the simulator's own clean-up after exit handlers.
pub fn go_on() {
    IS_RUNTIME_OVER.store(false, Ordering::Relaxed);
}

/// The driver, opened and initialised at the first call. Fails once exit handlers have ended the simulated CUDA runtime.
pub fn driver() -> Outcome<&'static Driver> {
    if IS_RUNTIME_OVER.load(Ordering::Relaxed) {
        return refuse(ncclUnhandledCudaError, "Cuda failure 'driver shutting down'");
    }
    static DRIVER: OnceLock<std::result::Result<Driver, String>> = OnceLock::new();
    let opened = DRIVER.get_or_init(|| {
        let driver = open()?;
        // SAFETY: cuInit takes no pointers.
        match unsafe { (driver.init)(0) } {
            SUCCESS => Ok(driver),
            code => Err(format!("cuInit answered {code}")),
        }
    });
    match opened {
        Ok(driver) => Ok(driver),
        Err(text) => refuse(ncclUnhandledCudaError, format!("no CUDA driver: {text}")),
    }
}

fn check(code: Result, name: &str) -> Outcome {
    if code == SUCCESS {
        Ok(())
    } else {
        refuse(ncclUnhandledCudaError, format!("Cuda failure {code} in {name}"))
    }
}

// SAFETY, for all unsafe blocks below: pointers are to locals or to values that the caller keeps alive for the call,
// and handles are passed through to the driver, which checks them.
impl Driver {
    /// `cudaGetDevice` of NCCL's own copy of CUDA's runtime: the current context's device; without a context, the device that NCCL last
    /// [set](Driver::set_device) on this thread, 0 at first. Makes nothing current.
    pub fn device(&self) -> Outcome<c_int> {
        if self.context() == 0 {
            return Ok(DEVICE.get());
        }
        let mut device = 0;
        // SAFETY: see above.
        check(unsafe { (self.context_device)(&mut device) }, "cuCtxGetDevice")?;
        Ok(device)
    }

    /// `cudaSetDevice` of NCCL's own copy of CUDA's runtime.
    pub fn set_device(&self, device: c_int) -> Outcome {
        DEVICE.set(device);
        self.make_current(self.primary(device)?)
    }

    /// What an init takes from its thread: a device, and a context of it. Then calls `cudaFree(NULL)`: without a context device 0's becomes
    /// current, also where NCCL has set another device (2.18.1, 2.28.9 and 2.31.2 on H100).
    pub fn current(&self) -> Outcome<(Context, c_int)> {
        let device = self.device()?;
        if self.context() != 0 {
            return Ok((self.context(), device));
        }
        self.make_current(self.primary(0)?)?;
        Ok((self.primary(device)?, device))
    }

    /// Runs `body` with a context and its device set on this thread. Afterwards the thread's own context is current again; a thread without
    /// one has its device set, as NCCL sets it.
    pub fn within<T>(
        &self,
        context: Context,
        device: c_int,
        body: impl FnOnce() -> Outcome<T>,
    ) -> Outcome<T> {
        let (context_before, device_before) = (self.context(), self.device()?);
        DEVICE.set(device);
        self.make_current(context)?;
        let result = body();
        match context_before {
            0 => self.set_device(device_before)?,
            before => {
                DEVICE.set(device_before);
                self.make_current(before)?;
            }
        }
        result
    }

    /// The calling thread's context, 0 for none.
    pub fn context(&self) -> Context {
        let mut context = 0;
        // SAFETY: see above.
        unsafe { (self.context_current)(&mut context) };
        context
    }

    pub fn primary(&self, device: c_int) -> Outcome<Context> {
        let (mut handle, mut context) = (0, 0);
        // SAFETY: see above.
        check(unsafe { (self.device_get)(&mut handle, device) }, "cuDeviceGet")?;
        // SAFETY: see above.
        check(unsafe { (self.primary_retain)(&mut context, handle) }, "cuDevicePrimaryCtxRetain")?;
        Ok(context)
    }

    pub fn make_current(&self, context: Context) -> Outcome {
        // SAFETY: see above.
        check(unsafe { (self.context_set)(context) }, "cuCtxSetCurrent")
    }

    pub fn devices(&self) -> Outcome<c_int> {
        let mut count = 0;
        // SAFETY: see above.
        check(unsafe { (self.device_count)(&mut count) }, "cuDeviceGetCount")?;
        Ok(count)
    }

    /// A number that is different for each physical device of this host.
    pub fn bus_id(&self, device: c_int) -> Outcome<u64> {
        let mut text = [0u8; 64];
        // SAFETY: see above.
        let code = unsafe { (self.device_bus_id)(text.as_mut_ptr().cast(), text.len() as c_int, device) };
        check(code, "cuDeviceGetPCIBusId")?;
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        let digits = text[..end].iter().filter_map(|byte| (*byte as char).to_digit(16));
        Ok(digits.fold(0u64, |value, digit| value << 4 | u64::from(digit)))
    }

    pub fn is_capturing(&self, stream: Stream) -> Outcome<bool> {
        let mut status = 0;
        // SAFETY: see above.
        check(unsafe { (self.stream_capturing)(stream, &mut status) }, "cuStreamIsCapturing")?;
        Ok(status != 0)
    }

    /// The point that a stream has reached in its capture; `None` if it does not capture.
    pub fn captured(&self, stream: Stream) -> Outcome<Option<Captured>> {
        let (mut status, mut capture, mut graph, mut nodes, mut count) = (0, 0, 0, std::ptr::null(), 0);
        // SAFETY: all outputs are locals.
        let code = unsafe {
            (self.capture_info)(stream, &mut status, &mut capture, &mut graph, &mut nodes, &mut count)
        };
        check(code, "cuStreamGetCaptureInfo")?;
        if status == 0 {
            return Ok(None);
        }
        // SAFETY: there are `count` nodes, readable until the capture goes on.
        let node = (count > 0).then(|| unsafe { nodes.add(count - 1).read() });
        Ok(Some(Captured { capture, node }))
    }

    /// Makes later work of a capturing stream depend on a node of the same capture.
    pub fn order_behind(&self, node: usize, later: Stream) -> Outcome {
        const ADD: c_uint = 0;
        // SAFETY: one node.
        let code = unsafe { (self.capture_dependencies)(later, &node, 1, ADD) };
        check(code, "cuStreamUpdateCaptureDependencies")
    }

    /// Queues `function(data)` on `stream`, where it counts as a kernel that does `work`.
    pub fn launch(
        &self,
        stream: Stream,
        function: extern "C" fn(*mut c_void),
        data: *mut c_void,
        work: &SimWork,
    ) -> Outcome {
        // SAFETY: the caller keeps `data` alive until the function has run (or for ever, if captured); `work` is read at once.
        check(unsafe { (self.launch_kernel)(stream, function, data, work) }, "simLaunch")
    }

    /// Acts as the launch of a kernel with so many bytes of stack a thread. If the context's stack grows, it waits for running kernels.
    pub fn need_stack(&self, bytes: usize) -> Outcome {
        // SAFETY: no pointers.
        check(unsafe { (self.need_stack)(bytes) }, "simNeedStack")
    }

    /// Where a test may hold an init whose ranks have come.
    pub fn init_joined(&self) -> Outcome {
        // SAFETY: no pointers.
        check(unsafe { (self.init_joined)() }, "simInitJoined")
    }

    /// Has `act` called at the process's end, before the simulated driver counts leaks.
    pub fn before_leaks(&self, act: extern "C" fn()) -> Outcome {
        // SAFETY: a function of this library, which stays mapped.
        check(unsafe { (self.before_leaks)(act) }, "simBeforeLeaks")
    }

    /// Makes an event of a context, which is no leak if it is never destroyed.
    pub fn new_event(&self, context: Context) -> Outcome<usize> {
        let (before, mut event) = (self.context(), 0);
        self.make_current(context)?;
        // SAFETY: see above.
        let code = unsafe { (self.event_create)(&mut event, EVENT_DISABLE_TIMING) };
        self.make_current(before)?;
        check(code, "cuEventCreate")?;
        // SAFETY: no pointers.
        check(unsafe { (self.keep_event)(event) }, "simKeepEvent").map(|()| event)
    }

    pub fn end_event(&self, event: usize) {
        // SAFETY: the driver keeps a destroyed event until the work that names it has gone.
        unsafe { (self.event_destroy)(event) };
    }

    /// Records an event on a stream.
    pub fn record(&self, event: usize, stream: Stream, reach: Reach) -> Outcome {
        // SAFETY: see above.
        check(unsafe { (self.event_record)(event, stream, reach as c_uint) }, "cuEventRecordWithFlags")
    }

    /// Makes later work of a stream wait for an event.
    pub fn wait(&self, event: usize, stream: Stream, reach: Reach) -> Outcome {
        // SAFETY: see above.
        check(unsafe { (self.stream_wait)(stream, event, reach as c_uint) }, "cuStreamWaitEvent")
    }

    /// Makes later work of the stream `later` wait for all work that `earlier` has now.
    pub fn order(&self, earlier: Stream, later: Stream) -> Outcome {
        let mut event = 0;
        // SAFETY: see above.
        check(unsafe { (self.event_create)(&mut event, EVENT_DISABLE_TIMING) }, "cuEventCreate")?;
        // SAFETY: see above.
        let recorded = self.record(event, earlier, Reach::Inside);
        // SAFETY: see above.
        let waited = recorded
            .and_then(|()| check(unsafe { (self.stream_wait)(later, event, 0) }, "cuStreamWaitEvent"));
        // SAFETY: the driver keeps a destroyed event until the work that names it has gone.
        unsafe { (self.event_destroy)(event) };
        waited
    }
}
