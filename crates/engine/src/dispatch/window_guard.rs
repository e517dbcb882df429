//! Drops kept windows before NCCL runs a call whose buffers overlap them: NCCL has these windows registered, the application does not.

use std::ffi::c_void;

use crate::communicator::Communicator;
use windlass_base::call::Call;
use windlass_base::range::Range;

/// Called before NCCL gets a call of a communicator with a peer group. This rank drops windows without asking others: NCCL then sees
/// what it would see without Windlass.
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
    // Both ranges have the size of the larger buffer: a window that is dropped without need is registered again.
    let bytes = call.shared.bytes(peer_group.negotiated().members.len()).max(1);
    let range = |buffer: *const c_void| Range { base: buffer as u64, bytes };
    let (send, receive) = (range(call.local.send), range(call.local.receive.cast_const()));
    windows.meet(&[send, receive]);
}
