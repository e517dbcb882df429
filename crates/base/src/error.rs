//! Refusals of our own: NCCL's code for the caller, one log line for the user, and the text that `ncclGetLastError` gives.

use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use nccl_sys::{ncclInternalError, ncclResult_t};

/// As long as NCCL's own text.
const TEXT_BYTES: usize = 1024;

/// The text of the last refusal, and what NCCL said last before it. As NCCL's own, it is the process's and changes under
/// whoever reads it.
static TEXT: [AtomicU8; TEXT_BYTES] = [const { AtomicU8::new(0) }; TEXT_BYTES];
/// Held while the text changes. What NCCL had said when it was first asked for after that.
static BEFORE: Mutex<Before> = Mutex::new(Before::Nothing);

enum Before {
    /// Nothing was refused.
    Nothing,
    /// NCCL was not asked since.
    NotAsked,
    Said(Vec<u8>),
}

/// Logs why a call is refused, with the value and what was expected, and gives the code to answer.
pub fn refuse(code: ncclResult_t, why: std::fmt::Arguments<'_>) -> ncclResult_t {
    log::warn!("{why}: answering {}", code.name().unwrap_or("an unknown code"));
    note(&why.to_string());
    code
}

/// The refusal of what a panic has left undone; Rust's own message has told the panic itself.
pub fn panicked(what: &str) -> ncclResult_t {
    refuse(ncclInternalError, format_args!("a panic of Windlass has left {what} undone"))
}

fn note(why: &str) {
    let mut before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner);
    let text = why.bytes().filter(|byte| *byte != 0).take(TEXT_BYTES - 1);
    for (place, byte) in TEXT.iter().zip(text.chain(std::iter::repeat(0))) {
        place.store(byte, Ordering::Relaxed);
    }
    *before = Before::NotAsked;
}

/// What `ncclGetLastError` gives where NCCL would give `real`: the text of our last refusal, unless NCCL has said something since
/// that was first asked for.
pub fn last(real: Option<&CStr>) -> Option<*const c_char> {
    let mut before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner);
    let said = real.map(CStr::to_bytes).unwrap_or_default();
    match &*before {
        Before::Nothing => return None,
        Before::NotAsked => *before = Before::Said(said.to_vec()),
        Before::Said(then) if then != said => return None,
        Before::Said(_) => {}
    }
    Some(TEXT.as_ptr().cast())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_sys::ncclInvalidUsage;

    /// Ours until NCCL says something else.
    #[test]
    fn last_texts() {
        assert_eq!(refuse(ncclInvalidUsage, format_args!("rank {}, expected 0", 7)), ncclInvalidUsage);
        assert!(last(Some(c"")).is_some());
        let text: Vec<u8> =
            TEXT.iter().map(|byte| byte.load(Ordering::Relaxed)).take_while(|byte| *byte != 0).collect();
        assert_eq!(text, b"rank 7, expected 0");
        assert!(last(Some(c"")).is_some());
        assert_eq!(last(Some(c"NCCL's own")), None);
    }
}
