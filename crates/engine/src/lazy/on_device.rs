//! Calls NCCL with a given device as the current one.

use nccl_sys::{ncclInternalError, ncclResult_t};

use windlass_base::error::refuse;
use windlass_base::gpu::{self, Home, Ordinal};

/// Runs `call` with a device as the current one, in relaxed capture mode: a capture that has begun since must not make NCCL's init fail.
pub(crate) fn on_device(device: Ordinal, call: impl FnOnce() -> ncclResult_t) -> ncclResult_t {
    let home = gpu::driver().and_then(|driver| Home::of(driver, device));
    let home = match home {
        Ok(home) => home,
        Err(failure) => return refuse(ncclInternalError, format_args!("{failure}")),
    };
    let _entered = match home.enter() {
        Ok(entered) => entered,
        Err(failure) => return refuse(ncclInternalError, format_args!("{failure}")),
    };
    call()
}
