//! Blocks that leave the pool: their windows go first, each with the gate of its communicator closed, then NCCL frees them. On a
//! [thread of its own](super::super::beside): a drop asks peers' processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::forward::registration;
use crate::gpu::Home;
use crate::pool;

use super::super::{beside, memory_is_freed};
use super::{Windows, blocks};

/// Whether a thread is at it.
static IS_BUSY: AtomicBool = AtomicBool::new(false);

struct Busy;

impl Drop for Busy {
    fn drop(&mut self) {
        IS_BUSY.store(false, Ordering::Release);
    }
}

/// Has the blocks that are to leave freed, of which no communicator has a call inside; the others later. Waits for nobody.
pub(in crate::fabric) fn look(all: impl Iterator<Item = Arc<Windows>>) {
    if pool::leaving().is_empty() || IS_BUSY.swap(true, Ordering::AcqRel) {
        return;
    }
    let busy = Busy;
    let all: Vec<Arc<Windows>> = all.collect();
    beside::run(None, move || {
        let _busy = busy;
        for block in pool::leaving() {
            all.iter().for_each(|one| one.let_go(block.serial));
            if blocks::is_free(block.serial)
                && let Some(address) = pool::left(block.serial)
            {
                memory_is_freed(address);
                let mut homes = all.iter().filter_map(|one| one.home.as_ref());
                let _entered = homes.find(|home| home.device == block.device).map(Home::enter);
                let code = registration::free(address);
                if code != nccl_sys::ncclSuccess {
                    log::warn!("{} bytes at {address:#x} cannot be freed: {code:?}", block.bytes);
                }
            }
        }
    });
}

impl Windows {
    fn let_go(&self, block: u64) {
        if !self.has_any() || self.is_shared.load(Ordering::Acquire) {
            return;
        }
        let Some(_closed) = self.gate.get().and_then(|gate| gate.try_close()) else { return };
        // After the gate: an abort says so before it looks at that.
        if self.is_aborted.load(Ordering::Acquire) {
            return;
        }
        let taken = self.change(|book| book.leave(block));
        self.drop_all(taken);
    }
}
