//! The table at the end of the demo, from Windlass's counters: function, calls, bytes, paths.

use crate::counts;
use crate::text;
use std::collections::{BTreeMap, BTreeSet};
use windlass_base::stats::snapshot::Snapshot;

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
    let mut lines = vec![["function", "calls", "bytes", "path"].map(str::to_owned).to_vec()];
    for (function, Row { calls, bytes, paths }) in rows {
        let paths = Vec::from_iter(paths).join(" ");
        lines.push(vec![function.to_owned(), calls.to_string(), bytes.to_string(), paths]);
    }
    text::table(&lines, &[1, 2])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counts::tests::snapshot;

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
