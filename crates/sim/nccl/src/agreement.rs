//! The comparison of a collective's calls on all ranks: each rank writes the facts of its call, and all ranks compare them.

use crate::communicator::Communicator;
use crate::lookup::{COVERED, Coverage, LARGE_BYTES, LARGE_GATHER_BYTES, PARTLY_COVERED, UNCOVERED};
use crate::operation::{Buffer, Call, Kind};
use crate::operators::Recipe;
use crate::refusal::lock;
use crate::segment::CallFacts;
use crate::strict;
use nccl_sys::*;

/// The facts of this rank's call.
pub fn facts(
    communicator: &Communicator,
    call: &Call,
    recipe: Option<&Recipe>,
    buffers: (Option<Buffer>, Option<Buffer>),
    coverage: Coverage,
    captured: bool,
) -> CallFacts {
    let windows = lock(&communicator.windows);
    let place = |buffer: Option<Buffer>| {
        buffer.and_then(|buffer| windows.symmetric_place(buffer.address)).unwrap_or((0, 0))
    };
    let ((send_window, send_offset), (receive_window, receive_offset)) = (place(buffers.0), place(buffers.1));
    CallFacts {
        kind: call.kind as u32,
        datatype: call.datatype.0,
        operator: recipe.map_or(0, |recipe| recipe.class),
        root: if call.kind.has_root() { call.root } else { 0 },
        count: call.count as u64,
        captured: captured.into(),
        coverage,
        send_window,
        send_offset,
        receive_window,
        receive_offset,
    }
}

/// Describes the first difference between the ranks' calls that NCCL does not allow.
pub fn complaint(all_facts: &[CallFacts], call: &Call) -> Option<String> {
    let differ = |of: fn(&CallFacts) -> u64| all_facts.iter().any(|facts| of(facts) != of(&all_facts[0]));
    let bytes =
        |facts: &CallFacts| facts.count * ncclDataType_t(facts.datatype).size_bytes().unwrap_or(0) as u64;
    if differ(|facts| facts.kind.into()) {
        return Some("mismatched collectives: different calls".to_owned());
    }
    // Without a reduction NCCL moves bytes, so types may differ.
    let mismatch = if call.kind.reduces() {
        [
            ("counts", differ(|facts| facts.count)),
            ("types", differ(|facts| facts.datatype as u64)),
            ("operators", differ(|facts| facts.operator as u64)),
            ("roots", differ(|facts| facts.root as u64)),
        ]
        .into_iter()
        .find_map(|(what, differs)| differs.then_some(what))
    } else if all_facts.iter().any(|facts| bytes(facts) != bytes(&all_facts[0])) {
        Some("sizes")
    } else {
        differ(|facts| facts.root as u64).then_some("roots")
    };
    if let Some(what) = mismatch {
        return Some(format!("mismatched collectives: different {what}"));
    }
    if !strict::enabled() {
        return None;
    }
    if differ(|facts| facts.captured.into()) {
        let captured = all_facts.iter().map(|facts| if facts.captured != 0 { "captured" } else { "eager" });
        let list: Vec<String> =
            captured.enumerate().map(|(rank, how)| format!("rank {rank} {how}")).collect();
        return Some(format!("collective captured on some ranks only: {}", list.join(", ")));
    }
    window_complaint(all_facts, call)
        .or_else(|| registration_complaint(all_facts, call, bytes(&all_facts[0])))
}

/// Describes mixed registration: ranks with registered buffers and ranks without would wait for each other for ever.
fn registration_complaint(all_facts: &[CallFacts], call: &Call, bytes: u64) -> Option<String> {
    // For all-gathers NCCL looks up both buffers and needs both.
    let (bytes, large, partly) = match call.kind {
        Kind::AllGather => (bytes * all_facts.len() as u64, LARGE_GATHER_BYTES, UNCOVERED),
        _ => (bytes, LARGE_BYTES, PARTLY_COVERED),
    };
    let coverage = |facts: &CallFacts| if facts.coverage == PARTLY_COVERED { partly } else { facts.coverage };
    // NCCL registers the buffers of captured collectives itself.
    let eager = all_facts[0].captured == 0;
    if !eager || bytes < large || all_facts.iter().all(|facts| coverage(facts) == coverage(&all_facts[0])) {
        return None;
    }
    let word = |facts| match coverage(facts) {
        COVERED => "registered",
        UNCOVERED => "unregistered",
        _ => "partly registered",
    };
    let list = all_facts.iter().enumerate().map(|(rank, facts)| format!("rank {rank} {}", word(facts)));
    Some(format!("mixed registration of {bytes} bytes: {}", list.collect::<Vec<_>>().join(", ")))
}

/// Describes unequal windows or offsets. NCCL's collectives through windows access peers' memory at the caller's own offset, so all
/// ranks' must be equal.
fn window_complaint(all_facts: &[CallFacts], call: &Call) -> Option<String> {
    let send = |facts: &CallFacts| (facts.send_window, facts.send_offset);
    let receive = |facts: &CallFacts| (facts.receive_window, facts.receive_offset);
    let in_windows = |facts: &CallFacts| facts.send_window != 0 && facts.receive_window != 0;
    let complain = |name: &str, place: &dyn Fn(&CallFacts) -> (u64, u64)| {
        let all = all_facts.iter().all(in_windows);
        (all && all_facts.iter().any(|facts| place(facts) != place(&all_facts[0]))).then(|| {
            let text = |(rank, facts)| {
                let (window, offset) = place(facts);
                format!("rank {rank} window {window} offset {offset}")
            };
            let list: Vec<String> = all_facts.iter().enumerate().map(text).collect();
            format!("unequal window offsets of {name}: {}", list.join(", "))
        })
    };
    let uses_send = matches!(call.kind, Kind::AllReduce | Kind::ReduceScatter);
    let uses_receive = matches!(call.kind, Kind::AllReduce | Kind::AllGather);
    if !uses_send && !uses_receive {
        return None;
    }
    if all_facts.iter().any(|facts| in_windows(facts) != in_windows(&all_facts[0])) {
        let text = |(rank, facts)| {
            format!("rank {rank} {}", if in_windows(facts) { "in windows" } else { "outside" })
        };
        let list: Vec<String> = all_facts.iter().enumerate().map(text).collect();
        return Some(format!(
            "mixed registration: buffers in windows on some ranks only: {}",
            list.join(", ")
        ));
    }
    let sent = if uses_send { complain("sendbuff", &send) } else { None };
    sent.or_else(|| if uses_receive { complain("recvbuff", &receive) } else { None })
}
