//! Writes Windlass's counters of a run as a table.

use super::counting::Counters;
use windlass_base::stats::report::size;

/// The heading of the table.
pub fn heading(counters: &Counters) -> String {
    format!(
        "Windlass's counters of the last run with it, of all ranks together (processes: {}, communicators: {}). Windlass counts \
         calls and bytes, not the time inside calls.",
        counters.processes, counters.communicators
    )
}

/// The head, and a line for each function and path; empty if nothing was counted.
pub fn lines(counters: &Counters) -> Vec<Vec<String>> {
    if counters.calls.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![["function", "path", "calls", "bytes"].map(str::to_owned).to_vec()];
    lines.extend(counters.calls.iter().map(|count| {
        vec![count.function.clone(), count.path.clone(), count.calls.to_string(), size(count.bytes)]
    }));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::counting::Count;

    /// Calls and bytes by function and path.
    #[test]
    fn tables() {
        let count = Count { function: "ncclSend".into(), path: "p2p".into(), calls: 3, bytes: 1 << 21 };
        let counters = Counters { processes: 2, communicators: 4, calls: vec![count] };
        assert!(heading(&counters).contains("(processes: 2, communicators: 4)"));
        assert_eq!(lines(&counters)[1], ["ncclSend", "p2p", "3", "2.0 MiB"]);
        assert!(lines(&Counters::default()).is_empty());
    }
}
