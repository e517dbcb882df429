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

use std::sync::Arc;

use nccl_sys::{ncclResult_t, ncclSuccess};

use crate::call::{Call, Function};
use crate::communicator::{self, Communicator};
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
        && let Some(fabric) = communicator.fabric()
    {
        // What fails is logged; NCCL meets the same device.
        let _ = fabric.order(stream_of(call));
    }
}

/// The fabric that serves this send or receive; none if NCCL is to refuse it, or if another thread has just ended the
/// communicator.
pub fn serves(call: &Call, communicator: &Communicator) -> Option<Arc<Fabric>> {
    let fabric = communicator.fabric()?;
    let ranks = fabric.contract().members.len();
    let good_peer = call.local.peer.is_some_and(|peer| (0..ranks as i32).contains(&peer));
    (good_peer && operation(call).is_some()).then_some(fabric)
}

/// Runs a send or receive, or holds it till its group ends.
pub fn take(call: &Call, fabric: &Arc<Fabric>) -> ncclResult_t {
    let Some(operation) = operation(call) else {
        return refuse(nccl_sys::ncclInternalError, format_args!("a message without bytes or peer"));
    };
    let held = Held {
        communicator: call.local.communicator,
        fabric: fabric.clone(),
        operation,
        stream: stream_of(call),
    };
    if group::is_open() {
        match group::hold(held) {
            Ok(()) => ncclSuccess,
            Err(held) => run(&[held]),
        }
    } else {
        run(&[held])
    }
}

/// Runs what a group held. The first that fails is the answer; the others run all the same, as their peers wait.
pub fn run_held(held: &[Held]) -> ncclResult_t {
    let Some(first) = held.first() else { return ncclSuccess };
    if held.iter().all(|one| Arc::ptr_eq(&one.fabric, &first.fabric)) {
        return run(held);
    }
    let mut fabrics: Vec<&Arc<Fabric>> = Vec::new();
    for one in held {
        if !fabrics.iter().any(|fabric| Arc::ptr_eq(fabric, &one.fabric)) {
            fabrics.push(&one.fabric);
        }
    }
    fabrics.sort_by_key(|fabric| (fabric.contract().birth, fabric.rank()));
    let mut answer = ncclSuccess;
    for fabric in fabrics {
        let own: Vec<Held> =
            held.iter().filter(|one| Arc::ptr_eq(fabric, &one.fabric)).map(Held::again).collect();
        let result = run(&own);
        if answer == ncclSuccess {
            answer = result;
        }
    }
    answer
}

/// Runs one communicator's part.
fn run(held: &[Held]) -> ncclResult_t {
    let Some(first) = held.first() else { return ncclSuccess };
    let (fabric, stream) = (&first.fabric, first.stream);
    if let Some(communicator) = communicator::find(first.communicator) {
        communicator.runs_messages();
        if communicator.has_forwarded_elsewhere(stream.0)
            && let Some([from, to]) = fabric.scratch()
        {
            let result = known::order(first.communicator, fabric.rank(), from, to, stream);
            if result != ncclSuccess {
                return refuse(result, format_args!("NCCL did not order its work before ours"));
            }
        }
    }
    if held.len() == 1 {
        return fabric.run(&[first.operation], stream, &[]);
    }
    let operations: Vec<Operation> = held.iter().map(|one| one.operation).collect();
    let mut others: Vec<StreamHandle> = Vec::new();
    for one in held {
        if one.stream != stream && !others.contains(&one.stream) {
            others.push(one.stream);
        }
    }
    fabric.run(&operations, stream, &others)
}

/// What is to be moved, if the type is one and the bytes can be counted.
fn operation(call: &Call) -> Option<Operation> {
    let (address, direction) = match call.shared.function {
        Function::Send => (call.local.send as u64, Direction::Send),
        Function::Recv => (call.local.receive as u64, Direction::Receive),
        _ => return None,
    };
    let bytes = (call.shared.count as u64).checked_mul(call.shared.datatype.size_bytes()? as u64)?;
    Some(Operation { address, bytes, peer: u32::try_from(call.local.peer?).ok()?, direction })
}

fn stream_of(call: &Call) -> StreamHandle {
    StreamHandle(call.local.stream as usize)
}
