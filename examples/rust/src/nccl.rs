//! The part of `nccl.h` that the program calls. A binding crate would do as well: Windlass has NCCL's C interface.

use crate::cuda::Stream;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::process::exit;

/// `ncclComm_t`, to which nothing is known but its address.
pub type Communicator = *mut c_void;

/// `ncclFloat32` of `ncclDataType_t`.
pub const FLOAT32: c_int = 7;

// By the file's own name: machines that run programs have `libnccl.so.2`, and `libnccl.so` only those that build them.
#[link(name = "libnccl.so.2", modifiers = "+verbatim")]
unsafe extern "C" {
    pub fn ncclCommInitAll(communicators: *mut Communicator, count: c_int, devices: *const c_int) -> c_int;
    pub fn ncclAllGather(
        from: *const c_void,
        to: *mut c_void,
        count: usize,
        data_type: c_int,
        communicator: Communicator,
        stream: Stream,
    ) -> c_int;
    pub fn ncclCommDestroy(communicator: Communicator) -> c_int;
    fn ncclGetErrorString(code: c_int) -> *const c_char;
}

/// Ends the program where a call failed: the other ranks would wait for this one.
pub fn must(code: c_int, what: &str) {
    if code != 0 {
        // SAFETY: NCCL has a static string for every code.
        let why = unsafe { CStr::from_ptr(ncclGetErrorString(code)) };
        eprintln!("{what}: {}", why.to_string_lossy());
        exit(1);
    }
}
