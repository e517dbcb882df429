//! The guard around every export: it turns panics into error codes, and refuses calls from forked children and from callbacks.

use crate::code::{
    CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_NOT_PERMITTED, CUDA_ERROR_UNKNOWN, CUDA_SUCCESS, Code,
};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

/// Set in the child of a fork after `cuInit`, where the real driver does not work either.
static FORKED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static FORBIDDEN: Cell<bool> = const { Cell::new(false) };
    static PER_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Runs the body of the export `name`.
pub fn answer(name: &str, body: impl FnOnce() -> Result<(), Code>) -> Code {
    if forked() {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    if FORBIDDEN.get() {
        crate::report::line(format_args!(
            "{name} called from a host function, kernel or user object destructor"
        ));
        return CUDA_ERROR_NOT_PERMITTED;
    }
    crate::hold::pass(name);
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => CUDA_SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => {
            crate::report::line(format_args!("{name} panicked"));
            CUDA_ERROR_UNKNOWN
        }
    }
}

/// Runs code of the application on a thread of the simulator; CUDA calls that the code makes are refused.
pub fn forbidding_calls<T>(body: impl FnOnce() -> T) -> T {
    let before = FORBIDDEN.replace(true);
    let result = body();
    FORBIDDEN.set(before);
    result
}

/// Runs the `_ptsz` or `_ptds` twin of an export: there the null stream means the per-thread one.
pub fn with_per_thread_default<T>(body: impl FnOnce() -> T) -> T {
    let before = PER_THREAD.replace(true);
    let result = body();
    PER_THREAD.set(before);
    result
}

/// Whether the null stream means the per-thread one in the running call.
pub fn null_is_per_thread() -> bool {
    PER_THREAD.get()
}

pub fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

pub extern "C" fn mark_forked() {
    FORKED.store(true, Ordering::Relaxed);
}
