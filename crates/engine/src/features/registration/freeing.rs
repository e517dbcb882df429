//! Has NCCL free blocks that have left the pool, and lets other threads wait for that.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nccl_sys::ncclSuccess;

use crate::features::memory::pool;
use crate::forward::registration;
use windlass_base::gpu::{self, Address, Home, Ordinal};
use windlass_base::scoped::Counted;
use windlass_base::thread;

use crate::features::registration::deregistration::memory_is_freed;

const LOOK_EVERY: Duration = Duration::from_micros(100);

/// How many threads are freeing blocks that have left the pool and are not back at the driver yet.
static FREEING: AtomicUsize = AtomicUsize::new(0);

/// The threads that are freeing: from before the blocks leave the pool until they are freed.
pub(crate) struct Freeing;

impl Freeing {
    /// Counts this thread while the value lives.
    pub(crate) fn begin() -> Counted<'static> {
        Counted::by(&FREEING)
    }

    /// Waits for other threads to finish freeing, up to `within`. Returns whether there were any.
    pub(crate) fn wait(within: Duration) -> bool {
        let are_any = || FREEING.load(Ordering::Acquire) > 0;
        let were_any = are_any();
        thread::wait_while(within, LOOK_EVERY, are_any);
        were_any
    }
}

/// Deregisters blocks that have left the pool, and has NCCL free them, on this thread.
pub(crate) fn let_go(blocks: &[Address]) {
    let _freeing = Freeing::begin();
    for block in blocks {
        // A registration would keep the memory.
        memory_is_freed(*block);
        free(*block);
    }
}

/// Has NCCL free a block that is not registered.
pub(crate) fn free(block: Address) {
    let code = registration::free(block);
    if code != ncclSuccess {
        log::warn!("NCCL does not free {block:#x}, which it allocated: {code:?}");
    }
}

/// Whether the device has so little free memory that blocks should not be kept.
pub(crate) fn is_short_on(device: Ordinal) -> bool {
    let Some(home) = home_of(device) else { return false };
    let Ok(_entered) = home.enter() else { return false };
    home.driver.room().is_ok_and(|room| pool::is_too_much(device, room))
}

/// A device's primary context. None if the program has none there, since this would make one.
pub(crate) fn home_of(device: Ordinal) -> Option<Home> {
    Home::if_primary(gpu::driver().ok()?, device)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// A thread that was refused memory waits while other threads free some. It returns at once if there are none, and never
    /// waits longer than the limit.
    #[test]
    fn waits_for_what_is_being_freed() {
        assert!(!Freeing::wait(Duration::from_secs(60)));
        let freeing = Freeing::begin();
        let began = Instant::now();
        let frees = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(freeing);
        });
        assert!(Freeing::wait(Duration::from_secs(60)));
        assert!(began.elapsed() >= Duration::from_millis(50));
        assert_eq!(FREEING.load(Ordering::Acquire), 0);
        frees.join().unwrap();
        let _never_ends = Freeing::begin();
        assert!(Freeing::wait(Duration::from_millis(5)));
    }
}
