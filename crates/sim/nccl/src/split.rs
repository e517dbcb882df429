//! Child communicators: `ncclCommSplit` and `ncclCommShrink`.

use crate::communicator::{self, Communicator, Config, Init, find};
use crate::driver::driver;
use crate::exchange::{Note, SPLIT, exchange};
use crate::group::{self, Blocking, Task};
use crate::order::Order;
use crate::profiler;
use crate::refusal::{Outcome, lock, refuse};
use crate::rendezvous::{self, Member, Token};
use nccl_sys::*;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

/// The caller's place for the handle, written when the child is complete.
#[derive(Clone, Copy)]
struct Out(usize);

impl Out {
    fn write(self, handle: ncclComm_t) {
        // SAFETY: the caller of split or shrink keeps the place writable until the call, or its group, has ended; a
        // nonblocking caller until the parent's state says so.
        unsafe { *(self.0 as *mut ncclComm_t) = handle };
    }
}

/// Reads a child's configuration. If it is refused the parent is marked: NCCL 2.28.9 keeps a pointer in it to memory that it has freed
/// for the child (`childAbortFlag`).
///
/// # Safety
/// As `arguments::read_config` asks.
unsafe fn child_config(config: *const ncclConfig_t, parent: &Communicator) -> Outcome<Config> {
    // SAFETY: by contract.
    unsafe { crate::arguments::read_config(config, Some(parent.config)) }
        .inspect_err(|_| parent.has_refused_child.store(true, SeqCst))
}

/// `ncclCommSplit`.
///
/// # Safety
/// `out` must be null or writable until the split has completed; `config` as `arguments::read_config` asks.
pub unsafe fn split(
    handle: ncclComm_t,
    color: i32,
    key: i32,
    out: *mut ncclComm_t,
    config: *const ncclConfig_t,
) -> Outcome {
    let parent = group::note(find(handle, "ncclCommSplit"))?;
    if out.is_null() {
        return group::note(refuse(ncclInvalidArgument, "ncclCommSplit : newcomm argument is NULL"));
    }
    group::note(parent.ensure_ready())?;
    // SAFETY: by contract.
    let config = group::note(unsafe { child_config(config, &parent) })?;
    let _inside = parent.enter("ncclCommSplit");
    let out = Out(out as usize);
    out.write(std::ptr::null_mut());
    let number = parent.splits.fetch_add(1, SeqCst);
    let splitting = parent.clone();
    let work = Box::new(move || {
        let note = Note { kind: SPLIT, values: [color.into(), key.into(), 0, 0, 0] };
        let notes = match parent_notes(&splitting, note) {
            Some(notes) => notes,
            None => return refuse(ncclInternalError, "aborted in ncclCommSplit"),
        };
        if color == NCCL_SPLIT_NOCOLOR {
            return Ok(());
        }
        let mut members: Vec<(i64, usize)> = (0..splitting.ranks)
            .filter(|&rank| notes[rank].values[0] == i64::from(color))
            .map(|rank| (notes[rank].values[1], rank))
            .collect();
        members.sort();
        let rank = members.iter().position(|(_, rank)| *rank == splitting.rank).expect("has this color");
        let token = splitting.token.child("split", number, color.into());
        let share = config.split_share && !splitting.revoked.load(SeqCst);
        bear(&splitting, rank, members.len(), token, config, share, out)
    });
    group::note(group::run(Task { communicator: parent.clone(), work, blocking: Blocking::AsConfigured }))
}

fn parent_notes(parent: &Communicator, note: Note) -> Option<Vec<Note>> {
    // A revoked parent still splits: its operations are stopped, its ranks are not.
    let never = AtomicBool::new(false);
    let leave = if parent.revoked.load(SeqCst) { &never } else { &parent.leave };
    exchange(parent.segment(), parent.rank, note, leave).ok()
}

/// `ncclCommShrink`: the excluded ranks do not call.
///
/// # Safety
/// `out` as in `split`, `excluded` must hold `count` ranks.
pub unsafe fn shrink(
    handle: ncclComm_t,
    excluded: *const i32,
    count: i32,
    out: *mut ncclComm_t,
    config: *const ncclConfig_t,
    flags: i32,
) -> Outcome {
    let parent = group::note(find(handle, "ncclCommShrink"))?;
    if out.is_null() {
        return group::note(refuse(ncclInvalidArgument, "ncclCommShrink : newcomm argument is NULL"));
    }
    if excluded.is_null() || count <= 0 {
        return group::note(refuse(
            ncclInvalidArgument,
            "ncclCommShrink : excludeRanksList argument is NULL or empty",
        ));
    }
    // SAFETY: by contract.
    let excluded: Vec<i32> = unsafe { std::slice::from_raw_parts(excluded, count as usize) }.to_vec();
    if excluded.contains(&(parent.rank as i32)) {
        return group::note(refuse(ncclInvalidArgument, "ncclCommShrink : called by an excluded rank"));
    }
    if flags & SHRINK_ABORT != 0 {
        parent.make_leave(crate::segment::standing::ABORTED);
    }
    group::note(parent.ensure_ready())?;
    // SAFETY: by contract.
    let config = group::note(unsafe { child_config(config, &parent) })?;
    let _inside = parent.enter("ncclCommShrink");
    let out = Out(out as usize);
    out.write(std::ptr::null_mut());
    let survivors: Vec<usize> =
        (0..parent.ranks).filter(|rank| !excluded.contains(&(*rank as i32))).collect();
    // Survivors exchange nothing: the set of their ranks determines the child's token.
    let mask = survivors.iter().fold(0i64, |mask, rank| mask | 1 << rank);
    let count = *lock(&parent.shrinks).entry(mask).and_modify(|count| *count += 1).or_default();
    let token = parent.token.child("shrink", count, mask);
    let rank = survivors.iter().position(|rank| *rank == parent.rank).expect("not excluded");
    let share = config.shrink_share && flags & SHRINK_ABORT == 0 && !parent.revoked.load(SeqCst);
    let shrinking = parent.clone();
    let work = Box::new(move || bear(&shrinking, rank, survivors.len(), token, config, share, out));
    group::note(group::run(Task { communicator: parent.clone(), work, blocking: Blocking::AsConfigured }))
}

const SHRINK_ABORT: i32 = 1;

/// Makes the child, waits for its other ranks, and writes its handle.
fn bear(
    parent: &Arc<Communicator>,
    rank: usize,
    ranks: usize,
    token: Token,
    config: Config,
    share: bool,
    out: Out,
) -> Outcome {
    let Communicator { device, context, .. } = **parent;
    // NCCL runs children that share resources in their parent's order.
    let order = if share { parent.order.clone() } else { Arc::new(Order::default()) };
    let child = Communicator::new(Init { rank, ranks, device, context, config, token, order });
    let member = Member { ids: Vec::new(), rank, ranks, device, bus_id: driver()?.bus_id(device)? };
    let never = AtomicBool::new(false);
    let leave = if parent.leave.load(SeqCst) { &never } else { &parent.leave };
    child.set_segment(rendezvous::join(token, &member, leave)?);
    profiler::init(&child, token.number());
    out.write(communicator::publish(&child));
    Ok(())
}
