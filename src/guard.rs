//! No panic leaves this library: it would end a program that plain NCCL would not end.

use std::panic::{AssertUnwindSafe, catch_unwind};

use nccl_sys::{ncclInternalError, ncclResult_t};

/// Runs the code of a call; a panic becomes `ncclInternalError`.
#[inline]
pub fn call(code: impl FnOnce() -> ncclResult_t) -> ncclResult_t {
    or_else(|| ncclInternalError, code)
}

/// Runs `code`; after a panic, gives the other answer instead. The panic itself is told by Rust's own message.
#[inline]
pub fn or_else<T>(other: impl FnOnce() -> T, code: impl FnOnce() -> T) -> T {
    // Whatever a panic left half done, the answer says that the call failed.
    catch_unwind(AssertUnwindSafe(code)).unwrap_or_else(|_| other())
}
