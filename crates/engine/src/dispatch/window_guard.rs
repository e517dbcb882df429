//! Calls that NCCL is to run while it has windows that the application does not: their buffers must meet none of these.

use std::ffi::c_void;

use crate::communicator::Communicator;
use windlass_base::call::Call;
use windlass_base::range::Range;

/// Before a call goes to NCCL whose communicator has a peer group. What is dropped is this rank's own business: NCCL then sees what it
/// would see without us.
#[inline]
pub(super) fn before_forward(call: &Call, communicator: &Communicator) {
    if communicator.has_windows() {
        drop_what_it_meets(call, communicator);
    }
}

#[cold]
#[inline(never)]
fn drop_what_it_meets(call: &Call, communicator: &Communicator) {
    let Some(peer_group) = communicator.peer_group(call.local.communicator) else { return };
    let Some(windows) = peer_group.windows() else { return };
    // Both as large as the larger: what is dropped without need is made again.
    let bytes = call.shared.bytes(peer_group.negotiated().members.len()).max(1);
    let range = |buffer: *const c_void| Range { base: buffer as u64, bytes };
    let (send, receive) = (range(call.local.send), range(call.local.receive.cast_const()));
    windows.meet(&[send, receive]);
}
