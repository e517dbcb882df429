//! Windows: symmetric registrations that all ranks make together.

use crate::communicator::Communicator;
use crate::driver::driver;
use crate::exchange::{Note, WINDOW_REGISTER, exchange};
use crate::operation::Buffer;
use crate::refusal::{Outcome, lock, refuse};
use crate::registration::Range;
use crate::strict;
use nccl_sys::*;

const SYMMETRIC: i32 = 1;
/// NCCL_WIN_REQUIRED_ALIGNMENT, counted from the start of the allocation.
const ALIGNMENT_BYTES: usize = 4096;

#[derive(Clone, Copy, Debug)]
pub struct Window {
    pub range: Range,
    /// Equal on all ranks.
    number: u64,
    flags: i32,
    handle: usize,
}

#[derive(Default)]
pub struct Windows {
    entries: Vec<Window>,
    made: u64,
}

impl Windows {
    /// The window that holds `address`; NCCL looks at no more than a buffer's start.
    pub fn find(&self, address: usize) -> Option<Window> {
        let holds = |window: &&Window| {
            (window.range.address..window.range.address + window.range.bytes).contains(&address)
        };
        self.entries.iter().find(holds).copied()
    }

    /// The number of the symmetric window that holds `address`, and the offset in it in bytes.
    pub fn symmetric_place(&self, address: usize) -> Option<(u64, u64)> {
        let window = self.find(address).filter(|window| window.flags & SYMMETRIC != 0)?;
        Some((window.number, (address - window.range.address) as u64))
    }

    pub fn live(&self) -> impl Iterator<Item = &Range> {
        self.entries.iter().map(|window| &window.range)
    }
}

/// Registers a window with all ranks.
pub fn register(communicator: &Communicator, buffer: Buffer, flags: i32) -> Outcome<usize> {
    communicator.ensure_ready()?;
    let driver = driver()?;
    if !(buffer.address - driver.allocation(buffer.address)?.0).is_multiple_of(ALIGNMENT_BYTES) {
        return refuse(ncclInvalidArgument, "Window address must be suitably aligned.");
    }
    if !driver.is_virtual(buffer.address) {
        return refuse(
            ncclUnhandledCudaError,
            "Cuda failure in cuMemRetainAllocationHandle: no memory for windows",
        );
    }
    let range = Range::new(buffer.address, buffer.bytes)?;
    if communicator.ranks > 1 {
        let (segment, rank) = (communicator.segment(), communicator.rank);
        let values = [buffer.bytes as i64, flags.into(), 0, 0];
        let Ok(notes) = exchange(segment, rank, Note { kind: WINDOW_REGISTER, values }, &communicator.leave)
        else {
            return refuse(ncclInternalError, "aborted in ncclCommWindowRegister");
        };
        if notes.iter().any(|note| note.values[..2] != values[..2]) {
            let lines: Vec<String> =
                std::iter::once("window registered with unequal sizes or flags".to_owned())
                    .chain((0..communicator.ranks).map(|peer| {
                        let [bytes, flags, ..] = notes[peer].values;
                        format!("  rank {peer}: ncclCommWindowRegister of {bytes} bytes, flags {flags:#x}")
                    }))
                    .collect();
            strict::fail(segment, rank, &lines);
        }
    }
    let mut windows = lock(&communicator.windows);
    windows.made += 1;
    let number = windows.made;
    let handle = (number as usize) << 4 | 3;
    windows.entries.push(Window { range, number, flags, handle });
    Ok(handle)
}

pub fn deregister(communicator: &Communicator, handle: usize) -> Outcome {
    if handle == 0 {
        return Ok(());
    }
    let entries = &mut lock(&communicator.windows).entries;
    let Some(index) = entries.iter().position(|window| window.handle == handle) else {
        return refuse(ncclInvalidUsage, "ncclCommWindowDeregister: unknown window");
    };
    entries.remove(index);
    Ok(())
}
