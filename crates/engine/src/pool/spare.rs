//! How much of a device's memory may be kept: never more than an eighth of what is free. A program that asks `cudaMalloc` for memory
//! hears nothing of what is kept, and is refused only if it asks for more than the rest.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::gpu::{Driver, Home, Ordinal};

/// What the driver said lasts so long: it takes some 60 us to ask. Who looks after what is kept asks oftener.
const LASTS_MS: u64 = 60;
/// For blocks that are larger it is asked anew: what has changed since is small beside what they take.
const LASTS_FOR: u64 = 64 << 20;
const PART: u64 = 8;

#[derive(Clone, Copy)]
struct Said {
    device: Ordinal,
    at: u64,
    free: u64,
}

static SAID: Mutex<Vec<Said>> = Mutex::new(Vec::new());

/// Bytes at this time, in milliseconds, for who gives back so many. None where nobody can be asked.
pub fn bytes(driver: &'static Driver, device: Ordinal, given_back: u64, now: u64) -> u64 {
    let is_one = |said: &&Said| said.device == device && now < said.at + LASTS_MS && given_back <= LASTS_FOR;
    let known = lock().iter().find(is_one).map(|said| said.free);
    let ask = || {
        let free = free_on(driver, device);
        said(device, free, now);
        free
    };
    known.unwrap_or_else(ask) / PART
}

/// The driver has said that so much is free.
pub fn said(device: Ordinal, free: u64, now: u64) {
    let mut all = lock();
    all.retain(|said| said.device != device);
    all.push(Said { device, at: now, free });
}

/// Held for some stores.
fn lock() -> MutexGuard<'static, Vec<Said>> {
    SAID.lock().unwrap_or_else(PoisonError::into_inner)
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
