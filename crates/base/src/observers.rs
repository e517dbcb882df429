//! Tells profilers of the calls that Windlass runs itself: plugins of NCCL's profiler interface, and tools that read NVTX ranges. NCCL tells
//! them of all other calls.

pub mod profiler;

mod nvtx;

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::call::Call;
use crate::guard;
use crate::lock::Mutex;
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
#[inline(never)]
pub fn before(call: &Call, path: Path, communicator: &Observed, depth: i32) {
    // A call never fails because of what is told of it.
    guard::or_else(
        || (),
        || {
            profiler::share_masks();
            // One of too many communicators has no known rank.
            if matches!(path, Path::P2p | Path::Native) && communicator.ranks > 0 {
                profiler::before(call, path, communicator, depth);
                nvtx::push(call, communicator);
            }
        },
    )
}

/// Tells that what this thread has called was issued. `depth`: of the thread's groups that are still open.
#[cold]
#[inline(never)]
pub fn after(depth: i32) {
    nvtx::pop();
    guard::or_else(|| (), || profiler::after(depth));
}

/// A name as C's text, for ever.
fn text(name: &'static str) -> *const c_char {
    static TEXTS: Mutex<BTreeMap<&str, CString>> = Mutex::new(BTreeMap::new());
    let mut texts = TEXTS.lock();
    texts.entry(name).or_insert_with(|| CString::new(name).unwrap_or_default()).as_ptr()
}
