//! Times blocks, windows and cycles of one side.

use super::super::memory::NCCL_WIN_COLL_SYMMETRIC;
use super::super::worker::{Job, communicator};
use crate::gpu::{Buffer, Gpu, Stream};
use crate::nccl::{Nccl, nccl_call};
use crate::ranks::Channel;
use anyhow::{Context, Result, bail};
use nccl_sys::types::{ncclComm_t, ncclFloat32, ncclSum, ncclUint8, ncclWindow_t};
use std::ffi::c_void;
use std::time::Instant;

/// A library and a communicator, which lives while the side is measured: without one Windlass keeps no memory.
pub struct Side<'a> {
    nccl: &'a Nccl,
    communicator: ncclComm_t,
    stream: Stream,
    scratch: Buffer,
    rank: usize,
    ranks: usize,
}

impl<'a> Side<'a> {
    pub fn new(channel: &mut Channel, gpu: &Gpu, nccl: &'a Nccl, job: &Job) -> Result<Self> {
        let (stream, scratch) = (gpu.stream()?, gpu.buffer(4)?);
        let communicator = communicator(channel, nccl, job)?;
        Ok(Self { nccl, communicator, stream, scratch, rank: job.rank, ranks: job.ranks })
    }

    pub fn destroy(&self) -> Result<()> {
        nccl_call!(self.nccl, ncclCommDestroy(self.communicator))
    }

    /// Waits until the devices of all ranks have met in an all-reduce.
    pub fn line_up(&self) -> Result<()> {
        let (at, stream) = (self.scratch.at(0), self.stream.as_nccl());
        nccl_call!(self.nccl, ncclAllReduce(at, at, 1, ncclFloat32, ncclSum, self.communicator, stream))?;
        self.stream.synchronize()
    }

    /// Microseconds to allocate, to free, and of both.
    pub fn block(&self, bytes: usize) -> Result<Vec<f64>> {
        let (block, allocated_us) = timed(|| self.allocate(bytes))?;
        let ((), freed_us) = timed(|| self.free(block))?;
        Ok(vec![allocated_us, freed_us, allocated_us + freed_us])
    }

    /// Microseconds to register, which all ranks begin together, and to deregister.
    pub fn window(&self, bytes: usize) -> Result<Vec<f64>> {
        let block = self.allocate(bytes)?;
        self.line_up()?;
        let (window, registered_us) = timed(|| self.register(block, bytes))?;
        let ((), deregistered_us) = timed(|| self.deregister(window))?;
        self.free(block)?;
        Ok(vec![registered_us, deregistered_us])
    }

    /// Microseconds of a whole cycle.
    pub fn cycle(&self, bytes: usize) -> Result<Vec<f64>> {
        let ((), us) = timed(|| {
            let block = self.allocate(bytes)?;
            let window = self.register(block, bytes)?;
            self.all_gather(block, bytes)?;
            self.stream.synchronize()?;
            self.deregister(window)?;
            self.free(block)
        })?;
        Ok(vec![us])
    }

    fn allocate(&self, bytes: usize) -> Result<*mut c_void> {
        let mut block = std::ptr::null_mut();
        nccl_call!(self.nccl, ncclMemAlloc(&mut block, bytes))
            .with_context(|| format!("cannot allocate {bytes} bytes of NCCL's memory"))?;
        Ok(block)
    }

    fn free(&self, block: *mut c_void) -> Result<()> {
        nccl_call!(self.nccl, ncclMemFree(block))
    }

    fn register(&self, block: *mut c_void, bytes: usize) -> Result<ncclWindow_t> {
        let (communicator, mut window) = (self.communicator, std::ptr::null_mut());
        let flags = NCCL_WIN_COLL_SYMMETRIC;
        nccl_call!(self.nccl, ncclCommWindowRegister(communicator, block, bytes, &mut window, flags))
            .with_context(|| format!("cannot register {bytes} bytes as a window"))?;
        if window.is_null() {
            bail!(
                "ncclCommWindowRegister made no window: NCCL has none here (NCCL_WIN_ENABLE, NCCL_CUMEM_ENABLE)"
            );
        }
        Ok(window)
    }

    fn deregister(&self, window: ncclWindow_t) -> Result<()> {
        nccl_call!(self.nccl, ncclCommWindowDeregister(self.communicator, window))
    }

    /// An all-gather in place, over the whole block.
    fn all_gather(&self, block: *mut c_void, bytes: usize) -> Result<()> {
        let share = bytes / self.ranks;
        let own = block.wrapping_byte_add(self.rank * share);
        let stream = self.stream.as_nccl();
        nccl_call!(self.nccl, ncclAllGather(own, block, share, ncclUint8, self.communicator, stream))
    }
}

/// The result of `act`, and its microseconds.
fn timed<T>(act: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let began = Instant::now();
    let given = act()?;
    Ok((given, began.elapsed().as_nanos() as f64 / 1e3))
}
