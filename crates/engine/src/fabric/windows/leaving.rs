//! Blocks that leave the pool: their windows go first, each with the gate of its communicator closed, then NCCL frees them. On a
//! [thread of its own](super::super::beside): a drop asks peers' processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::gpu::Home;
use crate::pool::{self, Block};

use super::super::beside;
use super::super::recycling::{self, Busy};
use super::{Windows, blocks};

/// Whether a thread is at it.
static IS_BUSY: AtomicBool = AtomicBool::new(false);

/// Has the blocks that are to leave freed, of which no communicator has a call inside; the others later. Waits for nobody.
pub(in crate::fabric) fn look(all: impl Iterator<Item = Arc<Windows>>) {
    if pool::leaving().is_empty() || IS_BUSY.swap(true, Ordering::AcqRel) {
        return;
    }
    let busy = Busy(&IS_BUSY);
    let all: Vec<Arc<Windows>> = all.collect();
    beside::run(None, move || {
        let _busy = busy;
        for block in pool::leaving() {
            all.iter().for_each(|one| one.let_go(block.serial));
            free(&block);
        }
    });
}

/// Has the blocks freed that are to leave and have no windows any more. For the application's thread: a communicator has ended.
pub fn free_left() {
    pool::leaving().iter().for_each(free);
}

fn free(block: &Block) {
    if blocks::is_free(block.serial)
        && let Some(address) = pool::left(block.serial)
    {
        // NCCL, which brings back the device that was, would make a context for device 0 on a thread that has none.
        let home = recycling::home_of(block.device);
        let _entered = home.as_ref().map(Home::enter);
        recycling::let_go(&[address]);
    }
}

impl Windows {
    fn let_go(&self, block: u64) {
        if !self.has_any() || self.is_shared.load(Ordering::Acquire) {
            return;
        }
        let Some(_closed) = self.gate.get().and_then(|gate| gate.try_close()) else { return };
        self.is_dropping.store(true, Ordering::SeqCst);
        if self.may_drop() {
            let taken = self.change(|book| book.leave(block));
            self.drop_all(taken);
        }
        self.is_dropping.store(false, Ordering::SeqCst);
    }

    /// For a thread of ours that has the gate closed, and has said that it is dropping some.
    fn may_drop(&self) -> bool {
        !self.is_aborted.load(Ordering::SeqCst) && !self.is_ended.load(Ordering::Acquire)
    }
}
