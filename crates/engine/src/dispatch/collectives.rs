//! Runs collectives as kernels of Windlass: checks arguments at the call, and runs at once or at the end of the group. A call
//! that NCCL would refuse goes to NCCL, which says why.

use std::ptr::null;
use std::sync::Arc;

use nccl_sys::{ncclRedOp_t, ncclResult_t, ncclSuccess};

use crate::communicator::{self, Communicator};
use crate::forward::of_call;
use crate::group::{self, Ours};
use crate::peers::PeerGroup;
use windlass_base::call::{Call, Function, Local, Scalar};
use windlass_base::path::Path;
use windlass_transport::native::{
    self, Collective, Kind, Part, RANKS_MAX, Reduction, SCALED_SUM, Task, Uneven,
};

use super::ordering::{self, Where, stream_of};

/// A collective, and the peer group that runs it.
pub struct Served {
    peer_group: Arc<PeerGroup>,
    collective: Collective,
    scalar: Option<Scalar>,
}

/// The peer group that runs this call. None if NCCL is to refuse the call, or if another thread has just ended the communicator.
pub fn serves(call: &Call, communicator: &Communicator) -> Option<Served> {
    let peer_group = ordering::peer_group_of(call, communicator)?;
    let scalar = match call.shared.operation {
        Some(operation) if call.shared.has_own_operation() => {
            Some(scalar_of(operation, call, communicator, &peer_group)?)
        }
        _ => None,
    };
    let call = Call { local: Local { scalar, ..call.local }, ..*call };
    let collective = collective_of(&call, peer_group.rank(), peer_group.negotiated().members.len())?;
    Some(Served { peer_group, collective, scalar })
}

/// The scalar of an operation that the program made (`ncclRedOpCreatePreMulSum`). None if the operation does not exist or is for
/// another type.
fn scalar_of(
    operation: ncclRedOp_t,
    call: &Call,
    communicator: &Communicator,
    peer_group: &PeerGroup,
) -> Option<Scalar> {
    match communicator.lazy(call.local.communicator) {
        Some(lazy) => lazy.operators.scalar(operation, call.shared.datatype),
        None => peer_group.scalars.of(operation, call.shared.datatype),
    }
}

/// Runs a call, or holds it until its group ends.
pub fn take(call: &Call, Served { peer_group, collective, scalar }: &Served) -> ncclResult_t {
    // NCCL drops an empty collective, too.
    if collective.count == 0 {
        return ncclSuccess;
    }
    if group::is_open() {
        // The program may free its operation and its configuration before the group ends.
        let held = Call { local: Local { scalar: *scalar, config: null(), ..call.local }, ..*call };
        let code = ordering::hold(call, peer_group, std::iter::once(Ours::Collective(held)));
        // A held call is counted at the group's end, with its path.
        if code != ncclSuccess
            && let Some(communicator) = communicator::find(call.local.communicator)
        {
            super::count(call, communicator, Path::Forward);
        }
        return code;
    }
    let one = [Task::One(*collective)];
    ordering::run(call.local.communicator, peer_group, &one, &[], &Where::on(stream_of(call)))
}

/// One call of a group as a kernel of its own. None where NCCL would have refused the call.
pub(super) fn alone(call: &Call, rank: u32, ranks: usize) -> Option<Task> {
    collective_of(call, rank, ranks).map(Task::One)
}

/// Broadcasts, or reduces, of a group, each with another root, fused into one task. None where NCCL would have refused one of them.
pub(super) fn fused<'a>(calls: impl Iterator<Item = &'a Call>, rank: u32, ranks: usize) -> Option<Task> {
    let mut uneven = Uneven { reduction: None, scalar: None, parts: [Part::default(); RANKS_MAX], own: 0 };
    for call in calls {
        let Collective { kind, count, element_bytes, reduction, send, receive, .. } =
            collective_of(call, rank, ranks)?;
        let (root, part, own) = match kind {
            Kind::Broadcast { root } => (root, receive, send),
            Kind::Reduce { root } => (root, send, receive),
            _ => return None,
        };
        let bytes = count.checked_mul(element_bytes.into())?;
        *uneven.parts.get_mut(root as usize)? = Part { address: part, bytes };
        uneven.reduction = reduction;
        if root == rank {
            uneven.own = own;
        }
    }
    Some(Task::Fused(uneven))
}

/// Several separate calls of a group in one kernel. None where NCCL would have refused one of them.
pub(super) fn batch<'a>(calls: impl Iterator<Item = &'a Call>, rank: u32, ranks: usize) -> Option<Task> {
    calls.map(|call| collective_of(call, rank, ranks)).collect::<Option<_>>().map(Task::Batch)
}

/// The arguments of a call as the kernels take them. None if NCCL would refuse an argument, or fault on it.
fn collective_of(call: &Call, rank: u32, ranks: usize) -> Option<Collective> {
    let (shared, local) = (&call.shared, &call.local);
    // A configuration says how NCCL is to run the call. NCCL refuses one that is not valid.
    if !local.config.is_null() && !of_call::is_one(local.config) {
        return None;
    }
    let root = || {
        let root = u32::try_from(shared.root?).ok()?;
        ((root as usize) < ranks).then_some(root)
    };
    let kind = match shared.function.plain() {
        Function::AllReduce => Kind::AllReduce,
        Function::Broadcast | Function::Bcast => Kind::Broadcast { root: root()? },
        Function::Reduce => Kind::Reduce { root: root()? },
        Function::AllGather => Kind::AllGather,
        Function::ReduceScatter => Kind::ReduceScatter,
        _ => return None,
    };
    let reads = !matches!(kind, Kind::Broadcast { root } if root != rank);
    let writes = !matches!(kind, Kind::Reduce { root } if root != rank);
    let is_missing = reads && local.send.is_null() || writes && local.receive.is_null();
    if is_missing && shared.count > 0 {
        return None;
    }
    // Without a scalar, the operation is unknown.
    if shared.has_own_operation() && local.scalar.is_none() {
        return None;
    }
    let number = |operation: ncclRedOp_t| if shared.has_own_operation() { SCALED_SUM } else { operation.0 };
    Some(Collective {
        kind,
        count: shared.count as u64,
        element_bytes: shared.datatype.size_bytes()? as u32,
        reduction: shared
            .operation
            .map(|operation| Reduction { datatype: shared.datatype.0, operation: number(operation) }),
        scalar: local.scalar.map(|scalar| match scalar {
            Scalar::Here(bytes) => native::Scalar::Bits(u64::from_le_bytes(bytes)),
            Scalar::OnDevice(address) => native::Scalar::At(address as u64),
        }),
        send: local.send as u64,
        receive: local.receive as u64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_sys::{ncclDataType_t, ncclFloat32, ncclSum};
    use std::ptr::{null_mut, without_provenance_mut};
    use windlass_base::call::Shared;

    fn call(function: Function, root: Option<i32>, send: usize, receive: usize) -> Call {
        let operation = matches!(function, Function::AllReduce | Function::Reduce).then_some(ncclSum);
        let shared = Shared { function, count: 3, datatype: ncclFloat32, operation, root };
        let local = Local {
            called: function,
            send: without_provenance_mut(send),
            receive: without_provenance_mut(receive),
            peer: None,
            config: null(),
            communicator: null_mut(),
            stream: null_mut(),
            scalar: None,
        };
        Call { shared, local }
    }

    /// A call becomes the arguments of a kernel.
    #[test]
    fn translated() {
        let all_reduce = collective_of(&call(Function::AllReduce, None, 8, 16), 1, 4).unwrap();
        assert_eq!((all_reduce.kind, all_reduce.count, all_reduce.element_bytes), (Kind::AllReduce, 3, 4));
        assert_eq!((all_reduce.send, all_reduce.receive), (8, 16));
        assert_eq!(all_reduce.reduction, Some(Reduction { datatype: 7, operation: 0 }));
        let broadcast = collective_of(&call(Function::Bcast, Some(3), 8, 8), 1, 4).unwrap();
        assert_eq!((broadcast.kind, broadcast.reduction), (Kind::Broadcast { root: 3 }, None));
    }

    /// Broadcasts and reduces with a root each become one: each rank's part is where its call has it, and this rank's own is apart.
    #[test]
    fn roots_become_parts() {
        let sized = |call: Call, count| Call { shared: Shared { count, ..call.shared }, ..call };
        let broadcast = |root, count, at| sized(call(Function::Broadcast, Some(root), at, at + 1), count);
        let calls = [broadcast(2, 5, 100), broadcast(1, 7, 200), broadcast(0, 1, 300)];
        let Some(Task::Fused(gather)) = fused(calls.iter(), 1, 4) else { panic!("not one") };
        assert_eq!((gather.reduction, gather.own), (None, 200));
        let parts = gather.parts.map(|part| (part.address, part.bytes));
        assert_eq!(parts[..5], [(301, 4), (201, 28), (101, 20), (0, 0), (0, 0)]);
        let reduce = |root, count, at| sized(call(Function::Reduce, Some(root), at, at + 1), count);
        let calls = [reduce(0, 5, 100), reduce(3, 7, 200)];
        let Some(Task::Fused(scatter)) = fused(calls.iter(), 3, 4) else { panic!("not one") };
        assert_eq!((scatter.reduction.unwrap().operation, scatter.own), (0, 201));
        assert_eq!(scatter.parts[3], Part { address: 200, bytes: 28 });
        // A rank that is no root has nothing of its own.
        let Some(Task::Fused(other)) = fused(calls.iter(), 2, 4) else { panic!("not one") };
        assert_eq!(other.own, 0);
        assert_eq!(fused([reduce(4, 1, 100)].iter(), 2, 4), None);
        assert_eq!(fused([call(Function::AllGather, None, 8, 8)].iter(), 2, 4), None);
    }

    /// Calls with a root that is no rank, an unknown type, or a missing buffer that is needed go to NCCL.
    #[test]
    fn refusable() {
        let ours = |call: Call| collective_of(&call, 1, 4).is_some();
        for root in [-1, 4, i32::MAX] {
            assert!(!ours(call(Function::Broadcast, Some(root), 8, 8)));
            assert!(!ours(call(Function::Reduce, Some(root), 8, 8)));
        }
        let mut unknown = call(Function::AllGather, None, 8, 8);
        unknown.shared.datatype = ncclDataType_t(77);
        assert!(!ours(unknown));
        for (function, root, send, receive, expected) in [
            (Function::AllReduce, None, 0, 8, false),
            (Function::AllReduce, None, 8, 0, false),
            (Function::Broadcast, Some(0), 0, 8, true),
            (Function::Broadcast, Some(1), 0, 8, false),
            (Function::Broadcast, Some(0), 8, 0, false),
            (Function::Reduce, Some(0), 8, 0, true),
            (Function::Reduce, Some(1), 8, 0, false),
            (Function::Reduce, Some(0), 0, 0, false),
        ] {
            let call = call(function, root, send, receive);
            assert_eq!(ours(call), expected, "{call:?}");
            let nothing = Call { shared: Shared { count: 0, ..call.shared }, ..call };
            assert!(ours(nothing), "{nothing:?}");
        }
        assert!(!ours(call(Function::Send, None, 8, 8)));
    }
}
