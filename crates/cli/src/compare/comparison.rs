//! Reduces all runs to the results: plain data, for the table and the JSON file.

use super::counting::Counters;
use super::memory::{Peaks, Source, source};
use super::row::{Difference, Row};
use super::schedule::{Purpose, Side, Turn};
use super::table;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// The results of one run.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    #[serde(flatten)]
    pub turn: Turn,
    pub seconds: f64,
    /// The figures of each metric, without the first ones that are skipped.
    pub metrics: BTreeMap<String, Vec<f64>>,
    /// Peaks of GPU memory in bytes.
    pub memory: Peaks,
    /// Windlass's counters, in a run with Windlass.
    pub counters: Option<Counters>,
    /// The real NCCLs that the run's processes had mapped, as far as they were seen.
    pub nccl: BTreeSet<PathBuf>,
    /// Processes that the command left behind and that were ended.
    pub left_behind: usize,
    pub log: PathBuf,
}

/// What the user asked for.
#[derive(Clone, Debug, Serialize)]
pub struct Request {
    /// The time in UTC.
    pub date: String,
    /// Version, commit and kernels of Windlass.
    pub windlass: String,
    pub command: Vec<String>,
    pub simulated: bool,
    pub pairs: usize,
    /// The names of metrics, in the order on the command line.
    pub metrics: Vec<String>,
    pub has_nvml: bool,
}

/// The whole result.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    #[serde(flatten)]
    pub request: Request,
    pub rows: Vec<Row>,
    /// How differences are distinguished from noise.
    pub rule: String,
    /// Notes for the reader.
    pub notes: Vec<String>,
    /// Whether memory is that of processes or of devices.
    pub memory_of: Option<Source>,
    /// The counters of the last run with Windlass.
    pub counters: Counters,
    pub runs: Vec<Run>,
}

impl Comparison {
    pub fn of(request: Request, runs: Vec<Run>) -> Comparison {
        let peaks: Vec<&Peaks> = measured(&runs).map(|run| &run.memory).collect();
        let memory_of = source(&peaks);
        let counters =
            of_side(&runs, Side::With).last().and_then(|run| run.counters.clone()).unwrap_or_default();
        let mut rows = rows(&request, &runs, memory_of);
        if counters.processes == 0 {
            rows.iter_mut().for_each(|row| row.difference = Difference::NoVerdict);
        }
        Comparison {
            rows,
            rule: table::rule(request.pairs),
            notes: notes(&request, &runs, memory_of, &counters),
            request,
            memory_of,
            counters,
            runs,
        }
    }
}

fn measured(runs: &[Run]) -> impl Iterator<Item = &Run> {
    runs.iter().filter(|run| run.turn.purpose == Purpose::Measured)
}

fn of_side(runs: &[Run], side: Side) -> impl Iterator<Item = &Run> {
    measured(runs).filter(move |run| run.turn.side == side)
}

fn rows(request: &Request, runs: &[Run], memory_of: Option<Source>) -> Vec<Row> {
    let row = |name: &str, unit: &str, value: &dyn Fn(&Run) -> f64| {
        let [without, with] =
            [Side::Without, Side::With].map(|side| of_side(runs, side).map(value).collect());
        Row::of(name, unit, without, with)
    };
    let mut rows = vec![row("wall time", "s", &|run| run.seconds)];
    for name in &request.metrics {
        rows.push(row(name, "", &|run| run.metrics.get(name).map_or(0.0, |values| median(values))));
    }
    let Some(source) = memory_of else { return rows };
    let devices: BTreeSet<usize> =
        measured(runs).flat_map(|run| run.memory.of(source).keys().copied()).collect();
    for device in devices {
        let mib =
            |run: &Run| run.memory.of(source).get(&device).copied().unwrap_or(0) as f64 / f64::from(1 << 20);
        rows.push(row(&format!("peak memory of GPU {device}"), "MiB", &mib));
    }
    rows
}

/// A figure that a program prints repeatedly counts by its median.
fn median(values: &[f64]) -> f64 {
    crate::bench::statistics::spread(&[values.to_vec()]).median
}

fn notes(request: &Request, runs: &[Run], memory_of: Option<Source>, counters: &Counters) -> Vec<String> {
    let simulated = "Both sides ran on the simulator: its times say nothing about GPUs.";
    let uncounted = "Windlass counted no communicator in the last run with it: this comparison says nothing about Windlass. The command's \
                     processes made none, or reached NCCL in another way (windlass doctor).";
    let missed = "GPU memory is looked at about ten times a second: shorter peaks are missed.";
    let memory = match (memory_of, request.has_nvml) {
        (_, false) => Some("No GPU memory is told: libnvidia-ml.so.1 is not there, or has no GPU."),
        (None, true) => Some("No GPU memory is told: no GPU's memory grew while the command ran."),
        (Some(Source::Devices), true) => Some(
            "GPU memory is the growth of the whole GPU during a run, by whichever program: the driver does not name the command's \
             processes.",
        ),
        (Some(Source::Processes), true) => None,
    };
    let left_behind = |run: &Run| {
        let (number, left) = (run.turn.number, run.left_behind);
        (left > 0).then(|| format!("Run {number} left {left} processes behind, which were ended."))
    };
    let of_runs = [request.simulated.then_some(simulated), (counters.processes == 0).then_some(uncounted)];
    let of_memory = [memory, memory_of.map(|_| missed)].into_iter().flatten().map(str::to_owned);
    let of_runs = of_runs.into_iter().flatten().map(str::to_owned).chain(other_nccl(runs));
    of_runs.chain(of_memory).chain(runs.iter().filter_map(left_behind)).collect()
}

/// A note if both sides ran over different NCCLs. If a side's was not seen, there is none.
fn other_nccl(runs: &[Run]) -> Option<String> {
    let of = |side| -> BTreeSet<&PathBuf> { of_side(runs, side).flat_map(|run| &run.nccl).collect() };
    let (without, with) = (of(Side::Without), of(Side::With));
    let words = |paths: &BTreeSet<&PathBuf>| {
        paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    };
    (!without.is_empty() && !with.is_empty() && without != with).then(|| {
        format!(
            "The sides ran over different NCCLs: without Windlass {}, with it {}. Name the first one with --nccl.",
            words(&without),
            words(&with)
        )
    })
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::compare::counting::Count;
    use crate::compare::schedule::turns;

    /// A comparison of three pairs after a warm-up, in which Windlass is faster and takes more memory.
    pub fn comparison(change: impl Fn(&mut Run)) -> Comparison {
        let request = Request {
            date: "2026-01-31T12:00:00Z".into(),
            windlass: "windlass 0.1.0".into(),
            command: vec!["train".into(), "a <b>".into()],
            simulated: false,
            pairs: 3,
            metrics: vec![r"step (\S+) ms".into()],
            has_nvml: true,
        };
        let run = |turn: Turn| {
            let (seconds, step, mib) = match (turn.purpose, turn.side) {
                (Purpose::Warmup, _) => (100.0, 100.0, 1),
                (_, Side::Without) => (10.0, 4.0, 100),
                (_, Side::With) => (9.0, 3.0, 120),
            };
            let count =
                Count { function: "ncclAllReduce".into(), path: "native".into(), calls: 8, bytes: 4096 };
            let mut run = Run {
                turn,
                seconds: seconds + turn.number as f64 / 100.0,
                metrics: BTreeMap::from([(r"step (\S+) ms".into(), vec![step, step, 77.0])]),
                memory: Peaks {
                    processes: BTreeMap::from([(1, mib << 20)]),
                    devices: BTreeMap::from([(1, (mib + 50) << 20)]),
                },
                counters: (turn.side == Side::With).then(|| Counters {
                    processes: 2,
                    communicators: 2,
                    calls: vec![count],
                }),
                nccl: BTreeSet::from([PathBuf::from("/n/libnccl.so.2")]),
                left_behind: 0,
                log: format!("/logs/{}.log", turn.name()).into(),
            };
            change(&mut run);
            run
        };
        Comparison::of(request, turns(3, 1).into_iter().map(run).collect())
    }

    /// There are rows for the wall time, metrics by their medians, and memory by GPU; the warm-up is in none.
    #[test]
    fn rows_of_runs() {
        let comparison = comparison(|_| ());
        let told: Vec<_> = comparison
            .rows
            .iter()
            .map(|row| (&*row.name, row.without.median.round(), row.with.median.round(), row.difference))
            .collect();
        let expected = [
            ("wall time", 10.0, 9.0, Difference::Lower),
            (r"step (\S+) ms", 4.0, 3.0, Difference::Lower),
            ("peak memory of GPU 1", 100.0, 120.0, Difference::Higher),
        ];
        assert_eq!(told, expected);
        assert_eq!(comparison.counters.calls[0].calls, 8);
        assert_eq!(
            comparison.notes,
            ["GPU memory is looked at about ten times a second: shorter peaks are missed."]
        );
    }

    /// The notes name missing counters, another NCCL, the source of memory figures, and processes left behind.
    #[test]
    fn says_what_to_know() {
        let without_counters = comparison(|run| run.counters = None);
        assert!(without_counters.notes[0].starts_with("Windlass counted no communicator"));
        assert!(without_counters.rows.iter().all(|row| row.difference == Difference::NoVerdict));
        let other = comparison(|run| {
            if run.turn.side == Side::With {
                run.nccl = BTreeSet::from(["/other/libnccl.so.2".into()]);
            }
        });
        assert!(other.notes[0].contains("without Windlass /n/libnccl.so.2, with it /other/libnccl.so.2"));
        let unseen = comparison(|run| run.nccl.clear());
        assert_eq!(unseen.notes.len(), 1);
        let devices = comparison(|run| run.memory.processes.clear());
        assert_eq!(devices.rows[2].without.median, 150.0);
        assert!(devices.notes[0].starts_with("GPU memory is the growth of the whole GPU"));
        let left = comparison(|run| run.left_behind = usize::from(run.turn.number == 4));
        assert_eq!(left.notes[1], "Run 4 left 1 processes behind, which were ended.");
        let none = comparison(|run| run.memory = Peaks::default());
        assert_eq!(none.rows.len(), 2);
        assert!(none.notes[0].contains("no GPU's memory grew"));
    }

    /// The JSON file has the request, the rows and each run.
    #[test]
    fn json() {
        let json = serde_json::to_value(comparison(|_| ())).unwrap();
        assert_eq!(json["command"][0], "train");
        assert_eq!(json["memory_of"], "processes");
        assert_eq!(json["rows"][0]["difference"], "lower");
        assert_eq!(json["runs"][0]["purpose"], "warmup");
        assert_eq!(json["runs"][3]["side"], "without");
        assert_eq!(json["runs"][2]["metrics"][r"step (\S+) ms"][2], 77.0);
    }
}
