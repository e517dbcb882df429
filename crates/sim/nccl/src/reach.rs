//! What a window's handle points to, and the ranks' memory that device code finds by it: the allocations of all ranks, mapped into
//! this process side by side. All ranks are on one host: one team for loads and stores.

use crate::communicator::Communicator;
use crate::driver::{Mapping, Space, driver};
use crate::import;
use crate::refusal::{Outcome, refuse};
use nccl_sys::ncclSystemError;
use std::fs::OpenOptions;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;

const STRIDE_UNIT_BYTES: usize = 4 << 30;

/// `ncclWindow_vidmem` as far as it is the same from 2.28.3 to 2.30.7.
#[repr(C)]
struct Record {
    /// NCCL's own, and nobody else's to follow.
    host: usize,
    lsa_flat_base: usize,
    lsa_rank: i32,
    world_rank: i32,
    stride_4g: u32,
}

/// One rank's allocation, in rank order: its descriptor in the rank's process, and its size in bytes.
#[derive(Clone, Copy)]
pub struct Exported {
    pub descriptor: i32,
    pub bytes: usize,
}

/// Holds mappings of the allocations of all ranks, and the handle's record.
pub struct Reach {
    space: Option<Space>,
    record: Mapping,
}

impl Reach {
    /// Maps what the ranks have exported, which they keep open meanwhile. `offset` is where the window begins in this rank's
    /// allocation.
    ///
    /// As in NCCL each rank counts with its own offset: where the ranks' differ, it finds a peer's memory that far from the
    /// start of the peer's allocation, which is not the peer's window.
    pub fn new(communicator: &Communicator, exported: &[Exported], offset: usize) -> Outcome<Reach> {
        let driver = driver()?;
        let largest = exported.iter().map(|one| one.bytes).max().unwrap_or(0);
        let stride = largest.next_multiple_of(STRIDE_UNIT_BYTES);
        let record = driver.allocate_private(size_of::<Record>(), next_hint(), communicator.device)?;
        let handle = record.at;
        let mut reach = Reach { space: None, record };
        let space = reach.space.insert(driver.reserve_space(exported.len() * stride)?);
        for (rank, one) in exported.iter().enumerate() {
            let file = open(communicator.segment().rank(rank).process.load(SeqCst), one.descriptor)?;
            let at = space.at + rank * stride;
            driver.map_shared(space, at, one.bytes, &file, communicator.device)?;
        }
        let record = Record {
            host: handle,
            lsa_flat_base: space.at + offset,
            lsa_rank: communicator.rank as i32,
            world_rank: communicator.rank as i32,
            stride_4g: (stride / STRIDE_UNIT_BYTES) as u32,
        };
        // SAFETY: the record's memory is mapped for writing, large enough and aligned to pages; nobody knows of it yet.
        unsafe { (handle as *mut Record).write(record) };
        Ok(reach)
    }

    pub fn handle(&self) -> usize {
        self.record.at
    }
}

impl Drop for Reach {
    fn drop(&mut self) {
        let (space, record) = (self.space.take(), self.record);
        import::unmap(move |driver| {
            space.iter().for_each(|space| driver.free_space(space));
            driver.unmap(record);
        });
    }
}

/// Where the next record should be: not where one was, so that late uses of its handle are found out.
// Divergence: NCCL's records come from a pool in device memory, where addresses come again.
fn next_hint() -> usize {
    const FIRST: usize = 16 << 40;
    /// More than the record and the pages around it.
    const STEP_BYTES: usize = 16 << 20;
    static NEXT: AtomicUsize = AtomicUsize::new(FIRST);
    NEXT.fetch_add(STEP_BYTES, SeqCst)
}

/// Opens another process's file, or one of this process's, as legacy IPC of the simulated driver does.
fn open(process: i32, descriptor: i32) -> Outcome<OwnedFd> {
    let path = format!("/proc/{process}/fd/{descriptor}");
    match OpenOptions::new().read(true).write(true).open(&path) {
        Ok(file) => Ok(file.into()),
        Err(error) => refuse(ncclSystemError, format!("{path}: {error}")),
    }
}
