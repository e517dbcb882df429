//! No panic leaves this library: it would end a program that plain NCCL would not end.

use std::panic::{AssertUnwindSafe, catch_unwind};

use nccl_sys::{ncclInternalError, ncclResult_t};

/// Runs the code of a call that does not enter the real NCCL; a panic becomes `ncclInternalError`.
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

/// Runs a call of the real NCCL between what we do before and after it; a panic of ours becomes
/// `ncclInternalError`.
///
/// The call itself runs under no catch: NCCL is C++, and what it throws goes on to the caller, as does the end of a
/// thread that is cancelled inside it. Rust would abort the process where either meets a `catch_unwind`.
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
