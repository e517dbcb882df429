//! Runs one rank of the benchmark.

use super::Cell;
use super::batch::{self, Batch, Side, Timing, Work};
use super::companions::Companions;
use super::company::{self, Company};
use super::comparison;
use super::first_use::{self, FirstUse};
use super::memory::Memory;
use super::product::Product;
use super::statistics::{HostTimes, Spread, host_times, ratios, spread};
use crate::counts;
use crate::element::Reduction;
use crate::gpu::{Buffer, Gpu};
use crate::nccl::{Nccl, id_bytes, id_from_bytes};
use crate::ranks::{self, Channel};
use crate::text;
use anyhow::{Context, Result, anyhow};
use nccl_sys::types::ncclComm_t;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use windlass_base::stats::snapshot::Snapshot;

/// Calls of a size before it is timed: Windlass registers the buffers of large all-gathers after three suitable calls.
const WARM_UP_CALLS: usize = 8;

/// The most uncounted runs of a batch to find how many bursts outlast it.
const TRIALS_MAX: usize = 6;

/// The job of a rank.
#[derive(Serialize, Deserialize)]
pub struct Job {
    pub rank: usize,
    pub ranks: usize,
    /// The real library.
    pub plain: PathBuf,
    pub windlass: PathBuf,
    pub cells: Vec<Cell>,
    pub reduction: String,
    pub memory: Memory,
    pub company: Company,
    pub repeat: usize,
    /// Microseconds that a batch should take.
    pub batch_us: f64,
    /// How often a cell that looks slower than NCCL is measured again.
    pub again: usize,
    /// Communicators that are made to measure first messages; 0: none.
    pub inits: usize,
    /// Whether this is the simulator, where a matrix product is small.
    pub simulated: bool,
    /// Elements on each side of a product's matrices.
    pub product: Option<usize>,
}

/// A finished measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CellDone {
    /// The position among the measurements; a repeated one replaces the first.
    pub position: usize,
    pub cell: Cell,
    /// Bytes of the whole call, after rounding to whole elements.
    pub bytes: u64,
    /// Calls of one batch.
    pub calls: usize,
    pub plain: Spread,
    pub windlass: Spread,
    pub plain_host_ns: Option<HostTimes>,
    pub windlass_host_ns: Option<HostTimes>,
    /// The least part of a batch during which all busy communicators worked; none without busy ones.
    pub plain_busy_part: Option<f64>,
    pub windlass_busy_part: Option<f64>,
    /// Windlass's time divided by NCCL's for each pair of batches, each by its slowest rank.
    #[serde(default)]
    pub ratios: Vec<f64>,
    /// The number of repeated rounds, of which this is the median one; 0: measured once.
    pub again: usize,
    /// The path on which Windlass ran the calls.
    pub path: String,
}

/// What a rank reports at its end.
#[derive(Serialize, Deserialize)]
pub struct Outcome {
    pub nccl_version: i32,
    /// In the order in which they were made.
    pub first_uses: Vec<FirstUse>,
}

impl CellDone {
    pub fn describe(&self) -> String {
        let again = if self.again > 0 { format!(", again {} times", self.again) } else { String::new() };
        format!(
            "{} {} {} {}: {:.2} us alone, {:.2} us through Windlass, {:.3} ({}){again}",
            self.cell.operation.name(),
            self.cell.element,
            text::size(self.bytes),
            self.cell.mode.name(),
            self.plain.median,
            self.windlass.median,
            self.ratio(),
            self.path
        )
    }

    /// Windlass's time divided by NCCL's.
    pub fn ratio(&self) -> f64 {
        self.windlass.median / self.plain.median
    }
}

/// The hidden subcommand: a rank that talks with its parent process over standard input.
pub fn work() -> Result<()> {
    ranks::work(rank)
}

fn rank(channel: &mut Channel, job: Job) -> Result<Outcome> {
    let gpu = Gpu::open(job.rank)?;
    let reduction: Reduction = job.reduction.parse().map_err(|reason: String| anyhow!(reason))?;
    // The real library is opened first: Windlass then forwards to the file that is already mapped.
    let (plain, windlass) = (Nccl::open(&job.plain)?, Nccl::open(&job.windlass)?);
    job.memory.check([&plain, &windlass])?;
    let first_uses = first_use::measure(channel, &gpu, [&plain, &windlass], &job)?;
    let nccl_version = plain.version;
    let plain = join(channel, &gpu, plain, "NCCL", &job)?;
    let windlass = join(channel, &gpu, windlass, "Windlass", &job)?;
    let wants_product = job.cells.iter().any(|cell| cell.operation.has_product());
    let product = wants_product.then(|| Product::new(&gpu, job.simulated, job.product)).transpose()?;
    if let Some(product) = product.as_ref().filter(|_| job.rank == 0) {
        say!("bench: the product is {}", product.describe());
    }
    let rank_bytes = |cell: &Cell| cell.bytes as usize + job.ranks * cell.element.bytes();
    let largest = job.cells.iter().map(rank_bytes).max().unwrap_or(0);
    // One part for each of two communicators, with the same alignment.
    let receive_bytes = largest.next_multiple_of(256);
    // Both sides use the same buffers, so that neither has better memory. Windlass allocates them, as in programs.
    let buffer = |bytes| job.memory.buffer(&gpu, &windlass.nccl, bytes);
    let (send, receive) = (buffer(largest)?, buffer(2 * receive_bytes)?);
    let windows = [&plain, &windlass].map(|side| job.memory.windows(side, [&send, &receive]));
    let windows = windows.into_iter().collect::<Result<Vec<_>>>()?;
    let dump = tempfile::NamedTempFile::new().context("cannot make a temporary file")?;
    let bench = Bench {
        job: &job,
        sides: [&plain, &windlass],
        reduction,
        send: &send,
        receive: &receive,
        receive_bytes,
        product: product.as_ref(),
        dump: dump.path(),
    };
    let mut done = Vec::new();
    for (position, cell) in job.cells.iter().enumerate() {
        if cell.operation.exists_in(&plain.nccl) {
            let measured = bench.measure(channel, position, cell)?;
            tell(channel, &job, nccl_version, &measured)?;
            done.push(measured);
        }
    }
    for position in if job.again > 0 { comparison::suspicious(&done) } else { Vec::new() } {
        let CellDone { position, cell, .. } = done[position];
        let rounds = (0..job.again).map(|_| bench.measure(channel, position, &cell));
        if let Some(settled) = comparison::settled(rounds.collect::<Result<Vec<_>>>()?) {
            tell(channel, &job, nccl_version, &settled)?;
        }
    }
    drop(windows);
    windlass.destroy()?;
    plain.destroy()?;
    Ok(Outcome { nccl_version, first_uses })
}

/// Rank 0 reports a measurement to the parent process; all ranks have the same.
fn tell(channel: &mut Channel, job: &Job, nccl_version: i32, done: &CellDone) -> Result<()> {
    if job.rank == 0 { channel.progress(&(nccl_version, done)) } else { Ok(()) }
}

/// One side's results: each rank's times, the hosts' times of calls, the least busy part.
type Gathered = (Vec<Vec<f64>>, Option<HostTimes>, Option<f64>);

/// What all measurements of a rank share.
pub(super) struct Bench<'a> {
    pub job: &'a Job,
    /// The real library, then Windlass.
    pub sides: [&'a Side; 2],
    pub reduction: Reduction,
    pub send: &'a Buffer,
    pub receive: &'a Buffer,
    pub receive_bytes: usize,
    pub product: Option<&'a Product>,
    pub dump: &'a Path,
}

impl Bench<'_> {
    /// Makes one measurement, on all ranks together.
    pub fn measure(&self, channel: &mut Channel, position: usize, cell: &Cell) -> Result<CellDone> {
        let Self { job, sides: [plain, windlass], .. } = *self;
        let count = cell.operation.count(cell.bytes, cell.element, job.ranks);
        let work = Work {
            operation: cell.operation,
            mode: cell.mode,
            count,
            element: cell.element,
            reduction: self.reduction,
            rank: job.rank,
            ranks: job.ranks,
            send: self.send,
            receive: self.receive,
            receive_bytes: self.receive_bytes,
            product: self.product,
        };
        let calls = batch_calls(channel, plain, windlass, &work, job)?;
        // After the warm-up, whose calls may take other paths.
        let before = counts_of(&windlass.nccl, self.dump)?;
        let [plain, through] = alternate(channel, [plain, windlass], work, calls, job.repeat)?;
        let after = counts_of(&windlass.nccl, self.dump)?;
        let mut gathered = |timings: Vec<Timing>| -> Result<Gathered> {
            let us: Vec<f64> = timings.iter().map(|timing| timing.us).collect();
            let parts: Vec<f64> = timings.iter().filter_map(busy_part).collect();
            let calls_ns: Vec<u32> = timings.into_iter().flat_map(|timing| timing.calls_ns).collect();
            let least = channel.exchange(&parts)?.into_iter().flatten().reduce(f64::min);
            Ok((channel.exchange(&us)?, host_times(&channel.exchange(&calls_ns)?), least))
        };
        let (plain, plain_host_ns, plain_busy_part) = gathered(plain)?;
        let (windlass, windlass_host_ns, windlass_busy_part) = gathered(through)?;
        Ok(CellDone {
            position,
            cell: *cell,
            bytes: cell.operation.bytes(count, cell.element, job.ranks),
            calls,
            plain: spread(&plain),
            windlass: spread(&windlass),
            ratios: ratios([&plain, &windlass]),
            plain_host_ns,
            windlass_host_ns,
            plain_busy_part,
            windlass_busy_part,
            again: 0,
            path: counts::paths_between(&before, &after, cell.operation.functions()),
        })
    }
}

/// Windlass's counters of this process, by way of `file`.
pub(super) fn counts_of(windlass: &Nccl, file: &Path) -> Result<Snapshot> {
    windlass.dump(file).context("the library named as Windlass has no windlassDump")??;
    counts::read(file)
}

/// Makes a side's communicators. The others come after the measured ones, since the first communicator of a device
/// differs from later ones.
fn join(channel: &mut Channel, gpu: &Gpu, nccl: Nccl, name: &str, job: &Job) -> Result<Side> {
    let measured = [communicator(channel, &nccl, job)?, communicator(channel, &nccl, job)?];
    let companions = Companions::new(channel, gpu, &nccl, name, job)?;
    Side::new(gpu, nccl, measured, companions)
}

/// As [`join`], for operations on one communicator.
pub(super) fn join_one(channel: &mut Channel, gpu: &Gpu, nccl: Nccl, name: &str, job: &Job) -> Result<Side> {
    let measured = communicator(channel, &nccl, job)?;
    let companions = Companions::new(channel, gpu, &nccl, name, job)?;
    Side::new(gpu, nccl, [measured, std::ptr::null_mut()], companions)
}

/// A new communicator of all ranks.
pub(super) fn communicator(channel: &mut Channel, nccl: &Nccl, job: &Job) -> Result<ncclComm_t> {
    let own = if job.rank == 0 { id_bytes(&nccl.unique_id()?) } else { Vec::new() };
    let id = id_from_bytes(&channel.share_first(&own)?)?;
    nccl.communicator(job.ranks, id, job.rank)
}

/// Warms both sides up (first calls connect, later ones register) and decides how many calls a batch has; the same on all ranks.
fn batch_calls(
    channel: &mut Channel,
    plain: &Side,
    windlass: &Side,
    work: &Work,
    job: &Job,
) -> Result<usize> {
    for side in [plain, windlass] {
        for _ in 0..WARM_UP_CALLS {
            side.issue(work)?;
            // All ranks together: if one ran ahead, the ranks could agree on something else.
            side.synchronize()?;
        }
    }
    let call_us = plain.estimate_us(work, job.simulated)?.max(windlass.estimate_us(work, job.simulated)?);
    let slowest = channel.exchange(&call_us)?.into_iter().fold(0.0, f64::max);
    // On the simulator every call takes long, so there is no least number.
    let least = if job.simulated { 1 } else { work.operation.calls_min() };
    Ok(batch::calls(work.mode, job.batch_us, slowest).max(least))
}

/// Times every repetition of both sides; the side that begins alternates.
fn alternate(
    channel: &mut Channel,
    [plain, windlass]: [&Side; 2],
    work: Work,
    calls: usize,
    repeat: usize,
) -> Result<[Vec<Timing>; 2]> {
    let batches = [Batch::new(plain, work, calls)?, Batch::new(windlass, work, calls)?];
    let bursts = [try_out(channel, plain, &batches[0])?, try_out(channel, windlass, &batches[1])?];
    let mut timings = [Vec::new(), Vec::new()];
    for repetition in 0..repeat {
        for turn in 0..2 {
            let side = (repetition + turn) % 2;
            timings[side].push(batches[side].time(bursts[side])?);
        }
    }
    Ok(timings)
}

/// Runs a batch without counting it, since a graph's first launch uploads it. Beside busy communicators, repeats until it is
/// known how many bursts outlast the batch; the same on all ranks.
fn try_out(channel: &mut Channel, side: &Side, batch: &Batch) -> Result<usize> {
    let mut bursts = side.bursts_first();
    for _ in 0..TRIALS_MAX {
        let timing = batch.time(bursts)?;
        let Some(busy_us) = timing.busy_us else { break };
        let wanted = company::bursts_for(bursts, busy_us, timing.device_us);
        let most = channel.exchange(&wanted)?.into_iter().fold(bursts, usize::max);
        if most == std::mem::replace(&mut bursts, most) {
            break;
        }
    }
    Ok(bursts)
}

fn busy_part(timing: &Timing) -> Option<f64> {
    timing.busy_us.map(|busy_us| company::part(busy_us, timing.device_us))
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A measurement for tests.
    pub fn cell(ratio: f64) -> CellDone {
        serde_json::from_value(serde_json::json!({
            "position": 0, "bytes": 1024, "calls": 1, "path": "native", "again": 0,
            "cell": {"operation": "all_reduce", "bytes": 1024, "mode": "graph", "element": "bfloat16"},
            "plain": {"median": 1.0, "min": 1.0, "max": 1.0}, "plain_host_ns": null,
            "windlass": {"median": ratio, "min": ratio, "max": ratio}, "windlass_host_ns": null,
        }))
        .unwrap()
    }

    /// The description of a measurement has all that distinguishes it from others.
    #[test]
    fn described() {
        let done = CellDone { again: 3, ..cell(0.5) };
        let text = "all_reduce bfloat16 1K graph: 1.00 us alone, 0.50 us through Windlass, 0.500 (native), again 3 times";
        assert_eq!(done.describe(), text);
    }
}
