//! Helpers of this folder: pass a communicator's gate, record a new communicator, refuse an ended one.

use std::sync::Arc;

use nccl_sys::{Entry, ncclComm_t, ncclInProgress, ncclInvalidArgument, ncclResult_t, ncclSuccess};

use crate::communicator::{self, Communicator};
use crate::forward::init::Handle;
use crate::forward::known;
use crate::group::{self, Awaited};
use crate::peers::PeerGroup;
use windlass_base::error::refuse;
use windlass_base::gate::Passed;
use windlass_base::guard;
use windlass_base::stats::count::{self, Identity};
use windlass_bootstrap::outcome::FallbackReason;

/// Passes the gate of a communicator ([`group::enter`]), by handle.
pub(super) fn enter_by(handle: ncclComm_t) -> Option<Passed<'static>> {
    let communicator = communicator::find(handle)?;
    group::enter(|| communicator.pass())
}

/// Fails for a communicator that sleeps: counts the call, and has the open group fail.
pub(super) fn check_awake(entry: Entry, handle: ncclComm_t) -> Result<(), ncclResult_t> {
    let known = guard::or_else(|| None, || communicator::find(handle));
    let awake = known.map_or(Ok(()), |known| known.check_awake(handle));
    awake.inspect_err(|_| count::function(entry)).map_err(group::fail)
}

/// What `look` finds in a communicator's peer group. None without one, or after a panic.
pub(super) fn in_peer_group<T>(
    handle: ncclComm_t,
    look: impl FnOnce(&Arc<PeerGroup>) -> Option<T>,
) -> Option<T> {
    guard::or_else(|| None, || look(&communicator::find(handle)?.peer_group(handle)?))
}

/// From now on NCCL's communicator may be used by another, or by calls that Windlass does not see.
pub(super) fn share(handle: ncclComm_t) {
    in_peer_group(handle, |peer_group| {
        peer_group.share();
        Some(())
    });
}

/// Refuses an ended handle of Windlass, which NCCL would read as one of its own.
pub(super) fn ended(handle: ncclComm_t) -> ncclResult_t {
    refuse(ncclInvalidArgument, format_args!("communicator {handle:p} has been destroyed"))
}

/// Whether NCCL has taken a call, to run it now or later.
pub(super) fn is_taken(result: ncclResult_t) -> bool {
    result == ncclSuccess || result == ncclInProgress
}

pub(super) const UNKNOWN: Identity = Identity { rank: -1, ranks: 0, device: -1 };

/// Makes the record of a new communicator if NCCL has written its handle. If NCCL writes it at the end of the group, the record is made
/// then. The handle of a non-blocking split, written even later, gets its record at its first use.
pub(super) fn note(handle: Handle, identity: Identity) -> Option<(ncclComm_t, &'static Communicator)> {
    let written = known::read_handle(handle);
    if written.is_null() {
        if group::is_open() {
            group::wait_for(Awaited::Handle(handle, FallbackReason::Child));
        }
        return None;
    }
    let identity = if group::is_open() { identity } else { known::identity(written).unwrap_or(identity) };
    Some((written, communicator::insert(written, identity)))
}
