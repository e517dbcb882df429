//! Tells each call to the other ranks before it runs, so that they can compare their calls (`WINDLASS_CHECK`).

use crate::communicator::Communicator;
use windlass_base::call::Call;
use windlass_base::guard;

/// Tells the other ranks of a call, before its path is decided. A call in a group is told at once, too: calls that all ranks must
/// make alike they make in one order.
#[inline]
pub(super) fn tell(call: &Call, communicator: &Communicator) {
    if communicator.is_checked() {
        told(call, communicator);
    }
}

#[cold]
#[inline(never)]
fn told(call: &Call, communicator: &Communicator) {
    // A failed check must not fail the call.
    guard::or_else(
        || (),
        || {
            let peer_group = communicator.peer_group(call.local.communicator);
            peer_group
                .iter()
                .filter_map(|peer_group| peer_group.checking())
                .for_each(|checking| checking.tell(call));
        },
    );
}
