//! Memory of the application that has left the pool, freed by NCCL, and who waits for that.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nccl_sys::ncclSuccess;

use crate::features::memory::pool;
use crate::forward::registration;
use windlass_base::gpu::{self, Address, Home, Ordinal};

use crate::features::registration::deregistration::memory_is_freed;

const LOOK_EVERY: Duration = Duration::from_micros(100);

/// So many threads free what has left the pool: memory that is not the driver's yet.
static FREEING: AtomicUsize = AtomicUsize::new(0);

/// From before blocks leave until they are freed.
pub(crate) struct Freeing;

impl Freeing {
    pub(crate) fn begin() -> Freeing {
        FREEING.fetch_add(1, Ordering::AcqRel);
        Freeing
    }

    /// Waits for others, so long; whether there were any.
    pub(crate) fn wait(within: Duration) -> bool {
        let (until, mut were_any) = (Instant::now() + within, false);
        while FREEING.load(Ordering::Acquire) > 0 && Instant::now() < until {
            were_any = true;
            std::thread::sleep(LOOK_EVERY);
        }
        were_any
    }
}

impl Drop for Freeing {
    fn drop(&mut self) {
        FREEING.fetch_sub(1, Ordering::AcqRel);
    }
}

/// NCCL frees these, on this thread. They have left the pool.
pub(crate) fn let_go(blocks: &[Address]) {
    let _freeing = Freeing::begin();
    for block in blocks {
        // What is registered of it would keep the memory.
        memory_is_freed(*block);
        free(*block);
    }
}

/// NCCL frees this one, of which nothing is registered.
pub(crate) fn free(block: Address) {
    let code = registration::free(block);
    if code != ncclSuccess {
        log::warn!("NCCL does not free {block:#x}, which it allocated: {code:?}");
    }
}

/// A thread is at it until this is dropped.
pub(crate) struct Busy(pub &'static AtomicBool);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Whether so little is free there that nothing more is to be kept.
pub(crate) fn is_short_on(device: Ordinal) -> bool {
    let Some(home) = home_of(device) else { return false };
    let Ok(_entered) = home.enter() else { return false };
    home.driver.room().is_ok_and(|room| pool::is_too_much(device, room))
}

/// Nothing of a program that has no primary context there: one would be made.
pub(crate) fn home_of(device: Ordinal) -> Option<Home> {
    Home::if_primary(gpu::driver().ok()?, device)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who was refused memory hears that some is just being freed, and comes back when it has been; without any, at once; and never
    /// waits longer than it would.
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
