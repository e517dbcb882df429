//! Prepares `windlassDisable`, which switches Windlass off in a running process: later calls are not seen, and pass no gate.

use nccl_sys::{ncclInternalError, ncclInvalidUsage, ncclResult_t, ncclSuccess};

use crate::group;
use crate::peers::{self, StillRegistered};
use windlass_base::error::refuse;

/// Deregisters all buffers that Windlass has registered. After an error Windlass must stay on.
pub fn before() -> ncclResult_t {
    if group::is_open() {
        return refuse(ncclInvalidUsage, format_args!("windlassDisable within a group: end that first"));
    }
    match peers::register_nothing() {
        Ok(()) => {
            super::memory::trim();
            ncclSuccess
        }
        Err(StillRegistered::InUse(communicators)) => refuse(
            ncclInvalidUsage,
            format_args!(
                "windlassDisable while calls or groups of other threads use {communicators} communicators"
            ),
        ),
        Err(StillRegistered::Kept(communicators)) => refuse(
            ncclInternalError,
            format_args!(
                "NCCL keeps what Windlass has registered on {communicators} communicators: destroy those first"
            ),
        ),
    }
}
