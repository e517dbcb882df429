//! Hosts the sessions behind ids, through the bootstrap thread of this process.

use windlass_base::config::nccl;
use windlass_base::config::{Switch, config};
use windlass_base::process;
use windlass_bootstrap::id_tag::Id;

/// Whether this process may have peer groups.
pub fn is_on() -> bool {
    config().peer_groups == Switch::On && !process::is_forked()
}

/// Hosts a session for NCCL's id, and returns the id that the ranks must get. Without a session that is the same id.
pub fn host(id: &Id) -> Id {
    if !is_on() || nccl::has_own_ids() {
        return *id;
    }
    let hosted = windlass_bootstrap::process().and_then(|bootstrap| bootstrap.host(id));
    hosted.unwrap_or_else(|error| {
        log::info!("no session for a new id: {error}");
        *id
    })
}

/// An id that NCCL made in this process and that no rank has used or will use, to be used instead of a new one. None where
/// NCCL_COMM_ID names the root.
pub fn spare_id() -> Option<Id> {
    if !is_on() || nccl::has_own_ids() {
        return None;
    }
    windlass_bootstrap::started()?.spare_id()
}
