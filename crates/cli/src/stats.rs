//! `windlass stats`: the counters of running programs, from shared memory.

mod openmetrics;

use crate::text;
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use windlass_base::stats::calls::{CallMade, ProcessCalls, processes};
use windlass_base::stats::closing::{self, many};
use windlass_base::stats::segment::Clock;
use windlass_base::stats::snapshot::{self, Snapshot};
use windlass_base::stats::{files, report};

/// Options of `windlass stats`.
#[derive(Args)]
pub struct Options {
    /// The id of a process, of which all counters are shown [default: one line for each process]
    #[arg(value_parser = process_id)]
    process: Option<u32>,
    /// All counters are printed as JSON, one object and line for each process
    #[arg(long)]
    json: bool,
    /// The last 256 calls of each communicator are printed instead of the counters
    #[arg(long, conflicts_with_all = ["clean", "last"])]
    calls: bool,
    /// The counters of all processes are printed as OpenMetrics, which node_exporter's textfile collector reads
    #[arg(long, conflicts_with_all = ["process", "json", "calls", "clean", "last"])]
    openmetrics: bool,
    /// The counters that killed programs of this user left in /dev/shm are removed
    #[arg(long, conflicts_with = "json")]
    clean: bool,
    /// The line that `windlass run` prints at its command's end, of the last run that left counters: a signal ended it, or it still runs
    #[arg(long, conflicts_with_all = ["process", "json", "clean"])]
    last: bool,
}

/// Reads a process's number.
pub fn process_id(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "expected the number of a process".into())
}

/// Prints what processes have counted so far.
pub fn run(options: &Options) -> Result<()> {
    if options.clean {
        return clean(options.process);
    }
    if options.last {
        return text::print(last(Path::new(files::FOLDER))?);
    }
    text::print(look(options)?)
}

/// The last calls of a process, or of all.
fn last_calls(options: &Options) -> Result<String> {
    let all = processes(Path::new(files::FOLDER), &Clock::measure());
    let wanted = |one: &ProcessCalls| options.process.is_none_or(|process| process == one.process);
    let wanted: Vec<&ProcessCalls> = all.iter().filter(|one| wanted(one)).collect();
    if let Some(process) = options.process.filter(|_| wanted.is_empty()) {
        bail!("{}", no_counters(process));
    }
    if options.json {
        let lines: Result<Vec<String>, _> = wanted.iter().map(serde_json::to_string).collect();
        return Ok(lines?.iter().map(|line| format!("{line}\n")).collect());
    }
    Ok(wanted.iter().map(|one| calls_text(one)).collect())
}

fn calls_text(process: &ProcessCalls) -> String {
    let ended = if process.is_alive { "" } else { " (ended)" };
    let mut text = format!("process {}, {}{ended}\n", process.process, process.program);
    for one in &process.communicators {
        let (state, name) = (
            if one.is_live { "live" } else { "ended" },
            if one.name.is_empty() { "unknown" } else { &one.name },
        );
        text += &format!(
            "\ncommunicator {}: rank {} of {}, {state}, name {name}, {}\n",
            one.serial,
            one.rank,
            one.ranks,
            many(one.made as usize, "call")
        );
        let head =
            ["number", "collective", "function", "bytes", "type", "peer, root", "stream", "path", "s ago"];
        let or_dash = |number: Option<u64>| number.map_or_else(|| "-".into(), |number| number.to_string());
        let row = |call: &CallMade| {
            vec![
                call.number.to_string(),
                or_dash(call.collective),
                call.function.clone(),
                report::size(call.bytes),
                call.datatype.clone(),
                or_dash(call.other.map(u64::from)),
                call.stream.clone(),
                call.path.clone(),
                format!("{:.6}", call.seconds_ago),
            ]
        };
        text += &text::table(&head, one.calls.iter().map(row), &[0, 1, 3, 5, 8]);
    }
    text
}

fn no_counters(process: u32) -> String {
    if !Path::new(&format!("/proc/{process}")).exists() {
        return format!(
            "there is no process {process}, and none of that number has left counters in {}: `windlass stats` lists those that there are",
            files::FOLDER
        );
    }
    format!(
        "process {process} has no counters in {}: it runs without Windlass, made no communicator yet, or was started with \
         WINDLASS_STATS=off",
        files::FOLDER
    )
}

fn look(options: &Options) -> Result<String> {
    if options.calls {
        return last_calls(options);
    }
    let seen = snapshots(options.process)?;
    if options.openmetrics {
        // What ended processes have left would stay in sums until others end.
        let snapshots: Vec<Snapshot> =
            seen.into_iter().filter_map(|(snapshot, is_alive)| is_alive.then_some(snapshot)).collect();
        return Ok(openmetrics::text(&snapshots));
    }
    if options.json {
        return Ok(seen.iter().map(|(snapshot, _)| report::json(snapshot)).collect());
    }
    if options.process.is_some() {
        return Ok(seen.iter().map(|(snapshot, _)| report::text(snapshot)).collect());
    }
    if seen.is_empty() {
        return Ok(format!(
            "no process counts in {} (programs do from their first communicator on)\n",
            files::FOLDER
        ));
    }
    Ok(overview(&seen))
}

/// The counters of a process, as often as it has left some.
pub fn of_process(process: u32) -> Result<Vec<Snapshot>> {
    Ok(snapshots(Some(process))?.into_iter().map(|(snapshot, _)| snapshot).collect())
}

/// The counters of all processes or of one, and whether it runs.
fn snapshots(wanted: Option<u32>) -> Result<Vec<(Snapshot, bool)>> {
    let mut seen = Vec::new();
    let mut unreadable = None;
    for path in segments(wanted) {
        match Snapshot::of_file(&path) {
            Ok(snapshot) => seen.push((snapshot, !files::has_ended(&path))),
            Err(error) => unreadable = Some((path, error)),
        }
    }
    if let Some(process) = wanted.filter(|_| seen.is_empty()) {
        // Segments of other users cannot be read, and need not be talked of unless asked for.
        if let Some((path, error)) = unreadable {
            bail!("cannot read {}: {error}", path.display());
        }
        bail!("{}", no_counters(process));
    }
    Ok(seen)
}

/// The files of the counters of all processes or of one.
fn segments(wanted: Option<u32>) -> impl Iterator<Item = PathBuf> {
    let is_wanted = move |path: &PathBuf| {
        files::owner(path).is_some_and(|owner| wanted.is_none_or(|wanted| wanted == owner.process))
    };
    files::list(Path::new(files::FOLDER)).into_iter().filter(is_wanted)
}

/// What became of the last run, from what its processes have left.
fn last(folder: &Path) -> Result<String> {
    let run = files::newest_run(folder).with_context(|| {
        format!(
            "no run that called NCCL has left counters in {}: a run whose command exits prints this line and leaves none",
            folder.display()
        )
    })?;
    let state = if run.is_alive() { "still runs" } else { "has ended" };
    let processes = snapshot::of_run(folder, run);
    let line = closing::line(&processes);
    let began = processes.iter().map(|process| process.began_ns).min().unwrap_or_default();
    let ago = SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_nanos(began)).unwrap_or_default();
    let minutes = ago.as_secs() / 60;
    Ok(format!(
        "windlass: {line}\n(the last run that called NCCL: process {}, which {state}; its first communicator came {minutes} min ago)\n",
        run.process
    ))
}

/// Removes the counters of this user's processes that are gone. A killed process leaves some, and below `windlass run` each until the run's end.
fn clean(wanted: Option<u32>) -> Result<()> {
    let mut failed = Vec::new();
    for path in segments(wanted) {
        match files::remove_if_ended(&path) {
            Ok(true) => text::print(format!("removed {}\n", path.display()))?,
            Ok(false) => {}
            Err(error) => failed.push(format!("{} ({error})", path.display())),
        }
    }
    ensure!(failed.is_empty(), "cannot remove {}", failed.join(", "));
    Ok(())
}

/// One line a process.
fn overview(seen: &[(Snapshot, bool)]) -> String {
    let head = ["process", "program", "NCCL", "communicators", "cached", "calls", "bytes", "paths"];
    let row = |(snapshot, alive): &(Snapshot, bool)| {
        let paths = snapshot.paths();
        let (calls, bytes) = paths
            .values()
            .fold((0u64, 0u64), |sum, path| (sum.0.saturating_add(path.0), sum.1.saturating_add(path.1)));
        let live = snapshot.communicators.iter().filter(|communicator| communicator.state == "live").count();
        let by_path: Vec<String> = paths.iter().map(|(path, sum)| format!("{path} {}", sum.0)).collect();
        let ended = if *alive { "" } else { " (ended)" };
        vec![
            snapshot.process.to_string(),
            format!("{}{ended}", snapshot.program),
            report::version(snapshot.nccl_version),
            format!("{live} of {}", snapshot.communicators_made),
            match snapshot.cached {
                0 => "-".into(),
                cached => format!("{cached}, {}", report::size(snapshot.cached_bytes)),
            },
            calls.to_string(),
            report::size(bytes),
            by_path.join(" "),
        ]
    };
    let on_nccl = seen.iter().flat_map(|(snapshot, _)| on_nccl(snapshot));
    text::table(&head, seen.iter().map(row), &[0, 5, 6]) + &on_nccl.collect::<String>()
}

/// A line for each reason why NCCL runs communicators of a process.
fn on_nccl(snapshot: &Snapshot) -> Vec<String> {
    let mut reasons: BTreeMap<(String, &str, i32), usize> = BTreeMap::new();
    for counts in &snapshot.communicators {
        if let Some(reason) = counts.fallback() {
            *reasons.entry((reason, &counts.change, counts.ranks)).or_default() += 1;
        }
    }
    let line = |((reason, change, ranks), count): ((String, &str, i32), usize)| {
        let change = if change.is_empty() { String::new() } else { format!(" ({change})") };
        let (communicators, ranks) = (many(count, "communicator"), many(ranks as usize, "rank"));
        format!("process {}: {communicators} of {ranks} on NCCL: {reason}{change}\n", snapshot.process)
    };
    reasons.into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counts::tests::snapshot;
    use windlass_base::stats::snapshot::CommunicatorCounts;

    /// One line a process, with sums over paths; the dead are marked.
    #[test]
    fn overviews() {
        let snapshot = snapshot(&[("ncclSend", "forward", 2, 1024), ("ncclRecv", "p2p", 1, 1024)]);
        let text = overview(&[(snapshot, false)]);
        let cells: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        let expected = [
            "1", "x", "(ended)", "2.28.9", "1", "of", "1", "-", "3", "2.0", "KiB", "forward", "2", "p2p", "1",
        ];
        assert_eq!(cells, expected);
    }

    /// Below the table, each reason why NCCL runs communicators of a process has a line.
    #[test]
    fn reasons() {
        let mut snapshot = snapshot(&[]);
        let mut counts = snapshot.communicators.remove(0);
        (counts.peer_group, counts.change) = ("ranks share a GPU".into(), "give each rank its own".into());
        let one_rank = CommunicatorCounts {
            peer_group: "it has one rank".into(),
            change: String::new(),
            ranks: 1,
            ..counts.clone()
        };
        snapshot.communicators = vec![counts.clone(), one_rank, counts];
        let text = overview(&[(snapshot, true)]);
        assert_eq!(
            text.lines().skip(2).collect::<Vec<_>>(),
            [
                "process 1: 1 communicator of 1 rank on NCCL: it has one rank",
                "process 1: 2 communicators of 2 ranks on NCCL: ranks share a GPU (give each rank its own)"
            ]
        );
    }
}
