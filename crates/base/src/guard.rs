//! Catches panics, so that none leaves this library: a panic would end a program that NCCL alone would not end.

use std::panic::{AssertUnwindSafe, catch_unwind};

use nccl_sys::{ncclInternalError, ncclResult_t};

/// Runs the code of a call that does not enter the real NCCL; a panic becomes `ncclInternalError`.
#[inline]
pub fn call(code: impl FnOnce() -> ncclResult_t) -> ncclResult_t {
    or_else(|| ncclInternalError, code)
}

/// Runs `code`; after a panic, gives the answer of `other` instead. Rust's own message tells the panic.
#[inline]
pub fn or_else<T>(other: impl FnOnce() -> T, code: impl FnOnce() -> T) -> T {
    // A panic may leave state half changed: the answer tells the caller that the call failed.
    catch_unwind(AssertUnwindSafe(code)).unwrap_or_else(|_| other())
}

/// Runs a call of the real NCCL with Windlass's code before and after it. A panic of Windlass's code becomes
/// `ncclInternalError`.
///
/// No catch is around the real call. NCCL is C++: its exceptions, and the end of a thread that is cancelled inside
/// NCCL, must reach the caller. Rust would abort the process where either meets a `catch_unwind`.
#[inline(always)]
pub fn around<T>(
    before: impl FnOnce() -> T,
    real: impl FnOnce(&T) -> ncclResult_t,
    after: impl FnOnce(T, ncclResult_t),
) -> ncclResult_t {
    let Ok(prepared) = catch_unwind(AssertUnwindSafe(before)) else { return ncclInternalError };
    let result = real(&prepared);
    or_else(
        || ncclInternalError,
        || {
            after(prepared, result);
            result
        },
    )
}
