//! Decides which size to measure next, and the limit that follows. Pure.
//!
//! The search begins with a coarse grid of sizes, from the smallest to the first at which Windlass does not win. Then come the sizes
//! between that one and the last that won, and then the size below the limit, which must win, too. Unclear sizes are measured again, and
//! count as lost if they stay unclear.

use super::rule::{Finding, Standard, finding};
use crate::bench::operation::Operation;
use crate::bench::{Cell, CellDone, Mode};
use crate::element::{Element, MAX, Reduction, SUM, element};
use nccl_sys::types::{ncclBfloat16, ncclFloat16, ncclFloat32};
use serde::{Deserialize, Serialize};
use windlass_transport::tuning::file::NATIVE_BYTES_MAX;
use windlass_transport::tuning::{Collective, REGISTERED_BYTES_MIN, unmeasured_bytes_max};

/// The modes in which a size must win. Graphs come first: a size that loses there needs no eager batches.
const MODES: &[Mode] = &[Mode::Graph, Mode::Eager];

/// One limit to find.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Task {
    pub collective: Collective,
    pub operation: Operation,
}

/// All-gathers that NCCL runs with buffers that Windlass registers. They are measured separately, since native ones
/// would take their place.
pub const REGISTERED: [Task; 1] =
    [Task { collective: Collective::RegisteredAllGather, operation: Operation::AllGather }];

/// Tasks for sums of short floats and for collectives that only move data, the most used first.
pub const USUAL: [Task; 7] = [
    Task { collective: Collective::AllReduce, operation: Operation::AllReduce },
    Task { collective: Collective::AllGather, operation: Operation::AllGather },
    Task { collective: Collective::ReduceScatter, operation: Operation::ReduceScatter },
    Task { collective: Collective::Broadcast, operation: Operation::Broadcast },
    Task { collective: Collective::Reduce, operation: Operation::Reduce },
    Task { collective: Collective::UnevenAllGather, operation: Operation::UnevenAllGather },
    Task { collective: Collective::UnevenReduceScatter, operation: Operation::UnevenReduceScatter },
];

/// Tasks for other types and operations.
pub const OTHER: [Task; 3] = [
    Task { collective: Collective::OtherAllReduce, operation: Operation::AllReduce },
    Task { collective: Collective::OtherReduceScatter, operation: Operation::ReduceScatter },
    Task { collective: Collective::OtherReduce, operation: Operation::Reduce },
];

/// Above this size NCCL registers all-gathers' buffers for Windlass, which is another measurement.
const ALL_GATHER_BYTES_MAX: u64 = 64 << 20;

impl Task {
    /// The element to measure with. Several types share a limit, so a slow one stands for all. On 2 × H100 a reduce of 16 MiB takes 1.03 of NCCL's
    /// time with bf16 (docs/measurements/2026-11-26-limits), 0.91 with fp32 (2026-11-26-crossovers).
    pub fn element(&self) -> Element {
        element(match self.operation.reduces() {
            true if self.collective.is_other() => ncclFloat16,
            true => ncclBfloat16,
            false => ncclFloat32,
        })
    }

    /// The reduction to measure with. Of other types and operations, maxima of fp16 are slow. On 2 × H100 a reduce of 4 MiB takes 0.99 of NCCL's
    /// time with these (docs/measurements/2026-11-26-limits), 0.74 to 0.79 with sums of integers and fp64 (2026-11-26-other-types).
    pub fn reduction(&self) -> Reduction {
        if self.collective.is_other() { MAX } else { SUM }
    }

    /// The standard for a size. Up to the limit of unmeasured GPUs, Windlass runs the collective anyway.
    pub fn standard(&self, bytes: u64) -> Standard {
        let is_ours = unmeasured_bytes_max(self.collective).is_some_and(|usual| bytes <= usual);
        if is_ours { Standard::NotSlower } else { Standard::Faster }
    }

    /// The path of calls that are Windlass's.
    pub fn path(&self) -> &'static str {
        if self.is_registered() { "registered" } else { "native" }
    }

    /// The modes to measure. In graphs NCCL registers buffers by itself.
    fn modes(&self) -> &'static [Mode] {
        if self.is_registered() { &[Mode::Eager] } else { MODES }
    }

    fn is_registered(&self) -> bool {
        self.collective == Collective::RegisteredAllGather
    }

    fn cell(&self, bytes: u64, mode: Mode) -> Cell {
        Cell { operation: self.operation, bytes, mode, element: self.element() }
    }

    /// Whether a measurement belongs to this task.
    pub fn owns(&self, done: &CellDone) -> bool {
        done.cell.operation == self.operation && done.cell.element == self.element()
    }
}

/// The sizes that may be measured, and how often.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Grid {
    /// The sizes, ascending.
    pub sizes: Vec<u64>,
    /// Every how manyth size belongs to the coarse grid.
    pub stride: usize,
    /// How often an unclear size is measured again.
    pub again: usize,
    /// How often a size that NCCL wins is measured again.
    pub lost_again: usize,
}

/// The next step to a limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    Measure(Cell),
    /// The limit: the largest size up to which all sizes win, or none.
    Found(Option<u64>),
    /// Windlass's kernels run no call of the task, so there is no limit.
    NotOurs,
}

enum Standing {
    Unknown(Cell),
    Won,
    Lost,
    NotOurs,
}

/// The additional rounds of unclear sizes at the second look, after everything else was measured.
const SECOND_LOOK: usize = 2;

impl Grid {
    /// The grid of the first look.
    pub fn new(sizes: Vec<u64>, stride: usize, again: usize) -> Grid {
        Grid { sizes, stride, again, lost_again: 0 }
    }

    /// The grid of a second look: a size may have lost because of a disturbance that is over. All rounds count together.
    pub fn second_look(&self) -> Grid {
        Grid { again: self.again + SECOND_LOOK, lost_again: 1, ..self.clone() }
    }

    /// The limit of a task, by measurements in the order in which they were made. It is the second look's if that was completed, else the
    /// first look's.
    pub fn limit(&self, task: &Task, measured: &[CellDone]) -> Option<Option<u64>> {
        let first = || (0..=measured.len()).find_map(|count| self.found(task, &measured[..count]).ok());
        self.second_look().found(task, measured).ok().or_else(first)
    }

    /// The next step of a task, by the measurements of all tasks.
    pub fn next(&self, task: &Task, measured: &[CellDone]) -> Step {
        self.found(task, measured).map_or_else(|step| step, Step::Found)
    }

    /// The limit of a task, or the step before it is known.
    fn found(&self, task: &Task, measured: &[CellDone]) -> Result<Option<u64>, Step> {
        let sizes = self.sizes_of(task);
        let Some(last) = sizes.len().checked_sub(1) else { return Ok(None) };
        let wins = |index: usize| match self.standing(task, sizes[index], measured) {
            Standing::Unknown(cell) => Err(Step::Measure(cell)),
            Standing::NotOurs if index == 0 => Err(Step::NotOurs),
            Standing::Won => Ok(true),
            Standing::Lost | Standing::NotOurs => Ok(false),
        };
        let mut won: Option<usize> = None;
        let mut lost = sizes.len();
        for index in (0..last).step_by(self.stride.max(1)).chain([last]) {
            if !wins(index)? {
                lost = index;
                break;
            }
            won = Some(index);
        }
        let Some(mut won) = won else { return Ok(None) };
        for index in won + 1..lost {
            if !wins(index)? {
                break;
            }
            won = index;
        }
        // If two neighbours lose, no size between them counts.
        while won > 0 && !wins(won - 1)? {
            let Some(below) = won.checked_sub(2) else { return Ok(None) };
            won = below;
        }
        // If the largest size still wins, the limit is open: the cost of registering does not grow with the size.
        let is_endless = task.is_registered() && won == last;
        Ok(Some(if is_endless { NATIVE_BYTES_MAX } else { sizes[won] }))
    }

    /// The sizes at which a task can be measured.
    pub fn sizes_of(&self, task: &Task) -> &[u64] {
        let (least, most) = match task.collective {
            Collective::AllGather => (0, ALL_GATHER_BYTES_MAX),
            Collective::RegisteredAllGather => (REGISTERED_BYTES_MIN, u64::MAX),
            _ => (0, u64::MAX),
        };
        let place = |bytes: u64| self.sizes.partition_point(|size| *size < bytes);
        &self.sizes[place(least)..place(most.saturating_add(1))]
    }

    fn standing(&self, task: &Task, bytes: u64, measured: &[CellDone]) -> Standing {
        for mode in task.modes() {
            let cell = task.cell(bytes, *mode);
            let rounds = measured.iter().filter(|done| done.cell == cell);
            let count = rounds.clone().count();
            match finding(rounds, task.path(), task.standard(bytes)) {
                _ if count == 0 => return Standing::Unknown(cell),
                Finding::Windlass => {}
                Finding::Unclear if count <= self.again => return Standing::Unknown(cell),
                Finding::Nccl if count <= self.lost_again => return Standing::Unknown(cell),
                Finding::Unclear | Finding::Nccl => return Standing::Lost,
                Finding::NotOurs => return Standing::NotOurs,
            }
        }
        Standing::Won
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::cell;
    use windlass_transport::tuning::UNMEASURED_BYTES_MAX;

    const QUICK: usize = 2;
    const ALL: usize = 1;

    fn grid(stride: usize) -> Grid {
        Grid::new((10..=28).map(|shift| 1 << shift).collect(), stride, 2)
    }

    /// Pseudo-random numbers, the same in every run.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> f64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut bits = self.0;
            bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((bits ^ (bits >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
        }

        /// Approximately normal, with mean 0 and deviation 1.
        fn normal(&mut self) -> f64 {
            (0..12).map(|_| self.next()).sum::<f64>() - 6.0
        }
    }

    /// Times of one collective over `ranks` ranks: a start time, and bytes divided by a bandwidth.
    #[derive(Clone, Copy)]
    struct Curves {
        ranks: usize,
        /// Microseconds to start and bytes for each microsecond, of NCCL and of Windlass.
        nccl: (f64, f64),
        windlass: (f64, f64),
        noise: f64,
        /// How often a batch takes up to three times as long.
        loaded: f64,
        /// The factor by which one rank is slower.
        slow: f64,
    }

    impl Curves {
        fn us(side: (f64, f64), bytes: u64) -> f64 {
            side.0 + bytes as f64 / side.1
        }

        fn ratio(&self, bytes: u64) -> f64 {
            Self::us(self.windlass, bytes) / Self::us(self.nccl, bytes)
        }

        /// The largest size of the grid up to which the rule holds without noise.
        fn crossover(&self, sizes: &[u64]) -> Option<u64> {
            let most = |bytes: u64| if bytes <= UNMEASURED_BYTES_MAX { 1.02 } else { 0.95 };
            sizes.iter().copied().take_while(|bytes| self.ratio(*bytes) <= most(*bytes)).last()
        }

        fn batch(&self, side: (f64, f64), bytes: u64, random: &mut Random) -> f64 {
            let of_rank = |rank: usize, random: &mut Random| {
                let own = if rank == 0 { self.slow } else { 1.0 };
                Self::us(side, bytes) * own * (1.0 + self.noise * random.normal()).max(0.5)
            };
            let slowest = (0..self.ranks).map(|rank| of_rank(rank, random)).fold(0.0, f64::max);
            let load = if random.next() < self.loaded { 1.0 + 2.0 * random.next() } else { 1.0 };
            slowest * load
        }

        fn measure(&self, asked: Cell, pairs: usize, random: &mut Random) -> CellDone {
            let ratio = |random: &mut Random| {
                self.batch(self.windlass, asked.bytes, random) / self.batch(self.nccl, asked.bytes, random)
            };
            let ratios = (0..pairs).map(|_| ratio(random)).collect();
            CellDone { cell: asked, bytes: asked.bytes, ratios, ..cell(1.0) }
        }

        /// The limit that is found, and the number of measurements.
        fn search(&self, grid: &Grid, random: &mut Random) -> (Option<u64>, usize) {
            let mut measured = Vec::new();
            loop {
                match grid.next(&USUAL[0], &measured) {
                    Step::Measure(cell) => measured.push(self.measure(cell, 5, random)),
                    Step::Found(limit) => return (limit, measured.len()),
                    Step::NotOurs => panic!("all is native"),
                }
                assert!(measured.len() < 200, "no end");
            }
        }
    }

    /// Windlass starts sooner and has less bandwidth, so the curves cross. The values are measured or modelled, by
    /// ranks.
    fn curves() -> Vec<Curves> {
        let of =
            |(ranks, nccl, windlass)| Curves { ranks, nccl, windlass, noise: 0.0, loaded: 0.0, slow: 1.0 };
        [
            (2, (12.0, 250e3), (4.0, 240e3)),
            (2, (12.0, 250e3), (4.0, 290e3)),
            (3, (14.0, 240e3), (6.0, 150e3)),
            (4, (16.0, 240e3), (7.0, 120e3)),
            (5, (18.0, 250e3), (9.0, 90e3)),
            (8, (21.0, 250e3), (12.0, 60e3)),
            (8, (12.0, 250e3), (13.0, 60e3)),
        ]
        .map(of)
        .to_vec()
    }

    fn place(limit: Option<u64>) -> i64 {
        limit.map_or(9, |bytes| bytes.trailing_zeros().into())
    }

    /// Without noise the limit is the crossover, with the coarse grid and with the whole one, which takes longer.
    #[test]
    fn finds_the_crossover() {
        for curves in curves() {
            let (mut random, whole) = (Random(1), grid(ALL));
            let expected = curves.crossover(&whole.sizes);
            let (limit, all) = curves.search(&whole, &mut random);
            assert_eq!(limit, expected, "{} ranks", curves.ranks);
            let (limit, some) = curves.search(&grid(QUICK), &mut random);
            assert_eq!(limit, expected, "{} ranks", curves.ranks);
            assert!(some <= all && some <= 24, "{some} of {all}");
        }
    }

    /// With noise the limit is at most one step from the crossover.
    #[test]
    fn finds_it_in_noise() {
        let mut random = Random(2);
        for base in curves() {
            for (noise, slow) in [(0.01, 1.0), (0.02, 1.0), (0.02, 1.3)] {
                for _ in 0..40 {
                    let curves = Curves { noise, slow, ..base };
                    let expected = place(curves.crossover(&grid(QUICK).sizes));
                    let limit = place(curves.search(&grid(QUICK), &mut random).0);
                    let ranks = curves.ranks;
                    assert!(
                        (expected - 1..=expected + 1).contains(&limit),
                        "{ranks}: {limit} for {expected}"
                    );
                }
            }
        }
    }

    /// Under load or heavy noise the limit may be lower. It is at most one step above the crossover, or what Windlass runs anyway.
    #[test]
    fn is_never_far_above() {
        let mut random = Random(3);
        for base in curves() {
            for (noise, loaded) in [(0.02, 0.1), (0.02, 0.5), (0.1, 0.0), (0.3, 0.3)] {
                for _ in 0..40 {
                    let curves = Curves { noise, loaded, ..base };
                    let expected = place(curves.crossover(&grid(QUICK).sizes));
                    let limit = place(curves.search(&grid(QUICK), &mut random).0);
                    let most = place(Some(UNMEASURED_BYTES_MAX)).max(expected + 1);
                    assert!(limit <= most, "{}: {limit} for {expected}", curves.ranks);
                }
            }
        }
    }

    fn done(asked: Cell, ratio: f64) -> CellDone {
        CellDone { cell: asked, bytes: asked.bytes, ratios: vec![ratio; 5], ..cell(ratio) }
    }

    /// The limit and the measured sizes, if measurements have these ratios.
    fn limit_of(grid: &Grid, ratios: &[f64]) -> (Option<u64>, Vec<u64>) {
        let mut measured: Vec<CellDone> = Vec::new();
        loop {
            match grid.next(&USUAL[0], &measured) {
                Step::Measure(cell) => {
                    let index = grid.sizes.iter().position(|bytes| *bytes == cell.bytes).unwrap();
                    measured.push(done(cell, ratios[index]));
                }
                Step::Found(limit) => {
                    let mut sizes: Vec<u64> = measured.iter().map(|done| done.bytes).collect();
                    sizes.dedup();
                    return (limit, sizes);
                }
                Step::NotOurs => panic!("all is native"),
            }
        }
    }

    /// Sizes at which Windlass must be faster.
    fn mebibytes(sizes: &[u64]) -> Vec<u64> {
        sizes.iter().map(|size| size << 20).collect()
    }

    /// The limit ends below the first size that loses. Larger sizes that win do not count, nor does one between two that lose.
    #[test]
    fn neighbours_agree() {
        let small = Grid::new(mebibytes(&[1, 2, 4, 8, 16]), 2, 0);
        let limit = |ratios: [f64; 5]| {
            let (limit, sizes) = limit_of(&small, &ratios);
            (limit.map(|bytes| bytes >> 20), sizes.iter().map(|bytes| bytes >> 20).collect::<Vec<_>>())
        };
        assert_eq!(limit([0.5; 5]), (Some(16), vec![1, 4, 16, 8]));
        assert_eq!(limit([0.5, 0.5, 0.5, 1.0, 1.0]), (Some(4), vec![1, 4, 16, 8, 2]));
        assert_eq!(limit([0.5, 0.5, 0.5, 0.5, 1.0]).0, Some(8));
        assert_eq!(limit([0.5, 0.5, 1.0, 0.5, 0.5]), (Some(2), vec![1, 4, 2]));
        assert_eq!(limit([0.5, 1.0, 0.5, 1.0, 1.0]).0, Some(1));
        assert_eq!(limit([1.0, 0.5, 0.5, 0.5, 0.5]), (None, vec![1]));
        assert_eq!(limit_of(&Grid { sizes: vec![], ..small.clone() }, &[]).0, None);
    }

    /// Sizes that Windlass runs anyway must not be slower; for other types there are more such sizes.
    #[test]
    fn sizes_that_are_ours_anyway() {
        let kib = |size: u64| size << 10;
        for (task, of_all, beyond) in [(USUAL[0], 16, 32), (OTHER[0], 64, 128)] {
            assert_eq!(task.standard(kib(of_all)), Standard::NotSlower);
            assert_eq!(task.standard(kib(beyond)), Standard::Faster);
        }
        for task in [REGISTERED[0], OTHER[2]] {
            assert_eq!(task.standard(1), Standard::Faster);
        }
        let grid = Grid::new([4, 16, 64].map(kib).to_vec(), 1, 0);
        assert_eq!(limit_of(&grid, &[1.0, 1.01, 1.0]).0, Some(kib(16)));
        assert_eq!(limit_of(&grid, &[1.0, 1.03, 0.5]).0, Some(kib(4)));
    }

    /// An unclear size is measured again this often. All rounds count together, and then it counts as lost.
    #[test]
    fn again_where_unclear() {
        let grid = Grid::new(mebibytes(&[1]), 1, 1);
        let Step::Measure(asked) = grid.next(&USUAL[0], &[]) else { panic!("nothing was measured") };
        assert_eq!(asked.mode, Mode::Graph);
        let unclear = CellDone { ratios: vec![0.9, 0.9, 0.9, 0.9, 1.5], ..done(asked, 0.9) };
        assert_eq!(grid.next(&USUAL[0], std::slice::from_ref(&unclear)), Step::Measure(asked));
        assert_eq!(grid.next(&USUAL[0], &[unclear.clone(), unclear.clone()]), Step::Found(None));
        let eager = Cell { mode: Mode::Eager, ..asked };
        assert_eq!(grid.next(&USUAL[0], &[unclear.clone(), done(asked, 0.9)]), Step::Measure(eager));
        let forwarded = CellDone { path: "forward".into(), ..done(asked, 0.9) };
        assert_eq!(grid.next(&USUAL[0], &[forwarded]), Step::NotOurs);
    }

    /// A size that lost to a disturbance wins at the second look; one that loses again is NCCL's, after one more
    /// round.
    #[test]
    fn second_look() {
        let grid = Grid::new(mebibytes(&[1, 2, 4, 8, 16]), 1, 2);
        let task = &USUAL[0];
        let all_but = |disturbed: usize, again: f64| {
            let mut measured: Vec<CellDone> = Vec::new();
            let mut rounds = 0;
            for look in [grid.clone(), grid.second_look()] {
                while let Step::Measure(cell) = look.next(task, &measured) {
                    let is_disturbed = cell.bytes == grid.sizes[disturbed] && cell.mode == Mode::Graph;
                    let first = !measured.iter().any(|done| done.cell == cell);
                    let ratio = match (is_disturbed, first) {
                        (true, true) => 1.5,
                        (true, false) => again,
                        _ => 0.6,
                    };
                    rounds += usize::from(is_disturbed);
                    measured.push(done(cell, ratio));
                    // If the time ends after the first look, its limit holds.
                    let is_first_over = (0..=measured.len())
                        .any(|count| matches!(grid.next(task, &measured[..count]), Step::Found(_)));
                    assert_eq!(grid.limit(task, &measured).is_some(), is_first_over);
                }
            }
            (grid.limit(task, &measured).flatten().map(|bytes| bytes >> 20), rounds)
        };
        assert_eq!(all_but(2, 0.6), (Some(16), 4));
        assert_eq!(all_but(2, 1.4), (Some(2), 2));
        assert_eq!(grid.limit(task, &[]), None);
    }

    /// Registered all-gathers must win eager, on their path; if the largest size wins, the limit is open.
    #[test]
    fn registered() {
        let (task, grid) = (REGISTERED[0], Grid::new(vec![8 << 20, 16 << 20], 1, 0));
        let registered = |bytes, ratio| {
            let cell = task.cell(bytes, Mode::Eager);
            CellDone { path: "registered".into(), ..done(cell, ratio) }
        };
        let [small, large] = [(8 << 20, 0.9), (16 << 20, 0.9)].map(|(bytes, ratio)| registered(bytes, ratio));
        assert_eq!(grid.next(&task, &[small.clone(), large]), Step::Found(Some(NATIVE_BYTES_MAX)));
        assert_eq!(grid.next(&task, &[small.clone(), registered(16 << 20, 1.0)]), Step::Found(Some(8 << 20)));
        assert_eq!(grid.next(&task, &[registered(8 << 20, 1.0)]), Step::Found(None));
        let native = CellDone { path: "native".into(), ..small };
        assert_eq!(grid.next(&task, &[native]), Step::NotOurs);
    }

    /// Other types have measurements of their own, and all-gathers end where they are registered.
    #[test]
    fn tasks() {
        let (usual, other) = (USUAL[0], OTHER[0]);
        let Step::Measure(asked) = grid(QUICK).next(&other, &[]) else { panic!("nothing was measured") };
        assert_eq!(asked.element.name, "half");
        assert!(other.owns(&done(asked, 1.0)) && !usual.owns(&done(asked, 1.0)));
        assert_eq!(grid(QUICK).sizes_of(&USUAL[1]).last(), Some(&(64 << 20)));
        assert_eq!(grid(QUICK).sizes_of(&usual).last(), Some(&(256 << 20)));
        let sizes = grid(QUICK).sizes_of(&REGISTERED[0]).to_vec();
        assert_eq!((sizes.len(), sizes[0]), (6, 8 << 20));
        let mut collectives: Vec<Collective> =
            USUAL.iter().chain(&OTHER).chain(&REGISTERED).map(|task| task.collective).collect();
        collectives.sort();
        assert_eq!(collectives, Collective::ALL);
    }
}
