//! Measures symmetric memory: repeated `ncclMemAlloc`, windows over its blocks, and whole cycles with an all-gather in
//! between.
//!
//! The sides take turns as NCCL, Windlass, Windlass, NCCL: memory that Windlass keeps for two seconds is still there at its second
//! turn.

mod side;
pub mod table;
mod usage;

use super::statistics::{Steady, steady};
use super::worker::{Job, counts_of};
use crate::gpu::Gpu;
use crate::nccl::Nccl;
use crate::ranks::Channel;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use side::Side;
use std::path::Path;
use std::time::Duration;
use usage::Resource;

/// Sizes are multiples of this: a window has whole pages, shared out among all ranks.
pub const STEP: u64 = 4096;
/// Repetitions of blocks and of windows, for each side; cycles have a number of their own.
const REPETITIONS: usize = 50;
/// By then NCCL's late frees and Windlass's threads are done.
const SETTLED_AFTER: Duration = Duration::from_millis(300);

/// What to measure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Wanted {
    /// Bytes of the blocks.
    pub sizes: Vec<u64>,
    pub cycles: usize,
}

/// The results.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Symmetric {
    pub costs: Vec<Cost>,
    pub growths: Vec<Growth>,
    /// Why windows, and with them cycles, were not measured.
    pub without_windows: Option<String>,
}

/// Microseconds of one step; a repetition counts by its slowest rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    pub what: What,
    pub bytes: u64,
    /// Repetitions of each side.
    pub repetitions: usize,
    pub plain_us: Steady,
    pub windlass_us: Steady,
    pub windlass_pool: Pool,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    Alloc,
    Free,
    AllocAndFree,
    Register,
    Deregister,
    Cycle,
}

/// The counts of Windlass's pool in the same repetitions: the fewest hits and the most misses of any rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pool {
    pub hits: u64,
    pub misses: u64,
}

/// What the cycles of one size took and did not free.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Growth {
    pub grown: Resource,
    pub bytes: u64,
    /// Cycles of each side.
    pub cycles: usize,
    pub plain: Grown,
    pub windlass: Grown,
}

/// The rank with the largest growth: its use before the first counted cycles, and what all cycles added.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Grown {
    pub before: i64,
    pub added: i64,
}

/// The work of one repetition.
#[derive(Clone, Copy, PartialEq)]
enum Work {
    /// Allocates and frees.
    Blocks,
    /// Registers and deregisters a window over a new block.
    Windows,
    /// Allocates, registers, gathers, waits, deregisters and frees.
    Cycles,
}

impl Work {
    const ALL: [Work; 3] = [Work::Blocks, Work::Windows, Work::Cycles];

    /// The steps whose times a repetition gives, in order.
    fn tells(self) -> &'static [What] {
        match self {
            Work::Blocks => &[What::Alloc, What::Free, What::AllocAndFree],
            Work::Windows => &[What::Register, What::Deregister],
            Work::Cycles => &[What::Cycle],
        }
    }

    /// The microseconds of one repetition's steps.
    fn run(self, side: &Side, bytes: usize) -> Result<Vec<f64>> {
        match self {
            Work::Blocks => side.block(bytes),
            Work::Windows => side.window(bytes),
            Work::Cycles => side.cycle(bytes),
        }
    }
}

/// Measures what the job asks for; the first side is the real library. All ranks get the same.
pub fn measure(channel: &mut Channel, gpu: &Gpu, sides: [&Nccl; 2], job: &Job) -> Result<Symmetric> {
    let mut found = Symmetric::default();
    let Some(wanted) = &job.symmetric else { return Ok(found) };
    sides.into_iter().try_for_each(|nccl| nccl.memory_functions().map(drop)).context("--symmetric-memory")?;
    found.without_windows =
        sides.into_iter().find_map(|nccl| nccl.has_windows().err()).map(|error| error.to_string());
    let dump = tempfile::NamedTempFile::new().context("cannot make a temporary file")?;
    let mut turns = Turns {
        sides: [Side::new(channel, gpu, sides[0], job)?, Side::new(channel, gpu, sides[1], job)?],
        channel,
        gpu,
        windlass: sides[1],
        dump: dump.path(),
    };
    for bytes in &wanted.sizes {
        for work in Work::ALL {
            if work != Work::Blocks && found.without_windows.is_some() {
                continue;
            }
            let repetitions = if work == Work::Cycles { wanted.cycles } else { REPETITIONS };
            let taken = turns.take(work, *bytes as usize, repetitions)?;
            found.costs.extend(costs(&taken, work, *bytes));
            if work == Work::Cycles {
                found.growths.extend(growths(&taken, *bytes, repetitions));
            }
        }
    }
    let [plain, windlass] = turns.sides;
    windlass.destroy()?;
    plain.destroy()?;
    Ok(found)
}

struct Turns<'a> {
    sides: [Side<'a>; 2],
    channel: &'a mut Channel,
    gpu: &'a Gpu,
    windlass: &'a Nccl,
    /// The file for Windlass's counters.
    dump: &'a Path,
}

/// The results of both sides' turns on one rank.
#[derive(Serialize, Deserialize)]
struct Taken {
    /// Microseconds by side and step, in the order of measuring.
    times: [Vec<Vec<f64>>; 2],
    /// Growth by side and resource.
    grown: [Vec<Grown>; 2],
    pool: Pool,
}

impl Turns<'_> {
    /// Runs two turns of each side with half of the repetitions each, after one uncounted repetition: what is made only once,
    /// or was freed in between, is no growth. Returns all ranks' numbers.
    fn take(&mut self, work: Work, bytes: usize, repetitions: usize) -> Result<Vec<Taken>> {
        let mut times = [(); 2].map(|()| vec![Vec::new(); work.tells().len()]);
        let mut usages = [Vec::new(), Vec::new()];
        let before = self.pool()?;
        for (turn, side) in [0, 1, 1, 0].into_iter().enumerate() {
            let mut run = |turns: &Self| -> Result<()> {
                let numbers = work.run(&turns.sides[side], bytes)?;
                times[side].iter_mut().zip(numbers).for_each(|(list, number)| list.push(number));
                Ok(())
            };
            self.line_up(side)?;
            run(self)?;
            let before = self.usage()?;
            self.line_up(side)?;
            for _ in 0..(repetitions + 1 - turn / 2) / 2 {
                run(self)?;
            }
            usages[side].push([before, self.usage()?]);
            if turn == 2 {
                // Frees the pool now, else it would shrink during the other side's turn. The next measurement then
                // also begins without kept memory.
                self.windlass.trim()?;
                std::thread::sleep(SETTLED_AFTER);
            }
        }
        let after = self.pool()?;
        let pool = Pool { hits: after.hits - before.hits, misses: after.misses - before.misses };
        self.channel.exchange(&Taken { times, grown: usages.map(|turns| grown(&turns)), pool })
    }

    /// All ranks wait for each other, so that a late rank does not add to the times.
    fn line_up(&mut self, side: usize) -> Result<()> {
        self.channel.exchange(&0)?;
        self.sides[side].line_up()
    }

    /// This process's use of resources when all ranks are here.
    fn usage(&mut self) -> Result<[i64; Resource::COUNT]> {
        self.channel.exchange(&0)?;
        usage::now(self.gpu)
    }

    /// The pool's counts of Windlass so far.
    fn pool(&self) -> Result<Pool> {
        let counted = counts_of(self.windlass, self.dump)?.pool;
        let of = |name: &str| counted.get(name).copied().unwrap_or(0);
        Ok(Pool { hits: of("hits"), misses: of("misses") })
    }
}

/// The costs over all ranks.
fn costs(ranks: &[Taken], work: Work, bytes: u64) -> Vec<Cost> {
    let hits = ranks.iter().map(|taken| taken.pool.hits).min().unwrap_or(0);
    let misses = ranks.iter().map(|taken| taken.pool.misses).max().unwrap_or(0);
    let cost = |(index, what): (usize, &What)| {
        let [plain, windlass] =
            [0, 1].map(|side| ranks.iter().map(|taken| taken.times[side][index].clone()).collect::<Vec<_>>());
        Cost {
            what: *what,
            bytes,
            repetitions: plain.first().map_or(0, Vec::len),
            plain_us: steady(&plain),
            windlass_us: steady(&windlass),
            windlass_pool: Pool { hits, misses },
        }
    };
    work.tells().iter().enumerate().map(cost).collect()
}

/// The growth over all ranks.
fn growths(ranks: &[Taken], bytes: u64, cycles: usize) -> Vec<Growth> {
    let most = |side: usize, index: usize| {
        ranks.iter().map(|taken| taken.grown[side][index]).max_by_key(|grown| grown.added)
    };
    let growth = |(index, grown): (usize, Resource)| {
        Some(Growth { grown, bytes, cycles, plain: most(0, index)?, windlass: most(1, index)? })
    };
    Resource::ALL.into_iter().enumerate().filter_map(growth).collect()
}

/// The growth in a side's turns, each from its beginning to its end. Growth between them belongs to the other side.
fn grown(turns: &[[[i64; Resource::COUNT]; 2]]) -> Vec<Grown> {
    let of = |index: usize| Grown {
        before: turns.first().map_or(0, |[before, _]| before[index]),
        added: turns.iter().map(|[before, after]| after[index] - before[index]).sum(),
    };
    (0..Resource::COUNT).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times are the slowest rank's, growth the largest of any rank, hits the fewest of any rank.
    #[test]
    fn over_ranks() {
        let taken = |plain: [f64; 3], through: [f64; 3], added: i64, hits| Taken {
            times: [vec![plain.to_vec()], vec![through.to_vec()]],
            grown: [(); 2].map(|()| vec![Grown { before: hits as i64, added }; Resource::COUNT]),
            pool: Pool { hits, misses: 3 - hits },
        };
        let ranks =
            [taken([9.0, 1.0, 2.0], [4.0, 1.0, 1.0], -1, 2), taken([8.0, 3.0, 1.0], [5.0, 0.5, 0.5], 7, 1)];
        let found = costs(&ranks, Work::Cycles, 4096);
        let expected = Cost {
            what: What::Cycle,
            bytes: 4096,
            repetitions: 3,
            plain_us: Steady { first: 9.0, median: 2.5, worst: 3.0 },
            windlass_us: Steady { first: 5.0, median: 1.0, worst: 1.0 },
            windlass_pool: Pool { hits: 1, misses: 2 },
        };
        assert_eq!(found, [expected]);
        let grown = growths(&ranks, 4096, 2);
        assert_eq!(grown.len(), Resource::COUNT);
        assert_eq!((grown[0].grown, grown[0].plain), (Resource::MemoryBytes, Grown { before: 1, added: 7 }));
    }

    /// Growth between a side's turns is not counted for the side.
    #[test]
    fn grows() {
        let found = grown(&[[[10, 1, 5], [12, 1, 5]], [[100, 1, 5], [101, 3, 4]]]);
        let expected = [(10, 3), (1, 2), (5, -1)].map(|(before, added)| Grown { before, added });
        assert_eq!(found, expected);
    }
}
