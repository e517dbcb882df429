//! [`Windows`]: the windows that a communicator keeps. NCCL makes them, they stay there when the program deregisters them, and a
//! [round](agreeing) of all ranks finds them again. See docs/symmetric-memory.md.
//!
//! No call of this rank may meet a window that NCCL has and the program has not: NCCL would take another path than on
//! ranks that have no such window. So such windows are [dropped](Windows::meet) before NCCL gets a buffer. Each rank does that
//! alone, without waiting, and the others hear of it in the next round.
//!
//! The program's threads have passed the communicator's gate when they come here. Threads of Windlass have [closed it](leaving).

mod agreeing;
mod blocks;
mod leaving;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use nccl_sys::{ncclComm_t, ncclSuccess};
use once_cell::sync::OnceCell;

use crate::features::memory::pool;
use crate::features::windows::decide::Rules;
use crate::features::windows::list::{Ended, Record, Standing, WindowLedger};
use crate::features::windows::slot::WindowSlot;
use crate::forward::queries;
use windlass_base::config::nccl;
use windlass_base::gate::{Gate, Passed};
use windlass_base::gpu::{self, Home, Ordinal};
use windlass_base::lock::Mutex;
use windlass_base::range::Range;
use windlass_base::shared_page::SharedPage;
use windlass_base::stats::count;
use windlass_base::stats::resources::Kept;
use windlass_base::thread;
use windlass_bootstrap::negotiated::NegotiatedConfig;

use crate::background::weak_list::WeakList;
use crate::features::page_layout::WINDOWS_AT;
use crate::features::registration::registering::End;

pub(crate) use agreeing::{Course, Health, Making, WindowRequest};
pub(crate) use leaving::free_left;
pub(crate) use leaving::{free_leaving, look};

static WINDOWS: WeakList<Windows> = WeakList::new();

/// The live ones of this process.
pub(crate) fn alive() -> impl Iterator<Item = Arc<Windows>> {
    WINDOWS.alive()
}

/// How many windows of a communicator stay that the program has deregistered.
const CACHED_MAX: usize = 64;
/// How long an abort waits for a drop by another thread, which involves peers' processes.
const DROPS_WITHIN: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// The kept windows of one communicator on this rank.
#[derive(Debug)]
pub struct Windows {
    slot: WindowSlot<Arc<SharedPage>>,
    rules: Rules,
    rank: u32,
    /// None if the driver refused it. Windows are then dropped in the thread's current context.
    home: Option<Home>,
    gate: OnceCell<&'static Gate>,
    /// NCCL's own handle. 0 before the first registration.
    real: AtomicUsize,
    /// Whether the ledger has any entry.
    has_any: AtomicBool,
    /// Whether some rank has stopped keeping windows.
    is_off: AtomicBool,
    is_aborted: AtomicBool,
    /// Whether no thread of Windlass may drop windows: NCCL ends or has ended the communicator, or it has failed. An end sets this with
    /// the gate passed.
    is_ended: AtomicBool,
    /// Whether a thread of Windlass is about to drop windows. It sets this before it reads `is_aborted`, and an abort sets `is_aborted`
    /// before it reads this.
    is_dropping: AtomicBool,
    /// Whether calls come that Windlass does not see. Then no thread of Windlass may be in NCCL's communicator.
    is_shared: AtomicBool,
    /// Locked for some stores and looks. The pool's lock comes after it.
    ledger: Mutex<WindowLedger>,
}

/// Whether a window's block has left the pool.
fn has_left(record: &Record) -> bool {
    let block = pool::block_of(record.range.base);
    record.block.is_some() && block.map(|block| block.serial) != record.block
}

/// The state of a window's block.
fn standing(record: &Record) -> Standing {
    match pool::block_of(record.range.base) {
        Some(block) if Some(block.serial) == record.block => match block.held {
            true => Standing::Held { life: block.life },
            false => Standing::Kept,
        },
        _ => Standing::Leaving,
    }
}

impl Windows {
    /// The kept windows, if the negotiated config has them, over the peer group's shared page.
    pub(crate) fn new(
        negotiated: &NegotiatedConfig,
        page: &Arc<SharedPage>,
        rank: u32,
        device: Ordinal,
    ) -> Option<Arc<Windows>> {
        if !negotiated.keeps_windows() {
            return None;
        }
        let version = nccl::version();
        let windows = Arc::new(Windows {
            slot: WindowSlot::new(page.clone(), WINDOWS_AT, rank, negotiated.members.len() as u32)?,
            rules: Rules::of(version),
            rank,
            home: gpu::driver().and_then(|driver| Home::of(driver, device)).ok(),
            gate: OnceCell::new(),
            real: AtomicUsize::new(0),
            has_any: AtomicBool::new(false),
            is_off: AtomicBool::new(false),
            is_aborted: AtomicBool::new(false),
            is_ended: AtomicBool::new(false),
            is_dropping: AtomicBool::new(false),
            is_shared: AtomicBool::new(false),
            ledger: Mutex::default(),
        });
        WINDOWS.push(&windows);
        Some(windows)
    }

    /// Sets the gate that the program's calls pass.
    pub fn guarded_by(&self, gate: &'static Gate) {
        let _ = self.gate.set(gate);
    }

    /// Notes that another communicator uses this one's NCCL resources, or that calls are not seen. Drops all windows that the program does not
    /// have, as no thread of Windlass may drop them later.
    pub fn share(&self) {
        if !self.is_shared.swap(true, Ordering::AcqRel) && !self.is_ended.load(Ordering::Acquire) {
            self.end_cached();
        }
    }

    /// Handles a deregistration by the program. In an open group, NCCL allows earlier calls to use the window until the group ends, so NCCL
    /// hears of the end at once.
    pub fn end(&self, handle: usize, is_grouped: bool) -> Ended {
        if !self.has_any() {
            return Ended::Unknown;
        }
        self.drop_leaving();
        // Here no thread of Windlass may drop windows later, since the communicator is shared.
        let is_real = is_grouped || self.is_shared.load(Ordering::Acquire);
        let record = self.ledger.lock().find(handle);
        let is_real = is_real || record.is_some_and(|record| !self.has_room_for(&record));
        let stays = |record: &Record| if is_real { Standing::Leaving } else { standing(record) };
        let ended = self.change(|ledger| ledger.end(handle, stays));
        if ended == Ended::Cached {
            count::windows(Kept::Cached, 1);
            // The block may have left the pool just before, when it had no ended window.
            if let Some(block) = record.filter(has_left).and_then(|record| record.block) {
                self.drop_all(self.change(|ledger| ledger.leave(block)));
            }
            self.drop_all(self.change(|ledger| ledger.limit(CACHED_MAX)));
        }
        ended
    }

    /// Whether the blocks of cached windows, with this one's, take no more than the pool may keep. A block with a window does not go
    /// back to the driver in the free itself.
    fn has_room_for(&self, record: &Record) -> bool {
        let cached: Vec<(u64, Range)> = self.ledger.lock().cached().collect();
        let Some(block) = pool::block_of(record.range.base) else { return true };
        let Some(driver) = gpu::opened() else { return false };
        let others = cached.iter().filter(|(serial, _)| *serial != block.serial);
        let blocks = others.filter_map(|(_, range)| pool::block_of(range.base));
        let bytes = block.bytes + blocks.map(|other| other.bytes).sum::<u64>();
        bytes <= pool::bytes_max(driver, block.device, bytes)
    }

    /// Whether NCCL has this window and the program has ended it.
    pub fn is_cached(&self, handle: usize) -> bool {
        self.has_any() && self.ledger.lock().is_cached(handle)
    }

    /// Drops all windows that overlap these buffers and that the program does not have. Called before NCCL gets the buffers.
    pub fn meet(&self, buffers: &[Range]) {
        if !self.has_any() {
            return;
        }
        let ledger = self.ledger.lock();
        if !buffers.iter().any(|buffer| ledger.meets(*buffer, standing)) {
            return;
        }
        drop(ledger);
        let taken = self.change(|ledger| {
            let taken = buffers.iter().flat_map(|buffer| ledger.meet(*buffer, standing));
            taken.collect::<Vec<_>>()
        });
        if !taken.is_empty() {
            count::windows(Kept::Dropped, taken.len() as u64);
            let dropped = taken.len();
            log::debug!(
                "rank {}: {dropped} windows that were kept are dropped for a call over them",
                self.rank
            );
        }
        self.drop_all(taken);
    }

    /// Drops the windows of leaving blocks, if the communicator is shared: then [no other thread](leaving) may.
    fn drop_leaving(&self) {
        if self.is_shared.load(Ordering::Acquire) && self.has_any() && pool::is_any_leaving() {
            self.drop_all(self.change(|ledger| ledger.leave_all(standing)));
        }
    }

    /// Drops all windows that the program does not have, so that NCCL may free what they use.
    pub fn end_cached(&self) {
        let _inside = self.pass();
        self.drop_all(self.change(|ledger| ledger.end_cached(standing)));
    }

    /// For the communicator's end, when none of its work runs. Windows that the program has not ended stay, as in NCCL, with their memory.
    pub(crate) fn end_all(&self) {
        if self.is_aborted.load(Ordering::Acquire) {
            return;
        }
        self.is_off.store(true, Ordering::Release);
        // A thread that has the gate closed may be dropping windows. One that closes it later sees `is_ended`.
        let _inside = self.pass();
        self.is_ended.store(true, Ordering::Release);
        self.end_cached();
        self.change(WindowLedger::forget_all_names);
        let left: Vec<(u64, bool)> = self.ledger.lock().blocks().collect();
        left.into_iter().for_each(|(block, _)| pool::taint(block));
    }

    /// Stops dropping windows after the communicator has failed: a drop asks peers' processes, which may be dead.
    pub(crate) fn leave_alone(&self) {
        self.is_ended.store(true, Ordering::Release);
    }

    /// Stops keeping windows because calls are not seen any more. Returns false if a call is inside.
    pub(crate) fn release(&self) -> bool {
        // Without a gate no call knows the communicator yet.
        let closed = self.gate.get().map(|gate| gate.try_close());
        if matches!(closed, Some(None)) {
            return false;
        }
        self.stop_keeping("windlassDisable");
        true
    }

    /// For an abort: waits end, and no window is dropped, since peers may be writing there. The blocks are never handed
    /// out again.
    pub(crate) fn abort(&self) -> End {
        self.is_aborted.store(true, Ordering::SeqCst);
        let is_inside = || self.is_dropping.load(Ordering::SeqCst);
        thread::wait_while(DROPS_WITHIN, LOOK_EVERY, is_inside);
        // The blocks are tainted before the pool hears that they have no windows.
        let blocks: Vec<(u64, bool)> = self.ledger.lock().blocks().collect();
        blocks.into_iter().for_each(|(block, _)| pool::taint(block));
        self.change(WindowLedger::forget);
        if is_inside() { End::Left } else { End::Clean }
    }

    /// Stops keeping windows on this rank, and tells the others, which then stop, too.
    fn stop_keeping(&self, why: &str) {
        if !self.is_off.load(Ordering::Acquire) {
            self.slot.go_off();
            self.go_off(why);
        }
    }

    fn go_off(&self, why: &str) {
        if self.is_off.swap(true, Ordering::AcqRel) {
            return;
        }
        log::info!("rank {}: windows are not kept any more: {why}", self.rank);
        let taken = self.change(|ledger| ledger.end_cached(standing));
        self.change(WindowLedger::forget_all_names);
        self.drop_all(taken);
    }

    /// Has NCCL drop these windows. Waits for no other rank.
    fn drop_all(&self, records: Vec<Record>) {
        if records.is_empty() {
            return;
        }
        // The program may be capturing, and this thread may have another device.
        let _entered = self.home.as_ref().map(Home::enter);
        let real = self.real.load(Ordering::Acquire) as ncclComm_t;
        for Record { handle, times, range, .. } in records {
            for _ in 0..times {
                let code = queries::end_window(real, handle as _);
                if code != ncclSuccess {
                    let Range { base, bytes } = range;
                    log::warn!("rank {}: a window of {bytes} bytes at {base:#x} stays: {code:?}", self.rank);
                }
            }
        }
    }

    fn has_any(&self) -> bool {
        self.has_any.load(Ordering::Acquire)
    }

    fn pass(&self) -> Option<Passed<'static>> {
        self.gate.get().map(|gate| gate.pass())
    }

    /// Changes the ledger, and tells the pool which blocks have windows.
    fn change<T>(&self, act: impl FnOnce(&mut WindowLedger) -> T) -> T {
        let mut ledger = self.ledger.lock();
        let before: Vec<(u64, bool)> = ledger.blocks().collect();
        let answer = act(&mut ledger);
        self.has_any.store(!ledger.is_empty(), Ordering::Release);
        blocks::changed(&before, &ledger.blocks().collect::<Vec<_>>());
        answer
    }
}

impl Drop for Windows {
    /// NCCL has ended the communicator, or never will. Its windows no longer keep blocks in the pool.
    fn drop(&mut self) {
        self.change(WindowLedger::forget);
    }
}
