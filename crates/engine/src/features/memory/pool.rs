//! The blocks of `ncclMemAlloc`: those that the application has, and those that it has freed and may get again. Making and
//! freeing them takes NCCL milliseconds (2 to 5 on a host of 8 GPUs); handing one out again takes none of its work.
//!
//! A block is NCCL's own: what is not here NCCL makes, and what leaves NCCL frees, so that handles, alignment and access of peers
//! are NCCL's whatever its version. This module decides and keeps the ledger; it calls neither NCCL nor, while it has the ledger, the
//! driver. Who asks carries the answers out: what [`free`], [`trim`] and [`left`] give has left the ledger, and is NCCL's to free.
//!
//! A free of NCCL's waits for nothing on the device, so whoever may free memory has finished with it everywhere. That is what handing
//! it out again at once stands on.
//!
//! `WINDLASS_POOL` bounds what is kept on a device, and so does [what is free](spare) there; `off` keeps nothing, and notes nothing. Nor
//! is anything kept while [nobody looks after it](look_after): what nobody wants for a while is to [age], for others to have that memory.

mod ledger;
mod spare;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;

use windlass_base::config::config;
use windlass_base::config::nccl::{self, Effect};
use windlass_base::gpu::memory::{Room, granularity};
use windlass_base::gpu::pointer::Extent;
use windlass_base::gpu::{self, Address, Driver, Ordinal};
use windlass_base::process;
use windlass_base::range::Range;
use windlass_base::stats::count;
use windlass_base::stats::pool::Pooled;

pub(crate) use ledger::{Block, Over, Registration};
use ledger::{Given, PoolLedger, State};

/// Who has which block. Held for some stores, never across the driver or NCCL; comes after every other lock.
static LEDGER: Mutex<PoolLedger> = Mutex::new(PoolLedger::new());
/// Blocks in the ledger: without any there is nothing to look up.
static KNOWN: AtomicUsize = AtomicUsize::new(0);
/// Blocks that are kept.
static KEPT: AtomicUsize = AtomicUsize::new(0);
/// A thread looks after what is kept.
static LOOKED_AFTER_BY: AtomicUsize = AtomicUsize::new(0);
/// This process was forked off one that has blocks: CUDA is dead, and the lock may be held by a thread that is not here.
static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// What is asked of NCCL instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Making {
    /// Of whose memory.
    pub device: Ordinal,
    bytes: u64,
}

/// How a request for memory is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Supply {
    /// By NCCL; it is none of ours.
    Forward,
    /// By this block, which is handed out already.
    Recycled(Address),
    /// By NCCL; [`made`] is to hear of it.
    Make(Making),
}

/// What becomes of memory that the application frees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Return {
    /// It is none of ours: NCCL frees it, or says what is wrong with it.
    Forward,
    /// It has left the ledger: NCCL frees it.
    LetGo,
    /// It is kept, and these have left for it: NCCL frees them.
    Kept(Vec<Address>),
    /// It was freed before.
    Refused,
}

/// Serves a request for so many bytes on the current device.
pub(crate) fn allocate(bytes: usize) -> Supply {
    // First, as NCCL reads it at this call whatever the pool may do.
    if nccl::at_allocation().has(Effect::NoCuMem) || config().pool_bytes_max == 0 || bytes == 0 || is_forked()
    {
        return Supply::Forward;
    }
    // Without a current context NCCL chooses the device.
    let Some((driver, device)) = current() else { return Supply::Forward };
    let Some(bytes) = class(driver, device, bytes) else { return Supply::Forward };
    loop {
        let taken = change(|ledger| ledger.take(device, bytes));
        let Some(block) = taken else { break };
        if is_still(driver, &block) {
            count::pooled(Pooled::Hits, 1);
            return Supply::Recycled(block.base);
        }
        forget(&block);
    }
    count::pooled(Pooled::Misses, 1);
    Supply::Make(Making { device, bytes })
}

/// NCCL has made memory, for the application. Whether it is a block of ours from now on: where NCCL has it from `cudaMalloc`
/// (NCCL_CUMEM_ENABLE=0), or rounds sizes as we do not, it is not.
pub(crate) fn made(making: &Making, address: Address) -> bool {
    let Some(driver) = gpu::opened() else { return false };
    let Some(said) = driver.attributes(address) else { return false };
    let expected = Extent { base: address, bytes: making.bytes };
    if said.mapping != expected || said.device != making.device || !driver.is_mapped_by_handle(address) {
        return false;
    }
    change(|ledger| ledger.enter(making.device, Range { base: address, bytes: making.bytes }, said.id));
    true
}

/// The application frees this memory.
pub(crate) fn free(address: Address) -> Return {
    if address == 0 || is_empty() {
        return Return::Forward;
    }
    let found = lock().find(address);
    match found {
        None => Return::Forward,
        Some((_, State::Kept | State::Leaving)) => refused(),
        // NCCL finds no mapping that begins there.
        Some((block, State::Held)) if block.base != address => Return::Forward,
        Some((block, State::Held)) => give_back(&block),
    }
}

fn give_back(block: &Block) -> Return {
    let Some(driver) = gpu::opened().filter(|driver| is_still(driver, block)) else {
        forget(block);
        return Return::Forward;
    };
    let bytes_max = bytes_max(driver, block.device, block.bytes);
    let give_back = |ledger: &mut PoolLedger| {
        ledger.at(now());
        ledger.give_back(block, bytes_max)
    };
    match change(give_back) {
        Given::Kept { over } => {
            count::pooled(Pooled::Evicted, over.len() as u64);
            Return::Kept(over)
        }
        Given::LetGo => {
            count::pooled(Pooled::LetGo, 1);
            Return::LetGo
        }
        // Another thread has.
        Given::NotHeld => refused(),
    }
}

fn refused() -> Return {
    count::pooled(Pooled::DoubleFrees, 1);
    Return::Refused
}

/// What lies at this address, if it is a block of ours: held by the application or not.
pub(crate) fn block_of(address: Address) -> Option<Block> {
    if is_empty() { None } else { lock().find(address).map(|(block, _)| block) }
}

/// This block is handed out never again: the next free of it is NCCL's, and if it is kept it is [leaving].
pub(crate) fn taint(serial: u64) {
    if !is_empty() {
        change(|ledger| ledger.taint(serial));
    }
}

/// The same of all blocks of a device, or of every device: peers that are not stopped yet may be writing to what is registered of
/// them. Memory that NCCL has freed they have for themselves.
pub(crate) fn distrust(device: Option<Ordinal>) {
    if !is_empty() {
        change(|ledger| ledger.taint_all(device));
    }
}

/// The same of all blocks that are held within.
pub(crate) fn taint_within(range: Range) {
    if !is_empty() {
        lock().taint_within(range);
    }
}

/// The application has registered this memory with a communicator. A block that is freed with any such registration is NCCL's to free,
/// with all that this leaves behind.
pub(crate) fn registered(range: Range, registration: Registration) {
    if !is_empty() {
        lock().register(range, registration);
    }
}

/// The blocks that the latest call with this answer registered.
pub(crate) fn registered_by(registration: Registration) -> Vec<Range> {
    if is_empty() { Vec::new() } else { lock().registered_by(registration) }
}

/// It has ended that registration.
pub(crate) fn deregistered(registration: Registration) {
    if !is_empty() {
        lock().deregister(registration);
    }
}

/// So many windows of this block are live in NCCL. It is NCCL's to free when those that the application has ended are gone: it is
/// [leaving] before. Those that it owes the end of stay in NCCL, as without us.
pub(crate) fn has_windows(serial: u64, over: Over) {
    if !is_empty() {
        lock().set_windows(serial, over);
    }
}

/// How much of freed memory may be kept on a device now, by who would keep so many bytes more.
pub(crate) fn bytes_max(driver: &'static Driver, device: Ordinal, more: u64) -> u64 {
    if LOOKED_AFTER_BY.load(Ordering::Relaxed) == 0 {
        return 0;
    }
    let kept = lock().kept_on(device);
    config().pool_bytes_max.min(spare::bytes(driver, device, (kept, kept + more), now()))
}

/// The driver has said how much is free on a device: whether it should have back what is kept there.
pub(crate) fn is_too_much(device: Ordinal, room: Room) -> bool {
    let kept = lock().kept_on(device);
    spare::said(device, room, kept, now()) < kept || is_short(room.free, room.total)
}

/// The blocks that are to leave as soon as their windows are gone.
pub(crate) fn leaving() -> Vec<Block> {
    if is_empty() { Vec::new() } else { lock().leaving() }
}

/// Whether there are any.
pub(crate) fn is_any_leaving() -> bool {
    !is_empty() && lock().sums().leaving_blocks > 0
}

/// The windows of a block that is [leaving] are gone. It leaves the ledger, and NCCL is to free what this gives; nothing if
/// somebody was here before.
#[must_use]
pub(crate) fn left(serial: u64) -> Option<Address> {
    if is_empty() { None } else { change(|ledger| ledger.leave(serial)) }
}

/// All that is kept on a device leaves: NCCL is to free what this gives.
#[must_use]
pub(crate) fn trim(device: Ordinal) -> Vec<Address> {
    if !is_any_kept() {
        return Vec::new();
    }
    let gone = change(|ledger| ledger.trim(device));
    count::pooled(Pooled::Trimmed, gone.len() as u64);
    gone
}

/// As long as this is kept, a thread calls [`age`] again and again.
#[derive(Debug)]
pub(crate) struct LookedAfter(());

/// A thread does from now on.
pub(crate) fn look_after() -> LookedAfter {
    LOOKED_AFTER_BY.fetch_add(1, Ordering::Relaxed);
    LookedAfter(())
}

impl Drop for LookedAfter {
    fn drop(&mut self) {
        LOOKED_AFTER_BY.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What nobody has wanted for so long leaves: NCCL is to free what this gives.
#[must_use]
pub(crate) fn age(longest: Duration) -> Vec<Address> {
    if !is_any_kept() {
        return Vec::new();
    }
    let gone = change(|ledger| {
        ledger.at(now());
        ledger.age(longest.as_millis() as u64)
    });
    count::pooled(Pooled::Evicted, gone.len() as u64);
    gone
}

/// Milliseconds since the first call.
fn now() -> u64 {
    static BEGAN: OnceCell<Instant> = OnceCell::new();
    BEGAN.get_or_init(Instant::now).elapsed().as_millis() as u64
}

/// The devices on which something is kept.
pub(crate) fn devices() -> Vec<Ordinal> {
    if is_any_kept() { lock().devices() } else { Vec::new() }
}

/// Whether anything is kept.
pub(crate) fn is_any_kept() -> bool {
    KEPT.load(Ordering::Relaxed) > 0 && !is_forked()
}

/// Whether there is no block at all.
pub(crate) fn is_empty() -> bool {
    KNOWN.load(Ordering::Relaxed) == 0 || is_forked()
}

/// Whether a device with so much free memory should have back what is kept: less than 2 % and an eighth of it, or than
/// 1 GiB where that is less, is free.
fn is_short(free_bytes: u64, total_bytes: u64) -> bool {
    const ENOUGH: u64 = 1 << 30;
    free_bytes < (total_bytes / 50).max(ENOUGH.min(total_bytes / 8))
}

fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

fn current() -> Option<(&'static Driver, Ordinal)> {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| process::on_fork(in_child));
    let driver = gpu::driver().ok()?;
    Some((driver, driver.current_device().ok()??))
}

/// Bytes of a block for so many: whole granules, a function of the request alone. Never a larger block: NCCL 2.28 maps its own
/// size of every peer's block, and one of another size would fail there, on one rank.
fn class(driver: &'static Driver, device: Ordinal, bytes: usize) -> Option<u64> {
    const DEVICES: usize = 64;
    static GRANULES: [AtomicU64; DEVICES] = [const { AtomicU64::new(0) }; DEVICES];
    let place = GRANULES.get(usize::try_from(device).ok()?)?;
    let mut granule = place.load(Ordering::Relaxed);
    if granule == 0 {
        granule = granularity(driver, device).ok()?;
        place.store(granule, Ordering::Relaxed);
    }
    (bytes as u64).checked_next_multiple_of(granule)
}

/// Whether the memory there is the block's: who unmapped it himself told nobody.
fn is_still(driver: &Driver, block: &Block) -> bool {
    driver.buffer_id(block.base) == Some(block.buffer_id)
}

#[cold]
fn forget(block: &Block) {
    change(|ledger| ledger.forget(block));
    count::pooled(Pooled::Forgotten, 1);
    let Block { base, bytes, device, .. } = block;
    // At exit the driver may be gone before memory is freed.
    let is_driver_there = gpu::opened().is_some_and(|driver| driver.has_primary_context(*device));
    if is_driver_there {
        log::warn!(
            "device {device}: {bytes} bytes of ncclMemAlloc at {base:#x} were unmapped by somebody else"
        );
    }
}

/// Changes the ledger, and notes for readers what it holds.
fn change<T>(act: impl FnOnce(&mut PoolLedger) -> T) -> T {
    let mut ledger = lock();
    let done = act(&mut ledger);
    let now = ledger.sums();
    KNOWN.store(now.held_blocks + now.kept_blocks + now.leaving_blocks, Ordering::Relaxed);
    KEPT.store(now.kept_blocks, Ordering::Relaxed);
    for (what, value) in [
        (Pooled::Blocks, (now.kept_blocks + now.leaving_blocks) as u64),
        (Pooled::Bytes, now.kept_bytes + now.leaving_bytes),
        (Pooled::HeldBlocks, now.held_blocks as u64),
        (Pooled::HeldBytes, now.held_bytes),
    ] {
        count::pooled_now(what, value);
    }
    count::pooled_highest(now.kept_bytes + now.leaving_bytes);
    done
}

/// A panic elsewhere leaves the ledger whole: every change is complete before anything can fail.
fn lock() -> MutexGuard<'static, PoolLedger> {
    LEDGER.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// 2 % of a large device, 1 GiB of a middle one, an eighth of a small one.
    #[test]
    fn shortage() {
        let short = |free: u64, total: u64| is_short(free, total);
        assert!(short(2 * GIB, 141 * GIB) && !short(3 * GIB, 141 * GIB));
        assert!(short(GIB - 1, 16 * GIB) && !short(GIB, 16 * GIB));
        assert!(short(GIB / 8 - 1, GIB) && !short(GIB / 8, GIB));
    }
}
