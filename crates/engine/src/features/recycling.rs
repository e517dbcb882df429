//! Gives back kept memory and ends cached communicators: when too much is kept, when memory is short, or when the program asks.
//!
//! No signal tells that another program lacks memory. So the background worker looks every 50 ms while anything is kept that may go, and
//! without the worker nothing is kept.

pub(crate) mod alive;
pub(crate) mod cached;

use std::collections::BTreeSet;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::features::memory::pool;
use windlass_base::gpu::{self, Ordinal};
use windlass_base::scoped::Flagged;
use windlass_transport::heap::{Heap, HeapError};

use crate::background::{side_thread, worker};
use crate::features::registration::freeing::{Freeing, free, home_of, is_short_on, let_go};
use crate::features::windows;

/// Wakes the worker if something is kept that may go. Called when a block is freed, and when a communicator has ended.
pub(crate) fn look_after_kept() {
    if is_any_to_look_after() {
        worker::wake();
    }
}

/// Frees blocks whose windows must go first. Called by the thread that frees one, which so has the memory back at its return, unless a
/// call is inside one of their communicators.
pub(crate) fn free_leaving() {
    let devices: BTreeSet<Ordinal> = pool::leaving().iter().map(|block| block.device).collect();
    for device in devices {
        windows::free_leaving(device, WINDOWS_GO_WITHIN);
    }
}

/// How long a caller that needs memory waits for windows of blocks to go, which involves peers' processes.
const WINDOWS_GO_WITHIN: Duration = Duration::from_millis(200);

/// Frees all kept blocks of a device, with their windows. Returns whether there were any. Takes NCCL half a millisecond a block, and
/// one or two a window.
pub(crate) fn trim_pool(device: Ordinal) -> bool {
    if !pool::is_any_kept() && !pool::is_any_leaving() {
        return Freeing::wait(WINDOWS_GO_WITHIN);
    }
    // Without a current context NCCL, which restores the previous device, would make a context on device 0.
    let home = home_of(device);
    let _entered = home.as_ref().and_then(|home| home.enter().ok());
    let blocks = pool::trim(device);
    let_go(&blocks);
    let count = blocks.len() + windows::free_leaving(device, WINDOWS_GO_WITHIN);
    if count > 0 {
        log::info!("device {device}: {count} kept blocks of ncclMemAlloc were given back");
    }
    Freeing::wait(WINDOWS_GO_WITHIN) || count > 0
}

/// Called before NCCL makes a communicator on this device, which takes some hundred MiB. If memory is short there, kept blocks go back,
/// then cached communicators.
pub(crate) fn make_room(device: Option<Ordinal>) {
    if let Some(device) = device.filter(|_| pool::is_any_kept() || cached::is_any())
        && is_short_on(device)
    {
        trim_pool(device);
        // A cached communicator may serve this very init, so these go last.
        if is_short_on(device) {
            cached::trim(device);
        }
    }
}

/// Lends a region by `lend`. If there is no room, calls `make_room` and lends again whenever ended communicators may have released some.
/// `make_room` asks its argument whether there is enough.
pub(crate) fn lend<T>(
    heap: &Heap,
    make_room: impl FnOnce(&mut dyn FnMut() -> bool),
    lend: impl Fn() -> Result<T, HeapError>,
) -> Result<T, HeapError> {
    let trim = || _ = trim_pool(heap.device());
    lend_again(lend, || heap.held(), trim, make_room)
}

fn lend_again<T, H: PartialEq>(
    lend: impl Fn() -> Result<T, HeapError>,
    held: impl Fn() -> H,
    trim: impl Fn(),
    make_room: impl FnOnce(&mut dyn FnMut() -> bool),
) -> Result<T, HeapError> {
    let mut lent = lend();
    let lacks_memory = match &lent {
        Err(HeapError::Cuda(failure)) if failure.is_out_of_memory() => true,
        Err(HeapError::Full { .. }) => false,
        _ => return lent,
    };
    // The first look always tries: counters need not show what another thread has just released.
    let mut seen = None;
    make_room(&mut || {
        let now = Some(held());
        let is_new = now != seen;
        if is_new {
            seen = now;
            if lacks_memory {
                trim();
            }
            lent = lend();
        }
        lent.is_ok()
    });
    lent
}

/// Looks for blocks and communicators kept too long, and for shortage of memory. Called on the background worker, which must not wait: the
/// driver may wait for a thread of the program. So the driver is asked on a [side thread](crate::background::side_thread), one
/// at a time. A later look of the worker deregisters what was registered of freed blocks.
pub(crate) fn look() {
    static IS_BUSY: AtomicBool = AtomicBool::new(false);
    if is_any_to_look_after()
        && let Some(busy) = Flagged::by(&IS_BUSY)
    {
        side_thread::run_while(LOOK_AFTER_EVERY, move || {
            let _busy = &busy;
            let_go_of_old();
            give_back_where_short();
            cached::look();
            is_any_to_look_after()
        });
    }
}

/// How often that thread looks, so that memory goes back soon when it is short.
const LOOK_AFTER_EVERY: Duration = Duration::from_millis(50);

/// Whether anything is kept that may go.
pub(crate) fn is_any_to_look_after() -> bool {
    pool::is_any_kept() || cached::may_end()
}

/// How long an unused block is kept. Another program or `cudaMalloc` may need the memory, and does not say so.
const KEPT_FOR: Duration = Duration::from_secs(2);

fn let_go_of_old() {
    let _freeing = Freeing::begin();
    for block in pool::age(KEPT_FOR) {
        // On a thread without a current context NCCL, which restores the previous device, would make a context on device 0. Memory that
        // the program has unmapped by other means is skipped.
        let Some(said) = gpu::opened().and_then(|driver| driver.attributes(block)) else { continue };
        let home = home_of(said.device);
        let _entered = home.as_ref().and_then(|home| home.enter().ok());
        free(block);
    }
}

fn give_back_where_short() {
    for device in pool::devices().into_iter().filter(|device| is_short_on(*device)) {
        let Some(home) = home_of(device) else { continue };
        let Ok(_entered) = home.enter() else { continue };
        let _freeing = Freeing::begin();
        let blocks = pool::trim(device);
        blocks.iter().for_each(|block| free(*block));
        log::info!("device {device}: memory is short: {} kept blocks were given back", blocks.len());
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use windlass_base::gpu::Failure;
    use windlass_base::gpu::failure::{NOT_READY, OUT_OF_MEMORY};

    use super::*;

    /// For lack of room, and for no other failure, room is made and the region is asked for again: after the first look, and whenever
    /// the counters have changed.
    #[test]
    fn asks_again_for_want_of_room() {
        let full = HeapError::Full { device: 0, asked_bytes: 2, mapped_bytes: 4, mapped_bytes_limit: 4 };
        let cuda = |code| {
            let (name, detail) = Default::default();
            Failure { call: "cuMemCreate", code: Some(code), name, detail }
        };
        let (short, lost) = (HeapError::Cuda(cuda(OUT_OF_MEMORY)), HeapError::Cuda(cuda(NOT_READY)));
        // Given: the answer to each attempt, and the counters at each look. Counted: attempts, looks and trims.
        let asked = |answers: &[Result<(), &HeapError>], helds: &[u32]| {
            let [asked, looked, trimmed] = [const { Cell::new(0) }; 3];
            let lend = || answers[asked.replace(asked.get() + 1)].map_err(HeapError::clone);
            let trim = || trimmed.set(trimmed.get() + 1);
            let held = || helds[looked.replace(looked.get() + 1)];
            let lent =
                lend_again(lend, held, trim, |is_enough| while looked.get() < helds.len() && !is_enough() {});
            (lent, [asked.get(), looked.get(), trimmed.get()])
        };
        assert_eq!(asked(&[Ok(())], &[7]), (Ok(()), [1, 0, 0]));
        for (refusal, trims) in [(&full, 0), (&short, 1)] {
            let no = Err(refusal);
            assert_eq!(asked(&[no, Ok(())], &[7, 7]), (Ok(()), [2, 1, trims]));
            assert_eq!(asked(&[no, no], &[7, 7, 7]), (Err(refusal.clone()), [2, 3, trims]));
            assert_eq!(asked(&[no, no, Ok(())], &[7, 7, 6, 6]), (Ok(()), [3, 3, 2 * trims]));
        }
        for refusal in [lost, HeapError::Gone] {
            assert_eq!(asked(&[Err(&refusal)], &[7]), (Err(refusal.clone()), [1, 0, 0]));
        }
    }
}
