//! The ids by which ranks find each other, and the bootstrap thread of this process behind them.

use windlass_base::config::nccl;
use windlass_base::config::{Switch, config};
use windlass_bootstrap::id_tag::Id;

/// Whether inits are looked at here.
pub fn is_on() -> bool {
    config().peer_groups == Switch::On && !windlass_bootstrap::is_in_child()
}

/// Gives the id that ranks must get instead of NCCL's own; the same one where there will be no session.
pub fn host(id: &Id) -> Id {
    if !is_on() || nccl::has_own_ids() {
        return *id;
    }
    let hosted = bootstrap().and_then(|bootstrap| bootstrap.host(id));
    hosted.unwrap_or_else(|error| {
        log::info!("no session for a new id: {error}");
        *id
    })
}

/// An id that NCCL made here, as it made it, whose root nobody was at or will be: to be used instead of a new one. NCCL
/// makes none where NCCL_COMM_ID names the root.
pub fn spare_id() -> Option<Id> {
    if !is_on() || nccl::has_own_ids() {
        return None;
    }
    windlass_bootstrap::started()?.spare_id()
}

/// The bootstrap thread of this process.
pub(in crate::peers) fn bootstrap() -> std::io::Result<&'static windlass_bootstrap::Bootstrap> {
    windlass_bootstrap::process()
}
