//! The peer groups of this process, for the background worker and for what concerns all of them.

use std::sync::Arc;

use windlass_bootstrap::negotiated::Token;

use super::group::PeerGroup;
use crate::background::weak_list::WeakList;
use crate::background::worker;

static PEER_GROUPS: WeakList<PeerGroup> = WeakList::new();

/// From now on a peer group is looked after.
pub(super) fn add(peer_group: &Arc<PeerGroup>) {
    PEER_GROUPS.push(peer_group);
    worker::wake();
}

/// Those that are alive, held one at a time.
pub(super) fn alive() -> impl Iterator<Item = Arc<PeerGroup>> {
    PEER_GROUPS.alive()
}

/// Whether there is none.
pub(super) fn is_empty() -> bool {
    PEER_GROUPS.is_empty()
}

/// A rank's of this name.
pub(super) fn find(comm: Token, rank: u32) -> Option<Arc<PeerGroup>> {
    alive().find(|peer_group| peer_group.negotiated().comm == comm && peer_group.rank() == rank)
}

/// From now on no call of this process is told to other ranks.
pub(super) fn end_checking() {
    alive().for_each(|peer_group| peer_group.end_checking());
}
