//! Collectives: rounds through the staging slots.
//!
//! In a round every rank publishes a piece of its input in its slot, reduces its share of the sum where there is one,
//! and copies out what it needs. Slots are double: a piece is overwritten two rounds later, when all have read it.

use crate::communicator::Communicator;
use crate::operation::{Collective, Kind};
use crate::reduce;
use crate::segment::{CallFacts, Left, SLOT_BYTES, Segment};
use crate::settings::settings;
use crate::{agreement, strict};
use std::sync::atomic::Ordering::SeqCst;

/// A round has three phases: published, reduced, read.
const PHASES: u64 = 3;

pub fn run(communicator: &Communicator, collective: &Collective) -> Result<(), Left> {
    if communicator.ranks == 1 {
        run_alone(collective);
        return Ok(());
    }
    let (rank, ranks) = (communicator.rank, communicator.ranks);
    let call = &collective.call;
    let segment = communicator.segment();
    let element = call.element_bytes();
    let parts = match call.kind {
        Kind::ReduceScatter | Kind::AlltoAll | Kind::Scatter => ranks,
        _ => 1,
    };
    // Parts start at multiples of 16 bytes, so that elements in them are aligned.
    let part_bytes = SLOT_BYTES / parts / 16 * 16;
    let step = part_bytes / element;
    let (send, receive) = (call.send as *const u8, call.receive as *mut u8);
    // In NCCL peers write into a registered receive buffer through their import, so this rank writes there, too.
    let arrives = collective.arrives.map_or(receive, |address| address as *mut u8);
    let is_root = rank as i32 == call.root;
    let root = call.root.max(0) as usize;
    let block = call.bytes();
    for start in (0..call.count).step_by(step) {
        let count = step.min(call.count - start);
        let (offset, bytes) = (start * element, count * element);
        let round = communicator.round.fetch_add(1, SeqCst);
        let phase = round * PHASES;
        let first = start == 0;
        let slot = |peer| segment.slot(peer, round);
        let wait = |goal: u64, what: &str| wait_all(communicator, goal, what);

        wait(phase.saturating_sub(PHASES), "to read the round before the last")?;
        if first {
            // SAFETY: the cell is this rank's, and all have read what it held two rounds ago.
            unsafe { segment.rank(rank).all_facts[(round & 1) as usize].get().write(collective.facts) };
        }
        let publishes = match call.kind {
            Kind::Broadcast | Kind::Scatter => is_root,
            _ => true,
        };
        if publishes {
            for part in 0..parts {
                // SAFETY: the user's input has `parts` blocks of `block` bytes; the slot has room for all parts.
                unsafe { copy(send.add(part * block + offset), slot(rank).add(part * part_bytes), bytes) };
            }
            let factor = collective.recipe.as_ref().and_then(|recipe| recipe.factor(call.datatype));
            for (part, factor) in (0..parts).filter_map(|part| factor.map(|factor| (part, factor))) {
                // SAFETY: aligned, this rank's own, and not yet announced.
                unsafe { reduce::scale(call.datatype, slot(rank).add(part * part_bytes), count, factor) };
            }
        }
        announce(segment, rank, phase + 1);
        wait(phase + 1, "to take part")?;
        if first {
            compare(communicator, collective, round);
        }

        // SAFETY, to the end of the round: slots hold what peers announced; user buffers are as large as `Call::buffers`
        // says; every rank writes its own share of the results.
        match call.kind {
            Kind::AllReduce | Kind::Reduce => {
                let (low, high) = (count * rank / ranks, count * (rank + 1) / ranks);
                // SAFETY: see above.
                unsafe {
                    fold(
                        communicator,
                        collective,
                        round,
                        low * element,
                        slot(ranks).add(low * element),
                        high - low,
                    )
                };
                announce(segment, rank, phase + 2);
                wait(phase + 2, "to reduce")?;
                if call.kind == Kind::AllReduce || is_root {
                    // SAFETY: see above.
                    unsafe { copy(slot(ranks), arrives.add(offset), bytes) };
                }
            }
            Kind::ReduceScatter => {
                let share = rank * part_bytes;
                // No other rank reads this rank's share of its own slot, so the result may go there.
                // SAFETY: see above.
                unsafe {
                    fold(communicator, collective, round, share, slot(rank).add(share), count);
                    copy(slot(rank).add(share), receive.add(offset), bytes);
                }
            }
            Kind::Broadcast => {
                let target = if is_root { receive } else { arrives };
                // SAFETY: see above.
                unsafe { copy(slot(root), target.add(offset), bytes) };
            }
            Kind::Scatter => {
                // SAFETY: see above.
                unsafe { copy(slot(root).add(rank * part_bytes), receive.add(offset), bytes) };
            }
            Kind::AllGather | Kind::Gather if call.kind == Kind::AllGather || is_root => {
                for peer in 0..ranks {
                    let target = if peer == rank { receive } else { arrives };
                    // SAFETY: see above.
                    unsafe { copy(slot(peer), target.add(peer * block + offset), bytes) };
                }
            }
            Kind::AlltoAll => {
                for peer in 0..ranks {
                    // SAFETY: see above.
                    unsafe {
                        copy(slot(peer).add(rank * part_bytes), receive.add(peer * block + offset), bytes)
                    };
                }
            }
            _ => {}
        }
        announce(segment, rank, phase + PHASES);
    }
    Ok(())
}

/// Runs a collective of a communicator of one rank: a copy, scaled if the operator has a factor.
fn run_alone(collective: &Collective) {
    let call = &collective.call;
    let factor = collective.recipe.as_ref().and_then(|recipe| recipe.factor(call.datatype));
    // SAFETY: user buffers are as large as `Call::buffers` says. Users' buffers may be unaligned, so that elements are
    // scaled in an aligned copy.
    unsafe {
        match factor {
            None => copy(call.send as *const u8, call.receive as *mut u8, call.bytes()),
            Some(factor) => {
                let mut scaled = vec![0u64; call.bytes().div_ceil(8)];
                let scaled: *mut u8 = scaled.as_mut_ptr().cast();
                copy(call.send as *const u8, scaled, call.bytes());
                reduce::scale(call.datatype, scaled, call.count, factor);
                copy(scaled, call.receive as *mut u8, call.bytes());
            }
        }
    }
}

/// # Safety
/// As `std::ptr::copy`; a null pointer is allowed with zero bytes.
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: by contract.
        unsafe { std::ptr::copy(from, to, bytes) };
    }
}

/// # Safety
/// Every slot holds `count` elements at `offset` bytes, and `target` has room.
unsafe fn fold(
    communicator: &Communicator,
    collective: &Collective,
    round: u64,
    offset: usize,
    target: *mut u8,
    count: usize,
) {
    let segment = communicator.segment();
    // SAFETY: offsets lie in the slots by contract.
    let source = |peer| unsafe { segment.slot(peer, round).add(offset).cast_const() };
    let mut sources: Vec<*const u8> = (0..communicator.ranks).map(source).collect();
    if settings().folds_in_rings {
        // In a ring the owner of a share adds its own input last.
        sources.rotate_left((communicator.rank + 1) % communicator.ranks);
    }
    let how = collective.recipe.as_ref().expect("reductions have a recipe").fold;
    // SAFETY: by contract.
    unsafe { reduce::fold(collective.call.datatype, how, target, &sources, count) };
}

fn announce(segment: &Segment, rank: usize, phase: u64) {
    segment.rank(rank).phase.store(phase, SeqCst);
    segment.ring_all();
}

fn wait_all(communicator: &Communicator, goal: u64, what: &str) -> Result<(), Left> {
    let segment = communicator.segment();
    let late = |peer: &usize| segment.rank(*peer).phase.load(SeqCst) < goal;
    let text = || {
        let late: Vec<String> = (0..communicator.ranks).filter(late).map(|peer| peer.to_string()).collect();
        format!("rank {} {what}", late.join(", "))
    };
    segment.wait(communicator.rank, &communicator.leave, text, || {
        !(0..communicator.ranks).any(|peer| late(&peer))
    })
}

/// Compares the calls of all ranks; ends the process if they do not match.
fn compare(communicator: &Communicator, collective: &Collective, round: u64) {
    let segment = communicator.segment();
    let read = |peer: usize| -> CallFacts {
        // SAFETY: every peer has written its facts for this round and writes them again only two rounds later.
        unsafe { segment.rank(peer).all_facts[(round & 1) as usize].get().read() }
    };
    let all_facts: Vec<CallFacts> = (0..communicator.ranks).map(read).collect();
    if let Some(complaint) = agreement::complaint(&all_facts, &collective.call) {
        let calls =
            (0..communicator.ranks).map(|peer| format!("  rank {peer}: {}", segment.rank(peer).call.get()));
        let lines: Vec<String> = std::iter::once(complaint).chain(calls).collect();
        strict::fail(segment, communicator.rank, &lines);
    }
}
