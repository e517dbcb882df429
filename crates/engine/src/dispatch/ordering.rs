//! Runs kernels of Windlass in order with each other and with NCCL's work: at once, or at the end of the group.
//!
//! Communicators of a group run in the order of their tokens, after all that NCCL runs of the group, as NCCL orders them by hashes of
//! their ids since 2.26. Of one communicator the collectives come first, in an order that all ranks have
//! ([`super::common_order`]), then its messages as one kernel: the same on all ranks, whatever order each called them in.
//!
//! # Order against NCCL's own operations
//! NCCL runs a communicator's operations on a GPU one after the other. A call that goes to NCCL after a kernel of Windlass waits for it
//! ([`before_forward`]). A kernel of Windlass may come on another stream than NCCL's last call. Then NCCL first sends one byte to its own rank
//! on that stream, and orders this message after its own work. Before a captured kernel it does so on a stream beside the capture, as a
//! graph must not depend on what ran before. Streams are compared by id: a new stream may have the handle of a destroyed one whose work
//! still runs. In a group of both, streams are joined instead ([`before_nccl`]). With graphs see [`after_forward`].

use std::sync::Arc;

use nccl_sys::{
    cudaStream_t, ncclComm_t, ncclInProgress, ncclInvalidUsage, ncclResult_t, ncclSuccess,
    ncclUnhandledCudaError,
};

use crate::communicator::{self, Communicator};
use crate::forward::known;
use crate::group::{self, Ended, Followed, Held, Joints, Ours, Runs};
use crate::peers::{Afterwards, History, PeerGroup, Went};
use windlass_base::call::Call;
use windlass_base::error::refuse;
use windlass_base::gpu::capture::Relaxed;
use windlass_base::gpu::{self, StreamHandle};
use windlass_base::guard;
use windlass_base::observers::{self, profiler::times};
use windlass_base::stats::count;
use windlass_transport::native::Task;
use windlass_transport::p2p::Operation;
use windlass_transport::sequencer::Joins;

/// The kernels of one communicator at the end of a group.
#[derive(Debug)]
pub struct Part {
    /// The communicator's handle.
    pub communicator: ncclComm_t,
    /// Its peer group.
    pub peer_group: Arc<PeerGroup>,
    /// Its collectives, in the order that [all ranks have](super::common_order); an error where one of them cannot be run.
    pub tasks: Result<Vec<Task>, ncclResult_t>,
    /// Its messages, in call order.
    pub operations: Vec<Operation>,
    /// The streams of these calls, each once, in call order.
    pub streams: Vec<StreamHandle>,
}

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

/// A call that NCCL gets, ordered behind kernels of Windlass.
#[derive(Debug)]
pub(crate) struct InOrder {
    communicator: ncclComm_t,
    peer_group: Arc<PeerGroup>,
    stream: StreamHandle,
    afterwards: Afterwards,
}

/// Called before NCCL gets a call of a communicator with a peer group. Its stream waits for kernels of Windlass, and in a group joins those of the
/// communicator's other calls. None if nothing is left to do for it, as another call of the group was ordered on the same stream.
pub(crate) fn before_forward(
    lane: Lane,
    communicator: &Communicator,
) -> Result<Option<InOrder>, ncclResult_t> {
    if lane.is_empty || join(lane)? {
        return Ok(None);
    }
    let Some(peer_group) = communicator.peer_group(lane.communicator) else { return Ok(None) };
    let stream = lane.stream();
    // NCCL may never launch what a group holds.
    let afterwards = peer_group.before_nccl(stream, !group::is_open());
    if afterwards == Some(Afterwards::FollowInCapture) {
        count::recorded(communicator.counters(), 1);
    }
    let communicator = lane.communicator;
    Ok(afterwards.map(|afterwards| InOrder { communicator, peer_group, stream, afterwards }))
}

/// Called after NCCL has taken or refused such a call. Windlass does not see launches of a graph. So from the first capture of either side on, NCCL's
/// calls are followed: later kernels and graphs wait for them.
pub(crate) fn after_forward(forwarded: Option<InOrder>, result: ncclResult_t) {
    let Some(InOrder { communicator, peer_group, stream, afterwards }) = forwarded else { return };
    let followed = |peer_group| Followed { communicator, peer_group, stream, afterwards };
    if result != ncclSuccess {
        return not_over(followed(peer_group), result);
    }
    match afterwards {
        Afterwards::Nothing => {}
        _ if group::is_open() => group::follow(followed(peer_group)),
        // Where the driver failed, a message of NCCL's orders the next kernel.
        _ => drop(peer_group.after_nccl(stream, afterwards == Afterwards::Follow)),
    }
}

/// The call goes on behind its answer, or NCCL has refused it.
#[cold]
#[inline(never)]
fn not_over(followed: Followed, result: ncclResult_t) {
    match followed.afterwards {
        _ if result != ncclInProgress => followed.peer_group.nccl_refused(),
        Afterwards::Nothing => {}
        _ if group::is_open() => group::follow(followed),
        _ => behind_nccl(vec![followed], Vec::new(), Joints::default()),
    }
}

/// Called after NCCL has run its part of a group (`is_run`), or failed: makes later kernels wait for NCCL's work. If NCCL has failed it may have
/// launched some communicators before, so graphs wait all the same.
pub(crate) fn after_group(all: Vec<Followed>, is_run: bool) {
    for Followed { peer_group, stream, afterwards, .. } in &all {
        match afterwards {
            Afterwards::Nothing => {}
            Afterwards::Confirm if is_run => peer_group.nccl_ran(),
            Afterwards::Confirm => {}
            Afterwards::Follow | Afterwards::FollowInCapture => drop(peer_group.after_nccl(*stream, false)),
        }
        if !is_run {
            peer_group.nccl_refused();
        }
    }
    group::put_back_followed(all);
}

/// Called after NCCL has begun to run its part of a group, or a call, on a thread of its own: does what comes after that part. Communicators of
/// the group with a peer group are in progress meanwhile, those of NCCL's calls too, so that no later call overtakes.
pub(crate) fn behind_nccl(followed: Vec<Followed>, parts: Vec<Part>, joints: Joints) {
    if followed.is_empty() && parts.is_empty() {
        return;
    }
    let mut handles: Vec<ncclComm_t> = joints.all().map(|joint| joint.communicator).collect();
    handles.extend(followed.iter().map(|followed| followed.communicator));
    let told = times::hand_over();
    communicator::go_on_behind(handles, None, move |has_run| {
        after_group(followed, has_run);
        // What NCCL says of its failure comes first.
        if has_run { told.run(|| run_held(&parts, &joints)) } else { ncclSuccess }
    });
}

/// The peer group of a call's communicator; none if the communicator was revoked, or if another thread has just ended it.
pub(super) fn peer_group_of(call: &Call, communicator: &Communicator) -> Option<Arc<PeerGroup>> {
    match communicator.lazy(call.local.communicator) {
        Some(lazy) if lazy.is_revoked() => None,
        Some(lazy) => Some(lazy.peer_group.clone()),
        None => communicator.peer_group(call.local.communicator),
    }
}

/// Holds the parts of a call until its group ends; refuses what NCCL would refuse there because of its stream.
pub(super) fn hold(
    call: &Call,
    peer_group: &Arc<PeerGroup>,
    parts: impl Iterator<Item = Ours>,
) -> ncclResult_t {
    let (communicator, stream) = (call.local.communicator, stream_of(call));
    if let Err(code) = group::join(communicator, stream, Runs::Held, |_| Some(peer_group.clone())) {
        return code;
    }
    parts.for_each(|what| group::hold(Held { communicator, peer_group: peer_group.clone(), what, stream }));
    ncclSuccess
}

/// Whether NCCL has a call of the communicator on that stream in the open group already.
fn join(lane: Lane) -> Result<bool, ncclResult_t> {
    if !group::is_open() {
        return Ok(false);
    }
    group::join(lane.communicator, lane.stream(), Runs::Nccl, |handle| {
        communicator::find(handle)?.peer_group(handle)
    })
}

/// Called before NCCL runs its part of a group: that part waits for the streams that only calls of Windlass have.
pub(crate) fn before_nccl(ended: &Ended) -> ncclResult_t {
    let joints = || ended.joints.all();
    for (place, joint) in joints().enumerate() {
        let first_of_same = joints().take(place).find(|other| joint.is_of_same(other));
        if first_of_same.is_some_and(|other| is_eager(joint.first) != is_eager(other.first)) {
            let why = format_args!("one thread's ranks of a communicator must all be captured, or all eager");
            return refuse(ncclInvalidUsage, why);
        }
    }
    for joint in joints() {
        if let Some((nccls, unknown)) = joint.before_nccl()
            && let Err(code) = joint.peer_group.join(nccls, &unknown)
        {
            return code;
        }
    }
    ncclSuccess
}

/// Runs the parts of a group, after NCCL's part. Returns the first failure; the other parts run all the same, as their peers wait.
///
/// One thread may drive several ranks, and a launch blocks once about a thousand launches are pending. So no part gets further ahead of
/// the others than one round.
pub(crate) fn run_held(parts: &[Part], joints: &Joints) -> ncclResult_t {
    let mut answer = ncclSuccess;
    let places: Vec<Where> = parts.iter().map(|part| Where::of(part, joints)).collect();
    for round in 0..parts.iter().map(rounds).max().unwrap_or_default() {
        for (part, place) in parts.iter().zip(&places).filter(|(part, _)| round < rounds(part)) {
            let result = guard::call(|| run_round(part, round, place));
            answer = answer.and(result);
        }
    }
    answer
}

/// Where kernels of a communicator run.
#[derive(Debug)]
pub(super) struct Where {
    lane: group::PartLane,
    /// NCCL has a part of the same group, which these kernels come after.
    is_behind_nccl: bool,
}

impl Where {
    /// On one stream, beside no other.
    pub(super) fn on(stream: StreamHandle) -> Where {
        Where {
            lane: group::PartLane { stream, before: Vec::new(), after: Vec::new() },
            is_behind_nccl: false,
        }
    }

    /// Of a part of a group.
    fn of(part: &Part, joints: &Joints) -> Where {
        match joints.of(&part.peer_group) {
            Some(joint) => Where { lane: joint.lane(&part.streams), is_behind_nccl: !joint.nccls.is_empty() },
            None => Where::on(part.streams[0]),
        }
    }

    /// The streams that one of the rounds joins: the first one those before, the last one those after.
    fn others(&self, is_first: bool, is_last: bool) -> Joins<'_> {
        let when = |is_so, streams| if is_so { streams } else { &[][..] };
        Joins { before: when(is_first, &self.lane.before[..]), after: when(is_last, &self.lane.after[..]) }
    }
}

/// Kernels of one communicator that are launched before those of the next communicator.
const ROUND: usize = 256;

fn rounds(part: &Part) -> usize {
    part.tasks.as_ref().map_or(1, |tasks| tasks.len().div_ceil(ROUND).max(1))
}

/// Launches one round of a part. Messages come after all collectives, in the last round.
fn run_round(part: &Part, round: usize, place: &Where) -> ncclResult_t {
    let Part { communicator, peer_group, tasks, operations, .. } = part;
    let tasks = match tasks {
        Ok(tasks) => tasks.chunks(ROUND).nth(round).unwrap_or_default(),
        Err(code) => return *code,
    };
    let is_last = round + 1 == rounds(part);
    let operations = if is_last { &operations[..] } else { &[] };
    launch(*communicator, peer_group, (tasks, operations), place, place.others(round == 0, is_last))
}

/// Launches these collectives and messages now, after NCCL's work of the communicator.
pub(super) fn run(
    handle: ncclComm_t,
    peer_group: &Arc<PeerGroup>,
    tasks: &[Task],
    operations: &[Operation],
    place: &Where,
) -> ncclResult_t {
    launch(handle, peer_group, (tasks, operations), place, place.others(true, true))
}

fn launch(
    handle: ncclComm_t,
    peer_group: &Arc<PeerGroup>,
    (tasks, operations): (&[Task], &[Operation]),
    place: &Where,
    others: Joins<'_>,
) -> ncclResult_t {
    let stream = place.lane.stream;
    if !place.is_behind_nccl {
        let ordered = behind_nccls_history(handle, peer_group, stream);
        if ordered != ncclSuccess {
            return refuse(ordered, format_args!("NCCL did not order its work before ours"));
        }
    }
    if observers::are_on() {
        times::launches(handle as usize);
    }
    peer_group.device().into_iter().for_each(group::set_device);
    match peer_group.run(tasks, operations, stream, others) {
        Ok(Went::ToStream) => {}
        Ok(Went::IntoCapture) => {
            let kernels = tasks.len() + usize::from(!operations.is_empty());
            let found = communicator::find(handle).into_iter();
            found.for_each(|communicator| count::recorded(communicator.counters(), kernels as u64));
        }
        Err(code) => return code,
    }
    ncclSuccess
}

/// Makes the next kernel of Windlass on a stream run after NCCL's earlier work of the communicator, where a message of NCCL's has to do that.
fn behind_nccls_history(handle: ncclComm_t, peer_group: &PeerGroup, stream: StreamHandle) -> ncclResult_t {
    match peer_group.history(stream) {
        Some(History::Behind) => ncclSuccess,
        Some(History::MessageHere) => message(handle, peer_group, stream, stream),
        Some(History::MessageBeside) => beside_capture(handle, peer_group, stream),
        None => ncclUnhandledCudaError,
    }
}

/// Sends NCCL's message on the communicator's own stream, and follows it.
fn beside_capture(handle: ncclComm_t, peer_group: &PeerGroup, captured: StreamHandle) -> ncclResult_t {
    let Some(stream) = peer_group.history_stream() else { return ncclSuccess };
    // NCCL may make calls that a capture in another mode forbids this thread.
    let Some(_relaxed) = gpu::opened().and_then(|driver| Relaxed::enter(driver).ok()) else {
        return ncclUnhandledCudaError;
    };
    if peer_group.before_nccl(stream, true).is_none() {
        return ncclUnhandledCudaError;
    }
    let sent = message(handle, peer_group, stream, captured);
    if sent != ncclSuccess {
        peer_group.nccl_refused();
        return sent;
    }
    if peer_group.after_nccl(stream, false) { ncclSuccess } else { ncclUnhandledCudaError }
}

/// Has NCCL order its work before the next work on a stream, for a turn on the application's stream. NCCL has no work of a lazy communicator that is
/// not materialized, and must not get a communicator that another thread has ended.
fn message(
    handle: ncclComm_t,
    peer_group: &PeerGroup,
    stream: StreamHandle,
    of_turn: StreamHandle,
) -> ncclResult_t {
    let Some([from, to]) = peer_group.scratch() else { return ncclSuccess };
    let is_of = |known: &&Communicator| {
        known.peer_group(handle).is_some_and(|own| std::ptr::eq(&raw const *own, peer_group))
    };
    let Some(communicator) = communicator::find(handle).filter(is_of) else { return ncclSuccess };
    let real = match communicator.lazy(handle) {
        Some(lazy) => {
            lazy.runs_alone_on(of_turn);
            lazy.real()
        }
        None => Some(handle),
    };
    real.map_or(ncclSuccess, |real| known::order(real, peer_group.rank(), from, to, stream))
}

/// Whether a stream is part of no capture, as far as the driver says.
fn is_eager(stream: StreamHandle) -> bool {
    gpu::opened().is_some_and(|driver| driver.capture_of(stream) == Ok(None))
}

pub(super) fn stream_of(call: &Call) -> StreamHandle {
    StreamHandle(call.local.stream as usize)
}
