//! `windlassAllGatherV` and `windlassReduceScatterV`: each is a group of broadcasts or reduces, one for each rank, that runs as any
//! group of the application does. Within a peer group it may become one kernel (`dispatch/fusing.rs`); else NCCL runs it.

use std::ffi::{c_int, c_void};

use nccl_sys::{
    cudaStream_t, ncclComm_t, ncclDataType_t, ncclInvalidArgument, ncclRedOp_t, ncclResult_t, ncclSuccess,
    open, slots,
};

use thiserror::Error;

use crate::forward::{self, known};
use crate::{communicator, dispatch, group, lazy};
use windlass_base::call::{Call, Function, Local, Shared};
use windlass_base::error::refuse;
use windlass_base::{guard, process};

use super::groups;

/// The arguments of a call.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// The function's name, for errors.
    pub name: &'static str,
    /// The reduction; none for an all-gather-v.
    pub operation: Option<ncclRedOp_t>,
    /// The send buffer: this rank's part for an all-gather-v, all parts for a reduce-scatter-v.
    pub send: *const c_void,
    /// The receive buffer: all parts for an all-gather-v, this rank's part for a reduce-scatter-v.
    pub receive: *mut c_void,
    /// Type of an element.
    pub datatype: ncclDataType_t,
    /// The communicator.
    pub communicator: ncclComm_t,
    /// The stream.
    pub stream: cudaStream_t,
}

/// Elements of each rank's part, and the element at which each begins in the buffer of all parts. Without displacements the parts follow
/// each other.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Lists<'a> {
    pub counts: &'a [usize],
    pub displacements: Option<&'a [usize]>,
}

/// Runs the call. `lists` gets the number of ranks, and returns none if there are no counts. An error within a group fails the group, as
/// NCCL's errors do.
pub fn run<'a>(asked: &Asked, lists: impl FnOnce(usize) -> Option<Lists<'a>>) -> ncclResult_t {
    guard::around(
        || {
            process::first_call();
            prepare(asked, lists)
        },
        |calls| match calls {
            Ok(calls) if slots::forwards_everything() => {
                grouped(calls, known::group_start, forward::forward, known::group_end)
            }
            Ok(calls) => grouped(calls, groups::start, dispatch::call, groups::end),
            Err(code) => *code,
        },
        |_, _| {},
    )
}

fn grouped(
    calls: &[Call],
    start: fn() -> ncclResult_t,
    run: fn(&Call) -> ncclResult_t,
    end: fn() -> ncclResult_t,
) -> ncclResult_t {
    let started = start();
    if started != ncclSuccess {
        return started;
    }
    // After a refusal NCCL runs nothing of the group, but the group must still be ended.
    let refused = calls.iter().map(run).find(|code| *code != ncclSuccess);
    let ended = end();
    refused.unwrap_or(ended)
}

fn prepare<'a>(
    asked: &Asked,
    lists: impl FnOnce(usize) -> Option<Lists<'a>>,
) -> Result<Vec<Call>, ncclResult_t> {
    let complain =
        |complaint: Complaint| refuse(ncclInvalidArgument, format_args!("{}: {complaint}", asked.name));
    let prepared = place_in(asked.communicator, asked.name).and_then(|(rank, ranks)| {
        let lists = lists(ranks).ok_or(Complaint::NoCounts).map_err(complain)?;
        calls(asked, rank, ranks, &lists).map_err(complain)
    });
    prepared.map_err(group::fail)
}

/// This rank and the number of ranks.
fn place_in(handle: ncclComm_t, name: &str) -> Result<(usize, usize), ncclResult_t> {
    if open::opened().is_none() || handle.is_null() {
        return Err(refuse(ncclInvalidArgument, format_args!("{name}: no communicator {handle:p}")));
    }
    if !slots::forwards_everything() {
        let peer_group = communicator::find(handle).and_then(|communicator| communicator.peer_group(handle));
        if let Some(peer_group) = peer_group {
            return Ok((peer_group.rank() as usize, peer_group.negotiated().members.len()));
        }
        if lazy::is_ours(handle) {
            let why = format_args!("{name}: communicator {handle:p} has been destroyed");
            return Err(refuse(ncclInvalidArgument, why));
        }
    }
    known::place_in(handle)
}

/// Why the arguments are refused, with their values.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
enum Complaint {
    #[error("recvcounts is null, expected a count for each rank")]
    NoCounts,
    #[error("datatype is {}, expected one of NCCL's", .0.0)]
    Datatype(ncclDataType_t),
    #[error("sendbuff is null, expected this rank's elements")]
    NoSend,
    #[error("recvbuff is null, expected room for this rank's elements")]
    NoReceive,
    #[error(
        "rank {rank} has {count} elements from element {displacement} on, expected them to end within {} bytes",
        isize::MAX
    )]
    Extent { rank: usize, count: usize, displacement: usize },
}

/// The calls, one for each rank, also for parts without elements, as NCCL checks their other arguments.
fn calls(asked: &Asked, rank: usize, ranks: usize, lists: &Lists<'_>) -> Result<Vec<Call>, Complaint> {
    let element = asked.datatype.size_bytes().ok_or(Complaint::Datatype(asked.datatype))?;
    let mut calls = Vec::with_capacity(ranks);
    let mut packed = 0;
    for (root, count) in lists.counts.iter().copied().enumerate().take(ranks) {
        let displacement = lists.displacements.map_or(packed, |all| all.get(root).copied().unwrap_or(packed));
        let end = displacement.checked_add(count);
        let is_within =
            |end: &usize| end.checked_mul(element).is_some_and(|bytes| isize::try_from(bytes).is_ok());
        packed = end.filter(is_within).ok_or(Complaint::Extent { rank: root, count, displacement })?;
        calls.push(asked.call(root, root == rank, count, displacement * element)?);
    }
    Ok(calls)
}

impl Asked {
    /// The call for one root. Ranks that are not the root pass one pointer for both buffers, as programs do: NCCL uses only one of them.
    fn call(&self, root: usize, is_own: bool, count: usize, at: usize) -> Result<Call, Complaint> {
        let is_gather = self.operation.is_none();
        let is_missing = |pointer: *const c_void, is_used: bool| is_used && count > 0 && pointer.is_null();
        if is_missing(self.send, is_own || !is_gather) {
            return Err(Complaint::NoSend);
        }
        if is_missing(self.receive, is_own || is_gather) {
            return Err(Complaint::NoReceive);
        }
        let whole = if is_gather { self.receive } else { self.send.cast_mut() };
        let part = whole.wrapping_byte_add(at);
        let (send, receive) = match (is_own, is_gather) {
            (true, true) => (self.send, part),
            (true, false) => (part.cast_const(), self.receive),
            (false, _) => (part.cast_const(), part),
        };
        let function = if is_gather { Function::Broadcast } else { Function::Reduce };
        let (datatype, operation, root) = (self.datatype, self.operation, Some(root as c_int));
        let (communicator, stream) = (self.communicator, self.stream);
        let config = std::ptr::null();
        Ok(Call {
            shared: Shared { function, count, datatype, operation, root },
            local: Local {
                called: function,
                send,
                receive,
                peer: None,
                config,
                communicator,
                stream,
                scalar: None,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_sys::{ncclFloat32, ncclInt8, ncclSum};
    use std::ptr::{null, null_mut, without_provenance, without_provenance_mut};

    fn asked(operation: Option<ncclRedOp_t>) -> Asked {
        Asked {
            name: "windlassTest",
            operation,
            send: without_provenance(1000),
            receive: without_provenance_mut(5000),
            datatype: ncclFloat32,
            communicator: null_mut(),
            stream: null_mut(),
        }
    }

    fn told(
        asked: &Asked,
        counts: &[usize],
        displacements: Option<&[usize]>,
    ) -> Result<Vec<[usize; 4]>, Complaint> {
        let lists = Lists { counts, displacements };
        let told = |call: &Call| {
            let root = call.shared.root.unwrap() as usize;
            [root, call.shared.count, call.local.send as usize, call.local.receive as usize]
        };
        Ok(calls(asked, 1, counts.len(), &lists)?.iter().map(told).collect())
    }

    /// Each rank's part is one call, at its displacement or behind the part before; empty parts too.
    #[test]
    fn one_for_each_rank() {
        let gather = asked(None);
        let packed = told(&gather, &[3, 5, 0], None).unwrap();
        assert_eq!(packed, [[0, 3, 5000, 5000], [1, 5, 1000, 5012], [2, 0, 5032, 5032]]);
        let placed = told(&gather, &[3, 5, 2], Some(&[100, 50, 0])).unwrap();
        assert_eq!(placed, [[0, 3, 5400, 5400], [1, 5, 1000, 5200], [2, 2, 5000, 5000]]);
        let scatter = told(&asked(Some(ncclSum)), &[3, 5, 2], None).unwrap();
        assert_eq!(scatter, [[0, 3, 1000, 1000], [1, 5, 1012, 5000], [2, 2, 1032, 1032]]);
    }

    /// Arguments that NCCL could not check, or would fault on, are refused with their values.
    #[test]
    fn nonsense_is_refused() {
        let gather = asked(None);
        let most = isize::MAX as usize / 4;
        assert!(told(&gather, &[most, 0], None).is_ok());
        let extent = |rank, count, displacement| Err(Complaint::Extent { rank, count, displacement });
        assert_eq!(told(&gather, &[most + 1, 0], None), extent(0, most + 1, 0));
        assert_eq!(told(&gather, &[most, 1], None), extent(1, 1, most));
        let negative = -1_isize as usize;
        assert_eq!(told(&gather, &[1, negative], None), extent(1, negative, 1));
        assert_eq!(told(&gather, &[1, 1], Some(&[0, negative])), extent(1, 1, negative));
        let bytes = Asked { datatype: ncclInt8, ..gather };
        assert!(told(&bytes, &[most + 1, 0], None).is_ok());
        let unknown = Asked { datatype: ncclDataType_t(77), ..gather };
        assert_eq!(told(&unknown, &[0, 0], None), Err(Complaint::Datatype(ncclDataType_t(77))));

        let without_send = |operation| Asked { send: null(), ..asked(operation) };
        let without_receive = |operation| Asked { receive: null_mut(), ..asked(operation) };
        assert!(told(&without_send(None), &[3, 0, 1], None).is_ok());
        assert_eq!(told(&without_send(None), &[3, 1, 1], None), Err(Complaint::NoSend));
        assert_eq!(told(&without_receive(None), &[3, 0, 0], None), Err(Complaint::NoReceive));
        assert_eq!(told(&without_send(Some(ncclSum)), &[3, 0, 0], None), Err(Complaint::NoSend));
        assert!(told(&without_receive(Some(ncclSum)), &[3, 0, 0], None).is_ok());
        assert_eq!(told(&without_receive(Some(ncclSum)), &[3, 1, 0], None), Err(Complaint::NoReceive));
        assert!(told(&Asked { send: null(), receive: null_mut(), ..gather }, &[0, 0], None).is_ok());
    }
}
