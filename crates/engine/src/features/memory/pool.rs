//! The pool: blocks of `ncclMemAlloc` that the program holds, and freed blocks that are kept and handed out again. NCCL takes
//! milliseconds to make or free a block (2 to 5 on a host of 8 GPUs); handing one out again avoids that.
//!
//! NCCL makes every block and frees every block that leaves, so handles, alignment and peers' access are NCCL's own. This module only
//! decides and keeps the ledger. It never calls NCCL, nor the driver while it has the ledger locked. Callers act on the answers: the
//! blocks that [`free`], [`trim`] and [`left`] return have left the ledger, and NCCL must free them.
//!
//! NCCL's free does not wait for the device, so the program has finished with freed memory everywhere. That makes it safe to hand
//! it out again at once.
//!
//! `WINDLASS_POOL` and the device's [free memory](spare) limit what is kept; with `off` nothing is kept or noted. Nothing is kept
//! either unless [a thread](look_after) calls [age], which returns blocks that are unused for a while.

mod ledger;
mod spare;

use std::collections::BTreeSet;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;

use crate::background::worker;
use crate::forward::device;
use windlass_base::config::config;
use windlass_base::config::nccl::{self, Effect};
use windlass_base::gpu::memory::{Room, granularity};
use windlass_base::gpu::pointer::Extent;
use windlass_base::gpu::{self, Address, Driver, Ordinal};
use windlass_base::lock::Mutex;
use windlass_base::range::Range;
use windlass_base::scoped::Counted;
use windlass_base::stats::count;
use windlass_base::stats::resources::Pooled;

pub(crate) use ledger::{Block, Over, Registration};
use ledger::{Given, PoolLedger, State};

/// Which block belongs to whom. Locked for some stores, never across calls of the driver or NCCL. Comes after every other lock.
static LEDGER: LazyLock<Mutex<PoolLedger>> = LazyLock::new(Mutex::default);
/// How many blocks the ledger has. Without any, no lookup is needed.
static KNOWN: AtomicUsize = AtomicUsize::new(0);
/// How many blocks are kept.
static KEPT: AtomicUsize = AtomicUsize::new(0);
static LEAVING: AtomicUsize = AtomicUsize::new(0);
/// How many threads look after kept blocks.
static LOOKED_AFTER_BY: AtomicUsize = AtomicUsize::new(0);

/// What the caller asks NCCL to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Making {
    /// The device whose memory it is.
    pub device: Ordinal,
    bytes: u64,
}

/// How a request for memory is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Supply {
    /// By NCCL, and the pool does not know the memory.
    Forward,
    /// By this kept block, which is handed out already.
    Recycled(Address),
    /// By NCCL, and the caller then calls [`made`].
    Make(Making),
}

/// What happens with memory that the program frees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Return {
    /// The pool does not know it: NCCL frees it, or reports an error.
    Forward,
    /// It has left the ledger, and the caller has NCCL free it.
    LetGo,
    /// It is kept. The caller has NCCL free these blocks, which left the pool for it.
    Kept(Vec<Address>),
    /// It was freed before.
    Refused,
}

/// Serves a request for this many bytes on the device that NCCL takes from this thread, where it has set that one.
pub(crate) fn allocate(bytes: usize, set: Option<Ordinal>) -> Supply {
    // Read first, because NCCL also reads the variable at this call, whatever the pool does.
    if nccl::at_allocation().has(Effect::NoCuMem) || config().pool_bytes_max == 0 || bytes == 0 || is_forked()
    {
        return Supply::Forward;
    }
    let Some((driver, device)) = current(set) else { return Supply::Forward };
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

/// Enters memory that NCCL has made for the program, if it is a block of the pool. It is none if NCCL got it from `cudaMalloc`
/// (NCCL_CUMEM_ENABLE=0), or rounds sizes in another way.
pub(crate) fn made(making: &Making, address: Address) {
    let Some(driver) = gpu::opened() else { return };
    let Some(said) = driver.attributes(address) else { return };
    let expected = Extent { base: address, bytes: making.bytes };
    if said.mapping != expected || said.device != making.device || !driver.is_mapped_by_handle(address) {
        return;
    }
    change(|ledger| ledger.enter(making.device, Range { base: address, bytes: making.bytes }, said.id));
}

/// Handles a free by the program.
pub(crate) fn free(address: Address) -> Return {
    if address == 0 || is_empty() {
        return Return::Forward;
    }
    let found = LEDGER.lock().find(address);
    match found {
        None => Return::Forward,
        Some((_, State::Kept | State::Leaving)) => refused(),
        // NCCL finds no mapping that begins there, and reports that.
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
        // Another thread has freed it.
        Given::NotHeld => refused(),
    }
}

fn refused() -> Return {
    count::pooled(Pooled::DoubleFrees, 1);
    Return::Refused
}

/// The pool's block at this address, whether the program holds it or not.
pub(crate) fn block_of(address: Address) -> Option<Block> {
    in_known(|ledger| ledger.find(address).map(|(block, _)| block))
}

/// Never hands this block out again. NCCL frees it at the next free; if it is kept now, it is [leaving].
pub(crate) fn taint(serial: u64) {
    if !is_empty() {
        change(|ledger| ledger.taint(serial));
    }
}

/// Taints all blocks of a device, or of every device: peers that still run may be writing to registered memory. Memory that NCCL has
/// freed stays with such peers alone.
pub(crate) fn distrust(device: Option<Ordinal>) {
    if !is_empty() {
        change(|ledger| ledger.taint_all(device));
    }
}

/// Taints all blocks in this range that the program holds.
pub(crate) fn taint_within(range: Range) {
    in_known(|ledger| ledger.taint_within(range))
}

/// Notes that the program has registered this memory with a communicator. A block that is freed while registered is not kept: NCCL
/// frees it, with the same consequences as without Windlass.
pub(crate) fn registered(range: Range, registration: Registration) {
    in_known(|ledger| ledger.register(range, registration))
}

/// The blocks registered by the latest call that returned this registration.
pub(crate) fn registered_by(registration: Registration) -> Vec<Range> {
    in_known(|ledger| ledger.registered_by(registration))
}

/// Notes that the program has ended that registration.
pub(crate) fn deregistered(registration: Registration) {
    in_known(|ledger| ledger.deregister(registration))
}

/// Notes how many windows of this block are live in NCCL. NCCL may free the block only when those that the program has ended are gone;
/// until then it is [leaving]. Windows that the program has still to end stay in NCCL, as without Windlass.
pub(crate) fn has_windows(serial: u64, over: Over) {
    in_known(|ledger| ledger.set_windows(serial, over))
}

/// How many bytes of freed memory may be kept on a device now, for a caller that would keep `more` bytes.
pub(crate) fn bytes_max(driver: &'static Driver, device: Ordinal, more: u64) -> u64 {
    if LOOKED_AFTER_BY.load(Ordering::Relaxed) == 0 {
        return 0;
    }
    let kept = LEDGER.lock().kept_on(device);
    config().pool_bytes_max.min(spare::bytes(driver, device, (kept, kept + more), now()))
}

/// Whether kept memory should go back to the device, given what the driver says is free there.
pub(crate) fn is_too_much(device: Ordinal, room: Room) -> bool {
    let kept = LEDGER.lock().kept_on(device);
    spare::said(device, room, kept, now()) < kept || is_short(room.free, room.total)
}

/// The blocks that leave once their windows are gone.
pub(crate) fn leaving() -> Vec<Block> {
    in_known(|ledger| ledger.leaving())
}

/// Whether any block is leaving.
pub(crate) fn is_any_leaving() -> bool {
    LEAVING.load(Ordering::Relaxed) > 0 && !is_forked()
}

/// Removes a [leaving] block whose windows are gone. The caller has NCCL free the result. None if another thread has removed the block
/// before.
#[must_use]
pub(crate) fn left(serial: u64) -> Option<Address> {
    if is_empty() { None } else { change(|ledger| ledger.leave(serial)) }
}

/// Removes all blocks that are kept on a device. The caller has NCCL free the result.
#[must_use]
pub(crate) fn trim(device: Ordinal) -> Vec<Address> {
    if !is_any_kept() {
        return Vec::new();
    }
    let gone = change(|ledger| ledger.trim(device));
    count::pooled(Pooled::Trimmed, gone.len() as u64);
    gone
}

/// Notes that the calling thread calls [`age`] repeatedly while the value lives.
pub(crate) fn look_after() -> Counted<'static> {
    Counted::by(&LOOKED_AFTER_BY)
}

/// Removes blocks that were kept unused for longer than this. The caller has NCCL free the result.
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

/// The devices on which blocks are kept.
pub(crate) fn devices() -> BTreeSet<Ordinal> {
    if is_any_kept() { LEDGER.lock().devices() } else { BTreeSet::new() }
}

/// Whether any block is kept.
pub(crate) fn is_any_kept() -> bool {
    KEPT.load(Ordering::Relaxed) > 0 && !is_forked()
}

/// Whether the ledger has no block.
fn is_empty() -> bool {
    KNOWN.load(Ordering::Relaxed) == 0 || is_forked()
}

/// Whether a device has so little free memory that kept blocks should go back: less than 2 % of its memory, or less than the smaller
/// of 1 GiB and an eighth of it.
fn is_short(free_bytes: u64, total_bytes: u64) -> bool {
    const ENOUGH: u64 = 1 << 30;
    free_bytes < (total_bytes / 50).max(ENOUGH.min(total_bytes / 8))
}

fn is_forked() -> bool {
    gpu::opened().is_some_and(Driver::is_in_forked_child)
}

fn current(set: Option<Ordinal>) -> Option<(&'static Driver, Ordinal)> {
    Some((gpu::driver().ok()?, device::of_allocation(set).ok()?))
}

/// The size of the block for a request: whole granules, determined by the request alone. Never a larger block: NCCL 2.28 maps
/// its own block's size from every peer, which would fail on one rank if blocks differed.
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

/// Whether the memory there still is the block's. A program that unmaps it by other means tells nobody.
fn is_still(driver: &Driver, block: &Block) -> bool {
    driver.buffer_id(block.base) == Some(block.buffer_id)
}

#[cold]
fn forget(block: &Block) {
    change(|ledger| ledger.forget(block));
    count::pooled(Pooled::Forgotten, 1);
    let Block { base, bytes, device, .. } = block;
    // At exit the driver may be gone before memory is freed, which needs no warning.
    let is_driver_there = gpu::opened().is_some_and(|driver| driver.has_primary_context(*device));
    if is_driver_there {
        log::warn!(
            "device {device}: {bytes} bytes of ncclMemAlloc at {base:#x} were unmapped by somebody else"
        );
    }
}

/// Changes the ledger, and updates the counters that are read without the lock.
fn change<T>(act: impl FnOnce(&mut PoolLedger) -> T) -> T {
    let mut ledger = LEDGER.lock();
    let done = act(&mut ledger);
    let now = ledger.sums();
    KNOWN.store(now.held_blocks + now.kept_blocks + now.leaving_blocks, Ordering::Relaxed);
    let before = [(&KEPT, now.kept_blocks), (&LEAVING, now.leaving_blocks)]
        .map(|(counter, blocks)| counter.swap(blocks, Ordering::Relaxed) == 0 && blocks > 0);
    if before.contains(&true) {
        worker::wake();
    }
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

/// What `act` finds in the ledger, or does there to what [`change`] does not count. Without any block it is not asked.
fn in_known<T: Default>(act: impl FnOnce(&mut PoolLedger) -> T) -> T {
    if is_empty() { T::default() } else { act(&mut LEDGER.lock()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// 2 % of a large device, 1 GiB of a medium one, an eighth of a small one.
    #[test]
    fn shortage() {
        let short = |free: u64, total: u64| is_short(free, total);
        assert!(short(2 * GIB, 141 * GIB) && !short(3 * GIB, 141 * GIB));
        assert!(short(GIB - 1, 16 * GIB) && !short(GIB, 16 * GIB));
        assert!(short(GIB / 8 - 1, GIB) && !short(GIB / 8, GIB));
    }
}
