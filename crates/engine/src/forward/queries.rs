//! Queries and other calls of the real NCCL on a communicator, with NCCL's handle and otherwise the application's own arguments.

// The pointers are the application's own arguments.
#![allow(unsafe_code, clippy::not_unsafe_ptr_arg_deref, missing_docs)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use nccl_sys::{
    cudaStream_t, ncclComm_t, ncclCommMemStat_t, ncclDataType_t, ncclResult_t, ncclUniqueId,
    ncclWaitSignalDesc_t, ncclWindow_t, real,
};

use windlass_base::error;

/// One function each: the entry point, its name here and its arguments after the handle.
macro_rules! questions {
    ($($entry:ident $name:ident($($argument:ident: $type:ty),*);)*) => {$(
        pub fn $name(communicator: ncclComm_t, $($argument: $type),*) -> ncclResult_t {
            // SAFETY: NCCL's own handle and the arguments with which the application called this very function; the library is
            // open, since the ABI layer lets no call past before that.
            unsafe { real::$entry(communicator, $($argument),*) }
        }
    )*};
}
questions! {
    ncclCommCount count(place: *mut c_int);
    ncclCommCuDevice device(place: *mut c_int);
    ncclCommUserRank rank(place: *mut c_int);
    ncclCommSuspend suspend(flags: c_int);
    ncclCommResume resume();
    ncclCommMemStats memory(which: ncclCommMemStat_t, place: *mut u64);
    ncclCommGetUniqueId unique_id(place: *mut ncclUniqueId);
    ncclCommWindowRegister window(
        address: *mut c_void, bytes: usize, place: *mut ncclWindow_t, flags: c_int
    );
    ncclCommWindowDeregister end_window(window: ncclWindow_t);
    ncclWinGetUserPtr window_address(window: ncclWindow_t, place: *mut *mut c_void);
    ncclCommRegister register(address: *mut c_void, bytes: usize, place: *mut *mut c_void);
    ncclCommDeregister deregister(registration: *mut c_void);
}

pub fn last_error(communicator: ncclComm_t) -> *const c_char {
    // SAFETY: NCCL's own handle, or none, which NCCL's manual allows.
    let said = unsafe { real::ncclGetLastError(communicator) };
    // SAFETY: NCCL gives a string, or nothing.
    let text = (!said.is_null()).then(|| unsafe { CStr::from_ptr(said) });
    error::last(text).unwrap_or(said)
}

/// NCCL's `ncclPutSignal`.
#[allow(clippy::too_many_arguments)]
pub fn put(
    communicator: ncclComm_t,
    local: *const c_void,
    count: usize,
    datatype: ncclDataType_t,
    peer: c_int,
    window: ncclWindow_t,
    offset: usize,
    signal: c_int,
    context: c_int,
    flags: c_uint,
    stream: cudaStream_t,
) -> ncclResult_t {
    // SAFETY: as for the questions above.
    unsafe {
        real::ncclPutSignal(
            local,
            count,
            datatype,
            peer,
            window,
            offset,
            signal,
            context,
            flags,
            communicator,
            stream,
        )
    }
}

/// NCCL's `ncclSignal`.
pub fn signal(
    communicator: ncclComm_t,
    peer: c_int,
    signal: c_int,
    context: c_int,
    flags: c_uint,
    stream: cudaStream_t,
) -> ncclResult_t {
    // SAFETY: as for the questions above.
    unsafe { real::ncclSignal(peer, signal, context, flags, communicator, stream) }
}

/// NCCL's `ncclWaitSignal`.
pub fn wait(
    communicator: ncclComm_t,
    count: c_int,
    signals: *mut ncclWaitSignalDesc_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    // SAFETY: as for the questions above.
    unsafe { real::ncclWaitSignal(count, signals, communicator, stream) }
}
