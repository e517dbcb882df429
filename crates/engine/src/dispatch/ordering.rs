//! What runs within peer groups, in order with the rest: at once, or at the end of its group.
//!
//! Communicators of a group run in the order that the NCCL underneath keeps ([`super::group_order`]): since 2.26 in that of their
//! communicators' tokens, which all ranks see alike, after all that NCCL runs of the group, so no two ranks wait for each other's later
//! ones; before, in that of their first calls, as near to NCCL's part as one end of a group allows. Of one communicator the
//! collectives come first, in an order that all ranks have whatever order they called them in ([`super::common_order`]), then its
//! messages as one kernel: so they do on all ranks, whatever stands between.
//!
//! # Order against NCCL's own operations
//! NCCL runs a communicator's operations on a GPU one after the other. What goes to NCCL after one of ours waits for ours
//! ([`before_forward`]). When one of ours comes after NCCL's on another stream, or first in a capture, NCCL is given a copy of one byte to
//! itself on our stream, which it orders after its own work. Streams are told apart by their ids: the next stream may have the handle of one
//! that was destroyed, whose work still runs.
//!
//! A graph runs where nobody looks. So from the first capture of either kind after one of ours on, what NCCL has taken is followed
//! ([`after_forward`], [`after_group`]): it counts as an operation of ours that was last, for eager ones and graphs to wait for as for any
//! ([`windlass_transport::sequencer`]). A communicator without graphs is spared that. What NCCL alone captured before any of ours ran is not seen.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nccl_sys::{cudaStream_t, ncclComm_t, ncclInProgress, ncclResult_t, ncclSuccess};

use crate::communicator::{self, Communicator};
use crate::forward::known;
use crate::group::{self, Awaited, Ended, Followed, Held, Ours};
use crate::peers::{Afterwards, PeerGroup};
use windlass_base::call::Call;
use windlass_base::error::refuse;
use windlass_base::gpu::stream::Place;
use windlass_base::gpu::{self, StreamHandle};
use windlass_base::guard;
use windlass_base::stats::segment;
use windlass_transport::native::Task;
use windlass_transport::p2p::Operation;

use super::group_order::{self, Member, Nccls, Order, Schedule};
use super::group_part::Part;

/// Where NCCL is to run something of a communicator.
#[derive(Clone, Copy, Debug)]
pub struct Lane {
    /// As the application knows it.
    pub communicator: ncclComm_t,
    /// The application's.
    pub stream: cudaStream_t,
    /// Without an element: NCCL drops it before it looks at its stream.
    pub is_empty: bool,
}

impl Lane {
    /// Of a call.
    pub fn of(call: &Call) -> Lane {
        Lane {
            communicator: call.local.communicator,
            stream: call.local.stream,
            is_empty: call.shared.count == 0,
        }
    }

    fn stream(&self) -> StreamHandle {
        StreamHandle(self.stream as usize)
    }
}

/// Before a call goes to NCCL whose communicator has a peer group. `is_ordered`: another one has just gone there on the same stream.
pub fn before_forward(lane: Lane, communicator: &Communicator, is_ordered: bool) {
    if is_ordered || lane.is_empty {
        return;
    }
    let peer_group = communicator.has_run().then(|| communicator.peer_group(lane.communicator)).flatten();
    let afterwards = peer_group.map_or(Afterwards::Nothing, |peer_group| peer_group.order(lane.stream()));
    if afterwards != Afterwards::Nothing {
        communicator.follows();
    }
    // Nodes of its graph follow a captured one, which may never run: what an eager one has left is still to be waited for.
    if afterwards != Afterwards::FollowInCapture {
        communicator.forwards_on(lane.stream, || place_of(lane.stream()));
    }
}

/// After such a call: NCCL has taken it, or refused it.
pub fn after_forward(lane: Lane, communicator: &Communicator, result: ncclResult_t) {
    let (is_taken, is_grouped) = (result == ncclSuccess || result == ncclInProgress, group::is_open());
    if is_grouped && order() == Order::Calls {
        group::give(lane.communicator, is_taken);
    }
    if !is_taken || lane.is_empty || !communicator.has_to_follow() {
        return;
    }
    match communicator.peer_group(lane.communicator) {
        Some(peer_group) if is_grouped => {
            group::follow(Followed { communicator: lane.communicator, peer_group, stream: lane.stream() });
        }
        Some(peer_group) => follow(communicator, &peer_group, lane.stream()),
        None => {}
    }
}

/// After NCCL has run its part of a group.
pub fn after_group(all: Vec<Followed>) {
    for Followed { communicator, peer_group, stream } in &all {
        if let Some(communicator) = communicator::find(*communicator) {
            follow(communicator, peer_group, *stream);
        }
    }
    group::put_back_followed(all);
}

fn follow(communicator: &Communicator, peer_group: &PeerGroup, stream: StreamHandle) {
    if peer_group.follow(stream) {
        communicator.is_followed();
    }
}

/// Known since the first communicator was asked for.
pub(super) fn order() -> Order {
    Order::of_release(segment::current().nccl_version.load(Ordering::Relaxed))
}

/// The peer group of a communicator that takes calls; none if another thread has just ended it.
pub(super) fn peer_group_of(call: &Call, communicator: &Communicator) -> Option<Arc<PeerGroup>> {
    match communicator.lazy(call.local.communicator) {
        Some(lazy) if lazy.is_revoked() => None,
        Some(lazy) => Some(lazy.peer_group().clone()),
        None => communicator.peer_group(call.local.communicator),
    }
}

/// Holds what a call is till its group ends.
pub(super) fn hold(call: &Call, peer_group: &Arc<PeerGroup>, parts: impl Iterator<Item = Ours>) {
    let (communicator, stream) = (call.local.communicator, stream_of(call));
    let given = group::given();
    parts.for_each(|what| {
        group::hold(Held { communicator, peer_group: peer_group.clone(), what, stream, given })
    });
}

/// When what a group held runs: by place in the list of its parts, which are in the order of their first calls.
pub fn schedule(parts: &[Part], ended: &Ended) -> Schedule {
    let Ended { given, awaited, .. } = ended;
    let order = order();
    if parts.len() < 2 && order == Order::Names {
        return Schedule { before: Vec::new(), after: (0..parts.len()).collect() };
    }
    // Of a group with a call that was refused nothing runs, and that is NCCL's to say at its end.
    let is_refused = given.is_refused || matches!(awaited.first(), Some(Awaited::Failed(_)));
    let members: Vec<Member> = parts
        .iter()
        .map(|Part { communicator, peer_group, called_after, .. }| Member {
            name: peer_group.negotiated().comm,
            rank: peer_group.rank(),
            called_after: if is_refused { Nccls::Some } else { *called_after },
            beside: if given.communicators.contains(communicator) { Nccls::Some } else { Nccls::Nothing },
        })
        .collect();
    group_order::schedule(&members, order)
}

/// Runs the parts of these places. The first that fails is the answer; the others run all the same, as their peers wait.
///
/// One thread may bring several ranks, and a launch waits where the driver has a thousand of them ahead: so none is further ahead of the
/// others than a round.
pub fn run_held(parts: &[Part], places: &[usize]) -> ncclResult_t {
    let mut answer = ncclSuccess;
    let mut run_one = |part: &Part, round: usize| {
        let result = guard::call(|| run_round(part, round));
        if answer == ncclSuccess {
            answer = result;
        }
    };
    let parts = || places.iter().filter_map(|place| parts.get(*place));
    for round in 0..parts().map(rounds).max().unwrap_or_default() {
        parts().filter(|part| round < rounds(part)).for_each(|part| run_one(part, round));
    }
    answer
}

/// Kernels of one communicator that are launched before the next one's.
const ROUND: usize = 256;

fn rounds(part: &Part) -> usize {
    part.tasks.as_ref().map_or(1, |tasks| tasks.len().div_ceil(ROUND).max(1))
}

/// Messages come after all collectives.
fn run_round(part: &Part, round: usize) -> ncclResult_t {
    let Part { communicator, peer_group, tasks, operations, stream, others, .. } = part;
    match tasks {
        Ok(tasks) => {
            let of_round = tasks.chunks(ROUND).nth(round).unwrap_or_default();
            let operations = if round + 1 == rounds(part) { &operations[..] } else { &[] };
            run(*communicator, peer_group, of_round, operations, *stream, others)
        }
        Err(code) => *code,
    }
}

/// Runs them now.
pub(super) fn run(
    handle: ncclComm_t,
    peer_group: &Arc<PeerGroup>,
    tasks: &[Task],
    operations: &[Operation],
    stream: StreamHandle,
    others: &[StreamHandle],
) -> ncclResult_t {
    if let Some(communicator) = communicator::find(handle) {
        communicator.runs();
        if communicator.has_forwarded_elsewhere(|| place_of(stream))
            && let Some([from, to]) = peer_group.scratch()
            && let Some(real) = real_of(communicator, handle, stream)
        {
            let result = known::order(real, peer_group.rank(), from, to, stream);
            if result != ncclSuccess {
                return refuse(result, format_args!("NCCL did not order its work before ours"));
            }
        }
    }
    peer_group.run(tasks, operations, stream, others)
}

/// What the driver refuses to say it refuses to whoever launches there, too.
fn place_of(stream: StreamHandle) -> Option<Place> {
    gpu::opened()?.place_of(stream).ok()
}

/// NCCL's own handle, for a copy on this stream; none of a lazy communicator that was not materialized, of which NCCL runs nothing.
fn real_of(communicator: &Communicator, handle: ncclComm_t, stream: StreamHandle) -> Option<ncclComm_t> {
    match communicator.lazy(handle) {
        Some(lazy) => {
            lazy.runs_alone_on(stream);
            lazy.real()
        }
        None => Some(handle),
    }
}

pub(super) fn stream_of(call: &Call) -> StreamHandle {
    StreamHandle(call.local.stream as usize)
}
