//! Where the ranks of a child communicator meet: at a roster on their host, or at one of them.

use crate::peers::setup::hosting::bootstrap;
use windlass_bootstrap::children::Invitation;
use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::{Bootstrap, LocalEntry, local_rendezvous};

use super::lineage::Lineage;

/// Where the ranks of a child meet: always at a process of one of them. A rank of the parent that is not in the child may have ended.
#[derive(Debug)]
pub(super) enum SessionPlace {
    /// This rank is in no child, or it has sent all that it has to send.
    Nowhere,
    /// At the roster of the child, which this rank entered before NCCL was asked. The error says why it could not.
    AtRoster(Result<LocalEntry, String>),
    /// At the process of the child's first rank, which expects this one. After a round, or without need of one, all know the child's ranks.
    AtMember(Invitation),
}

/// Enters the roster of this child on this host. Waits a limited time for another process in the same call to acknowledge. A rank that has not
/// entered by then has no peer group, nor have the other ranks of the child.
pub(super) fn enter(lineage: &Lineage, child: Option<Token>) -> SessionPlace {
    let Some(child) = child else { return SessionPlace::Nowhere };
    let enter = |bootstrap: &Bootstrap| {
        bootstrap.enter_local(local_rendezvous::name(child), lineage.rank, &|| lineage.has_ended())
    };
    let entered = bootstrap().and_then(enter);
    SessionPlace::AtRoster(entered.map_err(|error| error.to_string()))
}
