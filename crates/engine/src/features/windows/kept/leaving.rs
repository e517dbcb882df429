//! Frees blocks that leave the pool. Their windows are dropped first, each with the gate of its communicator closed, then NCCL frees them. A
//! [side thread](crate::background::side_thread) does it, because a drop involves peers' processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::features::memory::pool::{self, Block};
use windlass_base::gpu::{Home, Ordinal};
use windlass_base::scoped::Flagged;
use windlass_base::thread;

use crate::background::side_thread;
use crate::features::registration::freeing;
use crate::features::windows::kept::{LOOK_EVERY, Windows, alive, blocks};

/// Whether a thread is freeing leaving blocks for [`look`].
static IS_BUSY: AtomicBool = AtomicBool::new(false);

/// Starts to free the leaving blocks, on a side thread. Those of communicators with a call inside stay for a later look. Does not wait.
pub(crate) fn look() {
    if pool::leaving().is_empty() {
        return;
    }
    let Some(busy) = Flagged::by(&IS_BUSY) else { return };
    let all: Vec<Arc<Windows>> = alive().collect();
    side_thread::run(None, move || {
        let _busy = busy;
        pool::leaving().iter().for_each(|block| {
            leave(&all, block);
        });
    });
}

/// Frees the leaving blocks of a device for a caller that needs memory. Waits up to `within`, as a communicator may have a call inside, or
/// [`look`]'s thread may be at work. Returns how many were freed.
pub(crate) fn free_leaving(device: Ordinal, within: Duration) -> usize {
    let leaving = move || pool::leaving().into_iter().filter(move |block| block.device == device);
    if leaving().next().is_none() {
        return 0;
    }
    let all: Vec<Arc<Windows>> = alive().collect();
    let freed = Arc::new(AtomicUsize::new(0));
    let free_all = {
        let freed = freed.clone();
        move || {
            thread::wait_while(within, LOOK_EVERY, || {
                let count = leaving().filter(|block| leave(&all, block)).count();
                freed.fetch_add(count, Ordering::Relaxed);
                leaving().next().is_some()
            });
        }
    };
    let _ = side_thread::run(Some(within), free_all);
    freed.load(Ordering::Relaxed)
}

/// Drops a block's windows and frees it. Returns whether it was freed.
fn leave(all: &[Arc<Windows>], block: &Block) -> bool {
    all.iter().for_each(|one| one.let_go(block.serial));
    free(block)
}

/// Frees the leaving blocks that have no windows any more, on the program's thread after a communicator has ended.
pub(crate) fn free_left() {
    pool::leaving().iter().for_each(|block| {
        free(block);
    });
}

fn free(block: &Block) -> bool {
    let left = if blocks::is_free(block.serial) { pool::left(block.serial) } else { None };
    let Some(address) = left else { return false };
    // Without a current context NCCL, which restores the previous device, would make a context on device 0.
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

    /// Whether windows may be dropped, asked by a thread of Windlass that has closed the gate and set `is_dropping`.
    fn may_drop(&self) -> bool {
        !self.is_aborted.load(Ordering::SeqCst) && !self.is_ended.load(Ordering::Acquire)
    }
}
