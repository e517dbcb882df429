//! Holds one call of a thread, so that a test decides what happens meanwhile (`simHold`).

use crate::sync::lock;
use std::ffi::{CStr, CString};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// What a test reads and writes while a call is held.
const HELD: u32 = 1;
const LOOK_EVERY: Duration = Duration::from_millis(1);

static IS_SET: AtomicBool = AtomicBool::new(false);
static NEXT: Mutex<Option<(CString, &'static AtomicU32)>> = Mutex::new(None);

/// Holds the next call of the function `name`: `state` becomes 1, and the call goes on when it is anything else.
pub fn set(name: &CStr, state: &'static AtomicU32) {
    *lock(&NEXT) = Some((name.to_owned(), state));
    IS_SET.store(true, Ordering::Release);
}

/// Called before each call, without a lock of the simulator.
pub fn pass(name: &str) {
    if !IS_SET.load(Ordering::Acquire) {
        return;
    }
    let held = lock(&NEXT).take_if(|(held, _)| held.to_bytes() == name.as_bytes());
    let Some((_, state)) = held else { return };
    IS_SET.store(false, Ordering::Release);
    state.store(HELD, Ordering::SeqCst);
    while state.load(Ordering::SeqCst) == HELD {
        std::thread::sleep(LOOK_EVERY);
    }
}
