//! Who is named: ranks in words, and whose waiting explains whose.

use super::compare::{Late, Member, Trouble};
use windlass_base::stats::calls::CallMade;

/// Functions that end on no rank before all have come.
const SYNCHRONIZING: [&str; 4] = ["ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclAlltoAll"];

/// Whether a call ends on no rank before all ranks have come.
pub fn is_synchronizing(call: &CallMade) -> bool {
    SYNCHRONIZING.contains(&call.function.trim_end_matches("Config")) && call.bytes > 0
}

/// `rank 1`, or `ranks 0, 2`.
pub fn ranks_text(members: &[Member<'_>]) -> String {
    let ranks: Vec<String> = members.iter().map(|member| member.of.rank.to_string()).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, ranks.join(", "))
}

/// ` 31 s ago`.
pub fn since(seconds: f64) -> String {
    if seconds.is_finite() { format!(" {seconds:.0} s ago") } else { String::new() }
}

/// Leaves out ranks that do not come because they wait themselves: those that they wait for are named. Where all wait for each other, all
/// are named.
pub fn without_waiters(found: Vec<Late>) -> Vec<Late> {
    let is_waiting = |one: &Late| {
        let waits = |process| {
            found
                .iter()
                .any(|other| other.communicator != one.communicator && other.waiting.contains(process))
        };
        one.trouble == Trouble::Absent && one.processes.iter().all(waits)
    };
    let first: Vec<Late> = found.iter().filter(|one| !is_waiting(one)).cloned().collect();
    if first.is_empty() { found } else { first }
}
