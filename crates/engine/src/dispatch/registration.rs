//! Calls of which NCCL may get registered buffers: given a number, decided with the other ranks, run with what
//! [`crate::features::registration::registering`] puts in the buffers' place.

use std::sync::Arc;

use nccl_sys::{ncclInProgress, ncclInternalError, ncclResult_t, ncclSuccess};

use crate::communicator::Communicator;
use crate::features::registration::registering::{Buffers, Candidate, Registering, Substitutes};
use crate::forward;
use crate::group::{self, Waiting};
use crate::peers::PeerGroup;
use crate::plan::{self, Standing, Terms};
use windlass_base::call::{Call, Function, Local};
use windlass_base::gpu::{self, StreamHandle};
use windlass_base::guard;
use windlass_base::path::Path;
use windlass_base::range::Range;

use super::ordering::stream_of;

/// A call that is decided.
pub struct Taken {
    peer_group: Arc<PeerGroup>,
    candidate: Result<Candidate, ncclResult_t>,
    path: Path,
}

impl Taken {
    /// How it runs.
    pub fn path(&self) -> Path {
        self.path
    }
}

/// Looks whether all ranks number this call, and decides it then.
pub fn take(call: &Call, communicator: &Communicator, terms: Terms) -> Option<Taken> {
    // A null buffer is for NCCL to refuse: the call that comes in its place has its number.
    let refusable = call.local.send.is_null() || call.local.receive.is_null();
    if refusable || call.shared.function != Function::AllGather {
        return None;
    }
    let peer_group = communicator.peer_group(call.local.communicator)?;
    let registering = peer_group.registering()?;
    let ranks = terms.ranks;
    if !plan::is_candidate(&call.shared, &terms) {
        return None;
    }
    // Whether a call is captured is alike on all ranks, as NCCL has it. Where the driver cannot say, NCCL fails too.
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

/// Runs it.
pub fn run(call: &Call, taken: &Taken) -> ncclResult_t {
    let Taken { peer_group, candidate, .. } = taken;
    let candidate = match candidate {
        Ok(candidate) => candidate,
        Err(code) => return *code,
    };
    let Some(registering) = peer_group.registering() else { return ncclInternalError };
    let stream = stream_of(call);
    let result = match &candidate.substitutes {
        None => forward::forward(call),
        Some(substitutes) => {
            // NCCL runs a group at its end, after all that its streams hold by then.
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

/// NCCL is about to run the group: what is staged is copied now, after all that its communicator's streams in the group hold, as
/// NCCL has it. Divergence: of streams that only other calls of the group name, nothing is known.
pub fn before_group(candidates: &[Waiting]) -> ncclResult_t {
    let staged = || candidates.iter().filter(|waiting| waiting.copies());
    for waiting in staged() {
        let Some((registering, substitutes)) = waiting.parts() else { continue };
        for stream in others(candidates, waiting) {
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

/// NCCL has run the group, or not. The first that fails is the answer.
pub fn after_group(candidates: &[Waiting], is_run: bool) -> ncclResult_t {
    if !is_run {
        // Of a group that fails NCCL may have run a part. The first number of each communicator comes last, and stays.
        for waiting in candidates.iter().rev() {
            let Waiting { peer_group, candidate, stream } = waiting;
            peer_group.registering().into_iter().for_each(|one| one.failed(candidate, *stream));
        }
        candidates.iter().filter_map(|waiting| waiting.peer_group.registering()).for_each(|one| one.doubt());
        return ncclSuccess;
    }
    let mut answer = ncclSuccess;
    let mut note = |code| answer = if answer == ncclSuccess { code } else { answer };
    candidates.iter().for_each(|waiting| note(finish(waiting)));
    for waiting in candidates.iter().filter(|waiting| waiting.copies()) {
        let Some((registering, _)) = waiting.parts() else { continue };
        let others = others(candidates, waiting).into_iter();
        others.for_each(|stream| note(registering.join(stream, waiting.stream)));
    }
    answer
}

/// NCCL has run nothing of the group.
pub fn forget(candidates: &[Waiting]) {
    // As above.
    for waiting in candidates.iter().rev() {
        waiting.peer_group.registering().into_iter().for_each(|one| one.refused(&waiting.candidate));
    }
}

/// The other streams of a call's communicator. Those of other communicators hold up nothing of it, and may be another device's.
fn others(candidates: &[Waiting], of: &Waiting) -> Vec<StreamHandle> {
    let mut streams: Vec<StreamHandle> = Vec::new();
    for waiting in candidates.iter().filter(|waiting| Arc::ptr_eq(&waiting.peer_group, &of.peer_group)) {
        if waiting.stream != of.stream && !streams.contains(&waiting.stream) {
            streams.push(waiting.stream);
        }
    }
    streams
}

impl Waiting {
    fn parts(&self) -> Option<(&Registering, &Substitutes)> {
        Some((self.peer_group.registering()?, self.candidate.substitutes.as_ref()?))
    }

    fn copies(&self) -> bool {
        self.candidate.substitutes.is_some_and(|substitutes| substitutes.copies())
    }
}

/// NCCL has it on its stream.
fn finish(waiting: &Waiting) -> ncclResult_t {
    let Waiting { peer_group, candidate, stream } = waiting;
    let Some(registering) = peer_group.registering() else { return ncclInternalError };
    registering.passed(candidate, *stream)
}
