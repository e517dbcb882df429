//! A `libnccl.so.2` whose every function succeeds at once and does nothing: benchmarks measure Windlass's own overhead over it.
//! The few functions that Windlass asks before it knows a communicator give fixed answers.

#![allow(non_snake_case, missing_docs)]

use std::ffi::c_int;

use nccl_sys::{for_each_entry, ncclComm_t, ncclResult_t, ncclSuccess};

macro_rules! succeed {
    (calls { $($(#[doc = $doc:literal])* [$since:literal $role:ident] fn $name:ident | $twin:ident
               $arguments:tt $(-> $result:ty)?;)* }
     opaque { $([$osince:literal $orole:ident] $oname:ident $(| $otwin:ident)? -> $oresult:ty;)* }) => {
        $(succeed!(@$name);)*
        $(succeed!(@$oname);)*
    };
    (@ncclGetVersion) => {};
    (@ncclCommGetAsyncError) => {};
    (@ncclCommUserRank) => {};
    (@ncclCommCount) => {};
    (@ncclCommCuDevice) => {};
    (@$name:ident) => {
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> usize {
            0
        }
    };
}
for_each_entry!(succeed);

/// # Safety
/// `version` points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> ncclResult_t {
    // SAFETY: this function's contract.
    unsafe { version.write(23203) };
    ncclSuccess
}

/// # Safety
/// `state` points to a result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(_: ncclComm_t, state: *mut ncclResult_t) -> ncclResult_t {
    // SAFETY: this function's contract.
    unsafe { state.write(ncclSuccess) };
    ncclSuccess
}

macro_rules! number {
    ($name:ident $value:literal) => {
        /// # Safety
        /// `out` points to an int.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(_: ncclComm_t, out: *mut c_int) -> ncclResult_t {
            // SAFETY: this function's contract.
            unsafe { out.write($value) };
            ncclSuccess
        }
    };
}
number!(ncclCommUserRank 0);
number!(ncclCommCount 2);
number!(ncclCommCuDevice 0);
