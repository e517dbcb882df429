//! The driver's functions by name, and helpers of all tests.

use libloading::Library;
use std::ffi::{c_char, c_void};
use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::sync::mpsc::{Receiver, Sender, channel};

pub type Handle = usize;
pub type HostFunction = extern "C" fn(*mut c_void);

pub const NOT_READY: u32 = 600;

/// `CUlaunchAttribute`.
#[repr(C)]
pub struct LaunchAttribute {
    pub id: u32,
    pub pad: u32,
    pub value: [u32; 16],
}

/// `SimWork`.
#[repr(C)]
pub struct Work {
    pub side: *const c_char,
    pub operation: *const c_char,
    pub bytes: u64,
    pub ranks: u32,
    pub reserved: u32,
}

/// `CUlaunchConfig`.
#[repr(C)]
pub struct LaunchConfiguration {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub stream: Handle,
    pub attributes: *const LaunchAttribute,
    pub attribute_count: u32,
}

fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let test = std::env::current_exe().expect("tests have a path");
        let directory = test.parent().expect("tests lie in a directory");
        // SAFETY: the library under test has no constructors.
        unsafe { Library::new(directory.join("libsim_cuda.so")) }
            .expect("cargo builds the library before its tests")
    })
}

macro_rules! driver {
    ($(fn $name:ident($($argument:ident: $type:ty),*);)*) => {$(
        pub fn $name($($argument: $type),*) -> u32 {
            type Function = extern "C" fn($($type),*) -> u32;
            // SAFETY: the types are those of the driver's header.
            let function = unsafe { library().get::<Function>(concat!(stringify!($name), "\0").as_bytes()) };
            function.expect(stringify!($name))($($argument),*)
        }
    )*};
}

driver! {
    fn simHold(name: *const c_char, state: &'static AtomicU32);
    fn simInitJoined();
    fn simTakeGrids(prefix: *const c_char, blocks: *mut u32, room: usize, count: &mut usize);
    fn cuInit(flags: u32);
    fn cuDriverGetVersion(version: &mut i32);
    fn cuDeviceGetCount(count: &mut i32);
    fn cuDeviceGetAttribute(value: &mut i32, attribute: u32, device: i32);
    fn cuDevicePrimaryCtxRetain(context: &mut Handle, device: i32);
    fn cuDevicePrimaryCtxRelease_v2(device: i32);
    fn cuCtxSetCurrent(context: Handle);
    fn cuCtxGetCurrent(context: &mut Handle);
    fn cuCtxSynchronize();
    fn cuCtxEnablePeerAccess(peer: Handle, flags: u32);
    fn cuGetProcAddress_v2(name: *const i8, function: &mut usize, version: i32, flags: u64, status: &mut u32);
    fn cuMemAlloc_v2(address: &mut usize, bytes: usize);
    fn cuMemFree_v2(address: usize);
    fn cuMemAllocAsync(address: &mut usize, bytes: usize, stream: Handle);
    fn cuMemFreeAsync(address: usize, stream: Handle);
    fn cuMemGetInfo_v2(free: &mut usize, total: &mut usize);
    fn cuMemHostAlloc(address: &mut usize, bytes: usize, flags: u32);
    fn cuMemFreeHost(address: usize);
    fn cuMemHostRegister_v2(address: usize, bytes: usize, flags: u32);
    fn cuMemHostUnregister(address: usize);
    fn cuMemcpyHtoD_v2(to: usize, from: *const c_void, bytes: usize);
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: usize, bytes: usize);
    fn cuMemcpyHtoDAsync_v2(to: usize, from: *const c_void, bytes: usize, stream: Handle);
    fn cuMemcpyDtoDAsync_v2(to: usize, from: usize, bytes: usize, stream: Handle);
    fn cuMemsetD8_v2(at: usize, value: u8, count: usize);
    fn cuMemsetD32Async(at: usize, value: u32, count: usize, stream: Handle);
    fn cuMemGetAddressRange_v2(base: &mut usize, bytes: &mut usize, at: usize);
    fn cuPointerGetAttribute(data: *mut c_void, attribute: u32, address: usize);
    fn cuPointerGetAttributes(count: u32, attributes: *const u32, data: *const *mut c_void, address: usize);
    fn cuMemAddressReserve(address: &mut usize, bytes: usize, alignment: usize, hint: usize, flags: u64);
    fn cuMemAddressFree(address: usize, bytes: usize);
    fn cuMemCreate(handle: &mut u64, bytes: usize, properties: &[u64; 4], flags: u64);
    fn cuMemRelease(handle: u64);
    fn cuMemMap(address: usize, bytes: usize, offset: usize, handle: u64, flags: u64);
    fn cuMemUnmap(address: usize, bytes: usize);
    fn cuMemSetAccess(address: usize, bytes: usize, description: &[u32; 3], count: usize);
    fn cuMemExportToShareableHandle(out: &mut i32, handle: u64, kind: u32, flags: u64);
    fn cuMemImportFromShareableHandle(handle: &mut u64, descriptor: usize, kind: u32);
    fn cuMemRetainAllocationHandle(handle: &mut u64, address: usize);
    fn cuIpcGetMemHandle(handle: &mut [u64; 8], address: usize);
    fn cuIpcOpenMemHandle_v2(address: &mut usize, handle: IpcHandle, flags: u32);
    fn cuIpcCloseMemHandle(address: usize);
    fn cuIpcGetEventHandle(handle: &mut [u64; 8], event: Handle);
    fn cuIpcOpenEventHandle(event: &mut Handle, handle: IpcHandle);
    fn cuStreamCreate(stream: &mut Handle, flags: u32);
    fn cuStreamDestroy_v2(stream: Handle);
    fn cuStreamSynchronize(stream: Handle);
    fn cuStreamQuery(stream: Handle);
    fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: u32);
    fn cuStreamGetId(stream: Handle, id: &mut u64);
    fn cuStreamWaitValue32_v2(stream: Handle, address: usize, value: u32, flags: u32);
    fn cuStreamWriteValue32_v2(stream: Handle, address: usize, value: u32, flags: u32);
    fn simLaunch(stream: Handle, function: HostFunction, data: *mut c_void, work: *const Work);
    fn simSetConditional(handle: u64, value: u32);
    fn cuLaunchHostFunc(stream: Handle, function: HostFunction, data: *mut c_void);
    fn cuEventCreate(event: &mut Handle, flags: u32);
    fn cuEventDestroy_v2(event: Handle);
    fn cuEventRecord(event: Handle, stream: Handle);
    fn cuEventRecordWithFlags(event: Handle, stream: Handle, flags: u32);
    fn cuEventQuery(event: Handle);
    fn cuEventSynchronize(event: Handle);
    fn cuEventElapsedTime(milliseconds: &mut f32, start: Handle, end: Handle);
    fn cuStreamBeginCapture_v2(stream: Handle, mode: u32);
    fn cuStreamGetCaptureInfo_v2(
        stream: Handle,
        status: &mut u32,
        id: &mut u64,
        graph: *mut Handle,
        dependencies: *mut *const Handle,
        count: *mut usize
    );
    fn cuStreamBeginCaptureToGraph(
        stream: Handle, graph: Handle, on: *const Handle, data: *const c_void, count: usize, mode: u32
    );
    fn cuStreamUpdateCaptureDependencies(stream: Handle, nodes: *const Handle, count: usize, flags: u32);
    fn cuStreamEndCapture(stream: Handle, graph: &mut Handle);
    fn cuStreamIsCapturing(stream: Handle, status: &mut u32);
    fn cuThreadExchangeStreamCaptureMode(mode: &mut u32);
    fn cuGraphCreate(graph: &mut Handle, flags: u32);
    fn cuGraphConditionalHandleCreate(handle: &mut u64, graph: Handle, context: Handle, default: u32, flags: u32);
    fn cuGraphAddNode_v2(
        node: &mut Handle, graph: Handle, on: *const Handle, data: *const c_void, count: usize, parameters: &mut [u64; 32]
    );
    fn cuGraphAddChildGraphNode(node: &mut Handle, graph: Handle, on: *const Handle, count: usize, child: Handle);
    fn cuGraphClone(clone: &mut Handle, graph: Handle);
    fn cuGraphGetNodes(graph: Handle, nodes: *mut Handle, count: &mut usize);
    fn cuGraphNodeGetType(node: Handle, kind: &mut u32);
    fn cuGraphChildGraphNodeGetGraph(node: Handle, child: &mut Handle);
    fn cuGraphEventRecordNodeGetEvent(node: Handle, event: &mut Handle);
    fn cuGraphEventRecordNodeSetEvent(node: Handle, event: Handle);
    fn cuGraphAddDependencies(graph: Handle, from: *const Handle, to: *const Handle, count: usize);
    fn cuGraphRemoveDependencies(graph: Handle, from: *const Handle, to: *const Handle, count: usize);
    fn cuGraphDestroyNode(node: Handle);
    fn cuGraphInstantiateWithFlags(executable: &mut Handle, graph: Handle, flags: u64);
    fn cuGraphLaunch(executable: Handle, stream: Handle);
    fn cuGraphExecUpdate_v2(executable: Handle, graph: Handle, result: &mut [usize; 3]);
    fn cuGraphExecDestroy(executable: Handle);
    fn cuGraphDestroy(graph: Handle);
    fn cuUserObjectCreate(object: &mut Handle, pointer: *mut c_void, destroy: HostFunction, count: u32, flags: u32);
    fn cuGraphRetainUserObject(graph: Handle, object: Handle, count: u32, flags: u32);
    fn cuModuleLoadData(module: &mut Handle, image: *const u8);
    fn cuModuleUnload(module: Handle);
    fn cuModuleGetFunction(function: &mut Handle, module: Handle, name: *const i8);
    fn cuLaunchKernelEx(
        configuration: &LaunchConfiguration, function: Handle, parameters: *const *const c_void, extra: *const c_void
    );
    fn cuLaunchKernel(
        function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32,
        shared: u32, stream: Handle, parameters: *const *const c_void, extra: *const *const c_void
    );
}

/// Both IPC handle types: structs of 64 bytes, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle(pub [u64; 8]);

pub fn ok(code: u32) {
    assert_eq!(code, 0, "a driver call failed");
}

/// Starts the simulator with device 0's primary context current.
pub fn start() -> Handle {
    ok(cuInit(0));
    use_device(0)
}

pub fn use_device(device: i32) -> Handle {
    let mut context = 0;
    ok(cuDevicePrimaryCtxRetain(&mut context, device));
    ok(cuCtxSetCurrent(context));
    context
}

pub fn made(make: impl FnOnce(&mut usize) -> u32) -> usize {
    let mut out = 0;
    ok(make(&mut out));
    out
}

pub fn stream() -> Handle {
    made(|out| cuStreamCreate(out, 1))
}

pub fn event() -> Handle {
    made(|out| cuEventCreate(out, 0))
}

pub fn buffer(bytes: usize) -> usize {
    made(|out| cuMemAlloc_v2(out, bytes))
}

pub fn attribute(address: usize, attribute: u32) -> u64 {
    let mut value = 0_u64;
    ok(cuPointerGetAttribute((&raw mut value).cast(), attribute, address));
    value
}

/// Work that blocks a stream until the test opens the gate, so that no test needs to sleep.
pub struct Gate {
    open: Sender<()>,
    entered: Receiver<()>,
}

extern "C" fn wait_at_gate(data: *mut c_void) {
    // SAFETY: `Gate::in_stream` leaked this box for this one call.
    let (entered, open) = *unsafe { Box::from_raw(data.cast::<(Sender<()>, Receiver<()>)>()) };
    let _ = entered.send(());
    let _ = open.recv();
}

impl Gate {
    pub fn in_stream(stream: Handle) -> Gate {
        let (open, opened) = channel();
        let (enter, entered) = channel();
        let data = Box::into_raw(Box::new((enter, opened)));
        ok(cuLaunchHostFunc(stream, wait_at_gate, data.cast()));
        Gate { open, entered }
    }

    pub fn wait_until_reached(&self) {
        self.entered.recv().expect("the stream runs");
    }

    pub fn open(self) {
        self.open.send(()).expect("the stream waits");
    }
}

/// A host function that appends to a list: `(list, entry)`.
pub struct Note(pub std::sync::Arc<std::sync::Mutex<Vec<u32>>>, pub u32);

extern "C" fn append(data: *mut c_void) {
    // SAFETY: `note` leaks its boxes, so that graphs may replay them.
    let Note(list, entry) = unsafe { &*data.cast::<Note>() };
    list.lock().expect("no panics").push(*entry);
}

pub fn note(stream: Handle, list: &std::sync::Arc<std::sync::Mutex<Vec<u32>>>, entry: u32) {
    let data = Box::into_raw(Box::new(Note(list.clone(), entry)));
    ok(cuLaunchHostFunc(stream, append, data.cast()));
}

pub fn instantiate(graph: Handle) -> Handle {
    made(|out| cuGraphInstantiateWithFlags(out, graph, 0))
}
