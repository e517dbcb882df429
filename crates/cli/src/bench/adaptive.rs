//! Runs a rank that measures limits: each next measurement depends on what was found ([`crate::limits::search`]).
//!
//! One run measures communicators of several numbers of ranks; each uses the first processes. Starting a process and its first
//! communicator takes longer than finding most limits. Rank 0 decides the next step, and when the time is over.

use super::company::Company;
use super::memory::Memory;
use super::worker::{self, Bench, CellDone, join_one};
use super::{Cell, batch::Side};
use crate::element::SUM;
use crate::gpu::{Buffer, Gpu};
use crate::limits::search::{Grid, OTHER, REGISTERED, Step, Task, USUAL};
use crate::nccl::Nccl;
use crate::ranks::{self, Channel};
use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use windlass_base::config::nccl::{self, Effect};
use windlass_transport::circumstances;
use windlass_transport::tuning::cache::Circumstances;
use windlass_transport::tuning::file::Multicast;

/// The job of a rank.
#[derive(Serialize, Deserialize)]
pub struct Job {
    pub rank: usize,
    /// The number of processes.
    pub ranks: usize,
    /// The real library.
    pub plain: PathBuf,
    pub windlass: PathBuf,
    pub effort: Effort,
    pub simulated: bool,
}

/// What to measure, and for how long.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Effort {
    /// The numbers of ranks, in the order of measuring.
    pub numbers: Vec<usize>,
    pub grid: Grid,
    /// Pairs of batches for each measurement.
    pub repeat: usize,
    /// Microseconds that a batch should take.
    pub batch_us: f64,
    /// Idle communicators beside the measured one.
    pub beside: u32,
    pub what: What,
    /// The time from the start of the ranks, after which nothing new begins. None: no bound.
    pub time: Option<Time>,
}

/// The path whose limits are found. Native collectives would hide registered ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    Native,
    Registered,
}

impl What {
    /// The tasks to measure first, and the tasks after them.
    pub fn tasks(self) -> [&'static [Task]; 2] {
        match self {
            What::Native => [&USUAL, &OTHER],
            What::Registered => [&REGISTERED, &[]],
        }
    }

    /// The memory of the buffers. Windlass maps registered buffers a second time, which only `ncclMemAlloc`'s allow.
    pub fn memory(self) -> Memory {
        match self {
            What::Native => Memory::Device,
            What::Registered => Memory::Nccl,
        }
    }
}

/// A bound on time, in seconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Time {
    pub all: f64,
    /// The least time for measuring, even if the ranks took long to be ready.
    pub measuring_least: f64,
}

/// What rank 0 reports while it measures.
#[derive(Serialize, Deserialize)]
pub enum Told {
    Group(Group),
    Measured(usize, Box<CellDone>),
}

/// A number of ranks that is measured, and where.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Group {
    pub ranks: usize,
    pub place: Place,
    pub nccl_version: i32,
}

/// The circumstances under which a rank measures, and the key of its cells.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Place {
    circumstances: Vec<String>,
    pub capability: u16,
    pub multiprocessors: u16,
    pub multicast: bool,
}

impl Place {
    /// Reads the circumstances as a program's process would, on this device with this NCCL.
    pub fn observe(ordinal: usize, ranks: usize, path: &Path, version: i32) -> Result<Place> {
        nccl::note_version(version);
        let driver = windlass_base::gpu::driver().map_err(|failure| anyhow!("{failure}"))?;
        let facts = driver.device_facts(i32::try_from(ordinal)?).map_err(|failure| anyhow!("{failure}"))?;
        let multicast = facts.multicast && !nccl::settings().has(Effect::NoMulticast);
        let of_table = if multicast { Multicast::Yes } else { Multicast::No };
        let path = std::fs::canonicalize(path)?;
        let nccl = circumstances::Nccl { path: &path, version };
        Ok(Place {
            circumstances: circumstances::observe(driver, &facts, ranks, of_table, nccl).lines().to_vec(),
            capability: u16::try_from(facts.capability)?,
            multiprocessors: u16::try_from(facts.multiprocessors)?,
            multicast,
        })
    }

    pub fn circumstances(&self) -> Circumstances {
        Circumstances::of_lines(self.circumstances.clone())
    }

    pub fn multicast(&self) -> Multicast {
        if self.multicast { Multicast::Yes } else { Multicast::No }
    }
}

/// The time to make the communicators of another number of ranks. With less time left, they are not begun.
const JOINING: Duration = Duration::from_secs(1);

/// The hidden subcommand.
pub fn work() -> Result<()> {
    ranks::work(rank)
}

fn rank(channel: &mut Channel, job: Job) -> Result<()> {
    let began = Instant::now();
    let gpu = Gpu::open(job.rank)?;
    let largest = job.effort.grid.sizes.last().copied().unwrap_or(0) as usize;
    // Sizes are rounded down to whole elements of each rank, except the smallest.
    let bytes = largest + job.ranks * size_of::<f64>();
    // The real library is opened first: Windlass then forwards to the file that is already mapped.
    let (_, windlass) = (Nccl::open(&job.plain)?, Nccl::open(&job.windlass)?);
    let buffer = || job.effort.what.memory().buffer(&gpu, &windlass, bytes);
    let (send, receive) = (buffer()?, buffer()?);
    let dump = tempfile::NamedTempFile::new().context("cannot make a temporary file")?;
    let shared = Shared { job: &job, gpu: &gpu, send, receive, dump: dump.path() };
    let mut groups: Vec<Members> = Vec::new();
    let mut deadline = None;
    for (ranks, tasks) in turns(&job.effort.numbers, job.effort.what) {
        let is_new = !groups.iter().any(|group| group.ranks == ranks);
        let begins = if is_new { JOINING } else { Duration::ZERO };
        let is_over = deadline.is_some_and(|deadline| Instant::now() + begins >= deadline);
        if channel.share_first(&is_over)? {
            break;
        }
        if job.rank >= ranks {
            continue;
        }
        channel.among(Some(ranks));
        if is_new {
            groups.push(shared.join(channel, ranks)?);
        }
        let group = groups.iter_mut().find(|group| group.ranks == ranks).context("a group that was made")?;
        let deadline = *deadline.get_or_insert_with(|| deadline_of(&job.effort, began));
        shared.measure(channel, group, tasks, deadline)?;
        channel.among(None);
    }
    groups.into_iter().try_for_each(|group| {
        group.windlass.destroy()?;
        group.plain.destroy()
    })
}

/// The moment after which no new measurement begins; without a bound, far in the future.
fn deadline_of(effort: &Effort, began: Instant) -> Instant {
    let ready = Instant::now();
    let seconds = |seconds: f64| Duration::from_secs_f64(seconds.clamp(0.0, 1e6));
    effort.time.map_or(ready + seconds(1e6), |time| {
        (began + seconds(time.all)).max(ready + seconds(time.measuring_least))
    })
}

/// The order of measuring: the first two numbers of ranks come first, with all tasks, then further numbers.
fn turns(numbers: &[usize], what: What) -> Vec<(usize, &'static [Task])> {
    let (first, further) = numbers.split_at(numbers.len().min(2));
    let in_turn = |numbers: &[usize]| -> Vec<_> {
        let of =
            |tasks: &'static [Task]| numbers.iter().map(move |ranks| (*ranks, tasks)).collect::<Vec<_>>();
        what.tasks().into_iter().filter(|tasks| !tasks.is_empty()).flat_map(of).collect()
    };
    [in_turn(first), in_turn(further)].concat()
}

/// Both sides of one number of ranks, and their measurements.
struct Members {
    ranks: usize,
    plain: Side,
    windlass: Side,
    measured: Vec<CellDone>,
}

struct Shared<'a> {
    job: &'a Job,
    gpu: &'a Gpu,
    send: Buffer,
    receive: Buffer,
    dump: &'a Path,
}

impl Shared<'_> {
    fn bench_job(&self, ranks: usize) -> worker::Job {
        let Job { rank, plain, windlass, effort, simulated, .. } = self.job;
        worker::Job {
            rank: *rank,
            ranks,
            plain: plain.clone(),
            windlass: windlass.clone(),
            cells: Vec::new(),
            reduction: SUM.name.into(),
            memory: effort.what.memory(),
            company: Company { beside: effort.beside, busy: 0 },
            repeat: effort.repeat,
            batch_us: effort.batch_us,
            again: 0,
            inits: 0,
            simulated: *simulated,
            product: None,
        }
    }

    /// Makes the communicators and reports the circumstances. Fails if ranks have different ones.
    fn join(&self, channel: &mut Channel, ranks: usize) -> Result<Members> {
        let (job, bench) = (self.job, self.bench_job(ranks));
        let (plain, windlass) = (Nccl::open(&job.plain)?, Nccl::open(&job.windlass)?);
        let nccl_version = plain.version;
        let place = Place::observe(job.rank, ranks, &job.plain, nccl_version)?;
        let places = channel.exchange(&place)?;
        let all: Vec<Circumstances> = places.iter().map(Place::circumstances).collect();
        if let Some((one, other)) = all.iter().find_map(|other| all[0].unlike(other)) {
            bail!("{ranks} ranks: GPUs are unlike: {one}, {other}");
        }
        let plain = join_one(channel, self.gpu, plain, "NCCL", &bench)?;
        let windlass = join_one(channel, self.gpu, windlass, "Windlass", &bench)?;
        self.tell(channel, &Told::Group(Group { ranks, place, nccl_version }))?;
        Ok(Members { ranks, plain, windlass, measured: Vec::new() })
    }

    fn tell(&self, channel: &mut Channel, told: &Told) -> Result<()> {
        if self.job.rank == 0 { channel.progress(told) } else { Ok(()) }
    }

    /// Measures until all limits of these tasks are found or the time is over.
    fn measure(
        &self,
        channel: &mut Channel,
        group: &mut Members,
        tasks: &[Task],
        deadline: Instant,
    ) -> Result<()> {
        let bench_job = self.bench_job(group.ranks);
        let sides = [&group.plain, &group.windlass];
        let looks = [self.job.effort.grid.clone(), self.job.effort.grid.second_look()];
        let in_look = |grid| tasks.iter().map(move |task| (grid, task));
        let tasks = looks.iter().flat_map(in_look);
        for (grid, task) in tasks.filter(|(_, task)| task.operation.exists_in(&group.plain.nccl)) {
            let bench = Bench {
                job: &bench_job,
                sides,
                reduction: task.reduction(),
                send: &self.send,
                receive: &self.receive,
                receive_bytes: 0,
                product: None,
                dump: self.dump,
            };
            loop {
                let next = match grid.next(task, &group.measured) {
                    Step::Measure(cell) if Instant::now() < deadline => Some(cell),
                    _ => None,
                };
                let next: Option<Cell> = channel.share_first(&next)?;
                let Some(cell) = next else { break };
                let done = bench.measure(channel, group.measured.len(), &cell)?;
                self.tell(channel, &Told::Measured(group.ranks, Box::new(done.clone())))?;
                group.measured.push(done);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All GPUs and pairs of ranks come first, with all tasks, then further numbers.
    #[test]
    fn order() {
        let order: Vec<(usize, usize)> =
            turns(&[8, 2, 4], What::Native).into_iter().map(|(ranks, tasks)| (ranks, tasks.len())).collect();
        assert_eq!(order, [(8, 7), (2, 7), (8, 3), (2, 3), (4, 7), (4, 3)]);
        assert_eq!(turns(&[2], What::Native).len(), 2);
        assert!(turns(&[], What::Native).is_empty());
        assert_eq!(turns(&[4, 2], What::Registered).len(), 2);
    }

    /// If ranks took long to be ready, the least time counts from then on.
    #[test]
    fn time_left() {
        let grid = Grid::new(Vec::new(), 1, 0);
        let effort = |time| Effort {
            numbers: vec![],
            grid: grid.clone(),
            repeat: 5,
            batch_us: 1.0,
            beside: 0,
            what: What::Native,
            time,
        };
        let began = Instant::now().checked_sub(Duration::from_secs(4)).unwrap();
        let left =
            |time| deadline_of(&effort(time), began).saturating_duration_since(Instant::now()).as_secs_f64();
        assert!((left(Some(Time { all: 14.0, measuring_least: 2.0 })) - 10.0).abs() < 0.5);
        assert!((left(Some(Time { all: 5.0, measuring_least: 2.0 })) - 2.0).abs() < 0.5);
        assert!(left(None) > 1e5);
    }
}
