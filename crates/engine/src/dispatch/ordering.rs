//! Runs kernels of Windlass in order with each other and with NCCL's work: at once, or at the end of the group.
//!
//! Communicators of a group run in the order of their tokens, after all that NCCL runs of the group, as NCCL orders them by hashes of
//! their ids since 2.26. Of one communicator the collectives come first, in an order that all ranks have
//! ([`super::common_order`]), then its messages as one kernel: the same on all ranks, whatever order each called them in.
//!
//! # Order against NCCL's own operations
//! NCCL runs a communicator's operations on a GPU one after the other. A call that goes to NCCL after a kernel of Windlass waits for it
//! ([`before_forward`]). A kernel of Windlass may come on another stream than NCCL's last call, or first in a capture. Then NCCL first
//! sends one byte to its own rank on that stream, and orders this message after its own work. Streams are compared by id: a new
//! stream may have the handle of a destroyed one whose work still runs. With graphs see [`after_forward`].

use std::sync::Arc;

use nccl_sys::{cudaStream_t, ncclComm_t, ncclInProgress, ncclResult_t, ncclSuccess};

use crate::communicator::{self, Communicator};
use crate::forward::known;
use crate::group::{self, Followed, Held, Ours};
use crate::peers::{Afterwards, PeerGroup, Went};
use windlass_base::call::Call;
use windlass_base::error::refuse;
use windlass_base::gpu::stream::Place;
use windlass_base::gpu::{self, StreamHandle};
use windlass_base::guard;
use windlass_base::stats::count;
use windlass_transport::native::Task;
use windlass_transport::p2p::Operation;

use super::group_part::Part;

/// A communicator and the stream on which NCCL is to run a call of it.
#[derive(Clone, Copy, Debug)]
pub struct Lane {
    /// The application's handle.
    pub communicator: ncclComm_t,
    /// The application's stream.
    pub stream: cudaStream_t,
    /// Whether the call has no elements: NCCL drops such a call before it looks at the stream.
    pub is_empty: bool,
}

impl Lane {
    /// The lane of a call.
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

/// Called before NCCL gets a call of a communicator with a peer group: orders the stream after kernels of Windlass.
/// `is_ordered`: another call has just gone to NCCL on the same stream, so nothing is to be done.
pub(crate) fn before_forward(lane: Lane, communicator: &Communicator, is_ordered: bool) {
    if is_ordered || lane.is_empty {
        return;
    }
    let order = || {
        let afterwards = communicator.peer_group(lane.communicator)?.order(lane.stream())?;
        // NCCL may never launch what a group holds.
        if afterwards == Afterwards::Nothing && !group::is_open() {
            communicator.orders_on(lane.stream);
        }
        Some(afterwards)
    };
    let is_to_order =
        communicator.has_run() && !(communicator.is_ordered_on(lane.stream) && is_eager(lane.stream()));
    match is_to_order.then(order).flatten().unwrap_or(Afterwards::Nothing) {
        Afterwards::Nothing => communicator.forwards_on(lane.stream, || place_of(lane.stream())),
        // An eager call that is followed needs no stream to be remembered. A captured call is ordered only within its graph, which may never be
        // launched: NCCL's earlier eager call must still be waited for.
        Afterwards::Follow => communicator.follows(),
        Afterwards::FollowInCapture => {
            count::recorded(communicator.counters(), 1);
            communicator.follows();
        }
    }
}

/// Called after NCCL has taken or refused such a call: follows it if need be.
///
/// Windlass does not see launches of a graph. So from the first capture of either side after a kernel of Windlass on, NCCL's calls are
/// followed: each counts as an operation in the [sequencer](windlass_transport::sequencer), and later kernels and graphs wait for it.
/// Communicators without graphs skip this. NCCL's captures before the first kernel are not seen.
pub(crate) fn after_forward(lane: Lane, communicator: &Communicator, result: ncclResult_t) {
    let (is_taken, is_grouped) = (result == ncclSuccess || result == ncclInProgress, group::is_open());
    if !is_taken {
        communicator.is_ordered_no_more();
    }
    if !is_taken || lane.is_empty || !communicator.has_to_follow() {
        return;
    }
    match communicator.peer_group(lane.communicator) {
        Some(peer_group) if is_grouped => {
            group::follow(Followed { communicator: lane.communicator, peer_group, stream: lane.stream() });
        }
        Some(peer_group) => follow(communicator, &peer_group, lane.stream(), true),
        None => {}
    }
}

/// Called after NCCL has run its part of a group: makes later kernels wait for NCCL's work.
pub(crate) fn after_group(all: Vec<Followed>) {
    for Followed { communicator, peer_group, stream } in &all {
        if let Some(communicator) = communicator::find(*communicator) {
            follow(communicator, peer_group, *stream, false);
        }
    }
    group::put_back_followed(all);
}

fn follow(communicator: &Communicator, peer_group: &PeerGroup, stream: StreamHandle, at_once: bool) {
    match peer_group.follow(stream, at_once) {
        Some(true) => communicator.is_followed(),
        Some(false) => {}
        // The driver failed. NCCL's own order is left.
        None => communicator.forwards_on(stream.0 as cudaStream_t, || place_of(stream)),
    }
}

/// The peer group of a call's communicator; none if the communicator was revoked, or if another thread has just ended it.
pub(super) fn peer_group_of(call: &Call, communicator: &Communicator) -> Option<Arc<PeerGroup>> {
    match communicator.lazy(call.local.communicator) {
        Some(lazy) if lazy.is_revoked() => None,
        Some(lazy) => Some(lazy.peer_group().clone()),
        None => communicator.peer_group(call.local.communicator),
    }
}

/// Holds the parts of a call until its group ends.
pub(super) fn hold(call: &Call, peer_group: &Arc<PeerGroup>, parts: impl Iterator<Item = Ours>) {
    let (communicator, stream) = (call.local.communicator, stream_of(call));
    parts.for_each(|what| group::hold(Held { communicator, peer_group: peer_group.clone(), what, stream }));
}

/// Runs the parts of a group. Returns the first failure; the other parts run all the same, as their peers wait.
///
/// One thread may drive several ranks, and a launch blocks once about a thousand launches are pending. So no part gets further ahead of
/// the others than one round.
pub(crate) fn run_held(parts: &[Part]) -> ncclResult_t {
    let mut answer = ncclSuccess;
    let mut run_one = |part: &Part, round: usize| {
        let result = guard::call(|| run_round(part, round));
        if answer == ncclSuccess {
            answer = result;
        }
    };
    for round in 0..parts.iter().map(rounds).max().unwrap_or_default() {
        parts.iter().filter(|part| round < rounds(part)).for_each(|part| run_one(part, round));
    }
    answer
}

/// Kernels of one communicator that are launched before those of the next communicator.
const ROUND: usize = 256;

fn rounds(part: &Part) -> usize {
    part.tasks.as_ref().map_or(1, |tasks| tasks.len().div_ceil(ROUND).max(1))
}

/// Launches one round of a part. Messages come after all collectives, in the last round.
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

/// Launches these collectives and messages now, after NCCL's work of the communicator.
pub(super) fn run(
    handle: ncclComm_t,
    peer_group: &Arc<PeerGroup>,
    tasks: &[Task],
    operations: &[Operation],
    stream: StreamHandle,
    others: &[StreamHandle],
) -> ncclResult_t {
    let found = communicator::find(handle);
    if let Some(communicator) = found {
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
    peer_group.device().into_iter().for_each(group::set_device);
    let went = match peer_group.run(tasks, operations, stream, others) {
        Ok(went) => went,
        Err(code) => return code,
    };
    if let (Went::IntoCapture, Some(communicator)) = (went, found) {
        let kernels = tasks.len() + usize::from(!operations.is_empty());
        count::recorded(communicator.counters(), kernels as u64);
    }
    ncclSuccess
}

/// Whether a stream is part of no capture, as far as the driver says.
fn is_eager(stream: StreamHandle) -> bool {
    gpu::opened().is_some_and(|driver| driver.capture_of(stream) == Ok(None))
}

/// The id and capture of a stream. None where the driver gives an error, which a launch on this stream then gets, too.
fn place_of(stream: StreamHandle) -> Option<Place> {
    gpu::opened()?.place_of(stream).ok()
}

/// NCCL's own handle, for a message on this stream. None of a lazy communicator that is not materialized: NCCL has no work of it.
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
