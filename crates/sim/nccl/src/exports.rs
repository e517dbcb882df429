//! The exports: every public name of NCCL 2.28.9 and its `pnccl` twin, nothing newer.

#![allow(non_snake_case)]

use crate::device_api::{self, ResourceHandle, ResourceRequirements, Team};
use crate::operation::{self, Buffer, Call, Kind};
use crate::refusal::{Outcome, code_text, last_error, outcome, refuse};
use crate::settings::settings;
use crate::{allocation, arguments, communicator, group, leaks, lifecycle, operators, registration};
use crate::{reentry, rendezvous, split, strict, window};
use libc::{c_char, c_int, c_void};
use nccl_sys::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The guard around every call: it refuses forked children all but the version, and turns panics into an error code.
fn answer(name: &str, body: impl FnOnce() -> Outcome) -> ncclResult_t {
    if leaks::is_forked_child() && !name.ends_with("ncclGetVersion") {
        return ncclSystemError;
    }
    let code = catch_unwind(AssertUnwindSafe(body)).map_or_else(
        |_| {
            strict::say(&format!("{name} panicked"));
            ncclInternalError
        },
        |outcome| outcome.err().unwrap_or(ncclSuccess),
    );
    if settings().log {
        // SAFETY: gettid has no preconditions.
        let thread = unsafe { libc::gettid() };
        strict::say(&format!("thread {thread} {name} {}", code.name().unwrap_or("unknown code")));
    }
    code
}

/// Defines two exports around the body of each row. The twin does not call its sibling by name: a preloaded library
/// may have the same name.
macro_rules! exports {
    ($(fn $name:ident | $twin:ident ($($argument:ident: $type:ty),*) $body:block)*) => {
        mod bodies {
            use super::*;
            $(#[allow(clippy::too_many_arguments)]
            pub unsafe fn $name($($argument: $type),*) -> Outcome $body)*
        }
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) -> ncclResult_t {
                // SAFETY: C callers keep what nccl.h asks of the arguments.
                answer(stringify!($name), || unsafe { bodies::$name($($argument),*) })
            }
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $twin($($argument: $type),*) -> ncclResult_t {
                // SAFETY: C callers keep what nccl.h asks of the arguments.
                answer(stringify!($twin), || unsafe { bodies::$name($($argument),*) })
            }
        )*
    };
}

/// Like `exports`, for functions that return no result code.
macro_rules! plain_exports {
    ($(fn $name:ident | $twin:ident ($($argument:ident: $type:ty),*) -> $result:ty $body:block)*) => {
        mod plain_bodies {
            use super::*;
            $(pub fn $name($($argument: $type),*) -> $result $body)*
        }
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name($($argument: $type),*) -> $result { plain_bodies::$name($($argument),*) }
            #[unsafe(no_mangle)]
            extern "C" fn $twin($($argument: $type),*) -> $result { plain_bodies::$name($($argument),*) }
        )*
    };
}

/// Writes an output; fails if the place is null.
///
/// # Safety
/// `place` must be null or writable.
unsafe fn put<T>(place: *mut T, value: T, name: &str) -> Outcome {
    if place.is_null() {
        return refuse(ncclInvalidArgument, format!("{name} argument is NULL"));
    }
    // SAFETY: by contract.
    unsafe { place.write(value) };
    Ok(())
}

fn call(
    kind: Kind,
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
) -> Call {
    let (send, receive) = (send as usize, receive as usize);
    Call { kind, send, receive, count, datatype, operator: ncclSum, root: 0, stream: 0 }
}

fn enqueue(comm: ncclComm_t, stream: cudaStream_t, call: Call) -> Outcome {
    operation::enqueue(comm, Call { stream: stream as usize, ..call })
}

// SAFETY, in all bodies: what C callers guarantee by nccl.h, passed on.
exports! {
    fn ncclGetVersion | pncclGetVersion (version: *mut c_int) {
        // SAFETY: see above.
        unsafe { put(version, settings().version, "GetVersion : version") }
    }
    fn ncclGetUniqueId | pncclGetUniqueId (out: *mut ncclUniqueId) {
        // SAFETY: see above.
        unsafe { put(out, rendezvous::unique_id()?, "GetUniqueId : out") }
    }
    fn ncclCommInitRank | pncclCommInitRank (comm: *mut ncclComm_t, ranks: c_int, id: ncclUniqueId, rank: c_int) {
        // SAFETY: see above.
        let config = unsafe { arguments::read_config(std::ptr::null(), None)? };
        // SAFETY: see above.
        unsafe { lifecycle::init_rank(comm, ranks, &[id], rank, config) }
    }
    fn ncclCommInitRankConfig | pncclCommInitRankConfig (comm: *mut ncclComm_t, ranks: c_int, id: ncclUniqueId, rank: c_int, config: *mut ncclConfig_t) {
        // SAFETY: see above.
        let config = group::note(unsafe { arguments::read_config(config, None) })?;
        // SAFETY: see above.
        unsafe { lifecycle::init_rank(comm, ranks, &[id], rank, config) }
    }
    fn ncclCommInitRankScalable | pncclCommInitRankScalable (comm: *mut ncclComm_t, ranks: c_int, rank: c_int, number: c_int, ids: *mut ncclUniqueId, config: *mut ncclConfig_t) {
        if number <= 0 || number > ranks || ids.is_null() {
            let text = format!("improper usage of ncclCommInitRank: nId = {number}, nranks={ranks}");
            return group::note(refuse(ncclInvalidArgument, text));
        }
        // SAFETY: see above.
        let config = group::note(unsafe { arguments::read_config(config, None) })?;
        // SAFETY: see above.
        let ids = unsafe { std::slice::from_raw_parts(ids, number as usize) };
        // SAFETY: see above.
        unsafe { lifecycle::init_rank(comm, ranks, ids, rank, config) }
    }
    fn ncclCommInitAll | pncclCommInitAll (comms: *mut ncclComm_t, number: c_int, devices: *const c_int) {
        if comms.is_null() {
            return refuse(ncclInvalidArgument, "CommInitAll : comms argument is NULL");
        }
        if number < 0 {
            return refuse(ncclInvalidArgument, format!("Invalid device count requested : {number}"));
        }
        let devices: Vec<c_int> = match devices.is_null() {
            true => (0..number).collect(),
            // SAFETY: see above.
            false => unsafe { std::slice::from_raw_parts(devices, number as usize) }.to_vec(),
        };
        // SAFETY: see above.
        unsafe { lifecycle::init_all(comms, &devices) }
    }
    fn ncclCommFinalize | pncclCommFinalize (comm: ncclComm_t) {
        if comm.is_null() { Ok(()) } else { lifecycle::finalize(comm) }
    }
    fn ncclCommDestroy | pncclCommDestroy (comm: ncclComm_t) {
        if comm.is_null() { Ok(()) } else { lifecycle::destroy(comm) }
    }
    fn ncclCommAbort | pncclCommAbort (comm: ncclComm_t) {
        if comm.is_null() { Ok(()) } else { lifecycle::abort(comm) }
    }
    fn ncclCommRevoke | pncclCommRevoke (comm: ncclComm_t, flags: c_int) {
        if comm.is_null() { Ok(()) } else { lifecycle::revoke(comm, flags) }
    }
    fn ncclCommSplit | pncclCommSplit (comm: ncclComm_t, color: c_int, key: c_int, newcomm: *mut ncclComm_t, config: *mut ncclConfig_t) {
        // SAFETY: see above.
        unsafe { split::split(comm, color, key, newcomm, config) }
    }
    fn ncclCommShrink | pncclCommShrink (comm: ncclComm_t, excluded: *mut c_int, number: c_int, newcomm: *mut ncclComm_t, config: *mut ncclConfig_t, flags: c_int) {
        // SAFETY: see above.
        unsafe { split::shrink(comm, excluded, number, newcomm, config, flags) }
    }
    fn ncclCommGetAsyncError | pncclCommGetAsyncError (comm: ncclComm_t, error: *mut ncclResult_t) {
        let state = communicator::find(comm, "ncclGetAsyncError")?.state();
        // SAFETY: see above.
        unsafe { put(error, state, "ncclGetAsyncError : asyncError") }
    }
    fn ncclCommCount | pncclCommCount (comm: ncclComm_t, count: *mut c_int) {
        let communicator = communicator::find(comm, "CommCount")?;
        communicator.ensure_ready()?;
        // SAFETY: see above.
        unsafe { put(count, communicator.ranks as c_int, "CommCount : count") }
    }
    fn ncclCommCuDevice | pncclCommCuDevice (comm: ncclComm_t, device: *mut c_int) {
        let communicator = communicator::find(comm, "CommCuDevice")?;
        communicator.ensure_ready()?;
        // SAFETY: see above.
        unsafe { put(device, communicator.device, "CommCuDevice : device") }
    }
    fn ncclCommUserRank | pncclCommUserRank (comm: ncclComm_t, rank: *mut c_int) {
        let communicator = communicator::find(comm, "CommUserRank")?;
        communicator.ensure_ready()?;
        // SAFETY: see above.
        unsafe { put(rank, communicator.rank as c_int, "CommUserRank : rank") }
    }
    fn ncclMemAlloc | pncclMemAlloc (pointer: *mut *mut c_void, size: usize) {
        if pointer.is_null() {
            // The code of cudaMalloc, to which NCCL passes the pointer.
            return refuse(ncclUnhandledCudaError, "ncclMemAlloc : ptr argument is NULL");
        }
        // SAFETY: see above.
        unsafe { put(pointer, allocation::allocate(size)? as *mut c_void, "ptr") }
    }
    fn ncclMemFree | pncclMemFree (pointer: *mut c_void) {
        allocation::free(pointer as usize)
    }
    fn ncclCommRegister | pncclCommRegister (comm: ncclComm_t, buffer: *mut c_void, size: usize, handle: *mut *mut c_void) {
        let communicator = communicator::find_for_operation(comm, "ncclCommRegister")?;
        let _inside = communicator.enter("ncclCommRegister");
        if handle.is_null() {
            return refuse(ncclInvalidArgument, "ncclCommRegister : handle argument is NULL");
        }
        let record = registration::register(&communicator, buffer as usize, size)?;
        // SAFETY: see above.
        unsafe { put(handle, record as *mut c_void, "handle") }
    }
    fn ncclCommDeregister | pncclCommDeregister (comm: ncclComm_t, handle: *mut c_void) {
        let communicator = communicator::find_for_operation(comm, "ncclCommDeregister")?;
        let _inside = communicator.enter("ncclCommDeregister");
        registration::deregister(&communicator, handle as usize)
    }
    fn ncclCommWindowRegister | pncclCommWindowRegister (comm: ncclComm_t, buffer: *mut c_void, size: usize, window: *mut ncclWindow_t, flags: c_int) {
        let communicator = group::note(communicator::find_for_operation(comm, "ncclCommWindowRegister"))?;
        let _inside = communicator.enter("ncclCommWindowRegister");
        if window.is_null() {
            return group::note(refuse(ncclInvalidArgument, "ncclCommWindowRegister : win argument is NULL"));
        }
        if buffer.is_null() || size == 0 {
            return Ok(());
        }
        let place = window as usize;
        let buffer = Buffer { address: buffer as usize, bytes: size };
        let registering = communicator.clone();
        let work = Box::new(move || {
            let handle = window::register(&registering, buffer, flags)?;
            // SAFETY: the caller keeps the place writable until the group ends.
            unsafe { (place as *mut ncclWindow_t).write(handle as ncclWindow_t) };
            Ok(())
        });
        group::note(group::run(group::Task { communicator: communicator.clone(), work, blocking: group::Blocking::AsConfigured }))
    }
    fn ncclCommWindowDeregister | pncclCommWindowDeregister (comm: ncclComm_t, window: ncclWindow_t) {
        if window.is_null() {
            return Ok(());
        }
        let communicator = communicator::find_for_operation(comm, "ncclCommWindowDeregister")?;
        let _inside = communicator.enter("ncclCommWindowDeregister");
        window::deregister(&communicator, window as usize)
    }
    fn ncclRedOpCreatePreMulSum | pncclRedOpCreatePreMulSum (operator: *mut ncclRedOp_t, scalar: *mut c_void, datatype: ncclDataType_t, residence: ncclScalarResidence_t, comm: ncclComm_t) {
        let communicator = communicator::find(comm, "ncclRedOpCreatePreMulSum")?;
        let _inside = communicator.enter("ncclRedOpCreatePreMulSum");
        if operator.is_null() || scalar.is_null() {
            return refuse(ncclInvalidArgument, "ncclRedOpCreatePreMulSum : op or scalar argument is NULL");
        }
        // SAFETY: see above.
        unsafe { put(operator, operators::create(&communicator, scalar, datatype, residence)?, "op") }
    }
    fn ncclRedOpDestroy | pncclRedOpDestroy (operator: ncclRedOp_t, comm: ncclComm_t) {
        if (0..ncclNumOps.0).contains(&operator.0) {
            return refuse(ncclInvalidArgument, "ncclRedOpDestroy : operator is a NCCL builtin.");
        }
        if operator.0 < 0 {
            return refuse(ncclInvalidArgument, "ncclRedOpDestroy :  operator is garbage.");
        }
        if comm.is_null() {
            return refuse(ncclInvalidArgument, "ncclRedOpDestroy : invalid communicator passed.");
        }
        let communicator = communicator::find(comm, "ncclRedOpDestroy")?;
        let _inside = communicator.enter("ncclRedOpDestroy");
        operators::destroy(&communicator, operator)
    }
    fn ncclAllReduce | pncclAllReduce (send: *const c_void, receive: *mut c_void, count: usize, datatype: ncclDataType_t, operator: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t) {
        enqueue(comm, stream, Call { operator, ..call(Kind::AllReduce, send, receive, count, datatype) })
    }
    fn ncclBroadcast | pncclBroadcast (send: *const c_void, receive: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t) {
        enqueue(comm, stream, Call { root, ..call(Kind::Broadcast, send, receive, count, datatype) })
    }
    fn ncclBcast | pncclBcast (buffer: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t) {
        match reentry::broadcast() {
            // SAFETY: see above.
            Some(broadcast) => outcome(unsafe { broadcast(buffer, buffer, count, datatype, root, comm, stream) }),
            None => enqueue(comm, stream, Call { root, ..call(Kind::Broadcast, buffer, buffer, count, datatype) }),
        }
    }
    fn ncclReduce | pncclReduce (send: *const c_void, receive: *mut c_void, count: usize, datatype: ncclDataType_t, operator: ncclRedOp_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t) {
        enqueue(comm, stream, Call { operator, root, ..call(Kind::Reduce, send, receive, count, datatype) })
    }
    fn ncclAllGather | pncclAllGather (send: *const c_void, receive: *mut c_void, count: usize, datatype: ncclDataType_t, comm: ncclComm_t, stream: cudaStream_t) {
        enqueue(comm, stream, call(Kind::AllGather, send, receive, count, datatype))
    }
    fn ncclReduceScatter | pncclReduceScatter (send: *const c_void, receive: *mut c_void, count: usize, datatype: ncclDataType_t, operator: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t) {
        enqueue(comm, stream, Call { operator, ..call(Kind::ReduceScatter, send, receive, count, datatype) })
    }
    fn ncclAlltoAll | pncclAlltoAll (send: *const c_void, receive: *mut c_void, count: usize, datatype: ncclDataType_t, comm: ncclComm_t, stream: cudaStream_t) {
        enqueue(comm, stream, call(Kind::AlltoAll, send, receive, count, datatype))
    }
    fn ncclGather | pncclGather (send: *const c_void, receive: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t) {
        enqueue(comm, stream, Call { root, ..call(Kind::Gather, send, receive, count, datatype) })
    }
    fn ncclScatter | pncclScatter (send: *const c_void, receive: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t) {
        enqueue(comm, stream, Call { root, ..call(Kind::Scatter, send, receive, count, datatype) })
    }
    fn ncclSend | pncclSend (send: *const c_void, count: usize, datatype: ncclDataType_t, peer: c_int, comm: ncclComm_t, stream: cudaStream_t) {
        enqueue(comm, stream, Call { root: peer, ..call(Kind::Send, send, std::ptr::null_mut(), count, datatype) })
    }
    fn ncclRecv | pncclRecv (receive: *mut c_void, count: usize, datatype: ncclDataType_t, peer: c_int, comm: ncclComm_t, stream: cudaStream_t) {
        enqueue(comm, stream, Call { root: peer, ..call(Kind::Recv, std::ptr::null(), receive, count, datatype) })
    }
    fn ncclGroupStart | pncclGroupStart () {
        group::start_by_user();
        Ok(())
    }
    fn ncclGroupEnd | pncclGroupEnd () {
        group::end_by_user()
    }
    fn ncclGroupSimulateEnd | pncclGroupSimulateEnd (information: *mut ncclSimInfo_t) {
        const SIM_INFO_MAGIC: u32 = 0x7468_5283;
        // SAFETY: see above.
        if !information.is_null() && unsafe { (*information).magic } != SIM_INFO_MAGIC {
            let _ = group::end_simulated();
            return refuse(ncclInvalidArgument, "ncclSimInfo_t argument not initialized via NCCL_SIM_INFO_INITIALIZER");
        }
        let calls = group::end_simulated()?;
        if !information.is_null() {
            // The estimate only has to be positive: the number of calls.
            // SAFETY: see above.
            unsafe { (*information).estimatedTime = calls as f32 };
        }
        Ok(())
    }
    fn ncclDevCommCreate | pncclDevCommCreate (_comm: ncclComm_t, _requirements: *const c_void, _out: *mut c_void) {
        device_api::no_device("ncclDevCommCreate")
    }
    fn ncclDevCommDestroy | pncclDevCommDestroy (_comm: ncclComm_t, _communicator: *const c_void) {
        device_api::no_device("ncclDevCommDestroy")
    }
    fn ncclLsaBarrierCreateRequirement | pncclLsaBarrierCreateRequirement (team: Team, barriers: c_int, handle: *mut ResourceHandle, requirements: *mut ResourceRequirements) {
        let words = 3 * barriers + barriers * team.ranks;
        // SAFETY: see above.
        unsafe { device_api::require(handle, requirements, barriers, words as usize * 4, 4) }
    }
    fn ncclLLA2ACreateRequirement | pncclLLA2ACreateRequirement (blocks: c_int, slots: c_int, handle: *mut ResourceHandle, requirements: *mut ResourceRequirements) {
        // SAFETY: see above.
        unsafe { device_api::require(handle, requirements, slots, (blocks * (1 + 2 * slots)) as usize * 16, 16) }
    }
    fn ncclGinBarrierCreateRequirement | pncclGinBarrierCreateRequirement (_comm: ncclComm_t, _team: Team, _barriers: c_int, _handle: *mut c_void, _requirements: *mut ResourceRequirements) {
        device_api::no_device("ncclGinBarrierCreateRequirement")
    }
}

plain_exports! {
    fn ncclGetErrorString | pncclGetErrorString (code: ncclResult_t) -> *const c_char {
        code_text(code).as_ptr()
    }
    fn ncclGetLastError | pncclGetLastError (_comm: ncclComm_t) -> *const c_char {
        last_error()
    }
    fn ncclResetDebugInit | pncclResetDebugInit () -> () {}
    fn ncclLLA2ACalcSlots | pncclLLA2ACalcSlots (elements: c_int, element_bytes: c_int) -> c_int {
        elements * ((element_bytes + 7) / 8)
    }
    fn ncclTeamWorld | pncclTeamWorld (comm: ncclComm_t) -> Team {
        device_api::team_world(comm)
    }
    fn ncclTeamLsa | pncclTeamLsa (comm: ncclComm_t) -> Team {
        device_api::team_world(comm)
    }
    fn ncclTeamRail | pncclTeamRail (comm: ncclComm_t) -> Team {
        device_api::team_rail(comm)
    }
    fn ncclTeamRankToWorld | pncclTeamRankToWorld (comm: ncclComm_t, team: Team, rank: c_int) -> c_int {
        device_api::rank_in_world(comm, team, rank)
    }
    fn ncclTeamRankToLsa | pncclTeamRankToLsa (comm: ncclComm_t, team: Team, rank: c_int) -> c_int {
        device_api::rank_in_world(comm, team, rank)
    }
}

/// The one name without a twin.
#[unsafe(no_mangle)]
extern "C" fn ncclResetDebugInitInternal() {}
