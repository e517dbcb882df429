//! What runs within fabrics, in order with the rest: at once, or at the end of its group.
//!
//! Communicators of a group run in the order of their births' names, which all ranks see alike, after all that NCCL runs of the
//! group: so no two ranks wait for each other's later ones. Of one communicator the collectives come first, in the order of
//! their calls, then its messages as one kernel: so they do on all ranks, whatever stands between.
//!
//! # Order against NCCL's own operations
//! NCCL runs a communicator's operations on a GPU one after the other. What goes to NCCL after one of ours waits for ours
//! ([`before_forward`]). When one of ours comes after NCCL's on another stream, NCCL is given a copy of one byte to itself on
//! our stream, which it orders after its own work. That looks at handles of streams: what NCCL runs from a graph, or
//! ran on a stream that was destroyed and whose handle is in use again, is not seen.

use std::sync::Arc;

use nccl_sys::{ncclComm_t, ncclInternalError, ncclResult_t, ncclSuccess};

use crate::call::Call;
use crate::communicator::{self, Communicator};
use crate::error::refuse;
use crate::fabric::Fabric;
use crate::fast::Task;
use crate::forward::known;
use crate::gpu::StreamHandle;
use crate::group::{self, Held, Ours};
use crate::mailbox::Operation;

use super::settling::Part;

/// Before a call goes to NCCL whose communicator has a fabric.
pub fn before_forward(call: &Call, communicator: &Communicator) {
    communicator.forwards_on(call.local.stream);
    if communicator.has_run()
        && let Some(fabric) = communicator.fabric(call.local.communicator)
    {
        // What fails is logged; NCCL meets the same device.
        let _ = fabric.order(stream_of(call));
    }
}

/// The fabric of a communicator that takes calls; none if another thread has just ended it.
pub(super) fn fabric_of(call: &Call, communicator: &Communicator) -> Option<Arc<Fabric>> {
    match communicator.promise(call.local.communicator) {
        Some(promise) if promise.is_revoked() => None,
        Some(promise) => Some(promise.fabric().clone()),
        None => communicator.fabric(call.local.communicator),
    }
}

/// Holds what a call is till its group ends.
pub(super) fn hold(call: &Call, fabric: &Arc<Fabric>, mut parts: impl Iterator<Item = Ours>) -> ncclResult_t {
    let (communicator, stream) = (call.local.communicator, stream_of(call));
    let held = |what| group::hold(Held { communicator, fabric: fabric.clone(), what, stream });
    match parts.all(held) {
        true => ncclSuccess,
        false => refuse(ncclInternalError, format_args!("a group of a thread that is ending")),
    }
}

/// Runs what a group held, after NCCL has run what is its. The first that fails is the answer; the others run all the same, as their
/// peers wait.
pub fn run_held(mut parts: Vec<Part>) -> ncclResult_t {
    parts.sort_by_key(|part| (part.fabric.contract().birth, part.fabric.rank()));
    let mut answer = ncclSuccess;
    for Part { communicator, fabric, tasks, operations, stream, others } in &parts {
        let result = match tasks {
            Ok(tasks) => run(*communicator, fabric, tasks, operations, *stream, others),
            Err(code) => *code,
        };
        if answer == ncclSuccess {
            answer = result;
        }
    }
    answer
}

/// Runs them now.
pub(super) fn run(
    handle: ncclComm_t,
    fabric: &Arc<Fabric>,
    tasks: &[Task],
    operations: &[Operation],
    stream: StreamHandle,
    others: &[StreamHandle],
) -> ncclResult_t {
    if let Some(communicator) = communicator::find(handle) {
        communicator.runs();
        if communicator.has_forwarded_elsewhere(stream.0)
            && let Some([from, to]) = fabric.scratch()
            && let Some(real) = real_of(communicator, handle, stream)
        {
            let result = known::order(real, fabric.rank(), from, to, stream);
            if result != ncclSuccess {
                return refuse(result, format_args!("NCCL did not order its work before ours"));
            }
        }
    }
    fabric.run(tasks, operations, stream, others)
}

/// NCCL's own handle, for a copy on this stream; none of a promise that was not honoured, of which NCCL runs nothing.
fn real_of(communicator: &Communicator, handle: ncclComm_t, stream: StreamHandle) -> Option<ncclComm_t> {
    match communicator.promise(handle) {
        Some(promise) => {
            promise.runs_alone_on(stream);
            promise.real()
        }
        None => Some(handle),
    }
}

pub(super) fn stream_of(call: &Call) -> StreamHandle {
    StreamHandle(call.local.stream as usize)
}
