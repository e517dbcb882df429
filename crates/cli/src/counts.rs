//! Windlass's counters as other processes see them: a report in a file.

use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use windlass_base::stats::snapshot::Snapshot;

/// The value of `WINDLASS_REPORT` for a report in a file.
pub fn report_to(file: &Path) -> OsString {
    let mut variable = OsString::from("json:");
    variable.push(file);
    variable
}

/// Reads a report of `WINDLASS_REPORT=json:FILE` or `windlassDump`.
pub fn read(file: &Path) -> Result<Snapshot> {
    let text = std::fs::read_to_string(file).with_context(|| {
        format!("Windlass wrote no report to {} (did the calls reach it?)", file.display())
    })?;
    serde_json::from_str(&text).with_context(|| format!("unreadable report of Windlass: {text:?}"))
}

/// Calls and bytes by function and path, over all communicators.
pub fn by_path(snapshot: &Snapshot) -> BTreeMap<(&str, &str), (u64, u64)> {
    let mut sums: BTreeMap<(&str, &str), (u64, u64)> = BTreeMap::new();
    for counts in snapshot.communicators.iter().flat_map(|communicator| &communicator.calls) {
        let sum = sums.entry((&counts.function, &counts.path)).or_default();
        *sum = (sum.0 + counts.calls, sum.1 + counts.bytes);
    }
    sums
}

/// The paths that calls of these functions took between two snapshots, joined; empty if there was none. A path that took less than a
/// hundredth of the bytes is left out: calls by which ranks meet are small.
pub fn paths_between(before: &Snapshot, after: &Snapshot, functions: &[&str]) -> String {
    let before = by_path(before);
    let mut taken: BTreeMap<&str, u64> = BTreeMap::new();
    for (key, (calls, bytes)) in by_path(after) {
        let (calls_before, bytes_before) = before.get(&key).copied().unwrap_or_default();
        if functions.contains(&key.0) && calls > calls_before {
            *taken.entry(key.1).or_default() += bytes - bytes_before;
        }
    }
    let all: u64 = taken.values().sum();
    let paths = taken.into_iter().filter(|(_, bytes)| bytes.saturating_mul(100) >= all).map(|(path, _)| path);
    paths.collect::<Vec<_>>().join("+")
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A snapshot of one communicator with these calls: function, path, calls, bytes.
    pub fn snapshot(calls: &[(&str, &str, u64, u64)]) -> Snapshot {
        let mut functions: BTreeMap<&str, u64> = BTreeMap::new();
        for (function, _, calls, _) in calls {
            *functions.entry(function).or_default() += calls;
        }
        let calls: Vec<_> = calls
            .iter()
            .map(|(function, path, calls, bytes)| {
                serde_json::json!({"function": function, "path": path, "calls": calls, "bytes": bytes})
            })
            .collect();
        serde_json::from_value(serde_json::json!({
            "windlass": "0.2.0", "process": 1, "program": "x", "nccl_path": "", "nccl_version": 22809,
            "began_ns": 0, "communicators_made": 1, "functions": functions,
            "communicators": [
                {"serial": 1, "state": "live", "rank": 0, "ranks": 2, "device": 0, "calls": calls},
            ],
        }))
        .unwrap()
    }

    /// Only paths whose counters moved, and only of the functions asked for.
    #[test]
    fn moved_paths() {
        let before = snapshot(&[("ncclSend", "forward", 5, 0), ("ncclRecv", "native", 1, 0)]);
        let after = snapshot(&[
            ("ncclSend", "forward", 5, 0),
            ("ncclSend", "p2p", 1, 0),
            ("ncclRecv", "native", 2, 0),
            ("ncclAllReduce", "staged", 1, 0),
        ]);
        assert_eq!(paths_between(&before, &after, &["ncclSend", "ncclRecv"]), "native+p2p");
        assert_eq!(paths_between(&before, &after, &["ncclBcast"]), "");
    }
}
