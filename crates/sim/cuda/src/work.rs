//! The work of streams and graph nodes as plain data: the same description runs on a stream or becomes a node of a capture.

use crate::clock;
use crate::conditional::Branch;
use crate::device::Ordinal;
use crate::event::{Event, Recording};
use crate::guard;
use crate::mapping::PAGE;
use crate::module::Launch;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// `CUhostFn`.
pub type HostFunction = unsafe extern "C" fn(*mut c_void);

#[derive(Clone)]
pub enum Work {
    Empty,
    Kernel(Arc<Launch>),
    Copy(Copy),
    Fill(Fill),
    Host {
        function: HostFunction,
        data: usize,
    },
    /// A kernel of the simulated NCCL: a host function that counts as a kernel.
    Device {
        function: HostFunction,
        data: usize,
        device: Ordinal,
        /// What the kernel does, for the modelled clock.
        work: Option<clock::Work>,
    },
    Memory(Vec<MemoryOperation>),
    RecordEvent(Arc<Event>),
    WaitEvent(Arc<Event>),
    /// A conditional node. Only executable graphs have this work.
    Branch(Arc<Branch>),
}

/// A copy of a box of bytes, row by row and slice by slice. Addresses are numbers, so that it can go to a stream's thread.
#[derive(Clone, Copy, Debug, Default)]
pub struct Copy {
    pub source: usize,
    pub source_pitch: usize,
    pub source_slice: usize,
    pub destination: usize,
    pub destination_pitch: usize,
    pub destination_slice: usize,
    pub width: usize,
    pub height: usize,
    pub depth: usize,
}

/// A fill of rows with equal elements of 1, 2 or 4 bytes; `pitch` is in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Fill {
    pub destination: usize,
    pub pitch: usize,
    pub value: u32,
    pub element_bytes: usize,
    /// In elements.
    pub width: usize,
    pub height: usize,
}

#[derive(Clone, Copy, Debug)]
pub enum MemoryOperation {
    Wait { address: usize, value: u64, comparison: u32, bits: u32 },
    Write { address: usize, value: u64, bits: u32 },
    Barrier,
}

/// `CUstreamWaitValue_flags` without the flush bit.
pub const WAIT_GREATER_OR_EQUAL: u32 = 0;
pub const WAIT_EQUAL: u32 = 1;
pub const WAIT_AND: u32 = 2;
pub const WAIT_NOR: u32 = 3;

impl Copy {
    pub fn linear(destination: usize, source: usize, bytes: usize) -> Self {
        Copy { source, destination, width: bytes, height: 1, depth: 1, ..Copy::default() }
    }

    fn run(&self) {
        for slice in 0..self.depth {
            for row in 0..self.height {
                let from = self.source + slice * self.source_slice + row * self.source_pitch;
                let to = self.destination + slice * self.destination_slice + row * self.destination_pitch;
                // SAFETY: the application vouches for both ranges, as it does to a GPU; a bad one faults. They may
                // overlap or be shared with other processes, so this is `memmove` and never a Rust reference.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, self.width) };
            }
        }
    }
}

/// From so many bytes on, a fill with zeros skips pages that the system has not made yet.
const WORTH_ASKING: usize = 64 << 10;
/// Pages of one `mincore` call.
const ASKED_AT_ONCE: usize = 1024;

impl Fill {
    fn run(&self) {
        for row in 0..self.height {
            let start = self.destination + row * self.pitch;
            let bytes = self.width * self.element_bytes;
            if self.value == 0 && bytes >= WORTH_ASKING { clear(start, bytes) } else { self.write(start) }
        }
    }

    /// Fills the row at `start`.
    fn write(&self, start: usize) {
        // SAFETY: the application vouches for the range and its alignment, as it does to a GPU.
        unsafe {
            match self.element_bytes {
                1 => (start as *mut u8).write_bytes(self.value as u8, self.width),
                2 => (0..self.width).for_each(|at| (start as *mut u16).add(at).write(self.value as u16)),
                _ => (0..self.width).for_each(|at| (start as *mut u32).add(at).write(self.value)),
            }
        }
    }
}

/// Zeros a range, but leaves pages alone that were never touched. Most of a cleared buffer is never used, and making a page takes the
/// system longer than writing it.
fn clear(start: usize, bytes: usize) {
    let write = |from: usize, to: usize| {
        // SAFETY: the application vouches for the range, as it does to a GPU.
        unsafe { (from as *mut u8).write_bytes(0, to - from) }
    };
    let (first, end) = (start.next_multiple_of(PAGE), (start + bytes) / PAGE * PAGE);
    write(start, first);
    let mut there = [0_u8; ASKED_AT_ONCE];
    let mut at = first;
    while at < end {
        let pages = ((end - at) / PAGE).min(ASKED_AT_ONCE);
        // SAFETY: room for a byte of each page.
        let asked = unsafe { libc::mincore(at as *mut c_void, pages * PAGE, there.as_mut_ptr()) };
        let is_there = |page: usize| asked != 0 || there[page] & 1 != 0;
        let mut page = 0;
        while page < pages {
            let kind = is_there(page);
            let next = (page..pages).find(|&page| is_there(page) != kind).unwrap_or(pages);
            let (from, to) = (at + page * PAGE, at + next * PAGE);
            // A page that is not resident may have been swapped out, so the range is emptied; that costs nothing where no page was made.
            // The system refuses this for memory without a file, which is written.
            // SAFETY: as for writing zeros, which is what is read afterwards.
            if kind || unsafe { libc::madvise(from as *mut c_void, to - from, libc::MADV_REMOVE) } != 0 {
                write(from, to);
            }
            page = next;
        }
        at += pages * PAGE;
    }
    write(end, start + bytes);
}

impl MemoryOperation {
    fn run(&self) {
        match *self {
            MemoryOperation::Barrier => std::sync::atomic::fence(Ordering::SeqCst),
            MemoryOperation::Write { address, value, bits: 32 } => {
                word32(address).store(value as u32, Ordering::Release);
            }
            MemoryOperation::Write { address, value, .. } => word64(address).store(value, Ordering::Release),
            MemoryOperation::Wait { address, value, comparison, bits } => {
                let mut polls = 0_u32;
                while !satisfied(load(address, bits), value, comparison, bits) {
                    pause(&mut polls);
                }
            }
        }
    }
}

/// Yields for the first 63 polls, then sleeps: simulated GPUs share few cores.
fn pause(polls: &mut u32) {
    *polls = polls.saturating_add(1);
    if *polls < 64 {
        std::thread::yield_now();
    } else {
        std::thread::sleep(Duration::from_micros(50));
    }
}

fn load(address: usize, bits: u32) -> u64 {
    if bits == 32 {
        u64::from(word32(address).load(Ordering::Acquire))
    } else {
        word64(address).load(Ordering::Acquire)
    }
}

/// Whether a wait for a value ends. "Greater or equal" is cyclic: the sign of the difference decides, as the driver documents.
fn satisfied(found: u64, value: u64, comparison: u32, bits: u32) -> bool {
    let mask = if bits == 32 { u64::from(u32::MAX) } else { u64::MAX };
    match comparison {
        WAIT_GREATER_OR_EQUAL if bits == 32 => (found as u32).wrapping_sub(value as u32) as i32 >= 0,
        WAIT_GREATER_OR_EQUAL => found.wrapping_sub(value) as i64 >= 0,
        WAIT_EQUAL => found == value & mask,
        WAIT_AND => found & value != 0,
        _ => !(found | value) & mask != 0,
    }
}

fn word32(address: usize) -> &'static AtomicU32 {
    // SAFETY: checked to be aligned and known memory when it was issued; freed memory under a pending wait faults.
    unsafe { &*(address as *const AtomicU32) }
}

fn word64(address: usize) -> &'static AtomicU64 {
    // SAFETY: as in `word32`.
    unsafe { &*(address as *const AtomicU64) }
}

fn call(function: HostFunction, data: usize) {
    guard::forbidding_calls(|| {
        // SAFETY: the application passed this function for being called with this pointer on another thread.
        unsafe { function(data as *mut c_void) }
    });
}

impl Work {
    /// Runs the work on this thread; waits as the work does. `recording` is that which an event operation completes or waits for, taken
    /// when the work was issued.
    pub fn run(&self, recording: Option<&Recording>) {
        match self {
            Work::Empty => {}
            Work::Kernel(launch) => launch.run(),
            Work::Copy(copy) => copy.run(),
            Work::Fill(fill) => fill.run(),
            Work::Host { function, data } => call(*function, *data),
            Work::Device { function, data, device, work } => {
                call(*function, *data);
                work.iter().for_each(|work| clock::pass(*device, work));
            }
            Work::Memory(operations) => operations.iter().for_each(MemoryOperation::run),
            Work::RecordEvent(_) => recording.into_iter().for_each(Recording::complete),
            Work::WaitEvent(_) => recording.into_iter().for_each(Recording::wait),
            Work::Branch(branch) => branch.run(),
        }
    }

    /// `CUgraphNodeType`.
    pub fn node_type(&self) -> u32 {
        match self {
            Work::Kernel(_) | Work::Device { .. } => 0,
            Work::Copy(_) => 1,
            Work::Fill(_) => 2,
            Work::Host { .. } => 3,
            Work::Empty => 5,
            Work::WaitEvent(_) => 6,
            Work::RecordEvent(_) => 7,
            Work::Memory(_) => 12,
            Work::Branch(_) => 13,
        }
    }
}
