//! Other calls of the real NCCL: handles that it wrote, facts and end of a communicator, groups.

// The pointers are the application's own arguments: the exported C functions are the unsafe border, and the
// engine behind it hands them on.
#![allow(unsafe_code, clippy::not_unsafe_ptr_arg_deref)]

use std::ffi::{c_int, c_void};
use std::time::Duration;

use nccl_sys::{
    cudaStream_t, ncclComm_t, ncclInProgress, ncclInvalidArgument, ncclResult_t, ncclSimInfo_t, ncclSuccess,
    ncclUint8, real,
};

use crate::forward::init::{self, Handle};
use windlass_base::error::refuse;
use windlass_base::gpu::{Address, StreamHandle};
use windlass_base::observers;
use windlass_base::stats::count::Identity;

/// How often a launch of NCCL's is looked at that goes on behind a call.
const LOOK_EVERY: Duration = Duration::from_micros(20);

/// How a communicator ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum End {
    Finalize,
    Destroy,
    Abort,
}

/// The handle at this place now.
pub fn read_handle(handle: Handle) -> ncclComm_t {
    // SAFETY: NCCL took this pointer to write a handle to, now or at the end of the open group, and calls here
    // are made no later than that.
    unsafe { handle.0.read_volatile() }
}

/// Destroys a communicator whose session failed, and clears the handle that NCCL wrote. Nothing has run on it. It is not aborted,
/// since it may share its abort flag with its parent, which may be in use.
pub fn take_back(handle: Handle, communicator: ncclComm_t) -> ncclResult_t {
    // SAFETY: as for `read_handle`; nobody has been told of the communicator.
    unsafe {
        handle.0.write_volatile(std::ptr::null_mut());
        real::ncclCommDestroy(communicator)
    }
}

/// Rank, ranks and device of a communicator that NCCL has accepted; none while it is not ready, or if NCCL gives an error.
pub fn identity(communicator: ncclComm_t) -> Option<Identity> {
    let (mut state, mut rank, mut ranks, mut device): (_, c_int, c_int, c_int) = (ncclInProgress, -1, 0, -1);
    // SAFETY: NCCL wrote or accepted this handle; the outputs are locals.
    let all_answered = unsafe {
        real::ncclCommGetAsyncError(communicator, &mut state) == ncclSuccess
            && state == ncclSuccess
            && real::ncclCommUserRank(communicator, &mut rank) == ncclSuccess
            && real::ncclCommCount(communicator, &mut ranks) == ncclSuccess
            && real::ncclCommCuDevice(communicator, &mut device) == ncclSuccess
    };
    all_answered.then_some(Identity { rank, ranks, device })
}

/// Rank and ranks of a communicator of NCCL's, or NCCL's refusal of the handle.
pub fn place_in(communicator: ncclComm_t) -> Result<(usize, usize), ncclResult_t> {
    let (mut rank, mut ranks): (c_int, c_int) = (0, 0);
    // SAFETY: the application's own argument; the outputs are locals.
    let answers = unsafe {
        [real::ncclCommUserRank(communicator, &mut rank), real::ncclCommCount(communicator, &mut ranks)]
    };
    match answers.into_iter().find(|code| *code != ncclSuccess) {
        Some(code) => Err(code),
        None => Ok((rank.max(0) as usize, ranks.max(0) as usize)),
    }
}

/// Ends a communicator.
pub fn end(how: End, communicator: ncclComm_t) -> ncclResult_t {
    // SAFETY: the application's own argument; the library is open.
    unsafe {
        match how {
            End::Finalize => real::ncclCommFinalize(communicator),
            End::Destroy => real::ncclCommDestroy(communicator),
            End::Abort => real::ncclCommAbort(communicator),
        }
    }
}

/// Aborts a communicator whose init is under way on another thread. This thread must have no group open. In a group NCCL's abort stops
/// the init at once, and frees the communicator only at the group's end (2.28.9). `is_out` waits before that end until the other thread
/// has left NCCL. If `is_out` returns false, nothing is freed.
pub fn abort_init(communicator: ncclComm_t, is_out: impl FnOnce() -> bool) -> ncclResult_t {
    init::in_group(|| {
        let aborted = end(End::Abort, communicator);
        if !is_out() {
            init::spoil_group();
        }
        aborted
    })
}

/// Revokes a communicator.
pub fn revoke(communicator: ncclComm_t, flags: c_int) -> ncclResult_t {
    // SAFETY: the application's own arguments; the library is open.
    unsafe { real::ncclCommRevoke(communicator, flags) }
}

/// Asks for a communicator's asynchronous error.
pub fn async_error(communicator: ncclComm_t, place: *mut ncclResult_t) -> ncclResult_t {
    // SAFETY: the application's own arguments; the library is open.
    unsafe { real::ncclCommGetAsyncError(communicator, place) }
}

/// The state of a communicator: its asynchronous error, or why NCCL does not say.
pub fn state(communicator: ncclComm_t) -> ncclResult_t {
    let mut state = ncclInProgress;
    async_error(communicator, &mut state).and(state)
}

/// Writes a result that Windlass gives in place of NCCL, or refuses a null place.
pub fn put<T>(place: *mut T, value: T, what: &str) -> ncclResult_t {
    if place.is_null() {
        return refuse(ncclInvalidArgument, format_args!("{what} is null, expected a place for the answer"));
    }
    // SAFETY: the application's own place for this answer.
    unsafe { place.write(value) };
    ncclSuccess
}

/// Writes an error of Windlass where NCCL has just written that there is none.
pub fn add_error(place: *mut ncclResult_t, error: ncclResult_t) {
    // SAFETY: NCCL took this place and wrote its answer there.
    unsafe {
        if place.read() == ncclSuccess {
            place.write(error);
        }
    }
}

/// Has NCCL order all its work of a communicator before the next work on a stream, by a message of one byte from this rank to itself,
/// which needs no other rank. Waits for the launch alone.
pub fn order(
    communicator: ncclComm_t,
    rank: u32,
    from: Address,
    to: Address,
    stream: StreamHandle,
) -> ncclResult_t {
    let stream = stream.0 as cudaStream_t;
    let rank = rank as c_int;
    // The program has made no such call.
    observers::profiler::quietly(|| {
        let mut result = init::in_group(|| {
            // SAFETY: the handle is that of a communicator that NCCL made and nobody has ended; the bytes are ours.
            unsafe {
                let sent = real::ncclSend(from as *const c_void, 1, ncclUint8, rank, communicator, stream);
                sent.and(real::ncclRecv(to as *mut c_void, 1, ncclUint8, rank, communicator, stream))
            }
        });
        // Of a communicator with `blocking = 0`: NCCL launches it on a thread of its own.
        while result == ncclInProgress {
            std::thread::sleep(LOOK_EVERY);
            result = state(communicator);
        }
        result
    })
}

/// Opens a group.
pub fn group_start() -> ncclResult_t {
    // SAFETY: the library is open.
    unsafe { real::ncclGroupStart() }
}

/// Closes a group.
pub fn group_end() -> ncclResult_t {
    // SAFETY: the library is open.
    unsafe { real::ncclGroupEnd() }
}

/// Closes a group without running it.
pub fn group_simulate_end(estimate: *mut ncclSimInfo_t) -> ncclResult_t {
    // SAFETY: the application's own argument; the library is open.
    unsafe { real::ncclGroupSimulateEnd(estimate) }
}
