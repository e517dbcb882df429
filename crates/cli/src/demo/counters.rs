//! The calls that ranks made, whether Windlass counted the same, and the table of what it counted: function, calls, bytes, paths.

use crate::collective::Kind;
use crate::counts;
use crate::text;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use windlass_base::stats::snapshot::Snapshot;

/// What a rank did, by function.
pub type Made = BTreeMap<String, Counted>;

/// The calls of one function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    pub calls: u64,
    /// Bytes of the larger buffer of each call.
    pub bytes: u64,
}

/// One line for each comparison: calls of every function, then calls and bytes by path of those that move data.
pub fn compare(made: &Made, report: &Snapshot) -> Vec<Result<String, String>> {
    let by_path = counts::by_path(report);
    let mut lines = Vec::new();
    for function in made.keys().chain(report.functions.keys()).collect::<BTreeSet<_>>() {
        let Counted { calls, bytes } = made.get(function).copied().unwrap_or_default();
        lines.push(agree(function, "calls", calls, report.functions.get(function).copied().unwrap_or(0)));
        if calls > 0 && moves_data(function) {
            let sums = by_path.iter().filter(|((name, _), _)| name == function).map(|(_, sums)| sums);
            let by_path = sums.fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
            lines.push(agree(function, "calls by path", calls, by_path.0));
            lines.push(agree(function, "bytes by path", bytes, by_path.1));
        }
    }
    lines
}

fn agree(function: &str, what: &str, made: u64, counted: u64) -> Result<String, String> {
    if made == counted {
        Ok(format!("{function}: {made} {what}"))
    } else {
        Err(format!("{function}: made {made} {what}, Windlass counted {counted}"))
    }
}

/// Whether a function is a collective, a send or a receive.
fn moves_data(function: &str) -> bool {
    Kind::ALL.iter().any(|kind| kind.function() == function) || matches!(function, "ncclSend" | "ncclRecv")
}

/// What all ranks counted of one function.
#[derive(Default)]
struct Row<'a> {
    calls: u64,
    bytes: u64,
    /// Every path that a call took; none for functions that have none.
    paths: BTreeSet<&'a str>,
}

/// Every function that Windlass counted on any rank, summed over ranks.
pub fn table(ranks: &[Snapshot]) -> String {
    let mut rows: BTreeMap<&str, Row> = BTreeMap::new();
    for report in ranks {
        for (function, calls) in report.functions.iter().filter(|(_, calls)| **calls > 0) {
            rows.entry(function).or_default().calls += calls;
        }
        for ((function, path), (_, bytes)) in counts::by_path(report) {
            if let Some(row) = rows.get_mut(function) {
                row.bytes += bytes;
                row.paths.insert(path);
            }
        }
    }
    let row = |(function, Row { calls, bytes, paths }): (&str, Row)| {
        let paths = Vec::from_iter(paths).join(" ");
        vec![function.to_owned(), calls.to_string(), bytes.to_string(), paths]
    };
    text::table(&["function", "calls", "bytes", "path"], rows.into_iter().map(row), &[1, 2])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counts::tests::snapshot;

    fn failed(made: &Made, report: &Snapshot) -> usize {
        compare(made, report).iter().filter(|line| line.is_err()).count()
    }

    /// Equal counters agree; a call or a byte too few, or a function never called, does not.
    #[test]
    fn compares() {
        let made = Made::from([("ncclAllReduce".into(), Counted { calls: 2, bytes: 64 })]);
        let report = |calls, bytes| snapshot(&[("ncclAllReduce", "forward", calls, bytes)]);
        assert_eq!(compare(&made, &report(2, 64)).len(), 3);
        assert_eq!(failed(&made, &report(2, 64)), 0);
        assert_eq!(failed(&made, &report(2, 63)), 1);
        assert_eq!(failed(&made, &report(1, 64)), 2);
        assert_eq!(failed(&Made::new(), &report(1, 64)), 1);
        assert_eq!(failed(&made, &snapshot(&[])), 3);
    }

    /// Functions without data are compared by calls alone.
    #[test]
    fn plain_functions() {
        let made = Made::from([("ncclGroupStart".into(), Counted { calls: 1, bytes: 0 })]);
        assert_eq!(compare(&made, &snapshot(&[("ncclGroupStart", "", 1, 0)])).len(), 1);
    }

    /// Calls and bytes are summed over ranks, and paths collected.
    #[test]
    fn sums_over_ranks() {
        let rank = |path: &str| snapshot(&[("ncclAllReduce", path, 1, 8), ("ncclGroupStart", "", 0, 0)]);
        assert_eq!(
            table(&[rank("forward"), rank("native")]),
            "function       calls  bytes  path\nncclAllReduce      2     16  forward native\n"
        );
    }
}
