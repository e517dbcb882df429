//! The Rust code of the entry points that the engine looks at. Each makes plain data of its arguments and hands
//! them to the engine; the entries of [`crate::entries`] jump here. The compiler holds every signature against the
//! list of entry points.
//!
//! `C-unwind`: what the real NCCL throws passes through ([`windlass_base::guard::around`]).

#![allow(non_snake_case, clippy::too_many_arguments)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};

use nccl_sys::*;
use windlass_base::call::{Call, Function, Local, Shared};
use windlass_engine::api::{communicators, groups, memory, queries, sleep, windows};
use windlass_engine::dispatch;
use windlass_engine::forward::init::{InitCall, InitFunction};
use windlass_engine::forward::known::End;
use windlass_engine::forward::queries as forward;

// Collectives, sends and receives.

#[inline(always)]
fn run(shared: Shared, local: Local) -> ncclResult_t {
    let call = Call { shared, local };
    dispatch::call(&call)
}

fn shared(function: Function, count: usize, datatype: ncclDataType_t) -> Shared {
    Shared { function, count, datatype, operation: None, root: None }
}

fn local(
    called: Function,
    communicator: ncclComm_t,
    stream: cudaStream_t,
    send: *const c_void,
    receive: *mut c_void,
) -> Local {
    Local { called, send, receive, peer: None, config: null(), communicator, stream, scalar: None }
}

/// A row for each collective: the plain function and the one with a configuration, and what it has besides buffers,
/// count, type, communicator and stream.
macro_rules! collectives {
    ($($plain:ident $plain_function:ident, $configured:ident $configured_function:ident,
       ($($argument:ident: $type:ty),*) { $($field:ident),* };)*) => {
        $(
            pub extern "C-unwind" fn $plain(
                sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
                $($argument: $type,)* comm: ncclComm_t, stream: cudaStream_t,
            ) -> ncclResult_t {
                let shared = shared(Function::$plain_function, count, datatype);
                let local = local(shared.function, comm, stream, sendbuff, recvbuff);
                run(Shared { $($field: Some($argument),)* ..shared }, local)
            }

            pub extern "C-unwind" fn $configured(
                sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
                $($argument: $type,)* comm: ncclComm_t, stream: cudaStream_t, config: *const ncclCollConfig_t,
            ) -> ncclResult_t {
                let called = Function::$configured_function;
                // Another rank may make the plain call.
                let function = if config.is_null() { Function::$plain_function } else { called };
                let shared = shared(function, count, datatype);
                let local = local(called, comm, stream, sendbuff, recvbuff);
                run(Shared { $($field: Some($argument),)* ..shared }, Local { config, ..local })
            }
        )*
    };
}
collectives! {
    ncclAllReduce AllReduce, ncclAllReduceConfig AllReduceConfig, (op: ncclRedOp_t) { operation };
    ncclBroadcast Broadcast, ncclBroadcastConfig BroadcastConfig, (root: c_int) { root };
    ncclReduce Reduce, ncclReduceConfig ReduceConfig, (op: ncclRedOp_t, root: c_int) { operation, root };
    ncclAllGather AllGather, ncclAllGatherConfig AllGatherConfig, () {};
    ncclReduceScatter ReduceScatter, ncclReduceScatterConfig ReduceScatterConfig, (op: ncclRedOp_t) { operation };
    ncclAlltoAll AlltoAll, ncclAlltoAllConfig AlltoAllConfig, () {};
    ncclGather Gather, ncclGatherConfig GatherConfig, (root: c_int) { root };
    ncclScatter Scatter, ncclScatterConfig ScatterConfig, (root: c_int) { root };
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
        local(Function::Bcast, comm, stream, buff, buff),
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
        Local { peer: Some(peer), ..local(Function::Send, comm, stream, sendbuff, null_mut()) },
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
        Local { peer: Some(peer), ..local(Function::Recv, comm, stream, null(), recvbuff) },
    )
}

pub extern "C-unwind" fn ncclMemAlloc(ptr: *mut *mut c_void, size: usize) -> ncclResult_t {
    memory::allocate(ptr, size)
}

pub extern "C-unwind" fn ncclMemFree(ptr: *mut c_void) -> ncclResult_t {
    memory::free(ptr)
}

// Init and end of communicators.

pub extern "C-unwind" fn ncclGetUniqueId(uniqueId: *mut ncclUniqueId) -> ncclResult_t {
    communicators::unique_id(uniqueId)
}

fn make_communicator(
    entry: Entry,
    place: *mut ncclComm_t,
    config: *mut ncclConfig_t,
    parent: Option<ncclComm_t>,
    function: InitFunction,
) -> ncclResult_t {
    communicators::init(entry, &InitCall { place, config, parent, function })
}

pub extern "C-unwind" fn ncclCommInitRank(
    comm: *mut ncclComm_t,
    nranks: c_int,
    commId: ncclUniqueId,
    rank: c_int,
) -> ncclResult_t {
    make_communicator(
        Entry::ncclCommInitRank,
        comm,
        null_mut(),
        None,
        InitFunction::Rank { ranks: nranks, id: commId, rank },
    )
}

pub extern "C-unwind" fn ncclCommInitRankConfig(
    comm: *mut ncclComm_t,
    nranks: c_int,
    commId: ncclUniqueId,
    rank: c_int,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    make_communicator(
        Entry::ncclCommInitRankConfig,
        comm,
        config,
        None,
        InitFunction::RankConfig { ranks: nranks, id: commId, rank },
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
    make_communicator(
        Entry::ncclCommInitRankScalable,
        newcomm,
        config,
        None,
        InitFunction::RankScalable { ranks: nranks, rank: myrank, id_count: nId, ids: commIds },
    )
}

pub extern "C-unwind" fn ncclCommInitAll(
    comm: *mut ncclComm_t,
    ndev: c_int,
    devlist: *const c_int,
) -> ncclResult_t {
    make_communicator(
        Entry::ncclCommInitAll,
        comm,
        null_mut(),
        None,
        InitFunction::All { count: ndev, devices: devlist },
    )
}

pub extern "C-unwind" fn ncclCommSplit(
    comm: ncclComm_t,
    color: c_int,
    key: c_int,
    newcomm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    make_communicator(Entry::ncclCommSplit, newcomm, config, Some(comm), InitFunction::Split { color, key })
}

pub extern "C-unwind" fn ncclCommShrink(
    comm: ncclComm_t,
    excludeRanksList: *mut c_int,
    excludeRanksCount: c_int,
    newcomm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
    shrinkFlags: c_int,
) -> ncclResult_t {
    make_communicator(
        Entry::ncclCommShrink,
        newcomm,
        config,
        Some(comm),
        InitFunction::Shrink {
            excluded: excludeRanksList,
            excluded_count: excludeRanksCount,
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
    make_communicator(
        Entry::ncclCommGrow,
        newcomm,
        config,
        Some(comm),
        InitFunction::Grow { ranks: nRanks, id: uniqueId, rank },
    )
}

pub extern "C-unwind" fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t {
    communicators::end(Entry::ncclCommFinalize, End::Finalize, comm)
}

pub extern "C-unwind" fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t {
    communicators::end(Entry::ncclCommDestroy, End::Destroy, comm)
}

pub extern "C-unwind" fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t {
    communicators::end(Entry::ncclCommAbort, End::Abort, comm)
}

pub extern "C-unwind" fn ncclCommRevoke(comm: ncclComm_t, revokeFlags: c_int) -> ncclResult_t {
    communicators::revoke(comm, revokeFlags)
}

pub extern "C-unwind" fn ncclCommGetAsyncError(
    comm: ncclComm_t,
    asyncError: *mut ncclResult_t,
) -> ncclResult_t {
    communicators::async_error(comm, asyncError)
}

// Questions to a communicator, and what else takes one.

/// A row for each function that hands its arguments on as they are: the entry, its arguments, the engine's function.
macro_rules! asked {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty = $family:ident::$asked:ident($($given:ident),*);)*) => {$(
        pub extern "C-unwind" fn $name($($argument: $type),*) -> $result {
            $family::$asked($($given),*)
        }
    )*};
}
asked! {
    ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> ncclResult_t = queries::count(comm, count);
    ncclCommCuDevice(comm: ncclComm_t, device: *mut c_int) -> ncclResult_t = queries::device(comm, device);
    ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t = queries::rank(comm, rank);
    ncclGetLastError(comm: ncclComm_t) -> *const c_char = queries::last_error(comm);
    ncclCommSuspend(comm: ncclComm_t, flags: c_int) -> ncclResult_t = sleep::suspend(comm, flags);
    ncclCommResume(comm: ncclComm_t) -> ncclResult_t = sleep::resume(comm);
    ncclCommMemStats(comm: ncclComm_t, stat: ncclCommMemStat_t, value: *mut u64) -> ncclResult_t
        = sleep::memory(comm, stat, value);
    ncclCommGetUniqueId(comm: ncclComm_t, id: *mut ncclUniqueId) -> ncclResult_t = queries::unique_id(comm, id);
    ncclCommRegister(comm: ncclComm_t, buff: *mut c_void, size: usize, handle: *mut *mut c_void) -> ncclResult_t
        = queries::register(comm, buff, size, handle);
    ncclCommDeregister(comm: ncclComm_t, handle: *mut c_void) -> ncclResult_t = queries::deregister(comm, handle);
    ncclCommWindowRegister(comm: ncclComm_t, buff: *mut c_void, size: usize, win: *mut ncclWindow_t, flags: c_int)
        -> ncclResult_t = windows::register(comm, buff, size, win, flags);
    ncclCommWindowDeregister(comm: ncclComm_t, win: ncclWindow_t) -> ncclResult_t = windows::end(comm, win);
    ncclWinGetUserPtr(comm: ncclComm_t, win: ncclWindow_t, place: *mut *mut c_void) -> ncclResult_t
        = windows::address(comm, win, place);
    ncclRedOpCreatePreMulSum(
        op: *mut ncclRedOp_t, scalar: *mut c_void, datatype: ncclDataType_t, residence: ncclScalarResidence_t,
        comm: ncclComm_t
    ) -> ncclResult_t = queries::operator(op, scalar, datatype, residence, comm);
    ncclRedOpDestroy(op: ncclRedOp_t, comm: ncclComm_t) -> ncclResult_t = queries::end_operator(op, comm);
}

pub extern "C-unwind" fn ncclPutSignal(
    localbuff: *const c_void,
    count: usize,
    datatype: ncclDataType_t,
    peer: c_int,
    peerWin: ncclWindow_t,
    peerWinOffset: usize,
    sigIdx: c_int,
    ctx: c_int,
    flags: c_uint,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let sent = (localbuff, count.saturating_mul(datatype.size_bytes().unwrap_or(1)));
    queries::one_sided(Entry::ncclPutSignal, comm, stream, Some(sent), |real| {
        forward::put(
            real,
            localbuff,
            count,
            datatype,
            peer,
            peerWin,
            peerWinOffset,
            sigIdx,
            ctx,
            flags,
            stream,
        )
    })
}

pub extern "C-unwind" fn ncclSignal(
    peer: c_int,
    sigIdx: c_int,
    ctx: c_int,
    flags: c_uint,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let forward = |real| forward::signal(real, peer, sigIdx, ctx, flags, stream);
    queries::one_sided(Entry::ncclSignal, comm, stream, None, forward)
}

pub extern "C-unwind" fn ncclWaitSignal(
    nDesc: c_int,
    signalDescs: *mut ncclWaitSignalDesc_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let forward = |real| forward::wait(real, nDesc, signalDescs, stream);
    queries::one_sided(Entry::ncclWaitSignal, comm, stream, None, forward)
}

// Groups.

pub extern "C-unwind" fn ncclGroupStart() -> ncclResult_t {
    groups::start()
}

pub extern "C-unwind" fn ncclGroupEnd() -> ncclResult_t {
    groups::end()
}

pub extern "C-unwind" fn ncclGroupSimulateEnd(simInfo: *mut ncclSimInfo_t) -> ncclResult_t {
    groups::simulate_end(simInfo)
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
