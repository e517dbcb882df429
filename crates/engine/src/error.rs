//! Refusals of our own: NCCL's code for the caller, one log line for the user.

use nccl_sys::ncclResult_t;

/// Logs why a call is refused, with the value and what was expected, and gives the code to answer.
pub fn refuse(code: ncclResult_t, why: std::fmt::Arguments<'_>) -> ncclResult_t {
    log::warn!("{why}: answering {}", code.name().unwrap_or("an unknown code"));
    code
}
