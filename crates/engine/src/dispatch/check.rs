//! Calls that are told to the other ranks before they go to whoever serves them (`WINDLASS_CHECK`).

use crate::communicator::Communicator;
use windlass_base::call::Call;
use windlass_base::guard;

/// Before a call of a communicator with a peer group is decided, in a group too: what all ranks must call alike they call in one order.
#[inline]
pub(super) fn tell(call: &Call, communicator: &Communicator) {
    if communicator.is_checked() {
        told(call, communicator);
    }
}

#[cold]
#[inline(never)]
fn told(call: &Call, communicator: &Communicator) {
    // No call fails by this.
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
