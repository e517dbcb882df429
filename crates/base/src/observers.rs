//! Tells profilers of the calls that Windlass runs itself: plugins of NCCL's profiler interface, and tools that read NVTX ranges. NCCL tells
//! them of all other calls.

pub mod profiler;

mod nvtx;

use std::ffi::{CString, c_char};
use std::ptr::null;
use std::sync::atomic::{AtomicBool, Ordering};

use nccl_sys::{CODES, ncclDataType_t};
use once_cell::sync::OnceCell;

use crate::call::{Call, Function};
use crate::path::Path;

/// Whether anybody listens.
static ON: AtomicBool = AtomicBool::new(false);

/// Finds who listens, at the first communicator, before NCCL looks.
pub fn start() {
    // Both, whatever the first one finds.
    ON.store(profiler::start() | nvtx::start(), Ordering::Release);
}

/// Whether anybody listens.
#[inline]
pub fn are_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// A communicator, as profilers know it.
#[derive(Clone, Copy, Debug)]
pub struct Observed {
    /// The program's handle.
    pub handle: usize,
    /// Whether the handle is one of Windlass, not NCCL's.
    pub is_lazy: bool,
    /// What all its ranks call it. Where there is an id, what NCCL calls the communicator of this id.
    pub name: u64,
    /// This rank.
    pub rank: i32,
    /// The number of ranks.
    pub ranks: i32,
}

/// Tells of a call that is about to run, on its path. `depth`: of the thread's groups, with the call's own.
#[cold]
pub fn before(call: &Call, path: Path, communicator: &Observed, depth: i32) {
    profiler::share_masks();
    if matches!(path, Path::P2p | Path::Native) {
        profiler::before(call, communicator, depth);
        nvtx::push(call, communicator);
    }
}

/// Tells that what this thread has called was issued. `depth`: of the thread's groups that are still open.
#[cold]
pub fn after(depth: i32) {
    nvtx::pop();
    profiler::after(depth);
}

/// The name of the function that the program called, for ever.
fn function_name(function: Function) -> *const c_char {
    static NAMES: OnceCell<Vec<CString>> = OnceCell::new();
    let name = |function: Function| CString::new(function.entry().description().name).unwrap_or_default();
    NAMES.get_or_init(|| Function::ALL.map(name).into())[function as usize].as_ptr()
}

/// NCCL's name of a type, for ever.
fn type_name(datatype: ncclDataType_t) -> *const c_char {
    static NAMES: OnceCell<Vec<(i32, CString)>> = OnceCell::new();
    let name = |&(name, value): &(&str, i32)| (value, CString::new(name).unwrap_or_default());
    let names = NAMES.get_or_init(|| CODES[2].values.iter().map(name).collect());
    names.iter().find(|(value, _)| *value == datatype.0).map_or(null(), |(_, name)| name.as_ptr())
}
