//! Calls of the real NCCL for operations that the program makes (`ncclRedOpCreatePreMulSum`).

// The pointers are the application's own arguments.
#![allow(unsafe_code, clippy::not_unsafe_ptr_arg_deref)]

use std::ffi::c_void;

use nccl_sys::{
    ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclScalarDevice, ncclScalarHostImmediate,
    ncclScalarResidence_t, real,
};
use windlass_base::call::Scalar;

/// The scalar of an operation, read now if it lies on the host. None for an unknown type.
pub fn scalar(
    place: *mut c_void,
    datatype: ncclDataType_t,
    residence: ncclScalarResidence_t,
) -> Option<Scalar> {
    if residence != ncclScalarHostImmediate {
        return Some(Scalar::OnDevice(place as usize));
    }
    let (mut scalar, bytes) = ([0; 8], datatype.size_bytes()?);
    // SAFETY: by ncclRedOpCreatePreMulSum's contract an element lies there; it has at most 8 bytes.
    unsafe { std::ptr::copy_nonoverlapping(place.cast::<u8>(), scalar.as_mut_ptr(), bytes.min(8)) };
    Some(Scalar::Here(scalar))
}

/// Has NCCL make an operation.
pub fn create(
    scalar: &Scalar,
    datatype: ncclDataType_t,
    communicator: ncclComm_t,
) -> Result<ncclRedOp_t, ncclResult_t> {
    let mut made = ncclRedOp_t(0);
    let (place, residence) = match scalar {
        // NCCL reads the scalar during the call.
        Scalar::Here(bytes) => (bytes.as_ptr().cast_mut().cast(), ncclScalarHostImmediate),
        Scalar::OnDevice(place) => (*place as *mut c_void, ncclScalarDevice),
    };
    // SAFETY: the handle is that of a communicator that NCCL made and nobody has ended; the rest is as the application gave it.
    let code = unsafe { real::ncclRedOpCreatePreMulSum(&mut made, place, datatype, residence, communicator) };
    code.ok().map(|()| made)
}

/// Has NCCL destroy an operation.
pub fn destroy(operation: ncclRedOp_t, communicator: ncclComm_t) -> ncclResult_t {
    // SAFETY: as for `create`.
    unsafe { real::ncclRedOpDestroy(operation, communicator) }
}

/// Creates an operation with the application's own arguments.
pub fn create_for(
    place: *mut ncclRedOp_t,
    scalar: *mut c_void,
    datatype: ncclDataType_t,
    residence: ncclScalarResidence_t,
    communicator: ncclComm_t,
) -> ncclResult_t {
    // SAFETY: the application's own arguments; the library is open.
    unsafe { real::ncclRedOpCreatePreMulSum(place, scalar, datatype, residence, communicator) }
}

/// The number that NCCL has just given an operation.
pub fn made(place: *const ncclRedOp_t) -> ncclRedOp_t {
    // SAFETY: NCCL has written it.
    unsafe { place.read() }
}
