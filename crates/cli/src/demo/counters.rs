//! The calls that a rank made, the calls that Windlass counted, and whether they agree.

use crate::nccl::ENTRIES;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What a rank did, by function.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counters {
    pub functions: BTreeMap<String, Counted>,
}

/// The calls of one function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counted {
    pub calls: u64,
    /// Bytes that the calls were about: the count argument times the size of an element.
    pub bytes: u64,
    /// Seconds from the first call of a step to the end of the step on the stream, for each step with the function.
    pub seconds: f64,
}

impl Counters {
    pub fn add(&mut self, function: &str, bytes: u64) {
        let counted = self.functions.entry(function.to_owned()).or_default();
        counted.calls += 1;
        counted.bytes += bytes;
    }

    pub fn add_seconds(&mut self, function: &str, seconds: f64) {
        self.functions.entry(function.to_owned()).or_default().seconds += seconds;
    }

    pub fn calls(&self, function: &str) -> u64 {
        self.functions.get(function).map_or(0, |counted| counted.calls)
    }
}

/// Windlass's report at exit, as far as it is read here.
#[derive(Debug, Default, Deserialize)]
pub struct Report {
    #[serde(default)]
    pub functions: BTreeMap<String, u64>,
    #[serde(default)]
    pub communicators: Vec<Communicator>,
}

/// A communicator of the report.
#[derive(Debug, Deserialize)]
pub struct Communicator {
    #[serde(default)]
    pub calls: Vec<Calls>,
}

/// Calls of one function that took one path.
#[derive(Debug, Deserialize)]
pub struct Calls {
    pub function: String,
    pub path: String,
    pub calls: u64,
    pub bytes: u64,
}

impl Report {
    /// The paths that calls of these functions took, joined; empty if none was counted.
    pub fn paths_of(&self, functions: &[&str]) -> String {
        let calls = self.communicators.iter().flat_map(|communicator| &communicator.calls);
        let paths: BTreeSet<&str> = calls
            .filter(|calls| calls.calls > 0 && functions.contains(&calls.function.as_str()))
            .map(|calls| calls.path.as_str())
            .collect();
        paths.into_iter().collect::<Vec<_>>().join("+")
    }

    pub fn read(file: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(file).with_context(|| {
            format!("Windlass wrote no report to {} (did the calls reach it?)", file.display())
        })?;
        serde_json::from_str(&text).with_context(|| format!("unreadable report of Windlass: {text:?}"))
    }
}

/// One line for each comparison.
pub fn compare(made: &Counters, report: &Report) -> Vec<Result<String, String>> {
    let mut lines = Vec::new();
    for entry in ENTRIES.iter().filter(|entry| entry.counted) {
        let expected = made.calls(entry.name);
        let counted = report.functions.get(entry.name).copied().unwrap_or(0);
        if expected > 0 || counted > 0 {
            lines.push(agree(entry.name, "calls", expected, counted));
        }
    }
    let mut by_function: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for calls in report.communicators.iter().flat_map(|communicator| &communicator.calls) {
        let sum = by_function.entry(&calls.function).or_default();
        sum.0 += calls.calls;
        sum.1 += calls.bytes;
    }
    for (function, counted) in made.functions.iter().filter(|(function, _)| moves_data(function)) {
        let (calls, bytes) = by_function.remove(function.as_str()).unwrap_or_default();
        lines.push(agree(function, "calls by path", counted.calls, calls));
        lines.push(agree(function, "bytes by path", counted.bytes, bytes));
    }
    lines.extend(by_function.into_iter().filter(|(function, _)| moves_data(function)).map(
        |(function, (calls, _))| Err(format!("{function}: made no calls, Windlass counted {calls} by path")),
    ));
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
pub fn moves_data(function: &str) -> bool {
    let kinds = crate::collective::Kind::ALL;
    kinds.iter().any(|kind| kind.function() == function) || matches!(function, "ncclSend" | "ncclRecv")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(calls: u64, bytes: u64) -> Report {
        serde_json::from_value(serde_json::json!({
            "functions": {"ncclAllReduce": calls},
            "communicators": [{"name": "a", "rank": 0, "ranks": 2, "device": 0, "calls": [
                {"function": "ncclAllReduce", "path": "Forward", "calls": calls, "bytes": bytes},
            ]}],
        }))
        .unwrap()
    }

    /// Equal counters agree; a call or a byte too few, or a function never called, does not.
    #[test]
    fn compares() {
        let mut made = Counters::default();
        made.add("ncclAllReduce", 64);
        made.add("ncclAllReduce", 0);
        let failed =
            |made: &Counters, report| compare(made, &report).into_iter().filter(Result::is_err).count();
        assert_eq!(failed(&made, report(2, 64)), 0);
        assert_eq!(compare(&made, &report(2, 64)).len(), 3);
        assert_eq!(failed(&made, report(2, 63)), 1);
        assert_eq!(failed(&made, report(1, 64)), 2);
        assert_eq!(failed(&Counters::default(), report(1, 64)), 2);
        assert_eq!(failed(&made, Report::default()), 3);
    }

    /// Functions that Windlass passes through uncounted are not compared.
    #[test]
    fn uncounted_functions() {
        let mut made = Counters::default();
        made.add("ncclGetVersion", 0);
        assert!(compare(&made, &Report::default()).is_empty());
    }
}
