//! The communicators of one side that are beside its measured one: idle, or at work while that side's batches are timed.
//!
//! How busy the busy ones are: a burst is a CUDA graph of [`BURST_CALLS`] all-reduces of 16 KiB, one after the other, captured once for
//! each. Before a batch as many bursts as outlast it are put on each one's stream, then the batch on its own: a busy communicator
//! always has a call that runs and others that wait, from before the batch's first call to after its last, and the host does
//! nothing for them while it issues what is timed. Calls issued one by one between the timed ones would cost the host more than
//! these, and so be in their times; they would also be counted as the measured function's.
//!
//! All ranks put the same number of bursts, which they have agreed on, on the same streams in the same order, bursts before the
//! batch. So whatever a rank waits for, on its host or on its device, is put out by every rank before it waits for the same or a
//! later thing: nothing waits in a circle, although NCCL keeps no order between communicators. The device must have room for the blocks of
//! all at once, hence the limit of `--busy`.

use super::company::Company;
use super::worker::{Job, communicator};
use crate::element::{SUM, element};
use crate::gpu::{Buffer, Event, Gpu, Graph, Stream};
use crate::nccl::{Nccl, nccl_call};
use crate::ranks::Channel;
use anyhow::{Context, Result};
use nccl_sys::types::{ncclComm_t, ncclFloat32};

/// Of a busy communicator's all-reduce.
const BUSY_BYTES: usize = 16 << 10;
/// All-reduces of a burst: half a millisecond and more, many times what launching it costs.
const BURST_CALLS: usize = 128;
/// On the simulator, whose calls are slow and whose times say nothing.
const BURST_CALLS_SIMULATED: usize = 4;

/// Of one side.
pub struct Companions {
    idle: Vec<ncclComm_t>,
    busy: Vec<Busy>,
}

struct Busy {
    /// Goes before the communicator that its calls are of.
    burst: Graph,
    communicator: ncclComm_t,
    stream: Stream,
    /// After the last burst.
    over: Event,
    /// In use by the burst.
    _buffer: Buffer,
}

impl Companions {
    /// Makes them, all ranks together. Each has run an all-reduce, so that nothing is set up or loaded later.
    pub fn new(channel: &mut Channel, gpu: &Gpu, nccl: &Nccl, name: &str, job: &Job) -> Result<Self> {
        let Company { beside, busy } = job.company;
        let stream = gpu.stream()?;
        let scratch = gpu.buffer(size_of::<f32>())?;
        let mut make = |kind: &str, number: u32, of: u32| {
            let made = communicator(channel, nccl, job).and_then(|communicator| {
                all_reduce(nccl, communicator, &scratch, &stream)?;
                stream.synchronize()?;
                Ok(communicator)
            });
            made.with_context(|| format!("{name}'s {kind} communicator {number} of {of} cannot be made"))
        };
        let idle = (1..=beside).map(|number| make("idle", number, beside)).collect::<Result<_>>()?;
        let calls = if job.simulated { BURST_CALLS_SIMULATED } else { BURST_CALLS };
        let busy = (1..=busy).map(|number| Busy::new(gpu, nccl, make("busy", number, busy)?, calls));
        Ok(Self { idle, busy: busy.collect::<Result<_>>()? })
    }

    /// Bursts of each to begin with, before it is known how many a batch needs: none if nobody is busy.
    pub fn bursts_first(&self) -> usize {
        usize::from(!self.busy.is_empty())
    }

    /// Puts the busy ones to work, in turn; all ranks with the same number.
    pub fn begin(&self, bursts: usize) -> Result<()> {
        for _ in 0..bursts {
            self.busy.iter().try_for_each(|busy| busy.burst.launch(&busy.stream))?;
        }
        self.busy.iter().try_for_each(|busy| busy.over.record(&busy.stream))
    }

    /// Waits until their work is over, and says how many microseconds after `start` the first of them had none; none if nobody is busy.
    pub fn end(&self, start: &Event) -> Result<Option<f64>> {
        let mut lasted_us: Option<f64> = None;
        for busy in &self.busy {
            busy.stream.synchronize()?;
            let us = busy.over.us_since(start)?;
            lasted_us = Some(lasted_us.map_or(us, |least| least.min(us)));
        }
        Ok(lasted_us)
    }

    pub fn destroy(self, nccl: &Nccl) -> Result<()> {
        for Busy { burst, communicator, stream, .. } in self.busy {
            stream.synchronize()?;
            drop(burst);
            nccl_call!(nccl, ncclCommDestroy(communicator))?;
        }
        self.idle.into_iter().try_for_each(|communicator| nccl_call!(nccl, ncclCommDestroy(communicator)))
    }
}

impl Busy {
    fn new(gpu: &Gpu, nccl: &Nccl, communicator: ncclComm_t, calls: usize) -> Result<Self> {
        let (stream, over, buffer) = (gpu.stream()?, gpu.event()?, gpu.buffer(BUSY_BYTES)?);
        buffer.upload(&stream, &[0; BUSY_BYTES])?;
        // By itself first: what loads or connects at a first call of that size must not meet calls that wait for their peers.
        all_reduce(nccl, communicator, &buffer, &stream)?;
        stream.synchronize()?;
        stream.begin_capture()?;
        let issued = (0..calls).try_for_each(|_| all_reduce(nccl, communicator, &buffer, &stream));
        let burst = stream.end_capture();
        issued?;
        let burst = burst?;
        // A graph's first launch uploads it.
        burst.launch(&stream)?;
        stream.synchronize()?;
        Ok(Self { burst, communicator, stream, over, _buffer: buffer })
    }
}

/// In place, of all floats of a buffer.
fn all_reduce(nccl: &Nccl, communicator: ncclComm_t, buffer: &Buffer, stream: &Stream) -> Result<()> {
    let (at, count, kind) = (buffer.at(0), buffer.bytes() / size_of::<f32>(), element(ncclFloat32).code);
    nccl_call!(nccl, ncclAllReduce(at, at, count, kind, SUM.code, communicator, stream.as_nccl()))
}
