//! Windows: memory that all ranks register together.

use crate::communicator::Communicator;
use crate::driver::driver;
use crate::exchange::{FIRST_WINDOW, Note, WINDOW_MAPPED, WINDOW_REGISTER, exchange};
use crate::legacy;
use crate::operation::Buffer;
use crate::reach::{Exported, Reach};
use crate::refusal::{Outcome, lock, refuse};
use crate::registration::Range;
use crate::settings::settings;
use crate::strict;
use nccl_sys::*;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

const SYMMETRIC: i32 = 1;
/// NCCL_WIN_REQUIRED_ALIGNMENT, counted from the start of the allocation.
const ALIGNMENT_BYTES: usize = 4096;

/// A registered window. It keeps its memory, also after `ncclMemFree`, as the peers' mappings in NCCL do.
pub struct Window {
    pub range: Range,
    /// Equal on all ranks.
    number: u64,
    flags: i32,
    handle: usize,
    allocation: usize,
    /// Eager operations that were issued and have not ended on this rank.
    in_flight: AtomicU64,
    _reach: Reach,
}

impl Window {
    /// Ends the process if an operation still uses the window, whose mappings and record are about to go.
    fn check_idle(&self, communicator: &Communicator) {
        let uses = self.in_flight.load(SeqCst);
        if uses > 0 && strict::enabled() && !communicator.leave.load(SeqCst) {
            let Range { address, bytes, .. } = self.range;
            let line = format!(
                "ncclCommWindowDeregister of {bytes} bytes at {address:#x} while {uses} buffers of operations in flight lie in it"
            );
            strict::fail(communicator.segment(), communicator.rank, &[line]);
        }
    }
}

/// An operation's use of a window, from its issue to its end on this rank.
pub struct Use(Arc<Window>);

impl Use {
    pub fn new(window: &Arc<Window>) -> Use {
        window.in_flight.fetch_add(1, SeqCst);
        Use(window.clone())
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, SeqCst);
    }
}

#[derive(Default)]
pub struct Windows {
    entries: Vec<Arc<Window>>,
    made: u64,
    /// Whether a symmetric window was ever requested.
    is_begun: bool,
}

impl Windows {
    /// The window that holds `address`. NCCL, too, looks at a buffer's start only.
    pub fn find(&self, address: usize) -> Option<&Arc<Window>> {
        let holds = |window: &&Arc<Window>| {
            (window.range.address..window.range.address + window.range.bytes).contains(&address)
        };
        self.entries.iter().find(holds)
    }

    /// The number of the symmetric window that holds `address`, and the offset in it in bytes.
    pub fn symmetric_place(&self, address: usize) -> Option<(u64, u64)> {
        let window = self.find(address).filter(|window| window.flags & SYMMETRIC != 0)?;
        Some((window.number, (address - window.range.address) as u64))
    }

    pub fn live(&self) -> impl Iterator<Item = &Range> {
        self.entries.iter().map(|window| &window.range)
    }

    /// How many windows were ever made.
    pub fn made(&self) -> u64 {
        self.made
    }
}

/// From this release on a registration maps an allocation again that has a window already. Before, a rank with such an allocation skips
/// the exchange for which other ranks wait.
const MAPS_ANEW_SINCE: i32 = 23_003;
/// The first release that maps allocations of different sizes on different ranks.
const UNLIKE_SINCE: i32 = 23_007;

/// Prepares NCCL's symmetric kernels at the first request of a symmetric window. All ranks do this together, before any of them checks
/// its arguments (2.28.9, ncclSymkInitOnce).
fn begin(communicator: &Communicator, flags: i32) -> Outcome {
    if flags & SYMMETRIC == 0 || communicator.ranks == 1 {
        return Ok(());
    }
    if std::mem::replace(&mut lock(&communicator.windows).is_begun, true) {
        return Ok(());
    }
    let note = Note { kind: FIRST_WINDOW, values: [0; 5] };
    match exchange(communicator.segment(), communicator.rank, note, &communicator.leave) {
        Ok(_) => Ok(()),
        Err(_) => refuse(ncclInternalError, "aborted in ncclCommWindowRegister"),
    }
}

/// Registers a window together with all ranks, waits for them, and gives its handle: 0 if cuMem is off.
pub fn register(communicator: &Communicator, buffer: Buffer, flags: i32) -> Outcome<usize> {
    communicator.ensure_ready()?;
    // The answer of 2.30.7.
    if !legacy::cu_mem() {
        return Ok(0);
    }
    begin(communicator, flags)?;
    let driver = driver()?;
    let (allocation, allocated) = driver.allocation(buffer.address)?;
    if !(buffer.address - allocation).is_multiple_of(ALIGNMENT_BYTES) {
        return refuse(ncclInvalidArgument, "Window address must be suitably aligned.");
    }
    if !driver.is_virtual(buffer.address) {
        return refuse(
            ncclUnhandledCudaError,
            "Cuda failure in cuMemRetainAllocationHandle: no memory for windows",
        );
    }
    let range = Range::new(buffer.address, buffer.bytes)?;
    let reach = reach(communicator, buffer, flags, (allocation, allocated))?;
    let handle = reach.handle();
    let mut windows = lock(&communicator.windows);
    windows.made += 1;
    let number = windows.made;
    windows.entries.push(Arc::new(Window {
        range,
        number,
        flags,
        handle,
        allocation,
        in_flight: AtomicU64::new(0),
        _reach: reach,
    }));
    Ok(handle)
}

/// Exchanges descriptors with all ranks, and maps their allocations.
fn reach(
    communicator: &Communicator,
    buffer: Buffer,
    flags: i32,
    (allocation, allocated): (usize, usize),
) -> Outcome<Reach> {
    let exported = driver()?.export(allocation)?;
    let is_known = lock(&communicator.windows).entries.iter().any(|one| one.allocation == allocation);
    let descriptor = exported.as_raw_fd().into();
    let values = [buffer.bytes as i64, flags.into(), allocated as i64, is_known.into(), descriptor];
    let meet = |kind, values| {
        let note = Note { kind, values };
        if communicator.ranks == 1 {
            return Ok(vec![note]);
        }
        exchange(communicator.segment(), communicator.rank, note, &communicator.leave)
            .or_else(|_| refuse(ncclInternalError, "aborted in ncclCommWindowRegister"))
    };
    let notes = meet(WINDOW_REGISTER, values)?;
    compare(communicator, &notes);
    let exports: Vec<Exported> = notes
        .iter()
        .map(|note| Exported { descriptor: note.values[4] as i32, bytes: note.values[2] as usize })
        .collect();
    let reach = Reach::new(communicator, &exports, buffer.address - allocation);
    // This rank's descriptor stays open until all ranks have opened it.
    meet(WINDOW_MAPPED, [0; 5])?;
    reach
}

/// Ends the process if the ranks' arguments differ so that NCCL would hang or corrupt memory.
fn compare(communicator: &Communicator, notes: &[Note]) {
    let differ = |of: usize| notes.iter().any(|note| note.values[of] != notes[0].values[of]);
    let version = settings().version;
    let complaint = if differ(0) || differ(1) {
        "window registered with unequal sizes or flags"
    } else if version < UNLIKE_SINCE && differ(2) {
        "window registered of unequal allocations"
    } else if version < MAPS_ANEW_SINCE && differ(3) {
        "window registered of allocations that have one on some ranks only, which skip the exchange"
    } else {
        return;
    };
    let lines: Vec<String> =
        std::iter::once(complaint.to_owned())
            .chain((0..communicator.ranks).map(|peer| {
                let [bytes, flags, allocated, is_known, _] = notes[peer].values;
                let known = if is_known == 0 { "" } else { ", which has a window" };
                format!("  rank {peer}: ncclCommWindowRegister of {bytes} bytes, flags {flags:#x}, of an allocation of {allocated} bytes{known}")
            }))
            .collect();
    strict::fail(communicator.segment(), communicator.rank, &lines);
}

pub fn deregister(communicator: &Communicator, handle: usize) -> Outcome {
    if handle == 0 {
        return Ok(());
    }
    if communicator.finalized.load(SeqCst) && !communicator.leave.load(SeqCst) && strict::enabled() {
        let line = "ncclCommWindowDeregister of a communicator that was finalized: the threads that it asks have ended";
        strict::fail(communicator.segment(), communicator.rank, &[line.to_owned()]);
    }
    let mut windows = lock(&communicator.windows);
    let Some(index) = windows.entries.iter().position(|window| window.handle == handle) else {
        return refuse(ncclInternalError, "ncclCommWindowDeregister: unknown window");
    };
    let window = windows.entries.remove(index);
    let start = window.range.address;
    let is_double = windows.entries.iter().any(|other| other.range.address == start);
    drop(windows);
    if is_double && strict::enabled() {
        let line = format!(
            "ncclCommWindowDeregister of one of two windows at {start:#x}: NCCL 2.28.9 forgets the later one and frees the other's record"
        );
        strict::fail(communicator.segment(), communicator.rank, &[line]);
    }
    window.check_idle(communicator);
    Ok(())
}
