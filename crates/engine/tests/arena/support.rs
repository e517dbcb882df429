//! The stand-in driver, the application around the arena, and what tests ask of them.

use std::ffi::c_void;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use libloading::os::unix::Library;
use windlass_engine::arena::{Arena, Holds, Slice};
use windlass_engine::gpu::{Calls, Driver, StreamHandle, driver};

pub const MIB: u64 = 1 << 20;
pub const SOON: Duration = Duration::from_secs(10);

/// Functions of the driver that only applications call.
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
    fn cuStreamCreate(stream: &mut usize, flags: u32);
    fn cuStreamQuery(stream: usize);
    fn cuStreamSynchronize(stream: usize);
    fn cuStreamBeginCapture_v2(stream: usize, mode: u32);
    fn cuStreamEndCapture(stream: usize, graph: &mut usize);
    fn cuGraphInstantiateWithFlags(executable: &mut usize, graph: usize, flags: u64);
    fn cuGraphDestroy(graph: usize);
    fn cuGraphExecDestroy(executable: usize);
    fn cuMemsetD8Async(at: u64, value: u8, count: usize, stream: usize);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: usize);
    fn cuMemsetD32Async(at: u64, value: u32, count: usize, stream: usize);
    fn cuMemGetAccess(flags: &mut u64, location: &[i32; 2], at: u64);
    fn cuMemGetInfo_v2(free: &mut usize, total: &mut usize);
}

fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        if on_a_gpu() {
            // SAFETY: the driver; every CUDA program runs its constructors.
            return unsafe { Library::new("libcuda.so.1") }.expect("this machine has a driver");
        }
        let test = std::env::current_exe().expect("tests have a path");
        let stand_in = test.parent().expect("tests lie in a folder").join("libsim_cuda.so");
        // SAFETY: the stand-in has no constructors. Its soname is the driver's, so whoever asks for that gets it.
        unsafe { Library::new(stand_in) }.expect("cargo builds the stand-in before these tests")
    })
}

pub fn ok(code: u32) {
    assert_eq!(code, 0, "a driver call failed");
}

pub fn made(make: impl FnOnce(&mut usize) -> u32) -> usize {
    let mut out = 0;
    ok(make(&mut out));
    out
}

/// With `ARENA_TEST_ON=gpu` these tests run on the machine's own driver, which needs two GPUs. Those that ask the
/// stand-in for what only it has pass without a word.
pub fn on_a_gpu() -> bool {
    std::env::var("ARENA_TEST_ON").is_ok_and(|on| on == "gpu")
}

/// Loads the stand-in, strict.
pub fn start() -> &'static Driver {
    // SAFETY: nextest gives this test a process of its own, and nothing else in it reads the environment now.
    unsafe { std::env::set_var("WINDLASS_SIM_STRICT", "1") };
    library();
    driver().expect("the stand-in is loaded")
}

/// A program that uses a device by its primary context, as all that use CUDA's runtime do.
pub struct Application {
    pub driver: &'static Driver,
    device: i32,
    pub context: usize,
}

impl Application {
    pub fn on(device: i32) -> Application {
        let driver = start();
        let mut context = 0;
        // SAFETY: the output is a local.
        assert_eq!(unsafe { (driver.calls.cuDevicePrimaryCtxRetain)(&mut context, device) }.0, 0);
        ok(cuCtxSetCurrent(context));
        Application { driver, device, context }
    }

    pub fn arena(&self, bytes: u64) -> Arc<Arena> {
        Arena::open(self.driver, self.device, bytes).unwrap()
    }

    pub fn stream(&self) -> AppStream {
        AppStream(made(|out| cuStreamCreate(out, 1)))
    }

    /// A stream that orders itself with the legacy stream, as streams do by default.
    pub fn blocking_stream(&self) -> AppStream {
        AppStream(made(|out| cuStreamCreate(out, 0)))
    }

    pub fn free_bytes(&self) -> u64 {
        let (mut free, mut total) = (0, 0);
        ok(cuMemGetInfo_v2(&mut free, &mut total));
        free as u64
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        // SAFETY: gives back what `on` retained.
        unsafe { (self.driver.calls.cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

pub struct AppStream(pub usize);

impl AppStream {
    pub fn handle(&self) -> StreamHandle {
        StreamHandle(self.0)
    }

    /// A kernel that spins until it is told.
    pub fn spin(&self) -> Gate {
        let (open, opened) = channel::<()>();
        let (enter, entered) = channel::<()>();
        let data = Box::into_raw(Box::new((enter, opened)));
        // SAFETY: the box is for this one call, and `wait_at_gate` makes no CUDA call.
        unsafe { driver().unwrap().launch_host(self.handle(), wait_at_gate, data.cast()) }.unwrap();
        entered.recv_timeout(SOON).unwrap();
        Gate(open)
    }

    pub fn capture(&self, body: impl FnOnce()) -> usize {
        const GLOBAL: u32 = 0;
        ok(cuStreamBeginCapture_v2(self.0, GLOBAL));
        body();
        made(|out| cuStreamEndCapture(self.0, out))
    }
}

impl Drop for AppStream {
    fn drop(&mut self) {
        // SAFETY: created by the application, destroyed once.
        unsafe { (driver().unwrap().calls.cuStreamDestroy_v2)(self.0) };
    }
}

pub struct Gate(Sender<()>);

impl Gate {
    pub fn open(self) {
        self.0.send(()).unwrap();
    }
}

pub unsafe extern "C" fn wait_at_gate(data: *mut c_void) {
    // SAFETY: `spin` leaked this box for this one call.
    let (entered, open) = *unsafe { Box::from_raw(data.cast::<(Sender<()>, Receiver<()>)>()) };
    entered.send(()).unwrap();
    // A test that failed meanwhile lets go too.
    let _ = open.recv();
}

/// The same driver with other functions, for as long as the process lives.
pub fn with_calls(change: impl FnOnce(&mut Calls)) -> &'static Driver {
    let mut calls = start().calls;
    change(&mut calls);
    Box::leak(Box::new(Driver::of(calls)))
}

/// Waits for what another thread or process will do. Not a sleep: it ends when it is so, and fails if it never is.
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < SOON, "never: {what}");
        std::thread::yield_now();
    }
}

pub fn lend(arena: &Arc<Arena>, bytes: u64) -> Slice {
    let slice = arena.lend(bytes, &Holds::new()).unwrap();
    slice.wait_zeroed(SOON).unwrap();
    slice
}

/// Whether a device may read and write at an address.
pub fn may_access(device: i32, at: u64) -> bool {
    const DEVICE: i32 = 1;
    let mut flags = 0;
    ok(cuMemGetAccess(&mut flags, &[DEVICE, device], at));
    flags == 3
}

/// Fills a slice, from a stream that waits for no other.
pub fn fill(slice: &Slice, byte: u8) {
    let stream = AppStream(made(|out| cuStreamCreate(out, 1)));
    ok(cuMemsetD8Async(slice.address(), byte, slice.bytes() as usize, stream.0));
    ok(cuStreamSynchronize(stream.0));
}

/// Whether every byte of a slice is this one.
pub fn holds(slice: &Slice, byte: u8) -> bool {
    let mut bytes = vec![!byte; slice.bytes() as usize];
    let stream = AppStream(made(|out| cuStreamCreate(out, 1)));
    ok(cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), slice.address(), bytes.len(), stream.0));
    ok(cuStreamSynchronize(stream.0));
    bytes.iter().all(|found| *found == byte)
}

pub fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}
