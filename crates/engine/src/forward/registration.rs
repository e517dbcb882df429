//! Calls of the real NCCL that register buffers, or allocate and free memory.

// The pointers are the application's own arguments.
#![allow(unsafe_code, clippy::not_unsafe_ptr_arg_deref)]

use std::ffi::c_void;
use std::ptr::null_mut;

use nccl_sys::{ncclComm_t, ncclResult_t, ncclSuccess, real};

use windlass_base::gpu::Address;

/// Registers a buffer.
pub fn register(communicator: ncclComm_t, address: usize, bytes: usize) -> Result<usize, ncclResult_t> {
    // NCCL may succeed without writing a handle.
    let mut handle: *mut c_void = null_mut();
    // SAFETY: the handle is that of a communicator that NCCL made and nobody has ended; the rest is as the application gave it.
    let code = unsafe { real::ncclCommRegister(communicator, address as *mut c_void, bytes, &mut handle) };
    code.ok().map(|()| handle as usize)
}

/// Ends a registration.
pub fn deregister(communicator: ncclComm_t, handle: usize) -> ncclResult_t {
    // SAFETY: as for `register`.
    unsafe { real::ncclCommDeregister(communicator, handle as *mut c_void) }
}

/// Allocates `bytes` bytes on the current device by `ncclMemAlloc`.
pub fn allocate(bytes: usize) -> Result<Address, ncclResult_t> {
    let mut address: *mut c_void = null_mut();
    // SAFETY: the output is a local.
    let code = unsafe { real::ncclMemAlloc(&mut address, bytes) };
    if code == ncclSuccess && !address.is_null() { Ok(address as Address) } else { Err(code) }
}

/// Frees memory of [`allocate`].
pub fn free(address: Address) -> ncclResult_t {
    // SAFETY: given by `allocate`, once; callers vouch that nothing uses it.
    unsafe { real::ncclMemFree(address as *mut c_void) }
}

/// Allocates memory for the application with its own arguments, of which NCCL checks place and size.
pub fn allocate_applications(place: *mut *mut c_void, bytes: usize) -> ncclResult_t {
    // SAFETY: the application's own arguments.
    unsafe { real::ncclMemAlloc(place, bytes) }
}

/// The address that NCCL has just written.
pub fn allocated(place: *mut *mut c_void) -> Address {
    // SAFETY: NCCL has just taken this place and written to it.
    unsafe { place.read() as Address }
}

/// The handle that NCCL wrote for a registration or a window; 0 for a null place.
pub fn handle_at<T>(place: *mut *mut T) -> usize {
    // SAFETY: as for `allocated`.
    if place.is_null() { 0 } else { unsafe { place.read() as usize } }
}

/// Frees memory that the application got from NCCL.
pub fn free_applications(address: *mut c_void) -> ncclResult_t {
    // SAFETY: the application's own argument.
    unsafe { real::ncclMemFree(address) }
}
