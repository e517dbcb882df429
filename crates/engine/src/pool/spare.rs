//! How much of a device's memory may be kept: never more than an eighth of what is free. A program that asks `cudaMalloc` for memory
//! hears nothing of what is kept, and is refused only if it asks for more than the rest.

use std::sync::Mutex;
use std::sync::PoisonError;

use crate::gpu::{Driver, Home, Ordinal};

/// What the driver said lasts so long: it takes tens of microseconds to ask.
const LASTS_MS: u64 = 20;
const PART: u64 = 8;

#[derive(Clone, Copy)]
struct Said {
    device: Ordinal,
    at: u64,
    free: u64,
}

/// Bytes at this time, in milliseconds. None where nobody can be asked.
pub fn bytes(driver: &'static Driver, device: Ordinal, now: u64) -> u64 {
    static SAID: Mutex<Vec<Said>> = Mutex::new(Vec::new());
    let lock = || SAID.lock().unwrap_or_else(PoisonError::into_inner);
    let known = lock().iter().find(|said| said.device == device && now < said.at + LASTS_MS).copied();
    let free = known.map_or_else(
        || {
            let free = free_on(driver, device);
            let mut all = lock();
            all.retain(|said| said.device != device);
            all.push(Said { device, at: now, free });
            free
        },
        |said| said.free,
    );
    free / PART
}

/// Of a program that has no primary context there: one would be made.
fn free_on(driver: &'static Driver, device: Ordinal) -> u64 {
    if !driver.has_primary_context(device) {
        return 0;
    }
    let Ok(home) = Home::of(driver, device) else { return 0 };
    let Ok(_entered) = home.enter() else { return 0 };
    driver.room().map_or(0, |room| room.free)
}
