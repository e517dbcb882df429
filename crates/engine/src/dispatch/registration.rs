//! Runs large all-gathers on NCCL with registered buffers, which [`crate::features::registration::registering`] gives. All ranks number
//! these calls alike and decide together.

use std::sync::Arc;

use nccl_sys::{ncclInProgress, ncclInternalError, ncclResult_t, ncclSuccess};

use crate::communicator::Communicator;
use crate::features::registration::registering::{Buffers, Candidate, Registering, Substitutes};
use crate::forward;
use crate::group::{self, Joint, Joints, Waiting};
use crate::peers::PeerGroup;
use crate::plan::{self, Standing, Terms};
use windlass_base::call::{Call, Function, Local};
use windlass_base::gpu::{self, StreamHandle};
use windlass_base::guard;
use windlass_base::path::Path;
use windlass_base::range::Range;

use super::ordering::stream_of;

/// A candidate on which the ranks have decided.
pub struct Taken {
    peer_group: Arc<PeerGroup>,
    candidate: Result<Candidate, ncclResult_t>,
    /// The path of the call.
    pub path: Path,
}

/// Decides a call together with the other ranks. None if the call is no candidate.
pub fn take(call: &Call, communicator: &Communicator, terms: &Terms) -> Option<Taken> {
    // NCCL refuses a null buffer. Such a call takes no number, so the program's next call gets it.
    let refusable = call.local.send.is_null() || call.local.receive.is_null();
    if refusable || call.shared.function != Function::AllGather {
        return None;
    }
    let peer_group = communicator.peer_group(call.local.communicator)?;
    let registering = peer_group.features.registering.as_ref()?;
    let ranks = terms.ranks;
    if !plan::is_candidate(&call.shared, terms) {
        return None;
    }
    // NCCL requires that all ranks capture a call, or none. Where the driver cannot say, NCCL fails, too.
    if !matches!(gpu::opened()?.capture_of(stream_of(call)), Ok(None)) {
        return None;
    }
    let bytes = call.shared.bytes(ranks);
    let ranks = ranks as u64;
    let buffers = Buffers {
        send: Range { base: call.local.send as u64, bytes: bytes / ranks },
        receive: Range { base: call.local.receive as u64, bytes },
    };
    let candidate = registering.consider(call.local.communicator, &buffers);
    let registers = !matches!(candidate, Ok(Candidate { substitutes: None, .. }));
    let standing = if registers { Standing::Registering(terms) } else { Standing::PeerGroup(terms) };
    let path = plan::plan(&call.shared, standing);
    Some(Taken { peer_group, candidate, path })
}

/// Runs a decided call on NCCL, with registered buffers if there are any.
pub fn run(call: &Call, taken: &Taken) -> ncclResult_t {
    let Taken { peer_group, candidate, .. } = taken;
    let candidate = match candidate {
        Ok(candidate) => candidate,
        // NCCL does not get the call, so nothing of its group may run.
        Err(code) => return group::fail(*code),
    };
    let Some(registering) = peer_group.features.registering.as_ref() else { return ncclInternalError };
    let stream = stream_of(call);
    let result = match &candidate.substitutes {
        None => forward::forward(call),
        Some(substitutes) => {
            // NCCL runs a group at its end, after all work on its streams until then: `before_group` copies.
            let copied = match group::is_open() {
                true => ncclSuccess,
                false => guard::call(|| registering.before(substitutes, stream)),
            };
            if copied != ncclSuccess {
                registering.refused(candidate);
                return copied;
            }
            let (send, receive) = (substitutes.send as _, substitutes.receive as _);
            forward::forward(&Call { local: Local { send, receive, ..call.local }, ..*call })
        }
    };
    guard::call(|| {
        if result != ncclSuccess && result != ncclInProgress {
            registering.failed(candidate, stream);
            return result;
        }
        let waiting = Waiting { peer_group: peer_group.clone(), candidate: *candidate, stream };
        if !group::is_open() {
            return finish(&waiting);
        }
        group::hold_candidate(waiting);
        result
    })
}

/// Called before NCCL runs a group: copies data into staging buffers, after all work on the streams of their communicator in the
/// group, as in NCCL.
pub(crate) fn before_group(candidates: &[Waiting], joints: &Joints) -> ncclResult_t {
    let staged = || candidates.iter().filter(|waiting| waiting.copies());
    for waiting in staged() {
        let Some((registering, substitutes)) = waiting.parts() else { continue };
        for stream in others(joints, waiting) {
            let joined = registering.join(waiting.stream, stream);
            if joined != ncclSuccess {
                return joined;
            }
        }
        let copied = registering.before(substitutes, waiting.stream);
        if copied != ncclSuccess {
            return copied;
        }
    }
    ncclSuccess
}

/// Called after NCCL has run the group (`is_run`) or failed. Returns the first failure.
pub(crate) fn after_group(candidates: &[Waiting], joints: &Joints, is_run: bool) -> ncclResult_t {
    if !is_run {
        // NCCL may have run a part. In reverse, so that each communicator goes back to its first number.
        for waiting in candidates.iter().rev() {
            let Waiting { peer_group, candidate, stream } = waiting;
            peer_group
                .features
                .registering
                .as_ref()
                .into_iter()
                .for_each(|one| one.failed(candidate, *stream));
        }
        candidates
            .iter()
            .filter_map(|waiting| waiting.peer_group.features.registering.as_ref())
            .for_each(|one| one.doubt());
        return ncclSuccess;
    }
    let mut answer = ncclSuccess;
    let mut note = |code| answer = answer.and(code);
    candidates.iter().for_each(|waiting| note(finish(waiting)));
    for waiting in candidates.iter().filter(|waiting| waiting.copies()) {
        let Some((registering, _)) = waiting.parts() else { continue };
        others(joints, waiting).for_each(|stream| note(registering.join(stream, waiting.stream)));
    }
    answer
}

/// Called when NCCL has run nothing of the group.
pub(crate) fn forget(candidates: &[Waiting]) {
    // In reverse, as in `after_group`.
    for waiting in candidates.iter().rev() {
        waiting
            .peer_group
            .features
            .registering
            .as_ref()
            .into_iter()
            .for_each(|one| one.refused(&waiting.candidate));
    }
}

/// The other streams of a call's communicator. Other communicators' streams do not delay it, and may be of another device.
fn others<'a>(joints: &'a Joints, of: &'a Waiting) -> impl Iterator<Item = StreamHandle> + 'a {
    let own = joints.of(&of.peer_group).into_iter().flat_map(Joint::all);
    own.filter(|stream| *stream != of.stream)
}

impl Waiting {
    fn parts(&self) -> Option<(&Registering, &Substitutes)> {
        Some((self.peer_group.features.registering.as_ref()?, self.candidate.substitutes.as_ref()?))
    }

    fn copies(&self) -> bool {
        self.candidate.substitutes.is_some_and(|substitutes| substitutes.copies())
    }
}

/// Called when NCCL has put the call on its stream.
fn finish(waiting: &Waiting) -> ncclResult_t {
    let Waiting { peer_group, candidate, stream } = waiting;
    let Some(registering) = peer_group.features.registering.as_ref() else { return ncclInternalError };
    registering.passed(candidate, *stream)
}
