//! How much of a device's memory the pool may keep: at most an eighth of what is free, and nothing when memory is short. `cudaMalloc` cannot
//! take back kept memory, so it fails only if the program asks it for more than the rest.

use windlass_base::gpu::memory::Room;
use windlass_base::gpu::{Driver, Home, Ordinal};
use windlass_base::lock::Mutex;

use crate::features::memory::pool::is_short;

/// How long the driver's answer is used, as asking takes tens of microseconds. The thread that looks after the pool asks more often.
const LASTS_MS: u64 = 60;
/// The answer is used while no more than this many further bytes are kept: smaller changes do not matter.
const LASTS_FOR: u64 = 64 << 20;
const PART: u64 = 8;

#[derive(Clone, Copy)]
struct Said {
    device: Ordinal,
    at: u64,
    /// Bytes that may be kept.
    spare: u64,
    /// Bytes that were kept then.
    kept: u64,
}

/// Locked for some stores.
static SAID: Mutex<Vec<Said>> = Mutex::new(Vec::new());

/// How many bytes may be kept at time `now`, in milliseconds, where `kept` are kept and `would_be` would be. 0 if the driver cannot be asked.
pub(crate) fn bytes(driver: &'static Driver, device: Ordinal, (kept, would_be): (u64, u64), now: u64) -> u64 {
    let lasts = |said: &&Said| now < said.at + LASTS_MS && would_be <= said.kept + LASTS_FOR;
    let known = SAID.lock().iter().find(|said| said.device == device).filter(lasts).map(|said| said.spare);
    known.unwrap_or_else(|| {
        let room = room_on(driver, device);
        room.map_or(0, |room| said(device, room, kept, now))
    })
}

/// Notes the driver's answer, and returns how many bytes may be kept.
pub(crate) fn said(device: Ordinal, room: Room, kept: u64, now: u64) -> u64 {
    let spare = if is_short(room.free, room.total) { 0 } else { room.free / PART };
    let mut all = SAID.lock();
    all.retain(|said| said.device != device);
    all.push(Said { device, at: now, spare, kept });
    spare
}

/// The free memory of a device. None without a primary context there, since asking would make one.
fn room_on(driver: &'static Driver, device: Ordinal) -> Option<Room> {
    let home = Home::if_primary(driver, device)?;
    let _entered = home.enter().ok()?;
    driver.room().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An eighth of the free memory, and nothing where that is short.
    #[test]
    fn parts() {
        const GIB: u64 = 1 << 30;
        let spare = |free: u64| said(99, Room { free: free * GIB, total: 141 * GIB }, 0, 0);
        assert_eq!((spare(80), spare(8), spare(2)), (10 * GIB, GIB, 0));
    }
}
