//! The table at the end of the demo, from Windlass's counters: function, calls, bytes, path; and how long the
//! steps took that used the function, on the slowest rank (functions of one step share its time).

use super::counters::Counters;
use crate::counts;
use crate::text;
use std::collections::{BTreeMap, BTreeSet};
use windlass_base::stats::snapshot::Snapshot;

/// One line of the table, summed over ranks.
#[derive(Debug, PartialEq)]
pub struct Row {
    pub function: String,
    pub calls: u64,
    pub bytes: u64,
    /// Every path that a call took; none for functions that have none.
    pub paths: BTreeSet<String>,
    /// The largest over the ranks of the time of the steps that used the function.
    pub seconds: f64,
}

/// Every function that Windlass counted on any rank.
pub fn rows(ranks: &[(Counters, Snapshot)]) -> Vec<Row> {
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    for (made, report) in ranks {
        for (function, calls) in report.functions.iter().filter(|(_, calls)| **calls > 0) {
            let row = rows.entry(function.clone()).or_insert_with(|| Row {
                function: function.clone(),
                calls: 0,
                bytes: 0,
                paths: BTreeSet::new(),
                seconds: 0.0,
            });
            row.calls += calls;
            row.seconds =
                row.seconds.max(made.functions.get(function).map_or(0.0, |counted| counted.seconds));
        }
        for ((function, path), (_, bytes)) in counts::by_path(report) {
            if let Some(row) = rows.get_mut(function) {
                row.bytes += bytes;
                row.paths.insert(path.to_owned());
            }
        }
    }
    rows.into_values().collect()
}

/// The table as text.
pub fn render(rows: &[Row]) -> String {
    let mut lines = vec![["function", "calls", "bytes", "path", "steps took"].map(str::to_owned).to_vec()];
    for row in rows {
        let paths: Vec<&str> = row.paths.iter().map(String::as_str).collect();
        let time = if row.seconds > 0.0 { format!("{:.1} ms", row.seconds * 1e3) } else { String::new() };
        lines.push(vec![
            row.function.clone(),
            row.calls.to_string(),
            row.bytes.to_string(),
            paths.join(" "),
            time,
        ]);
    }
    text::table(&lines, &[1, 2, 4])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counts::tests::snapshot;

    /// Calls and bytes are summed over ranks, paths collected, times are the slowest rank's.
    #[test]
    fn sums_over_ranks() {
        let rank = |path: &str, seconds| {
            let mut made = Counters::default();
            made.add("ncclAllReduce", 8);
            made.add_seconds("ncclAllReduce", seconds);
            (made, snapshot(&[("ncclAllReduce", path, 1, 8), ("ncclGroupStart", "", 0, 0)]))
        };
        let rows = rows(&[rank("forward", 0.001), rank("native", 0.002)]);
        assert_eq!(rows.len(), 1);
        assert_eq!((rows[0].calls, rows[0].bytes, rows[0].seconds), (2, 16, 0.002));
        let text = render(&rows);
        assert_eq!(
            text,
            "function       calls  bytes  path            steps took\n\
             ncclAllReduce      2     16  forward native      2.0 ms\n"
        );
    }
}
