//! What the ranks of a collective must agree on: each writes a card of its call, and the cards are compared.

use crate::communicator::Communicator;
use crate::lookup::{COVERED, Coverage, LARGE_BYTES, LARGE_GATHER_BYTES, PARTLY_COVERED, UNCOVERED};
use crate::operation::{Buffer, Call, Kind};
use crate::operators::Recipe;
use crate::refusal::lock;
use crate::segment::CallCard;
use crate::strict;
use nccl_sys::*;

/// What this rank tells its peers about a collective.
pub fn card(
    communicator: &Communicator,
    call: &Call,
    recipe: Option<&Recipe>,
    buffers: (Option<Buffer>, Option<Buffer>),
    coverage: Coverage,
    captured: bool,
) -> CallCard {
    let windows = lock(&communicator.windows);
    let place = |buffer: Option<Buffer>| {
        buffer.and_then(|buffer| windows.symmetric_place(buffer.address)).unwrap_or((0, 0))
    };
    let ((send_window, send_offset), (receive_window, receive_offset)) = (place(buffers.0), place(buffers.1));
    CallCard {
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

/// The first thing that the ranks of a collective do not agree on.
pub fn complaint(cards: &[CallCard], call: &Call) -> Option<String> {
    let differ = |of: fn(&CallCard) -> u64| cards.iter().any(|card| of(card) != of(&cards[0]));
    let bytes = |card: &CallCard| card.count * ncclDataType_t(card.datatype).size_bytes().unwrap_or(0) as u64;
    if differ(|card| card.kind.into()) {
        return Some("mismatched collectives: different calls".to_owned());
    }
    // NCCL moves bytes where it does not reduce: there the type is free.
    let mismatch = if call.kind.reduces() {
        [
            ("counts", differ(|card| card.count)),
            ("types", differ(|card| card.datatype as u64)),
            ("operators", differ(|card| card.operator as u64)),
            ("roots", differ(|card| card.root as u64)),
        ]
        .into_iter()
        .find_map(|(what, differs)| differs.then_some(what))
    } else if cards.iter().any(|card| bytes(card) != bytes(&cards[0])) {
        Some("sizes")
    } else {
        differ(|card| card.root as u64).then_some("roots")
    };
    if let Some(what) = mismatch {
        return Some(format!("mismatched collectives: different {what}"));
    }
    if !strict::enabled() {
        return None;
    }
    if differ(|card| card.captured.into()) {
        let captured = cards.iter().map(|card| if card.captured != 0 { "captured" } else { "eager" });
        let list: Vec<String> =
            captured.enumerate().map(|(rank, how)| format!("rank {rank} {how}")).collect();
        return Some(format!("collective captured on some ranks only: {}", list.join(", ")));
    }
    window_complaint(cards, call).or_else(|| registration_complaint(cards, call, bytes(&cards[0])))
}

/// Ranks whose buffers are registered and others whose are not would wait for each other for ever.
fn registration_complaint(cards: &[CallCard], call: &Call, bytes: u64) -> Option<String> {
    // Of all-gathers NCCL looks both buffers up and needs both.
    let (bytes, large, partly) = match call.kind {
        Kind::AllGather => (bytes * cards.len() as u64, LARGE_GATHER_BYTES, UNCOVERED),
        _ => (bytes, LARGE_BYTES, PARTLY_COVERED),
    };
    let coverage = |card: &CallCard| if card.coverage == PARTLY_COVERED { partly } else { card.coverage };
    // NCCL registers the buffers of captured collectives itself.
    let eager = cards[0].captured == 0;
    if !eager || bytes < large || cards.iter().all(|card| coverage(card) == coverage(&cards[0])) {
        return None;
    }
    let word = |card| match coverage(card) {
        COVERED => "registered",
        UNCOVERED => "unregistered",
        _ => "partly registered",
    };
    let list = cards.iter().enumerate().map(|(rank, card)| format!("rank {rank} {}", word(card)));
    Some(format!("mixed registration of {bytes} bytes: {}", list.collect::<Vec<_>>().join(", ")))
}

/// The collectives that NCCL runs through windows reach into peers at the caller's own offset: it must be theirs.
fn window_complaint(cards: &[CallCard], call: &Call) -> Option<String> {
    let send = |card: &CallCard| (card.send_window, card.send_offset);
    let receive = |card: &CallCard| (card.receive_window, card.receive_offset);
    let in_windows = |card: &CallCard| card.send_window != 0 && card.receive_window != 0;
    let complain = |name: &str, place: &dyn Fn(&CallCard) -> (u64, u64)| {
        let all = cards.iter().all(in_windows);
        (all && cards.iter().any(|card| place(card) != place(&cards[0]))).then(|| {
            let text = |(rank, card)| {
                let (window, offset) = place(card);
                format!("rank {rank} window {window} offset {offset}")
            };
            let list: Vec<String> = cards.iter().enumerate().map(text).collect();
            format!("unequal window offsets of {name}: {}", list.join(", "))
        })
    };
    let uses_send = matches!(call.kind, Kind::AllReduce | Kind::ReduceScatter);
    let uses_receive = matches!(call.kind, Kind::AllReduce | Kind::AllGather);
    if !uses_send && !uses_receive {
        return None;
    }
    if cards.iter().any(|card| in_windows(card) != in_windows(&cards[0])) {
        let text =
            |(rank, card)| format!("rank {rank} {}", if in_windows(card) { "in windows" } else { "outside" });
        let list: Vec<String> = cards.iter().enumerate().map(text).collect();
        return Some(format!(
            "mixed registration: buffers in windows on some ranks only: {}",
            list.join(", ")
        ));
    }
    let sent = if uses_send { complain("sendbuff", &send) } else { None };
    sent.or_else(|| if uses_receive { complain("recvbuff", &receive) } else { None })
}
