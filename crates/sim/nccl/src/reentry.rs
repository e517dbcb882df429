//! Calls of this library's own public functions through their public names, as the real library makes them. A preloaded
//! library with the same names gets these calls.

use libc::{c_int, c_void};
use nccl_sys::*;

/// The function that the loader has bound a public name to; `None` on other processors than x86-64.
macro_rules! bound {
    ($name:ident as $signature:ty) => {{
        #[cfg(target_arch = "x86_64")]
        {
            let address: usize;
            // SAFETY: reads the cell of the global offset table that the loader filled.
            unsafe {
                core::arch::asm!(
                    concat!("mov {}, qword ptr [rip + ", stringify!($name), "@GOTPCREL]"),
                    out(reg) address,
                    options(nostack, pure, readonly, preserves_flags)
                )
            };
            // SAFETY: every definition of the name has the signature of nccl.h.
            Some(unsafe { std::mem::transmute::<usize, $signature>(address) })
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            None::<$signature>
        }
    }};
}

pub type Broadcast = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    ncclDataType_t,
    c_int,
    ncclComm_t,
    cudaStream_t,
) -> ncclResult_t;
pub type GetUniqueId = unsafe extern "C" fn(*mut ncclUniqueId) -> ncclResult_t;
pub type GetAsyncError = unsafe extern "C" fn(ncclComm_t, *mut ncclResult_t) -> ncclResult_t;

/// NCCL's ncclBcast calls this.
pub fn broadcast() -> Option<Broadcast> {
    bound!(ncclBroadcast as Broadcast)
}

/// NCCL's ncclCommInitAll calls this.
pub fn get_unique_id() -> Option<GetUniqueId> {
    bound!(ncclGetUniqueId as GetUniqueId)
}

/// NCCL's operations on nonblocking communicators call this.
pub fn get_async_error() -> Option<GetAsyncError> {
    bound!(ncclCommGetAsyncError as GetAsyncError)
}
