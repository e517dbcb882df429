//! Runs ranks that find limits, and concludes the limits from their measurements.

use super::search::{Grid, Task};
use super::written::{self, Tuned};
use crate::LIMITS_RANK;
use crate::bench::CellDone;
use crate::bench::adaptive::{Effort, Group, Job, Time, Told, What};
use crate::machine::Machine;
use crate::ranks::{self, Launch, Variable};
use anyhow::{Context, Result};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};
use windlass_transport::tuning::Collective;
use windlass_transport::tuning::file::Key;

/// Whether ranks run without a variable of the user's, since it would change the measurement or print much. Examples are Windlass's
/// options, above all checks and traces, and tools that inject themselves. No limit may depend on them.
fn is_left_out(name: &str) -> bool {
    let is_option =
        name.starts_with("WINDLASS") && !name.starts_with("WINDLASS_SIM_") && name != "WINDLASS_NCCL";
    let is_tool =
        name.contains("_INJECTION") || name.starts_with("NSYS_") || name.starts_with("NCCL_PROFILE");
    let is_debug = name.starts_with("NCCL_DEBUG") || ["CUDA_LAUNCH_BLOCKING", "LD_PRELOAD"].contains(&name);
    is_option || is_tool || is_debug || name == "NCCL_COMM_ID"
}

/// Ranks that report nothing for this time are stuck.
const SILENCE: Duration = Duration::from_secs(120);

/// The results for one number of ranks.
pub struct OfRanks {
    pub group: Group,
    pub what: What,
    /// A limit for each collective that was measured to its end.
    pub tuned: Vec<Tuned>,
    /// Whether Windlass's kernels ran anything.
    pub is_native: bool,
    pub measured: Vec<CellDone>,
}

impl Effort {
    /// An effort for which a command may wait once: a coarse grid, short batches, one run for all numbers of ranks.
    pub fn quick(devices: usize, machine: &Machine) -> Effort {
        Effort {
            numbers: quick_numbers(devices),
            grid: Grid::new(usual_sizes(machine), 2, 2),
            repeat: 5,
            batch_us: 400.0,
            beside: 0,
            what: What::Native,
            time: Some(Time { all: 5.0, measuring_least: 2.0 }),
        }
    }

    /// The same effort, if so much of its time is over before the ranks start.
    pub fn after(self, spent: Duration) -> Effort {
        let left = |time: Time| Time { all: (time.all - spent.as_secs_f64()).max(0.0), ..time };
        Effort { time: self.time.map(left), ..self }
    }
}

/// All GPUs first, then pairs, then powers of two, as jobs have them, then the rest; larger numbers come first.
fn quick_numbers(devices: usize) -> Vec<usize> {
    let most = devices.min(windlass_transport::native::RANKS_MAX);
    let mut numbers: Vec<usize> = (2..=most).collect();
    numbers.sort_by_key(|ranks| (*ranks != most, *ranks != 2, !ranks.is_power_of_two(), Reverse(*ranks)));
    numbers
}

/// Powers of two, from 1 KiB to 256 MiB.
pub fn usual_sizes(machine: &Machine) -> Vec<u64> {
    let last = if machine.is_simulated() { 16 } else { 28 };
    (10..=last).map(|shift| 1 << shift).collect()
}

/// Runs the ranks, one for each device of the largest group, and not beyond a deadline. Calls `progress` for each measurement.
pub fn measure(
    machine: &Machine,
    windlass: &Path,
    effort: &Effort,
    deadline: Option<Instant>,
    mut progress: impl FnMut(usize, &CellDone),
) -> Result<Vec<OfRanks>> {
    let mut forced = tempfile::NamedTempFile::new().context("cannot make a temporary file")?;
    let devices = &machine.gpus.devices;
    let ranks = effort.numbers.iter().copied().max().unwrap_or(0);
    let first = devices.first().context("no device")?;
    let (major, minor) = first.compute_capability;
    let (capability, multiprocessors) =
        (u16::try_from(major * 10 + minor)?, u16::try_from(first.multiprocessors)?);
    let key = |ranks: &usize, collective| {
        let multicast = windlass_transport::tuning::file::Multicast::No;
        Key { collective, ranks: *ranks, capability, multiprocessors, multicast }
    };
    let numbers = effort.numbers.iter();
    let keys = numbers.clone().flat_map(|ranks| Collective::ALL.map(|collective| key(ranks, collective)));
    let others = match effort.what {
        What::Native => Vec::new(),
        What::Registered => numbers.map(|ranks| key(ranks, Collective::AllGather)).collect(),
    };
    forced.write_all(written::forced(&keys.collect::<Vec<_>>(), &others).as_bytes())?;
    let launch = Launch {
        subcommand: LIMITS_RANK,
        ranks,
        environment: environment(machine, effort.what, forced.path()),
        without: is_left_out,
        silence: SILENCE,
        deadline,
    };
    let job = |rank| Job {
        rank,
        ranks,
        plain: machine.nccl.clone(),
        windlass: windlass.to_owned(),
        effort: effort.clone(),
        simulated: machine.is_simulated(),
    };
    let mut groups: Vec<Group> = Vec::new();
    let mut measured: BTreeMap<usize, Vec<CellDone>> = BTreeMap::new();
    let told = |_, told| match told {
        Told::Group(group) => groups.push(group),
        Told::Measured(ranks, done) => {
            progress(ranks, &done);
            measured.entry(ranks).or_default().push(*done);
        }
    };
    ranks::run::<_, _, ()>(&launch, job, |_| Vec::new(), told)?;
    Ok(groups
        .into_iter()
        .map(|group| {
            let measured = measured.remove(&group.ranks).unwrap_or_default();
            conclude(group, effort.what, &effort.grid, measured)
        })
        .collect())
}

/// Variables with which all sizes go to Windlass's kernels, whatever the user has set. Earlier limits are not read.
fn environment(machine: &Machine, what: What, forced: &Path) -> Vec<Variable> {
    let set: [(&str, &OsStr); 6] = [
        ("WINDLASS_TUNING", forced.as_os_str()),
        ("WINDLASS_CACHE", "off".as_ref()),
        ("WINDLASS_COLLECTIVES", "auto".as_ref()),
        ("WINDLASS_ORDER", "auto".as_ref()),
        ("WINDLASS_PEER_GROUPS", "on".as_ref()),
        ("WINDLASS", "on".as_ref()),
    ];
    // Windlass registers nothing in lazy communicators.
    let eager: Option<(&str, &OsStr)> = (what == What::Registered).then(|| ("WINDLASS_LAZY", "off".as_ref()));
    let set = set.into_iter().chain(eager).map(|(name, value)| (name.into(), value.to_owned()));
    machine.environment().into_iter().chain(set).collect()
}

/// The limits that follow. A task that was not measured to its end has none.
fn conclude(group: Group, what: What, grid: &Grid, measured: Vec<CellDone>) -> OfRanks {
    let tuned = |task: &Task| {
        let limit = grid.limit(task, &measured)?;
        let key = Key {
            collective: task.collective,
            ranks: group.ranks,
            capability: group.place.capability,
            multiprocessors: group.place.multiprocessors,
            multicast: group.place.multicast(),
        };
        Some(Tuned::of(task, key, limit, &measured))
    };
    let tuned: Vec<Tuned> = what.tasks().into_iter().flatten().filter_map(tuned).collect();
    let is_native = measured.iter().any(|done| done.path == "native");
    OfRanks { group, what, tuned, is_native, measured }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::adaptive::Place;
    use crate::bench::tests::cell;
    use crate::limits::search::{Step, USUAL};

    /// All GPUs first, then pairs, then four ranks, then the others.
    #[test]
    fn numbers() {
        assert_eq!(quick_numbers(8), [8, 2, 4, 7, 6, 5, 3]);
        assert_eq!(quick_numbers(16)[..2], [8, 2]);
        assert_eq!(quick_numbers(3), [3, 2]);
        assert_eq!(quick_numbers(2), [2]);
        assert_eq!(quick_numbers(1), [0; 0]);
    }

    /// A task that was not measured to its end has no limit, and neither has one that Windlass left to NCCL.
    #[test]
    fn conclusions() {
        let grid = Grid::new(vec![1024], 1, 0);
        let place: Place = serde_json::from_value(serde_json::json!({
            "circumstances": ["ranks 2"], "capability": 90, "multiprocessors": 132, "multicast": false,
        }))
        .unwrap();
        let group = Group { ranks: 2, place, nccl_version: 22809 };
        let Step::Measure(graph) = grid.next(&USUAL[0], &[]) else { panic!("nothing was measured") };
        let done = |asked| CellDone { cell: asked, ratios: vec![0.5; 5], ..cell(0.5) };
        let eager = crate::bench::Cell { mode: crate::bench::Mode::Eager, ..graph };
        let of = |measured| conclude(group.clone(), What::Native, &grid, measured);
        assert_eq!(of(vec![done(graph)]).tuned.len(), 0);
        let all = of(vec![done(graph), done(eager)]);
        assert_eq!(all.tuned.len(), 1);
        assert_eq!(all.tuned[0].cell.native_bytes_max, Some(1024));
        let forwarded = of(vec![CellDone { path: "forward".into(), ..done(graph) }]);
        assert_eq!((forwarded.tuned.len(), forwarded.is_native), (0, false));
    }
}
