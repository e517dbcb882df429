//! `ncclMemAlloc` and `ncclMemFree`: what [`pool`] decides, carried out.

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

/// Memory for the application.
pub fn allocate(place: *mut *mut c_void, bytes: usize) -> ncclResult_t {
    guard::around(
        || {
            count::function(Entry::ncclMemAlloc);
            process::know_version();
            // Of a null place NCCL says what it says.
            if place.is_null() { Supply::Forward } else { pool::allocate(bytes) }
        },
        |supply| match supply {
            Supply::Forward => registration::allocate_applications(place, bytes),
            // Divergence: it holds what it held, and whoever has it exported or retained still reaches it.
            Supply::Recycled(address) => put(place, *address as *mut c_void, "ncclMemAlloc: ptr"),
            Supply::Make(making) => make(place, bytes, making),
        },
        |supply, result| {
            if let Supply::Make(making) = supply
                && result == ncclSuccess
                && pool::made(&making, registration::allocated(place))
            {
                recycling::look_after_pool();
            }
        },
    )
}

/// By NCCL; where memory is short, after it has back what is kept.
fn make(place: *mut *mut c_void, bytes: usize, making: &Making) -> ncclResult_t {
    let code = registration::allocate_applications(place, bytes);
    if code != ncclUnhandledCudaError || !guard::or_else(|| false, || recycling::trim_pool(making.device)) {
        return code;
    }
    registration::allocate_applications(place, bytes)
}

/// Takes memory of `ncclMemAlloc` back. What is registered of memory that NCCL is to free is deregistered first, so that it goes
/// back to the driver.
pub fn free(address: *mut c_void) -> ncclResult_t {
    guard::around(
        || {
            count::function(Entry::ncclMemFree);
            let given = pool::free(address as Address);
            if matches!(given, Return::Forward | Return::LetGo) {
                memory_is_freed(address as Address);
            }
            given
        },
        |given| match given {
            Return::Forward | Return::LetGo => registration::free_applications(address),
            // Divergence: where NCCL's free would make a kernel that still uses the memory fault, it goes on.
            Return::Kept(over) => {
                guard::or_else(
                    || (),
                    || {
                        freeing::let_go(over);
                        // Others' may wait for long. Where this thread's group has communicators, they have calls inside.
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
            // As NCCL answers of memory that is not there. It would free ours.
            Return::Refused => guard::call(|| {
                let why = format_args!("ncclMemFree: {address:p} has been freed");
                refuse(ncclUnhandledCudaError, why)
            }),
        },
        |_, _| (),
    )
}

/// Gives back all that is kept, on every device.
pub fn trim() {
    let devices: BTreeSet<_> = pool::devices().into_iter().chain(cached::devices()).collect();
    for device in devices {
        recycling::trim_pool(device);
        cached::trim(device);
    }
}
