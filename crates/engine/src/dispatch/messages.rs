//! Sends and receives within a fabric: looked at when they are called, run at once or at the end of their group.
//!
//! A communicator's part of a group is one kernel. Communicators of a group run in the order of their births' names, which
//! all ranks see alike, after all that NCCL runs of the group: so no two ranks wait for each other's later ones. What
//! NCCL would refuse goes to NCCL, which says why, and fails the group.
//!
//! # Order against NCCL's own operations
//! NCCL runs a communicator's operations on a GPU one after the other. What goes to NCCL after one of ours waits for ours
//! ([`before_forward`]). When one of ours comes after NCCL's on another stream, NCCL is given a copy of one byte to itself on
//! our stream, which it orders after its own work. That looks at handles of streams: what NCCL runs from a graph, or
//! ran on a stream that was destroyed and whose handle is in use again, is not seen.

use std::ffi::c_int;
use std::sync::Arc;

use nccl_sys::{ncclComm_t, ncclInternalError, ncclResult_t, ncclSuccess};

use crate::call::{Call, Function};
use crate::communicator::{self, Communicator};
use crate::contract::RANKS_MAX;
use crate::error::refuse;
use crate::fabric::Fabric;
use crate::forward::known;
use crate::gpu::StreamHandle;
use crate::group::{self, Held};
use crate::mailbox::{Direction, Operation};

/// Before a call goes to NCCL whose communicator has a fabric.
pub fn before_forward(call: &Call, communicator: &Communicator) {
    communicator.forwards_on(call.local.stream);
    if communicator.has_run_messages()
        && let Some(fabric) = communicator.fabric(call.local.communicator)
    {
        // What fails is logged; NCCL meets the same device.
        let _ = fabric.order(stream_of(call));
    }
}

/// The fabric that serves this call; none if NCCL is to refuse it, or if another thread has just ended the communicator.
pub fn serves(call: &Call, communicator: &Communicator) -> Option<Arc<Fabric>> {
    let fabric = match communicator.promise(call.local.communicator) {
        Some(promise) if promise.is_revoked() => return None,
        Some(promise) => promise.fabric().clone(),
        None => communicator.fabric(call.local.communicator)?,
    };
    Messages::of(call, &fabric).is_some().then_some(fabric)
}

/// Runs a call, or holds it till its group ends.
pub fn take(call: &Call, fabric: &Arc<Fabric>) -> ncclResult_t {
    let Some(messages) = Messages::of(call, fabric) else {
        return refuse(ncclInternalError, format_args!("a message without bytes or peer"));
    };
    let (communicator, stream) = (call.local.communicator, stream_of(call));
    if group::is_open() {
        let hold = |operation: &Operation| {
            group::hold(Held { communicator, fabric: fabric.clone(), operation: *operation, stream })
        };
        if messages.all().iter().all(hold) {
            return ncclSuccess;
        }
        return refuse(ncclInternalError, format_args!("a group of a thread that is ending"));
    }
    run(communicator, fabric, messages.all(), stream, &[])
}

/// Runs what a group held. The first that fails is the answer; the others run all the same, as their peers wait.
pub fn run_held(held: &[Held]) -> ncclResult_t {
    let Some(first) = held.first() else { return ncclSuccess };
    let mut fabrics: Vec<&Held> = vec![first];
    for one in held {
        if !fabrics.iter().any(|known| Arc::ptr_eq(&known.fabric, &one.fabric)) {
            fabrics.push(one);
        }
    }
    fabrics.sort_by_key(|one| (one.fabric.contract().birth, one.fabric.rank()));
    let mut answer = ncclSuccess;
    for first in fabrics {
        let result = run_of(first, held.iter().filter(|one| Arc::ptr_eq(&one.fabric, &first.fabric)));
        if answer == ncclSuccess {
            answer = result;
        }
    }
    answer
}

/// One communicator's part.
fn run_of<'a>(first: &Held, own: impl Iterator<Item = &'a Held>) -> ncclResult_t {
    let mut others: Vec<StreamHandle> = Vec::new();
    let mut operations: Vec<Operation> = Vec::new();
    for one in own {
        operations.push(one.operation);
        if one.stream != first.stream && !others.contains(&one.stream) {
            others.push(one.stream);
        }
    }
    run(first.communicator, &first.fabric, &operations, first.stream, &others)
}

fn run(
    handle: ncclComm_t,
    fabric: &Arc<Fabric>,
    operations: &[Operation],
    stream: StreamHandle,
    others: &[StreamHandle],
) -> ncclResult_t {
    if let Some(communicator) = communicator::find(handle) {
        communicator.runs_messages();
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
    fabric.run(operations, stream, others)
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

/// The sends and receives of a call, in NCCL's order.
struct Messages {
    operations: [Operation; 2 * RANKS_MAX],
    count: usize,
}

impl Messages {
    /// None if an argument is such that NCCL refuses it.
    fn of(call: &Call, fabric: &Fabric) -> Option<Messages> {
        let (shared, local) = (&call.shared, &call.local);
        let ranks = fabric.contract().members.len() as u32;
        let bytes = (shared.count as u64).checked_mul(shared.datatype.size_bytes()? as u64)?;
        let send = |place: u32, peer| (local.send as u64, place, peer, Direction::Send);
        let receive = |place: u32, peer| (local.receive as u64, place, peer, Direction::Receive);
        let known = |rank: Option<c_int>| u32::try_from(rank?).ok().filter(|rank| *rank < ranks);
        let mut messages = Messages { operations: [NOTHING; 2 * RANKS_MAX], count: 0 };
        let mut add = |(base, place, peer, direction): (u64, u32, u32, Direction)| {
            let address = base.wrapping_add(u64::from(place).wrapping_mul(bytes));
            messages.operations[messages.count] = Operation { address, bytes, peer, direction };
            messages.count += 1;
        };
        match shared.function {
            Function::Send => add(send(0, known(local.peer)?)),
            Function::Recv => add(receive(0, known(local.peer)?)),
            Function::AlltoAll => (0..ranks).for_each(|peer| {
                add(send(peer, peer));
                add(receive(peer, peer));
            }),
            Function::Gather => {
                let root = known(shared.root)?;
                add(send(0, root));
                if root == fabric.rank() {
                    (0..ranks).for_each(|peer| add(receive(peer, peer)));
                }
            }
            Function::Scatter => {
                let root = known(shared.root)?;
                if root == fabric.rank() {
                    (0..ranks).for_each(|peer| add(send(peer, peer)));
                }
                add(receive(0, root));
            }
            _ => return None,
        }
        Some(messages)
    }

    fn all(&self) -> &[Operation] {
        &self.operations[..self.count]
    }
}

const NOTHING: Operation = Operation { address: 0, bytes: 0, peer: 0, direction: Direction::Send };

pub(super) fn stream_of(call: &Call) -> StreamHandle {
    StreamHandle(call.local.stream as usize)
}
