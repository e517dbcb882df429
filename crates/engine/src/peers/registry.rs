//! The list of this process's peer groups, for the background worker and for calls that concern all of them.

use std::sync::Arc;

use windlass_bootstrap::negotiated::Token;

use super::group::PeerGroup;
use crate::background::weak_list::WeakList;
use crate::background::worker;

static PEER_GROUPS: WeakList<PeerGroup> = WeakList::new();

/// Adds a peer group, so that the background worker looks after it.
pub(super) fn add(peer_group: &Arc<PeerGroup>) {
    PEER_GROUPS.push(peer_group);
    worker::wake();
}

/// The live peer groups, each held only while it is the current item.
pub(super) fn alive() -> impl Iterator<Item = Arc<PeerGroup>> {
    PEER_GROUPS.alive()
}

/// The peer group of this token and rank.
pub(super) fn find(comm: Token, rank: u32) -> Option<Arc<PeerGroup>> {
    alive().find(|peer_group| peer_group.negotiated().comm == comm && peer_group.rank() == rank)
}
