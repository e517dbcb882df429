//! Writes a snapshot as a table for people, or as JSON.

use std::fmt::Write;

use crate::stats::snapshot::{CallCounts, CommunicatorCounts, Snapshot};
use crate::stats::{closing, features, order, resources, why};

/// One JSON object on one line.
pub fn json(snapshot: &Snapshot) -> String {
    serde_json::to_string(snapshot).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}")) + "\n"
}

/// A table for people.
pub fn text(snapshot: &Snapshot) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "windlass {} in {} (process {}), NCCL {} at {}",
        snapshot.windlass,
        or_unknown(&snapshot.program),
        snapshot.process,
        version(snapshot.nccl_version),
        or_unknown(&snapshot.nccl_path),
    );
    let head = match snapshot.forked_from {
        0 => closing::line(std::slice::from_ref(snapshot)),
        owner => forked_from(owner),
    };
    let _ = writeln!(out, "{head}");
    if snapshot.cached > 0 {
        let _ = writeln!(
            out,
            "cached: {} communicators of NCCL's, {}",
            snapshot.cached,
            size(snapshot.cached_bytes)
        );
    }
    if snapshot.fused_kernels > 0 {
        let (calls, kernels) = (snapshot.fused_calls, snapshot.fused_kernels);
        let _ = writeln!(out, "fused: {calls} grouped collectives in {kernels} kernels");
    }
    let lines = [
        order::text(&snapshot.order, snapshot.ordered()),
        resources::registrations(&snapshot.registrations, size),
        resources::pool(&snapshot.pool, size),
        resources::windows(&snapshot.windows),
    ];
    for line in lines.into_iter().flatten() {
        let _ = writeln!(out, "{line}");
    }
    let _ = writeln!(out, "\n{:<32} {:>23}", "function", "calls");
    for (name, calls) in &snapshot.functions {
        let _ = writeln!(out, "{name:<32} {calls:>23}");
    }
    for equal in folded(&snapshot.communicators) {
        let _ = write!(out, "\n{}{}", heading(&equal), body(equal[0]));
    }
    out
}

/// Why NCCL runs all calls of a forked child, and what would change that.
pub fn forked_from(owner: u32) -> String {
    format!(
        "forked from process {owner}, which had communicators: its own are on NCCL, and not counted \
         (fork workers before the first communicator, or start them as programs)"
    )
}

/// Neighbours of which everything but number, rank and device is equal, as of a process with all ranks.
fn folded(communicators: &[CommunicatorCounts]) -> Vec<Vec<&CommunicatorCounts>> {
    let mut folded: Vec<Vec<&CommunicatorCounts>> = Vec::new();
    let is_equal = |one: &CommunicatorCounts, other: &CommunicatorCounts| {
        let of = |counts: &CommunicatorCounts| (counts.ranks, counts.state.clone(), body(counts));
        one.serial > 0 && of(one) == of(other)
    };
    for counts in communicators {
        match folded.last_mut() {
            Some(equal) if is_equal(equal[0], counts) => equal.push(counts),
            _ => folded.push(vec![counts]),
        }
    }
    folded
}

/// Which communicators these are, and how far they are.
fn heading(equal: &[&CommunicatorCounts]) -> String {
    let CommunicatorCounts { serial, ranks, state, .. } = equal[0];
    let several = |what: &str, of: &dyn Fn(&CommunicatorCounts) -> String| {
        let plural = if equal.len() > 1 { "s" } else { "" };
        format!("{what}{plural} {}", equal.iter().map(|counts| of(counts)).collect::<Vec<_>>().join(" "))
    };
    let (numbers, names, devices) = (
        several("communicator", &|counts| counts.serial.to_string()),
        several("rank", &|counts| known(counts.rank, 0)),
        several("device", &|counts| known(counts.device, 0)),
    );
    match serial {
        0 => "communicators unknown, or ended long ago\n".to_owned(),
        _ => format!("{numbers}: {names} of {}, {devices}, {state}\n", known(*ranks, 1)),
    }
}

/// What the communicator has or lacks, and a row for each kind of call.
fn body(counts: &CommunicatorCounts) -> String {
    let mut out = String::new();
    let lost = counts.not_in_fixed_order;
    let order = (lost > 0).then(|| {
        let reductions = if lost == 1 { "reduction" } else { "reductions" };
        let without = if counts.peer_group.is_empty() { " (WINDLASS_PEER_GROUPS=off)" } else { "" };
        format!("not in fixed order: {lost} {reductions}{without}")
    });
    let recorded = (counts.recorded > 0).then(|| format!("recorded in graphs: {} calls", counts.recorded));
    let is_awake = if counts.sleeps { ", given back: it sleeps" } else { "" };
    let memory =
        (counts.memory_bytes > 0).then(|| format!("memory: {}{is_awake}", size(counts.memory_bytes)));
    let guesses =
        Some(counts.reason.clone()).filter(|_| counts.peer_group == "yes" && !counts.reason.is_empty());
    for line in [standing(counts), guesses, nccl(&counts.nccl), memory, order, recorded].into_iter().flatten()
    {
        let _ = writeln!(out, "  {line}");
    }
    for row in &counts.calls {
        let CallCounts { function, path, calls, bytes, .. } = row;
        let limit = why::limit(row).map_or(String::new(), |limit| format!("  native {limit}"));
        let _ = writeln!(out, "  {function:<30} {path:<10} {calls:>12} {:>12}{limit}", size(*bytes));
    }
    out
}

/// What the communicator has, or why it is on NCCL.
fn standing(counts: &CommunicatorCounts) -> Option<String> {
    let has = || format!("peer group: {}", features::line(&counts.lacks, &counts.limits_from));
    why::standing(counts).or_else(|| (!counts.peer_group.is_empty()).then(has))
}

/// The state of NCCL's part of a lazy communicator.
fn nccl(text: &str) -> Option<String> {
    Some(match text {
        "" => return None,
        "unbuilt" => "NCCL's communicator is lazy: not built, no call needed it".into(),
        "built" => "NCCL's communicator was lazy: built when a call needed it".into(),
        "reused" => "NCCL's communicator was lazy: one that was cached serves it".into(),
        other => format!("NCCL's communicator: {other}"),
    })
}

fn or_unknown(text: &str) -> &str {
    if text.is_empty() { "unknown" } else { text }
}

fn known(value: i32, least: i32) -> String {
    if value < least { "?".into() } else { value.to_string() }
}

/// `2.28.9` for 22809.
pub fn version(code: i32) -> String {
    match code {
        0 => "unknown".into(),
        _ => format!("{}.{}.{}", code / 10000, code / 100 % 100, code % 100),
    }
}

/// `1.5 GiB` for 1610612736.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let power = (bytes.max(1).ilog2() / 10).min(5);
    let value = bytes as f64 / (1u64 << (10 * power)) as f64;
    match power {
        0 => format!("{bytes} B"),
        _ => format!("{value:.1} {}", UNITS[power as usize]),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn example() -> Snapshot {
        let calls = CallCounts {
            function: "ncclAllReduce".into(),
            path: "forward".into(),
            calls: 3,
            bytes: 3 << 20,
            native_below: 0,
        };
        Snapshot {
            windlass: "0.1.0".into(),
            process: 7,
            forked_from: 0,
            program: "train".into(),
            nccl_path: "/x/libnccl.so.2".into(),
            nccl_version: 22809,
            began_ns: 1,
            communicators_made: 1,
            cached: 2,
            cached_bytes: 3 << 20,
            order: "fixed".into(),
            fused_kernels: 2,
            fused_calls: 8,
            registrations: [("registered".to_owned(), 12)].into(),
            pool: [("hits".to_owned(), 3)].into(),
            windows: [("made".to_owned(), 2)].into(),
            functions: [("ncclAllReduce".to_owned(), 3), ("ncclCommInitRank".to_owned(), 1)].into(),
            communicators: vec![CommunicatorCounts {
                serial: 1,
                state: "live".into(),
                rank: 0,
                ranks: 4,
                device: -1,
                peer_group: String::new(),
                nccl: String::new(),
                lacks: BTreeMap::new(),
                limits_from: Vec::new(),
                in_fixed_order: 6,
                not_in_fixed_order: 4,
                reason: String::new(),
                reason_rank: None,
                recorded: 0,
                memory_bytes: 0,
                sleeps: false,
                change: String::new(),
                calls: vec![calls],
            }],
        }
    }

    /// The table names program, library, functions and communicators.
    #[test]
    fn table() {
        let table = text(&example());
        assert!(
            table.starts_with("windlass 0.1.0 in train (process 7), NCCL 2.28.9 at /x/libnccl.so.2\n"),
            "{table}"
        );
        assert_eq!(
            table.lines().nth(1),
            Some("1 process, 1 communicator, 0 of 3 calls in Windlass's kernels: WINDLASS_PEER_GROUPS=off")
        );
        assert_eq!(table.lines().nth(2), Some("cached: 2 communicators of NCCL's, 3.0 MiB"));
        assert_eq!(table.lines().nth(3), Some("fused: 8 grouped collectives in 2 kernels"));
        let lines = ["order: fixed; 4 of 10 reductions that round", "registration: ", "pool: ", "windows: "];
        for (line, begin) in table.lines().skip(4).zip(lines) {
            assert!(line.starts_with(begin), "{line}");
        }
        let ends = |line: &str| line.chars().count();
        let calls = table.lines().find(|line| line.starts_with("ncclAllReduce")).unwrap();
        assert!(table.contains("\n  not in fixed order: 4 reductions (WINDLASS_PEER_GROUPS=off)\n"));
        let last = table.lines().last().unwrap();
        assert_eq!(last.split_whitespace().collect::<Vec<_>>().join(" "), "ncclAllReduce forward 3 3.0 MiB");
        // The number of calls stands in one column in both tables.
        assert_eq!(ends(calls), ends(last) - ends("      3.0 MiB"));
        assert!(table.contains("\ncommunicator 1: rank 0 of 4, device ?, live\n"), "{table}");
    }

    /// What Windlass takes of the device for a communicator, or has given back.
    #[test]
    fn memory() {
        let mut counts = example().communicators.remove(0);
        assert!(!body(&counts).contains("memory"));
        counts.memory_bytes = 18 << 20;
        assert!(body(&counts).contains("  memory: 18.0 MiB\n"));
        counts.sleeps = true;
        assert!(body(&counts).contains("  memory: 18.0 MiB, given back: it sleeps\n"));
    }

    /// A communicator's line has its features, or why it is on NCCL and what would change that.
    #[test]
    fn standings() {
        let with = |peer_group: &str, lacks: &[(&str, &str)], change: &str, nccl: &str| {
            let mut counts = example().communicators.remove(0);
            counts.peer_group = peer_group.into();
            counts.limits_from = vec!["built in".into(), "model".into()];
            counts.lacks = lacks.iter().map(|(name, why)| ((*name).into(), (*why).into())).collect();
            (counts.change, counts.nccl) = (change.into(), nccl.into());
            body(&counts).lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let first = |lines: Vec<String>| lines[0].clone();
        assert_eq!(
            first(with("yes", &[("registration", "WINDLASS_REGISTER=off")], "", "")),
            "  peer group: send/recv, native collectives (limits from: built in, model), kept windows; \
             no registration: WINDLASS_REGISTER=off"
        );
        assert_eq!(
            first(with("NCCL_COMM_ID is set", &[], "unset it", "")),
            "  on NCCL: NCCL_COMM_ID is set (unset it)"
        );
        assert_eq!(first(with("it has one rank", &[], "", "")), "  on NCCL: it has one rank");
        let mut counts = example().communicators.remove(0);
        (counts.peer_group, counts.reason) =
            ("a rank could not prepare".into(), "no device is current".into());
        (counts.reason_rank, counts.recorded) = (Some(1), 68);
        let text = format!("\n{}", body(&counts));
        let expected = "\n  on NCCL: a rank could not prepare, rank 1: no device is current\n";
        assert!(text.contains(expected) && text.contains("\n  recorded in graphs: 68 calls\n"), "{text}");
        (counts.peer_group, counts.reason) = ("yes".into(), "limits not measured here".into());
        assert!(format!("\n{}", body(&counts)).contains("\n  limits not measured here\n"));
        assert_eq!(
            with("yes", &[], "", "unbuilt")[1],
            "  NCCL's communicator is lazy: not built, no call needed it"
        );
    }

    /// Ranks of one process with equal counts stand together; another count, size or an unknown one stands alone.
    #[test]
    fn equal_ranks() {
        let of = |serial, rank, change: fn(&mut CommunicatorCounts)| {
            let mut counts = example().communicators.remove(0);
            (counts.serial, counts.rank, counts.device) = (serial, rank, rank);
            change(&mut counts);
            counts
        };
        let communicators = vec![
            of(1, 0, |_| ()),
            of(2, 1, |_| ()),
            of(3, 2, |counts| counts.calls[0].calls = 4),
            of(0, -1, |_| ()),
        ];
        let table = text(&Snapshot { communicators, ..example() });
        let heads: Vec<&str> = table.lines().filter(|line| line.starts_with("communicator")).collect();
        assert_eq!(
            heads,
            [
                "communicators 1 2: ranks 0 1 of 4, devices 0 1, live",
                "communicator 3: rank 2 of 4, device 2, live",
                "communicators unknown, or ended long ago"
            ]
        );
    }

    /// Calls that NCCL ran have the limit beside them, below which native collectives would have served them.
    #[test]
    fn limits_beside_calls() {
        let mut counts = example().communicators.remove(0);
        counts.calls[0].native_below = 8 << 20;
        let row = body(&counts).lines().last().unwrap().to_owned();
        assert!(row.ends_with("3      3.0 MiB  native below 8.0 MiB"), "{row}");
    }

    /// The report of a forked child names the parent.
    #[test]
    fn forked() {
        let child = Snapshot { forked_from: 6, ..example() };
        let second = text(&child).lines().nth(1).unwrap().to_owned();
        assert!(second.starts_with("forked from process 6, which had communicators"), "{second}");
        assert!(json(&child).contains("\"forked_from\":6"));
        assert!(!json(&example()).contains("forked_from"));
    }

    /// JSON reads back as the same snapshot.
    #[test]
    fn json_round_trip() {
        assert_eq!(serde_json::from_str::<Snapshot>(&json(&example())).unwrap(), example());
    }

    /// Sizes choose a readable unit.
    #[test]
    fn sizes() {
        assert_eq!((size(0), size(1023), size(1536)), ("0 B".into(), "1023 B".into(), "1.5 KiB".into()));
        assert_eq!(size(u64::MAX), "16384.0 PiB");
    }
}
