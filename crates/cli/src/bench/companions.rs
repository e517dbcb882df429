//! The communicators of one side beside the measured one: idle ones, and busy ones that work while the side's batches
//! are timed.
//!
//! A burst is a CUDA graph of [`BURST_CALLS`] all-reduces of 16 KiB in sequence. Before a batch, each busy communicator's stream gets
//! as many bursts as outlast the batch. So it always has a running call and waiting ones, and the host does nothing for it while it
//! issues the timed calls. Calls issued between the timed ones would add host time, and would count as calls of the measured function.
//!
//! All ranks launch the same agreed number of bursts, on the same streams in the same order, before the batch. So every rank launches
//! what others wait for before it waits for the same or a later operation: there is no deadlock, although NCCL keeps no order between
//! communicators. The device must have room for the blocks of all kernels at once, hence the limit of `--busy`.

use super::company::Company;
use super::worker::{Job, communicator};
use crate::element::{SUM, element};
use crate::gpu::{self, Buffer, Event, Gpu, Graph, Stream};
use crate::nccl::{Nccl, nccl_call};
use crate::ranks::Channel;
use anyhow::{Context, Result};
use nccl_sys::types::{ncclComm_t, ncclFloat32};

/// Bytes of a busy communicator's all-reduce.
const BUSY_BYTES: usize = 16 << 10;
/// All-reduces of one burst: half a millisecond and more, many times the cost of its launch.
const BURST_CALLS: usize = 128;
/// All-reduces of one burst on the simulator, where calls are slow and times mean nothing.
const BURST_CALLS_SIMULATED: usize = 4;

/// The idle and busy communicators of one side.
pub struct Companions {
    idle: Vec<ncclComm_t>,
    busy: Vec<Busy>,
}

struct Busy {
    /// The graph is dropped before the communicator of its calls.
    burst: Graph,
    communicator: ncclComm_t,
    stream: Stream,
    /// Recorded after the last burst.
    over: Event,
    /// The burst's buffer.
    _buffer: Buffer,
}

impl Companions {
    /// Makes the communicators, on all ranks together. Each runs an all-reduce, so that nothing is set up or loaded
    /// later.
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

    /// The bursts of each busy communicator before it is known how many a batch needs; 0 without busy ones.
    pub fn bursts_first(&self) -> usize {
        usize::from(!self.busy.is_empty())
    }

    /// Launches `bursts` bursts on each busy communicator's stream, in turn. All ranks pass the same number.
    pub fn begin(&self, bursts: usize) -> Result<()> {
        for _ in 0..bursts {
            self.busy.iter().try_for_each(|busy| busy.burst.launch())?;
        }
        Ok(self.busy.iter().try_for_each(|busy| busy.over.record(&busy.stream))?)
    }

    /// Waits until all bursts are over. Returns after how many microseconds from `start` the first stream ran out of work; none without
    /// busy ones.
    pub fn end(&self, start: &Event) -> Result<Option<f64>> {
        let mut lasted_us: Option<f64> = None;
        for busy in &self.busy {
            busy.stream.synchronize()?;
            let us = f64::from(start.elapsed_ms(&busy.over)?) * 1e3;
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
        buffer.upload(&stream, 0, &[0; BUSY_BYTES])?;
        // One call runs alone first: loading or connecting at a first call must not meet calls that wait for peers.
        all_reduce(nccl, communicator, &buffer, &stream)?;
        stream.synchronize()?;
        let issue = || (0..calls).try_for_each(|_| all_reduce(nccl, communicator, &buffer, &stream));
        let burst = gpu::capture(&stream, issue)?;
        // The first launch uploads the graph.
        burst.launch()?;
        stream.synchronize()?;
        Ok(Self { burst, communicator, stream, over, _buffer: buffer })
    }
}

/// An all-reduce in place, of all floats of a buffer.
fn all_reduce(nccl: &Nccl, communicator: ncclComm_t, buffer: &Buffer, stream: &Stream) -> Result<()> {
    let (at, count, kind) = (buffer.at(0), buffer.bytes / size_of::<f32>(), element(ncclFloat32).code);
    nccl_call!(nccl, ncclAllReduce(at, at, count, kind, SUM.code, communicator, stream.cu_stream().cast()))
}
