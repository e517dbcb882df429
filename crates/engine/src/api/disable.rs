//! Switched off in the middle of a process: from then on calls are not seen, and pass no gate.

use nccl_sys::{ncclInternalError, ncclInvalidUsage, ncclResult_t, ncclSuccess};

use crate::group;
use crate::peers::{self, StillRegistered};
use windlass_base::error::refuse;

/// Gets ready for it: nothing of ours stays registered. An error says that it is not, and that calls must be seen as before.
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
