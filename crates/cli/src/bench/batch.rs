//! Timing batches of calls of one side.

use super::Mode;
use super::companions::Companions;
use super::operation::{Issue, Operation};
use super::product::Product;
use crate::element::{Element, Reduction, SUM, element};
use crate::gpu::{Buffer, Event, Gpu, Graph, Stream};
use crate::nccl::{Nccl, nccl_call};
use anyhow::Result;
use nccl_sys::types::{ncclComm_t, ncclFloat32};
use std::time::Instant;

/// Calls whose launches the device's queue surely takes without waiting.
const HOST_CALLS_MAX: usize = 64;
/// Calls in one graph; more only makes the capture long.
const GRAPH_CALLS_MAX: usize = 128;
const EAGER_CALLS_MAX: usize = 2000;

/// A library, a communicator through it, and what timing needs.
pub struct Side {
    pub nccl: Nccl,
    pub communicator: ncclComm_t,
    /// Of the same ranks, for operations on two; null where there are none of these.
    other: ncclComm_t,
    stream: Stream,
    other_stream: Stream,
    /// Where the other stream leaves the first, and comes back to it.
    fork: Event,
    join: Event,
    start: Event,
    end: Event,
    scratch: Buffer,
    companions: Companions,
}

/// What is done in a batch.
#[derive(Clone, Copy)]
pub struct Work<'a> {
    pub operation: Operation,
    pub mode: Mode,
    pub count: usize,
    pub element: Element,
    pub reduction: Reduction,
    pub rank: usize,
    pub ranks: usize,
    pub send: &'a Buffer,
    pub receive: &'a Buffer,
    /// Of the receive buffer, for each of two communicators.
    pub receive_bytes: usize,
    pub product: Option<&'a Product>,
}

/// What one run of a batch took.
pub struct Timing {
    /// Microseconds of one call.
    pub us: f64,
    /// Of each call on the host, in nanoseconds; empty where the device is timed.
    pub calls_ns: Vec<u32>,
    /// Of all calls on the device, in microseconds, whatever is timed.
    pub device_us: f64,
    /// How long after its beginning all busy communicators were at work; none if there are none.
    pub busy_us: Option<f64>,
}

/// A batch ready to be timed again and again.
pub struct Batch<'a> {
    side: &'a Side,
    work: Work<'a>,
    calls: usize,
    graph: Option<Graph>,
}

impl Side {
    pub fn new(
        gpu: &Gpu,
        nccl: Nccl,
        [communicator, other]: [ncclComm_t; 2],
        companions: Companions,
    ) -> Result<Self> {
        let (start, end, scratch) = (gpu.event()?, gpu.event()?, gpu.buffer(4)?);
        let (fork, join, other_stream) = (gpu.event()?, gpu.event()?, gpu.stream()?);
        let stream = gpu.stream()?;
        Ok(Self {
            nccl,
            communicator,
            other,
            stream,
            other_stream,
            fork,
            join,
            start,
            end,
            scratch,
            companions,
        })
    }

    pub fn destroy(self) -> Result<()> {
        self.companions.destroy(&self.nccl)?;
        if !self.other.is_null() {
            nccl_call!(&self.nccl, ncclCommDestroy(self.other))?;
        }
        nccl_call!(&self.nccl, ncclCommDestroy(self.communicator))
    }

    pub fn synchronize(&self) -> Result<()> {
        self.other_stream.synchronize()?;
        self.stream.synchronize()
    }

    /// Lines the ranks up on their devices, so that a late rank's lateness is in nobody's time.
    fn line_up(&self) -> Result<()> {
        let (at, kind, stream) = (self.scratch.at(0), element(ncclFloat32).code, self.stream.as_nccl());
        nccl_call!(&self.nccl, ncclAllReduce(at, at, 1, kind, SUM.code, self.communicator, stream))
    }

    pub fn issue(&self, work: &Work) -> Result<()> {
        let issue = Issue {
            nccl: &self.nccl,
            communicator: self.communicator,
            stream: self.stream.as_nccl(),
            other_communicator: self.other,
            other_stream: self.other_stream.as_nccl(),
            product: work.product,
            send: work.send.at(0),
            receive: work.receive.at(0),
            other_receive: work.receive.at(work.receive_bytes),
            rank: work.rank,
            ranks: work.ranks,
            element: work.element,
            reduction: work.reduction,
        };
        work.operation.issue(work.count, &issue)
    }

    /// Bursts of each busy communicator to begin with; 0 if there are none.
    pub fn bursts_first(&self) -> usize {
        self.companions.bursts_first()
    }

    /// Microseconds of a few calls, each, on the device, with nobody busy. On the simulator the host's count if they are more: the
    /// device's may be modelled ones, which nobody waits for.
    pub fn estimate_us(&self, work: &Work, simulated: bool) -> Result<f64> {
        let batch = Batch { side: self, work: Work { mode: Mode::Eager, ..*work }, calls: 4, graph: None };
        let began = Instant::now();
        let device_us = batch.time(0)?.us;
        let host_us = began.elapsed().as_secs_f64() * 1e6 / batch.calls as f64;
        Ok(if simulated { device_us.max(host_us) } else { device_us })
    }
}

/// How many calls fill `batch_us` when one takes `call_us`.
pub fn calls(mode: Mode, batch_us: f64, call_us: f64) -> usize {
    let most = match mode {
        Mode::Eager => EAGER_CALLS_MAX,
        Mode::Graph => GRAPH_CALLS_MAX,
        Mode::Host => HOST_CALLS_MAX,
    };
    // A float that is too large or no number becomes the largest or zero.
    ((batch_us / call_us.max(0.1)) as usize).clamp(1, most)
}

impl<'a> Batch<'a> {
    pub fn new(side: &'a Side, work: Work<'a>, calls: usize) -> Result<Self> {
        let mut batch = Self { side, work, calls, graph: None };
        if work.mode == Mode::Graph {
            side.stream.begin_capture()?;
            let issued = batch.issue_all(|| side.issue(&work));
            let graph = side.stream.end_capture();
            issued?;
            batch.graph = Some(graph?);
        }
        Ok(batch)
    }

    /// Runs the batch beside so many bursts of each busy communicator; all ranks with the same number.
    pub fn time(&self, bursts: usize) -> Result<Timing> {
        let Side { stream, start, end, companions, .. } = self.side;
        companions.begin(bursts)?;
        self.side.line_up()?;
        let mut calls_ns = Vec::new();
        if self.work.mode == Mode::Host {
            stream.synchronize()?;
        }
        start.record(stream)?;
        match &self.graph {
            Some(graph) => graph.launch(stream)?,
            None if self.work.mode == Mode::Host => self.issue_all(|| {
                let began = Instant::now();
                self.side.issue(&self.work)?;
                calls_ns.push(began.elapsed().as_nanos().try_into().unwrap_or(u32::MAX));
                Ok(())
            })?,
            None => self.issue_all(|| self.side.issue(&self.work))?,
        }
        end.record(stream)?;
        stream.synchronize()?;
        let device_us = end.us_since(start)?;
        // Before the other side begins: its batches have their own company alone.
        let busy_us = companions.end(start)?;
        let total_us = match self.work.mode {
            Mode::Host => calls_ns.iter().map(|ns| f64::from(*ns)).sum::<f64>() / 1e3,
            Mode::Eager | Mode::Graph => device_us,
        };
        Ok(Timing { us: total_us / self.calls as f64, calls_ns, device_us, busy_us })
    }

    fn issue_all(&self, mut issue: impl FnMut() -> Result<()>) -> Result<()> {
        let Side { stream, other_stream, fork, join, .. } = self.side;
        let two = self.work.operation.has_two_streams();
        if two {
            fork.record(stream)?;
            other_stream.wait(fork)?;
        }
        (0..self.calls).try_for_each(|_| issue())?;
        if two {
            join.record(other_stream)?;
            stream.wait(join)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Batches fill their time within limits of the mode.
    #[test]
    fn batch_lengths() {
        assert_eq!(calls(Mode::Eager, 10_000.0, 100.0), 100);
        assert_eq!(calls(Mode::Eager, 10_000.0, 0.0), EAGER_CALLS_MAX);
        assert_eq!(calls(Mode::Graph, 10_000.0, 1.0), GRAPH_CALLS_MAX);
        assert_eq!(calls(Mode::Host, 1e9, 1.0), HOST_CALLS_MAX);
        assert_eq!(calls(Mode::Eager, 10.0, 1e6), 1);
    }
}
