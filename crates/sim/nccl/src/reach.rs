//! The record that a window's handle points to, and the mappings that device code finds through it: the allocations of all ranks, side by
//! side in this process. All ranks are on one host, so they are one team for loads and stores.

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
    /// A pointer of NCCL's own, which no other code may follow.
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

/// The mappings of the allocations of all ranks, and the handle's record. They are unmapped when dropped.
pub struct Reach {
    space: Option<Space>,
    record: Mapping,
}

impl Reach {
    /// Maps the allocations of all ranks, which keep their descriptors open meanwhile. `offset` is the start of the window in this
    /// rank's allocation, in bytes.
    ///
    /// As in NCCL each rank uses its own offset for all ranks. If the offsets differ, it finds memory of a peer that is not the peer's
    /// window.
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

/// The address for the next record. It is never used twice, so that use of a handle after its end is detected.
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
