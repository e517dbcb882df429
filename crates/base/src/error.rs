//! Refuses calls in Windlass: NCCL's code for the caller, one log line for the user, and the text for `ncclGetLastError`.

use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicU8, Ordering};

use crate::lock::Mutex;

use nccl_sys::{ncclInternalError, ncclResult_t};

/// NCCL's own text has as many bytes.
const TEXT_BYTES: usize = 1024;

/// The text of the last refusal. Like NCCL's own, it belongs to the whole process, and may change while a caller reads
/// it.
static TEXT: [AtomicU8; TEXT_BYTES] = [const { AtomicU8::new(0) }; TEXT_BYTES];
/// Locked while the text changes. The value is NCCL's text as of the first question after the last refusal.
static BEFORE: Mutex<Before> = Mutex::new(Before::Nothing);

enum Before {
    /// Windlass has refused nothing yet.
    Nothing,
    /// `ncclGetLastError` was not called since the last refusal.
    NotAsked,
    Said(Vec<u8>),
}

/// Logs why a call is refused, notes the reason for `ncclGetLastError`, and returns `code`. The reason has the value
/// and what was expected.
pub fn refuse(code: ncclResult_t, why: std::fmt::Arguments<'_>) -> ncclResult_t {
    log::warn!("{why}: answering {}", code.name().unwrap_or("an unknown code"));
    note(&why.to_string());
    code
}

/// Refuses a call that a panic has left undone. Rust's own message has told the panic itself.
pub fn panicked(what: &str) -> ncclResult_t {
    refuse(ncclInternalError, format_args!("a panic of Windlass has left {what} undone"))
}

fn note(why: &str) {
    let mut before = BEFORE.lock();
    let text = why.bytes().filter(|byte| *byte != 0).take(TEXT_BYTES - 1);
    for (place, byte) in TEXT.iter().zip(text.chain(std::iter::repeat(0))) {
        place.store(byte, Ordering::Relaxed);
    }
    *before = Before::NotAsked;
}

/// The answer of `ncclGetLastError` where NCCL would give `real`: the text of the last refusal. None if there was no refusal, or
/// if NCCL's text has changed since the first question after it.
pub fn last(real: Option<&CStr>) -> Option<*const c_char> {
    let mut before = BEFORE.lock();
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

    /// The refusal's text is given until NCCL's own text changes.
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
