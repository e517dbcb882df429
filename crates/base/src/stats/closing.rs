//! The line about a run at its end: what of its calls ran in Windlass's kernels, and if nothing did, why.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::path::Path;
use crate::stats::features::Feature;
use crate::stats::peer_group::is_expected;
use crate::stats::snapshot::{CallCounts, CommunicatorCounts, Snapshot};

/// The line about the processes of a run that have asked for a communicator.
pub fn line(processes: &[Snapshot]) -> String {
    let all: Vec<&CommunicatorCounts> = processes.iter().flat_map(|process| &process.communicators).collect();
    if all.is_empty() {
        return match processes.len() {
            0 => "no process of this run called NCCL through Windlass".into(),
            asked => {
                format!("{} asked for a communicator, but none was made", many(asked, "process"))
            }
        };
    }
    let of_run =
        format!("{}, {}", many(processes.len(), "process"), many(communicators(&all), "communicator"));
    let (calls, bytes) = sum(&all, |_| true);
    let (ours, our_bytes) = sum(&all, |path| path == Path::P2p.name() || path == Path::Native.name());
    let share = match (u128::from(our_bytes) * 100).checked_div(bytes.into()) {
        Some(0) if our_bytes > 0 => "under 1 % of bytes".into(),
        Some(percent) if our_bytes > 0 => format!("{percent} % of bytes"),
        _ if calls == 0 => "no call".into(),
        _ => format!("{} of {} calls", grouped(ours), grouped(calls)),
    };
    let share = format!("{share} in Windlass's kernels");
    let mut line = match (most_used(&all, |reason| !is_expected(reason)), most_used(&all, is_expected)) {
        (Some(fault), _) if ours == 0 => format!("{share}: {}", because(fault)),
        (Some(fault), _) if calls_of(fault) > 0 => format!("{of_run}, {share}; {}", because(fault)),
        (None, Some(expected)) if ours == 0 => {
            format!("{of_run}, {share} (on NCCL: {})", expected.fallback().unwrap_or_default())
        }
        _ if ours == 0 && calls > 0 => format!("{of_run}, {share}: {}", left_to_nccl(&all)),
        _ => format!("{of_run}, {share}"),
    };
    let recorded = all.iter().fold(0u64, |sum, one| sum.saturating_add(one.recorded));
    if recorded > 0 {
        line += &format!("; {} calls recorded in graphs", grouped(recorded));
    }
    line
}

/// How many communicators these entries are of, at least. Each of its ranks has an entry of a communicator, but where it spans hosts not
/// all are seen. Entries of one rank, or of unlike numbers of ranks, are of different communicators.
fn communicators(entries: &[&CommunicatorCounts]) -> usize {
    let mut by_size: BTreeMap<i32, BTreeMap<i32, usize>> = BTreeMap::new();
    for entry in entries.iter().filter(|entry| entry.serial > 0) {
        *by_size.entry(entry.ranks).or_default().entry(entry.rank).or_default() += 1;
    }
    by_size.into_values().filter_map(|by_rank| by_rank.into_values().max()).sum()
}

/// Calls and bytes on the paths that `wanted` names.
fn sum(communicators: &[&CommunicatorCounts], wanted: impl Fn(&str) -> bool) -> (u64, u64) {
    let calls = communicators.iter().flat_map(|one| &one.calls).filter(|counts| wanted(&counts.path));
    calls.fold((0, 0), |(calls, bytes): (u64, u64), counts: &CallCounts| {
        (calls.saturating_add(counts.calls), bytes.saturating_add(counts.bytes))
    })
}

fn calls_of(communicator: &CommunicatorCounts) -> u64 {
    sum(&[communicator], |_| true).0
}

/// Of the communicators on NCCL whose reason `wanted` takes, the one with most calls.
fn most_used<'a>(
    all: &[&'a CommunicatorCounts],
    wanted: impl Fn(&str) -> bool,
) -> Option<&'a CommunicatorCounts> {
    let on_nccl = all.iter().copied().filter(|one| one.fallback().is_some() && wanted(&one.peer_group));
    on_nccl.min_by_key(|one| (Reverse(calls_of(one)), one.rank))
}

/// Why NCCL ran all calls although no communicator has fallen back: of the communicator with most calls.
fn left_to_nccl(all: &[&CommunicatorCounts]) -> String {
    let Some(one) = all.iter().copied().max_by_key(|one| calls_of(one)) else { return String::new() };
    match (one.peer_group.as_str(), one.lacks.get(Feature::Native.name())) {
        ("", _) => "WINDLASS_PEER_GROUPS=off".into(),
        (_, Some(why)) => format!("no native collectives: {why}"),
        (_, None) if !one.reason.is_empty() => one.reason.clone(),
        (_, None) => {
            "all were above the limits of native collectives, which windlass tune --show prints".into()
        }
    }
}

fn because(communicator: &CommunicatorCounts) -> String {
    let CommunicatorCounts { rank, ranks, change, reason, reason_rank, peer_group, .. } = communicator;
    let reason = match reason.as_str() {
        // "This rank" is that of the process whose counters these are.
        "" => peer_group.replacen("this rank", &format!("rank {rank}"), 1),
        words => format!("{words} (rank {})", reason_rank.map_or(*rank, |rank| rank as i32)),
    };
    let change = if change.is_empty() { String::new() } else { format!("; {change}") };
    format!("communicator of {} is on NCCL because {reason}{change}", many(*ranks as usize, "rank"))
}

/// `1 rank`, `2 ranks`.
pub fn many(count: usize, what: &str) -> String {
    let plural = if what.ends_with('s') { "es" } else { "s" };
    format!("{count} {what}{}", if count == 1 { "" } else { plural })
}

/// `12,400` for 12400.
fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let groups: Vec<&[u8]> = digits.as_bytes().rchunks(3).rev().collect();
    String::from_utf8_lossy(&groups.join(&b',')).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{peer_group, segment};

    /// A communicator's entry of one rank.
    fn entry(rank: i32, ranks: i32, calls: &[(&str, u64, u64)]) -> CommunicatorCounts {
        let calls: Vec<_> = calls
            .iter()
            .map(|(path, calls, bytes)| {
                serde_json::json!({"function": "ncclAllReduce", "path": path, "calls": calls, "bytes": bytes})
            })
            .collect();
        let entry = serde_json::json!({
            "serial": 1, "state": "ended", "rank": rank, "ranks": ranks, "device": rank, "peer_group": "yes", "calls": calls,
        });
        serde_json::from_value(entry).unwrap()
    }

    /// An entry with this fallback reason.
    fn on_nccl(number: u32, entry: CommunicatorCounts) -> CommunicatorCounts {
        let number = peer_group::ON_NCCL + number;
        let (peer_group, change) = (peer_group::text(number).into(), peer_group::change(number).into());
        CommunicatorCounts { peer_group, change, ..entry }
    }

    fn process(communicators: Vec<CommunicatorCounts>) -> Snapshot {
        Snapshot { communicators, ..segment::test_support::with_words(&[], Snapshot::of) }
    }

    /// The line has processes, communicators, the share of bytes, and what graphs have recorded.
    #[test]
    fn in_kernels() {
        let of = |rank| {
            let world = entry(rank, 2, &[("native", 500, 9_799), ("forward", 1, 200), ("p2p", 1, 1)]);
            process(vec![CommunicatorCounts { recorded: 34, ..world }, entry(rank, 2, &[])])
        };
        assert_eq!(
            line(&[of(0), of(1)]),
            "2 processes, 2 communicators, 98 % of bytes in Windlass's kernels; 68 calls recorded in graphs"
        );
        let little = process(vec![entry(0, 1, &[("native", 1, 1), ("forward", 1, 200)])]);
        assert_eq!(line(&[little]), "1 process, 1 communicator, under 1 % of bytes in Windlass's kernels");
        let empty = process(vec![entry(0, 2, &[("native", 3, 0)]), entry(1, 2, &[("native", 3, 0)])]);
        assert_eq!(line(&[empty]), "1 process, 1 communicator, 6 of 6 calls in Windlass's kernels");
    }

    /// Nothing in kernels: the communicator with most calls says why, in the words of its first rank.
    #[test]
    fn nothing_in_kernels() {
        let small = on_nccl(20, entry(0, 4, &[("forward", 1, 8)]));
        let first = on_nccl(11, entry(0, 2, &[("forward", 6_200, 8)]));
        let first = CommunicatorCounts { reason: "no device is current".into(), ..first };
        let second = on_nccl(18, entry(1, 2, &[("forward", 6_199, 8)]));
        assert_eq!(
            line(&[process(vec![small, first]), process(vec![second.clone()])]),
            "0 of 12,400 calls in Windlass's kernels: communicator of 2 ranks is on NCCL because no device is current (rank 0)"
        );
        let words =
            CommunicatorCounts { reason: "no device is current".into(), reason_rank: Some(0), ..second };
        let told = line(&[process(vec![words])]);
        assert!(told.contains("is on NCCL because no device is current (rank 0)"), "{told}");
    }

    /// Where some bytes ran in kernels, a communicator that has unexpectedly fallen back is named behind them, if it has calls.
    #[test]
    fn some_on_nccl() {
        let good = || entry(0, 2, &[("native", 9, 900)]);
        let with = |bad| line(&[process(vec![good(), bad])]);
        assert_eq!(
            with(on_nccl(9, entry(0, 4, &[("forward", 1, 100)]))),
            "1 process, 2 communicators, 90 % of bytes in Windlass's kernels; communicator of 4 ranks is on NCCL because ranks run \
             unlike versions of Windlass; install one version"
        );
        assert!(with(on_nccl(9, entry(0, 4, &[]))).ends_with("100 % of bytes in Windlass's kernels"));
    }

    /// What a user expects is no fault.
    #[test]
    fn expected() {
        for number in [1, 2, 3, 5, 7, 13] {
            let seen = on_nccl(number, entry(0, 1, &[("forward", 40, 8)]));
            let reason = peer_group::text(peer_group::ON_NCCL + number);
            assert_eq!(
                line(&[process(vec![seen.clone()])]),
                format!("1 process, 1 communicator, 0 of 40 calls in Windlass's kernels (on NCCL: {reason})")
            );
            let told = line(&[process(vec![seen, entry(0, 2, &[("native", 1, 792)])])]);
            assert_eq!(told, "1 process, 2 communicators, 99 % of bytes in Windlass's kernels");
        }
        let not_asked = CommunicatorCounts { peer_group: String::new(), ..entry(0, 2, &[("forward", 1, 8)]) };
        assert_eq!(
            line(&[process(vec![not_asked])]),
            "1 process, 1 communicator, 0 of 1 calls in Windlass's kernels: WINDLASS_PEER_GROUPS=off"
        );
    }

    /// A peer group whose calls all went to NCCL says what it lacks, or that limits left them there.
    #[test]
    fn nothing_native() {
        let mut of = entry(0, 2, &[("forward", 8, 1 << 30)]);
        of.peer_group = "yes".into();
        let told = line(&[process(vec![of.clone()])]);
        assert!(told.contains("0 of 8 calls in Windlass's kernels: all were above the limits"), "{told}");
        of.reason = "limits not measured here".into();
        let told = line(&[process(vec![of.clone()])]);
        assert!(told.ends_with("0 of 8 calls in Windlass's kernels: limits not measured here"), "{told}");
        of.lacks.insert(Feature::Native.name().into(), "WINDLASS_COLLECTIVES=off".into());
        let told = line(&[process(vec![of])]);
        assert!(told.ends_with(": no native collectives: WINDLASS_COLLECTIVES=off"), "{told}");
    }

    /// Of a communicator over several hosts rank 0 may be elsewhere.
    #[test]
    fn rank_0_elsewhere() {
        let of =
            |rank| process(vec![on_nccl(13, entry(rank, 8, &[])), entry(rank % 4, 4, &[("native", 1, 8)])]);
        let told = line(&[of(4), of(5), of(6), of(7)]);
        assert_eq!(told, "4 processes, 2 communicators, 100 % of bytes in Windlass's kernels");
        let told = line(&[process(vec![on_nccl(13, entry(4, 8, &[]))])]);
        assert!(told.starts_with("1 process, 1 communicator, no call in Windlass's kernels"), "{told}");
    }

    /// Without a communicator the line says whether one was asked for.
    #[test]
    fn no_communicator() {
        assert_eq!(line(&[]), "no process of this run called NCCL through Windlass");
        let asked = line(&[process(Vec::new()), process(Vec::new())]);
        assert_eq!(asked, "2 processes asked for a communicator, but none was made");
    }
}
