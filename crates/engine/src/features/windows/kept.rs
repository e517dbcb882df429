//! The windows that a communicator keeps: made by NCCL, left there when the application deregisters them, and found again by a
//! [round](agreeing) of all ranks. See docs/symmetric-memory.md.
//!
//! A window that NCCL has and the application does not must be met by no call of this rank: NCCL would take another path than the
//! ranks that have none. So whoever is about to give NCCL a buffer [has such windows dropped](Windows::meet) first. That is this
//! rank's own business: the drop waits for nobody, and the others hear of it in the next round.
//!
//! The application's thread is in here with the gate of its communicator passed, another [with that gate closed](leaving).

mod agreeing;
mod blocks;
mod leaving;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nccl_sys::{ncclComm_t, ncclSuccess};
use once_cell::sync::OnceCell;

use crate::features::memory::pool;
use crate::features::windows::decide::Rules;
use crate::features::windows::list::{Ended, Record, Standing, WindowLedger};
use crate::features::windows::slot::WindowSlot;
use crate::forward::queries;
use windlass_base::gate::{Gate, Passed};
use windlass_base::gpu::{self, Home, Ordinal};
use windlass_base::range::Range;
use windlass_base::shared_page::SharedPage;
use windlass_base::stats::windows::Kept;
use windlass_base::stats::{count, segment};
use windlass_bootstrap::negotiated::NegotiatedConfig;

use crate::background::weak_list::WeakList;
use crate::features::page_layout::WINDOWS_AT;
use crate::features::registration::registering::End;

pub(crate) use agreeing::{Course, Health, Making, WindowRequest, is_refused_alone};
pub(crate) use leaving::free_left;
pub(crate) use leaving::{free_leaving, look};

static WINDOWS: WeakList<Windows> = WeakList::new();

/// Those of this process that are alive.
pub(crate) fn alive() -> impl Iterator<Item = Arc<Windows>> {
    WINDOWS.alive()
}

/// So many windows of a communicator stay that nobody has registered.
const CACHED_MAX: usize = 64;
/// As long as an abort waits for a drop that is under way, which asks peers' processes.
const DROPS_WITHIN: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// What a rank has of it.
#[derive(Debug)]
pub struct Windows {
    slot: WindowSlot<Arc<SharedPage>>,
    rules: Rules,
    rank: u32,
    /// None if the driver refused that: then it goes without.
    home: Option<Home>,
    gate: OnceCell<&'static Gate>,
    /// NCCL's own handle, since the first registration.
    real: AtomicUsize,
    /// Whether there is anything in the ledger.
    has_any: AtomicBool,
    /// Some rank keeps none any more.
    is_off: AtomicBool,
    is_aborted: AtomicBool,
    /// No thread of ours drops any: NCCL is ending the communicator, or has, which is written with the gate passed; or it has failed.
    is_ended: AtomicBool,
    /// A thread of ours is about to drop some. It says so before it looks whether the communicator was aborted, which says that before it
    /// looks at this.
    is_dropping: AtomicBool,
    /// Calls come that we do not see: no thread of ours may be in NCCL's communicator.
    is_shared: AtomicBool,
    /// Held for some stores and looks; the pool's lock comes after it.
    ledger: Mutex<WindowLedger>,
}

/// Whether a window's block is the pool's no more.
fn has_left(record: &Record) -> bool {
    let block = pool::block_of(record.range.base);
    record.block.is_some() && block.map(|block| block.serial) != record.block
}

/// How a window's block stands.
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
    /// Where the negotiated config says so, for a rank of a peer group whose ranks have this shared page.
    pub(crate) fn new(
        negotiated: &NegotiatedConfig,
        page: &Arc<SharedPage>,
        rank: u32,
        device: Ordinal,
    ) -> Option<Arc<Windows>> {
        if !negotiated.keeps_windows() {
            return None;
        }
        let version = segment::current().nccl_version.load(Ordering::Relaxed);
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

    /// What the application's calls pass.
    pub fn guarded_by(&self, gate: &'static Gate) {
        let _ = self.gate.set(gate);
    }

    /// Another communicator uses NCCL's resources of this one, or calls of it are not seen. What the application does not have goes now:
    /// no thread of ours may drop it later.
    pub fn share(&self) {
        if !self.is_shared.swap(true, Ordering::AcqRel) && !self.is_ended.load(Ordering::Acquire) {
            self.end_cached();
        }
    }

    /// The application ends a registration. In an open group what came before may use it yet, by NCCL's own word: that hears of the end
    /// at once.
    pub fn end(&self, handle: usize, is_grouped: bool) -> Ended {
        if !self.has_any() {
            return Ended::Unknown;
        }
        self.drop_leaving();
        // No thread of ours may drop what is left of a communicator that is shared.
        let is_real = is_grouped || self.is_shared.load(Ordering::Acquire);
        let record = self.ledger().find(handle);
        let is_real = is_real || record.is_some_and(|record| !self.has_room_for(&record));
        let stays = |record: &Record| if is_real { Standing::Leaving } else { standing(record) };
        let ended = self.change(|ledger| ledger.end(handle, stays));
        if ended == Ended::Cached {
            count::windows(Kept::Cached, 1);
            // Its block may have left a moment ago, when nothing stood on it that had to go first.
            if let Some(block) = record.filter(has_left).and_then(|record| record.block) {
                let taken = self.change(|ledger| ledger.leave(block));
                self.drop_all(taken);
            }
            let surplus = self.change(|ledger| ledger.limit(CACHED_MAX));
            self.drop_all(surplus);
        }
        ended
    }

    /// Whether the blocks of cached windows, with this one's, are no more than would be kept: memory that has a window does not go
    /// back to the driver in the free itself.
    fn has_room_for(&self, record: &Record) -> bool {
        let cached: Vec<(u64, Range)> = self.ledger().cached().collect();
        let Some(block) = pool::block_of(record.range.base) else { return true };
        let Some(driver) = gpu::opened() else { return false };
        let others = cached.iter().filter(|(serial, _)| *serial != block.serial);
        let blocks = others.filter_map(|(_, range)| pool::block_of(range.base));
        let bytes = block.bytes + blocks.map(|other| other.bytes).sum::<u64>();
        bytes <= pool::bytes_max(driver, block.device, bytes)
    }

    /// Whether NCCL has a window that the application has ended.
    pub fn is_cached(&self, handle: usize) -> bool {
        self.has_any() && self.ledger().is_cached(handle)
    }

    /// NCCL is about to get these buffers. Windows that the application does not have are dropped where they overlap.
    pub fn meet(&self, buffers: &[Range]) {
        if !self.has_any() {
            return;
        }
        let ledger = self.ledger();
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

    /// Windows of blocks that leave go, where [no thread of ours](leaving) may do that.
    fn drop_leaving(&self) {
        if self.is_shared.load(Ordering::Acquire) && self.has_any() && pool::is_any_leaving() {
            let taken = self.change(|ledger| ledger.leave_all(standing));
            self.drop_all(taken);
        }
    }

    /// What the application does not have goes; NCCL may then give back what stands behind it.
    pub fn end_cached(&self) {
        let _inside = self.pass();
        let taken = self.change(|ledger| ledger.end_cached(standing));
        self.drop_all(taken);
    }

    /// The communicator ends, and nothing of it runs. What the application has stays, as in NCCL, and the memory with it.
    pub(crate) fn end_all(&self) {
        if self.is_aborted.load(Ordering::Acquire) {
            return;
        }
        self.is_off.store(true, Ordering::Release);
        // Who has the gate closed may be dropping some; who closes it later finds this.
        let _inside = self.pass();
        self.is_ended.store(true, Ordering::Release);
        self.end_cached();
        self.change(WindowLedger::forget_all_names);
        let left: Vec<(u64, bool)> = self.ledger().blocks().collect();
        left.into_iter().for_each(|(block, _)| pool::taint(block));
    }

    /// The communicator has failed: a drop asks peers' processes, which may be dead.
    pub(crate) fn leave_alone(&self) {
        self.is_ended.store(true, Ordering::Release);
    }

    /// Calls are not seen any more. False: a call is inside.
    pub(crate) fn release(&self) -> bool {
        // Without a gate nobody knows the communicator yet.
        let closed = self.gate.get().map(|gate| gate.try_close());
        if matches!(closed, Some(None)) {
            return false;
        }
        self.stop_keeping("windlassDisable");
        true
    }

    /// The communicator is stopped: waits end, nothing is dropped, since peers may be writing there, and its memory is never handed
    /// out again.
    pub(crate) fn abort(&self) -> End {
        self.is_aborted.store(true, Ordering::SeqCst);
        let until = Instant::now() + DROPS_WITHIN;
        let is_inside = || self.is_dropping.load(Ordering::SeqCst);
        while is_inside() && Instant::now() < until {
            std::thread::sleep(LOOK_EVERY);
        }
        // Tainted before the pool hears that there are none.
        let blocks: Vec<(u64, bool)> = self.ledger().blocks().collect();
        blocks.into_iter().for_each(|(block, _)| pool::taint(block));
        self.change(WindowLedger::forget);
        if is_inside() { End::Left } else { End::Clean }
    }

    /// From now on this rank keeps none, and the others follow.
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

    /// NCCL drops these. Waits for no other rank.
    fn drop_all(&self, records: Vec<Record>) {
        if records.is_empty() {
            return;
        }
        // The application may be capturing, or be another thread than has the device.
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

    fn ledger(&self) -> MutexGuard<'_, WindowLedger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pool hears which blocks have windows.
    fn change<T>(&self, act: impl FnOnce(&mut WindowLedger) -> T) -> T {
        let mut ledger = self.ledger();
        let before: Vec<(u64, bool)> = ledger.blocks().collect();
        let answer = act(&mut ledger);
        self.has_any.store(!ledger.is_empty(), Ordering::Release);
        blocks::changed(&before, &ledger.blocks().collect::<Vec<_>>());
        answer
    }
}

impl Drop for Windows {
    /// NCCL has ended the communicator, or never will: its windows hold up no block any more.
    fn drop(&mut self) {
        self.change(WindowLedger::forget);
    }
}
