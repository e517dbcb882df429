//! How much of a device's memory may be kept: never more than an eighth of what is free. A program that asks `cudaMalloc` for memory
//! hears nothing of what is kept, and is refused only if it asks for more than the rest. Where memory is short nothing is.

use std::sync::{Mutex, MutexGuard, PoisonError};

use windlass_base::gpu::memory::Room;
use windlass_base::gpu::{Driver, Home, Ordinal};

use crate::features::memory::pool::is_short;

/// What the driver said lasts so long: it takes tens of microseconds to ask. Who looks after what is kept asks oftener.
const LASTS_MS: u64 = 60;
/// And for so much more that is kept then: what has changed since is small beside that.
const LASTS_FOR: u64 = 64 << 20;
const PART: u64 = 8;

#[derive(Clone, Copy)]
struct Said {
    device: Ordinal,
    at: u64,
    /// What may be kept.
    spare: u64,
    /// What was kept then.
    kept: u64,
}

static SAID: Mutex<Vec<Said>> = Mutex::new(Vec::new());

/// Bytes at this time, in milliseconds, where so many are kept and so many would be. None where nobody can be asked.
pub(crate) fn bytes(driver: &'static Driver, device: Ordinal, (kept, would_be): (u64, u64), now: u64) -> u64 {
    let lasts = |said: &&Said| now < said.at + LASTS_MS && would_be <= said.kept + LASTS_FOR;
    let known = lock().iter().find(|said| said.device == device).filter(lasts).map(|said| said.spare);
    known.unwrap_or_else(|| {
        let room = room_on(driver, device);
        room.map_or(0, |room| said(device, room, kept, now))
    })
}

/// The driver has said what is free. What may be kept.
pub(crate) fn said(device: Ordinal, room: Room, kept: u64, now: u64) -> u64 {
    let spare = if is_short(room.free, room.total) { 0 } else { room.free / PART };
    let mut all = lock();
    all.retain(|said| said.device != device);
    all.push(Said { device, at: now, spare, kept });
    spare
}

/// Held for some stores.
fn lock() -> MutexGuard<'static, Vec<Said>> {
    SAID.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Of a program that has no primary context there: one would be made.
fn room_on(driver: &'static Driver, device: Ordinal) -> Option<Room> {
    let home = Home::if_primary(driver, device)?;
    let _entered = home.enter().ok()?;
    driver.room().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An eighth of what is free, nothing where that is little.
    #[test]
    fn parts() {
        const GIB: u64 = 1 << 30;
        let spare = |free: u64| said(99, Room { free: free * GIB, total: 141 * GIB }, 0, 0);
        assert_eq!((spare(80), spare(8), spare(2)), (10 * GIB, GIB, 0));
    }
}
