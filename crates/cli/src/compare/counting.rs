//! Collects Windlass's counters of a run: from the reports that its processes write at exit, and from shared memory for processes that
//! are killed.

use crate::counts;
use anyhow::{Context, Result};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use windlass_base::stats::files;
use windlass_base::stats::segment::Opened;
use windlass_base::stats::snapshot::Snapshot;

/// Collects the counters of a run's processes while it runs.
pub struct Counting {
    reports: PathBuf,
    /// Segments by process. They stay readable after the process has ended.
    segments: BTreeMap<u32, Opened>,
}

/// The sums over all processes of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Counters {
    /// Processes that made a communicator.
    pub processes: usize,
    pub communicators: u64,
    pub calls: Vec<Count>,
}

/// Calls of one function on one path.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Count {
    pub function: String,
    pub path: String,
    pub calls: u64,
    pub bytes: u64,
}

impl Counting {
    /// Begins with an empty folder for reports.
    pub fn begin(reports: PathBuf) -> Result<Counting> {
        let old = std::fs::create_dir_all(&reports).and_then(|()| std::fs::read_dir(&reports));
        old.and_then(|old| old.flatten().try_for_each(|old| std::fs::remove_file(old.path())))
            .with_context(|| format!("cannot make {}", reports.display()))?;
        Ok(Counting { reports, segments: BTreeMap::new() })
    }

    /// The value of `WINDLASS_REPORT` for the run.
    pub fn variable(&self) -> OsString {
        counts::report_to(&self.reports.join("%h-%p.json"))
    }

    /// Opens the segments of processes that have begun to count.
    pub fn look(&mut self, family: &BTreeSet<u32>) {
        for path in files::list(Path::new(files::FOLDER)) {
            let process = files::owner(&path).map(|owner| owner.process);
            let Some(process) = process.filter(|process| family.contains(process)) else { continue };
            if !self.segments.contains_key(&process)
                && let Ok(segment) = Opened::open(&path)
            {
                self.segments.insert(process, segment);
            }
        }
    }

    /// The sums, after the run has ended.
    pub fn end(self) -> Counters {
        let reports = std::fs::read_dir(&self.reports).into_iter().flatten().flatten();
        let read =
            |(process, segment): (&u32, &Opened)| Some((*process, Snapshot::of(&*segment.read().ok()?)));
        let mut snapshots: BTreeMap<u32, Snapshot> = self.segments.iter().filter_map(read).collect();
        // A report is newer than the segment's counts.
        for report in reports.filter_map(|report| counts::read(&report.path()).ok()) {
            snapshots.insert(report.process, report);
        }
        sum(&snapshots.into_values().collect::<Vec<_>>())
    }
}

fn sum(snapshots: &[Snapshot]) -> Counters {
    let mut calls: BTreeMap<(&str, &str), (u64, u64)> = BTreeMap::new();
    for snapshot in snapshots {
        for (key, (more_calls, more_bytes)) in counts::by_path(snapshot) {
            let sum = calls.entry(key).or_default();
            *sum = (sum.0.saturating_add(more_calls), sum.1.saturating_add(more_bytes));
        }
    }
    let count = |((function, path), (calls, bytes)): ((&str, &str), (u64, u64))| Count {
        function: function.into(),
        path: path.into(),
        calls,
        bytes,
    };
    Counters {
        processes: snapshots.iter().filter(|snapshot| snapshot.communicators_made > 0).count(),
        communicators: snapshots.iter().map(|snapshot| snapshot.communicators_made).sum(),
        calls: calls.into_iter().map(count).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counts::tests::snapshot;

    /// Calls of all processes are added up for each function and path.
    #[test]
    fn sums() {
        let first = snapshot(&[("ncclAllReduce", "native", 2, 64), ("ncclSend", "p2p", 1, 8)]);
        let second =
            snapshot(&[("ncclAllReduce", "native", 3, 96), ("ncclAllReduce", "forward", 1, 1 << 20)]);
        let counters = sum(&[first, second]);
        assert_eq!((counters.processes, counters.communicators), (2, 2));
        let calls: Vec<_> = counters
            .calls
            .iter()
            .map(|count| (&*count.function, &*count.path, count.calls, count.bytes))
            .collect();
        assert_eq!(
            calls,
            [
                ("ncclAllReduce", "forward", 1, 1 << 20),
                ("ncclAllReduce", "native", 5, 160),
                ("ncclSend", "p2p", 1, 8)
            ]
        );
    }

    /// Reports of an earlier comparison are removed before a run.
    #[test]
    fn reads_reports() {
        let folder = tempfile::tempdir().unwrap();
        let reports = folder.path().join("counters");
        std::fs::create_dir(&reports).unwrap();
        std::fs::write(reports.join("old.json"), "{}").unwrap();
        let counting = Counting::begin(reports.clone()).unwrap();
        assert!(counting.variable().to_string_lossy().ends_with("/counters/%h-%p.json"));
        let report = snapshot(&[("ncclSend", "p2p", 7, 70)]);
        std::fs::write(reports.join("host-1.json"), serde_json::to_string(&report).unwrap()).unwrap();
        let counters = counting.end();
        assert_eq!((counters.processes, counters.calls[0].calls), (1, 7));
    }
}
