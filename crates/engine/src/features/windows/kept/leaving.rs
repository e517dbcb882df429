//! Blocks that leave the pool: their windows go first, each with the gate of its communicator closed, then NCCL frees them. On a
//! [thread of its own](crate::background::side_thread): a drop asks peers' processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::features::memory::pool::{self, Block};
use windlass_base::gpu::{Home, Ordinal};

use crate::background::side_thread;
use crate::features::registration::freeing::{self, Busy};
use crate::features::windows::kept::{LOOK_EVERY, Windows, alive, blocks};

/// Whether a thread is at it.
static IS_BUSY: AtomicBool = AtomicBool::new(false);

/// Has the blocks that are to leave freed, of which no communicator has a call inside; the others later. Waits for nobody.
pub(crate) fn look() {
    if pool::leaving().is_empty() || IS_BUSY.swap(true, Ordering::AcqRel) {
        return;
    }
    let busy = Busy(&IS_BUSY);
    let all: Vec<Arc<Windows>> = alive().collect();
    side_thread::run(None, move || {
        let _busy = busy;
        pool::leaving().iter().for_each(|block| {
            leave(&all, block);
        });
    });
}

/// The same of a device's, for who needs its memory, which is waited for so long: a communicator may have a call inside, or the other
/// thread that does this. How many were freed.
pub(crate) fn free_leaving(device: Ordinal, within: Duration) -> usize {
    let leaving = move || pool::leaving().into_iter().filter(move |block| block.device == device);
    if leaving().next().is_none() {
        return 0;
    }
    let all: Vec<Arc<Windows>> = alive().collect();
    let until = Instant::now() + within;
    let freed = Arc::new(AtomicUsize::new(0));
    let free_all = {
        let freed = freed.clone();
        move || {
            while Instant::now() < until && leaving().next().is_some() {
                let count = leaving().filter(|block| leave(&all, block)).count();
                freed.fetch_add(count, Ordering::Relaxed);
                std::thread::sleep(LOOK_EVERY);
            }
        }
    };
    let _ = side_thread::run(Some(within), free_all);
    freed.load(Ordering::Relaxed)
}

/// Whether it has left.
fn leave(all: &[Arc<Windows>], block: &Block) -> bool {
    all.iter().for_each(|one| one.let_go(block.serial));
    free(block)
}

/// Has the blocks freed that are to leave and have no windows any more. For the application's thread: a communicator has ended.
pub(crate) fn free_left() {
    pool::leaving().iter().for_each(|block| {
        free(block);
    });
}

fn free(block: &Block) -> bool {
    let left = if blocks::is_free(block.serial) { pool::left(block.serial) } else { None };
    let Some(address) = left else { return false };
    // NCCL, which brings back the device that was, would make a context for device 0 on a thread that has none.
    let home = freeing::home_of(block.device);
    let _entered = home.as_ref().map(Home::enter);
    freeing::let_go(&[address]);
    true
}

impl Windows {
    fn let_go(&self, block: u64) {
        if !self.has_any() || self.is_shared.load(Ordering::Acquire) {
            return;
        }
        let Some(_closed) = self.gate.get().and_then(|gate| gate.try_close()) else { return };
        self.is_dropping.store(true, Ordering::SeqCst);
        if self.may_drop() {
            let taken = self.change(|ledger| ledger.leave(block));
            self.drop_all(taken);
        }
        self.is_dropping.store(false, Ordering::SeqCst);
    }

    /// For a thread of ours that has the gate closed, and has said that it is dropping some.
    fn may_drop(&self) -> bool {
        !self.is_aborted.load(Ordering::SeqCst) && !self.is_ended.load(Ordering::Acquire)
    }
}
