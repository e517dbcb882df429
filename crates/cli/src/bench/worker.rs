//! One rank of the benchmark.

use super::Cell;
use super::batch::{self, Batch, Side, Work};
use super::first_use::{self, FirstUse};
use super::memory::Memory;
use super::product::Product;
use super::statistics::{Spread, spread};
use crate::counts;
use crate::element::{Element, Reduction};
use crate::gpu::Gpu;
use crate::nccl::{Nccl, id_bytes, id_from_bytes};
use crate::ranks::{self, Channel};
use crate::text;
use anyhow::{Context, Result, anyhow};
use nccl_sys::types::ncclComm_t;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use windlass_engine::stats::snapshot::Snapshot;

/// Of a size, before it is timed: Windlass registers the buffers of large all-gathers after three calls that could have been.
const WARM_UP_CALLS: usize = 8;

/// What a rank is to do.
#[derive(Serialize, Deserialize)]
pub struct Job {
    pub rank: usize,
    pub ranks: usize,
    /// The real library.
    pub plain: PathBuf,
    pub windlass: PathBuf,
    pub cells: Vec<Cell>,
    pub element: String,
    pub reduction: String,
    pub memory: Memory,
    pub repeat: usize,
    /// Microseconds that a batch should take.
    pub batch_us: f64,
    /// Communicators that are made to see what a first message costs; 0: none.
    pub births: usize,
    /// On stand-ins, where a matrix product is small.
    pub simulated: bool,
}

/// A finished measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CellDone {
    pub cell: Cell,
    /// Bytes of the whole call, after rounding to whole elements.
    pub bytes: u64,
    /// Calls of one batch.
    pub calls: usize,
    pub plain: Spread,
    pub windlass: Spread,
    /// How Windlass ran the calls.
    pub path: String,
}

/// What a rank says at its end.
#[derive(Serialize, Deserialize)]
pub struct Outcome {
    pub nccl_version: i32,
    /// In the order in which they were made.
    pub first_uses: Vec<FirstUse>,
}

impl CellDone {
    pub fn describe(&self) -> String {
        format!(
            "{} {} {}: {:.2} us alone, {:.2} us through Windlass",
            self.cell.operation.name(),
            text::size(self.bytes),
            self.cell.mode.name(),
            self.plain.median,
            self.windlass.median
        )
    }
}

/// The hidden subcommand: a rank that talks to its parent over standard input.
pub fn work() -> Result<()> {
    ranks::work(rank)
}

fn rank(channel: &mut Channel, job: Job) -> Result<Outcome> {
    let gpu = Gpu::open(job.rank)?;
    let element: Element = job.element.parse().map_err(|reason: String| anyhow!(reason))?;
    let reduction: Reduction = job.reduction.parse().map_err(|reason: String| anyhow!(reason))?;
    // The real library first: Windlass then forwards to the very library that is mapped.
    let (plain, windlass) = (Nccl::open(&job.plain)?, Nccl::open(&job.windlass)?);
    job.memory.check([&plain, &windlass])?;
    let first_uses = first_use::measure(channel, &gpu, [&plain, &windlass], &job)?;
    let plain = join(channel, &gpu, plain, &job)?;
    let windlass = join(channel, &gpu, windlass, &job)?;
    let wants_product = job.cells.iter().any(|cell| cell.operation.has_product());
    let product = wants_product.then(|| Product::new(&gpu, job.simulated)).transpose()?;
    if let Some(product) = product.as_ref().filter(|_| job.rank == 0) {
        eprintln!("bench: the product is {}", product.describe());
    }
    let largest =
        job.cells.iter().map(|cell| cell.bytes as usize).max().unwrap_or(0) + job.ranks * element.bytes();
    // One part for each of two communicators, aligned alike.
    let receive_bytes = largest.next_multiple_of(256);
    // The same of both sides, so that no side has better memory; through Windlass, as programs have it.
    let buffer = |bytes| job.memory.buffer(&gpu, &windlass.nccl, bytes);
    let (send, receive) = (buffer(largest)?, buffer(2 * receive_bytes)?);
    let dump = tempfile::NamedTempFile::new().context("cannot make a temporary file")?;
    for cell in job.cells.iter().filter(|cell| cell.operation.exists_in(&plain.nccl)) {
        let count = cell.operation.count(cell.bytes, element, job.ranks);
        let work = Work {
            operation: cell.operation,
            mode: cell.mode,
            count,
            element,
            reduction,
            rank: job.rank,
            ranks: job.ranks,
            send: &send,
            receive: &receive,
            receive_bytes,
            product: product.as_ref(),
        };
        let calls = batch_calls(channel, &plain, &windlass, &work, job.batch_us)?;
        // After the warming up, whose calls may take other paths.
        let before = counts_of(&windlass, dump.path())?;
        let (times_plain, times_windlass) = alternate(&plain, &windlass, work, calls, job.repeat)?;
        let after = counts_of(&windlass, dump.path())?;
        let plain_all = channel.exchange(&times_plain)?;
        let windlass_all = channel.exchange(&times_windlass)?;
        if job.rank == 0 {
            let path = counts::paths_between(&before, &after, cell.operation.functions());
            let bytes = cell.operation.bytes(count, element, job.ranks);
            let (plain, windlass) = (spread(&plain_all), spread(&windlass_all));
            let done = CellDone { cell: *cell, bytes, calls, plain, windlass, path };
            channel.progress(serde_json::to_string(&done)?)?;
        }
    }
    windlass.destroy()?;
    plain.destroy()?;
    Ok(Outcome { nccl_version: plain.nccl.version(), first_uses })
}

/// Windlass's counters of this process.
fn counts_of(windlass: &Side, file: &Path) -> Result<Snapshot> {
    windlass.nccl.dump(file).context("the library named as Windlass has no windlassDump")??;
    counts::read(file)
}

fn join(channel: &mut Channel, gpu: &Gpu, nccl: Nccl, job: &Job) -> Result<Side> {
    let communicator = communicator(channel, &nccl, job)?;
    let other = self::communicator(channel, &nccl, job)?;
    Side::new(gpu, nccl, communicator, other)
}

/// A new communicator of all ranks.
pub(super) fn communicator(channel: &mut Channel, nccl: &Nccl, job: &Job) -> Result<ncclComm_t> {
    let own = if job.rank == 0 { id_bytes(&nccl.unique_id()?) } else { Vec::new() };
    let id = id_from_bytes(&channel.share_first(&own)?)?;
    nccl.communicator(job.ranks, id, job.rank)
}

/// Warms both sides up (first calls connect, later ones register) and settles how many calls a batch has; the same on all ranks.
fn batch_calls(
    channel: &mut Channel,
    plain: &Side,
    windlass: &Side,
    work: &Work,
    batch_us: f64,
) -> Result<usize> {
    for side in [plain, windlass] {
        for _ in 0..WARM_UP_CALLS {
            side.issue(work)?;
            // Together: what ranks agree on is not the same when one runs ahead.
            side.synchronize()?;
        }
    }
    let call_us = plain.estimate_us(work)?.max(windlass.estimate_us(work)?);
    let slowest = channel.exchange(&call_us)?.into_iter().fold(0.0, f64::max);
    Ok(batch::calls(work.mode, batch_us, slowest))
}

/// Times of one call in every repetition, of the real library and of Windlass; who begins alternates.
fn alternate(
    plain: &Side,
    windlass: &Side,
    work: Work,
    calls: usize,
    repeat: usize,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let plain = Batch::new(plain, work, calls)?;
    let windlass = Batch::new(windlass, work, calls)?;
    let (mut times_plain, mut times_windlass) = (Vec::new(), Vec::new());
    // One batch each that nobody counts: a graph's first launch uploads it.
    plain.time_us()?;
    windlass.time_us()?;
    for repetition in 0..repeat {
        if repetition % 2 == 0 {
            times_plain.push(plain.time_us()?);
            times_windlass.push(windlass.time_us()?);
        } else {
            times_windlass.push(windlass.time_us()?);
            times_plain.push(plain.time_us()?);
        }
    }
    Ok((times_plain, times_windlass))
}
