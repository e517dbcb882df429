//! Communicators of ranks on devices of the stand-in driver (or, see [`on_a_gpu`], of a GPU machine), each rank on a thread, and messages that are verified.

use std::collections::hash_map::DefaultHasher;
use std::ffi::c_void;
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use libloading::os::unix::Library;
use windlass_engine::arena::{Arena, Holds, Slice};
use windlass_engine::gpu::{Driver, Home, StreamHandle, driver};
use windlass_engine::mailbox::{Calls, Direction, Layout, Mailbox, Operation, Parts, Supply};
use windlass_kernels::images::Image;
use windlass_kernels::launch::Geometry;

pub const SOON: Duration = Duration::from_secs(60);

/// Small: rings of 31 KB of lines and 32 KiB of chunks, so that ordinary messages go round them.
pub const GEOMETRY: Geometry = Geometry {
    first_tag: 1,
    bulk_from_bytes: 40_000,
    line_lanes: 4,
    line_slots: 4,
    bulk_lanes: 2,
    bulk_slots: 4,
    bulk_chunk_bytes: 4096,
    rank: 0,
};
pub const BLOCKS: u32 = 2;

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
    fn cuMemAlloc_v2(address: &mut u64, bytes: usize);
    fn cuMemFree_v2(address: u64);
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize);
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize);
    fn cuStreamCreate(stream: &mut usize, flags: u32);
    fn cuStreamQuery(stream: usize);
    fn cuStreamSynchronize(stream: usize);
    fn cuStreamBeginCapture_v2(stream: usize, mode: u32);
    fn cuStreamEndCapture(stream: usize, graph: &mut usize);
    fn cuGraphInstantiateWithFlags(executable: &mut usize, graph: usize, flags: u64);
    fn cuGraphLaunch(executable: usize, stream: usize);
    fn cuGraphDestroy(graph: usize);
    fn cuGraphExecDestroy(executable: usize);
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

/// Waits for what another thread will do; fails if it never does.
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < SOON, "never: {what}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

fn calls() -> Calls {
    macro_rules! found {
        ($name:ident) => {
            // SAFETY: the field's type is that of the driver's header.
            *unsafe { library().get(concat!(stringify!($name), "\0").as_bytes()) }.expect(stringify!($name))
        };
    }
    Calls {
        cuMemcpyDtoDAsync_v2: found!(cuMemcpyDtoDAsync_v2),
        cuMemcpyHtoDAsync_v2: found!(cuMemcpyHtoDAsync_v2),
        cuMemHostAlloc: found!(cuMemHostAlloc),
        cuMemFreeHost: found!(cuMemFreeHost),
    }
}

/// With `MAIL_TEST_ON=gpu` these tests run on the machine's own driver with the compiled kernels; most need two GPUs,
/// some four.
pub fn on_a_gpu() -> bool {
    std::env::var("MAIL_TEST_ON").is_ok_and(|on| on == "gpu")
}

/// The kernel as a shared object, compiled once per change of its sources, whichever test comes first.
fn object() -> PathBuf {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels");
    let mut hash = DefaultHasher::new();
    for folder in ["device", "host"] {
        let mut paths: Vec<PathBuf> =
            fs::read_dir(kernels.join(folder)).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths.iter().for_each(|path| fs::read(path).unwrap().hash(&mut hash));
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mail-object");
    fs::create_dir_all(&folder).unwrap();
    let object = folder.join(format!("mail-{:016x}.so", hash.finish()));
    // Tests run as processes side by side: one compiles, the others wait.
    let lock = File::create(folder.join("lock")).unwrap();
    lock.lock().unwrap();
    if !object.exists() {
        let unfinished = object.with_extension("part");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let status = Command::new(&compiler)
            .args(["-std=c++17", "-O2", "-g", "-pthread", "-shared", "-fPIC", "-o"])
            .arg(&unfinished)
            .arg(kernels.join("host/mail_object.cpp"))
            .status()
            .unwrap_or_else(|error| panic!("a C++ compiler ({compiler}) is needed: {error}"));
        assert!(status.success(), "mail_object.cpp does not compile");
        fs::rename(unfinished, &object).unwrap();
    }
    object
}

pub fn image() -> Image {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    let bytes = BYTES.get_or_init(|| {
        let object = object();
        [b"windlass-sim:", object.as_os_str().as_bytes(), b"\0"].concat()
    });
    Image { name: "host", bytes, has_bulk_copies: true }
}

/// Loads the stand-in, strict.
pub fn start() -> &'static Driver {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        // SAFETY: nextest gives this test a process of its own, and nothing else in it reads the environment now.
        unsafe { std::env::set_var("WINDLASS_SIM_STRICT", "1") };
        library();
    });
    driver().expect("the stand-in is loaded")
}

/// A device that the program uses by its primary context.
pub struct Device {
    pub driver: &'static Driver,
    pub ordinal: i32,
    pub context: usize,
    pub arena: Arc<Arena>,
    pub supply: Arc<Supply>,
}

impl Device {
    pub fn new(ordinal: i32) -> Device {
        let driver = start();
        let mut context = 0;
        // SAFETY: the output is a local.
        assert_eq!(unsafe { (driver.calls.cuDevicePrimaryCtxRetain)(&mut context, ordinal) }.0, 0);
        let arena = Arena::open(driver, ordinal, 256 << 20).unwrap();
        let home = Home::of(driver, ordinal).unwrap();
        let supply = match on_a_gpu() {
            true => Supply::new(home, calls()),
            false => Supply::with_images(home, calls(), &[image()]),
        };
        let supply = supply.unwrap();
        Device { driver, ordinal, context, arena, supply }
    }

    pub fn make_current(&self) {
        ok(cuCtxSetCurrent(self.context));
    }

    pub fn stream(&self) -> AppStream {
        self.make_current();
        AppStream(made(|out| cuStreamCreate(out, 1)))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        eventually("graphs let go", || self.supply.is_unused());
        self.arena.settle().unwrap();
        assert_eq!(self.arena.counters().slices, 0, "slices are left");
        // SAFETY: gives back what `new` retained.
        unsafe { (self.driver.calls.cuDevicePrimaryCtxRelease_v2)(self.ordinal) };
    }
}

pub struct AppStream(pub usize);

impl AppStream {
    pub fn handle(&self) -> StreamHandle {
        StreamHandle(self.0)
    }

    pub fn synchronize(&self) {
        ok(cuStreamSynchronize(self.0));
    }

    pub fn is_busy(&self) -> bool {
        cuStreamQuery(self.0) == 600
    }
}

impl Drop for AppStream {
    fn drop(&mut self) {
        // SAFETY: created by the application, destroyed once.
        unsafe { (driver().unwrap().calls.cuStreamDestroy_v2)(self.0) };
    }
}

/// One rank. Fields are dropped in this order: the mailbox before its slice.
pub struct Rank {
    pub rank: u32,
    pub mailbox: Mailbox,
    pub slice: Slice,
    pub holds: Arc<Holds>,
}

pub fn devices(count: usize) -> Vec<Device> {
    (0..count as i32).map(Device::new).collect()
}

/// A communicator with one rank on each device.
pub fn communicator(devices: &[Device]) -> Vec<Rank> {
    communicator_of(devices, GEOMETRY, BLOCKS)
}

pub fn communicator_of(devices: &[Device], geometry: Geometry, blocks: u32) -> Vec<Rank> {
    let bytes = Layout::of(devices.len() as u32, &geometry).bytes;
    let lent: Vec<(Slice, Arc<Holds>)> = devices
        .iter()
        .map(|device| {
            let holds = Holds::new();
            let slice = device.arena.lend(bytes, &holds).unwrap();
            slice.wait_zeroed(SOON).unwrap();
            devices
                .iter()
                .filter(|d| d.ordinal != device.ordinal)
                .for_each(|d| slice.allow(d.ordinal).unwrap());
            (slice, holds)
        })
        .collect();
    let slices: Vec<u64> = lent.iter().map(|(slice, _)| slice.address()).collect();
    lent.into_iter()
        .zip(devices)
        .enumerate()
        .map(|(rank, ((slice, holds), device))| {
            let mailbox =
                mailbox(device, Geometry { rank: rank as u32, ..geometry }, blocks, slices.clone(), &holds);
            Rank { rank: rank as u32, mailbox, slice, holds }
        })
        .collect()
}

pub fn mailbox(
    device: &Device,
    geometry: Geometry,
    blocks: u32,
    slices: Vec<u64>,
    holds: &Arc<Holds>,
) -> Mailbox {
    let holds = holds.clone();
    Mailbox::new(Parts {
        supply: device.supply.clone(),
        grant: device.supply.grant(blocks, 1).unwrap(),
        geometry,
        slices,
        hold: Box::new(move |driver, capture| holds.hold(driver, capture)),
    })
    .unwrap()
}

/// Runs `body` for every rank on a thread of its own, with its device current.
pub fn all<'a>(devices: &'a [Device], ranks: &'a [Rank], body: impl Fn(&'a Device, &'a Rank) + Sync) {
    std::thread::scope(|scope| {
        for (device, rank) in devices.iter().zip(ranks) {
            let body = &body;
            scope.spawn(move || {
                device.make_current();
                body(device, rank);
            });
        }
    });
}

/// Ends a communicator as its owner does.
pub fn end(ranks: Vec<Rank>) {
    for rank in &ranks {
        rank.mailbox.wait_idle(SOON).unwrap();
    }
    drop(ranks);
}

/// Device memory of the application, between canaries.
pub struct Buffer {
    base: u64,
    pub address: u64,
    pub bytes: u64,
}

const MARGIN: u64 = 64;
const CANARY: u8 = 0x5e;

fn expected(id: u64, index: u64) -> u8 {
    let mut z = ((id << 40) ^ (index / 8)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z >> (8 * (index % 8))) as u8
}

impl Buffer {
    /// At `offset` from a multiple of 16.
    pub fn new(bytes: u64, offset: u64) -> Buffer {
        let mut base = 0;
        ok(cuMemAlloc_v2(&mut base, (bytes + 2 * MARGIN + 16) as usize));
        let buffer = Buffer { base, address: base.next_multiple_of(16) + MARGIN - 16 + offset, bytes };
        buffer.clear();
        buffer
    }

    fn whole_bytes(&self) -> usize {
        (self.bytes + 2 * MARGIN + 16) as usize
    }

    pub fn clear(&self) {
        let bytes = vec![CANARY; self.whole_bytes()];
        ok(cuMemcpyHtoD_v2(self.base, bytes.as_ptr().cast(), bytes.len()));
    }

    pub fn fill(&self, id: u64) {
        let bytes: Vec<u8> = (0..self.bytes).map(|index| expected(id, index)).collect();
        if !bytes.is_empty() {
            ok(cuMemcpyHtoD_v2(self.address, bytes.as_ptr().cast(), bytes.len()));
        }
    }

    /// What is wrong, if anything is: the bytes of `id`, and nothing beside them written.
    pub fn fault(&self, id: u64) -> Option<String> {
        let mut all = vec![0; self.whole_bytes()];
        ok(cuMemcpyDtoH_v2(all.as_mut_ptr().cast(), self.base, all.len()));
        let begin = (self.address - self.base) as usize;
        (0..).zip(all).find_map(|(index, found)| {
            let inside = index >= begin && index < begin + self.bytes as usize;
            let right = if inside { expected(id, (index - begin) as u64) } else { CANARY };
            let at = index as i64 - begin as i64;
            (found != right)
                .then(|| format!("message {id}: byte {at} of {} is {found}, not {right}", self.bytes))
        })
    }

    pub fn holds(&self, id: u64) {
        assert_eq!(self.fault(id), None);
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        ok(cuMemFree_v2(self.base));
    }
}

#[derive(Clone, Copy)]
pub struct Message {
    pub from: u32,
    pub to: u32,
    pub bytes: u64,
    pub offset: u64,
}

pub fn message(from: u32, to: u32, bytes: u64) -> Message {
    Message { from, to, bytes, offset: 0 }
}

/// One rank's buffers and operations of a list of messages.
pub struct Side {
    pub operations: Vec<Operation>,
    sent: Vec<Buffer>,
    received: Vec<(u64, Buffer)>,
}

impl Side {
    pub fn of(rank: u32, messages: &[Message]) -> Side {
        let mut side = Side { operations: Vec::new(), sent: Vec::new(), received: Vec::new() };
        for (id, message) in messages.iter().enumerate() {
            if message.from == rank {
                let buffer = Buffer::new(message.bytes, message.offset);
                buffer.fill(id as u64);
                side.operations.push(send(&buffer, message.to));
                side.sent.push(buffer);
            }
            if message.to == rank {
                let buffer = Buffer::new(message.bytes, (message.offset * 7) % 16);
                side.operations.push(receive(&buffer, message.from));
                side.received.push((id as u64, buffer));
            }
        }
        side
    }

    pub fn check(&self) {
        self.received.iter().for_each(|(id, buffer)| buffer.holds(*id));
    }

    pub fn has_arrived(&self) -> bool {
        self.received.iter().all(|(id, buffer)| buffer.fault(*id).is_none())
    }

    pub fn clear(&self) {
        self.received.iter().for_each(|(_, buffer)| buffer.clear());
    }
}

pub fn send(buffer: &Buffer, peer: u32) -> Operation {
    Operation { address: buffer.address, bytes: buffer.bytes, peer, direction: Direction::Send }
}

pub fn receive(buffer: &Buffer, peer: u32) -> Operation {
    Operation { address: buffer.address, bytes: buffer.bytes, peer, direction: Direction::Receive }
}

/// All messages as one group of every rank, several times, verified.
pub fn exchange(devices: &[Device], ranks: &[Rank], messages: &[Message], times: usize) {
    all(devices, ranks, |device, rank| {
        let stream = device.stream();
        let side = Side::of(rank.rank, messages);
        for _ in 0..times {
            rank.mailbox.run(&side.operations, stream.handle()).unwrap();
            stream.synchronize();
            side.check();
            side.clear();
        }
    });
}

/// Captures `body` on a stream and makes it runnable; the graph itself is destroyed at once.
pub fn captured(stream: &AppStream, body: impl FnOnce()) -> usize {
    // Ranks are threads here: what one does must not break another's capture.
    const THREAD_LOCAL: u32 = 1;
    ok(cuStreamBeginCapture_v2(stream.0, THREAD_LOCAL));
    body();
    let graph = made(|out| cuStreamEndCapture(stream.0, out));
    let executable = made(|out| cuGraphInstantiateWithFlags(out, graph, 0));
    ok(cuGraphDestroy(graph));
    executable
}

/// A stream that waits until it is told.
pub struct Gate(Option<std::sync::mpsc::Sender<()>>);

impl Gate {
    pub fn on(stream: &AppStream) -> Gate {
        let (open, opened) = std::sync::mpsc::channel::<()>();
        let data = Box::into_raw(Box::new(opened));
        // SAFETY: the box is for this one call, and `wait_at_gate` makes no CUDA call.
        unsafe { driver().unwrap().launch_host(stream.handle(), wait_at_gate, data.cast()) }.unwrap();
        Gate(Some(open))
    }

    pub fn open(mut self) {
        drop(self.0.take());
    }
}

unsafe extern "C" fn wait_at_gate(data: *mut c_void) {
    // SAFETY: `on` leaked this box for this one call.
    let opened = unsafe { Box::from_raw(data.cast::<std::sync::mpsc::Receiver<()>>()) };
    // An error is the gate's opening.
    let _ = opened.recv();
}
