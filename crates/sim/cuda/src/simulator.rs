//! The simulator's state in a process, made by the first `cuInit`, and the order of its locks.

use crate::code::{
    CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_NO_DEVICE, CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_OPERATING_SYSTEM,
    Code,
};
use crate::context::Context;
use crate::device::{Device, Ordinal};
use crate::event::Event;
use crate::executable::Executable;
use crate::graph::{Graph, Node};
use crate::memory::{Pool, Ranges};
use crate::module::{Function, Module};
use crate::stream::Stream;
use crate::table::{Reuse, Table};
use crate::user_object::UserObject;
use crate::virtual_memory::{AddressSpace, Physical};
use crate::{clock, guard, holders, leak};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

/// The answer of `cuDriverGetVersion`: CUDA 13.0.
pub const DRIVER_VERSION: i32 = 13000;

static SIMULATOR: OnceLock<Simulator> = OnceLock::new();
static NEXT_IDENTITY: AtomicU64 = AtomicU64::new(1);

/// Locks are taken in this order where one thread needs several: a device's primary context, the list of running captures,
/// a stream's capture state, a capture's members or a graph's nodes, an event's state, a context's order, a lane's queue;
/// `addresses` before `ranges`; a table's lock is held for one look-up only.
pub struct Simulator {
    pub devices: Vec<Device>,
    pub contexts: Table<Context>,
    pub streams: Table<Stream>,
    pub events: Table<Event>,
    pub graphs: Table<Graph>,
    pub nodes: Table<Node>,
    pub executables: Table<Executable>,
    pub user_objects: Table<UserObject>,
    pub modules: Table<Module>,
    pub functions: Table<Function>,
    pub pools: Table<Pool>,
    pub physicals: Table<Physical>,
    pub ranges: Mutex<Ranges>,
    pub addresses: Mutex<AddressSpace>,
    /// `WINDLASS_SIM_NVLINK`.
    pub nvlink: bool,
    /// `WINDLASS_SIM_MULTICAST`.
    pub multicast: bool,
}

/// The simulator, or `CUDA_ERROR_NOT_INITIALIZED` before `cuInit`.
pub fn simulator() -> Result<&'static Simulator, Code> {
    SIMULATOR.get().ok_or(CUDA_ERROR_NOT_INITIALIZED)
}

/// The simulator, or `None` before `cuInit`: for exit handlers and destructors.
pub fn started() -> Option<&'static Simulator> {
    SIMULATOR.get()
}

/// A number that is never given twice in a process: an id of a stream, context, capture or buffer.
pub fn next_identity() -> u64 {
    NEXT_IDENTITY.fetch_add(1, Ordering::Relaxed)
}

pub fn start() -> Result<(), Code> {
    let devices = number_from_environment("WINDLASS_SIM_DEVICES").unwrap_or(8);
    let mebibytes = number_from_environment("WINDLASS_SIM_DEVICE_MEMORY").unwrap_or(1024);
    if devices == 0 {
        return Err(CUDA_ERROR_NO_DEVICE);
    }
    let multiprocessors = number_from_environment("WINDLASS_SIM_MULTIPROCESSORS").unwrap_or(32);
    let multiprocessors = multiprocessors.clamp(1, 1024) as i32;
    let capability = number_from_environment("WINDLASS_SIM_CAPABILITY").unwrap_or(90).clamp(50, 200) as i32;
    // An unreadable `WINDLASS_SIM_CLOCK` ends the process here, not at the first event.
    clock::is_modelled();
    let mut failed = false;
    SIMULATOR.get_or_init(|| {
        // SAFETY: both handlers are plain functions of this library, which is never unloaded once it has threads.
        failed = unsafe {
            libc::pthread_atfork(None, None, Some(mark_forked)) != 0 || libc::atexit(before_leaks) != 0
        };
        Simulator::new(devices, mebibytes << 20, multiprocessors, capability)
    });
    if failed { Err(CUDA_ERROR_OPERATING_SYSTEM) } else { Ok(()) }
}

unsafe extern "C" fn mark_forked() {
    guard::mark_forked();
    holders::close_in_child();
}

extern "C" fn before_leaks() {
    leak::run_before();
}

/// Counts leaks after all exit handlers: programs may call the driver in those, and in destructors of libraries that depend on it.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_END: extern "C" fn() = report_leaks;

extern "C" fn report_leaks() {
    leak::at_exit();
}

pub fn number_from_environment(name: &str) -> Option<usize> {
    let text = std::env::var(name).ok()?;
    let number = text.trim().parse().ok();
    if number.is_none() {
        crate::report::line(format_args!("{name} is not a number: {text}"));
    }
    number
}

impl Simulator {
    fn new(devices: usize, bytes: usize, multiprocessors: i32, capability: i32) -> Self {
        let device = |ordinal| Device::new(ordinal as Ordinal, bytes, multiprocessors, capability);
        Simulator {
            devices: (0..devices).map(device).collect(),
            contexts: Table::new(Reuse::Never),
            streams: Table::new(Reuse::LastFreed),
            events: Table::new(Reuse::Never),
            graphs: Table::new(Reuse::Never),
            nodes: Table::new(Reuse::Never),
            executables: Table::new(Reuse::Never),
            user_objects: Table::new(Reuse::Never),
            modules: Table::new(Reuse::Never),
            functions: Table::new(Reuse::Never),
            pools: Table::new(Reuse::Never),
            physicals: Table::new(Reuse::Never),
            ranges: Mutex::default(),
            addresses: Mutex::default(),
            nvlink: number_from_environment("WINDLASS_SIM_NVLINK") != Some(0),
            multicast: number_from_environment("WINDLASS_SIM_MULTICAST") == Some(1),
        }
    }

    pub fn device(&self, ordinal: Ordinal) -> Result<&Device, Code> {
        usize::try_from(ordinal).ok().and_then(|at| self.devices.get(at)).ok_or(CUDA_ERROR_INVALID_DEVICE)
    }
}
