//! Counters in the text format OpenMetrics, which node_exporter's textfile collector reads, too.
//!
//! Every label has few values, whatever runs: processes are added up by device.

use std::collections::BTreeMap;
use std::fmt::Write;
use windlass_base::stats::snapshot::Snapshot;

/// The counters of processes.
pub fn text(seen: &[Snapshot]) -> String {
    let mut calls: BTreeMap<(i32, &str, &str), (u64, u64)> = BTreeMap::new();
    let mut communicators: BTreeMap<(i32, &str), u64> = BTreeMap::new();
    for of in seen.iter().flat_map(|snapshot| &snapshot.communicators) {
        for counts in &of.calls {
            let sum = calls.entry((of.device, &counts.function, &counts.path)).or_default();
            *sum = (sum.0.saturating_add(counts.calls), sum.1.saturating_add(counts.bytes));
        }
        if of.state == "live" {
            let peer_group = if of.peer_group == "yes" { "yes" } else { "no" };
            *communicators.entry((of.device, peer_group)).or_default() += 1;
        }
    }
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "# TYPE windlass_processes gauge\n# HELP windlass_processes Processes that have counters."
    );
    let _ = writeln!(out, "windlass_processes {}", seen.len());
    let _ = writeln!(
        out,
        "# TYPE windlass_communicators gauge\n# HELP windlass_communicators Communicators that live."
    );
    for ((device, peer_group), count) in &communicators {
        let _ = writeln!(
            out,
            "windlass_communicators{{device=\"{device}\",peer_group=\"{peer_group}\"}} {count}"
        );
    }
    let mut family = |name: &str, help: &str, value: fn(&(u64, u64)) -> u64| {
        let _ = writeln!(out, "# TYPE {name} counter\n# HELP {name} {help}");
        for ((device, function, path), sum) in &calls {
            let labels = format!("device=\"{device}\",function=\"{function}\",path=\"{path}\"");
            let _ = writeln!(out, "{name}_total{{{labels}}} {}", value(sum));
        }
    };
    family("windlass_calls", "Calls by function and path.", |sum| sum.0);
    family("windlass_call_bytes", "Bytes of the larger buffer of each call.", |sum| sum.1);
    out + "# EOF\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counts::tests::snapshot;

    /// Processes of a device are added up, and the text ends as the format wants.
    #[test]
    fn adds_up() {
        let one = snapshot(&[("ncclSend", "forward", 2, 1024), ("ncclRecv", "p2p", 1, 1024)]);
        let text = text(&[one.clone(), one]);
        let device = text.split("device=\"").nth(1).unwrap().split('"').next().unwrap();
        let labels = format!("{{device=\"{device}\",function=\"ncclSend\",path=\"forward\"}}");
        for line in [
            "windlass_processes 2",
            "# TYPE windlass_calls counter",
            &format!("windlass_communicators{{device=\"{device}\",peer_group=\"no\"}} 2"),
            &format!("windlass_calls_total{labels} 4"),
            &format!("windlass_call_bytes_total{labels} 2048"),
        ] {
            assert!(text.lines().any(|own| own == line), "no {line} in {text}");
        }
        assert!(text.ends_with("\n# EOF\n"));
        // A line is a comment, or a name with labels and a number.
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(name.starts_with("windlass_") && value.parse::<u64>().is_ok(), "{line}");
        }
    }

    /// Without a process, the text is complete.
    #[test]
    fn nobody() {
        assert!(text(&[]).contains("windlass_processes 0\n"));
    }
}
