//! What the functions of communicators share: entering one, noting a new one, refusing one that has ended.

use nccl_sys::{ncclComm_t, ncclInProgress, ncclInvalidArgument, ncclResult_t, ncclSuccess};

use crate::communicator::{self, Communicator};
use crate::forward::init::Handle;
use crate::forward::known;
use crate::group::{self, Awaited};
use windlass_base::error::refuse;
use windlass_base::gate::Passed;
use windlass_base::stats::count::Identity;

/// [`group::enter`], by handle.
pub(super) fn enter_by(handle: ncclComm_t) -> Option<Passed<'static>> {
    let communicator = communicator::find(handle)?;
    group::enter(|| communicator.pass())
}

/// NCCL would look into it as if it were its own.
pub(super) fn ended(handle: ncclComm_t) -> ncclResult_t {
    refuse(ncclInvalidArgument, format_args!("communicator {handle:p} has been destroyed"))
}

/// Whether NCCL runs it, now or soon.
pub(super) fn is_taken(result: ncclResult_t) -> bool {
    result == ncclSuccess || result == ncclInProgress
}

pub(super) const UNKNOWN: Identity = Identity { rank: -1, ranks: 0, device: -1 };

/// A handle that is written now is entered; one that NCCL writes at the end of the group is awaited. What a
/// non-blocking split writes later still, is entered when it is first used.
pub(super) fn note(handle: Handle, identity: Identity) -> Option<(ncclComm_t, &'static Communicator)> {
    let written = known::read_handle(handle);
    if written.is_null() {
        if group::is_open() {
            group::wait_for(Awaited::Handle(handle));
        }
        return None;
    }
    let identity = if group::is_open() { identity } else { known::identity(written).unwrap_or(identity) };
    Some((written, communicator::insert(written, identity)))
}
