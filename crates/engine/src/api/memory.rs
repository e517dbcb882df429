//! `ncclMemAlloc` and `ncclMemFree`: carry out what [`pool`] decides.

use std::collections::BTreeSet;
use std::ffi::c_void;

use nccl_sys::{Entry, ncclResult_t, ncclSuccess, ncclUnhandledCudaError};

use crate::features::memory::pool::{self, Making, Return, Supply};
use crate::features::recycling::{self, cached};
use crate::features::registration::deregistration::memory_is_freed;
use crate::features::registration::freeing;
use crate::forward::known::put;
use crate::forward::registration;
use crate::group;
use windlass_base::error::refuse;
use windlass_base::gpu::Address;
use windlass_base::guard;
use windlass_base::process;
use windlass_base::stats::count;

/// Allocates `bytes` bytes for the application, from the pool or by NCCL.
pub fn allocate(place: *mut *mut c_void, bytes: usize) -> ncclResult_t {
    guard::around(
        || {
            count::function(Entry::ncclMemAlloc);
            process::know_version();
            // NCCL gives its own error for a null place.
            if place.is_null() { Supply::Forward } else { pool::allocate(bytes, group::device_set()) }
        },
        |supply| match supply {
            Supply::Forward => registration::allocate_applications(place, bytes),
            // Divergence: it holds its old contents, and exported or retained handles of it still reach it.
            Supply::Recycled(address) => put(place, *address as *mut c_void, "ncclMemAlloc: ptr"),
            Supply::Make(making) => make(place, bytes, making),
        },
        |supply, result| {
            if let Supply::Make(making) = supply
                && result == ncclSuccess
            {
                pool::made(&making, registration::allocated(place));
            }
        },
    )
}

/// Allocates by NCCL; where memory is short, once more after the pool has given its memory back.
fn make(place: *mut *mut c_void, bytes: usize, making: &Making) -> ncclResult_t {
    let code = registration::allocate_applications(place, bytes);
    if code != ncclUnhandledCudaError || !guard::or_else(|| false, || recycling::trim_pool(making.device)) {
        return code;
    }
    registration::allocate_applications(place, bytes)
}

/// Frees memory of `ncclMemAlloc`, or keeps it in the pool. Windlass deregisters memory before NCCL frees it, so that it goes back to the
/// driver.
pub fn free(address: *mut c_void) -> ncclResult_t {
    guard::around(
        || {
            count::function(Entry::ncclMemFree);
            group::restore_device();
            let given = pool::free(address as Address);
            if matches!(given, Return::Forward | Return::LetGo) {
                memory_is_freed(address as Address);
            }
            given
        },
        |given| match given {
            Return::Forward | Return::LetGo => registration::free_applications(address),
            // Divergence: a kernel that still uses the memory goes on, where it would fault after NCCL's free.
            Return::Kept(over) => {
                guard::or_else(
                    || (),
                    || {
                        freeing::let_go(over);
                        // Only for this block, as others may wait long. Not in a group, whose own calls would be waited for.
                        let is_leaving = |block: &pool::Block| block.base == address as Address;
                        if pool::is_any_leaving()
                            && !group::is_open()
                            && pool::leaving().iter().any(is_leaving)
                        {
                            recycling::free_leaving();
                        }
                    },
                );
                ncclSuccess
            }
            // NCCL's code for unknown memory. NCCL itself would free memory of the pool.
            Return::Refused => guard::call(|| {
                let why = format_args!("ncclMemFree: {address:p} has been freed");
                refuse(ncclUnhandledCudaError, why)
            }),
        },
        |_, _| (),
    )
}

/// Frees all memory in the pool and all cached communicators, on every device.
pub fn trim() {
    let devices: BTreeSet<_> = pool::devices().into_iter().chain(cached::devices()).collect();
    for device in devices {
        recycling::trim_pool(device);
        cached::trim(device);
    }
}
