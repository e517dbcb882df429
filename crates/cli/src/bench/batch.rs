//! Times batches of calls of one side.

use super::Mode;
use super::companions::Companions;
use super::operation::{Issue, Operation};
use super::product::Product;
use crate::element::{Element, Reduction, SUM, element};
use crate::gpu::{self, Buffer, Event, Gpu, Graph, Stream};
use crate::nccl::{Nccl, nccl_call};
use anyhow::Result;
use nccl_sys::types::{ncclComm_t, ncclFloat32};
use std::time::Instant;

/// So many launches surely fit into the device's queue, so the host does not wait.
const HOST_CALLS_MAX: usize = 64;
/// The most calls of one graph; with more the capture only takes longer.
const GRAPH_CALLS_MAX: usize = 128;
const EAGER_CALLS_MAX: usize = 2000;

/// A library, its communicator, and what timing needs.
pub struct Side {
    pub nccl: Nccl,
    pub communicator: ncclComm_t,
    /// A second communicator of the same ranks, for operations that use two; else null.
    other: ncclComm_t,
    stream: Stream,
    other_stream: Stream,
    /// Events with which the other stream forks from the first one and joins it.
    fork: Event,
    join: Event,
    start: Event,
    end: Event,
    scratch: Buffer,
    companions: Companions,
}

/// The work of one batch.
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
    /// Bytes of the receive buffer for each of two communicators.
    pub receive_bytes: usize,
    pub product: Option<&'a Product>,
}

/// The times of one run of a batch.
pub struct Timing {
    /// Microseconds of one call.
    pub us: f64,
    /// Nanoseconds of each call on the host; empty if the device is timed.
    pub calls_ns: Vec<u32>,
    /// Microseconds of all calls on the device, whatever is timed.
    pub device_us: f64,
    /// Microseconds from the batch's beginning during which all busy communicators had work; none if there are none.
    pub busy_us: Option<f64>,
}

/// A batch that can be timed repeatedly.
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
        Ok(self.stream.synchronize()?)
    }

    /// Makes all ranks' devices wait for each other, so that a late rank does not add to the times.
    fn line_up(&self) -> Result<()> {
        let (at, kind, stream) =
            (self.scratch.at(0), element(ncclFloat32).code, self.stream.cu_stream().cast());
        nccl_call!(&self.nccl, ncclAllReduce(at, at, 1, kind, SUM.code, self.communicator, stream))
    }

    pub fn issue(&self, work: &Work) -> Result<()> {
        let issue = Issue {
            nccl: &self.nccl,
            communicator: self.communicator,
            stream: self.stream.cu_stream().cast(),
            other_communicator: self.other,
            other_stream: self.other_stream.cu_stream().cast(),
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

    /// The first number of bursts of each busy communicator; 0 if there are none.
    pub fn bursts_first(&self) -> usize {
        self.companions.bursts_first()
    }

    /// Microseconds of one call on the device, from a few calls without busy communicators. On the simulator the host's time if
    /// that is longer, since the device's time may be modelled.
    pub fn estimate_us(&self, work: &Work, simulated: bool) -> Result<f64> {
        let batch = Batch { side: self, work: Work { mode: Mode::Eager, ..*work }, calls: 4, graph: None };
        let began = Instant::now();
        let device_us = batch.time(0)?.us;
        let host_us = began.elapsed().as_secs_f64() * 1e6 / batch.calls as f64;
        Ok(if simulated { device_us.max(host_us) } else { device_us })
    }
}

/// How many calls take `batch_us` if one takes `call_us`.
pub fn calls(mode: Mode, batch_us: f64, call_us: f64) -> usize {
    let most = match mode {
        Mode::Eager => EAGER_CALLS_MAX,
        Mode::Graph => GRAPH_CALLS_MAX,
        Mode::Host => HOST_CALLS_MAX,
    };
    // The conversion turns a float that is too large into the largest number, and NaN into zero.
    ((batch_us / call_us.max(0.1)) as usize).clamp(1, most)
}

impl<'a> Batch<'a> {
    pub fn new(side: &'a Side, work: Work<'a>, calls: usize) -> Result<Self> {
        let mut batch = Self { side, work, calls, graph: None };
        if work.mode == Mode::Graph {
            batch.graph = Some(gpu::capture(&side.stream, || batch.issue_all(|| side.issue(&work)))?);
        }
        Ok(batch)
    }

    /// Runs the batch beside `bursts` bursts of each busy communicator. All ranks pass the same number.
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
            Some(graph) => graph.launch()?,
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
        let device_us = f64::from(start.elapsed_ms(end)?) * 1e3;
        // Waits before the other side begins: each side's batches run beside their own busy communicators only.
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

    /// Batches fill their time within the limits of the mode.
    #[test]
    fn batch_lengths() {
        assert_eq!(calls(Mode::Eager, 10_000.0, 100.0), 100);
        assert_eq!(calls(Mode::Eager, 10_000.0, 0.0), EAGER_CALLS_MAX);
        assert_eq!(calls(Mode::Graph, 10_000.0, 1.0), GRAPH_CALLS_MAX);
        assert_eq!(calls(Mode::Host, 1e9, 1.0), HOST_CALLS_MAX);
        assert_eq!(calls(Mode::Eager, 10.0, 1e6), 1);
    }
}
