//! Shared by the tests: the simulated driver, strict, or a GPU machine's own, and functions of it that only applications call.

use std::ffi::c_void;
use std::sync::{Once, OnceLock};
use std::time::{Duration, Instant};

use libloading::os::unix::Library;
use windlass_base::gpu::{Driver, driver};

use super::watch;

/// With `ENGINE_TEST_ON=gpu` these tests run on the machine's own driver with the compiled kernels, which needs two GPUs. Tests of
/// what only the simulator has pass there without a check.
pub fn on_a_gpu() -> bool {
    std::env::var("ENGINE_TEST_ON").is_ok_and(|on| on == "gpu")
}

/// The longest wait for something that should come soon. Threads of the simulator share few cores.
pub fn soon() -> Duration {
    Duration::from_secs(if on_a_gpu() { 10 } else { 60 })
}

/// Whether the machine has so many devices; prints a line if not. The simulator has eight.
pub fn has_devices(count: i32) -> bool {
    let found = start().device_count().unwrap();
    if found < count {
        println!("skipped: it needs {count} devices, here are {found}");
    }
    found >= count
}

macro_rules! application_calls {
    ($(fn $name:ident($($argument:ident: $type:ty),*);)*) => {$(
        #[allow(non_snake_case)]
        pub fn $name($($argument: $type),*) -> u32 {
            // SAFETY: the types are those of the driver's header.
            let function = unsafe {
                library().get::<unsafe extern "C" fn($($type),*) -> u32>(concat!(stringify!($name), "\0").as_bytes())
            };
            // SAFETY: as above; tests pass what they own.
            unsafe { function.expect(stringify!($name))($($argument),*) }
        }
    )*};
}

application_calls! {
    fn cuCtxSetCurrent(context: usize);
    fn cuCtxCreate_v2(context: &mut usize, flags: u32, device: i32);
    fn cuCtxDestroy_v2(context: usize);
    fn cuDevicePrimaryCtxRelease_v2(device: i32);
    fn cuDevicePrimaryCtxReset_v2(device: i32);
    fn cuMemAlloc_v2(address: &mut u64, bytes: usize);
    fn cuMemFree_v2(address: u64);
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize);
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: usize);
    fn cuMemsetD8Async(at: u64, value: u8, count: usize, stream: usize);
    fn cuMemsetD32Async(at: u64, value: u32, count: usize, stream: usize);
    fn cuMemAllocAsync(address: &mut u64, bytes: usize, stream: usize);
    fn cuMemFreeAsync(address: u64, stream: usize);
    fn cuMemAllocManaged(address: &mut u64, bytes: usize, flags: u32);
    fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: u32);
    fn cuMemHostUnregister(address: *mut c_void);
    fn cuMemCreate(handle: &mut u64, bytes: usize, properties: &[u64; 4], flags: u64);
    fn cuMemRelease(handle: u64);
    fn cuMemAddressReserve(address: &mut u64, bytes: usize, alignment: usize, hint: u64, flags: u64);
    fn cuMemAddressFree(address: u64, bytes: usize);
    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    fn cuMemUnmap(address: u64, bytes: usize);
    fn cuMemSetAccess(address: u64, bytes: usize, access: &[i32; 3], count: usize);
    fn cuMemGetAccess(flags: &mut u64, location: &[i32; 2], at: u64);
    fn cuMemGetInfo_v2(free: &mut usize, total: &mut usize);
    fn cuStreamCreate(stream: &mut usize, flags: u32);
    fn cuStreamGetFlags(stream: usize, flags: &mut u32);
    fn cuStreamQuery(stream: usize);
    fn cuStreamSynchronize(stream: usize);
    fn cuLaunchHostFunc(stream: usize, function: unsafe extern "C" fn(*mut c_void), data: *mut c_void);
    fn cuStreamBeginCapture_v2(stream: usize, mode: u32);
    fn cuStreamBeginCaptureToGraph(
        stream: usize, graph: usize, dependencies: *const usize, data: *const c_void, count: usize, mode: u32
    );
    fn cuStreamEndCapture(stream: usize, graph: &mut usize);
    fn cuGraphCreate(graph: &mut usize, flags: u32);
    fn cuGraphAddChildGraphNode(
        node: &mut usize, graph: usize, dependencies: *const usize, count: usize, child: usize
    );
    fn cuGraphGetNodes(graph: usize, nodes: *mut usize, count: &mut usize);
    fn cuGraphNodeGetType(node: usize, kind: &mut u32);
    fn cuGraphEventRecordNodeGetEvent(node: usize, event: &mut usize);
    fn cuGraphInstantiateWithFlags(executable: &mut usize, graph: usize, flags: u64);
    fn cuGraphLaunch(executable: usize, stream: usize);
    fn cuGraphDestroy(graph: usize);
    fn cuGraphExecDestroy(executable: usize);
}

pub fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        if on_a_gpu() {
            // SAFETY: the driver; every CUDA program runs its constructors.
            return unsafe { Library::new("libcuda.so.1") }.expect("this machine has a driver");
        }
        let test = std::env::current_exe().expect("tests have a path");
        let simulator = test.parent().expect("tests lie in a folder").join("libsim_cuda.so");
        // SAFETY: the simulator has no constructors. Its soname is the driver's, so whoever asks for that gets it.
        unsafe { Library::new(simulator) }.expect("cargo builds the simulator before these tests")
    })
}

/// Loads the driver; the simulator is strict.
pub fn start() -> &'static Driver {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: nextest gives this test a process of its own, and nothing else in it reads the environment now.
        unsafe {
            std::env::set_var("WINDLASS_SIM_STRICT", "1");
            // As an H200; these tests say themselves how many blocks they take.
            std::env::set_var("WINDLASS_SIM_MULTIPROCESSORS", "132");
        }
        library();
        if on_a_gpu() {
            watch::begin();
        }
    });
    driver().expect("the driver is loaded")
}

#[track_caller]
pub fn ok(code: u32) {
    assert_eq!(code, 0, "a driver call failed");
}

#[track_caller]
pub fn made(make: impl FnOnce(&mut usize) -> u32) -> usize {
    let mut out = 0;
    ok(make(&mut out));
    out
}

/// Waits until another thread or process has made a condition true; fails if it never does.
#[track_caller]
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < soon(), "never: {what}");
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// A device's primary context, as programs have it that use CUDA's runtime.
pub struct Primary {
    pub driver: &'static Driver,
    pub device: i32,
    pub context: usize,
}

impl Primary {
    pub fn of(device: i32) -> Primary {
        let driver = start();
        let mut context = 0;
        // SAFETY: the output is a local.
        ok(unsafe { (driver.calls.cuDevicePrimaryCtxRetain)(&mut context, device) }.0);
        Primary { driver, device, context }
    }

    pub fn make_current(&self) {
        ok(cuCtxSetCurrent(self.context));
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // Releases what `of` retained.
        let _ = cuDevicePrimaryCtxRelease_v2(self.device);
    }
}
