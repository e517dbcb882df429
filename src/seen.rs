//! The Rust code of the entry points that the engine looks at. Each makes plain data of its arguments and hands
//! them to the engine; the entries of [`crate::entries`] jump here. The compiler holds every signature against the
//! list of entry points.
//!
//! `C-unwind`: what the real NCCL throws passes through ([`windlass_engine::guard::around`]).

#![allow(non_snake_case, clippy::too_many_arguments)]

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

use nccl_sys::*;
use windlass_engine::call::{Call, Function, Local, Shared};
use windlass_engine::forward::birth::Birth;
use windlass_engine::forward::known::End;
use windlass_engine::{dispatch, lifecycle};

// Collectives, sends and receives.

#[inline(always)]
fn run(shared: Shared, local: Local) -> ncclResult_t {
    let call = Call { shared, local };
    dispatch::call(&call)
}

fn shared(function: Function, count: usize, datatype: ncclDataType_t) -> Shared {
    Shared { function, count, datatype, operation: None, root: None }
}

fn local(communicator: ncclComm_t, stream: cudaStream_t, send: *const c_void, receive: *mut c_void) -> Local {
    Local { send, receive, peer: None, config: null(), communicator, stream }
}

pub extern "C-unwind" fn ncclAllReduce(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    run(
        Shared { operation: Some(op), ..shared(Function::AllReduce, count, datatype) },
        local(comm, stream, sendbuff, recvbuff),
    )
}

pub extern "C-unwind" fn ncclBroadcast(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    run(
        Shared { root: Some(root), ..shared(Function::Broadcast, count, datatype) },
        local(comm, stream, sendbuff, recvbuff),
    )
}

pub extern "C-unwind" fn ncclReduce(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    run(
        Shared { operation: Some(op), root: Some(root), ..shared(Function::Reduce, count, datatype) },
        local(comm, stream, sendbuff, recvbuff),
    )
}

pub extern "C-unwind" fn ncclAllGather(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    sendcount: usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    run(shared(Function::AllGather, sendcount, datatype), local(comm, stream, sendbuff, recvbuff))
}

pub extern "C-unwind" fn ncclReduceScatter(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    recvcount: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    run(
        Shared { operation: Some(op), ..shared(Function::ReduceScatter, recvcount, datatype) },
        local(comm, stream, sendbuff, recvbuff),
    )
}

pub extern "C-unwind" fn ncclAlltoAll(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    run(shared(Function::AlltoAll, count, datatype), local(comm, stream, sendbuff, recvbuff))
}

pub extern "C-unwind" fn ncclGather(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    run(
        Shared { root: Some(root), ..shared(Function::Gather, count, datatype) },
        local(comm, stream, sendbuff, recvbuff),
    )
}

pub extern "C-unwind" fn ncclScatter(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    run(
        Shared { root: Some(root), ..shared(Function::Scatter, count, datatype) },
        local(comm, stream, sendbuff, recvbuff),
    )
}

pub extern "C-unwind" fn ncclAllReduceConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    run(
        Shared { operation: Some(op), ..shared(Function::AllReduceConfig, count, datatype) },
        Local { config, ..local(comm, stream, sendbuff, recvbuff) },
    )
}

pub extern "C-unwind" fn ncclBroadcastConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    run(
        Shared { root: Some(root), ..shared(Function::BroadcastConfig, count, datatype) },
        Local { config, ..local(comm, stream, sendbuff, recvbuff) },
    )
}

pub extern "C-unwind" fn ncclReduceConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    run(
        Shared { operation: Some(op), root: Some(root), ..shared(Function::ReduceConfig, count, datatype) },
        Local { config, ..local(comm, stream, sendbuff, recvbuff) },
    )
}

pub extern "C-unwind" fn ncclAllGatherConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    sendcount: usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    run(
        shared(Function::AllGatherConfig, sendcount, datatype),
        Local { config, ..local(comm, stream, sendbuff, recvbuff) },
    )
}

pub extern "C-unwind" fn ncclReduceScatterConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    recvcount: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    run(
        Shared { operation: Some(op), ..shared(Function::ReduceScatterConfig, recvcount, datatype) },
        Local { config, ..local(comm, stream, sendbuff, recvbuff) },
    )
}

pub extern "C-unwind" fn ncclAlltoAllConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    run(
        shared(Function::AlltoAllConfig, count, datatype),
        Local { config, ..local(comm, stream, sendbuff, recvbuff) },
    )
}

pub extern "C-unwind" fn ncclGatherConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    run(
        Shared { root: Some(root), ..shared(Function::GatherConfig, count, datatype) },
        Local { config, ..local(comm, stream, sendbuff, recvbuff) },
    )
}

pub extern "C-unwind" fn ncclScatterConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    run(
        Shared { root: Some(root), ..shared(Function::ScatterConfig, count, datatype) },
        Local { config, ..local(comm, stream, sendbuff, recvbuff) },
    )
}

pub extern "C-unwind" fn ncclBcast(
    buff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    run(
        Shared { root: Some(root), ..shared(Function::Bcast, count, datatype) },
        local(comm, stream, buff, buff),
    )
}

pub extern "C-unwind" fn ncclSend(
    sendbuff: *const c_void,
    count: usize,
    datatype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    run(
        shared(Function::Send, count, datatype),
        Local { peer: Some(peer), ..local(comm, stream, sendbuff, null_mut()) },
    )
}

pub extern "C-unwind" fn ncclRecv(
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    run(
        shared(Function::Recv, count, datatype),
        Local { peer: Some(peer), ..local(comm, stream, null(), recvbuff) },
    )
}

// Birth and end of communicators.

fn birth(entry: Entry, wish: Birth) -> ncclResult_t {
    lifecycle::birth(entry, &wish)
}

pub extern "C-unwind" fn ncclCommInitRank(
    comm: *mut ncclComm_t,
    nranks: c_int,
    commId: ncclUniqueId,
    rank: c_int,
) -> ncclResult_t {
    birth(Entry::ncclCommInitRank, Birth::InitRank { handle: comm, ranks: nranks, id: commId, rank })
}

pub extern "C-unwind" fn ncclCommInitRankConfig(
    comm: *mut ncclComm_t,
    nranks: c_int,
    commId: ncclUniqueId,
    rank: c_int,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    birth(
        Entry::ncclCommInitRankConfig,
        Birth::InitRankConfig { handle: comm, ranks: nranks, id: commId, rank, config },
    )
}

pub extern "C-unwind" fn ncclCommInitRankScalable(
    newcomm: *mut ncclComm_t,
    nranks: c_int,
    myrank: c_int,
    nId: c_int,
    commIds: *mut ncclUniqueId,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    birth(
        Entry::ncclCommInitRankScalable,
        Birth::InitRankScalable {
            handle: newcomm,
            ranks: nranks,
            rank: myrank,
            id_count: nId,
            ids: commIds,
            config,
        },
    )
}

pub extern "C-unwind" fn ncclCommInitAll(
    comm: *mut ncclComm_t,
    ndev: c_int,
    devlist: *const c_int,
) -> ncclResult_t {
    birth(Entry::ncclCommInitAll, Birth::InitAll { handles: comm, count: ndev, devices: devlist })
}

pub extern "C-unwind" fn ncclCommSplit(
    comm: ncclComm_t,
    color: c_int,
    key: c_int,
    newcomm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    birth(Entry::ncclCommSplit, Birth::Split { parent: comm, color, key, handle: newcomm, config })
}

pub extern "C-unwind" fn ncclCommShrink(
    comm: ncclComm_t,
    excludeRanksList: *mut c_int,
    excludeRanksCount: c_int,
    newcomm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
    shrinkFlags: c_int,
) -> ncclResult_t {
    birth(
        Entry::ncclCommShrink,
        Birth::Shrink {
            parent: comm,
            excluded: excludeRanksList,
            excluded_count: excludeRanksCount,
            handle: newcomm,
            config,
            flags: shrinkFlags,
        },
    )
}

pub extern "C-unwind" fn ncclCommGrow(
    comm: ncclComm_t,
    nRanks: c_int,
    uniqueId: *const ncclUniqueId,
    rank: c_int,
    newcomm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    birth(
        Entry::ncclCommGrow,
        Birth::Grow { parent: comm, ranks: nRanks, id: uniqueId, rank, handle: newcomm, config },
    )
}

pub extern "C-unwind" fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t {
    lifecycle::end(Entry::ncclCommFinalize, End::Finalize, comm)
}

pub extern "C-unwind" fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t {
    lifecycle::end(Entry::ncclCommDestroy, End::Destroy, comm)
}

pub extern "C-unwind" fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t {
    lifecycle::end(Entry::ncclCommAbort, End::Abort, comm)
}

// Groups.

pub extern "C-unwind" fn ncclGroupStart() -> ncclResult_t {
    lifecycle::group_start()
}

pub extern "C-unwind" fn ncclGroupEnd() -> ncclResult_t {
    lifecycle::group_end()
}

pub extern "C-unwind" fn ncclGroupSimulateEnd(simInfo: *mut ncclSimInfo_t) -> ncclResult_t {
    lifecycle::group_simulate_end(simInfo)
}

// Every row of the list that is marked `seen` has code here, with the row's signature.

macro_rules! signatures {
    (calls { $($(#[doc = $doc:literal])* [$since:literal $role:ident] fn $name:ident | $twin:ident
               ($($arg:ident: $type:ty),*) $(-> $result:ty)?;)* }
     opaque { $($opaque:tt)* }) => {
        $(signatures!(@$role $name ($($type),*) $(-> $result)?);)*
    };
    (@seen $name:ident ($($type:ty),*) -> $result:ty) => {
        const _: extern "C-unwind" fn($($type),*) -> $result = $name;
    };
    (@$role:ident $($rest:tt)*) => {};
}
for_each_entry!(signatures);
