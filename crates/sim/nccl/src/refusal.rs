//! Refusals: a result code, with a text for `ncclGetLastError`.

use nccl_sys::*;
use std::ffi::CStr;
use std::sync::{Mutex, MutexGuard};

pub type Outcome<T = ()> = Result<T, ncclResult_t>;

const TEXT_BYTES_MAX: usize = 1024;

struct LastError([u8; TEXT_BYTES_MAX]);

/// One text for the process, as in NCCL; the pointer that callers get stays valid.
static LAST_ERROR: Mutex<LastError> = Mutex::new(LastError([0; TEXT_BYTES_MAX]));

/// Keeps `text` as the last error and gives the code back for the caller to return.
pub fn refuse<T>(code: ncclResult_t, text: impl AsRef<str>) -> Outcome<T> {
    let text = text.as_ref();
    if crate::settings::settings().log {
        crate::strict::say(&format!("refused: {text}"));
    }
    let mut last = lock(&LAST_ERROR);
    let length = text.len().min(TEXT_BYTES_MAX - 1);
    last.0[..length].copy_from_slice(&text.as_bytes()[..length]);
    last.0[length..].fill(0);
    Err(code)
}

pub fn last_error() -> *const libc::c_char {
    lock(&LAST_ERROR).0.as_ptr().cast()
}

/// A code as an outcome.
pub fn outcome(code: ncclResult_t) -> Outcome {
    if code == ncclSuccess { Ok(()) } else { Err(code) }
}

/// NCCL's text for a code.
pub fn code_text(code: ncclResult_t) -> &'static CStr {
    match code {
        ncclSuccess => c"no error",
        ncclUnhandledCudaError => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        ncclSystemError => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        ncclInternalError => c"internal error - please report this issue to the NCCL developers",
        ncclInvalidArgument => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        ncclInvalidUsage => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        ncclRemoteError => c"remote process exited or there was a network error",
        ncclInProgress => c"NCCL operation in progress",
        _ => c"unknown result code",
    }
}

/// A lock whose poisoning does not matter: panics are reported where they are caught.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
