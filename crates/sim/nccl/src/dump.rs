//! The dump of what every rank of a communicator waits for, printed when one has waited too long.

use crate::segment::{Segment, standing};
use crate::settings::settings;
use crate::{communicator, strict};
use std::sync::atomic::Ordering::SeqCst;

/// Reports that `rank` is stuck and ends the process.
pub fn stuck(segment: &Segment, rank: usize) -> ! {
    let name = strict::name(segment, rank);
    let limit = settings().timeout.as_millis();
    let mut lines =
        vec![format!("{name}: no progress for {limit} ms, waits for {}", segment.rank(rank).waits_for.get())];
    // Ranks time out together; one dump is enough.
    if segment.header().dumped.swap(1, SeqCst) == 0 {
        lines.extend((0..segment.ranks()).map(|peer| describe(segment, peer)));
    }
    lines.extend(elsewhere(segment));
    strict::say(&lines.join("\nsim-nccl: "));
    let _ = segment.header().failed.compare_exchange(0, rank as u32 + 1, SeqCst, SeqCst);
    segment.unlink();
    segment.ring_all();
    strict::leave()
}

/// A line for each other communicator of this process that is in a call: a rank that is late here is often stuck in another one.
pub fn elsewhere(segment: &Segment) -> Vec<String> {
    let others = communicator::live();
    let busy = others.iter().filter_map(|other| {
        let theirs = other.segment_if_made().filter(|theirs| !std::ptr::eq(*theirs, segment))?;
        let record = theirs.rank(other.rank);
        let call = Some(record.call.get()).filter(|call| !call.is_empty())?;
        Some(format!("  {}: in {call}, waits for {}", other.name(), record.waits_for.get()))
    });
    busy.collect()
}

/// Describes a rank in one line.
pub fn describe(segment: &Segment, rank: usize) -> String {
    let record = segment.rank(rank);
    let state = match record.standing.load(SeqCst) {
        standing::ABSENT => return format!("  rank {rank}: has not joined"),
        standing::ABORTED => "aborted",
        standing::DESTROYED => "destroyed its communicator",
        standing::REVOKED => "revoked its communicator",
        _ => "alive",
    };
    let process = record.process.load(SeqCst);
    let state = if is_gone(process) { "dead (the process is gone; NCCL would hang)" } else { state };
    let (device, operation) = (record.device.load(SeqCst), record.operation.load(SeqCst));
    let call =
        Some(record.call.get()).filter(|text| !text.is_empty()).unwrap_or_else(|| "no call".to_owned());
    let waits = Some(record.waits_for.get()).filter(|text| !text.is_empty());
    let waits = waits.map_or_else(|| "waits for nothing".to_owned(), |text| format!("waits for {text}"));
    format!(
        "  rank {rank} (process {process}, device {device}): {state}, operation {operation}, in {call}, {waits}"
    )
}

/// Whether a process has ended. A zombie counts as ended.
fn is_gone(process: i32) -> bool {
    let Ok(text) = std::fs::read_to_string(format!("/proc/{process}/stat")) else {
        // SAFETY: signal 0 only asks.
        return unsafe { libc::kill(process, 0) } != 0;
    };
    text.rsplit(')').next().is_some_and(|rest| matches!(rest.trim_start().chars().next(), Some('Z' | 'X')))
}
