//! The calls that a rank made, and whether Windlass counted the same.

use crate::collective::Kind;
use crate::counts;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use windlass_base::stats::snapshot::Snapshot;

/// What a rank did, by function.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counters {
    pub functions: BTreeMap<String, Counted>,
}

/// The calls of one function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    pub calls: u64,
    /// Bytes of the larger buffer of each call.
    pub bytes: u64,
}

impl Counters {
    pub fn add(&mut self, function: &str, bytes: u64) {
        let counted = self.functions.entry(function.to_owned()).or_default();
        counted.calls += 1;
        counted.bytes += bytes;
    }
}

/// One line for each comparison: calls of every function, then calls and bytes by path of those that move data.
pub fn compare(made: &Counters, report: &Snapshot) -> Vec<Result<String, String>> {
    let mut lines = Vec::new();
    let uncalled = report.functions.keys().filter(|function| !made.functions.contains_key(*function));
    for function in made.functions.keys().chain(uncalled) {
        let calls = made.functions.get(function).map_or(0, |counted| counted.calls);
        lines.push(agree(function, "calls", calls, report.functions.get(function).copied().unwrap_or(0)));
    }
    let mut by_function: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for ((function, _), (calls, bytes)) in counts::by_path(report) {
        let sum = by_function.entry(function).or_default();
        *sum = (sum.0 + calls, sum.1 + bytes);
    }
    for (function, counted) in made.functions.iter().filter(|(function, _)| moves_data(function)) {
        let (calls, bytes) = by_function.get(function.as_str()).copied().unwrap_or_default();
        lines.push(agree(function, "calls by path", counted.calls, calls));
        lines.push(agree(function, "bytes by path", counted.bytes, bytes));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counts::tests::snapshot;

    fn failed(made: &Counters, report: &Snapshot) -> usize {
        compare(made, report).iter().filter(|line| line.is_err()).count()
    }

    /// Equal counters agree; a call or a byte too few, or a function never called, does not.
    #[test]
    fn compares() {
        let mut made = Counters::default();
        made.add("ncclAllReduce", 64);
        made.add("ncclAllReduce", 0);
        let report = |calls, bytes| snapshot(&[("ncclAllReduce", "forward", calls, bytes)]);
        assert_eq!(compare(&made, &report(2, 64)).len(), 3);
        assert_eq!(failed(&made, &report(2, 64)), 0);
        assert_eq!(failed(&made, &report(2, 63)), 1);
        assert_eq!(failed(&made, &report(1, 64)), 2);
        assert_eq!(failed(&Counters::default(), &report(1, 64)), 1);
        assert_eq!(failed(&made, &snapshot(&[])), 3);
    }

    /// Functions without data are compared by calls alone.
    #[test]
    fn plain_functions() {
        let mut made = Counters::default();
        made.add("ncclGroupStart", 0);
        assert_eq!(compare(&made, &snapshot(&[("ncclGroupStart", "", 1, 0)])).len(), 1);
    }
}
